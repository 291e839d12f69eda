# SPDX-License-Identifier: Apache-2.0
"""Which bundler the tools measure and attack: the wheel behind `make bench`, with its extensions,
else the checkout's; a result says which.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import page
from tools.shared import measurement

ROOT = Path(__file__).resolve().parents[2]
ASK = (
    "from tools.shared.processes import output; print(output('where_is_it', environment={}),"
    " end='')"
)
BUILT = {"_kernel_writer": True, "_kernel_reader": True}


def package_of_a_child(site, **environment):
    """Return where a module that a tool starts finds the package, when `site` has another one."""
    (site / "bundler").mkdir()
    (site / "bundler" / "__init__.py").touch()
    (site / "where_is_it.py").write_text("import bundler; print(bundler.__file__)")
    (site / "link").mkdir()
    (site / "link" / "tools").symlink_to(ROOT / "tools")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{site / 'link'}{os.pathsep}{site}",
    } | environment
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent


def test_a_child_keeps_the_checkout_off_its_path(tmp_path):
    """Where its parent does, as with `make bench`: the package is the one that is installed."""
    assert package_of_a_child(tmp_path, PYTHONSAFEPATH="1") == tmp_path / "bundler"


def test_without_that_the_checkout_goes_first(tmp_path):
    """As for who runs `python -m tools.bench` in a checkout."""
    assert package_of_a_child(tmp_path) == ROOT / "bundler"


@pytest.mark.parametrize("package", ["bench", "fuzz"])
def test_nobody_measures_python_alone_unawares(package, tmp_path):
    """Where the bundler that is measured has no extensions, the first line says so, and what builds
    them.
    """
    folder = tmp_path / "bundler"
    for name in (
        "lifecycle/_kernel_reader",
        "lifecycle/_kernel_writer",
        "runtime/launch/jit/_jit_driver",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.abi3.so").touch()
    (folder / "__init__.py").touch()
    (tmp_path / "tools").symlink_to(ROOT / "tools")

    def said():
        done = subprocess.run(
            [sys.executable, "-P", "-m", f"tools.{package}", "bundle", "--help"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        return done.stderr

    assert said().startswith(
        f"note: bundler has no _launch here, so that this is about Python alone; `make {package}"
        " PROGRAM=bundle` builds"
    )
    (folder / "runtime/launch/_launch.abi3.so").touch()
    assert "note:" not in said()


@pytest.mark.parametrize("target", ["bench", "fuzz", "crash"])
def test_make_runs_the_tools_with_the_wheel(target):
    """The targets start their tool by the line that keeps the checkout's package away."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(
        rf"^{target}: \.venv-test/\.ready .*\n\t\$\(tool\) tools\.{target} ", makefile, re.MULTILINE
    )
    (line,) = re.findall(r"^tool = (.*)", makefile, re.MULTILINE)
    assert (
        "ln -sfn ../../tools .build/path/tools && PYTHONSAFEPATH=1"
        " PYTHONPATH=$(CURDIR)/.build/path " in line
    )


def test_a_result_says_which_extensions_were_there(monkeypatch):
    """Each of the project's, by name."""
    found = measurement.extensions()
    assert {"_kernel_writer", "_kernel_reader", "_launch", "_jit_driver"} <= {*found}
    for name in ("_kernel_writer", "_kernel_reader"):
        assert found[name] == (importlib.util.find_spec(f"bundler.lifecycle.{name}") is not None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert {*measurement.extensions().values()} == {False}
    assert measurement.facts()["machine"]["extensions"] == dict.fromkeys(found, False)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({}, ""),  # a result of before
        ({"extensions": BUILT}, ""),
        ({"extensions": dict.fromkeys(BUILT, False)}, "pure Python, no extension was built"),
        (
            {"extensions": BUILT | {"_launch": False, "_jit_driver": False}},
            "without the extensions _jit_driver, _launch",
        ),
    ],
)
def test_the_page_says_what_was_missing(machine, words):
    """Beside the machine, below the figures; a result with everything says nothing of it."""
    assert measurement.without_extensions(machine) == words
    result = {
        "machine": {"gpu": None, "processor": "P", "cores": 2, **machine},
        "versions": {"python": "3"},
        "commit": None,
    }
    between = f"; **{words}**" if words else ""
    assert (
        page._provenance(result, Path("r.json"))
        == f"P, 2 cores{between}; python 3; commit unknown; raw: [r.json](results/r.json)."
    )

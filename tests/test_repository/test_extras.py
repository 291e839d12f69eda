# SPDX-License-Identifier: Apache-2.0
"""What is said to be installed is what is needed: by the package, by the README, and by what is
deployed.
"""

import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from bundler.toolchain import identity

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What is imported, by the name that it is installed by, where that is another.
DISTRIBUTIONS = {
    "zstandard": "zstandard",
    "click_man": "click-man",
    "sympy": "torch",
    "numpy": "torch",
    "opentelemetry": "opentelemetry-api",
}
# Those of the work on this project are not for who installs a wheel.
OURS_ALONE = {"test", "dev"}


def names(lines):
    """Return the names of the distributions in requirements."""
    return {re.match(r"[\w-]+", line).group() for line in lines}


def imported():
    """Yield (file in the package, top-level name) of everything that a module of the wheel imports,
    wherever in it.
    """
    for folder, _, files in os.walk(ROOT / "bundler", followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            where = path.relative_to(ROOT / "bundler").as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from ((where, alias.name.partition(".")[0]) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    yield where, node.module.partition(".")[0]


def test_whatever_the_wheel_imports_an_extra_brings():
    """A module that needs more than the dependencies is for those who ask for an extra, which is
    none of the project's own.
    """
    promised = names(PROJECT["dependencies"]).union(
        *(names(EXTRAS[name]) for name in EXTRAS.keys() - OURS_ALONE)
    )
    known = {*sys.stdlib_module_names, "bundler"}
    needed = {(name, top) for name, top in imported() if top not in known}
    assert {
        (name, top) for name, top in needed if DISTRIBUTIONS.get(top, top) not in promised
    } == set()


def test_the_contract_needs_what_its_extra_brings():
    """The shipped contract imports pytest and hypothesis, and the extra of its name brings these
    alone.
    """
    outside = {
        top
        for place, top in imported()
        if place.startswith("backends/testing/") and top not in sys.stdlib_module_names
    }
    assert outside - {"bundler"} == names(EXTRAS["contract"])


@pytest.mark.parametrize("extra", ["triton", "torch"])
def test_an_extra_shuts_no_release_out_and_begins_where_the_tried_ones_do(extra):
    """A server pins its own torch, and torch its Triton: the extra has a floor, the oldest release
    that was tried, and no bound above.
    """
    specifiers = [
        re.match(rf"{extra}([^;]*)", line)[1]
        for line in EXTRAS[extra]
        if re.match(rf"{extra}\b(?!-)", line)
    ]
    assert specifiers == [f">={identity.TRIED[extra][0]}"]


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("3.9.0", False),
        ("3.9.1+git1", False),
        ("3.10.0", True),
        ("3.60", True),
        ("unknown", False),
        (None, False),
    ],
)
def test_a_release_is_tried_by_its_minor_number(release, expected):
    """A patch release of a tried one is tried, 3.60 is not 3.6, and of an unknown release nothing
    is said.
    """
    assert identity.untried("triton", release) is expected


@pytest.mark.parametrize(
    ("extra", "section"),
    [
        ("cli", "triton-bundler explain"),
        ("redis", "redis://kernel-cache"),
        ("torch", "With torch.compile"),
        ("triton", "make demo"),
    ],
)
def test_the_install_line_of_the_readme_is_enough_for_its_sections(extra, section):
    """What README.md shows works after its line for pip."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    line = re.search(r"pip install '\.\[([\w,]+)\]'.*\n.*'triton-bundler\[([\w,]+)\]'", text)
    assert section in text
    assert [extra in named.split(",") for named in line.groups()] == [True, True]


def script(text):
    """Return the script of the init container in a text of YAML."""
    return textwrap.dedent(
        re.search(r"args:\n(?: *#.*\n)* *- \|\n((?:(?: {8,}.*)?\n)+?) *(?:volumeMounts|```)", text)[
            1
        ]
    )


@pytest.fixture
def init(tmp_path):
    """Run the init container's script with a command in place of triton-bundler; returns what it
    did, and its message.
    """

    def run(command):
        (tmp_path / "triton-bundler").write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "triton-bundler").chmod(0o755)
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "TERMINATION_LOG": str(tmp_path / "message"),
        }
        text = (ROOT / "deploy" / "kubernetes" / "serve.yaml").read_text(encoding="utf-8")
        done = subprocess.run(
            ["sh", "-c", script(text)], env=environment, capture_output=True, text=True
        )
        message = tmp_path / "message"
        return done, message.read_text() if message.exists() else None

    return run


def test_a_pod_starts_without_kernels_and_says_so(init):
    """A restore that fails is told in the log and in the container's message, with status and
    reason; the pod goes on.
    """
    done, message = init('echo "3 skipped"; echo "error: no tag $3" >&2; exit 7')
    told = (
        "warning: restore ended with status 7; the server compiles what is not in place\nerror: no"
        " tag llama3/h200\n"
    )
    assert (done.returncode, done.stderr, message) == (0, told, told)
    assert done.stdout == "3 skipped\nerror: no tag llama3/h200\n"


def test_a_pod_that_got_its_kernels_says_nothing_else(init):
    """After a restore that worked, there is no warning and no message."""
    done, message = init('echo "22 of 22 kernels in place"')
    assert (done.returncode, done.stdout, done.stderr, message) == (
        0,
        "22 of 22 kernels in place\n",
        "",
        None,
    )


def test_the_pod_is_documented_as_it_is():
    """docs/cluster.md has the script of deploy/kubernetes/serve.yaml, and both name the extras that
    its command needs.
    """
    pod, page = (
        (ROOT / path).read_text(encoding="utf-8")
        for path in ("deploy/kubernetes/serve.yaml", "docs/cluster.md")
    )
    assert script(page[page.index("```yaml\ninitContainers") :]) == script(pod)
    assert ["triton-bundler[cli,redis]" in text for text in (pod, page)] == [True, True]

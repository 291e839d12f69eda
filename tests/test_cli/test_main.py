# SPDX-License-Identifier: Apache-2.0
"""The command itself: help, version, what it imports, and what it says when an extra is missing."""

import json
import platform
import subprocess
import sys
import time

import pytest

import bundler
from bundler.cli.app import app
from bundler.toolchain import identity

COMMANDS = [
    "demo",
    "run",
    "build",
    "generate",
    "capture",
    "tune",
    "pack",
    "restore",
    "inspect",
    "report",
    "extract",
    "verify",
    "diff",
    "merge",
    "push",
    "pull",
    "tags",
    "stats",
    "prune",
    "sync",
    "serve",
    "top",
    "oci",
    "sign",
    "key",
    "explain",
    "doctor",
    "config",
    "completion",
    "man",
]


def python(code):
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )


def test_version(cli):
    """--version prints name and version, and what compiles here."""
    name, toolchain = cli("--version").stdout.splitlines()
    assert name == f"triton-bundler {bundler.__version__}"
    assert toolchain.startswith(f"Python {platform.python_version()}, Triton ")
    for distribution in ("triton", "torch"):
        version = identity.version_of(distribution) or "not found"
        assert f", {distribution.replace('tri', 'Tri')} {version}, " in toolchain
    assert ", ptxas " in toolchain


def test_help_lists_the_commands(cli):
    """--help lists every command, the newcomer's first."""
    text = cli("--help").stdout
    assert list(app.commands) == [one.name for one in app.commands.values()] == COMMANDS
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert "..." not in text.partition("\nCommands:")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(cli, name):
    """Each command's help has a sentence, an example that parses as its own, --json, and exit
    status 0.
    """
    result = cli(name, "--help")
    assert result.exit_code == 0
    assert f"\n  Example:\n    triton-bundler {name}" in result.stdout
    assert "--json" in result.stdout
    assert cli(name, "-h").stdout == result.stdout


@pytest.mark.parametrize("library", ["click", "rich"])
def test_a_missing_extra_is_one_sentence(library):
    """Without click or rich the command says in one sentence what to install, and exits with 1."""
    done = python(
        f"import sys; sys.modules[{library!r}] = None\nfrom bundler.cli import main; main()"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'triton-bundler[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.serial
def test_help_is_light():
    """Help imports neither Triton, torch nor redis, and is there at once."""
    code = """
import json, sys
sys.argv = ["triton-bundler", "--help"]
from bundler.cli import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    started = time.monotonic()
    done = python(code)
    assert done.returncode == 0
    assert time.monotonic() - started < 5
    assert {"triton", "torch", "redis", "numpy"} & set(json.loads(done.stderr)) == set()


def test_a_command_imports_no_other_command():
    """What a command needs is imported, and not what thirty commands need."""
    code = """
import sys
sys.argv = ["triton-bundler", "tags", "--help"]
from bundler.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    loaded = {*python(code).stderr.split()}
    assert "bundler.cli.stores.transfer" in loaded
    others = {"bundler.cli.builds.build", "bundler.cli.doctor", "bundler.compile", "http.server"}
    assert loaded & others == set()


def test_python_m_bundler_is_the_command(command):
    """`python -m bundler` is the same command."""
    done = command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"triton-bundler {bundler.__version__}\n")


def test_a_closed_pipe_is_no_traceback():
    """A reader that goes away early, such as head, is no reason for a traceback."""
    line = f"'{sys.executable}' -P -m bundler --help | head -n 1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Usage: triton-bundler")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["softmax_kernel", "triton_poi_fused_relu_0"])
def test_keys_of_graph_entries_are_told_where_torch_compiles_kernels_are(cli, monkeypatch, name):
    """Who explains no kernel of torch.compile is not told of its C++ compiler."""
    pytest.importorskip("torch")
    monkeypatch.setenv("CXX", "c++-9")
    monkeypatch.setattr(
        "bundler.integrations.explanations.explain",
        lambda *_, **__: (bundler.Explanation("K" * 52, name, "unknown"),),
    )
    told = cli("explain", "KKKK").stdout
    assert ("hold $CXX (here c++-9)" in told) == name.startswith("triton_")

# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and other signals that ask a command to end: what it leaves, what it says, and its exit
status.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import bundler

# argv: place, points, and the command after "--".  Of the calls of the file system that name
# something below the place, one after another is followed by its signal, each in a forked child
# that runs the command in a copy of `place`.
_STOPPED = """
import json, os, shutil, signal, sys
from bundler.cli import main
import bundler.cli.app, bundler.lifecycle.restoration, bundler.lifecycle.directory_pack, bundler.lifecycle.machine_store
from bundler.lifecycle import kernel_directory, kernel_writer
# The extensions do not go by way of os.
kernel_directory.compiled_reader = kernel_writer.compiled_writer = lambda: None
place, points, _, *words = sys.argv[1:]
bundler.cli.app.app.commands[words[0]]  # imported once for all children

def watched(name, counter, number, point, here):
    real = getattr(os, name)
    def call(*args, **kwargs):
        try:
            return real(*args, **kwargs)
        finally:
            if any(isinstance(arg, str) and arg.startswith(here) for arg in args):
                counter.append(name)
                if len(counter) == point:
                    os.kill(os.getpid(), number)
    setattr(os, name, call)

def run(number, point):
    here = f"{place}-{point}"
    shutil.copytree(place, here)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(f"{here}.err", os.O_RDWR | os.O_CREAT), 2)
        counter = []
        for name in ("mkdir", "open", "link", "unlink", "rename", "replace", "rmdir"):
            watched(name, counter, number, point, here)
        sys.argv = ["triton-bundler", *(word.replace(place, here) for word in words)]
        try:
            main()
        except SystemExit as end:
            os._exit(end.code or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print(json.dumps([run(number, point) for number, point in json.loads(points)]))
"""
PLACES = (("store/tmp", ""), ("near/tmp", ""), ("out", ".tmp"), ("cache", "tmp."))
COMMANDS = {
    "push": ("push", "PLACE/b.tbundle", "--store", "file://PLACE/store", "--tag", "t"),
    "pull": ("pull", "t", "--store", "file://PLACE/store", "-o", "PLACE/out/b.tbundle"),
    "restore": ("restore", "PLACE/b.tbundle", "--only", "all", "--cache-dir", "PLACE/cache"),
    "restore from tiers": (
        "restore",
        "--tag",
        "t",
        "--store",
        "file://PLACE/near",
        "--store",
        "file://PLACE/store",
        "--only",
        "all",
        "--cache-dir",
        "PLACE/cache",
    ),
    "prune": ("prune", "--store", "file://PLACE/store"),
    "pack": ("pack", "PLACE/filled", "-o", "PLACE/out/b.tbundle"),
}


def temporaries(place):
    """Return the temporary files and directories below a directory."""
    return [
        name
        for folder, mark in PLACES
        if (place / folder).is_dir()
        for name in os.listdir(place / folder)
        if mark in name
    ]


@pytest.fixture
def prepared(request, cli, packed, cache, tmp_path):
    """A directory with what each command needs; a store with a tag, and units that no tag
    reaches.
    """
    place = tmp_path / "place"
    (place / "out").mkdir(parents=True)
    shutil.copy(packed, place / "b.tbundle")
    if request.node.callspec.params["name"] == "pack":  # what is here is copied for each signal
        shutil.copytree(cache, place / "filled")
    with bundler.Bundle.load(packed) as made:
        for tag, target in (("t", "cuda:90"), ("old", "hip:gfx942")):
            made.select(target=target).save(tmp_path / "part")
            assert (
                cli(
                    "push", tmp_path / "part", "--store", f"file://{place}/store", "--tag", tag
                ).exit_code
                == 0
            )
    assert cli("tags", "--store", f"file://{place}/store", "--delete", "old").exit_code == 0
    for path in (place / "store" / "data").rglob("*"):
        os.utime(path, (0, 0))
    return place


def stopped(name, place, points):
    """Run a command once for each signal and point, with that signal there; returns the exit
    statuses.
    """
    words = [word.replace("PLACE", str(place)) for word in COMMANDS[name]]
    given = [str(place), json.dumps(points), "--", *words]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _STOPPED, *given], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.toolchain
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_signal_leaves_no_temporary_file(prepared, name):
    """Ctrl-C or SIGTERM after any of a command's calls of the file system: no temporary file stays,
    and the status says which.
    """
    points = [
        (number, point)
        for number, first in ((signal.SIGINT, 1), (signal.SIGTERM, 2))
        for point in range(first, 20, 3)
    ]
    statuses = stopped(name, prepared, points)
    for number in (signal.SIGINT, signal.SIGTERM):
        found = [s for (other, _), s in zip(points, statuses, strict=True) if other == number]
        assert {*found} <= {0, 128 + number}
        assert sum(map(bool, found)) > 1, "the command did fewer calls than the test thinks"
    for (number, point), status in zip(points, statuses, strict=True):
        # No point is one of both signals.
        place = prepared.with_name(f"{prepared.name}-{point}")
        assert temporaries(place) == [], f"{number.name} after call {point}"
        said = f"error: interrupted by {number.name}\n" if status else ""
        assert place.with_name(f"{place.name}.err").read_text() == said


def python(code, *arguments):
    """Run Python code that raises signals itself."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


_WHILE_IMPORTING = """
import os, signal, sys
wanted, sys.argv = sys.argv[1], ["triton-bundler", "tune", "--help"]
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from bundler.cli import main
main()
"""


@pytest.mark.parametrize(
    "module", ["bundler.cli.interruption", "click", "rich.progress", "bundler.cli.bundles.tune"]
)
def test_an_interrupted_import_is_no_traceback(module):
    """Ctrl-C while the command is being imported ends it with status 130 and one line."""
    done = python(_WHILE_IMPORTING, module)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "error: interrupted by SIGINT\n",
    )


def test_the_package_is_imported_in_no_time():
    """Before it listens to signals, the command imports nothing but itself."""
    code = (
        "import sys; before = {*sys.modules}; import bundler.cli; print(*sorted({*sys.modules} -"
        " before))"
    )
    ours = {
        "__future__",
        "bundler",
        "bundler.cli",
        "importlib",
        "warnings",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
    }
    assert {*python(code).stdout.split()} - ours == set()


_CLEANING = """
import os, signal, sys
from bundler.cli.interruption import run
def command():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        print("cleaned up")
run(command)
"""
_SWALLOWED = """
import os, signal, sys, time
from bundler.cli.interruption import run
sys.unraisablehook = lambda _: None
class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
def command():
    swallowing = Swallowing()
    del swallowing
    time.sleep(30)
    print("went on")
run(command)
"""
_IGNORED = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from bundler.cli.interruption import run
run(lambda: os.kill(os.getpid(), signal.SIGHUP))
print("went on")
"""


@pytest.mark.parametrize(
    ("code", "status", "out"),
    [(_CLEANING, 130, "cleaned up\n"), (_SWALLOWED, 130, ""), (_IGNORED, 0, "went on\n")],
)
def test_signals_after_the_first(code, status, out):
    """A second signal does not stop the clean-up; one that Python swallowed counts all the same;
    what nohup ignores stays ignored.
    """
    done = python(code)
    assert (done.returncode, done.stdout) == (status, out), done.stderr

# SPDX-License-Identifier: Apache-2.0
"""What workers do in tests, in place of compiling: the job's name is a command.  Also the programs
that tests start.
"""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

from bundler.compile.compile_job import Compiled, Job, SourceRef
from bundler.format.entries import Target

HERE = Path(__file__).parent
PATIENCE_S = 30
SPAWN = multiprocessing.get_context("spawn")


class Seen(Executor):
    """An executor that notes what is submitted and hands it to another one."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def submit(self, function, /, *arguments, **keywords):
        self.calls.append((function, arguments, keywords))
        return self.inner.submit(function, *arguments, **keywords)


class Held(Executor):
    """An executor whose calls a test answers."""

    def __init__(self):
        self.calls = []

    def submit(self, function, message):
        future = Future()
        self.calls.append((message, future))
        return future


def processes(count=2, **more):
    """Return an engine of so many new processes."""
    return ProcessPoolExecutor(count, mp_context=SPAWN, **more)


def is_alive(pid):
    """Tell whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def job(command, **more):
    """Return a job for `perform`."""
    given = {"source": SourceRef("text", "f", data=b""), "target": Target("cuda", "90")} | more
    return Job(command, given.pop("source"), (), (), (), (), given.pop("target"), **given)


def perform(payload, cache_dir):
    """Do what a job's name says; each start leaves a line in the file `starts` of the cache
    directory.
    """
    asked = Job.from_bytes(payload)
    what, *rest = asked.name.split()
    os.makedirs(cache_dir, exist_ok=True)
    with open(os.path.join(cache_dir, "starts"), "a", encoding="utf-8") as file:
        file.write(f"{asked.name}\n")
    said = COMMANDS[what](cache_dir, *rest)
    key = asked.key or str(said)
    return Compiled(
        key,
        os.path.join(cache_dir, asked.key) if asked.key else cache_dir,
        0.0,
        (("stage", 0.5),),
        what == "hit",
    ).to_bytes()


def slowly(seconds):
    """Sleep where a signal may come."""
    time.sleep(float(seconds))
    return "slept"


def crash(_cache_dir):
    print("about to crash")
    ctypes.string_at(0)


def once_fatal(cache_dir, mark):
    """End the first worker only."""
    try:
        os.close(os.open(os.path.join(cache_dir, mark), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "survived"
    os._exit(9)


def once_fatal_at(_cache_dir, mark):
    """End the first worker only, where each try has a cache directory of its own."""
    return once_fatal("/", mark)


def with_child_at(_cache_dir, place, seconds):
    """As `with_child`, where each try has a cache directory of its own."""
    return with_child(place, seconds)


def eat(_cache_dir, mebibytes):
    return len(bytearray(int(mebibytes) << 20))


def with_child(cache_dir, seconds):
    """Start a program as a compiler would, note its number, and sleep."""
    child = subprocess.Popen(["sleep", "300"])
    Path(cache_dir, "child").write_text(str(child.pid))
    return slowly(seconds)


def rendezvous(cache_dir, mine, other):
    """Wait until another job has begun too."""
    Path(cache_dir, mine).touch()
    deadline = time.monotonic() + 30
    while not os.path.exists(os.path.join(cache_dir, other)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return mine


def fail(_cache_dir, *words):
    raise ValueError(" ".join(words))


def refuse(_cache_dir, bytes_="0"):
    """Fail as LLVM does: what is wrong goes to the process's standard error, past Python."""
    os.write(2, b"error: invalid instruction\n" + b"x" * int(bytes_) + b"  this is none\n")
    raise RuntimeError("PassManager::run failed")


def copy(cache_dir, built, key):
    """Take a kernel that was compiled before."""
    shutil.copytree(os.path.join(built, key), os.path.join(cache_dir, key))
    group = next(Path(cache_dir, key).glob("__grp__*.json"))
    group.write_text(group.read_text().replace(built, cache_dir))
    return key


def close_everything(_cache_dir):
    os.closerange(3, 256)
    time.sleep(60)


COMMANDS = {
    "echo": lambda _, *words: " ".join(words),
    "hit": lambda *_: "hit",
    "sleep": lambda _, seconds: slowly(seconds),
    "pid": lambda *_: os.getpid(),
    "server": lambda *_: os.getppid(),
    "env": lambda _, name: os.environ.get(name, "unset"),
    "path": lambda *_: os.pathsep.join(sys.path),
    "crash": crash,
    "exit": lambda _, status: os._exit(int(status)),
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "once_fatal": once_fatal,
    "once_fatal_at": once_fatal_at,
    "with_child_at": with_child_at,
    "eat": eat,
    "fail": fail,
    "leave": lambda *_: sys.exit(3),
    "with_child": with_child,
    "rendezvous": rendezvous,
    "copy": copy,
    "close_everything": close_everything,
    "refuse": refuse,
    "large": lambda _, bytes_: "x" * int(bytes_),
    "say": lambda _, number, bytes_: print(number * int(bytes_)),
    "interrupt": lambda *_: os.kill(os.getpid(), signal.SIGINT),
}


def prepend(place):
    """Have this process look for modules there first."""
    sys.path.insert(0, place)


def poison_workers():
    """Let every process that is forked from this one end at once."""
    os.register_at_fork(after_in_child=lambda: os._exit(7))


def hang():
    time.sleep(300)


def start_slowly():
    time.sleep(3.0)


def fail_to_start():
    raise RuntimeError("no compiler on this machine")

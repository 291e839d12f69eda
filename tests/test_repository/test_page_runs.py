# SPDX-License-Identifier: Apache-2.0
"""The code that pages show runs, and prints what they show: what somebody types on the pages for
newcomers, and elsewhere each block that says so.

A comment of HTML before a block is an order: `not run: WHY` on pages for newcomers, `run` on the
others, `run after: CODE` where a block needs names that its page does not define.  Each page has a
folder of its own, with the kernels and the bundle of docs/start.md.  Servers that a page speaks to
at their usual ports on the loopback are real ones.

What a page shows under a command is compared: `…` stands for anything in a line, alone in a line
for any lines, and digests, sizes and times may differ.  A command under which an error is shown has
to fail.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import registry_server
import s3_server
import waiting

from tools.docs_site.code_blocks import PROMPT, blocks
from tools.shared import redis_server

ROOT = Path(__file__).resolve().parents[2]
NEWCOMERS = [
    "docs/start.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("howto", "concepts")
        for path in (ROOT / "docs" / folder).glob("*.md")
    ),
]
OTHERS = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
]
ORDER = "run after: "
# In a process without torch and Triton, and with what stands in for a GPU: it launches, and
# computes nothing.
GPU_OF_PAGES = """
import ctypes, sys
sys.modules |= dict.fromkeys(("torch", "triton"))
ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)
"""
ANYTHING = "…"
# Between the outputs of commands.
END = "\x1e"
# What differs from run to run: digests and keys, sizes and durations, and times.
VARYING = re.compile(
    r"\b[0-9a-f]{8,}\b…?|\b[0-9][0-9.,]* (?:[KMG]?B|ms|us|s)\b|\b[0-9]+\.[0-9]+\b|\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"
)
# As long as all that a page does may take.
LIMIT_S = 110
DOCTEST = (
    "import doctest, sys; sys.exit(doctest.testfile(sys.argv[1], module_relative=False).failed)"
)

pytestmark = pytest.mark.slow


def answers(port):
    """Whether somebody listens on a port of the loopback."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def redis():
    """Run a Redis server while the block runs; yields its address."""
    port = s3_server.free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([redis_server.program(), *words], stdout=subprocess.DEVNULL)
    try:
        waiting.until(lambda: answers(port), "the Redis server does not listen")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3():
    """Run an S3 server with a bucket `kernel-cache` while the block runs; yields its address."""
    with s3_server.running() as endpoint:
        made = urllib.request.Request(f"{endpoint}/kernel-cache", method="PUT")
        urllib.request.urlopen(made, timeout=30).close()
        yield endpoint.removeprefix("http://")


@contextmanager
def registry():
    """Run a registry of containers while the block runs; yields its address."""
    with registry_server.SmallRegistry().serving() as server:
        yield server.host


# By the address that a page has for one of the reader's.
SERVERS = {"127.0.0.1:6379": redis, "127.0.0.1:9000": s3, "127.0.0.1:5000": registry}


def to_run(page):
    """Return the blocks of a page that are to run: of newcomers' pages all that are not excepted,
    of the others those that say so.
    """
    found = [
        block
        for block in blocks(ROOT / page, ROOT)
        if block.language in {"python", "console"} or block.title
    ]
    if page in NEWCOMERS:
        return [block for block in found if not block.order.startswith("not run: ")]
    return [block for block in found if block.order.startswith("run")]


RUN = {page: chosen for page in (*NEWCOMERS, *OTHERS) if (chosen := to_run(page))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a home with `python` and `triton-bundler` on its path, and the kernels and the bundle of
    the first page.
    """
    if find_spec("triton") is None:
        pytest.skip("the pages need triton, which is not installed")
    home = tmp_path_factory.mktemp("home")
    for name, arguments in (("python", ""), ("triton-bundler", "-m bundler")):
        (home / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (home / name).chmod(0o755)
    kernels = next(
        block
        for block in blocks(ROOT / "docs" / "start.md", ROOT)
        if block.title == "my_kernels.py"
    )
    (home / "my_kernels.py").write_text(kernels.text)
    started(home, "triton-bundler", "run", "-o", "mine.tbundle", "--", "python", "my_kernels.py")
    return home


@pytest.fixture(scope="module")
def gpu_of_pages(tmp_path_factory):
    """The text of a module that makes a process one with a GPU; who asks for libcuda gets the
    library that is loaded already.
    """
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("what stands in for a GPU needs a C compiler, and there is none")
    path, source = (
        tmp_path_factory.mktemp("gpu") / "libcuda.so.1",
        Path(__file__).parent / "gpu_of_pages.c",
    )
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", source, "-o", path],
        check=True,
    )
    return GPU_OF_PAGES.format(library=str(path))


def started(where, *command):
    """Run a command in a folder as a newcomer would, with nothing set; its output is shown where it
    fails.
    """
    home = where if (where / "triton-bundler").exists() else where.parent
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "PYTHON", "XDG_"))
    }
    clean |= {
        "HOME": str(home),
        "PATH": f"{home}:{clean['PATH']}",
        "TRITON_CACHE_DIR": str(where / "cache"),
    }
    done = subprocess.run(
        command,
        cwd=where,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def type_in(block, where, servers):
    """Type what a block of a terminal shows, in one shell, and compare what is printed."""
    commands = [part.partition("\n") for part in f"\n{block.text}".split(f"\n{PROMPT}")[1:]]
    script = ["set -euo pipefail"]
    for command, _, shown in commands:
        typed = moved(command, servers)
        # In this shell, since a command may set a variable.
        group = f"{{ {typed}\n}} 2>&1"
        fails = any(line.startswith("error: ") for line in shown.splitlines())
        script += [f"if {group}; then exit 9; fi" if fails else group, f"printf '{END}'"]
    printed = moved(started(where, "bash", "-c", "\n".join(script)), servers, back=True)
    for (command, _, shown), found in zip(commands, printed.split(END), strict=False):
        if shown.strip():
            assert fits(shown, found), f"{block}: {command}\nshown:\n{shown}\nprinted:\n{found}"


def moved(text, servers, *, back=False):
    """Return a text with the addresses of servers in the place of those that pages have, or the
    other way round.
    """
    for usual, here in servers.items():
        text = text.replace(*((here, usual) if back else (usual, here)))
    return text


def fits(shown, printed):
    """Whether what was printed is what a page shows."""
    lines = [VARYING.sub("#", line.rstrip()) for line in printed.strip().splitlines()]
    pattern = ""
    for line in shown.strip().splitlines():
        parts = VARYING.sub("#", line.rstrip()).split(ANYTHING)
        pattern += r"(?:.*\n)*?" if line == ANYTHING else ".*?".join(map(re.escape, parts)) + "\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def run(block, where, servers):
    """Run a block in a folder: write the file that it shows, or do what it types, or run its
    Python.
    """
    before = (
        block.order.removeprefix(ORDER).replace("; ", "\n") + "\n"
        if block.order.startswith(ORDER)
        else ""
    )
    if block.title:
        (where / block.title).write_text(block.text)
        if block.language == "bash":
            started(where, "bash", "-n", block.title)
    elif block.language == "console":
        type_in(block, where, servers)
    elif block.text.startswith(">>> "):
        (where / "session.txt").write_text(
            "".join(f">>> {line}\n" for line in before.splitlines() if line) + block.text
        )
        started(where, "python", "-c", DOCTEST, "session.txt")
    else:
        (where / "block.py").write_text(before + block.text)
        started(where, "python", "block.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(folder, page, request):
    """Each block of a page that is to run ends well, one after the other in one folder."""
    if any("import torch" in block.text for block in RUN[page]) and find_spec("torch") is None:
        pytest.skip(f"{page} needs torch, which is not installed")
    if any("SigningKey" in block.text or "key new" in block.text for block in RUN[page]):
        pytest.importorskip("cryptography")
    where = folder / page.replace("/", "-")
    where.mkdir()
    for name in ("my_kernels.py", "mine.tbundle"):
        shutil.copy(folder / name, where)
    if any("gpu_of_pages" in block.order for block in RUN[page]):
        (where / "gpu_of_pages.py").write_text(request.getfixturevalue("gpu_of_pages"))
    text = (ROOT / page).read_text()
    with ExitStack() as stack:
        servers = {
            usual: stack.enter_context(server())
            for usual, server in SERVERS.items()
            if usual in text
        }
        for block in RUN[page]:
            run(block, where, servers)


def test_each_exception_has_a_reason():
    """On pages for newcomers a block that is not run says why, and no order is misspelt on any
    page.
    """
    orders = {
        (str(block), block.order)
        for page in (*NEWCOMERS, *OTHERS)
        for block in blocks(ROOT / page, ROOT)
        if block.order
    }
    known = ("not run: ", ORDER)
    assert {
        order for order in orders if not order[1].startswith(known) and order[1] != "run"
    } == set()
    assert len(RUN) > 15

# SPDX-License-Identifier: Apache-2.0
"""The code that pages show runs: what somebody types on the pages for newcomers, and elsewhere each
block that says so.

A comment of HTML before a block is an order: `not run: WHY` on pages for newcomers, `run` on the
others, `run after: CODE` where a block needs names that its page does not define.  Each page has a
folder of its own, with the kernels and the bundle of docs/start.md.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.docs_site.code_blocks import PROMPT, blocks

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
# As long as all that a page does may take.
LIMIT_S = 110
DOCTEST = (
    "import doctest, sys; sys.exit(doctest.testfile(sys.argv[1], module_relative=False).failed)"
)

pytestmark = pytest.mark.slow


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


def run(block, where):
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
        lines = [
            line.removeprefix(PROMPT) for line in block.text.splitlines() if line.startswith(PROMPT)
        ]
        started(where, "bash", "-euo", "pipefail", "-c", "\n".join(lines))
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
    for block in RUN[page]:
        run(block, where)


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

# SPDX-License-Identifier: Apache-2.0
"""The code that pages show runs: what somebody types on the pages for newcomers, and elsewhere each
block that says so.

A comment of HTML before a block is an order: `not run: WHY` on pages for newcomers, `run` on the
others, `run after: CODE` where a block needs names that its page does not define.  Each page has a
folder of its own, with the kernels and the bundle of docs/start.md, and one terminal: what a block
exports is there in the blocks behind it.  Output that a page shows is compared with what was
printed (tests/page_output.py).  Servers that pages name by an example's address are real ones of
this machine.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_output import fault, steps

import bundler
from tools.docs_site.code_blocks import blocks

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
# Printed after each command of a block, with its status.
END = "\x1eended with"
# Where a shell leaves what it exports to the next one of the page.
EXPORTED = ".exported"
CHILD_START = ROOT / "tests" / "child_start"
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
    package = Path(bundler.__file__).resolve().parents[1]
    # A checkout under test goes before an installed package.
    path = f"{package}:{CHILD_START}" if package == ROOT else CHILD_START
    for name, arguments in (("python", ""), ("triton-bundler", "-m bundler")):
        (home / name).write_text(
            f"#!/bin/sh\nPYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"
            f' exec {sys.executable} {arguments} "$@"\n'
        )
        (home / name).chmod(0o755)
    kernels = next(
        block
        for block in blocks(ROOT / "docs" / "start.md", ROOT)
        if block.title == "my_kernels.py"
    )
    (home / "my_kernels.py").write_text(kernels.text)
    started(home, "triton-bundler", "run", "-o", "mine.tbundle", "--", "python", "my_kernels.py")
    return home


@contextlib.contextmanager
def redis_of_pages(folder):
    """Run a Redis server; yields what its address is in the pages and here, and the environment
    that it needs.
    """
    pytest.importorskip("redis")
    import redis_server

    with redis_server.running(redis_server.NAMES[0]) as server:
        yield {"redis://kernel-cache": server.url(scheme="redis")}, {}


@contextlib.contextmanager
def bucket_of_pages(folder):
    """Run an S3 server with the bucket `kernels`."""
    import s3_server

    with s3_server.running() as endpoint:
        s3_server.make_bucket(endpoint, "kernels")
        yield {}, {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}


@contextlib.contextmanager
def registry_of_pages(folder):
    """Run a registry of containers, with TLS."""
    import registry_server

    (folder / "registry").mkdir()
    pem = registry_server.certificate(folder / "registry")
    with registry_server.debian_registry(folder / "registry", tls=pem) as host:
        yield {"oci://registry.example": f"oci://{host}"}, {"SSL_CERT_FILE": str(pem)}


# By the beginning of their addresses in the pages.
SERVERS = {
    "redis://kernel-cache": redis_of_pages,
    "s3://kernels/": bucket_of_pages,
    "oci://registry.example": registry_of_pages,
}


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


def environment(where):
    """Return the environment of somebody who has set nothing."""
    home = where if (where / "triton-bundler").exists() else where.parent
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "PYTHON", "XDG_", "AWS_"))
        and not name.lower().endswith("_proxy")
        and name not in {"DOCKER_CONFIG", "REGISTRY_AUTH_FILE"}
    }
    return clean | {
        "HOME": str(home),
        "PATH": f"{home}:{clean['PATH']}",
        "TRITON_CACHE_DIR": str(where / "cache"),
        # Else what is printed would come after the errors.
        "PYTHONUNBUFFERED": "1",
    }


def started(where, *command, more=None):
    """Run a command in a folder as a newcomer would; its output is shown where it fails."""
    done = subprocess.run(
        command,
        cwd=where,
        env=environment(where) | (more or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


class Terminal:
    """Runs the blocks of one page, one after the other in one folder."""

    def __init__(self, where, addresses=None, more=None):
        self.where, self.addresses, self.more = where, addresses or {}, more or {}
        (where / EXPORTED).touch()

    def run(self, block):
        """Write the file that a block shows, or do what it types, or run its Python."""
        text = block.text
        for named, real in self.addresses.items():
            text = text.replace(named, real)
        before = (
            block.order.removeprefix(ORDER).replace("; ", "\n") + "\n"
            if block.order.startswith(ORDER)
            else ""
        )
        if block.title:
            (self.where / block.title).write_text(text)
            if block.language == "bash":
                self._started("bash", "-n", block.title)
        elif block.language == "console":
            self._type(block, text)
        elif text.startswith(">>> "):
            (self.where / "session.txt").write_text(
                "".join(f">>> {line}\n" for line in before.splitlines() if line) + text
            )
            self._started("python", "-c", DOCTEST, "session.txt")
        else:
            (self.where / "block.py").write_text(before + text)
            self._started("python", "block.py")

    def _type(self, block, text):
        """Do what a console types; each command ends as the page shows it, and prints what it
        shows.
        """
        typed, wanted = steps(text), steps(block.text)
        script = [step.command + f"\nprintf '\\n{END} %d\\n' $?" for step in typed]
        printed = self._started("bash", "-uc", "\n".join(script) + f"\nexport -p >{EXPORTED}")
        for named, real in self.addresses.items():
            # Messages show neither user nor password.
            printed = printed.replace(re.sub("//[^/@]*@", "//", real), named)
        ended = re.findall(f"(.*?)\n{END} (\\d+)\n", printed, re.DOTALL)
        assert len(ended) == len(typed), f"{block}: the shell ended early:\n{printed}"
        for step, (output, status) in zip(wanted, ended, strict=True):
            assert (int(status) != 0) == step.fails, (
                f"{block}: $ {step.command}\nended with {status}:\n{output}"
            )
            wrong = fault(step.shown, output) if step.shown else None
            assert wrong is None, f"{block}: $ {step.command}\n{wrong}"

    def _started(self, *command):
        return started(
            self.where,
            *("bash", "-c", f'. ./{EXPORTED}; exec "$@"', "bash", *command),
            more=self.more,
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(folder, page, request):
    """Each block of a page that is to run ends well, one after the other in one folder."""
    if any("import torch" in block.text for block in RUN[page]) and find_spec("torch") is None:
        pytest.skip(f"{page} needs torch, which is not installed")
    if any("SigningKey" in block.text or "key new" in block.text for block in RUN[page]):
        pytest.importorskip("cryptography")
    if any("--no-build-isolation" in block.text for block in RUN[page]):
        pytest.importorskip("setuptools", minversion="77")
    where = folder / page.replace("/", "-")
    where.mkdir()
    for name in ("my_kernels.py", "mine.tbundle"):
        shutil.copy(folder / name, where)
    if any("gpu_of_pages" in block.order for block in RUN[page]):
        (where / "gpu_of_pages.py").write_text(request.getfixturevalue("gpu_of_pages"))
    with contextlib.ExitStack() as servers:
        addresses, more = {}, {}
        for named, server in SERVERS.items():
            if any(named in block.text for block in RUN[page]):
                real, needed = servers.enter_context(server(where))
                addresses, more = addresses | real, more | needed
        terminal = Terminal(where, addresses, more)
        for block in RUN[page]:
            terminal.run(block)


def test_each_how_to_shows_what_its_commands_print():
    """A page of docs/howto has output that is compared; four have nothing that can run here."""
    shown = {
        page
        for page, chosen in RUN.items()
        if any(
            step.shown
            for block in chosen
            if block.language == "console"
            for step in steps(block.text)
        )
    }
    pages = {page for page in NEWCOMERS if page.startswith("docs/howto/")}
    elsewhere = {"index", "kserve", "kubernetes", "sglang", "vllm"}
    assert pages - shown == {f"docs/howto/{name}.md" for name in elsewhere}


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

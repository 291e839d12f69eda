# SPDX-License-Identifier: Apache-2.0
"""Source modules: text becomes a file that its digest names, and what is imported is that text."""

import hashlib
import inspect
import linecache
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from bundler.compile.source_modules import SourceModule, source_module
from bundler.errors import (
    CompileFailed,
    ConfigError,
    DigestMismatch,
    LimitExceeded,
    NotFound,
    StoreUnavailable,
)

TEXT = "imports = globals().get('imports', 0) + 1\n\n\ndef double(x):\n    return 2 * x\n"


@pytest.fixture
def folder(tmp_path):
    """The directory of source modules; modules are forgotten after the test."""
    before = set(sys.modules)
    yield tmp_path / "sources"
    for name in set(sys.modules) - before:
        if name.startswith("bundler_source_"):
            del sys.modules[name]


def test_a_text_becomes_a_file_named_by_its_digest(folder):
    """The file holds the text, for its owner alone, under the text's digest."""
    module = source_module(TEXT, folder)
    assert module.digest == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (module.name, Path(module.path).read_text()) == (f"bundler_source_{module.digest}", TEXT)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, module.path)] == [0o700, 0o600]
    assert os.listdir(folder) == [f"{module.name}.py"]


def test_a_module_is_imported_once(folder):
    """Every load gives the same module, also one that is made again from the same text, and in
    threads at once.
    """
    with ThreadPoolExecutor(8) as threads:
        loaded = list(threads.map(lambda _: source_module(TEXT, folder).load(), range(16)))
    assert {id(module) for module in loaded} == {id(loaded[0])}
    assert (loaded[0].double(4), loaded[0].imports, sys.modules[loaded[0].__name__]) == (
        8,
        1,
        loaded[0],
    )


def test_a_module_can_be_imported_again(folder):
    """After unload it is imported anew from the file, as a worker does it; whoever holds the old
    one keeps it.
    """
    module = source_module(TEXT, folder)
    old = module.load()
    module.unload()
    module.unload()
    new = SourceModule(module.digest, module.directory).load()
    assert new is not old
    assert (old.double(1), new.double(1), new.imports) == (2, 2, 1)


def test_inspect_and_tracebacks_show_the_text(folder):
    """The source of a function, and the lines of a traceback, are those of the text, also when the
    file is gone.
    """
    module = source_module(TEXT + "def wrong():\n    raise KeyError('here')\n", folder)
    loaded = module.load()
    shutil.rmtree(folder)
    linecache.checkcache()
    assert inspect.getsource(loaded.double) == "def double(x):\n    return 2 * x\n"
    assert inspect.getsourcelines(loaded.double)[1] == 4
    with pytest.raises(KeyError) as caught:
        loaded.wrong()
    assert "raise KeyError('here')" in "".join(traceback.format_exception(caught.value))
    module.unload()
    assert module.path not in linecache.cache


def test_a_changed_file_is_not_imported(folder):
    """A file that no longer has its digest is refused with both digests, and mended by making the
    module again.
    """
    module = source_module(TEXT, folder)
    Path(module.path).write_text("raise SystemExit('run')")
    with pytest.raises(DigestMismatch, match="somebody changed the file") as caught:
        module.load()
    assert (caught.value.expected, caught.value.path) == (module.digest, module.path)
    assert source_module(TEXT, folder).load().double(2) == 4
    assert os.listdir(folder) == [f"{module.name}.py"]


def test_bytecode_beside_the_file_is_not_used(folder, tmp_path):
    """A .pyc that somebody put there, with the file's size and time, is not what is imported."""
    module = source_module(TEXT, folder)
    other = tmp_path / "other.py"
    other.write_text(TEXT.replace("2 * x", "3 * x"))
    shutil.copystat(module.path, other)
    py_compile.compile(str(other), cache_from_source(module.path), doraise=True)
    assert module.load().double(2) == 4


def test_a_file_that_is_gone_is_said(folder):
    """Without its file a module that is not imported yet is not found."""
    module = source_module(TEXT, folder)
    os.unlink(module.path)
    with pytest.raises(NotFound, match="is gone; make the source module again"):
        module.load()


def test_a_link_is_not_followed(folder, tmp_path):
    """A symbolic link in the file's place is not read."""
    module = source_module(TEXT, folder)
    os.rename(module.path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", module.path)
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        module.load()


def test_a_pipe_is_not_waited_for(folder):
    """A named pipe in the file's place is an error, and making the module again puts the file
    there.
    """
    module = source_module(TEXT, folder)
    os.unlink(module.path)
    os.mkfifo(module.path)
    with pytest.raises(StoreUnavailable, match="a named pipe, expected a file; remove it"):
        module.load()
    assert source_module(TEXT, folder).load() is not None


def test_a_directory_that_others_may_write_to_is_refused(folder):
    """Whoever may write there could have their code run, so such a directory is refused with the
    fix.
    """
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="everyone may write to it"):
        source_module(TEXT, folder)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a = 1\nb = (\n", 2, "SyntaxError"),
        ("a = 1\n\nraise ValueError('no')\n", 3, "ValueError: no"),
        ("def f():\n    import no_such_thing\n\n\nf()\n", 2, "ModuleNotFoundError"),
        ("a = 1\nexit(3)\n", None, None),
    ],
)
def test_a_text_that_cannot_be_imported_says_where(folder, text, line, reason):
    """The error names the file, the line and the reason, and nothing half-imported stays."""
    module = source_module(text, folder)
    if reason is None:
        with pytest.raises(SystemExit):
            module.load()
    else:
        with pytest.raises(CompileFailed, match=reason) as caught:
            module.load()
        assert caught.value.line == line
        assert f"{module.path}:{line}" in str(caught.value)
    assert module.name not in sys.modules
    assert module.path not in linecache.cache


def test_line_ends_and_declared_encodings_make_no_difference(folder):
    """Text from another system is the same module; a declared encoding does not garble it."""
    assert (
        source_module(TEXT.replace("\n", "\r\n"), folder)
        == source_module(TEXT, folder)
        == source_module(TEXT[:-1], folder)
    )
    umlaut = source_module("# -*- coding: latin-1 -*-\nname = 'Größe'\n", folder)
    assert umlaut.load().name == "Größe"


@pytest.mark.parametrize(
    ("text", "error"), [("x = '\ud800'", ConfigError), ("#" * ((64 << 20) + 1), LimitExceeded)]
)
def test_bad_texts_are_refused(folder, text, error):
    """What is no Unicode, or larger than a file may be, is refused before anything is written."""
    with pytest.raises(error):
        source_module(text, folder)
    assert not folder.exists()


def test_the_default_directory_is_the_users_cache(tmp_path, monkeypatch):
    """Without a directory modules go to the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert source_module(TEXT).directory == str(tmp_path / "xdg" / "triton-bundler" / "sources")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source_module(TEXT).directory == os.path.expanduser("~/.cache/triton-bundler/sources")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_import_while_a_thread_of_its_parent_does(folder):
    """A fork in the middle of another thread's import does not leave the child waiting for ever."""
    slow = source_module("import threading\nthreading.go.set()\nthreading.stay.wait(30)\n", folder)
    quick = source_module(TEXT, folder)
    threading.go, threading.stay = threading.Event(), threading.Event()
    importing = threading.Thread(target=slow.load)
    importing.start()
    try:
        assert threading.go.wait(30)
        child = os.fork()
        if child == 0:
            os._exit(0 if quick.load().double(3) == 6 else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        threading.stay.set()
        importing.join()
        del threading.go, threading.stay


_KEYS = """
import sys
from bundler.compile.source_modules import source_module
module = source_module(open(sys.argv[1]).read(), sys.argv[2]).load()
print(module.outer.cache_key, module.recursive.cache_key, module.outer.starting_line_number, module.outer.fn.__code__.co_filename)
"""
_KERNELS = """import triton
import triton.language as tl


@triton.jit
def inner(x):
    return x * 2


@triton.jit
def outer(a, B: tl.constexpr):
    tl.store(a + tl.arange(0, B), inner(1.0))


@triton.jit
def recursive(x):
    return recursive(x)
"""


@pytest.mark.toolchain
def test_keys_do_not_depend_on_the_place(tmp_path):
    """Two machines that keep the same text in different directories get the same source hash from
    Triton.
    """
    (tmp_path / "text").write_text(_KERNELS)
    answers = []
    for place in ("one", "another/place"):
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _KEYS,
                str(tmp_path / "text"),
                str(tmp_path / place),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.split())
    assert answers[0][:3] == answers[1][:3]
    assert answers[0][3] != answers[1][3]
    assert {len(key) for key in answers[0][:2]} == {64}

# SPDX-License-Identifier: Apache-2.0
"""What the tests of every room share: the right package, a clean environment, no leaks, and kernels
compiled once.
"""

import ast
import functools
import gc
import importlib.util
import itertools
import json
import multiprocessing.resource_tracker
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import filelock
import hypothesis
import pytest

import bundler
from bundler.toolchain import instances

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("cuda:90", "hip:gfx942")
CORPUS = ROOT.parent / "shared" / "corpus"
REAL_CACHES = ("inductor-transformer-h200", "triton-liger-h200")
# Last, so that an installed bundler goes before that of the checkout: tests import tools.fuzz and
# others.
sys.path.append(str(ROOT))
# What tests of several rooms share.
sys.path.append(str(ROOT / "tests"))
# What programs that tests start run first; behind ROOT, so that it shadows nothing.
CHILD_START = ROOT / "tests" / "child_start"
sys.path.append(str(CHILD_START))
# For torch and numpy, here and in what tests start: threads that wait for a part of a small tensor
# keep a processor busy, which another test has a use for.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A machine that is busy draws slowly, which says nothing of a test; rooms add to this profile.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")
_RUN_APART = ("serial", "slow", "release", "toolchain")
_OURS_TO_KEEP = "BUNDLER_TEST_INSTALLED"
_FOREIGN = (
    "TRITON_",
    "TORCHINDUCTOR_",
    "TORCH_COMPILE_",
    "DISABLE_LLVM_OPT",
    "LLVM_IR_ENABLE_DUMP",
)
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_PATIENCE_S = 10
_COMPILE = """
import importlib.util, sys
import bundler
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
with bundler.recording() as recording:
    kernels.compile_all(sys.argv[3:])
with recording.collect() as bundle:
    assert bundle.left_out == (), bundle.left_out
    bundle.save(sys.argv[2])
"""


def pytest_configure(config):
    """Refuse to test the checkout where the installed wheel is what counts; let Ctrl-C reach what
    tests start.
    """
    gc.disable()  # what is imported for the tests stays; see pytest_collection_finish
    # A job in the background of a shell ignores it, and so would every program that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (
        os.environ.get(_OURS_TO_KEEP) == "1"
        and Path(bundler.__file__).resolve().parent == ROOT / "bundler"
    ):
        raise pytest.UsageError(
            f"{_OURS_TO_KEEP}=1, but bundler is imported from the checkout ({bundler.__file__});"
            " run python -P -m pytest"
        )


def pytest_addoption(parser):
    """Add the option that spares `make` the import of files in which it has nothing to run."""
    parser.addoption(
        "--holding",
        metavar="MARK",
        choices=_RUN_APART,
        help="collect only files that name this mark",
    )


def pytest_ignore_collect(collection_path, config):
    """Leave out files without the mark that `--holding` names: importing all 190 of them takes
    longer than many a run.
    """
    mark = config.getoption("--holding")
    if mark is None or collection_path.suffix != ".py" or _names(collection_path, mark):
        return None
    named = {config.invocation_params.dir / argument.partition("::")[0] for argument in config.args}
    return (
        None if collection_path in named else True
    )  # pytest says of a test in a file that was left out that it does not exist


def pytest_collection_modifyitems(items):
    """Refuse a test whose mark its own file does not name, since `--holding` would not find it."""
    for item in items:
        for mark in _RUN_APART:
            if item.get_closest_marker(mark) is not None and not _names(item.path, mark):
                raise pytest.UsageError(
                    f"{item.nodeid} has the mark {mark}, but {item.path.name} does not name it"
                )


def pytest_collection_finish():
    """Spare the collector what was imported for the tests: it looks through torch for 0.3 s."""
    gc.enable()
    gc.collect()
    gc.freeze()


@functools.cache
def _names(path, mark):
    return f"mark.{mark}" in path.read_text(encoding="utf-8")


def pytest_runtest_setup(item):
    """Skip GPU tests where there is none, and say so."""
    if item.get_closest_marker("gpu") is not None and not any(map(os.path.exists, _GPU_FILES)):
        pytest.skip(f"needs a GPU: none of {', '.join(_GPU_FILES)} is here")


def _open_files():
    """Return what each file descriptor of this process leads to, but for those that Python keeps
    for itself.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    found.pop(getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None), None)
    return found


def _new_files(before):
    new = {fd: target for fd, target in _open_files().items() if before.get(fd) != target}
    # The interpreter, not the test, keeps devices and the files of loaded libraries open.
    return {
        fd: target for fd, target in new.items() if not target.startswith(("/dev/", "anon_inode:"))
    }


@pytest.fixture(autouse=True, scope="session")
def one_parser_at_a_time():
    """Let one thread at a time parse Python source.

    CPython 3.11 counts the depth of AST constructors for the interpreter, not for each thread, so
    two threads that parse at once may get a SystemError.  Triton parses a kernel's source in
    whatever thread compiles it.
    """
    lock, parse = threading.RLock(), ast.parse

    def locked(*args, **kwargs):
        with lock:
            return parse(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", locked)
        yield


@pytest.fixture(autouse=True, scope="session")
def small_search():
    """Spare the search for JIT functions the namespaces of installed libraries, of which a process
    of all tests has imported three thousand: each recording would look through them for 0.1 s.

    No test puts a kernel there, and processes that tests start search everywhere.
    """
    everything = instances.module_namespaces
    places = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    installed = {
        _package(one) for one in everything() if str(one.get("__file__")).startswith(places)
    } - {"triton", "bundler"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            instances,
            "module_namespaces",
            lambda: (one for one in everything() if _package(one) not in installed),
        )
        yield


def _package(namespace):
    return str(namespace.get("__name__")).partition(".")[0]


@pytest.fixture(autouse=True, scope="module")
def nothing_loaded(small_search):
    """Let each file of tests begin without the kernels that another file's tests loaded.

    A recording, and a session's tag, take every kernel that this process's JIT functions hold;
    which files share a process, and which functions the collector has freed, differs from run to
    run.
    """
    for function in instances.instances(instances.JIT_FUNCTION):
        getattr(function, "device_caches", {}).clear()


@pytest.fixture(scope="session")
def run_tool():
    """Return a function that runs a program of tools/ with the bundler that is tested here, and
    returns the finished process.
    """

    def run(program, *arguments, first="", timeout=280):
        line = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            *f"tools.{program}".split(),
            *map(str, arguments),
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(first), *sys.path])),
            "PYTHONSAFEPATH": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # A group of its own: it starts processes, which must not outlive it when it takes too long.
        with subprocess.Popen(
            line, env=environment, cwd=ROOT, start_new_session=True, **pipes
        ) as process:
            try:
                said = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(line, process.returncode, *said)

    return run


@pytest.fixture(autouse=True)
def no_leaks(request):
    """Each test closes its files and ends its threads; a GPU's driver keeps files of its own."""
    if not os.path.isdir("/proc/self/fd") or request.node.get_closest_marker("gpu"):
        yield
        return
    files, threads = _open_files(), set(threading.enumerate())
    yield
    # A call that nobody waits for any more closes what it opened when it ends, in a thread that
    # `threading`, or Python, may not know.
    ends = time.monotonic() + _PATIENCE_S
    while _new_files(files) and time.monotonic() < ends:
        gc.collect()  # what waits for the collector is not a leak
        time.sleep(0.01)
    assert _new_files(files) == {}, "files were left open"
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} was left running"


@pytest.fixture(scope="session")
def private_folders(tmp_path_factory):
    """Folders of tests, one after the other: pytest's own `mktemp` lists all that it has made, each
    time.
    """
    root = tmp_path_factory.mktemp("private")
    return (root / str(number) for number in itertools.count())


@pytest.fixture
def tmp_path(private_folders):
    """As pytest's own, which lists the folders of all tests before it, each time."""
    folder = next(private_folders)
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def clean_environment(no_leaks, private_folders):
    """Nobody's settings reach a test, and nothing of a test lands in anybody's home or caches."""
    before = dict(os.environ)
    folder = next(private_folders)
    home, temporary = folder / "home", folder / "t"
    for path in (folder, home, temporary):
        path.mkdir(mode=0o700)
    # Not the monkeypatch fixture: that one is undone when the test's own fixtures expect it.
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(_FOREIGN):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", None)
        yield
    # What a test set and left is no other test's.
    if (left := dict(os.environ)) != before:
        for name in left.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@dataclass(frozen=True)
class Compiled:
    """The kernels of examples/kernels.py for each target, as Triton left them, and the recording of
    their compiles.

    Read only: tests make copies.
    """

    cache: Path
    bundle: Path

    @property
    def keys(self):
        """Kernel keys, sorted."""
        return sorted(path.parent.name for path in self.cache.glob("*/__grp__*.json"))

    def keys_of(self, name, target="cuda:90"):
        """Keys of the kernels with this entry point and target, sorted."""
        named = {
            path.parent.name: json.loads(path.read_text())["target"]
            for path in self.cache.glob(f"*/{name}.json")
        }
        return sorted(
            key
            for key, made_for in named.items()
            if f"{made_for['backend']}:{made_for['arch']}" == target
        )


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory):
    """Return a function that fills a folder once a run: the first worker of pytest-xdist to ask
    does it, the others wait.

    What is in the folder is read only.  Where filling fails, the next to ask tries again.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def make(name, fill):
        folder, done = shared / f"once-{name}", shared / f"once-{name}.done"
        with filelock.FileLock(shared / f"once-{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(autouse=True, scope="session")
def triton_hashed_once(made_once):
    """Let programs that tests start share what Triton computes of itself;
    `child_start/sitecustomize.py` says how.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUNDLER_TEST_TRITON_KEYS", str(made_once("triton-keys", lambda folder: None)))
        patch.setenv("PYTHONPATH", str(CHILD_START), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def interpreter(triton_hashed_once, tmp_path_factory):
    """A process with torch and the generator, which runs programs in Triton's interpreter."""
    # Late: it is found on the path that this module has added.
    from prepared_process import PreparedProcess

    home = str(tmp_path_factory.mktemp("interpreter"))
    prepared = PreparedProcess(
        "warmed_generator", TRITON_INTERPRET="1", HOME=home, XDG_CACHE_HOME=home
    )
    yield prepared
    prepared.close()


@pytest.fixture(scope="session")
def compiled(made_once):
    """Compile the example kernels once a run, in a process of its own, with recording on."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, so there is nothing to compile with")
    folder = made_once("compiled", _compile_examples)
    return Compiled(folder / "cache", folder / "b.tbundle")


def _compile_examples(folder):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    program = [_COMPILE, ROOT / "examples" / "kernels.py", folder / "b.tbundle", *TARGETS]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", *map(str, program)],
        env=clean | {"TRITON_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def debian_program(made_once):
    """Return a function that finds a program: of this machine, or out of a package of Debian's,
    which is unpacked and not installed; else it skips.
    """

    def fetch(package, folder):
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return
        try:
            done = subprocess.run(
                ["apt-get", "download", package], cwd=folder, capture_output=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return
        for file in folder.glob(f"{package}_*.deb") if done.returncode == 0 else ():
            subprocess.run(["dpkg-deb", "-x", file, folder], check=True, capture_output=True)

    def find(name, package):
        found = shutil.which(name)
        if found is None:
            folder = made_once(f"debian-{package}", lambda folder: fetch(package, folder))
            found = next(folder.rglob(f"bin/{name}"), None)
        # What does not even start lacks a library of its own.
        if found is None or subprocess.run([found, "-v"], capture_output=True).returncode > 1:
            pytest.skip(
                f"{name} is not installed, nor to be had as a package (Debian: apt-get install"
                f" {package})"
            )
        return str(found)

    return find


@pytest.fixture(scope="session")
def unpacked(made_once):
    """Return a function that unpacks an archive of real caches, once a run, or skips where it is
    not; read only.
    """

    def unpack(name):
        archive = CORPUS / f"{name}.tar.xz"
        if not archive.is_file():
            pytest.skip(
                f"needs the real caches: {archive.name} is not in {CORPUS.name}/ beside the"
                " checkout"
            )

        def fill(folder):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")

        (root,) = made_once(f"corpus-{name}", fill).iterdir()
        return root

    return unpack


@pytest.fixture(scope="session", params=REAL_CACHES)
def real_cache(request, unpacked):
    """A cache directory as a compiler left it."""
    return unpacked(request.param)

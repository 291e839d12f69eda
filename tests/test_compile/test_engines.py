# SPDX-License-Identifier: Apache-2.0
"""Builds on Dask, MPI and Ray, by the recipes of docs/howto/many-machines.md: the same bundle as on
one machine, also when a worker is killed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import until

import bundler
from tools.docs_site.code_blocks import blocks

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    block.title: block.text
    for block in blocks(ROOT / "docs" / "howto" / "many-machines.md", ROOT)
    if block.title
}
TARGETS = ("--target", "cuda:90", "--target", "hip:gfx942")
LIMIT_S = 250
# What the process that forks compilers is started with.
SERVER = b"bundler.compile.compile_worker"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


def engine(module, package, *more):
    """Return the parameters of a test for an engine, skipped aloud where that is not installed."""
    missing = [name for name in (package, *more) if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: pip install {package}"
    return pytest.param(module, marks=pytest.mark.skipif(bool(missing), reason=reason), id=package)


DASK, RAY = engine("dask_cluster", "distributed"), engine("ray_cluster", "ray")


class Place:
    """A directory with kernels and recipes, the command in it, and the processes that it started:
    all have this directory's mark.
    """

    def __init__(self, path, kernels):
        self.kernels = kernels
        self.path, self.mark = path, f"BUNDLER_TEST_MARK={path}".encode()
        for name, text in RECIPES.items():
            (path / name).write_text(text)
        (path / "t").mkdir()

    def start(self, *words, launcher=(), **environment):
        """Start `build` of the examples, in a session of its own, so that Ctrl-C reaches what a
        terminal's would.
        """
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("TRITON_", "RAY_"))}
        clean |= {
            "BUNDLER_TEST_MARK": str(self.path),
            "TMPDIR": str(self.path / "t"),
            "HOME": str(self.path),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        if launcher:
            command = [*launcher, "bundler"]
        else:
            command = [sys.executable, "-W", "ignore", "-m", "bundler"]
        with open(self.path / "out", "wb") as out, open(self.path / "err", "wb") as err:
            return subprocess.Popen(
                [*command, "build", str(self.kernels), *TARGETS, *map(str, words), "--json"],
                cwd=self.path,
                env=clean | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def finish(self, process, status=0):
        """Wait for the command; returns what it printed."""
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        said = (self.path / "err").read_text()[-4000:]
        assert process.returncode == status, said
        printed = re.search(
            r"^\{$.*^\}$", (self.path / "out").read_text(), re.MULTILINE | re.DOTALL
        )
        return json.loads(printed[0]) if printed else {}

    def processes(self):
        """Return the numbers of the processes that are left of what was started here."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def compiling(self):
        """Return the numbers of an engine's workers that have begun to compile."""
        workers = set()
        for number in self.processes():
            with contextlib.suppress(OSError):
                if SERVER in Path(f"/proc/{number}/cmdline").read_bytes():
                    status = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                    workers.add(int(status[1]))
        return workers - {1}

    def jobs(self):
        """Return how many directories of compiles there are."""
        return len(list((self.path / "t").glob("triton-bundler-engine-*/*")))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The examples at one place for all builds: IR has the path of its source."""
    examples = Path(bundler.__file__).parent / "cli" / "demo_kernels.py"
    return shutil.copy(examples, tmp_path_factory.mktemp("kernels") / "kernels.py")


@pytest.fixture
def place(kernels):
    """A directory to build in; nothing that was started in it is left after the test."""
    # Ray has sockets in it, whose paths may have 107 bytes.
    made = Place(Path(tempfile.mkdtemp(prefix="engines-", dir="/tmp")), kernels)
    yield made
    for number in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    shutil.rmtree(made.path, ignore_errors=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory, kernels):
    """The digest of the bundle that this machine's own processes build."""
    made = Place(tmp_path_factory.mktemp("local"), kernels)
    return made.finish(made.start("-o", "local.tbundle"))["digest"]


@pytest.mark.parametrize("module", [DASK, RAY])
def test_an_engine_builds_the_same_bundle_although_a_worker_is_killed(place, local, module):
    """Kernels for NVIDIA and AMD, by one command; a worker is killed on the way."""
    process = place.start("-o", "built.tbundle", "--executor", f"{module}:executor")
    until(lambda: place.jobs() or process.poll() is not None)
    victim = min(place.compiling())
    os.kill(victim, signal.SIGKILL)
    answer = place.finish(process)
    assert answer["digest"] == local
    assert not answer["failures"]
    assert len(answer["compiled"]) == 22
    until(lambda: not place.processes())
    assert not list((place.path / "t").glob("triton-bundler-client-*"))


mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None
    or not shutil.which("mpiexec", path=str(Path(sys.executable).parent)),
    reason="mpi4py with mpiexec is not installed: pip install mpi4py mpich",
)


def ranks(count):
    return (
        Path(sys.executable).parent / "mpiexec",
        "-n",
        str(count),
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mpi4py.futures",
        "-m",
    )


@mpi
def test_two_ranks_of_mpi_build_the_same_bundle(place, local):
    """One rank gives out the work and two do it."""
    answer = place.finish(
        place.start("-o", "built.tbundle", "--executor", "mpi_ranks:executor", launcher=ranks(3))
    )
    assert answer["digest"] == local
    until(lambda: not place.processes())


@mpi
def test_a_rank_that_is_lost_ends_all_and_the_next_build_goes_on(place, local):
    """MPI ends every rank; what was compiled is in the store, and the same command compiles what is
    missing.
    """
    words = (
        "-o",
        "built.tbundle",
        "--executor",
        "mpi_ranks:executor",
        "--store",
        place.path / "store",
    )
    process = place.start(*words, launcher=ranks(3))
    until(
        lambda: (
            len(list((place.path / "store").rglob("v*/k/**/*"))) > 4 or process.poll() is not None
        )
    )
    os.kill(min(place.compiling()), signal.SIGKILL)
    process.wait(LIMIT_S)
    assert process.returncode != 0
    until(lambda: not place.processes())
    answer = place.finish(place.start(*words, launcher=ranks(3)))
    assert answer["digest"] == local
    assert answer["reused"]
    assert len(answer["compiled"]) + len(answer["reused"]) == 22


@pytest.mark.parametrize("module", [DASK])
def test_workers_publish_into_the_store(place, local, module):
    """With a store, kernels go there from the workers, and the next build compiles nothing."""
    words = (
        "-o",
        "built.tbundle",
        "--executor",
        f"{module}:executor",
        "--store",
        place.path / "store",
    )
    first = place.finish(place.start(*words))
    assert first["digest"] == local
    assert not first["unsent"]
    second = place.finish(place.start(*words))
    assert second["digest"] == local
    assert not second["compiled"]
    assert len(second["reused"]) == 22


@pytest.mark.parametrize("module", [DASK, RAY])
def test_ctrl_c_leaves_nothing_running(place, module):
    """Neither the engine that the command's function started, nor a compile, nor a file."""
    process = place.start("-o", "built.tbundle", "--executor", f"{module}:executor")
    until(lambda: place.jobs() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT_S) == 130, (place.path / "err").read_text()[-4000:]
    until(lambda: not place.processes())
    assert not (place.path / "built.tbundle").exists()
    assert not list((place.path / "t").glob("triton-bundler-client-*"))


class Cluster:
    """A scheduler and two workers of Dask that are somebody else's."""

    def __init__(self, place):
        self.place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.begin()

    def _start(self, program, *words):
        environment = os.environ | {
            "BUNDLER_TEST_MARK": str(self.place.path),
            "TMPDIR": str(self.place.path / "t"),
        }
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                f"distributed.cli.{program}",
                *words,
                "--no-dashboard",
            ],
            cwd=self.place.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def begin(self):
        """Start the scheduler at the same address as before, and workers."""
        port = self.address.rpartition(":")[2]
        self.scheduler = self._start("dask_scheduler", "--host", "127.0.0.1", "--port", port)
        self.workers = self._start(
            "dask_worker",
            self.address,
            "--nworkers",
            "2",
            "--nthreads",
            "1",
            "--local-directory",
            str(self.place.path / "t"),
            "--host",
            "127.0.0.1",
            "--death-timeout",
            "60",
        )

    def end(self):
        for process in (self.scheduler, self.workers):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(place):
    """A cluster that is there before the build."""
    pytest.importorskip("distributed", reason="distributed not installed: pip install distributed")
    made = Cluster(place)
    yield made
    made.end()


def test_a_scheduler_that_is_started_again_gets_the_rest(place, local, cluster):
    """The client connects again, and what was not done is given out anew."""
    process = place.start(
        "-o", "built.tbundle", "--executor", "dask_cluster:executor", DASK_SCHEDULER=cluster.address
    )
    until(lambda: place.jobs() or process.poll() is not None)
    cluster.end()
    time.sleep(1)
    cluster.begin()
    answer = place.finish(process)
    assert answer["digest"] == local
    assert not answer["failures"]


def test_a_scheduler_that_is_lost_is_reported_for_each_kernel(place, cluster):
    """By name, with what the engine says; nothing is written."""
    process = place.start(
        "-o",
        "built.tbundle",
        "--executor",
        "dask_cluster:executor",
        DASK_SCHEDULER=cluster.address,
        DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="3s",
    )
    until(lambda: place.jobs() or process.poll() is not None)
    cluster.end()
    answer = place.finish(process, status=1)
    assert answer["path"] is None
    assert not (place.path / "built.tbundle").exists()
    assert {failure["name"] for failure in answer["failures"]} >= {
        "matmul_kernel",
        "softmax_kernel",
    }
    assert all("its worker was lost 2 times" in failure["reason"] for failure in answer["failures"])


LOST = """
import distributed
from bundler.compile.executor_pool import always_ending
async def lost(*_):
    raise OSError("the scheduler is gone")
if __name__ == "__main__":
    cluster = distributed.LocalCluster(1, processes=False, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        executor = always_ending(client.get_executor(retries=1))
        print(executor.submit(bytes, b"there").result())
        gather, client._gather = client._gather, lost
        print(executor.submit(bytes, b"gone").exception(20))
        client._gather, client.status = gather, "closing"
        print(executor.submit(bytes, b"dropped").exception(20))
        client.status = "running"
"""


def test_what_dask_loses_is_an_error(tmp_path):
    """A result that the client fetched when the scheduler ended, and a task for a client that
    closes; Dask's own executor has futures then that nothing ends.
    """
    pytest.importorskip("distributed", reason="distributed not installed: pip install distributed")
    (tmp_path / "program.py").write_text(LOST)
    command = [sys.executable, "-W", "ignore", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "b'there'\nthe scheduler is gone\nDask's client was closed\n", done.stderr


def test_a_cluster_of_somebody_else_stays_and_our_compiles_end(place, cluster):
    """After Ctrl-C no compile of the command is left; the cluster does the next build."""
    words = ("-o", "built.tbundle", "--executor", "dask_cluster:executor")
    process = place.start(*words, DASK_SCHEDULER=cluster.address)
    until(lambda: place.jobs() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    until(lambda: not place.jobs())
    until(lambda: not list((place.path / "t").glob("triton-bundler-client-*")))
    assert cluster.scheduler.poll() is None
    assert not place.finish(place.start(*words, DASK_SCHEDULER=cluster.address))["failures"]

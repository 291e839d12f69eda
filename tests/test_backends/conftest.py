# SPDX-License-Identifier: Apache-2.0
"""What the tests of byte stores share."""

import errno
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# The contract asserts like a test, so its failures should be explained like a test's.
pytest.register_assert_rewrite("bundler.backends.testing")

HERE = Path(__file__).parent

hypothesis.settings.register_profile(
    "backends", deadline=None, max_examples=40, stateful_step_count=30
)


def _load(name, folder=HERE):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


disk = _load("disk")
redis_server, redis_proxy = (
    _load(shared, HERE.parent) for shared in ("redis_server", "redis_proxy")
)
s3_server = _load("s3_server", HERE.parent)
azure_server = _load("azure_server", HERE.parent)
if importlib.util.find_spec("obstore"):
    _load("cloud_contract")


@pytest.fixture(scope="module", params=redis_server.NAMES)
def server(request):
    """A server from the repository's own files."""
    with redis_server.running(request.param) as started:
        yield started


@pytest.fixture
def admin(server):
    """The administrator of an empty server."""
    client = server.client()
    client.flushall()
    yield client
    client.flushall()


@pytest.fixture
def root(tmp_path):
    """Where a store may be; not there yet."""
    return tmp_path / "store"


@pytest.fixture
def local(root):
    """A store in a directory."""
    from bundler.backends.local import LocalBackend

    with LocalBackend(str(root)) as backend:
        yield backend


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes a function of `os` fail: with an errno, for paths with a text in
    them, so often.
    """

    def arrange(name, number, where="", times=None):
        real, left = getattr(os, name), [times]

        def call(path, *args, **kwargs):
            if left[0] != 0 and where in str(path):
                left[0] = None if left[0] is None else left[0] - 1
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, name, call)
        return left

    return arrange


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a small file system in memory, or skips aloud where that is not
    permitted.
    """
    places = []

    def mount(name, *options):
        place = tmp_path / name
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def read_only(mounted):
    """Return a function that fills a store and then makes its file system read-only; the
    directory's path.
    """

    def prepare(fill):
        place = mounted("read-only", "size=8m", "mode=755")
        fill(str(place / "store"))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        return str(place / "store")

    return prepare


@pytest.fixture
def workers():
    """Return a function that starts a worker process; what still runs at the end is killed."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-P", str(HERE / "worker.py"), *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


# Errors by what they mean, for parametrized tests.
FULL = [errno.ENOSPC, errno.EDQUOT]
DENIED = [errno.EACCES, errno.EPERM, errno.EROFS]

# SPDX-License-Identifier: Apache-2.0
"""A small registry, a bundle to push, and keys."""

import base64
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from bundler import SigningKey
from bundler.trust.trusted_keys import TrustedKey, write_key

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "data" / "v2.0"


def _load(name):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


registry_server = _load("registry_server")


class Setting(NamedTuple):
    """Alice, whom everybody here trusts, and how to ask for signatures."""

    alice: SigningKey
    mallory: SigningKey
    monkeypatch: pytest.MonkeyPatch

    def require(self):
        """From now on signatures are required."""
        self.monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")


@pytest.fixture(autouse=True)
def setting(tmp_path, monkeypatch):
    """Nothing of the user's is read: no credentials, no keys, no proxies, no caches."""
    for name in (
        "REGISTRY_AUTH_FILE",
        "XDG_RUNTIME_DIR",
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))
    made = Setting(SigningKey(b"a" * 32), SigningKey(b"m" * 32), monkeypatch)
    write_key(
        tmp_path / "keys", "alice", TrustedKey(key=base64.b64encode(made.alice.public).decode())
    )
    return made


@pytest.fixture
def bundle_path(tmp_path):
    """A bundle file of four kernels."""
    return Path(shutil.copy(GOLDEN / "triton-3.7.1.tbundle", tmp_path / "model.tbundle"))


@pytest.fixture
def registry():
    """A registry that lists referrers."""
    with registry_server.SmallRegistry().serving() as server:
        yield server


@pytest.fixture
def log_in(tmp_path):
    """Write what docker login writes."""

    def write(host, user, password):
        folder = tmp_path / "docker"
        folder.mkdir(exist_ok=True)
        auth = base64.b64encode(f"{user}:{password}".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))

    return write

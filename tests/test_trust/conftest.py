# SPDX-License-Identifier: Apache-2.0
"""A key, folders of trusted keys, bundles and stores to sign."""

import base64
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import bundler
from bundler import SignaturePolicy, SigningKey
from bundler.trust.trusted_keys import TrustedKey, write_key

GOLDEN = Path(__file__).parents[1] / "data" / "v2.0"


class Signers(NamedTuple):
    """Alice, whom the folder trusts, and Mallory, whom nobody does."""

    folder: Path
    alice: SigningKey
    mallory: SigningKey

    def trust(self, key=None, name="alice", **scope):
        """Trust a key, Alice's unless another is given, within a scope."""
        public = (key or self.alice).public
        write_key(self.folder, name, TrustedKey(key=base64.b64encode(public).decode(), **scope))

    def policy(self, **demands):
        """Return the policy over the folder as it is now."""
        return SignaturePolicy.load(self.folder, **demands)


@pytest.fixture
def signers(tmp_path, monkeypatch):
    """The environment names the folder, and asks for nothing."""
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    made = Signers(tmp_path / "keys", SigningKey(b"a" * 32), SigningKey(b"m" * 32))
    made.trust()
    return made


@pytest.fixture
def kernels(tmp_path):
    """A bundle file of kernels alone."""
    return Path(shutil.copy(GOLDEN / "triton-3.7.1.tbundle", tmp_path / "kernels.tbundle"))


@pytest.fixture
def code(tmp_path):
    """A bundle file that also has what runs on the CPU."""
    return Path(shutil.copy(GOLDEN / "synthetic.tbundle", tmp_path / "code.tbundle"))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in a directory."""
    with bundler.open_store(str(tmp_path / "store")) as opened:
        yield opened


@pytest.fixture(scope="session")
def minisign_program(debian_program):
    """The program minisign."""
    return debian_program("minisign", "minisign")

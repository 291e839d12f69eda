# SPDX-License-Identifier: Apache-2.0
"""The contract against Azurite, Microsoft's emulator of Azure Blob Storage, where its program is
installed.
"""

import azure_server
import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")
from cloud_contract import CloudContract, connections_end  # noqa: F401  # a fixture

from bundler.backends.backend_errors import BackendDenied, BackendUnavailable
from bundler.backends.cloud import CloudBackend, connect, parse_url
from bundler.store.store_layout import encode_object
from bundler.store.store_urls import open_backend

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint():
    """The address of the server."""
    with azure_server.running() as endpoint:
        yield endpoint


@pytest.fixture
def azure(endpoint, monkeypatch):
    """The URL of a store in a new container."""
    for name, value in azure_server.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"az://{azure_server.make_container(endpoint)}/some/prefix"


def plain(url):
    """Open a store without guard, which marks each use at once."""
    return CloudBackend(connect(parse_url(url), url), touch_every_s=0)


class TestAzure(CloudContract):
    """The contract, for Azure Blob Storage."""

    clock_step_s = 0.02

    @pytest.fixture
    def backend(self, azure):
        """An empty container."""
        backend = plain(azure)
        yield backend
        # pytest holds the backend for longer, and with it its connections, which Azurite leaves
        # open.
        backend._bucket = None


def test_a_store_by_its_url(azure):
    """Objects and refs come back by the URL alone."""
    with open_backend([azure])[0] as backend:
        assert backend.put({"a": encode_object(b"1")}) == {"a"}
        assert backend.swap_ref("t", None, b"1")
        assert not backend.swap_ref("t", None, b"2")
    with open_backend([azure])[0] as backend:
        assert (backend.get(["a"]), backend.read_ref("t")) == ({"a": encode_object(b"1")}, b"1")


def test_a_missing_container_and_a_wrong_key_are_said_to_be_that(azure, monkeypatch):
    """Both are typed errors, and never an empty store; the key is not printed."""
    with pytest.raises(BackendUnavailable, match="no such bucket"):
        plain("az://there-is-none/prefix").get(["a"])
    wrong = "d3Jvbmctd3Jvbmctd3Jvbmc="
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    with pytest.raises(BackendDenied) as raised:
        plain(azure).get(["a"])
    assert wrong not in str(raised.value)

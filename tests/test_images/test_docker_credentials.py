# SPDX-License-Identifier: Apache-2.0
"""Credentials are found where docker and podman keep them."""

import base64
import json

import pytest

from bundler.backends.oci import parse_image_url
from bundler.backends.oci.docker_credentials import Credentials, find_credentials

HOST = "registry.example:5000"


def auth(user, password="hush"):
    """Return an entry as both write it."""
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def write(tmp_path):
    """Write docker's file."""

    def written(auths, folder="docker", name="config.json"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(json.dumps({"auths": auths}))

    return written


def test_nobody_logged_in():
    """Without a file, or an entry, there are none."""
    assert find_credentials(HOST, "team/kernels") is None


@pytest.mark.parametrize(
    "name", [HOST, f"https://{HOST}", f"https://{HOST}/v2/", f"{HOST}/team", f"{HOST}/team/kernels"]
)
def test_an_entry_is_found_by_host_or_path(name, write):
    """podman logs in to a part of a registry, too; the longest that fits counts."""
    write({name: auth("alice"), "other.example": auth("bob"), f"{HOST}/team/kernel": auth("bob")})
    assert find_credentials(HOST, "team/kernels") == Credentials("alice", "hush")


def test_dockers_hub_has_an_address_of_its_own(write):
    """What docker login writes without a host."""
    write({"https://index.docker.io/v1/": auth("alice")})
    url = parse_image_url("oci://docker.io/team/kernels")
    assert find_credentials(url.host, url.repository) == Credentials("alice", "hush")


def test_the_file_that_the_environment_names_goes_first(write, tmp_path, monkeypatch):
    """Then docker's, then podman's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    write({HOST: auth("carol")}, "run/containers", "auth.json")
    assert find_credentials(HOST, "a") == Credentials("carol", "hush")
    write({HOST: auth("bob")})
    assert find_credentials(HOST, "a") == Credentials("bob", "hush")
    write({HOST: auth("alice")}, "given", "auth.json")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "given" / "auth.json"))
    assert find_credentials(HOST, "a") == Credentials("alice", "hush")


def test_an_identity_token_is_kept_as_one(write):
    """Some registries give one in place of a password."""
    write({HOST: {"identitytoken": "t0k3n"}})
    assert find_credentials(HOST, "a") == Credentials(identity_token="t0k3n")


def test_a_repr_shows_no_secret():
    """Credentials land in a traceback's locals."""
    assert "hush" not in repr(Credentials("alice", "hush", "hush"))

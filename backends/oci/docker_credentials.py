# SPDX-License-Identifier: Apache-2.0
"""`find_credentials`: user and password for a registry, from the files that `docker login` and
`podman login` write.

Read are `$REGISTRY_AUTH_FILE`, `$DOCKER_CONFIG/config.json` (or `~/.docker/config.json`) and
`$XDG_RUNTIME_DIR/containers/auth.json`, in this order; `credHelpers` and `credsStore` in them name
a program of the user's, `docker-credential-NAME`, which is asked as docker asks it.

`registry.py` is the caller.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from bundler.backends.backend_errors import BackendDenied, BadSettings

MAX_FILE_BYTES = 1 << 20
HELPER_S = 10.0
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DOCKER_HOST, _DOCKER_KEY = "registry-1.docker.io", "https://index.docker.io/v1/"
# What a helper answers for a registry that it knows nothing of.
_UNKNOWN = "credentials not found"
_TOKEN_USER = "<token>"  # noqa: S105  # what helpers call the user of a token


@dataclass(frozen=True)
class Credentials:
    """Who we are at a registry; its repr shows no secret.

    Attributes:
        user, password: for HTTP's basic scheme.
        identity_token: in their place, to get tokens with.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of the header `Authorization`."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be printed."""
        return tuple(
            filter(None, (self.password, self.identity_token, self.basic[6:] if self.user else ""))
        )


class _Auth(msgspec.Struct, rename={"identity_token": "identitytoken"}):
    auth: str = ""
    username: str = ""
    password: str = ""
    identity_token: str = ""


class _File(msgspec.Struct, rename={"helper": "credsStore", "helpers": "credHelpers"}):
    auths: dict[str, _Auth] = {}
    helper: str = ""
    helpers: dict[str, str] = {}


class _HelperAnswer(msgspec.Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


def find_credentials(host: str, repository: str) -> Credentials | None:
    """Return the credentials of a repository; None where no file has any.

    Raises:
        BadSettings: a file cannot be read, or is no such file.
        BackendDenied: a helper failed.
    """
    for path in _files():
        found = _in_file(path, host, repository)
        if found is not None:
            return found
    return None


def _files() -> Iterator[str]:
    given = os.environ.get("REGISTRY_AUTH_FILE")
    if given:
        yield given
    docker = os.environ.get("DOCKER_CONFIG") or os.path.join(os.path.expanduser("~"), ".docker")
    yield os.path.join(docker, "config.json")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield os.path.join(runtime, "containers", "auth.json")


def _in_file(path: str, host: str, repository: str) -> Credentials | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadSettings(
            f"{path}: {error.strerror}; it should hold the credentials of {host}"
        ) from error
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes")
        content = msgspec.json.decode(data, type=_File) if data.strip() else _File()
    except (msgspec.DecodeError, ValueError):
        # Not `from error`: its text may quote what must not be printed.
        raise BadSettings(
            f"{path}: is no file of credentials; run docker login {host} again"
        ) from None
    helper = content.helpers.get(host) or content.helper
    if helper:
        return _asked(helper, host)
    entry = next(
        (content.auths[name] for name in _names(host, repository) if name in content.auths), None
    )
    return None if entry is None else _decoded(entry, path, host)


def _names(host: str, repository: str) -> Iterator[str]:
    """Yield what a repository may be called in `auths`: the longest first."""
    parts = repository.split("/")
    yield from ("/".join((host, *parts[:length])) for length in range(len(parts), -1, -1))
    yield from (f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/", f"http://{host}")
    if host == _DOCKER_HOST:
        yield from (_DOCKER_KEY, "docker.io")


def _decoded(entry: _Auth, path: str, host: str) -> Credentials | None:
    if entry.identity_token:
        return Credentials(identity_token=entry.identity_token)
    user, password = entry.username, entry.password
    if entry.auth:
        try:
            user, _, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise BadSettings(
                f"{path}: the entry of {host} is damaged; run docker login {host} again"
            ) from None
    return Credentials(user, password) if user else None


def _asked(helper: str, host: str) -> Credentials | None:
    if not _HELPER_NAME.fullmatch(helper):
        raise BadSettings(
            f"{helper!r:.80}: is no name of a credential helper; correct credHelpers or credsStore"
        )
    program = f"docker-credential-{helper}"
    server = _DOCKER_KEY if host == _DOCKER_HOST else host
    try:
        done = subprocess.run(
            [program, "get"],
            input=server,
            capture_output=True,
            text=True,
            timeout=HELPER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendDenied(
            f"{program}: {type(error).__name__}; it should give the credentials of {host}"
        ) from None
    if done.returncode:
        if _UNKNOWN in done.stdout or _UNKNOWN in done.stderr:
            return None
        raise BackendDenied(
            f"{program}: ended with status {done.returncode} for {host}; log in again"
        )
    try:
        answer = msgspec.json.decode(done.stdout.encode(), type=_HelperAnswer)
    except msgspec.DecodeError:
        raise BackendDenied(
            f"{program}: answered something other than credentials for {host}"
        ) from None
    if answer.username == _TOKEN_USER:
        return Credentials(identity_token=answer.secret)
    return Credentials(answer.username, answer.secret) if answer.username else None

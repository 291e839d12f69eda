# SPDX-License-Identifier: Apache-2.0
"""Images: manifests and blobs in a registry of containers, or in a directory of the same layout.

`open_image_place` opens the one that a URL names, `shown_image_url` says what may be printed of it,
`SCHEMES` are those that mean one.  It is not a byte store: a registry has no compare-and-set and no
listing of blobs, so tags are last-writer-wins.

Nothing but the standard library is needed.  The package `oras` was looked at and not used: its
requests have no timeout, its retries take minutes, and it compares no digest of what it downloads
(`docs/oci.md`).

::

    oci://registry[:port]/repository[:tag][@sha256:<64
    hex>][?timeout_s=30&plain_http=1&ca_file=/etc/ca.pem]
    oci-dir:/absolute/directory[:tag][@sha256:<64 hex>]

`parse_image_url` gives the `ImageUrl` of such a URL.  Credentials are not in it: they come from the
files that `docker login` and `podman login` write (`docker_credentials.py`).

`bundler/images/image_manifests.py` is the caller.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from bundler.backends.backend_errors import BadSettings
from bundler.backends.oci.image_port import ImagePlace
from bundler.backends.url_parts import seconds

DIRECTORY_SCHEME = "oci-dir"
SCHEMES = frozenset({"oci", DIRECTORY_SCHEME})
DEFAULT_TAG = "latest"
MAX_REPOSITORY = 255
_REPOSITORY = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
)
_YES_NO = {"1": True, "0": False}
_EXPECTED = (
    "expected oci://registry/repository:tag, with @sha256:… for one manifest, and"
    " ?timeout_s=SECONDS, plain_http=1, ca_file=FILE; or oci-dir:/directory:tag"
)
# The name that people write, and the host that answers.
_DOCKER_HUB, _DOCKER_HOST = frozenset({"docker.io", "index.docker.io"}), "registry-1.docker.io"


@dataclass(frozen=True)
class ImageUrl:
    """Which image is meant.

    Attributes:
        shown: the place without tag, digest and settings: what messages and signed statements call
            it.
        host: of the registry, with its port; empty for a directory.
        repository: its name in the registry.
        directory: the directory; empty for a registry.
        tag: what it is called there; empty where only the digest was given.
        digest: `sha256:` and 64 hexadecimal digits; empty where only a tag was given.
        timeout_s: for how long the registry may be silent; a whole pull or push ends after three
            times that and the time of its bytes.
        plain_http: without TLS.
        ca_file: certificates that the registry's is checked with, beside none of the system's;
            empty for the system's.
    """

    shown: str
    host: str = ""
    repository: str = ""
    directory: str = ""
    tag: str = ""
    digest: str = ""
    timeout_s: float = 15.0
    plain_http: bool = False
    ca_file: str = ""

    @property
    def reference(self) -> str:
        """What manifests are asked for by: the digest where one is known, else the tag."""
        return self.digest or self.tag

    @property
    def full(self) -> str:
        """The place with tag and digest, for messages."""
        tag = f":{self.tag}" if self.tag else ""
        return self.shown + tag + (f"@{self.digest}" if self.digest else "")


def parse_image_url(url: str) -> ImageUrl:
    """Return which image a URL means.

    Raises:
        BadSettings: not such a URL, credentials in it, or an unknown setting; the message holds no
            secret.
    """
    shown = shown_image_url(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadSettings(f"{shown}: {error}; {_EXPECTED}") from error
    if parts.scheme == DIRECTORY_SCHEME:
        return _directory(url.partition(":")[2], shown)
    if parts.scheme != "oci" or parts.fragment:
        raise BadSettings(f"{shown}: {_EXPECTED}")
    if "@" in parts.netloc:
        raise BadSettings(
            f"{shown}: holds user or password; run docker login or podman login, which keep them in"
            " a file"
        )
    if not _HOST.fullmatch(parts.netloc):
        raise BadSettings(f"{shown}: {parts.netloc!r:.80} is no host; {_EXPECTED}")
    path, tag, digest = _split(parts.path.lstrip("/"), shown)
    host = parts.netloc
    if host in _DOCKER_HUB:
        host, path = _DOCKER_HOST, path if "/" in path else f"library/{path}"
    if not _REPOSITORY.fullmatch(path) or len(path) > MAX_REPOSITORY:
        raise BadSettings(
            f"{shown}: {path!r:.80} is no repository: lower case letters, digits, '.', '_', '-'"
            " and '/'"
        )
    return ImageUrl(
        f"oci://{parts.netloc}/{path}", host, path, "", tag, digest, **_settings(parts.query, shown)
    )


def shown_image_url(url: str) -> str:
    """Return a URL without what may be secret: user, password and settings."""
    scheme, colon, rest = url.partition(":")
    if scheme == DIRECTORY_SCHEME:
        return url
    place, slash, path = rest.removeprefix("//").partition("?")[0].partition("/")
    return f"{scheme}{colon}//{place.rpartition('@')[2]}{slash}{path}"


def _directory(rest: str, shown: str) -> ImageUrl:
    path, tag, digest = _split(rest, shown)
    # Three slashes are as good as one, as with file:.
    path = os.path.normpath(f"/{path.lstrip('/')}") if path.startswith("/") else ""
    if not path or "\0" in path:
        raise BadSettings(f"{shown}: {_EXPECTED}")
    return ImageUrl(f"{DIRECTORY_SCHEME}:{path}", directory=path, tag=tag, digest=digest)


def _split(text: str, shown: str) -> tuple[str, str, str]:
    """Return what stands before the tag, the tag and the digest."""
    text, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise BadSettings(
            f"{shown}: {digest!r:.90} is no digest; expected sha256: and 64 hexadecimal digits"
        )
    folder, slash, last = text.rpartition("/")
    name, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise BadSettings(
            f"{shown}: {tag!r:.140} is no tag: up to 128 letters, digits, '_', '.', '-'"
        )
    return f"{folder}{slash}{name}", tag or ("" if digest else DEFAULT_TAG), digest


def _settings(query: str, shown: str) -> dict[str, Any]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    found: dict[str, Any] = {}
    for name, text in given.items():
        if name == "timeout_s":
            found[name] = seconds(shown, name, text)
        elif name == "plain_http" and text in _YES_NO:
            found[name] = _YES_NO[text]
        elif name == "ca_file" and text:
            found[name] = text
        else:
            raise BadSettings(f"{shown}: unknown setting or value of {name!r:.40}; {_EXPECTED}")
    return found


def open_image_place(url: ImageUrl, *, make: bool = False) -> ImagePlace:
    """Open the registry or the directory that a URL names; nothing is sent yet.

    Args:
        url: where.
        make: make a directory that is not there.

    Raises:
        NotThere: there is no such directory.
        BackendDenied, BackendUnavailable, BadSettings: it cannot be opened, or the file of
            credentials cannot be read.
    """
    if url.directory:
        from bundler.backends.oci.image_directory import ImageDirectory

        return ImageDirectory(url.directory, url.shown, make=make)
    from bundler.backends.oci.registry import Registry

    return Registry(url)

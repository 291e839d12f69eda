# SPDX-License-Identifier: Apache-2.0
"""`open_bundle`, `open_bundle_file`: a bundle by what a user calls it: the path of a file,
`oci://…`, `oci-dir:…` or `hf+file:///…`.

Commands that read a bundle call it in place of `Bundle.load`.

Bundles beside a model are in a folder as `huggingface_hub.snapshot_download` leaves it:
`bundles/*.tbundle` and `bundles/index.json`.

::

    {
        "version": 1,
        "bundles": [
            {
                "name": "llama3/h200",
                "file": "llama3-h200.tbundle",
                "sha256": "<64 hex>",
                "size": 1234,
                "digest": "sha256:<64 hex>",
                "targets": ["cuda:90"],
            }
        ],
    }

`open_snapshot_bundle` finds the file that a URL `hf+file:///folder#name` means, and compares it with
the index; `add_to_snapshot` writes both.  Nothing is downloaded here.  Files of a snapshot are
symbolic links into the cache of Hugging Face, so links are followed.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec

from bundler.errors import ConfigError, DigestMismatch, FormatError, NotFound, UnsupportedVersion
from bundler.format import names
from bundler.format.bundle import Bundle, require_content
from bundler.format.bundle_file import (
    open_regular,
    os_errors,
    read_regular,
    replace_content,
    replace_file,
)
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.images.image_manifests import is_image_url


@contextmanager
def open_bundle(source: str | os.PathLike[str]) -> Iterator[Bundle]:
    """Open a bundle until the block ends; raises as `Bundle.load`, `open_image` or
    `open_snapshot_bundle`.
    """
    with open_bundle_file(source) as (bundle, _):
        yield bundle


@contextmanager
def open_bundle_file(source: str | os.PathLike[str]) -> Iterator[tuple[Bundle, str]]:
    """Open a bundle as `open_bundle` does, and tell which file it is in until the block ends."""
    text = os.fspath(source)
    if is_snapshot_url(text):
        with open_snapshot_bundle(text) as found:
            yield found
    # A file may be called so, too: what is there goes first.
    elif is_image_url(text) and not os.path.lexists(text):
        from bundler.images.image_pull import open_image

        with open_image(text) as (bundle, path, _):
            yield bundle, path
    else:
        with _loaded(text) as bundle:
            yield bundle, text


def _loaded(path: str) -> Bundle:
    """Open a file; what is wrong with it is said with its name, since a command may have been given
    several.
    """
    try:
        return Bundle.load(path)
    except (FormatError, DigestMismatch) as error:
        if path in error.message:
            raise
        raise type(error)(f"{path}: {error.message}", **{"path": path, **error.facts}) from error


SCHEME = "hf+file"
FOLDER, INDEX_NAME = "bundles", "index.json"
INDEX_BYTES = 4 << 20
VERSION = 1
_EXPECTED = f"expected {SCHEME}:///folder, or {SCHEME}:///folder#name where it has several bundles"
_SHOWN = 6
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class SnapshotRow(msgspec.Struct, frozen=True):
    """One bundle of a snapshot.

    Attributes:
        name: what people call it.
        file: its file in `bundles/`.
        sha256: of the file.
        size: of the file, in bytes.
        digest: of the bundle.
        targets: of its kernels.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    file: str
    sha256: _Hex
    size: Annotated[int, msgspec.Meta(ge=0)]
    digest: str = ""
    targets: tuple[str, ...] = ()


class _Version(msgspec.Struct):
    version: int


class SnapshotIndex(msgspec.Struct, frozen=True):
    """What `bundles/index.json` says."""

    bundles: tuple[SnapshotRow, ...] = ()
    version: int = VERSION


def is_snapshot_url(text: str) -> bool:
    """Whether a text is meant as the URL of a bundle in a snapshot."""
    return text.startswith(f"{SCHEME}:")


@contextmanager
def open_snapshot_bundle(url: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[Bundle, str]]:
    """Open the bundle that a URL means, until the block ends; and tell its file.

    Raises:
        ConfigError: not such a URL, or it does not say which of several bundles.
        NotFound, AccessDenied: there is no such folder, index or bundle.
        FormatError, UnsupportedVersion, UnsafeName, LimitExceeded: the index or the bundle cannot
            be read.
        DigestMismatch: the file is not the one of the index; download it again.
    """
    folder, name = _parsed(url)
    row = _chosen(read_index(folder), name, url)
    path = os.path.join(folder, FOLDER, names.check_file_name(row.file))
    with os_errors(path, "read"), open(open_regular(path), "rb") as file:
        _compare(file, row, path)
        # What was compared is what is read, whatever is at the path by now, where the system can
        # open an open file again.
        held = f"/proc/self/fd/{file.fileno()}"
        with Bundle.load(held if os.path.exists(held) else path, limits) as bundle:
            yield bundle, path


def add_to_snapshot(
    bundle_path: str | os.PathLike[str], folder: str | os.PathLike[str], name: str
) -> SnapshotRow:
    """Copy a bundle file into the folder of a model, and list it in the index; one of that name is
    replaced.

    Raises:
        NotFound, AccessDenied, FormatError, DigestMismatch: the bundle or the index cannot be read.
        EmptyBundle: there is nothing in it.
        StoreFull: no space is left.
    """
    root = os.fspath(folder)
    with Bundle.load(bundle_path) as bundle:
        require_content(bundle, "nothing was written")
        digest = bundle.digest
        targets = tuple(sorted({str(kernel.target) for kernel in bundle.kernels}))
    with os_errors(root, "write"):
        os.makedirs(os.path.join(root, FOLDER), exist_ok=True)
    # Named by its content, so that a reader of the index of before finds the file of before.
    file = f"{digest.removeprefix('sha256:')[:32]}.tbundle"
    path = os.path.join(root, FOLDER, file)
    with os_errors(bundle_path, "read"), open(open_regular(bundle_path), "rb") as source:
        replace_file(path, lambda out: shutil.copyfileobj(source, out))
    with open(path, "rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
        size = os.fstat(written.fileno()).st_size
    row = SnapshotRow(name, file, found, size, digest, targets)
    try:
        before = read_index(root).bundles
    except NotFound:
        before = ()
    rows = sorted([*(one for one in before if one.name != name), row], key=lambda one: one.name)
    text = msgspec.json.format(msgspec.json.encode(SnapshotIndex(tuple(rows))), indent=2)
    replace_content(os.path.join(root, FOLDER, INDEX_NAME), text + b"\n")
    return row


def read_index(folder: str) -> SnapshotIndex:
    """Read the index of a folder; raises `NotFound`, `AccessDenied`, `FormatError`,
    `UnsupportedVersion`, `LimitExceeded`.
    """
    path = os.path.join(folder, FOLDER, INDEX_NAME)
    with os_errors(path, "read"):
        data = read_regular(path, INDEX_BYTES)
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise UnsupportedVersion(
                f"{path}: version {version}, expected {VERSION}; read it with a newer release"
            )
        return msgspec.json.decode(data, type=SnapshotIndex)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}: {error}; expected an index of bundles") from error


def _parsed(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    path = unquote(parts.path)
    here = parts.scheme == SCHEME and parts.netloc in {"", "localhost"}
    if not here or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{url!r:.200}: {_EXPECTED}", url=url)
    return path, unquote(parts.fragment)


def _chosen(index: SnapshotIndex, name: str, url: str) -> SnapshotRow:
    found = [row for row in index.bundles if row.name == name or not name]
    listed = ", ".join(row.name for row in index.bundles[:_SHOWN]) or "none"
    if not found:
        raise NotFound(f"{url}: there is no such bundle; the index lists {listed}", url=url)
    if len(found) > 1:
        raise ConfigError(
            f"{url}: the index lists {len(found)} bundles, {listed}; add #name", url=url
        )
    return found[0]


def _compare(file: io.BufferedReader, row: SnapshotRow, path: str) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != row.size or hashlib.file_digest(file, "sha256").hexdigest() != row.sha256:
        raise DigestMismatch(
            f"{path}: is not the file of the index ({size:,} bytes, expected {row.size:,});"
            " download it again",
            path=path,
        )

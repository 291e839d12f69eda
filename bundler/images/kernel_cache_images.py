# SPDX-License-Identifier: Apache-2.0
"""Images as MCV makes and reads them, which GKM and KServe mount: `cache_files` lays out a bundle,
`image_config` describes it, `unpack_image` reads one.

The layout is that of MCV's `spec-compat.md`: labels `cache.triton.image/*` in the config, one
compressed layer.  Triton's group files name their members by absolute paths, so an image is made
for the place where its reader mounts it.

`write_layer` makes a layer, `unpack_layer` takes kernels out of one that anybody may have made: a
gzip-compressed tar archive with `io.triton.cache/<kernel key>/<file>` and
`io.triton.manifest/manifest.json`, as MCV of the GKM project defines it.  MCV extracts what a layer
says; `unpack_layer` first asks of each member whether it is a file or directory below the layer's
root and no larger than it may be.  A link, a device, a whiteout or a name that leads elsewhere
condemns the whole layer: no builder of such images writes one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from bundler.errors import BundlerError, DigestMismatch, FormatError, LimitExceeded, UnsafeName
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.metadata import parse_metadata
from bundler.format.sentinel import TRITON_DIR
from bundler.images.image_manifests import DOCKER_LAYER, OCI_LAYER, Manifest
from bundler.lifecycle.kernel_placement import localize, localized, planned, read

# Where GKM's examples mount a cache.
DEFAULT_ROOT = "/cache"
LABELS = "cache.triton.image"
SUMMARY = f"{LABELS}/summary"
FOREIGN_SUMMARY = "cache.vllm.image/summary"
# The third is of older images, which MCV reads still.
LAYERS = frozenset({DOCKER_LAYER, OCI_LAYER, "application/cache.triton.content.layer.v1+triton"})
CONFIG_BYTES = 4 << 20
# The name that images have for a machine.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NOWHERE = (
    "has a path of Triton's installation in it, and Triton is not installed here; give triton_dir"
)


class CacheFiles(Struct):
    """A bundle's kernels as files of a cache directory.

    Attributes:
        files: name in the layer -> bytes.
        entries: what `manifest.json` says of each kernel.
        left_out: (key or path, reason) of what is not among them.
    """

    files: dict[str, bytes | memoryview]
    entries: list[dict[str, Any]]
    left_out: list[tuple[str, str]]


class _Settings(msgspec.Struct, rename="pascal"):
    labels: dict[str, str] | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: tuple[str, ...] = ()


class _Config(msgspec.Struct):
    config: _Settings | None = None
    rootfs: _RootFiles | None = None


def cache_files(bundle: Bundle, root: str, triton_dir: str | None = None) -> CacheFiles:
    """Lay out the kernels and helper libraries of a bundle for a reader.

    Args:
        bundle: it.
        root: the cache directory, as the reader will see it.
        triton_dir: where Triton is installed there; None when that is not known, which leaves out
            kernels that have it in them.

    Raises:
        DigestMismatch, FormatError, NotFound: it is damaged.
    """
    made = CacheFiles({}, [], [])
    for kernel in sorted(bundle.kernels, key=lambda one: one.key):
        spans = [span for artifact in kernel.artifacts for span in artifact.spans]
        if triton_dir is None and any(span.place == TRITON_DIR for span in spans):
            made.left_out.append((kernel.key, _NOWHERE))
            continue
        placement = planned(kernel, "all")
        read(bundle.blobs, [placement])
        ready = localized(placement, root, triton_dir).verified()
        paths = {name: f"{root}/{kernel.key}/{name}" for name in ready.names}
        metadata = next(name for name in ready.names if name.endswith(".json"))
        group = json.dumps({"child_paths": paths}).encode()
        folder = f"{CACHE_FOLDER}/{kernel.key}"
        made.files |= {f"{folder}/{name}": data for name, data in ready.files}
        made.files[f"{folder}/{names.GROUP_PREFIX}{metadata}"] = group
        made.entries.append(_entry(parse_metadata(bytes(dict(ready.files)[metadata]))))
    for entry in bundle.helpers:
        made.files[f"{CACHE_FOLDER}/{entry.path}"] = localize(
            entry.artifact.spans, bundle.read(entry.artifact), root, triton_dir
        )
    made.left_out += [(one.path, "not a file of Triton's cache") for one in bundle.opaque]
    return made


def _entry(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what MCV's manifest says of a kernel; like it, nothing of a value that is 0 or
    false.
    """
    target = metadata["target"]
    optional = ("ptx_version", "num_stages", "num_warps", "debug")
    return {
        "hash": metadata["hash"],
        **{name: metadata[name] for name in optional if metadata.get(name)},
        "backend": target["backend"],
        "arch": str(target["arch"]),
        "warp_size": target["warp_size"],
    }


def layer_files(made: CacheFiles) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield the files of a layer, in its order."""
    yield from sorted(made.files.items())
    yield MANIFEST_FILE, json.dumps({"triton": made.entries}, indent=2).encode()


def labels_of(made: CacheFiles, cache_bytes: int, title: str) -> dict[str, str]:
    """Return the labels that MCV looks at, and the digest of the bundle."""
    targets = {(one["backend"], one["arch"], one["warp_size"]) for one in made.entries}
    summary = {
        "targets": [{"backend": b, "arch": a, "warp_size": w} for b, a, w in sorted(targets)]
    }
    return {
        f"{LABELS}/entry-count": str(len(made.entries)),
        SUMMARY: json.dumps(summary, separators=(",", ":")),
        f"{LABELS}/cache-size-bytes": str(cache_bytes),
        "org.opencontainers.image.title": title,
    }


def image_config(labels: Mapping[str, str], diff_id: str) -> bytes:
    """Return the config of an image; without a time, so that the same bundle is the same image."""
    return msgspec.json.encode(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Labels": dict(sorted(labels.items()))},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created_by": "triton-bundler"}],
        }
    )


def is_kernel_cache(manifest: Manifest) -> bool:
    """Whether an image may be one of MCV's: all layers are of the types that it reads."""
    return bool(manifest.layers) and all(layer.media_type in LAYERS for layer in manifest.layers)


def unpack_image(
    config: bytes, layers: Iterator[BinaryIO], folder: str, where: str, limits: Limits
) -> list[tuple[str, str]]:
    """Write the kernels of an image below a folder; each layer was compared with its digest
    already.

    Args:
        config: the image's.
        layers: its layers, compressed, in order.
        folder: an empty directory of ours.
        where: for messages.
        limits: how large it may be.

    Returns:
        (name, reason) of what was not taken, and of labels that are wrong.

    Raises:
        FormatError, LimitExceeded, UnsafeName: it is no such image, or a hostile one.
        DigestMismatch: a layer is another than the config names.
    """
    found = _read_config(config, where)
    labels = (found.config.labels if found.config else None) or {}
    if SUMMARY not in labels:
        what = (
            "a cache of vLLM: extract it with mcv, then triton-bundler pack vllm"
            if FOREIGN_SUMMARY in labels
            else "no cache"
        )
        raise FormatError(f"{where}: is {what}; expected an image with the label {SUMMARY}")
    wanted = found.rootfs.diff_ids if found.rootfs else ()
    notes: list[tuple[str, str]] = []
    cache_bytes = 0
    for number, layer in enumerate(layers):
        try:
            one = unpack_layer(layer, folder, limits)
        except FileExistsError as error:
            raise FormatError(
                f"{where}: two layers have one file, {error.filename}; expected an image of one"
                " layer"
            ) from error
        except BundlerError as error:
            raise type(error)(f"{where}: {error.message}", **error.facts) from error
        if wanted and wanted[number : number + 1] != (one.diff_id,):
            raise DigestMismatch(
                f"{where}: layer {number} unpacks to {one.diff_id}, and the config names another;"
                " build it again"
            )
        notes += one.left_out
        cache_bytes += one.cache_bytes
    said = labels.get(f"{LABELS}/cache-size-bytes", "")
    if said != str(cache_bytes):
        # Every byte was compared with a digest, so a label that is wrong is told, as MCV does, and
        # no more.
        wrong = f"says {said or 'nothing'!s:.20}, and the cache has {cache_bytes} bytes"
        notes.append((f"{LABELS}/cache-size-bytes", wrong))
    return notes


def _read_config(config: bytes, where: str) -> _Config:
    try:
        return msgspec.json.decode(config, type=_Config)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: cannot read the image's config: {error}") from error


CACHE_FOLDER = "io.triton.cache"
MANIFEST_FILE = "io.triton.manifest/manifest.json"
GZIP_LEVEL = 6
MOST_MEMBERS = 1_000_000
_BLOCK = 512
_CHUNK = 1 << 20
# Of a long name, or of the fields of a pax header.
_HEADER_BYTES = 64 * 1024
_WHITEOUT = ".wh."
_EXTENSIONS = frozenset(
    {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE}
)


class Unpacked(Struct, frozen=True):
    """What came out of a layer.

    Attributes:
        diff_id: digest of the archive before it was compressed, which an image's config names.
        cache_bytes: of all files of the cache, taken or not.
        left_out: (name, reason) of each file of the cache that belongs to no kernel directory.
    """

    diff_id: str
    cache_bytes: int
    left_out: tuple[tuple[str, str], ...]


def write_layer(out: BinaryIO, files: Iterable[tuple[str, bytes | memoryview]]) -> tuple[str, int]:
    """Write a layer of these files, in this order; the same bytes for the same files.

    Returns:
        The digest of the archive before it was compressed, and the size of the files below
        `io.triton.cache/`.
    """
    digest, size = hashlib.sha256(), 0
    made: set[str] = set()
    with gzip.GzipFile("", "wb", GZIP_LEVEL, out, mtime=0) as packed:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            packed.write(data)

        for name, data in files:
            parts = name.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder not in made:
                    made.add(folder)
                    put(_header(f"{folder}/", 0, tarfile.DIRTYPE, 0o755))
            put(_header(name, len(data), tarfile.REGTYPE, 0o644))
            put(data)
            put(b"\0" * (-len(data) % _BLOCK))
            size += len(data) if name.startswith(f"{CACHE_FOLDER}/") else 0
        put(b"\0" * (2 * _BLOCK))
    return f"sha256:{digest.hexdigest()}", size


def _header(name: str, size: int, kind: bytes, mode: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mode = size, kind, mode
    return member.tobuf(tarfile.PAX_FORMAT)


def unpack_layer(source: BinaryIO, folder: str, limits: Limits = DEFAULT_LIMITS) -> Unpacked:
    """Write the kernel directories of a layer's cache below a folder.

    Args:
        source: the layer, compressed.
        folder: an empty directory of ours.
        limits: how much may come out.

    Raises:
        UnsafeName: a member is a link, a device or a whiteout, leads out of the layer, or comes
            twice.
        LimitExceeded: more files, or larger ones, than a bundle may have.
        FormatError: it is no archive.
    """
    archive = _Archive(source, limits)
    taken: set[str] = set()
    left_out: list[tuple[str, str]] = []
    cache_bytes = 0
    try:
        for path, size in archive.files():
            if not path.startswith(f"{CACHE_FOLDER}/"):
                archive.skip(size)
                continue
            cache_bytes += size
            inside = path.partition("/")[2]
            why = _why_not(inside)
            if why is not None:
                left_out.append((inside, why))
                archive.skip(size)
                continue
            if inside in taken:
                raise UnsafeName(f"the layer has the file {path!r} twice", name=path)
            limits.check("file_bytes", size, path)
            taken.add(inside)
            _write(os.path.join(folder, inside), archive.chunks(size))
        diff_id = archive.finish()
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"the layer is no gzip-compressed tar archive, or is cut short: {error}"
        ) from error
    return Unpacked(diff_id, cache_bytes, tuple(left_out))


def _why_not(inside: str) -> str | None:
    """Return why a file of the cache is none of a kernel directory, None when it is."""
    key, _, name = inside.partition("/")
    if not names.is_kernel_key(key) or "/" in name:
        return "not a file of a kernel directory"
    try:
        names.check_file_name(name)
    except UnsafeName as error:
        return error.message
    return None


def _write(path: str, chunks: Iterator[bytes]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Created here and now: the folder is ours, and no member is a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as out:
        out.writelines(chunks)


class _Archive:
    """Reads a tar archive once, from its beginning to its end, within bounds.

    Python's own reader takes a header's word for how long a name is, and would allocate it.
    """

    def __init__(self, source: BinaryIO, limits: Limits) -> None:
        self._plain = gzip.GzipFile(fileobj=source, mode="rb")
        self._digest, self._read, self._most = hashlib.sha256(), 0, limits.raw_bytes
        self._padding = 0

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield path and size of each regular file; the caller reads or skips its bytes before it
        asks for the next.
        """
        given: dict[str, str] = {}
        for _ in range(MOST_MEMBERS):
            self._take(self._padding)
            self._padding = 0
            block = self._take(_BLOCK)
            if not block.strip(b"\0"):
                return
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if member.type in _EXTENSIONS:
                fields = self._extension(member)
                given |= fields if member.type != tarfile.XGLTYPE else {}
                continue
            path = _checked_path(given.get("path", member.name), member)
            size = int(given.get("size", member.size))
            given = {}
            if size < 0:
                raise FormatError(f"{path!a}: has a negative size")
            if member.type == tarfile.DIRTYPE:
                continue
            self._padding = -size % _BLOCK
            yield path, size
        raise LimitExceeded(f"the layer has more than {MOST_MEMBERS:,} members", limit=MOST_MEMBERS)

    def _extension(self, member: tarfile.TarInfo) -> dict[str, str]:
        """Return the fields that a header of pax or GNU gives the next member."""
        if not 0 <= member.size <= _HEADER_BYTES:
            raise LimitExceeded(
                f"the layer has a header of {member.size:,} bytes, expected at most"
                f" {_HEADER_BYTES:,}"
            )
        data = self._take(member.size)
        self._take(-member.size % _BLOCK)
        if member.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        if member.type == tarfile.GNUTYPE_LONGLINK:
            return {}  # what it belongs to is a link, and refused
        fields: dict[str, str] = {}
        while data:
            length, blank, _ = data.partition(b" ")
            if not blank or not length.isdigit() or not len(length) < int(length) <= len(data):
                raise FormatError("the layer has a damaged pax header")
            key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
            fields[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            data = data[int(length) :]
        if any(name.startswith("GNU.sparse") for name in fields):
            raise FormatError("the layer has a sparse file, which no builder of such images writes")
        return fields

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the bytes of the file whose path came last."""
        while size:
            chunk = self._take(min(size, _CHUNK))
            size -= len(chunk)
            yield chunk

    def skip(self, size: int) -> None:
        """Read over the bytes of the file whose path came last."""
        for _ in self.chunks(size):
            pass

    def finish(self) -> str:
        """Read to the end, and return the digest of the archive."""
        while chunk := self._plain.read(_CHUNK):
            self._count(chunk)
        return f"sha256:{self._digest.hexdigest()}"

    def _take(self, size: int) -> bytes:
        data = self._plain.read(size) if size else b""
        self._count(data)
        if len(data) != size:
            raise FormatError("the layer ends in the midst of a member")
        return data

    def _count(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > self._most:
            raise LimitExceeded(
                f"the layer has more than {self._most:,} bytes", limit=self._most, got=self._read
            )
        self._digest.update(data)


def _checked_path(name: str, member: tarfile.TarInfo) -> str:
    """Return a member's path below the layer's root; raises `UnsafeName` for anything that is no
    file or directory there.
    """
    path = name.removeprefix("./").rstrip("/")
    parts = path.split("/")
    shown = ascii(name[:100])
    if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE}:
        raise UnsafeName(
            f"the layer has a link, device or other special file, {shown}; expected files and"
            " directories",
            name=shown,
        )
    if name in {".", "./", "/"}:
        return ""
    if name.startswith("/") or any(part in {"", ".", ".."} for part in parts) or "\0" in name:
        raise UnsafeName(f"the layer has the name {shown}, which leads out of it", name=shown)
    if any(part.startswith(_WHITEOUT) for part in parts):
        raise UnsafeName(
            f"the layer removes files of another one ({shown}); expected an image of one layer",
            name=shown,
        )
    return path

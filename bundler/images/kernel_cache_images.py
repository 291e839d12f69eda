# SPDX-License-Identifier: Apache-2.0
"""Images as MCV makes and reads them, which GKM and KServe mount: `cache_files` lays out a bundle,
`image_config` describes it, `unpack_image` reads one.

The layout is that of MCV's `spec-compat.md`: labels `cache.triton.image/*` in the config, one
compressed layer (`kernel_cache_layers.py`).  Triton's group files name their members by absolute
paths, so an image is made for the place where its reader mounts it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.limits import Limits
from bundler.format.metadata import parse_metadata
from bundler.format.sentinel import TRITON_DIR
from bundler.images.image_manifests import DOCKER_LAYER, OCI_LAYER, Manifest
from bundler.images.kernel_cache_layers import CACHE_FOLDER, MANIFEST_FILE, unpack_layer
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

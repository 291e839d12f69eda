# SPDX-License-Identifier: Apache-2.0
"""Makes a bundle from a Triton or Inductor cache directory that somebody else filled.

Users and the command `pack` call `pack`; so does `bundler.integrations.inductor`, for the
directories of this process.  A recording takes what it finds with `add_found`
and `tuning_results` (`recorder.py`); `family_pack.py` takes kernels with `pack_kernels`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from bundler.errors import NotFound
from bundler.format import names
from bundler.format.bundle import Bundle, Keep, check_keep
from bundler.format.bundle_file import os_errors
from bundler.format.entries import Opaque, TuningFile
from bundler.format.manifest import Observation
from bundler.format.source_stripping import Strip, check_strip, strip_source
from bundler.lifecycle.bundle_builder import NOT_NEEDED, Builder, KnownFacts, join
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_kernels, walk_files
from bundler.lifecycle.tuning_directory import FOLDER, TuningFolder, with_tunings

KERNEL_SUBDIRECTORY = "triton"
Watch = Callable[[int, int], object]


def pack(
    directory: str | os.PathLike[str],
    *,
    keep: Keep = "all",
    strip: Strip | None = None,
    watch: Callable[[int, int], object] | None = None,
) -> Bundle:
    """Make a bundle from a cache directory.

    Args:
        directory: a Triton cache directory (it holds kernel directories), or an Inductor cache
            directory (it holds `triton/<device>/` with kernel directories, beside generated code
            and graph entries).
        keep: `all`, or `launch` for device binaries, metadata and tuning files only.
        strip: `source` takes out what tells of where and from what kernels were compiled, as
            `strip_source` does.
        watch: is told how many kernels of how many were read; of an Inductor cache, for each device
            by itself.

    Returns:
        A bundle whose `left_out` names everything that was seen and not taken, with the reason.
        Its kernels have no launch facts and no key parts, since a cache directory does not hold
        them; record the compiles to have those.

    Raises:
        NotFound: no such directory, or it holds no kernels.
        AccessDenied: the directory cannot be read.
    """
    check_keep(keep)
    check_strip(strip)
    packed = _pack(os.fspath(directory), keep, watch)
    return packed if strip is None else strip_source(packed)


def _pack(root: str, keep: Keep, watch: Watch | None) -> Bundle:
    with os_errors(root, "read"):
        found = sorted(os.listdir(root))
        devices = _devices(root) if KERNEL_SUBDIRECTORY in found else []
        if not devices and not any(names.is_kernel_key(name) for name in found):
            raise NotFound(
                f"no kernels in {root}: expected directories named by a kernel key, as in a Triton"
                f" cache, or {KERNEL_SUBDIRECTORY}/<device>/ as in an Inductor cache",
                path=root,
            )
        if not devices:
            kernels = join([pack_kernels(root, keep, Observation(layouts=("triton",)), watch)])
            return with_tunings(kernels, TuningFolder(root).records())
        builders = [
            pack_kernels(
                os.path.join(root, KERNEL_SUBDIRECTORY, str(device)),
                keep,
                Observation((device,), ("inductor",)),
                watch,
            )
            for device in devices
        ]
        return join([*builders, _pack_rest(root, keep, devices)])


def _devices(root: str) -> list[int]:
    folder = os.path.join(root, KERNEL_SUBDIRECTORY)
    return sorted(
        int(name) for name in os.listdir(folder) if name.isdecimal() and str(int(name)) == name
    )


def pack_kernels(
    root: str, keep: str, observation: Observation, watch: Watch | None = None
) -> Builder:
    """Take the kernels of one Triton cache directory, and the files in it that belong to none."""
    builder = Builder(root, keep)
    keys = []
    for name in sorted(os.listdir(root)):
        if names.is_kernel_key(name) and os.path.isdir(os.path.join(root, name)):
            keys.append(name)
        elif name != FOLDER:
            builder.left_out.append((name, "not a kernel directory"))
    paths = [os.path.join(root, key) for key in keys]
    for done, (key, found) in enumerate(zip(keys, read_kernels(paths), strict=True), 1):
        add_found(builder, key, found, observation)
        if watch is not None:
            watch(done, len(keys))
    return builder


def add_found(
    builder: Builder,
    key: str,
    found: KernelFiles | Rejected,
    observation: Observation,
    facts: KnownFacts | None = None,
) -> None:
    """Take what was found in a key directory: a kernel, or files that belong to none."""
    # What is a kernel holds other files, too.
    singles = single_files(os.path.join(builder.root, key)) if isinstance(found, Rejected) else []
    for child in singles:
        builder.add_single(key, child)
    if not singles:
        builder.add_found(key, found, observation, facts)


def single_files(directory: str) -> list[str]:
    """Return the names in a key directory that holds only tuning results and shared libraries, else
    nothing.
    """
    try:
        content = sorted(os.listdir(directory))
    except OSError:
        return []  # gone or unreadable: reading it as a kernel says which
    return content if all(name.endswith((names.AUTOTUNE_SUFFIX, ".so")) for name in content) else []


def tuning_results(root: str) -> Iterator[tuple[str, str]]:
    """Yield (key, file name) of every result file of Triton's tuner in a cache directory."""
    if os.path.isdir(root):
        for key in sorted(filter(names.is_kernel_key, os.listdir(root))):
            for name in single_files(os.path.join(root, key)):
                if name.endswith(names.AUTOTUNE_SUFFIX):
                    yield key, name


def _pack_rest(root: str, keep: str, devices: Iterable[int]) -> Builder:
    """Take what Inductor keeps beside the kernels: tuning results, and files that torch executes or
    unpickles.
    """
    builder = Builder(root, keep)
    kernels = {f"{KERNEL_SUBDIRECTORY}/{device}" for device in devices}
    # A link to a directory is not followed; as a file it is refused with that reason.
    for path in walk_files(root, lambda path: path not in kernels, builder.left_out):
        if path.endswith(names.BEST_CONFIG_SUFFIX):
            builder.add_file(path, TuningFile)
        elif path.endswith(".lock") or any(part.startswith("tmp") for part in path.split("/")):
            builder.left_out.append((path, "a lock or temporary file"))
        elif keep == "launch":
            builder.left_out.append((path, NOT_NEEDED))
        else:
            builder.add_file(path, Opaque)
    return builder

# SPDX-License-Identifier: Apache-2.0
"""`pack_family`: makes a bundle from the cache directory of a server, as a `Family` declares it.

Its Triton kernels become kernels of the bundle, once each however many ranks have them; everything
else becomes trees (`TreeIndex`). Users and the command `pack` call it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bundler.errors import NotFound, UnsafeName
from bundler.format.bundle import Bundle, Keep, check_keep
from bundler.format.bundle_file import os_errors
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Kernel, Opaque
from bundler.format.limits import GIB, Limits
from bundler.format.manifest import Observation
from bundler.format.opaque_files import (
    TreeFile,
    TreeIndex,
    blob_path,
    check_tree_path,
    chunk_digests,
    tree_file,
)
from bundler.lifecycle.bundle_builder import NOT_NEEDED, Builder, join
from bundler.lifecycle.directory_pack import pack_kernels
from bundler.lifecycle.family import (
    FAMILIES,
    PROGRAMS,
    Family,
    check_facts,
    find_family,
    is_kernel_directory,
    may_hold,
    place_of,
    rank_of,
    takes,
)
from bundler.lifecycle.kernel_directory import Rejected, read_file, walk_files
from bundler.toolchain import identity
from bundler.toolchain.identity import machine_facts
from bundler.user_warnings import warn

RANKS = "ranks"
# A compiled model is one file.  It is read whole and stored in chunks.
_LIMITS = Limits(file_bytes=4 * GIB)
_LINK = "a symbolic link, which could lead anywhere"


def pack_family(
    family: Family | str,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: Keep = "all",
    facts: Mapping[str, str] | None = None,
) -> Bundle:
    """Make a bundle from the cache directory of a server or a compiler.

    Args:
        family: which: a declaration, or the name of one that we know, such as `vllm` and `sglang`.
        root: the cache directory; None for where the declaration says that it is here.
        keep: `all`, or `launch` for device binaries, metadata and tuning files of Triton's kernels
            only.
        facts: parts of the fingerprint by name, in place of what this machine says.

    Returns:
        A bundle whose `left_out` names everything that was seen and not taken, with the reason.
        Nothing of the directory is executed or unpickled, and no symbolic link in it is followed.

    Raises:
        NotFound: no such family or directory, or the directory holds nothing of the family.
        AccessDenied: the directory cannot be read.
        ConfigError: another value for `keep`, or a fact that the family's fingerprint does not
            have.

    Warns:
        BundlerWarning: another Triton compiled the kernels than is installed here; the trees are
        marked as made for that one.
    """
    check_keep(keep)
    declared = find_family(family) if isinstance(family, str) else family
    check_facts(facts or {}, declared.fingerprint)
    directory = declared.find_root() if root is None else os.path.abspath(os.fspath(root))
    with os_errors(directory, "read"):
        packed = _Packed(declared, directory, keep)
        packed.walk()
        if packed.is_empty:
            raise NotFound(
                f"{directory} holds nothing of {declared.name}: expected files such as"
                f" {', '.join(declared.patterns[:3])}",
                path=directory,
            )
        fingerprint = machine_facts(declared.fingerprint) | dict(facts or {})
        if "triton" in declared.fingerprint and "triton" not in (facts or {}):
            fingerprint |= packed.triton_of_kernels(fingerprint.get("triton"))
        return join([*packed.kernels.values(), packed.trees(fingerprint)], identity.environment())


def pack_programs(paths: Iterable[str], keep: Keep = "all") -> Bundle:
    """Make a bundle of programs that the generator kept.

    Args:
        paths: of their files, in any directories.
        keep: `launch` takes none: a program is no kernel.
    """
    declared, builders = FAMILIES[PROGRAMS], []
    for folder, names in _by_folder(paths).items():
        packed = _Packed(declared, folder, keep)
        for name in names:
            packed.take_file(name)
        builders.append(packed.trees(machine_facts(declared.fingerprint)))
    return join(builders, identity.environment())


def _by_folder(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(set(paths)):
        folder, name = os.path.split(path)
        found.setdefault(folder, []).append(name)
    return found


@dataclass
class _Packed:
    """What was found so far."""

    family: Family
    root: str
    keep: Keep
    files: dict[str, dict[str, TreeFile]] = field(default_factory=dict)
    kernels: dict[str, Builder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rest = Builder(self.root, self.keep)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken, and nothing would have been with keep='all'."""
        taken = any(builder.entries for builder in self.kernels.values()) or self.files
        return not taken and not any(reason == NOT_NEEDED for _, reason in self._rest.left_out)

    def walk(self) -> None:
        """Go through the directory; what cannot be listed is left out with the reason."""
        # An error of the root is the caller's, one of a directory in it is not.
        os.listdir(self.root)
        for path in walk_files(self.root, self._enters, self._rest.left_out):
            self.take_file(path)

    def _enters(self, path: str) -> bool:
        if "/" not in path and not may_hold(self.family, path):
            self._leave_out(path, f"not of {self.family.name}")
            return False
        if os.path.islink(os.path.join(self.root, path)):
            self._leave_out(path, _LINK)
            return False
        if is_kernel_directory(self.family, path):
            self.kernels[path] = pack_kernels(
                os.path.join(self.root, path), self.keep, Observation()
            )
            return False
        return True

    def take_file(self, path: str) -> None:
        """Take a file, by its path relative to the root, or say why not."""
        if not takes(self.family, path):
            self._leave_out(path, f"not of {self.family.name}, or unfinished")
            return
        if self.keep == "launch":
            self._leave_out(path, NOT_NEEDED)
            return
        place = place_of(self.family, path)
        inner = path.removeprefix(f"{place}/") if place else path
        folder, _, name = path.rpartition("/")
        try:
            check_tree_path(path)
            data = read_file(os.path.join(self.root, folder), name, _LIMITS)
        except UnsafeName as error:
            self._leave_out(path, error.message)
            return
        except OSError as error:
            self._leave_out(path, f"cannot read: {error.strerror}")
            return
        if isinstance(data, Rejected):
            self._leave_out(path, data.reason)
            return
        chunks = chunk_digests(data)
        for raw, piece in chunks:
            self._add(blob_path(self.family.name, raw), raw, piece)
        self.files.setdefault(place, {})[inner] = tree_file(inner, chunks)

    def triton_of_kernels(self, installed: str | None) -> dict[str, str]:
        """Return the release of Triton that compiled the kernels, where that is another one than is
        installed here, and say so.

        Who packs the cache of a server may do so in an environment of his own, of which the rest of
        the fingerprint is.
        """
        releases = sorted(
            {
                entry.toolchain.release
                for builder in self.kernels.values()
                for entry in builder.entries.values()
                if isinstance(entry, Kernel) and entry.toolchain.release
            }
        )
        if not releases or releases == [installed]:
            return {}
        rest = (
            "the rest of its fingerprint is of this environment: pack where the server runs, or say"
            " what differs by --fact, or facts="
        )
        there = f"{self.root}: its kernels were compiled by Triton {' and '.join(releases)}"
        here = (
            f"Triton {installed} is installed here" if installed else "no Triton is installed here"
        )
        if len(releases) > 1:
            warn(
                f"{there}, and {here}; which of them its trees were made for is not known, and"
                f" {rest}"
            )
            return {}
        warn(f"{there}, and {here}; its trees are marked as made for {releases[0]}, and {rest}")
        return {"triton": releases[0]}

    def trees(self, fingerprint: Mapping[str, str]) -> Builder:
        """Return a builder with the chunks of all files, and an index for each tree."""
        in_place: dict[str, dict[str, tuple[str, ...]]] = {}
        for path, builder in self.kernels.items():
            place = place_of(self.family, f"{path}/")
            inner = path.removeprefix(place).strip("/")
            in_place.setdefault(place, {})[inner] = tuple(sorted(_keys(builder)))
        for place in sorted({*self.files, *in_place}):
            files, kernels = self.files.get(place, {}), in_place.get(place, {})
            ranks = {
                rank
                for path in (*files, *kernels)
                if (rank := rank_of(self.family, f"{path}/")) is not None
            }
            known = dict(fingerprint)
            if not ranks:
                known.pop(RANKS, None)
            elif RANKS in self.family.fingerprint:
                known.setdefault(RANKS, " ".join(sorted(ranks)))
            index = TreeIndex(
                self.family.name, place, known, tuple(sorted(ranks)), tuple(files.values()), kernels
            )
            data = index.encode()
            self._add(index.entry_path, sha256(data), data)
        return self._rest

    def _add(self, path: str, raw: bytes, data: bytes) -> None:
        self._rest.blobs[raw] = data
        self._rest.entries[path] = Opaque(
            path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data))
        )

    def _leave_out(self, path: str, reason: str) -> None:
        self._rest.left_out.append((path, reason))


def _keys(builder: Builder) -> Iterator[str]:
    """Yield the directories of a Triton cache directory that are entries: kernels, and files that
    belong to none.
    """
    for entry in builder.entries.values():
        yield entry.key if isinstance(entry, Kernel) else entry.path.partition("/")[0]

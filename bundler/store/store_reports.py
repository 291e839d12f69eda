# SPDX-License-Identifier: Apache-2.0
"""The results of the store's operations, as values: `PushReport`, `VerifyReport`, `PruneReport`,
`SyncReport`, `StoreStats`, `TagInfo`.

`BundleStore` returns them; the commands `push`, `tags`, `stats`, `verify`, `prune`
and `sync` print them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bundler.format.summary import Reported, Summarized

Reasons = tuple[tuple[str, str], ...]
# By what a prune finds objects held; `Held` says what each means.
TAGS, UNREAD_TAGS, GRACE = "tags", "unread tags", "grace"
AGE, ROOM, USE = "older_than", "max_bytes", "use"


@dataclass(frozen=True, repr=False)
class PushReport(Reported):
    """What a push did.

    Attributes:
        digest: of the bundle that the tag names now (with `merge`, the union), or of the bundle
            pushed without a tag.
        blobs_sent, blobs_present: units that were missing, and that were there.
        bytes_sent: stored bytes of what was sent, the manifest included.
        repaired: units that were there but damaged, and were sent again.
        variants_dropped: builds that `merge` left out.
        tag_before, tag_after: digests that the tag named; None for not set, not readable, or no tag
            given.
        seconds: wall time.
    """

    digest: str
    blobs_sent: int
    blobs_present: int
    bytes_sent: int
    repaired: int
    variants_dropped: int
    tag_before: str | None
    tag_after: str | None
    seconds: float


@dataclass(frozen=True, repr=False)
class TagInfo(Summarized):
    """A tag, and the bundle that it names; equal where name and digest are.

    Attributes:
        name: the tag.
        digest: of the bundle; None when what the tag says is damaged or of a newer version.
        kernels, targets, size_bytes: what is in the bundle, uncompressed.
        problem: why the bundle cannot be opened; None when it can.
    """

    name: str
    digest: str | None
    kernels: int = field(default=0, compare=False)
    targets: tuple[str, ...] = field(default=(), compare=False)
    size_bytes: int = field(default=0, compare=False)
    problem: str | None = field(default=None, compare=False)


@dataclass(frozen=True, repr=False)
class StoreStats(Summarized):
    """What a store holds; sizes are stored bytes.  `tagged_bytes` is what tags reach.

    Attributes:
        records, record_bytes: kernels that were published one by one, and single files; their units
            count as units.
        failures: compiles whose failure was told.
        dictionaries, dictionary_bytes: what units were compressed with.
        kernels: those that are found by their keys, however they came here.
        index_bytes: what says which bundle has which kernel.
    """

    units: int
    unit_bytes: int
    manifests: int
    manifest_bytes: int
    tags: int
    tagged_bytes: int
    records: int = 0
    record_bytes: int = 0
    failures: int = 0
    dictionaries: int = 0
    dictionary_bytes: int = 0
    kernels: int = 0
    index_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """All of it."""
        named = self.manifest_bytes + self.record_bytes + self.index_bytes
        return self.unit_bytes + self.dictionary_bytes + named


@dataclass(frozen=True, repr=False)
class VerifyReport(Reported):
    """What was checked.

    Attributes:
        checked: objects read.
        damaged: (key, reason) of objects whose bytes are not what they should be.
        dangling: (bundle digest, tag, or key of a kernel that was published by itself, what it
            lacks).
        removed: keys of damaged objects, and of records that lack something, that `repair` removed:
            the next push sends them again, and the next build can be published.
        indexed: kernels of tagged bundles that are found by their keys again, since `repair` wrote
            which bundle has them.
    """

    checked: int
    damaged: Reasons
    dangling: Reasons
    removed: tuple[str, ...]
    indexed: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not self.damaged and not self.dangling


@dataclass(frozen=True, repr=False)
class Held(Summarized):
    """Objects that a prune left, and by what they are held.

    Attributes:
        by: `tags` that reach them; `unread tags`, of which it is not known what they reach;
            `grace`, used too recently; `older_than`, younger than was asked for; `max_bytes`, the
            store is small enough; `use`, used while the prune ran.
        objects, size_bytes: how many, and their stored bytes.
    """

    by: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class PruneReport(Reported):
    """What was removed, or with `dry_run` would be.

    Attributes:
        removed: keys, oldest first.
        removed_bytes, kept_bytes: stored bytes.
        tagged_bytes: what tags reach, which is never removed.
        spared: objects that no tag reaches, kept because they were used within the grace, or
            because of `unfollowed`.
        over_limit_bytes: by how much what is kept exceeds `max_bytes`; 0 when it does not.
        unfollowed: (tag, reason) of tags of which it is not known what they reach: then nothing is
            removed.
        held: what holds what is kept, each object in one of them.
        grace_s: for how long after its last use nothing was removed.
    """

    removed: tuple[str, ...]
    removed_bytes: int
    kept_bytes: int
    tagged_bytes: int
    spared: int
    over_limit_bytes: int
    unfollowed: Reasons = ()
    held: tuple[Held, ...] = ()
    grace_s: float = 0.0


@dataclass(frozen=True, repr=False)
class SyncReport(Reported):
    """What a mirror did, or with `dry_run` would do.

    Attributes:
        moved: tags that were set, or of which something was missing.
        kept: tags that were there as they are in the source, with all that they reach.
        deleted: tags that the source does not have, removed where that was asked for.
        failed: (tag, reason) of tags that stay as they were.
        units_moved, units_present: units that were missing, and that were there.
        bytes_moved: stored bytes of all that was moved; 0 with `dry_run`.
        seconds: wall time.
    """

    moved: tuple[str, ...]
    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    failed: Reasons
    units_moved: int
    units_present: int
    bytes_moved: int
    seconds: float


@dataclass
class PushProgress:
    """What a push sent so far; what it tells at its end is a `PushReport`.

    Attributes:
        known: whether the bundle was there, under whatever tag.
        indexed: whether some of its kernels, which stand for all that were there, are found by
            their keys.
    """

    units: int = 0
    present: int = 0
    bytes: int = 0
    repaired: int = 0
    known: bool = False
    indexed: bool = False

# SPDX-License-Identifier: Apache-2.0
"""What collecting and restoring did, and what they left out and why.

Recordings and `collection.py` make a `RecordReport`, `restoration.py` a `RestoreReport`, and
`restore_check.py` a `CheckReport`; users, sessions and the command line read
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bundler.format.entries import FrozenValue, set_fields
from bundler.format.summary import Reported

Reasons = tuple[tuple[str, str], ...]


class RecordReport(Reported, FrozenValue):
    """What a recording saw.

    Attributes:
        sources: how many kernels were found by `listener`, `children`, `jit-cache` and
            `directories`; a kernel counts for the first of these that reported it.
        hits: compiles that Triton answered from its cache.
        compiles: real compiles, with `compile_seconds` spent in them, in all processes.
        left_out: (kernel key or file, reason) of everything seen that is not in the bundle.
        not_portable: (kernel key, argument) of constants that have no encoding: the kernel restores
            as usual, but cannot be compiled again from the bundle alone.
        without_facts: keys of kernels whose argument types are not known.
        errors: how often our own listener failed; details are in the log.
    """

    sources: Mapping[str, int]
    hits: int
    compiles: int
    compile_seconds: float
    left_out: Reasons
    not_portable: Reasons
    without_facts: tuple[str, ...]
    errors: int

    def __init__(
        self,
        sources: Mapping[str, int] | None = None,
        hits: int = 0,
        compiles: int = 0,
        compile_seconds: float = 0.0,
        left_out: Reasons = (),
        not_portable: Reasons = (),
        without_facts: tuple[str, ...] = (),
        errors: int = 0,
    ) -> None:
        sources = {} if sources is None else sources
        set_fields(self, locals())


class _ListedWhenRead:
    """A field of a report whose texts are made when somebody reads it; those of a hundred thousand
    kernels take 12 MB.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: Any, owner: type) -> Any:
        if report is None:
            return ()  # the default
        given = vars(report)[self._name]
        if not isinstance(given, tuple):
            given = vars(report)[self._name] = given()
        return given

    def __set__(self, report: Any, given: Any) -> None:
        vars(report)[self._name] = given


def _listed_when_read() -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _ListedWhenRead()


class RestoreReport(Reported, FrozenValue):
    """What a restore did.  Kernels count once, however many devices they were placed for.

    Attributes:
        restored: keys of kernels that were published.
        present: keys of kernels that were there already: ours, or another complete build of the
            same kernel.
        repaired: keys of kernels whose broken directory was replaced as a whole.
        skipped: (kernel key or file, reason) of what was left out.
        damaged: names among `skipped` whose bytes in the bundle are damaged.
        unchecked: facts that are unknown on this machine and therefore excluded nothing.
        companions: paths of tuning files, helper libraries and opaque files that are in place.
        rewritten: files whose bytes hold a path of this machine and so differ from where they were
            made.
        directories: where kernels went.
        rekeyed: (key, key of the kernel in the bundle that it was derived from) of kernels in
            place; `rekey=True` only.
        moved: (key, key of the kernel in the bundle) of kernels in place whose functions only
            moved; `moved=True` only.
        tuned: how many tuning records were written; those that were there already, or are slower,
            do not count.
        files, bytes: how much was written, tuning records not counted.
        seconds: wall time.
        signatures: whose signature was found good, or in one line why none was; empty where nobody
            asked.
    """

    restored: tuple[str, ...]
    present: tuple[str, ...]
    repaired: tuple[str, ...]
    skipped: Reasons
    damaged: tuple[str, ...]
    unchecked: tuple[str, ...]
    companions: tuple[str, ...]
    rewritten: tuple[str, ...] = _listed_when_read()
    directories: tuple[str, ...]
    rekeyed: Reasons
    moved: Reasons
    tuned: int
    files: int
    bytes: int
    seconds: float
    signatures: str

    def __init__(
        self,
        restored: tuple[str, ...] = (),
        present: tuple[str, ...] = (),
        repaired: tuple[str, ...] = (),
        skipped: Reasons = (),
        damaged: tuple[str, ...] = (),
        unchecked: tuple[str, ...] = (),
        companions: tuple[str, ...] = (),
        rewritten: tuple[str, ...] = (),
        directories: tuple[str, ...] = (),
        rekeyed: Reasons = (),
        moved: Reasons = (),
        tuned: int = 0,
        files: int = 0,
        bytes: int = 0,  # noqa: A002  # the field's name
        seconds: float = 0.0,
        signatures: str = "",
    ) -> None:
        set_fields(self, locals())

    @property
    def usable(self) -> int:
        """How many kernels are in place now."""
        return len(self.restored) + len(self.present) + len(self.repaired)


class CheckReport(Reported, FrozenValue):
    """What a check found.  Kernels count once, however many devices they are placed for.

    Attributes:
        missing: (kernel key or file, reason) of what a restore would write: it is not there, or
            broken.
        present: keys of kernels and paths of files that are in place, in each directory where they
            belong.
        skipped: (kernel key or file, reason) of what a restore would leave out.
        unchecked: facts that are unknown on this machine and therefore excluded nothing.
        directories: where we looked.
        signatures: as of a `RestoreReport`.
    """

    missing: Reasons
    present: tuple[str, ...]
    skipped: Reasons
    unchecked: tuple[str, ...]
    directories: tuple[str, ...]
    signatures: str

    def __init__(
        self,
        missing: Reasons = (),
        present: tuple[str, ...] = (),
        skipped: Reasons = (),
        unchecked: tuple[str, ...] = (),
        directories: tuple[str, ...] = (),
        signatures: str = "",
    ) -> None:
        set_fields(self, locals())

    @property
    def complete(self) -> bool:
        """Whether nothing that this machine can use is missing."""
        return not self.missing

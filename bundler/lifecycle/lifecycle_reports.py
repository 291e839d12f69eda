# SPDX-License-Identifier: Apache-2.0
"""What collecting and restoring did, and what they left out and why.

Recordings and `collection.py` make a `RecordReport`, `restoration.py` a `RestoreReport`, `restore_check.py` a `CheckReport`; users, sessions
and the command line read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bundler.format.frozen_values import FrozenValue
from bundler.format.summary import Summarized

Reasons = tuple[tuple[str, str], ...]


@dataclass(init=False, repr=False, eq=False)
class RecordReport(Summarized, FrozenValue):
    """What a recording saw.

    Attributes:
        sources: how many kernels were found by `listener`, `children`, `jit-cache` and `directories`; a kernel counts
            for the first of these that reported it.
        hits: compiles that Triton answered from its cache.
        compiles: real compiles, with `compile_seconds` spent in them, in all processes.
        left_out: (kernel key or file, reason) of everything seen that is not in the bundle.
        not_portable: (kernel key, argument) of constants that have no encoding: the kernel restores as usual, but
            cannot be compiled again from the bundle alone.
        without_facts: keys of kernels whose argument types are not known.
        errors: how often our own listener failed; details are in the log.
    """

    sources: Mapping[str, int] = field(default_factory=dict)
    hits: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    left_out: Reasons = ()
    not_portable: Reasons = ()
    without_facts: tuple[str, ...] = ()
    errors: int = 0

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
        self._set_fields(locals())


class RewrittenFiles:
    """Files that hold a path of this machine, as a restore notes them: of each kernel only the key.

    Args:
        kernels: keys of kernels, by the names of their files that do; one that went to several directories is there as often.
        others: paths of other files.
    """

    def __init__(self, kernels: Mapping[tuple[str, ...], Sequence[str]], others: set[str]) -> None:
        self._kernels, self._others = kernels, others

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({f"{key}/{name}" for names, keys in self._kernels.items() for key in keys for name in names}
                           | self._others))  # fmt: skip


class _ListedWhenRead:
    """A field of a report whose texts are made when somebody reads it; those of a hundred thousand kernels take 12 MB."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: Any, owner: type) -> Any:
        if report is None:
            return ()  # the default
        given = vars(report)[self._name]
        if not isinstance(given, tuple):
            given = vars(report)[self._name] = tuple(given)
        return given

    def __set__(self, report: Any, given: Any) -> None:
        vars(report)[self._name] = given


def _listed_when_read() -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _ListedWhenRead()


@dataclass(init=False, repr=False, eq=False)
class RestoreReport(Summarized, FrozenValue):
    """What a restore did.  Kernels count once, however many devices they were placed for.

    Attributes:
        restored: keys of kernels that were published.
        present: keys of kernels that were there already: ours, or another complete build of the same kernel.
        repaired: keys of kernels whose broken directory was replaced as a whole.
        skipped: (kernel key or file, reason) of what was left out.
        damaged: names among `skipped` whose bytes in the bundle are damaged.
        unchecked: facts that are unknown on this machine and therefore excluded nothing.
        companions: paths of tuning files, helper libraries and opaque files that are in place.
        rewritten: files whose bytes hold a path of this machine and so differ from where they were made.
        directories: where kernels went.
        rekeyed: (key, key of the kernel in the bundle that it was derived from) of kernels in place; `rekey=True` only.
        tuned: how many tuning records were written; those that were there already, or are slower, do not count.
        files, bytes: how much was written, tuning records not counted.
        seconds: wall time.
        signatures: whose signature was found good, or in one line why none was; empty where nobody asked.
    """

    restored: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    skipped: Reasons = ()
    damaged: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = _listed_when_read()
    directories: tuple[str, ...] = ()
    rekeyed: Reasons = ()
    tuned: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    signatures: str = ""

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
        tuned: int = 0,
        files: int = 0,
        bytes: int = 0,  # noqa: A002  # the field's name
        seconds: float = 0.0,
        signatures: str = "",
    ) -> None:
        self._set_fields(locals())

    @property
    def usable(self) -> int:
        """How many kernels are in place now."""
        return len(self.restored) + len(self.present) + len(self.repaired)


@dataclass(init=False, repr=False, eq=False)
class CheckReport(Summarized, FrozenValue):
    """What a check found.  Kernels count once, however many devices they are placed for.

    Attributes:
        missing: (kernel key or file, reason) of what a restore would write: it is not there, or broken.
        present: keys of kernels and paths of files that are in place, in each directory where they belong.
        skipped: (kernel key or file, reason) of what a restore would leave out.
        unchecked: facts that are unknown on this machine and therefore excluded nothing.
        directories: where we looked.
        signatures: as of a `RestoreReport`.
    """

    missing: Reasons = ()
    present: tuple[str, ...] = ()
    skipped: Reasons = ()
    unchecked: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    signatures: str = ""

    def __init__(
        self,
        missing: Reasons = (),
        present: tuple[str, ...] = (),
        skipped: Reasons = (),
        unchecked: tuple[str, ...] = (),
        directories: tuple[str, ...] = (),
        signatures: str = "",
    ) -> None:
        self._set_fields(locals())

    @property
    def complete(self) -> bool:
        """Whether nothing that this machine can use is missing."""
        return not self.missing

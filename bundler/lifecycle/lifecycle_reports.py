# SPDX-License-Identifier: Apache-2.0
"""What collecting and restoring did, and what they left out and why.

Recordings and `collection.py` make a `RecordReport`, `restoration.py` a `RestoreReport`, from its
`RestoreTally`, and `restore_check.py` a `CheckReport`; users, sessions and the command line read
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from bundler.errors import BundlerError
from bundler.format.entries import FrozenValue
from bundler.format.summary import Reported

if TYPE_CHECKING:
    from bundler.lifecycle.cache_directory import Outcome
    from bundler.lifecycle.kernel_writer import ReadyKernel

Reasons = tuple[tuple[str, str], ...]


@dataclass(init=False, repr=False, eq=False)
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
        kernels: keys of kernels, by the names of their files that do; one that went to several
            directories is there as often.
        others: paths of other files.
    """

    def __init__(self, kernels: Mapping[tuple[str, ...], Sequence[str]], others: set[str]) -> None:
        self._kernels, self._others = kernels, others

    def __iter__(self) -> Iterator[str]:
        return iter(
            sorted(
                {
                    f"{key}/{name}"
                    for names, keys in self._kernels.items()
                    for key in keys
                    for name in names
                }
                | self._others
            )
        )


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
            given = vars(report)[self._name] = tuple(given)
        return given

    def __set__(self, report: Any, given: Any) -> None:
        vars(report)[self._name] = given


def _listed_when_read() -> Any:
    # What a type checker sees is the type of the field, which the descriptor stands for.
    return _ListedWhenRead()


@dataclass(init=False, repr=False, eq=False)
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
    moved: Reasons = ()
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
        moved: Reasons = (),
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


class RestoreTally:
    """What one restore did so far, of which `restoration.py` makes its report.

    Of a hundred thousand kernels the keys are named here, which are those of the bundle, and hardly
    anything else: eight bytes for each.
    """

    def __init__(self) -> None:
        # Keys of kernels that were written, one for each directory, by the files that hold a path
        # of this machine.
        self.written: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        self.present: list[str] = []
        self.repaired: set[str] = set()
        self.skipped: list[tuple[str, str]] = []
        self.damaged: list[str] = []
        self.companions: list[str] = []
        self.rewritten: set[str] = set()
        self.tuned = self.files = self.bytes = 0

    def spoiled(self, name: str, error: BundlerError) -> None:
        """Count a kernel, or another file, that is damaged."""
        self.skipped.append((name, error.message))
        # Also by itself: most of what a report calls skipped is whole, and of no use on this
        # machine.
        self.damaged.append(name)

    def placed(self, kernel: ReadyKernel, outcome: Outcome | BundlerError) -> None:
        """Count a kernel by what became of it in one directory."""
        if isinstance(outcome, BundlerError):
            self.spoiled(kernel.key, outcome)
            return
        if outcome == "present":
            self.present.append(kernel.key)
            return
        if outcome == "repaired":
            self.repaired.add(kernel.key)
        self.written[kernel.rewritten].append(kernel.key)
        # One file more than the bundle has: Triton's group file.
        self.files += len(kernel.names) + 1
        self.bytes += kernel.size_bytes

    def keys(self) -> Mapping[Outcome, tuple[str, ...]]:
        """Return the keys of kernels by what became of them: by the most that was done for one that
        goes to several directories.
        """
        return {
            "restored": _once(chain.from_iterable(self.written.values()), self.repaired),
            "repaired": _once(self.repaired),
            "present": _once(
                self.present,
                set(chain.from_iterable(self.written.values())) if self.present else (),
            ),
        }

    def rewritten_files(self) -> Any:
        """Return what the report lists when it is asked for it: a text for each kernel would be
        most of its memory.
        """
        return RewrittenFiles(self.written, self.rewritten)

    def wrote(self, files: int, size: int) -> None:
        """Count other files."""
        self.files += files
        self.bytes += size


def _once(keys: Iterable[str], without: Container[str] = ()) -> tuple[str, ...]:
    """Return keys in order, each once; a set of a hundred thousand would take more memory than
    their kernels.
    """
    return tuple(key for key, _ in groupby(sorted(keys)) if key not in without)

# SPDX-License-Identifier: Apache-2.0
"""What a restore or a check is asked, and what a restore tells: its report, with what it left out
and why.

`restore`, `check` and `Store.restore` make `RestoreOptions` of their arguments, of which
`TreeOptions` are a part.  `restoration.py` makes a `RestoreReport`; users, sessions and the command
line read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from bundler.errors import ConfigError, ToolchainMismatch
from bundler.format.entries import FrozenValue, Keep, set_fields
from bundler.format.summary import Reported
from bundler.lifecycle.kernel_placement import Trust

if TYPE_CHECKING:
    from bundler.lifecycle.family import Family

Reasons = tuple[tuple[str, str], ...]
Only = Literal["usable", "all"]
_CHOICES = {
    "keep": ("all", "launch"),
    "only": ("usable", "all"),
    "trust": ("kernels", "code", "signed"),
}


# ----------------------------------------------------------------------------------------- Options


# No struct: `inspect.signature` of one wants the names in its annotations, and a restore does not
# import `Family`.


class TreeOptions(FrozenValue):
    """How the trees of servers' caches in a bundle are restored, those that `pack_family` took.

    Attributes:
        roots: family -> the directory to restore it to; one that is not here goes where its
            declaration says.
        facts: parts of a fingerprint by name, in place of what this machine says: `{"ranks":
            "4x1"}` for four ranks.
        families: declarations beside those that we know.
        max_bytes: how many bytes all their files may take on disk; None for 64 times what the
            bundle holds of them, at least 64 MiB, since an index may name one chunk any number of
            times.

    Raises:
        ConfigError: a root or a fact is empty, or `max_bytes` negative.
    """

    roots: Mapping[str, str | os.PathLike[str]]
    facts: Mapping[str, str]
    families: Sequence[Family]
    max_bytes: int | None

    def __init__(
        self,
        roots: Mapping[str, str | os.PathLike[str]] | None = None,
        facts: Mapping[str, str] | None = None,
        families: Sequence[Family] = (),
        max_bytes: int | None = None,
    ) -> None:
        roots, facts = roots or {}, facts or {}
        set_fields(self, locals())
        for name, root in self.roots.items():
            if not os.fspath(root):
                raise ConfigError(f"roots[{name!r}]={root!r}: expected a directory", got=root)
        for name, value in self.facts.items():
            if not value:
                raise ConfigError(
                    f"facts[{name!r}]={value!r}: expected a text that is not empty", got=value
                )
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"max_bytes={max_bytes!r}: expected 0 or more", got=max_bytes)


NO_TREES = TreeOptions()


class RestoreOptions(Struct, frozen=True):
    """The choices of one restore or check; `bundler.restore` says what each means.

    Raises:
        ConfigError: a choice has a value that it cannot have.
        ToolchainMismatch: not a POSIX system, where nothing can be placed.
    """

    cache_dir: str | os.PathLike[str] | None = None
    keep: Keep = "all"
    devices: Sequence[int] | None = None
    only: Only = "usable"
    trust: Trust = "kernels"
    rekey: bool = False
    allow_empty: bool = False
    trees: TreeOptions = NO_TREES
    # A `SignaturePolicy`, or None; its module is not imported for a restore that nobody asks
    # signatures of.
    signatures: Any = None
    moved: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"{name}={value!r}: expected {' or '.join(map(repr, choices))}", got=value
                )
        _check_devices(self.devices)
        if self.cache_dir is not None and not os.fspath(self.cache_dir):
            raise ConfigError(
                "cache_dir is an empty text; give a directory, or None for Triton's own",
                got=self.cache_dir,
            )
        if os.name != "posix":
            raise ToolchainMismatch(
                "restore needs a POSIX system (directories renamed over each other, no-follow"
                f" opens); this is {os.name}",
                platform=os.name,
            )


def _check_devices(devices: Sequence[int] | None) -> None:
    if devices is None:
        return
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise ConfigError(
            f"devices={devices!r}: expected device indices, such as [0, 1]", got=devices
        )
    if not devices or any(type(device) is not int or device < 0 for device in devices):
        raise ConfigError(
            f"devices={devices!r}: expected one or more device indices, such as [0, 1]", got=devices
        )


# ----------------------------------------------------------------------------------------- Reports


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

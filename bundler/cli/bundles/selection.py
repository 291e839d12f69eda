# SPDX-License-Identifier: Apache-2.0
"""`--kernel`: which kernels a command is about, by name, by the beginning of a name or of a key, or
by a glob.

The commands `inspect`, `extract` and `tune` choose kernels by `chosen`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from bundler.cli import wording
from bundler.cli.command import option
from bundler.errors import ConfigError, NotFound
from bundler.format.entries import Kernel
from bundler.store.stored_manifests import did_you_mean

T = TypeVar("T")
NAMED = 6
_NEAR = 3
HELP = "Only these kernels: a name, a glob, or the beginning of a name or of one key."

kernel_option = option("--kernel K", "wanted", HELP)


def chosen(
    items: Iterable[T],
    wanted: str | None,
    source: str,
    *,
    name: Callable[[T], str],
    key: Callable[[T], str],
) -> list[T]:
    """Return what is meant: of this name or glob; else with names that begin so; else the one key
    that does.

    Args:
        items: what there is.
        wanted: what the user wrote; None for everything.
        source: where the items are from, for errors.
        name: returns an item's name.
        key: returns an item's kernel key, empty for one without.

    Raises:
        NotFound: nothing is meant.
        ConfigError: several keys begin so.
    """
    listed = list(items)
    if wanted is None:
        return listed
    text = wanted.removesuffix("…")  # tables show keys so
    found = [item for item in listed if _fits(text, name(item), key(item))]
    found = found or [item for item in listed if text and name(item).startswith(text)]
    if found:
        return found
    found = [item for item in listed if text and key(item).startswith(text)]
    keys = {key(item): name(item) for item in found}
    if len(keys) > 1:
        raise ConfigError(
            f"several kernels in {source} have keys that begin with {text!r}: {_candidates(keys)};"
            " give more of the key",
            candidates=sorted(keys),
        )
    if not found:
        names = sorted({name(item) for item in listed})
        there = (
            f"it has {', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}"
            if names
            else "it has no kernels"
        )
        near = tuple(difflib.get_close_matches(text, names, n=_NEAR))
        hint = did_you_mean(near) or there
        raise NotFound(
            f"no kernel in {source} matches {wanted!r}; {hint}", pattern=wanted, near=near
        )
    return found


def chosen_kernels(kernels: Iterable[Kernel], wanted: str | None, source: str) -> list[Kernel]:
    """Return the kernels that are meant; raises as `chosen`."""
    return chosen(
        kernels, wanted, source, name=lambda kernel: kernel.name, key=lambda kernel: kernel.key
    )


def only_kernel(kernels: Sequence[Kernel], source: str) -> Kernel:
    """Return the one kernel that there is; raises `ConfigError` with the keys when there are
    others.
    """
    if len(kernels) != 1:
        keys = {kernel.key: kernel.name for kernel in kernels}
        raise ConfigError(
            f"{wording.count(len(keys), 'kernel')} in {source} {wording.plural(len(keys), 'is')}"
            f" meant, and one can be shown: {_candidates(keys) or 'there is none'}; give --kernel"
            " and a key",
            candidates=sorted(keys),
        )
    return kernels[0]


def _fits(text: str, name: str, key: str) -> bool:
    return fnmatch.fnmatchcase(name, text) or fnmatch.fnmatchcase(key, text)


def _candidates(keys: dict[str, str]) -> str:
    # As many characters as tell all of them apart.
    length = next(
        n for n in range(wording.KEY_CHARACTERS, 65) if len({key[:n] for key in keys}) == len(keys)
    )
    shown = [f"{key[:length]}… ({name})" for key, name in sorted(keys.items())]
    return ", ".join(shown[:NAMED]) + (
        f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    )

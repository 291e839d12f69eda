# SPDX-License-Identifier: Apache-2.0
"""`TreeOptions`: how the trees of servers' caches in a bundle are restored; part of
`RestoreOptions`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bundler.errors import ConfigError
from bundler.format.entries import FrozenValue, set_fields

if TYPE_CHECKING:
    from bundler.lifecycle.trees.family import Family


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

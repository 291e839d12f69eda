# SPDX-License-Identifier: Apache-2.0
"""`Counters`: what a session did so far, in numbers, as `Session.counters` and the report of a
process give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bundler.format.summary import Summarized


@dataclass(frozen=True, repr=False)
class Counters(Summarized):
    """What a session did so far in this process; a snapshot that does not change.

    Attributes:
        hits: kernels that Triton did not compile.
        found: the same by where they were: `triton` (its own directory), `tag`, `store`,
            `registered`.
        misses: kernels that were nowhere.
        compiles: kernels that Triton compiled and stored.
        compile_seconds: time that these took.
        seconds_saved: time that the compiles of the hits took when they were recorded, as far as
            known.
        published: kernels and files that were sent to the store.
        bytes_fetched, bytes_sent: their sizes, uncompressed.
        errors: how often something failed, by cause; the program went on.
        slowest: (name, seconds) of the compiles that took longest.
        strict_warnings: kernels that were compiled although strict mode `warn` was on, each counted
            once.
        launchers: modules that Triton was given in place of ones that a C compiler would have
            built: launchers, and `cuda_utils`.
        launchers_of_triton: how many of these it had to build or load itself, by reason.
        moved: of the hits, kernels that differ from the recorded one in line numbers alone.
    """

    hits: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    seconds_saved: float = 0.0
    published: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    slowest: tuple[tuple[str, float], ...] = ()
    strict_warnings: int = 0
    launchers: int = 0
    launchers_of_triton: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0

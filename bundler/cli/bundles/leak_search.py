# SPDX-License-Identifier: Apache-2.0
"""`find_leaks`: which paths, names of users and machines, and traces of source travel inside a
bundle, and which paths are stored as placeholders.

`inspect --leaks` calls it.
"""

from __future__ import annotations

import functools
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from bundler.cli import wording
from bundler.cli.terminal import Column, Screen
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.entries import Artifact, Kernel, entry_kind
from bundler.format.sentinel import CACHE_DIR, TRITON_DIR
from bundler.format.source_stripping import absolute_paths, source_traces, user_names, words_in

_TITLES = {
    "paths": "path that travels",
    "users": "user",
    "hosts": "machine",
    "sources": "what tells of the source",
}
# What the rows of each table call what they list.
_NAMES = {"paths": "path", "users": "name", "hosts": "name", "sources": "what"}
# Names of users and machines that are no secret, and words of any text.
_EVERYWHERE = {"root", "home", "user", "users", "localhost", "runner", "ubuntu", "admin", "test"}
_SHORTEST_NAME = 3
PLACES = {CACHE_DIR: "cache_dir", TRITON_DIR: "triton_dir"}
_SAID = {
    "cache_dir": "the cache directory, in {}: stored as a placeholder, does not travel",
    "triton_dir": "Triton's install directory, in {}: stored as a placeholder, does not travel",
}


def find_leaks(bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool) -> dict[str, Any]:
    """Search the files and facts of these kernels, and with `whole` what is beside them.

    Returns:
        `paths`: for each path the number of files and, by kind of file, where; `users` and `hosts`:
        the same for names of users, which paths tell, and of this user and machine; `sources`: for
        what tells of the source; `placeholders`: for each place that is stored without its path, in
        how many files.
    """
    kernels = list(kernels)
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    placeholders: Counter[str] = Counter()
    searched: dict[str, list[tuple[str, str]]] = {}
    for kind, artifact in _artifacts(bundle, kernels, whole=whole):
        placeholders.update({PLACES.get(span.place, "other") for span in artifact.spans})
        if artifact.digest not in searched:
            searched[artifact.digest] = _found(bundle.read(artifact))
        for leak in searched[artifact.digest]:
            counts[leak][kind] += 1
    for kind, data in _beside_files(bundle, kernels, whole=whole):
        for leak in _found(data):
            counts[leak][kind] += 1
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in _TITLES}
    ordered = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    for (table, what), where in ordered:
        row = {_NAMES[table]: what, "files": where.total(), "in": dict(where.most_common())}
        rows[table].append(row)
    return {**rows, "placeholders": dict(sorted(placeholders.items()))}


def _found(data: bytes) -> list[tuple[str, str]]:
    """Return (table, what) of each leak in a file."""
    paths = absolute_paths(data)
    me, host = _names_here()
    return [
        *(("paths", path) for path in paths),
        *(("users", name) for name in user_names(paths) | words_in(data, me)),
        *(("hosts", name) for name in words_in(data, host)),
        *(("sources", what) for what in source_traces(data)),
    ]


@functools.cache
def _names_here() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of this user and of this machine, where they are not words that stand
    everywhere.
    """
    user, host = os.path.basename(os.path.expanduser("~")), socket.gethostname().partition(".")[0]
    mine, its = (
        (name,) if len(name) >= _SHORTEST_NAME and name not in _EVERYWHERE else ()
        for name in (user, host)
    )
    return mine, its


def _artifacts(
    bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool
) -> Iterator[tuple[str, Artifact]]:
    for kernel in kernels:
        yield from ((artifact.kind, artifact) for artifact in kernel.artifacts)
    if whole:
        for entry in bundle.content.entries:
            if not isinstance(entry, Kernel):
                yield entry_kind(entry), entry.artifact


def _beside_files(
    bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool
) -> Iterator[tuple[str, bytes]]:
    """Yield what of a bundle is in no file: launch facts, key parts, tuning records, and what was
    observed.
    """
    for kernel in kernels:
        for kind, data in (("launch facts", kernel.facts_bytes), ("key parts", kernel.parts_bytes)):
            if data is not None:
                yield kind, data
    if whole:
        yield from (
            ("tuning record", wire.pack(record.to_wire())) for record in bundle.tuning_records
        )
        yield "observations", bundle.observed.encode()


def show_leaks(screen: Screen, leaks: dict[str, Any]) -> None:
    """Print what travels, the most frequent first, and what became of the places that we know."""
    screen.line()
    for table, title in _TITLES.items():
        if leaks[table]:
            screen.table(
                (Column(title, folds=True), Column("files", True), Column("where", folds=True)),
                [
                    (
                        leak[_NAMES[table]],
                        f"{leak['files']:,}",
                        ", ".join(f"{kind} {number}" for kind, number in leak["in"].items()),
                    )
                    for leak in leaks[table]
                ],
            )
            screen.line()
    for place, number in leaks["placeholders"].items():
        if place in _SAID:
            screen.line(_SAID[place].format(wording.count(number, "file")))
    if any(leaks[table] for table in _TITLES):
        screen.done(
            f"{wording.count(len(leaks['paths']), 'path')} would travel; `triton-bundler merge B"
            " --strip source -o C` leaves them out, with the texts and debug information"
        )
    else:
        screen.done(
            "no absolute path was found, nor anything that tells of users, machines or source"
        )

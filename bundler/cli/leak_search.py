# SPDX-License-Identifier: Apache-2.0
"""`find_leaks`: which absolute paths travel inside a bundle's files, and which are stored as placeholders.

`inspect --leaks` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from bundler.cli import wording
from bundler.cli.terminal import Column, Screen
from bundler.format.bundle import Bundle
from bundler.format.entries import Artifact, Kernel, entry_kind
from bundler.format.leaks import absolute_paths
from bundler.format.sentinel import CACHE_DIR, TRITON_DIR

PLACES = {CACHE_DIR: "cache_dir", TRITON_DIR: "triton_dir"}
_SAID = {
    "cache_dir": "the cache directory, in {}: stored as a placeholder, does not travel",
    "triton_dir": "Triton's install directory, in {}: stored as a placeholder, does not travel",
}


def find_leaks(bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool) -> dict[str, Any]:
    """Search the files of these kernels, and with `whole` those beside them.

    Returns:
        `paths`: for each path the number of files and, by kind of file, where; `placeholders`: for each place that
        is stored without its path, in how many files.
    """
    where: dict[str, Counter[str]] = {}
    placeholders: Counter[str] = Counter()
    searched: dict[str, set[str]] = {}
    for kind, artifact in _artifacts(bundle, kernels, whole=whole):
        placeholders.update({PLACES.get(span.place, "other") for span in artifact.spans})
        if artifact.digest not in searched:
            searched[artifact.digest] = absolute_paths(bundle.read(artifact))
        for path in searched[artifact.digest]:
            where.setdefault(path, Counter())[kind] += 1
    return {
        "paths": [
            {"path": path, "files": counts.total(), "in": dict(counts.most_common())}
            for path, counts in sorted(where.items(), key=lambda item: (-item[1].total(), item[0]))
        ],
        "placeholders": dict(sorted(placeholders.items())),
    }


def _artifacts(bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool) -> Iterable[tuple[str, Artifact]]:
    for kernel in kernels:
        yield from ((artifact.kind, artifact) for artifact in kernel.artifacts)
    if whole:
        for entry in bundle.content.entries:
            if not isinstance(entry, Kernel):
                yield entry_kind(entry), entry.artifact


def show_leaks(screen: Screen, leaks: dict[str, Any]) -> None:
    """Print the paths, the most frequent first, and what became of those we know."""
    screen.line()
    if leaks["paths"]:
        columns = (Column("path that travels", folds=True), Column("files", True), Column("where", folds=True))
        screen.table(columns, [
            (leak["path"], f"{leak['files']:,}", ", ".join(f"{kind} {number}" for kind, number in leak["in"].items()))
            for leak in leaks["paths"]
        ])  # fmt: skip
        screen.line()
    for place, number in leaks["placeholders"].items():
        if place in _SAID:
            screen.line(_SAID[place].format(wording.count(number, "file")))
    screen.done(f"{wording.count(len(leaks['paths']), 'path')} would travel; --keep launch leaves out the texts, not the "
                "debug information of binaries" if leaks["paths"] else "no absolute path was found")  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""A stranger can read bundles: a reader written from docs/format.md alone finds the same files as
ours.
"""

import ast
from pathlib import Path

import pytest

import bundler
from bundler.format.bundle import Bundle
from bundler.format.sentinel import CACHE_DIR, TRITON_DIR, from_sentinels

PATHS = ("/new place/é", "/opt/triton")


def ours(bundle):
    """Return {path: (stored, restored)} as the independent reader does."""
    files = [
        (f"{kernel.key}/{artifact.filename}", artifact)
        for kernel in bundle.kernels
        for artifact in kernel.artifacts
    ]
    files += [(e.path, e.artifact) for e in (*bundle.tuning_files, *bundle.helpers, *bundle.opaque)]
    paths = {CACHE_DIR: PATHS[0], TRITON_DIR: PATHS[1]}
    stored = {path: (bundle.read(artifact), artifact.spans) for path, artifact in files}
    return {
        path: (data, from_sentinels(data, spans, paths)) for path, (data, spans) in stored.items()
    }


def test_the_independent_reader_is_short_and_knows_nothing_of_us():
    """The independent reader has fewer than 130 lines, and imports only what the format needs."""
    text = Path(__file__).with_name("independent_reader.py").read_text(encoding="utf-8")
    modules = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert len(text.splitlines()) < 130
    assert modules == {"hashlib", "json", "struct", "msgpack", "zstandard"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("name", ["empty", "synthetic", "triton-3.7.1"])
def test_it_reads_golden_files(independent, name):
    """The independent reader gets the same digest, files, launch facts and key parts out of each
    golden bundle as we do.
    """
    path = Path(__file__).parents[1] / "data" / "v2.0" / f"{name}.tbundle"
    with Bundle.load(path) as bundle:
        assert independent.read(path.read_bytes(), PATHS) == (bundle.digest, ours(bundle))
        encoded = {
            kernel.key: (kernel.facts_bytes, kernel.parts_bytes) for kernel in bundle.kernels
        }
        assert independent.documents(path.read_bytes()) == encoded


def test_it_reads_a_real_cache(independent, real_cache):
    """The independent reader gets every file out of a bundle of a real cache as we do."""
    packed = bundler.pack(real_cache)
    data = packed.to_bytes()
    with Bundle.from_bytes(data) as bundle:
        digest, files = independent.read(data, PATHS)
        assert (digest, files) == (packed.digest, ours(bundle))


def test_a_real_cache_has_what_the_format_is_for(independent, real_cache):
    """A real Inductor cache has opaque sections with a prefix, so that the test above
    covers them.
    """
    if not (real_cache / "triton").is_dir():
        pytest.skip("a plain Triton cache has no opaque files; the other archive tests this")
    sections = independent.parse_table(bundler.pack(real_cache).to_bytes())
    assert [prefix for kind, *_, prefix in sections if kind == 5] == [[0, 2]]


def test_the_stored_files_are_those_of_the_directory(independent, real_cache):
    """Restored to where the cache lay, the files that the independent reader gives are those of the
    cache, byte for byte.
    """
    data = bundler.pack(real_cache).to_bytes()
    _, files = independent.read(data, (str(real_cache), "/nowhere"))
    kernels = {path.parent.name: path.parent for path in real_cache.rglob("__grp__*.json")}
    seen = 0
    for path, (stored, restored) in files.items():
        key, _, name = path.partition("/")
        if key in kernels and b"[[" not in stored:
            assert (kernels[key] / name).read_bytes() == restored
            seen += 1
    assert seen >= 5 * len(kernels) > 0

# SPDX-License-Identifier: Apache-2.0
"""Commands say "1 kernel", whatever they count."""

import re

import pytest

import bundler

pytestmark = pytest.mark.toolchain
# The verb of "1 of 2 kernels" and names such as "1 of this process" are no nouns that follow their
# number.
ONE_OF_MANY = re.compile(
    r"\b1 (?:more |other |tuning |helper |opaque"
    r" )?(?!is\b|was\b|has\b|process\b|pass\b|ms\b)[a-z]+s\b"
)


@pytest.fixture
def single(packed, tmp_path):
    """A bundle of one kernel."""
    path = tmp_path / "single.tbundle"
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90", names="gelu_kernel").save(path)
    return path


def test_one_of_anything_is_singular(cli, single, tmp_path):
    """No command says "1 kernels", of a bundle, a store or a cache directory with one
    kernel in it.
    """
    store, cache = f"file://{tmp_path}/store", tmp_path / "cache"
    lines = [
        ("inspect", single),
        ("inspect", single, "--leaks"),
        ("verify", single),
        ("diff", single, single),
        ("merge", single, single, "-o", tmp_path / "m.tbundle"),
        ("push", single, "--store", store, "--tag", "t"),
        ("tags", "--store", store),
        ("stats", "--store", store),
        ("verify", "--store", store),
        ("pull", "t", "-o", tmp_path / "p.tbundle", "--store", store),
        ("prune", "--store", store, "--dry-run"),
        ("restore", single, "--cache-dir", cache, "--only", "all", "--check"),
        ("restore", single, "--cache-dir", cache, "--only", "all"),
        ("pack", cache, "-o", tmp_path / "k.tbundle"),
    ]
    for line in lines:
        done = cli(*line)
        assert not ONE_OF_MANY.search(done.stdout + done.stderr), (
            line[0],
            done.stdout,
            done.stderr,
        )
        assert "Error" not in done.stderr

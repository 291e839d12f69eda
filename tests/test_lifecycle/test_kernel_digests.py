# SPDX-License-Identifier: Apache-2.0
"""The digests of the extension: of two files at once by the processor, or of one after the other by
OpenSSL, they are those of hashlib.
"""

import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.lifecycle import kernel_directory, kernel_writer

SOURCES = Path(kernel_writer.__file__).parent
# What lies around the ends of a block of 64 bytes, where the length of a file begins another one.
EDGES = [0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000]


@pytest.fixture(scope="module")
def openssl_only(tmp_path_factory):
    """The writer as it is built for processors that cannot hash themselves."""
    compiler = shutil.which("cc")
    if compiler is None or not (SOURCES / "_kernel_writer.c").exists():
        pytest.skip("no C compiler, or no sources")
    library = tmp_path_factory.mktemp("built") / "_kernel_writer.so"
    include = sysconfig.get_path("include")
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-pthread",
            "-DBUNDLER_OPENSSL_ONLY",
            f"-I{include}",
            "-o",
            library,
            SOURCES / "_kernel_writer.c",
            "-ldl",
        ],
        check=True,
        capture_output=True,
    )
    spec = importlib.util.spec_from_file_location("bundler.lifecycle._kernel_writer", library)
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    if not built.COMPARES_DIGESTS:
        pytest.skip("no libcrypto here")
    return built


@pytest.fixture(params=["usual", "openssl"])
def begin_writing(request):
    if request.param == "openssl":
        return request.getfixturevalue("openssl_only").begin_writing
    return pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    ).begin_writing


def kernel_of(number, contents, digests):
    names = tuple(f"f{place}" for place in range(len(contents)))
    return (
        f"t{number}",
        f"K{number}",
        names,
        tuple(contents),
        tuple(digests),
        (),
        -1,
        -1,
        "__grp__k.json",
        b"{}",
    )


def damaged_of(begin_writing, root, kernels):
    return [
        code == kernel_writer.DAMAGED
        for code in begin_writing(str(root), tuple(kernels), 1).finish()
    ]


def test_files_of_any_two_lengths_are_hashed_beside_each_other(begin_writing, tmp_path):
    """Whichever of two files ends first, and wherever in a block: each is taken for sound with its
    own digest, and with no other one.
    """
    rng = random.Random(7)
    pairs = [(rng.randbytes(one), rng.randbytes(two)) for one in EDGES for two in EDGES]
    right = [[hashlib.sha256(data).digest() for data in pair] for pair in pairs]
    sound = [
        kernel_of(number, pair, digests)
        for number, (pair, digests) in enumerate(zip(pairs, right, strict=True))
    ]
    (tmp_path / "sound").mkdir()
    assert not any(damaged_of(begin_writing, tmp_path / "sound", sound))
    for place in (0, 1):
        wrong = [[*digests] for digests in right]
        for digests in wrong:
            changed = bytearray(digests[place])
            changed[rng.randrange(32)] ^= 1 << rng.randrange(8)
            digests[place] = bytes(changed)
        kernels = [
            kernel_of(n, pair, digests)
            for n, (pair, digests) in enumerate(zip(pairs, wrong, strict=True))
        ]
        assert all(damaged_of(begin_writing, tmp_path, kernels))


@given(
    kernels=st.lists(
        st.lists(st.binary(max_size=400) | st.integers(0, 30_000).map(bytes), max_size=5),
        max_size=5,
    ),
    flips=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))),
)
@settings(max_examples=60, deadline=None)
def test_any_kernels_side_by_side(openssl_only, kernels, flips, tmp_path_factory):
    """Kernels of any number of files, of which some have another digest: those are refused, by both
    ways of hashing.
    """
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    made, expected = [], []
    for number, contents in enumerate(kernels):
        wrong = {place for of, place in flips if of == number and place < len(contents)}
        digests = [
            hashlib.sha256(data + b"x" * (place in wrong)).digest()
            for place, data in enumerate(contents)
        ]
        made.append(kernel_of(number, contents, digests))
        expected.append(bool(wrong))
    for begin in (extension.begin_writing, openssl_only.begin_writing):
        assert damaged_of(begin, tmp_path_factory.mktemp("there"), made) == expected


def test_a_directory_that_is_read_has_the_digests_of_its_files(tmp_path):
    begin = kernel_directory.compiled_reader()
    if begin is None:
        pytest.skip("the extension _kernel_reader was not built here")
    rng = random.Random(3)
    for number, size in enumerate(EDGES):
        (tmp_path / f"f{number}").write_bytes(rng.randbytes(size))
    ((contents, digests),) = begin((os.fsencode(tmp_path),), 100, 1 << 20, 1).finish()
    assert {len(data) for data in contents.values()} == {*EDGES}
    assert digests == {name: hashlib.sha256(data).digest() for name, data in contents.items()}

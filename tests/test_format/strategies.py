# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for everything that a bundle can hold."""

import string

from hypothesis import strategies as st

from bundler.format.constant_values import Value
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
)
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import Argument, LaunchFacts, LaunchSpec, TuningRecord
from bundler.format.manifest import Observation, Observed
from bundler.format.names import GROUP_PREFIX
from bundler.format.sentinel import Span

NAME_CHARACTERS = string.ascii_letters + string.digits + "._@-"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNT = st.integers(0, 2**64 - 1)
FILE_NAMES = st.text(NAME_CHARACTERS, min_size=1, max_size=20).filter(
    lambda name: name not in {".", ".."}
)
# A stem that begins as group files do is no kernel's: bundles refuse such a file.
STEMS = st.text(string.ascii_letters + string.digits + "_@-", min_size=1, max_size=12).filter(
    lambda stem: not stem.startswith(GROUP_PREFIX)
)
KEYS = st.one_of(
    st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", min_size=52, max_size=52),
    st.text("0123456789abcdef", min_size=64, max_size=64),
)
TARGETS = st.sampled_from(
    [Target("cuda", "90", 32), Target("cuda", "100", 32), Target("hip", "gfx942", 64)]
)

SCALARS = st.one_of(
    st.just(Value("none")),
    st.booleans().map(lambda x: Value("bool", x)),
    st.integers(-(2**63), 2**64 - 1).map(lambda x: Value("int", x)),
    st.integers(2**64, 2**500).map(lambda x: Value("int", str(-x))),
    st.binary(min_size=8, max_size=8).map(lambda x: Value("float", x)),
    st.tuples(st.sampled_from(["str", "dtype", "other"]), TEXT).map(lambda x: Value(*x)),
    st.tuples(TEXT, TEXT).map(lambda x: Value("jit", x)),
)


def _containers(inner):
    return st.one_of(
        st.tuples(st.sampled_from(["tuple", "list"]), st.lists(inner, max_size=3).map(tuple)).map(
            lambda x: Value(*x)
        ),
        st.lists(st.tuples(TEXT, inner), max_size=3).map(lambda x: Value("dict", tuple(x))),
        inner.map(lambda x: Value("constexpr", x)),
    )


def _nested(depth):
    # A dictionary takes three arrays a level, so four levels are within the limit wherever a value
    # stands.
    return SCALARS if depth == 0 else st.one_of(SCALARS, _containers(_nested(depth - 1)))


VALUES = _nested(3)
NAMED = st.lists(st.tuples(TEXT, VALUES), max_size=3).map(tuple)
BY_PATH = st.lists(st.tuples(st.lists(COUNT, max_size=3).map(tuple), VALUES), max_size=3).map(tuple)
ARGUMENTS = st.builds(
    Argument, TEXT, TEXT, st.none() | VALUES, st.booleans(), st.booleans(), st.booleans()
)
FACTS = st.builds(
    LaunchFacts,
    st.sampled_from(["ast", "ir"]),
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    NAMED,
    BY_PATH,
    BY_PATH,
    NAMED,
)
PARTS = st.builds(KeyParts, st.lists(st.tuples(TEXT, TEXT), max_size=4).map(tuple), st.booleans())
RECORDS = st.builds(
    TuningRecord, TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple), NAMED, TEXT
)
MAYBE = st.none() | COUNT
SPECS = st.builds(
    LaunchSpec,
    TEXT,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    MAYBE,
    MAYBE,
    MAYBE,
    MAYBE,
    MAYBE,
    st.booleans(),
    st.booleans(),
    VALUES,
    st.none(),
)
SPANS = st.lists(st.builds(Span, COUNT, COUNT, COUNT), max_size=2).map(tuple)
TOOLCHAINS = st.builds(Toolchain, st.none() | TEXT, st.none() | TEXT, st.none() | TEXT)
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)
OBSERVATIONS = st.builds(
    Observation,
    st.lists(COUNT, max_size=2).map(tuple),
    st.lists(TEXT, max_size=2).map(tuple),
    st.lists(st.tuples(TEXT, COUNT), max_size=2).map(tuple),
)
OBSERVED = st.builds(
    Observed,
    st.dictionaries(KEYS, OBSERVATIONS, max_size=3),
    st.lists(PAIRS, max_size=2).map(lambda x: tuple(sorted(x))),
)


class Blobs(dict):
    """Blobs by raw digest, filled while entries are drawn."""

    def artifact(self, draw, filename, *, min_size=0):
        data = draw(st.binary(min_size=min_size, max_size=60))
        self[sha256(data)] = data
        return Artifact(filename, digest_text(sha256(data)), len(data), draw(SPANS))


@st.composite
def kernels(draw, blobs):
    """Draw a kernel, and put its files into `blobs`."""
    stem, target = draw(STEMS), draw(TARGETS)
    kinds = draw(st.sets(st.sampled_from(["source", "ttir", "ttgir", "llir", "ptx", "dat"])))
    binary = "cubin" if target.backend == "cuda" else "hsaco"
    names = draw(
        st.permutations(
            [*(f"{stem}.{kind}" for kind in sorted(kinds)), f"{stem}.{binary}", f"{stem}.json"]
        )
    )
    artifacts = tuple(
        blobs.artifact(draw, name, min_size=int(name.endswith(binary))) for name in names
    )
    return Kernel(
        draw(KEYS),
        draw(TEXT),
        target,
        artifacts,
        draw(TOOLCHAINS),
        draw(SPECS),
        draw(st.none() | FACTS.map(LaunchFacts.to_bytes)),
        draw(st.none() | PARTS.map(KeyParts.to_bytes)),
    )


@st.composite
def placed(draw, blobs):
    """Draw an entry that is one file, and put that into `blobs`."""
    # A folder never has the name of a file, so that no path lies in another.
    folders = draw(st.lists(STEMS.map(lambda name: f"{name}.d"), max_size=5))
    filename = f"{draw(STEMS)}.f"
    path, artifact = "/".join([*folders, filename]), blobs.artifact(draw, filename)
    kind = draw(st.sampled_from([TuningFile, HelperLibrary, Opaque]))
    return kind(path, artifact, draw(TEXT)) if kind is HelperLibrary else kind(path, artifact)


@st.composite
def contents(draw):
    """Draw (entries, tuning records, blobs); keys and paths occur once."""
    blobs = Blobs()
    entries = draw(st.lists(kernels(blobs), max_size=3, unique_by=lambda k: k.key))
    entries += draw(st.lists(placed(blobs), max_size=4, unique_by=lambda e: e.path))
    return entries, draw(st.lists(RECORDS, max_size=2)), blobs

# SPDX-License-Identifier: Apache-2.0
"""Grids as text: expressions give what the functions give, and so does the C++ and the C that is
made of them.
"""

import ctypes
import random
import re
from types import SimpleNamespace

import compiling
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bundler.errors import BundlerError, ConfigError
from bundler.runtime.heuristics.grid_expressions import GridExpressions, TextGrid, expressions_of
from bundler.runtime.heuristics.grid_sources import (
    HELPERS,
    expression_text,
    grid_function,
    identifier,
    identifiers,
)
from bundler.runtime.heuristics.launch_expressions import bound, evaluate, names_in
from bundler.runtime.heuristics.launch_grids import launch_grid, open_grid

BLOCKS = {"XBLOCK": 32, "YBLOCK": 16, "ZBLOCK": 2, "R0_BLOCK": 64}
COMBO = {
    "num_kernels": 4,
    "min_blocks": 0,
    "default_config": None,
    "xnumel_0": 1000,
    "no_x_dim_0": False,
    "xnumel_1": None,
    "no_x_dim_1": False,
    "xnumel_2": 7,
    "no_x_dim_2": True,
    "xnumel_3": None,
    "no_x_dim_3": True,
}
COMBO_Y = COMBO | {"ynumel_0": 100, "ynumel_1": None, "min_blocks": 64}
OWN = {"XBLOCK_0": 128, "YBLOCK_0": 16, "XBLOCK_1": 64, "YBLOCK_1": 8}
COMPUTED = {
    "precomputed_grids": [
        {"config": {"BLOCK": 64}, "python": ["-((n) // -(64))", "1", 1]},
        {
            "config": {"BLOCK": 128},
            "python": ["(n + BLOCK - 1) // BLOCK", "max(1, n % 7)", "2*3 - 5"],
        },
    ]
}
# One of each kind, and of each way in which a config decides what of it is a number.
CASES = [
    ("Grid1D", BLOCKS, {}),
    ("Grid1D", {}, {}),
    ("Grid1D", {"XBLOCK": 1}, {}),
    ("Grid2D", BLOCKS, {}),
    ("Grid3D", BLOCKS, {}),
    ("BatchMatmulGrid3D", BLOCKS, {}),
    ("ProductGrid", BLOCKS, {}),
    ("ProductGrid", BLOCKS | {"PROGRAMS": 0}, {}),
    ("ProductGrid", BLOCKS | {"PROGRAMS": 132}, {}),
    ("Grid2DWithYZOverflow", BLOCKS, {}),
    ("Grid2DWithYZOverflow", {"XBLOCK": 8}, {}),
    ("MixOrderReductionGrid", {"RSPLIT_SIZE": 64, "XBLOCK": 2}, {}),
    ("CooperativeReductionGrid", {"RSPLIT": 8, "XBLOCK": 2}, {}),
    ("SplitScanGrid", {"XBLOCK": 1, "R0_BLOCK": 256}, {}),
    ("FixedGrid", {}, {"fixed_grid": ["_grid_0", "_grid_1", "_grid_2"]}),
    (
        "FixedGrid",
        {"BLOCK": 48},
        {"fixed_grid": ["-(-n // BLOCK)", "min(m, 7, 3 + n % 5)", "abs(m - n) % 9"]},
    ),
    ("PrecomputedGrid", {"BLOCK": 64}, COMPUTED),
    ("PrecomputedGrid", {"BLOCK": 128}, COMPUTED),
    *(
        (f"{kind}ComboKernelGrid", blocks, {"combo_grid_meta": case})
        for kind in ("Sequential", "RoundRobin", "SequentialFlatten")
        for blocks in (BLOCKS | OWN, {"XBLOCK_1": 4})
        for case in (COMBO, COMBO_Y, COMBO_Y | {"default_config": {"XBLOCK": 256, "YBLOCK": 2}})
    ),
]


def expressions(seed):
    """Return made-up expressions over `n` and `m`, the same for a seed."""
    chance = random.Random(seed)

    def made(depth):
        if depth == 0 or chance.random() < 0.2:
            return chance.choice(
                ["n", "m", str(chance.randint(0, 9)), str(chance.randint(0, 2**40))]
            )
        one, two = made(depth - 1), made(depth - 1)
        forms = (
            "({0} + {1})",
            "({0} - {1})",
            "({0} * {1})",
            "({0} // {1})",
            "({0} % {1})",
            "-({0})",
            "+({0})",
            "abs({0})",
            "max({0}, {1}, 3)",
            "min({0}, {1})",
            "max({0})",
            "-(-({0}) // ({1}))",
        )
        return chance.choice(forms).format(one, two)

    return [made(chance.randint(1, 4)) for _ in range(120)]


MADE = expressions(17)


@pytest.fixture(scope="module", params=["c++", "c"])
def compiled(request, tmp_path_factory):
    """Every grid and expression above as a function of one library, in both languages."""
    grids = [expressions_of(open_grid(kind, metadata), blocks) for kind, blocks, metadata in CASES]
    grids += [GridExpressions(text) for text in MADE]
    texts = [grid_function(f"grid_{number}", grid, "cuda") for number, grid in enumerate(grids)]
    shown = ['extern "C" {' if request.param == "c++" else ""]
    for number, grid in enumerate(grids):
        sizes = [f"s{place}" for place in range(len(grid.sizes))]
        parameters = "".join(f"int64_t {size}, " for size in sizes)
        passed = "".join(f"{size}, " for size in sizes)
        shown.append(f"int call_{number}({parameters}uint32_t *grid);")
        shown.append(
            f"int call_{number}({parameters}uint32_t *grid) {{ return"
            f" grid_{number}({passed}grid); }}"
        )
    shown.append("}" if request.param == "c++" else "")
    text = "\n".join(["#include <stdint.h>", HELPERS, *texts, *shown, ""])
    path = compiling.compile_text(
        text, tmp_path_factory.mktemp("grids") / "libgrids.so", language=request.param
    )
    library = ctypes.CDLL(str(path))

    def call(number, sizes):
        """Return the grid, or the status that says why there is none."""
        found = (ctypes.c_uint32 * 3)()
        values = [ctypes.c_int64(sizes[name]) for name in grids[number].sizes]
        status = library[f"call_{number}"](*values, found)
        return status or tuple(found)

    return SimpleNamespace(grids=grids, call=call)


SIZES = st.one_of(st.integers(0, 5000), st.integers(-3, 2**33), st.integers(0, 2**62))


def in_python(work):
    try:
        return work()
    except BundlerError:
        return None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(CASES) - 1), st.data())
def test_every_kind_of_grid_is_the_same_in_all_languages(compiled, number, data):
    """Sizes of no block, of many and of more than a device launches: the function, the expressions
    and the compiled text agree.
    """
    kind, blocks, metadata = CASES[number]
    expressions = compiled.grids[number]
    sizes = {name: data.draw(SIZES, name) for name in expressions.sizes}
    grid = open_grid(kind, metadata)
    expected = in_python(lambda: launch_grid(grid, blocks, {**blocks, **sizes}))
    got = compiled.call(number, sizes)
    assert (got if isinstance(got, tuple) else None) == expected
    assert (
        in_python(lambda: launch_grid(lambda _blocks, given: expressions.grid(given), {}, sizes))
        == expected
    )


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(MADE) - 1), SIZES, SIZES)
@example(0, -1, 0)
def test_arithmetic_is_pythons_or_refused(compiled, number, n, m):
    """Signs, roundings and remainders; what goes beyond 64 bits on the way is refused, and never
    another number.
    """
    value = in_python(lambda: evaluate(MADE[number], {"n": n, "m": m}))
    got = compiled.call(len(CASES) + number, {"n": n, "m": m})
    if isinstance(got, tuple):
        assert got == (value, 1, 1)
    elif got == 2:
        assert value is None or not 0 <= value < 2**31
    else:
        assert got == 1


def test_what_fits_64_bits_is_not_refused(compiled):
    """Of small sizes every made-up expression has in C++ what it has in Python; else the test above
    would say nothing.
    """
    known = 0
    for number, text in enumerate(MADE):
        if any(int(word) > 10**6 for word in re.findall(r"\d+", text)):
            continue
        value = in_python(lambda text=text: evaluate(text, {"n": 37, "m": 5}))
        expected = 1 if value is None else (value, 1, 1) if 0 <= value < 2**31 else 2
        assert compiled.call(len(CASES) + number, {"n": 37, "m": 5}) == expected, text
        known += isinstance(expected, tuple)
    assert known > 20


def test_the_texts_are_short_and_fold_what_is_known():
    """A number stands where the config and the metadata decide; the C++ rounds up in one step."""
    case = COMBO | {"xnumel_3": 5}
    assert expressions_of(
        open_grid("SequentialComboKernelGrid", {"combo_grid_meta": case}), {"XBLOCK": 128}
    ).axes == (
        "(-(-xnumel_1 // 128)) + 20",
        "1",
        "1",
    )
    assert expressions_of(open_grid("Grid1D", {}), {"XBLOCK": 1}).axes == ("xnumel", "1", "1")
    assert (
        expression_text("-(-n // 128)", {"n": "n"})
        == "bundler_ceildiv(n, INT64_C(128), &bundler_bad)"
    )


def test_what_has_no_text_is_a_typed_error():
    """A function of the user's, a number beyond 64 bits, a block that is missing, what is no
    expression.
    """
    with pytest.raises(
        ConfigError, match="a function of the user's has no text; write the grid as text"
    ):
        expressions_of(lambda blocks, sizes: (1, 1, 1), {})
    with pytest.raises(ConfigError, match="does not fit 64 bits"):
        expression_text(str(2**63), {})
    with pytest.raises(ConfigError, match="RSPLIT_SIZE"):
        expressions_of(open_grid("MixOrderReductionGrid", {}), {"XBLOCK": 2})
    with pytest.raises(ConfigError, match="not an expression"):
        names_in("__import__('os')")
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        expressions_of(open_grid("Grid1D", {}), {"XBLOCK": 2}).grid({"xnumel": -1})


def test_numbers_take_the_place_of_names():
    """Whole numbers alone, negative ones too; the names of functions stay."""
    assert bound("max(n, m) // max", {"n": -3, "max": 7, "m": 2.5}) == "max(-3, m) // 7"
    assert names_in("max(b, a) + b * max") == ("b", "a", "max")
    grid = TextGrid("-(-n // BLOCK)", "heads")
    assert grid({"n": 100, "BLOCK": 32, "heads": 8}) == (4, 8, 1)
    assert grid.expressions({"BLOCK": 32}).axes == ("-(-n // 32)", "heads", "1")


def test_names_fit_both_languages():
    """Words of the languages, macros and our own names are taken; no two names become one."""
    assert identifiers(["n", "default", "größe", "gr__e", "2x", "bundler_x", "int64_t"]) == {
        "n": "n",
        "default": "default_",
        "größe": "gr__e",
        "gr__e": "gr__e_",
        "2x": "k2x",
        "bundler_x": "kbundler_x",
        "int64_t": "kint64_t",
    }
    assert identifier("grid", ["grid"]) == "grid_"

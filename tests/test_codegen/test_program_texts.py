# SPDX-License-Identifier: Apache-2.0
"""The text of generated kernels: some that a reader can follow, parameters and metadata, masks,
names, fallbacks.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.kernels.kernel_plan import LARGEST_BLOCK  # noqa: E402
from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.runtime.heuristics.facts import (  # noqa: E402
    Device,
    Facts,
    Policy,
    ReductionHint,
    Setting,
)
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs  # noqa: E402
from bundler.runtime.heuristics.reduction_rules import (  # noqa: E402
    persistent_reduction_configs,
    reduction_configs,
)


@pytest.fixture
def golden(beside):
    """The module with their functions."""
    return beside("golden_programs")


@pytest.mark.parametrize(
    "name",
    [
        "add_relu",
        "broadcast",
        "transpose",
        "half_gate",
        "embedding",
        "padding",
        "row_sum",
        "softmax",
        "long_layer_norm",
        "argmax",
        "linear_gate",
        "scores",
        "quantized",
        "decode",
        "scaled",
        "patches",
        "lists",
        "tiles",
        "tiles_of_rows",
        "tiles_of_long_rows",
    ],
)
def test_the_text_of_a_kernel_is_the_one_that_was_read(golden, name):
    """A change of the text is seen: `python tests/test_codegen/golden_programs.py` writes it anew,
    to be read.
    """
    assert golden.text_of(name) == (golden.GOLDEN / f"{name}.txt").read_text()


def text(function, *inputs, **options):
    return "\n".join(generate(function, inputs, **options).sources.values())


def test_what_leaves_the_graph_in_16_bits_is_read_with_these_bits():
    """A statistic is that of the numbers that are stored, which a backward computes with; what is
    not stored keeps the precision of float32.
    """
    x, w = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    rounded = ".to(tl.bfloat16).to(tl.float32)"
    assert rounded in text(lambda a, b: (lambda y: (y, y.float().var(0)))(a * b), x, w)
    assert rounded in text(lambda a: (lambda y: (y, a - y))(a.sum(1, keepdim=True)), x)
    assert rounded not in text(lambda a, b: (a * b).float().var(0), x, w)
    single = x.float()
    assert rounded not in text(lambda a, b: (lambda y: (y, y.var(0)))(a * b), single, w.float())


def test_a_mask_that_is_always_true_is_left_out():
    """No block is larger than 4096, nor than the power of two at or above the size: multiples of
    4096 and powers of two fill every block.
    """
    for full in (16384, 3 * 4096, 512):
        assert "xmask" not in text(lambda a: a + 1, torch.zeros(full))
    for other in (16000, 3 * 512):
        assert "xmask = xindex < xnumel" in text(lambda a: a + 1, torch.zeros(other))


@pytest.mark.parametrize(
    "device",
    [
        Device("cuda", 132, major=9),
        Device("cuda", 16, major=12),
        Device("hip", 304, 64),
        Device("xpu", 64),
    ],
)
def test_no_candidate_has_a_larger_block_than_masks_count_on(device):
    """Whatever is known of a kernel: blocks are at most the size hint, which is the size itself for
    a power of two, and 4096 along x.
    """
    facts = [
        Facts(num_load=n, num_reduction=n, atomic_add=n > 4, max_xblock=LARGEST_BLOCK["x"])
        for n in (1, 12)
    ]
    seen = set()
    for fact, policy in itertools.product(
        facts, (Policy(), Policy(max_autotune=True), Policy(autotune_pointwise=False))
    ):
        setting = Setting(device, fact, policy)
        for x, y in itertools.product((1, 2, 64, 2048, 1 << 26), (1, 8, 512, 1 << 17)):
            found = [
                (hints, pointwise_configs(hints, setting))
                for hints in ({"x": x}, {"x": x, "y": y}, {"x": x, "y": y, "z": 4})
            ]
            for hint in ReductionHint:
                found.append(
                    ({"x": x, "r0_": y}, reduction_configs({"x": x, "r0_": y}, setting, hint=hint))
                )
                if y <= 1024:
                    found.append(
                        (
                            {"x": x, "r0_": y},
                            persistent_reduction_configs({"x": x, "r0_": y}, setting, hint=hint),
                        )
                    )
            for hints, configs in found:
                for config, (axis, hint) in itertools.product(configs, hints.items()):
                    block = config.kwargs.get(f"{axis.upper()}BLOCK", 1)
                    assert block <= min(hint, LARGEST_BLOCK[axis]), (hints, config)
                    seen.add((axis, block))
    assert ("x", 1024) in seen


def test_a_long_softmax_runs_over_its_row_twice():
    """Maximum and sum of exponentials in one pass, the results in another; a short row is held
    whole.
    """
    assert text(lambda a: torch.softmax(a, -1), torch.zeros(300, 2000)).count("for r0_offset") == 2
    assert "for " not in text(lambda a: torch.softmax(a, -1), torch.zeros(300, 200))


def only(function, *inputs, **options):
    (kernel,) = generate(function, inputs, **options).kernels.values()
    return kernel


def test_each_direction_of_memory_has_a_block():
    """A transposition has two blocks, three orders have three; what is smaller or read in one order
    has one.
    """
    a, b, c = (
        torch.zeros(sizes, device="meta") for sizes in ((32, 48, 64), (48, 64, 32), (64, 32, 48))
    )
    three = only(lambda a, b, c: a + b.permute(2, 0, 1) + c.permute(1, 2, 0), a, b, c)
    two = only(lambda a, b: a + b.permute(2, 0, 1), a, b)
    assert [(name, int(size)) for name, size in three.text.dimensions] == [
        ("z", 32),
        ("y", 48),
        ("x", 64),
    ]
    assert [(name, int(size)) for name, size in two.text.dimensions] == [("y", 32), ("x", 3072)]
    assert "'grid_type': 'Grid3D'" in three.source
    assert [name for name, _ in only(lambda a: a + 1, a.permute(2, 0, 1)).text.dimensions] == ["x"]


def test_more_programs_than_a_grid_has_along_y_go_on_along_z():
    """Beyond 65,535 the kernel counts along z too, and keeps its mask there."""
    long = only(
        lambda a, b: a + b.t(),
        torch.zeros(1 << 17, 4, device="meta"),
        torch.zeros(4, 1 << 17, device="meta"),
    )
    short = only(
        lambda a, b: a + b.t(),
        torch.zeros(1 << 12, 4, device="meta"),
        torch.zeros(4, 1 << 12, device="meta"),
    )
    assert "(tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * YBLOCK" in long.source
    assert "ymask = yindex < ynumel" in long.source
    assert "yoffset = tl.program_id(1) * YBLOCK" in short.source
    assert "ymask" not in short.source


def test_an_element_that_other_warps_hold_changes_behind_a_barrier():
    """Where a kernel of rows changes one element for each row in place, every warp has read it
    before.
    """

    def function(m, x):
        m.mul_(0.9).add_(x.mean(1))
        return x - m[:, None]

    lines = only(function, torch.zeros(20), torch.zeros(20, 70)).text.body
    place = next(n for n, line in enumerate(lines) if "tl.store(in_out_ptr0" in line)
    assert lines[place - 1] == "tl.debug_barrier()"
    assert "debug_barrier" not in only(lambda x: x.mul_(2), torch.zeros(20, 70)).source


def test_a_row_that_is_read_again_stays_in_the_cache():
    """The last load of each buffer goes first, in looped rows and in rows that are held."""
    lines = only(
        lambda a, b: torch.softmax(a + b, -1), torch.zeros(300, 2000), torch.zeros(300, 2000)
    ).text.body
    loads = [line for line in lines if "tl.load(" in line]
    assert [("evict_last" in line, "evict_first" in line) for line in loads] == [
        (True, False)
    ] * 2 + [(False, True)] * 2
    (held,) = [
        line
        for line in only(lambda a: a.sum(1), torch.zeros(300, 200)).text.body
        if "tl.load(" in line
    ]
    assert "evict_first" in held


def test_what_other_lanes_read_too_stays_in_the_cache():
    """A row that is added to each of many, and one number for each, where one dimension is both;
    what is read once goes by no rule, and neither does a row that a value names.
    """
    many, row, each = torch.zeros(30, 70), torch.zeros(70), torch.zeros(30, 1)
    lines = only(lambda a, b, c: a * c + b, many, row, each).text.body
    loads = {line.split("ptr")[1][0]: "evict_last" in line for line in lines if "tl.load(" in line}
    assert loads == {"0": False, "1": True, "2": True}
    named = only(lambda a, i: a[i] + a, many, torch.zeros(30, dtype=torch.int64)).text.body
    assert ["evict" in line for line in named if "in_ptr1" in line and "tl.load(" in line] == [
        False
    ] * 2


def test_an_index_that_is_read_is_asserted_unless_it_is_known():
    """An index that a tensor holds is asserted by name and size, where nobody asked otherwise; one
    that is counted is known.
    """
    table, rows = torch.zeros(100, 16), torch.zeros(32, dtype=torch.int64)
    kernel = only(lambda a, i: a[i], table, rows)
    (line,) = [line for line in kernel.text.body if "device_assert" in line]
    assert re.search(
        r'\(0 <= (tmp\d+)\) & \(\1 < 100\).*"index out of bounds: 0 <= \1 < 100"', line
    )
    assert "'assert_indirect_indexing': True" in kernel.source
    unasked = only(lambda a, i: a[i], table, rows, options=GenerateOptions(assert_indices=False))
    counted = only(lambda a: a[torch.arange(32) * 2] + 1, table)
    for other in (unasked, counted):
        assert "device_assert" not in other.source
        assert "'assert_indirect_indexing': False" in other.source


@pytest.mark.parametrize("size", [(112, 112), (100, 90)])
def test_an_image_that_is_turned_and_enlarged_is_read_where_it_lies(size):
    """By a power of two, places are part of the address; by another number they are values of 32
    bits, of which nothing is asserted.
    """
    enlarged = torch.nn.functional.interpolate
    source = only(
        lambda a: enlarged(a.roll((5, -7), (2, 3)), size=size) + 1, torch.zeros(4, 8, 56, 56)
    ).source
    assert "device_assert" not in source
    assert "int64" not in source
    assert ("float32)" in source) == (size == (100, 90))


def test_facts_that_heuristics_look_at_are_in_the_text():
    """A long row, whose second reading a block as long as the row would save, says so."""
    assert (
        "add_persistent_rblock=True"
        in only(lambda a: torch.softmax(a, -1), torch.zeros(300, 4096)).source
    )
    assert "add_persistent_rblock" not in only(lambda a: a.sum(1), torch.zeros(300, 4096)).source


def test_memory_across_the_rows_decides_how_they_are_reduced():
    """What each row has of its own decides, not a number for each element of it, which all rows
    share: columns are reduced with blocks of columns.
    """

    def function(a, b, m):
        return ((a - m[:, None]) * b).sum(0), a * 2 + b.sum(1, keepdim=True)

    a, m = torch.zeros(4096, 1024, device="meta"), torch.zeros(4096, device="meta")
    columns, step, rows = sorted(
        generate(function, [a, a, m]).kernels.values(),
        key=lambda k: k.text.dimensions[0][1] % 32768,
    )
    assert [(name, int(size)) for name, size in columns.text.dimensions] == [
        ("x", 32768),
        ("r0_", 128),
    ]
    assert (columns.text.kind, columns.text.reduction_hint) == ("reduction", "OUTER")
    # The other result reads the same tensors along their rows, so it is of the kernel that reduces
    # these.
    assert (rows.text.kind, rows.text.reduction_hint, rows.text.counts["num_store"]) == (
        "persistent_reduction",
        "INNER",
        1,
    )
    assert (step.text.reduction_hint, step.text.counts["num_reduction"]) == ("OUTER", 1)


@pytest.mark.parametrize(("dim", "told"), [(0, True), (1, False)])
def test_kernels_across_memory_have_tiles_of_their_own(dim, told):
    """A reduction across memory says so, so that heuristics take the tiles that were measured for
    it.
    """
    program = generate(lambda a: a.sum(dim), [torch.zeros(1024, 128, device="meta")])
    assert all(("column_tiles=True" in source) is told for source in program.sources.values())


def test_what_several_sums_add_is_loaded_before_the_first():
    """The threads of a program wait for each other in a sum; loads behind it would begin late."""

    def function(a, b, c):
        return [(a * one).sum(0) for one in (b, c)]

    program = generate(function, [torch.zeros(1024, 128, device="meta")] * 3)
    (step,) = [k.source for k in program.kernels.values() if k.text.kind != "reduction"]
    lines = step.splitlines()
    loads = [number for number, line in enumerate(lines) if "tl.load(" in line]
    sums = [number for number, line in enumerate(lines) if "tl.sum(" in line]
    assert len(loads) == len(sums) == 2
    assert max(loads) < min(sums)


def test_equal_kernels_are_one():
    """Two kernels that differ in nothing but their names are launched under one."""

    def function(a):
        b = a.t() @ a + 1
        return b @ b + 1

    program = generate(function, [torch.zeros(8, 8)])
    assert len(program.kernels) == 1
    assert sum(1 for step in program.plan.steps if type(step).__name__ == "Launch") == 2


def test_the_signature_says_types_alignment_and_what_changes():
    """Pointers come first, then numels; multiples of 16 are marked; an input that is changed is an
    in-out pointer.
    """

    def function(x, y):
        x.add_(y)
        return x * 2

    (kernel,) = generate(function, [torch.zeros(32), torch.zeros(32)]).kernels.values()
    assert [(p.name, p.type) for p in kernel.text.parameters] == [
        ("in_out_ptr0", "*fp32"),
        ("in_ptr0", "*fp32"),
        ("out_ptr0", "*fp32"),
        ("xnumel", "i32"),
    ]
    assert "'mutated_arg_names': ['in_out_ptr0']" in kernel.source
    assert kernel.source.count("['tt.divisibility', 16]") == 4
    assert re.fullmatch(r"triton_poi_fused_add_mul_0", kernel.name)


def test_what_is_not_generated_is_called_and_listed():
    """A product of matrices and a sort of long rows are calls of the wrapper, each with its
    reason.
    """

    def function(a, b):
        return torch.sort(a @ b).values + 1

    program = generate(function, [torch.zeros(4, 8), torch.zeros(8, 2000)])
    assert [fallback.operator for fallback in program.fallbacks] == [
        "aten.mm.default",
        "aten.sort.default",
    ]
    assert all(fallback.reason for fallback in program.fallbacks)
    assert len(program.kernels) == 1


def test_the_text_needs_no_torch():
    """No generated module names torch."""
    assert "torch" not in text(
        lambda a: torch.softmax(a, -1).to(torch.bfloat16), torch.zeros(4, 30)
    ).replace("torch_", "")


def test_memory_that_nobody_reads_again_is_written_over():
    """What a call returned is taken by the kernel that reads it last."""
    program = generate(lambda a, b: (a @ b).relu(), [torch.zeros(4, 8), torch.zeros(8, 4)])
    (kernel,) = program.kernels.values()
    assert [parameter.name for parameter in kernel.text.parameters] == ["in_out_ptr0", "xnumel"]


def test_a_row_wise_result_does_not_join_a_sum_of_columns():
    """A sum of columns that is done in pieces has as many elements as the input; what reads the
    input along its rows is a kernel of its own.
    """

    def function(a, g):
        return (a * g).sum(0), a + 1

    program = generate(function, [torch.empty(4096, 1024), torch.empty(4096, 1024)])
    reducing = [source for source in program.sources.values() if "tl.sum(" in source]
    assert not any("fused_add" in source for source in reducing)
    assert len(program.kernels) > len(reducing)


HERE = Path(__file__).resolve().parent
#: Further interpreters to compare, as paths; those of these names on PATH are found.
PYTHONS = ("python3.11", "python3.12", "python3.13")


def text_digest(python, seed):
    """Return the digest of texts that an interpreter generates; None where it lacks what the
    generator needs.
    """
    path = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": os.environ["PATH"],
    }
    asked = subprocess.run(
        [python, "-c", "import sympy, msgspec"],
        env=environment,
        capture_output=True,
        check=False,
        timeout=60,
    )
    if asked.returncode:
        return None
    done = subprocess.run(
        [python, str(HERE / "text_worker.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_text_is_the_same_in_every_interpreter_and_for_every_hash_seed():
    """Equal graphs have equal texts and plans in processes of Python 3.11, 3.12 and 3.13, those
    that are here, and whatever the hash seed.
    """
    others = [
        *filter(None, map(shutil.which, PYTHONS)),
        *filter(None, os.environ.get("BUNDLER_TEST_PYTHONS", "").split(os.pathsep)),
    ]
    found = {
        (python, seed): text_digest(python, seed)
        for python in dict.fromkeys([sys.executable, *others])
        for seed in ("1", "4242")
    }
    compared = {python for (python, _), digest in found.items() if digest is not None}
    assert sys.executable in compared
    assert len({digest for digest in found.values() if digest is not None}) == 1, found
    if len(compared) == 1:
        pytest.skip(
            f"no other interpreter with sympy and msgspec is here: {', '.join(others) or 'none'};"
            " name one in BUNDLER_TEST_PYTHONS"
        )

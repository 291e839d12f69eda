# SPDX-License-Identifier: Apache-2.0
"""Products of matrices as kernels of a bundle (`templates="all"`): numbers, what shares a kernel,
masks, builds, and launches without torch.
"""

import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.loops.fusion import LoopGroup  # noqa: E402
from bundler.codegen.lower import lower_graph  # noqa: E402
from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402
from bundler.errors import UnsupportedOperator  # noqa: E402
from bundler.format.opaque_files import program_name  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Launch,
    OperatorStep,
    read_plan,
)
from bundler.runtime.program.program_summary import summary_of  # noqa: E402

TEMPLATES = GenerateOptions(templates="all")
TARGETS = ("cuda:90", "hip:gfx942")


def generated(function, *inputs, **options):
    return generate(function, inputs, options=GenerateOptions(templates="all", **options))


def full(*sizes, dtype=torch.float32):
    return torch.zeros(sizes, dtype=dtype)


def test_numbers_are_those_of_float64_within_a_bound(interpreted):
    """Sums and their scales, what shares a product's kernel, and inputs that change."""
    cases = ("sums", "repeated", "epilogues", "laid_out", "small", "changed_inputs", "single_rows")
    assert interpreted("product_worker.py", *cases).strip() == str(len(cases))


def test_numbers_of_operands_that_are_computed_scaled_or_cut(interpreted):
    """Operands computed where they are loaded, 8-bit floats, patches of images."""
    cases = ("prologues", "wide_prologues", "scaled", "patches", "turns", "siblings")
    assert interpreted("product_worker.py", *cases).strip() == str(len(cases))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [("100",), ("split_sums", "other_dtypes", "changing_sizes", "measured", "modules")],
    ids=" ".join,
)
def test_any_shape_any_strides_any_module(interpreted, cases):
    """Drawn: no rows, one, odd ones; transposed, sliced, repeated, computed; each dtype. Sums in
    pieces, integers, sizes that change, and whole modules.
    """
    assert interpreted("product_worker.py", *cases).strip() == str(len(cases))


def test_without_the_option_products_are_called():
    """As ever: the default decides nothing anew."""
    program = generate(torch.mm, [full(4, 5), full(5, 6)])
    assert [one.operator for one in program.fallbacks] == ["aten.mm.default"]
    assert GenerateOptions().templates == "none"


def test_a_program_calls_no_operator_and_says_so():
    """Linear layers with what follows are one launch each, and the plan stays data."""
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    program = generated(lambda x: layer(x) + x, full(2, 9, 32))
    plan = read_plan(program.plan.to_json())
    assert not any(isinstance(step, OperatorStep) for step in plan.steps)
    assert [step.kernel[:10] for step in plan.steps if isinstance(step, Launch)] == [
        "triton_mm_"
    ] * 2
    assert not summary_of("program", plan).operators
    assert not program.fallbacks


@pytest.mark.parametrize(
    ("function", "kernels", "why"),
    [
        (lambda a, b: (a @ b).relu(), 1, "an epilogue"),
        (
            lambda a, b: (lambda y: (y, y.relu()))(a @ b),
            1,
            "what leaves the graph too is stored beside it",
        ),
        (lambda a, b: (a @ b).relu() * (a @ (b + 1)), 2, "a kernel has one product"),
        (lambda a, b: (a @ b).softmax(1), 2, "rows are reduced by another kernel"),
        (lambda a, b: (a + 1) @ b.sigmoid(), 1, "operands are computed where they are loaded"),
        (
            lambda a, b: (lambda c: (c @ b, c.T @ b))(a + 1),
            3,
            "an operand that others read too is stored",
        ),
        (lambda a, b: (lambda c: (c @ b, c))(a + 1), 2, "so is one that leaves the program"),
        (lambda a, b: (lambda c: c @ c.T)(a.exp()), 2, "and one that is read twice"),
        (lambda a, b: (a * torch.arange(32.0)) @ b, 2, "and what is no tensor's"),
        (lambda a, b: a[(a[:, 0] > 0).long()] @ b, 2, "and what values decide where it is"),
        (lambda a, b: ((a @ b) + 1).t().contiguous(), 1, "a result may lie in another order"),
        (lambda a, b: ((a @ b) + 1).flip(0), 2, "but for one that runs backwards"),
        (lambda a, b: (a.t() @ b.t()).t(), 1, "a transposed operand is read where it lies"),
        (lambda a, b: (a @ b) @ b, 2, "a product of a product"),
        (
            lambda a, b: torch.zeros(2, 32).index_add(0, (a[:, 0] > 0).long(), a @ b),
            3,
            "what is added at places that values decide is added by another kernel",
        ),
    ],
)
def test_what_shares_a_kernel_with_a_product(function, kernels, why):
    """Only what is computed of each element and stored."""
    program = generated(function, full(32, 32), full(32, 32))
    assert len([s for s in program.plan.steps if isinstance(s, Launch)]) == kernels, why


@pytest.mark.parametrize(
    ("function", "dtype", "used", "why"),
    [
        (lambda a, b: torch.nn.functional.gelu(a @ b), torch.bfloat16, True, "behind a product"),
        (lambda a, b: 1 + (a @ b).float().erf(), torch.float16, True, "whoever writes it"),
        (lambda a, b: torch.nn.functional.gelu(a @ b), torch.float32, False, "sums take longer"),
        (lambda a, b: (a @ b).float().erf() + 2, torch.bfloat16, False, "another sum"),
        (lambda a, b: (a @ b).float().erf(), torch.bfloat16, False, "small ones have digits"),
        (lambda a, b: torch.nn.functional.gelu(a) @ b, torch.bfloat16, False, "same as stored"),
    ],
)
def test_the_error_function_behind_a_product_is_a_short_one(function, dtype, used, why):
    """It is computed while nothing is multiplied."""
    (source,) = generated(function, *[full(64, 64, dtype=dtype)] * 2).sources.values()
    assert ("lib.one_plus_erf(" in source, "libdevice.erf(" in source) == (used, not used), why


@pytest.mark.parametrize(
    ("rows", "columns", "kernels", "why"),
    [
        (4, 1024, 2, "each block of columns would wait for both"),
        (1, 1024, 2, "each program would compute all of a single row"),
        (256, 128, 1, "a block of columns reads no more than was stored"),
        (256, 4096, 2, "each of many blocks would read both"),
    ],
)
def test_an_operand_of_two_tensors_is_computed_where_that_reads_no_more(
    rows, columns, kernels, why
):
    """Else it is stored once, and read as often as any."""
    half = torch.bfloat16
    gate, weight = full(rows, 512, dtype=half), full(columns, 512, dtype=half)
    program = generated(
        lambda a, b, w: torch.nn.functional.linear(a.sigmoid() * b, w), gate, gate + 1, weight
    )
    assert len(program.sources) == kernels, why


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("function", "inputs", "reaches", "why"),
    [
        (torch.mm, (full(9, 24, dtype=HALF), full(24, 16, dtype=HALF)), True, "rows and columns"),
        (
            lambda a, b: a.t() @ b.t(),
            (full(24, 16, dtype=HALF), full(40, 24, dtype=HALF)),
            True,
            "whichever lie along memory",
        ),
        (torch.bmm, (full(3, 9, 24, dtype=HALF), full(3, 24, 8, dtype=HALF)), True, "of a batch"),
        (
            lambda a, b: a[:, 8:32] @ b[2:],
            (full(9, 40, dtype=HALF), full(26, 16, dtype=HALF)),
            True,
            "parts of them",
        ),
        (torch.mm, (full(9, 25, dtype=HALF), full(25, 16, dtype=HALF)), False, "a row of 50 bytes"),
        (
            lambda a, b: a[:, 1:25] @ b,
            (full(9, 40, dtype=HALF), full(24, 16, dtype=HALF)),
            False,
            "begins between 16 bytes",
        ),
        (
            lambda a, b: a[:, ::2] @ b,
            (full(9, 48, dtype=HALF), full(24, 16, dtype=HALF)),
            False,
            "every other column",
        ),
        (
            lambda a, b: a.as_strided((9, 24), (8, 1)) @ b,
            (full(9, 40, dtype=HALF), full(24, 16, dtype=HALF)),
            False,
            "rows lie over each other",
        ),
        (
            lambda a, b: (a * 2) @ b,
            (full(9, 24, dtype=HALF), full(24, 16, dtype=HALF)),
            False,
            "an operand is computed",
        ),
        (torch.mm, (full(9, 24), full(24, 16)), False, "float32 lies in registers"),
        (
            lambda a, b: (a @ b).float(),
            (full(9, 24, dtype=HALF), full(24, 16, dtype=HALF)),
            False,
            "what is stored has no room beside the next operands",
        ),
        (
            lambda a, b: (a @ b + torch.ones(16)).to(HALF),
            (full(9, 24, dtype=HALF), full(24, 16, dtype=HALF)),
            True,
            "a row of float32 has",
        ),
    ],
)
def test_descriptors_reach_operands_that_lie_as_they_ask(function, inputs, reaches, why):
    """Then a kernel has the form in which some programs take all blocks in turn."""
    (source,) = generated(function, *inputs).sources.values()
    assert len(re.findall(r"desc[01] = ", source)) == 2 * reaches, why
    assert ("PROGRAMS: tl.constexpr" in source) == reaches


@pytest.mark.parametrize(
    ("rows", "dynamic", "reaches"), [(9, False, True), (9, True, False), (2**28, False, False)]
)
def test_sizes_that_change_and_wide_indices_leave_pointers(rows, dynamic, reaches):
    """A descriptor's strides are numbers, and its offsets have 32 bits."""
    inputs = [torch.empty(sizes, dtype=HALF, device="meta") for sizes in ((rows, 24), (40, 24))]
    program = generate(torch.nn.functional.linear, inputs, options=TEMPLATES, dynamic=dynamic)
    assert ("PROGRAMS" in "".join(program.sources.values())) == reaches


@pytest.mark.parametrize(
    ("rows", "columns", "length", "pieces"),
    [
        (1, 1024, 4096, 4),
        (1, 64, 8192, 16),
        (16, 4096, 4096, 1),
        (1, 1024, 4000, 1),
        (1, 64, 1024, 1),
        (32, 512, 8192, 8),
        (33, 512, 8192, 1),
        (512, 512, 8192, 1),
        (2048, 2048, 2048, 1),
        (1, 64, 2048 + 128, 1),
    ],
)
def test_few_rows_and_columns_are_summed_up_in_pieces(rows, columns, length, pieces):
    """As many as keep a device busy, each long enough and of one length without masks."""
    program = generated(torch.mm, full(rows, length), full(length, columns))
    launches = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert launches[0].sizes["znumel"] == pieces
    assert len(launches) == 1 + (pieces > 1)
    assert "r0_row < r0_numel" not in next(iter(program.sources.values())) or length == 4000


@pytest.mark.parametrize(
    ("rows", "columns", "length", "pieces"),
    [
        (197, 768, 3072, 4),
        (256, 1024, 4096, 4),
        (64, 1024, 2048, 4),
        (512, 768, 3072, 1),
        (197, 768, 1024, 1),
        (64, 4096, 4096, 1),
    ],
)
def test_a_norm_adds_up_few_pieces_of_few_tiles(rows, columns, length, pieces):
    """It reads the sum anyway, so there is no launch more; without a norm there would be."""

    def layer(x, w, b, residual):
        product = torch.nn.functional.linear(x, w, b) + residual
        return product, torch.nn.functional.layer_norm(product, (columns,))

    inputs = full(rows, length), full(columns, length), full(columns), full(rows, columns)
    program = generated(layer, *inputs)
    launches = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert launches[0].sizes["znumel"] == pieces
    assert len(launches) == 2
    alone = generated(lambda *given: layer(*given)[0], *inputs)
    assert [step.sizes["znumel"] for step in alone.plan.steps if isinstance(step, Launch)] == [1]


def test_what_changes_in_between_is_read_before():
    """An operand is stored where an operator that is called writes what it is computed of."""
    from bundler.codegen.loops.lazy_tensors import GraphBuilder
    from bundler.codegen.templates.prologues import with_prologues

    graph = lower_graph(trace(lambda a, b: (a + 1) @ b, [full(8, 8), full(8, 8)]), templates=True)
    builder = graph.builder
    assert isinstance(builder, GraphBuilder)
    (stored, product) = builder.nodes
    assert with_prologues(builder, builder.nodes, (), {})[0].is_product
    (read,) = stored.reads
    changed = replace(stored, buffer=read)
    kept = with_prologues(builder, [stored, changed, product], (), {})
    assert kept == [stored, changed, product]


def halves(a, b):
    """Multiply the sum of two halves of rows of 256."""
    return (a[:, :128] + a[:, 128:]) @ b[:128]


def normed(a, b):
    """Multiply a norm of rows."""
    return torch.nn.functional.rms_norm(a, a.shape[-1:]) @ b


@pytest.mark.parametrize(
    ("function", "sizes", "dtype", "computed", "why"),
    [
        (lambda a, b: torch.nn.functional.gelu(a) @ b, (128, 256, 128), HALF, True, "once"),
        (lambda a, b: torch.nn.functional.gelu(a) @ b, (128, 256, 256), HALF, False, "twice"),
        (normed, (197, 512, 128), HALF, True, "once, in a few steps"),
        (normed, (197, 768, 128), HALF, False, "once, in many steps"),
        (normed, (4096, 768, 128), HALF, True, "storing so many rows takes longer"),
        (normed, (197, 768, 2304), HALF, False, "for each block of columns"),
        (normed, (16, 768, 2304), HALF, False, "however few rows"),
        (lambda a, b: a.relu() @ b, (197, 768, 2304), HALF, False, "however little it is"),
        (lambda a, b: a.to(HALF) @ b.to(HALF), (512, 512, 512), torch.int8, True, "fewer bytes"),
        (
            lambda a, b: (a & 7).to(HALF) @ ((b >> 4).to(HALF) * 0.5),
            (512, 512, 512),
            torch.int8,
            True,
            "and an instruction or two",
        ),
        (
            lambda a, b: a.to(HALF).sigmoid() @ b.to(HALF),
            (512, 512, 512),
            torch.int8,
            False,
            "of fewer bytes, but a slow function",
        ),
        (
            lambda a, b: (a.to(HALF) / 3) @ b.to(HALF),
            (64, 2048, 64),
            torch.int8,
            True,
            "of fewer bytes, once",
        ),
        (lambda a, b: (a * 0.5) @ b, (512, 128, 512), HALF, True, "summed up in one block"),
        (lambda a, b: a.exp() @ b, (512, 128, 512), HALF, False, "in one block, but slow"),
        (halves, (512, 256, 256), HALF, True, "two reads for each of two blocks"),
        (halves, (512, 256, 1024), HALF, False, "two reads for each of eight"),
        (lambda a, b: (a * 0.5) @ b, (512, 256, 512), HALF, False, "in two blocks"),
    ],
)
def test_what_makes_a_product_wait_is_stored_first(function, sizes, dtype, computed, why):
    """Blocks that are loaded as they lie are copied ahead; those that are computed are waited
    for.
    """
    rows, length, columns = sizes
    program = generated(function, full(rows, length, dtype=dtype), full(length, columns).to(dtype))
    (source,) = (text for text in program.sources.values() if "tl.dot(" in text)
    assert ("left = tmp" in source) == computed, why


def several(x, *weights):
    """Multiply one operand by several."""
    return tuple(x @ weight for weight in weights)


def many(count, *sizes):
    return [full(*sizes, dtype=HALF) for _ in range(count)]


@pytest.mark.parametrize(
    ("function", "inputs", "launches", "why"),
    [
        (several, (full(40, 64, dtype=HALF), *many(3, 64, 96)), [3], "query, key and value"),
        (lambda a, b, c, d: (a @ b, c @ d), many(4, 32, 32), [2], "what has nothing in common"),
        (
            lambda x, a, b: ((x @ a).relu(), (x @ b).relu() + 1),
            many(3, 32, 32),
            [1, 1],
            "other epilogues",
        ),
        (
            lambda x, a, b: (lambda y: ((x @ a).relu(), y, y.relu()))(x @ b),
            many(3, 32, 32),
            [1, 1],
            "one stores its product, too",
        ),
        (
            lambda x, a, b: ((x @ a).sigmoid() * 2, (x @ b).sigmoid() * 2),
            many(3, 32, 32),
            [2],
            "equal ones",
        ),
        (lambda x, a, b: (x @ a) * (x @ b), many(3, 32, 32), [1, 1], "one reads the other"),
        (lambda x, a, b: (x @ a) @ b, many(3, 32, 32), [1, 1], "one multiplies the other"),
        (
            lambda x, a, b: (x @ a, x @ b[:, 1:]),
            [*many(2, 32, 32), full(32, 33, dtype=HALF)],
            [1, 1],
            "an address that is no multiple of 16",
        ),
        (several, [*many(2, 32, 32), *many(2, 32, 48)], [1, 2], "of equal sizes alone"),
        (several, [*many(3, 32, 32), full(32, 32).to(HALF).t()], [2, 1], "that lie alike"),
        (lambda x, a, b: (x @ a, x @ b), many(3, 4, 32, 32), [4, 4], "batches are many already"),
        (several, (full(2048, 32, dtype=HALF), *many(2, 32, 2304)), [1, 1], "large ones"),
        (several, many(11, 32, 32), [8, 2], "as many as each program may choose from"),
    ],
)
def test_small_products_that_are_alike_share_a_launch(function, inputs, launches, why):
    """Each is too small for a large device, and a launch takes as long."""
    program = generated(function, *inputs)
    steps = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert [step.sizes["znumel"] for step in steps] == launches, why


@pytest.mark.slow
def test_products_that_share_a_launch_compile_for_both_makers(tmp_path):
    """Each candidate, with pointers that are chosen."""
    program = generated(several, *many(4, 72, 72), sources=str(tmp_path))
    assert len(program.kernels) == 1
    assert program.build((*TARGETS, "cuda:80", "cuda:100"), candidates=8).kernels


@pytest.mark.parametrize(
    ("function", "inputs", "words"),
    [
        (
            lambda a, s: torch._scaled_mm(a, a.t(), s, s),
            (full(16, 16).to(torch.float8_e4m3fn), full()),
            "a result in float8_e4m3fn",
        ),
        (
            lambda x, w: torch.conv2d(x, w, stride=2, padding=2),
            (full(1, 3, 8, 8), full(4, 3, 2, 2)),
            "windows do not overlap",
        ),
        (
            lambda x, w: torch.conv2d(x, w, stride=2, groups=3),
            (full(1, 3, 8, 8), full(6, 1, 2, 2)),
            "windows do not overlap",
        ),
        (
            lambda x, w: torch.conv_transpose2d(x, w, stride=2),
            (full(1, 3, 8, 8), full(3, 4, 2, 2)),
            "windows do not overlap",
        ),
    ],
)
def test_what_is_no_product_is_refused_with_the_reason(function, inputs, words):
    """What a kernel would compute otherwise, or not at all."""
    with pytest.raises(UnsupportedOperator, match=words):
        generated(function, *inputs)


def test_what_is_stored_in_16_bits_is_read_with_these_bits():
    """Beside a store, an epilogue has what is stored; without one, all that was summed up."""
    half = full(16, 16, dtype=torch.bfloat16)
    rounded = "accumulator.to(tl.bfloat16).to(tl.float32)"
    text = "".join(
        generated(lambda a, b: (lambda y: (y, y.exp()))(a @ b), half, half).sources.values()
    )
    assert rounded in text
    text = "".join(generated(lambda a, b: (a @ b).exp(), half, half).sources.values())
    assert rounded not in text


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(lambda a, b: a @ b, "bfloat16"), (lambda a, b: torch.addmm(a, a, b), "float32")],
)
def test_what_is_added_to_is_not_rounded_before(function, dtype):
    """Whatever kernel adds: a sum is rounded once."""
    half = full(16, 16, dtype=torch.bfloat16)
    graph = lower_graph(trace(function, [half, half]), templates=True)
    (product,) = [node for node in graph.builder.nodes if getattr(node, "is_product", False)]
    assert graph.builder.buffers[product.buffer].layout.dtype == dtype


def test_what_is_left_to_call_is_refused_with_its_line():
    """Each operator, why, and where; not what nobody needs."""

    def function(x, w):
        y = torch.conv2d(x @ x, w)
        return torch.fft.rfft(y).real

    with pytest.raises(UnsupportedOperator, match=r"aten\._fft_r2c.*aten\.convolution") as caught:
        generated(function, full(1, 3, 8, 8), full(4, 3, 3, 3))
    facts = caught.value.facts
    assert "aten.convolution.default" in facts["operators"]
    assert "y = torch.conv2d(x @ x, w)" in caught.value.message
    assert facts["line"].endswith("y = torch.conv2d(x @ x, w)")
    with pytest.raises(UnsupportedOperator, match="complex64"):
        generated(torch.mm, full(2, 2, dtype=torch.complex64), full(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("sizes", "masks"),
    [
        ((256, 512, 128), ""),
        ((128, 16, 64), ""),
        ((768, 256, 384), ""),
        ((257, 512, 128), "y"),
        ((384, 512, 128), "y"),
        ((256, 2, 128), "x"),
        ((256, 300, 8), "xr0_"),
        ((2, 2, 192), "yxr0_"),
    ],
)
def test_masks_are_left_out_where_no_block_goes_beyond(sizes, masks):
    """Of each candidate on each device, which is what the text counts on."""
    from bundler.codegen.emit import device_of
    from bundler.format.entries import Target

    rows, columns, length = sizes
    program = generated(torch.mm, full(rows, length), full(length, columns))
    ((name, source),) = program.sources.items()
    found = [
        p
        for p, text in {"y": "& ymask|ymask", "x": "xmask", "r0_": "r0_row < r0_numel"}.items()
        if re.search(text, source)
    ]
    assert "".join(found) == masks
    of_axis = {"y": rows, "x": columns, "r0_": length}
    for target in (*TARGETS, "cuda:80", "cuda:86", "cuda:100", "cuda:120"):
        for config in program.modules[name].on(device_of(Target.parse(target))).configs:
            for prefix in of_axis.keys() - set(found):
                assert of_axis[prefix] % config.kwargs[f"{prefix.upper()}BLOCK"] == 0, (
                    target,
                    config,
                )


def test_torchs_setting_decides_about_tf32():
    """float32 is multiplied as it is, unless torch may round it."""

    def text(dtype=torch.float32):
        given = full(16, 16, dtype=dtype)
        return "".join(generated(torch.mm, given, given).sources.values())

    setting = torch.backends.cuda.matmul
    plain, before = text(), setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        rounded, half = text(), text(torch.bfloat16)
    finally:
        setting.fp32_precision = before
    assert "input_precision='ieee'" in plain
    assert "operands='fp32'" in plain
    assert "allow_tf32=True" in rounded
    assert "operands='tf32'" in rounded
    assert "operands='bf16'" in half
    assert "tf32" not in half


def test_wide_indices_are_wide_everywhere():
    """Blocks, lanes and strides, so that no address overflows."""
    program = generated(
        lambda a, b: torch.bmm(a.expand(70_000, -1, -1), b.expand(70_000, -1, -1)),
        full(1, 256, 16),
        full(1, 16, 256),
    )
    (source,) = program.sources.values()
    assert "yblock.to(tl.int64) * YBLOCK" in source
    assert "tl.arange(0, R0_BLOCK).to(tl.int64)" in source
    assert "tl.full([1, 1], program // (yblocks * xblocks), tl.int64)" in source


def test_no_group_has_two_products():
    """The kernel's text has one sum; fusion sees to it."""
    program = generated(lambda a, b: (a @ b) + (a @ b.t()), full(16, 16), full(16, 16))
    assert all(source.count("tl.dot(") == 1 for source in program.sources.values())
    assert LoopGroup((), ()).product is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prologues_pieces_and_patches_compile_for_both_makers(dtype, tmp_path):
    """Ahead of time: an operand of 8 bits, one with the scale of each row, a split sum, patches."""

    def function(x, rows, w, scale, long, other, images, filters):
        eight = torch.nn.functional.linear(x * rows, w.to(dtype) * scale)
        patches = torch.conv2d(images, filters, stride=4).flatten(2).transpose(1, 2)
        return eight, torch.nn.functional.gelu(long @ other), patches + 1

    sizes = (((50, 72), (50, 1), (40, 72), (40, 1), (3, 2048), (2048, 40)), ((2, 3, 12, 13),))
    given = [full(*one, dtype=dtype) for one in (*sizes[0], *sizes[1], (8, 3, 4, 4))]
    given[2] = given[2].to(torch.int8)
    options = GenerateOptions(templates="all", sources=str(tmp_path))
    program = generate(function, given, options=options)
    targets = (*TARGETS, "cuda:80", "cuda:100")
    assert len(program.kernels) == 4
    assert len(program.build(targets).kernels) == len(targets) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_vector_is_a_column(dtype):
    """By the rule of products of one row; in dtypes that have none it is summed up, as before."""
    given = [full(70, 90, dtype=dtype), full(90, dtype=dtype), full(70, dtype=dtype)]
    options = GenerateOptions(templates="all")
    program = generate(lambda w, x, b: torch.addmv(b, w, x).relu(), given, options=options)
    (source,) = program.sources.values()
    assert ("row_products" in source) == (dtype == torch.bfloat16)
    assert not program.fallbacks


@pytest.mark.slow
def test_products_of_one_row_compile_for_both_makers(tmp_path):
    """Each candidate: a gate of two products, weights of 8 bits, a column, masks, a whole row."""

    def function(x, w, v, eight, scale, short):
        gate = torch.nn.functional.silu(torch.nn.functional.linear(x, w))
        both = gate * torch.nn.functional.linear(x, v)
        return both, torch.nn.functional.linear(x, eight.to(x.dtype) * scale), short @ short[:1].t()

    half = torch.bfloat16
    given = [full(*sizes, dtype=half) for sizes in ((1, 3000), (500, 3000), (500, 3000))]
    given += [full(70, 3000).to(torch.int8), full(70, 1, dtype=half), full(300, 200)]
    options = GenerateOptions(templates="all", sources=str(tmp_path))
    program = generate(function, given, options=options)
    assert all("row_products=True" in source for source in program.sources.values())
    assert program.build((*TARGETS, "cuda:80"), candidates=8).kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "targets"),
    [
        (torch.float8_e4m3fn, ("cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950")),
        (torch.float8_e4m3fnuz, ("hip:gfx942",)),
    ],
)
@pytest.mark.parametrize("fast", [False, True])
def test_products_of_8_bit_floats_compile_where_they_are(dtype, targets, fast, tmp_path):
    """Each candidate; and are refused by name where the compiler has no such float."""
    a, b = full(64, 256).to(dtype), full(96, 256).to(dtype)
    scales = full(64, 1), full(1, 96)

    def function(a, b, one, other):
        return torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.bfloat16, use_fast_accum=fast)

    options = GenerateOptions(templates="all", sources=str(tmp_path))
    program = generate(function, [a, b, *scales], options=options)
    assert program.build(targets, candidates=4).kernels
    with pytest.raises(UnsupportedOperator, match=f"Triton has no {str(dtype)[6:]} there"):
        program.build(["cuda:80"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_product_compiles_for_both_makers(dtype, tmp_path):
    """Ahead of time, without a GPU: operands in rows and columns, a batch, masks, wide
    epilogues.
    """

    def function(a, b, c):
        y = torch.nn.functional.gelu(torch.addmm(c, a, b)).to(torch.float32)
        return y, torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1).contiguous())[:, :, ::2] + 1

    given = [full(100, 72, dtype=dtype), full(50, 72, dtype=dtype).t(), full(50, dtype=dtype)]
    options = GenerateOptions(templates="all", sources=str(tmp_path))
    program = generate(function, given, options=options)
    bundle = program.build(TARGETS)
    assert len(bundle.kernels) == len(TARGETS) * len(program.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_bundle_of_products_is_launched_without_torch_and_triton(replay, backend, tmp_path):
    """On a driver without a GPU: with what the plan says, and as many programs as cover each
    product.
    """

    def function(a, b):
        return ((a @ b).relu() @ a + a).exp(), torch.bmm(
            b[None].expand(3, -1, -1), a[None].expand(3, -1, -1)
        )

    options = GenerateOptions(templates="all", sources=str(tmp_path / "sources"))
    program = generate(function, [full(48, 64), full(64, 48)], options=options)
    bundle = program.build(TARGETS)
    bundle.save(tmp_path / "program.tbundle")
    report = replay(tmp_path / "program.tbundle", backend)
    steps = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert [one["kernel"] for one in report["launches"]] == [step.kernel for step in steps]
    (entry,) = [one for one in bundle.opaque if program_name(one.path) is not None]
    kernels = read_plan(bundle.read(entry.artifact)).kernels
    for launch, step in zip(report["launches"], steps, strict=True):
        choices = kernels[step.kernel].choices
        blocks = next(listed[0].blocks for at, listed in choices.items() if at.startswith(backend))
        rows, columns = (
            -(-step.sizes[f"{axis}numel"] // blocks[f"{axis.upper()}BLOCK"]) for axis in "yx"
        )
        assert launch["grid"] == [rows * columns * step.sizes["znumel"], 1, 1]

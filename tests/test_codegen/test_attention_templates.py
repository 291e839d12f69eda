# SPDX-License-Identifier: Apache-2.0
"""Attention as a kernel of a bundle (`templates="all"`): numbers, what shares a kernel, masks, what
is refused, builds.
"""

import functools
import re

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402
from bundler.errors import UnsupportedOperator  # noqa: E402
from bundler.runtime.program.program_plan import Launch, read_plan  # noqa: E402
from bundler.runtime.program.program_summary import summary_of  # noqa: E402

attend = torch.nn.functional.scaled_dot_product_attention
flash = torch.ops.aten._scaled_dot_product_flash_attention
efficient = torch.ops.aten._scaled_dot_product_efficient_attention
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def full(*sizes, dtype=torch.bfloat16):
    return torch.zeros(sizes, dtype=dtype)


def generated(function, *inputs, device="cuda", **options):
    options = GenerateOptions(templates="all", **options)
    return generate(function, inputs, device=device, options=options)


def launches(program):
    return [step.kernel for step in program.plan.steps if isinstance(step, Launch)]


def test_numbers_are_those_of_float64_within_a_bound(interpreted):
    """Masks, rows without a key, parts of keys that heads share, heads in two parts."""
    assert interpreted("attention_worker.py", "forms", "two_parts").strip() == "2"


@pytest.mark.slow
def test_any_shape_any_strides_any_mask(interpreted):
    """Drawn; logarithms, sizes that change, modules, and what is no number."""
    cases = (
        "100",
        "as_torch_has_them",
        "changing_sizes",
        "decoding",
        "logarithms",
        "measured",
        "modules",
        "what_is_no_number",
    )
    assert interpreted("attention_worker.py", *cases).strip() == str(len(cases))


def test_a_program_calls_no_operator_and_says_so():
    """Whatever torch's trace would make of it on a GPU, and by whatever name it is called."""
    heads, mask = full(2, 4, 40, 64), torch.zeros(40, 40, dtype=torch.bool)
    for function in (
        attend,
        lambda q, k, v, _: torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v, _: attend(q, k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v, _: flash(q, k, v)[0],
        lambda q, k, v, _: efficient(q, k, v, None, False)[0],
    ):
        program = generated(function, heads, heads, heads, mask)
        assert not program.fallbacks
        assert [name[:10] for name in launches(program)] == ["triton_att"]
        assert not summary_of("program", read_plan(program.plan.to_json())).operators


def test_without_the_option_attention_is_traced_as_ever():
    """The default keeps nothing whole."""
    heads = full(2, 4, 40, 64)
    program = generate(attend, [heads] * 3, device="cuda")
    assert [one.operator for one in program.fallbacks] == [
        "aten._scaled_dot_product_flash_attention.default"
    ]
    assert torch.nn.functional.scaled_dot_product_attention is attend


def test_what_is_traced_lies_as_torchs_own_result():
    """Sizes and strides are what torch's operators would return."""
    heads = full(2, 40, 4, 64).transpose(1, 2)
    for device in ("cpu", "cuda"):
        ours, theirs = (
            trace(attend, [heads] * 3, device=device, templates=templates)
            .graph.output_node()
            .args[0]
            .meta["val"]
            for templates in (True, False)
        )
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


@pytest.mark.parametrize(
    ("function", "kernels", "why"),
    [
        (lambda q, k, v: attend(q, k, v).float() * 2, 1, "an epilogue"),
        (lambda q, k, v: attend(q * 2, k, v), 2, "operands are read from memory"),
        (lambda q, k, v: attend(q.transpose(1, 2), k.mT, v[..., :64, :20]), 1, "lies as it may"),
        (lambda q, k, v: attend(q[:, :, :1], k, v) + 1, 2, "parts of keys are added up"),
        (lambda q, k, v: attend(q[:, :, :1], k[:, :, :200], v[:, :, :200]), 1, "too few for parts"),
        (lambda q, k, v: attend(q[:, :, :1], k, v, is_causal=True), 1, "one key is seen"),
    ],
)
def test_what_shares_a_kernel_with_attention(function, kernels, why):
    """What is computed of each element of the result, and no copy."""
    q, k = full(1, 64, 64, 64), full(1, 64, 64, 64)
    if "parts" in why:
        q, k = full(1, 2, 64, 64), full(1, 2, 4096, 64)
    assert len(launches(generated(function, q, k, k))) == kernels, why


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda q: attend(q, q, q, dropout_p=0.1), "dropout"),
        (lambda q: attend(q, q, q, scale=float("inf")), "a finite number"),
        (lambda q: flash(q, q, q)[6], "random state"),
        (lambda q: efficient(q, q, q, None, True)[1], "logarithms of sums have other sizes"),
        (
            torch.func.grad(lambda q: attend(q, q, q).float().sum()),
            "flash_attention_backward",
        ),
    ],
)
def test_what_no_kernel_is_made_for_is_refused_by_name(function, words):
    """A program never computes something else instead."""
    with pytest.raises(UnsupportedOperator, match=words):
        generated(function, full(1, 2, 40, 64), device="cpu" if "backward" in words else "cuda")


def test_larger_heads_are_products_and_a_softmax():
    """Where torch has no attention of its own for them."""
    heads = full(1, 2, 20, 264, dtype=torch.float32)
    program = generated(functools.partial(attend, scale=0.1), heads, heads, heads[..., :264])
    assert not any("_att_" in name for name in launches(program))


def test_torchs_setting_decides_about_tf32():
    """float32 is multiplied as it is, unless torch may round it."""
    heads, setting = full(1, 2, 40, 64, dtype=torch.float32), torch.backends.cuda.matmul
    (plain,) = generated(attend, heads, heads, heads).sources.values()
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        (rounded,) = generated(attend, heads, heads, heads).sources.values()
    finally:
        setting.fp32_precision = before
    assert plain.count("input_precision='ieee'") == plain.count("tl.dot(")
    assert rounded.count("allow_tf32=True") == rounded.count("tl.dot(")
    assert "operands='fp32'" in plain
    assert "operands='tf32'" in rounded


@pytest.mark.parametrize(
    ("rows", "keys", "head", "masked"),
    [(256, 512, 128, ""), (256, 500, 128, "k"), (200, 512, 72, "yxe"), (16, 16, 16, "")],
)
def test_masks_are_left_out_where_no_block_goes_beyond(rows, keys, head, masked):
    """Of each candidate on each device, which is what the text counts on."""
    from bundler.codegen.emit import device_of
    from bundler.format.entries import Target

    q, k = full(1, 2, rows, head), full(1, 2, keys, head)
    program = generated(attend, q, k, k)
    ((name, source),) = program.sources.items()
    texts = {"y": "ymask =", "x": "xmask =", "k": "r0_row < r0_numel", "e": "r1_row < r1_numel"}
    assert "".join(one for one, text in texts.items() if text in source) == masked
    sizes = {"YBLOCK": rows, "R0_BLOCK": keys}
    for target in (*TARGETS, "cuda:86", "cuda:120"):
        for config in program.modules[name].on(device_of(Target.parse(target))).configs:
            assert config.kwargs["XBLOCK"] == max(16, 1 << (head - 1).bit_length())
            for block, size in sizes.items():
                assert block[0].lower().replace("r", "k") in masked or not (
                    size % config.kwargs[block]
                ), (target, config)


@pytest.mark.parametrize(
    ("dtype", "head", "columns", "parts", "why"),
    [
        (torch.bfloat16, 80, 80, (64, 16), "else each third product would be one of zeros"),
        (torch.float16, 192, 192, (128, 64), "as in 16 bits of the other kind"),
        (torch.float16, 72, 72, (), "8 elements are fewer than a matrix unit takes"),
        (torch.float16, 112, 112, (), "what is left is no power of two"),
        (torch.float16, 48, 48, (), "small heads take as long"),
        (torch.float16, 64, 64, (), "nothing is left"),
        (torch.float16, 80, 64, (), "values of another size have blocks of their own"),
        (torch.float32, 80, 80, (), "32 bits have no room"),
    ],
)
def test_heads_of_two_powers_are_two_blocks(dtype, head, columns, parts, why):
    """No lane is over, so there is no mask along them."""
    q, v = full(1, 2, 256, head, dtype=dtype), full(1, 2, 256, columns, dtype=dtype)
    (source,) = generated(attend, q, q, v).sources.values()
    found = re.findall(r"accumulator(?:_rest)? = tl.zeros\(\[YBLOCK, (\d+)\]", source)
    assert tuple(map(int, found)) == parts, why
    assert ("xmask" in source) == (not parts and columns not in {64}), why


def test_wide_indices_are_wide_everywhere():
    """Blocks, lanes and strides, so that no address overflows."""
    heads = full(1, 1, 256, 64).expand(70_000, 4, -1, -1)
    (source,) = generated(attend, heads, heads, heads).sources.values()
    assert "yblock.to(tl.int64) * YBLOCK" in source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head"), [("float32", 80), ("float16", 80), ("bfloat16", 64), ("bfloat16", 256)]
)
def test_attention_compiles_for_both_makers(dtype, head, tmp_path):
    """Ahead of time, without a GPU: causal, with a mask, and in parts."""

    def function(q, k, mask):
        return attend(q, k, k, is_causal=True), attend(q, k, k, mask), attend(q[:, :, :1], k, k)

    kind = getattr(torch, dtype)
    given = [full(1, 2, 100, head, dtype=kind), full(1, 2, 300, head, dtype=kind)]
    given.append(full(100, 300, dtype=torch.bool))
    program = generated(function, *given, sources=str(tmp_path))
    bundle = program.build(TARGETS)
    # Of one that spills registers there are further candidates.
    made = {(kernel.name, str(kernel.target)) for kernel in bundle.kernels}
    assert len(made) == len(TARGETS) * len(program.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_bundle_of_attention_is_launched_without_torch_and_triton(replay, backend, tmp_path):
    """On a driver without a GPU: keys in parts, and what adds them up."""

    def function(a, b):
        keys = a.view(1, 1, 384, 8)
        return attend(b.view(1, 384, 1, 8)[:, :2], keys, keys, enable_gqa=True)

    given = [full(48, 64, dtype=torch.float32), full(64, 48, dtype=torch.float32)]
    program = generated(function, *given, sources=str(tmp_path / "sources"))
    program.build(("cuda:90", "hip:gfx942")).save(tmp_path / "program.tbundle")
    report = replay(tmp_path / "program.tbundle", backend)
    assert [one["kernel"] for one in report["launches"]] == launches(program)
    # Both heads are rows of one block, for each of two parts.
    assert report["launches"][0]["grid"] == [2, 1, 1]

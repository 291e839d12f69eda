# SPDX-License-Identifier: Apache-2.0
"""Which operators are taken apart: our table beside Inductor's, and the numbers of what it decides.

`decomposition_worker` runs the modules in Triton's interpreter.
"""

import json

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.decompositions import decompositions  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.program.program_plan import OperatorStep  # noqa: E402

# Inductor takes these apart and we do not: reason -> operators.
NOT_OURS = {
    "lowered whole": (
        "_to_copy.default all.default all.dim all.dims amax.default amin.default "
        "arange.start_step bernoulli.default bernoulli.p cat.default clamp.Tensor "
        "clamp.default empty_permuted.default exponential.default flip.default fmax.default "
        "fmin.default full.default full_like.default index_select.default "
        "masked_scatter.default max_pool2d_with_indices.default max_pool2d_with_indices_backward.default "
        "max_pool2d_with_indices_backward.grad_input max_pool3d_with_indices.default "
        "native_dropout.default rand_like.default rand_like.generator randint.default "
        "randint_like.default randint_like.low_dtype randn_like.default randn_like.generator "
        "round.decimals std.correction std.default std.dim uniform.default var.default var.dim "
        "var_mean.default var_mean.dim prims.fmax.default prims.fmin.default "
        "prims.uniform.default"
    ),
    "complex numbers are torch's": "add.Scalar add.Tensor",
    "a product in another dtype is always called": "addmm.dtype bmm.dtype mm.dtype",
    "a scan or a search, which is called": (
        "bucketize.Scalar searchsorted.Scalar repeat_interleave.Tensor"
    ),
    "extremes of floats by atomics would lose NaN": "index_reduce.default",
    "contiguous where torch's result is not": "put.default",
    "Inductor converts the numbers instead of the bits": "view_copy.dtype",
    "torch 2.11 has the function in Inductor alone": "adaptive_max_pool2d.default",
}
# We take these apart and Inductor does not.
OURS_ALONE = {
    "lowered by Inductor, and the same numbers by torch's functions": (
        "_adaptive_avg_pool2d.default _unsafe_masked_index.default "
        "_unsafe_masked_index_put_accumulate.default embedding.default glu.default "
        "unfold.default upsample_bilinear2d.default diagonal_scatter.default"
    ),
    "Inductor fuses a product with a sum, which is the last bit": "addcdiv.default addcmul.default",
    "of an expanded tensor alone, which is copied first": "select_scatter.default",
    "an outer product alone; the others stay whole": "baddbmm.default",
    "one tensor after another": (
        "_fused_adam.default _fused_adam.tensor_lr _fused_adamw.default _fused_adamw.tensor_lr"
    ),
    "numbers of our own generator": "prims.normal.default",
    "torch has no rule for its results, or none without a bias": (
        "_thnn_fused_gru_cell.default _thnn_fused_lstm_cell.default"
    ),
}
# Both take these apart, by functions of different names.
OTHER_FUNCTIONS = {
    "batch norms are laid out as torch's kernels do it": (
        "_batch_norm_no_update.default _batch_norm_with_update.default "
        "_batch_norm_with_update_functional.default _native_batch_norm_legit.default "
        "_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default "
        "_native_batch_norm_legit_no_training.default native_batch_norm.default "
        "miopen_batch_norm.default cudnn_batch_norm.default"
    ),
    "laid out as torch's kernel for the CPU does it": "max_unpool2d.default",
    "torch's copies into a new tensor, which a graph may not": (
        "index_fill.int_Scalar index_fill.int_Tensor"
    ),
    "without what Inductor does for CPUs and for coordinate descent": (
        "addmm.default bmm.default mm.default convolution_backward.default grid_sampler_2d.default"
    ),
    "the last bit is Inductor's by fused products": (
        "_softmax_backward_data.default lerp.Scalar lerp.Tensor silu.default "
        "_foreach_lerp.Scalar _foreach_lerp.ScalarList"
    ),
    "Inductor asks for the device or the dtype and goes on to the same function": (
        "embedding_dense_backward.default index_add.default native_layer_norm.default"
    ),
    "the same, or that of the installed torch": (
        "adaptive_max_pool3d.default angle.default conj_physical.default lift.default "
        "narrow_copy.default special_log_ndtr.default sym_constrain_range_for_size.default "
        "view_copy.default prims.normal.default"
    ),
    "a generator that is passed stays torch's": (
        "cauchy.default geometric.default log_normal.default normal.Tensor_Tensor "
        "normal.Tensor_float normal.float_Tensor normal.float_float "
        "rrelu_with_noise_functional.default"
    ),
}
# Releases of torch from 2.11 to 2.15 differ in these: a reason that one needs is idle in another.
BY_RELEASE = {
    "adaptive_max_pool2d.default",
    "adaptive_max_pool3d.default",
    "addcdiv.default",
    "addcmul.default",
    "lerp.Scalar",
    "lerp.Tensor",
    "max_pool2d_with_indices_backward.default",
    "max_pool2d_with_indices_backward.grad_input",
    "special_log_ndtr.default",
    "uniform.default",
    "prims.normal.default",
    "prims.uniform.default",
}


def names_of(table):
    """Return the functions by name, for operators that change no argument and take no `out`."""
    found = {}
    for operator, function in table.items():
        if not isinstance(operator, torch._ops.OpOverload):  # one that takes functions
            continue
        namespace, name, overload = str(operator).split(".")
        if namespace in {"aten", "prims"} and not name.endswith("_") and "out" not in overload:
            found[f"{name}.{overload}" if namespace == "aten" else str(operator)] = function
    return found


def whose(function):
    """Name a function: torch binds those of implicit operators anew in each call."""
    plain = getattr(function, "func", function)
    return plain.__module__, plain.__qualname__


def listed(table):
    return {name for names in table.values() for name in names.split()}


def test_each_difference_from_inductors_table_has_a_reason():
    """What Inductor keeps whole we keep whole.

    An operator that a release of torch adds to either table fails here until somebody says why.
    """
    inductor = pytest.importorskip("torch._inductor.decomposition")
    theirs, ours = names_of(inductor.select_decomp_table()), names_of(decompositions())
    lists = {name for name in ours if name.startswith("_foreach_") and name not in theirs}
    found = {
        "not ours": theirs.keys() - ours.keys(),
        "ours alone": ours.keys() - theirs.keys() - lists,
        "other functions": {
            name for name in ours.keys() & theirs.keys() if whose(ours[name]) != whose(theirs[name])
        },
    }
    told = {
        "not ours": listed(NOT_OURS),
        "ours alone": listed(OURS_ALONE),
        "other functions": listed(OTHER_FUNCTIONS),
    }
    assert {kind: sorted(found[kind] - told[kind]) for kind in found} == {
        kind: [] for kind in found
    }
    stale = {kind: sorted(told[kind] - found[kind] - BY_RELEASE) for kind in found}
    assert stale == {kind: [] for kind in found}


@pytest.mark.parametrize(
    "name",
    [
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
)
def test_products_and_attention_stay_whole(name):
    """Decompositions of products multiply upcast operands; ours are of those without a sum."""
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        function = decompositions().get(getattr(packet, overload))
        assert function is None or function.__module__ == "bundler.codegen.decompositions", overload


def calls_of(function, *inputs):
    return [
        step for step in generate(function, inputs).plan.steps if isinstance(step, OperatorStep)
    ]


def halves(*sizes):
    return torch.ones(*sizes, dtype=torch.bfloat16)


PRODUCTS = {
    "linear": (torch.nn.functional.linear, [(4, 8), (6, 8), (6,)], "aten.addmm.default"),
    "linear of a batch": (
        torch.nn.functional.linear,
        [(2, 4, 8), (6, 8), (6,)],
        "aten.addmm.default",
    ),
    "addmm": (
        lambda m, x, y: torch.addmm(m, x, y, beta=0.5),
        [(5,), (4, 8), (8, 5)],
        "aten.addmm.default",
    ),
    "baddbmm": (torch.baddbmm, [(3, 4, 5), (3, 4, 8), (3, 8, 5)], "aten.baddbmm.default"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_halves_is_one_call_of_halves(name):
    """No operand is converted to float32 before the call, and no kernel adds the bias after it."""
    function, sizes, operator = PRODUCTS[name]
    program = generate(function, [halves(*part) for part in sizes])
    (call,) = (step for step in program.plan.steps if isinstance(step, OperatorStep))
    assert call.operator == operator
    given = {one["buffer"] for one in call.arguments if isinstance(one, dict)}
    assert given == {"arg0", "arg1", "arg2"}
    assert [result.dtype for result in call.results] == ["bfloat16"]
    assert not program.kernels


def test_a_product_without_a_sum_is_a_kernel():
    """A column times a row is not called; a beta of 0 ignores what would be added, NaN too."""
    column, row = torch.ones(4, 1), torch.ones(1, 6)
    assert calls_of(torch.mm, column, row) == []
    assert calls_of(torch.bmm, column[None], row[None]) == []
    assert calls_of(torch.addmm, torch.ones(6), column, row) == []
    assert len(calls_of(torch.mm, torch.ones(4, 2), torch.ones(2, 6))) == 1
    kept = decompositions()[torch.ops.aten.addmm.default]
    found = kept(torch.full((6,), torch.nan), column, row, beta=0, alpha=2)
    assert torch.equal(found, torch.full((4, 6), 2.0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_batch_norm_of_cudnn_is_laid_out_as_cudnn_does_it(training, last):
    """In the memory format of its argument: a permuted one, which has none, gives a dense
    result.
    """
    given = torch.empty(3, 4, 5, 6, device="meta").permute(0, 2, 1, 3)
    if last:
        given = given.contiguous(memory_format=torch.channels_last)
    numbers = [torch.empty(5, device="meta") for _ in range(4)]
    function = decompositions()[torch.ops.aten.cudnn_batch_norm.default]
    found = function(given, *numbers, training, 0.1, 1e-5)
    assert found[0].stride() == ((120, 1, 30, 5) if last else (120, 24, 6, 1))
    assert len(found) == 4


def check(interpreted, tmp_path, *names):
    report = json.loads(interpreted("decomposition_worker.py", tmp_path, *names, timeout=280))
    assert {name: case["problems"] for name, case in report.items() if case["problems"]} == {}
    return {name: case["calls"] for name, case in report.items()}


@pytest.mark.timeout(300)
def test_attention_and_batch_norm_are_those_of_torch(interpreted, tmp_path):
    """Results, gradients, running statistics, strides; one call of attention for each direction."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    calls = check(interpreted, tmp_path, "attention", "attention_results", "batch_norm_transposed")
    both = [[f"aten.{attention}.default"], [f"aten.{attention}_backward.default"]]
    assert calls["attention"] == calls["attention_results"] == both
    assert calls["batch_norm_transposed"] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_form_is_that_of_torch(interpreted, tmp_path):
    """All cases of the worker; a case that calls more than is written here fails."""
    calls = check(interpreted, tmp_path)
    called = {name: found for name, found in calls.items() if any(found)}
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert called == {
        "attention": [[f"{attention}.default"], [f"{attention}_backward.default"]],
        "attention_results": [[f"{attention}.default"], [f"{attention}_backward.default"]],
        "convolution": [["aten.convolution.default"], ["aten.convolution_backward.default"]],
        "linear": [["aten.addmm.default"], ["aten.mm.default", "aten.mm.default"]],
        "outer": [[], ["aten.mm.default"] * 4],
        "pools": [[], ["aten._adaptive_avg_pool2d_backward.default"]],
        "grid": [[], ["aten.grid_sampler_2d_backward.default"]],
        "integers": [["aten.gcd.default"]],
    }


DRAWN = {
    "cauchy": lambda x: x.clone().cauchy_(),
    "geometric": lambda x: x.clone().geometric_(0.3),
    "geometric of whole numbers": lambda x: x.to(torch.int64).geometric_(0.3),
    "log_normal": lambda x: x.clone().log_normal_(),
    "normal": lambda x: torch.normal(x, x.abs()) + torch.normal(0.0, x.abs()),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_are_drawn_in_kernels(name):
    """Nothing is called: each distribution is made of uniform and normal numbers."""
    program = generate(DRAWN[name], [torch.linspace(-1, 1, 64)])
    assert program.fallbacks == ()
    assert program.kernels

# SPDX-License-Identifier: Apache-2.0
"""What a plan that was loaded may call: a list of operators, arguments within their tensors, and
whatever else with trust in code.
"""

import contextlib
import dataclasses
import functools
import json

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bundler.codegen import generate  # noqa: E402
from bundler.errors import (  # noqa: E402
    BundlerError,
    FormatError,
    NotFound,
    OperatorFailed,
    Untrusted,
)
from bundler.format.bundle import Bundle, MemoryBlobs  # noqa: E402
from bundler.format.digest import digest_text, sha256  # noqa: E402
from bundler.format.entries import Artifact, Opaque  # noqa: E402
from bundler.format.manifest import Content, Observed  # noqa: E402
from bundler.format.opaque_files import (  # noqa: E402
    is_cache_path,
    is_code_path,
    program_name,
    program_path,
)
from bundler.runtime.launch.drivers.dry_driver import DryDriver  # noqa: E402
from bundler.runtime.program.allowed_operators import ALLOWED, unlisted  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.operator_arguments import (  # noqa: E402
    CHECKS,
    ArgumentRefused,
    check_arguments,
)
from bundler.runtime.program.program_plan import (  # noqa: E402
    Input,
    OperatorStep,
    Output,
    ProgramPlan,
    TensorSpec,
)
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402
from bundler.trust.signature_policy import subject_of  # noqa: E402

# Listed for releases of torch other than the one that is installed: none now.
ELSEWHERE: frozenset[str] = frozenset()


def found(name):
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def spec_of(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()))


def reference(name):
    return {"buffer": name, "spec": None}


def plan_of(calls, tensors, output=None, count=1):
    """Return a plan of calls (operator, arguments): each tensor among them becomes an input, and
    `#n` is the result of call n.
    """
    tensors = list(tensors)
    steps = []

    def encoded(item):
        if isinstance(item, torch.Tensor):
            place = next(n for n, tensor in enumerate(tensors) if tensor is item)
            return reference(f"arg{place}")
        if isinstance(item, list):
            return [encoded(part) for part in item]
        return reference(f"buf{item[1:]}") if isinstance(item, str) and item[:1] == "#" else item

    for number, (operator, arguments) in enumerate(calls):
        keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if keywords else arguments
        outputs = (f"buf{number}", *[None] * (count - 1))
        made = tuple(None if name is None else TensorSpec("float32", (), ()) for name in outputs)
        step = OperatorStep(
            operator, tuple(map(encoded, positional)), keywords, outputs, count == 1, made
        )
        steps.append(step)
    inputs = tuple(Input(f"arg{n}", spec_of(tensor)) for n, tensor in enumerate(tensors))
    last = f"buf{len(calls) - 1}" if output is None else output
    return ProgramPlan(inputs, {}, tuple(steps), (Output(last),), {})


def bundle_of(data, *, code=False, name="program"):
    raw, path = sha256(data), program_path(name, code=code)
    entry = Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data)))
    return Bundle(Content.of([entry]), Observed(), MemoryBlobs({raw: data}))


def loaded(plan, *, code=False, **options):
    data = plan if isinstance(plan, bytes) else plan.to_json()
    options.setdefault("memory", TorchMemory())
    return load_program(bundle_of(data, code=code), driver=DryDriver("cuda"), **options)


# They have no result, and raise where a value is not as it has to be.
CHECKED_VALUES = {
    "aten._assert_async.default",
    "aten._assert_async.msg",
    "aten._linalg_check_errors.default",
}


# ----------------------------------------------------------------------------------------- The list


def test_each_listed_operator_is_torchs_and_changes_nothing():
    """A name that torch lacks is a slip or a change of torch; no schema writes to an argument, and
    each returns tensors alone, or nothing where it checks values.
    """
    for name in sorted(ALLOWED):
        if name in ELSEWHERE:
            with pytest.raises(AttributeError):
                found(name)
            continue
        schema = found(name)._schema
        assert not schema.is_mutable, name
        assert not any(
            part.alias_info is not None and part.alias_info.is_write
            for part in (*schema.arguments, *schema.returns)
        ), name
        kinds = {str(part.type) for part in schema.returns}
        assert kinds & {"Tensor", "List[Tensor]"} or name in CHECKED_VALUES, name
        assert kinds <= {"Tensor", "List[Tensor]", "int"}, (
            name
        )  # attention returns numbers of rows too
        for argument in schema.arguments:
            assert argument.name not in {"fn", "func"}, name
            assert str(argument.type) not in {"Storage", "Stream", "Any"}, name


def test_checks_name_parameters_as_torch_does():
    """Arguments are bound to a check's parameters as torch binds them, since both have the same
    names in the same order.
    """
    for name, check in CHECKS.items():
        theirs = [argument.name for argument in found(name)._schema.arguments]
        if isinstance(check, functools.partial):  # which binds names itself
            ours = check.args[0]
        else:
            ours = check.__code__.co_varnames[: check.__code__.co_argcount]
        assert ours, name
        assert list(ours) == theirs[: len(ours)], name


REACHING = {
    "aten._sparse_coo_tensor_unsafe.default",
    "aten.add_.Tensor",
    "aten.mm.out",
    "aten.set_.source_Tensor",
    "aten.resize_.default",
    "aten.from_file.default",
    "aten.from_blob.default",
    "aten.as_strided.default",
    "aten.as_strided_scatter.default",
    "aten._print.default",
    "aten.save.default",
    "aten._embedding_bag.default",
    "aten._ctc_loss.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten._cudnn_rnn.default",
    "aten._thnn_fused_lstm_cell.default",
    "aten.native_batch_norm.default",
    "aten._local_scalar_dense.default",
    "aten.segment_reduce.default",
    "aten._convert_indices_from_coo_to_csr.default",
    "aten.sparse_csr_tensor.crow_col_value",
    "aten.quantize_per_tensor.default",
    "aten._resize_output.default",
    "prims.copy_to.default",
    "prims.item.default",
    "mylib.run.default",
}


@pytest.mark.parametrize("operator", sorted(REACHING))
def test_other_operators_are_refused_before_anything_runs(operator):
    """The message names the operator and what to do; trust in code does not help a plan that is not
    marked as code.
    """
    plan = plan_of([(operator, [])], [])
    assert unlisted(plan) == (operator,)
    for trust in ("kernels", "code", "signed"):
        with pytest.raises(Untrusted, match=operator.replace(".", r"\.")) as raised:
            loaded(plan, trust=trust)
        assert raised.value.operators == (operator,)


def test_what_wrote_to_a_chosen_place_is_refused():
    """Indices by `full`, a sparse tensor of them without a check, and `add_`: the attack that a
    plan signed for kernels alone made.
    """
    place = torch.zeros(4)
    plan = plan_of(
        [
            ("aten.full.default", [[1, 1], 1 << 40, {"dtype": {"dtype": "int64"}}]),
            ("aten._sparse_coo_tensor_unsafe.default", ["#0", place, [1 << 41]]),
            ("aten.add_.Tensor", [place, "#1"]),
        ],
        [place],
    )
    with pytest.raises(Untrusted, match=r"_sparse_coo_tensor_unsafe\.default, aten\.add_\.Tensor"):
        loaded(plan)


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


X = torch.arange(24.0)
FAR = 2**33
# Each reads or writes memory that is not its arguments', or ends the process, when torch is called:
# found by `tools.fuzz operators`.
ATTACKS = {
    "max_pool2d_with_indices_backward": (
        X[:1].view(1, 1, 1, 1),
        X[:4].view(1, 1, 2, 2),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        ints(FAR).view(1, 1, 1, 1),
    ),
    "max_pool3d_with_indices_backward": (
        X[:1].view(1, 1, 1, 1, 1),
        X[:8].view(1, 1, 2, 2, 2),
        [2] * 3,
        [2] * 3,
        [0] * 3,
        [1] * 3,
        False,
        ints(-FAR).view(1, 1, 1, 1, 1),
    ),
    "adaptive_max_pool2d_backward": (
        X[:1].view(1, 1, 1, 1),
        X[:4].view(1, 1, 2, 2),
        ints(FAR).view(1, 1, 1, 1),
    ),
    "adaptive_max_pool3d_backward": (
        X[:1].view(1, 1, 1, 1),
        X[:8].view(1, 2, 2, 2),
        ints(FAR).view(1, 1, 1, 1),
    ),
    "fractional_max_pool3d_backward": (
        X[:1].view(1, 1, 1, 1),
        X[:8].view(1, 2, 2, 2),
        [2] * 3,
        [1] * 3,
        ints(FAR).view(1, 1, 1, 1),
    ),
    "max_unpool2d": (X[:1].view(1, 1, 1), ints(FAR).view(1, 1, 1), [2, 2]),
    "embedding": (X.view(4, 6), ints(4)),
    "embedding_dense_backward": (X.view(1, 24), ints(FAR), 10, -1, False),
    "gather": (X, 0, ints(24)),
    "index_select": (X, 0, ints(-1)),
    "index.Tensor": (X.view(4, 6), [None, ints(6)]),
    "_unsafe_index.Tensor": (X, [ints(-25)]),
    "index_put": (X, [ints(FAR)], X[:1]),
    "_unsafe_index_put": (X, [ints(FAR)], X[:1]),
    "index_add": (X, 0, ints(24), X[:1]),
    "index_copy": (X, 0, ints(24), X[:1]),
    "index_fill.int_Scalar": (X, 0, ints(24), 1.0),
    "scatter.value": (X, 0, ints(FAR), 1.0),
    "scatter_add": (X, 0, ints(FAR), X[:1]),
    "take": (X, ints(24)),
    "put": (X, ints(-25), X[:1]),
    "nll_loss_forward": (X.view(4, 6), ints(0, 1, 2, 6), None, 1, -100),
    "nll_loss_backward": (X[:4], X.view(4, 6), ints(0, 1, 2, FAR), None, 0, -100, X[0]),
    "nll_loss2d_backward": (
        X[0],
        X.view(1, 6, 2, 2),
        ints(0, 1, 2, FAR).view(1, 2, 2),
        None,
        1,
        -100,
        X[0],
    ),
    "searchsorted.Tensor": (X, X[:1], {"sorter": reference("arg2")}),
    "repeat_interleave.Tensor": (ints(1, 2), {"output_size": 9}),
    "lu_unpack": (X[:9].view(3, 3), ints(1, 2, 99, dtype=torch.int32)),
    "linalg_lu_solve": (X[:9].view(3, 3), ints(1, 0, 3, dtype=torch.int32), X[:3].view(3, 1)),
    "_fft_c2c": (X.view(4, 6), [FAR], 0, True),
    "_fft_c2r": (X.view(4, 6), [1], 0, 99),
    "_fft_r2c": (X.view(4, 6), [-2], 0, True),
    "_softmax_backward_data": (X, X[:4], 0, {"dtype": "float32"}),
    "_log_softmax_backward_data": (X.view(4, 6), X[:12].view(2, 6), 1, {"dtype": "float32"}),
    "_adaptive_avg_pool2d_backward": (X.view(1, 6, 2, 2), X[:4].view(1, 1, 2, 2)),
    "_adaptive_avg_pool3d_backward": (X.view(1, 3, 2, 2, 2), X[:8].view(1, 1, 2, 2, 2)),
    "avg_pool3d_backward": (
        X[:8].view(1, 1, 2, 2, 2),
        X.view(3, 1, 2, 2, 2),
        [1] * 3,
        [1] * 3,
        [0] * 3,
        False,
        True,
        None,
    ),
    "_cdist_backward": (X[:4].view(2, 2), X[:4].view(2, 2), X.view(2, 12), 2.0, X[:4].view(2, 2)),
    "_native_batch_norm_legit.no_stats": (X.view(4, 6), None, None, False, 0.1, 1e-5),
    "_native_batch_norm_legit_functional": (
        X.view(4, 6),
        None,
        None,
        X[:1],
        X[:1],
        False,
        0.1,
        1e-5,
    ),
    "native_batch_norm_backward": (
        X.view(4, 6),
        X.view(4, 6),
        None,
        None,
        None,
        X[:1],
        X[:1],
        True,
        1e-5,
        [True] * 3,
    ),
    "native_layer_norm_backward": (
        X.view(4, 6),
        X.view(4, 6),
        [6],
        X[:1],
        X[:1],
        None,
        None,
        [True] * 3,
    ),
    "native_group_norm_backward": (
        X.view(4, 6),
        X.view(4, 6),
        X[:4].view(4, 1),
        X[:1],
        None,
        4,
        6,
        1,
        1,
        [True] * 3,
    ),
    "reflection_pad1d_backward": (X[:4].view(1, 4), X.view(1, 24), [1, 1]),
    "replication_pad2d_backward": (X[:4].view(1, 2, 2), X.view(1, 4, 6), [1, 1, 1, 1]),
    "_upsample_bilinear2d_aa": (X.view(1, 1, 4, 6), [2, 3], False, 1.7, 0.5),
    "upsample_nearest2d": (X.view(1, 1, 4, 6), [8, 12], 2.0, 1e-30),
    "lcm": (ints(-(2**63)), ints(5)),
    "_scaled_dot_product_flash_attention_for_cpu": (
        X[:8].view(1, 1, 2, 4),
        X[:4].view(1, 1, 1, 4),
        X.view(1, 1, 6, 4),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        X[:8].view(1, 1, 2, 4),
        *[X[:8].view(1, 1, 2, 4)] * 4,
        X[:1].view(1, 1, 1),
        0.0,
        False,
    ),
    "_scaled_dot_product_flash_attention_backward": (
        *[X[:8].view(1, 1, 2, 4)] * 5,
        X[:2].view(1, 1, 2),
        ints(0, FAR),
        ints(0, FAR),
        2,
        2,
        0.0,
        False,
        X[0],
        X[0],
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        *[X[:8].view(1, 1, 2, 4)] * 4,
        None,
        X[:8].view(1, 1, 2, 4),
        X[:1].view(1, 1, 1),
        X[0],
        X[0],
        0.0,
        [True] * 4,
    ),
    "_scaled_dot_product_cudnn_attention": (
        X[:8].view(1, 1, 2, 4),
        X[:8].view(1, 1, 2, 4),
        X[:8].view(1, 1, 2, 4),
        X[:9].view(3, 3),
        True,
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_arguments_that_lead_out_of_their_tensors_are_refused(name):
    """The operator is not called; the error names step and operator, and says what was expected."""
    operator = f"aten.{name}" if "." in name else f"aten.{name}.default"
    arguments = list(ATTACKS[name])
    tensors = []
    inside = [part for item in arguments if isinstance(item, list) for part in item]
    for one in (*arguments, *inside):
        if isinstance(one, torch.Tensor) and not any(one is other for other in tensors):
            tensors.append(one)
    if name == "searchsorted.Tensor":
        tensors.append(torch.full((24,), FAR))
    results = found(operator)._schema.returns
    program = loaded(plan_of([(operator, arguments)], tensors, count=len(results)))
    with pytest.raises(
        OperatorFailed, match=f"step 0 of the program, {operator}.*expected"
    ) as raised:
        program(*tensors)
    assert raised.value.operator == operator
    assert raised.value.step == 0


@pytest.mark.parametrize(
    ("operator", "behind"),
    [
        ("aten._adaptive_avg_pool2d_backward.default", ()),
        ("aten.adaptive_max_pool2d_backward.default", (torch.zeros(1, 6, 1, 2, 2).long(),)),
    ],
)
def test_a_gradient_with_more_dimensions_than_its_input_is_refused(operator, behind):
    """Its first sizes are those of the input, and what follows them is not: all but the last two
    are compared.
    """
    gradient, source = X.view(1, 6, 1, 2, 2), X.view(1, 6, 2, 2)
    with pytest.raises(ArgumentRefused, match="leading sizes"):
        check_arguments(operator, (gradient, source, *behind), {})


def test_right_arguments_are_let_through():
    """What models give these operators passes: the checks are no tighter than torch, for indices,
    masks, backward steps and attention.
    """
    grid, image = X.view(4, 6), torch.randn(1, 2, 4, 6)
    pooled, places = torch.ops.aten.max_pool2d_with_indices(image, [2, 2], [2, 2])
    heads = torch.randn(2, 4, 3, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(heads, heads, heads)
    softmax = grid.softmax(-1)
    calls = [
        (
            "max_pool2d_with_indices_backward.default",
            (pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
        ),
        ("embedding.default", (grid, ints(0, 3))),
        ("index.Tensor", (grid, [ints(-4, 3), ints(5, -6)])),
        ("index.Tensor", (grid, [None, ints(5)])),
        ("index.Tensor", (grid, [grid > 3])),
        ("gather.default", (grid, -1, ints(5).view(1, 1))),
        ("scatter.value", (grid, 1, ints(5).view(1, 1), 2.0)),
        ("take.default", (grid, ints(-24, 23))),
        ("nll_loss_forward.default", (grid, ints(0, 5, -100, 1), None, 1, -100)),
        ("_softmax_backward_data.default", (grid, softmax, -1, torch.float32)),
        ("_fft_c2r.default", (torch.fft.rfft(grid), [1], 0, 6)),
        ("embedding_dense_backward.default", (grid, ints(0, 1, 9, 3), 10, -1, False)),
        ("upsample_bilinear2d.default", (image, [8, 12], False, 2.0, 2.0)),
        ("upsample_nearest2d.default", (image, [7, 9])),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward.default",
            (heads, heads, heads, heads, out, logsumexp, 0.0, False),
        ),
        (
            "convolution_backward.default",
            (
                torch.ones(1, 3, 4, 6),
                image,
                torch.ones(3, 2, 1, 1),
                None,
                [1, 1],
                [0, 0],
                [1, 1],
                False,
                [0, 0],
                1,
                [True, True, False],
            ),
        ),
    ]
    from bundler.runtime.program.bundle_programs import CheckedMemory

    memory = CheckedMemory(TorchMemory())
    for name, arguments in calls:
        plain = [
            {"dtype": "float32"}
            if item is torch.float32
            else list(item)
            if isinstance(item, tuple)
            else item
            for item in arguments
        ]
        got = memory.call(f"aten.{name}", plain, {})
        wanted = found(f"aten.{name}")(*arguments)
        torch.testing.assert_close(got, wanted)


def test_a_plan_of_this_process_may_leave_out_what_torch_itself_leaves_out():
    """Gradients of attention are called without tensors that their schema needs; other operators
    crash without theirs.
    """
    memory = TorchMemory()
    flash = "aten._scaled_dot_product_flash_attention_backward.default"
    given = [torch.ones(1)] * 6 + [None, None, 1, 1, 0.0, False, torch.ones(1), torch.ones(1)]
    assert memory.lacking(flash, given, {}) is None
    assert memory.lacking(flash, [None, *given[1:]], {}) == "grad_out"
    assert memory.lacking("aten.mm.default", [torch.ones(1)], {"mat2": None}) == "mat2"


def test_views_stay_in_their_tensors():
    """A storage may be larger than the input that is a part of it: a plan sees the part."""
    whole = torch.arange(100.0)
    part = whole[10:14]
    spec = TensorSpec("float32", (50,), (1,))
    data = json.loads(plan_of([], [part], output="arg0").to_json())
    # Sizes that change are not compared when the plan is read.
    data["inputs"][0]["spec"]["sizes"] = ["ks0"]
    data["sizes"] = {"ks0": [0, 0]}
    data["outputs"][0]["spec"] = dataclasses.asdict(spec)
    program = loaded(json.dumps(data).encode())
    with pytest.raises(OperatorFailed, match="at most the 4 elements"):
        program(part)
    torch.testing.assert_close(program(whole)[0], whole[:50])


# ------------------------------------------------------------------------------- Failures are typed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"operator": "aten.sin.default", "arguments": [reference("arg0")], "single": False},
            "expected a tuple of results, got Tensor",
        ),
        (
            {"operator": "aten.sort.default", "arguments": [reference("arg0")], "single": False},
            "expected 1 results, got 2",
        ),
        (
            {"operator": "aten.sort.default", "arguments": [reference("arg0")]},
            "expected a tensor for buf0, got tuple",
        ),
        ({"arguments": [reference("arg0")]}, "missing value for argument"),
        ({"arguments": [reference("arg0"), reference("arg0")]}, "RuntimeError.*mat1 and mat2"),
        ({"arguments": [reference("arg0"), 3]}, "step 0 of the program, aten.mm.default"),
        (
            {"arguments": [None, reference("arg0")]},
            "step 0 of the program, aten.mm.default.*expected a tensor for self, got None",
        ),
        (
            {"operator": "aten.cat.default", "arguments": [[None, reference("arg0")]]},
            "expected a tensor for tensors, got None",
        ),
        ({"keywords": {"nothing": 1}}, "step 0 of the program, aten.mm.default"),
        (
            {"operator": "aten.full.default", "arguments": [[1 << 47], 1.0]},
            "step 0 of the program, aten.full.default",
        ),
    ],
)
def test_an_operator_that_fails_says_which_step_it_was(change, expected):
    """torch's own errors, too few results and results that are no tensors: one typed error, whose
    cause is torch's.
    """
    data = json.loads(plan_of([("aten.mm.default", [X, X])], [X]).to_json())
    data["inputs"][0]["spec"] |= {"sizes": [4, 6], "strides": [6, 1]}
    data["steps"][0][1] |= change
    with pytest.raises(OperatorFailed, match=expected):
        loaded(json.dumps(data).encode())(X.view(4, 6))


def test_a_view_without_a_spec_is_refused_when_it_is_read():
    """It was a KeyError at the call."""
    data = json.loads(plan_of([("aten.sin.default", [X])], [X]).to_json())
    del data["steps"][0][1]["arguments"][0]["spec"]
    with pytest.raises(FormatError, match="a buffer and how it is seen"):
        loaded(json.dumps(data).encode())


def layers(x, weight, table, index):
    rows = torch.nn.functional.embedding(index, table)
    mixed = torch.histc(torch.mm(x, weight).median(-1, True)[0], 4, -1, 1)
    image = torch.nn.functional.conv2d(x.view(1, 1, 4, 6), weight.view(2, 1, 3, 6)[:, :, :, :3])
    attended = torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 2, 2, 6)] * 3)
    return mixed.cumsum(0), rows.cumsum(0), image, attended, torch.fft.rfft(x), x[index]


PROGRAM_INPUTS = (torch.randn(4, 6), torch.randn(6, 6), torch.randn(5, 3), ints(0, 2, 1))
VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            -1,
            0,
            1,
            2,
            7,
            FAR,
            -FAR,
            1 << 62,
            0.5,
            float("nan"),
            "",
            "arg0",
            "buf0",
            "@buf0",
        ]
    ),
    st.sampled_from(
        [
            "float64",
            "int8",
            "complex64",
            [],
            {},
            [[]],
            [0, 1],
            reference("arg0"),
            reference("buf0"),
            {"size": "1"},
            {"dtype": "int64"},
        ]
    ),
    st.sampled_from(sorted(ALLOWED)),
    st.integers(-3, 40),
)


@pytest.fixture(scope="module")
def real_plan():
    program = generate(layers, PROGRAM_INPUTS)
    assert unlisted(program.plan) == ()
    assert len([step for step in program.plan.steps if isinstance(step, OperatorStep)]) >= 6
    return program.plan.to_json()


def test_a_real_plan_that_is_changed_anywhere_is_refused_or_fails_by_a_typed_error(
    real_plan, capfd
):
    """Hypothesis changes one to three places of a plan of products, convolutions, attention, sorts,
    scans and gathers; nothing prints.
    """
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=120, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def change(data):
        document = json.loads(real_plan)
        calls = [step["arguments"] for kind, step in document["steps"] if kind == "OperatorStep"]
        # What passes validation most often are changed arguments.
        starts = [document, *calls]
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.sampled_from(starts))
            while True:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = data.draw(st.sampled_from(keys))
                if (
                    isinstance(place[key], (dict, list))
                    and place[key]
                    and data.draw(st.integers(0, 4))
                ):
                    place = place[key]
                    continue
                place[key] = json.loads(json.dumps(data.draw(VALUES)))
                break
        try:
            program = loaded(json.dumps(document).encode())
        except BundlerError:
            outcomes["refused"] += 1
            return
        outcomes["read"] += 1
        with contextlib.suppress(BundlerError):
            program(*PROGRAM_INPUTS)

    change()
    assert min(outcomes.values()) > 20
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


# ------------------------------------------------------------------------------- Operators of users


@pytest.fixture(scope="module")
def library():
    made = torch.library.Library("bundler_test", "FRAGMENT")
    made.define("twice(Tensor x) -> Tensor")
    made.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("bundler_test::twice", torch.empty_like, lib=made)
    made.define("unfaked(Tensor x) -> Tensor")
    made.impl("unfaked", lambda x: x * 2, "CPU")

    @torch.library.custom_op("bundler_test::halves", mutates_args=())
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 2, x / 2 + 0

    halves.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    halves.register_autograd(lambda _context, first, second: (first + second) / 2)

    @torch.library.custom_op("bundler_test::bump", mutates_args=("x",))
    def bump(x: torch.Tensor) -> None:
        x.add_(1)

    yield torch.ops.bundler_test
    made._destroy()


def test_a_generated_program_calls_operators_of_users(library):
    """`generate` lists it among the fallbacks, and the program of this process calls it; nothing
    has to be trusted.
    """
    program = generate(lambda x: library.halves(library.twice(x)), [X])
    assert [call.operator for call in program.fallbacks] == [
        "bundler_test.twice.default",
        "bundler_test.halves.default",
    ]
    for got in program.run(X + 1):
        torch.testing.assert_close(got, X + 1)


@pytest.mark.slow
def test_torch_compile_calls_operators_of_users_forward_and_backward(library):
    """As one program each way; one that changes its argument is run as torch has it, with its
    effect.
    """
    from bundler.codegen.torch_backend import triton_bundler

    programs = []
    options = {"programs": programs}
    x = X.clone().requires_grad_()
    compiled = torch.compile(
        lambda x: library.halves(x)[0], backend=triton_bundler, options=options
    )
    compiled(x).sum().backward()
    assert [call.operator for call in programs[0].fallbacks] == ["bundler_test.halves.default"]
    torch.testing.assert_close(x.grad, torch.full_like(X, 0.5))
    programs.clear()
    given = X.clone()
    torch.compile(library.bump, backend=triton_bundler, options=options)(given)
    torch.testing.assert_close(given, X + 1)
    assert [call.operator for call in programs] == ["the whole graph"]


@pytest.mark.parametrize(
    ("name", "expected"), [("bump", "changes its arguments"), ("unfaked", "register_fake")]
)
def test_what_cannot_be_traced_is_refused_by_name(library, name, expected):
    """The error says what to do; it was torch's own."""
    from bundler.errors import UnsupportedOperator

    with pytest.raises(UnsupportedOperator, match=expected) as raised:
        generate(getattr(library, name), [X.clone()])
    assert raised.value.operator.replace("::", ".").startswith(f"bundler_test.{name}")


def test_a_bundle_with_operators_of_users_is_marked_as_code_and_needs_trust_in_it(library):
    """By its name: a signature of kernels does not cover it, a restore leaves it out, and
    `load_program` asks for trust.
    """
    plan = generate(library.twice, [X]).plan
    assert unlisted(plan) == ("bundler_test.twice.default",)
    bundle = bundle_of(plan.to_json(), code=True)
    (path,) = [entry.path for entry in bundle.opaque]
    assert (program_name(path), is_code_path(path), is_cache_path(path)) == ("program", True, False)
    assert subject_of(bundle).trust == "code"
    for trust in ("kernels", "signed"):
        with pytest.raises(Untrusted, match="trust='code'"):
            loaded(plan, code=True, trust=trust)
    torch.testing.assert_close(loaded(plan, code=True, trust="code")(X)[0], X * 2)


def test_the_build_of_a_program_marks_its_plan(library):
    """Listed operators leave a plan data; one of a user makes it code."""
    for function, code in ((lambda x: x.sort()[0], False), (library.twice, True)):
        bundle = generate(function, [X]).build(["cuda:90"])
        assert [is_code_path(entry.path) for entry in bundle.opaque] == [code]
        assert subject_of(bundle).trust == ("code" if code else "kernels")


def test_two_plans_of_one_name_are_refused():
    """Which of them counts must not depend on their order."""
    data = plan_of([("aten.sin.default", [X])], [X]).to_json()
    raw = sha256(data)
    entries = [
        Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data)))
        for path in (program_path("program"), program_path("program", code=True))
    ]
    bundle = Bundle(Content.of(entries), Observed(), MemoryBlobs({raw: data}))
    with pytest.raises(FormatError, match="expected one plan"):
        load_program(bundle, memory=TorchMemory())


def test_a_library_that_is_missing_is_named_when_the_program_is_loaded():
    """Before anything runs: which operator, and that its library has to be imported; the same for
    an operator that this torch lacks.
    """
    plan = plan_of([("a_library.run.default", [X])], [X])
    with pytest.raises(
        NotFound, match=r"a_library\.run\.default.*import the one that has 'a_library'"
    ):
        loaded(plan, code=True, trust="code")
    plan = plan_of([("aten.no_such_operator.default", [X])], [X])
    with pytest.raises(NotFound, match="installed torch"):
        loaded(plan, code=True, trust="code")
    for name in ("load_library.__func__.default", "higher_order.cond.default", "aten.mm.overloads"):
        with pytest.raises(NotFound):
            TorchMemory().operator(name)

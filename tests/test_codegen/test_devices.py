# SPDX-License-Identifier: Apache-2.0
"""Devices: programs for one that is not here, tensors on the host beside them, two GPUs in one
graph, deterministic algorithms.
"""

import json

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from bundler.codegen.device_tracing import tracing_for  # noqa: E402
from bundler.codegen.lower import lower_graph  # noqa: E402
from bundler.codegen.program import generate, program_of_graph  # noqa: E402
from bundler.codegen.trace import decompositions, trace  # noqa: E402
from bundler.errors import ConfigError, UnsupportedOperator  # noqa: E402
from bundler.runtime.program.program_plan import read_plan  # noqa: E402


def called(program):
    return [fallback.operator.split(".")[1] for fallback in program.fallbacks]


def relative_bucket(x):
    """Positions as transformers of relative positions have them."""
    away = (torch.arange(4)[:, None] - torch.arange(4)[None, :]).abs()
    far = 2 + (torch.log(away.float() / 2) / 3 * 2).to(torch.long)
    bucket = torch.where(away < 2, away, torch.minimum(far, torch.full_like(far, 3)))
    return x + bucket.to(x.device)


def offsets(x):
    grid = torch.zeros(4, 4, 3)
    steps = (torch.arange(4).view(1, -1) - torch.arange(4).view(-1, 1)).repeat(1, 1)
    grid[:, :, 1] = steps
    grid[:, :, 0] = 7.0
    return x + grid.sum(-1).to(x.device)


def inverted_mask(x):
    return x.masked_fill(~torch.zeros(4).to(device=x.device, dtype=torch.bool), 0.5)


def traced(function, *devices):
    """Trace a function of vectors of four that lie on devices, as torch.compile does; "cpu number"
    has one element.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing_for("cuda", dynamic=False) as tracing:
        given = [
            torch.empty(() if "number" in name else (4,), device=name.partition(" ")[0])
            for name in devices
        ]
        functional = torch.func.functionalize(function, remove="mutations")
        assert tracing.mode is given[0].fake_mode
        return make_fx(functional, decomposition_table=decompositions())(*given)


def test_results_are_eager_s(interpreted, tmp_path):
    """What is computed on the host, passed by value, copied and changed, on the CPU's memory."""
    result = json.loads(interpreted("device_worker.py", tmp_path, timeout=200))
    assert (result["cases"], result["wrong"]) == (9, {})


def test_a_model_is_traced_for_a_device_that_is_not_here():
    """No operator of the CPU alone is left, the module's tensors are constants, and the kernels
    compile.
    """

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
            self.recurrent = torch.nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            y = self.recurrent(self.norm(self.linear(x)))[0]
            q = y.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
            attended = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)
            return attended.gelu() if hasattr(attended, "gelu") else F.gelu(attended) + x[:, :1]

    program = generate(Model(), [torch.randn(2, 3, 16)], device="cuda")
    assert program.device == "cuda"
    assert not [name for name in called(program) if "mkldnn" in name or "cpu" in name]
    assert len(program.plan.constants) == 8
    assert program.build(["cuda:90"]).kernels


@pytest.mark.parametrize(
    ("kind", "bias"), [("LSTM", True), ("LSTM", False), ("GRU", True), ("RNN", True)]
)
def test_recurrent_layers_are_traced_for_a_device_that_is_not_here(kind, bias):
    """Nothing looks into memory that is not there, also where the function changes what it made on
    a device that it names.
    """
    layer = getattr(torch.nn, kind)(8, 16, batch_first=True, bias=bias)
    program = generate(layer, [torch.randn(2, 3, 8)], device="cuda")
    assert set(called(program)) <= {"addmm", "mm"}
    assert program.build(["cuda:90"]).kernels


def test_recurrent_layers_are_traced_without_cudnn():
    """cuDNN's call would look into the weights' memory, on a machine with a GPU too."""

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function.__name__ == "gru":
                enabled.append(torch.backends.cudnn.enabled)
            return function(*args, **(kwargs or {}))

    enabled = []
    with Seen():
        generate(torch.nn.GRU(8, 16), [torch.randn(3, 2, 8)])
    assert (enabled, torch.backends.cudnn.enabled) == ([False], True)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_recurrent_cell_has_the_numbers_of_torch_s(kind):
    """Both biases or none, in float64; torch's kernels for CPUs are other functions."""
    cell = getattr(torch.nn, f"{kind}Cell")(5, 7).double()
    x, state = torch.randn(3, 5).double(), [torch.randn(3, 7).double() for _ in range(2)]
    fused = decompositions()[getattr(torch.ops.aten, f"_thnn_fused_{kind.lower()}_cell").default]
    for biases in ((cell.bias_ih, cell.bias_hh), ()):
        if not biases:
            torch.nn.init.zeros_(cell.bias_ih), torch.nn.init.zeros_(cell.bias_hh)
        gates = x @ cell.weight_ih.T, state[0] @ cell.weight_hh.T
        if kind == "GRU":
            *results, kept = fused(*gates, state[0], *biases)
            torch.testing.assert_close(results, [cell(x, state[0])])
        else:
            *results, kept = fused(*gates, state[1], *biases)
            torch.testing.assert_close(results, list(cell(x, tuple(state))))
        assert kept.shape == (3, 7 * {"GRU": 5, "LSTM": 4}[kind])


def test_a_kernel_of_torch_s_jiterator_is_refused_before_it_is_launched(monkeypatch):
    """It would be launched on memory that a traced tensor does not have, which ends the use of the
    GPU.
    """
    launched, name = [], "_cuda_jiterator_compile_and_launch_kernel"
    monkeypatch.setattr(torch._C, name, lambda *given: launched.append(given), raising=False)
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T same(T x) { return x; }")
    kernel.is_cuda_available = True
    with pytest.raises(UnsupportedOperator, match="same: a kernel of torch"):
        generate(lambda x: kernel(x) + 1, [torch.ones(4)])
    assert launched == []
    kernel(torch.ones(4))
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("dtype", "mask", "expected"),
    [
        (torch.float16, None, "_scaled_dot_product_flash_attention"),
        (torch.float32, None, "_scaled_dot_product_efficient_attention"),
        (torch.float32, (16, 16), "_scaled_dot_product_efficient_attention"),
        (torch.float32, (16, 1), "bmm"),
    ],
)
def test_attention_is_chosen_by_a_rule(dtype, mask, expected):
    """Every machine chooses the same; a mask that is not aligned is no reason to fail at
    the call.
    """
    q = torch.randn(1, 2, 16, 8, dtype=dtype)
    inputs = [q] if mask is None else [q, torch.randn(*mask, dtype=dtype)]
    program = generate(
        lambda q, m=None: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        inputs,
        device="cuda",
    )
    assert expected in called(program)


def test_attention_of_sizes_that_change_is_chosen_too():
    """Heads are compared as the symbols that they are."""
    program = generate(
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        [torch.randn(3, 2, 16, 16), torch.randn(3, 2, 12, 16)],
        dynamic=True,
        device="cuda",
    )
    assert "_scaled_dot_product_efficient_attention" in called(program)


def test_another_name_than_a_device_s_is_refused():
    """The error says what there is."""
    for name in ("gpu", "mps", "meta"):
        with pytest.raises(ConfigError, match="device"):
            generate(torch.relu, [torch.ones(4)], device=name)


def test_a_number_on_the_host_is_passed_by_value():
    """No kernel is given the address of memory on the host."""
    program = program_of_graph(traced(lambda x, s: x * (s + 1), "cuda", "cpu number"))
    (kernel,) = program.kernels.values()
    assert [p.type for p in kernel.text.parameters] == ["*fp32", "*fp32", "fp64", "i32"]
    (launch,) = (step for step in program.plan.steps if hasattr(step, "kernel"))
    assert "#arg1" in launch.arguments
    assert program.plan.inputs[1].spec.device == "host"
    assert read_plan(program.plan.to_json()) == program.plan
    assert program.build(["cuda:90"]).kernels


def test_a_tensor_on_the_host_is_changed_there():
    """A counter of steps, as optimizers have it, is copied to by torch, no kernel."""
    program = program_of_graph(traced(lambda x, s: (s.add_(1), x * s)[1], "cuda", "cpu number"))
    assert called(program) == ["add", "copy_"]


def test_results_lie_where_the_function_has_them():
    """What was made on the host is an operator's result there; the plan names the host."""
    program = program_of_graph(
        traced(lambda x: (x.cpu(), torch.zeros_like(x, device="cpu"), x + 1), "cuda")
    )
    steps = [step for step in program.plan.steps if hasattr(step, "operator")]
    assert sorted(step.operator.split(".")[1] for step in steps) == ["_to_copy", "full_like"]
    assert all(step.results[0].device == "host" for step in steps)
    assert all({"device": "host"} in step.keywords.values() for step in steps)


@pytest.mark.parametrize(
    ("function", "constants"),
    [
        (relative_bucket, 1),
        (offsets, 1),
        (inverted_mask, 0),
        (lambda x: x[torch.arange(4).flip(0)], 0),
        (lambda x: x * torch.arange(1, 5).float().log().sum(), 0),
        (lambda x: x / torch.sqrt(torch.tensor(64.0)), 0),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device), 1),
        (lambda x: x * torch.arange(8).chunk(2)[1].to(x.device), 0),
        (lambda x: x + torch.arange(4).float().log1p().cummax(0)[0].to(x.device), 1),
    ],
)
def test_what_is_made_on_the_host_of_numbers_alone_is_no_call(function, constants):
    """Exact operators are the kernels'; a logarithm and a sum of floats are the host's numbers."""
    program = program_of_graph(traced(function, "cuda"), guarded=True)
    assert (called(program), len(program.constants)) == ([], constants)
    assert not program.host_constants
    assert program.build(["cuda:90"]).kernels
    for held in program.constants.values():
        assert torch.equal(torch.zeros(4) + held, function(torch.zeros(4)))


def test_a_program_of_its_own_gets_no_constant_that_its_bundle_lacks():
    """Who loads it would have to bring a table that the program could make."""
    for function, calls in ((relative_bucket, True), (inverted_mask, False)):
        program = generate(function, [torch.zeros(4)], device="cuda")
        assert (bool(called(program)), dict(program.constants)) == (calls, {})


def test_a_constant_made_of_the_host_s_numbers_is_never_a_result():
    """A caller may change a result in place; the next call has the same numbers."""

    def table(x):
        return torch.arange(4).float().log1p().to(x.device)

    for function in (table, lambda x: table(x).view(2, 2), lambda x: table(x).add_(x)):
        program = program_of_graph(traced(function, "cuda"), guarded=True)
        (held,) = program.constants
        assert held not in {output.buffer for output in program.plan.outputs}


def test_one_constant_serves_all_copies():
    def function(x):
        table = torch.arange(4).float().log1p()
        return x * table.to(x.device) + table.to(x.device)

    assert len(program_of_graph(traced(function, "cuda"), guarded=True).constants) == 1


def test_a_check_of_the_tracer_s_keeps_nothing_on_the_host():
    """torch.export checks the dtype of what is copied."""

    def function(x):
        places = torch.arange(4)
        torch.ops.aten._assert_tensor_metadata(places, dtype=torch.int64)
        return x + places.to(x.device)

    module = traced(function, "cuda")
    assert any("_assert" in str(node.target) for node in module.graph.nodes)
    assert called(program_of_graph(module)) == []


def test_what_is_too_large_for_a_constant_is_called():
    def function(x):
        return x + torch.arange(1 << 18).float().log1p().to(x.device).sum()

    program = program_of_graph(traced(function, "cuda"), guarded=True)
    assert "log1p" in called(program)
    assert not program.constants


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + torch.arange(x.shape[0])[:, None].to(x.device), set()),
        (lambda x: x[torch.arange(x.shape[0]).flip(0)], set()),
        # Floats of sizes that change are no constant, and a kernel's may have other bits.
        (lambda x: x + torch.arange(x.shape[0]).float().log1p()[:, None].to(x.device), {"log1p"}),
        (lambda x: x + (torch.arange(3).float().log1p() * x.shape[0]).to(x.device), {"log1p"}),
        # What does not change is a constant, which kernels repeat.
        (
            lambda x: x + torch.arange(3).float().log1p().expand(x.shape[0], 3).to(x.device),
            set(),
        ),
    ],
)
def test_sizes_that_change_are_computed_by_kernels(function, expected):
    module = trace(function, [torch.zeros(5, 3)], device="cuda", dynamic=True)
    program = program_of_graph(module, guarded=True)
    assert {"log1p"} & set(called(program)) == expected
    if not expected:
        assert called(program) == []


library = torch.library.Library("host_numbers", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.impl("twice", torch.empty_like, "Meta")


def test_what_the_host_is_asked_for_stays_there():
    """Random numbers, what leaves on the host, what is made of an input there or changes one, and
    an operator of a library.
    """
    for function, *devices in (
        (lambda x: x + torch.rand(4).to(x.device), "cuda"),
        (lambda x, y: x + (y + torch.arange(4)).to(x.device), "cuda", "cpu"),
        (lambda x: torch.arange(4), "cuda"),
        (lambda x, y: (y.add_(torch.arange(4)), x + y.to(x.device))[1], "cuda", "cpu"),
        (lambda x: x + torch.ops.host_numbers.twice(torch.arange(4)).to(x.device), "cuda"),
    ):
        module = traced(function, *devices)
        before = [found.operator.split(".")[1] for found in lower_graph(module).fallbacks]
        assert before
        assert called(program_of_graph(module)) == before


def test_what_is_read_on_the_host_too_is_made_on_both():
    """As a result there, or as what an input there becomes."""
    program = program_of_graph(
        traced(lambda x: ((a := torch.arange(4)), x + a.to(x.device)), "cuda")
    )
    assert called(program) == ["arange"]
    program = program_of_graph(
        traced(lambda x, y: (y.copy_(a := torch.arange(4)), x + a.to(x.device))[1], "cuda", "cpu")
    )
    assert called(program) == ["arange", "copy", "copy_"]


def test_a_number_that_the_host_reads_is_read_there():
    """`item` of what is made there; the device has its own."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from bundler.codegen.host_constants import on_device

    module = traced(lambda x: ((a := torch.arange(4).sum()), x + a)[1], "cuda")
    graph = module.graph
    (total,) = (node for node in graph.nodes if node.target is torch.ops.aten.sum.default)
    with graph.inserting_after(total):
        number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (total,))
    number.meta["val"] = ShapeEnv().create_unbacked_symint()
    graph.output_node().args = ((graph.output_node().args[0], number),)
    found = {node.name: node for node in on_device(module, constants=True).graph.nodes}
    read = found[number.name].all_input_nodes
    assert [node.meta["val"].device.type for node in read] == ["cpu"]
    (added,) = (node for node in found.values() if node.target is torch.ops.aten.add.Tensor)
    assert read[0] not in added.all_input_nodes


def test_two_gpus_in_one_graph_are_refused():
    """torch.compile runs such a graph as torch has it."""
    with pytest.raises(UnsupportedOperator, match="cuda:0 and cuda:1"):
        lower_graph(traced(lambda x, y: (x + 1, y + 1), "cuda:0", "cuda:1"))


def test_the_second_gpu_alone_is_the_program_s_device():
    """Its number is part of the device that allocations and launches are made on."""
    assert program_of_graph(traced(lambda x: x + 1, "cuda:1")).device == "cuda:1"


@pytest.mark.parametrize("on", [True, False])
def test_deterministic_algorithms_are_obeyed(on):
    """Sums in an open order, and writes of several numbers to one place, are torch's operators
    then.
    """

    def function(x, index, rows):
        return (
            torch.zeros(4, 3).index_add(0, index, rows),
            torch.zeros(4, 3).index_put((index,), rows),
            x.scatter_add(0, index, rows[:, 0]),
            x.long().scatter_add(0, index, index),
        )

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        given = [torch.ones(4), torch.tensor([1, 1, 2]), torch.ones(3, 3)]
        program = generate(function, given)
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(called(program)) == (3 if on else 0)


@pytest.mark.gpu
def test_tensors_of_the_second_gpu_are_computed_there():
    """The current device is another one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(64, 32, device="cuda:1")
    compiled = torch.compile(
        lambda x: torch.softmax(x, -1) + torch.tensor(2.0), backend="triton_bundler"
    )
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1) + 2)


@pytest.mark.gpu
def test_numbers_of_the_host_reach_kernels():
    """Of every dtype, and floats that are made of sizes."""
    for dtype in (torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8):
        number = torch.tensor(1, dtype=dtype)
        compiled = torch.compile(
            lambda x, s: x * s + 1 / x.shape[0], backend="triton_bundler", dynamic=True
        )
        for rows in (3, 5):
            x = torch.randn(rows, 7, device="cuda", dtype=torch.float64)
            torch.testing.assert_close(compiled(x, number), x * number + 1 / rows)

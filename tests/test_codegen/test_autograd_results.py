# SPDX-License-Identifier: Apache-2.0
"""What AOTAutograd made of a graph is found by another process, which traces nothing and has equal
results, and only for a graph, inputs and settings that are equal in all that decide it.
"""

import contextlib
import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._functorch import config  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bundler.codegen import autograd_key as keys  # noqa: E402
from bundler.codegen import graph_key  # noqa: E402
from bundler.codegen.program import GenerateOptions  # noqa: E402
from bundler.codegen.program_policy import ProgramPolicy  # noqa: E402

OPTIONS = GenerateOptions()


def function(x, y):
    return torch.softmax(x * y, -1) + 1.5


def given():
    return [torch.zeros(6, 8), torch.zeros(8)]


def key(called=function, inputs=None, options=OPTIONS, *, dynamic=False):
    """Return the key of what Dynamo makes of a call."""
    found = []

    def backend(module, examples):
        found.append(keys.autograd_key(module, examples, options))
        return module.forward

    torch._dynamo.reset()
    torch.compile(called, backend=backend, dynamic=dynamic)(*(inputs or given()))
    (digest,) = found
    return digest


# ------------------------------------------------------------------------------------------- Keys


def test_an_equal_graph_has_an_equal_key():
    """Names of the user's say nothing, nor does what is left out of programs."""
    known = key()
    assert len(known) == 64
    assert known != key(options=replace(OPTIONS, graphs=True))
    named = replace(OPTIONS, name="another", sources="/elsewhere", nan_checks=True)
    assert known == key() == key(options=named)


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(8)],
        [torch.zeros(7, 8), torch.zeros(8)],
        [torch.zeros(8, 6).t(), torch.zeros(8)],
        [torch.zeros(49)[1:].view(6, 8), torch.zeros(8)],
        [torch.zeros(6, 8), torch.zeros(1).expand(8)],
        [torch.zeros(6, 8), torch.zeros(8, requires_grad=True)],
        [torch.zeros(6, 8), torch.nn.Parameter(torch.zeros(8))],
        [torch.zeros(6, 8), 2.0],
    ],
    ids=["dtype", "sizes", "strides", "offset", "expanded", "gradient", "parameter", "number"],
)
def test_what_an_input_is_decides_the_key(inputs):
    """So it does with what AOTAutograd traces."""
    assert key(inputs=inputs) not in {key(), None}


@pytest.mark.parametrize(
    "called",
    [
        lambda x, y: torch.softmax(x * y, -1) + 2.5,
        lambda x, y: torch.softmax(x * y, 0) + 1.5,
        lambda x, y: torch.log_softmax(x * y, -1) + 1.5,
        lambda x, y: torch.softmax(y * x, -1) + 1.5,
        lambda x, y: (torch.softmax(x * y, -1) + 1.5, x * 2),
        lambda x, y: torch.softmax(x.mul_(y), -1) + 1.5,
        lambda x, y: torch.softmax(x[..., 0:8] * y, -1) + 1.5,
    ],
    ids=["number", "argument", "function", "order", "results", "in place", "slice"],
)
def test_what_the_graph_is_decides_the_key(called):
    """Its functions, their arguments, and what it returns."""
    assert key(called) not in {key(), None}


@contextlib.contextmanager
def set_and_put_back(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


STATES = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to another type": lambda: torch.autocast("cpu", torch.float16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "dtype": lambda: set_and_put_back(torch.set_default_dtype, torch.float64, torch.float32),
    "precision": lambda: set_and_put_back(
        torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision()
    ),
    "deterministic": lambda: set_and_put_back(torch.use_deterministic_algorithms, True, False),
    "partitioner": lambda: config.patch(activation_memory_budget=0.5),
    "decompositions": lambda: config.patch(functionalize_rng_ops=True),
    "inductor": lambda: torch._inductor.config.patch(fallback_random=True),
}


@pytest.mark.parametrize("state", STATES)
def test_torchs_settings_decide_the_key(state):
    """Those that a trace, a partition or a program reads."""
    known = key()
    with STATES[state]():
        assert key() not in {known, None}
    assert key() == known


@pytest.mark.parametrize(
    "changed",
    [
        {"upcast": False},
        {"templates": "all"},
        {"assert_indices": False},
        {"wide_indices": True},
        {"policy": ProgramPolicy(coordinate_descent_tuning=True)},
        {"policy": ProgramPolicy(deterministic=True)},
    ],
)
def test_options_decide_the_key(changed):
    """Those that `GraphKey` has."""
    assert key(options=replace(OPTIONS, **changed)) not in {key(), None}


def test_versions_decide_the_key(monkeypatch):
    """Of the generator's text, of torch, Triton, SymPy and Python, and torch's own files."""
    found = {key()}
    for place, name in (
        (graph_key, "_generator"),
        (graph_key, "_libraries"),
        (graph_key, "_state"),
        (keys, "_torchs_files"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda: "another")
            found.add(key())
    assert len(found) == 5
    assert None not in found


def test_files_of_torch_are_told_apart(tmp_path, monkeypatch):
    """By their times, since nobody reads them in each process."""
    (tmp_path / "_decomp").mkdir()
    file = tmp_path / "_decomp" / "decompositions.py"
    file.write_text("")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    before = keys._torchs_files.__wrapped__()
    assert before == keys._torchs_files.__wrapped__()
    file.write_text("another")
    assert before != keys._torchs_files.__wrapped__()


@torch.library.custom_op("autograd_results::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


@torch.compiler.allow_in_graph
def of_the_user(x):
    return x + 1


def shared():
    whole = torch.zeros(56)
    return [whole[:48].view(6, 8), whole[48:]]


@pytest.mark.parametrize(
    ("called", "inputs"),
    [
        (function, shared()),
        (lambda x, y: twice(x) * y, None),
        (lambda x, y: torch.ops.autograd_results.twice.default(x) * y, None),
        (lambda x, y: of_the_user(x) * y, None),
        (lambda x, y: checkpoint(torch.sin, x, use_reentrant=False) * y, None),
        (lambda x, y: torch.nonzero(x).sum() + y, [torch.ones(6, 8), torch.zeros(8)]),
    ],
    ids=["memory", "operator", "overload", "function", "graph in a graph", "unknown sizes"],
)
def test_what_is_not_known_has_no_key(called, inputs):
    """AOTAutograd sees more of it than the key would say."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert key(called, inputs) is None


def test_sizes_that_change_have_no_key():
    """Guards on them are taken while torch traces."""
    assert key(dynamic=True) is None


def test_modes_have_no_key():
    """They may change what is traced."""
    module, found = torch.fx.symbolic_trace(function), []
    for mode in (contextlib.nullcontext(), torch.device("meta")):
        with mode:
            found.append(keys.autograd_key(module, given(), OPTIONS))
    assert [one is None for one in found] == [False, True]


def test_functions_that_decide_what_is_saved_have_no_key():
    """torch leaves them out of what it says of its settings."""
    with config.patch(activation_memory_budget_solver=lambda *_: None):
        assert key() is None


@pytest.mark.parametrize("left_out", ["_target", "_arguments", "_tensor"])
def test_a_key_that_says_too_little_is_found(left_out, monkeypatch):
    """Each part of a line tells some of these graphs apart."""
    calls = [
        (function, given()),
        (lambda x, y: torch.log_softmax(x * y, -1) + 1.5, given()),
        (lambda x, y: torch.softmax(x * y, -1) + 2.5, given()),
        (function, [torch.zeros(7, 8), torch.zeros(8)]),
        (function, [torch.zeros(6, 8), torch.zeros(8, requires_grad=True)]),
    ]
    assert len({key(*one) for one in calls}) == len(calls)
    monkeypatch.setattr(keys._DynamoLines, left_out, lambda *_: "")
    assert len({key(*one) for one in calls}) < len(calls)


# ---------------------------------------------------------------------------------- Second starts


@pytest.mark.slow
def test_second_starts(interpreted, tmp_path):
    """Inference, training, gradients twice, inputs that are changed; with files that are damaged,
    gone or not trusted; programs that fail; and settings that differ.
    """
    told = json.loads(interpreted("autograd_result_worker.py", tmp_path))
    assert told == {name: EXPECTED[name] for name in told}
    assert told.keys() == EXPECTED.keys()


# Of each: how often torch traced, and whether results are those of the first start.
EXPECTED = {
    "first": [1, True],
    "second": [0, True],
    "not kept": [1, True],
    "another number": [1, False],
    "another input": [1, False],
    "program gone": [1, True],
    "program there again": [0, True],
    "damaged": [1, True],
    "mended": [0, True],
    "not torch's": [1, True],
    "not trusted: autograd": [1, True],
    "not trusted: autograd-programs": [1, True],
    "never ran": [1, True],
    "ran": [0, True],
    "refused by torch": [1, True],
    "fails": ["raises", True],
    "failed": [1, True],
    "inputs changed": [1, True],
    "inputs changed again": [0, True],
    "trained forward alone": [1, True],
    "trained": [1, True],
    "trained again": [0, True],
    "gradients kept": [0, True],
    "verified": [1, True],
    "caches off": [1, True],
    "no pickle": [1, True],
    "too large": [1, True],
    "kept at last": [1, True],
    "found at last": [0, True],
    "tensor held, once": [1, True],
    "tensor held, twice": [1, True],
}

# SPDX-License-Identifier: Apache-2.0
"""An operator is called by torch's own function for it where that is the same call, and as ever
elsewhere.
"""

import pytest

torch = pytest.importorskip("torch")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from bundler.toolchain import torch_functions  # noqa: E402
from bundler.toolchain.torch_functions import SCHEMAS, quick_function  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402

# What torch computes by the listed operators; attention on a GPU is in none of its samples.
FUNCTIONS = [
    "addmm",
    "baddbmm",
    "bmm",
    "mm",
    "nn.functional.conv1d",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
]
DTYPES = (torch.float32, torch.complex64, torch.int64)
HEADS = torch.ones(1, 2, 4, 8)
ATTENTION = [
    ("flash", (HEADS, HEADS, HEADS, 0.0, True), {"scale": 0.5}),
    ("flash", (HEADS, HEADS, HEADS), {}),
    ("efficient", (HEADS, HEADS, HEADS, None, True), {}),
    ("efficient", (HEADS, HEADS, HEADS, HEADS, False, 0.25, True), {"scale": 0.5}),
    ("cudnn", (HEADS, HEADS, HEADS, None, True), {}),
    ("cudnn", (HEADS, HEADS, HEADS, HEADS, False, 0.25, True, False), {"scale": 0.5}),
]


class Noted(Exception):
    """Ends a call before anything is computed."""


class Notes(TorchDispatchMode):
    """Lists the listed operators that are called, with what each is given."""

    def __init__(self, *, ends=False):
        super().__init__()
        self.calls, self.ends = [], ends

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if self.ends or str(operator) in SCHEMAS:
            self.calls.append((operator, arguments, dict(keywords or {})))
        if self.ends:
            raise Noted
        return operator(*arguments, **(keywords or {}))


def samples():
    """Return calls of listed operators that torch's own samples come to."""
    notes = Notes()
    for info in op_db:
        for dtype in DTYPES if info.name in FUNCTIONS else ():
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for sample in info.sample_inputs("cpu", dtype):
                with torch.no_grad(), notes:
                    info(sample.input, *sample.args, **sample.kwargs)
    return notes.calls


def dispatched(function, arguments, keywords):
    """Return which operator a function calls, with which tensors and numbers."""
    notes = Notes(ends=True)
    with notes, pytest.raises(Noted):
        function(*arguments, **keywords)
    ((operator, *given),) = notes.calls
    return operator, tree_map(_told, given)


def _told(value):
    return id(value) if isinstance(value, torch.Tensor) else (type(value), value)


def same_bits(one, other):
    alike = one.dtype == other.dtype and one.stride() == other.stride()
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor):
    return tensor.resolve_conj().reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_each_function_calls_its_operator_with_what_it_is_given():
    """Over torch's samples of many types and layouts, the same overload is dispatched with the
    same tensors and numbers, and the same numbers come back, bit by bit.
    """
    met = set()
    for operator, arguments, keywords in samples():
        name = str(operator)
        function = quick_function(torch, name, operator)
        met.add(name)
        found = dispatched(function, arguments, keywords)
        assert found == dispatched(operator._op, arguments, keywords)
        assert found[0] is operator
        expected, got = operator(*arguments, **keywords), function(*arguments, **keywords)
        assert type(got) is type(expected) or isinstance(got, tuple)
        assert all(map(same_bits, tree_leaves(tuple(got)), tree_leaves(tuple(expected))))
    for kind, arguments, keywords in ATTENTION:
        name = f"aten._scaled_dot_product_{kind}_attention.default"
        operator = TorchMemory().operator(name)
        function = quick_function(torch, name, operator)
        met.add(name)
        found = dispatched(function, arguments, keywords)
        assert found == dispatched(operator._op, arguments, keywords)
        assert found[0] is operator
    assert met == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_listed_operators_are_called_by_torchs_functions(name):
    """In this release of torch each has the listed schema, and its function."""
    function, _ = TorchMemory().bound_operator(name)
    assert function is getattr(torch, name.split(".")[1])


def test_an_operator_that_is_not_the_listed_one_is_called_as_it_is(monkeypatch):
    """A release whose operator takes something else is left alone, as is what nobody listed."""
    assert quick_function(torch, "aten.mul.Tensor", torch.ops.aten.mul.Tensor) is None
    monkeypatch.setitem(
        torch_functions.SCHEMAS, "aten.mm.default", "(Tensor self, Tensor mat2, bool b) -> Tensor"
    )
    function, _ = TorchMemory().bound_operator("aten.mm.default")
    assert function is torch.ops.aten.mm.default._op

# SPDX-License-Identifier: Apache-2.0
"""`trace`: a function, module or exported program as an FX graph of ATen operators, with operators
taken apart by `decompositions`.  Imports torch.

`schedule` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import string_at
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bundler.codegen.attention_operator import attention_kept_whole
from bundler.codegen.decompositions import decompositions
from bundler.codegen.device_tracing import tracing_for
from bundler.errors import ConfigError, UnsupportedOperator
from bundler.format.digest import digest_text, sha256
from bundler.runtime.program.program_inputs import is_lazy
from bundler.toolchain.user_frames import recorded_lines

# Key of a graph's `meta`: place of a result -> its `InputView`, where it shares an input's memory.
# A functional graph itself does not say so.
RETURNED_INPUTS = "returned_inputs"
# Key of a graph's `meta`: torch.export made it, so its sizes may be 0 or 1 too.
EXPORTED = "exported"
# Key of a graph's `meta`: where the graph holds a tensor -> what the module calls it, several names
# where it is shared.
MODULE_NAMES = "module_names"
# Key of a graph's `meta`: name of a parameter or buffer whose numbers Python read, which are in the
# graph from then on -> their digest.
READ_NUMBERS = "read_numbers"
# Part of torch's message where it cannot trace -> what the user can do.
_REFUSALS = {
    "symbolic sizes": (
        "an operator asks in C++ for sizes that are symbols, as dropout does: generate for the"
        ' sizes of the example, or use torch.compile(backend="triton_bundler", dynamic=True)'
    ),
    "mutating a non-functional tensor": (
        "the function changes a tensor that is no input: pass it as an input, or give the module "
        "with a device"
    ),
    "is not linked with support for": (
        "an operator asks the device itself how to compute, and this build of torch has no support"
        " for it: trace with a build of torch that has, no GPU is needed"
    ),
    "Unhandled FakeTensor Device Propagation": (
        "tensors lie on two devices: what a function has from elsewhere stays where it is, so give"
        " the module itself, or its tensors as inputs"
    ),
}
# What launches a kernel of torch.cuda.jiterator.
_JITERATOR = "_cuda_jiterator_compile_and_launch_kernel"
# torch's message about a library's operator that changes an argument or returns one.
_CHANGING_OPERATOR = re.compile(r"Found a custom \(non-ATen\) operator .*?: ([\w:.]+)\(")


class InputView(NamedTuple):
    """A result that shares an input's memory.

    Attributes:
        number: of the input.
        sizes, strides: of the result.
        offset: of its first element, counted from the input's.
        itself: whether it is the input's own tensor object, as it was.
    """

    number: int
    sizes: Sequence[Any]
    strides: Sequence[Any]
    offset: Any
    itself: bool


def trace(
    function: Any,
    example_inputs: Sequence[Any],
    *,
    dynamic: bool = False,
    device: str | None = None,
    templates: bool = False,
) -> fx.GraphModule:
    """Return the functional graph of a call.

    Args:
        function: a function of tensors, or a `torch.export.ExportedProgram`, whose parameters and
            buffers are inputs in front of the user's.
        example_inputs: one tensor or number for each argument.
        dynamic: keep sizes symbolic; else the graph is for the sizes of the example.
        device: that the graph is for, which need not be here: see `device_tracing`.  None takes
            that of the example.
        templates: keep attention whole, and vectors columns, where kernels are made of products.

    Raises:
        UnsupportedOperator: an operator that cannot be traced so, as one whose sizes follow from
            values, or one of a library that changes its arguments.
        ConfigError: there is no such device, or the program was exported for another one.
    """
    if is_exported(function):
        if device is not None:
            raise ConfigError(
                f"device={device!r}: an exported program has its own device; export it for"
                " this one",
                got=device,
            )
        module = function.run_decompositions(decompositions(templates=templates)).graph_module
        module.meta[EXPORTED] = True
        return module

    examples = _apart(example_inputs)
    if device is not None:
        return _traced_for(function, examples, device, dynamic=dynamic, templates=templates)
    mode = "symbolic" if dynamic else "fake"
    traced = _traced(function, examples, mode, templates=templates)
    names = _module_names(function)
    held = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    found = {place: names.get(id(attrgetter(place)(traced)), ()) for place in held}
    traced.meta[MODULE_NAMES] = {place: named for place, named in found.items() if named}
    traced.meta[READ_NUMBERS] = _read_numbers(function, traced.meta.pop(READ_NUMBERS))
    return traced


def _read_numbers(function: Any, read: frozenset[int]) -> dict[str, str]:
    """Return the names of a module's tensors among memory that was read, and digests of them."""
    found = {}
    for name, tensor in _module_tensors(function):
        if _storage(tensor) in read:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found[name] = digest_text(sha256(string_at(data.data_ptr(), data.numel())))
    return found


def _module_tensors(function: Any) -> list[tuple[str, torch.Tensor]]:
    """Return a module's parameters and buffers with all their names; also of a method's module."""
    module = function if isinstance(function, torch.nn.Module) else _owner(function)
    if module is None:
        return []
    listed = (module.named_parameters, module.named_buffers)
    return [found for names in listed for found in names(remove_duplicate=False)]


def _module_names(function: Any) -> dict[int, tuple[str, ...]]:
    """Return the names of a module's parameters and buffers, by their ids."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in _module_tensors(function):
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _owner(function: Any) -> torch.nn.Module | None:
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _apart(examples: Sequence[Any]) -> list[Any]:
    """Return the examples, in memory of its own what shares memory with an earlier one, and what is
    lazily negative.

    A call may have other tensors there; torch traces a tensor that is given twice as one input, and
    a view of a negative one as a copy.
    """
    seen: set[int] = set()
    found = []
    for value in examples:
        if _is_strided(value):
            if _storage(value) in seen or is_lazy(value):
                value = _another(value)  # noqa: PLW2901
            seen.add(_storage(value))
        found.append(value)
    return found


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies as another one does, in memory of its own; its numbers do not
    matter.
    """
    offset = tensor.storage_offset()
    spans = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    memory = torch.zeros(offset + sum(spans) + 1, dtype=tensor.dtype, device=tensor.device)
    made = memory.as_strided(tensor.shape, tensor.stride(), offset)
    return made.requires_grad_(tensor.requires_grad)


def _traced_for(
    function: Any, example_inputs: Sequence[Any], device: str, *, dynamic: bool, templates: bool
) -> fx.GraphModule:
    """Return the graph for a device, in which the module's own tensors are constants again."""
    named: dict[str, torch.Tensor] = {}
    called, names = function, _module_names(function)
    if isinstance(function, torch.nn.Module):
        named = {**dict(function.named_parameters()), **dict(function.named_buffers())}

        def called(*inputs: Any) -> Any:
            given = dict(zip(named, inputs, strict=False))
            return torch.func.functional_call(function, given, tuple(inputs[len(named) :]))

    with tracing_for(device, dynamic=dynamic) as tracing:
        given = tracing.faked([*named.values(), *example_inputs])
        traced = _traced(called, given, "real", templates=templates)
    traced.meta[READ_NUMBERS] = {}  # fake tensors have none
    traced.meta[MODULE_NAMES] = {
        f"_tensor_of_module{number}": names[id(tensor)]
        for number, tensor in enumerate(named.values())
    }
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for number, (node, tensor) in enumerate(zip(placeholders, named.values(), strict=False)):
        # Traced as inputs, so that they are fake; in the graph they are constants again.
        if node.users:
            name = f"_tensor_of_module{number}"
            traced.register_buffer(name, tensor.detach())
            with traced.graph.inserting_before(node):
                constant = traced.graph.get_attr(name)
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
        traced.graph.erase_node(node)
    count = len(named)
    views = traced.meta[RETURNED_INPUTS]
    traced.meta[RETURNED_INPUTS] = {
        place: view._replace(number=view.number - count)
        for place, view in views.items()
        if view.number >= count
    }
    traced.recompile()
    return traced.to(tracing.device) if tracing.is_here else traced


def _traced(
    function: Any, example_inputs: Sequence[Any], mode: str, *, templates: bool
) -> fx.GraphModule:
    kept = attention_kept_whole if templates else nullcontext
    returned: dict[int, InputView] = {}
    read: set[int] = set()

    # `*inputs`, since make_fx counts parameters, and those with a default may be left out.
    def called(*inputs: Any) -> Any:
        given = {_storage(x): n for n, x in enumerate(inputs) if _is_strided(x)}
        before = {n: _layout(inputs[n]) for n in given.values()}
        with recorded_lines(), _without_jiterator(), kept(), _ChangesInPlace() as changes:
            result = function(*inputs)
        read.update(changes.read)
        for place, leaf in enumerate(tree_leaves(result)):
            # One that is lazily conjugated shares the memory, and has other numbers.
            plain = _is_strided(leaf) and not is_lazy(leaf)
            number = given.get(_storage(leaf)) if plain else None
            if number is not None and leaf.dtype == inputs[number].dtype:
                # A tensor whose sizes or strides were changed in place is the same object, but lies
                # otherwise.
                itself = leaf is inputs[number] and id(leaf) not in changes.reshaped
                sizes, strides, offset = before[number] if itself else _synced(leaf)
                first = before[number][2]
                if not itself and id(inputs[number]) not in changes.reshaped:
                    first = _synced(inputs[number])[2]
                returned[place] = InputView(number, sizes, strides, offset - first, itself)
        return result

    functional = torch.func.functionalize(called, remove="mutations")
    # Tensors that are no inputs, such as a module's parameters, become constants of the graph.
    take = partial(make_fx, tracing_mode=mode, _allow_non_fake_inputs=True)
    table = decompositions(templates=templates)
    try:
        traced = take(functional, decomposition_table=table)(*example_inputs)
    except RuntimeError as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from error
    # Decompositions run after the first pass made the graph functional, and may change in place.
    if _changes_what_it_made(traced):
        functional = torch.func.functionalize(traced, remove="mutations")
        traced = take(functional, decomposition_table=table)(*example_inputs)
    _forget_callers(traced)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    placeholders = (node for node in traced.graph.nodes if node.op == "placeholder")
    for node, value in zip(placeholders, example_inputs, strict=False):
        # A number has no fake value, unless it became a symbol.
        if isinstance(value, (bool, int, float)):
            node.meta.setdefault("val", value)
    traced.meta[RETURNED_INPUTS] = returned
    traced.meta[READ_NUMBERS] = frozenset(read)
    return traced


class _ChangesInPlace(TorchFunctionMode):  # type: ignore[misc]  # torch is not read
    """Keeps the strides of tensors that are changed in place.

    `functionalize` gives a changed tensor the strides and the offset of the value that it holds
    from then on, a new result of an operator.  A `copy_` keeps the tensor's strides; the offset is
    lost where torch has the value's fake tensor from its cache.

    Attributes:
        reshaped: ids of tensors whose sizes, strides or memory a call changed, as `t_` does.
        read: what names the memory of tensors whose numbers Python got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reshaped: set[int] = set()
        self.read: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if getattr(function, "__name__", "") in _RECURRENT:
            with torch.backends.cudnn.flags(enabled=False):
                return function(*arguments, **keywords)
        target: Any = arguments[0] if arguments else None
        if not _is_strided(target):
            return function(*arguments, **keywords)
        if getattr(function, "__name__", "") in _READING:
            self.read.add(_storage(target))
        if _resizes_nothing(function, target, arguments[1:], keywords):
            return target
        change = _change_of(function)
        if change == "layout":
            self.reshaped.add(id(target))
        if change != "numbers" or _is_whole(target):
            return function(*arguments, **keywords)
        # Changed in a copy and copied back, since `copy_` keeps the strides.
        changed = target.clone()
        function(changed, *arguments[1:], **keywords)
        target.copy_(changed)
        return None if function is torch.Tensor.__setitem__ else target


# What gives Python the numbers of a tensor.
_READING = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__float__",
        "__int__",
        "__bool__",
        "__index__",
        "__complex__",
        "__array__",
        "__dlpack__",
        "is_nonzero",
        "equal",
        "allclose",
    ]
)
# Functions of torch that are one call of cuDNN on a GPU.  torch takes them apart without it: for
# cuDNN it looks into the memory of the weights, which a traced tensor does not have.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


@contextmanager
def _without_jiterator() -> Iterator[None]:
    """Refuse kernels of torch's jiterator that are given tensors of a trace: they are no operators,
    and would be launched on memory that is not there.
    """
    launch = getattr(torch._C, _JITERATOR, None)  # noqa: SLF001  # no public name for it
    if launch is None:
        yield
        return

    def launched(
        code: Any, name: str, by_reference: Any, count: Any, tensors: Any, *rest: Any
    ) -> Any:
        if any(map(torch._is_functional_tensor, tensors)):  # noqa: SLF001
            raise UnsupportedOperator(
                f"{name}: a kernel of torch.cuda.jiterator is compiled where it is called, and is"
                " no operator that a program could call: make it one by torch.library.custom_op",
                operator=name,
            )
        return launch(code, name, by_reference, count, tensors, *rest)

    setattr(torch._C, _JITERATOR, launched)  # noqa: SLF001
    try:
        yield
    finally:
        setattr(torch._C, _JITERATOR, launch)  # noqa: SLF001


# Python's in-place operators -> torch's.
_AUGMENTED = {
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__idiv__": "div_",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    "__ipow__": "pow_",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_",
    "__irshift__": "bitwise_right_shift_",
}


def _change_of(function: Any) -> Literal["", "numbers", "layout"]:
    """Return what a function of torch changes of its first argument: its elements, where they lie,
    or neither.
    """
    name = getattr(function, "__name__", "")
    name = _AUGMENTED.get(name, name)
    if name in _PLACED_ANEW:
        return "layout"
    if name == "__setitem__":
        return "numbers"
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") else None
    if packet is None or name.startswith("__") or name in {"copy_", "requires_grad_"}:
        return ""
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    if any(torch.Tag.inplace_view in one.tags for one in overloads):
        return "layout"
    mutable = any(one._schema.is_mutable for one in overloads)  # noqa: SLF001
    return "numbers" if mutable else ""


def _resizes_nothing(
    function: Any, target: torch.Tensor, others: Sequence[Any], keywords: Any
) -> bool:
    """Whether a call resizes a tensor to the sizes that it has: torch's kernels leave it as it is,
    `functionalize` makes it dense.
    """
    name = getattr(function, "__name__", "")
    if name not in {"resize_", "resize_as_"} or keywords or not others:
        return False
    sizes = others[0].shape if name == "resize_as_" else others
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return len(sizes) == target.dim() and all(
        statically_known_true(one == other) for one, other in zip(sizes, target.shape, strict=True)
    )


_PLACED_ANEW = frozenset({"resize_", "resize_as_", "set_"})


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies as a new one of its sizes does."""
    return tensor.is_contiguous() and bool(statically_known_true(tensor.storage_offset() == 0))


def _refusal(error: RuntimeError) -> UnsupportedOperator | None:
    """Return what an error of torch's tracing says of an operator, None where it says nothing of
    one.
    """
    text, changing = str(error), _CHANGING_OPERATOR.search(str(error))
    if changing:
        return UnsupportedOperator(
            f"{changing[1]}: an operator of a library changes its arguments, which no program does "
            "for it: return what is new from it, or use torch.compile(backend='triton_bundler'), "
            "which runs such a graph as torch has it",
            operator=changing[1],
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in text:
        return UnsupportedOperator(
            f"an operator of a library does not say what its results are without running ({error}):"
            " register that by torch.library.register_fake",
            operator=str(getattr(error, "func", "")),
        )
    reason = next((why for said, why in _REFUSALS.items() if said in text), None)
    if reason is not None:
        return UnsupportedOperator(reason, operator=text.partition("\n")[0])
    return None


def _forget_callers(traced: fx.GraphModule) -> None:
    """Forget what recording lines records too: kernels are named after the operators that are in
    the graph.
    """
    for node in traced.graph.nodes:
        node.meta.pop("original_aten", None)


def is_exported(function: Any) -> bool:
    """Whether torch.export made something."""
    return isinstance(function, torch.export.ExportedProgram)


def _is_strided(value: Any) -> bool:
    """Whether a value is a tensor that lies in one storage, as sparse ones do not."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _synced(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """Return the layout that a functional tensor has after all changes of its memory."""
    if torch._is_functional_tensor(tensor):  # noqa: SLF001  # torch's own functions for it
        torch._sync(tensor)  # noqa: SLF001
    return _layout(tensor)


def _layout(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: torch.Tensor) -> int:
    """Return what names a tensor's memory; functional tensors share one name with their views."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch itself tells aliases so


def _changes_what_it_made(traced: fx.GraphModule) -> bool:
    """Whether some operator of a graph changes a tensor that is no input, as decompositions do that
    came after the graph was made functional.
    """
    return any(
        isinstance(changed, fx.Node) and changed.op != "placeholder"
        for node in traced.graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
        for changed in _changed_arguments(node)
    )


def _changed_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments of a call that the operator writes to, by its schema."""
    schema = node.target._schema.arguments  # noqa: SLF001
    named = dict(zip((argument.name for argument in schema), node.args, strict=False))
    named |= node.kwargs
    return [
        leaf
        for argument in schema
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(named.get(argument.name))
    ]

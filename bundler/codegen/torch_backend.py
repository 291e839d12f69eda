# SPDX-License-Identifier: Apache-2.0
"""`triton_bundler`: the backend of that name of torch.compile: forward and backward graphs by
AOTAutograd, run as generated programs.  Imports torch.

    torch.compile(function, backend="triton_bundler", options={"programs": programs})

torch finds it by the entry point `torch_dynamo_backends`.  A graph that no program can be generated
for, or whose program fails in its first call, runs as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import should_use_local_autograd_cache
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext

from bundler.codegen import compile_ahead, triton_hash
from bundler.codegen.attention import with_attention
from bundler.codegen.autograd_key import autograd_key
from bundler.codegen.autograd_results import AutogradResult, Runs, Unusable
from bundler.codegen.channels_last import CALLERS_RESULTS, FREED, STORED_STRIDES, has_images
from bundler.codegen.decompositions import decompositions
from bundler.codegen.donated_inputs import DonatedInputs, consumer
from bundler.codegen.emit import has_float8, refuse_missing_types
from bundler.codegen.graph_errors import refusals
from bundler.codegen.module_decorators import current_target
from bundler.codegen.program import FallbackCall, GenerateOptions, Program, program_of_graph
from bundler.codegen.program_policy import ALL, BY_RULE, ProgramPolicy
from bundler.codegen.uneven_products import with_even_operands
from bundler.compile.worker_pool import worker_count
from bundler.errors import BundlerError, ConfigError, WrongResult
from bundler.package_loggers import logger

aten = torch.ops.aten
_log = logger("bundler.codegen")
_WHOLE_GRAPH = "the whole graph"
_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# torch.compile's modes -> what they switch on.
MODES: Mapping[str | None, Mapping[str, bool]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"graphs": True},
    "max-autotune-no-cudagraphs": _TUNED,
    "max-autotune": {**_TUNED, "graphs": True},
}
# The options that are True or False, and what they are where nothing is said of them.
_SWITCHES = {
    "verify": False,
    "graphs": False,
    "upcast": True,
    **asdict(ProgramPolicy()),
    "keep": True,
}


# torch's names of settings that are one here.
_ALSO_CALLED = {
    "benchmark_fusion": "measured_fusion",
    "benchmark_combo_kernel": "measured_fusion",
}


def triton_bundler(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Any:
    """Compile a graph for torch.compile.

    Args:
        module, example_inputs: as torch hands them over.
        options: `programs`, a list that gets each program, and a `FallbackCall` for each graph that
            runs as torch has it; `verify`, whether the first call of each program is compared with
            eager torch's; `graphs`, whether repeated calls are launched as CUDA graphs; `workers`,
            how many processes compile kernels while torch traces on, None for one a core, 1 for
            none; `keep`, whether programs are kept in the user's cache directory, where the next
            process finds them; `upcast` and `templates`, as `GenerateOptions` has them, and the
            fields of `ProgramPolicy`, of which `measured_fusion` is also called as torch calls its
            two parts, `benchmark_fusion` and `benchmark_combo_kernel`.
        mode: None and `default`; `reduce-overhead` is the option `graphs`;
            `max-autotune-no-cudagraphs` the options `max_autotune` and `coordinate_descent_tuning`;
            `max-autotune` all three.

    Raises:
        ConfigError: another option, or another mode.
    """
    chosen = dict(options or {})
    programs: list[Program | FallbackCall] = chosen.pop("programs", [])
    workers, templates = chosen.pop("workers", None), chosen.pop("templates", BY_RULE)
    worker_count(workers)
    switches = _switches(chosen, mode)
    keep = switches["keep"]
    policy = ProgramPolicy.of(switches)
    generated = GenerateOptions(
        verify=switches["verify"],
        graphs=switches["graphs"],
        upcast=switches["upcast"],
        policy=policy,
        templates=templates,
    )
    before = len(programs)
    compiler = partial(
        compile_graph, programs=programs, options=generated, workers=workers, keep=keep
    )
    try:
        # Else torch would give checkpointed parts generators of their own, as objects in the graph;
        # `lower` knows the state of torch's generator alone.
        with functorch_config.patch(graphsafe_rng_functionalization=False):
            taken = module if policy.deterministic else with_attention(module)
            kept = None
            if keep and not generated.verify:
                kept = _kept_result(taken, example_inputs, generated, workers)
            if kept is not None and kept.look():
                with suppress(Unusable):
                    compiled = _compiled(taken, example_inputs, compiler, kept, {})
                    programs.extend(kept.programs)
                    return compiled
                kept = None
            return _compiled(taken, example_inputs, compiler, kept, _table(generated))
    # torch handles its own: it compiles anew, or without this graph.
    except (TorchDynamoException, BundlerError):
        raise
    # torch raises whatever it likes where it cannot take a graph apart.
    except Exception as error:  # noqa: BLE001
        del programs[before:]
        _log.debug("AOTAutograd cannot take a graph apart", exc_info=error)
        reason = f"torch cannot take it apart: {type(error).__name__}: {error}"
        _note(programs, reason.partition("\n")[0])
        return module.forward


def _kept_result(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: GenerateOptions,
    workers: int | None,
) -> AutogradResult | None:
    """Return where AOTAutograd's result is kept; None for a graph that is traced each time."""
    if not should_use_local_autograd_cache():
        return None
    try:
        digest = autograd_key(module, example_inputs, options)
    # torch raises whatever it likes where an input has no strides, say.
    except Exception as error:  # noqa: BLE001
        _log.debug("a graph of Dynamo's has no key", exc_info=error)
        return None
    if digest is None:
        return None
    return AutogradResult(digest, options, partial(_runs, workers=workers))


def _compiled(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[..., Any],
    kept: AutogradResult | None,
    table: Mapping[Any, Callable[..., Any]],
) -> Any:
    """Return what AOTAutograd makes of a graph with a table of decompositions, or made of it in an
    earlier process.
    """
    donated = DonatedInputs()
    forward: Callable[..., Any] = partial(_compile_forward, compiler=compiler, donated=donated)
    backward: Callable[..., Any] = partial(_compile_backward, compiler=compiler, donated=donated)
    inference = compiler
    if kept is not None:
        forward, inference = partial(kept.forward, forward), partial(kept.forward, inference)
        backward = partial(kept.backward, backward)
    compiled = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=table,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    with nullcontext() if kept is None else kept.in_place():
        return compiled(module, example_inputs)


def _runs(program: Program, *, workers: int | None) -> Runs | None:
    """Return what runs a program that another process ran; None where it cannot run here."""
    if _why_not(program) is not None:
        return None
    started = compile_ahead.start_again(program, workers)

    consume = consumer(program)

    def later(inputs: list[Any]) -> list[Any]:
        return list(consume(inputs))

    def first(inputs: list[Any]) -> list[Any]:
        compile_ahead.wait(started)
        results = later(inputs)
        program.keep_launches()
        return results

    return first, later


def _switches(chosen: Mapping[str, Any], mode: str | None) -> dict[str, bool]:
    """Return the options that are on or off; raises `ConfigError` as `triton_bundler`."""
    if mode not in MODES:
        raise ConfigError(
            f"backend triton_bundler: mode={mode!r}: expected one of"
            f" {', '.join(str(name) for name in MODES if name)}",
            got=mode,
        )
    unknown = sorted(chosen.keys() - _SWITCHES.keys() - _ALSO_CALLED.keys())
    wrong = [f"{name}={value!r}" for name, value in chosen.items() if not isinstance(value, bool)]
    if unknown or wrong:
        raise ConfigError(
            "backend triton_bundler: expected the options programs, a list, workers, a number,"
            f" templates, a word, and {', '.join(_SWITCHES)}, True or False, got"
            f" {', '.join(map(repr, unknown)) or wrong[0]}",
            got=unknown or dict(chosen),
        )
    named = {_ALSO_CALLED.get(name, name): False for name in chosen}
    for name, on in chosen.items():
        named[_ALSO_CALLED.get(name, name)] |= on
    return {**_SWITCHES, **MODES[mode], **named}


def _table(options: GenerateOptions) -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that take operators apart for a program."""
    table = decompositions(templates=options.templates == ALL)
    if options.templates == BY_RULE and not options.policy.deterministic:
        return table | {aten.mm.default: _product}
    return table


def _product(left: torch.Tensor, right: torch.Tensor) -> Any:
    """Take a product of matrices apart where a column and a row make it, or rows are uneven."""
    found = decompositions()[aten.mm.default](left, right)
    return with_even_operands(left, right) if found is NotImplemented else found


def _compile_forward(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    donated: DonatedInputs,
    **named: Any,
) -> Any:
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is not None:
        _copy_saved_inputs(module, known)
        module.meta[CALLERS_RESULTS] = known.num_forward
        donated.take(module, known)
    return compiler(module, example_inputs, made=donated.filled_by, **named)


def _compile_backward(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    donated: DonatedInputs,
    **named: Any,
) -> Any:
    # What was saved may lie otherwise than torch traced: as the forward graph's program reported.
    inputs = module.graph.find_nodes(op="placeholder")
    for node, example in zip(inputs, example_inputs, strict=False):
        # AOTAutograd's name of what the caller gave to forward, and still has.
        if not node.name.startswith("primals"):
            node.meta[FREED] = True
        traced = node.meta.get("val")
        if has_images(traced) and has_images(example) and example.stride() != traced.stride():
            node.meta[STORED_STRIDES] = example.stride()
    donated.mark(inputs)
    return compiler(module, example_inputs, **named)


def _copy_saved_inputs(forward: fx.GraphModule, known: Any) -> None:
    """Save copies for backward of the inputs that the function changes.

    The cut between forward and backward, which is Inductor's, may save such an input to compute
    again what eager mode saves; torch then refuses the gradient, since it is no more what it was.

    Args:
        forward: the graph.
        known: what AOTAutograd knows of it.
    """
    inputs = forward.graph.find_nodes(op="placeholder")
    changed = {n for n, info in zip(inputs, known.input_info, strict=False) if info.mutates_data}
    output = forward.graph.output_node()
    results = list(output.args[0])
    for place in range(known.num_forward, len(results)):
        saved = results[place]
        if saved in changed:
            with forward.graph.inserting_after(inputs[-1]):
                results[place] = forward.graph.call_function(aten.clone.default, (saved,))
            results[place].meta = dict(saved.meta)
    output.args = (tuple(results),)
    forward.recompile()


def compile_graph(
    module: fx.GraphModule,
    _example_inputs: Sequence[Any],
    *,
    programs: list[Program | FallbackCall],
    options: GenerateOptions | None = None,
    workers: int | None = 1,
    keep: bool = False,
    made: Callable[[Program], None] | None = None,
    ran: Callable[[Program], None] | None = None,
) -> Callable[..., Any]:
    """Return what runs a graph of ATen operators: a program, or the graph itself where none can be
    generated; `keep` is as `program_of_graph` has it, `made` is told of a program, and `ran` of one
    that ran.
    """
    try:
        program = program_of_graph(module, options, guarded=True, keep=keep)
    except BundlerError as error:
        # torch's own run would give other numbers from call to call as well.
        if error.facts.get("deterministic"):
            raise
        return _as_it_is(module, programs, error.message)
    reason = _why_not(program)
    if reason is not None:
        return _as_it_is(module, programs, reason)
    programs.append(program)
    if made is not None and not program.options.graphs:
        made(program)
    _report_strides(program)
    started = compile_ahead.start(program, workers)
    tried = _TriedProgram(program, module, programs, started, ran)

    # A function, whose mark torch's wrappers keep.
    def boxed(inputs: list[Any]) -> list[Any]:
        return list(tried(inputs))

    boxed._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001  # torch's mark
    return boxed


def _why_not(program: Program) -> str | None:
    """Return why a program's kernels cannot run here, and see to what their compiles need; None
    where they can.
    """
    try:
        with refusals("the kernels"):
            if has_float8(program.sources) and program.device != "cpu":
                refuse_missing_types(program.sources, current_target())
            interpreted = not program.kernels or program.is_interpreted
    except BundlerError as error:
        return error.message
    if interpreted:
        return None
    if program.device == "cpu":
        return "its tensors are on the CPU, which no kernel runs on without Triton's interpreter"
    triton_hash.remember()
    return None


def _report_strides(program: Program) -> None:
    """Tell AOTAutograd how results lie, where it asks: those that are saved for backward may lie
    otherwise than torch traced.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(program.result_strides)


class _TriedProgram:
    """Runs a program, and in its place the graph as torch has it where the program's first call
    fails and torch's does not.

    What fails then is mostly a kernel that does not compile, which nobody knows before it is
    launched.  A call takes a list of inputs and empties it, so that what backward is given is freed
    as soon as it was read.
    """

    def __init__(
        self,
        program: Program,
        module: fx.GraphModule,
        programs: list[Program | FallbackCall],
        started: compile_ahead.Started,
        ran: Callable[[Program], None] | None,
    ) -> None:
        self._program, self._module, self._programs = program, module, programs
        self._started, self._ran = started, ran
        self._run: Callable[[list[Any]], Any] = self._first_call

    def __call__(self, inputs: list[Any]) -> Any:
        return self._run(inputs)

    def _first_call(self, inputs: list[Any]) -> Any:
        compile_ahead.wait(self._started)
        self._started = ()
        # torch's call has to start from what the failed one started from: inputs and random state.
        changed = [n for n, item in enumerate(self._program.plan.inputs) if item.changed]
        held = {number: inputs[number].clone() for number in changed}
        generators = _generator_states(self._program.device)
        try:
            results = self._program.run(*inputs)
        except (WrongResult, torch.OutOfMemoryError):
            raise
        # Of the compiler, of an operator, or of the user's values: torch's own call tells which.
        except Exception as error:  # noqa: BLE001
            for number, tensor in held.items():
                inputs[number].copy_(tensor)
            for setter, state in generators:
                setter(state)
            results = self._module.forward(*inputs)
            self._give_up(error)
            return results
        self._run = consumer(self._program)
        if self._ran is not None:
            self._ran(self._program)
        self._program.keep_launches()
        return results

    def _give_up(self, error: Exception) -> None:
        self._run = lambda inputs: self._module.forward(*inputs)
        _log.debug("the first call of a program failed", exc_info=error)
        said = str(error).strip().partition("\n")[0]
        reason = f"its first call failed: {type(error).__name__}: {said}"
        place = next((n for n, one in enumerate(self._programs) if one is self._program), None)
        # Another thread may have given the program up already.
        if place is not None:
            del self._programs[place]
            _note(self._programs, reason, place)


def _generator_states(device: str) -> list[tuple[Callable[[Any], Any], Any]]:
    """Return what puts torch's generators back, of the host and of a device, and the states that
    they have now.
    """
    found = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.device(device).type != "cpu":
        module = torch.get_device_module(device)
        setter = partial(module.set_rng_state, device=device)
        found.append((setter, module.get_rng_state(device)))
    return found


def _as_it_is(
    module: fx.GraphModule, programs: list[Program | FallbackCall], reason: str
) -> Callable[..., Any]:
    _note(programs, reason)
    boxed: Callable[..., Any] = make_boxed_func(module.forward)
    return boxed


def _note(programs: list[Program | FallbackCall], reason: str, place: int | None = None) -> None:
    _log.warning("backend triton_bundler: a graph runs as torch has it: %s", reason)
    programs.insert(len(programs) if place is None else place, FallbackCall(_WHOLE_GRAPH, reason))

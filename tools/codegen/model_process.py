# SPDX-License-Identifier: Apache-2.0
"""One model in a process of its own: eager mode, float64, our backend, and what Inductor calls;
`models` starts it and reads the JSON that it writes.

    python -m tools.codegen.model_process LIBRARY NAME MODE DEVICE FILE ASKED

ASKED is no, too, time, time-graphs, judge-graphs or start-SIDE: see `judged`.

Three batch sizes, one after the other, through one compiled model: the first has fixed sizes, the
second has torch compile for sizes that change, and the third takes the program of the second.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo as dynamo
from torch import nn

from tools.codegen import model_times
from tools.codegen.drawn_candidates import draw_candidates
from tools.codegen.model_judge import Tensors, flat, wrong, wrong_beside_all
from tools.codegen.models import START

Found = dict[str, Any]
# Rows of an example.  Batch norm needs some, or its gradients are all rounding.
BATCHES = {"cuda": (8, 12, 10), "cpu": (3, 5, 4)}
# Results that are wrong, of one model, that are listed.
_LISTED = 8
# Runs with weights that are off by their last bit, for a result that is wrong beside eager mode: of
# eager mode, and of ours.
_NUDGED, _AT_STEPS = 3, 6
# Of torch's generator, before each example.
_SEED = 1
# Calls of an example before the one that is judged as a graph's.
_REPEATED = 10


def judged(library: str, name: str, mode: str, device: str, inductor: str) -> Iterator[Found]:
    """Yield what is known of a model: `status` is right, wrong, raises, absent (not in this
    release) or broken (eager mode fails or draws random numbers, or torch itself runs what Dynamo
    traced with other results).  Then the same with what Inductor calls, where it is `too`; where it
    is `time`, times alone.
    """
    models = importlib.import_module(f"tools.codegen.{library}_models")
    try:
        subject = Subject(models, name, mode, device)
        if inductor.startswith("time"):
            times = model_times.measured(subject, graphs="graphs" in inductor)
            yield {"status": "", "times": times}
            return
        if inductor.startswith(START):
            side = inductor.removeprefix(START)
            yield {"status": "", "start": model_times.first_call(subject, side)}
            return
        eager, exact = subject.results(subject.model), subject.results(subject.exact())
    except LookupError as error:
        yield {"status": "absent", "error": str(error)}
        return
    except Exception as error:  # noqa: BLE001  # whatever is raised says that the list is wrong
        yield {"status": "broken", **told(error)}
        return
    if any(one.isnan().any() for results in eager for one in results.values()):
        yield {"status": "broken", "error": "eager mode has a NaN"}
        return
    graphs = inductor == "judge-graphs"
    tolerance = models.tolerance(name, mode)
    drawn = drawn_by(subject, eager, tolerance)
    if drawn:
        yield {"status": "broken", "error": f"eager mode draws random numbers: {drawn}"}
        return
    found = _ours(subject, eager, exact, tolerance, graphs=graphs)
    if found["status"] in {"wrong", "raises"}:
        traced = _as_traced(subject, eager, exact, tolerance)
        found |= {"status": "broken", "error": traced} if traced else {}
    yield found
    if inductor == "too":
        yield found | {"inductor": _inductor(subject)}


class Subject:
    """A model, its examples, and how it is run."""

    def __init__(self, models: Any, name: str, mode: str, device: str) -> None:
        self.training, self.device = mode == "training", device
        torch.manual_seed(0)
        model = models.build(name, device)
        self._loss = models.loss
        without_dropout(model)
        without_constants(model)
        if self.training and hasattr(model, "set_experts_implementation"):
            # The gradient of the other ways reads how many tokens an expert has, which no backend
            # traces.
            model.set_experts_implementation("batched_mm")
        dtype = torch.float32 if self.training else torch.bfloat16
        self.model = model.to(device=device, dtype=dtype).train(self.training)
        self.examples = [
            self._example(models.inputs(name, batch, device), dtype) for batch in BATCHES[device]
        ]

    def exact(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return this model, or the given one, in float64, with experts multiplied in a way that
        torch has for it.
        """
        found = copy.deepcopy(model or self.model).double()
        if hasattr(found, "set_experts_implementation"):
            found.set_experts_implementation("eager")
        return found

    def nudged(self, seed: int) -> torch.nn.Module:
        """Return the model with weights that are off by a unit in the last place or two, up or
        down.
        """
        found, draw = copy.deepcopy(self.model), torch.Generator().manual_seed(seed)
        for parameter in found.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=draw).to(parameter) * 2 - 1
            parameter.data *= 1 + signs * torch.finfo(parameter.dtype).eps
        return found

    def results(
        self, model: torch.nn.Module, *, only: int | None = None, seed: int = _SEED
    ) -> list[Tensors]:
        """Run a copy of a model on all examples, or on one."""
        steps = self.steps(copy.deepcopy(model))
        steps = steps if only is None else [steps[only]]
        before = torch.get_default_dtype()
        # What a model makes while it runs has its type then: some make the least number of float64.
        torch.set_default_dtype(torch.float64 if _is_wide(model) else before)
        try:
            return [one(seed=seed) for one in steps]
        finally:
            torch.set_default_dtype(before)

    def steps(
        self, model: torch.nn.Module, call: Callable[..., Any] | None = None
    ) -> list[Callable[..., Tensors]]:
        """Return what runs a model, an example each; `call` makes of the model what is called."""
        called = (call or (lambda one: one))(model)
        dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
        steps = [
            functools.partial(self._step, model, called, _cast(one, dtype)) for one in self.examples
        ]
        return list(steps)

    def _step(
        self,
        model: torch.nn.Module,
        called: Callable[..., Any],
        given: Tensors,
        *,
        seed: int = _SEED,
    ) -> Tensors:
        torch.manual_seed(seed)
        outputs, loss = self.ran(model, called, given)
        if loss is None:
            return _copied(flat(outputs))
        gradients = {
            f"gradient of {name}": one.grad
            for name, one in model.named_parameters()
            if one.grad is not None
        }
        buffers = {f"buffer {name}": one for name, one in model.named_buffers()}
        return _copied(flat(outputs) | {"loss": loss.detach()} | gradients | buffers)

    def ran(
        self, model: torch.nn.Module, called: Callable[..., Any], given: Tensors
    ) -> tuple[Any, torch.Tensor | None]:
        """Run a model once; returns what it returned and, where it is trained, the loss, whose
        gradients were taken.
        """
        inputs = given if "x" not in given else {"x": given["x"]}
        if not self.training:
            with torch.no_grad():
                return called(**inputs), None
        model.zero_grad(set_to_none=True)
        outputs = called(**inputs)
        loss = self._loss(outputs, given)
        loss.backward()
        return outputs, loss

    def repeat(self, model: torch.nn.Module, called: Callable[..., Any], number: int) -> None:
        """Run a model with an example in another order, so often that what follows is a graph's,
        and leave its buffers as they were.

        Raises:
            AssertionError: a later call wrote over the results of an earlier one.
        """
        dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
        given = {name: _rolled(one) for name, one in _cast(self.examples[number], dtype).items()}
        buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
        kept: list[tuple[Tensors, Tensors]] = []
        for call in range(_REPEATED):
            outputs, _ = self.ran(model, called, given)
            tensors = flat(outputs)
            for now, before in kept:
                for name, one in now.items():
                    assert torch.equal(one, before[name]), f"{name} of an earlier call changed"
            # Results of every other call are kept, and those of the last ones are not.
            if call % 2 and call < _REPEATED - 3:
                kept.append((tensors, _copied(tensors)))
        with torch.no_grad():
            for name, one in model.named_buffers():
                one.copy_(buffers[name])

    def _example(self, given: Tensors, dtype: torch.dtype) -> Tensors:
        return _cast(
            {
                name: one.to(self.device) if isinstance(one, torch.Tensor) else one
                for name, one in given.items()
            },
            dtype,
        )


def _is_wide(model: torch.nn.Module) -> bool:
    return any(one.dtype == torch.float64 for one in model.parameters())


def without_dropout(model: torch.nn.Module) -> None:
    """Turn off what draws random numbers, which ours are not eager's: dropout, of which the
    dashboard sets a probability of 1e-30, and the noise of a router's inputs.
    """
    for module in model.modules():
        if isinstance(
            module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
        ):
            module.p = 0.0
        for name in ("drop_prob", "drop_rate", "attn_drop_rate", "dropout", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def without_constants(model: torch.nn.Module) -> None:
    """Move parameters that are one number everywhere: a branch that is multiplied by 0 at first
    would hide what is wrong in it.
    """
    for parameter in model.parameters():
        if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += 0.1 * torch.randn_like(parameter)


def _cast(given: Tensors, dtype: torch.dtype) -> Tensors:
    return {
        name: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for name, one in given.items()
    }


def _rolled(one: Any) -> Any:
    return one.roll(1, 0) if isinstance(one, torch.Tensor) and one.dim() else one


def _copied(results: Tensors) -> Tensors:
    return {name: one.detach().clone() for name, one in results.items()}


def _ours(
    subject: Subject,
    eager: list[Tensors],
    exact: list[Tensors],
    tolerance: tuple[float, bool],
    *,
    graphs: bool = False,
) -> Found:
    from bundler.codegen.torch_backend import triton_bundler

    programs: list[Any] = []
    found: Found = {
        "status": "right",
        "wrong": {},
        "steps": {},
        "first_call_s": None,
        "launches": None,
    }
    dynamo.reset()
    dynamo.utils.counters.clear()
    model = copy.deepcopy(subject.model)
    asked = {"programs": programs, "graphs": graphs}
    compiled = torch.compile(model, backend=triton_bundler, options=asked)
    steps = subject.steps(model, lambda _: compiled)
    try:
        for number, step in enumerate(steps):
            if graphs:
                subject.repeat(model, compiled, number)
            batch, started = BATCHES[subject.device][number], time.perf_counter()
            found["at"] = f"batch {batch}, {('static', 'dynamic', 'dynamic again')[number]}"
            results = step()
            if number == 0:
                found["first_call_s"] = round(time.perf_counter() - started, 2)
                found["launches"] = sum(_launches(program) for program in programs)
            lines = wrong(results, eager[number], exact[number], tolerance[0], larger=tolerance[1])
            if lines and subject.training:
                nudged = (subject.results(subject.nudged(seed))[number] for seed in range(_NUDGED))
                lines = wrong_beside_all(
                    lines, results, nudged, exact[number], tolerance[0], larger=tolerance[1]
                )
            if lines:
                told_lines = [f"{len(lines)} of {len(results)}", *lines[:_LISTED]]
                if subject.training and _at_a_step(subject, model, number, step, lines, tolerance):
                    found["steps"][found["at"]] = told_lines
                    continue
                found["status"] = "wrong"
                found["wrong"][found["at"]] = told_lines
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        found |= {"status": "raises", **told(error)}
    else:
        del found["at"]
    if graphs:
        found["replays"] = sum(one.graph_use.replays for one in programs if _has_graphs(one))
        refusals = Counter(one.graph_use.refusal for one in programs if _has_graphs(one))
        found["graph_refusals"] = dict(refusals)
    return found | counted(programs)


def drawn_by(subject: Subject, eager: list[Tensors], tolerance: tuple[float, bool]) -> str:
    """Return a result of eager mode that is another one with another seed, and the same once more
    with the same seed; or nothing.

    No two sides draw the same numbers, nor do float32 and float64: such a result may be wrong
    though it is right, and right though it is wrong.
    """
    again, otherwise = (
        [
            line
            for found, one in zip(subject.results(subject.model, seed=seed), eager, strict=True)
            for line in wrong(found, one, one, tolerance[0], larger=tolerance[1])
        ]
        for seed in (_SEED, _SEED + 1)
    )
    return otherwise[0] if otherwise and not again else ""


def _as_traced(
    subject: Subject, eager: list[Tensors], exact: list[Tensors], tolerance: tuple[float, bool]
) -> str:
    """Return why a model is no case for a backend: Dynamo's graphs of it, run by torch, raise, or
    are far off in each example; or nothing.

    Some models read whether they are traced, and compute something else then.
    """
    dynamo.reset()
    compiled = functools.partial(torch.compile, backend="eager")
    far: list[str] = []
    try:
        for number, step in enumerate(subject.steps(copy.deepcopy(subject.model), compiled)):
            lines = wrong(step(), eager[number], exact[number], tolerance[0], larger=tolerance[1])
            if not lines:
                return ""
            far += lines[:1]
    except Exception as error:  # noqa: BLE001  # whatever is raised is the reason
        return f"Dynamo's graphs, run by torch: {told(error)['error']}"
    return f"Dynamo's graphs, run by torch: {far[0]}"


def _has_graphs(program: Any) -> bool:
    return getattr(program, "graph_use", None) is not None


def _at_a_step(
    subject: Subject,
    ours: torch.nn.Module,
    number: int,
    step: Callable[[], Tensors],
    lines: list[str],
    tolerance: tuple[float, bool],
) -> bool:
    """Return whether each result that is wrong is right in one of the runs with nudged weights.

    Where a number stands at the step of a ReLU, rounding decides on which side of it a gradient
    is taken: another number in each run.  What a program computes wrongly is wrong in all of them.
    """
    names, kept = {line.partition(":")[0] for line in lines}, copy.deepcopy(ours.state_dict())
    for seed in range(_AT_STEPS):
        nudged = subject.nudged(seed)
        ours.load_state_dict(nudged.state_dict())
        eager = subject.results(nudged, only=number)[0]
        exact = subject.results(subject.exact(nudged), only=number)[0]
        still = wrong(step(), eager, exact, tolerance[0], larger=tolerance[1])
        names &= {line.partition(":")[0] for line in still}
        if not names:
            break
    ours.load_state_dict(kept)
    return not names


def _launches(program: Any) -> int:
    return (
        sum(type(step).__name__ == "Launch" for step in program.plan.steps)
        if hasattr(program, "plan")
        else 0
    )


def counted(programs: list[Any]) -> Found:
    """Return how many graphs there were, which ran as torch has them, where the graph broke, and
    what was called.
    """
    made = [one for one in programs if hasattr(one, "fallbacks")]
    calls = Counter(call.operator for program in made for call in program.fallbacks)
    reasons = {call.operator: call.reason for program in made for call in program.fallbacks}
    return {
        "graphs": len(programs),
        "as_torch_has_them": [one.reason for one in programs if not hasattr(one, "fallbacks")],
        "kernels": sum(len(program.kernels) for program in made),
        "breaks": _breaks(),
        "called": dict(calls.most_common()),
        "reasons": reasons,
    }


def _breaks() -> dict[str, int]:
    return {
        str(reason)[:200]: count for reason, count in dynamo.utils.counters["graph_break"].items()
    }


def _inductor(subject: Subject) -> Found:
    """Return what Inductor calls for the same model, in the same three calls."""
    from torch._inductor import config

    from tools.codegen.inductor_calls import InductorCalls

    dynamo.reset()
    dynamo.utils.counters.clear()
    calls = InductorCalls()
    compiled = functools.partial(torch.compile, backend=calls.backend)
    try:
        with config.patch({"fx_graph_cache": False, "fallback_random": True}):
            for step in subject.steps(copy.deepcopy(subject.model), compiled):
                step()
    except Exception as error:  # noqa: BLE001  # then there is nothing to compare with
        return told(error)
    return {
        "graphs": calls.graphs,
        "kernels": calls.kernels,
        "called": dict(calls.operators.most_common()),
        "breaks": _breaks(),
    }


def told(error: Exception) -> Found:
    """Return an exception in words, and where it comes from."""
    text = str(error)
    return {
        "error": (
            f"{type(error).__name__}:"
            f" {text[:600]}{' ... ' + text[-600:] if len(text) > 1200 else text[600:]}"
        ),
        "where": [
            f"{_short(one.filename)}:{one.lineno} {one.name}"
            for one in traceback.extract_tb(error.__traceback__)[-6:]
        ],
    }


def _short(path: str) -> str:
    """Return a path without the folder that all packages are in, or ours is."""
    return path.rpartition("site-packages/")[2].rpartition("/bundler/")[2]


def prepared() -> None:
    """Set up this process as the dashboard does: nothing random, no TF32, one thread."""
    draw_candidates()
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def main() -> int:
    """Judge one model; an answer stands in the file before Inductor, which takes long, has begun."""
    library, name, mode, device, path, inductor = sys.argv[1:]
    prepared()
    partial = Path(path).with_suffix(".partial")
    for found in judged(library, name, mode, device, inductor):
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A worker of `python -m tools.gpu generated`: compiles functions and corpus wrappers, compares
numbers, and times launches when told to.

`serve` runs in a process of its own and answers `("numbers", task)` and `("times", task)`; a task
is the number of a kind, or the path of a wrapper.  `generated.py` starts several, and lets one at a
time measure.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.gpu import generated_eager, generated_launches, generated_times
from tools.gpu.generated_kinds import KINDS, Kind
from tools.gpu.generated_launches import OURS, THEIRS, Launch, Wrapper

Task = int | str
Answer = dict[str, Any]
SEED = 20260
# Of torch.testing.assert_close, relative to a tensor's largest number; what is in no list has to be
# equal.
TOLERANCES = {
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1.3e-6,
    torch.float64: 1e-7,
    torch.float8_e4m3fn: 0.13,
    torch.float8_e5m2: 0.26,
}


def serve(connection: Any, device: str) -> None:
    """Answer until None comes; whatever a task raises is its answer."""
    tasks: dict[Task, list[Wrapper]] = {}
    while (message := connection.recv()) is not None:
        what, task = message
        try:
            if what == "numbers":
                tasks[task], answer = numbers(task, device)
            else:
                answer = times(tasks.pop(task))
        except Exception as error:  # noqa: BLE001  # one task that fails must not take the others with it
            answer = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc()[-3000:],
            }
        connection.send((what, task, answer))


def numbers(task: Task, device: str) -> tuple[list[Wrapper], Answer]:
    """Compile, run on both sides, compare; returns the wrappers, to be timed, and what was
    found.
    """
    if isinstance(task, str):
        return _corpus_numbers(Path(task))
    return _kind_numbers(KINDS[task], device)


def times(wrappers: list[Wrapper]) -> Answer:
    """Time each kernel that was launched."""
    found = {}
    for launch in (launch for wrapper in wrappers for launch in wrapper.launches.values()):
        if launch.args is not None and launch.ours is not None:
            found[launch.name] = generated_times.paired_times(launch)
    return found


# -------------------------------------------------------------------------------------------- Kinds


def _kind_numbers(kind: Kind, device: str) -> tuple[list[Wrapper], Answer]:
    torch._dynamo.reset()  # noqa: SLF001
    torch.manual_seed(SEED)
    inputs = kind.make(device)
    expected = _outputs(kind.eager or kind.call, inputs)
    # Without a GPU, Inductor's generator for Triton is there all the same, and Triton's interpreter
    # runs what it generates.
    settings = {**kind.settings, **({"cpu_backend": "triton"} if device == "cpu" else {})}
    compiled = torch.compile(kind.call, options=settings, dynamic=kind.dynamic)
    before = {id(module) for module in _modules()}
    run = functools.partial(_outputs, compiled, inputs)
    run()
    wrappers = [
        Wrapper(module)
        for module in _modules()
        if id(module) not in before and hasattr(module, "call")
    ]
    wrappers = [wrapper for wrapper in wrappers if wrapper.launches]
    theirs = run()
    faults = [fault for wrapper in wrappers for fault in wrapper.load()]
    for wrapper in wrappers:
        wrapper.use(OURS)
    ours = run()
    for wrapper in wrappers:
        wrapper.use(THEIRS)
    kernels = [_kernel(launch) for wrapper in wrappers for launch in wrapper.launches.values()]
    kinds = {decorator for kernel in kernels for decorator in kernel["heuristics"]}
    if kind.heuristic and kind.heuristic not in kinds:
        faults.append(f"no kernel under {kind.heuristic}, but {', '.join(sorted(kinds))}")
    against = expected if kind.against == "eager" else theirs
    return wrappers, {
        "name": kind.name,
        "faults": faults,
        "kernels": kernels,
        "settings": dict(kind.settings),
        "against": kind.against,
        "same_as_inductor": all(map(_same, ours, theirs)),
        "loose": kind.loose,
        "off": max(map(distance, ours, against)),
        "off_inductor": max(map(distance, theirs, expected)),
        "close": all(
            close(one, other, kind.loose) for one, other in zip(ours, against, strict=True)
        ),
    }


def _modules() -> list[Any]:
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


def _outputs(call: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
    """Call with the same random numbers; returns the tensors, in order."""
    torch.manual_seed(SEED)
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(call(*inputs))  # noqa: SLF001
        if isinstance(leaf, torch.Tensor)
    ]


def distance(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest difference of two tensors, in tolerances of their type; infinite where
    they have to be equal and are not.

    Args:
        one, other: the tensors.
        least: at least so much is the tolerance of a type that has one.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    tolerance = TOLERANCES.get(one.dtype)
    if tolerance is None:
        return 0.0 if torch.equal(one, other) else float("inf")
    tolerance = max(tolerance, least)
    left, right = one.double(), other.double()
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return 0.0
    off = torch.where(same, 0.0, (left - right).abs())
    # Relative to the largest number, since a sum's error is one of its summands, not of the sum.
    scale = (
        right[right.isfinite()].abs().amax()
        if bool(right.isfinite().any())
        else torch.ones((), dtype=torch.float64)
    )
    worst = float(off.max() / (tolerance * scale.clamp(min=1e-30)))
    return worst if worst == worst else float("inf")  # noqa: PLR0124  # not a number is never close


def close(one: torch.Tensor, other: torch.Tensor, loose: float) -> bool:
    """Whether two tensors are equal, but for so many tolerances."""
    return distance(one, other) <= loose


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and bool(torch.equal(left, right))


# ------------------------------------------------------------------------------------------- Corpus


def _corpus_numbers(path: Path) -> tuple[list[Wrapper], Answer]:
    """Import a wrapper as torch does, run it with the inputs that its own harness makes, and
    compare each kernel.
    """
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(SEED)
    inputs = module.get_args()
    wrapper = Wrapper(module)
    fault = ""
    try:
        module.call(list(inputs))
    except Exception as error:  # noqa: BLE001  # what comes after it was not launched, and the result says so
        fault = f"its call raises {type(error).__name__}: {error}"[:500]
    faults = [*wrapper.load(), *([fault] if fault else [])]
    eager = generated_eager.Graphs(path.read_text(encoding="utf-8"))
    kernels = []
    for launch in wrapper.launches.values():
        found = _kernel(launch)
        if launch.args is not None:
            found |= eager.compare(launch)
        kernels.append(found)
    return [wrapper], {"name": path.stem, "faults": faults, "kernels": kernels}


# ------------------------------------------------------------------------------------------ Kernels


def _kernel(launch: Launch) -> Answer:
    """Launch a kernel on both sides with equal arguments; returns what was found."""
    theirs = launch.theirs
    found: Answer = {
        "kernel": launch.name,
        "heuristics": launch.decorators,
        "grids": generated_launches.grids_of(theirs),
        "launched": launch.args is not None,
        "atomic": generated_launches.adds_atomically(theirs),
        "configs": generated_launches.chosen_configs([theirs]),
    }
    if launch.args is None or launch.ours is None:
        return found
    one = generated_launches.launched(theirs.run, launch.cloned())
    other = generated_launches.launched(launch.ours.run, launch.cloned())
    again = generated_launches.launched(theirs.run, launch.cloned())
    found |= {
        "unequal": generated_launches.unequal(one, other),
        "unequal_inductor": generated_launches.unequal(one, again),
        "our_configs": _our_configs(launch),
        "binary": _same_binary(launch),
    }
    return found


def _our_configs(launch: Launch) -> list[str]:
    tuned = getattr(launch.ours, "tuned", None)
    return (
        []
        if tuned is None
        else [f"{choice.config} by {choice.how}" for choice in tuned.choices.values()]
    )


def _same_binary(launch: Launch) -> bool | None:
    """Whether both sides launch the same compiled kernel of Triton's cache; None where that is not
    known.
    """
    key = next((launcher.cache_hash for launcher in getattr(launch.theirs, "launchers", ())), None)
    tuned = getattr(launch.ours, "tuned", None)
    if key is None or tuned is None:
        return None
    return bool(launch.ours.compile(tuned.best_config, os.environ["TRITON_CACHE_DIR"]).key == key)

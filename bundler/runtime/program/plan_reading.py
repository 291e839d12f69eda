# SPDX-License-Identifier: Apache-2.0
"""`read_plan`: decodes what `ProgramPlan.to_json` wrote, and refuses anything else; `run` calls it for a bundle's program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bundler.errors import FormatError, UnsupportedVersion
from bundler.runtime.program.plan_validation import check_plan
from bundler.runtime.program.program_plan import (
    MAX_PLAN_BYTES,
    MAX_SEEDS,
    VERSION,
    Allocate,
    Input,
    KernelChoice,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    Step,
    TensorSpec,
)

_STEPS = {"Allocate", "Launch", "OperatorStep", "Release", "Seeds"}


def read_plan(data: bytes) -> ProgramPlan:
    """Return the plan that some bytes are.

    Raises:
        FormatError: it is anything else, or does what no generated program does.
        UnsupportedVersion: a newer version wrote it.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise FormatError(
            f"a program's plan: expected at most {MAX_PLAN_BYTES} bytes, got {len(data)}",
            got=len(data),
        )
    try:
        found = json.loads(data)
        version = found.pop("version")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"a program's plan: not what `to_json` writes: {error}") from error
    if version != VERSION:
        raise UnsupportedVersion(
            f"a program's plan: expected version {VERSION}, got {version!r}; update bundler",
            got=version,
        )
    try:
        plan = _plan(found)
        check_plan(plan)
        return plan
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"a program's plan: {type(error).__name__}: {error}") from error


def _plan(data: Mapping[str, Any]) -> ProgramPlan:
    return ProgramPlan(
        tuple(map(_input, data["inputs"])),
        {str(name): (int(place[0]), int(place[1])) for name, place in data["sizes"].items()},
        tuple(_step(kind, item) for kind, item in data["steps"]),
        tuple(
            Output(item["buffer"], _spec(item["spec"]), item["size"]) for item in data["outputs"]
        ),
        {str(name): _kernel(item) for name, item in data["kernels"].items()},
        tuple(map(str, data["constants"])),
        {str(size): int(most) for size, most in data.get("limits", {}).items()},
        {str(name): str(text) for name, text in data.get("values", {}).items()},
        tuple(map(str, data.get("guards", ()))),
    )


def _input(data: Mapping[str, Any]) -> Input:
    aligned, changed = (bool(data[name]) for name in ("aligned", "changed"))
    number = data["number"]
    if number is not None and not isinstance(number, (bool, int, float)):
        raise TypeError(f"a number is a plain one, got {number!r:.80}")
    return Input(str(data["name"]), _spec(data["spec"]), aligned, changed, number)


def _spec(data: Any) -> TensorSpec | None:
    if data is None:
        return None
    sizes, strides = ([_size(part) for part in data[name]] for name in ("sizes", "strides"))
    where = str(data.get("device", ""))
    return TensorSpec(
        str(data["dtype"]), tuple(sizes), tuple(strides), _size(data["offset"]), where
    )


def _size(value: Any) -> Size:
    if type(value) in {int, str}:
        return value  # type: ignore[no-any-return]
    raise TypeError(f"a size is a number or a text, got {value!r:.80}")


def _count(value: Any) -> int:
    if type(value) is int and 0 < value <= MAX_SEEDS:
        return value
    raise ValueError(f"a number of seeds is from 1 to {MAX_SEEDS}, got {value!r:.80}")


def _step(kind: str, data: Mapping[str, Any]) -> Step:
    match kind:
        case "Allocate":
            spec = _spec(data["spec"])
            if spec is None:
                raise TypeError("an allocation has a spec")
            return Allocate(str(data["name"]), spec)
        case "Release":
            return Release(str(data["name"]))
        case "Seeds":
            return Seeds(str(data["name"]), _count(data["count"]))
        case "Launch":
            sizes = {str(name): _size(value) for name, value in data["sizes"].items()}
            return Launch(str(data["kernel"]), tuple(map(_size, data["arguments"])), sizes)
        case "OperatorStep":
            outputs = tuple(None if name is None else str(name) for name in data["outputs"])
            return OperatorStep(
                str(data["operator"]),
                tuple(data["arguments"]),
                dict(data["keywords"]),
                outputs,
                bool(data["single"]),
                tuple(map(_spec, data["results"])),
                bool(data["view"]),
            )
    raise ValueError(f"a step is one of {', '.join(sorted(_STEPS))}, got {kind!r:.80}")


def _kernel(data: Mapping[str, Any]) -> KernelEntry:
    choices = {
        str(target): tuple(
            KernelChoice(
                dict(item["blocks"]), item["num_warps"], item["num_stages"], dict(item["options"])
            )
            for item in items
        )
        for target, items in data["choices"].items()
    }
    return KernelEntry(
        str(data["grid"]), tuple(map(str, data["parameters"])), choices, str(data["source"])
    )

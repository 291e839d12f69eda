# SPDX-License-Identifier: Apache-2.0
"""`Wrapper`: a graph's wrapper module with its kernels as Inductor has them and as `load_generated`
has them, and what each is launched with.

`generated_workers.py` makes one of each module that torch loaded.  Between the two stands a
`Switch` in the wrapper's own namespace, so that the wrapper's `call` runs with the kernels of
either side.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bundler.integrations.inductor import load_generated
from bundler.integrations.inductor_generated import Dispatcher
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.multi_kernel import MultiKernel
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuning_winners import LookupTable

THEIRS, OURS = "inductor", "ours"
_COUNTS = ("num_warps", "num_stages")


class Launch:
    """One kernel of a wrapper.

    Attributes:
        name: the kernel's, in the wrapper.
        decorators: torch's heuristics above it there; several for kernels to choose from.
        theirs, ours: what the wrapper's text calls `run` of.
        args: of its first launch, as they were before it; None before that.
        after: the same after it.
    """

    def __init__(self, name: str, theirs: Any, text: str) -> None:
        self.name, self.theirs = name, theirs
        self.ours: Any = None
        self.decorators = sorted(
            {one for part in parts(theirs) for one in decorators_of(text, part.fn.__name__)}
        )
        self.args: list[Any] | None = None
        self.after: list[Any] | None = None

    def cloned(self) -> list[Any]:
        """Return the arguments of the first launch, with memory of their own."""
        assert self.args is not None
        return cloned(self.args)


class Switch:
    """Stands in a wrapper's namespace for a kernel."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.side = launch, THEIRS

    def run(self, *args: Any, **keywords: Any) -> Any:
        """Launch on the side that is switched on; notes the arguments of the first launch."""
        launch = self.launch
        if self.side == OURS:
            return launch.ours.run(*args, **keywords)
        if launch.args is not None:
            return launch.theirs.run(*args, **keywords)
        launch.args = cloned(args)
        found = launch.theirs.run(*args, **keywords)
        launch.after = cloned(args)
        return found


class Wrapper:
    """A wrapper module that torch imported.

    Args:
        module: of torch's.
    """

    def __init__(self, module: Any) -> None:
        self.path: str = module.__file__
        self._names = vars(module)
        # A wrapper of several partitions, or of two graphs with one text, has the same kernels
        # again.
        text = Path(self.path).read_text(encoding="utf-8")
        self.launches = {
            name: Launch(name, value, text)
            for name, value in self._names.items()
            if is_kernel(value)
        }
        self._switches = {name: Switch(launch) for name, launch in self.launches.items()}
        self._names.update(self._switches)

    def load(self) -> list[str]:
        """Load the module with `load_generated`, each kernel with the config that Inductor chose;
        returns what is not as it should be.
        """
        configs = chosen_configs(launch.theirs for launch in self.launches.values())
        table = LookupTable({"kernel": name, "config": config} for name, config in configs.items())
        options = TunerOptions(table=table, record=False, reuse="none", workers=1)
        # The choice among kernels is made by number; which one it is to be is said below.
        found = load_generated(
            self.path, options=options, clock=lambda: GivenClock(lambda *_, **_options: 1.0)
        )
        faults = []
        for name, launch in self.launches.items():
            launch.ours = found.get(name) or found.multi_kernels.get(name)
            if launch.ours is None:
                faults.append(f"{name} is not loaded")
            elif isinstance(launch.ours, MultiKernel):
                launch.ours.choose(picked(launch.theirs))
        self.multi: Mapping[str, Dispatcher] = found.multi_kernels
        return faults

    def use(self, side: str) -> None:
        """Switch all kernels to one side."""
        for switch in self._switches.values():
            switch.side = side


def is_kernel(value: Any) -> bool:
    """Whether a value of a wrapper's namespace is a kernel of Inductor's, or several of them with
    one name.
    """
    return type(value).__name__ in {
        "CachingAutotuner",
        "DebugAutotuner",
        "MultiKernelCall",
        "SizeHintMultiKernelCall",
    }


def parts(theirs: Any) -> list[Any]:
    """Return the kernels of Inductor's behind a name: one, or those that a multi-kernel chooses
    from.
    """
    return list(theirs.kernels) if hasattr(theirs, "kernels") else [theirs]


def picked(theirs: Any) -> str:
    """Return the name of the kernel that Inductor's multi-kernel chose."""
    return str(theirs.kernels[theirs.picked_kernel].fn.__name__)


def chosen_configs(kernels: Any) -> dict[str, dict[str, Any]]:
    """Return the config that Inductor chose for each kernel that was launched, as a lookup table
    has it.
    """
    found = {}
    for autotuner in (part for kernel in kernels for part in parts(kernel)):
        if len(autotuner.launchers) != 1:
            continue
        config = autotuner.launchers[0].config
        # torch keeps numbers of warps and stages of a user's kernel among its parameters, too.
        names = {*autotuner.triton_meta["signature"]} - {*_COUNTS}
        kwargs = {name: value for name, value in config.kwargs.items() if name in names}
        found[str(autotuner.fn.__name__)] = {
            "kwargs": kwargs,
            **{name: getattr(config, name) for name in _COUNTS},
        }
    return found


def grids_of(theirs: Any) -> list[str]:
    """Return the kind of grid of each kernel behind a name."""
    return [str(part.inductor_meta.get("grid_type")) for part in parts(theirs)]


def decorators_of(text: str, name: str) -> list[str]:
    """Return under which of torch's heuristics a wrapper has a kernel."""
    found = set()
    for part in text.split("\n@triton_heuristics.")[1:]:
        function = re.search(r"^def (\w+)\(", part, re.MULTILINE)
        if function is not None and function[1] == name:
            found.add(part.partition("(")[0])
    return sorted(found)


def adds_atomically(theirs: Any) -> bool:
    """Whether the order of additions, and so the last bits of a sum of floats, may be another at
    each launch.
    """
    return any(part.inductor_meta.get("atomic_add_found") for part in parts(theirs))


def cloned(args: Any) -> list[Any]:
    """Return a copy of arguments: tensors that share memory share it again, and lie in it where
    they lay.
    """
    storages: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = storage.clone()
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[key], value.storage_offset(), value.size(), value.stride())

    return [copied(value) for value in args]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory in which a tensor lies, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def unequal(one: list[Any], other: list[Any]) -> list[int]:
    """Return the places of tensors that are not equal bit for bit, with all memory in which they
    lie.
    """
    return [
        place
        for place, (left, right) in enumerate(zip(one, other, strict=True))
        if isinstance(left, torch.Tensor) and not torch.equal(bytes_of(left), bytes_of(right))
    ]


def launched(run: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Launch on the current stream; returns the arguments after it."""
    run(*args, stream=stream_of(args))
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in args):
        torch.cuda.synchronize()
    return args


def stream_of(args: list[Any]) -> int:
    """Return the current stream's number; 0 where nothing is on a GPU."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    return torch.cuda.current_stream().cuda_stream if on_gpu else 0

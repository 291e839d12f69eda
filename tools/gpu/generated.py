# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU that kernels which Inductor generated give the bits of Inductor's
own launch when `load_generated` launches them, and take the host no longer.

    python -m tools.gpu generated [--only KIND...] [--results DIR]
    python -m tools.gpu generated --device cpu          in Triton's interpreter, without times, what that can run

`KINDS` has a function for each way in which Inductor's wrappers launch.  torch.compile compiles
each; the wrappers that torch wrote are loaded by `load_generated`, each kernel with the config that
Inductor chose.  The whole function runs with our kernels, too.  Then the first launch of each
kernel is made again on both sides with equal arguments: compared are the bits of all memory in
which they lie, and the time of the host for a call, in turns.  Exit status 1 when any row is wrong.
The raw result goes to docs/results/gpu-generated.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from tools.gpu import steps
from tools.gpu.steps import Row
from tools.shared import measurement, programs
from tools.shared.measurement import check, in_turns, median, ratios

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
# Sums that are added in another order at each run differ so many tolerances.
ANOTHER_ORDER = 100.0
# Of the host's time for Inductor's call.
MOST = 1.03
# The calls of a sample are far fewer than the driver's queue takes.
ROUNDS, CALLS = 25, 100
_COUNTS = ("num_warps", "num_stages")
_KERNELS = ("CachingAutotuner", "DebugAutotuner", "MultiKernelCall", "SizeHintMultiKernelCall")


# -------------------------------------------------------------------------------------------- Kinds


@dataclass(frozen=True)
class Kind:
    """One function.

    Attributes:
        name: how its wrapper launches.
        call: the function; returns a tensor or several.
        make: makes the inputs on a device.
        shows: the grid or the heuristic of Inductor's that one of its kernels has.
        settings: of Inductor.
        dynamic: sizes are arguments.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[str], list[Any]]
    shows: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False


def normal(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Callable[[str], list[Any]]:
    """Return what makes a tensor of normal numbers for each shape."""
    return lambda device: [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def lists(device: str) -> list[Any]:
    """Return two lists of tensors."""
    return [[torch.randn(30, 70, device=device) for _ in range(6)] for _ in range(2)]


def whole_numbers(device: str) -> list[Any]:
    """Return a tensor of whole numbers, more than a block takes."""
    return [torch.randint(0, 1000, (1 << 20,), device=device)]


def floats_and_places(device: str) -> list[Any]:
    """Return numbers, and places that repeat."""
    return [torch.randn(8192, device=device), torch.randint(0, 1000, (8192,), device=device)]


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reductions along both dimensions of the same tensors: a norm's weight and input."""
    normed, grad = x * scale, gradient * weight
    of_input = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return (gradient * normed).sum(0), of_input


def mixture(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reductions and a map, of other sizes."""
    return x.sum(-1), (y * y).mean(-1), y.cos()


def users_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A user's own kernel, and a map of its result."""
    from tools.gpu import kernels

    out = torch.empty_like(x)
    kernels.add[(x.numel() // 256,)](x, y, out, x.numel(), BLOCK=256)
    return out.sin()


def eight_bit(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 8-bit floats and back."""
    values = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.to(torch.float32) * 2, values


_PAIR = normal((128, 640), (128, 640))
_NORM = normal((32768, 256), (256,), (32768, 256), (32768, 1))
_ALL_SIZES = {"combo_kernels": True, "combo_kernel_allow_mixed_sizes": 2}
_COOPERATIVE = {"triton.force_cooperative_reductions": True}
_THREE_TILES = {"triton.prefer_nd_tiling": True, "triton.max_tiles": 3}
KINDS = (
    Kind("map of two dimensions", lambda x, y: x + y.t(), normal((90, 70), (70, 90)), "Grid2D"),
    Kind(
        "map of three dimensions",
        lambda x, y: x + y.permute(2, 1, 0),
        normal((20, 30, 40), (40, 30, 20)),
        "Grid3D",
        _THREE_TILES,
    ),
    Kind("sort", lambda x: torch.sort(x, stable=True), normal((16, 200)), "PERSISTENT_REDUCTION"),
    Kind("scan", lambda x: x.cumsum(-1), normal((8, 6000)), "REDUCTION"),
    Kind("split scan", lambda x: x.cumsum(0), whole_numbers, "SplitScanGrid"),
    Kind("reduction, split in two", lambda x: x.sum(), whole_numbers),
    Kind("reduction along both dimensions", rms_norm_backward, _NORM, "MixOrderReductionGrid"),
    Kind(
        "cooperative reduction",
        lambda x: torch.var_mean(x, -1),
        normal((8, 1 << 14)),
        "CooperativeReductionGrid",
        _COOPERATIVE,
    ),
    Kind(
        "cooperative reduction, persistent",
        lambda x: (x.sum(-1), x.amax(-1)),
        normal((8, 512)),
        "CooperativeReductionGrid",
        _COOPERATIVE,
    ),
    Kind("foreach", torch._foreach_add, lists, "SequentialComboKernelGrid"),  # noqa: SLF001  # what torch's optimizers call
    Kind("combo", mixture, normal((40, 300), (20, 100)), settings=_ALL_SIZES),
    Kind(
        "combo, blocks of its kernels",
        mixture,
        normal((40, 300), (20, 100)),
        settings={**_ALL_SIZES, "combo_kernel_per_subkernel_blocks": True},
    ),
    Kind(
        "multi-kernel",
        lambda x: torch.softmax(x, -1),
        normal((64, 900)),
        settings={"triton.multi_kernel": 1},
    ),
    Kind(
        "block pointers",
        lambda x, y: (x * y).tanh(),
        _PAIR,
        settings={"triton.use_block_ptr": True},
    ),
    Kind(
        "tensor descriptors",
        lambda x, y: x * y + 1,
        _PAIR,
        settings={"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True},
    ),
    Kind(
        "many candidates",
        lambda x, y: x.sin() + y,
        _PAIR,
        settings={"max_autotune_pointwise": True},
    ),
    Kind(
        "dependent launch",
        lambda x: (x.relu() * 3).sum(-1).exp(),
        normal((50, 300), dtype=torch.bfloat16),
        settings={"triton.enable_pdl": True},
    ),
    Kind("sizes as arguments", lambda x: (x * 2, x.sum(-1)), normal((31, 77)), dynamic=True),
    Kind(
        "atomic additions", lambda x, at: x.new_zeros(1000).scatter_add(0, at, x), floats_and_places
    ),
    Kind(
        "random numbers", lambda x: F.dropout(x, 0.3, True) + torch.rand_like(x), normal((40, 500))
    ),
    Kind("a user's kernel", users_kernel, normal((64, 256), (64, 256)), "USER_AUTOTUNE"),
    Kind("fp8", eight_bit, normal((30, 400))),
)


def main() -> int:
    """Run every kind, print the table, write the result."""
    parser = programs.parser(
        __doc__,
        device=("cuda", "cpu compares in Triton's interpreter, and times nothing"),
        results=(measurement.RESULTS, "where gpu-generated.json goes"),
    )
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KIND")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-generated.") as folder:
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            # torch keeps kernels of each device in a directory of its own.
            "TRITON_CACHE_DIR": f"{folder}/triton/0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if options.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        found = steps.told("gpu-generated", _rows(options), options.results)
    return 0 if all(row["ok"] for row in found) else 1


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for kind in KINDS:
        if kind.name in options.only:
            try:
                yield _row(kind, options.device)
            except Exception as error:  # noqa: BLE001  # one kind that fails is a row of the table
                yield check(kind.name, False, f"{type(error).__name__}: {error}"[:300])


def _row(kind: Kind, device: str) -> Row:
    """Compile a function, launch its kernels on both sides, and return what was found."""
    torch._dynamo.reset()  # noqa: SLF001  # no other way to have each function compiled anew
    torch.manual_seed(SEED)
    inputs = kind.make(device)
    # Without a GPU, Inductor's generator for Triton is there all the same.
    settings = {**kind.settings, **({"cpu_backend": "triton"} if device == "cpu" else {})}
    compiled = torch.compile(kind.call, options=settings, dynamic=kind.dynamic)
    run = functools.partial(_outputs, compiled, inputs)
    before = {id(module) for module in _modules()}
    run()
    wrappers = [
        Wrapper(module)
        for module in _modules()
        if id(module) not in before and hasattr(module, "call")
    ]
    theirs = run()
    for wrapper in wrappers:
        wrapper.load()
        wrapper.are_ours = True
    ours = run()
    launches = [one for wrapper in wrappers for one in wrapper.launches if one.args is not None]
    other_bits = [one.name for one in launches if not one.gives_equal_bits()]
    atomic = any(one.adds_atomically for one in launches)
    off = max(map(distance, ours, theirs))
    shown = {word for one in launches for word in one.manners()}
    ok = bool(launches) and not other_bits and off <= (ANOTHER_ORDER if atomic else 1.0)
    ok = ok and (not kind.shows or kind.shows in shown)
    said = f"{len(launches)} kernels, {off:.3g} tolerances off; {', '.join(sorted(shown))}"
    if other_bits:
        said += f"; OTHER BITS: {', '.join(other_bits)}"
    facts: dict[str, Any] = {}
    if device != "cpu":
        facts["host_us"] = {one.name: one.host_us() for one in launches}
        times = [median(ratios(us["ours"], us["theirs"])) for us in facts["host_us"].values()]
        ratio = statistics.geometric_mean(times)
        said += f"; host {ratio:.3f} x Inductor's (at most {MOST})"
        ok = ok and ratio <= MOST
    return check(kind.name, ok, said, **facts)


def _modules() -> list[Any]:
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


def _outputs(call: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
    """Call with the same random numbers; returns the tensors, in order."""
    torch.manual_seed(SEED)
    leaves = torch.utils._pytree.tree_leaves(call(*inputs))  # noqa: SLF001  # torch has no public one
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, in tolerances of their type; infinite where
    they have to be equal and are not.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    tolerance = TOLERANCES.get(one.dtype)
    if tolerance is None:
        return 0.0 if torch.equal(one, other) else float("inf")
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


# ----------------------------------------------------------------------------- Wrappers and kernels


class Wrapper:
    """A wrapper module that torch imported, whose kernels are Inductor's or ours.

    Args:
        module: of torch's.
    """

    def __init__(self, module: Any) -> None:
        self._path: str = module.__file__
        self.are_ours = False
        found = {
            name: value for name, value in vars(module).items() if type(value).__name__ in _KERNELS
        }
        self.launches = [Launch(self, name, value) for name, value in found.items()]
        # The wrapper's `call` runs whatever has these names.
        vars(module).update({launch.name: launch for launch in self.launches})

    def load(self) -> None:
        """Load the module with `load_generated`, each kernel with the config that Inductor chose."""
        from bundler.integrations.inductor import load_generated
        from bundler.runtime.tuning.benchmark import GivenClock
        from bundler.runtime.tuning.multi_kernel import MultiKernel
        from bundler.runtime.tuning.tuner_options import TunerOptions
        from bundler.runtime.tuning.tuning_winners import LookupTable

        configs = [config for launch in self.launches for config in launch.chosen_configs()]
        options = TunerOptions(table=LookupTable(configs), record=False, reuse="none", workers=1)
        # The choice among kernels is made by number; which one it is to be is said below.
        found = load_generated(
            self._path, options=options, clock=lambda: GivenClock(lambda *_, **_options: 1.0)
        )
        for launch in self.launches:
            launch.ours = found.get(launch.name) or found.multi_kernels[launch.name]
            if isinstance(launch.ours, MultiKernel):
                launch.ours.choose(launch.picked())


class Launch:
    """One kernel of a wrapper, in whose namespace it stands.

    Attributes:
        theirs, ours: what is launched by `run`.
        args: of its first launch, as they were before it; None before that.
    """

    def __init__(self, wrapper: Wrapper, name: str, theirs: Any) -> None:
        self._wrapper, self.name, self.theirs = wrapper, name, theirs
        self.ours: Any = None
        self.args: list[Any] | None = None
        # Several where Inductor chooses among kernels.
        self._parts = [*theirs.kernels] if hasattr(theirs, "kernels") else [theirs]

    def run(self, *args: Any, **keywords: Any) -> Any:
        """Launch on the side that the wrapper is on; notes the arguments of the first launch."""
        if self._wrapper.are_ours:
            return self.ours.run(*args, **keywords)
        if self.args is None:
            self.args = cloned(args)
        return self.theirs.run(*args, **keywords)

    @property
    def adds_atomically(self) -> bool:
        """Whether the last bits of a sum of floats may be others at each launch."""
        return any(part.inductor_meta.get("atomic_add_found") for part in self._parts)

    def manners(self) -> set[str]:
        """Return Inductor's names of the grid and of the heuristics."""
        return {
            word
            for part in self._parts
            for word in (str(part.inductor_meta.get("grid_type")), part.heuristic_type.name)
        }

    def picked(self) -> str:
        """Return the name of the kernel that Inductor's multi-kernel chose."""
        return str(self.theirs.kernels[self.theirs.picked_kernel].fn.__name__)

    def chosen_configs(self) -> list[dict[str, Any]]:
        """Return the config that Inductor chose for each kernel that was launched, as a lookup
        table has it.
        """
        found = []
        for autotuner in self._parts:
            if len(autotuner.launchers) == 1:
                config = autotuner.launchers[0].config
                # torch keeps numbers of warps and stages of a user's kernel among its parameters.
                names = {*autotuner.triton_meta["signature"]} - {*_COUNTS}
                kwargs = {name: value for name, value in config.kwargs.items() if name in names}
                counts = {name: getattr(config, name) for name in _COUNTS}
                chosen = {"kwargs": kwargs, **counts}
                found.append({"kernel": autotuner.fn.__name__, "config": chosen})
        return found

    def gives_equal_bits(self) -> bool:
        """Whether all memory is equal after a launch on each side; what two launches of Inductor's
        leave unequal, as additions of floats in another order do, does not count.
        """
        one, other, again = (self._launched(side) for side in (self.theirs, self.ours, self.theirs))
        return all(
            torch.equal(memory_of(left), memory_of(right))
            or not torch.equal(memory_of(left), memory_of(third))
            for left, right, third in zip(one, other, again, strict=True)
            if isinstance(left, torch.Tensor)
        )

    def _launched(self, side: Any) -> list[Any]:
        args = cloned(self.args)
        side.run(*args, stream=_stream())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return args

    def host_us(self) -> dict[str, list[float]]:
        """Return microseconds of the host for a call on each side, in turns."""
        args, stream = cloned(self.args), _stream()

        def timed(side: Any) -> float:
            torch.cuda.synchronize()
            started = time.perf_counter_ns()
            for _ in range(CALLS):
                side.run(*args, stream=stream)
            took = time.perf_counter_ns() - started
            torch.cuda.synchronize()
            return took / CALLS / 1e3

        ways = {name: functools.partial(timed, getattr(self, name)) for name in ("ours", "theirs")}
        return in_turns(ways, ROUNDS)


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


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory in which a tensor lies, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _stream() -> int:
    """Return the current stream's number; 0 where there is no GPU."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0

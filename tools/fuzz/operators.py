# SPDX-License-Identifier: Apache-2.0
"""Gives hostile arguments to each operator that a plan may call; exit status 1 when one crashes.

    python -m tools.fuzz operators [--count N] [--seed S] [--jobs N] [--operators NAME ...] [--only NUMBER]

Calls are recorded from torch's own samples (`op_db`, which needs the package expecttest), forward
and backward; then sizes, dtypes, strides, numbers and indices in them are changed, and
`operator_arguments` is asked first, as in a replay.  That runs in processes whose allocator ends
each tensor at a page without access (`guarded_memory.c`, compiled by `cc`), so that an access behind
the end is a signal.  `--count` is for each operator.  Shapes come from the CPU; kernels of a GPU are not tried.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bundler.errors import NotFound, OperatorFailed
from bundler.runtime.program.allowed_operators import ALLOWED
from bundler.runtime.program.bundle_programs import CheckedMemory
from bundler.toolchain.torch_memory import TorchMemory
from tools.fuzz import workers

GUARD = Path(__file__).parent / "guarded_memory.c"
SAMPLES, CALLS_EACH, LARGEST = 25, 6, 20_000
NUMBERS = [-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 3, 7, 16, 100, 2**31, 2**33, 2**62, 2**63 - 1]
SMALL = [-2, -1, 0, 1, 2, 3, 5, 8, 16]
FLOATS = [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 0.5, 1e30, -1e30, 1e-30]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
Call = tuple[list[Any], dict[str, Any]]


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch's class, which mypy is not shown
    """Keeps the arguments of the first calls of each listed operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, and keep what it was given."""
        result = func(*args, **(kwargs or {}))
        kept = self.calls[str(func)]
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        small = all(item.numel() < LARGEST and item.layout is torch.strided for item in tensors)
        if str(func) in ALLOWED and len(kept) < CALLS_EACH and small:
            kept.append(tree_map(_copied, (list(args), dict(kwargs or {}))))
        return result


def _copied(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def record() -> dict[str, list[Call]]:
    """Return calls of listed operators, by name, that torch's samples lead to."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder()
    for info in op_db:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
            if info.supports_dtype(dtype, "cpu"):
                gradient = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
                for sample in islice(
                    info.sample_inputs("cpu", dtype, requires_grad=gradient), SAMPLES
                ):
                    _run(recorder, info, sample)
    return {name: calls for name, calls in sorted(recorder.calls.items()) if calls}


def _run(recorder: Recorder, info: Any, sample: Any) -> None:
    try:
        with recorder:
            result = info(sample.input, *sample.args, **sample.kwargs)
            given = [sample.input, sample.args, sample.kwargs]
            ends = [_wanting(part) for part in (result, given)]
            if all(ends):
                torch.autograd.grad(
                    [end.abs().sum() for end in ends[0]], ends[1], allow_unused=True
                )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        print(f"no call of {info.name}: {error!s:.80}")


def _wanting(values: Any) -> list[Any]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]


# Changes ----------------------------------------------------------------------------------------


def changed(item: Any, chance: random.Random) -> Any:
    """Return an argument that is not quite the one of a sample."""
    match item:
        case torch.Tensor():
            twice = [_resized, _other_values]
            return chance.choice([*twice, *twice, _strided, _retyped])(item, chance)
        case bool():
            return not item
        case int():
            return chance.choice([*NUMBERS, *SMALL, *SMALL, item + 1, item - 1, 2 * item])
        case float():
            return chance.choice(FLOATS)
        case [*parts] if parts:
            place = chance.randrange(len(parts))
            kept = [*parts[:place], changed(parts[place], chance), *parts[place + 1 :]]
            return chance.choice([kept, kept, kept, parts[:-1], [*parts, parts[-1]]])
        case None:
            zeros = [torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
            return chance.choice([1, 0, -1, 0.5, [1, 1], *zeros])
    return item


def _resized(tensor: Any, chance: random.Random) -> Any:
    sizes = list(tensor.shape)
    if sizes and chance.random() < 0.7:
        place = chance.randrange(len(sizes))
        size = sizes[place]
        sizes[place] = max(0, chance.choice([0, 1, size - 1, size + 1, 2 * size, 17, 200]))
    elif sizes and chance.random() < 0.5:
        sizes.pop(chance.randrange(len(sizes)))
    else:
        sizes.insert(chance.randrange(len(sizes) + 1), chance.choice([0, 1, 2, 5]))
    count, flat = int(torch.tensor(sizes, dtype=torch.int64).prod()), tensor.reshape(-1)
    if count > 1 << 21 or not flat.numel():
        return tensor
    return flat.repeat(-(-count // flat.numel()))[:count].reshape(sizes).clone()


def _other_values(tensor: Any, chance: random.Random) -> Any:
    if tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    real = tensor.is_floating_point() or tensor.is_complex()
    for _ in range(chance.choice([1, 1, 2, min(flat.numel(), 100)])):
        if real:
            value: Any = chance.choice(FLOATS)
        else:
            limits = torch.iinfo(tensor.dtype)
            near = [flat.numel(), 5_000, -5_000, 100_000]
            value = max(limits.min, min(limits.max, chance.choice([*NUMBERS, *near])))
        flat[chance.randrange(flat.numel())] = value
    return flat.view(tensor.shape)


def _strided(tensor: Any, chance: random.Random) -> Any:
    if not tensor.dim() or not tensor.numel():
        return tensor
    place = chance.randrange(tensor.dim())
    every_second = torch.stack([tensor, tensor], -1)[..., 0]
    swapped = tensor.transpose(0, place).contiguous().transpose(0, place)
    return chance.choice([every_second, swapped, tensor.narrow(place, 0, 1).expand(tensor.shape)])


def _retyped(tensor: Any, chance: random.Random) -> Any:
    return tensor.to(chance.choice(DTYPES))


# Processes --------------------------------------------------------------------------------------


def shown(item: Any) -> str:
    """Return an argument for a finding."""
    match item:
        case torch.Tensor():
            real = item.is_floating_point() or item.is_complex() or not item.numel()
            reach = "" if real else f"<{int(item.min())}..{int(item.max())}>"
            return f"{str(item.dtype)[6:]}{list(item.shape)}{reach}"
        case [*parts]:
            return f"[{', '.join(map(shown, parts))}]"
        case dict():
            return ", ".join(f"{name}={shown(part)}" for name, part in item.items())
    return repr(item)


class Operators(workers.Fuzzer):
    """Calls of operators; the number of a case says which operator, and how it is called.

    Args:
        seed: of the cases.
        kept: the file with the calls of samples.
        names: the operators.
    """

    name = "operators"
    memory_bytes = 20 << 30  # each tensor takes some pages more
    # A loop without an end is a finding, too.
    case_s = 4.0
    accepts = "fine"

    def __init__(self, seed: int, kept: Path, names: Sequence[str]) -> None:
        super().__init__(seed)
        self.kept, self.names = kept, names

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Read what was recorded."""
        torch.set_num_threads(1)
        self.memory = CheckedMemory(TorchMemory())
        self.calls: dict[str, list[Call]] = pickle.loads(self.kept.read_bytes())  # noqa: S301  # this program wrote it

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Call an operator; a refusal is as good as a result: torch, or we, have looked at the
        arguments.
        """
        case, operator = divmod(number, len(self.names))
        name = self.names[operator]
        chance = random.Random(f"{self.seed}/{name}/{case}")
        torch.manual_seed(case)
        positional, named = chance.choice(self.calls[name])
        positional = list(positional)
        for _ in range(chance.choice([1, 1, 2, 3]) if positional else 0):
            at = chance.randrange(len(positional))
            positional[at] = changed(positional[at], chance)
        done.append(f"{name}: {shown(positional)} {shown(dict(named))}"[:2000])
        begin()
        try:
            self.memory.call(name, positional, named)
        except (OperatorFailed, NotFound) as refused:
            return Counter({type(refused).__name__: 1})
        return Counter({self.accepts: 1})


def main() -> int:
    """Record, then fuzz and print the table."""
    parser = workers.parser(__doc__, 250)
    parser.add_argument("--operators", nargs="*", default=(), help="these alone, by whole names")
    options = parser.parse_args()
    wanted = options.operators or ALLOWED
    calls = {name: found for name, found in record().items() if name in wanted}
    without = sorted(name for name in wanted if name not in calls)
    print(
        f"{len(calls)} operators, {options.count} cases each; {len(without)} operators without"
        f" samples: {' '.join(without)}"
    )
    with tempfile.TemporaryDirectory() as folder:
        library, kept = Path(folder, "guarded_memory.so"), Path(folder, "calls")
        compiler = ("cc", "-O1", "-shared", "-fPIC", "-o", str(library))
        subprocess.run([*compiler, str(GUARD), "-ldl", "-lpthread"], check=True)
        kept.write_bytes(pickle.dumps(calls))
        os.environ["LD_PRELOAD"] = str(library)  # of the processes that judge
        options.count *= len(calls)
        return workers.run(Operators(options.seed, kept, list(calls)), options)

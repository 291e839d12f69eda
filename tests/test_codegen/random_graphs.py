# SPDX-License-Identifier: Apache-2.0
"""Random functions of tensors, as data: drawn from a seed, run by torch in any precision, and made
smaller while they still fail.

`drawn(seed)` is a `Description`; `function(description)` and `inputs(description)` make torch calls
of it, `smaller(description, fails)` is the least description found that still fails, and
`checked(description, results)` says what is wrong with the results of a kernel.
"""

import functools
import random
from dataclasses import dataclass, replace

import torch

# `tools/codegen/random_sides.py` sets these two for a GPU.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
LARGEST = 2000
# Longer products leave the range of their dtype in one order and not in another.
LONGEST_PRODUCT = 33
FLOATS = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "expanded")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Input:
    """A tensor that is given: `special` mixes infinities, NaN and zeros of both signs in."""

    shape: tuple
    dtype: str
    layout: str = "contiguous"
    special: bool = False


@dataclass(frozen=True)
class Step:
    """One operator: the values it takes, by number (inputs first), and its other arguments."""

    operator: str
    values: tuple
    more: tuple = ()


@dataclass(frozen=True)
class Description:
    """A function: its inputs, its steps, and the numbers of the values that it returns."""

    inputs: tuple
    steps: tuple
    outputs: tuple
    seed: int = 0


# ---------------------------------------------------------------------------------------- operators


def _abs(x):
    """Return the magnitude; of the smallest integer that of its neighbour, since ptxas takes a
    magnitude for never negative.
    """
    integral = not x.dtype.is_floating_point and x.dtype not in {torch.bool, torch.uint8}
    return (x.clamp(min=torch.iinfo(x.dtype).min + 1) if integral else x).abs()


def _cast(x, dtype, wide):
    kept = wide and x.dtype == torch.float64 and getattr(torch, dtype).is_floating_point
    return (
        x
        if kept
        else x.to(
            torch.float64
            if wide and getattr(torch, dtype).is_floating_point
            else getattr(torch, dtype)
        )
    )


def _index(x, index, axis):
    return x.index_select(axis, _places(x, index, axis))


def _places(x, index, axis):
    return index.reshape(-1).long().abs() % x.shape[axis]


def _index_add(x, index, axis):
    places = _places(x, index, axis)
    return x.index_add(axis, places, x.index_select(axis, places))


def _put(x, index, axis):
    """Put equal numbers, so that it does not matter which comes last."""
    places = _places(x, index, axis)
    return x.index_copy(axis, places, torch.ones_like(x.index_select(axis, places)))


#: How torch computes each step: from the values, and what else the step has.
COMPUTE = {
    **{
        n: getattr(torch, n)
        for n in (
            "neg",
            "relu",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "erf",
            "square",
            "atan",
            "expm1",
            "add",
            "sub",
            "mul",
            "maximum",
            "minimum",
            "floor",
            "ceil",
            "round",
            "trunc",
            "sign",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "isnan",
            "isinf",
            "signbit",
            "logical_not",
            "logical_and",
            "logical_or",
            "logical_xor",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "bitwise_not",
            "where",
        )
    },
    "abs": _abs,
    "exp": lambda x: torch.exp(-x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "reciprocal": lambda x: torch.reciprocal(x * x + 1),
    **{
        n: getattr(torch.nn.functional, n)
        for n in ("gelu", "silu", "softplus", "elu", "mish", "hardswish", "logsigmoid", "selu")
    },
    **{n: getattr(torch, n) for n in ("hypot", "logaddexp")},
    # Of zeros that a minimum chose among, torch leaves the sign open; that of a sum with 0 is
    # known.
    "atan2": lambda x, y: torch.atan2(x + 0, y + 0),
    "copysign": lambda x, y: torch.copysign(x, y + 0),
    "left_shift": lambda x, y: x << (y & 7),
    "right_shift": lambda x, y: x >> (y & 7),
    "power": lambda x, y: x ** (y & 3),
    "round_decimals": lambda x, decimals: torch.round(x, decimals=decimals),
    "mantissa": lambda x: torch.frexp(x)[0],
    "div": lambda x, y: x / (y * y + 1),
    "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 3, y)),
    "fmod": lambda x, y: torch.fmod(x, torch.where(y == 0, 3, y)),
    "floor_divide": lambda x, y: torch.div(
        x, torch.where((y == 0) | (y == -1), 3, y), rounding_mode="floor"
    ),
    "trunc_divide": lambda x, y: torch.div(
        x, torch.where((y == 0) | (y == -1), 3, y), rounding_mode="trunc"
    ),
    "add_number": lambda x, number: x + number,
    "mul_number": lambda x, number: x * number,
    "pow_number": lambda x, number: x**number,
    "clamp": lambda x, low, high: x.clamp(low, high),
    "permute": lambda x, axes: x.permute(axes),
    "reshape": lambda x, shape: x.reshape(shape),
    "slice": lambda x, axis, start, step: x[(slice(None),) * axis + (slice(start, None, step),)],
    "flip": lambda x, axis: x.flip(axis),
    "roll": lambda x, shift, axis: x.roll(shift, axis),
    "tril": lambda x, diagonal: x.tril(diagonal),
    "triu": lambda x, diagonal: x.triu(diagonal),
    "repeat": lambda x, count: x.repeat(*([1] * (x.dim() - 1)), count),
    "unsqueeze": lambda x, axis: x.unsqueeze(axis),
    "expand": lambda x, count: x.unsqueeze(0).expand(count, *x.shape),
    "cat": lambda x, y, axis: torch.cat([x, y], axis),
    "stack": lambda x, y, axis: torch.stack([x, y], axis),
    "pad": lambda x, before, after, value: torch.nn.functional.pad(x, (before, after), value=value),
    "index": _index,
    "index_add": _index_add,
    "put": _put,
    "masked_fill": lambda mask, x: x.masked_fill(mask, 1),
    "sum": lambda x, axis, keep: x.sum(axis, keepdim=keep),
    "mean": lambda x, axis, keep: x.mean(axis, keepdim=keep),
    "amax": lambda x, axis, keep: x.amax(axis, keepdim=keep),
    "amin": lambda x, axis, keep: x.amin(axis, keepdim=keep),
    "prod": lambda x, axis, keep: x.prod(axis, keepdim=keep),
    "any": lambda x, axis, keep: x.any(axis, keepdim=keep),
    "all": lambda x, axis, keep: x.all(axis, keepdim=keep),
    "argmax": lambda x, axis, keep: x.argmax(axis, keepdim=keep),
    "argmin": lambda x, axis, keep: x.argmin(axis, keepdim=keep),
    "var": lambda x, axis, keep: x.var(axis, correction=0, keepdim=keep),
    "std": lambda x, axis, keep: x.std(axis, correction=0, keepdim=keep),
    "norm": lambda x, axis, keep: x.norm(dim=axis, keepdim=keep),
    "logsumexp": lambda x, axis, keep: x.logsumexp(axis, keepdim=keep),
    "softmax": lambda x, axis: x.softmax(axis),
    "log_softmax": lambda x, axis: x.log_softmax(axis),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}
SMOOTH = (
    "neg",
    "abs",
    "relu",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "square",
    "atan",
    "expm1",
    "exp",
    "sqrt",
    "rsqrt",
    "log1p",
    "reciprocal",
    "gelu",
    "silu",
    "softplus",
    "elu",
    "mish",
    "hardswish",
    "logsigmoid",
    "selu",
)
ROUNDING = ("floor", "ceil", "round", "trunc", "sign")
TESTS = ("isnan", "isinf", "signbit")
# What the generator adds by atomics; of halves the order would show.
ADDED_ATOMICALLY = ("float32", "float64", "int32", "int64")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
PAIRS = ("add", "sub", "mul", "maximum", "minimum")
VIEWS = (
    "permute",
    "reshape",
    "slice",
    "flip",
    "unsqueeze",
    "expand",
    "pad",
    "roll",
    "repeat",
    "tril",
    "triu",
)
REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
    "var",
    "std",
    "norm",
    "logsumexp",
    "softmax",
    "log_softmax",
    "layer_norm",
)
# What keeps a value that torch computes alike in every precision such a value.
EXACT = {
    "neg",
    "abs",
    "relu",
    "maximum",
    "minimum",
    "where",
    "floor",
    "ceil",
    "round",
    "trunc",
    "sign",
    "amax",
    "amin",
    "clamp",
    "cat",
    "stack",
    "index",
    "put",
    "masked_fill",
    "copysign",
    *VIEWS,
}


# ------------------------------------------------------------------------------------------ running


def inputs(description):
    """Return the tensors that a description is given; the same ones each time, which nobody
    changes.
    """
    return [
        _tensor(given, description.seed * 100 + number)
        for number, given in enumerate(description.inputs)
    ]


@functools.lru_cache(maxsize=8)
def _tensor(given, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = list(given.shape)
    if given.layout == "transposed":
        shape = shape[::-1]
    elif given.layout == "sliced" and shape:
        shape = [*shape[:-1], shape[-1] * 2 + 1]
    elif given.layout == "expanded" and shape:
        shape = [1, *shape[1:]]
    made = _numbers(shape, given, generator)
    if given.layout == "transposed":
        return made.permute(*range(made.dim() - 1, -1, -1))
    if given.layout == "sliced" and shape:
        return made[..., 1::2]
    return made.expand(given.shape) if given.layout == "expanded" and shape else made


def _numbers(shape, given, generator):
    dtype = getattr(torch, given.dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low, high = (0, 12) if given.dtype == "uint8" else (-9, 9)
        numbers = torch.randint(low, high, shape, generator=generator).to(dtype)
        limits = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
        extreme = torch.rand(shape, generator=generator) < (0.1 if given.special else 0)
        return torch.where(
            extreme, limits[torch.randint(0, 2, shape, generator=generator)], numbers
        )
    numbers = torch.randn(shape, generator=generator)
    ties = torch.rand(shape, generator=generator) < 0.2
    numbers = torch.where(ties, (numbers * 2).round() / 2, numbers)
    if given.special:
        chosen = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
        numbers = torch.where(torch.rand(shape, generator=generator) < 0.15, chosen, numbers)
    made = numbers.to(dtype)
    # Some processors convert NaN to one with the sign bit set, others do not.
    return torch.where(made.isnan(), torch.tensor(float("nan"), dtype=dtype), made)


def values(description, given, *, wide=False):
    """Return every value of a description, computed by torch; in float64 throughout where
    `wide`.
    """
    found = [t.double() if wide and t.dtype.is_floating_point else t for t in given]
    for step in description.steps:
        taken = [found[number] for number in step.values]
        if step.operator == "cast":
            found.append(_cast(*taken, *step.more, wide))
        else:
            found.append(COMPUTE[step.operator](*taken, *step.more))
    return found


def function(description):
    """Return the function, as a user would write it."""

    def called(*given):
        found = values(description, given)
        return tuple(found[number] for number in description.outputs)

    return called


def checked(description, results):
    """Return what is wrong with results: floats may be off by twice what torch's own are from
    float64, all else is exact; empty where nothing is.
    """
    given = inputs(description)
    eager, wide = values(description, given), values(description, given, wide=True)
    slack = _slack(description, eager)
    for place, (number, got) in enumerate(zip(description.outputs, results, strict=True)):
        problem = _difference(got, eager[number], wide[number], slack[number])
        if problem:
            return f"output {place}: {problem}"
    return ""


# Of the largest number, for what the order of a sum does; the interpreter cuts bfloat16 off where a
# GPU rounds.
_SLACK = {
    torch.float64: 1e-13,
    torch.float32: 3e-6,
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
}


def _alike(one, other):
    """Return where two tensors are both finite, both NaN, or the same infinity."""
    return torch.where(
        torch.isfinite(one), torch.isfinite(other), (one == other) | one.isnan() & other.isnan()
    )


def _slack(description, found):
    """Return for each value how far it may be off beside what torch is: by the coarsest dtype that
    it was computed in.
    """
    count = len(description.inputs)
    slack = []
    for number, value in enumerate(found):
        step = description.steps[number - count] if number >= count else Step("", ())
        own = max([_SLACK.get(value.dtype, 0.0), *(slack[before] for before in step.values)])
        slack.append(own * (_AMPLIFIED if step.operator in NORMALIZED and _is_flat(value) else 1))
    return slack


# What is left of rows of equal numbers is rounding, relative to the root of layer_norm's epsilon,
# 1e-5.
NORMALIZED = ("layer_norm", "std", "var")
_AMPLIFIED = 320


def _is_flat(value):
    return bool((value[value.isfinite()].abs() < 1e-2).all())


def _difference(got, eager, wide, slack):
    if (got.dtype, tuple(got.shape)) != (eager.dtype, tuple(eager.shape)):
        return f"got {got.dtype} {tuple(got.shape)}, expected {eager.dtype} {tuple(eager.shape)}"
    if not got.numel():
        return ""
    if not got.dtype.is_floating_point:
        wrong = got != eager
        return (
            ""
            if not wrong.any()
            else (
                f"{int(wrong.sum())} of {got.numel()} wrong, got {got[wrong][0]}, expected"
                f" {eager[wrong][0]}"
            )
        )
    got, own = got.double(), eager.double()
    # What overflows depends on rounding; some of torch's vectorized functions give NaN where others
    # give infinity.
    unlike = ~_alike(got, own) & ~_alike(got, wide)
    finite = torch.isfinite(own) & torch.isfinite(wide) & torch.isfinite(got)
    if unlike.any():
        return (
            f"{int(unlike.sum())} of {got.numel()} not finite alike, got {got[unlike][0]}, expected"
            f" {own[unlike][0]}"
        )
    if not finite.any():
        return ""
    error, theirs = (got - wide)[finite].abs().max(), (own - wide)[finite].abs().max()
    allowed = 2 * theirs + slack * max(1.0, float(wide[finite].abs().max()))
    return "" if error <= allowed else f"off by {float(error)}, torch by {float(theirs)}"


# ------------------------------------------------------------------------------------------ drawing


@dataclass(frozen=True)
class _Known:
    """What drawing knows of a value: whether it is alike in every precision, whether it holds
    infinities or NaN, and whether it is an input.
    """

    shape: tuple
    dtype: str
    exact: bool
    special: bool
    given: bool

    @property
    def kind(self):
        return "bool" if self.dtype == "bool" else "float" if "float" in self.dtype else "int"


def drawn(seed):
    """Return a description that torch can compute, drawn from a seed."""
    chance = random.Random(seed)
    description = Description(tuple(_inputs(chance)), (), (), seed)
    for _ in range(chance.randint(1, 8)):
        step = _step(chance, description)
        longer = replace(description, steps=(*description.steps, step)) if step else description
        if step and _computes(longer):
            description = longer
    count = len(description.inputs)
    last = range(count, count + len(description.steps))
    used = {number for step in description.steps for number in step.values}
    ends = [number for number in last if number not in used] or [count + len(description.steps) - 1]
    more = [number for number in last if number in used and chance.random() < 0.2]
    return (
        replace(description, outputs=tuple(sorted({*ends, *more})))
        if description.steps
        else drawn(seed + 1_000_003)
    )


def _inputs(chance):
    rank = chance.choice((1, 2, 2, 2, 3))
    while True:
        shape = tuple(chance.choice(SIZES) for _ in range(rank))
        if _elements(shape) <= LARGEST // 2:
            break
    if chance.random() < 0.04:
        shape = (0, *shape[1:])
    main = chance.choice(FLOATS) if chance.random() < 0.75 else chance.choice(INTEGERS)
    special = chance.random() < 0.25
    for _ in range(chance.randint(1, 3)):
        other = main if chance.random() < 0.7 else chance.choice((*FLOATS, *INTEGERS, "bool"))
        drop = chance.randint(0, rank - 1) if chance.random() < 0.3 else 0
        sizes = tuple(1 if chance.random() < 0.15 else size for size in shape[drop:])
        yield Input(sizes, other, chance.choice(LAYOUTS), special)


def _elements(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def _known(description):
    given = inputs(description)
    found = values(description, given)
    exact = [True] * len(given)
    for step, value in zip(description.steps, found[len(given) :], strict=True):
        alike = all(exact[number] for number in step.values)
        exact.append(alike and (step.operator in EXACT or not value.dtype.is_floating_point))
    return [
        _Known(
            tuple(v.shape),
            str(v.dtype).removeprefix("torch."),
            e,
            v.dtype.is_floating_point and not bool(torch.isfinite(v).all()),
            number < len(given),
        )
        for number, (v, e) in enumerate(zip(found, exact, strict=True))
    ]


def _computes(description):
    """Whether torch computes the last step, in both precisions, without too many elements or
    numbers beyond those of its dtype.
    """
    try:
        last = values(description, inputs(description))[-1]
        values(description, inputs(description), wide=True)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    large = last.dtype.is_floating_point and bool((last[torch.isfinite(last)].abs() > 1e3).any())
    return last.numel() <= LARGEST and last.dim() <= 4 and not large and not last.is_complex()


def _step(chance, description):
    known = _known(description)
    recent = [n for n in range(len(known)) for _ in range(1 + 2 * (n >= len(description.inputs)))]
    one, other = chance.choice(recent), chance.choice(recent)
    draw = chance.choice(
        (_pointwise, _pointwise, _pairwise, _pairwise, _viewed, _reduced, _converted, _chosen)
    )
    return draw(chance, known, one, other)


def _pointwise(chance, known, one, other):
    value = known[one]
    if value.kind == "bool":
        return Step("logical_not", (one,))
    if value.kind == "int":
        names = (
            "neg",
            "abs",
            "relu",
            "square",
            "sign",
            "bitwise_not",
            "add_number",
            "mul_number",
            "clamp",
        )
    else:
        names = (
            *SMOOTH,
            "add_number",
            "mul_number",
            "pow_number",
            "clamp",
            *((*ROUNDING, *TESTS, "round_decimals", "mantissa") if value.exact else ()),
        )
    name = chance.choice([n for n in names if not (value.dtype == "uint8" and n == "neg")])
    more = {
        "add_number": lambda: (
            chance.choice((1, 2, 3)) if value.kind == "int" else chance.choice((1, 0.5, -2.25)),
        ),
        "mul_number": lambda: (
            chance.choice((2, 3)) if value.kind == "int" else chance.choice((2, 0.5, -0.75)),
        ),
        "pow_number": lambda: (chance.choice((2, 3)),),
        "round_decimals": lambda: (chance.choice((-1, 1, 2)),),
        "clamp": lambda: (0, 3) if value.kind == "int" else (-0.5, 0.75),
    }.get(name, tuple)()
    return Step(name, (one,), more)


def _pairwise(chance, known, one, other):
    left, right = known[one], known[other]
    kinds = {left.kind, right.kind}
    names = ["add", "mul"]
    if "bool" not in kinds:
        names += ["sub", "maximum", "minimum"]
    if kinds == {"float"}:
        names += ["div", "atan2", "hypot", "logaddexp"]
        names += ["copysign"] if right.exact else []
    if kinds == {"int"}:
        names += [
            "remainder",
            "fmod",
            "floor_divide",
            "trunc_divide",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
        ]
        names += ["left_shift", "right_shift", "power"]
    if kinds == {"bool"}:
        names = ["logical_and", "logical_or", "logical_xor", "bitwise_xor", "eq"]
    if left.exact and right.exact:
        names += COMPARISONS
    return Step(chance.choice(names), (one, other))


def _viewed(chance, known, one, other):
    shape = known[one].shape
    name = chance.choice(VIEWS)
    axis = chance.randrange(max(1, len(shape)))
    more = {
        "permute": lambda: (tuple(chance.sample(range(len(shape)), len(shape))),),
        "reshape": lambda: (chance.choice([(-1,), (*shape[:-2], -1), (1, *shape), (*shape, 1)]),),
        "slice": lambda: (axis, chance.choice((0, 1)), chance.choice((1, 2))),
        "flip": lambda: (axis,),
        "roll": lambda: (chance.choice((1, 2, -3)), axis),
        "tril": lambda: (chance.choice((-1, 0, 1)),),
        "triu": lambda: (chance.choice((-1, 0, 1)),),
        "repeat": lambda: (chance.choice((2, 3)),),
        "unsqueeze": lambda: (axis,),
        "expand": lambda: (chance.choice((2, 3)),),
        "pad": lambda: (chance.choice((0, 1, 2)), chance.choice((0, 1)), chance.choice((0, 1))),
    }[name]()
    return Step(name, (one,), more)


def _reduced(chance, known, one, other):
    value = known[one]
    names = [n for n in REDUCTIONS if n not in {"argmax", "argmin", "any", "all"} or value.exact]
    if value.kind != "float":
        names = ["sum", "amax", "amin", "any", "all"] + (
            ["prod", "argmax", "argmin"] if value.kind == "int" else []
        )
    name = chance.choice(names)
    axis = chance.randrange(max(1, len(value.shape)))
    if name == "prod" and len(value.shape) > axis and value.shape[axis] > LONGEST_PRODUCT:
        name = "sum"
    if name in {"softmax", "log_softmax"}:
        return Step(name, (one,), (axis,))
    if name == "layer_norm":
        return Step(name, (one,))
    if (
        name in {"sum", "mean", "amax", "amin", "var", "std", "norm", "logsumexp"}
        and chance.random() < 0.25
    ):
        axis = tuple(range(len(value.shape)))
    return Step(name, (one,), (axis, chance.random() < 0.5))


def _converted(chance, known, one, other):
    value = known[one]
    targets = [*FLOATS, "bool"] + ([] if value.special else list(INTEGERS[:3]))
    if value.kind == "float" and not value.exact:
        targets = list(FLOATS)
    return Step("cast", (one,), (chance.choice(targets),))


def _chosen(chance, known, one, other):
    masks = [n for n, value in enumerate(known) if value.kind == "bool"]
    indices = [
        n
        for n, value in enumerate(known)
        if value.kind == "int"
        and value.dtype in {"int32", "int64"}
        and _elements(value.shape) <= 64
    ]
    name = chance.choice(("where", "masked_fill", "cat", "stack", "index", "index_add", "put"))
    axis = chance.randrange(max(1, len(known[one].shape)))
    if name == "where":
        return Step("where", (chance.choice(masks), one, other)) if masks else None
    if name == "masked_fill":
        return Step("masked_fill", (chance.choice(masks), one)) if masks else None
    if name == "index_add" and known[one].dtype not in ADDED_ATOMICALLY:
        return None
    if name in {"index", "index_add", "put"}:
        return Step(name, (one, chance.choice(indices)), (axis,)) if indices else None
    return Step(name, (one, other), (axis,)) if known[one].dtype == known[other].dtype else None


# ---------------------------------------------------------------------------------------- shrinking


def smaller(description, fails, *, tries=200):
    """Return the smallest description found, by taking away outputs and steps and cutting sizes,
    for which `fails` still holds.
    """
    left = tries
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in _candidates(description):
            left -= 1
            if left < 0:
                break
            if _is_whole(candidate) and fails(candidate):
                description, changed = candidate, True
                break
    return description


def _is_whole(description):
    try:
        values(description, inputs(description))
        values(description, inputs(description), wide=True)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return bool(description.outputs)


def _candidates(description):
    count = len(description.inputs)
    for output in description.outputs:
        if len(description.outputs) > 1:
            yield replace(description, outputs=(output,))
    for place in range(len(description.steps) - 1, -1, -1):
        yield _without(description, place)
        for number in description.steps[place].values:
            yield _instead(description, count + place, number)
    for place, given in enumerate(description.inputs):
        for changed in (
            replace(given, layout="contiguous"),
            replace(given, special=False),
            replace(given, dtype="float32"),
        ):
            if changed != given:
                yield _with_input(description, place, changed)
    for size in sorted(
        {size for given in description.inputs for size in given.shape if size > 1}, reverse=True
    ):
        for less in {1, size // 2, size - 1}:
            cut = tuple(
                replace(g, shape=tuple(less if s == size else s for s in g.shape))
                for g in description.inputs
            )
            yield replace(description, inputs=cut)


def _with_input(description, place, given):
    return replace(
        description, inputs=(*description.inputs[:place], given, *description.inputs[place + 1 :])
    )


def _without(description, place):
    """Return a description without a step that nothing but an output needs."""
    number = len(description.inputs) + place
    if any(number in step.values for step in description.steps):
        return replace(description, outputs=())
    return _renumbered(description, place, {number: None})


def _instead(description, number, other):
    """Return a description in which one value stands for another, whose step is gone."""
    steps = tuple(
        replace(s, values=tuple(other if v == number else v for v in s.values))
        for s in description.steps
    )
    return _renumbered(
        replace(description, steps=steps), number - len(description.inputs), {number: other}
    )


def _renumbered(description, place, taken):
    gone = len(description.inputs) + place

    def moved(number):
        number = taken.get(number, number)
        return None if number is None else number - (number > gone)

    steps = [s for n, s in enumerate(description.steps) if n != place]
    steps = tuple(replace(s, values=tuple(moved(v) for v in s.values)) for s in steps)
    count = len(description.inputs)
    outputs = {moved(number) for number in description.outputs} - {None}
    return replace(
        description, steps=steps, outputs=tuple(sorted(n for n in outputs if n >= count))
    )

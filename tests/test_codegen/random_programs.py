# SPDX-License-Identifier: Apache-2.0
"""Random programs as models have them, as Python text: products, convolutions, attention, sorts,
norms, views, in-place changes, gradients, changing sizes.

`drawn(seed)` is a `Drawn`, `problem(drawn, ...)` runs it through torch.compile beside eager torch
and says what is wrong, and `smaller(drawn, fails)` is the least one found that still fails.  What
is compared: numbers, by the rule of TorchInductor's dashboard against float64, and dtype, sizes,
strides (as eager has them, or as torch traces them), and which results, inputs and gradients share
memory.
"""

import functools
import itertools
import random
import re
import traceback
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17)
#: The size of the batch, which no other size is: in the first call, and in the second where sizes
#: change.
BATCH, SECOND_BATCH = 6, 11
LARGEST = 6000
FLOATS = ("float32", "float32", "float32", "bfloat16", "float16", "float64")
LAYOUTS = (
    "contiguous",
    "contiguous",
    "transposed",
    "sliced",
    "offset",
    "expanded",
    "channels_last",
)
TOLERANCES = {"float64": 1e-7, "float32": 1e-3, "float16": 1e-2, "bfloat16": 2e-2}
# Other runs of eager mode that a result is compared with that is wrong beside the first.
_NUDGED = 3
# Root mean square under which a result in float64 is zero but for rounding.
_ZERO = 1e-12
MOST_STEPS = 9


@dataclass(frozen=True)
class Given:
    """An input: `b` among the sizes is that of the batch; `high` is the end of the range of an
    index.
    """

    name: str
    sizes: tuple
    dtype: str = "float32"
    layout: str = "contiguous"
    kind: str = "number"
    grad: bool = False
    high: int = 0

    def text(self, batch=BATCH):
        """Return what makes it, out of the generator `g`."""
        sizes = [batch if size == "b" else size for size in self.sizes]
        shape, last = list(sizes), ""
        if self.layout == "transposed":
            shape, last = (
                shape[::-1],
                f".permute({', '.join(map(str, reversed(range(len(sizes)))))})",
            )
        elif self.layout == "sliced" and sizes:
            shape[-1], last = 2 * shape[-1] + 1, "[..., 1::2]"
        elif self.layout == "offset" and sizes:
            shape[0], last = shape[0] + 2, "[2:]"
        elif self.layout == "expanded" and sizes:
            shape[0], last = 1, f".expand({sizes})"
        elif self.layout == "channels_last" and len(sizes) == 4:
            last = ".contiguous(memory_format=torch.channels_last)"
        made = {
            "number": f"torch.randn({shape}, generator=g)",
            "positive": f"(torch.rand({shape}, generator=g) + 0.5)",
            "index": f"torch.randint(0, {self.high}, {shape}, generator=g)",
            "mask": f"(torch.rand({shape}, generator=g) > 0.3)",
        }[self.kind]
        cast = f".to(torch.{self.dtype})" if self.kind in {"number", "positive"} else ""
        return f"{made}{cast}{last}"


@dataclass(frozen=True)
class Step:
    """A line: the names that it defines (none for a change in place), the values that it takes, and
    its text with `{0}`, `{1}` for these.
    """

    results: tuple
    values: tuple
    text: str

    def line(self):
        made = self.text.format(*self.values)
        return f"{', '.join(self.results)} = {made}" if self.results else made


@dataclass(frozen=True)
class Drawn:
    """A program: `backward` compares gradients too, `dynamic` makes a second call with another
    batch.
    """

    inputs: tuple
    steps: tuple
    outputs: tuple
    backward: bool = False
    dynamic: bool = False
    expanded_tangents: bool = False
    seed: int = 0

    def text(self):
        """Return the program as Python text that a user can run."""
        names = ", ".join(given.name for given in self.inputs)
        body = "".join(f"    {step.line()}\n" for step in self.steps)
        return f"def program({names}):\n{body}    return ({', '.join(self.outputs)},)\n"

    def shown(self):
        """Return the whole of it: what makes the inputs, the program, and how it is called."""
        given = "".join(
            f"{one.name} = {one.text()}{'.requires_grad_()' if one.grad else ''}\n"
            for one in self.inputs
        )
        facts = (
            f"# backward={self.backward} dynamic={self.dynamic}"
            f" expanded_tangents={self.expanded_tangents} seed={self.seed}\n"
        )
        head = "import torch\nimport torch.nn.functional as F\n\ng = torch.Generator().manual_seed"
        return f"{facts}{head}({self.seed})\n{given}\n\n{self.text()}"


# ------------------------------------------------------------------------------------------ running


@functools.lru_cache(maxsize=4096)
def _compiled_text(text):
    return compile(text, "<drawn program>", "exec")


def function(drawn, *, wide=False):
    """Return the function of a program; in float64 throughout where `wide`."""
    text = drawn.text()
    if wide:
        text = re.sub(r"torch\.(float32|bfloat16|float16)\b", "torch.float64", text)
    space = {"torch": torch, "F": torch.nn.functional}
    exec(_compiled_text(text), space)
    return space["program"]


def moved(tensor, device, dtype=None, nudge=None):
    """Return a copy of a tensor with its strides and offset, in memory of its own.

    With a generator for `nudge` its floats are off by their last bit.
    """
    dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    storage = tensor.untyped_storage()
    flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
    if nudge is not None and flat.dtype.is_floating_point:
        signs = torch.randint(0, 2, flat.shape, generator=nudge).to(flat.dtype) * 2 - 1
        flat = flat * (1 + signs * torch.finfo(flat.dtype).eps)
    flat = flat.to(device=device, dtype=dtype, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def inputs(drawn, *, batch=BATCH, device="cpu", wide=False, nudge=None):
    """Return new inputs of a program, the same numbers each time."""
    space = {"torch": torch, "g": torch.Generator().manual_seed(drawn.seed)}
    made = [
        moved(eval(given.text(batch), space), device, torch.float64 if wide else None, nudge)
        for given in drawn.inputs
    ]
    return [
        tensor.requires_grad_() if given.grad and drawn.backward else tensor
        for tensor, given in zip(made, drawn.inputs, strict=True)
    ]


def called(drawn, call, given):
    """Return what a call gives: results by name, changed inputs among them, and gradients."""
    results = list(call(*given))
    found = {f"output {place}": value for place, value in enumerate(results)}
    if drawn.backward:
        ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        # An input that becomes what needs a gradient is no leaf, and asks for none of its own.
        wanted = [(one.name, t) for one, t in zip(drawn.inputs, given, strict=True) if one.grad]
        if ends and wanted:
            tangents = [_tangent(end, place, drawn) for place, end in enumerate(ends)]
            # What is handed out is looked at as it was, before anybody else may change it.
            gradients = torch.autograd.grad(
                ends, [t for _, t in wanted], tangents, allow_unused=True
            )
            found |= {
                f"gradient of {name}": gradient
                for (name, _), gradient in zip(wanted, gradients, strict=True)
                if gradient is not None
            }
    return found | {f"input {one.name}": t for one, t in zip(drawn.inputs, given, strict=True)}


def _tangent(end, place, drawn):
    if drawn.expanded_tangents:
        return torch.ones((), dtype=end.dtype, device=end.device).expand(end.shape)
    generator = torch.Generator().manual_seed(place)
    drawn_numbers = torch.randn(end.shape, generator=generator)
    return drawn_numbers.to(dtype=end.dtype, device=end.device)


# ---------------------------------------------------------------------------------------- comparing


def problem(drawn, *, backend, device="cpu", programs=None):
    """Return what is wrong with a program through torch.compile; empty where nothing is.

    The first word says the kind: `raises`, `refused`, `wrong`, `strides`, `aliasing`, `dtype`,
    `sizes`.
    """
    torch._dynamo.reset()
    notes = [] if programs is None else programs
    del notes[:]
    compiled = torch.compile(
        function(drawn),
        backend=backend,
        options={"programs": notes},
        dynamic=drawn.dynamic,
        fullgraph=True,
    )
    for batch in (BATCH, SECOND_BATCH) if drawn.dynamic else (BATCH,):
        given = inputs(drawn, batch=batch, device=device)
        try:
            got = called(drawn, compiled, given)
        except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
            return _raised(drawn, error, batch, device)
        reasons = [one.reason for one in notes if not hasattr(one, "plan")]
        faults = [one for one in reasons if "internal error" in one or "cannot take" in one]
        if faults and _by_torch(drawn, batch, device) is not None:
            return f"refused: {faults[0]}"
        found = compared(drawn, got, batch, device)
        if found:
            return f"{found} (batch {batch})"
    return ""


def compared(drawn, got, batch=BATCH, device="cpu"):
    """Return what is wrong with what a call gave, `called(...)`, beside eager torch."""
    eager = called(drawn, function(drawn), inputs(drawn, batch=batch, device=device))
    wide = called(
        drawn, function(drawn, wide=True), inputs(drawn, batch=batch, device=device, wide=True)
    )
    torchs = None
    if list(got) != list(eager):
        # A change in place gives AOTAutograd a gradient of zeros where eager mode has none.
        torchs = _by_torch(drawn, batch, device)
        more = [name for name in got if name not in eager]
        others = got if torchs is None else torchs  # torch itself fails with some programs
        known = list(got) == list(others) and all(name in got for name in eager)
        if not known or any(got[name].any() for name in more):
            return f"wrong: got {list(got)}, expected {list(eager)}"
        got = {name: got[name] for name in eager}
    tolerance = _tolerance(drawn)
    for name, expected in eager.items():
        found = _difference(got[name], expected, wide[name], tolerance)
        if found:
            # What AOTAutograd makes of a view of an input whose elements overlap, with sizes that
            # change, has another gradient than eager mode's, whoever compiles the graph.
            torchs = torchs or _by_torch(drawn, batch, device)
            same = torchs is not None and not _differs(got[name], torchs[name], tolerance)
            nudged = (_nudged(drawn, batch, device, seed) for seed in range(_NUDGED))
            if not same and all(
                _difference(got[name], other[name], wide[name], tolerance) for other in nudged
            ):
                return f"{found} ({name})"
    for rule in (_strides, _aliases):
        if rule(got) != rule(eager):
            # What AOTAutograd alone does is torch's doing, and no layout of ours.
            torchs = torchs or _by_torch(drawn, batch, device)
            if torchs is None or rule(got) != rule(torchs):
                if rule is _strides and _strides(got) == _strides(_traced(drawn, batch, device)):
                    continue
                apart = [(a, b) for a, b in zip(rule(got), rule(eager), strict=False) if a != b]
                return (
                    f"{rule.__name__.strip('_')}: got, expected"
                    f" {apart[:2] or (rule(got), rule(eager))}"
                )
    return ""


def _raised(drawn, error, batch, device):
    if _by_torch(drawn, batch, device) is None:
        return ""  # AOTAutograd cannot do it either
    error = getattr(error, "inner_exception", error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
    return f"raises: {type(error).__name__}: {str(error).strip()[-300:]} ({where}, batch {batch})"


def _by_torch(drawn, batch, device):
    """Return what torch.compile gives without a generator of kernels; None where torch itself
    raises.
    """
    torch._dynamo.reset()
    compiled = torch.compile(
        function(drawn), backend="aot_eager", dynamic=drawn.dynamic, fullgraph=True
    )
    try:
        return called(drawn, compiled, inputs(drawn, batch=batch, device=device))
    except Exception:  # noqa: BLE001  # it tells that torch does not
        return None


def _traced(drawn, batch, device):
    """Return the results as torch traces them, which are fake tensors; nothing where it cannot.

    Its rule for `roll` has other strides than its kernel on the CPU, and a program keeps what was
    traced.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(one) for one in inputs(drawn, batch=batch, device=device)]
        try:
            return called(replace(drawn, backward=False), function(drawn), given)
        except RuntimeError:  # values decide something
            return {}


def _strides(found):
    """Return the strides of each tensor, and its offset; those of single elements and of gradients
    say nothing.
    """
    return [
        (
            name,
            *(stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)),
        )
        for name, t in found.items()
        if isinstance(t, torch.Tensor) and t.numel() and not name.startswith("gradient")
    ]


def _aliases(found):
    """Return the pairs of results and inputs that begin in the same memory, and how far from one
    another.
    """
    tensors = {
        name: t
        for name, t in found.items()
        if isinstance(t, torch.Tensor) and t.numel() and not name.startswith("gradient")
    }
    return [
        (one, other, tensors[other].storage_offset() - tensors[one].storage_offset())
        for one, other in itertools.combinations(tensors, 2)
        if tensors[one].untyped_storage().data_ptr() == tensors[other].untyped_storage().data_ptr()
    ]


def _tolerance(drawn):
    """Return the tolerance of the narrowest floats of a program: what goes through them is no
    closer, whatever it ends in.
    """
    text = drawn.shown()
    return max((t for name, t in TOLERANCES.items() if f"torch.{name}" in text), default=0.0)


def _difference(got, eager, wide, least=0.0):
    if not isinstance(eager, torch.Tensor):
        return "" if got == eager else f"wrong: got {got}, expected {eager}"
    if got.dtype != eager.dtype:
        return f"dtype: got {got.dtype}, expected {eager.dtype}"
    if got.shape != eager.shape:
        return f"sizes: got {tuple(got.shape)}, expected {tuple(eager.shape)}"
    if got.device != eager.device:
        return f"device: got {got.device}, expected {eager.device}"
    if not got.numel():
        return ""
    got, eager, wide = (one.detach().cpu() for one in (got, eager, wide))
    if not eager.dtype.is_floating_point:
        wrong = int((got != eager).sum())
        return f"wrong: {wrong} of {got.numel()} elements" if wrong else ""
    tolerance = max(least, TOLERANCES[str(eager.dtype).removeprefix("torch.")])
    few = eager.numel() < 1000 or eager.dtype.itemsize < 4 or tolerance >= 2e-2
    ours, theirs, right = got.double(), eager.double(), wide.double()
    if not torch.equal(torch.isfinite(ours), torch.isfinite(theirs)):
        return "wrong: other elements are infinite or NaN"
    keep = torch.isfinite(ours) & torch.isfinite(right)
    ours, theirs, right = ours[keep], theirs[keep], right[keep]
    # The dashboard's tolerance is absolute, which hides what is wrong with small gradients: it
    # counts for the tensor's own size here. One that is zero but for rounding has none.
    scale = max(min(1.0, _rms(right)), 1e-5) if _rms(right) > _ZERO else 1.0
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale):
        return ""
    mine, own = _rms(ours - right), _rms(theirs - right)
    if mine <= (3 if few else 2) * own + tolerance * scale / 10:
        return ""
    return f"wrong: off by {mine:.3g} (root mean square of {_rms(right):.3g}), eager by {own:.3g}"


def _nudged(drawn, batch, device, seed):
    """Return what eager mode gives for inputs that are off by their last bit.

    One run of eager mode does not show how far off it can be where terms cancel, as in the
    gradient of what a norm divides out again.
    """
    nudge = torch.Generator().manual_seed(seed)
    given = inputs(drawn, batch=batch, device=device, nudge=nudge)
    return called(drawn, function(drawn), given)


def _differs(got, torchs, tolerance):
    """Whether a result is another one than that of torch.compile without a generator."""
    wide = torchs.double() if torchs.dtype.is_floating_point else torchs
    return bool(_difference(got, torchs, wide, tolerance))


def _rms(numbers):
    return float(numbers.square().mean().sqrt()) if numbers.numel() else 0.0


# ------------------------------------------------------------------------------------------ drawing


class _Drawing:
    """A program while it is drawn: what each value is in eager torch, and whether it is alike in
    every precision.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        backward = self.chance.random() < 0.55
        self.drawn = Drawn(
            (), (), (), backward, self.chance.random() < 0.25, self.chance.random() < 0.3, seed
        )
        self.dtype = self.chance.choice(FLOATS)
        self.values, self.exact, self.made = {}, set(), set()
        self._count = itertools.count()

    def size(self):
        return self.chance.choice(SIZES)

    def new(self, sizes, kind="number", dtype=None, grad=True, layout=None, high=0):
        """Return the name of a new input, which is one of a candidate until a step takes it."""
        dtype = dtype or self.dtype
        name = f"x{len(self.drawn.inputs) + len(self._wanted)}"
        layout = layout or self.chance.choice(LAYOUTS)
        symbolic = tuple("b" if size == BATCH else size for size in sizes)
        is_float = kind in {"number", "positive"}
        wants = self.drawn.backward and grad and is_float and self.chance.random() < 0.8
        self._wanted.append(Given(name, symbolic, dtype, layout, kind, wants, high))
        return name

    def pick(self, fits=lambda t: True, *, floats=True, exact=False):
        """Return the name of a value that fits, the later ones rather; raises where there
        is none.
        """
        found = [
            name
            for name, t in self.values.items()
            if fits(t)
            and (not floats or t.dtype.is_floating_point)
            and (not exact or name in self.exact)
        ]
        if not found:
            raise LookupError
        recent = found[-3:]
        return self.chance.choice(recent if self.chance.random() < 0.75 else found)

    def like(self, name, sizes=None, **more):
        """Return an input of a value's dtype."""
        tensor = self.values[name]
        return self.new(
            sizes or tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."), **more
        )

    def name(self):
        return f"v{next(self._count)}"

    def add(self, make):
        """Take what a family of operators makes, where eager torch computes it."""
        self._wanted, before = [], self.drawn
        try:
            step, exact = make(self)
        except (LookupError, ValueError):
            return
        outputs = step.results or before.outputs
        candidate = replace(
            before,
            inputs=(*before.inputs, *self._wanted),
            steps=(*before.steps, step),
            outputs=outputs,
        )
        found = values_of(candidate)
        if found is None:
            return
        self.drawn = candidate
        for given in self._wanted:
            self.exact.add(given.name)
        self.values = found
        if step.results and exact and all(value in self.exact for value in step.values):
            self.exact |= set(step.results)
        if not step.results and not all(value in self.exact for value in step.values):
            self.exact.clear()  # who shares that memory is not known here


REFUSALS = (
    RuntimeError,
    IndexError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
)


def values_of(drawn):
    """Return the values of a program's first call in eager torch by name; None where torch refuses
    it, or numbers grow too large.
    """
    names = [given.name for given in drawn.inputs]
    names += [name for step in drawn.steps for name in step.results]
    plain = replace(drawn, outputs=tuple(names), backward=False)
    try:
        with torch.no_grad():
            values = function(plain)(*inputs(plain))
    except REFUSALS:
        return None
    found = {name: v for name, v in zip(names, values, strict=True) if isinstance(v, torch.Tensor)}
    return found if all(map(_is_moderate, found.values())) else None


def is_computed(drawn):
    """Whether eager torch computes a program: every call, in float64 too, with gradients, and no
    number grows too large.
    """
    try:
        for batch in (BATCH, SECOND_BATCH) if drawn.dynamic else (BATCH,):
            for wide in (False, True):
                given = inputs(drawn, batch=batch, wide=wide)
                found = called(drawn, function(drawn, wide=wide), given)
                tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
                if not all(map(_is_moderate, tensors)):
                    return False
    except REFUSALS:
        return False
    return True


def _is_moderate(tensor):
    if tensor.numel() > LARGEST or tensor.dim() > 5 or tensor.is_complex():
        return False
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return True
    return bool(torch.isfinite(tensor).all()) and float(tensor.detach().abs().max()) < 200


@functools.lru_cache(maxsize=256)
def drawn(seed):
    """Return a program that eager torch computes, drawn from a seed."""
    drawing = _Drawing(seed)
    chance = drawing.chance
    rank = chance.choice((2, 2, 3, 3, 4, 4))
    sizes = [BATCH, *(drawing.size() for _ in range(rank - 1))]
    if chance.random() < 0.2:
        chance.shuffle(sizes)
    start = _start(sizes)
    drawing.add(start)
    steps = chance.randint(2, MOST_STEPS)
    for _ in range(4 * steps):
        if len(drawing.drawn.steps) >= steps:
            break
        weights = [weight for weight, _ in FAMILIES]
        drawing.add(chance.choices([family for _, family in FAMILIES], weights)[0])
    for count in range(len(drawing.drawn.steps), 0, -1):
        finished = _returned(replace(drawing.drawn, steps=drawing.drawn.steps[:count]), chance)
        if finished.outputs and is_computed(finished):
            return finished
    return drawn(seed + 1_000_003)


def _returned(drawn, chance):
    """Return a program that returns what it does not use itself, some of the rest, and seldom an
    input.
    """
    made = [name for step in drawn.steps for name in step.results]
    used = {value for step in drawn.steps for value in step.values}
    ends = [name for name in made if name not in used] or made[-1:]
    more = [name for name in made if name in used and chance.random() < 0.25]
    same = [one.name for one in drawn.inputs if one.name in used and chance.random() < 0.04]
    taken = {*used, *ends, *more, *same}
    kept = tuple(one for one in drawn.inputs if one.name in taken)
    return replace(drawn, inputs=kept, outputs=(*ends, *more, *same))


def _start(sizes):
    def make(d):
        name = d.new(sizes)
        return (
            Step(
                (d.name(),),
                (name,),
                d.chance.choice(("{0} * 1.5", "{0} + 1", "{0}.clone()", "{0}.contiguous()")),
            ),
            True,
        )

    return make


def _one(d, values, text, *, exact=False):
    return Step((d.name(),), tuple(values), text), exact


def _axis(d, tensor):
    if not tensor.dim():
        raise LookupError
    return d.chance.randrange(-tensor.dim(), tensor.dim())


def pointwise(d):
    x = d.pick()
    text = d.chance.choice(
        (
            "torch.tanh({0})",
            "torch.sigmoid({0})",
            "F.gelu({0})",
            "F.gelu({0}, approximate='tanh')",
            "F.silu({0})",
            "F.relu({0})",
            "torch.exp(-{0}.abs())",
            "{0} * 0.5 + 1",
            "{0}.sin()",
            "F.softplus({0})",
            "{0}.clamp(-1, 1.5)",
            "F.leaky_relu({0}, 0.1)",
            "torch.erf({0})",
            "torch.rsqrt({0} * {0} + 1)",
            "{0}.square()",
            "{0} / {0}.shape[0]",
            "{0} * {0}.shape[-1] ** -0.5",
            "F.elu({0})",
            "F.hardswish({0})",
            "torch.log1p({0}.abs())",
        )
    )
    return _one(d, [x], text)


def paired(d):
    x = d.pick()
    shape = d.values[x].shape
    if d.chance.random() < 0.5:
        y = d.pick(lambda t: _fits(t.shape, shape))
    else:
        sizes = [
            1 if d.chance.random() < 0.2 else s for s in shape[d.chance.randint(0, len(shape)) :]
        ]
        y = d.new(sizes)  # of the program's own dtype: another one is promoted
    text = d.chance.choice(
        (
            "{0} + {1}",
            "{0} * {1}",
            "{0} - {1}",
            "torch.maximum({0}, {1})",
            "{0} / ({1}.abs() + 1)",
            "torch.addcmul({0}, {1}, {1}, value=0.5)",
            "torch.lerp({0}, {1}.to({0}.dtype), 0.25)",
        )
    )
    return _one(d, [x, y], text)


def _fits(one, other):
    try:
        return torch.broadcast_shapes(one, other) == torch.Size(other)
    except RuntimeError:
        return False


def converted(d):
    x = d.pick()
    return _one(
        d, [x], f"{{0}}.to(torch.{d.chance.choice(('bfloat16', 'float16', 'float32', 'float64'))})"
    )


def viewed(d):
    x = d.pick(lambda t: t.dim() > 0)
    t = d.values[x]
    axis, other = _axis(d, t), _axis(d, t)
    order = d.chance.sample(range(t.dim()), t.dim())
    text = d.chance.choice(
        (
            f"{{0}}.transpose({axis}, {other})",
            f"{{0}}.permute({order})",
            "{0}.flatten()",
            "{0}.reshape(-1)",
            f"{{0}}.unsqueeze({axis})",
            f"{{0}}.narrow({axis}, 0, 1)",
            f"{{0}}.select({axis}, 0)",
            f"{{0}}.flip({axis})",
            f"{{0}}.roll(1, {axis})",
            "{0}.contiguous()",
            "{0}.clone()",
            "{0}[..., ::2]",
            "{0}[1:]",
            "{0}[:, None]",
            "{0}.unsqueeze(0).expand(2, " + ", ".join(["-1"] * t.dim()) + ")",
            "{0}.mT" if t.dim() > 1 else "{0}[::2]",
            "{0}.reshape({0}.shape[0], -1)",
            "{0}.flatten(0, 1)" if t.dim() > 1 else "{0}.view(-1, 1)",
            "{0}.diagonal()" if t.dim() > 1 else "{0}.unfold(0, 1, 1)",
            "{0}.view(*{0}.shape, 1)",
            "{0}.repeat_interleave(2, 0)",
            "{0}.movedim(0, -1)",
            "{0}.transpose(0, -1).contiguous()",
        )
    )
    return _one(d, [x], text, exact=True)


def parts(d):
    x = d.pick(lambda t: t.dim() > 0 and max(t.shape) > 1)
    t = d.values[x]
    axis = d.chance.choice([n for n in range(t.dim()) if t.shape[n] > 1])
    size = t.shape[axis]
    way = d.chance.choice(("chunk", "split", "unbind", "sizes"))
    one, other = d.name(), d.name()
    if way == "unbind" and size <= 4:
        return Step((one,), (x,), f"{{0}}.unbind({axis})[1]"), True
    if way == "sizes":
        return Step((one, other), (x,), f"{{0}}.split([1, {{0}}.shape[{axis}] - 1], {axis})"), True
    if way == "chunk":
        return Step((one, other), (x,), f"{{0}}.chunk(2, {axis})"), True
    return Step((one,), (x,), f"{{0}}.split({max(1, size // 2)}, {axis})[0]"), True


def joined(d):
    x = d.pick(lambda t: t.dim() > 0)
    shape, axis = d.values[x].shape, _axis(d, d.values[x])
    y = d.pick(lambda t: t.shape == shape) if d.chance.random() < 0.6 else d.new(shape)
    text = d.chance.choice(
        (
            f"torch.cat([{{0}}, {{1}}], {axis})",
            f"torch.stack([{{1}}, {{0}}], {axis})",
            f"torch.cat([{{0}}, {{0}}, {{1}}], {axis})",
        )
    )
    return _one(d, [x, y], text, exact=True)


def products(d):
    way = d.chance.choice(
        ("mm", "linear", "linear", "addmm", "bmm", "einsum", "self", "batched", "mv", "baddbmm")
    )
    n = d.size()
    if way in {"linear", "batched", "einsum"} or way == "mv":
        x = d.pick(lambda t: t.dim() >= 2)
        k = d.values[x].shape[-1]
        if way == "linear":
            values = [x, d.like(x, (n, k))]
            if d.chance.random() < 0.6:
                return _one(d, [*values, d.like(x, (n,))], "F.linear({0}, {1}, {2})")
            return _one(d, values, "F.linear({0}, {1})")
        if way == "mv":
            return _one(d, [x, d.like(x, (k,))], "{0} @ {1}")
        if way == "einsum":
            text = d.chance.choice(
                (
                    "torch.einsum('...k,nk->...n', {0}, {1})",
                    "torch.einsum('...k,nk->n...', {0}, {1})",
                )
            )
            return _one(d, [x, d.like(x, (n, k))], text)
        return _one(d, [x, d.like(x, (k, n))], "{0} @ {1}")
    if way in {"mm", "addmm"}:
        x = d.pick(lambda t: t.dim() == 2)
        k = d.values[x].shape[-1]
        w = d.like(x, (k, n))
        if way == "mm":
            return _one(
                d, [x, w], d.chance.choice(("torch.mm({0}, {1})", "torch.mm({1}.t(), {0}.t())"))
            )
        bias = d.like(x, d.chance.choice(((n,), (1, n), (d.values[x].shape[0], n))))
        return _one(
            d,
            [bias, x, w],
            f"torch.addmm({{0}}, {{1}}, {{2}}, beta={d.chance.choice((1, 0.5))},"
            f" alpha={d.chance.choice((1, 2))})",
        )
    if way == "self":
        x = d.pick(lambda t: t.dim() >= 2)
        return _one(d, [x], d.chance.choice(("({0} @ {0}.mT) * 0.1", "({0}.mT @ {0}) * 0.1")))
    x = d.pick(lambda t: t.dim() == 3)
    b, m, k = d.values[x].shape
    w = d.like(x, (b, k, n))
    if way == "baddbmm":
        return _one(d, [d.like(x, (b, m, n)), x, w], "torch.baddbmm({0}, {1}, {2}, alpha=0.5)")
    return _one(d, [x, w], "torch.bmm({0}, {1})")


def convolutions(d):
    way = d.chance.choice(("1d", "2d", "2d", "transposed"))
    rank = 3 if way == "1d" else 4
    x = d.pick(lambda t: t.dim() == rank and min(t.shape[2:]) >= 2)
    channels = d.values[x].shape[1]
    groups = d.chance.choice([g for g in (1, 1, 2, channels) if channels % g == 0])
    out = groups * d.chance.choice((1, 2, 3))
    kernel = [d.chance.choice((1, 2, 3)) for _ in range(rank - 2)]
    stride, padding = d.chance.choice((1, 1, 2)), d.chance.choice((0, 1))
    more = f"stride={stride}, padding={padding}, groups={groups}"
    if way == "transposed":
        w = d.like(x, (channels, out // groups, *kernel))
        return _one(d, [x, w], f"F.conv_transpose{rank - 2}d({{0}}, {{1}}, {more})")
    if d.chance.random() < 0.3:
        more += ", dilation=2"
    w = d.like(x, (out, channels // groups, *kernel))
    if d.chance.random() < 0.5:
        return _one(d, [x, w, d.like(x, (out,))], f"F.conv{rank - 2}d({{0}}, {{1}}, {{2}}, {more})")
    return _one(d, [x, w], f"F.conv{rank - 2}d({{0}}, {{1}}, {more})")


def attention(d):
    way = d.chance.choice(("heads", "plain", "mask", "causal", "gqa", "boolean"))
    x = d.pick(lambda t: t.dim() in {3, 4} and min(t.shape) > 0)
    t = d.values[x]
    if t.dim() == 3:
        heads = d.chance.choice([h for h in (1, 2, 4) if t.shape[-1] % h == 0])
        # As models have it: one product for three, cut into heads.
        w = d.like(x, (3 * t.shape[-1], t.shape[-1]))
        split = f".unflatten(-1, (3, {heads}, -1)).permute(2, 0, 3, 1, 4)"
        return _one(
            d,
            [x, w],
            f"F.scaled_dot_product_attention(*F.linear({{0}}, {{1}}){split},"
            f" is_causal={way == 'causal'}).transpose(1, 2).flatten(2)",
        )
    b, h, s, e = t.shape
    keys = s if way == "causal" else d.chance.choice((s, d.size()))
    groups = d.chance.choice([g for g in (1, 2) if h % g == 0]) if way == "gqa" else h
    k, v = d.like(x, (b, groups, keys, e)), d.like(x, (b, groups, keys, d.chance.choice((e, e, 8))))
    more = {
        "causal": ", is_causal=True",
        "gqa": ", enable_gqa=True",
    }.get(way, "")
    values = [x, k, v]
    if way == "mask":
        values.append(d.like(x, d.chance.choice(((s, keys), (b, 1, s, keys), (1, h, 1, keys)))))
        more = ", attn_mask={3}"
    elif way == "boolean":
        values.append(d.new((s, keys), kind="mask"))
        more = ", attn_mask={3} | (torch.arange({1}.shape[2], device={1}.device) == 0)"
    return _one(d, values, f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}{more})")


def sorted_values(d):
    x = d.pick(lambda t: t.dim() > 0 and t.numel() > 0, exact=True)
    t = d.values[x]
    axis = _axis(d, t)
    k = d.chance.randint(1, t.shape[axis])
    text = d.chance.choice(
        (
            f"{{0}}.sort(dim={axis}, stable=True)[0]",
            f"{{0}}.sort(dim={axis}, descending=True, stable=True)[1]",
            # Which of equal elements, as of an expanded tensor, has the gradient is said nowhere.
            f"{{0}}.detach().topk({k}, {axis})[0]",
            f"{{0}}.argsort(dim={axis}, stable=True)",
            f"{{0}}.cumsum({axis})",
            f"{{0}}.argmax({axis})",
            f"{{0}}.amax({axis})",
            f"{{0}}.max({axis})[0]",
            f"{{0}}.min({axis})[1]",
            # Not of the tensor itself: of an expanded one torch's kernel for the CPU gives another
            # result each time.
            f"({{0}} + 0).median({axis})[0]",
            "({0} > 0).to({0}.dtype)",
            "{0}.round()",
            f"{{0}}.cumprod({axis})",
            f"{{0}}.logcumsumexp({axis})",
        )
    )
    return _one(d, [x], text, exact="cum" not in text)


def reduced(d):
    x = d.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    axis = _axis(d, d.values[x])
    keep = d.chance.choice(("", ", keepdim=True"))
    text = d.chance.choice(
        (
            f"{{0}}.sum({axis}{keep})",
            f"{{0}}.mean({axis}{keep})",
            f"{{0}}.softmax({axis})",
            f"{{0}}.log_softmax({axis})",
            f"{{0}}.var({axis}, correction=0{keep})",
            f"{{0}}.logsumexp({axis}{keep})",
            f"{{0}}.norm(dim={axis}{keep})",
            "{0}.mean()",
            f"F.normalize({{0}}, dim={axis})",
            f"{{0}} - {{0}}.mean({axis}, keepdim=True)",
            f"({{0}} + 2).cumsum({axis})",
        )
    )
    return _one(d, [x], text)


def norms(d):
    x = d.pick(lambda t: t.dim() >= 2 and min(t.shape) > 0)
    t = d.values[x]
    # With gradients, weights that are not dense crash torch's own group_norm for the CPU.
    layout = d.chance.choice(("contiguous", "offset")) if d.drawn.backward else None
    way = d.chance.choice(("layer", "layer", "group", "batch", "batch eval", "rms", "turned"))
    if way == "turned":  # as ConvNeXt has it
        w, bias = d.like(x, (t.shape[1],), layout=layout), d.like(x, (t.shape[1],), layout=layout)
        return _one(
            d,
            [x, w, bias],
            "F.layer_norm({0}.transpose(1, -1), [{0}.shape[1]], {1}, {2}).transpose(1, -1)",
        )
    if way == "layer":
        w, bias = d.like(x, (t.shape[-1],), layout=layout), d.like(x, (t.shape[-1],), layout=layout)
        return _one(d, [x, w, bias], "F.layer_norm({0}, [{0}.shape[-1]], {1}, {2})")
    if way == "rms":
        return _one(
            d,
            [x, d.like(x, (t.shape[-1],), layout=layout)],
            "F.rms_norm({0}, [{0}.shape[-1]], {1}, 1e-5)",
        )
    channels = t.shape[1]
    if way.startswith("batch"):  # cuDNN, which torch calls, faults at a weight of odd alignment
        layout = "contiguous"
    w, bias = d.like(x, (channels,), layout=layout), d.like(x, (channels,), layout=layout)
    if way == "group":
        groups = d.chance.choice([g for g in (1, 2, channels) if channels % g == 0])
        # torch's own kernel for the CPU crashes when it computes the gradients of weights alone of
        # an input whose channels are innermost.
        crashes = d.drawn.backward and not t.is_contiguous()
        dense = ".contiguous()" if crashes else ""
        return _one(d, [x, w, bias], f"F.group_norm({{0}}{dense}, {groups}, {{1}}, {{2}})")
    mean, var = (
        d.like(x, (channels,), grad=False, layout="contiguous"),
        d.like(x, (channels,), kind="positive", grad=False, layout="contiguous"),
    )
    return _one(
        d,
        [x, mean, var, w, bias],
        f"F.batch_norm({{0}}, {{1}}, {{2}}, {{3}}, {{4}}, training={way == 'batch'})",
    )


def pools(d):
    x = d.pick(lambda t: t.dim() in {3, 4} and min(t.shape[2:]) >= 2)
    n = d.values[x].dim() - 2
    text = d.chance.choice(
        (
            f"F.avg_pool{n}d({{0}}, 2)",
            f"F.avg_pool{n}d({{0}}, 2, stride=1, padding=1)",
            f"F.adaptive_avg_pool{n}d({{0}}, 1)",
            f"F.adaptive_avg_pool{n}d({{0}}, 3)",
            "F.interpolate({0}, scale_factor=2)",
            *(
                [f"F.max_pool{n}d({{0}}, 2)", f"F.max_pool{n}d({{0}}, 3, stride=2, padding=1)"]
                if x in d.exact
                else []
            ),
            *(
                ["F.interpolate({0}, scale_factor=2, mode='bilinear')", "F.pixel_unshuffle({0}, 2)"]
                if n == 2
                else []
            ),
        )
    )
    return _one(d, [x], text)


def padded(d):
    x = d.pick(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = d.values[x]
    texts = ["F.pad({0}, (1, 2))", "F.pad({0}, (0, 1), value=0.5)", "F.pad({0}, (-1, 1))"]
    if t.dim() in {2, 3} and t.shape[-1] > 1:
        texts += [
            "F.pad({0}, (1, 1), mode='reflect')",
            "F.pad({0}, (1, 2), mode='replicate')",
            "F.pad({0}, (1, 1), mode='circular')",
        ]
    if t.dim() == 4:
        texts += ["F.pad({0}, (1, 0, 0, 2))", "F.pad({0}, (1, 1, 1, 1), mode='replicate')"]
    return _one(d, [x], d.chance.choice(texts), exact=True)


def indexed(d):
    x = d.pick(lambda t: t.dim() > 0 and min(t.shape) > 0 and BATCH not in t.shape[:0])
    t = d.values[x]
    axes = [n for n in range(t.dim()) if t.shape[n] != BATCH]
    axis = d.chance.choice(axes) if axes else 0
    if t.shape[axis] == BATCH and d.drawn.dynamic:
        raise LookupError
    count, high = d.size(), t.shape[axis]
    way = d.chance.choice(
        (
            "select",
            "gather",
            "scatter_add",
            "embedding",
            "index",
            "index_add",
            "index_put",
            "cross_entropy",
            "masked_fill",
            "where",
            "tril",
        )
    )
    if way == "gather":
        shape = [*t.shape]
        shape[axis] = count
        return _one(
            d,
            [x, d.new(shape, kind="index", high=high)],
            f"{{0}}.gather({axis}, {{1}})",
            exact=True,
        )
    if way == "scatter_add":
        index = d.new(t.shape, kind="index", high=high)
        return _one(d, [x, index, d.like(x)], f"{{0}}.scatter_add({axis}, {{1}}, {{2}})")
    if way == "embedding":
        w = d.new((d.chance.choice((3, 9)), d.size()))
        index = d.new((BATCH, d.size()), kind="index", high=3, dtype="int64")
        return _one(d, [index, w], "F.embedding({0}, {1})")
    if way == "cross_entropy":
        if t.dim() != 2:
            raise LookupError
        return _one(
            d, [x, d.new((t.shape[0],), kind="index", high=t.shape[1])], "F.cross_entropy({0}, {1})"
        )
    if way in {"masked_fill", "where"}:
        mask = d.new(t.shape[d.chance.randint(0, t.dim() - 1) :], kind="mask")
        text = (
            "{0}.masked_fill({1}, 0.25)"
            if way == "masked_fill"
            else "torch.where({1}, {0}, {0} * 2)"
        )
        return _one(d, [x, mask], text)
    if way == "tril":
        if t.dim() < 2:
            raise LookupError
        return _one(d, [x], d.chance.choice(("{0}.tril()", "{0}.triu(1)")), exact=True)
    index = d.new((count,), kind="index", high=high)
    if way == "select":
        return _one(d, [x, index], f"{{0}}.index_select({axis}, {{1}})", exact=True)
    everything = ":, " * axis
    if way == "index":
        return _one(d, [x, index], f"{{0}}[{everything}{{1}}]", exact=True)
    shape = [*t.shape]
    shape[axis] = count
    if way == "index_add":
        return _one(d, [x, index, d.like(x, shape)], f"{{0}}.index_add({axis}, {{1}}, {{2}})")
    return _one(d, [x, index], f"{{0}}.index_fill({axis}, {{1}}, 0.5)", exact=True)


def changed(d):
    """Change a value, an input without a gradient, or a view of one, in place."""
    inputs_without = [
        one.name
        for one in d.drawn.inputs
        if not one.grad and one.kind == "number" and one.layout != "expanded"
    ]
    x = d.pick(lambda t: t.numel() > 0)
    if d.chance.random() < 0.3 and inputs_without:
        x = d.chance.choice(inputs_without)
    if x.startswith("x") and x not in inputs_without:
        raise LookupError
    t = d.values[x]
    seen = d.chance.choice(
        (
            "{0}",
            "{0}",
            "{0}[1:]",
            "{0}[..., :1]",
            "{0}.view(-1)",
            "{0}.transpose(0, -1)",
            "{0}[..., ::2]",
        )
    )
    text = d.chance.choice(
        (
            ".add_(1)",
            ".mul_(0.5)",
            ".relu_()",
            ".tanh_()",
            ".fill_(0.5)",
            ".clamp_(-1, 1)",
            ".zero_()",
            ".add_({1})",
            ".copy_({1})",
            ".mul_({1})",
        )
    )
    values = [x]
    if "{1}" in text:
        values.append(d.pick(lambda o: _fits(o.shape, t.shape)) if seen == "{0}" else d.new((1,)))
    if not t.dim():
        seen = "{0}"
    return Step((), tuple(values), seen + text), False


#: How often each family is drawn, and what draws one of its operators.
FAMILIES = (
    (3, pointwise),
    (3, paired),
    (1, converted),
    (4, viewed),
    (2, parts),
    (2, joined),
    (4, products),
    (7, convolutions),
    (5, attention),
    (5, sorted_values),
    (2, reduced),
    (4, norms),
    (4, pools),
    (2, padded),
    (5, indexed),
    (3, changed),
)


# ---------------------------------------------------------------------------------------- shrinking


def smaller(drawn, fails, *, tries=80):
    """Return the smallest program found, by taking away outputs, steps, switches and layouts, for
    which `fails` still holds.
    """
    left, changed_ = tries, True
    while changed_ and left > 0:
        changed_ = False
        for candidate in _candidates(drawn):
            if not candidate.outputs or not is_computed(candidate):
                continue
            left -= 1
            if left < 0:
                break
            if fails(candidate):
                drawn, changed_ = candidate, True
                break
    return drawn


def _candidates(drawn):
    if len(drawn.outputs) > 1:
        for output in drawn.outputs:
            yield _needed(replace(drawn, outputs=(output,)))
    for place in range(len(drawn.steps) - 1, -1, -1):
        yield from _without(drawn, place)
    for switch in ("backward", "dynamic", "expanded_tangents"):
        if getattr(drawn, switch):
            yield replace(drawn, **{switch: False})
    for place, given in enumerate(drawn.inputs):
        for less in ({"layout": "contiguous"}, {"grad": False}, {"dtype": "float32"}):
            simpler = replace(given, **less)
            if simpler != given:
                yield replace(
                    drawn, inputs=(*drawn.inputs[:place], simpler, *drawn.inputs[place + 1 :])
                )


def _needed(drawn):
    """Return a program without the lines and inputs that its outputs do not need; changes in place
    stay.
    """
    needed, steps = set(drawn.outputs), []
    for step in reversed(drawn.steps):
        if not step.results or needed & set(step.results):
            needed |= set(step.values)
            steps.append(step)
    inputs_ = tuple(given for given in drawn.inputs if given.name in needed)
    return replace(drawn, steps=tuple(steps[::-1]), inputs=inputs_)


def _without(drawn, place):
    """Yield programs without one line: with a value that it takes in place of its result."""
    step = drawn.steps[place]
    rest = (*drawn.steps[:place], *drawn.steps[place + 1 :])
    if not step.results:
        yield _needed(replace(drawn, steps=rest))
    for value in step.values if step.results else ():
        for result in step.results:
            names = {result: value}
            steps = tuple(replace(s, values=tuple(names.get(v, v) for v in s.values)) for s in rest)
            kept = dict.fromkeys(names.get(name, name) for name in drawn.outputs)
            made = {given.name for given in drawn.inputs} | {r for s in steps for r in s.results}
            outputs = tuple(name for name in kept if name in made)
            yield _needed(replace(drawn, steps=steps, outputs=outputs))

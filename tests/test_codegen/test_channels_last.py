# SPDX-License-Identifier: Apache-2.0
"""Convolutions run channels last where that is faster, and nothing is converted between them; what
numbers and results are then, `test_layouts` compares.
"""

import json
import math

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from bundler.codegen.channels_last import CALLERS_RESULTS  # noqa: E402
from bundler.codegen.program import generate, program_of_graph  # noqa: E402
from bundler.runtime.program.program_plan import Allocate, Launch, OperatorStep  # noqa: E402

CONVOLUTION = "aten.convolution.default"


class Network(torch.nn.Module):
    """The beginning of a residual network, with a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = convolution(3, 72, 7, stride=2), convolution(72, 72, 3, padding=1)
        self.each = convolution(72, 72, 3, padding=1, groups=72)
        self.last = torch.nn.Conv2d(72, 144, 1)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(72) for _ in range(3))
        self.head = torch.nn.Linear(144, 10)

    def forward(self, x):
        x = F.max_pool2d(self.norms[0](self.first(x)).relu(), 3, 2, 1)
        y = self.norms[1](self.second(x)).relu()
        y = (self.norms[2](self.each(y)) + x).relu()
        return self.head(self.last(y).relu().mean((2, 3)))


def convolution(inputs, outputs, size, **options):
    return torch.nn.Conv2d(inputs, outputs, size, bias=False, **options)


def steps_of(function, *inputs, device="cuda", **options):
    with torch.no_grad():
        return generate(function, inputs, device=device, **options).plan.steps


def operators(steps, name=CONVOLUTION):
    return [step for step in steps if isinstance(step, OperatorStep) and step.operator == name]


def are_channels_last(spec):
    channels, height, width = spec.sizes[1:]
    assert math.prod((channels, height, width)) > channels > 1
    return spec.strides == (channels * height * width, 1, width * channels, channels)


def copies(steps):
    """Return the kernels that compute nothing."""
    return [step.kernel for step in steps if isinstance(step, Launch) and "nothing" in step.kernel]


@pytest.mark.parametrize("device", ["cuda", None])
def test_convolutions_are_channels_last_and_nothing_is_converted_between_them(device):
    """The image and the weights are converted, unless they have one pixel or one channel: as
    Inductor does. Norms, pools and sums around the convolutions are stored in channels last.
    """
    steps = steps_of(Network().eval(), torch.ones(2, 3, 64, 64), device=device)
    found = operators(steps)
    assert [are_channels_last(step.results[0]) for step in found] == [True] * 4
    assert len(copies(steps)) == len(["x", "weight of first", "weight of second"])
    stored = [step.spec for step in steps if hasattr(step, "spec") and len(step.spec.sizes) == 4]
    assert stored
    assert all(are_channels_last(spec) for spec in stored)
    # No tensor is seen in another way than it was made, which would take a view in each call.
    given = [one["spec"] for step in found for one in step.arguments if isinstance(one, dict)]
    assert set(given) == {None}


def test_a_kernel_adds_the_bias():
    """torch would add it behind cuDNN's convolution, by a kernel of its own."""
    (call,) = operators(steps_of(torch.nn.Conv2d(8, 8, 1), torch.ones(2, 8, 4, 4)))
    assert call.arguments[2] is None
    (call,) = operators(steps_of(torch.nn.Conv2d(8, 8, 1), torch.ones(2, 8, 4, 4), device="cpu"))
    assert call.arguments[2] is not None


def of_pixels(dtype=torch.bfloat16, channels=16, size=1, device="cuda", **options):
    """Return the operators that a convolution of half of the channels and one behind it call."""

    def function(x, weight):
        return F.conv2d(F.conv2d(x, weight, **options).relu(), weight, **options)

    weight = torch.ones(channels, channels // options.get("groups", 1), size, size, dtype=dtype)
    given = torch.ones(2, channels, 8, 8, dtype=dtype)
    steps = steps_of(function, given, weight, device=device)
    return [step for step in steps if isinstance(step, OperatorStep)], steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_windows_of_one_pixel_are_products_of_what_lies_there_already(dtype):
    """Rows of pixels are the images themselves: the first are converted, and nothing is between a
    product and the next but what is computed.
    """
    (first, second), steps = of_pixels(dtype)
    assert {first.operator, second.operator} == {"aten.mm.default"}
    rows, factor = (one["spec"] for one in first.arguments)
    assert (rows["sizes"], rows["strides"]) == ((128, 16), (16, 1))
    assert (factor["sizes"], factor["strides"]) == ((16, 16), (1, 16))
    assert second.arguments == (
        {"buffer": second.arguments[0]["buffer"], "spec": None},
        first.arguments[1],
    )
    # The images are converted, the first result is rectified where it lies, the last is converted.
    assert sum(isinstance(step, Launch) for step in steps) == 3


def test_gates_of_a_few_channels_are_products_however_uneven():
    """One pixel an image is nothing to read; of whole images uneven rows are read slowly."""
    steps = steps_of(F.conv2d, *(torch.ones(8, 6, 1, 1).bfloat16() for _ in range(2)))
    assert [one.operator for one in steps if isinstance(one, OperatorStep)] == ["aten.mm.default"]


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": torch.float32},
        {"channels": 12},
        {"size": 3, "padding": 1},
        {"groups": 2},
        {"padding": 1},
        {"stride": 2},
    ],
    ids=str,
)
def test_other_convolutions_stay(asked):
    """float32 has a precision of its own in cuDNN, and cuBLAS reads uneven rows slowly."""
    steps, _ = of_pixels(**asked)
    assert [step.operator for step in steps] == [CONVOLUTION] * 2


def test_images_of_one_channel_are_told_to_lie_in_channels_last():
    """Their strides in rows are those in channels last, so that cuDNN would return rows."""
    (call,) = operators(steps_of(convolution(1, 8, 3), torch.ones(2, 1, 9, 9)))
    assert call.arguments[0]["spec"]["strides"] == (81, 1, 9, 1)
    assert are_channels_last(call.results[0])


def test_other_operators_are_given_what_torch_traced():
    """An operator that is called may read strides, so it gets a copy in the traced ones; the
    convolution behind it still reads channels last.
    """

    def function(x, weight):
        y = F.conv2d(x, weight, padding=1)
        sums = torch.cumsum(y, 0), F.adaptive_max_pool2d(y, 3)[0]
        return *sums, F.conv2d(y, weight)

    steps = steps_of(function, torch.ones(2, 8, 7, 5), torch.ones(8, 8, 3, 3))
    first, second = operators(steps)
    (pool,) = operators(steps, "aten.adaptive_max_pool2d.default")
    made = {step.name: step.spec for step in steps if hasattr(step, "spec")}
    assert made[pool.arguments[0]["buffer"]].strides == (280, 35, 5, 1)
    assert second.arguments[0] == {"buffer": first.outputs[0], "spec": None}


def test_parts_of_channels_are_converted_once():
    """A part of the channels has a stride of all; two convolutions read one copy of it."""

    def function(x, weight, other):
        part = x[:, :4]
        return F.conv2d(part, weight), F.conv2d(part, other)

    given = torch.ones(2, 8, 7, 5).contiguous(memory_format=torch.channels_last)
    steps = steps_of(function, given, torch.ones(8, 4, 1, 1), torch.ones(8, 4, 1, 1))
    one, other = operators(steps)
    assert one.arguments[0] == other.arguments[0]
    # One kernel copies the part, and two convert the results.
    assert sum(isinstance(step, Launch) for step in steps) == 3


def attention_behind_patches(x, weight, other):
    """A convolution cuts patches, heads attend to each other, and a convolution follows."""
    rows = F.conv2d(x, weight, stride=4).flatten(2).transpose(1, 2)
    heads = rows.unflatten(-1, (4, 16)).transpose(1, 2)
    heads = (heads * 2).relu() + heads.flip(0).exp()
    scores = heads @ (heads * 3).transpose(2, 3)
    found = (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2).transpose(1, 2)
    return F.conv2d(found.unflatten(-1, (4, 4)), other, padding=1)


def test_four_dimensions_that_are_no_image_stay_as_they_are():
    """Heads between two convolutions are stored as torch has them: each head's numbers together."""
    given = torch.ones(2, 3, 16, 16), torch.ones(64, 3, 4, 4), torch.ones(64, 64, 3, 3)
    steps = steps_of(attention_behind_patches, *given)
    heads = [step.spec for step in steps if getattr(step, "spec", None)]
    heads = [spec for spec in heads if spec.sizes == (2, 4, 16, 16)]
    assert len(heads) == 2  # the softmax is written over its scores
    assert {spec.strides[1] for spec in heads} == {16 * 16}


def test_images_that_no_kernel_lays_out_stay_as_they_are():
    """Images of integers, which torch convolves on the host alone."""
    given = (torch.ones(size, dtype=torch.int32) for size in ((2, 8, 7, 5), (8, 8, 3, 3)))
    (call,) = operators(steps_of(F.conv2d, *given))
    assert call.results[0].strides == (120, 15, 3, 1)


def test_a_convolution_on_the_host_is_as_torch_has_it():
    """Beside a program's device no kernel lays anything out."""
    wide = torch.ones(8, 8, 3, 3)
    function = lambda x, w: F.conv2d(F.conv2d(x, w).cpu(), w.cpu())  # noqa: E731
    first, second = operators(steps_of(function, torch.ones(2, 8, 7, 5), wide))
    assert are_channels_last(first.results[0])
    assert second.results[0].device == "host"
    assert second.results[0].strides == (24, 3, 1, 1)


def is_channels_last(*inputs, function=F.conv2d, **options):
    return is_laid_out(operators(steps_of(function, *inputs, **options)))


def is_laid_out(convolutions):
    (step,) = convolutions
    return are_channels_last(step.results[0])


def test_a_view_in_another_order_ends_what_lies_in_channels_last():
    """The second dimension of a permuted image is its height, which nobody wants innermost."""

    def function(x, weight):
        y = F.conv2d(x, weight).permute(0, 2, 3, 1)
        # So much that some of it is stored.
        for _ in range(40):
            y = y.sin() + 1
        return y.flip(1) + y

    steps = steps_of(function, torch.ones(2, 8, 7, 5), torch.ones(8, 8, 1, 1))
    assert is_laid_out(operators(steps))
    stored = [step.spec for step in steps if getattr(step, "spec", None)]
    stored = [spec.strides for spec in stored if spec.sizes == (2, 7, 5, 8)]
    # The result is as torch has it; what is stored before takes the convolution's memory.
    assert stored == [(280, 5, 1, 35)]


@pytest.mark.parametrize(
    ("images", "weight", "groups", "expected"),
    [
        ((2, 128, 8, 8), (128, 128, 3, 3), 1, True),
        ((2, 128, 8, 8), (128, 1, 3, 3), 128, True),
        ((2, 128, 8, 8), (128, 64, 3, 3), 2, False),
        ((2, 128, 8, 8), (32, 128, 3, 3), 1, True),
        ((2, 16, 8, 8), (16, 16, 3, 3), 1, True),
    ],
)
def test_inference_follows_inductors_rules(images, weight, groups, expected):
    """Groups of several channels are slower in channels last, all other convolutions are faster."""
    function = lambda x, w: F.conv2d(x, w, groups=groups)  # noqa: E731
    given = torch.ones(images), torch.ones(weight)
    assert is_channels_last(*given, function=function) is expected


@pytest.mark.parametrize(
    ("images", "weight", "groups", "expected"),
    [
        ((2, 128, 8, 8), (128, 128, 3, 3), 1, True),
        ((2, 128, 8, 8), (128, 1, 3, 3), 128, True),
        ((2, 128, 8, 8), (128, 64, 3, 3), 2, False),
        ((2, 128, 8, 8), (32, 128, 3, 3), 1, False),
        ((2, 16, 8, 8), (16, 16, 3, 3), 1, False),
    ],
)
def test_training_follows_inductors_rules(images, weight, groups, expected):
    """A backward step is slower for groups of several channels, where channels get fewer, and for
    few channels.
    """

    def function(x, w):
        made, backward = torch.func.vjp(lambda x, w: F.conv2d(x, w, groups=groups), x, w)
        return made, *backward(torch.ones_like(made))

    steps = steps_of(function, torch.ones(images), torch.ones(weight), device=None)
    backward = operators(steps, "aten.convolution_backward.default")
    specs = [spec for step in operators(steps) + backward for spec in step.results if spec]
    if weight[1] > 1:
        assert {are_channels_last(spec) for spec in specs} == {expected}
    else:
        assert are_channels_last(specs[0]) is expected


def test_sequences_are_put_in_rows_once():
    """torch copies a permuted sequence in front of each convolution, by a slower kernel; of images
    it copies none.
    """

    def function(x, *weights):
        turned = (x + 1).transpose(1, 2)
        return [F.conv1d(turned, weight, groups=4) for weight in weights]

    weights = [torch.ones(16, 4, 1) for _ in range(3)]
    steps = steps_of(function, torch.ones(2, 10, 16), *weights)
    given = [call.arguments[0] for call in operators(steps)]
    assert [one["spec"] for one in given] == [None] * 3
    assert len({one["buffer"] for one in given}) == 1
    (made,) = {one.name: one for one in steps if isinstance(one, Allocate)}.values()
    assert made.spec.strides == (160, 10, 1)
    assert len([one for one in steps if isinstance(one, Launch)]) == 1


def test_sizes_that_change_are_left_as_they_are():
    """Inductor found that channels last may be slower then."""
    given = torch.ones(3, 128, 8, 8), torch.ones(128, 128, 3, 3)
    (call,) = operators(steps_of(F.conv2d, *given, device="cpu", dynamic=True))
    assert call.results[0].strides[1] != 1


def test_few_convolutions_among_many_operators_are_left_as_they_are():
    """As Inductor does: what a transformer has behind its only convolution decides."""

    def function(x, w):
        y = F.conv2d(x, w)
        for number in range(300):
            y = y.sin() + number
        return y

    assert not is_channels_last(
        torch.ones(2, 16, 4, 4), torch.ones(16, 16, 1, 1), function=function
    )


@pytest.mark.parametrize("seen", [1, 3])
def test_what_is_converted_is_saved_as_it_was_converted(seen):
    """Backward is given images and weight as forward's convolution was, who called forward gets
    back what it passed.
    """

    def function(x, w):
        return F.conv2d(x, w, stride=2), x, w

    graph = make_fx(function, tracing_mode="fake")(
        torch.ones(2, 128, 9, 9), torch.ones(128, 128, 3, 3)
    )
    graph.meta[CALLERS_RESULTS] = seen
    program = program_of_graph(graph, guarded=True)
    assert [strides[1] == 1 for strides in program.result_strides[1:]] == [seen == 1] * 2
    passed = [item.buffer in {"arg0", "arg1"} for item in program.plan.outputs]
    assert passed == [False, *[seen == 3] * 2]


@pytest.mark.slow
def test_backward_goes_on_in_the_layout_of_forward(interpreted, tmp_path):
    """What forward saves lies in channels last, images and weights that it converted too, and
    backward is told so: it converts no more than their gradients.
    """
    found = json.loads(interpreted("layout_worker.py", tmp_path, "saved"))
    assert found["results that the caller sees"] == [[1728, 24, 4, 1]]
    assert len(found["saved images"]) >= 6
    # The result is saved as the caller gets it.
    others = [item for item in found["saved images"] if item[1][1] != 1]
    assert others == [[[2, 72, 6, 4], [1728, 24, 4, 1]]]
    assert found["kernels that copy"] == {"forward": 2, "backward": 2}

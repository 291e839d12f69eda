# SPDX-License-Identifier: Apache-2.0
"""What is told of a kernel beside its text: how much memory a launch moves, and what of the user's
program it computes; and the switch for 16-bit floats in their own type.
"""

import inspect
import json
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen import schedule  # noqa: E402
from bundler.codegen.module_decorators import ModuleKernel  # noqa: E402
from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.runtime.heuristics.facts import Device  # noqa: E402

KB, HALVES = 1000, [torch.float16, torch.bfloat16]


def in_place(x, y):
    x.add_(y)
    return x * 2


@pytest.mark.parametrize(
    ("function", "sizes", "moved"),
    [
        pytest.param(lambda a: a + 1, [(KB,)], 2 * 4 * KB, id="read and written"),
        pytest.param(lambda a: a[:10] + 1, [(KB,)], 2 * 4 * 10, id="a slice"),
        pytest.param(lambda a: a[:10] + a[20:30], [(KB,)], 3 * 4 * 10, id="two slices"),
        pytest.param(lambda a, b: a * b, [(64, 32), (32,)], 4 * (2 * 2048 + 32), id="broadcast"),
        pytest.param(lambda a: a.sum(1), [(64, 32)], 4 * (2048 + 64), id="reduced"),
        pytest.param(in_place, [(32,), (32,)], 4 * (2 * 32 + 32 + 32), id="in place"),
    ],
)
def test_the_metadata_says_how_much_memory_a_launch_moves(function, sizes, moved):
    """As torch counts it: each tensor once, twice where it is changed, a slice by what is read."""
    (kernel,) = generate(function, [torch.zeros(size) for size in sizes]).kernels.values()
    (told,) = re.findall(r"'kernel_num_gb': ([^,}]+)", kernel.source)
    assert float(told) == pytest.approx(moved / 1e9)


def test_profiles_and_figures_are_told_so():
    """The tuner of a generated kernel has the number, so it counts no tensors."""
    program = generate(lambda a: a + 1, [torch.zeros(KB)])
    (module,) = program.modules.values()
    assert isinstance(module, ModuleKernel)
    assert module.on(Device("cuda", 132)).tuned.options.gigabytes == pytest.approx(8e3 / 1e9)


def test_kernels_that_move_more_are_no_other_kernels(monkeypatch):
    """Sizes that change are no part of the text: it has the number of the first launch."""
    monkeypatch.setattr(schedule, "combined", lambda groups, *_: list(groups))
    a, b = torch.zeros(1000), torch.zeros(600)
    program = generate(lambda a, b: (a + 1, b + 1), [a, b], dynamic=True)
    (kernel,) = program.kernels.values()
    assert f"'kernel_num_gb': {8e3 / 1e9!r}" in kernel.source
    assert sum(type(step).__name__ == "Launch" for step in program.plan.steps) == 2
    assert len(program.comments[kernel.name]) == 2


def normed(x, w):
    y = torch.nn.functional.layer_norm(x, (64,))
    return torch.softmax(torch.mm(y * 2, w).relu(), -1)


def test_a_comment_says_which_nodes_and_lines_a_launch_computes():
    """In the words of torch's own; what another kernel or call computes is not in it."""
    program = generate(normed, [torch.zeros(8, 64), torch.zeros(64, 32)])
    ((norm,), (soft,)) = (program.comments[name] for name in program.kernels)
    _, first = inspect.getsourcelines(normed)
    assert norm[0].startswith("# Topologically Sorted Source Nodes: [var_mean, ")
    assert "aten.rsqrt" in norm[0]
    assert "aten.amax" not in norm[0]
    assert any(f"{__file__}:{first + 1}: y = torch" in line for line in norm)
    assert not any(f":{first + 1}: " in line for line in soft)
    assert soft[0].endswith(
        "Original ATen: [aten.relu, aten.amax, aten.sub, aten.exp, aten.sum, aten.div]"
    )
    assert "#   relu => relu" in soft
    assert any("#   %relu : " in line and "target=torch.ops.aten.relu" in line for line in soft)
    assert not any("%mm :" in line for line in (*norm, *soft))
    # Equal kernels of another program have the same text.
    assert not any("Source Nodes" in source for source in program.sources.values())


@pytest.fixture(scope="module")
def told(interpreter, tmp_path_factory):
    """What the worker prints."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    worker = Path(__file__).with_name("notes_worker.py")
    done = interpreter.run(worker, environment=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_torch_compile_tells_what_the_user_called_a_value(told):
    """torch knows from which variable a node is."""
    lines = told["comments"]
    assert any(re.fullmatch(r"#   y => .*rsqrt.*", line) for line in lines)
    assert (
        "# Topologically Sorted Source Nodes: [y, mul], Original ATen:"
        " [aten.native_layer_norm, aten.mul]"
    ) in lines


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_upcasting_each_result_is_rounded_as_torch_does_it(dtype, told):
    """Equal in each bit; in float32 they are closer to the exact number, and others."""
    assert all(told["bits"][f"{dtype} False"])
    assert not any(told["bits"][f"{dtype} True"])


def test_the_other_form_of_a_reduction_computes_the_same(told):
    """Held whole, and looped over."""
    assert told["forms"] == [True] * 6


@pytest.mark.toolchain
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_upcasting_the_compiler_computes_in_16_bits(dtype):
    """It makes one 16-bit instruction of an operation and its conversions."""
    inputs = [torch.zeros(4096, dtype=dtype)] * 2
    for upcast, single in ((True, True), (False, False)):
        program = generate(
            lambda a, b: (a * b + a) * b - a,
            inputs,
            device="cuda",
            options=GenerateOptions(upcast=upcast),
        )
        bundle = program.build(["cuda:90"])
        (kernel,) = bundle.kernels
        (ptx,) = (one for one in kernel.artifacts if one.filename.endswith(".ptx"))
        found = set(re.findall(r"\b(?:fma|mul|add|sub)\.rn\.(\w+)", bundle.read(ptx).decode()))
        assert ("f32" in found, any("f16" in kind for kind in found)) == (single, not single), found

# SPDX-License-Identifier: Apache-2.0
"""Rows whose length changes from call to call: a kernel that holds them whole, and one that loops
over those that are longer than its block; each call launches the one that fits.
"""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F  # noqa: E402  # needs torch

from bundler.codegen import generate  # noqa: E402
from bundler.errors import FormatError  # noqa: E402
from bundler.runtime.launch.drivers.dry_driver import DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.device_memory import DeviceMemory  # noqa: E402
from bundler.runtime.program.program_plan import read_plan  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402

LIMIT_S = 580


def softmax(a):
    return torch.softmax(a, -1)


def made(function, *sizes):
    return generate(function, [torch.empty(sizes)], dynamic=True)


def launched(program, *sizes):
    """Return kernel and arguments of each launch of a call."""
    found = []
    runner = program.runner(
        TorchMemory(), lambda kernel, arguments, _sizes: found.append((kernel, arguments))
    )
    runner(torch.ones(sizes))
    return found


def test_a_few_lengths_have_torchs_numbers(interpreted):
    """Up to the block, one element more, and far more."""
    interpreted("changing_row_cases.py", "-k", "a_few_lengths and softmax-3")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_lengths_have_torchs_numbers(interpreted):
    """Each case of the file: any length, rows without elements, and rows in pieces."""
    interpreted("changing_row_cases.py", timeout=LIMIT_S)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 128, 5000])
def test_each_call_launches_the_kernel_that_takes_its_rows(length):
    """The block is the power of two at or above the example's length; arguments are those of the
    kernel that is launched.
    """
    program = made(softmax, 20, 50)
    ((kernel, arguments),) = launched(program, 7, length)
    assert program.kernels[kernel].text.kind == (
        "persistent_reduction" if length <= 64 else "reduction"
    )
    named = dict(zip(program.plan.kernels[kernel].parameters, arguments, strict=True))
    assert (named["xnumel"], named["r0_numel"], named["ks0"]) == (7, length, length)
    assert (tuple(named["in_ptr0"].shape), tuple(named["out_ptr0"].shape)) == ((7, length),) * 2


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (softmax, (4, 1024)),
        (lambda a: F.layer_norm(a, a.shape[1:]), (8, 16, 30)),
        (lambda a: a - a.logsumexp(-1, keepdim=True), (300, 3)),
    ],
)
def test_rows_that_are_read_again_are_held(function, sizes):
    """The kernel that holds them reads each element once."""
    program = made(function, *sizes)
    ((name, _),) = launched(program, *sizes)
    text = program.kernels[name].text
    assert (text.kind, text.counts["num_load"]) == ("persistent_reduction", 1)
    assert len(program.kernels) == 2


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda a: a.sum(-1), (20, 50)),
        (lambda a: a.argmax(-1), (20, 50)),
        (softmax, (4, 1025)),
    ],
)
def test_rows_that_are_read_once_or_long_are_looped_over(function, sizes):
    """A second kernel would gain nothing by rows that a loop reads once; the longer example is
    held by no block.
    """
    program = made(function, *sizes)
    assert [one.text.kind for one in program.kernels.values()] == ["reduction"]
    assert not any(entry.most for entry in program.plan.kernels.values())


def test_arguments_go_where_the_other_kernel_has_them():
    """The two need not use buffers in the same order."""
    program = made(softmax, 20, 50)
    plan = program.plan
    (name,) = (name for name, entry in plan.kernels.items() if entry.most)
    ((beyond, places),) = plan.kernels[name].beyond.items()
    assert places == (0, 1, 2, 3, 4)
    turned = (1, 0, 2, 3, 4)
    kernels = {**plan.kernels, name: replace(plan.kernels[name], beyond={beyond: turned})}
    changed = replace(program, plan=replace(plan, kernels=kernels))
    ((_, given),) = launched(program, 3, 90)
    ((_, other),) = launched(changed, 3, 90)
    assert [tuple(one.shape) for one in other[:2]] == [(3, 90)] * 2
    assert (given[0] == 1).all()
    assert (other[1] == 1).all()
    assert other[2:] == given[2:]


def test_a_reader_of_older_plans_refuses_such_a_plan():
    """It knows of no longer rows, and would read beyond the block; other plans are as they were."""
    data = json.loads(made(softmax, 20, 50).plan.to_json())
    assert data["version"] == 2
    assert json.loads(made(lambda a: a.sum(-1), 20, 50).plan.to_json())["version"] == 1
    plan = read_plan(json.dumps(data).encode())
    assert sorted(entry.most.get("r0_numel", 0) for entry in plan.kernels.values()) == [0, 64]


@pytest.mark.parametrize(
    ("part", "value", "expected"),
    [
        ("most", {"r0_numel": 0}, "whole number from 1"),
        ("most", {"other": 64}, "one of the parameters"),
        ("most", {"in_ptr0": 64}, "a size for what has a largest number"),
        ("most", {}, "one kernel beyond"),
        ("beyond", {}, "one kernel beyond"),
        ("beyond", {"other": [0]}, "another kernel"),
        ("beyond", "self", "another kernel"),
        ("beyond", "short", "a place of an argument for each parameter"),
    ],
)
def test_a_plan_whose_longer_rows_have_no_kernel_is_refused(part, value, expected):
    """A bundle's plan may come from anybody."""
    data = json.loads(made(softmax, 20, 50).plan.to_json())
    (name,) = (name for name, entry in data["kernels"].items() if "most" in entry)
    entry = data["kernels"][name]
    (beyond,) = entry["beyond"]
    named = {"self": {name: [0, 1, 2, 3, 4]}, "short": {beyond: [0, 1, 2, 3]}}
    entry[part] = named.get(value, value) if isinstance(value, str) else value
    with pytest.raises(FormatError, match=expected):
        read_plan(json.dumps(data).encode())


@pytest.mark.slow
def test_a_bundle_has_both_kernels_for_both_makers_and_launches_the_one_that_fits():
    """A replay without torch's tensors decides as this process does."""
    targets = ["cuda:90", "hip:gfx942"]

    def function(a):
        return softmax(a), a.t().sum(0), F.layer_norm(a * 2, a.shape[1:])

    program = made(function, 20, 50)
    bundle = program.build(targets)
    assert len(bundle.kernels) == len(targets) * len(program.kernels)
    for length in (3, 64, 65, 700):
        driver = DryDriver("cuda")
        memory = DeviceMemory(driver=driver)
        given = memory.put_bytes(bytes(4 * 5 * length), "float32", (5, length))
        load_program(bundle, memory=memory, driver=driver)(given)
        names = {launch.plan.entry for launch in driver.launches}
        assert names
        assert all(("_per_" in name) == (length <= 64) for name in names), names

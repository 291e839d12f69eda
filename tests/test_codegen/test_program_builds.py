# SPDX-License-Identifier: Apache-2.0
"""The mission on a machine without a GPU: generate, build for two targets, carry the bundle, launch
it with neither torch nor Triton.
"""

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bundler import Bundle
from bundler.format.opaque_files import program_name
from bundler.runtime.heuristics.facts import Device
from bundler.runtime.program.device_tensors import DeviceTensor
from bundler.runtime.program.program_plan import Allocate, Launch, read_plan
from bundler.runtime.tuning.benchmark import Sample
from bundler.runtime.tuning.occupancy import usage_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
TARGETS = ("cuda:90", "hip:gfx942")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The path of a bundle with a softmax and a transposition, and what was generated."""
    import torch

    from bundler.codegen.program import GenerateOptions, generate

    def function(a, b):
        return torch.softmax(a, -1), (a + b.t()).relu()

    folder = tmp_path_factory.mktemp("program")
    options = GenerateOptions(sources=str(folder / "sources"))
    program = generate(function, [torch.randn(48, 64), torch.randn(64, 48)], options=options)
    bundle = program.build(TARGETS)
    bundle.save(folder / "program.tbundle")
    return folder / "program.tbundle", program, bundle


def test_every_kernel_is_built_for_every_target(built):
    """The bundle has each kernel for each target, and the plan says with which blocks."""
    _, program, bundle = built
    assert {str(kernel.target) for kernel in bundle.kernels} == set(TARGETS)
    assert len(bundle.kernels) == len(TARGETS) * len(program.kernels)


def test_a_candidate_that_spills_comes_last(tmp_path):
    """Where the first one spills registers those that follow are built, too, up to one that does
    not, which is launched; a kernel that does not spill has one.
    """
    from bundler.codegen.program import GenerateOptions, generate
    from tools.codegen.compared_graphs import GRAPHS

    function, make = GRAPHS["cross_entropy_backward"]
    program = generate(function, make(), options=GenerateOptions(sources=str(tmp_path)))
    bundle = program.build([TARGETS[0]])
    bundle.save(tmp_path / "program.tbundle")
    spills = {
        kernel.spec.num_warps: usage_of(
            bundle.read(kernel.binary), kernel.spec.entry, kernel.target
        )
        for kernel in bundle.kernels
        if "_scatter_" in kernel.name
    }
    assert {warps: one.spills > 16 for warps, one in spills.items()} == {32: True, 16: False}
    (several,) = [name for name in program.kernels if "_scatter_" in name]
    assert len(bundle.kernels) == len(program.kernels) + 1
    assert bundled_choice(tmp_path / "program.tbundle", several, "cuda") == {
        "R0_BLOCK": 2048,
        "XBLOCK": 1,
    }


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_bundle_is_launched_without_torch_and_triton(built, replay, backend):
    """Every launch has the addresses and sizes that the plan says, as its kernel's signature has
    them, and a grid that covers the problem.
    """
    path, program, _ = built
    report = replay(path, backend)
    taken = [step.name for step in program.plan.steps if isinstance(step, Allocate)]
    addresses = dict(zip(taken, report["allocated"], strict=True))
    addresses |= {
        given.name: address
        for given, address in zip(program.plan.inputs, report["inputs"], strict=True)
    }
    steps = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert [launch["kernel"] for launch in report["launches"]] == [step.kernel for step in steps]
    for launch, step in zip(report["launches"], steps, strict=True):
        types = [parameter.type for parameter in program.kernels[step.kernel].text.parameters]
        expected = [
            addresses[item[1:]] if isinstance(item, str) else item for item in step.arguments
        ]
        assert decoded(bytes.fromhex(launch["parameters"]), types) == expected
        assert covered(launch["grid"], bundled_choice(path, step.kernel, backend), step.sizes)
    # Two results, each in memory of its own.
    assert report["outputs"] == [addresses[output.buffer] for output in program.plan.outputs]
    assert len(set(report["outputs"])) == 2


def decoded(raw, types):
    """Return the parameters of a launch: pointers have eight bytes, sizes four, each at a multiple
    of its size.
    """
    found, place = [], 0
    for kind in types:
        size = 4 if kind == "i32" else 8
        place = -(-place // size) * size
        found.append(int.from_bytes(raw[place : place + size], "little"))
        place += size
    return found


def bundled_choice(path, kernel, backend):
    """Return the blocks with which the bundle's plan has a kernel launched."""
    bundle = Bundle.load(path)
    (entry,) = [one for one in bundle.opaque if program_name(one.path) is not None]
    choices = read_plan(bundle.read(entry.artifact)).kernels[kernel].choices
    return next(
        listed[0].blocks for target, listed in choices.items() if target.startswith(backend)
    )


def covered(grid, blocks, sizes):
    """Whether as many programs run along each dimension as its blocks need."""
    return all(
        grid[place] == -(-int(sizes[f"{prefix}numel"]) // blocks[f"{prefix.upper()}BLOCK"])
        for place, prefix in enumerate("xyz")
        if f"{prefix.upper()}BLOCK" in blocks
    )


def test_text_does_not_depend_on_the_hash_seed(built):
    """Another process with another hash seed generates the same text."""
    code = (
        "import torch, hashlib\nfrom bundler.codegen.program import generate\n"
        "def function(a, b):\n    return torch.softmax(a, -1), (a + b.t()).relu()\n"
        "program = generate(function, [torch.randn(48, 64), torch.randn(64, 48)])\n"
        "print(hashlib.sha256(repr((program.sources, program.plan)).encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        ).stdout
        for seed in ("1", "4242")
    }
    assert len(found) == 1
    assert re.fullmatch(r"[0-9a-f]{64}\n", found.pop())


def test_a_size_of_one_is_a_constant_in_64_bits_too(tmp_path):
    """A sum over all elements whose number changes is built."""
    import torch

    from bundler.codegen.program import GenerateOptions, generate

    options = GenerateOptions(wide_indices=True, sources=str(tmp_path))
    program = generate(lambda x: x.sum(), [torch.empty(5, 7)], dynamic=True, options=options)
    (source,) = program.sources.values()
    assert "xnumel, r0_numel: tl.int64" in source
    assert len(program.build(TARGETS).kernels) == len(TARGETS)


def test_a_module_ends_with_a_benchmark_where_that_was_asked_for(tmp_path, monkeypatch, capsys):
    """The text needs torch for nothing else; arguments are as the example's, and each candidate is
    timed, then the launch as it is.
    """
    import torch

    from bundler.codegen import module_benchmarks
    from bundler.codegen.program import GenerateOptions, generate

    def function(a):
        return torch.softmax(a, -1)

    given = [torch.randn(48, 64)]
    plain, asked = (
        generate(
            function,
            given,
            options=GenerateOptions(sources=str(tmp_path), benchmark_harness=harness),
        )
        for harness in (False, True)
    )
    assert not any("get_args" in source for source in plain.sources.values())
    name, source = next(iter(asked.sources.items()))
    head, _, harness = source.partition("from bundler.codegen.module_benchmarks")
    assert head.rstrip() == plain.sources[name].rstrip()
    assert "torch" not in harness
    assert (
        f"if __name__ == '__main__':\n    report(call, get_args(), {2 * 48 * 64 * 4 / 1e9!r})"
        in harness
    )
    module = sys.modules[asked.modules[name].fn.__module__]
    args = module_benchmarks.random_arguments(
        [("float32", (3, 4), (4, 1)), ("int64", (2,), (1,)), ("float8_e5m2", (8,), (1,)), 7], "cpu"
    )
    assert [getattr(item, "dtype", item) for item in args] == [
        torch.float32,
        torch.int64,
        torch.float8_e5m2,
        7,
    ]
    assert bool(args[0].std() > 0)
    assert not bool(args[1].any())

    class Clock:
        def sample(self, launch, reset):
            return Sample(2.0, 2.0, 2.0)

    monkeypatch.setattr(module_benchmarks, "current_device", lambda: Device("cuda", 132, major=9))
    times = module_benchmarks.candidate_times(
        asked.modules[name], [*given, *given, 48, 64], Clock()
    )
    assert len(times) == len(asked.modules[name].on(Device("cuda", 132, major=9)).configs)
    assert set(times.values()) == {2.0}
    module_benchmarks.report(module.call, args, 0.5, Clock())
    assert capsys.readouterr().out == "2.000 ms    0.500 GB    250.00 GB/s\n"


def test_a_nan_is_told_by_the_kernel_that_made_it(monkeypatch):
    """With `nan_checks` the first kernel with a NaN or an infinity among its tensors stops the
    program; without, nobody looks.
    """
    import torch

    from bundler.codegen.program import GenerateOptions, Program, generate

    def program(**options):
        found = generate(lambda a: a.log(), [torch.ones(8)], options=GenerateOptions(**options))
        kernel = SimpleNamespace(bound_among=lambda _: lambda a, out, _size: out.copy_(a.log()))
        monkeypatch.setattr(Program, "modules", dict.fromkeys(found.kernels, kernel))
        return found

    assert program(nan_checks=True).run(torch.ones(8))[0].tolist() == [0.0] * 8
    for number, word in ((-1.0, "a NaN"), (0.0, "an infinity")):
        with pytest.raises(
            FloatingPointError, match=f"log_0: after its launch tensor 1 has {word}"
        ):
            program(nan_checks=True).run(torch.full((8,), number))
        program().run(torch.full((8,), number))


def test_parameters_of_a_module_are_constants_that_a_replay_is_given(tmp_path):
    """What a function has from elsewhere is no input: the program names it, a bundle does not hold
    it, and a replay asks for it by name.
    """
    import torch

    from bundler.codegen.program import generate
    from bundler.errors import ConfigError
    from bundler.runtime.launch.drivers.dry_driver import DryDriver
    from bundler.runtime.program.bundle_programs import load_program

    norm, scale = torch.nn.LayerNorm(64).requires_grad_(False), torch.randn(64)
    program = generate(lambda x: norm(x) * scale, [torch.randn(32, 64)])
    assert [id(tensor) for tensor in program.constants.values()] == [
        id(norm.weight),
        id(norm.bias),
        id(scale),
    ]
    program.build(["cuda:90"]).save(tmp_path / "norm.tbundle")
    addresses = iter(range(0x1000_0000, 0x2000_0000, 0x10000))
    memory = SimpleNamespace(
        host=False,
        allocate=lambda dtype, sizes, strides: DeviceTensor(next(addresses), dtype, sizes, strides),
    )
    driver = DryDriver("cuda")
    with pytest.raises(ConfigError, match="constant0"):
        load_program(tmp_path / "norm.tbundle", memory=memory, driver=driver)
    given = {
        name: DeviceTensor(0x7000_0000 + 0x10000 * n, "float32", (64,), (1,))
        for n, name in enumerate(program.constants)
    }
    x = DeviceTensor(0x7800_0000, "float32", (32, 64), (64, 1))
    load_program(tmp_path / "norm.tbundle", memory=memory, driver=driver, constants=given)(x)
    parameters = b"".join(launch.parameters for launch in driver.launches)
    for tensor in (x, *given.values()):
        assert tensor.address.to_bytes(8, "little") in parameters


def test_what_cannot_be_traced_with_symbols_is_refused_by_name():
    """Dropout asks for a number of elements where only symbols are: a typed error says what to do
    instead.
    """
    import torch

    from bundler.codegen.program import generate
    from bundler.errors import UnsupportedOperator

    with pytest.raises(
        UnsupportedOperator, match=r"generate for the sizes of the example, or use torch\.compile"
    ):
        generate(lambda x: torch.nn.functional.dropout(x, 0.5), [torch.randn(32, 32)], dynamic=True)


@pytest.mark.parametrize(
    "sized", [lambda x: x.nonzero(), lambda x: x.masked_select(x > 0) + 1, lambda x: x[x > 0].sum()]
)
def test_sizes_that_values_decide_are_refused(sized):
    """No memory can be planned for them; torch.compile breaks the graph there, so only `generate`
    meets them.
    """
    import torch

    from bundler.codegen.program import generate
    from bundler.errors import UnsupportedOperator

    with pytest.raises(UnsupportedOperator, match="known only once values are"):
        generate(sized, [torch.randn(6, 8)])

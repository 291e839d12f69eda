# SPDX-License-Identifier: Apache-2.0
"""Recorded kernels for other targets, where their source is not at hand: from IR for static launch
only, or refused with the reason.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bundler
from bundler.compile import build_plan
from bundler.compile.build_plan import Plan, Retarget, why_not_from_ir
from bundler.compile.bundle_build import build
from bundler.errors import ConfigError
from bundler.format.entries import Target

pytest.importorskip("triton")
HERE = Path(__file__).parent
CUDA80, CUDA90, CUDA100, GFX = map(Target.parse, ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Kernels for sm_90 whose source is in no module that anybody names."""
    folder = tmp_path_factory.mktemp("special")
    program = (
        # Triton would import the real torch, which takes seconds.
        "import sys, types\nsys.modules['torch'] = torch = types.ModuleType('torch')\ntorch.Tensor"
        " = type('Tensor', (), {})\nfrom bundler.compile.bundle_build import build\nfrom"
        " bundler.compile.build_plan import Plan\nfrom bundler.format.entries import Target\nplan ="
        " Plan()\nplan.add_modules([sys.argv[1]], [Target.parse('cuda:90')])\nbuilt = build(plan,"
        " 1)\nassert built.failures == (), built.failures\nbuilt.bundle.save(sys.argv[2])\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-c",
            program,
            HERE / "special_kernels.py",
            folder / "s.tbundle",
        ],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    with bundler.Bundle.load(folder / "s.tbundle") as bundle:
        yield bundle


@pytest.fixture
def recorded_constant(tmp_path):
    """A kernel for sm_90 with a function as a constant, and the text of its module."""
    text = (
        "import triton\nimport triton.language as tl\n@triton.jit\ndef twice(x):\n    return x +"
        " x\n@triton.jit\ndef applied(x, ACT: tl.constexpr):\n    tl.store(x,"
        " ACT(tl.load(x)))\nPREBUILD = [{'kernel': applied, 'signature': {'x': '*fp32:16'},"
        " 'constants': {'ACT': twice}}]\n"
    )
    (tmp_path / "first_kernels.py").write_text(text)
    plan = Plan()
    plan.add_modules([str(tmp_path / "first_kernels.py")], [CUDA90])
    return build(plan, 1).bundle, text


def retargeted(recorded, *targets, modules=()):
    plan = Plan()
    Retarget(plan, recorded, modules).add(targets)
    return plan


@pytest.mark.slow
def test_what_an_older_or_another_target_cannot_have_is_refused_with_the_reason(recorded):
    """Descriptors and fp8 for older targets, libdevice and descriptors for AMD: each is refused, by
    name, with why and what to do.
    """
    plan = retargeted(recorded, CUDA80, GFX)
    reasons = {(failure.name, failure.target): failure.reason for failure in plan.failures}
    expected = {
        ("descriptor", "cuda:80"): "tensor descriptors",
        ("descriptor", "hip:gfx942"): "tensor descriptors",
        ("narrow", "cuda:80"): "fp8",
        ("library", "hip:gfx942"): "device library of cuda",
    }
    assert reasons.keys() == expected.keys()
    for key, words in expected.items():
        assert words in reasons[key]
        assert "name the module of its source" in reasons[key]


def test_a_kernel_from_its_ir_is_for_static_launch_only_and_says_so(recorded):
    """What is built from IR says so in its facts, which are those of the recorded call, and in the
    notes.
    """
    plan = retargeted(recorded.select(names="library"), CUDA100)
    built = build(plan, 1)
    (kernel,) = built.bundle.kernels
    facts, before = (
        kernel.launch.require_facts(),
        recorded.select(names="library").kernels[0].launch.require_facts(),
    )
    assert (facts.source_kind, before.source_kind) == ("ir", "ast")
    assert (facts.signature, facts.constants, facts.arguments) == (
        before.signature,
        before.constants,
        before.arguments,
    )
    assert kernel.target == CUDA100
    assert built.static_only == (kernel.key,)
    assert [note for _, _, note in built.notes] == [
        "built from its IR: for static launch only, no JIT will ask for it"
    ]


def test_ir_that_crashes_the_compiler_costs_its_own_kernel(recorded, monkeypatch):
    """IR is compiled in a worker, even when one process is asked for: what ends it is told, and the
    other kernels are built.
    """
    monkeypatch.setattr(build_plan, "why_not_from_ir", lambda *_: None)
    other = retargeted(recorded.select(names="narrow"), CUDA100)
    plan = retargeted(recorded.select(names="descriptor"), GFX)
    plan.jobs.update(other.jobs)
    built = build(plan, 1)
    assert [kernel.name for kernel in built.bundle.kernels] == ["narrow"]
    (failure,) = built.failures
    assert (failure.name, failure.target) == ("descriptor", "hip:gfx942")
    assert "it was ended by SIG" in failure.reason


def test_a_call_that_was_recorded_for_two_targets_is_built_from_ir_once(recorded):
    """From the IR of two targets the same call would become two kernels; it becomes one."""
    source = [str(HERE / "special_kernels.py")]
    other = build(retargeted(recorded.select(names="library"), CUDA100, modules=source), 1).bundle
    both = bundler.merge([recorded.select(names="library"), other])
    assert len(both.kernels) == 2
    assert len(retargeted(both, Target.parse("cuda:120")).jobs) == 1
    assert retargeted(both, CUDA90, CUDA100).jobs == {}


def test_cuda_to_amd_says_what_was_assumed(recorded):
    """An NVIDIA kernel does not tell whether a tensor is below 2 GB: for AMD that is assumed, and
    said.
    """
    plan = retargeted(
        recorded.select(names="library"), GFX, modules=[str(HERE / "special_kernels.py")]
    )
    assert {job.source.kind for job in plan.jobs.values()} == {"module"}
    assert any("2 GB" in note for _, _, note in plan.notes)


def test_a_bundle_without_ir_needs_the_source(recorded):
    """A launch set has no IR: without the source there is nothing to build from, and the reason
    says so.
    """
    plan = retargeted(recorded.select(names="library", keep="launch"), CUDA100)
    assert plan.jobs == {}
    assert "its IR is not in the bundle" in plan.failures[0].reason


def test_an_edited_source_is_not_taken_for_the_recorded_one(recorded, tmp_path):
    """A kernel whose text is another now is not built from that text, but from the IR that was
    recorded.
    """
    edited = tmp_path / "edited_kernels.py"
    edited.write_text(
        (HERE / "special_kernels.py")
        .read_text()
        .replace("libdevice.rsqrt(", "1 + libdevice.rsqrt(")
    )
    plan = retargeted(recorded.select(names="library"), CUDA100, modules=[str(edited)])
    assert {job.source.kind for job in plan.jobs.values()} == {"ir"}


def test_a_function_that_is_a_constant_must_be_the_one_that_was_recorded(
    tmp_path, recorded_constant
):
    """A function that was handed over as a constant is looked for by its name and hash; an edited
    one is not taken for it.
    """
    bundle, text = recorded_constant
    (tmp_path / "same_kernels.py").write_text(text)
    assert len(retargeted(bundle, CUDA100, modules=[str(tmp_path / "same_kernels.py")]).jobs) == 1
    (tmp_path / "other_kernels.py").write_text(text.replace("x + x", "x * x"))
    plan = retargeted(bundle, CUDA100, modules=[str(tmp_path / "other_kernels.py")])
    assert plan.jobs == {}
    assert "is not the function it was" in plan.failures[0].reason


def test_a_retarget_without_a_target_is_a_mistake(recorded):
    """Nobody knows what to build for when no target is named."""
    with pytest.raises(ConfigError, match="--target"):
        retargeted(recorded)


def test_ir_with_assembly_of_another_vendor_is_refused():
    """Inline assembly is for the chip that it was written for."""
    assert "assembly for cuda" in why_not_from_ir(b"tt.elementwise_inline_asm", CUDA90, GFX)
    assert why_not_from_ir(b"tt.elementwise_inline_asm", CUDA90, CUDA100) is None

# SPDX-License-Identifier: Apache-2.0
"""Kernels that are built for a GPU which is not here have the keys that Triton's JIT asks for on
one.

The JIT runs in a process of its own, on a driver that only says which GPU it has, and with a ptxas
that refuses to assemble.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import bundler
from bundler.compile import module_import
from bundler.compile.build_plan import Plan, source_of
from bundler.compile.compile_job import Compiled, Job, SourceRef, perform
from bundler.errors import FormatError
from bundler.format.constant_values import Value
from bundler.format.entries import Target, Toolchain
from bundler.toolchain import jit_specialization

pytest.importorskip("triton")
HERE = Path(__file__).parent
KERNELS = HERE / "built_kernels.py"
TARGETS = ("cuda:90", "cuda:100", "hip:gfx942")
_BUILD = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")  # Triton would import the real one, which takes seconds
torch.Tensor = type("Tensor", (), {})
from bundler.compile.bundle_build import build
from bundler.compile.build_plan import Plan
from bundler.format.entries import Target
plan = Plan()
plan.add_modules([sys.argv[1]], [Target.parse(text) for text in sys.argv[3:]])
built = build(plan, 1)
assert built.failures == (), built.failures
built.bundle.save(sys.argv[2])
print(sorted({(name, target) for name, target, text in built.notes if "both keys" in text}))
"""
_RECORD = """
import runpy, sys
import bundler
output, program, *arguments = sys.argv[1:]
with bundler.recording() as recording:
    runpy.run_path(program)["main"](*arguments)
recording.collect().save(output)
"""
_RETARGET = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")  # Triton would import the real one, which takes seconds
torch.Tensor = type("Tensor", (), {})
from bundler import Bundle
from bundler.compile.bundle_build import build
from bundler.compile.build_plan import Plan
from bundler.compile.build_plan import Retarget
from bundler.format.entries import Target
plan = Plan()
Retarget(plan, Bundle.load(sys.argv[1]), sys.argv[3:4]).add([Target.parse(text) for text in sys.argv[4:]])
built = build(plan, 1)
assert built.failures == (), built.failures
assert built.static_only == ()
built.bundle.save(sys.argv[2])
"""


def run(code, *arguments, **environment):
    """Run code, or a program, in a new Python; returns its last line."""
    how = ["-c", code] if "\n" in code else [code]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *how, *map(str, arguments)],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


def refusing(folder):
    """Return an environment in which ptxas says its version and assembles nothing."""
    script = folder / "ptxas"
    real = Path(sys.modules["triton"].__file__).parent / "backends" / "nvidia" / "bin"
    variables = {}
    for name, variable in (
        ("ptxas", "TRITON_PTXAS_PATH"),
        ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"),
    ):
        if (real / name).exists():
            script = folder / name
            script.write_text(
                f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real / name} --version;'
                " fi\nexit 1\n"
            )
            script.chmod(0o755)
            variables[variable] = script
    return variables


def ask(cache, folder, *targets):
    """Call every kernel through the JIT; returns what Triton's listener heard: [target, name, hash,
    hit].
    """
    return json.loads(
        run(
            str(HERE / "jit_calls.py"),
            KERNELS,
            *targets,
            TRITON_CACHE_DIR=cache,
            **refusing(folder),
        )
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the kernels for each target, once."""
    import triton  # noqa: F401  # `refusing` asks where it is

    path = tmp_path_factory.mktemp("built") / "b.tbundle"
    path.with_suffix(".notes").write_text(run(_BUILD, KERNELS, path, *TARGETS))
    return path


@pytest.mark.release
@pytest.mark.toolchain
def test_a_jit_on_each_target_finds_every_kernel_that_was_built(built, tmp_path):
    """A JIT that calls the kernels on sm_90, sm_100 and gfx942 finds each of them and compiles
    none.

    Among the calls are unaligned, large and absent arguments, ones, functions and types as
    constants, tuples, autotuned kernels, and functions that use a constant of their module.
    """
    bundler.restore(built, tmp_path / "cache", only="all")
    heard = ask(tmp_path / "cache", tmp_path, "helpers", *TARGETS)
    assert Counter(target for target, *_ in heard) == {"cuda:90": 9, "cuda:100": 7, "hip:gfx942": 7}
    assert [(target, name) for target, name, _, hit in heard if not hit] == []


@pytest.mark.toolchain
def test_a_kernel_is_published_under_each_key_that_the_order_of_hashing_gives(built):
    """Where the key of a kernel depends on what was hashed before (Triton 3.6 and 3.7), both keys
    are built, and that is told.
    """
    import triton

    order_matters = not triton.__version__.startswith("3.9")
    with bundler.Bundle.load(built) as bundle:
        names = Counter(
            kernel.name for kernel in bundle.kernels if kernel.target == Target.parse("cuda:90")
        )
    assert names["with_helper"] == names["same_helper"] == (2 if order_matters else 1)
    assert names["tuples"] == 1
    told = [("same_helper", "cuda:90"), ("with_helper", "cuda:90")] if order_matters else []
    assert built.with_suffix(".notes").read_text() == str(told)


@pytest.mark.slow
@pytest.mark.toolchain
def test_a_recording_for_one_target_gives_the_keys_of_another(tmp_path):
    """What a JIT on sm_80 compiled, built for sm_90 from the recording and the source, is what a
    JIT on sm_90 asks for.
    """
    import triton  # noqa: F401

    first, second = tmp_path / "80.tbundle", tmp_path / "90.tbundle"
    run(
        _RECORD,
        first,
        HERE / "jit_calls.py",
        KERNELS,
        "cuda:80",
        TRITON_CACHE_DIR=tmp_path / "recorded",
    )
    run(_RETARGET, first, second, KERNELS, "cuda:90")
    bundler.restore(second, tmp_path / "cache", only="all")
    heard = ask(tmp_path / "cache", tmp_path, "cuda:90")
    assert len(heard) == 7
    assert [name for _, name, _, hit in heard if not hit] == []


def test_every_built_kernel_has_facts_and_proven_parts(built):
    """A kernel that was built carries what a recorded one does: launch facts, named key parts that
    give its key, times.
    """
    with bundler.Bundle.load(built) as bundle:
        for kernel in bundle.kernels:
            assert kernel.launch.require_facts().source_kind == "ast"
            assert kernel.require_parts().proven
            assert bundle.observed.kernels[kernel.key].times_us


def job(**more):
    source = SourceRef("module", "f", "m", "/m.py", "/", b"")
    fields = {
        "signature": (("x", Value("tuple", (Value("str", "*fp32"),))),),
        "constants": (((0, 1), Value("none")),),
    }
    return Job(
        "f",
        source,
        **fields,
        attributes=(),
        options=(("num_warps", Value("int", 4)),),
        target=Target("cuda", "90"),
        **more,
    )


def test_a_job_and_its_result_survive_the_way_to_a_worker():
    """Jobs and results come back from their bytes as they were; equal jobs have equal digests,
    others not.
    """
    made = job(key="K", helpers_first=True, facts=b"f")
    assert Job.from_bytes(made.to_bytes()) == made
    result = Compiled(
        "K", "/d", 0.5, (("ttir", 0.25),), False, Toolchain("3.7", "ab", None), b"f", None
    )
    assert Compiled.from_bytes(result.to_bytes()) == result
    assert job().digest == job().digest != made.digest


@pytest.mark.parametrize("kind", [Job, Compiled])
def test_other_bytes_are_no_job_and_no_result(kind):
    """Bytes of anything else are refused by their type."""
    with pytest.raises(FormatError):
        kind.from_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(FormatError, match="unknown kind"):
        SourceRef.from_wire(["pickle", "", "", "", "", b""])


_CHAIN = """
import triton
import triton.language as tl

LEAST = tl.constexpr(0.5)

@triton.jit
def inner(x):
    return tl.where(x < LEAST, x * 2, x)

@triton.jit
def outer(x):
    return inner(x) + 1

@triton.jit
def first(p):
    tl.store(p, inner(tl.load(p)))

@triton.jit
def second(p):
    tl.store(p, outer(tl.load(p)))
"""


@pytest.mark.parametrize("planned_first", [True, False])
def test_a_worker_that_hashed_a_helper_before_compiles_the_kernel_that_was_planned(
    tmp_path, planned_first
):
    """Before Triton 3.9 the hash of a function depends on which helpers were hashed before it; a
    job's key does not.
    """
    path = tmp_path / "chain_of_helpers.py"
    path.write_text(_CHAIN)
    target = Target.parse("cuda:90")
    place = module_import.find(str(path))

    def plan(name):
        kernel = getattr(Plan().load(place, target), name)
        return Plan().add_calls(kernel, source_of(place, name), [({"p": "*fp32:16"}, {})], target)

    def forget():
        for name in ("first", "second"):
            for one in jit_specialization.functions_of(
                getattr(module_import.load(place, target), name)
            ):
                one.hash, one.used_global_vals = None, {}

    jobs = plan("second")
    # The worker: another process, whose helpers are hashed by the job before.
    forget()
    if planned_first:
        perform(plan("first")[0], str(tmp_path / "cache"))
    else:
        forget()
        _ = module_import.load(place, target).first.cache_key
    for job in jobs:
        assert perform(job, str(tmp_path / "cache")).key == job.key
    module_import.forget()

# SPDX-License-Identifier: Apache-2.0
"""A program captured without a GPU: which kernels it leads to, with which keys, and what becomes of
what goes wrong.
"""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import bundler
from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.toolchain import compile_call, jit_specialization

pytestmark = pytest.mark.toolchain

HERE = Path(__file__).parent
H100 = Target("cuda", "90")


@pytest.fixture
def torch():
    """Torch, where tensors can be fake."""
    pytest.importorskip("triton")
    return pytest.importorskip("torch")


@pytest.fixture
def kernels(torch, monkeypatch, tmp_path):
    """The module of kernels, imported anew, with a Triton cache of its own."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))
    sys.modules.pop("captured_kernels", None)
    import captured_kernels

    yield captured_kernels
    sys.modules.pop("captured_kernels", None)


def names(bundle):
    """Return the names of a bundle's kernels, sorted, each as often as it is there."""
    return sorted(kernel.name for kernel in bundle.kernels)


def declared_keys(kernel, arguments, **keywords):
    """Return the keys that Triton's JIT makes for a call which is described by hand."""
    found = jit_specialization.specialize(kernel, arguments, keywords, H100)
    return {key for one in found for key, _ in one.keys}


def test_keys_are_those_of_the_jit(torch, kernels):
    """The keys of captured launches are those of the same calls with signatures written by hand."""
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(1000, device="cuda")
        kernels.add_one[(8,)](x, 1000, BLOCK=128)
        kernels.add_one[(8,)](x, 1000, BLOCK=128)
        kernels.add_one[(8,)](x.to(torch.bfloat16), 16, BLOCK=64, num_warps=8, num_stages=2)
        kernels.add_one[(8,)](x, 1, BLOCK=64)
    pointer, number = "*fp32:16", "i32"
    expected = declared_keys(kernels.add_one, {"x": pointer, "n": number}, BLOCK=128)
    expected |= declared_keys(
        kernels.add_one, {"x": "*bf16:16", "n": "i32:16"}, BLOCK=64, num_warps=8, num_stages=2
    )
    expected |= declared_keys(kernels.add_one, {"x": pointer, "n": "i32:1"}, BLOCK=64)
    report = capture.report
    assert (report.launches, report.functions, report.kernels) == (4, 1, 3)
    assert {kernel.key for kernel in capture.build(1).kernels} == expected


def test_views_keep_their_alignment(torch, kernels):
    """A view at an odd offset is another kernel than its base; one at a multiple of 16 bytes is the
    same.
    """
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(1000, device="cuda")
        kernels.add_one[(8,)](x, 999, BLOCK=128)
        kernels.add_one[(8,)](x[4:], 999, BLOCK=128)
        kernels.add_one[(8,)](x.view(10, 100)[:, 1:], 999, BLOCK=128)
    aligned = declared_keys(kernels.add_one, {"x": "*fp32:16", "n": "i32"}, BLOCK=128)
    unaligned = declared_keys(kernels.add_one, {"x": "*fp32", "n": "i32"}, BLOCK=128)
    assert {kernel.key for kernel in capture.build(1).kernels} == aligned | unaligned


def test_every_configuration_of_a_tuner_is_captured(torch, kernels):
    """All configurations are compiled, each with its heuristics; the tuner is as it was before."""
    seen = []

    def grid(call):
        seen.append(call["BLOCK"])
        return (1000 // call["BLOCK"] + 1,)

    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(1000, device="cuda")
        kernels.scale[grid](x, torch.empty_like(x), 1000)
    expected = declared_keys(kernels.scale, {"x": "*fp32:16", "y": "*fp32:16", "n": "i32"})
    assert {kernel.key for kernel in capture.build(1).kernels} == expected
    assert len(expected) == 4
    assert set(seen) == {64, 128}
    assert kernels.scale.cache == {}


def test_configurations_are_pruned_as_for_a_run(torch, kernels, tmp_path):
    """Pruned configurations are not captured, results are neither looked up nor kept, and hooks
    work on fake tensors.
    """
    with bundler.capturing("cuda:90") as capture:
        x = torch.zeros(100, device="cuda")
        kernels.pruned[(8,)](x, 100)
        kernels.pruned[(8,)](x, 100)
    assert names(capture.build(1)) == ["pruned", "pruned"]
    assert list(tmp_path.rglob("*.autotune.json")) == []


def test_every_configuration_is_captured_where_the_key_of_a_tuner_does_not_tell(torch, kernels):
    """Two calls with one tuning key and two specializations: on a GPU the winner of the first, any
    of its configurations, runs in the second.
    """
    with bundler.capturing("cuda:90") as capture:
        x = torch.zeros(100, device="cuda")
        kernels.one_of_two[(8,)](x, x, None, 100)
        kernels.one_of_two[(8,)](x, None, x, 100)
        kernels.one_of_two[(8,)](x, None, x, 100)
    assert capture.report.kernels == 4


def test_tuples_and_descriptors_are_captured(torch, kernels):
    """A tuple argument and a tensor descriptor lead to the kernels that the JIT makes for them."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
        kernels.with_tuple[(1,)]((x, torch.empty_like(x)), 64, BLOCK=64)
        described = TensorDescriptor.from_tensor(x, [16, 64])
        kernels.with_descriptor[(1,)](
            described, torch.empty(16, device="cuda", dtype=torch.float16), BLOCK=16
        )
    assert names(capture.build(1)) == ["with_descriptor", "with_tuple"]
    assert capture.report.failures == ()


def test_backward_is_captured(torch, kernels):
    """A kernel in the backward of an autograd function is captured too."""

    class Increment(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            kernels.add_one[(8,)](gradient.contiguous(), gradient.numel(), BLOCK=32)
            return gradient

    with bundler.capturing("cuda:90") as capture:
        layer = torch.nn.Linear(8, 8).cuda()
        Increment.apply(layer(torch.randn(4, 8, device="cuda"))).sum().backward()
        assert layer.weight.grad.shape == (8, 8)
    assert capture.report.kernels == 1


def test_a_captured_kernel_is_a_hit(torch, kernels, tmp_path):
    """Restored to a cache directory, a captured kernel is what Triton finds for the call: it
    compiles nothing.
    """
    with bundler.capturing("cuda:90") as capture:
        kernels.add_one[(8,)](torch.randn(64, device="cuda"), 64, BLOCK=64)
    bundle = capture.build(1)
    bundler.restore(bundle, tmp_path / "cache", only="all")
    [found] = jit_specialization.specialize(
        kernels.add_one, {"x": "*fp32:16", "n": "i32:16"}, {"BLOCK": 64}, H100
    )
    event = compile_call.compile_function(
        kernels.add_one,
        found.signature,
        found.constants,
        found.attributes,
        found.options,
        H100,
        str(tmp_path / "cache"),
    )
    assert (event.cache_hit, event.key) == (True, bundle.kernels[0].key)


def test_what_depends_on_data_is_reported(torch, kernels):
    """`item`, `nonzero` and a branch get guesses, each with its line; the program goes on."""
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(64, device="cuda")
        line = sys._getframe().f_lineno
        assert x.sum().item() == 1.0
        assert x.nonzero().shape == (64, 1)
        if (x > 0).any():
            kernels.add_one[(1,)](x, int(x.argmax()), BLOCK=64)
    found = [
        (Path(guess.file).name, guess.line - line, guess.what, guess.taken)
        for guess in capture.report.guesses
    ]
    here = Path(__file__).name
    assert found == [
        (here, 1, "item", "1.0"),
        (here, 2, "nonzero", "shape [64, 1]"),
        (here, 3, "item", "True"),
        (here, 4, "item", "2"),
    ]
    assert capture.report.kernels == 1


def test_a_program_that_crashes_leaves_what_it_launched(torch, kernels):
    """What was captured before an error is built, and the report has the traceback."""
    with pytest.raises(ValueError, match="no luck"), bundler.capturing("cuda:90") as capture:
        kernels.add_one[(8,)](torch.randn(64, device="cuda"), 64, BLOCK=64)
        raise ValueError("no luck")
    assert "ValueError: no luck" in capture.report.crash
    assert names(capture.build(1)) == ["add_one"]
    assert not torch.cuda.is_available() or torch.zeros(1).device.type == "cpu"


def test_a_kernel_that_does_not_compile_is_named(torch, kernels):
    """One kernel's fault is in the report, with the compiler's reason, and the others are built."""
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(64, device="cuda")
        kernels.broken[(1,)](x, BLOCK=16)
        kernels.add_one[(8,)](x, 64, BLOCK=64)
    assert names(capture.build(2)) == ["add_one"]
    [(name, why)] = capture.report.failures
    assert name == "broken"
    assert "a block this large is refused" in why


def test_a_compiler_that_dies_fails_its_kernel_alone(torch, kernels, monkeypatch):
    """A compile that ends its process is a failure of one kernel."""
    compile_request = compile_call.compile_request

    def dying(request, *rest, **more):
        if request.source.fn is kernels.broken:
            os.kill(os.getpid(), signal.SIGKILL)
        return compile_request(request, *rest, **more)

    monkeypatch.setattr(compile_call, "compile_request", dying)
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(64, device="cuda")
        kernels.broken[(1,)](x, BLOCK=4)
        kernels.add_one[(8,)](x, 64, BLOCK=64)
    assert names(capture.build(2)) == ["add_one"]
    assert [name for name, why in capture.report.failures if "signal 9" in why] == ["broken"]


def test_what_a_store_holds_is_not_compiled_again(torch, kernels, tmp_path):
    """A second capture of the same program takes its kernels from the store."""
    reports = []
    with bundler.open_store(f"file://{tmp_path}/store") as store:
        for _ in range(2):
            with bundler.capturing("cuda:90") as capture:
                kernels.add_one[(8,)](torch.randn(64, device="cuda"), 64, BLOCK=64)
            assert names(capture.build(1, store)) == ["add_one"]
            reports.append(capture.report)
    assert [(len(report.compiled), len(report.reused)) for report in reports] == [(1, 0), (0, 1)]


def test_a_build_inside_the_block_is_refused(torch, kernels):
    """`build` says that the block is not over."""
    with (
        bundler.capturing("cuda:90") as capture,
        pytest.raises(ConfigError, match="after the block"),
    ):
        capture.build()


def test_a_capture_inside_another_is_refused(torch, kernels):
    """The second block is a mistake, and the first one goes on."""
    with bundler.capturing("cuda:90") as capture:
        with pytest.raises(ConfigError, match="already"), bundler.capturing("cuda:80"):
            pass
        kernels.add_one[(8,)](torch.randn(64, device="cuda"), 64, BLOCK=64)
    assert capture.report.kernels == 1


def test_what_is_asked_of_a_kernel_is_guessed_and_told(torch, kernels):
    """A program may compute a grid from the registers of its kernel, which was not compiled: it
    gets a guess, with the line.
    """
    with bundler.capturing("cuda:90") as capture:
        x = torch.randn(64, device="cuda")
        kernel = kernels.add_one.warmup(x, 64, BLOCK=64, grid=(1,))
        kernel._init_handles()
        programs = max(1, 65536 // (kernel.n_regs * 128) - kernel.metadata.shared)
        kernel[(programs, 1, 1)](x, 64)
    assert [guess.what for guess in capture.report.guesses] == [
        "n_regs of add_one",
        "metadata of add_one",
    ]
    assert {Path(guess.file).name for guess in capture.report.guesses} == {Path(__file__).name}


def test_bad_targets_and_properties_are_refused(torch):
    """A target or a property that does not exist is a mistake, told before anything runs."""
    with pytest.raises(ConfigError, match="not a target"):
        bundler.capturing("h100")
    with pytest.raises(ConfigError, match="sm_count"):
        bundler.capturing("cuda:90", properties={"sm_count": 4})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    ("library", "group", "least"),
    [("liger_kernel", "liger", 100), ("fla", "fla", 100), ("fla", "varlen", 10)],
)
def test_libraries_are_captured(torch, library, group, least, monkeypatch):
    """Each operator of the workload of tools runs under capture, forward and backward, and launches
    kernels.
    """
    if find_spec(library) is None:
        pytest.skip(f"{library} is not importable; put its wheel on PYTHONPATH")
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "tools" / "gpu"))
    with bundler.capturing("cuda:90") as capture:
        import library_calls

        happened = {
            name: library_calls.happened(call) for name, call in library_calls.GROUPS[group]()
        }
    # FLA itself refuses what Triton before 3.7.1 computes wrongly on this GPU.
    assert {
        name: said
        for name, said in happened.items()
        if said != "fine" and "incorrect results" not in said
    } == {}
    assert capture.report.kernels > least

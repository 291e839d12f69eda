# SPDX-License-Identifier: Apache-2.0
"""Which products and attentions become kernels where a measurement decides: a decision is a record
that travels, nothing is measured twice, and without a record a program is that of
`templates="none"`.

`template_choice_worker` runs both forms in Triton's interpreter.
"""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F  # noqa: E402

import bundler  # noqa: E402
from bundler.codegen import measured_choices  # noqa: E402
from bundler.codegen.graph_key import graph_key  # noqa: E402
from bundler.codegen.measured_templates import TemplateMeasurements  # noqa: E402
from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate  # noqa: E402
from bundler.codegen.torch_backend import triton_bundler  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402
from bundler.errors import ConfigError  # noqa: E402
from bundler.runtime import DryDriver  # noqa: E402
from bundler.runtime.tuning.benchmark import GivenClock  # noqa: E402

FASTER = GenerateOptions(templates="where faster")
LAYER = [torch.empty(32, 64), torch.empty(128, 64), torch.empty(128)]
HEADS = [torch.empty(1, 2, 32, 64, dtype=torch.float16)]


def layer(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def attention(heads):
    return F.scaled_dot_product_attention(heads, heads, heads)


class Nothing:
    """A form that launches nothing."""

    def __init__(self, name):
        self.name = name

    def prepare(self):
        pass

    def __call__(self):
        return self.name


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Generate a program for a GPU that is not there, on which one form is faster; returns it, and
    the forms that were timed.
    """

    def generated(machine, faster, function, inputs, *, backend="cuda", options=FASTER, **how):
        timed = []
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / machine))
        driver = None if backend is None else DryDriver(backend)

        def bench(call, quantiles):
            timed.append(("operator", "kernel")[len(timed) % 2])
            return [1.0 if timed[-1] == faster else 2.0] * len(quantiles)

        def here(device, policy, sources):
            return TemplateMeasurements("cpu", policy, driver, lambda: GivenClock(bench), sources)

        def launches(_self, programs, _inputs):
            return {form: Nothing(form) for form in programs}

        monkeypatch.setattr(TemplateMeasurements, "here", here)
        monkeypatch.setattr(TemplateMeasurements, "_launches", launches)
        program = generate(function, inputs, device="cuda", options=options, **how)
        return program, timed

    return generated


def kinds_of(program):
    return {kernel.text.kind for kernel in program.kernels.values()}


# ---------------------------------------------------------------------------------------- Decisions


@pytest.mark.toolchain
def test_a_decision_is_a_record_that_a_bundle_brings(measured):
    """Another machine with such a device measures nothing, nor does one without a device; another
    device does.
    """
    with bundler.recording() as recording:
        program, timed = measured("first", "kernel", layer, LAYER)
    assert (program.fallbacks, kinds_of(program), len(timed)) == ((), {"product"}, 2)
    bundle = program.build(["cuda:90"])
    records = [record for record, _ in program.decisions]
    assert {record.found_by for record in records} == {"templates"}
    for brought in (bundle, recording.collect()):
        assert {*records} <= {*brought.tuning_records}
    for machine, backend in (("second", "cuda"), ("third", None)):
        measured(machine, "operator", lambda a: a + 1, LAYER[:1], backend=backend)
        bundler.restore(bundle)
        again, timed = measured(machine, "operator", layer, LAYER, backend=backend)
        assert (again.sources, timed) == (program.sources, [])
        assert {record for record, _ in again.decisions} == {*records}
    # Records of two devices that differ are none for a machine without one.
    other, timed = measured("second", "operator", layer, LAYER, backend="hip")
    assert ([one.operator for one in other.fallbacks], len(timed)) == (["aten.mm.default"], 2)
    neither, _ = measured("second", "kernel", layer, LAYER, backend=None)
    assert (neither.sources, neither.decisions) == (other.sources, ())


@pytest.mark.parametrize(
    ("function", "inputs", "dynamic"),
    [(layer, LAYER, False), (layer, LAYER, True), (attention, HEADS, False)],
)
def test_each_form_is_the_program_that_has_it(measured, function, inputs, dynamic):
    """Of a kernel that is faster that of `all`; of an operator, and without a record, that of
    `none`.
    """
    none = generate(function, inputs, device="cuda", dynamic=dynamic)
    templates = GenerateOptions(templates="all")
    every = generate(function, inputs, device="cuda", dynamic=dynamic, options=templates)
    for faster, backend, expected, count in (
        ("kernel", "cuda", every, 2),
        ("operator", "cuda", none, 2),
        ("kernel", None, none, 0),
    ):
        machine = f"{faster} {backend}"
        given = {"backend": backend, "dynamic": dynamic}
        found, timed = measured(machine, faster, function, inputs, **given)
        assert kinds_of(found) == kinds_of(expected)
        assert [one.operator for one in found.fallbacks] == [
            one.operator for one in expected.fallbacks
        ]
        assert (len(timed), len(found.decisions)) == (count, count // 2)


def test_equal_pieces_are_decided_once(measured, monkeypatch):
    """Neither generated nor measured again."""
    asked, chosen = [], TemplateMeasurements.chosen

    def counted(self, *given):
        asked.append(given)
        return chosen(self, *given)

    monkeypatch.setattr(TemplateMeasurements, "chosen", counted)
    program, timed = measured(
        "x", "kernel", lambda x, y: (x @ y, y @ x, y @ x + 1), [torch.empty(64, 64)] * 2
    )
    assert (len(asked), len(timed), len(program.decisions)) == (2, 4, 2)
    assert program.fallbacks == ()


def test_what_follows_two_products_is_measured_with_the_later_one(measured):
    """What is computed for one alone of the graph's inputs is measured with it."""

    def gated(x, one, other):
        return torch.relu(x @ one) - (x @ other), x @ one.exp(), (x @ other).sum(1)

    program, timed = measured("x", "kernel", gated, [torch.empty(64, 64)] * 3)
    names = sorted(record.kernel for record, _ in program.decisions)
    assert len(timed) == 2 * len(names)
    assert names == [
        "triton_mm_fused_exp_mm",
        "triton_mm_fused_mm",
        "triton_mm_fused_mm_relu",
        "triton_mm_fused_mm_sub",
    ]


def test_what_is_deterministic_is_called(measured):
    """Nothing is measured, and no record is looked at; also after torch's own switch."""
    assert measured("x", "kernel", layer, LAYER)[1]
    exact = replace(FASTER, policy=ProgramPolicy(deterministic=True))
    program, timed = measured("x", "kernel", layer, LAYER, options=exact)
    assert (len(program.fallbacks), timed, program.decisions) == (1, [], ())
    torch.use_deterministic_algorithms(True)
    try:
        program, timed = measured("x", "kernel", layer, LAYER)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (len(program.fallbacks), timed, program.decisions) == (1, [], ())


def test_so_many_are_measured(measured, monkeypatch):
    """The others are called, as those of which no template is made: of float64, and of sizes that
    values decide.
    """
    monkeypatch.setattr(measured_choices, "_MOST_MEASURED", 1)
    both = [torch.empty(32, 64), torch.empty(64, 64), torch.empty(64, 32)]
    program, timed = measured("x", "kernel", lambda a, b, c: (a @ b) @ c, both)
    assert (len(program.fallbacks), len(timed)) == (1, 2)
    wide = [one.double() for one in both[:2]]
    program, timed = measured("y", "kernel", torch.matmul, wide)
    assert (len(program.fallbacks), timed) == (1, [])


# ------------------------------------------------------------------------------------------ Numbers


@pytest.mark.timeout(300)
def test_torch_compile_has_torchs_numbers(interpreted, tmp_path):
    """With every second kernel chosen, forward and backward."""
    found = json.loads(interpreted("template_choice_worker.py", tmp_path / "cache", "training"))
    timed, wrong, called, kinds = found
    assert (wrong, timed > 6) == ([], True)
    assert "aten.mm.default" in called
    assert "product" in kinds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_process_measures_nothing(interpreted, tmp_path):
    """Nor does a program whose sizes change, of pieces that were measured for the same sizes."""
    worker = ["template_choice_worker.py", tmp_path / "cache", "attention", "inference", "changing"]
    timed, wrong, called, kinds = json.loads(interpreted(*worker))
    assert (wrong, timed) == ([], 8)
    assert {"attention", "product"} <= {*kinds}
    assert json.loads(interpreted(*worker)) == [0, [], called, kinds]


# --------------------------------------------------------------------------------------- The option


def test_the_device_is_part_of_a_graphs_key(monkeypatch):
    """A kept program is of the device that was measured on."""
    module = trace(layer, LAYER, device="cuda")
    module.meta.clear()
    keys = [graph_key(module, one).digest for one in (GenerateOptions(), FASTER)]
    monkeypatch.setattr(measured_choices, "open_first_driver", lambda _: DryDriver("cuda"))
    keys += [graph_key(module, one).digest for one in (GenerateOptions(), FASTER)]
    assert (len({*keys}), keys[0]) == (3, keys[2])


def test_other_words_are_refused():
    """By torch.compile as by `generate`."""
    words = "templates='some': expected one of 'none', 'all', 'where faster', 'by rule'"
    with pytest.raises(ConfigError, match=words) as caught:
        GenerateOptions(templates="some")
    assert caught.value.facts["got"] == "some"
    for given in ("some", True):
        with pytest.raises(ConfigError, match=f"templates={given!r}: expected one of"):
            triton_bundler(None, [], options={"templates": given})


# -------------------------------------------------------------------------------------------- A GPU


@pytest.mark.gpu
def test_a_gpu_decides_and_a_second_time_nothing_is_measured(tmp_path, monkeypatch):
    """Numbers are eager torch's; records have times of both forms."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    inputs = [torch.randn(one.shape, device="cuda", dtype=torch.float16) for one in LAYER]
    program = generate(layer, inputs, options=FASTER)
    torch.testing.assert_close(program.run(*inputs)[0], layer(*inputs), rtol=1e-2, atol=1e-2)
    ((_, tuning),) = program.decisions
    assert all(timing.time_ns is not None for timing in tuning.timings)
    monkeypatch.setattr(measured_choices, "CudaClock", None)
    assert generate(layer, inputs, options=FASTER).sources == program.sources

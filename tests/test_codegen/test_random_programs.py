# SPDX-License-Identifier: Apache-2.0
"""Random programs through torch.compile: they compute what eager torch does; how they are drawn,
compared and made smaller.
"""

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

# With gradients, at two sizes, with changes in place, attention, convolutions and norms; what the
# judge is about is the slow test's many.
SAMPLE = (2, 3, 4, 5)
NAMED = (
    "scaled_dot_product_attention",
    "enable_gqa",
    "is_causal=True",
    "attn_mask",
    "F.linear",
    "torch.addmm",
    "torch.bmm",
    "torch.mm(",
    "einsum",
    "baddbmm",
    "F.conv1d",
    "F.conv2d",
    "conv_transpose2d",
    "groups=2",
    "stable=True",
    "topk(",
    ".chunk(",
    ".split(",
    ".unbind(",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "transpose(1, -1), [",
    "F.pad",
    "mode='reflect'",
    "_pool2d",
    "gather(",
    "scatter_add(",
    "F.embedding",
    "index_select",
    "torch.cat",
    "torch.stack",
    "torch.bfloat16",
    "_(",
    ".view(-1).",
    "[1:].",
    "cumsum",
    "cross_entropy",
    "requires_grad_()",
    ".expand(",
    "channels_last",
    "[..., 1::2]",
)


@pytest.fixture
def programs(beside):
    """The module that draws."""
    return beside("random_programs")


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (SAMPLE[0], len(SAMPLE)),
        *(pytest.param(n, 25, marks=pytest.mark.slow) for n in range(100, 300, 25)),
    ],
)
def test_random_programs_give_what_eager_torch_gives(interpreted, tmp_path, first, count):
    """Results, gradients and changed inputs are eager torch's, in Triton's interpreter; what is not
    is shown as small as it gets.
    """
    report = json.loads(
        interpreted("random_program_worker.py", tmp_path, first, count, timeout=280)
    )
    assert [text for found in report["found"].values() for text in found] == []
    assert report["counts"]["programs"] == count
    assert report["counts"]["kernels"] >= count


def test_a_seed_draws_one_program_that_a_user_can_run(programs):
    """The same seed gives the same text, and the text that is shown makes the same inputs and
    results.
    """
    for seed in range(12):
        drawn = programs.drawn(seed)
        programs.drawn.cache_clear()
        assert programs.drawn(seed) == drawn
        space = {}
        exec(drawn.shown(), space)
        given = programs.inputs(replace(drawn, backward=False))
        for one, tensor in zip(drawn.inputs, given, strict=True):
            made = space[one.name].detach()
            assert torch.equal(made, tensor)
            assert (made.stride(), made.storage_offset()) == (
                tensor.stride(),
                tensor.storage_offset(),
            )
        assert (
            programs.compared(
                drawn, programs.called(drawn, programs.function(drawn), programs.inputs(drawn))
            )
            == ""
        )


def test_what_is_drawn_covers_what_models_have(programs):
    """200 seeds draw each family of operators, layout and dtype, gradients, and changing sizes."""
    drawn = [programs.drawn(seed) for seed in range(200)]
    texts = "".join(program.shown() for program in drawn)
    assert [name for name in NAMED if name not in texts] == []
    assert {one.dtype for program in drawn for one in program.inputs} >= {*programs.FLOATS}
    assert {one.layout for program in drawn for one in program.inputs} == {*programs.LAYOUTS}
    differentiated = [p for p in drawn if p.backward and any(given.grad for given in p.inputs)]
    assert len(differentiated) > 80
    assert sum(program.dynamic for program in drawn) > 35
    assert max(len(program.steps) for program in drawn) == programs.MOST_STEPS


def _attention(programs, **more):
    """A program with a product, a view of an input that is returned, a change in place and
    gradients.
    """
    given = programs.Given
    return programs.Drawn(
        (given("x0", ("b", 8), grad=True), given("x1", (8, 4), grad=True), given("x2", ("b", 3))),
        (
            programs.Step(("v0",), ("x0", "x1"), "{0} @ {1}"),
            programs.Step((), ("x2",), "{0}.add_(1)"),
            programs.Step(("v1",), ("x2",), "{0}.t()"),
            programs.Step(("v2",), ("v0",), "torch.tanh({0})"),
        ),
        ("v2", "v1"),
        backward=True,
        **more,
    )


def test_each_kind_of_wrong_result_is_seen(programs):
    """Numbers, dtypes, sizes, strides, shared memory, gradients and inputs that are wrong are each
    found.
    """
    drawn = _attention(programs)

    def given():
        return programs.called(drawn, programs.function(drawn), programs.inputs(drawn))

    assert programs.compared(drawn, given()) == ""
    first, view, gradient, changed = "output 0", "output 1", "gradient of x1", "input x2"
    cases = {
        "wrong: off": {first: lambda t: t + 0.01},
        "dtype": {first: lambda t: t.double()},
        "sizes": {first: lambda t: t[:3]},
        "strides": {first: lambda t: t.t().contiguous().t()},
        "aliases": {view: lambda t: t.t().clone().t()},
        "wrong: other elements": {first: lambda t: t / torch.zeros(())},
    }
    for kind, changes in cases.items():
        got = given()
        got |= {name: change(got[name].detach()) for name, change in changes.items()}
        assert programs.compared(drawn, got).startswith(kind), kind
    for name in (gradient, changed):
        got = given()
        got[name].mul_(1.01)
        assert programs.compared(drawn, got).startswith("wrong: off"), name
    got = given()
    del got[gradient]
    assert programs.compared(drawn, got).startswith("wrong: got")
    # A small gradient that is wrong is as wrong as a large one.
    small = replace(drawn, steps=(*drawn.steps[:3], programs.Step(("v2",), ("v0",), "{0} * 1e-4")))
    found = programs.called(small, programs.function(small), programs.inputs(small))
    found[gradient] = found[gradient] * 1.1
    assert programs.compared(small, found).startswith("wrong: off")


def test_a_failing_program_is_made_as_small_as_it_gets(programs):
    """Lines, inputs, switches and layouts that have nothing to do with a failure are taken away."""
    drawn = _attention(programs, dynamic=True)
    least = programs.smaller(drawn, lambda one: "torch.tanh" in one.text())
    assert [step.text for step in least.steps] == ["torch.tanh({0})"]
    assert (len(least.inputs), least.backward, least.dynamic) == (1, False, False)
    kept = programs.smaller(drawn, lambda one: "add_" in one.text())
    assert [step.text for step in kept.steps] == ["{0}.add_(1)"]


def test_shards_draw_all_seeds_and_are_merged():
    """Each seed is in one shard, and the merged result says how many fail in each way."""
    from tools.codegen import random_programs

    shards = [random_programs._tasks(3, 52, number, 4, small=True) for number in (1, 2, 3, 4)]
    seeds = [
        seed
        for tasks in shards
        for first, count, _ in tasks
        for seed in range(first, first + count)
    ]
    assert sorted(seeds) == list(range(3, 55))
    one = {
        "counts": {"programs": 5, "right": 4},
        "wrong": {"7": ["strides: (4, 1)", ""]},
        "late": [],
        "seconds": 1.0,
    }
    whole = random_programs.merged([one, one | {"wrong": {"9": ["raises: KeyError", ""]}}])
    assert whole["counts"] == {"programs": 10, "right": 8}
    assert whole["kinds"] == {"strides": 1, "raises": 1}
    assert [row["ok"] for row in random_programs.rows(whole, 0)] == [False, True]


def test_answers_of_a_journal_are_not_asked_for_again(tmp_path):
    """What a run noted is kept by the next one, but for a line that was not written whole; what has
    no answer in the time that there was is late.
    """
    from tools.codegen import random_programs

    tasks, journal = random_programs._tasks(0, 10, 1, 1, small=True), tmp_path / "journal"
    answer = {"counts": {"programs": 5, "right": 4}, "wrong": {"3": ["strides: (4, 1)", ""]}}
    noted = [json.dumps({"task": task, **answer}) for task in tasks]
    journal.write_text(f"{noted[0]}\n{noted[1][:-4]}")
    found = random_programs.run(tasks, 1, 0.0, journal)
    assert (found["counts"], found["late"]) == ({"programs": 5, "right": 4}, [[5, 5]])
    assert [*found["wrong"]] == ["3"]
    journal.write_text("\n".join(noted))
    found = random_programs.run(tasks, 1, 0.0, journal)
    assert (found["counts"]["programs"], found["late"], [*found["wrong"]]) == (10, [], ["3"])

# SPDX-License-Identifier: Apache-2.0
"""torch's own lists of operators and modules, run as programs: what they are judged by, and a part
of them.
"""

import json
import os
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("expecttest")

from tools.codegen import suite_exceptions, suite_ties, suites, worker_pool  # noqa: E402
from tools.codegen.suite_judge import (  # noqa: E402
    Outcome,
    Tolerance,
    aliasing,
    difference,
    strides,
)

FLOAT32 = Tolerance(1.3e-6, 1e-5)


def outcome(*outputs, inputs=(), gradients=()):
    return Outcome(list(inputs), list(outputs), list(gradients))


def problem(expected, got, exact=None, compared="numbers"):
    wide = None if exact is None else outcome(exact)
    return difference(outcome(expected), outcome(got), wide, FLOAT32, compared)


def test_what_is_equal_or_close_is_right():
    """Equal whole numbers, close floats, and equal infinities and NaN are right."""
    numbers = torch.tensor([1.0, float("nan"), float("inf")])
    assert problem(numbers, numbers.clone()) == ""
    assert problem(numbers, numbers * (1 + 1e-6)) == ""
    assert problem(torch.arange(3), torch.arange(3)) == ""
    assert problem(3, 3) == problem(None, None) == ""


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.ones(3), torch.ones(3) + 1e-3, "3 of 3 numbers differ"),
        (torch.ones(3), torch.tensor([1.0, 1.0, float("nan")]), "1 of 3 numbers differ"),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), "1 of 1 numbers differ"),
        (torch.arange(3), torch.arange(3) + 1, "3 of 3 numbers differ"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 numbers differ"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "dtype: expected torch.float32"),
        (torch.ones(3), torch.ones(3, 1), r"shape: expected (3,), got (3, 1)"),
        (torch.ones(3), torch.ones(3, device="meta"), "device: expected cpu, got meta"),
        (torch.ones(3), torch.ones(3, requires_grad=True), "requires_grad"),
        (torch.ones(3), None, "expected torch.float32 of (3,), got None"),
        (True, None, "expected True, got None"),
        (3, 3.0, "expected 3, got 3.0"),
    ],
)
def test_what_differs_is_wrong_with_the_first_place_named(expected, got, words):
    """Numbers, NaN and infinities, dtype, size, device, and what is no tensor, are compared."""
    assert words in problem(expected, got, None if not torch.is_tensor(expected) else expected)


def test_floats_that_are_not_close_are_judged_by_their_distance_to_float64():
    """A result as far from float64 as eager's is right, and one three times and more as far is
    wrong.
    """
    exact = torch.linspace(1.0, 2.0, 100, dtype=torch.float64)
    eager = (exact + 1e-3).float()
    assert problem(eager, (exact - 1e-3).float(), exact) == ""
    assert problem(eager, exact.float(), exact) == ""
    assert "RMSE to float64 0.005" in problem(eager, (exact - 5e-3).float(), exact)
    assert "no float64 reference" in problem(eager, exact.float())


def test_floats_of_whole_numbers_have_the_tolerance_of_floats():
    """A tolerance for int64 is none, and what is made of it in float32 has torch's for float32;
    float32 is no reference for itself.
    """
    exact, none = torch.tensor([1.0, 2.0]), Tolerance(0.0, 0.0)
    one, near, far = (outcome(exact * factor) for factor in (1.0, 1 + 1e-6, 1 + 1e-4))
    assert difference(one, near, one, none) == ""
    assert "no float64 reference" in difference(one, far, one, none)


def test_random_numbers_are_compared_by_range_and_memory_as_it_was_found_by_kind():
    """Other draws are right, numbers far outside are not, and neither is another dtype."""
    assert problem(torch.rand(99), torch.rand(99), compared="range") == ""
    assert "random numbers" in problem(torch.rand(99), torch.rand(99) + 99, compared="range")
    assert "finite" in problem(torch.rand(9), torch.rand(9) / 0, compared="range")
    assert problem(torch.rand(9), torch.rand(9) + 99, compared="nothing") == ""
    assert "dtype" in problem(torch.rand(9), torch.rand(9).double(), compared="nothing")


def test_inputs_and_gradients_are_compared_too():
    """What a call changed, and what flows back, is judged like its outputs."""
    right, off = torch.ones(2), torch.zeros(2)
    for part in ("inputs", "gradients"):
        one, other = outcome(**{part: [right, right]}), outcome(**{part: [right, off]})
        found = difference(one, other, None, FLOAT32)
        assert found.startswith(f"{part[:-1]} 1: 2 of 2 numbers differ")
        assert difference(one, outcome(), None, FLOAT32) == f"{part}: expected 2, got 0"


def test_strides_are_those_of_eager_torch_where_they_say_anything():
    """Another order in memory is wrong; strides of one element, and of none, say nothing."""
    expected = outcome(torch.ones(3, 4), torch.ones(3, 1), torch.ones(0, 4))
    assert (
        strides(expected, outcome(torch.ones(3, 4), torch.ones(1, 3).t(), torch.ones(4, 0).t()))
        == ""
    )
    turned = outcome(torch.ones(4, 3).t(), *expected.outputs[1:])
    assert strides(expected, turned) == "output 0: strides of (3, 4): expected (4, 1), got (1, 3)"


def test_aliasing_is_that_of_eager_torch():
    """An output that is an input, a view of one at its place, or a view of another output, is no
    other tensor.
    """
    given = torch.arange(6.0)
    eager = outcome(given, given[2:], given + 1, inputs=[given])
    same = given.clone()
    assert aliasing(eager, outcome(same, same[2:], same + 1, inputs=[same])) == ""
    wrong = {
        (given.clone(), given[2:], given + 1): "output 0: expected input 0 itself",
        (
            given[:],
            given[2:],
            given + 1,
        ): "output 0: expected input 0 itself, got a view of input 0",
        (given, given[1:5], given + 1): "got a view of input 0, 1.0 elements",
        (given, given[2:], given[:]): "output 2: expected memory of its own",
    }
    for outputs, words in wrong.items():
        assert words in aliasing(eager, outcome(*outputs, inputs=[given]))
    shared = torch.ones(4)
    two, apart = outcome(shared[:2], shared[2:]), outcome(torch.ones(2), torch.ones(2))
    assert "output 1: expected a view of output 0, 2.0 elements" in aliasing(two, apart)


def test_a_crash_and_a_hang_of_one_case_end_no_other(beside):
    """Processes that die, hang, are spent or lose their device are renewed, and each task has an
    answer.
    """
    beside("suite_answers")
    tasks = ["right", "crash", "raise", "hang", "spent", "lost", "last"]
    told = []
    found = worker_pool.answered(
        "suite_answers", "answered", tasks, 1, 60.0, lambda *told_: told.append(told_), each_s=3.0
    )
    assert [task for task, _ in told] == tasks
    assert found["crash"] == {"error": "its process ended with -11"}
    assert found["hang"] == {"error": "no answer in 3 s"}
    assert found["raise"]["error"] == "ValueError: of the task"
    processes = [found[task]["process"] for task in ("right", "spent", "lost", "last")]
    assert len(set(processes)) == 4


def test_only_typed_errors_are_allowed_where_an_entry_says_so(monkeypatch):
    """A list of exceptions turns what it names into `allowed`, and an untyped error or a wrong
    number stays.
    """
    entry = suite_exceptions.SuiteException("op_db/nonzero/*", "raises", "sizes that values decide")
    monkeypatch.setattr(suite_exceptions, "EXCEPTIONS", (entry,))
    raised = {"outcome": "raises", "why": "UnsupportedOperator", "typed": True}
    verdict = suites._verdict("op_db/nonzero/float32/plain/0", raised)
    assert (verdict["outcome"], verdict["reason"]) == ("allowed", entry.reason)
    for name, answer in {
        "op_db/nonzero/float32/plain/1": {**raised, "typed": False},
        "op_db/sort/float32/plain/0": raised,
        "op_db/nonzero/float32/plain/2": {"outcome": "wrong", "why": "numbers"},
        "op_db/nonzero/float32/plain/3": {"error": "its process ended with -11"},
    }.items():
        assert suites._verdict(name, answer)["outcome"] in {"raises", "wrong"}


def test_a_run_goes_on_from_its_journal_or_repeats_what_was_at_fault(monkeypatch, tmp_path, capsys):
    """`--resume` runs what the journal lacks, `--again` what it has as wrong or raised; the last
    verdict on a case counts.
    """
    from tools.codegen.suite_cases import Case

    cases = [Case("op_db", name, "float32", "plain", 0) for name in ("add", "sub", "mul", "div")]
    monkeypatch.setattr(suites, "_listed", lambda _device: (cases, {}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("CODEGEN_SUITES_DEVICE", "OMP_NUM_THREADS", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")
    asked = []

    def run(tasks, options, journal):
        asked.append([case.operator for case in tasks])
        found = {case.name: {"outcome": "right", "why": ""} for case in tasks}
        with journal.open("a") as file:
            file.writelines(json.dumps({"case": n, **v}) + "\n" for n, v in found.items())
        return found

    monkeypatch.setattr(suites, "run", run)
    out = tmp_path / "suites.json"
    words = ["suites", "--out", str(out)]
    journal = tmp_path / "suites.json.journal"
    for name, verdict in (("add", "wrong"), ("sub", "right"), ("mul", "raises")):
        line = {"case": f"op_db/{name}/float32/plain/0", "outcome": verdict, "why": "as it was"}
        with journal.open("a") as file:
            file.write(json.dumps(line) + "\n")
    monkeypatch.setattr("sys.argv", [*words, "--resume"])
    assert suites.main() == 1
    monkeypatch.setattr("sys.argv", [*words, "--again"])
    assert suites.main() == 0
    assert asked == [["div"], ["add", "mul"]]
    assert json.loads(out.read_text())["counts"]["op_db"] == {"right": 4}
    monkeypatch.setattr("sys.argv", words)
    assert suites.main() == 0
    assert asked[-1] == ["add", "sub", "mul", "div"]


def test_every_exception_has_a_reason_and_names_cases():
    """No entry allows all, and each says why."""
    for entry in suite_exceptions.EXCEPTIONS:
        assert len(entry.reason) > 10
        assert len(entry.cases.split("/")) >= 3


def test_samples_of_a_case_are_the_same_and_small():
    """A case has one call whoever asks, in every layout, and what is changed in it is nobody
    else's.
    """
    from tools.codegen import suite_cases

    for mode in ("plain", "sliced", "transposed", "compiled"):
        case = suite_cases.Case("op_db", "mm", "float32", mode, 0)
        one, other = (suite_cases.call_of(case, "cpu") for _ in range(2))
        assert all(map(torch.equal, one.tensors, other.tensors))
        assert one.tensors[0].numel() <= 2048
        assert one.tensors[0].is_contiguous() == (mode in {"plain", "compiled"})
        one.tensors[0].detach().zero_()
        assert not torch.equal(one.tensors[0], other.tensors[0])


def test_an_operator_that_is_told_a_dtype_has_a_float64_reference():
    """The dtype of its input, as an argument, is float64 there as well."""
    from tools.codegen import suite_cases, suite_sides

    case = suite_cases.Case("op_db", "_softmax_backward_data", "bfloat16", "plain", 1)
    call = suite_cases.call_of(case, "cpu")
    assert suite_sides._exact(call, gradients=False).outputs[0].dtype == torch.float64
    assert call.function(*call.tensors).dtype == torch.bfloat16


def test_what_cancels_is_judged_beside_inputs_off_by_their_last_bit():
    """Eager mode may be near the exact number by luck; what no such run comes to is wrong."""
    from tools.codegen import suite_cases, suite_sides

    def function(x, numbers):
        return x.sum() - 64 / 3 + numbers.sum()

    given = [torch.full((64,), 1 / 3), torch.zeros(2, dtype=torch.int64)]
    moved = suite_cases.nudged(given, 0)
    assert torch.equal(moved[1], given[1])
    assert 0 < float((moved[0] - given[0]).abs().max()) < 1e-7
    assert torch.equal(given[0], torch.full((64,), 1 / 3))
    call = suite_cases.Call(function, given, lambda result: result, Tolerance(1.3e-6, 1e-9))
    theirs = suite_sides._Eager(
        outcome(function(*given), inputs=given),
        suite_sides._exact(call, gradients=False),
        "numbers",
    )

    def beside(result):
        got = outcome(result, inputs=given)
        return suite_sides._beside_nudged(call, theirs, got, gradients=False)

    assert beside(function(*moved))
    assert not beside(function(*moved) + 1e-3)


def test_shards_are_all_cases_and_each_once():
    """Every case of the lists belongs to one shard, and names are the cases' own."""
    from tools.codegen import suite_cases

    cases, _ = suite_cases.listed("cpu")
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) > 9_000
    options = [suites.parsed(["--shard", f"{number}/7"]) for number in range(1, 8)]
    shards = [[case.name for case in cases if suites._chosen(case, one)] for one in options]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert min(map(len, shards)) > len(names) / 14


@pytest.fixture
def cases_of_suites(monkeypatch, tmp_path):
    """Run cases in worker processes, and return the status and the result; the lists of torch are
    imported here once for all tests of this file.
    """
    for name in ("CODEGEN_SUITES_DEVICE", "OMP_NUM_THREADS", "PYTHONWARNINGS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")
    # A worker imports what this process has on its path.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def run(*words):
        out = tmp_path / "suites.json"
        monkeypatch.setattr("sys.argv", ["suites", "--out", str(out), *map(str, words)])
        return suites.main(), json.loads(out.read_text())

    return run


# Element-wise operators, reductions, views, products, convolutions, and a module with running
# statistics.
SAMPLE = (
    "op_db/add/float32/*",
    "op_db/add/int64/plain/*",
    "op_db/softmax/float32/compiled/*",
    "op_db/permute/bfloat16/sliced/0",
    "op_db/where/bool/plain/*",
    "op_db/zeros_like/float32/dynamic/0",
    "op_db/empty_like/float32/plain/0",
    "op_db/mm/bfloat16/plain/0",
    "module_db/nn.Linear.train/float32/compiled/0",
)


@pytest.mark.slow  # torch is imported in another process; test_operators has these operators
def test_operators_of_torch_are_right_as_programs(cases_of_suites):
    """A small part of the lists, each dtype and mode: none wrong, none raised; which case has
    nothing to be compared with is told.
    """
    only = [word for pattern in SAMPLE for word in ("--only", pattern)]
    status, result = cases_of_suites(*only)
    assert (status, result["wrong"], result["raises"]) == (0, {}, {})
    assert result["not_run"] == 0
    assert result["operators"] == {"op_db": 7, "module_db": 1}
    assert result["counts"]["op_db"]["right"] > 20
    assert result["unchecked"] == ["op_db/empty_like/float32/plain/0"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_shard_of_the_lists_is_right_as_programs(cases_of_suites):
    """About five minutes of the lists: none wrong, and none raised that the list of exceptions does
    not name.
    """
    workers = min(2, os.cpu_count() or 1)
    status, result = cases_of_suites("--shard", "7/12", "--workers", workers)
    assert (status, result["wrong"], result["raises"]) == (0, {}, {})
    assert result["counts"]["op_db"]["right"] > 300


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_lazy_tensor_has_the_same_numbers_and_other_ones_in_memory(dtype):
    """Copies, which each side is given, are as lazy."""
    from tools.codegen import suite_cases

    lazy, plain = (
        suite_cases.call_of(suite_cases.Case("op_db", "mul", dtype, mode, 0), "cpu").tensors[0]
        for mode in ("lazy", "plain")
    )
    for one in (lazy, *suite_cases.copied([lazy])):
        assert one.is_neg() or one.is_conj()
        assert torch.equal(one.detach(), plain.detach())
        assert one.requires_grad == plain.requires_grad


def chosen(source, places, dim=1, gradient=None):
    """Return the outcome of an operator that returns elements and their places."""
    values = source.gather(dim, places if places.dim() == source.dim() else places.unsqueeze(dim))
    values = values if places.dim() == source.dim() else values.squeeze(dim)
    gradients = [] if gradient is None else [gradient]
    return outcome(values, places, inputs=[source], gradients=gradients)


def test_which_of_equal_elements_is_named_is_the_programs_choice():
    """Places are right that hold the values, of NaN too, and not ones that lie outside, hold other
    values, or name an element twice; nor is another operator's.
    """
    nan = float("nan")
    source = torch.tensor([[2.0, 5.0, 5.0, nan, nan], [1.0, 1.0, 1.0, 0.0, 0.0]])
    eager = chosen(source, torch.tensor([[3, 4, 1], [0, 1, 2]]))

    def right(places, operator="topk", **changed):
        got = chosen(source, torch.tensor(places).clamp(max=4), **changed)
        got.outputs[1] = torch.tensor(places)
        named = suite_ties.among_equals(operator, eager, got)
        return not difference(eager, named, None, FLOAT32)

    assert right([[4, 3, 2], [2, 0, 1]])
    assert not right([[4, 3, 2], [2, 0, 1]], operator="cummax")
    assert not right([[4, 3, 0], [2, 0, 1]])
    assert not right([[4, 4, 2], [2, 0, 1]])
    assert not right([[4, 3, 2], [2, 0, 3]])
    assert not right([[4, 3, 5], [2, 0, 1]])
    one = chosen(source, torch.tensor([2, 2]))
    other = chosen(source, torch.tensor([1, 0]))
    assert not difference(one, suite_ties.among_equals("kthvalue", one, other), None, FLOAT32)


def test_gradients_may_go_to_another_of_equal_elements():
    """Among equals they are in eager's order, whatever the program's was; to none that differs."""
    source = torch.tensor([[2.0, 5.0, 5.0, 5.0]])
    eager = chosen(source, torch.tensor([[1, 2]]), gradient=torch.tensor([[0.0, 3.0, 4.0, 0.0]]))

    def right(*gradient):
        got = chosen(source, torch.tensor([[3, 1]]), gradient=torch.tensor([gradient]))
        named = suite_ties.among_equals("topk", eager, got)
        return not difference(eager, named, None, FLOAT32)

    assert right(0.0, 4.0, 0.0, 3.0)
    assert not right(3.0, 4.0, 0.0, 0.0)
    assert not right(0.0, 4.0, 4.0, 0.0)

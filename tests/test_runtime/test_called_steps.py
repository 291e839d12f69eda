# SPDX-License-Identifier: Apache-2.0
"""A step of a program is the same in Python and compiled, whatever it calls."""

import gc
import weakref
from functools import partial

import pytest

from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.program import called_steps
from bundler.runtime.program.called_steps import PythonStep
from bundler.runtime.program.tensor_addresses import ALIGNED_BYTES


class Placed:
    """A tensor of no library."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@pytest.fixture(params=["python", "extension"])
def step(request):
    """What makes a step."""
    if request.param == "python":
        return PythonStep
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    return partial(EXTENSION.Step, ALIGNED_BYTES)


@pytest.fixture(params=["python", "extension"])
def run_steps(request):
    """What takes several."""
    if request.param == "python":
        return called_steps._run_steps
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    return EXTENSION.run_steps


def told(*given, **named):
    return given, named


def test_a_step_calls_with_values_by_position_and_by_name(step):
    values = [1, 2, 3, None]
    assert step(told, (2, 0, 1), ("scale",), 3)(values) is None
    assert values == [1, 2, 3, ((3, 1), {"scale": 2})]


def test_a_step_takes_as_many_values_as_a_function_has(step):
    values = [*range(200), None]
    step(told, tuple(range(200)), (), 200)(values)
    assert values[200] == (tuple(range(200)), {})


def test_what_nobody_keeps_is_dropped(step):
    values = [1, 2]
    step(told, (0,))(values)
    assert values == [1, 2]


def test_a_step_without_a_function_empties_places(step):
    values = [1, 2, 3]
    step(None, (2, 0))(values)
    assert values == [None, 2, None]


@pytest.mark.parametrize("apart", [None, (0,)], ids=["anywhere", "apart"])
def test_a_result_is_looked_at_until_it_is_recognized_and_lies_apart(step, apart):
    """A view may begin where its tensor does; a new tensor may not, and has to be aligned."""
    looked = []

    def finish(values, result):
        looked.append(result.address)
        values[1] = result
        return lambda other: other.address != 64

    values, next_one = [Placed(16), None], []
    made = step(lambda _: next_one[-1], (0,), (), 1, finish, apart)
    for address in (32, 32, 16, 8, 64):
        next_one.append(Placed(address))
        made(values)
        assert values[1] is next_one[-1]
    assert looked == ([32, 64] if apart is None else [32, 16, 8, 64])


def test_a_finish_that_returns_nothing_looks_at_each_result(step):
    looked = []
    made = step(told, (), (), 0, lambda _, result: looked.append(result))
    for _ in range(3):
        made([None])
    assert len(looked) == 3


class Again:
    """What launches a kernel quickly."""

    def __init__(self, start, count):
        self.start, self.count, self.launched = start, count, []

    def launch(self, numbers, *arguments):
        self.launched.append((numbers, arguments))


class Tuned:
    """Of a kernel's launch."""

    again = None


def test_a_launch_goes_to_what_the_kernel_has_for_it_now():
    """Numbers that end the call come first; a kernel that has nothing, or nothing any more, is
    launched as ever.
    """
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    slow, tuned, first, second = [], Tuned(), Again(2, 3), Again(1, 1)
    made = EXTENSION.Step(ALIGNED_BYTES, lambda *a: slow.append(a), (3, 0, 1, 2), tuned=tuned)
    values = [1.5, 7, 8, "x"]
    for again in (None, False, first, first, second, None):
        tuned.again = again
        made(values)
    assert slow == [("x", 1.5, 7, 8)] * 4
    assert first.launched == [((7, 8), ("x", 1.5, 7))] * 2
    # 1.5 may be another number in the next call.
    assert second.launched == []


def test_a_kernel_with_a_number_of_each_call_at_its_end_is_launched_as_ever(step):
    tuned, slow = Tuned(), []
    tuned.again = Again(1, 2)
    made = step(lambda *a: slow.append(a), (0, 1), tuned=tuned)
    for number in (1.5, 2.5):
        made(["x", number])
    assert slow == [("x", 1.5), ("x", 2.5)]


def fails(*_):
    raise KeyError("that")


@pytest.mark.parametrize("where", ["function", "finish", "recognizer"])
def test_what_is_raised_comes_out_and_no_further_step_is_taken(step, run_steps, where):
    finish = {"function": None, "finish": fails, "recognizer": lambda *_: fails}[where]
    taken = []
    made = step(fails if where == "function" else told, (), (), 0, finish)
    steps = (lambda _: taken.append(1), made, lambda _: taken.append(2))
    if where == "recognizer":
        run_steps(steps, [None])
        taken.clear()
    with pytest.raises(KeyError, match="that"):
        run_steps(steps, [None])
    assert taken == [1]


@pytest.mark.parametrize("place", [3, 10**6])
def test_a_place_that_is_none_is_refused(step, place):
    for made in (step(told, (place,)), step(None, (place,)), step(told, (), (), place)):
        with pytest.raises(IndexError):
            made([1, 2, 3])


def test_the_compiled_steps_refuse_what_is_no_list():
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    made = EXTENSION.Step(ALIGNED_BYTES, told, (0,))
    for call in (
        lambda: made((1,)),
        lambda: made([1], 2),
        lambda: EXTENSION.run_steps([made], [1]),
        lambda: EXTENSION.run_steps((made,), (1,)),
        lambda: EXTENSION.Step(0, told, (0,)),
        lambda: EXTENSION.Step(ALIGNED_BYTES, told, (0,), ("a", "b")),
        lambda: EXTENSION.Step(ALIGNED_BYTES, told, ("a",)),
    ):
        with pytest.raises(TypeError):
            call()


def test_a_step_keeps_no_value_and_goes_with_what_made_it(step):
    """Values are the call's; a step that its own function holds is collected."""

    class Holder:
        def call(self, value):
            return value

    holder, value = Holder(), Placed(16)
    holder.step = step(holder.call, (0,), (), 1)
    values = [value, None]
    holder.step(values)
    gone = [weakref.ref(value), weakref.ref(holder)]
    del value, values, holder
    gc.collect()
    assert [one() for one in gone] == [None, None]

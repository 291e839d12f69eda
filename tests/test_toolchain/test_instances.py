# SPDX-License-Identifier: Apache-2.0
"""Which JIT functions and tuners of a process are known, and that looking for them leaves the
program alone.
"""

import copy
import gc
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import types
import weakref

import numpy as np
import pytest

from bundler.toolchain import instances

pytestmark = [pytest.mark.toolchain, pytest.mark.release]


class Made:
    """Stands for a class of Triton's."""

    def __init__(self, name, *, fails=False):
        self.name = name
        if fails:
            raise ValueError("it cannot be made")


class MadeAgain(Made):
    """Derived from it, with a constructor of its own."""

    def __init__(self):
        super().__init__("again")


@pytest.fixture
def made(monkeypatch):
    """A class that is noted from now on, and what is known of it."""
    module = types.ModuleType("module_of_made")
    module.Made = type(
        "Made",
        (Made,),
        {"__init__": Made.__init__, "__setstate__": lambda self, s: vars(self).update(s)},
    )
    kind = instances.InstanceKind("module_of_made", "Made", ("__init__", "__setstate__"))
    monkeypatch.setitem(sys.modules, "module_of_made", module)
    monkeypatch.setattr(instances, "_NOTED", (kind,))
    return module.Made, lambda: instances.instances(kind)


def test_what_is_made_from_now_on_is_known(made):
    """Instances are known however they are made: by the constructor, by that of a class derived
    from it, as a copy.
    """
    cls, known = made
    early = cls("early")
    instances.note_from_now_on()
    one, again, copied = cls("one"), type("Again", (cls,), {})(name="again"), copy.copy(early)
    assert {id(found) for found in known()} == {id(one), id(again), id(copied)}


def test_what_is_gone_is_not_known(made):
    """Nothing is kept alive by being noted."""
    cls, known = made
    instances.note_from_now_on()
    watch = weakref.ref(cls("one"))
    gc.collect()
    assert (watch(), known()) == (None, [])


def test_constructors_stay_as_they_are(made):
    """A wrapped constructor has the signature, the name and the text of the original, and raises
    what that raises.
    """
    cls, known = made
    before = (
        inspect.signature(cls),
        inspect.signature(cls.__init__),
        inspect.getsource(cls.__init__),
    )
    instances.note_from_now_on()
    assert (
        inspect.signature(cls),
        inspect.signature(cls.__init__),
        inspect.getsource(cls.__init__),
    ) == before
    assert (cls.__init__.__name__, cls.__init__.__doc__) == ("__init__", Made.__init__.__doc__)
    with pytest.raises(ValueError, match="it cannot be made"):
        cls("one", fails=True)
    with pytest.raises(TypeError):
        cls()
    assert known() == []


def test_a_constructor_is_wrapped_once(made):
    """However often, and from however many threads, there is one wrapper; a class that was made
    anew gets its own.
    """
    cls, known = made
    threads = [threading.Thread(target=instances.note_from_now_on) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not hasattr(cls.__init__.__wrapped__, "__wrapped__")
    new = sys.modules["module_of_made"].Made = type("Made", (Made,), {"__init__": Made.__init__})
    instances.note_from_now_on()
    assert cls("old") not in known()
    one = new("new")
    assert known() == [one]


def test_another_copy_of_our_module_finds_the_notes(made, monkeypatch):
    """Where our module is imported anew, what the first copy noted is known, and nothing is wrapped
    twice.
    """
    cls, _ = made
    instances.note_from_now_on()
    wrapped, one = cls.__init__, cls("one")
    spec = importlib.util.find_spec("bundler.toolchain.instances")
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    monkeypatch.setattr(again, "_NOTED", instances._NOTED)
    again.note_from_now_on()
    assert cls.__init__ is wrapped
    assert again.instances(*again._NOTED) == [one]


def test_a_forked_child_does_not_wait_for_its_parents_threads(made):
    """A child that was forked while another thread was wrapping goes on, and knows what its parent
    knew.
    """
    cls, known = made
    instances.note_from_now_on()
    one = cls("one")
    with instances._wrapping.lock:
        child = os.fork()
        if not child:
            os._exit(not (instances._wrapping.lock.acquire(blocking=False) and known() == [one]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_class_that_is_not_there_is_no_trouble(run_python):
    """Where neither Triton nor torch is imported, nothing is known, and asking imports nothing."""
    code = """
import sys
from bundler.toolchain import instances
instances.note_from_now_on()
assert not any(map(instances.instances, instances._NOTED))
assert not {"triton", "torch"} & set(sys.modules)
"""
    run_python(code)


# ----------------------------------------------------------------------------- What was made before


@pytest.fixture
def module(monkeypatch):
    """An empty module, imported."""
    made = types.ModuleType("module_to_look_into")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def reachable():
    return [found.name for found in instances.reachable(Made, instances.module_namespaces())]


class Tuner(Made):
    """Holds a function, as Triton's tuners and heuristics do."""

    def __init__(self, fn):
        super().__init__("tuner")
        self.fn = fn


def closing_over(made, *, later=False):
    """Return a function that holds an object, and a variable that has no value yet."""
    if later:
        unset = made

    def launch():
        return made, unset

    return launch


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (Made("global"), ["global"]),
        (MadeAgain(), ["again"]),
        (Tuner(Tuner(Made("inner"))), ["inner", "tuner", "tuner"]),
        ({"key": Made("dict")}, ["dict"]),
        ([Made("list")], ["list"]),
        ((Made("tuple"),), ["tuple"]),
        (type("Op", (), {"kernel": Made("attribute")}), ["attribute"]),
        (type("Op", (), {"kernel": staticmethod(Made("static"))}), ["static"]),
        (type("Meta", (type,), {})("Op", (), {"kernel": Made("metaclass")}), ["metaclass"]),
        (closing_over(Made("closure")), ["closure"]),
        # What docs/guarantees.md says is not seen.
        ({"key": [Made("deep")]}, []),
        (types.SimpleNamespace(kernel=Made("instance")), []),
        ({Made("set")}, []),
    ],
)
def test_what_a_module_leads_to_is_found(module, value, names):
    """Globals, what tuners hold, members of containers, attributes of classes and closures are
    found; what lies deeper is not.
    """
    module.value = value
    assert sorted(reachable()) == names


def test_looking_loads_no_module_and_asks_no_object(module, monkeypatch, tmp_path):
    """A module that is loaded when it is first asked stays unloaded, and objects that answer to
    everything are not asked.
    """
    (tmp_path / "lazy_module.py").write_text("raise SystemExit('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_module", tmp_path / "lazy_module.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)

    def refuse(*_):
        raise SystemExit("asked")

    asking = dict.fromkeys(
        (
            "__getattr__",
            "__getattribute__",
            "__eq__",
            "__hash__",
            "__iter__",
            "__len__",
            "__bool__",
        ),
        refuse,
    )
    strange = type("Strange", (), {**asking, "__class__": property(refuse)})()
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    monkeypatch.setitem(sys.modules, "strange_module", strange)
    monkeypatch.setitem(sys.modules, "no_module", None)
    module.strange, module.lists, module.made = strange, [strange], Made("one")
    module.cls = type("Meta", (type,), asking)(
        "Op", (), {"strange": strange, "kernel": Made("two")}
    )
    assert sorted(reachable()) == ["one", "two"]


def test_picking_begins_again_where_a_dictionary_changed():
    """A dictionary that changes its size meanwhile is looked at again; one that never rests is
    given up.
    """

    class Values:
        def __init__(self, changes):
            self.changes = changes

        def __iter__(self):
            self.changes -= 1
            if self.changes >= 0:
                raise RuntimeError("dictionary changed size during iteration")
            return iter(["text", 1])

    wanted = instances.subtypes(int)
    assert instances.pick(Values(3), wanted) == [1]
    assert instances.pick(Values(10**6), wanted) == []


def test_picking_holds_nothing_but_what_is_picked():
    """While a namespace is looked through, another thread changes the size of an array in it, which
    numpy refuses when it is held.
    """
    array = np.zeros(4)
    namespace = {number: f"text {number}" for number in range(100_000)} | {"array": array}
    del array
    broken, stop = [], threading.Event()

    def grow():
        size = 4
        while not stop.is_set():
            size = 9 - size
            try:
                namespace["array"].resize(size)
            except ValueError as error:
                broken.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(20):
            assert instances.pick(dict.values(namespace), instances.subtypes(Made)) == []
    finally:
        stop.set()
        thread.join()
    assert broken == []


# ------------------------------------------------------------------------- Triton's and torch's own


@pytest.fixture
def kept_function(load_kernels, monkeypatch):
    """Return a function that makes a JIT function which neither a module nor Triton's list leads
    to.
    """

    def make():
        add = load_kernels().add
        del sys.modules["kernels_for_tests"]
        monkeypatch.setattr(
            sys.modules[add.__class__.__module__],
            "_triton_jit_function_registry",
            {},
            raising=False,
        )
        return add

    return make


def test_functions_behind_tuners_are_found(kept_function, monkeypatch, module):
    """A JIT function is found behind heuristics and a tuner that were made before anybody
    looked.
    """
    import triton

    # As if nobody had noted: other tests of this process did.
    monkeypatch.setattr(instances, "_notes_of", lambda _: None)
    add = kept_function()
    module.add = triton.autotune([triton.Config({"BLOCK": 64})], ["n"])(
        triton.heuristics({"n": len})(add)
    )
    assert add in instances.instances(instances.JIT_FUNCTION)
    assert module.add in instances.instances(instances.TUNER)
    del module.add
    assert add not in instances.instances(instances.JIT_FUNCTION)


def test_functions_that_code_keeps_to_itself_are_noted(kept_function):
    """A JIT function that nothing leads to is known when it was made after we came, and Triton
    finds its wrapped classes in order.
    """
    import triton

    instances.note_from_now_on()
    kept = kept_function()
    tuner = triton.autotune([triton.Config({"BLOCK": 64})], ["n"])(kept)
    assert kept in instances.instances(instances.JIT_FUNCTION)
    assert tuner in instances.instances(instances.TUNER)
    assert "cache_results" in inspect.signature(triton.runtime.Autotuner.__init__).parameters


def test_tuners_of_inductor_are_noted_where_they_come_as_pickles():
    """Inductor's tuners come from compile workers and caches as pickles; they are known too."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    instances.note_from_now_on()
    made = object.__new__(CachingAutotuner)
    made.launchers, made.inductor_meta = [], {}
    come = pickle.loads(pickle.dumps(made))
    assert come in instances.instances(instances.INDUCTOR_TUNER)

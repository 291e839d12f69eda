# SPDX-License-Identifier: Apache-2.0
"""The compiled dispatcher sees by itself that Triton calls nothing around a launch, and hears of
every hook that comes, however it comes.
"""

import sys
import types

import launch_calls as calls
import pytest

from bundler.runtime.launch import compiled_dispatch
from bundler.toolchain.profiler_hooks import are_present

KNOBS = "triton.knobs"
ARGS = (calls.X, calls.Y, calls.OUT, 1024)
pytestmark = pytest.mark.parametrize("cuda", ["compiled"], indirect=True)


def make_module():
    """Return a module like Triton's, with classes of its own."""

    class Chain:
        def __init__(self):
            self.calls = []

        def __call__(self, facts):
            for call in self.calls:
                call(facts)

    class Runtime:
        launch_enter_hook, launch_exit_hook = Chain(), Chain()

    module = types.ModuleType(KNOBS)
    module.Chain, module.Runtime, module.runtime = Chain, Runtime, Runtime()
    return module


@pytest.fixture
def knobs(monkeypatch):
    """Put such a module in the place of Triton's."""
    module = make_module()
    monkeypatch.setitem(sys.modules, KNOBS, module)
    return module


@pytest.fixture
def asked(monkeypatch):
    """Return a list that grows whenever Python is asked for hooks."""
    asked = []
    monkeypatch.setattr(
        compiled_dispatch, "are_present", lambda: (asked.append(1), are_present())[1]
    )
    return asked


@pytest.fixture
def add(asked, knobs, cuda):
    """Return a kernel whose calls are known."""
    kernel = cuda["add"]
    kernel.forget()  # its dispatcher is made again, and takes what `asked` put in place
    for _ in range(3):
        kernel[(4,)](*ARGS)
    asked.clear()
    return kernel


def full_chain(knobs, hook):
    chain = knobs.Chain()
    chain.calls.append(hook)
    return chain


def add_member(knobs, hook):
    knobs.runtime.launch_enter_hook.calls.append(hook)
    return knobs.runtime.launch_enter_hook.calls.clear


def add_last_member(knobs, hook):
    knobs.runtime.launch_exit_hook.calls.append(hook)
    return knobs.runtime.launch_exit_hook.calls.clear


def replace_members(knobs, hook):
    knobs.runtime.launch_enter_hook.calls = [hook]
    return lambda: setattr(knobs.runtime.launch_enter_hook, "calls", [])


def set_chain_of_object(knobs, hook):
    knobs.runtime.launch_exit_hook = full_chain(knobs, hook)
    return lambda: delattr(knobs.runtime, "launch_exit_hook")


def set_chain_and_an_empty_one(knobs, hook):
    knobs.runtime.launch_exit_hook = full_chain(knobs, hook)
    return lambda: setattr(knobs.runtime, "launch_exit_hook", knobs.Chain())


def set_chain_of_class(knobs, hook):
    before, knobs.Runtime.launch_enter_hook = (
        knobs.Runtime.launch_enter_hook,
        full_chain(knobs, hook),
    )
    return lambda: setattr(knobs.Runtime, "launch_enter_hook", before)


def set_function(knobs, hook):
    knobs.runtime.launch_enter_hook = hook
    return lambda: delattr(knobs.runtime, "launch_enter_hook")


def replace_members_of_object(knobs, hook):
    knobs.runtime.__dict__ = {"launch_enter_hook": full_chain(knobs, hook)}
    return lambda: setattr(knobs.runtime, "__dict__", {})


def replace_object(knobs, hook):
    before, knobs.runtime = knobs.runtime, knobs.Runtime()
    knobs.runtime.launch_enter_hook = full_chain(knobs, hook)
    return lambda: setattr(knobs, "runtime", before)


def replace_module(knobs, hook):
    sys.modules[KNOBS] = make_module()
    sys.modules[KNOBS].runtime.launch_exit_hook.calls.append(hook)
    return lambda: sys.modules.update({KNOBS: knobs})


COMINGS = (
    add_member,
    add_last_member,
    replace_members,
    set_chain_of_object,
    set_chain_and_an_empty_one,
    set_chain_of_class,
    set_function,
    replace_members_of_object,
    replace_object,
    replace_module,
)


@pytest.mark.parametrize("come", COMINGS, ids=lambda come: come.__name__)
def test_a_hook_is_heard_from_the_next_launch_on(add, knobs, asked, come):
    """It hears each launch until it goes, and Python is asked for no launch before and after."""
    heard = []
    for round_ in range(1, 3):
        leave = come(knobs, heard.append)
        add[(4,)](*ARGS)
        add[(4,)](*ARGS)
        leave()
        assert (len(heard), len(asked)) == (2 * round_, 2 * round_)
        for _ in range(2):
            add[(4,)](*ARGS)
        assert (len(heard), len(asked)) == (2 * round_, 2 * round_)


def test_without_triton_nothing_is_asked(add, asked, monkeypatch):
    """A process that has not loaded Triton has no hooks."""
    monkeypatch.delitem(sys.modules, KNOBS)
    add[(4,)](*ARGS)
    assert asked == []


class Computed:
    """Members that are computed."""

    calls = property(lambda self: [])


class Unusual(list):
    """Members that are no plain list."""


def no_module(knobs):
    return types.SimpleNamespace(runtime=knobs.runtime)


def computing_object(knobs):
    class Computing(knobs.Runtime):
        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

    return with_object(Computing())


def with_object(runtime):
    module = types.ModuleType(KNOBS)
    module.runtime = runtime
    return module


def computed_members(_knobs):
    class Runtime:
        launch_enter_hook = launch_exit_hook = Computed()

    return with_object(Runtime())


def unusual_members(knobs):
    chain = knobs.Chain()
    chain.calls = Unusual()
    return with_object(types.SimpleNamespace(launch_enter_hook=chain, launch_exit_hook=chain))


def no_hooks(_knobs):
    class Runtime:
        launch_enter_hook = launch_exit_hook = None

    return with_object(Runtime())


@pytest.mark.parametrize(
    "make", [no_module, computing_object, computed_members, unusual_members, no_hooks]
)
def test_what_is_made_otherwise_is_asked_of_python(cuda, add, asked, monkeypatch, make, knobs):
    """Launches go on, and each of them asks."""
    monkeypatch.setitem(sys.modules, KNOBS, make(knobs))
    before = len(cuda.driver.launches)
    for _ in range(3):
        add[(4,)](*ARGS)
    assert (len(asked), len(cuda.driver.launches) - before) == (3, 3)


def test_an_error_of_looking_reaches_the_caller(add, monkeypatch):
    """What Python raises when it is asked is raised, and nothing is launched."""
    monkeypatch.setitem(sys.modules, KNOBS, types.ModuleType(KNOBS))
    with pytest.raises(AttributeError, match="runtime"):
        add[(4,)](*ARGS)


@pytest.mark.release
@pytest.mark.toolchain
def test_this_triton_is_looked_at_without_asking(cuda, asked):
    """The Triton that is installed is as the dispatcher expects it."""
    real = pytest.importorskip("triton").knobs
    kernel = cuda["add"]
    kernel.forget()
    for _ in range(4):
        kernel[(4,)](*ARGS)
    assert asked == []
    real.runtime.launch_enter_hook.add(print)
    try:
        assert are_present()
    finally:
        real.runtime.launch_enter_hook.remove(print)

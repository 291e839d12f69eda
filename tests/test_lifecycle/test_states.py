# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import threading

import pytest
import support
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import bundler
from bundler.errors import ConfigError, RecordingError

pytestmark = pytest.mark.toolchain
NOTHING = "nothing is being recorded; call begin_compile() first"


@pytest.fixture(autouse=True)
def closed_pairs(cache, nobody_listens):
    """Each test begins and ends with no recording open."""
    yield
    for _ in range(20):
        bundler.end_compile()


@pytest.fixture
def compile_kernel(kernels):
    """Return a function that compiles a kernel in this process and returns its keys."""
    return lambda name: {
        os.path.basename(os.path.dirname(str(path)))
        for kernel in kernels.compile_one(name, "cuda:90")
        for path in kernel.metadata_group.values()
    }


def collected():
    """Collect, and return the keys."""
    return {kernel.key for kernel in bundler.collect().kernels}


def assert_idle():
    with pytest.raises(RecordingError) as caught:
        bundler.collect()
    assert (str(caught.value), caught.value.code) == (NOTHING, "recording")


def test_begin_when_idle_records(compile_kernel):
    """idle x begin: what is compiled from then on is in the bundle, what was compiled before is
    not.
    """
    compile_kernel("softmax")
    bundler.begin_compile()
    wanted = compile_kernel("gelu")
    assert collected() == wanted


def test_collect_when_idle_is_an_error():
    """idle x collect: RecordingError, which says what to call first."""
    assert_idle()


def test_end_when_idle_has_no_effect():
    """idle x end: nothing happens, however often."""
    bundler.end_compile()
    bundler.end_compile()
    assert_idle()


def test_begin_while_recording_nests(compile_kernel):
    """recording x begin: the inner recording has what was compiled inside, the outer one has
    everything.
    """
    bundler.begin_compile()
    outside = compile_kernel("gelu")
    bundler.begin_compile()
    inside = compile_kernel("softmax")
    assert collected() == inside
    bundler.end_compile()
    after = compile_kernel("row_sum")
    assert collected() == outside | inside | after


def test_collect_while_recording_pops(compile_kernel):
    """recording x collect: the bundle, and no recording is left."""
    bundler.begin_compile()
    compile_kernel("gelu")
    assert len(collected()) == 1
    assert_idle()


def test_end_while_recording_discards(compile_kernel):
    """recording x end: what was recorded is gone, and the outer recording goes on."""
    bundler.begin_compile()
    first = compile_kernel("gelu")
    bundler.begin_compile()
    second = compile_kernel("softmax")
    bundler.end_compile()
    assert collected() == first | second
    assert_idle()


def test_begin_after_collect_records(compile_kernel):
    """after collect x begin: a new recording, without what the last one had."""
    bundler.begin_compile()
    compile_kernel("gelu")
    bundler.collect()
    bundler.begin_compile()
    wanted = compile_kernel("softmax")
    assert collected() == wanted


def test_collect_after_collect_is_an_error():
    """after collect x collect: RecordingError."""
    bundler.begin_compile()
    bundler.collect()
    assert_idle()


def test_end_after_collect_closes_the_pair(compile_kernel):
    """after collect x end: the inner pair is closed, and the outer recording is untouched."""
    bundler.begin_compile()
    outside = compile_kernel("gelu")
    bundler.begin_compile()
    bundler.collect()
    bundler.end_compile()
    assert collected() == outside


def test_a_collected_recording_that_nobody_ended_does_not_hide_the_outer_one(compile_kernel):
    """Ill-nested: collect twice in a nest without an end between gives the inner bundle, then the
    outer one.
    """
    bundler.begin_compile()
    outside = compile_kernel("gelu")
    bundler.begin_compile()
    inside = compile_kernel("softmax")
    assert collected() == inside
    assert collected() == outside | inside
    assert_idle()


def test_an_error_between_begin_and_end_leaves_nothing_armed(compile_kernel):
    """An exception between begin and collect, with end in a finally, leaves no recording behind."""
    with pytest.raises(ZeroDivisionError):
        bundler.begin_compile()
        try:
            1 / 0  # noqa: B018
        finally:
            bundler.end_compile()
    assert_idle()


def test_a_wrong_keep_leaves_the_recording_to_be_collected(compile_kernel):
    """collect with a wrong keep is a ConfigError, and the right call afterwards still gives the
    bundle.
    """
    bundler.begin_compile()
    wanted = compile_kernel("gelu")
    with pytest.raises(ConfigError, match="expected 'all' or 'launch'"):
        bundler.collect(keep="everything")
    assert collected() == wanted


def test_the_pairs_of_two_threads_are_one_stack(compile_kernel):
    """A recording that was begun in one thread can be collected in another."""
    bundler.begin_compile()
    wanted = compile_kernel("gelu")
    found = []
    thread = threading.Thread(target=lambda: found.append(collected()))
    thread.start()
    thread.join()
    assert found == [wanted]


class Nesting(RuleBasedStateMachine):
    """Begin, collect and end in any order, against a list of sets."""

    kernels = None
    cache = None
    source = None
    names = ("gelu", "softmax", "row_sum", "cumsum", "histogram")

    def __init__(self):
        super().__init__()
        self.pairs = []  # what each open pair has heard; None once it was collected
        shutil.rmtree(self.cache)
        shutil.copytree(self.source, self.cache)

    @rule(name=st.sampled_from(names))
    def compile(self, name):
        for kernel in self.kernels.compile_one(name, "cuda:90"):
            for heard in filter(lambda pair: pair is not None, self.pairs):
                heard.add(kernel.hash)

    @precondition(lambda self: len(self.pairs) < 5)
    @rule()
    def begin(self):
        bundler.begin_compile()
        if all(pair is None for pair in self.pairs):
            self.pairs = []
        self.pairs.append(set())

    @rule()
    def end(self):
        bundler.end_compile()
        del self.pairs[-1:]

    @rule()
    def collect(self):
        while self.pairs and self.pairs[-1] is None:
            self.pairs.pop()
        if not self.pairs:
            assert_idle()
            return
        with bundler.collect() as bundle:
            assert {bundler_hash(kernel.key) for kernel in bundle.kernels} == self.pairs[-1]
        self.pairs[-1] = None

    @invariant()
    def listens_exactly_while_recording(self):
        from triton import knobs

        assert (knobs.compilation.listener is not None) == any(
            pair is not None for pair in self.pairs
        )

    def teardown(self):
        while self.pairs:
            self.end()


def bundler_hash(key):
    """Return the hash that a kernel key spells in base32."""
    import base64

    return base64.b32decode(key + "=" * (-len(key) % 8)).hex()


@pytest.mark.slow
def test_any_sequence_of_calls_agrees_with_the_table(kernels, cache, compiled, monkeypatch):
    """Whatever the order of begin, compile, collect and end, each bundle has what its pair heard;
    slow, for it compiles.
    """
    monkeypatch.setattr(Nesting, "kernels", kernels)
    monkeypatch.setattr(Nesting, "cache", cache)
    monkeypatch.setattr(Nesting, "source", compiled.cache)
    run_state_machine_as_test(
        Nesting,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_recording_without_triton_names_the_extra(tmp_path):
    """Where Triton cannot be imported, a recording raises RecordingError that says what to install,
    and stays idle.
    """
    code = """
import json, sys
sys.modules["triton"] = None
import bundler
found = []
for begin in (bundler.begin_compile, bundler.recording().start):
    try:
        begin()
    except bundler.BundlerError as error:
        found.append([type(error).__name__, str(error)])
try:
    bundler.collect()
except bundler.BundlerError as error:
    found.append([type(error).__name__, str(error)])
bundler.end_compile()
print(json.dumps(found))
"""
    found = support.answer(code, env={"TRITON_CACHE_DIR": tmp_path})
    assert [kind for kind, _ in found] == ["RecordingError"] * 3
    assert ["triton-bundler[triton]" in text for _, text in found] == [True, True, False]
    assert found[2][1] == NOTHING

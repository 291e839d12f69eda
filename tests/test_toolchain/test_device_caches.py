# SPDX-License-Identifier: Apache-2.0
"""Recorded kernels go into the JIT's in-memory caches where Triton itself makes their key, and
nowhere else.
"""

import dataclasses
import importlib
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import bundler
from bundler.format.constant_values import Value
from bundler.toolchain import instances
from bundler.toolchain.device_caches import DeviceCaches, OfferedKernel

pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain

SOURCE = Path(__file__).with_name("specialized_kernels.py")


def tensor(dtype="float32"):
    from triton.runtime.jit import MockTensor

    return MockTensor(dtype)


def calls(k):
    """The calls of each kernel: (what it shows, function, arguments, options)."""
    import triton.language as tl

    x = tensor()
    return [
        ("aligned", k.add, (x, x, x, 128), {}),
        ("not aligned", k.add, (x, x, x, 7), {}),
        ("equal to 1", k.add, (x, x, x, 1), {"BLOCK": 32}),
        ("64 bits", k.add, (x, x, x, 2**40), {}),
        ("other types", k.add, (tensor("float16"), x, tensor("int64"), 7), {}),
        ("a warp count", k.add, (x, x, x, 7), {"num_warps": 8}),
        ("defaults written out", k.add, (x, x, x, 7), {"num_warps": 4, "num_stages": 3}),
        ("a float", k.constant, (x, 2.5), {}),
        ("infinity", k.constant, (x, float("inf")), {}),
        ("a text", k.constant, (x, "D"), {}),
        ("none", k.constant, (x, None), {}),
        ("a truth", k.constant, (x, True), {}),
        ("a type", k.constant, (x, tl.float16), {}),
        ("a constexpr", k.constant, (x, tl.constexpr(5)), {}),
        ("a tuple of constants", k.constant, (x, (1, 2.0)), {}),
        ("no tensor", k.optional, (x, None), {}),
        ("a function", k.apply, (x, k.scaled), {}),
        ("a helper with a global constant", k.calling, (x, 7), {}),
        ("annotations", k.annotated, (x, 128, 1.5), {}),
        ("a tuple", k.pair, (x, (1.5, (4.5, 3))), {}),
    ]


# Written in an order that `Requests` does not think of, and a tuple whose names no recorded fact
# has.
def odd_calls(k):
    return [
        (
            "stages before warps",
            k.add,
            (tensor(), tensor(), tensor(), 7),
            {"num_stages": 3, "num_warps": 4},
        ),
        ("a named tuple", k.named, (tensor(), k.Point(1.5, 2.5)), {}),
    ]


def make(table):
    return [
        function.warmup(*arguments, grid=(1,), **options)
        for _, function, arguments, options in table
    ]


@pytest.fixture
def module(tmp_path):
    """The name of the module that serves; functions of other tests, and of the recording, are of
    others.
    """
    return f"serving_{tmp_path.name}"


@pytest.fixture
def source(tmp_path):
    """The file of kernels, to be edited."""
    return Path(shutil.copy(SOURCE, tmp_path))


@pytest.fixture
def caches(monkeypatch, fake_driver):
    """The caches of a process that was offered nothing before."""
    from triton.runtime.jit import JITFunction

    for name in ("_do_compile", "_call_hook"):
        monkeypatch.setattr(JITFunction, name, getattr(JITFunction, name))
    monkeypatch.setattr(instances, "_watchers", dict(instances._watchers))
    return DeviceCaches()


@pytest.fixture
def record(cache, load_kernels, fake_driver, source):
    """Return a function that makes calls in functions of their own, and returns what was
    recorded.
    """

    def record(table=calls, path=source):
        with bundler.recording() as recording:
            make(table(load_kernels(path, "recorded")))
        bundle = recording.collect()
        # Without what functions of other tests hold.
        mine = [kernel for kernel in bundle.kernels if (cache / kernel.key).is_dir()]
        return bundler.Bundle(bundler.Content.of(mine), bundle.observed, bundle.blobs)

    return record


@pytest.fixture
def serve(tmp_path, monkeypatch, load_kernels, source, module, caches):
    """Return a function that restores a bundle elsewhere, imports the kernels anew, and offers them
    what was restored.
    """

    def serve(bundle, kernels=None, modules=(module,)):
        root = str(tmp_path / "restored")
        monkeypatch.setenv("TRITON_CACHE_DIR", root)
        if bundle.kernels:
            bundler.restore(bundle, root)
        functions = kernels or load_kernels(source, module)
        with ThreadPoolExecutor(2) as threads:
            told = caches.offer(
                (OfferedKernel(kernel, (root,), modules) for kernel in bundle.kernels), threads
            )
        return functions, told

    return serve


@pytest.fixture
def asked(monkeypatch):
    """What the JIT asked us for because it was not in its cache, and whether it got it."""
    seen, original = [], DeviceCaches.instead_of_compiling

    def spy(self, function, device, request):
        found = original(self, function, device, request)
        seen.append((function.__name__, found is not None))
        return found

    monkeypatch.setattr(DeviceCaches, "instead_of_compiling", spy)
    return seen


@pytest.fixture
def no_hook(monkeypatch):
    """Make Triton's hook after a compile, which it also calls for hits on disk, fail the test."""
    from triton import knobs

    def fired(**facts):
        raise AssertionError(f"jit_post_compile_hook: {facts['repr']}")

    return lambda: monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", fired)


def outcomes(told):
    return {one.outcome for one in told.values()}


@pytest.mark.release
def test_a_first_call_of_each_specialization_asks_nobody(record, serve, asked, events, no_hook):
    """Each recorded kernel is in the cache of its function before the first call: no compile, no
    hit on disk, no hook, and not we.
    """
    bundle = record()
    functions, told = serve(bundle)
    assert [one for one in told.values() if one.outcome != "replayed"] == []
    assert (
        len(told) == len(bundle.kernels) == len(calls(functions)) - 1
    )  # the defaults written out are no other kernel
    events.clear()
    no_hook()
    made = make(calls(functions))
    assert (events, asked) == ([], [])
    assert {kernel.hash for kernel in made} == {
        bundler.toolchain.events.kernel_hash(key) for key in told
    }


@pytest.mark.release
def test_what_cannot_be_foreseen_is_handed_over_at_the_first_call(
    record, serve, asked, events, no_hook
):
    """Options in another order, and a named tuple, whose names are not recorded: the JIT asks us
    once, and not its compiler.
    """
    functions, told = serve(record(lambda k: calls(k) + odd_calls(k)))
    assert outcomes(told) == {"replayed", "later"}
    events.clear()
    no_hook()
    assert make(odd_calls(functions)) == make(odd_calls(functions))
    assert (events, asked) == ([], [("add", True), ("named", True)])


@pytest.mark.release
def test_functions_that_are_made_later_get_theirs(
    record, serve, load_kernels, source, module, asked, events, no_hook
):
    """What is offered before a module is imported is handed over at the first call of a function,
    for all of its specializations.
    """
    bundle = record()
    _, told = serve(bundle, kernels=True)
    assert outcomes(told) == {"not found"}
    functions = load_kernels(source, module)
    events.clear()
    no_hook()
    make(calls(functions))
    names = {function.__name__ for _, function, _, _ in calls(functions)}
    assert events == []
    assert sorted(asked) == sorted((name, True) for name in names)


def test_functions_of_a_module_that_is_imported_later_are_filled_by_its_import(
    record, serve, fake_driver, source, module, asked, events, no_hook, monkeypatch
):
    """Python's own import of a module: when it ends each function has its kernels, and no call
    asks.
    """
    _, told = serve(record(lambda k: calls(k)[:3]), kernels=object())
    assert outcomes(told) == {"not found"}
    source.rename(source.with_name(f"{module}.py"))
    monkeypatch.syspath_prepend(str(source.parent))
    k = importlib.import_module(module)
    monkeypatch.delitem(sys.modules, module)
    assert k.add.device_caches[fake_driver.get_current_device()][0]
    no_hook()
    events.clear()
    make(calls(k)[:3])
    assert (asked, events) == ([], [])


def test_each_device_gets_its_own(record, serve, fake_driver, events, no_hook):
    """On a second device the first call makes a kernel object for it, since an object is loaded on
    one device.
    """
    functions, _ = serve(record())
    events.clear()
    no_hook()
    first = make(calls(functions))
    fake_driver.device = 1
    second = make(calls(functions))
    assert events == []
    assert [kernel.hash for kernel in first] == [kernel.hash for kernel in second]
    assert {id(kernel) for kernel in first} & {id(kernel) for kernel in second} == set()


def test_the_order_in_which_functions_were_hashed_does_not_matter(record, serve, events, no_hook):
    """Before Triton 3.9 a function has another hash when those that it calls were hashed before it;
    both are its source.
    """

    def helper_first(k):
        return [("", k.calling_too, (tensor(), 7), {}), ("", k.calling, (tensor(), 7), {})]

    def other_order(k):
        return list(reversed(helper_first(k)))

    both = bundler.merge([record(helper_first), record(other_order)])
    functions, told = serve(both)
    assert outcomes(told) == {"replayed"}
    events.clear()
    no_hook()
    make(helper_first(functions))
    assert events == []
    with bundler.recording() as recording:
        pass
    again = {kernel.key: kernel.parts for kernel in recording.collect().kernels}
    assert {key: again[key].proven for key in told} == dict.fromkeys(told, True)


# Each changes the length too: byte code counts as current while time in seconds and size of its
# source are the same.
_EDITS = {
    "source.text": ("tl.store(out, 1.0)", "tl.store(out, 2.25)"),
    "source.line": ("@triton.jit\ndef constant", "\n@triton.jit\ndef constant"),
    "source.hash": ("SCALE = tl.constexpr(3)", "SCALE = tl.constexpr(40)"),
}


@pytest.mark.parametrize("part", _EDITS)
def test_a_changed_function_is_told_and_compiled(record, serve, source, module, events, part):
    """A function whose text, line or global constant was changed since gets no recorded kernel; the
    report says which part differs.
    """

    def some(k):
        return [("", k.constant, (tensor(), 2.5), {}), ("", k.calling, (tensor(), 7), {})]

    bundle = record(some)
    text = source.read_text()
    assert _EDITS[part][0] in text
    source.write_text(text.replace(*_EDITS[part]))
    functions, told = serve(bundle)
    wrong = "calling" if part == "source.hash" else "constant"
    changed = {kernel.name for kernel in bundle.kernels if told[kernel.key].outcome == "changed"}
    assert wrong in changed
    assert any(
        one.reason.startswith(f"{part}: ") and f"{module}.{wrong}" in one.reason
        for one in told.values()
    )
    events.clear()
    make(some(functions))
    assert {event.name for event in events if not event.cache_hit} == changed


def _with_facts(bundle, change):
    from bundler.format.manifest import Content

    entries = [
        dataclasses.replace(kernel, facts_bytes=change(kernel.launch.require_facts()).to_bytes())
        for kernel in (
            bundler.Kernel(
                k.key,
                k.name,
                k.target,
                k.artifacts,
                k.toolchain,
                k.spec,
                k.facts_bytes,
                k.parts_bytes,
            )
            for k in bundle.kernels
        )
    ]
    return bundler.Bundle(Content.of(entries), bundle.observed, bundle.blobs)


def _replaced(field, index, value):
    def change(facts):
        items = list(getattr(facts, field))
        items[index] = (items[index][0], value)
        return dataclasses.replace(facts, **{field: tuple(items)})

    return change


_TAMPERINGS = {
    "a constant": _replaced("constants", -1, Value("int", 128)),
    "a type": _replaced("signature", 0, Value("str", "*fp16")),
    "no type": _replaced("signature", 0, Value("int", 3)),
    "an attribute": _replaced("attributes", 0, Value("list", ())),
    "an unknown attribute": _replaced("attributes", 0, Value("str", "DDD")),
    "an option": lambda facts: dataclasses.replace(
        facts, options=(("num_warps", Value("int", 8)),)
    ),
    "an option of another type": lambda facts: dataclasses.replace(
        facts, options=(("num_warps", Value("str", "x")),)
    ),
    "an argument less": lambda facts: dataclasses.replace(facts, signature=facts.signature[1:]),
    "no constants": lambda facts: dataclasses.replace(facts, constants=()),
    "an object": _replaced("constants", -1, Value("other", "os.system")),
    "another function": _replaced("constants", -1, Value("jit", ("os:system", "0" * 64))),
}


@pytest.mark.parametrize("tampering", _TAMPERINGS)
def test_tampered_facts_are_skipped(record, serve, tampering, asked):
    """Facts that do not lead to the kernel's own key put nothing into a cache."""
    bundle = _with_facts(record(lambda k: calls(k)[:1]), _TAMPERINGS[tampering])
    functions, told = serve(bundle)
    assert outcomes(told) == {"skipped"}
    assert functions.add.device_caches[3][0] == {}
    (again,) = make(calls(functions)[:1])
    assert again.hash == bundler.toolchain.events.kernel_hash(next(iter(told)))
    assert asked == [("add", False)]


def test_what_is_for_another_target_is_skipped(record, serve, fake_driver):
    """A kernel for another GPU is told, and given to nobody."""
    bundle = record(lambda k: calls(k)[:1])
    fake_driver.target = "cuda:80"
    functions, told = serve(bundle)
    assert [(one.outcome, one.reason) for one in told.values()] == [
        ("elsewhere", "it is for cuda:90, not cuda:80")
    ]
    assert functions.add.device_caches == {}


def test_missing_and_foreign_files_are_skipped(
    record, caches, load_kernels, source, module, tmp_path
):
    """A directory without the kernel, or with another kernel in its place, gives nothing."""
    bundle = record(lambda k: calls(k)[:2])
    one, two = sorted(kernel.key for kernel in bundle.kernels)
    root = tmp_path / "there"
    bundler.restore(bundle, root)
    shutil.rmtree(root / one)
    (root / one).mkdir()
    for file in (root / two).iterdir():
        if not file.name.startswith("__grp__"):
            (root / one / file.name).write_bytes(file.read_bytes())
    group = (root / two / "__grp__add.json").read_text()
    (root / one / "__grp__add.json").write_text(group.replace(two, one))
    shutil.rmtree(root / two)
    load_kernels(source, module)
    with ThreadPoolExecutor(2) as threads:
        told = caches.offer(
            (OfferedKernel(kernel, (str(root),), (module,)) for kernel in bundle.kernels), threads
        )
    assert outcomes(told) == {"skipped"}
    assert told[one].reason.endswith("is another kernel's")
    assert told[two].reason.startswith("its files are not, or not all, in ")


def test_packed_kernels_are_handed_over_at_their_first_call(
    record, serve, cache, events, asked, no_hook
):
    """A cache directory holds no facts; the key alone decides."""
    record(lambda k: calls(k)[:2])
    functions, told = serve(bundler.pack(cache))
    assert outcomes(told) == {"later"}
    events.clear()
    no_hook()
    make(calls(functions)[:2])
    assert (events, asked) == ([], [("add", True), ("add", True)])


def test_only_functions_of_the_modules_asked_for(record, serve, module, events):
    """`modules` are names of modules, or of packages above them; a name that only begins alike is
    another module.
    """
    bundle = record(lambda k: calls(k)[:1])
    functions, told = serve(bundle, modules=(module[:-1], "other"))
    assert outcomes(told) == {"not found"}
    events.clear()
    make(calls(functions)[:1])
    assert [event.cache_hit for event in events] == [True]
    assert outcomes(serve(bundle, modules=("other", module))[1]) == {"replayed"}


def test_who_wants_every_compile_gets_it(record, serve, events, monkeypatch):
    """With TRITON_ALWAYS_COMPILE nothing is replayed, neither when it is offered nor when it is
    called.
    """
    bundle = record(lambda k: calls(k)[:1])
    functions, _ = serve(bundle, kernels=True)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    functions, told = serve(bundle)
    assert [one.reason for one in told.values()] == ["TRITON_ALWAYS_COMPILE is set"]
    events.clear()
    make(calls(functions)[:1])
    assert [event.cache_hit for event in events] == [False]


def test_a_function_that_cannot_be_hashed_yet_is_left_as_it_was(
    record, serve, source, module, load_kernels, monkeypatch
):
    """While a module is being imported Triton may fail to hash its functions; afterwards they get
    their kernels.
    """
    bundle = record(lambda k: [("", k.calling, (tensor(), 7), {})])
    functions = load_kernels(source, module)
    calling = functions.calling
    monkeypatch.setattr(type(calling), "parse", lambda _: 1 / 0)
    _, told = serve(bundle, functions)
    assert [one.reason for one in told.values()] == [
        "Triton cannot hash it (ZeroDivisionError: division by zero)"
    ]
    assert calling.hash is None
    monkeypatch.undo()
    _, told = serve(bundle, functions)
    assert outcomes(told) == {"replayed"}


def test_a_fault_of_ours_ends_no_call(record, serve, monkeypatch, caplog):
    """When something goes wrong where the JIT would compile, it compiles, and the log says why."""
    functions, _ = serve(record(lambda k: calls(k)[:1]), kernels=None)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(DeviceCaches, "instead_of_compiling", fail)
    assert make(calls(functions)[1:2])[0].name == "add"
    assert "was not replayed (ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_launches_may_run_beside_a_replay(
    record, serve, caches, load_kernels, source, module, events, tmp_path
):
    """Threads that launch while kernels are offered get the right kernel each time, and nothing is
    compiled.
    """
    bundle = record()
    functions, _ = serve(bundle)
    fresh, stop, wrong = load_kernels(source, f"{module}.fresh"), threading.Event(), []
    expected = [kernel.hash for kernel in make(calls(functions))]
    events.clear()

    def launch():
        while not stop.is_set():
            found = [kernel.hash for kernel in make(calls(fresh))]
            wrong.extend(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])

    with ThreadPoolExecutor(3) as launching, ThreadPoolExecutor(2) as threads:
        running = [launching.submit(launch) for _ in range(3)]
        try:
            offers = [
                caches.offer(
                    (
                        OfferedKernel(kernel, (str(tmp_path / "restored"),), (module,))
                        for kernel in bundle.kernels
                    ),
                    threads,
                )
                for _ in range(3)
            ]
        finally:
            stop.set()
        for one in running:
            one.result()
    assert {one.reason for told in offers for one in told.values()} == {""}
    assert [outcomes(told) for told in offers] == [{"replayed"}] * 3
    assert wrong == []
    assert [event for event in events if not event.cache_hit] == []

# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.compile are found again by another process, which lowers nothing and has equal
results, and only for a graph that is equal in all that decides them.
"""

import json
import os
import random
import re
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import fx  # noqa: E402

import bundler  # noqa: E402
from bundler.codegen import graph_key as keys  # noqa: E402
from bundler.codegen import kept_programs, lower  # noqa: E402
from bundler.codegen.kept_programs import read_program  # noqa: E402
from bundler.codegen.program import GenerateOptions, program_of_graph  # noqa: E402
from bundler.codegen.torch_backend import triton_bundler  # noqa: E402
from bundler.codegen.trace import EXPORTED, RETURNED_INPUTS, trace  # noqa: E402
from bundler.errors import ConfigError, FormatError  # noqa: E402
from bundler.lifecycle.tree_plan import read_trees  # noqa: E402
from bundler.trust.signature_policy import subject_of  # noqa: E402
from tools.codegen.graph_keys import Found, outcome  # noqa: E402

OPTIONS = GenerateOptions()


def graph(function=None, *inputs, dynamic=False):
    """Return a graph as torch.compile hands it over."""
    inputs = inputs or (torch.zeros(6, 8), torch.zeros(8))
    made = trace(function or (lambda x, y: torch.softmax(x * y, -1) + 1.5), inputs, dynamic=dynamic)
    made.meta.pop(EXPORTED, None)
    made.meta.pop(RETURNED_INPUTS, None)
    return made


def key(module, options=OPTIONS):
    return keys.graph_key(module, options).digest


@pytest.fixture
def counted(monkeypatch):
    """Return a list that gets each graph that is lowered."""
    found, real = [], lower.lower_graph

    def lowered(module, **options):
        found.append(module)
        return real(module, **options)

    monkeypatch.setattr(lower, "lower_graph", lowered)
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return where programs are kept, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triton-bundler" / "programs"


def kept(module=None):
    return program_of_graph(module or graph(), guarded=True, keep=True)


# ----------------------------------------------------------------------------------- Two processes


def test_a_second_process_lowers_nothing_and_has_equal_results(interpreted, tmp_path):
    """Training, inference, sizes that change, constants, inputs that are changed and random numbers
    that are drawn twice: bit for bit, under the same guards.
    """
    first, second = (json.loads(interpreted("second_start_worker.py", tmp_path)) for _ in range(2))
    # Graphs whose sizes change, and those with a checkpointed part, are traced each time.
    again = {"trained": 2, "sized": 1, "kept_numbers": 2, "generated": 1}
    for name, one in first.items():
        assert one["lowered"] == one["traced"] == one["programs"] > 0, name
        kept = name != "generated"
        lowered = 0 if kept else one["lowered"]
        assert second[name] == {**one, "lowered": lowered, "traced": again.get(name, 0)}
    results = {name: one["results"] for name, one in second.items()}
    assert results["inferred"] == results["generated"] != results["other_numbers"]
    assert any("2147483647" in one for found in first["trained"]["guards"] for one in found)
    assert any(
        "triton_bundler.set_rng_state.default" in calls for calls in first["kept_numbers"]["calls"]
    )


@pytest.fixture
def brought(interpreted, tmp_path):
    """Train in a new process with a cache directory of its own; returns what it tells."""

    def run(cache, *arguments):
        folder = tmp_path / cache
        folder.mkdir(exist_ok=True)
        return json.loads(interpreted("brought_program_worker.py", folder, *arguments))

    return run


@pytest.mark.slow
def test_other_machines_lower_nothing_with_a_bundle_or_a_store(brought, tmp_path):
    """Forward and backward; a machine that trusts kernels alone generates, and is told."""
    bundle, store = tmp_path / "model.tbundle", tmp_path / "store"
    first = brought("one", "record", bundle)
    trusting = brought("two", "restore", bundle, "code")
    wary = brought("three", "restore", bundle, "kernels")
    assert first["lowered"] == wary["lowered"] == len(trusting["restored"]) == 2
    assert (trusting["skipped"], wary["skipped"]) == ([], ["generated_programs:."])
    told = [
        first,
        trusting,
        wary,
        *(
            brought(cache, "session", store, trust)
            for cache, trust in (("four", "code"), ("five", "code"), ("six", "kernels"))
        ),
    ]
    assert [one["lowered"] for one in told] == [2, 0, 2, 2, 0, 2]
    assert len({one["result"] for one in told}) == 1


def test_a_bundle_brings_programs_where_its_code_is_trusted(folder, counted, monkeypatch, tmp_path):
    """Into the directory where the generator looks, wherever kernels go; it is a bundle of code."""
    with bundler.recording(programs=True) as recording:
        kept()
    bundle = recording.collect()
    subject = subject_of(bundle)
    assert (subject.trust, subject.families) == ("code", ("generated_programs",))
    for trust, lowered in (("kernels", 2), ("code", 2)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / trust))
        report = bundler.restore(bundle, tmp_path / "triton", trust=trust)
        assert bool(report.companions) == (trust == "code")
        kept()
        assert len(counted) == lowered
    assert not (tmp_path / "triton").exists()


def test_a_store_brings_programs_where_its_code_is_trusted(folder, counted, monkeypatch, tmp_path):
    """By the key of the graph, in a session; what was found is kept."""
    for number, (trust, lowered) in enumerate([("code", 1), ("code", 1), ("kernels", 2)]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{number}"))
        with (
            bundler.open_store(str(tmp_path / "store"), trust=trust) as store,
            bundler.session(store),
        ):
            kept()
        kept()
        assert len(counted) == lowered


def test_a_damaged_program_of_a_store_is_a_miss(folder, counted, monkeypatch):
    """Then the program is generated, and kept."""

    class Delegate:
        def fetch_program(self, name):
            assert re.fullmatch("program [0-9a-f]{64}", name)
            return b"0\n{}"

        def made_record(self, name, filename, data):
            assert (name, filename) == (f"program {filename[:64]}", f"{name[8:]}.json")
            assert read_program(data).kernels

    monkeypatch.setattr(kept_programs, "delegates", lambda: [Delegate()])
    assert kept().kernels
    assert len(counted) == 1
    assert read_program(one_file(folder).read_bytes()).kernels


def test_a_recording_has_no_programs_unless_it_is_asked_for_them(folder):
    """They would make code of a bundle of kernels; nor does it have those of before."""
    kept()
    with bundler.recording() as plain, bundler.recording(programs=True) as asking:
        pass
    assert (plain.collect().opaque, asking.collect().opaque) == ((), ())
    with bundler.recording() as plain, bundler.recording(programs=True) as asking:
        kept()
    assert plain.collect().opaque == ()
    (tree,) = read_trees(asking.collect())
    assert [file.path for file in tree.files] == [one_file(folder).name]
    assert asking.collect(keep="launch").opaque == ()
    one_file(folder).unlink()
    gone = asking.collect()
    assert (gone.opaque, len(asking.report.left_out)) == ((), 1)


# ------------------------------------------------------------------------------------------- Keys


def test_a_graph_has_the_key_of_an_equal_one():
    """Names of nodes and lines of the user's program say nothing."""
    one, other = graph(), graph()
    for number, node in enumerate(other.graph.nodes):
        node.name = f"another_{number}"
        node.meta["stack_trace"] = "elsewhere"
    assert key(one) == key(other)
    named = replace(OPTIONS, name="another", sources="/elsewhere", verify=True, nan_checks=True)
    assert key(one) == key(one, named)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(8)),
        (torch.zeros(7, 8), torch.zeros(8)),
        (torch.zeros(8, 6).t(), torch.zeros(8)),
        (torch.zeros(49)[1:].view(6, 8), torch.zeros(8)),
        (torch.zeros(6, 8), torch.zeros(1).expand(8)),
    ],
    ids=["dtype", "sizes", "strides", "alignment", "expanded"],
)
def test_what_the_example_is_decides_the_key(inputs):
    """So it does with everything that kernels are written by."""
    function = lambda x, y: torch.softmax(x * y, -1) + 1.5  # noqa: E731
    changed = graph(function, *inputs)
    assert outcome(changed, OPTIONS) != outcome(graph(), OPTIONS)
    assert key(changed) != key(graph())


@pytest.mark.parametrize("number", [2.5, -0.0, 1, float("nan")])
def test_a_number_decides_the_key(number):
    """As an argument, and as the only element of a tensor that the graph holds."""
    zero, other = (graph(lambda x, y, n=n: x * y + n) for n in (0.0, number))
    assert key(zero) != key(other)
    held = [torch.tensor(n) for n in (0.0, number)]
    zero, other = (graph(lambda x, y, one=one: x * y + one) for one in held)
    assert outcome(zero, OPTIONS) != outcome(other, OPTIONS)
    assert key(zero) != key(other)


def test_settings_decide_the_key(monkeypatch):
    """Of torch, and of the generator."""
    found = {key(graph())}
    for option in ("wide_indices", "benchmark_harness"):
        found.add(key(graph(), replace(OPTIONS, **{option: True})))
    found.add(key(graph(), replace(OPTIONS, assert_indices=False)))
    module = graph()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_default_dtype", lambda: torch.float64)
        found.add(key(module))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        found.add(key(module))
    with monkeypatch.context() as patched:
        patched.setattr(keys, "_generator", lambda: "another text of ours")
        found.add(key(module))
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.4")
        patched.setattr(keys, "_libraries", keys._libraries.__wrapped__)
        found.add(key(module))
    assert len(found) == 8


def test_sizes_that_change_decide_the_key():
    """By the value that they have in the example, by their bounds, and by whether torch takes
    guards.
    """
    module = graph(dynamic=True)
    lines = keys.graph_key(module, OPTIONS)
    environment, symbol = lines.environment, next(iter(lines.symbols.values()))
    found = {lines.digest, key(graph())}
    for known, value in (
        (environment.backed_var_to_val, environment.backed_var_to_val[symbol] + 1),
        (environment.var_to_range, environment.var_to_range[symbol] & keys_range(3)),
    ):
        before, known[symbol] = known[symbol], value
        found.add(key(module))
        known[symbol] = before
    environment.frozen = True
    found.add(key(module))
    assert len(found) == 5


def keys_range(least):
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(least, int_oo)


def test_what_is_not_known_has_no_key():
    """Graphs by `generate`, and those that hold what is no tensor; they are generated."""
    made = trace(lambda x: x + 1, (torch.zeros(3),))
    assert keys.graph_key(made, OPTIONS) is None
    module = graph()
    module.odd = torch.nn.Identity()
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.get_attr("odd")
    assert keys.graph_key(module, OPTIONS) is None


def on_a_gpu():
    """Return a graph for a GPU that reads tensors and numbers of the host."""
    made = trace(
        lambda x: x * torch.tensor(0.3) + torch.arange(8).log1p().to(x.device),
        (torch.zeros(6, 8),),
        device="cuda",
    )
    made.meta.pop(RETURNED_INPUTS)
    return made


def judge_all(found):
    """Judge a few graphs, and changes of each that are drawn."""
    for found.name, module in (
        ("softmax", graph()),
        ("changing", graph(dynamic=True)),
        ("gathered", graph(lambda x, y: x[:, y.long()].cumsum(0) * torch.tensor(2.0))),
        ("host", on_a_gpu()),
        ("views", graph(lambda x, y: (x.t().reshape(4, 12).sum(0), x[1:, ::2] - y[::2]))),
    ):
        found.judge(module)
    return found


def test_changed_graphs_of_one_key_have_one_program():
    """Whatever is changed of a graph, its key changes where its program does."""
    found = judge_all(Found(random.Random(1), changes=25))
    assert found.faults == []
    assert found.counts["changes that decide the program"] > 40


@pytest.mark.parametrize("left_out", ["_tensor", "_target", "_known", "_arguments"])
def test_a_key_that_says_too_little_is_found(left_out, monkeypatch):
    """The judge of keys sees two programs of one key, sooner or later."""
    monkeypatch.setattr(keys.GraphLines, left_out, lambda *_: "")
    found = Found(random.Random(1), changes=4)
    assert any(judge_all(found).faults for _ in range(10))


# ------------------------------------------------------------------------------------------- Files


def test_a_program_is_kept_as_it_was(folder, counted):
    """Plan, texts, calls, tensors and where they lie."""
    table = torch.arange(8.0)
    module = graph(lambda x, y: torch.median(x * y + table, -1).values * 2)
    first, second = kept(module), kept(module)
    assert len(counted) == 1
    assert second.sources == first.sources
    assert second.plan == read_program(one_file(folder).read_bytes()).plan
    assert second.plan.to_json() == first.plan.to_json()
    assert second.fallbacks == first.fallbacks != ()
    assert [*second.constants] == [*first.constants] == ["constant0"]
    assert second.constants["constant0"] is first.constants["constant0"]
    assert (second.device, second.host_constants) == (first.device, first.host_constants)
    checked = program_of_graph(module, replace(OPTIONS, verify=True), guarded=True, keep=True)
    assert len(counted) == 1
    assert checked.verifier.module is module


def one_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: data.replace(b"Grid1D", b"Grid2D"),
        lambda data: b"",
        lambda data: b"\xff" * 80,
        lambda data: signed(data.partition(b"\n")[2].replace(b'"schema":1', b'"schema":9')),
        lambda data: signed(data.partition(b"\n")[2].replace(b'"guards":[]', b'"guards":[[1]]')),
        lambda data: signed(b"[]"),
    ],
    ids=["short", "changed", "empty", "no text", "another schema", "no guard", "no object"],
)
def test_a_damaged_file_is_a_miss_and_is_written_anew(folder, counted, damage):
    """Then the program is generated."""
    kept()
    path = one_file(folder)
    right = path.read_bytes()
    path.write_bytes(damage(right))
    assert kept().kernels
    assert len(counted) == 2
    assert one_file(folder).read_bytes() == right


def signed(text):
    import hashlib

    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def test_whoever_reads_a_damaged_file_is_told():
    """By an error of ours."""
    with pytest.raises(FormatError, match="not what was written"):
        read_program(b"abc\ndef")
    with pytest.raises(FormatError, match="expected schema 1, got 9"):
        read_program(signed(b'{"schema":9}'))


def test_a_directory_that_others_write_to_is_not_read(folder, counted):
    """Its texts would be run."""
    kept()
    folder.chmod(0o777)
    assert kept().kernels
    assert len(counted) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, counted):
    """The program is generated each time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept().kernels
    assert kept().kernels
    assert len(counted) == 2


def test_another_guard_meanwhile_is_not_kept(folder, monkeypatch):
    """It would not be taken again: a program is kept only with all guards that it needs."""
    real = lower.lower_graph

    def guarding(module, **options):
        size = next(iter(module.graph.nodes)).meta["val"].shape[0]
        assert size * 3 < 1000
        return real(module, **options)

    monkeypatch.setattr(lower, "lower_graph", guarding)
    assert kept(graph(dynamic=True)).kernels
    assert not folder.exists()


def test_a_guard_that_does_not_hold_here_is_a_miss(folder, counted, monkeypatch):
    """As where torch takes none any more."""
    kept(graph(dynamic=True))
    monkeypatch.setattr(keys.GraphKey, "is_guarded", lambda *_: False)
    kept(graph(dynamic=True))
    assert len(counted) == 2


def test_files_that_nobody_read_for_longest_go(folder, monkeypatch):
    """When there are too many bytes; so does what a killed writer left, after a day."""
    modules = [graph(lambda x, y, n=n: x * y + n) for n in range(4)]
    kept(modules[0])
    size = one_file(folder).stat().st_size
    monkeypatch.setattr(kept_programs, "MOST_BYTES", size * 3.5)
    left, young = folder / "1.0123456789abcdef", folder / "2.0123456789abcdef"
    for path, age_s in ((left, 2 * 86400), (young, 0)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age_s,) * 2)
    paths = [one for one in folder.iterdir() if one not in {left, young}]
    for module in modules[1:3]:
        kept(module)
        paths += [one for one in folder.iterdir() if one not in {left, young, *paths}]
    for age_s, path in zip((30, 20, 10), paths, strict=True):
        os.utime(path, (time.time() - age_s,) * 2)
    kept(modules[0])  # read now
    kept(modules[3])
    assert not paths[1].exists()
    assert paths[0].exists()
    assert {*folder.iterdir()} >= {young}
    assert not left.exists()


@pytest.mark.parametrize("wrong", ["yes", None, 1])
def test_another_value_of_keep_is_refused(wrong):
    """The option of torch.compile is True or False."""
    with pytest.raises(ConfigError, match=f"keep, True or False, got keep={wrong!r}"):
        triton_bundler(fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)], options={"keep": wrong})

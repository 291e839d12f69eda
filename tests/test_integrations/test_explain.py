# SPDX-License-Identifier: Apache-2.0
"""`explain` names what differs from the nearest recorded kernel, and strict mode says so before
anything is compiled.
"""

import dataclasses
import json
import os

import plugged
import pytest

import bundler
from bundler.format.entries import Toolchain
from bundler.format.manifest import Content
from bundler.integrations import miss_notes
from bundler.integrations.explanations import latest_run
from bundler.integrations.key_comparison import Difference, split_items
from bundler.integrations.miss_notes import ProcessNote, of_one_run, read_processes
from bundler.integrations.user_directories import LocalDirectory
from bundler.toolchain import identity

pytestmark = pytest.mark.toolchain

_ADD = """
import triton
import triton.language as tl

@triton.jit
def scaled(x):
    return x * {factor}
{gap}
@triton.jit
def add(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, {body}, mask=i < n)
"""
_PLAIN = {"factor": "2", "gap": "", "body": "scaled(tl.load(x + i, mask=i < n))"}
# name -> (what differs in the file, in the call)
_VARIANTS = {
    "source": ({"body": "3 + scaled(tl.load(x + i, mask=i < n))"}, {}),
    "line numbers": ({"gap": "# one line more\n"}, {}),
    "dependencies": ({"factor": "5"}, {}),
    "signature": ({}, {"type": "*fp16"}),
    "constants": ({}, {"block": 128}),
    "alignment": ({}, {"aligned": False}),
    "option num_warps": ({}, {"options": {"num_warps": 8}}),
    "target": ({}, {"arch": 80}),
    "environment TRITON_DISABLE_LINE_INFO": ({}, {"env": {"TRITON_DISABLE_LINE_INFO": "1"}}),
}
_COMPILE = """
def compile_add(path, type="*fp32", block=64, aligned=True, options=None, arch=90, env=None):
    os.environ.update(env or {})
    spec = importlib.util.spec_from_file_location("variant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = triton.compiler.ASTSource(
        module.add, {"x": type, "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": block},
        {(0,): [["tt.divisibility", 16]]} if aligned else {},
    )
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", arch, 32), options=options)
    for name in env or {}:
        del os.environ[name]
    return compiled.hash

import base64
def key_of(hashed):
    return base64.b32encode(bytes.fromhex(hashed)).decode().rstrip("=")

say({name: key_of(compile_add(path, **call)) for name, path, call in json.loads(sys.argv[2])})
"""


@pytest.fixture
def variants(tmp_path):
    """Return [name, file, call] of the plain kernel, and of each variant."""
    files = {}

    def file_of(changes):
        text = _ADD.format(**_PLAIN | changes)
        if text not in files:
            files[text] = tmp_path / f"variant{len(files)}.py"
            files[text].write_text(text)
        return str(files[text])

    return {
        name: [name, file_of(changes), call]
        for name, (changes, call) in {"plain": ({}, {}), **_VARIANTS}.items()
    }


def compile_variants(wanted, env, **more):
    return plugged.run(_COMPILE, env, json.dumps(wanted), **more)


@pytest.fixture
def env(store_url, tmp_path, monkeypatch):
    """The environment of programs, and of this process when it asks."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE", store_url)
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    return plugged.environment(store_url, tmp_path / "cache", TRITON_DEFAULT_FP_FUSION="1")


@pytest.mark.release
def test_each_planted_difference_is_named(env, variants, tmp_path, monkeypatch):
    """Of nine compiles that differ in one thing from a recorded kernel each is explained by that;
    on another device nothing differs.
    """
    plain = variants.pop("plain")
    recorded, _ = compile_variants([plain], env)
    keys, _ = compile_variants(list(variants.values()), env)
    found = {explanation.key: explanation for explanation in bundler.explain(last=True)}
    for name, key in keys.items():
        assert [difference.what for difference in found[key].differences] == [name]
        assert (found[key].status, found[key].nearest) == ("differs", recorded["plain"])
        assert found[key].name == "add"
    assert len(found) == len(_VARIANTS)
    # Inductor keeps the kernels of another device in another directory, under the same key.
    other = {**env, "TRITON_CACHE_DIR": str(tmp_path / "inductor" / "triton" / "1")}
    assert compile_variants([plain], other)[0] == recorded
    (local,) = bundler.explain(keys["constants"][:20])
    assert str(local.differences[0]) == "constants: BLOCK=128 here, BLOCK=64 there"
    assert local.sentence.endswith(f"(nearest recorded kernel: {recorded['plain']})")
    assert (
        str(found[keys["alignment"]].differences[0])
        == "alignment: nothing here, x=[['tt.divisibility', 16]] there"
    )
    changed = found[keys["source"]].source_diff.splitlines()
    assert changed[:2] == ["--- add, recorded", "+++ add, here"]
    assert [line for line in changed[2:] if line[0] in "+-"] == [
        "-    tl.store(out + i, scaled(tl.load(x + i, mask=i < n)), mask=i < n)",
        "+    tl.store(out + i, 3 + scaled(tl.load(x + i, mask=i < n)), mask=i < n)",
    ]
    assert {name for name, key in keys.items() if found[key].source_diff is not None} == {"source"}
    assert local.there_now
    # To a host that never compiled it, it is just there.
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "another host"))
    (same,) = bundler.explain(recorded["plain"])
    assert (same.status, same.differences, same.missed_at_s) == ("recorded", (), None)
    with pytest.raises(bundler.errors.NotFound):
        bundler.explain(last=True)
    with pytest.raises(bundler.errors.ConfigError, match="expected one of"):
        bundler.explain()


def _as_if_by(store, kernel, part):
    """Give a store a kernel that is another's but for this part of its key, and nothing else."""
    records = store.kernel_records()
    theirs = [
        (name, "other" if name in {part, "triton.code"} else text)
        for name, text in kernel.parts.parts
    ]
    parts = bundler.KeyParts(tuple(theirs), True).to_bytes()
    with records.look_up([other.key for other in records.recorded(10)]).bundle as bundle:
        other = dataclasses.replace(kernel, parts_bytes=parts, key="A" * 52)
        records.remove([held.key for held in bundle.kernels])
        records.publish(bundler.Bundle(Content.of([other]), bundle.observed, bundle.blobs))


def test_another_compiler_is_named(env, variants, store_url):
    """A kernel that another Triton compiled is near, and release or binary is what differs."""
    compile_variants([variants["plain"]], env)
    with bundler.open_store(store_url) as store:
        (kernel,) = store.kernel_records().recorded(10)
        for part, what in (("triton.release", "release"), ("triton.binary", "binary")):
            _as_if_by(store, kernel, part)
            (found,) = bundler.explain(last=True)
            assert [difference.what for difference in found.differences] == [what]
            assert found.nearest == "A" * 52


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", [""]),
        ("x: *fp32, n: i32", ["x: *fp32", "n: i32"]),
        (
            "dst_ptr=[['tt.divisibility', 16]], n=[['tt.divisibility', 16]]",
            ["dst_ptr=[['tt.divisibility', 16]]", "n=[['tt.divisibility', 16]]"],
        ),
        (
            "shape: (i32, (i32, i64)), d: tensordesc<fp16[64, 64]>",
            ["shape: (i32, (i32, i64))", "d: tensordesc<fp16[64, 64]>"],
        ),
        (
            "a='x, [', b=\"it's, \\\", \", c={'k': 1, 'l': 2}",
            ["a='x, ['", 'b="it\'s, \\", "', "c={'k': 1, 'l': 2}"],
        ),
    ],
)
def test_a_list_is_split_at_its_own_commas(text, items):
    """A comma inside brackets or quotes ends no item."""
    assert split_items(text) == items


def test_what_is_shown_of_a_list_is_whole():
    """Of many items those are shown that there is room for, none cut, and how many more
    there are.
    """
    items = [f"pointer_{number}=[['tt.divisibility', 16]]" for number in range(6)]
    told = str(Difference("alignment", "nothing", ", ".join(items)))
    assert told == f"alignment: {', '.join(items[:4])} and 2 more here, nothing there"


@pytest.mark.slow
def test_the_latest_process_compiled_nothing(env, variants):
    """After a run that found everything `last` is that run, and no older one's kernels; a run after
    it that compiles is seen again.
    """
    plain, other = variants["plain"], variants["constants"]
    for wanted, hits, compiles in (([plain], 0, 1), ([plain], 1, 0), ([plain, other], 1, 1)):
        said, _ = plugged.run(_COMPILE + "\nsay(os.getpid())\n", env, json.dumps(wanted))
        run = latest_run()
        assert [(process.pid, process.hits, process.compiled) for process in run.processes] == [
            (said, hits, compiles)
        ]
        assert [(found.pid, found.name) for found in bundler.explain(last=True)] == [
            (said, "add")
        ] * compiles
        assert run.hits == hits


def note(pid, began_ns, *lineage):
    return ProcessNote(pid, began_ns, lineage)


def test_processes_of_one_run():
    """A run is the latest process with its forks, and with what a noted process of it started;
    other children of a shell are others.
    """
    before = note(10, 1, "10", "shell")
    worker, fork = note(21, 3, "21", "20", "shell"), note(22, 3, "21", "20", "shell")
    parent = note(20, 5, "20", "shell")
    assert of_one_run([before, worker, fork, parent]) == (worker, fork, parent)
    assert of_one_run([before, worker, fork]) == (worker, fork)
    assert of_one_run([parent, before]) == (parent,)
    assert of_one_run([note(7, 1), note(8, 2), note(9, 2)]) == (note(8, 2), note(9, 2))
    assert of_one_run([]) == ()


def test_a_fork_is_of_the_run_of_its_parent():
    """A process and its fork have one lineage, which the program that started them has not."""
    mine = miss_notes.this_process(1).lineage
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, "\n".join(miss_notes.this_process(1).lineage).encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        os.close(write)
        assert tuple(file.read().split("\n")) == mine
    assert len(mine) == len(set(mine)) > 1


def test_notes_are_bounded_and_damage_is_left_out(tmp_path, monkeypatch):
    """The oldest notes and sources go; one that is none is no process, and a damaged source is
    none.
    """
    for kept in ("KEPT_PROCESSES", "KEPT_SOURCES"):
        monkeypatch.setattr(miss_notes, kept, 3)
    local = LocalDirectory(str(tmp_path), pytest.fail)
    for number in range(1, 6):
        note(number, number).write(local)
    miss_notes.sweep_processes(local)
    assert [process.pid for process in read_processes(local)] == [3, 4, 5]
    for text in (
        "",
        "[]",
        "{}",
        '{"pid": "1", "began_ns": 1, "lineage": []}',
        '{"pid": 1, "began_ns": 1, "lineage": [1]}',
        "[" * 9999,
    ):
        (tmp_path / "processes" / "9-9.json").write_text(text)
        assert [process.pid for process in read_processes(local)] == [3, 4, 5]
    digests = []
    for number in range(5):
        texts = miss_notes.SourceTexts(local)
        texts.add(f"def f{number}(): pass")
        texts.write()
        (digest,) = texts._written
        os.utime(tmp_path / "kernel-sources" / digest, (number, number))
        digests.append(digest)
    known = [miss_notes.read_source(local, digest) is not None for digest in digests]
    assert known == [False, True, True, True, True]
    (tmp_path / "kernel-sources" / digests[4]).write_text("def other(): pass")
    assert miss_notes.read_source(local, digests[4]) is None
    assert miss_notes.read_source(local, "../processes/9-9.json") is None


@pytest.mark.parametrize(
    ("release", "told"),
    [("3.6.0", True), ("3.7.1+gitabc", True), ("3.9.0", False), ("3.10.1", False), (None, True)],
)
def test_what_is_said_of_dependencies_is_true_of_the_triton_that_runs(monkeypatch, release, told):
    """Since Triton 3.9 a key does not depend on what was hashed before, and nothing is said of
    that; no other release is spoken of.
    """
    monkeypatch.setattr(identity, "installed_triton", lambda: Toolchain(release=release))
    sentence = str(Difference("dependencies", "a", "b"))
    assert sentence.startswith("a function that it calls, or a global that it uses, changed")
    assert ("hashed after another kernel" in sentence) == told
    assert "3.9" not in sentence

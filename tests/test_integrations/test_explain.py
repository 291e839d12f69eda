# SPDX-License-Identifier: Apache-2.0
"""`explain` names what differs from the nearest recorded kernel, and strict mode says so before anything is compiled."""

import dataclasses

import plugged
import pytest

import bundler
from bundler.format.manifest import Content

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

    return {name: [name, file_of(changes), call] for name, (changes, call) in {"plain": ({}, {}), **_VARIANTS}.items()}


def compile_variants(wanted, env, **more):
    import json

    return plugged.run(_COMPILE, env, json.dumps(wanted), **more)


@pytest.fixture
def env(store_url, tmp_path, monkeypatch):
    """The environment of programs, and of this process when it asks."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE", store_url)
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    return plugged.environment(store_url, tmp_path / "cache", TRITON_DEFAULT_FP_FUSION="1")


def test_each_planted_difference_is_named(env, variants, tmp_path, monkeypatch):
    """Of nine compiles that differ in one thing from a recorded kernel each is explained by that; on another device nothing differs."""
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
    theirs = [(name, "other" if name in {part, "triton.code"} else text) for name, text in kernel.parts.parts]
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

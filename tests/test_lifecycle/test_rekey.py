# SPDX-License-Identifier: Apache-2.0
"""`restore(rekey=True)`: kernels of another build of the same Triton, under the keys that the
Triton here asks for.

Another build is one that this package and Triton see: its binary has another hash, or it is
installed elsewhere.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import bundler
from bundler.errors import BundlerWarning
from bundler.format.bundle import MemoryBlobs
from bundler.format.manifest import Content

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[1] / "test_compile"
KERNELS, CALLS = FOLDER / "built_kernels.py", FOLDER / "jit_calls.py"
# argv: output, what of Triton's code differs ("binary", "files" or ""), target.
_BUILD = f"""
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")  # Triton would import the real one, which takes seconds
torch.Tensor = type("Tensor", (), dict())
import triton.runtime.cache as cache
from bundler.compile.bundle_build import build
from bundler.compile.build_plan import Plan
from bundler.format.entries import Target
from bundler.toolchain import identity
output, differs, target = sys.argv[1:]
if differs:
    real, binary = cache.triton_key(), identity.installed_triton().binary
    other = real.replace(binary, "ab" * 32)
    assert other != real
    if differs == "files":
        first = real.split("-")[1]
        other = other.replace(first, "cd" * 32)
    cache.triton_key = lambda: other
    identity._binary = lambda directory: "ab" * 32
plan = Plan()
plan.add_modules([{str(KERNELS)!r}], [Target.parse(target)])
built = build(plan, 1)
assert built.failures == (), built.failures
built.bundle.save(output)
"""
_RESTORE = """
import json, sys
import bundler
report = bundler.restore(sys.argv[1], sys.argv[2], rekey=sys.argv[3] == "rekey")
print(json.dumps([report.restored, report.rekeyed, report.skipped]))
"""


def run(what, *arguments, env=None):
    """Run code, or a program, in a new Python; returns what its last line says."""
    how = ["-c", what] if "\n" in str(what) else [str(what)]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *how, *map(str, arguments)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def compiles(cache, target, env=None):
    """Names of the kernels that a JIT on this target compiles, and how many it finds."""
    heard = run(CALLS, KERNELS, target, env={"TRITON_CACHE_DIR": str(cache), **(env or {})})
    return [name for _, name, _, hit in heard if not hit], sum(hit for *_, hit in heard)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Kernels for sm_90 of a Triton whose binary has another hash."""
    path = tmp_path_factory.mktemp("foreign") / "f.tbundle"
    run(_BUILD, path, "binary", "cuda:90")
    return path


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The same Triton under another path, as the environment of a process."""
    folder = tmp_path_factory.mktemp("elsewhere") / "site"
    folder.mkdir()
    package = Path(importlib.util.find_spec("triton").origin).parent
    for found in [package, *package.parent.glob("triton-*.dist-info")]:
        (folder / found.name).symlink_to(found)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    }


@pytest.mark.toolchain
@pytest.mark.slow
def test_amd_kernels_move_to_another_install_path_with_rekey_and_are_skipped_with_the_reason_without(
    elsewhere, tmp_path
):
    """Kernels for gfx942 built under one prefix: under another, a JIT compiles none of them with
    rekey.

    Before Triton 3.9 their keys hold the path where Triton is installed; without rekey each is
    skipped, and the reason names rekey.
    """
    run(_BUILD, tmp_path / "b.tbundle", "", "hip:gfx942")
    with bundler.Bundle.load(tmp_path / "b.tbundle") as bundle:
        total = len(bundle.kernels)
        path_counts = any(
            "triton.location" in dict(kernel.parts.parts) for kernel in bundle.kernels
        )
    restored, rekeyed, skipped = run(
        _RESTORE, tmp_path / "b.tbundle", tmp_path / "plain", "", env=elsewhere
    )
    if path_counts:
        assert (restored, rekeyed, len(skipped)) == ([], [], total)
        assert all(
            "path where Triton was installed" in reason and "rekey=True" in reason
            for _, reason in skipped
        )
    else:
        assert (len(restored), rekeyed, skipped) == (total, [], [])
    restored, rekeyed, skipped = run(
        _RESTORE, tmp_path / "b.tbundle", tmp_path / "moved", "rekey", env=elsewhere
    )
    assert (len(restored), len(rekeyed), skipped) == (total, total if path_counts else 0, [])
    assert compiles(tmp_path / "moved", "hip:gfx942", elsewhere) == ([], total)


@pytest.mark.release
@pytest.mark.toolchain
def test_kernels_of_another_binary_have_the_keys_of_this_one_after_rekey(foreign, tmp_path):
    """Where only the binary's hash differs, a JIT here finds every kernel; the report says what was
    derived from what.
    """
    with bundler.Bundle.load(foreign) as bundle:
        originals = {kernel.key for kernel in bundle.kernels}
    report = bundler.restore(foreign, tmp_path / "cache", rekey=True)
    assert len(report.restored) == len(report.rekeyed) == len(originals)
    assert {origin for _, origin in report.rekeyed} == originals
    assert {key for key, _ in report.rekeyed} == {*report.restored}
    assert originals.isdisjoint(report.restored)
    assert compiles(tmp_path / "cache", "cuda:90") == ([], 7)


def test_a_derived_kernel_is_the_original_but_for_its_hash(foreign, tmp_path):
    """Binary and IR are the original's byte for byte; metadata differs in the hash alone, so that
    it can be packed and checked.
    """
    report = bundler.restore(foreign, tmp_path / "cache", rekey=True)
    bundler.restore(foreign, tmp_path / "plain", only="all")
    for key, origin in report.rekeyed:
        ours, theirs = tmp_path / "cache" / key, tmp_path / "plain" / origin
        names = {path.name for path in theirs.iterdir()}
        assert {path.name for path in ours.iterdir()} == names
        for name in names - {name for name in names if name.endswith(".json")}:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        (metadata,) = [
            name for name in names if name.endswith(".json") and not name.startswith("__grp__")
        ]
        new, old = (json.loads((folder / metadata).read_text()) for folder in (ours, theirs))
        assert new.pop("hash") != old.pop("hash")
        assert new == old
    assert bundler.restore(foreign, tmp_path / "cache", rekey=True).present == report.restored
    with bundler.pack(tmp_path / "cache") as packed:
        assert {kernel.key for kernel in packed.kernels} == {*report.restored}


def test_without_rekey_another_build_is_skipped_with_the_way_out(foreign, tmp_path):
    """Nothing is derived unless somebody asks; the reason names the argument."""
    with pytest.warns(BundlerWarning, match="another build of Triton"):
        report = bundler.restore(foreign, tmp_path / "cache")
    assert (report.usable, report.rekeyed) == (0, ())
    assert all("rekey=True" in reason for _, reason in report.skipped)


def test_a_difference_besides_the_binary_is_refused_and_named(foreign, tmp_path, monkeypatch):
    """Other Python files of Triton, or another setting that is part of keys: no kernel is derived,
    and the reason says which.
    """
    run(_BUILD, tmp_path / "files.tbundle", "files", "cuda:90")
    with pytest.warns(BundlerWarning):
        report = bundler.restore(tmp_path / "files.tbundle", tmp_path / "one", rekey=True)
    assert report.usable == 0
    assert all("other files of its Triton differ" in reason for _, reason in report.skipped)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    with pytest.warns(BundlerWarning):
        report = bundler.restore(foreign, tmp_path / "two", rekey=True)
    assert report.usable == 0
    assert all("env.DISABLE_LLVM_OPT" in reason for _, reason in report.skipped)


def test_another_release_is_refused(foreign, tmp_path):
    """A kernel of another Triton release is never derived from, whatever else is equal; the reason
    names both releases.
    """
    with bundler.Bundle.load(foreign) as bundle:
        older = [
            replace(kernel, toolchain=msgspec.structs.replace(kernel.toolchain, release="3.5.9"))
            for kernel in bundle.kernels
        ]
        with pytest.warns(BundlerWarning, match=r"compiled by Triton 3\.5\.9"):
            report = bundler.restore(
                bundler.Bundle(Content.of(older), bundle.observed, bundle.blobs),
                tmp_path / "cache",
                rekey=True,
            )
    assert (report.usable, report.rekeyed) == (0, ())


def test_kernels_of_this_build_are_left_as_they_are(foreign, tmp_path):
    """A bundle of both builds: what was built here is taken, and nothing is derived for a key that
    is there.
    """
    run(_BUILD, tmp_path / "ours.tbundle", "", "cuda:90")
    with bundler.Bundle.load(foreign) as one, bundler.Bundle.load(tmp_path / "ours.tbundle") as two:
        report = bundler.restore(bundler.merge([one, two]), tmp_path / "cache", rekey=True)
        assert {*report.restored} == {kernel.key for kernel in two.kernels}
    assert report.rekeyed == ()


def test_a_store_restores_with_rekey_too(foreign, tmp_path):
    """`store.restore` takes the same keyword."""
    with (
        bundler.open_store(f"file://{tmp_path}/store") as store,
        bundler.Bundle.load(foreign) as bundle,
    ):
        store.push(bundle, "t")
        assert len(store.restore("t", cache_dir=tmp_path / "cache", rekey=True).rekeyed) == len(
            bundle.kernels
        )


def test_a_damaged_kernel_is_not_derived_from(foreign, tmp_path):
    """Bytes that do not match their digest are never used: the kernel is reported, the others are
    derived.
    """
    with bundler.Bundle.load(foreign) as bundle:
        victim = bundle.kernels[0]
        blobs = {digest: bundle.blobs.read_blob(digest) for digest, _ in bundle.content.blobs}
        blobs[bytes.fromhex(victim.metadata.digest.removeprefix("sha256:"))] += b" "
        damaged = bundler.Bundle(bundle.content, bundle.observed, MemoryBlobs(blobs))
        report = bundler.restore(damaged, tmp_path / "cache", rekey=True)
        assert victim.key in dict(report.skipped)
        assert report.damaged == (victim.key,)
        assert len(report.rekeyed) == len(bundle.kernels) - 1


def test_a_restore_with_rekey_that_skips_damage_exits_with_1(foreign, tmp_path):
    """The command's status is 1 when a kernel that rekey would derive from is damaged in the store,
    though others are in place.
    """
    from click.testing import CliRunner

    from bundler.cli.app import app
    from bundler.store.store_layout import units_of

    url = f"file://{tmp_path}/store"
    with bundler.open_store(url) as store, bundler.Bundle.load(foreign) as bundle:
        store.push(bundle, "t")
        victim, number = bundle.kernels[0], len(bundle.kernels)
        launch_set = next(
            unit for unit in units_of(bundle.content) if unit.family == f"{victim.target}/launch"
        )
    (path,) = (tmp_path / "store" / "data").rglob(launch_set.key.rpartition("/")[2])
    path.write_bytes(path.read_bytes()[:-1])
    words = [
        "restore",
        "--tag",
        "t",
        "--store",
        url,
        "--cache-dir",
        str(tmp_path / "cache"),
        "--rekey",
        "--json",
    ]
    done = CliRunner().invoke(app, words)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["damaged"], told["usable"]) == (1, [victim.key], number - 1)


@pytest.mark.parametrize("arch", ["-1", "", "12", "9" * 400, "gfx942", "gfx", "\u0663"])
@pytest.mark.parametrize("backend", ["cuda", "hip", "nothing"])
def test_what_triton_cannot_take_is_a_mismatch(foreign, backend, arch):
    """Whatever Triton raises for facts that somebody changed, a failed assertion included, is a
    reason not to derive.
    """
    from bundler.errors import ToolchainMismatch
    from bundler.format.entries import Target
    from bundler.toolchain import rekeyed_key

    with bundler.Bundle.load(foreign) as bundle:
        kernel = bundle.kernels[0]
        with pytest.raises(ToolchainMismatch):
            rekeyed_key.key_here(
                kernel.key, kernel.launch.facts, kernel.parts, Target(backend, arch)
            )

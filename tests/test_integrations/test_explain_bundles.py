# SPDX-License-Identifier: Apache-2.0
"""Why a kernel missed where there is no store: beside a bundle, a tag, a registered bundle, or what
lies in Triton's directory.
"""

import json
import subprocess
import sys

import plugged
import pytest

import bundler
from bundler.format.entries import Target
from bundler.format.keyparts import KeyParts
from bundler.integrations.key_comparison import KeyedKernel, differences, nearest

FUSION = {"TRITON_DEFAULT_FP_FUSION": "0"}
PART = "env.TRITON_DEFAULT_FP_FUSION"
_RECORD = """
import bundler
with bundler.recording() as recording:
    compile_one("gelu")
with recording.collect() as bundle:
    bundle.save(sys.argv[2])
say(heard)
"""
_RUN = 'compile_one("gelu")\nsay(heard)'


@pytest.fixture
def recorded(tmp_path):
    """A bundle of one kernel that another process compiled with its default for fusion."""
    path = tmp_path / "gelu.tbundle"
    plugged.run(_RECORD, plain(tmp_path / "recorded"), path)
    return path


def plain(cache, **more):
    """Return the environment of a program with Triton's own cache manager."""
    return plugged.environment(None, cache, TRITON_CACHE_MANAGER=None, **more)


def command(cache, *words, **more):
    """Run a command of the command line with `--json`."""
    line = "from bundler.cli import main; raise SystemExit(main())"
    env = plain(cache, TRITON_BUNDLER_LOCAL=f"{cache}-notes", **more)
    done = subprocess.run(
        [sys.executable, "-P", "-c", line, *map(str, words), "--json"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def parts_of(row):
    return {one["part"]: (one["recorded"], one["asked"]) for one in row["differences"]}


def test_after_a_restore_another_setting_is_named(recorded, tmp_path):
    """Restored, compiled again under another variable by plain Triton: `explain` and `diff` name
    the part of the key, with both values.
    """
    cache = tmp_path / "cache"
    with bundler.Bundle.load(recorded) as bundle:
        bundler.restore(bundle, cache, only="all")
    heard, _ = plugged.run(_RUN, plain(cache, **FUSION))
    assert [hit for _, hit in heard] == [False]
    for words in (["--last"], ["--name", "gelu*"]):
        found = command(cache, "explain", *words, "--bundle", recorded)["kernels"]
        (missed,) = [row for row in found if row["status"] != "recorded"]
        assert (missed["status"], parts_of(missed)[PART]) == ("differs", (None, "false"))
    compared = command(cache, "diff", recorded, cache)
    (added,) = compared["added"]
    assert (compared["same"], compared["changed"], compared["removed"]) == (1, [], [])
    assert (added["nearest"], parts_of(added)[PART]) == (missed["nearest"], (None, "false"))


def test_a_directory_and_a_tag_are_as_good_as_a_bundle(recorded, tmp_path):
    """The same from the directory that the kernel was recorded in, and from a tag of a store."""
    cache = tmp_path / "cache"
    plugged.run(_RUN, plain(cache, **FUSION))
    words = ("explain", "--last", "--bundle", tmp_path / "recorded")
    (missed,) = command(cache, *words)["kernels"]
    assert parts_of(missed)[PART] == (None, "false")
    store = tmp_path / "store"
    with bundler.open_store(str(store)) as opened, bundler.Bundle.load(recorded) as bundle:
        opened.push(bundle, "lib")
    (added,) = command(cache, "diff", "lib", cache, "--store", store)["added"]
    assert parts_of(added)[PART] == (None, "false")
    assert command(cache, "diff", "lib", recorded, "--store", store)["same"] == 1


def test_a_registered_bundle_is_compared_with(recorded, tmp_path):
    """A program that registered its kernels, and compiled others under another setting, asks in
    code; no store is named anywhere.
    """
    code = (
        'import bundler\nbundler.register(sys.argv[2])\ncompile_one("gelu")\nsay([[one.status,'
        " [d.part for d in one.differences]] for one in bundler.explain(last=True)])"
    )
    local = {"TRITON_BUNDLER_LOCAL": tmp_path / "notes"}
    said, _ = plugged.run(code, plain(tmp_path / "cache", **FUSION, **local), recorded)
    assert said == [["differs", ["option.enable_fp_fusion", PART]]]


def keyed(key, target, **options):
    parts = {"source.name": "k", "backend.name": "cuda"} | {
        f"option.{n}": v for n, v in options.items()
    }
    return KeyedKernel(key, "k", Target.parse(target), KeyParts(tuple(parts.items()), proven=True))


def test_the_nearest_is_one_for_the_same_target():
    """However little another target's differs; where there is none of the same target, that is
    told.
    """
    asked = keyed("A" * 52, "cuda:90", num_warps="4", num_stages="3", maxnreg="64")
    far = keyed("B" * 52, "cuda:90", num_warps="8", num_stages="2", maxnreg="32")
    other = keyed("C" * 52, "cuda:80", num_warps="4", num_stages="3", maxnreg="64")
    assert nearest(asked, [other, far])[0] is far
    assert nearest(asked, [far, other])[0] is far
    found, differing = nearest(asked, [other])
    assert (found, [one.what for one in differing]) == (other, ["target"])


def test_what_metadata_does_not_tell_is_no_difference():
    """Of a kernel of a directory only what both sides name is compared; where nothing of it
    differs, that is said.
    """
    whole = keyed("A" * 52, "cuda:90", num_warps="4", debug="False")
    told = KeyedKernel(
        "B" * 52, "k", whole.target, KeyParts((("option.num_warps", "4"),), False), True
    )
    (only,) = differences(whole, told)
    assert "source, signature or constants" in str(only)
    warps = KeyedKernel(
        "B" * 52, "k", whole.target, KeyParts((("option.num_warps", "8"),), False), True
    )
    assert [one.part for one in differences(whole, warps)] == ["option.num_warps"]

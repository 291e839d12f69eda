# SPDX-License-Identifier: Apache-2.0
"""Real caches from a GPU machine, packed here and restored elsewhere.  Skipped aloud where the
archives are not.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import bundler

KERNELS = {"triton-liger-h200": 9, "inductor-transformer-h200": 57}
GROUP = "__grp__"

# Asks Triton's own cache manager for the group of each kernel directory below argv[1].
_ASK = """
import glob, json, os, sys
from triton.runtime.cache import FileCacheManager
found = {}
for group in sorted(glob.glob(os.path.join(glob.escape(sys.argv[1]), "**", "__grp__*.json"), recursive=True)):
    directory = os.path.dirname(group)
    os.environ["TRITON_CACHE_DIR"] = os.path.dirname(directory)
    name = os.path.basename(group).removeprefix("__grp__")
    found[group] = FileCacheManager(os.path.basename(directory)).get_group(name)
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=sorted(KERNELS))
def corpus(request, unpacked):
    """A real cache directory, and how many kernels it holds."""
    return unpacked(request.param), KERNELS[request.param]


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    """The bundle of that cache, and its file."""
    file = tmp_path_factory.mktemp("packed") / "corpus.tbundle"
    with bundler.pack(corpus[0]) as packed:
        packed.save(file)
        yield packed, file


@pytest.fixture(params=["kernels", "code"])
def restored(request, corpus, packed, tmp_path):
    """The cache, packed and restored elsewhere."""
    (root, kernels), (bundle, file) = corpus, packed
    report = bundler.restore(file, tmp_path / "there", only="all", trust=request.param)
    return root, kernels, tmp_path / "there", bundle, report, request.param


def files(root):
    """Return the relative paths of all files."""
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}


def test_packing_leaves_out_nothing_without_a_reason(corpus):
    """Each kernel is packed, and each other file is an entry or has a reason."""
    root, kernels = corpus
    with bundler.pack(root) as packed:
        assert len(packed.kernels) == kernels
        entries = {entry.path for entry in (*packed.tuning_files, *packed.helpers, *packed.opaque)}
        taken = {f"{k.key}/{a.filename}" for k in packed.kernels for a in k.artifacts}
        reasons = dict(packed.left_out)
    assert all(why for why in reasons.values())
    for name in files(root):
        short = "/".join(Path(name).parts[-2:])
        assert {name, short} & (entries | taken | reasons.keys()) or GROUP in name, name


@pytest.mark.skipif(
    find_spec("triton") is None, reason="asks Triton's cache manager, and triton is not installed"
)
def test_triton_finds_every_group_with_every_child(restored):
    """Triton's own cache manager finds each kernel's group in the new place, with all its children,
    and nothing elsewhere.
    """
    root, kernels, there, *_ = restored
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ASK, there],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    groups = json.loads(done.stdout)
    assert len(groups) == kernels
    for group, children in groups.items():
        directory = Path(group).parent
        original = json.loads((root / directory.relative_to(there) / Path(group).name).read_text())[
            "child_paths"
        ]
        assert children == {name: str(directory / name) for name in original}
        assert all(Path(path).is_file() for path in children.values())


def test_every_other_file_is_identical_or_named(restored):
    """Each file of the original is at its new place byte for byte, or the report names it: skipped,
    or rewritten.
    """
    root, _, there, packed, report, _ = restored
    skipped, left_out = dict(report.skipped), dict(packed.left_out)
    named = 0
    for name, path in files(root).items():
        short = "/".join(Path(name).parts[-2:])
        if GROUP in name:
            continue
        if {name, short} & (skipped.keys() | left_out.keys()):
            named += 1
            assert not (there / name).exists()
        elif {name, short} & set(report.rewritten):
            named += 1
            assert (
                json.loads((there / name).read_bytes())["hash"]
                == json.loads(path.read_bytes())["hash"]
            )
        else:
            assert (there / name).read_bytes() == path.read_bytes(), name
    assert named <= len(skipped) + len(left_out) + len(report.rewritten)


def test_nothing_is_there_that_was_not_in_the_original(restored):
    """A restore makes no file that the original cache did not have."""
    root, _, there, *_ = restored
    assert files(there).keys() <= files(root).keys()


def test_what_is_skipped_depends_on_trust_alone(restored):
    """Without trust, shared libraries and torch's files are skipped, each with the reason; with
    trust, nothing is.
    """
    _, kernels, there, packed, report, trust = restored
    assert (len(report.restored), report.usable) == (kernels, kernels)
    code = {entry.path for entry in (*packed.helpers, *packed.opaque)}
    assert code
    if trust == "code":
        assert report.skipped == ()
        assert all(list(there.rglob(Path(path).name)) for path in code)
    else:
        assert dict(report.skipped).keys() == code
        assert {why for _, why in report.skipped} == {
            "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
        }
        assert not [path for path in there.rglob("*") if path.suffix in {".so", ".py"}]


def test_a_second_restore_finds_everything_present(restored, packed):
    """Restored again, every kernel is present, every single file in place, and nothing is
    written.
    """
    _, kernels, there, _, first, trust = restored
    before = {name: path.read_bytes() for name, path in files(there).items()}
    second = bundler.restore(packed[1], there, only="all", trust=trust)
    assert (len(second.present), second.restored, second.repaired, second.files) == (
        kernels,
        (),
        (),
        0,
    )
    assert second.companions == first.companions
    assert {name: path.read_bytes() for name, path in files(there).items()} == before


def test_packing_what_was_restored_gives_the_same_kernels(restored):
    """The bundle of the restored cache has the same kernels, file for file, as that of the
    original.
    """
    *_, there, packed, _, trust = restored
    with bundler.pack(there) as again:
        assert again.kernels == packed.kernels
        if trust == "code":
            assert again.digest == packed.digest

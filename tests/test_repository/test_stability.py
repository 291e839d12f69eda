# SPDX-License-Identifier: Apache-2.0
"""docs/public-surface.txt is the public surface, and what differs from the last release is named in
CHANGELOG.md.
"""

import subprocess

import pytest

from tools.docs_site import public_surface

BEFORE = [
    "Bundle.digest -> str",
    "class Bundle()",
    "command triton-bundler pack: --output root",
    "function restore(path: str) -> RestoreReport",
    "variable TRITON_BUNDLER_STORE",
]
NOW = [
    "Bundle.digest -> str",
    "Bundle.save(path: str) -> None",
    "class Bundle()",
    "command triton-bundler pack: --output --strip root",
    "function restore(path: str, only: Only = None) -> RestoreReport",
]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n{}\n\n## [1.0.0]\n\n- restore, save, pack\n"


def test_the_file_is_the_surface():
    """Write it anew by `python -m tools.docs_site.public_surface`, and read what changed."""
    assert public_surface.SURFACE.read_text(encoding="utf-8").splitlines() == public_surface.lines()


def test_what_changed_since_the_last_release_is_in_the_changelog():
    """Nothing was released without a tag, so then there is nothing to hold."""
    before = public_surface.released()
    if before is None:
        pytest.skip("no tag of a release is in this checkout")
    changelog = public_surface.CHANGELOG.read_text(encoding="utf-8")
    assert public_surface.unnamed(before, public_surface.lines(), changelog) == []


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("nothing", ["Bundle.save", "TRITON_BUNDLER_STORE", "pack", "restore"]),
        ("- `restore` takes `only`; `Bundle.save`", ["TRITON_BUNDLER_STORE", "pack"]),
        ("- save, restore, pack; TRITON_BUNDLER_STORE is gone", []),
    ],
)
def test_a_change_that_the_newest_section_does_not_name_is_found(words, missing):
    """What is new, went, or has another signature or option; older sections do not count."""
    assert public_surface.unnamed(BEFORE, NOW, CHANGELOG.format(words)) == missing


def test_the_last_release_is_that_of_the_newest_tag(tmp_path):
    """The file as it was at the tag counts, not as it is."""
    assert public_surface.released(tmp_path) is None

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    file = tmp_path / "docs" / public_surface.SURFACE.name
    file.parent.mkdir()
    file.write_text("\n".join(BEFORE))
    git("add", ".")
    git("commit", "-qm", "released")
    git("tag", "v1.0.0")
    file.write_text("\n".join(NOW))
    git("commit", "-qam", "later")
    assert public_surface.released(tmp_path) == BEFORE

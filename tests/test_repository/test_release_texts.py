# SPDX-License-Identifier: Apache-2.0
"""Tag, versions, CHANGELOG, citation, recipe and image file of a release agree, and where they do
not, it is said which.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tools.wheels.texts import IMAGE, RECIPE, changelog_faults, faults, version_of

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "pyproject.toml",
    "bundler/project.py",
    "CITATION.cff",
    "CHANGELOG.md",
    RECIPE,
)


@pytest.fixture
def copy(tmp_path):
    """The files that hold a version, to be changed."""
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def change(root, name, old, new):
    """Replace in a file what is there once."""
    text = (root / name).read_text(encoding="utf-8")
    assert text.count(old) >= 1
    (root / name).write_text(text.replace(old, new, 1), encoding="utf-8")


def test_this_checkout_agrees_with_itself():
    """No version differs from that in bundler/project.py, and CHANGELOG.md has the headings of keep
    a changelog.
    """
    assert list(faults(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("CITATION.cff", "\nversion: "),
        (RECIPE, '\n  version: "'),
    ],
)
def test_another_version_is_named(copy, name, old):
    """One place that was forgotten is one sentence, which says where, what and what was
    expected.
    """
    change(copy, name, old, old + "9")
    (fault,) = faults(copy)
    version = version_of(ROOT)
    assert fault.startswith(f"{name} has the version 9{version}, expected {version}, as bundler/")


@pytest.mark.parametrize(
    "old", ['dynamic = ["version"]', 'version = { attr = "bundler.project.VERSION" }']
)
def test_a_version_of_another_place_is_named(copy, old):
    """The metadata take the version from one line of the package, and a second one is a fault."""
    change(copy, "pyproject.toml", old, 'version = "1.0.0"')
    assert list(faults(copy)) == [
        "pyproject.toml does not take the version from bundler/project.py"
    ]


def test_a_build_reads_the_version_without_what_the_package_needs(tmp_path):
    """setuptools takes it from the text of the module: the Python that builds lacks msgspec."""
    expand = pytest.importorskip("setuptools.config.expand")
    module = tmp_path / "bundler" / "project.py"
    module.parent.mkdir()
    module.write_text(
        "import nothing_of_this_name\n" + (ROOT / "bundler/project.py").read_text(encoding="utf-8")
    )
    assert expand.read_attr("bundler.project.VERSION", root_dir=tmp_path) == version_of(ROOT)


def test_a_tag_has_to_be_the_version_and_the_newest_heading(copy):
    """An untagged checkout may have unreleased changes, a release may not."""
    assert list(faults(copy)) == []
    change(copy, "CHANGELOG.md", "## [Unreleased]", "## [9.1.1] - 2026-12-01")
    version = version_of(ROOT)
    assert "the first heading of CHANGELOG.md" in list(faults(copy, f"v{version}"))[-1]
    assert [fault.partition(" is ")[0] for fault in faults(copy, "v9.1.1")] == [
        f"CHANGELOG.md names neither {version} nor Unreleased",
        "the tag",
        "the first heading of CHANGELOG.md",
    ]
    for name in ("bundler/project.py", "CITATION.cff", RECIPE):
        text = (copy / name).read_text(encoding="utf-8")
        (copy / name).write_text(
            re.sub(r"(VERSION = |\bversion: )(\"?)\d+\.\d+\.\d+", r"\g<1>\g<2>9.1.1", text)
        )
    assert list(faults(copy, "v9.1.1")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("## Unreleased\n### Added\n- x\n## [1.0.0] - 2026-01-31\n", "no heading of a release"),
        ("## [1.0.0] - 2026-02-31\n", "no heading of a release"),
        ("## [1.0.0]\n## [Unreleased]\n", "no heading of a release"),
        ("## [1.0.0] - 2026-01-31\n## [Unreleased]\n", "below a release"),
        ("## [1.0.0] - 2026-01-31\n### Mended\n", "expected each once"),
        ("## [1.0.0] - 2026-01-31\n### Added\n### Added\n", "expected each once"),
        ("## [1.0.0] - 2026-01-31\n- x\n### Added\n", "stands under none"),
        ("## [1.0.0] - 2026-01-31\n## [1.10.0] - 2026-02-01\n", "newest first"),
        ("## [1.0.0] - 2026-01-31\n## [1.0.0] - 2026-01-30\n", "newest first"),
        ("## [0.9.0] - 2026-01-31\n", "neither 1.0.0 nor Unreleased"),
    ],
)
def test_headings_of_another_form_are_named(text, words):
    """Each fault of a CHANGELOG is a sentence of its own."""
    assert any(words in fault for fault in changelog_faults(text, "1.0.0"))


def test_numbers_of_versions_are_compared_as_numbers():
    """1.10.0 is newer than 1.9.0."""
    text = (
        "## [Unreleased]\n## [1.10.0] - 2026-02-01\n### Added\n- x\n## [1.9.0] - 2026-01-31\n###"
        " Fixed\n- x\n"
    )
    assert list(changelog_faults(text, "1.10.0")) == []


def test_the_recipe_asks_for_what_the_package_asks_for():
    """The conda recipe has each requirement of the package with its floor, under conda's name, and
    those of the command that it installs.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run = (ROOT / RECIPE).read_text(encoding="utf-8").partition("  run:\n")[2].partition("\n\n")[0]
    asked = {
        line.strip().removeprefix("- ").replace(" ", "")
        for line in run.splitlines()
        if "- " in line
    }
    core = {line.replace("msgpack>", "msgpack-python>") for line in project["dependencies"]}
    assert asked - {"python"} == core | {
        line for line in project["optional-dependencies"]["cli"] if "man" not in line
    }


def test_the_image_runs_as_nobody_on_the_python_that_it_was_built_for():
    """A user by number, no shell in the last stage, tags for both bases, and one Python version in
    both.
    """
    text = (ROOT / IMAGE).read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert [base.partition(":")[0] for base in bases] == [
        "debian",
        "gcr.io/distroless/python3-debian12",
    ]
    assert re.search(r":12\.\d+-slim$", bases[0])
    last = text.rpartition("FROM ")[2]
    assert "\nUSER 65532:65532\n" in last
    assert "\nRUN " not in last
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)[1])
    assert entry == ["/usr/bin/python3", "-m", "bundler"]
    ignored = (ROOT / f"{IMAGE}.dockerignore").read_text(encoding="utf-8").split()
    copied = {
        word
        for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
        for word in line.split()
    }
    assert copied == {word[1:] for word in ignored if word.startswith("!")}

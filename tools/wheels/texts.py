# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels texts [--tag TAG]`: what people read of a release agrees with what is
built, and has the form that its readers expect.

`faults` finds where they do not: versions, the tag, the headings of CHANGELOG.md (keep a
changelog), CITATION.cff, the conda recipe and the file of the container image.  The last three are
given to cffconvert, rattler-build and hadolint too, where these are installed, as `make dist` does.
The version is the one in bundler/project.py.  While its section of CHANGELOG.md is written, that
section is `[Unreleased]`; a tag asks for the version and a day.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from tools.shared import programs
from tools.shared.processes import ROOT, captured, said

SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
RECIPE = "deploy/conda/recipe.yaml"
VARIANTS = "deploy/conda/variants.yaml"
IMAGE = "deploy/image/Containerfile"
VERSION = "bundler/project.py"
# What else names the version, each time as the group of an expression.
_PLACES = {
    "CITATION.cff": r"^version: (.+)$",
    RECIPE: r'^  version: "(.+)"$',
}
_SOURCE = {"attr": "bundler.project.VERSION"}
_RELEASED = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)")


def faults(root: Path, tag: str | None = None) -> Iterator[str]:
    """Yield a sentence for each disagreement; with a tag, also for what an untagged checkout may
    have and a release may not.
    """
    metadata = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    source = metadata["tool"]["setuptools"].get("dynamic", {}).get("version")
    if metadata["project"].get("dynamic") != ["version"] or source != _SOURCE:
        yield f"pyproject.toml does not take the version from {VERSION}"
    version = version_of(root)
    for name, expression in _PLACES.items():
        found = re.findall(expression, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if found != [version]:
            yield (
                f"{name} has the version {', '.join(found) or 'nowhere'}, expected {version}, as"
                f" {VERSION} has it"
            )
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    yield from changelog_faults(changelog, version)
    if tag is not None:
        first = next(iter(re.findall(r"^## (.*)$", changelog, re.MULTILINE)), "")
        if tag != f"v{version}":
            yield f"the tag is {tag}, expected v{version}, as {VERSION} has it"
        if not first.startswith(f"[{version}] - "):
            yield (
                f"the first heading of CHANGELOG.md is {first!r}, expected [{version}] - and the"
                " day, in a release"
            )


def version_of(root: Path) -> str:
    """Return the version of a checkout, as a build reads it.

    Raises:
        ValueError: there is no line, or more than one.
    """
    text = (root / VERSION).read_text(encoding="utf-8")
    (version,) = re.findall(r'^VERSION = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    return str(version)


def changelog_faults(text: str, version: str) -> Iterator[str]:
    """Yield a sentence for each heading that keepachangelog.com does not have so, or not there."""
    headings: list[str] = []
    sections: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"CHANGELOG.md, line {number}: {line!r}"
        if line.startswith("## "):
            headings.append(line[3:])
            sections = []
            if not _is_heading(line[3:]):
                yield (
                    f"{place} is no heading of a release, as [1.2.3] - 2026-01-31, and not"
                    " [Unreleased]"
                )
        elif line.startswith("### "):
            if line[4:] not in SECTIONS or line[4:] in sections:
                yield f"{place}: expected each once, of {', '.join(SECTIONS)}"
            sections.append(line[4:])
        elif line.startswith("- ") and not sections:
            yield f"{place} stands under none of {', '.join(SECTIONS)}"
    if "[Unreleased]" in headings[1:]:
        yield "CHANGELOG.md has Unreleased below a release"
    releases = [
        tuple(map(int, found[1].split(".")))
        for one in headings
        if (found := _RELEASED.fullmatch(one))
    ]
    if releases != sorted(set(releases), reverse=True):
        yield (
            f"CHANGELOG.md has the headings {', '.join(headings)}; expected each once, the newest"
            " first"
        )
    if not any(one.startswith((f"[{version}]", "[Unreleased]")) for one in headings):
        yield f"CHANGELOG.md names neither {version} nor Unreleased"


def program_faults(root: Path) -> Iterator[str]:
    """Yield what the programs that read these files say of them."""
    scripts = Path(sysconfig.get_path("scripts"))
    for name, words in {
        "cffconvert": ("--validate", "-i", "CITATION.cff"),
        "hadolint": (IMAGE,),
    }.items():
        if not (scripts / name).exists():
            print(f"skipped: {name} is not installed")
            continue
        done = captured(scripts / name, *words, cwd=root)
        if done.returncode:
            yield f"{name} {' '.join(words)}:\n{done.stdout}{done.stderr}".rstrip()
        else:
            print(f"{name} {' '.join(words)}: nothing wrong")
    if importlib.util.find_spec("rattler_build") is None:
        print("skipped: rattler-build is not installed")
        return
    # Another process: what it says of a recipe is an error of its own, and mypy need not know the
    # package.
    render = (
        "import sys, rattler_build as r; recipe, variants = (type.from_file(path) for type, path in"
        " ((r.Stage0Recipe, sys.argv[1]), (r.VariantConfig, sys.argv[2])));print(';"
        " '.join(f'{one.recipe.package.name} {one.recipe.package.version}"
        " {one.recipe.build.string}' for one in recipe.render(variants)))"
    )
    done = captured(sys.executable, "-c", render, RECIPE, VARIANTS, cwd=root)
    if done.returncode:
        yield f"rattler-build does not render {RECIPE}:\n{done.stderr}".rstrip()
    else:
        print(f"rattler-build renders {RECIPE}: {done.stdout.strip()}")


def _is_heading(text: str) -> bool:
    found = _RELEASED.fullmatch(text)
    if found is None:
        return text == "[Unreleased]"
    try:
        date.fromisoformat(found[2])
    except ValueError:
        return False
    return True


def main() -> int:
    """Check this checkout; the status is 1 when something disagrees."""
    about = "what is to be released; default: the tag of the commit, if any"
    tag = programs.arguments(__doc__, tag=(str, about)).tag
    tag = tag or said("git", "-C", ROOT, "describe", "--exact-match", "--tags", "--match", "v*")
    found = [*faults(ROOT, tag), *program_faults(ROOT)]
    for fault in found:
        sys.stderr.write(f"texts: {fault}\n")
    if not found:
        print(f"texts agree with each other, and with {tag or 'no tag, since the commit has none'}")
    return 1 if found else 0

# SPDX-License-Identifier: Apache-2.0
"""`make release` prepares in one order, ends at the first step that fails, and uploads nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["texts", "gate", "release", "trial", "sums"]
# Each stands in for a program, notes its step, and fails where that is asked for.
PROGRAM = '#!/bin/sh\nstep=$({notes})\necho "$step" >>"$LOG"\n[ "$step" != "$FAILING" ]\n'
pytestmark = pytest.mark.skipif(
    None in {shutil.which("make"), shutil.which("git")}, reason="make or git is not installed"
)


@pytest.fixture
def prepared(tmp_path):
    """A checkout of one commit whose programs only note their names; returns what prepares a
    release there: status, steps, and what was said.
    """
    place, log = tmp_path / "checkout", tmp_path / "log"
    programs = {
        ".venv-dist/bin/python": 'echo "$3"',
        ".ci/run": "echo gate",
        "bin/sha256sum": "echo sums",
        "bin/minisign": 'echo "sign $*"',
    }
    for name, notes in programs.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM.format(notes=notes))
        path.chmod(0o755)
    shutil.copy(ROOT / "Makefile", place)
    texts = {"bundler/project.py": 'VERSION = "1.0.0"\n', ".gitignore": "/.build/\n/dist/\n"}
    for name in ("tools/wheels/requirements.txt", "dist/b-1.whl", "dist/a-1.tar.gz"):
        texts[name] = ""
    texts[".venv-dist/.ready"] = ""
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=place, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")

    def prepare(*variables, tag="v1.0.0", failing="none"):
        if tag:
            git("tag", "--force", tag)
        log.write_text("")
        path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "LOG": str(log), "FAILING": failing}
        line = ["make", "--no-print-directory", "release", *variables]
        done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr

    prepare.place = place
    return prepare


def test_all_steps_run_and_the_upload_is_only_said(prepared):
    """The last line names each file once; nothing is run that uploads."""
    status, steps, said = prepared()
    assert (status, steps) == (0, STEPS), said
    assert said.splitlines()[-1] == (
        "make: the upload of v1.0.0, not done: python -m twine upload dist/b-1.whl dist/a-1.tar.gz"
    )
    assert prepared("GATE=")[1] == [step for step in STEPS if step != "gate"]


@pytest.mark.parametrize("step", ["texts", "trial"])
def test_the_first_step_that_fails_ends_it(prepared, step):
    """What stands behind it is not tried."""
    status, steps, _ = prepared(failing=step)
    assert (status, steps) == (2, STEPS[: STEPS.index(step) + 1])


def test_without_the_tag_nothing_is_built_but_in_a_dry_run(prepared):
    """The tag of another version does not count. A dry run says what is missing, and goes on; a
    build that fails ends that, too.
    """
    status, steps, said = prepared(tag="v0.9.0")
    assert (status, steps) == (2, [])
    assert "the commit has not the tag v1.0.0" in said
    status, steps, said = prepared("DRY_RUN=1", tag="", failing="texts")
    assert (status, steps) == (0, STEPS), said
    assert "the commit has not the tag v1.0.0" in said
    assert prepared("DRY_RUN=1", tag="", failing="release")[:2] == (2, STEPS[:3])


def test_what_is_not_committed_would_not_be_in_a_release(prepared):
    """A file that nobody added ends it."""
    (prepared.place / "forgotten").touch()
    status, steps, said = prepared()
    assert (status, steps) == (2, [])
    assert "not committed" in said


def test_a_key_signs_the_digests(prepared):
    """Last, with the program of its kind."""
    _, steps, _ = prepared("KEY=release.key")
    assert steps == [*STEPS, "sign -S -s release.key -m dist/SHA256SUMS"]

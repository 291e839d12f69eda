# SPDX-License-Identifier: Apache-2.0
"""A release is prepared in one order, ends at the first step that fails, and is never uploaded."""

import subprocess
import sys

import pytest

from tools.wheels import prepare
from tools.wheels.texts import version_of

TAG = f"v{version_of(prepare.ROOT)}"
STEPS = ["texts", "gate", "files", "trial", "digests"]


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """Prepare a release of which some steps fail, and return the status and the steps that ran."""

    def call(*options, failing=(), faults=()):
        ran = []

        def run(step, words, folder=None):
            ran.append((step, words))
            return step not in failing

        monkeypatch.setattr(prepare, "run", run)
        monkeypatch.setattr(prepare, "commit_faults", lambda tag: iter(faults))
        monkeypatch.setattr(sys, "argv", ["prepare", str(tmp_path), *options])
        return prepare.main(), [step for step, _ in ran], ran

    return call


def test_all_steps_run_and_the_upload_is_only_said(prepared, tmp_path, capsys):
    """The command names each file once; nothing is run that uploads."""
    for name in ("b-1.whl", "a-1.tar.gz", "b-1.whl.cdx.json", "SHA256SUMS"):
        (tmp_path / name).touch()
    status, names, ran = prepared("--python", "3.12")
    assert (status, names) == (0, STEPS)
    assert not any("upload" in words for _, words in ran)
    assert [words[-2:] for _, words in ran[2:4]] == [["--python", "3.12"]] * 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"prepare: the upload of {TAG}, not done: ")
    assert last.endswith(f"twine upload {tmp_path}/a-1.tar.gz {tmp_path}/b-1.whl")


@pytest.mark.parametrize("step", STEPS)
def test_the_first_step_that_fails_ends_it(prepared, step):
    """What stands behind it is not tried."""
    status, names, _ = prepared(failing={step})
    assert (status, names) == (1, STEPS[: STEPS.index(step) + 1])


def test_without_the_tag_nothing_is_built_but_in_a_dry_run(prepared, capsys):
    """The dry run says what is missing, and goes on; a file that differs ends that, too."""
    faults = [f"the commit has no tag, expected {TAG}"]
    assert prepared(faults=faults)[:2] == (1, [])
    assert prepared("--dry-run", faults=faults, failing={"texts"})[:2] == (0, STEPS)
    assert capsys.readouterr().out.count(faults[0]) == 2
    assert prepared("--dry-run", faults=faults, failing={"files"})[:2] == (1, STEPS[:3])


def test_a_key_signs_the_digests_and_a_public_key_verifies(prepared, tmp_path, monkeypatch, capsys):
    """Without minisign a key is an error before anything is built."""
    key = tmp_path / "release.key"
    monkeypatch.setattr(prepare.shutil, "which", lambda name: name)
    _, names, ran = prepared("--no-gate", "--key", str(key))
    assert (names[-1], ran[-1][1][:2]) == ("signature", ["minisign", "-S"])
    key.with_suffix(".pub").touch()
    _, _, ran = prepared("--no-gate", "--key", str(key))
    assert [words[1] for step, words in ran if step == "signature"] == ["-S", "-V"]
    monkeypatch.setattr(prepare.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        prepared("--key", str(key))
    assert "minisign, which is not installed" in capsys.readouterr().err


def test_the_commit_has_to_have_the_tag_and_all_changes(tmp_path, monkeypatch):
    """A tag of another version does not count, nor one of another commit."""
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    assert "no history" in next(prepare.commit_faults("v1.0.0"))

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").touch()
    git("add", ".")
    git("commit", "-qm", "first")
    assert list(prepare.commit_faults("v1.0.0")) == ["the commit has no tag, expected v1.0.0"]
    git("tag", "v0.9.0")
    assert list(prepare.commit_faults("v1.0.0")) == ["the commit has v0.9.0, expected v1.0.0"]
    git("tag", "v1.0.0")
    assert list(prepare.commit_faults("v1.0.0")) == []
    (tmp_path / "file").write_text("changed")
    assert ["not committed" in fault for fault in prepare.commit_faults("v1.0.0")] == [True]


def test_a_step_ends_with_its_status(capsys):
    """The status of the program decides, and how long it took is said."""
    assert prepare.run("good", [sys.executable, "-c", "pass"])
    assert not prepare.run("bad", [sys.executable, "-c", "raise SystemExit(3)"])
    assert "prepare: bad: failed with 3 after 0 s" in capsys.readouterr().out

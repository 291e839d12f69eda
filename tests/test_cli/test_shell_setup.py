# SPDX-License-Identifier: Apache-2.0
"""`config show`, `completion` and `man`, as a user runs them."""

import os
import shutil
import subprocess

import pytest

from bundler import config
from bundler.cli import doctor


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home, and a folder to stand in, without settings."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_config_show_says_what_holds_and_why(cli, tmp_path, monkeypatch):
    """Each setting with its value and origin; passwords in URLs are not shown; unknown variables
    are named.
    """
    (tmp_path / "here" / "triton-bundler.toml").write_text('store = "redis://me:word@host"\n')
    monkeypatch.setenv("TRITON_BUNDLER_MODE", "read")
    monkeypatch.setenv("TRITON_BUNDLER_MODEL", "x")
    shown = cli("config", "show", "--origin")
    lines = [line.split() for line in shown.stdout.splitlines()]
    path = str(tmp_path / "here" / "triton-bundler.toml")
    assert ["store", "redis://***@host", path] in lines
    assert ["mode", "read", "TRITON_BUNDLER_MODE"] in lines
    assert ["keep", "all", "default"] in lines
    assert lines[-1] == ["read", path]
    assert "TRITON_BUNDLER_MODEL (did you mean TRITON_BUNDLER_MODE?)" in shown.stderr
    assert "default" not in cli("config", "show").stdout
    result = cli("config", "show", "--json")
    assert result.exit_code == 0
    assert '"redis://***@host"' in result.stdout
    assert "me:word" not in result.stdout
    assert len(lines) == len(config.SETTINGS) + 3


def test_commands_take_the_store_of_a_file(cli, tmp_path):
    """Without --store and variable, the project's file names the store."""
    (tmp_path / "store").mkdir()
    (tmp_path / "here" / "pyproject.toml").write_text(
        f'[tool.triton-bundler]\nstore = "{(tmp_path / "store").as_uri()}"\n'
    )
    assert cli("tags").exit_code == 0


def test_a_wrong_file_ends_config_show_and_is_a_problem_for_doctor(cli, tmp_path):
    """The error names file, setting and what was expected, in both."""
    path = tmp_path / "here" / "triton-bundler.toml"
    path.write_text('mode = "both"\n')
    words = f"{path}: mode = 'both': expected one of readwrite, read, write"
    shown = cli("config", "show")
    assert (shown.exit_code, shown.stderr) == (1, f"error: {words}\n")
    found = [finding for finding in doctor.all_checks() if finding.what == "settings"]
    assert [(finding.status, finding.value) for finding in found] == [(doctor.PROBLEM, words)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_where_the_shell_looks(shell, cli, home):
    """One command writes the script; again it is the same; --print prints it."""
    place = {
        "bash": ".local/share/bash-completion/completions/triton-bundler",
        "zsh": ".zfunc/_triton-bundler",
        "fish": ".config/fish/completions/triton-bundler.fish",
    }[shell]
    done = cli("completion", shell)
    assert (done.exit_code, done.stderr) == (0, "")
    assert str(home / place) in done.stdout
    script = (home / place).read_text()
    assert cli("completion", shell, "--print").stdout.strip() == script.strip()
    assert ("fpath+=" in done.stdout) == (shell == "zsh")
    if shell == "zsh":
        (home / ".zshrc").write_text("fpath+=(~/.zfunc)\n")
        assert "fpath+=" not in cli("completion", shell).stdout


def test_the_shell_is_that_of_the_user_or_must_be_named(cli, monkeypatch):
    """$SHELL decides; one that has no completions is named."""
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert "fish/completions" in cli("completion").stdout
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    refused = cli("completion")
    assert refused.exit_code == 1
    assert "$SHELL is tcsh" in refused.stderr
    assert "bash, zsh, fish" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_files(command, cli, tmp_path):
    """What bash asks of the program: names of commands and options, and that a bundle is a file."""

    def ask(*words):
        env = {
            "_TRITON_BUNDLER_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        return command(env=env).stdout.split()

    assert ask("triton-bundler", "compl") == ["plain,completion"]
    assert ask("triton-bundler", "prune", "--max") == ["plain,--max-bytes"]
    assert ask("triton-bundler", "restore", "x") == ["file,x"]
    assert ask("triton-bundler", "pack", "d", "-o", "x") == ["file,x"]
    script = cli("completion", "bash", "--print").stdout
    checked = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_manual_pages_are_of_the_text_of_help(cli, home):
    """A page for each command, with each option that its help has."""
    done = cli("man")
    folder = home / ".local" / "share" / "man" / "man1"
    assert done.exit_code == 0
    assert f"to {folder}: man triton-bundler" in done.stdout
    pages = set(os.listdir(folder))
    assert {"triton-bundler.1", "triton-bundler-restore.1", "triton-bundler-key-new.1"} <= pages
    page = (folder / "triton-bundler-prune.1").read_text().replace("\\", "")
    for line in cli("prune", "--help").stdout.splitlines():
        option = line.strip().split(" ")[0]
        assert not option.startswith("--") or option == "--help" or option in page


@pytest.mark.parametrize("words", [("completion", "bash"), ("man",)])
def test_a_home_that_cannot_be_written_is_an_error_of_ours(words, cli, tmp_path, monkeypatch):
    """The folder is named, and no traceback is shown."""
    (tmp_path / "file").touch()
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    result = cli(*words)
    assert result.exit_code == 1
    assert f"error: cannot make {tmp_path}/file/.local/share/" in result.stderr

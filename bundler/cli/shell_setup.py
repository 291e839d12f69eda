# SPDX-License-Identifier: Apache-2.0
"""The commands `completion` and `man`: what a shell needs to complete our words, and manual pages
of the text that `--help` prints.

`app.py` lists the commands; `main` calls `complete_files` while a shell asks for completions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

import bundler
from bundler.cli import wording
from bundler.cli.command import command, flag, option
from bundler.cli.terminal import Screen
from bundler.errors import NotFound
from bundler.format.bundle_file import os_errors, replace_content
from bundler.project import install

PROGRAM = "triton-bundler"
# click reads this variable when a shell asks: `bash_complete` and so on.
VARIABLE = "_TRITON_BUNDLER_COMPLETE"
# Where each shell looks for the completions of a user, below the folder in the first variable that
# is set, else below the home.
_PLACES = {
    "bash": ("XDG_DATA_HOME", ".local/share", f"bash-completion/completions/{PROGRAM}"),
    "zsh": ("ZDOTDIR", "", f".zfunc/_{PROGRAM}"),
    "fish": ("XDG_CONFIG_HOME", ".config", f"fish/completions/{PROGRAM}.fish"),
}
_ZSH_LINES = "fpath+=(${ZDOTDIR:-$HOME}/.zfunc)\nautoload -Uz compinit && compinit\n"
# Words of options and arguments that name files; the others have no completions.
_FILES = frozenset({"FILE", "BUNDLE", "DIR", "DIRECTORY|FAMILY", "FILE|DIR"})
_FILE_ARGUMENTS = frozenset({"bundle", "bundles", "first", "second", "file", "files", "source"})


@command(
    "Let the shell complete commands, options and files.",
    "completion",
    "completion zsh",
    "completion bash --print",
)
@click.argument("shell", required=False, type=click.Choice(tuple(_PLACES)))
@flag("--print", "printed", "Print the script instead of installing it.")
def completion(screen: Screen, shell: str | None, printed: bool) -> None:
    """Install what SHELL needs to complete our words; without SHELL, for the one in $SHELL.

    bash needs the package bash-completion. For zsh, two lines in .zshrc are printed where its
    folder is not yet searched.
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    made = get_completion_class(name)
    if name not in _PLACES or made is None:
        raise NotFound(
            f"$SHELL is {name or 'not set'}, for which there are no completions: name one of"
            f" {', '.join(_PLACES)}",
            shell=name,
        )
    script = made(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source()
    if printed:
        screen.text(script)
        screen.finish({"shell": name, "script": script})
        return
    variable, default, below = _PLACES[name]
    path = os.path.join(_below(variable, default), *below.split("/"))
    _make_folder(os.path.dirname(path))
    replace_content(path, script.encode())
    screen.done(f"wrote {path}: new shells complete {PROGRAM}")
    if name == "zsh" and ".zfunc" not in _rc_text():
        screen.line("add to .zshrc, before anything else calls compinit:")
        screen.text(_ZSH_LINES)
    screen.finish({"shell": name, "path": path})


@command("Write manual pages.", "man", "man -o /usr/local/share/man/man1")
@option("-o", "--output DIR", "The folder; else ~/.local/share/man/man1, where man looks.")
def man(screen: Screen, output: str | None) -> None:
    """Write a manual page for each command, of the text that --help prints."""
    try:
        from click_man.core import generate_man_page
    except ModuleNotFoundError as error:
        raise NotFound(
            f"manual pages need click-man, which is not installed: {install('cli')}",
            name="click-man",
        ) from error
    folder = output or os.path.join(_below("XDG_DATA_HOME", ".local/share"), "man", "man1")
    _make_folder(folder)
    written = []
    for context in _contexts(click.get_current_context().find_root().command):
        page = generate_man_page(context, version=bundler.__version__)
        path = os.path.join(folder, f"{context.command_path.replace(' ', '-')}.1")
        replace_content(path, page.encode())
        written.append(path)
    screen.done(f"wrote {wording.count(len(written), 'page')} to {folder}: man {PROGRAM}")
    screen.finish({"directory": folder, "files": written})


def _make_folder(folder: str) -> None:
    """Make a folder and those above it; raises `AccessDenied`, `NotFound` or `StoreFull` where the
    home or target cannot be written.
    """
    with os_errors(folder, "make"):
        os.makedirs(folder, exist_ok=True)


def complete_files(command: click.Command) -> None:
    """Have the arguments and options that name files completed as such; while a shell asks, nothing
    else runs.
    """
    for context in _contexts(command):
        for word in context.command.params:
            named = isinstance(word, click.Argument) and word.name in _FILE_ARGUMENTS
            text = isinstance(word.type, click.types.StringParamType)
            if text and (named or word.metavar in _FILES):
                word.type = click.Path()


def _contexts(
    command: click.Command, parent: click.Context | None = None
) -> Iterator[click.Context]:
    name = command.name if parent is not None else PROGRAM
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from _contexts(one, context)


def _below(variable: str, default: str) -> str:
    return os.environ.get(variable) or os.path.join(os.path.expanduser("~"), default)


def _rc_text() -> str:
    path = os.path.join(_below("ZDOTDIR", ""), ".zshrc")
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()

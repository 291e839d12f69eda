# SPDX-License-Identifier: Apache-2.0
"""What `--json` may print: `check_printed` compares an object with the schema of its command in
docs/schemas.

The fixtures that call the command use it, so that every run with --json in the suite is compared.
"""

import functools
import json
import sys
from pathlib import Path

import click
import jsonschema
from referencing import Registry, Resource

from bundler.cli.app import app
from bundler.cli.command import JSON_OPTION

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "schemas"


def named_commands(group=app, prefix=()):
    """Yield the words of each command that prints an object, such as `("tune", "show")`."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from named_commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


@functools.cache
def schemas():
    """Return the schemas by name, each read once."""
    return {path.stem: json.loads(path.read_bytes()) for path in SCHEMAS.glob("*.json")}


@functools.cache
def validator(name):
    """Return what compares with the schema of this name, made once."""
    registry = Registry().with_resources(
        (f"{other}.json", Resource.from_contents(schema)) for other, schema in schemas().items()
    )
    return jsonschema.Draft202012Validator(schemas()[name], registry=registry)


def command_of(words):
    """Return the name of the schema for a command line, or None where it names no command."""
    group, found = app, []
    for word in map(str, words):
        if word == "--":
            break
        command = group.commands.get(word)
        if command is None:
            continue
        found.append(word)
        if not isinstance(command, click.Group):
            return "-".join(found)
        group = command
    return None


def check_printed(words, printed):
    """Raise `AssertionError` where a command line with --json printed what its schema does not
    allow.
    """
    # A program and its words may follow, with or without `--`.
    ends = [place for place, word in enumerate(words) if str(word) in {"--", sys.executable}]
    before_program = [str(word) for word in words][: min(ends, default=None)]
    if (
        JSON_OPTION not in before_program
        or not printed.strip()
        or {"--help", "-h", "--version"} & {*before_program}
    ):
        return
    value = json.loads(printed)
    name = "error" if "error" in value else command_of(words)
    assert name is not None, f"an object of no command: {words}"
    wrong = jsonschema.exceptions.best_match(validator(name).iter_errors(value))
    assert wrong is None, f"{name}: at {wrong.json_path}: {wrong.message[-400:]}"

# SPDX-License-Identifier: Apache-2.0
"""The public surface as lines of text, docs/public-surface.txt: every public name with its
signature, environment variables, commands with their options, schemas.

    python -m tools.docs_site.public_surface
        write it anew

A test holds the file, so that no change goes unseen, and holds that CHANGELOG.md names what differs
from the last release: what a reader of docs/stability.md may count on.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

import bundler
from bundler import config
from bundler.cli.app import app
from tools.shared.processes import ROOT, said

SURFACE = ROOT / "docs" / "public-surface.txt"


def lines() -> list[str]:
    """Return the surface, a line for each name, in order."""
    found = [line for name in bundler.__all__ for line in _of_name(name)]
    found += [f"variable {config.PREFIX}{one.name}" for one in config.SETTINGS]
    found += [f"schema {path.name}" for path in (ROOT / "docs" / "schemas").glob("*.json")]
    return sorted({*found, *_commands(app, "triton-bundler")})


def _of_name(name: str) -> Iterator[str]:
    thing = getattr(bundler, name)
    if inspect.isclass(thing):
        # Others are how it is made, and differ where a C extension is there.
        bases = [
            base.__name__
            for base in thing.__bases__
            if base.__name__ in bundler.__all__ or base.__module__ == "builtins"
        ]
        yield f"class {name}({', '.join(base for base in bases if base != 'object')})"
        yield from (f"{name}.{member}" for member in _members(thing))
    elif inspect.isfunction(thing):
        yield f"function {name}{_signature(thing)}"
    else:
        yield f"type {name} = {thing}"


def _members(cls: type) -> Iterator[str]:
    """Yield fields, properties and methods of a class, and of those of ours that it is made of."""
    made = dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)
    if dataclasses.is_dataclass(cls):
        yield from (f"{field.name}: {_type(field.type)}" for field in dataclasses.fields(cls))
    elif issubclass(cls, msgspec.Struct):
        yield from (f"{name}: {_type(cls.__annotations__[name])}" for name in cls.__struct_fields__)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("bundler")]
    members = {name: one for base in reversed(ours) for name, one in vars(base).items()}
    for name, one in members.items():
        function = getattr(one, "__func__", one)
        if name.startswith("_") and (name != "__init__" or made or name not in vars(cls)):
            continue
        if inspect.isfunction(function):
            yield f"{name}{_signature(function)}"
        elif isinstance(one, property) or type(one).__name__ == "cached_property":
            getter: Any = one.fget if isinstance(one, property) else one.func
            yield f"{name} -> {_type(inspect.signature(getter).return_annotation)}"


def _signature(function: Any) -> str:
    # Where this process keeps an object is no part of a default.
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))
    return text.replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def _type(given: Any) -> str:
    return str(getattr(given, "__name__", given) if inspect.isclass(given) else given)


def _commands(command: click.Command, name: str) -> Iterator[str]:
    words = sorted(
        word
        for parameter in command.params
        for word in (
            [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Option)
            else [parameter.human_readable_name]
        )
    )
    yield f"command {name}: {' '.join(words)}"
    if isinstance(command, click.Group):
        for one, inner in command.commands.items():
            yield from _commands(inner, f"{name} {one}")


def changed_names(before: list[str], now: list[str]) -> list[str]:
    """Return the names whose lines were added, went or changed."""
    return sorted({_name(line) for line in {*before} ^ {*now}})


def _name(line: str) -> str:
    """Return the name that a line is about, as a changelog would write it."""
    kind, _, rest = line.partition(" ")
    if kind == "command":
        return rest.partition(":")[0].removeprefix("triton-bundler ")
    text = rest if kind in {"class", "function", "type", "variable", "schema"} else line
    return re.split(r"[(: ]", text)[0].rpartition(".__init__")[0] or re.split(r"[(: ]", text)[0]


def unnamed(before: list[str], now: list[str], changelog: str) -> list[str]:
    """Return names that changed and that the newest section of a changelog does not have."""
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    return [
        name
        for name in changed_names(before, now)
        if not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", newest)
    ]


def released(folder: Path = ROOT) -> list[str] | None:
    """Return the surface of the last release that a checkout has as a tag; None without one."""
    tag = said("git", "describe", "--tags", "--abbrev=0", "--match", "v*", cwd=folder)
    text = tag and said("git", "show", f"{tag}:docs/{SURFACE.name}", cwd=folder)
    return text.splitlines() if text else None


def main() -> int:
    """Write the file."""
    SURFACE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

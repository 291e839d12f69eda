# SPDX-License-Identifier: Apache-2.0
"""The public surface is what docs/api.md says it is."""

import builtins
import dataclasses
import inspect
import re
import typing
from pathlib import Path

import msgspec
import pytest

import bundler
from bundler import errors, runtime

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api.md"


def _signature(owner: str, function: object) -> str:
    text = re.sub(
        r"""(: |-> )(?:'([^']*)'|"([^"]*)")""", r"\1\2\3", str(inspect.signature(function))
    )
    return owner + text.replace("(self, ", "(").replace("(self)", "()")


def _members(cls: type) -> list[str]:
    """Return the documented form of each public method and property of a class, and of those of
    ours that it is made of.
    """
    found = []
    ours = [base for base in cls.__mro__ if base.__module__.startswith("bundler")]
    for name, member in {
        name: member for base in reversed(ours) for name, member in vars(base).items()
    }.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property) or type(member).__name__ == "cached_property":
            getter = member.fget if isinstance(member, property) else member.func
            returns = inspect.signature(getter).return_annotation
            found.append(f"{name} -> {returns}")
        elif isinstance(member, staticmethod):
            found.append(_signature(name, member.__func__))
        elif inspect.isfunction(member):
            found.append(_signature(name, member))
    return found


def _described() -> list[str]:
    """Return the public names of which docs/api.md describes every member: not the types that only
    signatures name, nor the runtime's.
    """
    text = API.read_text()
    headed = [name for name in bundler.__all__ if f"`{name}`" in text or f"{name}(" in text]
    return [name for name in headed if name == "autotune" or name not in runtime.__all__]


def _expected() -> list[str]:
    lines = []
    for name in _described():
        thing = getattr(bundler, name)
        if inspect.isfunction(thing):
            lines.append(
                _signature(thing.__name__, thing)
            )  # an alias has the signature of its original
        elif dataclasses.is_dataclass(thing):
            lines += [f"{field.name}: {field.type}" for field in dataclasses.fields(thing)]
        elif inspect.isclass(thing) and issubclass(thing, msgspec.Struct):
            lines += [f"{name}: {thing.__annotations__[name]}" for name in thing.__struct_fields__]
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            lines += _members(thing)
    return lines


@pytest.fixture(scope="module")
def documented() -> str:
    """docs/api.md on one line: signatures may be wrapped."""
    return re.sub(r"\s+", " ", API.read_text())


@pytest.mark.parametrize("line", _expected())
def test_each_signature_is_documented(documented: str, line: str) -> None:
    """docs/api.md repeats every public signature, field and property as the code has it."""
    assert line in documented, f"docs/api.md lacks: {line}"


def test_each_public_name_is_documented() -> None:
    """docs/api.md names everything in __all__, and everything that it names is there: errors,
    classes, and the types in signatures.
    """
    text = API.read_text()
    assert [name for name in bundler.__all__ if not re.search(rf"\b{name}\b", text)] == []
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    code = re.sub(r"#.*|'[^'\n]*'|\"[^\"\n]*\"", "", code)
    named = {*re.findall(r"\b[A-Z]\w*", code), *re.findall(r"`([A-Z][A-Za-z]+)`", text)}
    others = {"K", "Executor", "PathLike", *vars(builtins), *vars(typing)}
    assert named - others - set(bundler.__all__) == set()
    assert {name: getattr(bundler, name) for name in runtime.__all__} == {
        name: getattr(runtime, name) for name in runtime.__all__
    }


def test_each_error_is_documented_with_its_code() -> None:
    """docs/api.md lists each class of the error tree with its code."""
    text = API.read_text()
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.BundlerError)
    ]
    assert [c.__name__ for c in classes if f"| `{c.__name__}` | `{c.code}` |" not in text] == []
    assert [c.__name__ for c in classes if getattr(bundler, c.__name__, None) is not c] == []

# SPDX-License-Identifier: Apache-2.0
"""Two kernel keys, compared part by part, in words.

`keyed` takes kernels by their key parts, `nearest` finds the recorded one that differs least,
`differences` lists what differs, as `Difference`.  `explanations.py` and strict mode call them; the
lookup engine supplies strict mode with what was recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Target
from bundler.format.keyparts import FUNCTIONS_PART, LINES_PART, KeyParts
from bundler.format.metadata import parse_metadata
from bundler.format.summary import listed
from bundler.toolchain import identity
from bundler.toolchain.keytext import ADVICE, COLUMN_PART, PATH_PART
from bundler.toolchain.recording.spool_records import SpooledEvent

# Parts of one key's digests are long; a person compares their beginnings.
_SHOWN = 12
_SHOWN_TEXT = 60
# An item of a list is whole or not there: half of one says nothing.
_SHOWN_ITEM = 160
_LISTS = ("signature", "constants", "alignment")
_OPENING, _CLOSING, _QUOTES = "([{<", ")]}>", "'\""
_DIGEST = 64
# Of the options these are chosen by who launches; the others come from the target where that
# differs.
_CHOSEN_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas"})
_SOURCE_PATH = "source path"
# What a cache directory tells of a kernel: its metadata, in which there are options and environment
# variables, and nothing of its source.
_UNTOLD = "source, signature or constants"
_PREFIXES = {"option": "option", "environment": "env"}
_PARTS = {
    "release": "triton.release",
    "binary": "triton.binary",
    "location": "triton.location",
    "source": "source.text",
    "line numbers": "source.line",
    "dependencies": "source.hash",
    "signature": "source.signature",
    "constants": "source.constants",
    "alignment": "source.attributes",
    "ptxas": "backend.hash",
    "stages": "backend.stages",
}
_SENTENCES = {
    "source": "the source of the kernel changed",
    _SOURCE_PATH: (
        "only line information: its source lies at another path or column here, which this Triton's"
        f" keys hold; {ADVICE}"
    ),
    _UNTOLD: "nothing that its metadata tells; so its source, signature or constants",
}
_LIBRARY = ("triton.binary", "triton.code")
# The first release in which a function's hash does not depend on what a program hashed before.
_STEADY_HASHES = (3, 9)
_HASHED_BEFORE = (
    "the same helper was hashed after another kernel, which in this Triton changes the key of one"
    " that uses a constexpr of its module (triton-bundler build publishes both keys)"
)


_Sides = tuple[str | None, str | None]
_Changed = Mapping[str, _Sides]
_Parts = Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """One thing that differs between two kernel keys.

    Attributes:
        what: `release`, `binary`, `location`, `source`, `line numbers`, `source path`,
            `dependencies`, `signature`, `constants`, `alignment`, `target`, `ptxas`, `stages`,
            `option NAME` or `environment NAME`.
        recorded, asked: the texts there and here; None where there is none.
    """

    what: str
    recorded: str | None
    asked: str | None

    @property
    def part(self) -> str:
        """The part of Triton's key, as `Kernel.parts` names it, such as
        `env.TRITON_DEFAULT_FP_FUSION`.
        """
        kind, _, name = self.what.partition(" ")
        if name and kind in _PREFIXES:
            return f"{_PREFIXES[kind]}.{name}"
        return _PARTS.get(self.what, self.what)

    def __str__(self) -> str:
        there, here = shown_sides(self)
        if self.what == "dependencies":
            changed = "a function that it calls, or a global that it uses, changed"
            return f"{changed}; or {_HASHED_BEFORE}" if _hashes_in_turn() else changed
        if self.what == "line numbers" and " " in (self.asked or ""):
            return (
                "only line numbers: of a function that it calls; it and these begin at lines "
                f"{self.asked} here, {self.recorded} there"
            )
        if self.what == "line numbers":
            return (
                f"only line numbers: it begins at line {self.asked} here, at line {self.recorded}"
                " there"
            )
        return _SENTENCES.get(self.what, f"{self.what}: {here} here, {there} there")


def _hashes_in_turn() -> bool:
    """Whether the Triton here, or one that is not known, hashes a function by what was hashed
    before it.
    """
    ours = identity.installed_triton()
    if ours is None or ours.release is None:
        return True
    found = re.match(r"(\d+)\.(\d+)", ours.release)
    return found is None or (int(found[1]), int(found[2])) < _STEADY_HASHES


def shown_sides(difference: Difference) -> tuple[str, str]:
    """Return the texts there and here, shortened."""
    short = _short_list if difference.what in _LISTS else _short
    return short(difference.recorded), short(difference.asked)


@dataclass(frozen=True)
class KeyedKernel:
    """A kernel, asked for or recorded, by what its key is made of."""

    key: str
    name: str
    target: Target | None
    parts: KeyParts
    # Of metadata alone, or of less: what it does not name may differ or not.
    partial: bool = False

    @classmethod
    def partly(cls, kernel: Kernel, parts: Mapping[str, str]) -> Self:
        """Return a kernel of which nobody recorded the parts of its key, by those that are known."""
        known = KeyParts(tuple(parts.items()), proven=False)
        return cls(kernel.key, kernel.name, kernel.target, known, partial=True)

    @property
    def specialization(self) -> str:
        """Signature and constants, in short."""
        texts = dict(self.parts.parts)
        shown = [texts.get("source.signature", ""), texts.get("source.constants", "")]
        return "; ".join(filter(None, shown)) or "no arguments"


def keyed(kernels: Iterable[Kernel]) -> Iterator[KeyedKernel]:
    """Yield recorded kernels whose key parts are known."""
    for kernel in kernels:
        if kernel.parts is not None:
            name = dict(kernel.parts.parts).get("source.name", kernel.name)
            yield KeyedKernel(kernel.key, name, kernel.target, kernel.parts)


def asked_of(record: SpooledEvent) -> KeyedKernel | None:
    """Return a kernel by its key parts; None when they are not known."""
    if record.parts_bytes is None:
        return None
    try:
        parts = KeyParts.from_bytes(record.parts_bytes)
    except FormatError:
        return None
    return KeyedKernel(
        record.key, dict(parts.parts).get("source.name", record.name), record.target, parts
    )


def of_metadata(kernel: Kernel, metadata: bytes) -> KeyedKernel:
    """Return a kernel of which nobody recorded the parts of its key, by those that its metadata
    tells.

    Raises:
        FormatError: it is not a JSON object.
    """
    told = parse_metadata(metadata)
    parts = {"source.name": kernel.name, "backend.name": kernel.target.backend}
    for name, value in told.items():
        if name == "triton_version":
            parts["triton.release"] = str(value)
        elif name.isupper():
            parts[f"env.{name}"] = str(value)
        elif not isinstance(value, (dict, list)):
            parts[f"option.{name}"] = repr(value)
    return KeyedKernel.partly(kernel, parts)


def keyed_all(bundle: Bundle) -> Iterator[KeyedKernel]:
    """Yield all kernels of a bundle, by their key parts where they were recorded, else by their
    metadata.
    """
    for kernel in bundle.kernels:
        if kernel.parts is not None:
            yield from keyed([kernel])
            continue
        try:
            yield of_metadata(kernel, bundle.read(kernel.metadata))
        except (FormatError, DigestMismatch, NotFound):
            yield KeyedKernel.partly(kernel, {})


def nearest(
    asked: KeyedKernel, kernels: Iterable[KeyedKernel]
) -> tuple[KeyedKernel, tuple[Difference, ...]] | None:
    """Return the recorded kernel of the same name that differs least, and in what; None when there
    is none.

    One for the same target is nearer than any for another.  The kernel itself, if it is among them,
    differs in nothing.
    """
    best: tuple[KeyedKernel, tuple[Difference, ...]] | None = None
    least: tuple[bool, int, str] | None = None
    for kernel in kernels:
        if kernel.key == asked.key:
            return kernel, ()
        if kernel.name != asked.name or not kernel.parts.parts:
            continue
        found = differences(asked, kernel)
        rank = (kernel.target != asked.target, len(found), kernel.key)
        if least is None or rank < least:
            best, least = (kernel, found), rank
    return best


def differences(asked: KeyedKernel, kernel: KeyedKernel) -> tuple[Difference, ...]:
    """Return what differs between a kernel that was asked for and a recorded one."""
    here, there = dict(asked.parts.parts), dict(kernel.parts.parts)
    partial = asked.partial or kernel.partial
    changed = {
        name: (there.get(name), here.get(name))
        for name, _, _ in asked.parts.diff(kernel.parts)
        if not partial or name.startswith("env.") or (name in here and name in there)
    }
    _tell_lines(changed, here, there)
    found = [*_toolchain(changed, here, there), *_source(changed), *_specialization(changed)]
    other_target = None not in {asked.target, kernel.target} and asked.target != kernel.target
    if other_target:
        found.append(Difference("target", str(kernel.target), str(asked.target)))
    elif "backend.hash" in changed or "backend.name" in changed:
        found.append(Difference("ptxas", *changed.get("backend.hash", (None, None))))
    found += _rest(changed, other_target=other_target)
    return tuple(found or ([Difference(_UNTOLD, None, None)] if partial else []))


def _toolchain(changed: _Changed, here: _Parts, there: _Parts) -> Iterator[Difference]:
    library = next((part for part in _LIBRARY if part in changed), None)
    if "triton.release" in changed:
        yield Difference("release", *changed["triton.release"])
    elif library is not None:
        yield Difference("binary", there.get(library), here.get(library))
    if "triton.location" in changed:
        yield Difference("location", *changed["triton.location"])


def _tell_lines(changed: dict[str, _Sides], here: _Parts, there: _Parts) -> None:
    """Tell by what was recorded of functions that a source calls whether more than their lines
    differs.
    """
    if "source.hash" not in changed or not (FUNCTIONS_PART in here and FUNCTIONS_PART in there):
        return
    if FUNCTIONS_PART in changed:
        changed.pop("source.line", None)  # which is not all
    elif LINES_PART in changed:
        changed.setdefault("source.line", changed[LINES_PART])


def _source(changed: _Changed) -> Iterator[Difference]:
    if "source.text" in changed or "source.format" in changed:
        yield Difference("source", *changed.get("source.text", (None, None)))
    elif "source.hash" in changed:  # the places below are in it, where they count
        place = next((part for part in (PATH_PART, COLUMN_PART) if part in changed), None)
        if place is not None:
            yield Difference(_SOURCE_PATH, *changed[place])
        if "source.line" in changed:
            yield Difference("line numbers", *changed["source.line"])
        elif place is None:
            yield Difference("dependencies", *changed["source.hash"])


def _specialization(changed: _Changed) -> Iterator[Difference]:
    for what in _LISTS:
        if _PARTS[what] in changed:
            recorded, asked = changed[_PARTS[what]]
            yield Difference(what, *_only_changed(recorded or "", asked or ""))


def _rest(changed: _Changed, *, other_target: bool) -> Iterator[Difference]:
    for name, (recorded, asked) in changed.items():
        kind, _, rest = name.partition(".")
        if kind == "option" and (not other_target or rest in _CHOSEN_OPTIONS):
            yield Difference(f"option {rest}", recorded, asked)
        elif kind == "env":
            yield Difference(f"environment {rest}", recorded, asked)
        elif name == "backend.stages":
            yield Difference("stages", recorded, asked)


def _only_changed(recorded: str, asked: str) -> tuple[str, str]:
    """Leave out of two lists what they have in common."""
    there, here = split_items(recorded), split_items(asked)
    return (
        ", ".join(item for item in there if item not in here) or "nothing",
        ", ".join(item for item in here if item not in there) or "nothing",
    )


def split_items(text: str) -> list[str]:
    """Split a list at its own commas: not at those inside brackets or quotes."""
    items, start, depth, quote, escaped = [], 0, 0, "", False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\"
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif depth <= 0 and text.startswith(", ", position):
            items.append(text[start:position])
            start = position + 2
    return [*items, text[start:]]


def _short_list(text: str | None) -> str:
    """Return the items that there is room for, each whole, and how many more there are."""
    items = split_items(text or "nothing")
    shown = [_cut(items[0], _SHOWN_ITEM)]
    for item in items[1:]:
        if len(", ".join([*shown, item])) > _SHOWN_ITEM:
            break
        shown.append(item)
    return listed([*shown, *items[len(shown) :]], len(shown))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _short(text: str | None) -> str:
    if text is None:
        return "not set"
    plain = text.removeprefix("sha256:")
    if len(plain) == _DIGEST and all(character in "0123456789abcdef" for character in plain):
        return f"{plain[:_SHOWN]}…"
    return _cut(text, _SHOWN_TEXT)

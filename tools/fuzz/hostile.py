# SPDX-License-Identifier: Apache-2.0
"""Hostile bundles made from scratch: each attack has a name, and changes one thing in a sound
draft.

Beside the container and the manifest they attack memory and time (bombs, prefixes, manifests that
are deep, huge or of the wrong types), and what a restore looks into: metadata and the headers of
device binaries.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import msgpack
import zstandard

from tools.fuzz.container import (
    CONTENT,
    IR,
    LAUNCH,
    OBSERVED,
    OPAQUE,
    STORED,
    ZSTD,
    Draft,
    DraftKernel,
    File,
    Part,
    Parts,
    Table,
    blob_table,
    compressed,
    draft,
    kernel,
    key_of,
    metadata,
    nested,
    noise,
    pack,
    sha256,
)
from tools.fuzz.mutations import flip, mutated

Change = Callable[[Draft], Any]
MIB = 1 << 20
KEY = key_of(sha256(b"one"))
OTHER_KEY = key_of(sha256(b"other"))
GROUP = b'{"child_paths": {"k.cubin": "/etc/hostname", "k.json": "/etc/hostname"}}'

NAMES = {
    "dot-dot": "..",
    "up": "../x.json",
    "far-up": "../../../../../../escape.json",
    "absolute": "/escape.json",
    "two-slashes": "//escape.json",
    "up-inside": "a/../../../escape.json",
    "nul": "k\0.json",
    "long": "x" * 201,
    "very-long": "x" * 4000,
    "full-width": "\uff4b.json",
    "dot-leader": "k\u2024json",
    "full-width-slash": "..\uff0fx",
    "backslash": "..\\..\\x",
    "empty": "",
    "space": " ",
    "newline": "k.json\n",
    "home": "~/x",
    "variable": "$HOME",
    "escaped": "%2e%2e%2fx",
    "right-to-left": "\u202ek.json",
    "surrogate": "\ud800",
    "accent": "\u00e9",
    "link-arrow": "k.json -> /etc/passwd",
    "device-path": "/dev/null",
    "folder": "a/",
    "twice": "a//b",
    "here": "./a",
    "link-like": "k.json@",
    "option": "-rf",
    "windows-device": "CON",
    "windows-null": "nul.json",
    "hidden": ".bashrc",
    "no-stem-json": "json",
    "no-stem-cubin": "cubin",
    "only-dot-json": ".json",
    "only-dot-cubin": ".cubin",
    "at": "@",
    "tilde": "k~",
    "python": "k.py",
    "library": "cuda_utils.cpython-311-x86_64-linux-gnu.so",
    "lock": "k.lock",
    "group": "__grp__k.json",
    "group-other": "__grp__",
    "temporary": "tmp.bundler.1",
    "triton-temporary": "tmp.pid_1_k",
}
KEYS = {
    "lower": KEY.lower(),
    "short": KEY[:51],
    "long": KEY + "A",
    "eight": "8" + KEY[1:],
    "up": "../" + KEY[3:],
    "hex-short": "a" * 63,
    "hex-upper": "A" * 64,
    "newline": KEY + "\n",
    "full-width": "\uff21" * 52,
    "empty": "",
    "temporary": "tmp.bundler.1",
    "dot-dot": "..",
    "absolute": "/" + KEY[1:],
    "of-another": "A" * 52,
    "hex": "0" * 64,
    "nul": KEY[:51] + "\0",
    "very-long": KEY * 90,
    "own-hex": sha256(b"one").hex(),
}
PATHS = {
    "group-second": f"{KEY}/__grp__x.json",
    "group": f"{KEY}/__grp__k.json",
    "group-elsewhere": f"{OTHER_KEY}/__grp__k.json",
    "group-alone": "__grp__k.json",
    "in-kernel": f"{KEY}/more.autotune.json",
    "is-key": OTHER_KEY,
    "is-own-key": KEY,
    "over-file": f"{KEY}/k.json",
    "below-file": f"{KEY}/k.json/x.autotune.json",
    "deep": "a/" * 6 + "x.autotune.json",
    "deepest": "/".join(["a" * 200] * 6),
    "temporary": "tmp.bundler.1/x.autotune.json",
    "temporary-aside": "tmp.bundler.old.1/x.autotune.json",
    "device-folder": "triton",
    "device": "triton/0",
    "in-device": f"triton/0/{KEY}/k.cubin",
    "python": "ab/cab.py",
    "device-group": f"triton/0/{OTHER_KEY}/__grp__k.json",
    "git": ".git/hooks/post-checkout",
    "bash": ".bashrc",
    "library": f"{OTHER_KEY}/cuda_utils.so",
    # below a kernel's directory
    "triton-temporary": f"{OTHER_KEY}/tmp.pid_1_k/x.autotune.json",  # noqa: S108
    "device-temporary": "triton/0/tmp.bundler.old.1/x",
}
SPANS: dict[str, list[Any]] = {
    "no-placeholder": [0, 0, 0],
    "beyond": [1 << 20, 0, 0],
    "huge": [2**64 - 1, 0, 0],
    "negative": [-1, 0, 0],
    "place": [0, 9, 0],
    "style": [0, 0, 99],
    "two-numbers": [0, 0],
    "text": ["a", 0, 0],
    "huge-place": [0, 2**64 - 1, 0],
    "many": [0, 0, 0] * 5000,
}
SIZES = {
    "smaller": -1,
    "larger": 1,
    "limit": 64 * MIB,
    "over-limit": 64 * MIB + 1,
    "huge": 2**40,
    "largest": 2**63,
}

# What an attack meets where another one took away what it wanted to change.
_CLASHES: tuple[type[Exception], ...] = (StopIteration, LookupError, ValueError, TypeError)
_CLASHES += (OverflowError, struct.error, zstandard.ZstdError)
# What stands in place of a metadata file: the text after `"shared": `, the whole bytes, or fields.
_NUMBERS = {
    "infinity": "Infinity",
    "overflow": "1e999",
    "minus-infinity": "-Infinity",
    "nan": "NaN",
    "huge": "9" * 4300,
    "too-huge": "9" * 5000,
    "text": '"12"',
    "null": "null",
    "list": "[]",
    "object": "{}",
    "true": "true",
    "negative": "-1",
    "fraction": "1.5",
    "million-exponent": "1e-1000000",
    "surrogate": '"\\ud800"',
}
_FIELDS: dict[str, dict[str, Any]] = {
    "no-name": {"name": None},
    "name-list": {"name": [[["k"]]]},
    "name-long": {"name": "k" * 100_000},
    "name-surrogate": {"name": "\ud800"},
    "name-escape": {"name": "\x1b[2J"},
    "hash-number": {"hash": 1},
    "hash-short": {"hash": "00"},
    "hash-spaces": {"hash": " ".join(metadata("one")["hash"])},
    "hash-list": {"hash": []},
    "hash-surrogate": {"hash": "\ud800"},
    "target-text": {"target": "cuda:90:32"},
    "target-null": {"target": None},
    "target-empty": {"target": {}},
    "backend-odd": {"target": {"backend": ["x"], "arch": {}, "warp_size": 1}},
    "backend-surrogate": {
        "target": {"backend": "hip", "arch": "\ud800", "warp_size": 64},
        "name": "\udfff" * 9000,
    },
    "warp-infinite": {"target": {"backend": "cuda", "arch": 90, "warp_size": float("inf")}},
    "warp-text": {"target": {"backend": "cuda", "arch": 90, "warp_size": "many"}},
    "warps-null": {"num_warps": None},
    "warps-infinite": {"num_warps": float("inf")},
    "more": {"class": 1, "_x": 2, "": 3},
}


@dataclass(frozen=True)
class Attack:
    """A way to make a bundle wrong; `heavy` ones take seconds."""

    name: str
    change: Callable[[Draft], Any]
    heavy: bool = False

    @property
    def family(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]

    def make(self) -> bytes:
        """Return the bundle."""
        made = draft()
        self.change(made)
        return made.join()


def bound(change: Callable[..., Any], *values: Any) -> Callable[[Any], Any]:
    """Return a change with its further arguments given: a loop's variable would be another one when
    the change is made.
    """
    return lambda made: change(made, *values)


def value_chain(depth: int) -> list[Any]:
    """Return a tagged value inside so many lists."""
    value: list[Any] = ["none", None]
    for _ in range(depth):
        value = ["list", [value]]
    return value


def hostile(chance: random.Random, number: int) -> bytes:
    """Return a bundle: each tenth is one attack, in order until each was made; the others are two,
    or one that was damaged.

    Args:
        chance: what decides.
        number: which.
    """
    turn, rest = divmod(number, 10)
    if rest == 0 and turn < len(every_attack()):
        return every_attack()[turn].make()
    first, second = _pick(chance), _pick(chance)
    # to damage it, it is decoded here, without bounds
    if chance.random() < 0.5 and not first.heavy:
        return _damaged(chance, first.make())
    made = draft()
    try:
        first.change(made)
        second.change(made)
        return made.join()
    except _CLASHES:
        return second.make()


def _pick(chance: random.Random) -> Attack:
    family = families()[chance.choice(sorted(families()))]
    attack = chance.choice(family)
    while attack.heavy and chance.random() < 0.99:
        attack = chance.choice(family)
    return attack


def _damaged(chance: random.Random, data: bytes) -> bytes:
    try:
        return mutated(chance, data)
    except (*_CLASHES, msgpack.UnpackException):
        return flip(chance, data)


@cache
def every_attack() -> tuple[Attack, ...]:
    """Return every attack, in order."""
    return tuple(attacks())


@cache
def families() -> dict[str, list[Attack]]:
    """Return all attacks by family."""
    found: dict[str, list[Attack]] = {}
    for attack in every_attack():
        found.setdefault(attack.family, []).append(attack)
    return found


def attacks() -> Iterator[Attack]:
    """Yield every attack."""
    families = (_names, _spans, _sizes, _bombs, documents, _duplicates, _documents)
    for family in (*families, _binaries, _devices, _trees, _plans, _tables):
        yield from family()
    yield Attack("none", lambda _: None)


# What attacks do to the first kernel of a draft, its files, and the parts of the bundle.  Values
# are copied, since a second attack may change them in the draft.


def _kernel(**members: Any) -> Change:
    """Give members of the kernel other values."""

    def change(made: Draft) -> None:
        for name, value in members.items():
            setattr(made.kernels[0], name, deepcopy(value))

    return change


def _file(suffix: str, **members: Any) -> Change:
    """Give members of one of its files other values."""

    def change(made: Draft) -> None:
        for name, value in members.items() if made.kernels else ():
            setattr(made.kernels[0].file(suffix), name, deepcopy(value))

    return change


def _more(*files: File) -> Change:
    return lambda made: made.kernels[0].files.extend(deepcopy(files))


def _spec(at: int, value: Any) -> Change:
    return lambda made: made.kernels[0].spec.__setitem__(at, deepcopy(value))


def _edit(edit: Callable[[list[Any]], Any]) -> Change:
    """Edit the content document."""
    return lambda made: made.edits.append(edit)


def _container(edit: Callable[[Any], Any]) -> Change:
    return lambda made: made.container.append(edit)


def _seen(*rows: Any) -> Change:
    """Add observations of kernels."""
    return lambda made: made.observed[1].extend(deepcopy(rows))


def _names() -> Iterator[Attack]:
    for label, name in NAMES.items():
        for suffix in ("ttir", "cubin", "json"):
            yield Attack(f"name/{suffix}-{label}", _file(suffix, name=name))
        yield Attack(f"name/more-{label}", _more(File(name, b"more")))
    for label, key in KEYS.items():
        yield Attack(f"key/{label}", _kernel(key=key))
        yield Attack(f"key/observed-{label}", _seen([key, [], [], []]))
    inside = {f"in-{n}": f"a/{name}" for n, name in NAMES.items()}
    for label, path in {**NAMES, **PATHS, **inside}.items():
        for kind in ("tuning", "helpers", "opaque"):
            yield Attack(f"path/{kind}-{label}", _place(kind, path))
    yield Attack("path/forged-kernel", _forged_kernel)


def _place(kind: str, path: str) -> Change:
    return lambda made: getattr(made, kind).append((path, File(path.rpartition("/")[2], GROUP)))


def _forged_kernel(made: Draft) -> None:
    files = [*kernel("other").files[1:], File("__grp__k.json", GROUP)]
    made.tuning = [(f"{OTHER_KEY}/{file.name}", file) for file in files]


def _spans() -> Iterator[Attack]:
    for label, spans in SPANS.items():
        for suffix in ("json", "cubin"):
            yield Attack(f"span/{suffix}-{label}", _file(suffix, spans=[*spans]))

    def overlapping(made: Draft) -> None:
        file = made.kernels[-1].file("json")
        file.spans = [*file.spans, *file.spans]

    def turned(made: Draft) -> None:
        file = made.kernels[-1].file("json")
        file.spans = [*file.spans[3:], *file.spans[:3]]

    text = json.dumps(metadata("one"))[:-1] + ', "x": [[cache_dir]]}'
    outside = _file("json", data=text.encode(), spans=[text.index("[[cache"), 0, 0])
    inside = _file(
        "cubin",
        data=b"\x7fELF\x01[[cache_dir]][[triton_dir]][[cache_dir]]",
        spans=[5, 0, 1, 18, 1, 2, 32, 0, 3],
    )
    yield Attack("span/overlapping", overlapping)
    yield Attack("span/turned", turned)
    yield Attack("span/outside-string", outside)
    yield Attack("span/in-binary", inside)


def _sizes() -> Iterator[Attack]:
    def blob(document: list[Any], size: int) -> None:
        if document[1]:
            document[1][0][1] = document[1][0][1] + size if abs(size) == 1 else size

    def section(parts: Parts, kind: int, size: int) -> None:
        part = parts.find(kind)
        part.raw = part.raw + size if abs(size) == 1 else size

    for label, size in SIZES.items():
        yield Attack(f"size/blob-{label}", _edit(partial(blob, size=size)))
        for kind in (LAUNCH, CONTENT, OBSERVED):
            change = _container(partial(section, kind=kind, size=size))
            yield Attack(f"size/section-{kind}-{label}", change)
    yield Attack("size/empty-binary", _file("cubin", data=b""))
    yield Attack("size/empty-metadata", _file("json", data=b""))


def _duplicates() -> Iterator[Attack]:
    below = [("a", File("a", b"")), ("a/b", File("b", b""))]
    for label, change in {
        "kernel": lambda d: d.kernels.append(d.kernels[0]),
        "file": lambda d: d.kernels[0].files.append(d.kernels[0].files[0]),
        "metadata": _more(File("other.json", b"{}")),
        "binary": _more(File("k.hsaco", b"\x7fELF")),
        "path": lambda d: d.tuning.extend(d.tuning),
        "path-in-two-kinds": lambda d: d.helpers.extend(d.tuning),
        "blob": _edit(lambda doc: doc[1].append(doc[1][0])),
        "blob-unsorted": _edit(lambda doc: doc[1].reverse()),
        "observed": _seen(*[[KEY, [], [], []]] * 2),
        "section": _container(lambda p: p.sections.append(p.sections[0])),
        "content": _container(lambda p: p.sections.append(p.find(CONTENT))),
        "record": lambda d: d.records.extend([["k", [], [], "autotune"]] * 2),
        "folder-and-file": lambda d: d.opaque.extend(below),
    }.items():
        yield Attack(f"twice/{label}", change)


def _trees() -> Iterator[Attack]:
    """Yield indexes of trees of server caches; most are refused for their size, or name what is not
    there.
    """
    chunk = sha256(b"seed") * 32
    name = f"sha256:{sha256(chunk).hex()}"
    inside = "torch_compile_cache/aa/rank_0_0/model"
    for label, files in {
        "repeated": [[inside, len(chunk) * 100_000, [name] * 100_000]],
        "repeated-files": [[f"{inside}{n}", len(chunk) * 1000, [name] * 1000] for n in range(200)],
        "repeated-little": [[inside, len(chunk) * 40, [name] * 40]],
        "smaller": [[inside, 1, [name]]],
        "largest": [[inside, 2**63, [name]]],
        "beyond": [[inside, 2**70, [name]]],
        "lacking": [[inside, 32, ["sha256:" + "0" * 64]]],
        "no-digest": [[inside, 32, ["sha256:x"]]],
        "up": [["../" + inside, len(chunk), [name]]],
        "empty": [[inside, 0, []]],
    }.items():
        yield Attack(f"tree/{label}", bound(_tree, chunk, files, {}))
    yield Attack("tree/kernels-up", bound(_tree, chunk, [], {"../x": [KEY]}))
    yield Attack("tree/kernels-no-key", bound(_tree, chunk, [], {"x": ["../y"]}))
    yield Attack("tree/kernels-many", bound(_tree, chunk, [], {f"x{n}": [KEY] for n in range(30)}))


def _tree(made: Draft, chunk: bytes, files: list[Any], kernels: dict[str, Any]) -> None:
    row: dict[str, Any] = {"family": "vllm", "files": files, "fingerprint": {}, "format": 1}
    row |= {"kernels": kernels, "place": "", "ranks": []}
    index = json.dumps(row, separators=(",", ":"), sort_keys=True).encode()
    for data, ending in ((chunk, ""), (index, ".tree.json")):
        base = sha256(data).hex() + ending
        made.opaque.append((f"@families/vllm/{base}", File(base, data)))


def _plans() -> Iterator[Attack]:
    """Yield plans of programs; what is told of them is told before anything of them runs."""
    huge = {"dtype": "float32", "sizes": [2**62, 2**62], "strides": [2**62, 1], "offset": 0}
    spec = {"dtype": "float32", "sizes": [4, "n"], "strides": ["n", 1], "offset": 0}
    tensor = {"name": "x", "spec": spec, "aligned": False, "changed": False, "number": None}
    number = tensor | {"spec": None, "name": ""}
    terabytes = {"dtype": "int8", "sizes": [2**47], "strides": [1], "offset": 0}
    allocate = ["Allocate", {"name": "y", "spec": terabytes}]
    release = ["Release", {"name": "y"}]
    changed: dict[str, dict[str, Any]] = {
        "sound": {},
        "none": {"inputs": None},
        "infinite": {
            "inputs": [tensor, number | {"number": float("inf")}, number | {"number": float("nan")}]
        },
        "long-number": {"inputs": [tensor, number | {"number": 10**4000}]},
        "many-inputs": {"inputs": [tensor, *[number] * 500]},
        "huge": {"inputs": [tensor | {"spec": huge}], "sizes": {}},
        "negative": {"inputs": [tensor | {"spec": spec | {"sizes": [-1, "n"]}}]},
        "ranks-differ": {"inputs": [tensor | {"spec": spec | {"strides": [1]}}]},
        "size-elsewhere": {"sizes": {"n": [7, 0]}},
        "size-far": {"sizes": {"n": [0, 2**40]}},
        "size-negative": {"sizes": {"n": [-1, -9]}},
        "much-memory": {"steps": [allocate, release] * 2000},
        "twice": {"steps": [allocate, allocate]},
        "command": {"constants": ["\x1b[2J", "x" * 100_000]},
        "deep": {"outputs": json.loads("[" * 500 + "]" * 500)},
        "output-lacking": {"outputs": [{"buffer": "z", "spec": None, "size": None}]},
    }
    for label, changes in changed.items():
        plan: dict[str, Any] = {
            "inputs": [tensor],
            "sizes": {"n": [0, 1]},
            "steps": [],
            "kernels": {},
        }
        plan |= {"constants": [], "version": 1}
        plan |= {"outputs": [{"buffer": "x", "spec": None, "size": None}]} | changes
        yield Attack(f"plan/{label}", bound(_plan, json.dumps(plan).encode()))
    yield Attack("plan/no-json", bound(_plan, b"\xff{"))


def _plan(made: Draft, data: bytes) -> None:
    made.opaque.append(("programs/p.program.json", File("p.program.json", data)))


def _devices() -> Iterator[Attack]:
    for label, devices in {
        "negative": [-1],
        "largest": [2**64 - 1],
        "many": list(range(2000)),
        "twice": [0, 0, 1],
        "text": ["0"],
        "up": ["../.."],
        "true": [True],
    }.items():
        seen = _seen([KEY, devices, ["inductor"], []])
        yield Attack(f"device/{label}", seen, heavy=label == "many")
    layout = _seen([KEY, [0], ["../..", "inductor", ""], [["x", 2**64 - 1]]])
    host = [[["python", "\x1b[2J"]], [], [["a", "b"]] * 2]
    yield Attack("device/layout", layout)
    yield Attack("device/host", lambda made: made.observed[2].extend(host))


def _document(seed: str, **fields: Any) -> bytes:
    return json.dumps(metadata(seed, **fields)).encode()


def _documents() -> Iterator[Attack]:
    """Yield metadata that is no JSON, no object, or odd in a field."""
    plain = _document("one")
    large = b"x" * 2 * MIB + noise("large", 8000).hex().encode()
    whole = {
        "utf-16": plain.decode().encode("utf-16"),
        "utf-32": plain.decode().encode("utf-32"),
        "mark": b"\xef\xbb\xbf" + plain,
        "latin-1": plain[:-1] + b', "x": "\xe9"}',
        "raw-surrogate": plain[:-1] + b', "x": "\xed\xa0\x80"}',
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "number": b"1",
        "text": b'"k"',
        "trailing": plain + b"{}",
        "cut": plain[:-5],
        "zeros": bytes(99),
        "comment": b"//\n" + plain,
        "nul": plain[:-1] + b', "x": "\0"}',
        "twice": plain[:-1] + b', "shared": 1, "shared": 99999999999, "hash": "00", "name": []}',
        "control": plain + b"\x1a",
        "slashes": _document("one", x=" /" * 150_000),
        "triton": _document("one", x="/triton/backends/ " * 5000),
        "quotes": _document("one", x='"\\' * 50_000),
        "large": plain[:-1] + b', "x": "' + large + b'"}',
    }
    for label, data in whole.items():
        yield Attack(f"json/{label}", _metadata(data), heavy=label == "large")
    for label, number in _NUMBERS.items():
        for name in ("shared", "num_warps"):
            sound = f'"{name}": {metadata("one")[name]}'
            text = plain.decode().replace(sound, f'"{name}": {number}')
            yield Attack(f"json/{name}-{label}", _metadata(text.encode()))
    for label, fields in _FIELDS.items():
        yield Attack(f"json/{label}", _metadata(_document("one", **fields)))
    for depth in (100, *range(940, 1000, 3), 2000, 100_000):
        text = plain.decode()[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"
        yield Attack(f"json/deep-{depth}", _metadata(text.encode()))
        objects = plain.decode()[:-1] + ', "x": ' + '{"a":' * depth + "1" + "}" * depth + "}"
        yield Attack(f"json/deep-objects-{depth}", _metadata(objects.encode()))
    for name in metadata("one"):
        rest = {field: value for field, value in metadata("one").items() if field != name}
        yield Attack(f"json/without-{name}", _metadata(json.dumps(rest).encode()))


def _metadata(data: bytes) -> Change:
    return _file("json", data=data)


def elf(
    segments: int, sections: int, strides: tuple[int, int, int, int], tail: bytes = b""
) -> bytes:
    """Return an ELF header that says where its tables are: (bytes and count of segments, of
    sections).
    """
    head = b"\x7fELF\x02\x01\x01".ljust(32, b"\0") + struct.pack("<QQIH", segments, sections, 0, 64)
    return head + struct.pack("<HHHHH", *strides, 0) + tail


def _binaries() -> Iterator[Attack]:
    """Yield device binaries whose headers lie."""
    row, far = struct.Struct("<IIQQQQI20x").pack, (2**64 - 1, 2**64 - 1)
    tables = {
        "far": elf(2**64 - 1, 2**64 - 1, (56, 1, 64, 1)),
        "far-odd": elf(2**64 - 1, 0, (55, 3, 64, 0)),
        "far-odd-sections": elf(0, 2**63, (56, 0, 1, 65535)),
        "no-stride": elf(64, 64, (0, 65535, 0, 65535), bytes(64)),
        "many": elf(64, 64, (1, 65535, 1, 65535), bytes(70_000)),
        "huge-rows": elf(64, 64, (56, 1, 64, 1), b"\xff" * 64),
        "far-odd-rows": elf(0, 2**63, (56, 0, 65, 3), bytes(200)),
        "at-the-limit": elf(0, 2**63 - 1, (56, 0, 65, 3), bytes(200)),
        "far-names": elf(0, 64, (56, 0, 64, 2), row(2**32 - 1, 3, 0, 0, *far, 9) * 2),
        "far-notes": elf(0, 64, (56, 0, 64, 1), row(0, 7, 0, 0, far[0], 12, 0)),
        "far-symbols": elf(0, 64, (56, 0, 64, 1), row(0, 2, 0, far[0], 2**63, 2**63, 0)),
        "head-only": b"\x7fELF",
        "no-elf": b"MZ" + bytes(99),
        "half-head": b"\x7fELF\x02" + bytes(20),
    }
    for label, data in tables.items():
        heavy = label in {"many", "no-stride"}
        yield Attack(f"elf/{label}", _file("cubin", data=data), heavy=heavy)
    # Each path is looked for in the binary.
    count = 8_000
    texts = b"".join(b'\t.file %d "/%07d/%07d"\n' % (n, n, n) for n in range(count))
    binary = b"\x7fELF\x01.debug_line" + b"".join(b"/%07d/%07d" % (n, n) for n in range(count))

    def paths(made: Draft) -> None:
        made.kernels[0].file("cubin").data = binary
        made.kernels[0].files.append(File("k.ptx", texts))

    yield Attack("elf/many-paths", paths, heavy=True)


def _frame(data: bytes, raw: int, kind: int = CONTENT) -> Change:
    """Return a change that gives a section these stored bytes and this raw size."""

    def change(parts: Any) -> None:
        part = parts.find(kind)
        part.codec, part.data, part.raw = ZSTD, data, raw

    return lambda made: made.container.append(change)


def _bombs() -> Iterator[Attack]:
    """Yield attacks that would take memory or time."""
    zeros = compressed(bytes(16 * MIB))
    yield Attack("bomb/manifest-declared", _frame(compressed(b"\x90"), 2**40))
    yield Attack("bomb/manifest-ratio", _frame(zeros, 16 * MIB))
    yield Attack("bomb/manifest-lying-frame", _frame(zeros, MIB))
    yield Attack("bomb/launch-ratio", _frame(zeros, 16 * MIB, LAUNCH))
    for label, compressor in (
        ("no-size", zstandard.ZstdCompressor(write_content_size=False)),
        ("no-checksum", zstandard.ZstdCompressor(write_checksum=False)),
    ):
        yield Attack(f"bomb/{label}", _frame(compressor.compress(bytes(99)), 99))
    yield Attack("bomb/two-frames", _frame(compressed(bytes(50)) * 2, 50))
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    yield Attack("bomb/skippable", _frame(skippable + compressed(bytes(50)), 50))
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_checksum=True)
    streamed = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    yield Attack("bomb/window", _frame(streamed.compress(bytes(64)) + streamed.flush(), 64))
    # Exactly as dense as the limit allows: manifests of nothing but tiny arrays, long strings, deep
    # nests.
    units = {"lists": b"\x90", "pairs": b"\x92\xc0\xc0", "texts": b"\xa2ab", "ones": b"\x91\xc0"}
    for label, unit in units.items():
        for count in (60_000, 900_000, 4_000_000, 15_000_000):
            yield Attack(f"bomb/{label}-{count}", _dense(unit, count), heavy=count > 60_000)
    yield Attack("bomb/reused-blob", _reused_blob, heavy=True)
    yield Attack("bomb/prefix-chain", _prefix_chain)
    yield Attack("bomb/prefix-repeated", lambda made: _prefixed(made, 1, [0] * 60_000))
    yield Attack("bomb/prefix-large", _large_prefixes, heavy=True)
    yield Attack("bomb/prefix-own", lambda made: _prefixed(made, 1, [2]))
    yield Attack("bomb/prefix-later", lambda made: _prefixed(made, 1, [99]))
    sections = _container(lambda p: p.sections.extend(Part.of(99, b"") for _ in range(20_000)))
    yield Attack("bomb/sections", sections, heavy=True)


def _dense(unit: bytes, count: int) -> Change:
    """Return a change that makes a manifest of many tiny members, padded until the ratio of its
    frame is allowed.
    """

    def change(made: Draft) -> None:
        number, most = count // len(unit), 1_000_000
        rows = [min(most, number - start) for start in range(0, max(1, number), most)]
        body = b"".join(b"\xdd" + struct.pack(">I", row) + unit * row for row in rows)
        # Fourteen fields: the schema, no digests, and where the kernels are, these arrays.
        raw = b"\x9e\x02\xc4\x00" + b"\x90" * 7 + bytes([0x90 | len(rows)]) + body + b"\x90" * 3
        pad = noise("pad", min(65535, len(raw) // 250))
        raw += b"\x91\xc5" + struct.pack(">H", len(pad)) + pad
        _frame(compressed(raw, level=1), len(raw))(made)

    return change


def _reused_blob(made: Draft) -> None:
    """One blob of 2 MiB that stands for 20 GiB of files."""
    blob = noise("reused", 10_000) + bytes(2 * MIB)
    files = [File(f"f{n}.ttir", blob) for n in range(62)]
    first = made.kernels[0]
    made.kernels = [
        DraftKernel(key_of(sha256(bytes([n]))), "k", [*first.files[1:], *files]) for n in range(165)
    ]


def _prefixed(made: Draft, count: int, prefix: list[int]) -> None:
    """Add opaque files, each in a section of its own with this prefix."""
    files = [File("g", b"graph" + str(n).encode()) for n in range(count)]
    made.opaque += [(f"{n}/g", file) for n, file in enumerate(files)]

    def change(parts: Any) -> None:
        whole = parts.find(IR)
        document = parts.document(CONTENT)
        ours = {sha256(file.data): file.data for file in files}
        table = blob_table(document)
        numbers = {position: ours[raw] for position, (raw, _) in enumerate(table) if raw in ours}
        rest = zstandard.decompress(whole.data) if whole.codec == ZSTD else whole.data
        kept = [blob for blob in whole.blobs if blob not in numbers]
        size = sum(table[blob][1] for blob in kept)
        parts.sections[parts.sections.index(whole)] = Part.of(IR, rest[:size], kept)
        for number, data in numbers.items():
            parts.sections.append(Part(OPAQUE, STORED, data, len(data), [number], list(prefix)))

    made.container.append(change)


def _prefix_chain(made: Draft) -> None:
    def change(parts: Any) -> None:
        for number, part in enumerate(parts.sections):
            part.prefix = [number - 1] if number else []

    made.container.append(change)


def _large_prefixes(made: Draft) -> None:
    """Hundreds of small frames that each need 30 of others decoded again, more than a
    reader keeps.
    """
    made.kernels[0].files += [
        File(f"big{n}.ttir", f"{n}".encode() + bytes(MIB - 9)) for n in range(30)
    ]

    def split(parts: Any) -> None:
        whole = parts.find(IR)
        raw, position = zstandard.decompress(whole.data), 0
        table, sections = blob_table(parts.document(CONTENT)), []
        for blob in whole.blobs:
            size = table[blob][1]
            sections.append(Part.of(IR, raw[position : position + size], [blob]))
            position += size
        at = parts.sections.index(whole)
        parts.sections[at : at + 1] = sections

    _prefixed(made, 100, [*range(4, 34)])
    made.container.append(split)


def documents() -> Iterator[Attack]:
    """Yield manifests that are deep, huge, or of wrong types and values."""
    for depth in (10, 17, 60, 600, 100_000):
        deep = nested(depth)
        yield Attack(f"deep/content-{depth}", _raw(deep))
        yield Attack(f"deep/observed-{depth}", _raw(deep, OBSERVED))
        yield Attack(f"deep/facts-{depth}", _kernel(facts=deep))
        yield Attack(f"deep/parts-{depth}", _kernel(parts=deep))
    for depth in (2, 6, 9, 40):
        yield Attack(f"deep/value-{depth}", _spec(12, value_chain(depth)))
        record = ["k", [], [["x", value_chain(depth)]], "autotune"]
        yield Attack(f"deep/record-{depth}", bound(lambda d, r: d.records.append(r), record))
    heads = {"array": b"\xdd", "text": b"\xdb", "bin": b"\xc6", "map": b"\xdf", "ext": b"\xc9"}
    for label, head in heads.items():
        yield Attack(f"huge/{label}", _raw(b"\x9e\x02" + head + b"\xff\xff\xff\xff"))
    yield Attack("huge/map", _raw(b"\x82\x01\x02\x01\x03"))
    yield Attack("huge/float-schema", _edit(lambda doc: doc.__setitem__(0, 1.0)))
    yield Attack("huge/text", _kernel(name="n" * 5000))
    yield Attack("huge/escape", _kernel(name="\x1b]0;x\x07" * 500))
    yield Attack("huge/files", _more(*(File(f"f{n}.ttir", b"x") for n in range(65))))
    digits = {
        "unicode-digits": "\u0663",
        "many": "9" * 400,
        "minus": "--1",
        "empty": "",
        "hex": "0x1",
    }
    for label, text in digits.items():
        yield Attack(f"value/int-{label}", _spec(12, ["int", text]))
    twice = ["dict", [["a", ["none", None]], ["a", ["bool", True]]]]
    yield Attack("value/dict-twice", _spec(12, twice))
    argument, constant = ["x", "", None, True, False, False], [[2**63], ["int", 1]]
    yield Attack(
        "value/facts-path", _kernel(facts=pack(["ast", [argument], [], [constant], [], []]))
    )
    for position, odd in enumerate([-1, 2**64 - 1, None, "4", 1.5, True]):
        for at in range(12):
            yield Attack(f"value/spec-{at}-{position}", _spec(at, odd))
    yield Attack("value/arch-digits", _kernel(target=["cuda", "\u0669" * 1300, 0]))
    known = ["3.7.1", None, "12.9"]
    yield Attack("value/arch-long", _kernel(target=["cuda", "9" * 4096, 32], toolchain=known))


def _raw(data: bytes, kind: int = CONTENT) -> Change:
    return _container(lambda parts: parts.put(data, kind))


# What takes least bytes for its memory, and the fields that may be long.
_UNITS = {"nils": b"\xc0", "texts": b"\xa2ab", "ones": b"\x91\xc0"}
_LONG = (Table.NAMES, Table.LISTS, Table.PIECES, Table.KERNELS, 12, 13)
# Where a kernel refers to what, and which of that counts pieces.
_REFERENCES, _FACTS, _PARTS = 6, 2, 3


def _table(edit: Callable[[list[Any]], Any]) -> Change:
    """Edit the tables of the content."""
    return lambda made: made.table_edits.append(edit)


def _in_table(table: int, edit: Callable[[list[Any]], Any]) -> Change:
    return _table(lambda document: edit(document[table]))


def _in_kernel(*place: int, value: Any) -> Change:
    """Put a value into the row of the first kernel."""

    def edit(document: list[Any]) -> None:
        row = document[Table.KERNELS][0]
        for at in place[:-1]:
            row = row[at]
        row[place[-1]] = value

    return _table(edit)


def _tables() -> Iterator[Attack]:
    """Yield attacks on the tables of a content."""
    for name, change in chain(_numbers(), _runs(), _wrong_tables()):
        yield Attack(f"table/{name}", change)
    for field in range(1, 14):
        yield Attack(f"huge/table-{field}", _field(field, b"\xdd\xff\xff\xff\xff"))
        for label, unit in _UNITS.items():
            for size in (900_000, *([60_000_000] if field in _LONG else [])):
                dense = bound(_dense_field, field, unit, size // len(unit))
                yield Attack(f"dense/{field}-{label}-{size}", dense, heavy=True)


def _numbers() -> Iterator[tuple[str, Change]]:
    numbers = {"next": 9, "largest": 2**64 - 1, "negative": -1, "text": "0"}
    for position in range(1, _REFERENCES):
        for label, number in numbers.items():
            yield f"number-{position}-{label}", _in_kernel(position, value=number)
    for label, blobs in {
        "none": [],
        "more": [0] * 9,
        "beyond": [0, 1, 99],
        "many": [0] * 70_000,
        "negative": [-1, 0, 1],
    }.items():
        yield f"blobs-{label}", _in_kernel(_REFERENCES, 0, value=blobs)
    for label, spans in {
        "three": [0, 0, 0],
        "beyond": [9, 0, 0, 0],
        "negative": [-1, 0, 0, 0],
        "turned": [2, 0, 0, 0, 1, 0, 0, 0],
        "many": [2, 0, 0, 0] * 5000,
        "largest": [2**64 - 1] * 4,
        "too-many": [2, 0, 0, 0] * 70_000,
    }.items():
        yield f"spans-{label}", _in_kernel(_REFERENCES, 1, value=spans)


def _runs() -> Iterator[tuple[str, Change]]:
    large, small = b"x" * (1 << 20), b"y" * 1000
    tables: dict[str, tuple[list[bytes], list[Any]]] = {
        "odd": ([b"a"], [0]),
        "none": ([b"a"], [0, 0]),
        "beyond": ([b"a"], [0, 2]),
        "far": ([b"a"], [2**63, 1]),
        "wrap": ([b"a"], [2**64 - 1, 2]),
        "later": ([b"a", b"b"], [1, 1]),
        "unused": ([b"a", b"b"], [0, 1]),
        "twice": ([b"a", b"a"], [0, 2]),
        "negative": ([b"a"], [-1, 1]),
        "text": ([b"a"], ["0", 1]),
        "empty": ([b""], [0, 1]),
        "large": ([large, b"a"], [0, 2]),
        "repeated": ([small], [0, 1] * 1100),
        "most": ([large], [0, 1]),
    }
    for label, (pieces, runs) in tables.items():
        yield f"runs-{label}", _table(bound(_put_runs, pieces, runs))


def _put_runs(document: list[Any], pieces: list[bytes], runs: list[Any]) -> None:
    document[Table.PIECES] = pieces
    for row in document[Table.KERNELS]:
        row[_REFERENCES][_FACTS] = runs
        row[_REFERENCES][_PARTS] = None


def _wrong_tables() -> Iterator[tuple[str, Change]]:
    for table in (Table.NAMES, Table.TARGETS, Table.TOOLCHAINS, Table.SPECS, Table.LISTS):
        yield f"repeated-{table}", _in_table(table, lambda rows: rows.append(rows[0]))
        yield f"turned-{table}", _in_table(table, list.reverse)
        yield f"empty-{table}", _in_table(table, list.clear)
    yield "unused-name", _in_table(Table.NAMES, lambda names: names.append("nobody"))
    yield "unused-blob", _table(_add_blob)
    yield "digest-short", _digests(lambda digests: digests[:-1])
    yield "digests-turned", _digests(lambda d: d[32:64] + d[:32] + d[64:])
    yield "sizes-more", _in_table(Table.SIZES, lambda sizes: sizes.append(0))
    items = {"star": "*", "stars": "**", "inside": "k*.json", "absolute": "/*", "up": "../*"}
    for label, item in (items | {"empty": "", "dots": "*.."}).items():
        yield (
            f"list-{label}",
            _in_table(Table.LISTS, bound(lambda lists, x: _first(lists[0], x), item)),
        )
    more = [f"*.{n}" for n in range(70)]
    yield "list-long", _in_table(Table.LISTS, lambda lists: lists[0].extend(more))
    yield "list-large", _in_table(Table.LISTS, lambda lists: lists.append(["x" * 200] * 30_000))
    names = {"up": "../k", "empty": "", "long": "k" * 4000, "group": "__grp__k", "star": "*"}
    for label, name in names.items():
        yield f"name-{label}", _in_table(Table.NAMES, bound(_first, name))


def _first(rows: list[Any], value: Any) -> None:
    rows[0] = value


def _digests(changed: Callable[[bytes], bytes]) -> Change:
    return _table(lambda document: document.__setitem__(1, changed(document[1])))


def _add_blob(document: list[Any]) -> None:
    document[1] += b"\xff" * 32
    document[Table.SIZES].append(1)


def _field(field: int, packed: bytes) -> Change:
    """Put these bytes in the place of a field of the content, as they are."""
    return _container(lambda parts: parts.put_field(field, packed))


def _dense_field(made: Draft, field: int, unit: bytes, count: int) -> None:
    # The bytes are made here: all attacks are listed at once.
    _field(field, b"\xdd" + struct.pack(">I", count) + unit * count)(made)

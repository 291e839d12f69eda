# SPDX-License-Identifier: Apache-2.0
"""Hostile bundles made from scratch: each attack has a name, and changes one thing in a sound draft."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgpack
import zstandard

from tools.fuzz import bombs, metadata_attacks, table_content
from tools.fuzz.container import (
    CONTENT,
    LAUNCH,
    OBSERVED,
    Attack,
    Draft,
    File,
    bound,
    draft,
    kernel,
    key_of,
    metadata,
    sha256,
)
from tools.fuzz.mutations import flip, mutated

MIB = 1 << 20
SCHEMAS = (1, 2)
KEY = key_of(sha256(b"one"))
OTHER_KEY = key_of(sha256(b"other"))
GROUP = b'{"child_paths": {"k.cubin": "/etc/hostname", "k.json": "/etc/hostname"}}'

NAMES = {
    "dot-dot": "..", "up": "../x.json", "far-up": "../../../../../../escape.json", "absolute": "/escape.json",
    "two-slashes": "//escape.json", "up-inside": "a/../../../escape.json", "nul": "k\0.json", "long": "x" * 201,
    "very-long": "x" * 4000, "full-width": "\uff4b.json", "dot-leader": "k\u2024json", "full-width-slash": "..\uff0fx",
    "backslash": "..\\..\\x", "empty": "", "space": " ", "newline": "k.json\n", "home": "~/x", "variable": "$HOME",
    "escaped": "%2e%2e%2fx", "right-to-left": "\u202ek.json", "surrogate": "\ud800", "accent": "\u00e9",
    "link-arrow": "k.json -> /etc/passwd", "device-path": "/dev/null", "folder": "a/", "twice": "a//b", "here": "./a",
    "link-like": "k.json@", "option": "-rf", "windows-device": "CON", "windows-null": "nul.json", "hidden": ".bashrc",
    "no-stem-json": "json", "no-stem-cubin": "cubin", "only-dot-json": ".json", "only-dot-cubin": ".cubin",
    "at": "@", "tilde": "k~", "python": "k.py", "library": "cuda_utils.cpython-311-x86_64-linux-gnu.so", "lock": "k.lock",
    "group": "__grp__k.json", "group-other": "__grp__", "temporary": "tmp.bundler.1", "triton-temporary": "tmp.pid_1_k",
}  # fmt: skip
KEYS = {
    "lower": KEY.lower(), "short": KEY[:51], "long": KEY + "A", "eight": "8" + KEY[1:], "up": "../" + KEY[3:],
    "hex-short": "a" * 63, "hex-upper": "A" * 64, "newline": KEY + "\n", "full-width": "\uff21" * 52, "empty": "",
    "temporary": "tmp.bundler.1", "dot-dot": "..", "absolute": "/" + KEY[1:], "of-another": "A" * 52, "hex": "0" * 64,
    "nul": KEY[:51] + "\0", "very-long": KEY * 90, "own-hex": sha256(b"one").hex(),
}  # fmt: skip
PATHS = {
    "group-second": f"{KEY}/__grp__x.json", "group": f"{KEY}/__grp__k.json", "group-elsewhere": f"{OTHER_KEY}/__grp__k.json", "group-alone": "__grp__k.json",
    "in-kernel": f"{KEY}/more.autotune.json", "is-key": OTHER_KEY, "is-own-key": KEY, "over-file": f"{KEY}/k.json",
    "below-file": f"{KEY}/k.json/x.autotune.json", "deep": "a/" * 6 + "x.autotune.json", "deepest": "/".join(["a" * 200] * 6),
    "temporary": "tmp.bundler.1/x.autotune.json", "temporary-aside": "tmp.bundler.old.1/x.autotune.json",
    "device-folder": "triton", "device": "triton/0", "in-device": f"triton/0/{KEY}/k.cubin", "python": "ab/cab.py",
    "device-group": f"triton/0/{OTHER_KEY}/__grp__k.json", "git": ".git/hooks/post-checkout", "bash": ".bashrc",
    "library": f"{OTHER_KEY}/cuda_utils.so",
    "triton-temporary": f"{OTHER_KEY}/tmp.pid_1_k/x.autotune.json",  # noqa: S108  # below a kernel's directory
    "device-temporary": "triton/0/tmp.bundler.old.1/x",
}  # fmt: skip
SPANS: dict[str, list[Any]] = {
    "no-placeholder": [0, 0, 0], "beyond": [1 << 20, 0, 0], "huge": [2**64 - 1, 0, 0], "negative": [-1, 0, 0],
    "place": [0, 9, 0], "style": [0, 0, 99], "two-numbers": [0, 0], "text": ["a", 0, 0], "huge-place": [0, 2**64 - 1, 0],
    "many": [0, 0, 0] * 5000,
}  # fmt: skip
SIZES = {
    "smaller": -1,
    "larger": 1,
    "limit": 64 * MIB,
    "over-limit": 64 * MIB + 1,
    "huge": 2**40,
    "largest": 2**63,
}

# What an attack meets where another one took away what it wanted to change.
_CLASHES = (
    StopIteration,
    LookupError,
    ValueError,
    TypeError,
    OverflowError,
    struct.error,
    zstandard.ZstdError,
)


def hostile(chance: random.Random, number: int, schemas: Sequence[int] = SCHEMAS) -> bytes:
    """Return a bundle: each tenth is one attack, in order until each was made; the others are two, or one that was damaged.

    Args:
        chance: what decides.
        number: which.
        schemas: what schemas of content there are; attacks take turns in them.
    """
    turn, rest = divmod(number, 10)
    if rest == 0 and turn < len(every_attack()):
        return every_attack()[turn].make(schemas[turn % len(schemas)])
    first, second = _pick(chance), _pick(chance)
    schema = chance.choice(schemas)
    if (
        chance.random() < 0.5 and not first.heavy
    ):  # to damage it, it is decoded here, without bounds
        return _damaged(chance, first.make(schema))
    made = draft()
    made.schema = schema
    try:
        first.change(made)
        second.change(made)
        return made.join()
    except _CLASHES:
        return second.make(schema)


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
    yield from _names()
    yield from _spans()
    yield from _sizes()
    yield from bombs.bombs()
    yield from bombs.documents()
    yield from _duplicates()
    yield from metadata_attacks.documents()
    yield from metadata_attacks.binaries()
    yield from _devices()
    yield from _trees()
    yield from _plans()
    for name, change, heavy in table_content.attacks():
        yield Attack(name, change, heavy, table_content.SCHEMA)
    yield Attack("none", lambda _: None)


def _names() -> Iterator[Attack]:
    for label, name in NAMES.items():
        for suffix in ("ttir", "cubin", "json"):
            yield Attack(f"name/{suffix}-{label}", _rename(suffix, name))
        yield Attack(
            f"name/more-{label}",
            bound(lambda d, n: d.kernels[0].files.append(File(n, b"more")), name),
        )
    for label, key in KEYS.items():
        yield Attack(f"key/{label}", bound(lambda d, k: setattr(d.kernels[0], "key", k), key))
        yield Attack(
            f"key/observed-{label}", bound(lambda d, k: d.observed[1].append([k, [], [], []]), key)
        )
    for label, path in {
        **NAMES,
        **PATHS,
        **{f"in-{n}": f"a/{name}" for n, name in NAMES.items()},
    }.items():
        for kind in ("tuning", "helpers", "opaque"):
            yield Attack(f"path/{kind}-{label}", _place(kind, path))
    yield Attack("path/forged-kernel", _forged_kernel)


def _rename(suffix: str, name: str) -> Callable[[Draft], Any]:
    return lambda made: (
        setattr(made.kernels[0].file(suffix), "name", name) if made.kernels else None
    )


def _place(kind: str, path: str) -> Callable[[Draft], Any]:
    return lambda made: getattr(made, kind).append((path, File(path.rpartition("/")[2], GROUP)))


def _forged_kernel(made: Draft) -> None:
    files = [*kernel("other").files[1:], File("__grp__k.json", GROUP)]
    made.tuning = [(f"{OTHER_KEY}/{file.name}", file) for file in files]


def _spans() -> Iterator[Attack]:
    for label, spans in SPANS.items():
        for suffix in ("json", "cubin"):
            yield Attack(f"span/{suffix}-{label}", _span(suffix, spans))

    def overlapping(made: Draft) -> None:
        file = made.kernels[-1].file("json")
        file.spans = [*file.spans, *file.spans]

    def turned(made: Draft) -> None:
        file = made.kernels[-1].file("json")
        file.spans = [*file.spans[3:], *file.spans[:3]]

    def outside(made: Draft) -> None:
        text = json.dumps(metadata("one"))[:-1] + ', "x": [[cache_dir]]}'
        made.kernels[0].file("json").data = text.encode()
        made.kernels[0].file("json").spans = [text.index("[[cache"), 0, 0]

    def inside(made: Draft) -> None:
        made.kernels[0].file("cubin").data = b"\x7fELF\x01[[cache_dir]][[triton_dir]][[cache_dir]]"
        made.kernels[0].file("cubin").spans = [5, 0, 1, 18, 1, 2, 32, 0, 3]

    yield Attack("span/overlapping", overlapping)
    yield Attack("span/turned", turned)
    yield Attack("span/outside-string", outside)
    yield Attack("span/in-binary", inside)


def _span(suffix: str, spans: list[Any]) -> Callable[[Draft], Any]:
    return lambda made: (
        setattr(made.kernels[0].file(suffix), "spans", list(spans)) if made.kernels else None
    )


def _sizes() -> Iterator[Attack]:
    def blob(document: list[Any], size: int) -> None:
        if document[1]:
            document[1][0][1] = document[1][0][1] + size if abs(size) == 1 else size

    for label, size in SIZES.items():
        yield Attack(
            f"size/blob-{label}", bound(lambda d, s: d.edits.append(lambda doc: blob(doc, s)), size)
        )
        for kind in (LAUNCH, CONTENT, OBSERVED):
            yield Attack(f"size/section-{kind}-{label}", bound(lambda d, s, k: d.container.append(
                lambda parts: setattr(parts.find(k), "raw", parts.find(k).raw + s if abs(s) == 1 else s)), size, kind))  # fmt: skip
    yield Attack("size/empty-binary", lambda d: setattr(d.kernels[0].file("cubin"), "data", b""))
    yield Attack("size/empty-metadata", lambda d: setattr(d.kernels[0].file("json"), "data", b""))


def _duplicates() -> Iterator[Attack]:
    yield Attack("twice/kernel", lambda d: d.kernels.append(d.kernels[0]))
    yield Attack("twice/file", lambda d: d.kernels[0].files.append(d.kernels[0].files[0]))
    yield Attack("twice/metadata", lambda d: d.kernels[0].files.append(File("other.json", b"{}")))
    yield Attack("twice/binary", lambda d: d.kernels[0].files.append(File("k.hsaco", b"\x7fELF")))
    yield Attack("twice/path", lambda d: d.tuning.extend(d.tuning))
    yield Attack("twice/path-in-two-kinds", lambda d: d.helpers.extend(d.tuning))
    yield Attack("twice/blob", lambda d: d.edits.append(lambda doc: doc[1].append(doc[1][0])))
    yield Attack("twice/blob-unsorted", lambda d: d.edits.append(lambda doc: doc[1].reverse()))
    yield Attack("twice/observed", lambda d: d.observed[1].extend([[KEY, [], [], []]] * 2))
    yield Attack(
        "twice/section", lambda d: d.container.append(lambda p: p.sections.append(p.sections[0]))
    )
    yield Attack(
        "twice/content", lambda d: d.container.append(lambda p: p.sections.append(p.find(CONTENT)))
    )
    yield Attack("twice/record", lambda d: d.records.extend([["k", [], [], "autotune"]] * 2))
    yield Attack(
        "twice/folder-and-file",
        lambda d: d.opaque.extend([("a", File("a", b"")), ("a/b", File("b", b""))]),
    )


def _trees() -> Iterator[Attack]:
    """Yield indexes of trees of server caches; most are refused for their size, or name what is not there."""
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
    row = {
        "family": "vllm", "files": files, "fingerprint": {}, "format": 1, "kernels": kernels, "place": "", "ranks": [],
    }  # fmt: skip
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
    allocate = [
        "Allocate",
        {"name": "y", "spec": {"dtype": "int8", "sizes": [2**47], "strides": [1], "offset": 0}},
    ]
    release = ["Release", {"name": "y"}]
    changed: dict[str, dict[str, Any]] = {
        "sound": {},
        "none": {"inputs": None},
        "infinite": {"inputs": [tensor, number | {"number": float("inf")}, number | {"number": float("nan")}]},
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
    }  # fmt: skip
    for label, changes in changed.items():
        plan = {"inputs": [tensor], "sizes": {"n": [0, 1]}, "steps": [], "kernels": {}, "constants": [], "version": 1,
                "outputs": [{"buffer": "x", "spec": None, "size": None}]} | changes  # fmt: skip
        yield Attack(f"plan/{label}", bound(_plan, json.dumps(plan).encode()))
    yield Attack("plan/no-json", bound(_plan, b"\xff{"))


def _plan(made: Draft, data: bytes) -> None:
    made.opaque.append(("programs/p.program.json", File("p.program.json", data)))


def _devices() -> Iterator[Attack]:
    for label, devices in {
        "negative": [-1], "largest": [2**64 - 1], "many": list(range(2000)), "twice": [0, 0, 1], "text": ["0"],
        "up": ["../.."], "true": [True],
    }.items():  # fmt: skip
        seen = [KEY, devices, ["inductor"], []]
        yield Attack(
            f"device/{label}",
            bound(lambda d, s: d.observed[1].append(s), seen),
            heavy=label == "many",
        )
    yield Attack(
        "device/layout",
        lambda d: d.observed[1].append([KEY, [0], ["../..", "inductor", ""], [["x", 2**64 - 1]]]),
    )
    yield Attack(
        "device/host",
        lambda d: d.observed[2].extend([[["python", "\x1b[2J"]], [], [["a", "b"]] * 2]),
    )

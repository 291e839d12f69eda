# SPDX-License-Identifier: Apache-2.0
"""A program that damages a golden bundle in N ways, reads everything, and fails at anything but a typed error.

    python mutations.py SEED N

It prints how many mutations were accepted, and the classes of the errors.
"""

import copy
import hashlib
import random
import resource
import sys
from pathlib import Path

import builders
import msgpack

from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.sentinel import from_sentinels

GOLDEN = Path(__file__).parents[1] / "data" / "v1.0" / "synthetic.tbundle"
MEMORY_BYTES, PROCESSOR_S = 1 << 30, 100
ODD = [
    None, True, False, 0, 1, -1, 255, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 1.5, "", "..", "a/b", "\0", "x" * 5000, b"",
    b"\0" * 32, [], [[]], {}, {"a": 1}, "A" * 52, "k.cubin", ["none", None], ["list", []], [0, 0, 0],
]  # fmt: skip
DEEP = msgpack.unpackb(b"\x91" * 60 + b"\xc0")


def spots(node):
    """Return (array, position) of every field in nested arrays."""
    found = [(node, position) for position in range(len(node))]
    for item in node:
        if isinstance(item, list):
            found += spots(item)
    return found


def change(chance, node):
    """Change one field of nested arrays: replace, remove, repeat, swap or move it."""
    where = spots(node)
    array, position = chance.choice(where)
    match chance.randrange(8):
        case 0:
            del array[position]
        case 1:
            array.insert(position, copy.deepcopy(array[position]))
        case 2:
            other, place = chance.choice(where)
            # Copies, since an array could otherwise come to lie inside itself.
            array[position], other[place] = copy.deepcopy((other[place], array[position]))
        case 3 if isinstance(array[position], int):
            array[position] += chance.choice([-1, 1, 1 << 20])
        case 4 if isinstance(array[position], bytes):
            array[position] = flip(chance, array[position])
        case 5:
            array[position] = copy.deepcopy(DEEP)
        case _:
            array[position] = copy.deepcopy(chance.choice(ODD))


def flip(chance, data):
    """Return bytes with some of them changed, removed, repeated or put in."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        position = chance.randrange(len(data) + 1)
        length = chance.choice([1, 1, 4, 32])
        match chance.randrange(4):
            case 0 if position < len(data):
                data[position] = chance.randrange(256)
            case 1:
                del data[position : position + length]
            case 2:
                data[position:position] = chance.randbytes(length)
            case _:
                data[position:position] = data[position : position + length]
    return bytes(data)


def mutate_section(chance, parts):
    """Change a section, or the order of the sections, and keep the checksums right."""
    part = chance.choice(parts.sections)
    match chance.randrange(9):
        case 0:
            part.data = flip(chance, part.data)
        case 1:
            part.raw = chance.choice([0, part.raw + 1, 1 << 26, 1 << 40, 2**64 - 1])
        case 2:
            part.kind = chance.choice([*range(1, 20), 2**40])
        case 3:
            part.codec = chance.choice([0, 1, 2, 255])
        case 4:
            part.prefix = [chance.randrange(-1, 8) for _ in range(chance.randrange(4))]
        case 5:
            part.blobs = [chance.randrange(-1, 20) for _ in range(chance.randrange(9))]
        case 6:
            chance.shuffle(parts.sections)
        case 7:
            parts.sections.append(part)
        case _:
            part.offset = chance.choice([0, 71, 73, 2**63])


def mutated(chance, data):
    """Return damaged bytes: a third raw, a third with a changed manifest, a third with a changed container."""
    parts = builders.Parts.of(data)
    kind = chance.randrange(6)
    if kind == 0:
        return flip(chance, data)
    if kind == 1:
        return data[: chance.randrange(len(data))] + chance.randbytes(chance.choice([0, 0, 16]))
    if kind == 2:
        mutate_section(chance, parts)
        return parts.join()
    if kind == 3:
        table = flip(chance, data[int.from_bytes(data[24:32], "little") :])
        return parts.join(table=table)
    section = builders.CONTENT if kind == 4 else chance.choice([builders.CONTENT, builders.OBSERVED])
    document = parts.document(section)
    for _ in range(chance.choice([1, 1, 2])):
        change(chance, document)
    packed = msgpack.packb(document)
    parts.put(flip(chance, packed) if kind == 5 and chance.random() < 0.5 else packed, section)
    parts.minor = chance.choice([0, 0, 0, 1])
    return parts.join()


def read_everything(data):
    """Read, decode and restore everything in a bundle; what comes out has the digest that names it."""
    with Bundle.from_bytes(data) as bundle:
        for entry in bundle.content.entries:
            for artifact in getattr(entry, "artifacts", None) or [entry.artifact]:
                got = bundle.read(artifact)
                assert f"sha256:{hashlib.sha256(got).hexdigest()}" == artifact.digest
                assert len(got) == artifact.size
                from_sentinels(got, artifact.spans, {0: "/cache", 1: "/triton"})
        for kernel in bundle.kernels:
            assert kernel.launch.entry is not None
            kernel.launch.tensor_descriptors.plain()
            for _, value in kernel.launch.facts.constants if kernel.launch.facts else ():
                assert value.portable in {True, False}
            assert kernel.parts is None or isinstance(kernel.parts.proven, bool)
        bundle.verify()


def main():
    """Damage, read, count."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    seed, count = map(int, sys.argv[1:])
    golden = GOLDEN.read_bytes()
    read_everything(golden)
    accepted, errors = 0, set()
    for number in range(count):
        data = mutated(random.Random(f"{seed}/{number}"), golden)
        try:
            read_everything(data)
            accepted += 1
        except BundlerError as error:
            errors.add(type(error).__name__)
        except BaseException:
            print(f"seed {seed}, mutation {number}:", file=sys.stderr)
            raise
    print(accepted, *sorted(errors))


if __name__ == "__main__":
    main()

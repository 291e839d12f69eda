# SPDX-License-Identifier: Apache-2.0
"""Bundles for tests: made with defaults, so that a test states only its own field, and taken apart
to be put together wrongly.
"""

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace

import msgpack
import zstandard

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
)
from bundler.format.launch_spec import LaunchFacts, LaunchSpec
from bundler.format.manifest import Content, Observed

CUDA, HIP = Target("cuda", "90", 32), Target("hip", "gfx942", 64)
CONTENT, OBSERVED, SIGNATURES = 16, 17, 18
WITHOUT_FACTS = {"facts_bytes": None, "parts_bytes": None}


def noise(seed, size):
    """Return bytes that do not compress, the same each time."""
    return b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(size // 32 + 1))[
        :size
    ]


def key(seed):
    """Return a kernel key: a letter 52 times, or one of any number."""
    return seed * 52 if isinstance(seed, str) else f"{seed:064x}"


class Files:
    """The blobs of a bundle under construction."""

    def __init__(self):
        self.blobs = {}

    def add(self, filename, data=b"", spans=()):
        """Keep a file and return its artifact."""
        self.blobs[sha256(data)] = data
        return Artifact(filename, digest_text(sha256(data)), len(data), tuple(spans))

    def kernel(
        self, seed="A", name="k", target=CUDA, *, source="a.py", extra=None, metadata=None, **fields
    ):
        """Return a kernel; `source` is a text in its debug information, `extra` are further
        files.
        """
        document = {"name": name, "num_warps": 4, "shared": 0, **(metadata or {})}
        files = {
            f"{name}.ttir": f"tt.func @{name} loc({source})\n".encode() * 9,
            f"{name}.{'cubin' if target.backend == 'cuda' else 'hsaco'}": (
                b"\x7fELF" + noise((name, source), 40)
            ),
            f"{name}.json": json.dumps(document).encode(),
            **(extra or {}),
        }
        artifacts = tuple(self.add(filename, data) for filename, data in files.items())
        made = Kernel(
            key(seed), name, target, artifacts, Toolchain(), LaunchSpec.from_metadata(document)
        )
        return replace(made, **fields)

    def tuning(self, path, data=b"{}"):
        """Return a tuning file."""
        return TuningFile(path, self.add(path.rpartition("/")[2], data))

    def helper(self, path, data=b"\x7fELF so"):
        """Return a helper library."""
        return HelperLibrary(path, self.add(path.rpartition("/")[2], data), "x86_64")

    def opaque(self, path, data=b"pickle"):
        """Return an opaque file."""
        return Opaque(path, self.add(path.rpartition("/")[2], data))

    def bundle(self, *entries, records=(), observed=None):
        """Return a bundle of entries."""
        return Bundle(
            Content.of(entries, records),
            observed or Observed(),
            MemoryBlobs(self.blobs),
        )


def one(seed="A", name="k", **fields):
    """Return a bundle of one kernel."""
    files = Files()
    return files.bundle(files.kernel(seed, name, **fields))


def several():
    """Return a bundle with an entry of each kind and opaque files that share bytes with kernels."""
    files = Files()
    kernels = [files.kernel("A"), files.kernel("B", "other"), files.kernel("C", "k", HIP)]
    shared = b"graph " + files.blobs[bytes.fromhex(kernels[0].binary.digest[7:])] * 3
    return files.bundle(
        *kernels,
        files.tuning(f"{key('D')}/k.autotune.json"),
        files.helper(f"{key('E')}/u.so"),
        files.opaque("ab/graph", shared),
        files.opaque("ab/empty", b""),
    )


def facts(**fields):
    """Return launch facts, encoded."""
    made = LaunchFacts("ast", (), (), (), (), ())
    return replace(made, **fields).to_bytes()


@dataclass
class Part:
    """A section to be put together; `more` are fields behind the known ones, and None stands for
    the right value.
    """

    kind: int
    codec: int
    data: bytes
    raw: int
    blobs: list
    prefix: list
    offset: int | None = None
    digest: bytes | None = None
    more: list = field(default_factory=list)

    @staticmethod
    def stored(kind, data, blobs=()):
        """Return a section that is not compressed."""
        return Part(kind, 0, data, len(data), list(blobs), [])


@dataclass
class Parts:
    """A container taken apart."""

    sections: list
    major: int = 2
    minor: int = 0
    flags: tuple = (0, 0, 0)

    @staticmethod
    def of(data):
        """Take a container apart."""
        major, minor, *flags, offset, _ = struct.unpack_from("<HHIIIQQ", data, 8)
        sections = [
            Part(kind, codec, data[start : start + stored], raw, blobs, prefix)
            for kind, codec, start, stored, raw, _, blobs, prefix in msgpack.unpackb(data[offset:])
        ]
        return Parts(sections, major, minor, tuple(flags))

    def find(self, kind):
        """Return the first section of a kind."""
        return next(section for section in self.sections if section.kind == kind)

    def document(self, kind=CONTENT):
        """Return the decoded content, or the observations."""
        section = self.find(kind)
        return msgpack.unpackb(
            zstandard.decompress(section.data) if section.codec else section.data
        )

    def put(self, document, kind=CONTENT):
        """Replace the content, or the observations; bytes are taken as they are."""
        data = document if isinstance(document, bytes) else msgpack.packb(document)
        section = self.find(kind)
        section.codec, section.data, section.raw = 0, data, len(data)

    def join(self, *, table=None, gap=b"", tail=b"", checksum=None, table_size=None):
        """Put a container together, whatever is wrong with it."""
        body, entries = b"", []
        for s in self.sections:
            offset = 72 + len(body) if s.offset is None else s.offset
            digest = sha256(s.data) if s.digest is None else s.digest
            entries.append(
                [s.kind, s.codec, offset, len(s.data), s.raw, digest, s.blobs, s.prefix, *s.more]
            )
            body += s.data
        table = msgpack.packb(entries) if table is None else table
        size = len(table) if table_size is None else table_size
        head = struct.pack(
            "<8sHHIIIQQ",
            b"\x89TBNDL\r\n",
            self.major,
            self.minor,
            *self.flags,
            72 + len(body + gap),
            size,
        )
        return head + (checksum or sha256(head + table)) + body + gap + table + tail


def compressed(raw, **options):
    """Return raw bytes as a zstd frame."""
    options = {"write_checksum": True, "write_content_size": True, **options}
    return zstandard.ZstdCompressor(**options).compress(raw)


class Tables:
    """The content of `several`, to be made wrong; `document` is what is decoded."""

    def __init__(self, document):
        self.document = document
        self.kernels, self.tuning, self.opaque, self.records = (
            document[n] for n in (9, 10, 12, 13)
        )

    def set_key(self, key):
        """Give the first kernel another key."""
        self.kernels[0][0] = key

    def set_file_name(self, name, position=0):
        """Give a file of the first kernel another name."""
        lists = self.document[7]
        lists.append([*lists[0]])
        lists[-1][position] = name
        self.kernels[0][5] = len(lists) - 1

    def repeat_file(self):
        """Let the first kernel have its first file twice."""
        lists = self.document[7]
        lists.append([*lists[0], lists[0][0]])
        self.kernels[0][5] = len(lists) - 1
        self.kernels[0][6][0].append(self.kernels[0][6][0][0])

    def set_blob(self, blob):
        """Let the first file of the first kernel refer to another blob."""
        self.kernels[0][6][0][0] = blob

    def set_digest(self, position, change):
        """Change the digest of a file of the first kernel."""
        at = 32 * self.kernels[0][6][0][position]
        digests = self.document[1]
        self.document[1] = digests[:at] + change(digests[at : at + 32]) + digests[at + 32 :]

    def set_path(self, path):
        """Give the first opaque file another path; its name is the end of that."""
        self.opaque[0][0] = path

    def add_tuning(self, path):
        """Add a tuning file with the blob of the first opaque file."""
        self.tuning.append([path, self.opaque[0][1], []])

    def add_blob(self, digest, size):
        """Add a blob at the end of the table, and return its number."""
        self.document[1] += digest
        self.document[2].append(size)
        return len(self.document[2]) - 1

    def add_opaque(self, path, blob):
        """Add an opaque file."""
        self.opaque.append([path, blob, []])

    def blob(self, number):
        """Return digest and size of a blob."""
        return self.document[1][32 * number :][:32], self.document[2][number]

    def swap_blobs(self):
        """Exchange the first two blobs of the table."""
        one, two = self.document[1][:32], self.document[1][32:64]
        self.document[1] = two + one + self.document[1][64:]
        sizes = self.document[2]
        sizes[0], sizes[1] = sizes[1], sizes[0]


class Counting:
    """A source of bytes that remembers what was read."""

    def __init__(self, data):
        self.data, self.size, self.reads = data, len(data), []

    def read(self, offset, size):
        """Return bytes, and remember the range."""
        self.reads.append((offset, size))
        return self.data[offset : offset + size]

    def close(self):
        """Nothing to release."""


def read_all(bundle):
    """Return {path: bytes} of everything in a bundle; a kernel's files under its key."""
    found = {f"{k.key}/{a.filename}": bundle.read(a) for k in bundle.kernels for a in k.artifacts}
    placed = (*bundle.tuning_files, *bundle.helpers, *bundle.opaque)
    return found | {entry.path: bundle.read(entry.artifact) for entry in placed}

# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a manifest is refused with the right error: names, repeats, limits, digests,
and a wrong type in any field.
"""

import base64
import copy
import hashlib

import msgpack
import pytest
from msgspec.structs import replace

from bundler.errors import (
    ConfigError,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
    UnsafeName,
    UnsupportedVersion,
)
from bundler.format import manifest, wire
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.constant_values import Value
from bundler.format.digest import digest_raw, digest_text, sha256
from bundler.format.entries import Artifact, Target
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts, LaunchSpec
from bundler.format.limits import Limits
from bundler.format.manifest import Content, Observation, Observed
from bundler.format.names import (
    check_file_name,
    check_kernel_key,
    check_relative_path,
    is_kernel_key,
    is_key_of,
)

KEY = 0
TOOLCHAINS, SPECS, KERNELS, RECORDS = 5, 6, 9, 13
REFERENCES = 6


@pytest.fixture
def parts(build):
    """A bundle with every kind of entry, taken apart."""
    return build.Parts.of(build.several().to_bytes())


@pytest.fixture
def content(build, parts):
    """The decoded content of that bundle, with ways to make it wrong."""
    return build.Tables(parts.document())


def refused(document, kind, *words, limits=None):
    """Assert that decoding a content fails with exactly this class and these words."""
    document = getattr(document, "document", document)
    with pytest.raises(kind) as caught:
        Content.decode(msgpack.packb(document), *([limits] if limits else []))
    assert type(caught.value) is kind
    for word in words:
        assert str(word) in str(caught.value)
    return caught.value


BAD_NAMES = [
    "..",
    ".",
    "",
    "a/b",
    "/",
    "a\0b",
    "a" * 201,
    "é",
    "a b",
    "a\n",
    "\u202e",
    "a\\b",
    "~$",
    "k.cubin\0",
]
GOOD_NAMES = ["@k.cubin", "k", "-", "...", "a" * 200, "__grp", "A.B-c_d@e"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_unsafe_file_name_is_refused(content, name):
    """A file name that could leave its directory, or that Triton would not make, is refused, and
    the message quotes it.
    """
    content.set_file_name(name)
    assert (
        refused(content, UnsafeName, "unsafe file name", repr(name)[:100], "1 to 200").name == name
    )


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_name_that_triton_makes_is_accepted(content, name):
    """Names of the allowed characters are accepted, `@k.cubin` among them."""
    assert check_file_name(name) == name
    content.set_path(f"o/{name}")
    assert name in {
        entry.artifact.filename for entry in Content.decode(msgpack.packb(content.document)).opaque
    }


def test_a_kernel_may_be_called_at_k(build):
    """A bundle whose kernel's files are called `@k.…` is written and read."""
    with Bundle.from_bytes(build.one(name="@k").to_bytes()) as bundle:
        assert [artifact.filename for artifact in bundle.kernels[0].launch_set] == [
            "@k.cubin",
            "@k.json",
        ]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "a//x", "a/", "./x", "a/b\0/x", ""])
def test_an_unsafe_path_is_refused(content, path):
    """A path that is absolute, leads up, or has an empty component is refused."""
    content.set_path(path)
    refused(content, UnsafeName, "unsafe file name")


def test_a_path_of_seven_components_is_refused(content):
    """A path has at most six components."""
    content.set_path("a/b/c/d/e/f/g")
    refused(content, UnsafeName, "7 components, at most 6")
    assert check_relative_path("a/b/c/d/e/f") == "a/b/c/d/e/f"


def test_a_path_ends_in_its_file_name(build):
    """An entry whose path and file name differ is not written; the message names both."""
    files = build.Files()
    with pytest.raises(FormatError, match="path 'o/x' and file name 'y' differ"):
        files.bundle(
            replace(files.opaque("o/x"), artifact=files.opaque("o/y").artifact)
        ).content.encode()


BAD_KEYS = [
    "",
    "A" * 51,
    "A" * 53,
    "a" * 52,
    "1" + "A" * 51,
    "0" * 63,
    "G" * 64,
    "0" * 65,
    "../" + "A" * 49,
    "A" * 52 + "\n",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_kernel_key_of_another_alphabet_is_refused(content, key):
    """A kernel key that Triton would not make is refused, and the message quotes it."""
    content.set_key(key)
    assert refused(content, UnsafeName, "not a kernel key", repr(key)).name == key
    assert not is_kernel_key(key)


@pytest.mark.parametrize("key", ["A" * 52, "Z234567" + "B" * 45, "0123456789abcdef" * 4])
def test_a_kernel_key_is_base32_or_hexadecimal(key):
    """Both spellings of a SHA-256 that Triton's versions use are kernel keys."""
    assert check_kernel_key(key) == key


def test_a_kernel_key_occurs_once(content):
    """Two kernels with one key are refused."""
    content.kernels.append(content.kernels[0])
    refused(content, FormatError, f"kernel key '{content.kernels[0][KEY]}' occurs twice")


def test_a_file_name_occurs_once_in_a_kernel(content):
    """Two files with one name are refused."""
    content.repeat_file()
    refused(content, FormatError, "file 'k.ttir' occurs twice")


def test_a_path_occurs_once(content):
    """Two entries with one path are refused, whatever their kinds."""
    content.tuning.append(content.opaque[0])
    refused(content, FormatError, f"path '{content.opaque[0][0]}' occurs twice")


def test_a_tuning_file_does_not_replace_a_file_of_a_kernel(content):
    """An entry whose path is that of a kernel's own file is refused: it would be written
    over it.
    """
    key = content.kernels[0][KEY]
    content.add_tuning(f"{key}/k.cubin")
    refused(content, FormatError, f"path '{key}/k.cubin' occurs twice")


@pytest.mark.parametrize("outer", ["ab", "DDDD"])
def test_no_path_is_the_directory_of_another(build, outer):
    """A path that is a file and a directory at once is refused, on reading and on making."""
    files = build.Files()
    entries = [files.opaque(outer, b"1"), files.opaque(f"{outer}/x", b"2")]
    with pytest.raises(FormatError, match=f"path '{outer}' is a file and a directory at once"):
        files.bundle(*entries)


def test_a_group_file_is_never_stored(content):
    """A kernel that brings its own group file is refused."""
    content.set_file_name("__grp__k.json")
    refused(content, FormatError, "a group file is generated at restore, never stored")


@pytest.mark.parametrize(("name", "counts"), [("k.ttir.json", "1 and 2"), ("k.hsaco", "2 and 1")])
def test_a_kernel_has_one_binary_and_one_metadata_file(content, name, counts):
    """A kernel with two device binaries or two metadata files is refused, saying how many
    it has.
    """
    content.set_file_name(name)
    refused(
        content, FormatError, "expected one device binary and one metadata file", f"got {counts}"
    )


@pytest.mark.parametrize(("position", "counts"), [(1, "0 and 1"), (2, "1 and 0")])
def test_a_kernel_without_binary_or_metadata_is_refused(content, position, counts):
    """A kernel that lacks its device binary or its metadata is refused."""
    content.set_file_name("k.dat", position)
    refused(content, FormatError, f"got {counts}")


def test_an_empty_binary_is_refused(build):
    """A kernel whose device binary is empty is refused when a bundle is made and when it is
    read.
    """
    files = build.Files()
    with pytest.raises(FormatError, match="the device binary is empty"):
        files.bundle(files.kernel(extra={"k.cubin": b""}))


def test_the_blob_table_must_be_sorted(content):
    """A blob table in another order is refused, since the same content would have two digests."""
    content.swap_blobs()
    refused(content, FormatError, "the blob table is not the sorted list of the blobs in use")


def test_a_blob_that_nobody_uses_is_refused(content):
    """A blob in the table that no file refers to is refused."""
    content.add_blob(b"\xff" * 32, 1)
    refused(content, FormatError, "the blob table is not the sorted list of the blobs in use")


def test_a_blob_twice_in_the_table_is_refused(content):
    """A digest that stands twice in the table with two sizes is refused."""
    digest, size = content.blob(0)
    content.add_opaque("zz/x", content.add_blob(digest, size + 1))
    refused(content, FormatError, "the blob table is not the sorted list of the blobs in use")


@pytest.mark.parametrize("index", [999, 2**63])
def test_a_file_must_refer_to_the_table(content, index):
    """A file that refers beyond the blob table is refused, naming both numbers."""
    content.set_blob(index)
    refused(content, FormatError, f"blob {index} of ")


@pytest.mark.parametrize(("other", "fix"), [(0, "again"), (1, "again"), (3, "upgrade")])
def test_another_schema_of_content_is_refused(content, other, fix):
    """The error names both, and says what to do."""
    content.document[0] = other
    error = refused(content, UnsupportedVersion, f"schema {other}, expected 2", fix)
    assert (error.got, error.expected) == (other, 2)


@pytest.mark.parametrize("other", [0, 3])
def test_another_schema_of_observations_is_refused(build, parts, other):
    """The error names both."""
    observed = parts.document(build.OBSERVED)
    observed[0] = other
    with pytest.raises(FormatError, match=f"schema {other}, expected 1"):
        Observed.decode(msgpack.packb(observed))


def test_observations_of_a_kernel_occur_once(build):
    """Two observations of one kernel are refused."""
    one = [build.key("A"), [], [], []]
    with pytest.raises(FormatError, match=f"kernel key '{one[0]}' occurs twice"):
        Observed.decode(msgpack.packb([1, [one, one], []]))


def test_observations_are_made_when_one_is_read(build, monkeypatch):
    """Decoding checks them; the mapping is filled once, by who reads it first, and equals the one
    that was written.
    """
    made, make = [], manifest._observations
    monkeypatch.setattr(
        manifest, "_observations", lambda rows: (made.append(len(rows)), make(rows))[1]
    )
    one, other = (Observation((0, 1), ("triton",), (("ttir", 5),)), Observation())
    written = Observed({build.key("A"): one, build.key("B"): other}, ((("torch", "2.13"),),))
    read = Observed.decode(written.encode())
    assert made == []
    assert read.kernels.get(build.key("A")) == one
    assert read.kernels.get(build.key("C")) is None
    assert (read, len(read.kernels), read.devices, read.encode()) == (
        written,
        2,
        (0, 1),
        written.encode(),
    )
    assert made == [2]


def test_content_with_another_digest_is_noticed(build, parts):
    """Content that is not what the table of contents says is refused before it is decoded."""
    section = parts.find(build.CONTENT)
    section.digest = sha256(section.data)
    section.data = section.data[:-1] + b"\xc1"
    with pytest.raises(DigestMismatch, match="section at offset"):
        Bundle.from_bytes(parts.join())


def test_blob_bytes_with_another_digest_are_never_returned(parts, content):
    """When the manifest names another digest than the stored bytes have, reading them raises and
    names both.
    """
    content.set_digest(
        1, lambda digest: digest[:-1] + bytes([digest[-1] ^ 1])
    )  # stays in its place in the order
    parts.put(content.document)
    with Bundle.from_bytes(parts.join()) as bundle:
        binary = bundle.kernels[0].binary
        with pytest.raises(DigestMismatch) as caught:
            bundle.read(binary)
    assert caught.value.expected == binary.digest
    assert caught.value.got in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"kernels": 2}, ["3 is over the limit of 2", "kernels"]),
        ({"files_per_kernel": 2}, ["3 is over the limit of 2", "files_per_kernel"]),
        ({"file_bytes": 10}, ["over the limit of 10", "file_bytes"]),
        ({"kernel_bytes": 50}, ["over the limit of 50", "kernel_bytes"]),
        ({"raw_bytes": 100}, ["over the limit of 100", "raw_bytes"]),
        ({"manifest_bytes": 100}, ["over the limit of 100", "manifest_bytes"]),
        ({"string_bytes": 4}, ["over the limit of 4", "string_bytes"]),
        ({"depth": 3}, ["nested deeper than 3"]),
        ({"array_items": 6}, ["max_array_len(6)"]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_each_limit_of_a_manifest_holds(content, limits, words):
    """A manifest over a limit is refused, and the message names limit and amount."""
    refused(content, LimitExceeded, *words, limits=Limits(**limits))


def test_a_manifest_over_the_limit_is_refused_unread():
    """Content over the limit is refused by its length, before anything decodes it."""
    with pytest.raises(
        LimitExceeded, match=r"manifest: 67108865 is over the limit of 67108864 \(manifest_bytes\)"
    ):
        Content.decode(b"\xc1" * ((64 << 20) + 1))


def test_a_manifest_over_the_limit_is_not_written(build, tmp_path):
    """What no reader would accept is not written: the same limit stops the writer, and leaves no
    file.
    """
    files = build.Files()
    kernels = [files.kernel(number, facts_bytes=b"\0" * 4_000_000) for number in range(5)]
    with pytest.raises(LimitExceeded, match="facts_bytes"):
        files.bundle(*kernels).save(tmp_path / "b.tbundle")
    assert list(tmp_path.iterdir()) == []


def test_an_unsafe_path_is_not_written(build, tmp_path):
    """An entry with a path that readers refuse cannot be saved."""
    files = build.Files()
    with pytest.raises(UnsafeName, match=r"unsafe file name '\.\.'"):
        files.bundle(files.opaque("../x")).save(tmp_path / "b.tbundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\xc1", b"\x97", b"\x90", b"\x91\x01", b"\x81\xa1a\x01", b"\x01", b"\x90\x00"],
)
def test_what_is_no_positional_record_is_refused(data):
    """Bytes that are no msgpack array of the right length are refused by every decoder."""
    for decode in (Content.decode, Observed.decode, LaunchFacts.from_bytes, KeyParts.from_bytes):
        with pytest.raises(FormatError):
            decode(data)


def test_too_deep_msgpack_is_refused():
    """Msgpack that nests deeper than the limit is refused with the limit, however deep."""
    for depth in (17, 100, 1000, 100_000):
        with pytest.raises(LimitExceeded, match="nested deeper than 16") as caught:
            wire.unpack(b"\x91" * depth + b"\xc0", "nest")
        assert caught.value.limit == 16
    assert wire.unpack(b"\x91" * 16 + b"\xc0", "nest")


def test_a_map_is_refused_wherever_it_stands():
    """Maps are refused even when empty, since decoders keep the last of two equal keys."""
    for data in (b"\x91\x80", b"\x91\x81\xa1a\x01", b"\x91\x91\x80"):
        with pytest.raises(FormatError, match="map"):
            wire.unpack(data, "map")


@pytest.mark.parametrize("obj", ["\ud800", [2**64], [-(2**63) - 1]])
def test_what_msgpack_cannot_hold_is_refused(obj):
    """Text that is not Unicode and integers over 64 bits are typed errors when encoded."""
    with pytest.raises(FormatError, match="cannot be stored"):
        wire.pack([obj])


@pytest.mark.parametrize(
    "wire_value",
    [
        ["nothing", None],
        ["none", 0],
        ["bool", 1],
        ["int", True],
        ["int", 1.0],
        ["int", "x"],
        ["int", ""],
        ["int", "-"],
        ["int", "1" * 401],
        ["int", "--1"],
        ["float", b"1234567"],
        ["float", 1],
        ["float", 1.0],
        ["str", b"x"],
        ["tuple", None],
        ["tuple", [1]],
        ["list", "x"],
        ["dict", [[1, ["none", None]]]],
        ["dict", [["k"]]],
        ["dtype", 1],
        ["constexpr", None],
        ["constexpr", []],
        ["jit", "x"],
        ["jit", ["x"]],
        ["jit", ["x", 1]],
        ["other", None],
        ["none"],
        ["none", None, None],
        [],
        [1, 2],
        None,
        "none",
        {},
    ],
    ids=repr,
)
def test_a_value_that_is_not_in_the_table_is_refused(wire_value):
    """A tagged value with an unknown tag, or a payload of another type than its tag's, is refused."""
    with pytest.raises(FormatError):
        Value.from_wire(wire_value)


def spots(node, path=()):
    """Yield the path of every field inside nested arrays."""
    for position, item in enumerate(node):
        yield (*path, position)
        if isinstance(item, list):
            yield from spots(item, (*path, position))


def replaced(node, path, value):
    """Return a copy of nested arrays with one field replaced."""
    node = copy.deepcopy(node)
    inner = node
    for position in path[:-1]:
        inner = inner[position]
    inner[path[-1]] = value
    return node


WRONG = {
    int: ["x", b"x", None, True, 1.5, [], {}],
    str: [1, b"x", None, False, 1.5, [], {}],
    bytes: ["x", 1, True, 1.5, [], {}],
    bool: [0, "x", b"x", None, 1.5, [], {}],
    list: ["x", 1, b"x", None, True, 1.5, {}],
    type(None): [True, 1.5, {}],
}


def check_every_field(node, decode):
    """Replace each field by each wrong type, and return how many were refused; anything accepted
    fails.
    """
    accepted, count = [], 0
    for path in spots(node):
        old = node
        for position in path:
            old = old[position]
        for wrong in WRONG[type(old)]:
            try:
                decode(msgpack.packb(replaced(node, path, wrong)))
            except FormatError:
                count += 1
            else:
                accepted.append((path, old, wrong))
    return count, accepted


def test_a_wrong_type_in_any_field_of_a_content_is_refused(build):
    """Each field of each record of a content has a type, and every other type is a FormatError."""
    files = build.Files()
    descriptor = {"swizzle": 3, "on": True, "no": None, "w": 1.5, "name": "x", "block": [1]}
    metadata = {
        "tensordesc_meta": [descriptor],
        "tmem_size": 1,
        "global_scratch_size": 1,
        "global_scratch_align": 1,
    }
    kernel = files.kernel("A", metadata=metadata)
    bundle = files.bundle(
        kernel,
        files.tuning("t/k.autotune.json"),
        files.helper("h/u.so", b"1"),
        files.opaque("o/x", b"2"),
    )
    document = build.Parts.of(bundle.to_bytes()).document()
    document[KERNELS][0][REFERENCES][1] = [0, 5, 0, 0]
    document[TOOLCHAINS][0] = ["3.7.1", "ab", "12.9"]
    document[RECORDS] = [["k", [["a", "b"]], [["X", ["int", 1]]], "autotune"]]
    Content.decode(msgpack.packb(document))
    count, accepted = check_every_field(document, Content.decode)
    # An `int` or nil may be the other one; a text or nil too; a decimal text is an int's other
    # form.
    assert [spot for spot in accepted if not allowed_instead(*spot)] == []
    assert count > 700


def allowed_instead(path, old, wrong):
    """Tell whether the specification allows this type in the place of the other."""
    spec = path[:2] == (SPECS, 0) and len(path) == 3
    if wrong is None:
        return path[:1] == (TOOLCHAINS,) or (spec and type(old) is int and path[2] >= 5)
    return type(old) is type(None) and spec


def test_a_wrong_type_in_any_field_of_the_observations_is_refused(build):
    """Each field of each record of the observations has a type, and every other type is a
    FormatError.
    """
    document = [1, [[build.key("A"), [0], ["triton"], [["ttir", 5]]]], [[["python", "3.11"]]]]
    count, accepted = check_every_field(document, Observed.decode)
    assert accepted == []
    assert count > 80


def test_a_wrong_type_in_any_field_of_facts_and_parts_is_refused(make_golden):
    """Each field of launch facts and key parts has a type, and every other type is a
    FormatError.
    """
    facts = msgpack.unpackb(make_golden.facts().to_bytes())
    count, accepted = check_every_field(facts, LaunchFacts.from_bytes)
    # An argument's default may be a value or nil.
    accepted = [spot for spot in accepted if spot[0][0] != 1 or spot[2] is not None]
    # An integer of more than 64 bits is text, and another one is not.
    assert [(old, wrong) for _, old, wrong in accepted] == [(str(2**70), 1)]
    assert count > 1000
    count, accepted = check_every_field([True, [["a", "b"]]], KeyParts.from_bytes)
    assert (accepted, count > 25) == ([], True)


@pytest.mark.parametrize(
    "change",
    [
        {"name": 1},
        {"num_warps": "4"},
        {"num_warps": -1},
        {"shared": None},
        {"shared": 2**70},
        {"launch_pdl": 1},
        {"tmem_size": 1.5},
        {"name": "\ud800"},
        {"name": "n" * 5000},
        {"tensordesc_meta": [[[[[[[["deep"]]]]]]]]},
    ],
    ids=str,
)
def test_odd_metadata_is_refused_where_one_kernel_can_be_left_out(change):
    """Metadata with a field of another type, or one that a manifest cannot hold, gives a
    FormatError.
    """
    with pytest.raises(FormatError):
        LaunchSpec.from_metadata({"name": "k", "num_warps": 4, "shared": 0, **change})


@pytest.mark.parametrize("field", ["name", "num_warps", "shared"])
def test_metadata_without_a_needed_field_is_refused(field):
    """Metadata that lacks what a launch needs is refused, naming the field."""
    metadata = {"name": "k", "num_warps": 4, "shared": 0}
    del metadata[field]
    with pytest.raises(FormatError, match=f"metadata has no field '{field}'"):
        LaunchSpec.from_metadata(metadata)


def test_damaged_facts_are_refused_when_asked_for(build):
    """Facts and key parts are decoded when asked for; damaged ones do not hinder reading the
    kernel.
    """
    bundle = build.one(facts_bytes=b"\xc1", parts_bytes=b"\xc1")
    with Bundle.from_bytes(bundle.to_bytes()) as back:
        kernel = back.kernels[0]
        assert back.read(kernel.binary)
        with pytest.raises(FormatError, match="launch facts"):
            _ = kernel.launch
        with pytest.raises(FormatError, match="key parts"):
            _ = kernel.parts
        with pytest.raises(FormatError):
            back.verify()


def test_a_packed_kernel_says_why_it_has_no_facts(build):
    """A kernel that came by pack refuses what needs its signature or key parts, with that
    reason.
    """
    kernel = build.one().kernels[0]
    with pytest.raises(NotFound, match="it came by pack"):
        kernel.require_parts()
    with pytest.raises(Exception, match="came by pack") as caught:
        kernel.launch.require_facts()
    assert caught.value.code == "cannot-launch"


def test_key_parts_are_looked_up_and_compared(build):
    """Key parts are found by name, and a difference says what each side has."""
    one, two = KeyParts((("a", "1"), ("b", "2")), True), KeyParts((("b", "3"), ("c", "4")), True)
    assert one["b"] == "2"
    assert one.diff(two) == (("a", "1", None), ("b", "2", "3"), ("c", None, "4"))
    with pytest.raises(NotFound, match="no key part named 'z'"):
        one["z"]


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "A" * 64, "sha256:" + "a" * 63, "md5:" + "a" * 64, "a" * 64]
)
def test_a_digest_is_written_in_one_way(text):
    """Only `sha256:` and 64 lower-case digits are a digest."""
    with pytest.raises(FormatError, match="not a digest"):
        digest_raw(text)
    assert digest_raw(digest_text(b"\xab" * 32)) == b"\xab" * 32


@pytest.mark.parametrize("text", ["cuda", "cuda:", ":90", "CUDA:90", "cuda:90:32", "cuda 90", ""])
def test_what_is_no_target_is_refused(text):
    """A target is a backend and an architecture; anything else is a ConfigError that shows
    examples.
    """
    with pytest.raises(ConfigError, match="cuda:90 or hip:gfx942"):
        Target.parse(text)
    assert (Target.parse("hip:gfx942").warp_size, Target.parse("hip:gfx1100").warp_size) == (64, 32)
    assert str(Target.parse("cuda:90")) == "cuda:90"


def test_a_bundle_in_memory_verifies_what_it_reads_and_writes(build):
    """Bytes in memory that do not match their digest are found by read, verify and to_bytes."""
    bundle = build.one()
    binary = bundle.kernels[0].binary
    bad = Bundle(
        bundle.content,
        bundle.observed,
        MemoryBlobs({digest_raw(a.digest): b"x" for a in bundle.kernels[0].artifacts}),
    )
    for use in (lambda: bad.read(binary), bad.verify, bad.to_bytes):
        with pytest.raises(DigestMismatch):
            use()
    assert isinstance(binary, Artifact)


@pytest.mark.parametrize("seed", range(50))
def test_a_key_is_recognized_by_its_digest(seed):
    """In base32 and in hex; one bit more or less, and it is the key of another kernel."""
    digest = hashlib.sha256(bytes([seed])).digest()
    base32 = base64.b32encode(digest).decode().rstrip("=")
    other = bytes([digest[0], digest[1], *digest[2:31], digest[31] ^ 1])
    assert is_key_of(base32, digest)
    assert is_key_of(digest.hex(), digest)
    assert not is_key_of(base32, other)
    assert not is_key_of(digest.hex(), other)
    # The last character has room for more bits than the digest has.
    assert not is_key_of(base32[:-1] + chr(ord(base32[-1]) + 1), digest)
    assert not is_key_of(base32.lower(), digest)

# SPDX-License-Identifier: Apache-2.0
"""A stripped bundle tells nothing of where and from what its kernels were compiled, and is used as
before.
"""

import json
import struct
from pathlib import Path

import pytest
import support

import bundler
from bundler.cli.bundles.inspection import find_leaks
from bundler.errors import ConfigError, FormatError
from bundler.format.device_elf import content_of, sections
from bundler.format.source_stripping import (
    absolute_paths,
    debug_sections,
    source_traces,
    user_names,
    without_debug,
    words_in,
)
from bundler.runtime import DryDriver


class Tensor:
    """What a tensor is to a launch, at an address that 16 does not divide: so were these
    compiled.
    """

    dtype = "torch.float32"

    def data_ptr(self):
        return 0x7F00_0000_0004

    def get_device(self):
        return 0


NOTHING = {"paths": [], "users": [], "hosts": [], "sources": []}
_WITHOUT_BYTES = 8
_DEBUG = (".debug", ".rela.debug", ".rel.debug", ".nv_debug", ".rela.nv_debug", ".rel.nv_debug")
# What an assert of Inductor's names, as Triton puts it into a cubin.
_PATH = b"/tmp/torchinductor_alice/im/cim3ltn.py"
_TEXT = b"\0" + _PATH + b"\0index out of bounds\0"


@pytest.fixture(scope="module")
def golden():
    """Real kernels for two targets, with argument types, as Triton 3.7.1 left them."""
    with bundler.Bundle.load(
        Path(__file__).parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"
    ) as opened:
        yield opened


def leaks(bundle):
    """Return what `inspect --leaks` finds, but for placeholders."""
    found = find_leaks(bundle, bundle.kernels, whole=True)
    return {table: found[table] for table in NOTHING}


def loaded(image):
    """Return the bytes of each section that is no debug information, with its row."""
    rows, names_row = sections(image)
    names = content_of(image, rows[names_row])
    named = [(names[row.name_at : names.index(b"\0", row.name_at)].decode(), row) for row in rows]
    return [
        (name, row, content_of(image, row) if row.kind != _WITHOUT_BYTES else b"")
        for name, row in named
        if not name.startswith(_DEBUG)
    ]


def elf(*named):
    """Return an ELF file of 64 bits with these sections: (name, flags, bytes)."""
    names = b"\0" + b"".join(name + b"\0" for name, *_ in (*named, (b".shstrtab",)))
    body, rows = b"", [bytes(64)]
    for name, flags, data in (*named, (b".shstrtab", 0, names)):
        at = names.index(b"\0" + name + b"\0") + 1
        rows.append(
            struct.pack("<IIQQQQIIQQ", at, 1, flags, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        )
        body += data
    head = (
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack(
            "<HHIQQQIHHHHHH",
            2,
            190,
            1,
            0,
            0,
            64 + len(body),
            0,
            64,
            0,
            0,
            64,
            len(rows),
            len(rows) - 1,
        )
    )
    return head + body + b"".join(rows)


@pytest.mark.parametrize(
    "name", ["triton-liger-h200", pytest.param("inductor-transformer-h200", marks=pytest.mark.slow)]
)
def test_a_real_cache_tells_and_the_stripped_one_does_not(name, unpacked):
    """Paths, lines and debug information are found before, nothing is after, and no kernel is lost;
    twice is once.
    """
    with bundler.pack(unpacked(name)) as packed:
        before, stripped = leaks(packed), bundler.strip_source(packed)
        assert {leak["what"] for leak in before["sources"]} >= {
            "debug information",
            "places in source files",
        }
        assert before["paths"]
        assert [kernel.key for kernel in stripped.kernels] == [
            kernel.key for kernel in packed.kernels
        ]
        data = stripped.to_bytes()
        assert bundler.strip_source(stripped).digest == stripped.digest
    with bundler.Bundle.from_bytes(data) as read:
        read.verify()
        assert leaks(read) == NOTHING


def test_what_a_driver_loads_stays(golden):
    """Of each binary, only sections of debug information changed: all others are where they were,
    with the same bytes.
    """
    stripped = bundler.strip_source(golden)
    assert {kernel.target.backend for kernel in golden.kernels} == {"cuda", "hip"}
    for before, after in zip(golden.kernels, stripped.kernels, strict=True):
        one, two = golden.read(before.binary), stripped.read(after.binary)
        assert debug_sections(two) == ()
        assert loaded(one) == loaded(two)
        old, new = (
            json.loads(golden.read(before.metadata)),
            json.loads(stripped.read(after.metadata)),
        )
        assert (
            old == new
        )  # the golden ones name no path but placeholders, and what identifies the source stays
        assert (after.facts_bytes, after.parts_bytes) == (before.facts_bytes, before.parts_bytes)


def test_a_stripped_bundle_launches(golden):
    """A launch by replay has what it needs, binary, metadata and argument types: the driver gets
    the parameters that it gets without stripping.
    """

    def launched(bundle):
        driver = DryDriver()
        with bundler.load(bundle, driver=driver) as kernels:
            kernels["row_max_kernel"][(4,)](Tensor(), Tensor(), 1001, BLOCK=256)
        return driver.launches[0], driver.modules[0].image

    (before, image), (after, clean) = launched(golden), launched(bundler.strip_source(golden))
    assert (after.grid, after.parameters) == (before.grid, before.parameters)
    assert (bool(debug_sections(image)), debug_sections(clean)) == (True, ())


@pytest.mark.toolchain
def test_triton_hits_on_what_was_stripped(bundle, tmp_path):
    """Kernels that were just compiled, stripped, saved and restored elsewhere, are hits where ptxas
    refuses, and tell nothing.
    """
    assert leaks(bundle)["sources"]
    stripped = bundler.strip_source(bundle)
    assert leaks(stripped) == NOTHING
    stripped.save(tmp_path / "clean.tbundle")
    bundler.restore(tmp_path / "clean.tbundle", tmp_path / "there")
    assert support.hits_without_compiler(tmp_path / "there", tmp_path / "ptxas") == (
        len(bundle.kernels),
        0,
    )
    for path in (tmp_path / "there").rglob("*"):
        if path.suffix in {".cubin", ".hsaco"}:
            assert source_traces(path.read_bytes()) == set()


def test_texts_of_asserts_name_no_file():
    """A path between zeros becomes question marks of the same length; the message, and numbers that
    look like a path, stay.
    """
    from bundler.format.source_stripping import _without_paths

    image = elf(
        (b".text.k", 6, b"code"), (b".nv.global.init", 3, _TEXT + b"\1\2/home/numbers/are\0")
    )
    clean = _without_paths(image)
    assert len(clean) == len(image)
    assert b"torchinductor" not in clean
    assert b"\0" + b"?" * len(_PATH) + b"\0index out of bounds\0" in clean
    assert b"/home/numbers/are" in clean


def test_a_kernel_whose_code_names_a_path_is_left_out(golden, tmp_path):
    """Where a path cannot be taken out, the kernel is, and the report says why."""
    cache = tmp_path / "cache"
    kernel = next(kernel for kernel in golden.kernels if kernel.target.backend == "cuda")
    bundler.restore(golden, cache, only="all")
    binary = cache / kernel.key / kernel.binary.filename
    binary.write_bytes(elf((b".text.k", 6, b"\0/home/alice/models/kernel.py\0")))
    with bundler.pack(cache, strip="source") as packed:
        assert len(packed.kernels) == len(golden.kernels) - 1
        assert "still tells /home/alice/models/kernel.py" in dict(packed.left_out)[kernel.key]


def test_metadata_names_no_path_and_keeps_its_placeholders(golden, tmp_path):
    """A path that is no known place becomes a word; Triton's own directory is put back as before,
    and keys stay.
    """
    cache = tmp_path / "cache"
    kernel = next(kernel for kernel in golden.kernels if kernel.target.backend == "cuda")
    bundler.restore(golden, cache, only="all")
    file = cache / kernel.key / kernel.metadata.filename
    told = json.loads(file.read_text())
    told = {"ir_override": "/home/alice/mine.ttgir", **told, "extra": "/home/alice/other.ttgir"}
    file.write_text(json.dumps(told))
    with bundler.pack(cache, strip="source") as packed:
        (found,) = [one for one in packed.kernels if one.key == kernel.key]
        assert absolute_paths(packed.read(found.metadata)) == set()
        bundler.restore(packed, tmp_path / "there", only="all")
    back = json.loads((tmp_path / "there" / kernel.key / kernel.metadata.filename).read_text())
    assert back == told | {"ir_override": back["ir_override"], "extra": "[[stripped]]"}
    assert "alice" not in str(back["ir_override"])


def test_what_runs_on_the_cpu_is_left_out_with_a_reason(compiled, tmp_path):
    """Generated Python and pickled graphs are source; tuning results stay."""
    key = compiled.keys_of("gelu_kernel")[0]
    support.plant(compiled.cache, tmp_path / "inductor" / "triton" / "0", [key])
    for path in ("ab/code.py", "ab/cabc.best_config"):
        (tmp_path / "inductor" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "inductor" / path).write_text("{}")
    with bundler.pack(tmp_path / "inductor", strip="source") as packed:
        assert [file.path for file in packed.tuning_files] == ["ab/cabc.best_config"]
        assert packed.opaque == ()
        assert "may hold source" in dict(packed.left_out)["ab/code.py"]
        with bundler.pack(tmp_path / "inductor") as whole:
            assert bundler.strip_source(whole).digest == packed.digest


def test_another_word_is_refused(tmp_path):
    """The message says which words there are."""
    with pytest.raises(ConfigError, match="expected None or 'source'"):
        bundler.pack(tmp_path, strip="all")
    with bundler.recording() as recording:
        pass
    with pytest.raises(ConfigError, match="expected None or 'source'"):
        recording.collect(strip="all")
    assert recording.collect(strip="source").is_empty


def test_hostile_section_tables_are_typed_errors():
    """Debug information over code, beyond the end, or in no ELF file of 64 bits, is refused;
    nothing else is written over.
    """
    sound = elf((b".text.k", 6, b"code"), (b".debug_line", 0, b"secret"))
    assert b"secret" not in without_debug(sound)
    table = struct.unpack_from("<Q", sound, 40)[0]
    for start, size in ((64, 4), (66, 8), (0, 64), (table, 64), (70, 1 << 60), (1 << 63, 8)):
        image = bytearray(sound)
        struct.pack_into("<QQ", image, table + 2 * 64 + 24, start, size)
        with pytest.raises(FormatError, match="in the place of something else"):
            without_debug(bytes(image))
    for image in (b"", b"\x7fELF\1", sound[:70], b"not an ELF file" * 9):
        with pytest.raises(FormatError):
            without_debug(image)


def test_sections_that_are_loaded_are_never_emptied():
    """A section that a driver loads stays, whatever it is called."""
    image = elf((b".debug_line", 2, b"loaded"))
    assert without_debug(image) == image


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'#loc = loc("kernel.py":12:0)\n', {"places in source files"}),
        (b'#loc1 = loc("x_ptr"(#loc))\n', {"names of variables"}),
        (b'\t.file\t1 "kernel.py"\n', {"places in source files"}),
        (b'!5 = !DIFile(filename: "kernel.py", directory: ".")\n', {"places in source files"}),
        (b"import triton\n", {"lines of Python"}),
        (b'{"name": "kernel", "hash": "00"}', set()),
        (b"module {\n  tt.func @k()\n}\n", set()),
    ],
)
def test_traces_of_source(text, found):
    """Names of files and variables are found without their directory too; what a launch needs is no
    trace.
    """
    assert source_traces(text) == found


def test_names_of_users_and_machines():
    """Homes and Inductor's temporary directories tell a user; words are found whole, in whatever
    case.
    """
    paths = [
        "/home/alice/a.py",
        "/Users/bob/b.py",
        "/tmp/torchinductor_carol/c.py",
        "/usr/lib/python3/x.py",
    ]
    assert user_names(paths) == {"alice", "bob", "carol"}
    assert words_in(b"built on GPU-7 by alice_2", {"gpu-7", "alice", "gpu"}) == {
        "gpu-7",
        "alice",
        "gpu",
    }
    assert words_in(b"malice and gpus", {"alice", "gpu"}) == set()


def test_a_host_name_is_found(golden, monkeypatch, tmp_path):
    """This user's and this machine's names are looked for in every file, launch facts and
    observations too.
    """
    from bundler.cli.bundles import inspection

    monkeypatch.setattr(inspection, "_names_here", lambda: (("carol",), ("gpu-box",)))
    cache = tmp_path / "cache"
    bundler.restore(golden, cache, only="all")
    text = next(cache.rglob("*.ttir"))
    text.write_text(text.read_text() + "// by carol on gpu-box\n")
    with bundler.pack(cache) as packed:
        found = leaks(packed)
    assert (
        [leak["name"] for leak in found["hosts"]],
        "carol" in [leak["name"] for leak in found["users"]],
    ) == (
        ["gpu-box"],
        True,
    )

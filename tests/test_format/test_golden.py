# SPDX-License-Identifier: Apache-2.0
"""The golden files: what version 2.0 wrote is read as it was meant, and written again as it was."""

import json
import re
import shutil
import struct
from pathlib import Path

import msgpack
import msgspec
import pytest
import zstandard

from bundler.errors import UnsupportedVersion
from bundler.format.bundle import Bundle
from bundler.format.launch_spec import LaunchFacts
from bundler.format.manifest import Content, Observed, content_digest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data"
VERSION = "v2.0"
NAMES = sorted(f"{VERSION}/{path.stem}" for path in (GOLDEN / VERSION).glob("*.tbundle"))
DOCS = ROOT / "docs" / "format.md"

golden = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def pinned_zstandard():
    """Skip unless the library is the one that the golden files were compressed with."""
    pinned = re.search(
        r"^zstandard==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )[1]
    if zstandard.__version__ != pinned:
        pytest.skip(
            f"zstandard {zstandard.__version__} may compress otherwise than the pinned {pinned}"
        )


def expected(name):
    """Return what is in a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def test_there_are_golden_files_and_they_are_small():
    """The golden files are there, the one of real compiles among them, and take at most 200 KB."""
    assert [
        f"{VERSION}/{name}" for name in ("empty", "synthetic", "triton-3.7.1", "tuned")
    ] == NAMES
    assert sum(path.stat().st_size for path in (GOLDEN / VERSION).iterdir()) <= 200_000


def test_a_file_of_version_1_is_refused():
    """What was written before any release is told by its version, with what to do."""
    with pytest.raises(UnsupportedVersion, match=r"format 1\.0 .*expected 2\.x .*again") as caught:
        Bundle.load(GOLDEN / "v1.0" / "synthetic.tbundle")
    assert (caught.value.got, caught.value.expected) == ((1, 0, 0), (2, 0, 0))


@golden
def test_reading_gives_what_was_written(make_golden, name):
    """Reading a golden file gives exactly the digest, kernels, files, facts and observations that
    were written.
    """
    wanted = expected(name)
    with Bundle.load(GOLDEN / f"{name}.tbundle") as bundle:
        found = make_golden.plain(make_golden.describe(bundle))
        assert found == {key: wanted[key] for key in found}


@golden
def test_every_part_of_a_golden_file_is_sound(name):
    """Verifying a golden file finds nothing wrong."""
    with Bundle.load(GOLDEN / f"{name}.tbundle") as bundle:
        bundle.verify()


@golden
def test_header_is_as_written(name):
    """The header's numbers are those that were written."""
    data = (GOLDEN / f"{name}.tbundle").read_bytes()
    magic, *numbers = struct.unpack_from("<8sHHIIIQQ", data)
    wanted = expected(name)
    assert [magic.hex(), numbers, len(data)] == [wanted["magic"], wanted["header"], wanted["size"]]


@golden
def test_content_encodes_to_the_same_bytes(build, name):
    """The content of a golden file, decoded and made anew from its entries, encodes to the same
    bytes and digest.
    """
    data = build.Parts.of((GOLDEN / f"{name}.tbundle").read_bytes()).document()
    packed = msgpack.packb(data)
    content = Content.decode(packed)
    again = Content.of(reversed(list(content.entries)), content.tuning_records)
    assert again.encode() == packed
    assert content_digest(again.encode()) == expected(name)["digest"]


@golden
def test_observations_and_facts_encode_to_the_same_bytes(name):
    """Observations, launch facts and key parts of a golden file encode to the bytes they were
    decoded from.
    """
    with Bundle.load(GOLDEN / f"{name}.tbundle") as bundle:
        assert Observed.decode(bundle.observed.encode()) == bundle.observed
        assert bundle.blobs.observed_bytes == bundle.observed.encode()
        for kernel in bundle.kernels:
            if kernel.facts_bytes is not None:
                assert kernel.launch.facts.to_bytes() == kernel.facts_bytes
                assert LaunchFacts.from_bytes(kernel.facts_bytes) == kernel.launch.facts
                assert kernel.parts.to_bytes() == kernel.parts_bytes


@golden
def test_writing_again_gives_the_same_file(pinned_zstandard, tmp_path, name):
    """A golden file that is loaded and saved has the same bytes, with the version of zstandard that
    wrote it.
    """
    with Bundle.load(GOLDEN / f"{name}.tbundle") as bundle:
        bundle.save(tmp_path / "again.tbundle")
    assert (tmp_path / "again.tbundle").read_bytes() == (GOLDEN / f"{name}.tbundle").read_bytes()


@pytest.mark.parametrize("name", ["synthetic", "tuned"])
def test_the_script_makes_the_same_files(pinned_zstandard, make_golden, name):
    """The script beside the golden files makes those without real kernels again, byte for byte."""
    made = getattr(make_golden, name)().to_bytes()
    assert made == (GOLDEN / VERSION / f"{name}.tbundle").read_bytes()


@pytest.mark.parametrize("name", ["synthetic", "tuned"])
def test_the_script_writes_the_same_description(make_golden, tmp_path, name):
    """The script describes a golden file as the JSON beside it does."""
    shutil.copy(GOLDEN / VERSION / f"{name}.tbundle", tmp_path)
    make_golden.write(tmp_path / f"{name}.tbundle")
    assert (tmp_path / f"{name}.json").read_bytes() == (
        GOLDEN / VERSION / f"{name}.json"
    ).read_bytes()


def test_the_real_kernels_are_real():
    """The golden file of real compiles has an ELF binary for each of two kernels and two targets,
    with facts.
    """
    with Bundle.load(GOLDEN / VERSION / "triton-3.7.1.tbundle") as bundle:
        assert sorted((k.name, str(k.target)) for k in bundle.kernels) == [
            ("add_kernel", "cuda:90"),
            ("add_kernel", "hip:gfx942"),
            ("row_max_kernel", "cuda:90"),
            ("row_max_kernel", "hip:gfx942"),
        ]
        assert all(bundle.read(kernel.binary).startswith(b"\x7fELF") for kernel in bundle.kernels)
        assert all(kernel.parts.proven for kernel in bundle.kernels)


def test_the_worked_example_of_the_specification_is_the_golden_file():
    """The hexadecimal dump in docs/format.md is the empty golden bundle."""
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^[0-9a-f]{2}  ((?:[0-9a-f]{2}(?: {1,2}|$)){1,16})", text, re.MULTILINE)
    assert bytes.fromhex("".join(rows)) == (GOLDEN / "v2.0" / "empty.tbundle").read_bytes()
    assert expected("v2.0/empty")["digest"] in text


def test_the_table_of_the_specification_is_that_of_the_golden_file(build):
    """The table of contents in docs/format.md is that of the synthetic golden bundle."""
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \d \| (\d+) [a-z ]+\| (\d) \| (\d+) \| (\d+) \| (\d+) \| ([\d ]*)\| ?([\d ]*)\|$",
        text,
        re.MULTILINE,
    )
    offset, wanted = 72, []
    for part in build.Parts.of((GOLDEN / "v2.0" / "synthetic.tbundle").read_bytes()).sections:
        wanted.append(
            (part.kind, part.codec, offset, len(part.data), part.raw, part.blobs, part.prefix)
        )
        offset += len(part.data)
    assert [
        (*map(int, row[:5]), *([int(n) for n in cell.split()] for cell in row[5:])) for row in rows
    ] == wanted


def test_the_limits_of_the_specification_are_ours():
    """The numbers in the table of limits are the defaults."""
    from bundler.format.limits import DEFAULT_LIMITS

    text = DOCS.read_text(encoding="utf-8").partition("\n## Limits")[2].partition("\n## ")[0]
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    numbers = {
        int(number.replace(",", "")) * units.get(unit, 1)
        for number, unit in re.findall(r"\| ([\d,]+)(?: ([KMG]iB))?[^|]*\|$", text, re.MULTILINE)
    }
    assert set(msgspec.structs.astuple(DEFAULT_LIMITS)) <= numbers

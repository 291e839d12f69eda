# SPDX-License-Identifier: Apache-2.0
"""Registers, memory and barriers that are read from binaries are those that the vendors' own tools
read, and damage is a typed error.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.errors import FormatError, LimitExceeded
from bundler.format import device_elf
from bundler.lifecycle.binary_resources import BinaryResources, read_resources
from bundler.toolchain.ptxas import candidates

BINARIES = Path(__file__).parents[1] / "data" / "binaries"
EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels.py"
# What cuobjdump --dump-resource-usage of CUDA 13.1 says of the kernel k in resources.ptx, assembled
# by the ptxas that each name tells the ABI version of; threads are those of its .maxntid, barriers
# what ptxas -v says.
CUBINS = {
    "sm80-abi7.cubin": BinaryResources(
        10, 3008, 384, 0, constant_bytes=((0, 360),), max_threads=256, barriers=6
    ),
    "sm90a-abi7.cubin": BinaryResources(
        10, 4032, 384, 0, constant_bytes=((0, 536),), max_threads=256, barriers=6
    ),
    "sm100a-abi8.cubin": BinaryResources(
        10, 4032, 384, 0, constant_bytes=((0, 904),), max_threads=256, barriers=6
    ),
}
# What llvm-readelf --notes says, and of allocated registers the descriptor: gelu_kernel with
# waves_per_eu=1, and matmul_kernel with blocks of 64 x 128 x 32 and one warp.
HSACOS = {
    "gfx942-waves.hsaco": (
        "gelu_kernel",
        BinaryResources(
            17,
            0,
            0,
            allocated_registers=264,
            accumulation_registers=0,
            scalar_registers=19,
            spilled_registers=0,
            spilled_scalars=0,
            argument_bytes=40,
            max_threads=256,
        ),
    ),
    "gfx942-accumulation.hsaco": (
        "matmul_kernel",
        BinaryResources(
            310,
            0,
            0,
            allocated_registers=312,
            accumulation_registers=54,
            scalar_registers=106,
            spilled_registers=0,
            spilled_scalars=58,
            argument_bytes=56,
            max_threads=64,
        ),
    ),
}
GOLDEN = dict.fromkeys(CUBINS, "k") | {name: entry for name, (entry, _) in HSACOS.items()}
_FUNCTION = re.compile(r"Function (\S+):\n\s+(REG:.*)")
_COMPILE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
kernels.compile_all(sys.argv[2:])
"""


def image_of(name):
    return (BINARIES / name).read_bytes()


def tool(name):
    """The path of one of NVIDIA's programs, or a skip that says where to get it."""
    for path in (*candidates(name), shutil.which(name)):
        if path and os.access(path, os.X_OK):
            return path
    return pytest.skip(f"needs {name}, which Triton's wheel brings and the CUDA toolkit has")


def told_by_cuobjdump(path):
    """What `cuobjdump --dump-resource-usage` says: figures by their names, by function."""
    done = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = {
        name: dict(word.rsplit(":", 1) for word in line.split())
        for name, line in _FUNCTION.findall(done.stdout)
    }
    assert found, done.stdout
    return {
        name: {key: int(value) for key, value in figures.items()} for name, figures in found.items()
    }


def in_its_words(read):
    """Figures as cuobjdump names them."""
    figures = {
        "REG": read.registers,
        "STACK": read.stack_bytes,
        "SHARED": read.shared_bytes,
        "LOCAL": read.local_bytes,
    }
    banks = {f"CONSTANT[{bank}]": size for bank, size in read.constant_bytes}
    return figures | banks | {"TEXTURE": 0, "SURFACE": 0, "SAMPLER": 0}


def compare(paths):
    """Compare all functions of these cubins with cuobjdump's figures, and return what was
    compared.
    """
    compared = []
    for path in paths:
        image = Path(path).read_bytes()
        for name, figures in told_by_cuobjdump(path).items():
            read = read_resources(image, name)
            assert in_its_words(read) == figures, (path, name)
            compared.append(read)
    return compared


def assemble(ptx, path, *, limit):
    """Assemble PTX with a limit on registers, which Triton's fixed size of a block would override;
    None where no ptxas here can.
    """
    text = re.sub(r"^\.(req|max)ntid.*\n", "", ptx, flags=re.MULTILINE)
    architecture = re.search(r"^\.target (\w+)", text, flags=re.MULTILINE)[1]
    source = path.with_suffix(".ptx")
    source.write_text(text)
    for program in ("ptxas", "ptxas-blackwell"):
        line = [
            tool(program),
            f"--maxrregcount={limit}",
            f"--gpu-name={architecture}",
            source,
            "-o",
            path,
        ]
        if subprocess.run(line, capture_output=True, timeout=60).returncode == 0:
            return path
    return None


# ------------------------------------------------------------------------------------ Right figures


@pytest.mark.parametrize("name", CUBINS)
def test_a_cubin_of_each_abi_is_read_as_cuobjdump_read_it(name):
    """Static and dynamic shared memory, a stack, a called function, constants, barriers."""
    assert read_resources(image_of(name), "k") == CUBINS[name]


@pytest.mark.parametrize("name", CUBINS)
def test_two_kernels_of_one_cubin_are_told_apart(name):
    """Figures are looked up by the number of a kernel's symbol, and sections by its whole name."""
    other = read_resources(image_of(name), "k2")
    assert (other.registers, other.stack_bytes, other.barriers, other.max_threads) == (
        6 if "80" in name else 8,
        0,
        0,
        None,
    )


@pytest.mark.parametrize("name", HSACOS)
def test_an_hsaco_is_read_as_llvm_readelf_read_it(name):
    """Accumulation registers are among the registers; more registers are set aside than used where
    the user limits waves.
    """
    entry, expected = HSACOS[name]
    assert read_resources(image_of(name), entry) == expected


@pytest.mark.toolchain
def test_a_hundred_real_kernels_have_the_figures_of_cuobjdump(unpacked, compiled, tmp_path):
    """Those of the corpus and of the examples, and the corpus's again with so few registers that
    many spill.
    """
    roots = [unpacked("inductor-transformer-h200"), unpacked("triton-liger-h200"), compiled.cache]
    real = sorted(path for root in roots for path in root.rglob("*.cubin"))
    assert len(compare(real)) >= 75
    texts = sorted(path for root in roots[:2] for path in root.rglob("*.ptx"))
    squeezed = [
        assemble(text.read_text(), tmp_path / f"{number}.cubin", limit=24)
        for number, text in enumerate(texts[::2])
    ]
    if None in squeezed:
        pytest.skip("no ptxas here assembles the corpus's PTX, so nothing is compared that spills")
    spilling = compare(squeezed)
    assert len(real) + len(spilling) >= 100
    assert sum(read.stack_bytes > 0 for read in spilling) >= 5


@pytest.mark.slow
@pytest.mark.toolchain
def test_kernels_for_older_and_newer_gpus_have_the_figures_of_cuobjdump(tmp_path):
    """The examples, compiled for sm_80 and sm_100."""
    tool("cuobjdump")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-c",
            _COMPILE,
            str(EXAMPLES),
            "cuda:80",
            "cuda:100",
        ],
        env=clean | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert len(compare(sorted(tmp_path.rglob("*.cubin")))) >= 20


@pytest.mark.toolchain
@pytest.mark.parametrize("program", ["ptxas", "ptxas-blackwell"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_barriers_stack_and_registers_are_those_that_the_assembler_tells(
    program, architecture, tmp_path
):
    """What ptxas -v prints, which is the only one to print barriers."""
    text = (BINARIES / "resources.ptx").read_text().replace("sm_80", architecture)
    (tmp_path / "k.ptx").write_text(text)
    done = subprocess.run(
        [tool(program), "-v", f"--gpu-name={architecture}", "k.ptx", "-o", "k.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = re.search(
        r"function 'k' .*?(\d+) bytes stack frame.*?Used (\d+) registers, used (\d+) barriers",
        done.stderr,
        re.DOTALL,
    )
    read = read_resources((tmp_path / "k.cubin").read_bytes(), "k")
    assert [read.stack_bytes, read.registers, read.barriers] == [
        int(figure) for figure in said.groups()
    ]


def test_every_amd_kernel_of_the_examples_is_read_as_llvm_reads_it(compiled):
    """Note and descriptor are compared in each by the reader; LLVM's figures are compared where it
    is here.
    """
    paths = sorted(compiled.cache.rglob("*.hsaco"))
    readelf = shutil.which("llvm-readelf")
    for path in paths:
        read = read_resources(path.read_bytes(), path.stem)
        assert read.registers <= read.allocated_registers < read.registers + 8
        if readelf:
            notes = subprocess.run(
                [readelf, "--notes", path], capture_output=True, text=True, check=True
            ).stdout
            said = {
                key: int(value)
                for key, value in re.findall(r"\.(\w+):\s+(\d+)$", notes, re.MULTILINE)
            }
            assert (
                read.registers,
                read.scalar_registers,
                read.accumulation_registers,
                read.spilled_registers,
            ) == (
                said["vgpr_count"],
                said["sgpr_count"],
                said["agpr_count"],
                said["vgpr_spill_count"],
            )
            assert (read.stack_bytes, read.shared_bytes, read.max_threads, read.argument_bytes) == (
                said["private_segment_fixed_size"],
                said["group_segment_fixed_size"],
                said["max_flat_workgroup_size"],
                said["kernarg_segment_size"],
            )
    assert len(paths) >= 8
    if not readelf:
        pytest.skip(
            "llvm-readelf is not here: the figures of AMD's kernels were compared with their"
            " descriptors alone"
        )


# ------------------------------------------------------------------------------------------- Damage


@pytest.mark.parametrize("name", GOLDEN)
def test_a_binary_that_lost_its_end_is_refused_wherever_that_is(name):
    """No shorter binary gives figures."""
    image = image_of(name)
    for size in [*range(300), *range(300, len(image), 61), len(image) - 1]:
        with pytest.raises(FormatError):
            read_resources(image[:size], GOLDEN[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_a_kernel_that_is_not_there_is_missed_by_its_whole_name(name):
    """Neither a part of a name, nor a name of what is no kernel, nor text that is no Unicode."""
    for entry in ("", "gelu", "helper", "k3", ".text.k", "\udc80", "$k$helper"):
        with pytest.raises(FormatError) as caught:
            read_resources(image_of(name), entry)
        assert caught.value.kernel == entry


def test_a_binary_for_another_machine_is_refused_by_its_number():
    """An ELF file of a processor is no device binary."""
    image = bytearray(image_of("sm80-abi7.cubin"))
    struct.pack_into("<H", image, 18, 62)
    with pytest.raises(FormatError, match="machine 62") as caught:
        read_resources(bytes(image), "k")
    assert caught.value.machine == 62


def row_of(image, wanted):
    """Where the row of a section stands in a binary."""
    rows, names_row = device_elf.sections(image)
    names = device_elf.content_of(image, rows[names_row])
    (number,) = [
        number for number, row in enumerate(rows) if names.startswith(wanted + b"\0", row.name_at)
    ]
    return struct.unpack_from("<Q", image, 40)[0] + 64 * number


def test_shared_memory_that_no_gpu_has_is_a_limit():
    """A section that takes no room in the file may claim any size."""
    image = bytearray(image_of("sm90a-abi7.cubin"))
    struct.pack_into("<Q", image, row_of(bytes(image), b".nv.shared.k") + 32, 1 << 40)
    with pytest.raises(LimitExceeded):
        read_resources(bytes(image), "k")


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("sm90a-abi7.cubin", b".nv.info"),
        ("sm90a-abi7.cubin", b".nv.info.k"),
        ("gfx942-waves.hsaco", b".note"),
    ],
)
def test_more_attributes_or_notes_than_any_kernel_has_are_a_limit(name, section):
    """They are not walked: rows may name millions of them, and the same bytes again and again."""
    image = bytearray(image_of(name)) + bytes(2 << 20)
    struct.pack_into("<QQ", image, row_of(bytes(image), section) + 24, len(image_of(name)), 2 << 20)
    with pytest.raises(LimitExceeded):
        read_resources(bytes(image), GOLDEN[name])


def test_a_section_that_is_there_twice_is_refused():
    """Which of them a driver takes is not known."""
    image = bytearray(image_of("sm90a-abi7.cubin"))
    rows = [row_of(bytes(image), wanted) for wanted in (b".nv.shared.k", b".nv.shared.k2")]
    image[rows[1] : rows[1] + 4] = image[rows[0] : rows[0] + 4]
    with pytest.raises(FormatError, match=r"2 sections \.nv\.shared\.k"):
        read_resources(bytes(image), "k")


@pytest.mark.parametrize(
    ("at", "word", "what"),
    [
        (0, 64, "group_segment"),
        (4, 1024, "private_segment"),
        (8, 48, "kernarg"),
        (44, 0, "agpr"),
        (48, 0, "vgpr"),
    ],
)
def test_metadata_that_the_descriptor_contradicts_are_refused(at, word, what):
    """A launch goes by the descriptor, people by the metadata."""
    image = bytearray(image_of("gfx942-accumulation.hsaco"))
    rows, _ = device_elf.sections(bytes(image))
    _, section, address = device_elf.symbol_named(bytes(image), rows, b"matmul_kernel.kd")
    start = rows[section].start + address - rows[section].address
    struct.pack_into("<I", image, start + at, word)
    with pytest.raises(FormatError, match=what):
        read_resources(bytes(image), "matmul_kernel")


@pytest.mark.parametrize("name", GOLDEN)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_damaged_binary_raises_nothing_but_a_format_error(name, data):
    """Flipped, overwritten, cut and spliced bytes give figures within bounds or a FormatError."""
    image = bytearray(image_of(name))
    # Damage tells in headers, tables, attributes and notes, which lie at known places.
    spots = [
        0,
        40,
        len(image) // 2,
        max(0, len(image) - 4096),
        *(row.start for row in device_elf.sections(bytes(image))[0]),
    ]
    for _ in range(data.draw(st.integers(1, 6))):
        at = min(len(image) - 1, data.draw(st.sampled_from(spots)) + data.draw(st.integers(0, 512)))
        piece = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
        image[at : at + len(piece)] = piece
    if data.draw(st.booleans()):
        del image[data.draw(st.integers(0, len(image))) :]
    try:
        read = read_resources(bytes(image), GOLDEN[name])
    except FormatError:
        return
    figures = [
        read.registers,
        read.shared_bytes,
        read.stack_bytes,
        *(size for _, size in read.constant_bytes),
    ]
    assert all(figure is None or 0 <= figure < 1 << 32 for figure in figures)


@given(st.binary(max_size=400))
def test_bytes_that_are_no_binary_are_refused(noise):
    """With and without the head of a cubin's."""
    for image in (noise, image_of("sm80-abi7.cubin")[:64] + noise, b"\x7fELF\x02" + noise):
        with pytest.raises(FormatError):
            read_resources(image, "k")

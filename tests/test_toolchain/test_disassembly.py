# SPDX-License-Identifier: Apache-2.0
"""Which disassembler is run, and what is said where there is none."""

import os
import sys

import pytest

from bundler.cli.bundles.extraction import disassemble
from bundler.errors import NotFound, ToolchainMismatch
from bundler.format.entries import Target
from bundler.toolchain import ptxas

CUDA, HIP = Target.parse("cuda:90"), Target.parse("hip:gfx942")


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH with nothing but the programs that a test puts there, on a machine without Triton and
    ROCm.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(ptxas, "triton_dir", lambda: None)

    def put(name, code):
        path = folder / name
        path.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
        path.chmod(0o755)
        return path

    return put


def test_the_first_that_answers_is_taken(tools):
    """The program gets the binary as a file, which is gone afterwards."""
    tools("nvdisasm", "print(sys.argv[1:-1], open(sys.argv[-1], 'rb').read(), sys.argv[-1])")
    *words, path = disassemble(b"\x7fELF", CUDA).split()
    assert words == ["['--print-code']", "b'\\x7fELF'"]
    assert not os.path.exists(path)


def test_another_is_tried_where_one_fails(tools):
    """cuobjdump disassembles what nvdisasm cannot, and where there is no nvdisasm."""
    tools("cuobjdump", "print('code', sys.argv[1])")
    assert disassemble(b"x", CUDA) == "code -sass\n"
    tools("nvdisasm", "sys.exit(1)")
    assert disassemble(b"x", CUDA) == "code -sass\n"


def test_what_the_user_set_for_triton_counts(tools, monkeypatch):
    """TRITON_NVDISASM_PATH names the program, as for Triton."""
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tools("my-tool", "print('mine')")))
    assert disassemble(b"x", CUDA) == "mine\n"


def test_binaries_for_amd_gpus_go_to_llvm(tools):
    """llvm-objdump is told for which chip a binary is."""
    tools("llvm-objdump", "print(*sys.argv[1:-1])")
    assert disassemble(b"x", HIP) == "--disassemble --triple=amdgcn-amd-amdhsa --mcpu=gfx942\n"


@pytest.mark.parametrize(
    ("target", "fix"),
    [(CUDA, "install triton"), (HIP, "install ROCm"), (Target("xpu", "1"), "xpu:1")],
)
def test_without_one_the_error_says_what_to_install(tools, target, fix):
    """A typed error with the target and the fix."""
    with pytest.raises(NotFound, match=fix) as caught:
        disassemble(b"x", target)
    assert caught.value.target == str(target)


def test_a_binary_that_cannot_be_read_is_an_error_in_one_line(tools):
    """Of what the program says, the line that names the error, without escapes and the name of our
    file.
    """
    tools(
        "nvdisasm",
        "print('warning', file=sys.stderr); sys.exit(f'fatal: {sys.argv[-1]} \\x1b[2J is"
        " none\\nframe')",
    )
    with pytest.raises(
        ToolchainMismatch,
        match=r"\(nvdisasm: fatal: the binary \\x1b\[2J is none\): install triton",
    ):
        disassemble(b"x", CUDA)
    tools("llvm-objdump", "pass")
    with pytest.raises(ToolchainMismatch, match="llvm-objdump: it printed nothing"):
        disassemble(b"x", HIP)

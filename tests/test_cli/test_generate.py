# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler generate`: a function of a module becomes text, and a bundle with the program."""

import json
import subprocess
import sys

import pytest

from bundler.format.bundle import Bundle

pytest.importorskip("torch")
pytest.importorskip("triton")

MODULE = """
import torch


def softmax(x):
    return torch.softmax(x, -1)


def product(a, b):
    return torch.relu(a @ b)


def example_inputs():
    return torch.zeros(4, 8), torch.zeros(8, 2)
"""


@pytest.fixture
def module(tmp_path):
    """A file with functions."""
    path = tmp_path / "generated_functions.py"
    path.write_text(MODULE)
    return path


def test_the_text_is_shown_and_what_is_called_is_named(cli, module):
    """`--show` needs no target; an operator without a kernel is told with the reason."""
    shown = cli("generate", f"{module}:softmax", "--input", "float32[16,32]", "--show")
    assert shown.exit_code == 0, shown.output
    assert "def triton_per_fused_amax_div_exp_sub_sum_0(in_ptr0, out_ptr0" in shown.output
    told = json.loads(cli("generate", f"{module}:product", "--show", "--json").stdout)
    assert [fallback["operator"] for fallback in told["fallbacks"]] == ["aten.mm.default"]
    assert len(told["kernels"]) == 1


@pytest.mark.slow
def test_a_bundle_has_kernels_and_program(cli, module, tmp_path):
    """One kernel for each target, and the plan."""
    output = tmp_path / "out.tbundle"
    made = cli(
        "generate", f"{module}:softmax", "--input", "float32[16,32]", "--target", "cuda:90", "--target", "hip:gfx942", "-o", output
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    with Bundle.load(output) as bundle:
        assert sorted(str(kernel.target) for kernel in bundle.kernels) == ["cuda:90", "hip:gfx942"]
        assert [entry.path for entry in bundle.opaque] == ["programs/program.program.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "--input", "float32(16)"], "expected a dtype of torch and sizes"),
        (["--target", "cuda:90"], "give --target and -o together"),
        ([], "nothing to do"),
    ],
)
def test_what_is_wrong_is_told(cli, module, words, message):
    """A description of an input that is none, and options that do not go together."""
    result = cli("generate", f"{module}:softmax", *words)
    assert result.exit_code != 0
    assert message in result.output


def test_without_torch_every_other_command_works_and_this_one_says_what_to_install(module):
    """The command line imports the generator, and with it sympy, only for `generate`."""
    program = (
        "import sys\n"
        "sys.modules.update({'torch': None, 'sympy': None})\n"
        "from bundler.cli import main\n"
        "sys.argv = ['triton-bundler', *sys.argv[1:]]\n"
        "main()\n"
    )

    def run(*words):
        return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)

    assert run("--help").returncode == 0
    refused = run("generate", f"{module}:softmax", "--input", "float32[16,32]", "--show")
    assert (refused.returncode, refused.stderr.startswith("error: generate needs torch")) == (1, True), refused.stderr

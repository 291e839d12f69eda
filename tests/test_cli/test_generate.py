# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler generate`: a function of a module becomes text, and a bundle with the program."""

import json
import os
import re
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


def fourier(a, b):
    return torch.fft.rfft(a @ b).abs()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x) + SHIFT


SHIFT = torch.ones(8)


def scaled(a):
    return a * 2


def scaled_inputs():
    return [torch.zeros(3)]


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


def test_templates_leave_no_operator_or_say_so(cli, module):
    """With all of them a product is a kernel; without, it is told that it could be."""
    words = ("generate", f"{module}:product", "--show", "--json")
    (called,) = json.loads(cli(*words, "--templates", "none").stdout)["fallbacks"]
    assert called["operator"] == "aten.mm.default"
    assert "templates='all'" in called["reason"]
    told = json.loads(cli(*words, "--templates", "all").stdout)
    assert not told["fallbacks"]
    assert not told["program"]["operators"]
    refused = cli("generate", f"{module}:fourier", "--show", "--templates", "all")
    assert refused.exit_code != 0
    assert "aten._fft_r2c.default" in refused.output
    assert cli(*words, "--templates", "some").exit_code != 0


@pytest.mark.parametrize("faster", ["kernel", "operator"])
def test_a_product_is_what_was_measured_to_be_faster(cli, module, monkeypatch, faster):
    """`where faster` asks for each product; one of which nobody knows is called."""
    from bundler.codegen.measured_templates import TemplateMeasurements

    words = ("generate", f"{module}:product", "--show", "--json", "--templates", "where faster")
    assert len(json.loads(cli(*words).stdout)["fallbacks"]) == 1
    monkeypatch.setattr(TemplateMeasurements, "chosen", lambda *_: faster)
    assert len(json.loads(cli(*words).stdout)["fallbacks"]) == (faster == "operator")


def test_what_a_program_needs_is_told(cli, module):
    """Inputs, constants, results, memory, what needs torch, and targets, as text and in JSON."""
    shown = cli("generate", f"{module}:product", "--show").stdout
    lines = dict(re.findall(r"^([a-z ]+?)  +(.*)$", shown, re.MULTILINE))
    assert lines["program"] == "product: 1 kernel in 1 launch"
    assert lines["inputs"] == "float32[4, 8], float32[8, 2]"
    assert lines["constants"] == "none"
    assert lines["results"] == "float32[4, 2]"
    assert lines["memory"] == "32 B at its peak, beside inputs, weights and constants"
    assert lines["needs torch"] == "aten.mm.default"
    assert lines["targets"] == "none yet"
    told = json.loads(cli("generate", f"{module}:product", "--show", "--json").stdout)["program"]
    assert [value["type"] for value in told["inputs"]] == ["float32[4, 8]", "float32[8, 2]"]
    assert (told["memory_bytes"], told["operators"]) == (32, ["aten.mm.default"])


def test_the_weights_of_a_module_are_told_and_compared(cli, module, tmp_path):
    """A class is made without arguments; a file is compared before anything is built."""
    words = ("generate", f"{module}:Net", "--input", "float32[4,8]", "--show")
    shown = cli(*words).stdout
    lines = dict(re.findall(r"^([a-z ]+?)  +(.*)$", shown, re.MULTILINE))
    assert lines["weights"] == "2 tensors of 64 B: norm.weight float32[8], norm.bias float32[8]"
    assert lines["constants"] == "constant2"
    told = json.loads(cli(*words, "--json").stdout)["program"]
    assert told["weights"] == {"norm.weight": "float32[8]", "norm.bias": "float32[8]"}
    assert (told["weight_bytes"], told["constants"]) == (64, ["constant2"])
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    found = {"norm.weight": torch.ones(8), "norm.bias": torch.ones(8, dtype=torch.bfloat16)}
    safetensors.save_file(found, tmp_path / "wrong.safetensors")
    wrong = cli(*words, "--weights", tmp_path / "wrong.safetensors")
    assert wrong.exit_code != 0
    assert "norm.bias: expected float32[8], got bfloat16[8]" in " ".join(wrong.output.split())
    found["norm.bias"] = torch.ones(8)
    safetensors.save_file(found, tmp_path / "right.safetensors")
    assert cli(*words, "--weights", tmp_path / "right.safetensors").exit_code == 0


@pytest.mark.slow
def test_inspect_and_report_say_what_a_program_needs(cli, cli_json, module, tmp_path):
    """Of a bundle they say the same as `generate` does, with the targets that it was built for."""
    output, page = tmp_path / "out.tbundle", tmp_path / "out.html"
    words = ("generate", f"{module}:product", "--target", "cuda:90", "-o", output)
    made = cli(*words).stdout
    shown = cli("inspect", output).stdout
    told = made[made.index("program  ") : made.index("wrote")]
    assert "targets      cuda:90" in told
    assert told in shown
    (program,) = cli_json("inspect", output)[1]["programs"]
    assert (program["name"], program["targets"]) == ("product", ["cuda:90"])
    assert cli("report", output, "-o", page).exit_code == 0
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert [one["operators"] for one in facts["programs"]] == [["aten.mm.default"]]


@pytest.mark.slow
def test_a_bundle_has_kernels_and_program(cli, module, tmp_path):
    """One kernel for each target, and the plan."""
    output = tmp_path / "out.tbundle"
    made = cli(
        "generate",
        f"{module}:softmax",
        "--input",
        "float32[16,32]",
        "--target",
        "cuda:90",
        "--target",
        "hip:gfx942",
        "-o",
        output,
    )
    assert made.exit_code == 0, made.output
    with Bundle.load(output) as bundle:
        assert sorted(str(kernel.target) for kernel in bundle.kernels) == ["cuda:90", "hip:gfx942"]
        assert [entry.path for entry in bundle.opaque] == ["programs/softmax.program.json"]


@pytest.mark.slow
def test_programs_are_never_lost(cli, module, tmp_path):
    """Two functions are two programs in a merge and behind a tag; two programs of one name are
    refused with status 1, and both stay.
    """
    paths = {}
    for name, sizes in (("softmax", "16,32"), ("product", "16,16"), ("again", "16,64")):
        paths[name] = tmp_path / f"{name}.tbundle"
        function, more = ("softmax", ()) if name == "again" else (name, ())
        inputs = [f"--input=float32[{sizes}]"] if function == "softmax" else []
        made = cli(
            "generate",
            f"{module}:{function}",
            *inputs,
            *more,
            "--target",
            "cuda:90",
            "-o",
            paths[name],
        )
        assert made.exit_code == 0, made.output
    both = tmp_path / "both.tbundle"
    assert cli("merge", paths["softmax"], paths["product"], "-o", both).exit_code == 0
    with Bundle.load(both) as bundle:
        programs = [entry.path for entry in bundle.opaque]
        assert programs == ["programs/product.program.json", "programs/softmax.program.json"]
    refused = cli("merge", both, paths["again"], "-o", tmp_path / "no.tbundle")
    assert (refused.exit_code, (tmp_path / "no.tbundle").exists()) == (1, False)
    for word in ("program 'softmax'", str(both), str(paths["again"]), "--name"):
        assert word in refused.stderr
    store = ("--store", f"file://{tmp_path}/store", "--tag", "lib")
    assert cli("push", both, *store).exit_code == 0
    refused = cli("push", paths["again"], *store)
    assert (refused.exit_code, "program 'softmax'" in refused.stderr) == (1, True)


def test_several_functions_are_programs_of_one_bundle(cli, module, tmp_path):
    """Each with inputs of its own, and with kernels for products where all are asked for."""
    path = tmp_path / "both.tbundle"
    asked = ("generate", f"{module}:product", f"{module}:scaled", "--templates", "all")
    made = cli(*asked, "--target", "cuda:90", "-o", path, "--json")
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)["programs"]
    assert [one["program"]["name"] for one in told] == ["product", "scaled"]
    assert [one["program"]["targets"] for one in told] == [["cuda:90"]] * 2
    assert [one["fallbacks"] for one in told] == [[], []]
    with Bundle.load(path) as bundle:
        assert bundle.programs == ("product", "scaled")
    refused = cli(*asked, "--show", "--name", "one")
    assert (refused.exit_code, "of one function" in refused.stderr) == (2, True)


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
        return subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True
        )

    assert run("--help").returncode == 0
    refused = run("generate", f"{module}:softmax", "--input", "float32[16,32]", "--show")
    assert (refused.returncode, refused.stderr.startswith("error: generate needs torch")) == (
        1,
        True,
    ), refused.stderr


def test_verify_says_what_was_compared_and_where_it_can_run(cli, interpreter, module, tmp_path):
    """In the interpreter the program is compared with eager torch; on a CPU without it the error
    names the fix.
    """
    arguments = (f"{module}:softmax", "--input", "float32[16,32]", "--verify", "--json")
    refused = cli("generate", *arguments)
    assert refused.exit_code == 1
    assert "set TRITON_INTERPRET=1" in refused.output
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = ("-m", "bundler", "generate", *arguments)
    done = interpreter.run(*command, environment=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    verified = json.loads(done.stdout)["verified"]
    assert verified == {"checked": ["output 0 (div)"], "unchecked": {}, "float64": True}


MISTAKES = {
    "a class": ("Model", ["float32[4]"], "Model is a class: expected a function or an instance"),
    "an input too few": ("two", ["float32[4]"], r"two\(x, y\): got 1 example inputs"),
    "sizes that do not fit": (
        "two",
        ["float32[4]", "float32[3]"],
        r"torch cannot trace .*two\.py:3",
    ),
    "an error of its own": (
        "bad",
        ["float32[4]"],
        r"AttributeError: .*'foo'; at .*two\.py:5: .*foo",
    ),
}


@pytest.mark.parametrize(("function", "inputs", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_the_user_is_one_message_with_their_line(
    interpreter, tmp_path, function, inputs, message
):
    """No frame of ours or of torch is printed, unless --debug asks for them."""
    pytest.importorskip("torch")
    module = tmp_path / "two.py"
    module.write_text(
        "class Model:\n    pass\ndef two(x, y): return x + y\ndef bad(x):\n    return x.foo(3)\n"
    )
    arguments = [f"{module}:{function}", *(part for text in inputs for part in ("--input", text))]
    command = ("-m", "bundler", "generate", *arguments, "--show")
    done = interpreter.run(*command, environment=os.environ, timeout=100)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

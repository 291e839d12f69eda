# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler tune import` and `export` of the config files of vLLM, SGLang and
flash-linear-attention, as those write and read them.
"""

import json

import pytest

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import Tuning, id_of
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.tuner_files import key_hash
from bundler.lifecycle.tuning_directory import with_tunings
from bundler.runtime import Config
from bundler.runtime.tuning.tuning_winners import named_of

# Of vLLM's and SGLang's wheels, shortened.
SMALL = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 4,
}
LARGE = {**SMALL, "BLOCK_SIZE_M": 64, "num_warps": 8, "waves_per_eu": 0, "num_ctas": 1}
TMA = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 32,
    "USE_TMA": True,
}
MOE = {
    "vllm-moe": {
        "E=8,N=14336,device_name=NVIDIA_H200.json": {
            "triton_version": "3.7.1",
            "1": SMALL,
            "64": LARGE,
            "1024": LARGE,
        },
        "E=8,N=7168,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json": {
            "16": SMALL
        },
    },
    "sglang-moe": {
        "configs/triton_3_7_1/E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128, 128]_down.json": {
            "1": SMALL,
            "8": TMA,
        },
        "configs/triton_3_8_0/E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json": {
            "2": LARGE
        },
        "configs/triton_3_8_0/E=16,N=512,device_name=NVIDIA_H200_down.json": {"4": SMALL},
    },
}
KEY = [64, True, None, 0.5, "torch.float32"]
FLA_CONFIG = {
    "kwargs": {"BD": 32},
    "num_warps": 2,
    "num_stages": 3,
    "num_ctas": 1,
    "maxnreg": None,
    "ir_override": None,
}
FLA = {
    "kernel_name": "chunk_fwd",
    "triton_version": "3.8.0",
    "autotune_entries": {key_hash(KEY): {"autotune_key": KEY, "config": FLA_CONFIG}},
    "default_config": {**FLA_CONFIG, "num_warps": 8},
}


@pytest.fixture
def folder(tmp_path):
    """Write JSON files below a directory, and return it."""

    def write(files, name="in"):
        for path, document in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(
                document if isinstance(document, str) else json.dumps(document)
            )
        return tmp_path / name

    return write


def read(folder):
    """Return every file below a directory as JSON."""
    return {
        path.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in folder.rglob("*.json")
    }


def recorded(path):
    """Return the records of a bundle."""
    with Bundle.load(path) as bundle:
        return bundle.tuning_records


@pytest.mark.parametrize("form", MOE)
def test_moe_files_come_back_as_they_were(cli, folder, tmp_path, form):
    """Every field, selector, folder and count of tokens of imported files is in the exported ones;
    the order is that of the tokens.
    """
    done = cli("tune", "import", folder(MOE[form]), "--format", form, "-o", tmp_path / "b.tbundle")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        cli(
            "tune", "export", tmp_path / "b.tbundle", "--format", form, "-o", tmp_path / "out"
        ).exit_code
        == 0
    )
    assert read(tmp_path / "out") == MOE[form]
    for path, document in MOE[form].items():
        assert list(json.loads((tmp_path / "out" / path).read_text())) == list(document)


def test_gpu_and_release_of_triton_are_in_the_record(cli, folder, tmp_path):
    """vLLM's file names the release inside, SGLang's by its folder; the GPU has the
    driver's name.
    """
    for form in MOE:
        cli(
            "tune",
            "import",
            folder(MOE[form], form),
            "--format",
            form,
            "-o",
            tmp_path / f"{form}.tbundle",
        )
    vllm, sglang = (recorded(tmp_path / f"{form}.tbundle") for form in MOE)
    assert {dict(r.parts)["device"] for r in vllm} == {"NVIDIA H200", "AMD Instinct MI300X"}
    assert {dict(r.parts)["toolchain"] for r in vllm} == {
        "triton 3.7.1",
        "triton of an unknown release",
    }
    assert {dict(r.parts)["toolchain"] for r in sglang} == {"triton 3.7.1", "triton 3.8.0"}
    assert dict(vllm[0].parts)["arguments"].startswith("E=8, N=")


def test_what_vllm_tuned_serves_sglang(cli, folder, tmp_path):
    """The spelling of block shapes and the place of the release are each project's own; the release
    is told where the file lacks it.
    """
    bundle = tmp_path / "b.tbundle"
    cli("tune", "import", folder(MOE["vllm-moe"]), "--format", "vllm-moe", "-o", bundle)
    shown = cli("tune", "export", bundle, "--format", "sglang-moe", "-o", tmp_path / "out")
    assert (
        shown.exit_code,
        "holds no release of Triton; tell it with --triton" in shown.stderr,
    ) == (0, True)
    name = "configs/triton_3_7_1/E=8,N=14336,device_name=NVIDIA_H200.json"
    assert list(read(tmp_path / "out")) == [name]
    cli(
        "tune",
        "import",
        folder({k: v for k, v in MOE["vllm-moe"].items() if "fp8" in k}, "amd"),
        "--format",
        "vllm-moe",
        "--triton",
        "3.7.1",
        "-o",
        bundle,
    )
    cli("tune", "export", bundle, "--format", "sglang-moe", "-o", tmp_path / "amd-out")
    assert list(read(tmp_path / "amd-out")) == [
        (
            "configs/triton_3_7_1/E=8,N=7168,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,"
            " 128].json"
        )
    ]


@pytest.fixture
def own(tmp_path):
    """Make a bundle of records as this package's tuner writes them, and return its path."""

    def save(*records):
        pairs = []
        for kernel, arguments, device, toolchain, config in records:
            parts = {
                "source": "ab",
                "arguments": arguments,
                "device": device,
                "toolchain": toolchain,
            }
            record = TuningRecord(kernel, tuple(parts.items()), named_of(config), "autotune")
            pairs.append((record, Tuning(id_of(record), ())))
        with_tunings(Bundle(Content(), Observed(), MemoryBlobs({})), pairs).save(
            tmp_path / "own.tbundle"
        )
        return tmp_path / "own.tbundle"

    return save


CONFIG = Config({"BLOCK_SIZE_M": 32, "GROUP_SIZE_M": 8}, num_warps=8, num_stages=2)
ARCH = "cuda:90, 132 multiprocessors, 232448 bytes shared"
TRITON = "triton 3.7.1+git0a1b, binary 0123456789abcdef, ptxas 12.9"


def test_records_of_our_tuner_become_moe_files(cli, own, tmp_path):
    """--key says what the values of the tuning key are; what follows them, as the types of tensors,
    does not count.
    """
    bundle = own(
        ("my_moe", "8, skip, 14336, 64, torch.float16", f"NVIDIA H200, {ARCH}", TRITON, CONFIG),
        ("my_moe", "8, skip, 14336, 128, torch.float16", f"NVIDIA H200, {ARCH}", TRITON, CONFIG),
    )
    done = cli(
        "tune", "export", bundle, "--format", "vllm-moe", "--key", "E,_,N,M", "-o", tmp_path / "out"
    )
    assert done.exit_code == 0
    fields = {"BLOCK_SIZE_M": 32, "GROUP_SIZE_M": 8, "num_warps": 8, "num_stages": 2, "num_ctas": 1}
    assert read(tmp_path / "out") == {
        "E=8,N=14336,device_name=NVIDIA_H200.json": {
            "triton_version": "3.7.1",
            "64": fields,
            "128": fields,
        }
    }


def test_records_of_our_tuner_become_fla_files_and_back(cli, own, tmp_path):
    """A tuning key as text gives the hash of the values that FLA computes; the GPU is told where
    the record lacks it.
    """
    bundle = own(
        (
            "chunk_fwd",
            "64, True, None, 0.5, torch.float32",
            ARCH,
            TRITON,
            Config({"BD": 32}, num_warps=2),
        )
    )
    refused = cli("tune", "export", bundle, "--format", "fla", "-o", tmp_path / "out")
    assert (refused.exit_code != 0, "tell it with --device" in refused.stderr) == (True, True)
    assert not (tmp_path / "out").exists()
    done = cli(
        "tune",
        "export",
        bundle,
        "--format",
        "fla",
        "--device",
        "NVIDIA H200",
        "-o",
        tmp_path / "out",
    )
    assert done.exit_code == 0
    (document,) = read(tmp_path / "out").values()
    assert document["autotune_entries"] == FLA["autotune_entries"]
    assert document["triton_version"] == "3.7.1"


def test_fla_files_come_back_as_they_were(cli, folder, tmp_path):
    """Key, config, default config and release of an imported file; the GPU is that of the folder
    configs/<GPU>/.
    """
    files = folder({"configs/NVIDIA_H200/chunk_fwd.json": FLA})
    done = cli("tune", "import", files, "--format", "fla", "-o", tmp_path / "b.tbundle")
    assert (done.exit_code, done.stderr) == (0, "")
    assert {dict(r.parts)["device"] for r in recorded(tmp_path / "b.tbundle")} == {"NVIDIA H200"}
    cli("tune", "export", tmp_path / "b.tbundle", "--format", "fla", "-o", tmp_path / "out")
    assert read(tmp_path / "out") == {"chunk_fwd.json": FLA}


def test_the_hash_of_a_key_is_the_one_that_fla_computes():
    """What `AutotuneKey.key_hash` of fla-core 0.6.0 says."""
    assert key_hash([64, "torch.float32"]) == "37e448b0284d1f596728adaa82dfc416"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("E=8,N=2,device_name=A.json", "{", "is no config file of a fused MoE kernel"),
        ("E=8,N=2,device_name=A.json", "[]", "it is no JSON object"),
        ("E=8,N=2,device_name=A.json", "{}", "it holds no config"),
        ("E=8,N=2,device_name=A.json", '{"x": {"A": 1}}', "M=x is no count of tokens"),
        ("E=8,N=2,device_name=A.json", '{"01": {"A": 1}}', "M=01 is no count of tokens"),
        ("E=8,N=2,device_name=A.json", '{"1": 5}', "holds no config"),
        ("E=8,N=2,device_name=A.json", '{"1": {"A": [1]}}', "A is [1], which no config has"),
        ("E=8,N=2,device_name=A.json", '{"1": {"num_warps": true}}', "num_warps is True"),
        ("E=8,N=2,device_name=A.json", '{"1": {"A": NaN}}', "NaN is no value of a config"),
        (
            "E=8,N=2,device_name=A.json",
            '{"1": {"A": 1}, "1": {"A": 2}}',
            "a name stands in it twice",
        ),
        (
            "E=8,N=2,device_name=A.json",
            '{"triton_version": 3, "1": {"A": 1}}',
            "triton_version is 3",
        ),
        (
            "E=8,N=2,device_name=A.json",
            '{"1": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "is no config file",
        ),
        (
            "E=8,N=2,device_name=A,backend=flydsl.json",
            '{"1": {"A": 1}}',
            "'backend=flydsl' selects nothing",
        ),
        ("winners.json", '{"1": {"A": 1}}', "expected a name like E=8,N=14336"),
    ],
)
def test_a_file_that_is_none_is_named_with_what_is_wrong(cli, folder, tmp_path, name, text, said):
    """A damaged or foreign file alone is a format error, and no bundle is written."""
    done = cli(
        "tune",
        "import",
        folder({name: text}) / name,
        "--format",
        "vllm-moe",
        "-o",
        tmp_path / "b.tbundle",
        "--json",
    )
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code != 0, error["code"], said in error["message"]) == (True, "format", True)
    assert not (tmp_path / "b.tbundle").exists()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "expected autotune_entries, or default_config"),
        (
            {"autotune_entries": {"00": {"autotune_key": [1], "config": FLA_CONFIG}}},
            "not the one that the name is the hash of",
        ),
        (
            {"autotune_entries": {key_hash([1]): {"autotune_key": [1], "config": {"kwargs": {}}}}},
            "has no kwargs, num_warps",
        ),
        ({"default_config": {**FLA_CONFIG, "num_warps": "4"}}, "num_warps is '4'"),
    ],
)
def test_an_fla_file_that_is_none_is_named_with_what_is_wrong(
    cli, folder, tmp_path, document, said
):
    """A damaged file alone is a format error."""
    path = folder({"configs/NVIDIA_H200/k.json": document}) / "configs" / "NVIDIA_H200" / "k.json"
    done = cli("tune", "import", path, "--format", "fla", "-o", tmp_path / "b.tbundle", "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], said in error["message"]) == ("format", True)


def test_a_file_of_a_directory_that_is_none_is_left_out_with_a_warning(cli, folder, tmp_path):
    """As SGLang's own directory has two whose GPU has no name: the others are imported."""
    files = {**MOE["vllm-moe"], "E=384,N=128,device_name=,dtype=int4_w4a16.json": {"1": SMALL}}
    done = cli(
        "tune", "import", folder(files), "--format", "vllm-moe", "-o", tmp_path / "b.tbundle"
    )
    assert (done.exit_code, "left out" in done.stderr, "device_name=," in done.stderr) == (
        0,
        True,
        True,
    )
    assert len(recorded(tmp_path / "b.tbundle")) == 4


def test_two_configs_for_one_place_are_refused(cli, folder, tmp_path):
    """vLLM's files have no place for a second release of Triton: the message says how to choose,
    and nothing is written.
    """
    name = "E=8,N=14336,device_name=NVIDIA_H200.json"
    other = {"triton_version": "3.8.0", "1": LARGE}
    for number, document in enumerate((MOE["vllm-moe"][name], other)):
        cli(
            "tune",
            "import",
            folder({name: document}, str(number)),
            "--format",
            "vllm-moe",
            "-o",
            tmp_path / f"{number}.tbundle",
        )
    cli("merge", tmp_path / "0.tbundle", tmp_path / "1.tbundle", "-o", tmp_path / "both.tbundle")
    done = cli(
        "tune",
        "export",
        tmp_path / "both.tbundle",
        "--format",
        "vllm-moe",
        "-o",
        tmp_path / "out",
        "--json",
    )
    error = json.loads(done.stdout)["error"]
    assert (error["code"], "choose with --kernel, --device or --triton" in error["message"]) == (
        "config",
        True,
    )
    assert not (tmp_path / "out").exists()
    assert (
        cli(
            "tune",
            "export",
            tmp_path / "both.tbundle",
            "--format",
            "vllm-moe",
            "--triton",
            "3.8.0",
            "-o",
            tmp_path / "out",
        ).exit_code
        == 0
    )
    assert read(tmp_path / "out") == {name: other}


@pytest.mark.parametrize("device", ["../up", "a/b", ".hidden", "a\nb"])
def test_no_name_in_a_record_leads_out_of_the_directory(cli, own, tmp_path, device):
    """The GPU's name and the kernel's become parts of file names only where they can."""
    bundle = own(("fused_moe_kernel", "E=8, N=2, M=1", device, TRITON, CONFIG))
    done = cli("tune", "export", bundle, "--format", "vllm-moe", "-o", tmp_path / "out", "--json")
    assert "cannot be part of a file's name" in json.loads(done.stdout)["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_options_of_formats_are_for_formats_alone(cli, own, tmp_path):
    """--device without --format, and --as beside --format, are mistakes of the command line."""
    bundle = own(("k", "1", ARCH, TRITON, CONFIG))
    for words in (["--device", "A"], ["--format", "fla", "--as", "triton"]):
        done = cli("tune", "export", bundle, "-o", tmp_path / "out", *words)
        assert (done.exit_code, "--format" in done.stderr) == (2, True)

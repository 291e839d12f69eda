# SPDX-License-Identifier: Apache-2.0
"""Builds in parts by deploy/: the Job of Kubernetes has the fields of its kind, and what it and the
Slurm script run makes one bundle.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bundler
from bundler.format.bundle import Bundle

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
MANIFEST, SCRIPT = (
    ROOT / "deploy" / "kubernetes" / "build.yaml",
    ROOT / "deploy" / "slurm" / "build-array.sbatch",
)
SPEC = """
targets = ["cuda:90", "hip:gfx942"]
[[kernel]]
module = "kernels.py"
function = "gelu_kernel"
signature = { x_ptr = "*fp32:16", out_ptr = "*fp32:16", n = ["i32:16", "i32"] }
constants = { BLOCK = [512, 1024] }
"""
SHARDS = 3
# What Slurm would do with a task of the array: it runs the command on the node that the task got.
SRUN = '#!/bin/sh\necho "srun $*" >>"$SRUN_LOG"\nexec "$@"\n'

pytestmark = pytest.mark.slow


def documents():
    """Return the objects of the manifest."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


@pytest.fixture
def farm(tmp_path):
    """A directory with a build file, kernels, and programs on the path; returns how to run a
    command there.
    """
    examples = Path(bundler.__file__).parent / "cli" / "demo_kernels.py"
    (tmp_path / "kernels.py").write_bytes(examples.read_bytes())
    (tmp_path / "build.toml").write_text(SPEC)
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": SRUN,
        "triton-bundler": f'#!/bin/sh\nexec {sys.executable} -W ignore -m bundler "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*command, **variables):
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("TRITON_", "SLURM_"))}
        clean |= {
            "PATH": f"{tmp_path}/bin:{clean['PATH']}",
            "SRUN_LOG": str(tmp_path / "log"),
        } | variables
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.path = tmp_path
    return run


def fields(models, kind, value, where):
    """Compare an object with the fields that its kind has, as Kubernetes' own description names and
    types them.
    """
    if kind.lower().startswith("list["):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            fields(models, kind[5:-1], item, f"{where}[{number}]")
    elif kind.lower().startswith("dict"):
        assert isinstance(value, dict), where
        for name, item in value.items():
            fields(models, kind[5:-1].partition(", ")[2], item, f"{where}.{name}")
    elif kind in {"str", "int", "bool", "float", "object"}:
        assert kind == "object" or type(value).__name__ == kind, f"{where}: {value!r} is no {kind}"
    else:
        model = getattr(models, kind)
        names = {there: here for here, there in model.attribute_map.items()}
        assert set(value) <= set(names), f"{where}: unknown fields {set(value) - set(names)}"
        for name, item in value.items():
            fields(models, model.openapi_types[names[name]], item, f"{where}.{name}")
        # The constructor refuses what lacks a required field.
        model(**{names[name]: item for name, item in value.items()})


def test_the_manifest_has_the_fields_of_its_kinds():
    """A misspelled or misplaced field is one that no kind has; types and required fields are those
    of the kind.
    """
    client = pytest.importorskip(
        "kubernetes.client", reason="kubernetes not installed: pip install kubernetes"
    )
    build, collect = documents()
    for document in (build, collect):
        assert (document["apiVersion"], document["kind"]) == ("batch/v1", "Job")
        fields(client.models, "V1Job", document, document["metadata"]["name"])
    assert build["spec"]["completionMode"] == "Indexed"
    (container,) = build["spec"]["template"]["spec"]["containers"]
    shards = {entry["name"]: entry.get("value") for entry in container["env"]}["SHARDS"]
    assert int(shards) == build["spec"]["completions"]
    # Only with this policy may a Job retry single indexes.
    assert build["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_pods_of_an_indexed_job_build_their_parts_and_one_collects(farm):
    """What the pods run, with the variables that Kubernetes gives them; one of the pods
    never ran.
    """
    commands = []
    for document in documents():
        (container,) = document["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
        commands.append(
            [
                word.replace("/kernels/build.toml", "build.toml")
                .replace("/tmp/", "./")
                .replace("--jobs 8", "--jobs 1")
                for word in words
            ]
        )
    store = {"STORE": str(farm.path / "store"), "TAG": "fleet/main", "SHARDS": str(SHARDS)}
    for index in (0, 2):
        assert f"shard {index + 1}/{SHARDS}: " in farm(
            *commands[0], **store, JOB_COMPLETION_INDEX=str(index)
        )
    assert "compiled now: " in farm(*commands[1], **store)
    check(farm)


def test_the_slurm_script_builds_in_an_array_and_collects(farm):
    """With a stand-in for srun, and with the variables that Slurm gives the tasks of
    `--array=5-7`.
    """
    store = farm.path / "store"
    array = {
        "SLURM_ARRAY_TASK_MIN": "5",
        "SLURM_ARRAY_TASK_COUNT": str(SHARDS),
        "SLURM_CPUS_PER_TASK": "1",
    }
    for number in range(5, 8):
        farm("bash", SCRIPT, "build.toml", store, **array, SLURM_ARRAY_TASK_ID=str(number))
    assert "nothing is missing" in farm(
        "bash", SCRIPT, "build.toml", store, "fleet.tbundle", SLURM_CPUS_PER_TASK="1"
    )
    started = (farm.path / "log").read_text().splitlines()
    assert [line.rpartition("--shard ")[2].split()[0] for line in started[:-1]] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    assert "--collect" in started[-1]
    check(farm)


def check(farm):
    """The bundle is what one machine would have built."""
    whole = json.loads(
        farm(
            "triton-bundler",
            "build",
            "--spec",
            "build.toml",
            "-o",
            "whole.tbundle",
            "--jobs",
            "1",
            "--json",
        )
    )
    with Bundle.load(farm.path / "fleet.tbundle") as fleet:
        assert fleet.digest == whole["digest"]

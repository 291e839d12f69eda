# SPDX-License-Identifier: Apache-2.0
"""The command `oci`, and images where commands take a bundle."""

import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"


@pytest.fixture
def bundle(tmp_path):
    """A bundle file."""
    return shutil.copy(GOLDEN, tmp_path / "model.tbundle")


@pytest.mark.parametrize(
    "layout", ["bundle", "mcv", pytest.param("mcv-docker", marks=pytest.mark.slow)]
)
def test_export_and_import(layout, cli, bundle, tmp_path):
    """A bundle goes to a directory of images and back."""
    images, out = tmp_path / "images", tmp_path / "out.tbundle"
    done = cli("oci", "export", bundle, images, "--tag", "demo", "--layout", layout)
    assert done.exit_code == 0, done.output
    assert f"oci-dir:{images}:demo is sha256:" in done.output
    done = cli("oci", "import", images, "--tag", "demo", "-o", out, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["layout"], report["kernels"], report["path"]) == (layout, 4, str(out))
    assert cli("oci", "tags", f"oci-dir:{images}").output.splitlines()[0] == "demo"


def test_commands_take_an_image_for_a_bundle(cli, bundle, tmp_path):
    """What reads a bundle reads one in a registry, a directory of images or a model's folder."""
    cli("oci", "export", bundle, tmp_path / "images", "--tag", "demo")
    cli("oci", "export", bundle, tmp_path / "model", "--tag", "llama3", "--layout", "hf")
    for source in (f"oci-dir:{tmp_path}/images:demo", f"hf+file://{tmp_path}/model#llama3"):
        for words in (
            ("inspect", source),
            ("verify", source),
            ("diff", source, bundle),
            ("merge", source, bundle, "-o", tmp_path / "merged.tbundle"),
            ("push", source, "--store", tmp_path / "store", "--tag", "t"),
            ("restore", source, "--only", "all"),
            ("oci", "export", source, tmp_path / "again"),
        ):
            done = cli(*words)
            assert done.exit_code == 0, (words, done.output)
    assert len(list((tmp_path / "triton-cache").iterdir())) >= 4


def test_errors_are_one_line_without_secrets(cli, bundle, tmp_path):
    """What is wrong is told as by any command."""
    done = cli("oci", "push", bundle, "oci://alice:hush@registry.example/team/kernels:x")
    assert (done.exit_code, "hush" in done.output, "docker login" in done.output) == (
        1,
        False,
        True,
    )
    done = cli("oci", "pull", f"oci-dir:{tmp_path}/nothing:x", "-o", tmp_path / "x.tbundle")
    assert done.exit_code == 1
    assert "no directory of images" in done.output
    assert cli("restore", "oci://registry.example/Team:x").exit_code == 1
    assert (
        cli("oci", "export", bundle, tmp_path / "m", "--layout", "hf", "--key", "k.pem").exit_code
        == 2
    )


def test_a_registry_is_no_store(cli, bundle):
    """The message says which command is meant."""
    done = cli("push", bundle, "--store", "oci://registry.example/team/kernels", "--tag", "x")
    assert done.exit_code == 1
    assert "oci push" in done.output

# SPDX-License-Identifier: Apache-2.0
"""The commands pack, restore, inspect and explain on the cache of a server."""

import json
import shutil

import pytest

import bundler

PLACE = "torch_compile_cache/0123456789"
FACTORS = {
    "env": {"VLLM_USE_X": False},
    "config_hash": "c0",
    "code_hash": "c1",
    "compiler_hash": "c2",
}


@pytest.fixture
def root(compiled, tmp_path, monkeypatch):
    """Where vLLM's cache is here: one model of two ranks, with one kernel for both."""
    root = tmp_path / "vllm-root"
    (key,) = compiled.keys_of("gelu_kernel")
    for rank in ("rank_0_0", "rank_1_0"):
        shutil.copytree(compiled.cache / key, root / PLACE / rank / "triton_cache" / key)
        place = root / PLACE / rank / "backbone"
        place.mkdir()
        (place / "cache_key_factors.json").write_text(json.dumps(FACTORS))
        (root / PLACE / rank / "model").write_bytes(b"pickled")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
    return root


@pytest.fixture
def packed(root, cli, tmp_path):
    """That root as a bundle, packed by the command."""
    output = tmp_path / "server.tbundle"
    result = cli("pack", "vllm", "-o", output, "--fact", "gpu=NVIDIA H200", "--json")
    assert result.exit_code == 0, result.output
    return output


def test_pack_vllm_says_what_it_took(root, cli, tmp_path):
    """Kernels in the table, a line for each tree with ranks and what it was made for."""
    result = cli(
        "pack", "vllm", "--root", root, "-o", tmp_path / "b.tbundle", "--fact", "gpu=NVIDIA H200"
    )
    assert result.exit_code == 0
    assert f"tree vllm:{PLACE}: 4 files" in result.output
    assert "2 ranks; made for gpu NVIDIA H200" in result.output
    assert "opaque" not in result.output
    told = json.loads(cli("pack", "vllm", "-o", tmp_path / "c.tbundle", "--json").output)
    assert told["counts"]["kernels"] == 1
    assert [(tree["place"], tree["ranks"], tree["files"]) for tree in told["trees"]] == [
        (PLACE, ["rank_0_0", "rank_1_0"], 4)
    ]


def test_restore_takes_a_root_and_facts(packed, cli, tmp_path):
    """With trust, the files are where the root is; for other ranks they are not, the reason is
    printed, and the kernels are.
    """
    copy = tmp_path / "copy"
    words = ("restore", packed, "--trust", "code", "--only", "usable", "--fact", "ranks=2")
    assert cli(*words, "--root", f"vllm={copy}", "--fact", "gpu=NVIDIA H200").exit_code == 0
    assert (copy / PLACE / "rank_1_0" / "model").read_bytes() == b"pickled"
    refused = cli(*words, "--root", f"vllm={tmp_path / 'other'}", "--fact", "gpu=NVIDIA H100")
    assert "gpu: made for NVIDIA H200, here NVIDIA H100" in refused.output
    assert not (tmp_path / "other" / PLACE / "rank_1_0" / "model").exists()


def test_a_restore_of_nothing_is_a_problem(root, cli, tmp_path):
    """Exit status 1 where all trees were refused and there is no kernel."""
    for rank in ("rank_0_0", "rank_1_0"):
        shutil.rmtree(root / PLACE / rank / "triton_cache")
    cli("pack", "vllm", "-o", tmp_path / "b.tbundle")
    assert (
        cli("restore", tmp_path / "b.tbundle", "--root", f"vllm={tmp_path / 'copy'}").exit_code == 1
    )
    assert (
        cli(
            "restore",
            tmp_path / "b.tbundle",
            "--trust",
            "code",
            "--root",
            f"vllm={tmp_path / 'copy'}",
        ).exit_code
        == 0
    )


def test_check_needs_no_write(packed, cli, tmp_path):
    """--check with a root says what is missing there."""
    words = (
        "restore",
        packed,
        "--check",
        "--trust",
        "code",
        "--only",
        "all",
        "--root",
        f"vllm={tmp_path / 'copy'}",
    )
    told = json.loads(cli(*words, "--json").output)
    assert f"vllm:{PLACE}/rank_0_0/model" in dict(told["missing"])
    assert not (tmp_path / "copy").exists()


def test_explain_tree_beside_this_machine_and_beside_another(packed, root, cli, tmp_path):
    """The part of the fingerprint, then the factor of vLLM's hash, is named."""
    result = cli("explain", "--tree", packed, "--fact", "gpu=NVIDIA H100")
    assert result.exit_code == 0
    assert "gpu is NVIDIA H100 here, NVIDIA H200 there" in result.output
    other = tmp_path / "other" / "torch_compile_cache" / "9876543210" / "rank_0_0" / "backbone"
    other.mkdir(parents=True)
    (other / "cache_key_factors.json").write_text(json.dumps({**FACTORS, "config_hash": "c9"}))
    result = cli("explain", "--tree", packed, "--tree", f"vllm={tmp_path / 'other'}", "--json")
    (one,) = json.loads(result.output)["trees"]
    assert one["factors"] == [["backbone config_hash", "c0", "c9"]]
    assert "config_hash is c9 here, c0 there" in one["sentence"]


def test_a_users_family_of_a_file(cli, tmp_path):
    """--family declares one beside those that we know, for pack and for restore."""
    declared = tmp_path / "families.toml"
    declared.write_text(
        f'[families.mine]\nroot = "{tmp_path}/mine"\nfingerprint = []\ntrust = "kernels"\n'
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "table.json").write_text("{}")
    assert cli("pack", "mine", "-o", tmp_path / "b.tbundle", "--family", declared).exit_code == 0
    restored = cli(
        "restore",
        tmp_path / "b.tbundle",
        "--family",
        declared,
        "--root",
        f"mine={tmp_path / 'copy'}",
    )
    assert restored.exit_code == 0, restored.output
    assert (tmp_path / "copy" / "table.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("pack", "vllm", "--root", "nowhere", "-o", "b.tbundle"), 1, "nowhere"),
        (
            ("pack", "directory", "--root", "x", "-o", "b.tbundle"),
            2,
            "--root and --fact are for families",
        ),
        (("pack", "vllm", "--fact", "gpu", "-o", "b.tbundle"), 2, "expected NAME=VALUE"),
        (("pack", "vllm", "--family", "nowhere.toml", "-o", "b.tbundle"), 1, "nowhere.toml"),
        (("explain", "--tree", "nowhere.tbundle"), 1, "nowhere.tbundle"),
        (("explain", "--tree", "a", "--last"), 2, "a question of its own"),
        (("explain", "--tree", "a", "--tree", "b", "--tree", "c"), 2, "a question of its own"),
        (("explain", "--tree", "unknown=x"), 1, "no family 'unknown' is declared"),
        (("restore", "b.tbundle", "--root", "x"), 2, "expected NAME=VALUE"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(cli, tmp_path, monkeypatch, words, status, said):
    """A typed error or a usage error, never a traceback."""
    monkeypatch.chdir(tmp_path)
    result = cli(*words)
    assert result.exit_code == status
    assert said in result.output


def test_a_directory_of_a_familys_name_is_written_with_its_path(
    compiled, cli, tmp_path, monkeypatch
):
    """`./vllm` is a directory, `vllm` the family."""
    shutil.copytree(compiled.cache, tmp_path / "vllm")
    monkeypatch.chdir(tmp_path)
    assert cli("pack", "./vllm", "-o", "b.tbundle").exit_code == 0
    with bundler.Bundle.load("b.tbundle") as bundle:
        assert bundle.opaque == ()
        assert len(bundle.kernels) == len(compiled.keys)


def test_inspect_shows_trees(packed, cli):
    """What a bundle says of a server's cache is a line for each tree, and an object in JSON."""
    assert f"tree vllm:{PLACE}: 4 files" in cli("inspect", packed).output
    (tree,) = json.loads(cli("inspect", packed, "--json").output)["trees"]
    assert tree["fingerprint"]["gpu"] == "NVIDIA H200"


def test_a_servers_cache_travels_through_a_store(packed, cli, tmp_path):
    """Pushed under a tag, it is restored from there by another machine, trees and kernels."""
    store = tmp_path / "store"
    assert cli("push", packed, "--store", store, "--tag", "llama3/h200").exit_code == 0
    words = (
        "restore",
        "--tag",
        "llama3/h200",
        "--store",
        store,
        "--trust",
        "code",
        "--only",
        "all",
    )
    assert cli(*words, "--root", f"vllm={tmp_path / 'copy'}", "--fact", "ranks=2").exit_code == 0
    assert (tmp_path / "copy" / PLACE / "rank_1_0" / "model").read_bytes() == b"pickled"
    assert len(list((tmp_path / "copy").rglob("*.cubin"))) == 2

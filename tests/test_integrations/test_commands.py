# SPDX-License-Identifier: Apache-2.0
"""What the command line says of a process that went through the cache manager."""

import json
import os
import re
import subprocess
import sys

import json_schemas
import plugged
import pytest
from click.testing import CliRunner


@pytest.fixture
def command(monkeypatch):
    """Return a function that runs triton-bundler in this process, and returns what it printed."""
    from bundler.cli.app import app

    def command(*words, env, status=0):
        for name in list(os.environ):
            monkeypatch.delenv(name) if name.startswith("TRITON_") else None
        result = CliRunner().invoke(app, [str(word) for word in words], env=env)
        assert result.exit_code == status, result.output
        json_schemas.check_printed(words, result.stdout)
        return result.stdout

    return command


@pytest.mark.slow
def test_explain_and_doctor_after_a_run(command, store_url, tmp_path):
    """explain says why the latest run compiled, in text and JSON; doctor that store and manager
    work; run records through it.
    """
    settings = {
        "TRITON_CACHE_MANAGER": plugged.MANAGER,
        "TRITON_BUNDLER_STORE": store_url,
        "TRITON_BUNDLER_LOCAL": str(tmp_path / "local"),
    }
    bundle = tmp_path / "run.tbundle"
    program = [
        sys.executable,
        "-P",
        "-c",
        plugged.PRELUDE + "compile_one('softmax')",
        str(plugged.KERNELS),
    ]
    line = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-m",
        "bundler",
        "run",
        "-o",
        str(bundle),
        "--",
        *program,
    ]
    env = plugged.environment(store_url, tmp_path / "cache", **settings)
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=plugged.PATIENCE_S)
    assert (done.returncode, bundle.exists()) == (0, True), done.stderr
    assert "softmax_kernel: never recorded" in command("explain", "--last", env=settings)
    who = r"process \d+, started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: "
    assert re.match(who + "0 hits, 1 compile\n", command("explain", "--last", env=settings))
    assert "and this one is there now" in command("explain", "--last", env=settings)
    (row,) = json.loads(command("explain", "--name", "soft*", "--json", env=settings))["kernels"]
    assert (row["name"], row["status"], row["there_now"]) == (
        "softmax_kernel",
        "never recorded",
        True,
    )
    assert f" by process {row['pid']}\n" in command("explain", row["key"], env=settings)
    here = {"TRITON_BUNDLER_LOCAL": settings["TRITON_BUNDLER_LOCAL"]}
    (same,) = json.loads(
        command("explain", row["key"][:9], "--store", store_url, "--json", env=here)
    )["kernels"]
    assert same == row
    command("explain", "--last", "--name", "x", env=settings, status=2)
    # Without a store it is compared with Triton's directory, which is empty here.
    empty = here | {"TRITON_CACHE_DIR": str(tmp_path / "empty")}
    (alone,) = json.loads(command("explain", "--last", "--json", env=empty))["kernels"]
    assert (alone["key"], alone["there_now"]) == (row["key"], False)
    # A run that finds everything is the latest then, and nobody's kernels are shown for its own.
    again = subprocess.run(
        program, capture_output=True, text=True, env=env, timeout=plugged.PATIENCE_S
    )
    assert again.returncode == 0, again.stderr
    said = command("explain", "--last", env=settings)
    assert re.match(who + "1 hit, nothing was compiled\n", said)
    assert "softmax" not in said
    latest = json.loads(command("explain", "--last", "--json", env=settings))
    assert (latest["kernels"], latest["run"]["hits"], latest["run"]["compiles"]) == ([], 1, 0)
    assert latest["run"]["pid"] != row["pid"]
    checks = json.loads(command("doctor", "--json", env=settings))["checks"]
    found = {check["what"]: (check["status"], check["value"]) for check in checks}
    assert found["cache manager"][0] == "ok"
    assert found["store"] == ("ok", f"{store_url} answers")


def test_doctor_finds_what_would_make_triton_fail(monkeypatch, tmp_path):
    """A manager that children cannot import is a problem; so are a wrong setting and a silent
    store.
    """
    from bundler.cli import doctor

    monkeypatch.setenv("TRITON_CACHE_MANAGER", plugged.MANAGER)
    monkeypatch.setattr(doctor, "_IMPORT", "raise ModuleNotFoundError('No module named bundler')")
    monkeypatch.setenv("TRITON_BUNDLER_STORE", "redis://127.0.0.1:1")
    (manager, store) = doctor.plug_checks()
    assert (manager[0], store[0]) == ("problem", "problem")
    assert "No module named bundler" in manager[2]
    monkeypatch.setenv("TRITON_BUNDLER_MODE", "both")
    (_, (status, what, value, *_)) = doctor.plug_checks()
    assert (status, what) == ("problem", "settings")
    assert "TRITON_BUNDLER_MODE" in value
    monkeypatch.setenv("TRITON_BUNDLER_MODE", "read")
    monkeypatch.setenv("TRITON_BUNDLER_STORE", f"file://{tmp_path}/store")
    monkeypatch.delenv("TRITON_CACHE_MANAGER")
    (manager, store) = doctor.plug_checks()
    assert (manager[:2], store[0]) == (("warning", "cache manager"), "ok")
    assert os.listdir(tmp_path) == []


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("manager", "why", "fix"),
    [
        (
            "bundler.integrations.triton:BundlerCacheManger",
            "has no attribute 'BundlerCacheManger'",
            f"did you mean {plugged.MANAGER}?",
        ),
        (
            "bundlr.integrations.triton:BundlerCacheManager",
            "No module named 'bundlr'",
            f"did you mean {plugged.MANAGER}?",
        ),
        (
            "bundler.integrations.triton",
            "not of the form module:Class",
            f"did you mean {plugged.MANAGER}?",
        ),
        (
            "json:JSONDecoder",
            "it is not a CacheManager",
            "correct it, or unset TRITON_CACHE_MANAGER: Triton fails with it",
        ),
    ],
)
def test_doctor_imports_the_class_that_is_named(monkeypatch, manager, why, fix):
    """A manager that Triton could not use is a problem, with the import's own words and what was
    meant; Triton's own class is fine.
    """
    from bundler.cli import doctor

    monkeypatch.setenv("TRITON_CACHE_MANAGER", manager)
    ((status, what, value, said, _),) = doctor.plug_checks()
    assert (status, what, said) == ("problem", "cache manager", fix)
    assert manager in value
    assert why in value


@pytest.mark.toolchain
def test_doctor_takes_another_manager(monkeypatch):
    """A manager of somebody else's that Triton can use is fine."""
    from bundler.cli import doctor

    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:FileCacheManager")
    ((status, _, value, *_),) = doctor.plug_checks()
    assert (status, value) == (
        "ok",
        "triton.runtime.cache:FileCacheManager, found by child processes",
    )


def test_doctor_names_unknown_variables(monkeypatch):
    """A variable that nobody reads is a problem, with the right one that is nearest; those that we
    set ourselves are known.
    """
    from bundler.cli import doctor

    monkeypatch.setenv("TRITON_BUNDLER_STROE", "file:///a")
    monkeypatch.setenv("TRITON_BUNDLER_XQ", "1")
    monkeypatch.setenv("TRITON_BUNDLER_INNER", "a:B")
    found = list(doctor.plug_checks())
    assert [(status, value.split()[0]) for status, _, value, *_ in found] == [
        ("problem", "TRITON_BUNDLER_STROE"),
        ("problem", "TRITON_BUNDLER_XQ"),
    ]
    assert found[0][3] == "did you mean TRITON_BUNDLER_STORE?"
    assert found[1][3].endswith("/docs/api.md")
    assert "TRITON_BUNDLER_STROE" not in str([finding.value for finding in doctor._settings()])


def test_doctor_warns_of_a_distribution_called_bundler(monkeypatch):
    """Another distribution that brings a package of our name is a problem; ours alone is none."""
    from bundler.cli import doctor

    monkeypatch.setattr(
        "importlib.metadata.packages_distributions", lambda: {"bundler": ["triton-bundler"]}
    )
    assert [finding.status for finding in doctor._package_name()] == ["ok"]
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions",
        lambda: {"bundler": ["bundler", "triton-bundler"]},
    )
    (finding,) = doctor._package_name()
    assert (finding.status, finding.fix) == (
        "problem",
        "pip uninstall bundler, then install triton-bundler again",
    )


@pytest.mark.slow
def test_a_compile_that_fails_is_told_of_the_latest_run(command, store_url, tmp_path):
    """What was not found and not compiled either left no note of a compile."""
    settings = {
        "TRITON_CACHE_MANAGER": plugged.MANAGER,
        "TRITON_BUNDLER_STORE": store_url,
        "TRITON_BUNDLER_LOCAL": str(tmp_path / "local"),
    }
    code = plugged.PRELUDE + (
        "import triton.compiler.compiler as compiler\n"
        "def failing(*_, **__): raise RuntimeError('no assembler')\n"
        "compiler.ASTSource.make_ir = failing\n"
        "compile_one('softmax')"
    )
    program = [sys.executable, "-P", "-c", code, str(plugged.KERNELS)]
    env = plugged.environment(store_url, tmp_path / "cache", **settings)
    done = subprocess.run(
        program, capture_output=True, text=True, env=env, timeout=plugged.PATIENCE_S
    )
    assert "no assembler" in done.stderr
    said = command("explain", "--last", env=settings)
    assert re.search(r": 0 hits, nothing was compiled; 1 kernel not found, and not compiled", said)
    told = json.loads(command("explain", "--last", "--json", env=settings))["run"]
    assert (told["hits"], told["compiles"], told["failed"]) == (0, 0, 1)

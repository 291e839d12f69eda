# SPDX-License-Identifier: Apache-2.0
"""What the command line says of a process that went through the cache manager."""

import importlib.util
import json
import os
import subprocess
import sys

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
        return result.stdout

    return command


def test_explain_and_doctor_after_a_run(command, store_url, tmp_path):
    """explain says why the latest run compiled, in text and JSON; doctor that store and manager work; run records through it."""
    settings = {
        "TRITON_CACHE_MANAGER": plugged.MANAGER, "TRITON_BUNDLER_STORE": store_url,
        "TRITON_BUNDLER_LOCAL": str(tmp_path / "local"),
    }  # fmt: skip
    bundle = tmp_path / "run.tbundle"
    program = [sys.executable, "-P", "-c", plugged.PRELUDE + "compile_one('softmax')", str(plugged.KERNELS)]
    line = [sys.executable, "-P", "-W", "ignore", "-m", "bundler", "run", "-o", str(bundle), "--", *program]
    env = plugged.environment(store_url, tmp_path / "cache", **settings)
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=plugged.PATIENCE_S)
    assert (done.returncode, bundle.exists()) == (0, True), done.stderr
    assert "softmax_kernel: never recorded" in command("explain", "--last", env=settings)
    if importlib.util.find_spec("torch") is not None:
        assert "hold $CXX (here c++-9)" in command("explain", "--last", env=settings | {"CXX": "c++-9"})
    (row,) = json.loads(command("explain", "--name", "soft*", "--json", env=settings))["kernels"]
    assert (row["name"], row["status"], row["there_now"]) == ("softmax_kernel", "never recorded", True)
    here = {"TRITON_BUNDLER_LOCAL": settings["TRITON_BUNDLER_LOCAL"]}
    (same,) = json.loads(command("explain", row["key"][:9], "--store", store_url, "--json", env=here))["kernels"]
    assert same == row
    command("explain", "--last", "--name", "x", env=settings, status=2)
    told = json.loads(command("explain", "--last", "--json", env=here, status=1))
    assert "no store to compare with" in told["error"]["message"]
    checks = json.loads(command("doctor", "--json", env=settings))["checks"]
    found = {check["what"]: (check["status"], check["value"]) for check in checks}
    assert found["cache manager"][0] == "ok"
    assert found["store"] == ("ok", f"{store_url} answers")


def test_doctor_finds_what_would_make_triton_fail(monkeypatch, tmp_path):
    """A manager that children cannot import is a problem; so are a wrong setting and a silent store."""
    from bundler.cli import plug_checks

    monkeypatch.setenv("TRITON_CACHE_MANAGER", plugged.MANAGER)
    monkeypatch.setattr(plug_checks, "_IMPORT", "raise ModuleNotFoundError('No module named bundler')")
    monkeypatch.setenv("TRITON_BUNDLER_STORE", "redis://127.0.0.1:1")
    (manager, store) = plug_checks.plug_checks()
    assert (manager[0], store[0]) == ("problem", "problem")
    assert "No module named bundler" in manager[2]
    monkeypatch.setenv("TRITON_BUNDLER_MODE", "both")
    ((status, what, value, _),) = plug_checks.plug_checks()
    assert (status, what) == ("problem", "settings")
    assert "TRITON_BUNDLER_MODE" in value
    monkeypatch.setenv("TRITON_BUNDLER_MODE", "read")
    monkeypatch.setenv("TRITON_BUNDLER_STORE", f"file://{tmp_path}/store")
    monkeypatch.delenv("TRITON_CACHE_MANAGER")
    (manager, store) = plug_checks.plug_checks()
    assert (manager[:2], store[0]) == (("warning", "cache manager"), "ok")
    assert os.listdir(tmp_path) == []

# SPDX-License-Identifier: Apache-2.0
"""`doctor` says what is there, what is missing and what is broken."""

import os
import shutil

import pytest

from bundler.cli import doctor_checks

pytestmark = pytest.mark.toolchain


@pytest.fixture
def found(cli_json):
    """Run the doctor and return (status, name -> finding)."""

    def call():
        status, told = cli_json("doctor")
        assert set(told) >= {"ok", "problems", "checks"}
        assert all(set(check) == {"status", "what", "value", "fix"} for check in told["checks"])
        return status, {check["what"]: check for check in told["checks"]}

    return call


def test_doctor_of_a_sound_machine(cli):
    """Doctor prints a line for each thing it looked at, and its verdict, and exits with 0."""
    result = cli("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    words = [line.split() for line in result.stdout.splitlines()]
    assert {"ok", "warning"} >= {line.split()[0] for line in result.stdout.splitlines() if line and line[0] != " "} - {
        "no"
    }
    assert ["ok", "Python"] in [line[:2] for line in words]
    assert result.stdout.splitlines()[-1].startswith("no problem found")


def test_doctor_counts_kernels(found, cache, monkeypatch):
    """Doctor counts the kernels in Triton's cache directory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert f"{cache}: 4 kernels" in found()[1]["Triton's cache"]["value"]


def test_doctor_creates_nothing(found, tmp_path):
    """Doctor leaves a cache directory that is not there as it is."""
    assert "not there yet" in found()[1]["Triton's cache"]["value"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_a_cache_that_is_a_file(found, tmp_path, monkeypatch):
    """A file where Triton's cache directory should be is a problem with a fix, and exit status 1."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    status, findings = found()
    assert (status, findings["Triton's cache"]["status"]) == (1, "problem")
    assert "TRITON_CACHE_DIR" in findings["Triton's cache"]["fix"]


def test_doctor_names_the_compiler_in_torchs_keys(found, monkeypatch):
    """Where torch is installed, $CXX is named, since a graph saved under another one is not found."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch" or None)
    monkeypatch.setenv("CXX", "clang++-99")
    assert "clang++-99" in found()[1]["torch's graph keys"]["value"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch's graph keys" not in found()[1]


def test_doctor_finds_an_empty_setting(found, monkeypatch):
    """TRITON_CACHE_DIR set to nothing is a problem."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert found()[0] == 1


def test_doctor_without_triton(found, monkeypatch):
    """Without Triton doctor warns and says how to get it, and exits with 0."""
    monkeypatch.setattr(doctor_checks.identity, "triton_dir", lambda: None)
    status, findings = found()
    assert (status, findings["Triton"]["status"]) == (0, "warning")
    assert "triton-bundler[triton]" in findings["Triton"]["fix"]


def test_doctor_finds_a_broken_triton(found, program, monkeypatch):
    """A Triton that cannot be imported is a problem, told with its own words."""
    monkeypatch.setattr(doctor_checks, "_IMPORT_TRITON", "raise ImportError('libtriton.so: no such file')")
    status, findings = found()
    assert (status, findings["Triton"]["status"]) == (1, "problem")
    assert "libtriton.so: no such file" in findings["Triton"]["value"]


def test_doctor_warns_without_a_compiler(found, monkeypatch):
    """No C compiler is a warning; one that CC names is found."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert found()[1]["C compiler"] == {
        "status": "warning",
        "what": "C compiler",
        "value": "CC=no-such-compiler is not a program",
        "fix": "Triton needs gcc or clang, or what CC names, the first time it launches a kernel",
    }


@pytest.mark.parametrize(("kind", "value"), [(object, "compiled extension"), (None, "ctypes, since")])
def test_doctor_names_the_launch_path(found, monkeypatch, kind, value):
    """Doctor says how kernels are launched; without the extension it says how to get it, and that is no problem."""
    monkeypatch.setattr(doctor_checks.launchers, "compiled_type", lambda: kind)
    status, findings = found()
    path = findings["launch path"]
    assert (status, path["status"], path["value"].startswith(value)) == (0, "ok", True)
    assert ("C compiler" in path["fix"]) == (kind is None)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("TRITON_BUNDLER_STORE", "file:///a rediss://me:word@host:1/0", "file:///a rediss://***@host:1/0"),
        ("TRITON_REMOTE_PASSWORD", "word", "***"),
        ("TORCHINDUCTOR_api_token", "word", "***"),
        ("TRITON_PRINT_AUTOTUNING", "1", "1"),
    ],
)
def test_doctor_hides_secrets(cli, monkeypatch, name, value, shown):
    """Settings are listed with their values, but for secrets, by name and inside URLs."""
    monkeypatch.setenv(name, value)
    output = cli("doctor").stdout
    assert f"{name}={shown}\n" in output
    assert "word" not in output.replace("PASSWORD", "")


def test_doctor_lists_only_known_settings(cli, monkeypatch):
    """Variables of other programs are not shown."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert "hidden" not in cli("doctor").stdout
    assert "AWS" not in os.linesep.join(cli("doctor").stdout.splitlines())

# SPDX-License-Identifier: Apache-2.0
"""`doctor` says what is there, what is missing and what is broken."""

import contextlib
import os
import shutil

import pytest

from bundler.cli import doctor
from bundler.format.entries import Toolchain

pytestmark = pytest.mark.toolchain


@pytest.fixture
def found(cli_json):
    """Run the doctor and return (status, name -> finding)."""

    def call():
        status, told = cli_json("doctor")
        assert set(told) >= {"ok", "problems", "checks"}
        assert all(
            set(check) == {"status", "what", "value", "fix", "mendable"} for check in told["checks"]
        )
        return status, {check["what"]: check for check in told["checks"]}

    return call


def test_doctor_of_a_sound_machine(cli):
    """Doctor prints a line for each thing it looked at, and its verdict, and exits with 0."""
    result = cli("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    words = [line.split() for line in result.stdout.splitlines()]
    assert {"ok", "warning"} >= {
        line.split()[0] for line in result.stdout.splitlines() if line and line[0] != " "
    } - {"no"}
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
    """A file where Triton's cache directory should be is a problem with a fix, and exit
    status 1.
    """
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    status, findings = found()
    assert (status, findings["Triton's cache"]["status"]) == (1, "problem")
    assert "TRITON_CACHE_DIR" in findings["Triton's cache"]["fix"]


@pytest.mark.slow
def test_doctor_names_the_compiler_in_torchs_keys(found, monkeypatch):
    """Where torch is installed, $CXX is named, since a graph saved under another one is not
    found.
    """
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
    monkeypatch.setattr(doctor.identity, "triton_dir", lambda: None)
    status, findings = found()
    assert (status, findings["Triton"]["status"]) == (0, "warning")
    assert "triton-bundler[triton]" in findings["Triton"]["fix"]


def test_doctor_finds_a_broken_triton(found, program, monkeypatch):
    """A Triton that cannot be imported is a problem, told with its own words."""
    monkeypatch.setattr(doctor, "_IMPORT_TRITON", "raise ImportError('libtriton.so: no such file')")
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
        "fix": (
            "Triton needs gcc or clang, or what CC names, before its first launch, but where a"
            " session gives it our launchers"
        ),
        "mendable": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value"), [(object, "compiled extension"), (None, "ctypes, since")]
)
def test_doctor_names_the_launch_path(found, monkeypatch, kind, value):
    """Doctor says how kernels are launched; without the extension it says how to get it, and that
    is no problem.
    """
    monkeypatch.setattr(doctor.launchers, "compiled_type", lambda: kind)
    status, findings = found()
    path = findings["launch path"]
    assert (status, path["status"], path["value"].startswith(value)) == (0, "ok", True)
    assert ("C compiler" in path["fix"]) == (kind is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extension", "family", "setting", "words"),
    [
        (object, "3.9", None, "ours in a session on CUDA, in the form of 3.9"),
        (
            object,
            "3.9",
            "triton",
            "Triton's own, which its C compiler builds: TRITON_BUNDLER_LAUNCHER=triton",
        ),
        (None, "3.9", None, "our compiled extension was not built here"),
        (object, None, None, "this release was not compared with ours"),
    ],
)
def test_doctor_names_the_launchers_of_triton(
    found, monkeypatch, extension, family, setting, words
):
    """Doctor says whose launchers Triton uses, and why not ours; neither is a problem."""
    monkeypatch.setattr(doctor.identity, "triton_dir", lambda: "/triton")
    monkeypatch.setattr(doctor.jit_modules, "compiled_driver", lambda: extension)
    monkeypatch.setattr(doctor.driver_modules, "known_family", lambda: family)
    if setting:
        monkeypatch.setenv("TRITON_BUNDLER_LAUNCHER", setting)
    finding = found()[1]["Triton's launchers"]
    assert (finding["status"], words in finding["value"]) == ("ok", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        (
            "TRITON_BUNDLER_STORE",
            "file:///a rediss://me:word@host:1/0",
            "file:///a rediss://***@host:1/0",
        ),
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


@pytest.mark.slow
def test_doctor_lists_only_known_settings(cli, monkeypatch):
    """Variables of other programs are not shown."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert "hidden" not in cli("doctor").stdout
    assert "AWS" not in os.linesep.join(cli("doctor").stdout.splitlines())


@pytest.fixture
def releases(monkeypatch):
    """Make the doctor see these releases of Triton and torch, and a torch that lacks these
    names.
    """

    def install(triton, torch, lacking=""):
        identity = doctor.identity
        real = identity.version_of
        monkeypatch.setattr(identity, "installed_triton", lambda: Toolchain(triton, "0" * 64))
        monkeypatch.setattr(
            identity, "version_of", lambda name: torch if name == "torch" else real(name)
        )
        monkeypatch.setattr(doctor, "_MISSING", f"print({lacking!r})")

    return install


@pytest.mark.slow
def test_doctor_says_nothing_of_releases_that_were_tried(found, releases):
    """Patch releases and local versions of a minor release that was tried count as tried."""
    releases("3.9.4+git0a1b", "2.15.1+cu132")
    assert "releases" not in found()[1]


@pytest.mark.slow
def test_doctor_warns_once_of_releases_never_tried_and_refuses_nothing(found, releases):
    """Both releases stand in one warning, exit status 0; a torch that has every name we need is
    told so.
    """
    releases("4.0.0", "3.1.0")
    status, findings = found()
    told = findings["releases"]
    assert (status, told["status"]) == (0, "warning")
    assert told["value"].startswith(
        "triton 4.0.0, torch 3.1.0: never tried with this package (tried: triton 3.6, "
    )
    assert told["value"].endswith("; torch has every name that torch.compile's bundles need")
    assert "nothing is refused" in told["fix"]


@pytest.mark.slow
def test_doctor_names_what_a_torch_never_tried_lacks(found, releases):
    """What torch.compile's bundles need and the new torch has not is named; Triton, which was
    tried, is not.
    """
    releases("3.7.1", "3.1.0", "torch._inductor.codecache:sha256_hash")
    value = found()[1]["releases"]["value"]
    assert value.startswith("torch 3.1.0: never tried")
    assert "torch has no torch._inductor.codecache:sha256_hash, so inductor.save packs" in value


@pytest.mark.slow
def test_doctor_says_when_a_torch_never_tried_cannot_be_imported(found, releases, monkeypatch):
    """A torch that fails at its import is a reason in the warning, not an error."""
    releases("3.7.1", "3.1.0")
    monkeypatch.setattr(doctor, "_MISSING", "raise ImportError")
    assert "torch cannot be asked for the names" in found()[1]["releases"]["value"]


def test_doctor_mends_modes_and_leftovers(found, cli, tmp_path, monkeypatch):
    """What it can mend is marked; --fix mends that, says so, touches nothing younger than a day,
    and finds nothing the second time.
    """
    cache, key, here = tmp_path / "cache", tmp_path / "key.pem", tmp_path / "here"
    for name in ("tmp.bundler.1.old", "tmp.bundler.2.new"):
        (cache / name).mkdir(parents=True)
    (cache / "tmp.bundler.1.old" / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    key.touch(0o644)
    monkeypatch.setenv("TRITON_BUNDLER_SIGNING_KEY", str(key))
    here.mkdir()
    (here / "triton-bundler.toml").touch()
    (here / "triton-bundler.toml").chmod(0o666)
    monkeypatch.chdir(here)
    # A day passes for what is old alone.
    monkeypatch.setattr(doctor, "STALE_AFTER_S", -1)
    scandir = os.scandir

    @contextlib.contextmanager
    def old_alone(path):
        with scandir(path) as entries:
            yield [one for one in entries if not one.name.endswith("new")]

    monkeypatch.setattr(doctor.os, "scandir", old_alone)
    status, findings = found()
    assert status == 1
    assert {name for name, finding in findings.items() if finding["mendable"]} == {
        "signing key",
        "settings' file",
        "leftovers",
    }
    mended = cli("doctor", "--fix")
    assert mended.exit_code == 0
    assert mended.stdout.count(": mended") == 3
    assert (key.stat().st_mode & 0o777, (here / "triton-bundler.toml").stat().st_mode & 0o777) == (
        0o600,
        0o664,
    )
    assert [path.name for path in cache.iterdir()] == ["tmp.bundler.2.new"]
    assert not any(finding["mendable"] for finding in found()[1].values())

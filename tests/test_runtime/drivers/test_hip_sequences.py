# SPDX-License-Identifier: Apache-2.0
"""What the HIP driver asks of the HIP library, call by call, and that no branch of it goes without.

The library is `hip_stand_in.c`, compiled against AMD's own header.  Each scenario has a file in
`hip_sequences/`, one for each way to launch; WRITE_HIP_SEQUENCES=1 writes them anew, for who
changed the driver to read through.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import branch_record
import hip_machine
import hip_scenarios
import pytest

from bundler.errors import DriverError, DriverUnavailable
from bundler.runtime.launch.drivers import hip, hip_library, launchers

# Images, headers and how parameters lie are Triton's, so each release has its turn.
pytestmark = [pytest.mark.release, pytest.mark.toolchain]
SEQUENCES = Path(__file__).resolve().parent / "hip_sequences"
NAMES = {
    scenario.__name__: scenario for scenario in (*hip_scenarios.SCENARIOS, *hip_scenarios.LACKING)
}
PATHS = ("compiled", "ctypes")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The library, whole and without what is optional."""
    folder = tmp_path_factory.mktemp("hip")
    return {
        lacking: hip_machine.compile_stand_in(folder, lacking=lacking) for lacking in (False, True)
    }


@pytest.fixture
def play(libraries, recorded, launcher_type, monkeypatch):
    """Return a function that plays a scenario by one way to launch and returns the machine."""
    monkeypatch.setattr(launchers, "compiled_type", lambda: launcher_type)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def play(scenario, path):
        machine = hip_machine.Machine(libraries[scenario in hip_scenarios.LACKING], path, recorded)
        scenario(machine)
        return machine

    return play


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_of_calls_is_as_written_down(play, name, path):
    """The calls, their arguments and answers, and the errors that reach a caller; no error stays
    behind in the library.
    """
    machine = play(NAMES[name], path)
    file = SEQUENCES / path / f"{name}.txt"
    if os.environ.get("WRITE_HIP_SEQUENCES"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(machine.record())
    assert machine.record() == file.read_text()
    assert (machine.last_error, machine.allocated) == (0, 0)


def test_there_is_no_sequence_too_many():
    """A file without its scenario would be a promise that nothing keeps."""
    assert sorted(SEQUENCES.glob("*/*")) == sorted(
        SEQUENCES / path / f"{name}.txt" for path in PATHS for name in NAMES
    )


def test_every_branch_of_the_driver_is_driven(play):
    """All scenarios together take both ways of every conditional in hip.py, and reach every
    line.
    """
    with branch_record.Branches(hip) as branches:
        for path in PATHS:
            for scenario in NAMES.values():
                play(scenario, path)
    assert branches.missing() == []


def test_a_branch_that_is_not_driven_is_told(play):
    """The record above would tell: one scenario alone leaves branches out."""
    with branch_record.Branches(hip) as branches:
        play(hip_scenarios.launches, "compiled")
    missing = branches.missing()
    assert any(
        line.startswith("HipDriver._enter, ") and "never goes on" in line for line in missing
    )
    assert any(
        line.startswith("HipDriver.tensor_map, ") and "never reached" in line for line in missing
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_code_object_is_kept_until_it_is_unloaded(play, path):
    """HIP's runtime refers to the bytes for as long as the module is there, whoever else forgets
    them.
    """

    def keeping(machine):
        machine.device()
        driver, (plan, image) = machine.open(), machine.kernel(cooperative=False)
        image = bytes(bytearray(image))
        before = sys.getrefcount(image)
        module = driver.load(plan, image, 0)
        assert sys.getrefcount(image) == before + 1
        machine.fail("hipModuleUnload", 709)
        with machine.refuses(DriverError):
            driver.unload(module)
        assert sys.getrefcount(image) == before + 1
        module.unload()
        assert sys.getrefcount(image) == before

    play(keeping, path)


# ------------------------------------------------------------------------------------ Which library


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A process with no HIP library in sight: neither one that it has, nor one that it
    could find.
    """
    for variable in ("TRITON_LIBHIP_PATH", "HIP_PATH", "ROCM_PATH"):
        monkeypatch.delenv(variable, raising=False)
    maps = tmp_path / "maps"
    maps.write_text("")
    real = Path
    monkeypatch.setattr(
        hip_library, "Path", lambda *parts: maps if parts == ("/proc/self/maps",) else real(*parts)
    )
    monkeypatch.setattr(sys, "path", [])
    return maps


def touch(path):
    """Make an empty file and the folders above it."""
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_library_that_was_named_is_taken(bare, monkeypatch):
    """Triton's own variable comes first, whether or not the file is there."""
    monkeypatch.setenv("TRITON_LIBHIP_PATH", "/named/libamdhip64.so")
    assert hip_library.library_path() == "/named/libamdhip64.so"


def test_the_library_that_is_here_is_taken(libraries):
    """A copy that the process has already, as that of a torch which was imported, is not joined by
    another.
    """
    code = (
        "import ctypes, sys; from bundler.runtime.launch.drivers import hip_library;"
        " ctypes.CDLL(sys.argv[1]); print(hip_library.library_path())"
    )
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_LIBHIP_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, libraries[False]],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
    )
    assert done.stdout.strip() == str(libraries[False])


def test_a_copy_that_is_gone_is_no_copy(bare, tmp_path):
    """A file that was replaced while it was in use cannot be opened by its old name."""
    here = touch(tmp_path / "torch" / "lib" / "libamdhip64.so")
    bare.write_text(
        f"7f 00 /gone/libamdhip64.so.6 (deleted)\n7f 00 [stack]\n7f 00 rw-p 0 00:00 0   {here}\n"
    )
    assert hip_library.library_path() == str(here)


@pytest.mark.parametrize(
    "place", ["torch/lib/libamdhip64.so", "_rocm_sdk_core/lib/libamdhip64.so.7"]
)
def test_the_library_of_torch_is_taken(bare, monkeypatch, tmp_path, place):
    """torch opens its copy when it is imported, perhaps after us."""
    copy = touch(tmp_path / "site" / place)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site")])
    assert hip_library.library_path() == str(copy)


def test_the_library_of_the_loader_is_taken(bare, monkeypatch):
    """Without the files for developers there are only names with a version."""

    def opening(name):
        if not name.endswith(".6"):
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", opening)
    assert hip_library.library_path() == "libamdhip64.so.6"


@pytest.mark.parametrize("variable", ["HIP_PATH", "ROCM_PATH"])
def test_the_library_of_an_installation_is_taken(bare, monkeypatch, tmp_path, variable):
    """A ROCm that the loader does not know is found where its variables say."""
    library = touch(tmp_path / "lib" / "libamdhip64.so.7")
    monkeypatch.setenv(variable, str(tmp_path))
    assert hip_library.library_path() == str(library)


def test_without_any_library_the_error_names_it(bare):
    """Nothing found is an error that says what is missing, also where there is no /proc."""
    with pytest.raises(
        DriverUnavailable, match=r"hip kernels need the driver's library libamdhip64\.so"
    ):
        hip.HipDriver()
    bare.unlink()
    assert hip_library.library_path() == "libamdhip64.so"

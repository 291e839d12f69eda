# SPDX-License-Identifier: Apache-2.0
"""A second start launches the kernels that the first one launched, without Triton's JIT, and only
those: whatever differs, or is missing, is asked of Triton.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import bundler  # noqa: E402
from bundler.codegen import kept_launches, triton_hash  # noqa: E402
from bundler.compile.source_modules import PREFIX  # noqa: E402
from bundler.lifecycle.tuning_directory import TuningFolder, tuning_counters  # noqa: E402
from bundler.runtime import DryDriver  # noqa: E402
from bundler.runtime.launch.drivers.driver import DeviceProperties  # noqa: E402

HERE = Path(__file__).parent
H100, H200_PCIE = (DeviceProperties("90", 1024, 232448, 32, n, True) for n in (132, 114))


def test_a_second_process_launches_the_same_without_triton_s_jit(tmp_path):
    """Equal binaries, grids and arguments, and tuning counted as found; no module of a kernel is
    run, nor gluon imported, which Triton's JIT needs.
    """
    first, second = (_process(tmp_path) for _ in range(2))
    kernels, launches = sorted(first["kernels"]), first["launches"]
    assert len(launches) == 2 * len(kernels) == 6
    assert first["asked"] == kernels
    assert (len(first["imported"]), first["modules"]) == (2, 3)
    assert second == {
        "kernels": first["kernels"],
        "launches": launches,
        "asked": [],
        "imported": [],
        "modules": 0,
        "tuned, found": [0, 1],
    }


def _process(folder):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, str(HERE / "kept_launch_worker.py"), str(folder)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class Machine:
    """One GPU that is not there; a `start` is that of a process."""

    def __init__(self, cases, folder, monkeypatch):
        self.cases, self.put, self.folder = cases, monkeypatch.setattr, folder
        self.driver = DryDriver("cuda", properties=H100)
        self.asked = cases.imitate(self.driver, self.put)

    def start(self, number=1.5):
        """Return which kernels Triton was asked for, and what was launched."""
        self.run(number)
        return sorted({*self.asked}), self.cases.launched(self.driver)

    def run(self, number=1.5):
        """Return the program, which ran."""
        self.asked.clear()
        for name in [one for one in sys.modules if one.startswith(PREFIX)]:
            del sys.modules[name]
        return self.cases.run(number)

    @property
    def file(self):
        """The only file of launches."""
        (path,) = (self.folder / "user/triton-bundler/launches").iterdir()
        return path


@pytest.fixture
def machine(beside, tmp_path, monkeypatch):
    """A machine with caches of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return Machine(beside("kept_launch_cases"), tmp_path, monkeypatch)


def test_a_damaged_or_missing_file_has_triton_asked_and_is_kept_anew(machine):
    """Whichever byte it is; the launches are the same."""
    asked, launches = machine.start()
    data = machine.file.read_bytes()
    assert len(asked) == 3
    assert machine.start() == ([], launches)
    for place in (3, 70, data.index(b"\n", 65) + 9, len(data) - 9):
        wrong = bytearray(data)
        wrong[place] ^= 1
        machine.file.write_bytes(wrong)
        assert machine.start() == (asked, launches)
        assert machine.start() == ([], launches)
    for damage in (lambda path: path.write_bytes(data[:-1]), lambda path: path.unlink()):
        damage(machine.file)
        assert machine.start() == (asked, launches)
        assert machine.start() == ([], launches)


def test_a_directory_that_others_write_to_is_not_read(machine):
    """Its binaries would be run."""
    asked, _ = machine.start()
    machine.file.parent.chmod(0o777)
    assert machine.start()[0] == asked


def test_a_record_that_is_gone_has_the_kernel_tuned_again(machine):
    """The others are launched as they were kept."""
    _, launches = machine.start()
    before = tuning_counters()
    assert machine.start() == ([], launches)
    found = tuning_counters()
    assert (found.tuned, found.found) == (before.tuned, before.found + 1)
    shutil.rmtree(TuningFolder(machine.folder / "triton").path)
    asked, again = machine.start()
    assert len(asked) == 1
    assert asked[0].startswith("triton_poi_")
    assert again == launches
    assert tuning_counters().tuned == found.tuned + 1


def test_another_text_is_not_launched_by_what_was_kept(machine):
    """A number in a kernel is enough."""
    _, launches = machine.start()
    asked, others = machine.start(number=2.5)
    assert len(asked) >= 1
    assert others != launches
    assert machine.start() == ([], launches)


def test_a_recording_a_hook_and_a_profile_hear_of_all_kernels(machine, monkeypatch):
    """As if nothing was kept."""
    asked, launches = machine.start()
    with bundler.recording() as recording:
        assert machine.start() == (asked, launches)
    assert {kernel.name for kernel in recording.collect().kernels} == {*asked}
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        assert machine.start() == (asked, launches)
    with monkeypatch.context() as patched:
        heard = []
        hook = lambda *_, fn, **__: heard.append(fn.__name__)  # noqa: E731
        patched.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
        assert machine.start() == (asked, launches)
        assert sorted({*heard}) == asked
    assert machine.start() == ([], launches)


def test_a_call_that_no_kept_kernel_fits_is_launched_by_triton(machine):
    """As one whose arguments are not those of an earlier call."""
    machine.start()
    program = machine.run()
    kept, (name, *_) = program.kept_launches, program.kernels
    slow, sizes = [], {"xnumel": 96}
    launch = kept.bound(name, sizes, lambda: lambda *given: slow.append(given))
    launch("no tensor", 1)
    launch("no tensor", 2)
    assert slow == [("no tensor", 1), ("no tensor", 2)]


VARIABLES = {
    "TRITON_DEFAULT_FP_FUSION": "0",
    "PTXAS_OPTIONS": "-O1",
    "TRITON_PTXAS_PATH": "/elsewhere",
    "TRITON_F32_DEFAULT": "ieee",
    "DISABLE_PTXAS_OPT": "1",
    "TRITON_OVERRIDE_ARCH": "sm90",
    "TRITON_DISABLE_LINE_INFO": "1",
    "DISABLE_LLVM_OPT": "1",
}


def test_whatever_decides_a_compile_decides_where_it_is_kept(machine, monkeypatch, tmp_path):
    """Program, device, Triton's files, the assembler, settings in Python and the environment."""
    place = lambda program="one", driver=machine.driver: kept_launches._path(program, driver)  # noqa: E731
    found = [place(), place("another"), place(driver=DryDriver("cuda", properties=H200_PCIE))]
    for name, value in VARIABLES.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            found.append(place())
    for group, name, value in (
        ("language", "default_fp_fusion", False),
        ("nvidia", "ptxas_options", "-O2"),
        ("runtime", "debug", True),
        ("compilation", "instrumentation_mode", "consan"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(vars(getattr(triton.knobs, group)), name, value)
            found.append(place())
    with monkeypatch.context() as patched:
        assembler = tmp_path / "ptxas"
        patched.setenv("TRITON_PTXAS_PATH", str(assembler))
        for text in ("one", "two"):
            assembler.write_text(text)
            found.append(place())
    with monkeypatch.context() as patched:
        patched.setattr(triton_hash, "of_files", lambda: "another Triton")
        found.append(place())
    assert None not in found
    assert len({*found}) == len(found)
    assert place() == found[0]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("runtime", "interpret"),
        ("runtime", "jit_cache_hook"),
        ("runtime", "add_stages_inspection_hook"),
        ("compilation", "always_compile"),
        ("compilation", "override"),
        ("compilation", "dump_ir"),
        ("compilation", "listener"),
        ("cache", "manager_class"),
    ],
)
def test_where_triton_is_to_be_asked_nothing_is_looked_for(machine, monkeypatch, group, name):
    """Somebody wants to hear of each compile, or to have a say in it."""
    monkeypatch.setitem(vars(getattr(triton.knobs, group)), name, object)
    assert kept_launches._path("one", machine.driver) is None


def test_what_was_compiled_by_other_settings_is_not_kept(machine, monkeypatch):
    """A kernel of this process stays what it was when the settings change, and another process
    would find it under those of now.
    """
    program = machine.run()
    file = machine.file
    file.unlink()
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    program.keep_launches()
    assert [*file.parent.iterdir()] == []
    monkeypatch.delenv("PTXAS_OPTIONS")
    program.keep_launches()
    assert machine.file == file


def test_a_recording_that_begins_later_hears_of_all_kernels(machine):
    """A backward pass is found while the forward one is compiled, and launched much later."""
    asked, _ = machine.start()
    program = machine.run()
    kept, slow = program.kept_launches, []
    with bundler.recording():
        for name in program.kernels:
            kept.bound(name, {"xnumel": 96}, lambda name=name: slow.append(name))
    assert sorted(slow) == asked


def test_the_texts_of_a_program_name_its_launches():
    """A measurement may decide for other kernels of the same graph."""
    names = {
        kept_launches.program_name(key, sources)
        for key in ("a", "b")
        for sources in ({"one": "text"}, {"one": "texts"}, {"two": "text"}, {})
    }
    assert len(names) == 8


def test_a_kernel_that_is_launched_at_several_places_is_looked_up_once(machine):
    """As a tuner does, whose counters tell what it saved."""
    machine.start()
    before = tuning_counters().found
    program = machine.run()
    assert tuning_counters().found == before + 1
    for name in program.kernels:
        program.kept_launches.bound(name, {"xnumel": 96}, pytest.fail)
    assert tuning_counters().found == before + 1

# SPDX-License-Identifier: Apache-2.0
import base64
import contextlib
import hashlib
import importlib
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from bundler.toolchain import identity, ptxas


@pytest.fixture
def triton():
    return pytest.importorskip("triton")


@pytest.mark.release
@pytest.mark.toolchain
def test_record_identity_equals_hashing_the_file(triton, run_python):
    """The digest from the wheel's RECORD is the digest of the bytes on disk."""
    binary = Path(triton.__file__).parent / "_C" / "libtriton.so"
    with binary.open("rb") as file:
        expected = hashlib.file_digest(file, "sha256").hexdigest()
    assert identity.recorded_digest(str(binary), binary.stat().st_size) == expected
    assert identity.installed_triton().binary == expected


@pytest.mark.release
@pytest.mark.toolchain
def test_identity_does_not_import_triton_and_reads_no_binary(run_python):
    """Release, binary, directories, ptxas and environment are known without importing Triton or
    torch.
    """
    pytest.importorskip("triton")
    code = """
import sys
import time
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from bundler.toolchain import directories, identity, targets, ptxas
toolchain = identity.installed_triton()
identity.environment(), identity.triton_dir(), directories.triton_cache_dir(), directories.inductor_kernel_dir(0)
print(ptxas.ptxas_version(80), ptxas.ptxas_version(90))
assert toolchain.release and len(toolchain.binary) == 64 and toolchain.ptxas is None, toolchain
assert not any(name.split(".")[0] in ("triton", "torch") for name in sys.modules)
assert not any(path.endswith("libtriton.so") for path in opened)
"""
    assert run_python(code)


@pytest.mark.release
@pytest.mark.toolchain
def test_same_identity_before_and_after_the_import(run_python):
    """Importing Triton changes neither its release nor its binary nor its place."""
    pytest.importorskip("triton")
    code = """
from bundler.toolchain import identity
before = identity.installed_triton(), identity.triton_dir()
import triton
assert before == (identity.installed_triton(), identity.triton_dir())
assert before[0].release == triton.__version__
"""
    run_python(code)


def fake_install(tmp_path, binary=b"\x7fELF", recorded=None, size=None, version="9.9.9"):
    """A site-packages directory with a Triton that has no code."""
    suffix = identity.extension_suffix().rsplit(".", 1)[-1]
    package = tmp_path / "triton"
    (package / "_C").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (package / "_C" / f"libtriton.{suffix}").write_bytes(binary)
    digest = (
        base64.urlsafe_b64encode(hashlib.sha256(recorded or binary).digest()).rstrip(b"=").decode()
    )
    info = tmp_path / "triton-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9.9+local\n")
    (info / "RECORD").write_text(
        f"triton/_C/libtriton.{suffix},sha256={digest},{size or len(binary)}\n"
    )
    return package


@pytest.fixture
def alone(monkeypatch):
    """Make `tmp` the only place that packages come from."""

    def alone(directory):
        monkeypatch.setattr(
            sys, "path", [str(directory), *(p for p in sys.path if not p.endswith("-packages"))]
        )
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()

    return alone


def test_a_record_of_another_size_is_not_believed(tmp_path, alone):
    """A binary that was replaced after installation is hashed itself."""
    package = fake_install(tmp_path, binary=b"built here", recorded=b"from the wheel", size=14)
    alone(tmp_path)
    assert identity.triton_dir() == str(package)
    assert identity.installed_triton().binary == hashlib.sha256(b"built here").hexdigest()


def test_a_matching_record_is_believed(tmp_path, alone):
    """With a record of the right size the file is not read."""
    fake_install(tmp_path, binary=b"the real bytes", recorded=b"recorded bytes")
    alone(tmp_path)
    assert identity.installed_triton().binary == hashlib.sha256(b"recorded bytes").hexdigest()


def test_a_triton_without_metadata_is_hashed(tmp_path, alone):
    """A Triton on the path that no installer wrote has the release of its source and the digest of
    its file.
    """
    fake_install(tmp_path, version="3.8.0+git1234")
    shutil.rmtree(tmp_path / "triton-9.9.9.dist-info")
    alone(tmp_path)
    found = identity.installed_triton()
    assert (found.release, found.binary) == (
        "3.8.0+git1234",
        hashlib.sha256(b"\x7fELF").hexdigest(),
    )


def test_a_triton_that_comes_and_goes_is_found(tmp_path, alone):
    """What was found once counts as long as a module would be looked for in the same places, and it
    is there.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    alone(first)
    assert identity.triton_dir() is None
    (second / "triton").mkdir(parents=True)
    (second / "triton" / "__init__.py").touch()
    sys.path.insert(1, str(second))
    assert identity.triton_dir() == identity.triton_dir() == str(second / "triton")
    (first / "triton").mkdir()
    (first / "triton" / "__init__.py").touch()
    importlib.invalidate_caches()
    shutil.rmtree(second)
    assert identity.triton_dir() == str(first / "triton")
    sys.path.remove(str(first))
    assert identity.triton_dir() is None


def test_no_triton_is_no_identity(tmp_path, alone):
    """Without Triton, and with a mere directory of that name, nothing is known and nothing
    fails.
    """
    (tmp_path / "triton").mkdir()
    alone(tmp_path)
    assert identity.installed_triton() is None
    assert identity.triton_dir() is None
    assert ptxas.ptxas_version(90) is None
    assert "triton" not in dict(identity.environment())


def test_environment_names_python_and_platform():
    """The observed part says which Python and which platform, without a path."""
    facts = dict(identity.environment())
    assert facts["python"].count(".") == 2
    assert identity.machine() in facts["platform"]
    assert not any(os.sep + "home" in text for text in facts.values())


@pytest.mark.release
@pytest.mark.toolchain
@pytest.mark.parametrize("arch", [70, 80, 89, 90, 100, 120])
def test_ptxas_is_the_one_that_triton_takes(triton, arch):
    """For each target the version is that of the program Triton itself would run."""
    from triton.backends.nvidia.compiler import get_ptxas

    assert ptxas.ptxas_version(arch).startswith(get_ptxas(arch).version + " V")


def write_ptxas(path, answer, status=0):
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.release
@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("arch", "variable"), [(80, "TRITON_PTXAS_PATH"), (120, "TRITON_PTXAS_BLACKWELL_PATH")]
)
def test_ptxas_follows_the_environment_at_each_call(triton, tmp_path, monkeypatch, arch, variable):
    """A program named by the environment counts at once; one that fails falls back to the installed
    one, as in Triton.
    """
    installed = ptxas.ptxas_version(arch)
    monkeypatch.setenv(
        variable, write_ptxas(tmp_path / "mine", "Cuda compilation tools, release 99.1, V99.1.5")
    )
    assert ptxas.ptxas_version(arch) == "99.1 V99.1.5"
    monkeypatch.setenv(variable, write_ptxas(tmp_path / "broken", "oh no", status=3))
    assert ptxas.ptxas_version(arch) == installed
    monkeypatch.setenv(variable, str(tmp_path / "absent"))
    assert ptxas.ptxas_version(arch) == installed


@pytest.mark.release
@pytest.mark.toolchain
def test_ptxas_set_in_python_counts(triton, tmp_path, monkeypatch):
    """A program set through Triton's knobs is the one that is asked."""
    monkeypatch.setenv(
        "TRITON_PTXAS_PATH", ""
    )  # so that monkeypatch undoes what the knob writes there
    monkeypatch.setitem(
        triton.knobs.nvidia.__dict__,
        "ptxas",
        write_ptxas(tmp_path / "mine", "release 98.7, V98.7.6"),
    )
    assert ptxas.ptxas_version(80) == "98.7 V98.7.6"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 60", "no answer in 0.3 s"),
        ("exec sleep 60 >&- 2>&-", "it does not end in 0.3 s"),
        ("echo 'release 1.2, V1.2.3'; exit 3", "exit status 3"),
        ("kill -KILL $$", "exit status -9"),
    ],
)
def test_a_ptxas_that_does_not_answer_is_ended(tmp_path, monkeypatch, caplog, script, reason):
    """Whether it hangs before or after it wrote, or fails: there is no version, the log says why,
    and no child is left.
    """
    monkeypatch.setattr(ptxas, "_TIMEOUT_S", 0.3)
    program = tmp_path / "ptxas"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(ptxas, "candidates", lambda name: [str(program)])
    monkeypatch.setattr(ptxas, "_uses_blackwell", lambda arch: False)
    before = children()
    assert ptxas.ptxas_version(90) is None
    assert reason in caplog.text
    assert children() == before


def test_a_ptxas_that_writes_much_is_read_to_its_end(tmp_path, monkeypatch):
    """More than a pipe holds, on both outputs; what is asked ahead is told apart from no answer,
    and is asked once.
    """
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\nhead -c 300000 /dev/zero >&2\necho ' release 1.2, V1.2.3 '\n")
    program.chmod(0o755)
    monkeypatch.setattr(ptxas, "candidates", lambda name: [str(program)])
    monkeypatch.setattr(ptxas, "_uses_blackwell", lambda arch: False)
    asked = ptxas.begin_asking(90)
    asked.finish()
    assert b"".join(asked._parts) == bytes(300000) + b" release 1.2, V1.2.3 \n"
    assert asked.ended(0)
    assert ptxas.begin_asking(90) is None
    assert ptxas.ptxas_version(90) == "1.2 V1.2.3"


def test_a_ptxas_that_runs_is_not_waited_for(tmp_path, monkeypatch):
    """Who asks ahead looks now and then whether it has ended; an interrupt ends it, and the next
    who asks starts it again.
    """
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(ptxas, "candidates", lambda name: [str(program)])
    monkeypatch.setattr(ptxas, "_uses_blackwell", lambda arch: False)
    before = children()
    asked = ptxas.begin_asking(90)
    assert len(children() - before) == 1
    started = time.monotonic()
    assert not asked.ended(0)
    assert not asked.ended(0.01)
    assert time.monotonic() - started < 10
    monkeypatch.setattr("select.poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked.finish()
    assert children() == before
    assert ptxas._versions.get(asked._state, "not known") == "not known"


def children():
    """Return the processes that this one started and has not waited for; other tests' may be among
    them.
    """
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, parent, *_ = path.read_text().rpartition(") ")[2].split()
            if int(parent) == os.getpid():
                found.add(path.parent.name)
    return found


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ptxas: NVIDIA\nCuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8\n",
            "12.8 V12.8.93",
        ),
        ("release notes of release 13.0, V13.0.1", "13.0 V13.0.1"),
        ("release 12.8, V", "release 12.8, V"),
        ("release 12.8, V 1", "release 12.8, V 1"),
        ("release , V1.2", "release , V1.2"),
        ("something\n else", "something else"),
    ],
)
def test_the_version_in_an_answer(text, expected):
    """The first release with its build; an answer of another shape stays, in one line."""
    assert ptxas.short_version(text) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas\n", 100),
        (
            (
                "return knobs.nvidia.ptxas_blackwell if arch >= 90 else knobs.nvidia.ptxas  # arch"
                " >= 100\n"
            ),
            90,
        ),
        (
            (
                "if arch < 110:\n        return knobs.nvidia.ptxas\n    return"
                " knobs.nvidia.ptxas_blackwell\n"
            ),
            110,
        ),
        (
            "return knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas or None\n",
            100,
        ),
        ("return knobs.nvidia.ptxas\n", None),
        ("return (\n", None),
    ],
)
def test_which_ptxas_is_read_from_tritons_own_condition(tmp_path, body, expected):
    """As it stands in the releases that are known, at once, and in any other form by parsing."""
    source = tmp_path / "compiler.py"
    source.write_text(
        f"import os\n\n\ndef get_ptxas(arch: int) -> knobs.NvidiaTool:\n    {body}\n\ndef"
        " other(arch):\n    return arch >= 7\n"
    )
    assert ptxas._blackwell_threshold(str(source)) == expected

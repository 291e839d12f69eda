# SPDX-License-Identifier: Apache-2.0
"""A released wheel is the same bytes for everybody, and its bill of materials says what is in it
and what it asks for.
"""

import base64
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.wheels import release
from tools.wheels.bill import bill_of, pinned_versions, text_of
from tools.wheels.interpreters import FREE_THREADED, Interpreter, find
from tools.wheels.release import Kind, settled
from tools.wheels.trial import EXTENSIONS, fits, problems_of, promised

ROOT = Path(__file__).resolve().parents[2]
METADATA = """Metadata-Version: 2.4
Name: triton-bundler
Version: 0.1.0
Summary: One line.
License-Expression: Apache-2.0
Requires-Dist: msgspec>=0.19
Requires-Dist: cryptography>=44.0; extra == "trust"
Requires-Dist: cryptography>=44.0; extra == "test"
Requires-Dist: triton-bundler[trust]; extra == "all"
"""


@pytest.fixture
def wheel(tmp_path):
    """A wheel with one module."""
    code = b"x = 1\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(code).digest()).rstrip(b"=").decode()
    path = tmp_path / "triton_bundler-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (
            ("bundler/a,b.py", code),
            ("triton_bundler-0.1.0.dist-info/METADATA", METADATA.encode()),
            (
                "triton_bundler-0.1.0.dist-info/RECORD",
                f"bundler/a,b.py,sha256={digest},6\ntriton_bundler-0.1.0.dist-info/RECORD,,\n".encode(),
            ),
        ):
            archive.writestr(zipfile.ZipInfo(name, (2026, 11, 22, 19, 0, 0)), data)
    return path


def test_the_bill_names_the_wheel_its_files_and_what_it_asks_for(wheel):
    """Digests are those of the bytes; what an extra brings is optional; the version is the one that
    was tested; ourselves is no requirement.
    """
    bill = bill_of(wheel, {"msgspec": "0.22.0"})
    itself = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"], itself["purl"]) == (
        "CycloneDX",
        "1.6",
        "pkg:pypi/triton-bundler@0.1.0",
    )
    assert itself["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    (file,) = itself["components"]
    assert (file["name"], file["hashes"][0]["content"]) == (
        "bundler/a,b.py",
        hashlib.sha256(b"x = 1\n").hexdigest(),
    )
    needed = {one["name"]: (one.get("version"), one["scope"]) for one in bill["components"]}
    assert needed == {"msgspec": ("0.22.0", "required"), "cryptography": (None, "optional")}
    assert bill["metadata"]["timestamp"] == "2026-11-22T19:00:00Z"
    assert set(bill["dependencies"][0]["dependsOn"]) == {
        one["bom-ref"] for one in bill["components"]
    }


def test_two_bills_of_one_wheel_are_equal(wheel):
    """Neither the clock nor chance is in it; another wheel has another serial number."""
    first = text_of(bill_of(wheel, pinned_versions()))
    assert text_of(bill_of(wheel, pinned_versions())) == first
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", b"")
    assert (
        json.loads(text_of(bill_of(wheel, pinned_versions())))["serialNumber"]
        != json.loads(first)["serialNumber"]
    )


def test_pins_are_read():
    """Names are normalized, comments are none."""
    pins = pinned_versions()
    assert pins["typing-extensions"]
    assert "#" not in "".join(pins)


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ('["3.99", "3.99.1", "/include", true]', True),
        ('["3.98", "3.98.1", "/include", true]', False),  # another Python under this name
        ('["3.99t", "3.99.1", "/include", true]', False),  # one without the lock
        ('["3.99", "3.99.1", "/include", false]', False),  # no headers
        (None, False),  # pyenv's program for a version that is not selected
    ],
)
def test_an_interpreter_counts_when_it_runs_and_has_headers(tmp_path, monkeypatch, answer, taken):
    """What stands on PATH under the name of a Python is asked, and left out when it is another,
    lacks headers, or does not run.
    """
    program = tmp_path / "python3.99"
    program.write_text("#!/bin/sh\n" + ("exit 127\n" if answer is None else f"echo '{answer}'\n"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [Interpreter("3.99", "3.99.1", str(program), "/include")] if taken else []
    assert find(["3.99"]) == found
    assert [one.tag for one in found] == ["cp399"] * taken


def test_one_setuptools_builds_and_is_tested():
    """Equal bytes need one version, and two files pin it."""
    assert (
        pinned_versions(ROOT / "tools/wheels/requirements.txt")["setuptools"]
        == pinned_versions()["setuptools"]
    )


def test_names_say_what_a_file_brings():
    """The limited API is named in pyproject.toml; a wheel for AArch64 does not fit this
    interpreter, a wheel without machine code fits all, and a free-threaded Python takes no other.
    """
    limited = {"_kernel_reader", "_kernel_writer"}
    assert {name for name, is_limited in EXTENSIONS.items() if is_limited} == limited
    assert promised("t-1-cp311-abi3-manylinux_2_17_x86_64.whl") == limited
    assert (
        promised("t-1-cp312-cp312-manylinux_2_17_x86_64.whl")
        == set(EXTENSIONS)
        == promised("t-1.tar.gz")
    )
    assert promised("t-1-py3-none-any.whl") == set()
    here, other = platform.machine(), "riscv64"
    one = Interpreter("3.12", "3.12.1", "python3.12", "include")
    names = [
        f"t-1-{tag}-{machine}.whl"
        for tag in ("cp312-cp312", "cp313-cp313", "cp311-abi3")
        for machine in (f"manylinux_2_17_{here}", f"manylinux_2_17_{other}")
    ]
    fitting = [name for name in [*names, "t-1-py3-none-any.whl", "t-1.tar.gz"] if fits(name, one)]
    assert fitting == [names[0], names[4], "t-1-py3-none-any.whl", "t-1.tar.gz"]
    free = Interpreter("3.12t", "3.12.1", "python3.12t", "include")
    fitting = [name for name in [*names, "t-1-py3-none-any.whl", "t-1.tar.gz"] if fits(name, free)]
    assert fitting == ["t-1-py3-none-any.whl", "t-1.tar.gz"]


def test_a_wheel_without_its_extensions_is_no_wheel_for_a_machine(wheel):
    """Extensions are optional in a build, so one that did not compile must not go out; nor one for
    another machine, nor one that Python would not load.
    """
    empty = wheel.rename(wheel.with_name("triton_bundler-0.1.0-cp312-cp312-linux_x86_64.whl"))
    (fault,) = problems_of(empty)
    assert "has the extensions [], expected" in fault
    with zipfile.ZipFile(empty, "a") as archive:
        for name in EXTENSIONS:
            archive.writestr(f"bundler/{name}.abi3.so", b"\x7fELF" + bytes(14) + b"\xb7\x00")
    found = list(problems_of(empty))
    assert sum("is not for the machine" in fault for fault in found) == len(EXTENSIONS)
    assert sum("Python would not load it" in fault for fault in found) == [
        *EXTENSIONS.values()
    ].count(False)


def test_an_archive_is_the_same_whoever_packs_it():
    """Times, owners and order of a source distribution are settled; what its files hold and which
    can be run stays.
    """
    made = []
    for time, owner, names in ((5, "a", "xy"), (9, "b", "yx")):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.mtime, member.uname, member.size = time, owner, 1
                member.mode = 0o700 if name == "x" else 0o600
                tar.addfile(member, io.BytesIO(name.encode()))
        made.append(settled(raw.getvalue(), 1_700_000_000))
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(made[0])) as tar:
        found = [(one.name, one.mode, one.mtime, tar.extractfile(one).read()) for one in tar]
    assert found == [("x", 0o755, 1_700_000_000, b"x"), ("y", 0o644, 1_700_000_000, b"y")]


def test_the_variable_chooses_extensions(tmp_path):
    """`BUNDLER_BUILD_EXTENSIONS` leaves extensions out; a value that is none of three ends the
    build with a sentence; a free-threaded Python gets none, since one would bring its lock back.
    """
    pytest.importorskip("setuptools")
    shutil.copy(ROOT / "setup.py", tmp_path)
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["ext-modules"]
    lines = "".join(
        f'[[tool.setuptools.ext-modules]]\nname = "{one["name"]}"\nsources = ["x.c"]\n'
        f"py-limited-api = {str(one.get('py-limited-api', False)).lower()}\n"
        for one in listed
    )
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "x"\nversion = "1"\n[tool.setuptools]\npackages = []\n{lines}'
    )
    program = textwrap.dedent("""
        import os, sys, sysconfig, setuptools
        real = setuptools.setup
        setuptools.setup = lambda **words: print([one.name.split(".")[-1] for one in real(**words).ext_modules or []])
        sys.argv = ["setup.py", "--name"]
        for choice in ("all", "abi3", "none", "free-threaded", "some"):
            free = choice == "free-threaded"
            sysconfig.get_config_vars()["Py_GIL_DISABLED"] = free
            os.environ["BUNDLER_BUILD_EXTENSIONS"] = "all" if free else choice
            exec(open("setup.py").read())
    """)
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line != "x"]
    assert found == [str(list(EXTENSIONS)), "['_kernel_writer', '_kernel_reader']", "[]", "[]"]
    assert done.stderr == "BUNDLER_BUILD_EXTENSIONS is 'some'; expected all, abi3 or none\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_is_released_is_one_commit(tmp_path, monkeypatch):
    """Who commits while a release is built changes nothing in it; builds that differ are no
    release.
    """
    root = tmp_path / "root"

    def git(*words):
        command = ["git", "-C", root, "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
        subprocess.run(command, check=True, capture_output=True)

    def commit(text):
        (root / "file").write_text(text)
        git("add", "file")
        git("commit", "-m", text)

    def build(kind, python, source, out, time):
        commit((root / "file").read_text() + "more")
        out.mkdir()
        made = out / "triton_bundler-1.tar.gz"
        made.write_text((source / "file").read_text() + time + ("" if settles else str(out)))
        return made

    root.mkdir()
    git("init")
    commit("first")
    one = Interpreter("3.12", "3.12.1", "python3.12", "include")
    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "kinds_for", lambda found: ([Kind(one)], []))
    monkeypatch.setattr(release.interpreters, "environment", lambda *words: "python")
    settles = True
    made, sums = release.release("HEAD", tmp_path / "out", [one])
    assert made.read_text().startswith("first")
    assert sums.read_text() == f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n"
    settles = False
    with pytest.raises(RuntimeError, match=r"two builds of [0-9a-f]{40} differ"):
        release.release("HEAD", tmp_path / "out", [one])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_files_are_built_twice_and_are_the_same(run_tool, tmp_path):
    """From two copies of the commit at different paths: extensions, times, order and modes too; the
    digests are of the files, and what was built works.
    """
    if (
        shutil.which("git") is None
        or subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True).returncode
    ):
        pytest.skip("the checkout has no history of git, which says what to build")
    version = "{}.{}".format(*sys.version_info[:2])
    if shutil.which("cc") is None or not find([version]):
        pytest.skip("there is no C compiler, or this Python has no headers or no venv")
    out = tmp_path / "out"
    done = run_tool("wheels release", out, "--python", version, timeout=400)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("release: ")] == []
    sums = [line.split("  ") for line in (out / "SHA256SUMS").read_text().splitlines()]
    assert sorted(name for _, name in sums) == sorted(
        {path.name for path in out.iterdir()} - {"SHA256SUMS"}
    )
    for digest, name in sums:
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    wheels = list(out.glob("*.whl"))
    assert len(wheels) == 3
    assert {f"{path.name}.cdx.json" for path in wheels} == {
        path.name for path in out.glob("*.json")
    }
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            everything = b"".join(archive.read(name) for name in archive.namelist())
        assert str(tmp_path).encode() not in everything
        assert str(ROOT).encode() not in everything
    done = run_tool("wheels trial", out, "--python", version, *FREE_THREADED, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    used = re.findall(r" (\S+)  extensions used: ([^,\n]+)", done.stdout)
    free = len(find(FREE_THREADED))
    assert len(used) == 4 + 2 * free
    assert [names for name, names in used if name.endswith("-none-any.whl")] == ["none"] * (
        1 + free
    )
    print(*[line for line in done.stdout.splitlines() if line.startswith("skipped")], sep="\n")

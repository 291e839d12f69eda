# SPDX-License-Identifier: Apache-2.0
"""A released wheel is the same bytes for everybody, and its bill of materials says what is in it and what it asks for."""

import base64
import hashlib
import importlib.util
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.wheels.bill import bill_of, pinned_versions, text_of

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
            ("bundler/a,b.py", code), ("triton_bundler-0.1.0.dist-info/METADATA", METADATA.encode()),
            ("triton_bundler-0.1.0.dist-info/RECORD",
             f"bundler/a,b.py,sha256={digest},6\ntriton_bundler-0.1.0.dist-info/RECORD,,\n".encode()),
        ):  # fmt: skip
            archive.writestr(zipfile.ZipInfo(name, (2026, 11, 22, 19, 0, 0)), data)
    return path


def test_the_bill_names_the_wheel_its_files_and_what_it_asks_for(wheel):
    """Digests are those of the bytes; what an extra brings is optional; the version is the one that was tested; ourselves is no requirement."""
    bill = bill_of(wheel, {"msgspec": "0.22.0"})
    itself = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"], itself["purl"]) == (
        "CycloneDX",
        "1.6",
        "pkg:pypi/triton-bundler@0.1.0",
    )
    assert itself["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    (file,) = itself["components"]
    assert (file["name"], file["hashes"][0]["content"]) == ("bundler/a,b.py", hashlib.sha256(b"x = 1\n").hexdigest())
    needed = {one["name"]: (one.get("version"), one["scope"]) for one in bill["components"]}
    assert needed == {"msgspec": ("0.22.0", "required"), "cryptography": (None, "optional")}
    assert bill["metadata"]["timestamp"] == "2026-11-22T19:00:00Z"
    assert set(bill["dependencies"][0]["dependsOn"]) == {one["bom-ref"] for one in bill["components"]}


def test_two_bills_of_one_wheel_are_equal(wheel):
    """Neither the clock nor chance is in it; another wheel has another serial number."""
    first = text_of(bill_of(wheel, pinned_versions()))
    assert text_of(bill_of(wheel, pinned_versions())) == first
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", b"")
    assert json.loads(text_of(bill_of(wheel, pinned_versions())))["serialNumber"] != json.loads(first)["serialNumber"]


def test_pins_are_read():
    """Names are normalized, comments are none."""
    pins = pinned_versions()
    assert pins["typing-extensions"]
    assert "#" not in "".join(pins)


@pytest.mark.slow
def test_a_wheel_is_built_twice_and_is_the_same(run_tool, tmp_path):
    """From two copies of the commit at different paths: extensions, times, order and modes too; the digests are of the files."""
    if (
        shutil.which("git") is None
        or subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True).returncode
    ):
        pytest.skip("the checkout has no history of git, which says what to build")
    for package in ("build", "setuptools"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package}, which builds wheels, is not installed")
    done = run_tool("wheels release", tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stderr
    sums = [line.split("  ") for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()]
    assert [name.rpartition(".")[2] for _, name in sums] == ["whl", "json"]
    for digest, name in sums:
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    with zipfile.ZipFile(tmp_path / "out" / sums[0][1]) as archive:
        assert str(tmp_path).encode() not in b"".join(archive.read(name) for name in archive.namelist())
        assert str(ROOT).encode() not in b"".join(archive.read(name) for name in archive.namelist())

# SPDX-License-Identifier: Apache-2.0
"""A Triton whose keys hold path and column of the source: it is noticed, explained, and cured by
TRITON_DISABLE_LINE_INFO.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import plugged
import pytest

import bundler
from bundler.cli import doctor

HERE = Path(__file__).parent
_PATCH = f"""
sys.path.insert(0, {str(HERE)!r})
import coming_triton
coming_triton.install()
"""
_COMPILE = """
compile_one("softmax")
say([hit for name, hit in heard])
"""
_COUNTS = "\nfrom bundler.toolchain import keytext\nsay(keytext.path_counts())\n"

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]


@pytest.fixture
def checkout(tmp_path):
    """Copy the example kernels to a directory of this name, and return the file."""

    def copy(name):
        (tmp_path / name).mkdir()
        return Path(shutil.copy(plugged.KERNELS, tmp_path / name / "kernels.py"))

    return copy


@pytest.fixture
def asked(checkout, store_url, tmp_path, monkeypatch):
    """Record in one checkout; then, with an empty cache directory, ask in another: returns whether
    each kernel was found.
    """

    def ask(patch, **variables):
        monkeypatch.setenv("TRITON_BUNDLER_STORE", store_url)
        monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
        found = []
        for name in ("first", "second"):
            env = plugged.environment(
                store_url, tmp_path / f"cache of {name}", TRITON_DEFAULT_FP_FUSION="1", **variables
            )
            found.append(plugged.run(patch + _COMPILE, env, kernels=checkout(name))[0])
        assert found[0] == [False]
        return found[1]

    return ask


def test_the_triton_of_today_finds_a_kernel_of_another_checkout(asked):
    """Its keys hold no path."""
    assert asked("") == [True]


def test_a_coming_triton_misses_it_and_explain_says_what_to_set(asked):
    """What differs is the path alone, which is told as such, and not as a change of what the kernel
    calls; no path stands in the message.
    """
    assert asked(_PATCH) == [False]
    (explained,) = bundler.explain(last=True)
    assert [difference.what for difference in explained.differences] == ["source path"]
    assert (
        "set TRITON_DISABLE_LINE_INFO=1 where kernels are recorded and where they are used"
        in explained.sentence
    )
    assert "/kernels.py" not in explained.sentence


def test_without_line_information_it_finds_it(asked):
    """The recommendation cures it."""
    assert asked(_PATCH, TRITON_DISABLE_LINE_INFO="1") == [True]


@pytest.mark.slow
def test_a_shifted_line_is_no_reason_where_it_does_not_count(
    checkout, store_url, tmp_path, monkeypatch
):
    """Without line information a kernel three lines below is found, and of another specialization
    only that is told.
    """
    monkeypatch.setenv("TRITON_BUNDLER_STORE", store_url)
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    first, second = checkout("first"), checkout("second")
    second.write_text("\n\n\n" + second.read_text())
    for name, file, expected in (("a", first, [False]), ("b", second, [True])):
        env = plugged.environment(
            store_url, tmp_path / name, TRITON_DEFAULT_FP_FUSION="1", TRITON_DISABLE_LINE_INFO="1"
        )
        assert plugged.run(_PATCH + _COMPILE, env, kernels=file)[0] == expected
    env = plugged.environment(
        store_url, tmp_path / "c", TRITON_DEFAULT_FP_FUSION="0", TRITON_DISABLE_LINE_INFO="1"
    )
    assert plugged.run(_PATCH + _COMPILE, env, kernels=second)[0] == [False]
    (explained,) = bundler.explain(last=True)
    assert {d.what.partition(" ")[0] for d in explained.differences} <= {"option", "environment"}
    assert explained.differences


@pytest.mark.parametrize(
    ("patch", "variables", "counts"),
    [("", {}, False), (_PATCH, {}, True), (_PATCH, {"TRITON_DISABLE_LINE_INFO": "1"}, False)],
)
def test_what_counts_is_asked_of_triton_itself(store_url, tmp_path, patch, variables, counts):
    """Not its release: one function in two files has two hashes or one."""
    env = plugged.environment(store_url, tmp_path / "cache", **variables)
    assert plugged.run(patch + _COUNTS, env)[0] is counts


def test_doctor_recommends_it_where_keys_hold_paths(monkeypatch):
    """One warning with the fix; nothing where keys hold no path, or where line information
    is off.
    """
    monkeypatch.setattr(doctor.identity, "untried", lambda name, release: False)
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    assert list(doctor.toolchain_checks()) == []
    monkeypatch.setattr(doctor, "_PATH_COUNTS", f"import sys{_PATCH}{doctor._PATH_COUNTS}")
    (found,) = doctor.toolchain_checks()
    assert (found[:2], "TRITON_DISABLE_LINE_INFO=1" in found[3]) == (
        ("warning", "line information"),
        True,
    )
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert list(doctor.toolchain_checks()) == []


def test_parts_hold_a_digest_and_no_path(tmp_path):
    """What travels tells two paths apart, and nothing of either."""
    code = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import coming_triton
coming_triton.install()
import importlib.util, bundler
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
with bundler.recording() as recording:
    kernels.compile_one("softmax", "cuda:90")
with recording.collect() as bundle:
    (kernel,) = bundle.kernels
    print(json.dumps([kernel.parts.proven, dict(kernel.parts.parts)]))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code, str(plugged.KERNELS)],
        capture_output=True,
        text=True,
        timeout=90,
        env=plugged.environment(None, tmp_path / "cache", TRITON_CACHE_MANAGER=None),
    )
    assert done.returncode == 0, done.stderr
    proven, parts = json.loads(done.stdout.splitlines()[-1])
    assert (proven, len(parts["source.path"])) == (True, 16)
    assert not any("/" in text for name, text in parts.items() if name.startswith("source.p"))

# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from bundler.errors import ConfigError
from bundler.toolchain import directories


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


SCRIPT = """
import os, sys
from bundler.toolchain import directories
print(directories.triton_cache_dir())
os.environ["TRITON_CACHE_DIR"] = "/second"
print(directories.triton_cache_dir())
assert "triton" not in sys.modules
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRITON_CACHE_DIR": "/first"}, "/first"),
        ({"TRITON_HOME": "/nfs"}, "/nfs/.triton/cache"),
        ({"HOME": "/home/me"}, "/home/me/.triton/cache"),
        ({"TRITON_HOME": "/nfs", "TRITON_CACHE_DIR": "/first"}, "/first"),
    ],
)
def test_triton_directory_before_the_import(run_python, variables, expected):
    """Without Triton imported the environment decides, at each call."""
    assert run_python(SCRIPT, env={**os.environ, **variables}) == [expected, "/second"]


@pytest.mark.release
@pytest.mark.toolchain
@pytest.mark.parametrize(
    "variables", [{}, {"TRITON_CACHE_DIR": "relative/dir"}, {"TRITON_HOME": "home"}]
)
def test_triton_directory_is_tritons_own(run_python, variables):
    """Before and after the import of Triton the answer is where Triton itself looks, made
    absolute.
    """
    pytest.importorskip("triton")
    code = """
import os
from bundler.toolchain import directories
before = directories.triton_cache_dir()
from triton import knobs
assert before == directories.triton_cache_dir() == os.path.abspath(knobs.cache.dir), (before, knobs.cache.dir)
os.environ["TRITON_CACHE_DIR"] = "/later"
assert directories.triton_cache_dir() == "/later"
knobs.propagate_env = False
knobs.cache.dir = "/in/python"
assert directories.triton_cache_dir() == "/in/python"
"""
    run_python(code, env={**os.environ, **variables})


def test_symbolic_links_keep_their_spelling(tmp_path, monkeypatch):
    """A cache behind a symbolic link is spelled as the user spells it, since that is what Triton
    writes into files.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "link"))
    assert directories.triton_cache_dir() == str(tmp_path / "link")


def test_empty_directory_is_an_error_that_names_the_variable(monkeypatch):
    """An empty TRITON_CACHE_DIR, with which Triton refuses to work, is named."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR"):
        directories.triton_cache_dir()


def test_inductor_directories(monkeypatch, tmp_path):
    """Inductor's directory follows its own variable, and Triton's wins for kernels; nothing is
    created or set.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "inductor")
    assert directories.inductor_cache_dir() == str(tmp_path / "inductor")
    assert directories.inductor_kernel_dir(2) == str(tmp_path / "inductor" / "triton" / "2")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "inductor"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert directories.inductor_kernel_dir(2) == "/elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_inductor_default_has_the_users_name(monkeypatch, tmp_path):
    """A user name with characters that no file name has is cleaned as torch cleans it."""
    monkeypatch.setattr("getpass.getuser", lambda: "corp\\me:you")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert directories.inductor_cache_dir() == str(tmp_path / "torchinductor_corp_me_you")


@pytest.mark.slow
def test_inductor_directories_are_torchs_own(monkeypatch, tmp_path):
    """Functions of torch give the same directories."""
    utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert directories.inductor_kernel_dir(1) == utils.triton_cache_dir(1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert directories.inductor_kernel_dir(0) == utils.triton_cache_dir(0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert directories.inductor_kernel_dir(0) == utils.triton_cache_dir(0)


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/tmp/inductor/triton/0", ("/tmp/inductor", 0)),
        ("/tmp/inductor/triton/12/", ("/tmp/inductor", 12)),
        ("/home/me/.triton/cache", None),
        ("/tmp/inductor/triton/0/KEY", None),
        ("/tmp/inductor/triton/x1", None),
        ("/tmp/inductor/triton/²", None),
        ("triton/0", None),
        ("/triton/0", ("/", 0)),
    ],
)
def test_inductor_layout(directory, expected):
    """Only `<root>/triton/<number>` is a directory of Inductor's."""
    assert directories.inductor_layout(directory) == expected

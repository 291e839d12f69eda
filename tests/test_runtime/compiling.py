# SPDX-License-Identifier: Apache-2.0
"""Compiles our extensions, for tests that run from a checkout."""

import importlib.util
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiler():
    """Return a C compiler, or skip."""
    found = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if found is None:
        pytest.skip("needs a C compiler, and there is none")
    return found


def sources(name):
    """Return the C files of one of our extensions, as pyproject.toml lists them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    (paths,) = (each["sources"] for each in listed if each["name"].rpartition(".")[2] == name)
    return [ROOT / path for path in paths]


def compile_extension(name, folder):
    """Compile one of our extensions without a warning, and import it."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        pytest.skip(f"needs Python.h to compile {name}, and there is none in {include}")
    path = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = [
        compiler(),
        "-std=c11",
        "-O2",
        *warnings,
        "-shared",
        "-fPIC",
        f"-I{include}",
        *sources(name),
        "-o",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cxx_compiler():
    """Return a compiler of C++, or skip."""
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs a compiler of C++, and there is none")
    return found


def compile_text(text, path, *, language, library=True):
    """Compile a text of C or C++ without a warning; returns the path of the library."""
    source = path.with_suffix({"c": ".c", "c++": ".cpp"}[language])
    source.write_text(text)
    command, standard = (compiler(), "c11") if language == "c" else (cxx_compiler(), "c++17")
    kind = ["-shared", "-fPIC"] if library else ["-ldl"]
    done = subprocess.run(
        [
            command,
            f"-std={standard}",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-O1",
            source,
            *kind,
            "-o",
            path,
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return path

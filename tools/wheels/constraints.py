# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels constraints`: write constraints/torch-X-triton-Y.txt, a file for each
pair of torch and Triton that was tried.

A file pins the pair, and what the package asks for with the extra `all` in the versions of
constraints.txt.  It has nothing of what only the tests, the checks and the documentation need.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.shared import programs
from tools.shared.processes import ROOT
from tools.wheels.bill import pinned_versions

FOLDER = "constraints"
# torch and the Triton that its own metadata ask for, of each minor release that was tried.
PAIRS = (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.14.1", "3.8.0"), ("2.15.0", "3.9.0"))


def name_of(torch: str, triton: str) -> str:
    """Return the name of a pair's file."""
    return f"torch-{_minor(torch)}-triton-{_minor(triton)}.txt"


def requirements() -> list[str]:
    """Return what the package asks for with the extra `all`, but for torch and Triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"]["all"]
    asked = [*project["dependencies"]]
    for extra in line.partition("[")[2].rstrip("]").split(","):
        asked += project["optional-dependencies"][extra]
    return sorted({one for one in asked if not one.startswith(("triton", "torch"))})


def text_of(torch: str, triton: str) -> str:
    """Return the file of a pair."""
    pins = pinned_versions()
    names = sorted(one.partition(">=")[0] for one in requirements())
    lines = [f"{name}=={pins[name.replace('_', '-')]}" for name in names]
    name = name_of(torch, triton)
    return "\n".join(
        (
            "# SPDX-License-Identifier: Apache-2.0",
            f"# torch {_minor(torch)}, its Triton, and tested versions of what we need beside them.",
            "# `python -m tools.wheels constraints` writes it.",
            f"#   pip install -c {FOLDER}/{name} 'triton-bundler[all]'",
            f"torch=={torch}",
            f"triton=={triton}; sys_platform == 'linux'",
            *lines,
            "",
        )
    )


def _minor(release: str) -> str:
    return release.rpartition(".")[0]


def write(folder: Path) -> list[Path]:
    """Write the files into a folder, remove those of other pairs, and return them."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("torch-*.txt"):
        old.unlink()
    files = []
    for torch, triton in PAIRS:
        files.append(folder / name_of(torch, triton))
        files[-1].write_text(text_of(torch, triton), encoding="utf-8")
    return files


def main() -> int:
    """Write the files, and print their names."""
    programs.arguments(__doc__)
    for path in write(ROOT / FOLDER):
        print(path.relative_to(ROOT))
    return 0

# SPDX-License-Identifier: Apache-2.0
"""examples/notebook.ipynb runs from top to bottom, and shows a table for everything of ours that a
cell ends with.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
# What a notebook's own process does: each cell in order in one namespace; the value of its last
# expression is shown.
_RUN = """
import ast, json, sys
names, shown = {"__name__": "__main__"}, []
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    value = eval(compile(last, "cell", "eval"), names) if last is not None else None
    shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else None)
json.dump(shown, open(sys.argv[2], "w", encoding="utf-8"))
"""


def cells():
    """Return the source of each cell with code."""
    document = json.loads(NOTEBOOK.read_bytes())
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def test_nothing_that_was_run_is_in_the_file():
    """Outputs hold paths and times of whoever ran it last."""
    document = json.loads(NOTEBOOK.read_bytes())
    assert (document["nbformat"], len(cells()) > 5) == (4, True)
    for cell in document["cells"]:
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("triton") is None, reason="the notebook needs triton, which is not installed"
)
def test_the_notebook_runs(tmp_path):
    """All cells run in a process of their own; recording, bundle and reports are tables."""
    (tmp_path / "cells.json").write_text(json.dumps(cells()))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    # Where a notebook runs is where it lies; the package is the one that is tested.
    path = os.pathsep.join(filter(None, [str(EXAMPLES), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, tmp_path / "cells.json", tmp_path / "shown.json"],
        env=clean | {"TMPDIR": str(tmp_path), "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    shown = [html for html in json.loads((tmp_path / "shown.json").read_text()) if html is not None]
    titles = [html.partition('bold">')[2].partition("<")[0] for html in shown]
    assert titles == [
        "Recording, stopped",
        "Bundle",
        "RestoreReport",
        "CheckReport",
        "PushReport",
        "VerifyReport",
        "PruneReport",
    ]
    assert "gelu_kernel" in shown[1]

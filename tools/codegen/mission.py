# SPDX-License-Identifier: Apache-2.0
"""Programs generated and built without a GPU, carried, and launched on one in a process without
torch and Triton: writes docs/results/codegen-mission.json.

    python -m tools.codegen mission --build FOLDER [NAME ...]
        here: one bundle for each of the graphs, for cuda:90
    python -m tools.codegen mission --launch FOLDER --results OUT
        there: launched, and compared with torch
    python -m tools.codegen mission --check
        does the result meet its target?

The launching process has strict mode on, and neither torch nor Triton can be imported in it: inputs
are arrays of numpy, memory is the CUDA driver's.  It leaves results in files, which a second
process compares with what torch computes from the same bits on the same GPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.codegen import bench_rows
from tools.codegen.command_line import parser
from tools.shared import measurement
from tools.shared.processes import answer

NAME = "codegen-mission"
TARGETS = ("cuda:90",)
LEAST_GRAPHS = 40
# In tolerances of torch.testing, relative to the largest number; and beside what torch's own
# results are off.
MOST_OFF, MOST_BESIDE_TORCH = 10.0, 2.0
# Of each of the two processes.
_LIMIT_S = 3600.0
Found = dict[str, Any]


def main() -> int:
    """Build, launch or check."""
    line = parser(__doc__, "names results check")
    line.add_argument("--build", type=Path, metavar="FOLDER", help="where bundles go")
    line.add_argument("--launch", type=Path, metavar="FOLDER", help="where bundles are")
    options = line.parse_args()
    if options.check:
        return bench_rows.show(json.loads((options.results / f"{NAME}.json").read_text()))
    if options.build:
        return build(options.build, options.names)
    if not options.launch:
        line.error("--build, --launch or --check")
    return launch(options.launch, options.names, options.results)


def build(folder: Path, names: list[str]) -> int:
    """Generate and build; a line for each graph."""
    from bundler.codegen.program import GenerateOptions, generate
    from tools.codegen.compared_graphs import GRAPHS

    folder.mkdir(parents=True, exist_ok=True)
    for name in names or GRAPHS:
        function, make = GRAPHS[name]
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mission.") as sources:
            program = generate(function, make(), options=GenerateOptions(name, sources))
            program.build(TARGETS).save(folder / f"{name}.tbundle")
        print(
            f"{time.monotonic() - started:5.1f} s  {name}: {len(program.kernels)} kernels",
            flush=True,
        )
    return 0


def launch(folder: Path, names: list[str], results: Path) -> int:
    """Launch in one process, compare in another, and write the result."""
    with tempfile.TemporaryDirectory(
        prefix="mission.", dir=measurement.fast_directory()
    ) as outputs:
        launched = _process("tools.codegen.mission_launch", str(folder), outputs, *names)
        compared = _process("tools.codegen.mission_compare", str(folder), outputs, *names)
    result: Found = {"launched": launched, "compared": compared, "targets": TARGETS}
    result["rows"] = rows(result)
    measurement.save(NAME, result, results)
    return bench_rows.show(result)


def rows(result: Found) -> list[Found]:
    """Return what the page and `--check` show."""
    launched, compared = result["launched"], result["compared"]
    if "error" in launched or "error" in compared:
        return [
            measurement.row(
                "mission: errors",
                1,
                "errors",
                most=0,
                peer=(launched.get("error") or compared["error"])[-300:],
            )
        ]
    graphs = launched["graphs"]
    ran = [name for name, one in graphs.items() if "error" not in one]
    close = [name for name in ran if _close(compared["graphs"].get(name, {"error": ""}))]
    return [
        measurement.row(
            "mission: modules of torch, Triton or a compiler in the launching process",
            len(launched["imported"]),
            "modules",
            most=0,
        ),
        measurement.row(
            "mission: built without a GPU, launched without torch and Triton",
            len(ran),
            f"of {len(graphs)}",
            least=max(LEAST_GRAPHS, len(graphs) - len(launched["skipped"])),
            peer=f"{launched['kernels']} kernels",
            wrong={name: one["error"] for name, one in graphs.items() if "error" in one},
        ),
        measurement.row(
            "mission: numbers equal to torch's",
            len(close),
            f"of {len(ran)}",
            least=len(ran),
            wrong={name: compared["graphs"].get(name) for name in ran if name not in close},
        ),
    ]


def _close(one: Found) -> bool:
    return "error" not in one and one["off"] <= max(MOST_OFF, MOST_BESIDE_TORCH * one["off_torch"])


def section(result: Found) -> str:
    """Return the section of the page."""
    about = (
        "`python -m tools.codegen mission`. The same graphs, generated and built for cuda:90 on a"
        " machine without a GPU, launched on one from their bundles in a process in which neither"
        " torch nor Triton can be imported, in strict mode; results compared with torch's in"
        " float64."
    )
    table = bench_rows.rows_table(result["rows"], prefix="mission: ")
    return f"## Generated there, launched here\n\n{about}\n\n{table}"


def _process(program: str, *arguments: str) -> Found:
    """Run a module, which prints JSON in its last line."""
    try:
        strict = {"TRITON_BUNDLER_STRICT": "error"}
        found: Found = answer(program, *arguments, environment=strict, timeout_s=_LIMIT_S)
    except RuntimeError as error:
        return {"error": str(error)[-3000:]}
    return found

# SPDX-License-Identifier: Apache-2.0
"""`export_kernels`, `grid_option`: what `tune export --as kernels` needs: the kernels that won, as files for programs in other languages.

`tune.py` has the command.
"""

from __future__ import annotations

import click

from bundler.cli import wording
from bundler.cli.command import FINE
from bundler.cli.terminal import Screen
from bundler.cli.tuning_sources import matching
from bundler.errors import NotFound
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Tuning
from bundler.format.entries import Kernel
from bundler.format.launch_spec import TuningRecord
from bundler.lifecycle.tuning_directory import tunings_of
from bundler.runtime.heuristics.grid_expressions import TextGrid
from bundler.runtime.tuning.kernel_export import ExportNotes, compiled_in, export_kernel, grid_notes
from bundler.runtime.tuning.tuning_winners import config_of

_AXES = 3

grid_option = click.option(
    "--grid", "grid", metavar="X[,Y[,Z]]", default="",
    help="With --as kernels: the grid as expressions over arguments and parameters: '-(-n // BLOCK)'.",
)  # fmt: skip


def grid_of(text: str) -> TextGrid | None:
    """Return the grid that `--grid` names, None where it names none.

    Raises:
        UsageError: more than three expressions.
        ConfigError: one of them is no arithmetic on names and whole numbers.
    """
    if not text.strip():
        return None
    axes, depth, start = [], 0, 0
    for place, character in enumerate(text):  # a comma inside of max(a, b) is no end
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            axes.append(text[start:place])
            start = place + 1
    axes.append(text[start:])
    if len(axes) > _AXES:
        raise click.UsageError(f"--grid {text}: expected one to three expressions, got {len(axes)}")
    grid = TextGrid(*(axis.strip() for axis in axes))
    grid.expressions({})
    return grid


def export_kernels(
    screen: Screen, source: str, wanted: str | None, grid: TextGrid | None, output: str
) -> int:
    """Write the kernel of each record of a bundle; records whose kernel is not there are warned of."""
    files, left_out = [], []
    with Bundle.load(source) as bundle:
        pairs = tunings_of(bundle)
        if not pairs:
            raise NotFound(f"{source} has no tuning record to export", path=source)
        kernels = {kernel.key: kernel for kernel in bundle.kernels}
        for record, tuning in matching(pairs, wanted, source):
            kernel = _winner(record, tuning, kernels)
            if kernel is None or not kernel.has_facts:
                left_out.append(record.kernel)
                screen.warn(f"left out {record.kernel}: {source} does not have the kernel that won")
                continue
            config = config_of(record.config)
            expressions, why = grid_notes(grid, {**compiled_in(kernel), **config.all_kwargs()})
            notes = ExportNotes(config, expressions, why)
            files.append(
                str(export_kernel(kernel, bundle.read(kernel.binary), bundle, notes, output).header)
            )
    screen.done(f"wrote {wording.count(len(files), 'kernel')} to {output}")
    screen.finish({"path": output, "kernels": len(files), "headers": files, "left_out": left_out})
    return FINE


def _winner(
    record: TuningRecord, tuning: Tuning | None, kernels: dict[str, Kernel]
) -> Kernel | None:
    timings = tuning.timings if tuning is not None else ()
    won = [timing.key for timing in timings if dict(timing.config) == dict(record.config)]
    return next((kernels[key] for key in won if key in kernels), None)

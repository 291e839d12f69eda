# SPDX-License-Identifier: Apache-2.0
"""The command's table of contents.  What is heavy, is imported by the command that needs it, when it runs."""

from __future__ import annotations

import click

import bundler
from bundler.cli.build import build
from bundler.cli.command import Commands, example
from bundler.cli.compare import diff, merge
from bundler.cli.demo import demo
from bundler.cli.doctor import doctor
from bundler.cli.explaining import explain
from bundler.cli.look import inspect, verify
from bundler.cli.move import pack
from bundler.cli.record import run
from bundler.cli.restoring import restore
from bundler.cli.share import pull, push, tags
from bundler.cli.tend import prune, stats
from bundler.cli.tune import tune


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("demo", "run -o model.tbundle -- python train.py", "restore model.tbundle"),
)
@click.version_option(bundler.__version__, "--version", message="triton-bundler %(version)s")
def app() -> None:
    """Pack compiled Triton kernels into one file, and put them back where the next process finds them.

    Exit status: 0 fine, 1 a problem was found, 2 the command was used wrongly.
    """


for command in (
    demo, run, build, tune, pack, restore, inspect, verify, diff, merge, push, pull, tags, stats, prune, explain, doctor,
):  # fmt: skip
    app.add_command(command)

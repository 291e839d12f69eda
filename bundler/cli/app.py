# SPDX-License-Identifier: Apache-2.0
"""`app`: the list of commands, each imported from its module.

`main` in `bundler/cli/__init__.py` calls it.
"""

from __future__ import annotations

import click

import bundler
from bundler.cli.build import build
from bundler.cli.capture_command import capture
from bundler.cli.command import TALK_OPTIONS, Commands, example
from bundler.cli.comparison import diff, merge
from bundler.cli.demo import demo
from bundler.cli.doctor import doctor
from bundler.cli.explain import explain
from bundler.cli.extraction import extract
from bundler.cli.generate import generate_command
from bundler.cli.image_commands import oci
from bundler.cli.inspection import inspect, verify
from bundler.cli.pack import pack
from bundler.cli.report.report_command import report
from bundler.cli.restore import restore
from bundler.cli.run import run
from bundler.cli.serve_command import serve
from bundler.cli.settings_command import config_command
from bundler.cli.shell_setup import completion, man
from bundler.cli.signatures import key, sign
from bundler.cli.store_upkeep import prune, stats
from bundler.cli.sync_command import sync
from bundler.cli.top_command import top
from bundler.cli.transfer import pull, push, tags
from bundler.cli.tune import tune


@click.group(
    cls=Commands,
    short_help="Compiled Triton kernels in one file, and back where the next process finds them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[*TALK_OPTIONS],
    epilog=example("demo", "run -o model.tbundle -- python train.py", "restore model.tbundle"),
)
@click.version_option(bundler.__version__, "--version", message="triton-bundler %(version)s")
def app() -> None:
    """Pack compiled Triton kernels into one file, and put them back where the next process finds
    them.

    Exit status: 0 fine, 1 a problem was found, 2 the command was used wrongly, 130 after Ctrl-C.
    The run and capture commands end as the program that they run.
    """


# In the order in which a newcomer meets them.
_KERNELS = (demo, run, build, generate_command, capture, tune, pack, restore)
_BUNDLES = (inspect, report, extract, verify, diff, merge)
_STORES = (push, pull, tags, stats, prune, sync, serve, top, oci)
_MACHINE = (sign, key, explain, doctor, config_command, completion, man)
for command in (*_KERNELS, *_BUNDLES, *_STORES, *_MACHINE):
    app.add_command(command)

# SPDX-License-Identifier: Apache-2.0
"""`app`: the list of commands, each imported from its module.

`main` in `bundler/cli/__init__.py` calls it.
"""

from __future__ import annotations

import platform

import click

import bundler
from bundler.cli.builds.build import build
from bundler.cli.builds.capture_command import capture
from bundler.cli.builds.generate import generate_command
from bundler.cli.builds.run import run
from bundler.cli.bundles.comparison import diff, merge
from bundler.cli.bundles.extraction import extract
from bundler.cli.bundles.inspection import inspect, verify
from bundler.cli.bundles.signatures import key, sign
from bundler.cli.bundles.tune import tune
from bundler.cli.command import TALK_OPTIONS, group
from bundler.cli.demo import demo
from bundler.cli.doctor import doctor
from bundler.cli.explain import explain
from bundler.cli.pack import pack
from bundler.cli.report.report_command import report
from bundler.cli.restore import restore
from bundler.cli.settings_command import config_command
from bundler.cli.shell_setup import completion, man
from bundler.cli.stores.image_commands import oci
from bundler.cli.stores.serve_command import serve
from bundler.cli.stores.store_upkeep import prune, stats
from bundler.cli.stores.sync_command import sync
from bundler.cli.stores.top_command import top
from bundler.cli.stores.transfer import pull, push, tags
from bundler.toolchain import identity, ptxas

# Triton has one ptxas up to this compute capability, and another one beyond.
_ARCH = 90


@group(
    "Compiled Triton kernels in one file, and back where the next process finds them.",
    "demo",
    "run -o model.tbundle -- python train.py",
    "restore model.tbundle",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[*TALK_OPTIONS],
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, asked: _tell_version(context) if asked else None,
    help="Show the version, and those of Python, Triton, torch and ptxas, and exit.",
)
def app() -> None:
    """Pack compiled Triton kernels into one file, and put them back where the next process finds
    them.

    Exit status: 0 fine, 1 a problem was found, 2 the command was used wrongly, 130 after Ctrl-C.
    The run and capture commands end as the program that they run.
    """


def _tell_version(context: click.Context) -> None:
    found = {
        "Python": platform.python_version(),
        "Triton": identity.version_of("triton"),
        "torch": identity.version_of("torch"),
        "ptxas": ptxas.ptxas_version(_ARCH),
    }
    click.echo(f"triton-bundler {bundler.__version__}")
    click.echo(", ".join(f"{name} {version or 'not found'}" for name, version in found.items()))
    context.exit()


# In the order in which a newcomer meets them.
_KERNELS = (demo, run, build, generate_command, capture, tune, pack, restore)
_BUNDLES = (inspect, report, extract, verify, diff, merge)
_STORES = (push, pull, tags, stats, prune, sync, serve, top, oci)
_MACHINE = (sign, key, explain, doctor, config_command, completion, man)
for command in (*_KERNELS, *_BUNDLES, *_STORES, *_MACHINE):
    app.add_command(command)

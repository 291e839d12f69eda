# SPDX-License-Identifier: Apache-2.0
"""`app`: the list of commands, each imported from its module when it is asked for.

`main` in `bundler/cli/__init__.py` calls it.
"""

from __future__ import annotations

import platform
from collections import UserDict
from importlib import import_module
from typing import Any

import click

import bundler
from bundler.cli.command import TALK_OPTIONS, group
from bundler.toolchain import identity, ptxas

# Triton has one ptxas up to this compute capability, and another one beyond.
_ARCH = 90
# In the order in which a newcomer meets them: the module below `bundler.cli`, and what the command
# is called there where that is not its name.
_KERNELS = {
    "demo": "demo",
    "run": "builds.run",
    "build": "builds.build",
    "generate": "builds.generate:generate_command",
    "capture": "builds.capture_command",
    "tune": "bundles.tune",
    "pack": "pack",
    "restore": "restore",
}
_BUNDLES = {
    "inspect": "bundles.inspection",
    "report": "bundles.report_page",
    "extract": "bundles.extraction",
    "verify": "bundles.inspection",
    "diff": "bundles.comparison",
    "merge": "bundles.comparison",
}
_STORES = {
    "push": "stores.transfer",
    "pull": "stores.transfer",
    "tags": "stores.transfer",
    "stats": "stores.store_upkeep",
    "prune": "stores.store_upkeep",
    "sync": "stores.transfer",
    "serve": "stores.serve_command",
    "top": "stores.top_command",
    "oci": "stores.image_commands",
}
_MACHINE = {
    "sign": "bundles.signatures",
    "key": "bundles.signatures",
    "explain": "explain",
    "doctor": "doctor",
    "config": "settings_command:config_command",
    "completion": "shell_setup",
    "man": "shell_setup",
}


class CommandModules(UserDict[str, Any]):
    """Commands by name, each imported when it is asked for: one command's start is half as long
    without the modules of all others.
    """

    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = self.data[name].partition(":")
        command: click.Command = getattr(import_module(f"bundler.cli.{module}"), attribute or name)
        return command


@group(
    "Compiled Triton kernels in one file, and back where the next process finds them.",
    "demo",
    "run -o model.tbundle -- python train.py",
    "restore model.tbundle",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[*TALK_OPTIONS],
    commands=CommandModules(_KERNELS | _BUNDLES | _STORES | _MACHINE),
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

# SPDX-License-Identifier: Apache-2.0
"""`format_options`, `key_option`, `import_configs`, `export_configs`: what `tune export` and `tune import` need for the config files of other projects.

`tune.py` has the commands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from bundler.cli import wording
from bundler.cli.command import FINE
from bundler.cli.terminal import Screen
from bundler.lifecycle.config_files import FileFacts
from bundler.lifecycle.tuning_directory import Pair
from bundler.lifecycle.tuning_formats import FORMATS, read_configs, write_configs

key_option = click.option(
    "--key", "key", metavar="NAMES", default="",
    help="What the values of your tuner's key are, for --format vllm-moe and sglang-moe: E,N,M and dtype; _ for what does not count.",
)  # fmt: skip


def format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--format`, as `project`, and what it may be told by `--device`, `--triton` and `--key`, as `told`."""

    @click.option(
        "--format",
        "project",
        type=click.Choice(list(FORMATS)),
        help="Config files of another project.",
    )
    @click.option(
        "--device",
        metavar="NAME",
        default="",
        help="With --format: the GPU, where files or records do not say it.",
    )
    @click.option(
        "--triton",
        metavar="RELEASE",
        default="",
        help="With --format: the release of Triton, where they do not say it.",
    )
    @functools.wraps(command)
    def with_told(
        *args: Any, device: str, triton: str, key: str = "", project: str | None, **others: Any
    ) -> Any:
        names = tuple(name.strip() for name in key.split(",")) if key else ()
        if project is None and (device or triton or names):
            raise click.UsageError("--device, --triton and --key are about the files of --format")
        return command(*args, project=project, told=FileFacts(device, triton, names), **others)

    return with_told


def import_configs(screen: Screen, source: str, project: str, told: FileFacts) -> list[Pair]:
    """Return the records in a file or directory of a project; files of a directory that are none are warned of."""
    pairs, unreadable = read_configs(source, project, told)
    for problem in unreadable:
        screen.warn(f"left out {problem}")
    return pairs


def export_configs(
    screen: Screen, pairs: Sequence[Pair], project: str, told: FileFacts, output: str
) -> int:
    """Write records as the files of a project; records that it cannot hold are warned of."""
    written = write_configs(pairs, project, told, output)
    for kernel, why in written.left_out:
        screen.warn(f"left out {kernel}: {why}")
    screen.done(
        f"wrote {wording.count(written.records, 'record')} to {wording.count(len(written.files), 'file')} below {output}"
    )
    screen.finish({"path": output, "records": written.records, "files": list(written.files),
                   "left_out": [list(pair) for pair in written.left_out]})  # fmt: skip
    return FINE

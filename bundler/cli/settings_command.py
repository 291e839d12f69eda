# SPDX-License-Identifier: Apache-2.0
"""The command `config`: what holds for each setting, and which variable, file or default says so.

`app.py` lists the command; `bundler/config.py` reads the settings.
"""

from __future__ import annotations

from bundler import config
from bundler.cli import wording
from bundler.cli.command import command, flag, group
from bundler.cli.terminal import Column, Screen
from bundler.config import SettingOrigin

COLUMNS = (Column("setting"), Column("value", folds=True))
ORIGIN = Column("from", folds=True)


@group(
    "Say which settings hold, and where each comes from.",
    "config show",
    "config show --origin --json",
    name="config",
)
def config_command() -> None:
    """Look at the settings of triton-bundler.

    What an option of a command says goes first, then environment variables, then the nearest
    triton-bundler.toml or pyproject.toml with [tool.triton-bundler], from this directory upwards,
    then ~/.config/triton-bundler/triton-bundler.toml, then defaults.
    """


@command(
    "List the settings.",
    "config show",
    "config show --origin --json",
    name="show",
    group=config_command,
)
@flag("--origin", "Say what sets each: a variable, a file, or nobody.")
def show(screen: Screen, origin: bool) -> None:
    """List what holds for each setting in this directory."""
    found = config.origins()
    config.settings()  # a wrong value is an error here as it would be where it counts
    rows = []
    for one in found:
        value = _masked(one) or one.setting.default.replace("`", "")
        origins = [one.origin] if origin else []
        rows.append((config.setting_key(one.setting.name), value, *origins))
    screen.table((*COLUMNS, ORIGIN) if origin else COLUMNS, rows)
    files = config.settings_files()
    for file in files:
        if file.passed_over:
            screen.line(f"passed over {file.path}: {file.passed_over}")
        elif origin:
            screen.line(f"read {file.path}")
    screen.finish(
        {
            "settings": {
                config.setting_key(one.setting.name): {
                    "value": _masked(one),
                    "origin": one.origin,
                    "variable": config.PREFIX + one.setting.name,
                }
                for one in found
            },
            "files": [{"path": file.path, "passed_over": file.passed_over} for file in files],
        }
    )


def _masked(one: SettingOrigin) -> str | None:
    return wording.masked(one.value) if one.value is not None else None

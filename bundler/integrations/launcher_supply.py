# SPDX-License-Identifier: Apache-2.0
"""`supply_launchers`: for how long a session gives Triton launchers of ours, and what came of it.

`_process.py` begins it for each session and ends it; with `TRITON_BUNDLER_LAUNCHER=triton` there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bundler.toolchain.driver_modules import driver_modules

if TYPE_CHECKING:
    from bundler.config import Launcher
    from bundler.integrations.session_tally import Tally


def supply_launchers(launcher: Launcher, tally: Tally) -> Callable[[], None]:
    """Give Triton what it would have a C compiler build, from now on; returns what ends that.

    Args:
        launcher: `bundler`, or `triton` to leave everything as it is.
        tally: counts what was given, and why something was not.
    """
    if launcher == "triton":
        return lambda: None
    from bundler.runtime.launch.jit_modules import JitModules

    supplier = JitModules(tally.launcher)
    driver_modules.supply(supplier)
    return lambda: driver_modules.withdraw(supplier)

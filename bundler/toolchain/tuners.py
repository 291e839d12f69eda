# SPDX-License-Identifier: Apache-2.0
"""`tuners_not_saved`: tuners of this process whose results Triton does not write down.

The report of a process (`bundler/integrations/process_report.py`) names them.
"""

from __future__ import annotations

from bundler.toolchain import instances


def tuners_not_saved() -> tuple[str, ...]:
    """Return the names of tuned kernels that were timed here and will be timed again: their configurations have a `pre_hook`.

    Triton writes a result file only for configurations that it could write into one.  Empty when Triton is not imported.  Which tuners
    are known, says `instances`.
    """
    tuners = instances.instances(instances.TUNER)
    timed = [
        tuner
        for tuner in tuners
        if tuner.cache and any(config.pre_hook for config in tuner.configs)
    ]
    return tuple(sorted({_name(tuner) for tuner in timed}))


def _name(tuner: object) -> str:
    function = tuner
    while hasattr(function, "fn") and not hasattr(function, "__name__"):
        function = function.fn
    return str(getattr(function, "__name__", "a kernel"))

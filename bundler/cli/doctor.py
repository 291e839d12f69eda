# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`: what this machine has, and what keeps kernels from being found.

The checks themselves are in `doctor_checks.py`; `app.py` lists the command.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from bundler.cli.command import FINE, example, reports
from bundler.cli.command import PROBLEM as PROBLEM_STATUS
from bundler.cli.doctor_checks import OK, PROBLEM, WARNING, all_checks
from bundler.cli.terminal import Screen

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


@click.command(short_help="Say what this machine has, and what is in the way.", epilog=example("doctor"))
@reports
def doctor(screen: Screen) -> int:
    """Say what this machine has: Python, Triton, ptxas, GPU, cache directories, C compiler, settings.

    Exit status 1 when something is broken; what is merely absent is a warning.
    """
    with screen.progress("looking") as bar:
        findings = []
        for finding in all_checks():
            bar.advance(finding.what)
            findings.append(finding)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        screen.line(f"{finding.status:<7}  {finding.what:<{width}}  {finding.value}", STYLES[finding.status]
                    if finding.status != OK else "")  # fmt: skip
        if finding.fix:
            screen.line(f"{'':<7}  {'':<{width}}  {finding.fix}")
    counts = {status: sum(finding.status == status for finding in findings) for status in (PROBLEM, WARNING)}
    screen.line()
    screen.done(_verdict(counts[PROBLEM], counts[WARNING]))
    screen.finish({"ok": not counts[PROBLEM], "problems": counts[PROBLEM], "checks": [asdict(f) for f in findings]})
    return PROBLEM_STATUS if counts[PROBLEM] else FINE


def _verdict(problems: int, warnings: int) -> str:
    if problems:
        return f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return "no problem found" + (f", {warnings} warning{'s' * (warnings != 1)}" if warnings else "")

# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`: what this machine has, and what keeps kernels from being found.

The checks themselves are in `doctor_checks.py`; `app.py` lists the command.
"""

from __future__ import annotations

from dataclasses import replace

import click

from bundler.cli.command import FINE, example, reports
from bundler.cli.command import PROBLEM as PROBLEM_STATUS
from bundler.cli.doctor_checks import OK, PROBLEM, WARNING, Finding, all_checks
from bundler.cli.terminal import Screen

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


@click.command(
    short_help="Say what this machine has, and what is in the way.",
    epilog=example("doctor", "doctor --fix"),
)
@click.option(
    "--fix",
    "mends",
    is_flag=True,
    help="Mend what can be mended without losing anything: modes of files, leftovers.",
)
@reports
def doctor(screen: Screen, mends: bool) -> int:
    """Say what this machine has: Python, Triton, ptxas, GPU, cache directories, C compiler, settings.

    Exit status 1 when something is broken; what is merely absent is a warning.
    """
    with screen.progress("looking") as bar:
        findings = []
        for finding in all_checks():
            bar.advance(finding.what)
            findings.append(_mended(finding) if mends else finding)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        screen.line(f"{finding.status:<7}  {finding.what:<{width}}  {finding.value}", STYLES[finding.status]
                    if finding.status != OK else "")  # fmt: skip
        if finding.fix:
            by_us = ", or run doctor --fix" if finding.mend is not None else ""
            screen.line(f"{'':<7}  {'':<{width}}  {finding.fix}{by_us}")
    counts = {
        status: sum(finding.status == status for finding in findings)
        for status in (PROBLEM, WARNING)
    }
    screen.line()
    screen.done(_verdict(counts[PROBLEM], counts[WARNING]))
    told = [
        {
            "status": f.status,
            "what": f.what,
            "value": f.value,
            "fix": f.fix,
            "mendable": f.mend is not None,
        }
        for f in findings
    ]
    screen.finish({"ok": not counts[PROBLEM], "problems": counts[PROBLEM], "checks": told})
    return PROBLEM_STATUS if counts[PROBLEM] else FINE


def _mended(finding: Finding) -> Finding:
    """Mend what a finding tells, where that is possible; returns what is to be said then."""
    if finding.mend is None:
        return finding
    try:
        finding.mend()
    except OSError as error:
        return replace(
            finding, value=f"{finding.value}; mending it failed ({error.strerror})", mend=None
        )
    return Finding(OK, finding.what, f"{finding.value}: mended")


def _verdict(problems: int, warnings: int) -> str:
    if problems:
        return (
            f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        )
    return "no problem found" + (f", {warnings} warning{'s' * (warnings != 1)}" if warnings else "")

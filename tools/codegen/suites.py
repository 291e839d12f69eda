# SPDX-License-Identifier: Apache-2.0
"""torch's own lists of operators and modules, op_db and module_db, as generated programs: right,
wrong or raised, beside eager torch.

    python -m tools.codegen suites --shard 1/40 --workers 2
        on the CPU, in Triton's interpreter
    python -m tools.codegen suites --device cuda --workers 16 --seconds 500 --out FILE --resume
    python -m tools.codegen suites --only 'op_db/ldexp/*'
        one operator
    python -m tools.codegen suites --templates all --only 'op_db/*mm/*'
        products as kernels, in the modes that are generated; what is still called raises
    python -m tools.codegen suites --device cuda --merge JOURNAL JOURNAL --out FILE
        one result of several

A case is named suite/operator/dtype/mode/sample (`suite_cases`), is judged by `suite_judge`, and
runs in a process that may crash or hang, which is one `raises`.  Where there is no network,
expecttest comes in a folder of its own: `pip install --target FOLDER expecttest` elsewhere, and
PYTHONPATH=FOLDER.

`--out FILE` notes each verdict in FILE.journal as it comes, and writes FILE from all that the
journal has: shards of one machine may be run one after another with the same FILE.  Exit status 1:
something is wrong or raises that `suite_exceptions` does not allow, or was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.codegen import worker_pool
from tools.codegen.command_line import parser
from tools.codegen.drawn_candidates import ASKED
from tools.codegen.suite_exceptions import Allowed, exception_of
from tools.codegen.worker_pool import Answer, noted
from tools.shared import measurement

if TYPE_CHECKING:
    from tools.codegen.suite_cases import Case

OUTCOMES = ("right", "unchecked", "skipped", "allowed", "wrong", "raises")
_FAULTS = frozenset({"wrong", "raises"})
# How long one case may take: the interpreter is slow, and so is the compile of kernels.
_EACH_S = 120.0
# Progress is told so often.
_TOLD_S = 20.0
Verdicts = dict[str, Answer]


def main() -> int:
    """Run the cases that the options name; 1 when one is wrong, raises or was not run."""
    options = parsed()
    os.environ["CODEGEN_SUITES_DEVICE"] = options.device
    os.environ["CODEGEN_SUITES_TEMPLATES"] = options.templates
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if options.drawn_candidates:
        os.environ[ASKED] = "1"
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before any process imports Triton
    try:
        cases, skipped = _listed(options.device)
    except ImportError as error:
        print(f"torch's lists cannot be imported: {error}; install the package that is missing")
        return 2
    chosen = [case for case in cases if _chosen(case, options)]
    if options.merge:
        verdicts = {
            name: one for path in options.merge for name, one in noted(path, "case").items()
        }
        return _told(summary(verdicts, skipped, _left(chosen, verdicts)), options)
    journal = Path(f"{options.out}.journal") if options.out else None
    keeps = options.resume or options.again
    verdicts = noted(journal, "case") if journal and keeps else {}
    if options.again:
        chosen = [case for case in chosen if verdicts.get(case.name, {}).get("outcome") in _FAULTS]
    tasks = [case for case in chosen if options.again or case.name not in verdicts]
    if journal and not keeps:
        journal.unlink(missing_ok=True)
    verdicts |= run(tasks, options, journal)
    return _told(summary(verdicts, skipped, _left(chosen, verdicts)), options)


def _told(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Save and print a result; 1 when something is wrong, raises or was not run."""
    if options.out:
        options.out.write_text(
            json.dumps({**measurement.facts(), **result}, indent=1, sort_keys=True) + "\n"
        )
    print(table(result))
    return 1 if result["wrong"] or result["raises"] or result["not_run"] else 0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, this process's unless another is given."""
    line = parser(
        __doc__,
        "shard device workers seconds drawn-candidates resume again",
        device="cpu",
        workers=1,
        seconds=1e9,
    )
    line.add_argument(
        "--only", action="append", default=[], help="pattern of names of cases; may be repeated"
    )
    line.add_argument(
        "--templates", choices=("none", "all"), default="none", help="as GenerateOptions has it"
    )
    line.add_argument("--each", type=float, default=_EACH_S, help="seconds that a case may take")
    line.add_argument("--out", type=Path, help="file for the result")
    line.add_argument(
        "--merge", nargs="+", type=Path, metavar="JOURNAL", help="run nothing; put these together"
    )
    return line.parse_args(arguments)


def _listed(device: str) -> tuple[list[Case], dict[str, str]]:
    from tools.codegen import suite_cases  # torch's lists take seconds to import

    return suite_cases.listed(device)


def _chosen(case: Case, options: argparse.Namespace) -> bool:
    number, count = options.shard
    # An operator's cases stay together: a process has its samples.
    if zlib.crc32(f"{case.suite}/{case.operator}".encode()) % count != number - 1:
        return False
    # torch.compile has no such option.
    if options.templates != "none" and ("compiled" in case.mode or case.mode == "inplace"):
        return False
    return not options.only or any(fnmatchcase(case.name, one) for one in options.only)


def run(tasks: Sequence[Case], options: argparse.Namespace, journal: Path | None) -> Verdicts:
    """Return the verdicts on cases by name; each is noted in the journal as it comes."""
    if not tasks:
        return {}
    verdicts: Verdicts = {}
    began = told = time.monotonic()

    def tell(case: Any, answer: Answer) -> None:
        nonlocal told
        verdict = _verdict(case.name, answer)
        verdicts[case.name] = verdict
        if journal:
            worker_pool.note(journal, "case", case.name, verdict)
        if verdict["outcome"] in _FAULTS:
            print(f"{verdict['outcome']:<7} {case.name}: {verdict['why']}"[:600], flush=True)
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            print(f"{told - began:6.0f} s  {len(verdicts)} of {len(tasks)} cases", flush=True)

    folder = tempfile.mkdtemp(prefix="suites.")
    os.environ["XDG_CACHE_HOME"] = folder
    sides = "tools.codegen.suite_sides"
    try:
        worker_pool.answered(
            sides, "judged", tasks, options.workers, options.seconds, tell, options.each
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return verdicts


def _verdict(name: str, answer: Answer) -> Answer:
    """Return a worker's verdict, after what is allowed; a process that died, or was late,
    raised.
    """
    if "error" in answer:
        answer = {"outcome": "raises", "why": answer["error"], "typed": False}
    allowed: tuple[Allowed, ...] = ()
    if answer["outcome"] == "wrong":
        allowed = ("wrong",)
    elif answer["outcome"] == "raises":
        allowed = ("raises", "raises untyped") if answer["typed"] else ("raises untyped",)
    entry = exception_of(name, allowed)
    if entry is None:
        return answer
    return {**answer, "outcome": "allowed", "reason": entry.reason}


def _left(chosen: Sequence[Case], verdicts: Verdicts) -> int:
    return sum(case.name not in verdicts for case in chosen)


def summary(verdicts: Verdicts, left_out: dict[str, str], left: int) -> dict[str, Any]:
    """Return counts by suite, dtype and mode, and whatever is not right with its reason."""
    counts: dict[str, Counter[str]] = {}
    for name, verdict in verdicts.items():
        if verdict["outcome"] != "absent":
            suite, _, dtype, mode, _ = name.split("/")
            for row in (suite, f"{suite}, {dtype}", f"{suite}, {mode}"):
                counts.setdefault(row, Counter())[verdict["outcome"]] += 1

    def having(outcome: str) -> dict[str, Answer]:
        return {name: one for name, one in sorted(verdicts.items()) if one["outcome"] == outcome}

    found = {
        outcome: {name: one["why"] for name, one in having(outcome).items()}
        for outcome in ("wrong", "raises", "skipped")
    }
    allowed: dict[str, list[str]] = {}
    noted: dict[str, list[str]] = {}
    for name, verdict in sorted(verdicts.items()):
        if verdict["outcome"] == "allowed":
            allowed.setdefault(verdict["reason"], []).append(name)
        for note in verdict.get("notes", ()):
            noted.setdefault(note, []).append(name)
    operators = {
        tuple(name.split("/")[:2]) for name, one in verdicts.items() if one["outcome"] != "absent"
    }
    return {
        "operators": Counter(suite for suite, _ in operators),
        "counts": counts,
        **found,
        "left_out": left_out,
        "allowed": allowed,
        "unchecked": list(having("unchecked")),
        "notes": noted,
        "not_run": left,
    }


def table(result: dict[str, Any]) -> str:
    """Return the counts as lines, and how many cases were noted for what."""
    lines = [f"{'':<34}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES)]
    for name, counts in sorted(result["counts"].items()):
        lines.append(f"{name:<34}" + "".join(f"{counts.get(one, 0):>11,}" for one in OUTCOMES))
    operators = ", ".join(
        f"{count} of {suite}" for suite, count in sorted(result["operators"].items())
    )
    lines.append(f"operators and modules: {operators or 'none'}")
    for note, cases in sorted(result["notes"].items(), key=lambda item: -len(item[1]))[:12]:
        lines.append(f"noted {len(cases):>5}: {note[:150]}")
    if result["not_run"]:
        lines.append(
            f"not run in the time that there was: {result['not_run']} cases; --resume goes on"
        )
    return "\n".join(lines)

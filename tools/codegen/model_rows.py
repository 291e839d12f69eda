# SPDX-License-Identifier: Apache-2.0
"""`rows`, `line`, `show`: what `models` found, as figures with targets and a line for each model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tools.codegen import bench_rows
from tools.shared import measurement

NAME = "codegen-models"
# The least number of architectures of each library.
LEAST = 40
# Operators that are not counted: scans, sorts and lists of tensors are called here, and Inductor generates some of them.
EXCEPTED = re.compile(r"cum(sum|prod|max|min)|logcumsumexp|sort|topk|kthvalue|median|unique|_foreach_|_fused_")  # fmt: skip
Found = dict[str, Any]


def rows(result: Found, *, whole: bool = False) -> list[Found]:
    """Return a line for each target; of a part of the lists nobody asks for 40 of each, nor for what Inductor calls."""
    models, inductor = result["models"], result["inductor"]
    by_status = Counter(found["status"] for found in models.values())
    listed = {library: {name.split()[1] for name, found in models.items() if name.startswith(library) and found["status"] not in {"absent", "broken"}} for library in ("transformers", "timm")}  # fmt: skip
    more_breaks = [name for name, found in models.items() if name in inductor and sum(found.get("breaks", {}).values()) > sum(inductor[name].get("breaks", {}).values())]  # fmt: skip
    more_calls = [name for name, found in models.items() if name in inductor and extra_calls(found, inductor[name])]  # fmt: skip
    by_torch = [name for name, found in models.items() if found.get("as_torch_has_them")]
    made = [
        measurement.row(f"models of {library} that were judged", len(names), "", least=LEAST) for library, names in listed.items() if whole
    ]  # fmt: skip
    for status, words in (("wrong", "models and cases that are wrong"), ("raises", "that raise"), ("broken", "that eager mode cannot run")):  # fmt: skip
        names = sorted(name for name, found in models.items() if found["status"] == status)
        made.append(measurement.row(words, by_status[status], f"of {len(models)}", most=0, names=names))  # fmt: skip
    for words, names in (
        ("with a graph that runs as torch has it", by_torch),
        ("with more graph breaks than Inductor", more_breaks),
        ("that call more operators than Inductor", more_calls),
    ):
        made.append(measurement.row(words, len(names), f"of {len(models)}", most=0, names=sorted(names)))  # fmt: skip
    if whole:
        alone = [name for name, found in models.items() if _is_model(name) and found["status"] in {"right", "wrong"} and "called" not in inductor.get(name, {})]  # fmt: skip
        made.append(measurement.row("without Inductor's calls to compare with", len(alone), f"of {len(models)}", most=0, names=sorted(alone)))  # fmt: skip
    return made


def _is_model(name: str) -> bool:
    return name.startswith(("transformers ", "timm "))


def extra_calls(found: Found, inductor: Found) -> int:
    """Return how many operators a model calls beyond those that Inductor calls; of a model that raises, nothing is known."""
    if "called" not in inductor or found["status"] == "raises":
        return 0
    return max(0, _calls(found) - _calls(inductor))


def _calls(found: Found) -> int:
    return sum(count for name, count in found.get("called", {}).items() if not EXCEPTED.search(name))  # fmt: skip


def line(name: str, found: Found, inductor: Found | None) -> str:
    """Return what was found of one model, in words."""
    words = [f"{name}: {found['status']}"]
    if "graphs" in found:
        words.append(f"graphs {found['graphs']}, as torch has them {len(found['as_torch_has_them'])}, breaks {sum(found['breaks'].values())}")  # fmt: skip
        beside = f" (Inductor {sum(inductor['called'].values())})" if inductor and "called" in inductor else ""  # fmt: skip
        words.append(f"calls {sum(found['called'].values())}{beside}, launches {found['launches']}, first call {found['first_call_s']} s")  # fmt: skip
    words += [f"{at}: {'; '.join(lines)}" for at, lines in found.get("wrong", {}).items()]
    if "error" in found:
        words.append(f"{found.get('at', '')} {found['error']}".strip())
    return ", ".join(words)[:1200]


def show(result: Found, *, whole: bool = False) -> int:
    """Print what is not right, and the figures; 1 when a target is missed."""
    for name, found in sorted(result["models"].items()):
        if found["status"] != "right":
            print(line(name, found, result["inductor"].get(name)))
    absent = [name for name, found in result["models"].items() if found["status"] == "absent"]
    if absent:
        print(f"not in the releases that are installed: {', '.join(sorted(absent))}")
    skipped = {name: found["error"] for name, found in result["models"].items() if found["status"] == "skipped"}  # fmt: skip
    for name, why in skipped.items():
        print(f"{name}: SKIPPED, {why}")
    missed: int = bench_rows.show({**result, "rows": rows(result, whole=whole)})
    return missed

# SPDX-License-Identifier: Apache-2.0
"""The picture of README.md, docs/readme.svg: cold beside warm, and what the demo prints.

    python -m tools.docs_site.picture
        draw it from docs/results
    python -m tools.docs_site.picture --demo
        run the demo first, which needs Triton, and keep what it prints as docs/results/demo.txt

Figures are those of the results, the text is the demo's own: nothing is written by hand.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from html import escape
from typing import NamedTuple

from tools.shared import programs
from tools.shared.measurement import RESULTS
from tools.shared.processes import ROOT, output

PICTURE, DEMO = ROOT / "docs" / "readme.svg", RESULTS / "demo.txt"
_WIDTH, _LEFT, _BAR, _LINE = 820, 230, 470, 17
# Lines of the demo that are shown: what it did, and the first kernels.
_DEMO_LINES, _COLUMNS = 12, 104


class Work(NamedTuple):
    """What was timed three ways.

    Attributes:
        title: in words.
        result: file of docs/results.
        rows: (words, work of a row of that file, whether it is ours).
    """

    title: str
    result: str
    rows: tuple[tuple[str, str, bool], ...]


_FIRST = "first call of all kernels: "
WORKS = (
    Work(
        "torch.compile, max-autotune, a transformer: load and first iteration",
        "gpu-torch-compile",
        (
            ("cold", "max-autotune, cold: load and first iteration", False),
            ("torch's mega-cache", "max-autotune, mega-cache: load and first iteration", False),
            ("a bundle", "max-autotune, ours: load and first iteration", True),
        ),
    ),
    Work(
        "six kernels of Triton, 68 configurations to tune: all first calls",
        "gpu-autotune",
        (
            ("cold", f"{_FIRST}@triton.autotune, cold, with its disk cache", False),
            ("Triton's own cache", f"{_FIRST}@triton.autotune, warm, with its disk cache", False),
            ("a bundle", f"{_FIRST}ours, new process by bundle", True),
        ),
    ),
)


def drawn() -> str:
    """Return the picture as SVG."""
    parts, top = [], 30
    for work in WORKS:
        result = json.loads((RESULTS / f"{work.result}.json").read_text(encoding="utf-8"))
        seconds = {row["work"]: float(row["figure"]) for row in result["rows"]}
        longest = max(seconds[name] for _, name, _ in work.rows)
        parts.append(_text(20, top, f"{work.title} ({_gpu(result)})", "title"))
        for words, name, ours in work.rows:
            top += 24
            width = max(_BAR * seconds[name] / longest, 2)
            parts.append(_text(_LEFT - 12, top, words, "name"))
            parts.append(
                f'<rect x="{_LEFT}" y="{top - 12}" width="{width:.1f}" height="16"'
                f' class="{"ours" if ours else "others"}"/>'
            )
            parts.append(_text(_LEFT + width + 8, top, f"{seconds[name]:.3g} s", "label"))
        top += 40
    printed = DEMO.read_text(encoding="utf-8").splitlines()[:_DEMO_LINES]
    lines = ["$ triton-bundler demo", *itertools.chain.from_iterable(map(_wrapped, printed)), "…"]
    height = top + _LINE * len(lines) + 20
    parts.append(
        f'<rect x="20" y="{top - 14}" width="{_WIDTH - 40}" height="{height - top - 4}" rx="6"'
        ' class="terminal"/>'
    )
    parts += [
        _text(32, top + 6 + _LINE * number, line, "line") for number, line in enumerate(lines)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{escape('Cold starts beside warm ones, and what the demo prints')}</title>\n"
        f"<style>{_STYLE}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" class="page"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


_STYLE = (
    "text{font:13px sans-serif;fill:#1f2937}.title{font-weight:bold}.name{text-anchor:end}"
    ".page{fill:#fff}.others{fill:#cbd5e1}.ours{fill:#059669}.terminal{fill:#111827}"
    ".line{font:12px monospace;fill:#e5e7eb;white-space:pre}"
)


def _wrapped(line: str) -> list[str]:
    """Return a line of the demo as those of the picture's terminal."""
    if len(line) <= _COLUMNS:
        return [line]
    return textwrap.wrap(line, _COLUMNS, subsequent_indent="   ", replace_whitespace=False)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" xml:space="preserve">{escape(words)}</text>'


def _gpu(result: dict[str, dict[str, str]]) -> str:
    return result["machine"]["gpu"].partition(",")[0]


def main() -> int:
    """Draw the picture."""
    if programs.arguments(__doc__, demo=(False, "run the demo first")).demo:
        DEMO.write_text(output("bundler", "demo", environment={}), encoding="utf-8")
    PICTURE.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

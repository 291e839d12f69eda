# SPDX-License-Identifier: Apache-2.0
"""What the samples of the remote benchmark say: rows with figure, peer and target, and their
section of the page.
"""

from __future__ import annotations

from typing import Any

from tools.bench import floors
from tools.bench.bare_steps import PIPELINED
from tools.bench.step_profiles import START
from tools.shared.measurement import median, row, shown, target

ONCE = "0 ms"
# How many times faster than Triton, for everything and for the launch set, by what is added to each
# answer.
FASTER_TARGETS = {ONCE: (6.0, 14.0), "10 ms": (90.0, 140.0)}
LIMIT_TARGET, MEMORY_TARGET = 2.5, 20.0
SAMPLED = (
    "triton",
    "ours all",
    "ours launch",
    "gets all",
    "gets launch",
    "write all",
    "write launch",
)
SECTION = """`python -m tools.bench remote`. {kernels:,} kernels, compiled by Triton for sm_90 and recorded, on servers of this host started from
`deploy/redis`; everything goes into an empty directory, on {place}. {rounds} rounds without a delay, fewer with one: a program between
both passes every answer on so much later. Each piece of work runs in a process of its own, forked from one that has done its imports, whose memory it has copied before.
Redis {server}, redis-py {client}; load of the machine by other work before the run: {load_before}.

* *Triton*: `RemoteCacheManager` over `RedisRemoteCacheBackend`, `get_group` for each kernel, all of them hits. It fetches and writes
  every file, and verifies nothing.
* *ours*: `open_store`, `Store.restore` by tag, `close`. Every digest is checked.
* *the limit*: GETs of the very values that our restore needs, {pipelined} in a pipeline, whose bytes are thrown away; and the loop that
  writes the files.
"""

START_STEPS = (
    "A restore without a delay, step by step, each alone and in one thread. All steps but two are"
    " done by one thread after the other: `marks` are made, and `writers` write, while the kernels"
    " that come next are decompressed and checked. So no restore is faster than the other steps"
    " together. Of these, `tag` and what is fetched in `manifest`, `fetch` and `dictionaries` is"
    " the server's and its client's, as in the limit:"
)
MEASURED = (
    "Memory is `used_memory` above that of the empty server; sizes are of units and dictionaries."
    " Why units are compressed with dictionaries, and what they take alone, is in"
    " [cluster.md](cluster.md#compression)."
)


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of every delay, then those of memory and of sizes."""
    rows: list[dict[str, Any]] = []
    for delay, samples in result["delays"].items():
        rows += _delay_rows(delay, samples, result["kernels"])
    memory = result["memory"]
    rows.append(
        row(
            f"server memory, {shown(memory['ours'] / 1e6, 'MB')}: how many times less",
            memory["triton"] / memory["ours"],
            "x",
            least=MEMORY_TARGET,
            peer=f"Triton, {shown(memory['triton'] / 1e6, 'MB')}",
            ours_bytes=memory["ours"],
            peer_bytes=memory["triton"],
        )
    )
    for name, stored in result["stored"].items():
        rows.append(
            row(
                f"{name} in a store, {shown(stored['shared'] / 1e6, 'MB')}: beside one file",
                stored["shared"] / stored["file"],
                "x",
                peer=(
                    f"a bundle file, {shown(stored['file'] / 1e6, 'MB')}; alone"
                    f" {shown(stored['alone'] / 1e6, 'MB')}"
                ),
                ours_bytes=stored["shared"],
                peer_bytes=stored["file"],
            )
        )
    return rows


def _delay_rows(delay: str, samples: dict[str, list[float]], kernels: int) -> list[dict[str, Any]]:
    targets = [{"least": least} for least in FASTER_TARGETS.get(delay, ())] or [{}, {}]

    def ratio(
        work: str, over: list[float], under: list[float], peer: str, **target: float
    ) -> dict[str, Any]:
        ours = under if "faster" in work else over
        theirs = over if "faster" in work else under
        figure = median([one / other for one, other in zip(over, under, strict=True)])
        return row(
            f"{delay}: {work}",
            figure,
            "x",
            peer=f"{peer}, {shown(median(theirs) * 1e3, 'ms')}",
            ours_ms=median(ours) * 1e3,
            peer_ms=median(theirs) * 1e3,
            kernels=kernels,
            **target,
        )

    def limit(keep: str) -> list[float]:
        return [
            get + write
            for get, write in zip(samples[f"gets {keep}"], samples[f"write {keep}"], strict=True)
        ]

    return [
        ratio(
            "restore everything: how much faster",
            samples["triton"],
            samples["ours all"],
            "Triton",
            **targets[0],
        ),
        ratio(
            "restore the launch set: how much faster",
            samples["triton"],
            samples["ours launch"],
            "Triton",
            **targets[1],
        ),
        ratio("restore everything", samples["ours all"], limit("all"), "the limit"),
        ratio(
            "restore the launch set",
            samples["ours launch"],
            limit("launch"),
            "the limit",
            **({"most": LIMIT_TARGET} if delay == ONCE else {}),
        ),
    ]


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    timed = [line for line in result["rows"] if "peer_ms" in line]
    rest = [line for line in result["rows"] if "peer_ms" not in line]
    steps = [
        [name, *(shown(median(samples[name]) * 1e3, "ms") for samples in result["delays"].values())]
        for name in SAMPLED
    ]
    trips = [
        [
            f"{name}: exchanges with the server",
            *(
                f"{median(found[f'{name}: round trips']):.0f}"
                for found in result["delays"].values()
            ),
        ]
        for name in ("ours all", "ours launch")
    ]
    pushes = [[name, shown(median(result[name]) * 1e3, "ms")] for name in ("push", "push again")]
    return "\n".join(
        [
            "## A start from a server",
            "",
            SECTION.format(**result, pipelined=PIPELINED),
            _table(
                ["added to each answer: work", "ours", "peer", "ratio", "target"],
                [
                    [
                        line["work"],
                        shown(line["ours_ms"], "ms"),
                        line["peer"],
                        _verdict(line),
                        target(line),
                    ]
                    for line in timed
                ],
            ),
            _table(["step", *result["delays"]], [*steps, *trips]),
            _table(["into an empty server, without a delay", "time"], pushes),
            START_STEPS,
            "",
            _steps(result["profile"]),
            floors.table(result, "What no start from a server can leave out"),
            MEASURED,
            "",
            _table(
                ["what", "peer", "ratio", "target"],
                [[line["work"], line["peer"], _verdict(line), target(line)] for line in rest],
            ),
        ]
    )


def _steps(profile: dict[str, dict[str, float]]) -> str:
    """Return the table of the steps of a restore of everything and of the launch set, in their
    order.
    """
    columns = {
        what: profile[name]
        for what, name in (("everything", "start all"), ("launch set", "start"))
        if name in profile
    }
    names = sorted(
        profile["start"], key=lambda name: START.index(name) if name in START else len(START)
    )
    rows = [
        [name, *(shown(steps[name] * 1e3, "ms") for steps in columns.values())] for name in names
    ]
    sums = [shown(sum(steps.values()) * 1e3, "ms") for steps in columns.values()]
    return _table(["step", *columns], [*rows, ["sum", *sums]])


def _verdict(line: dict[str, Any]) -> str:
    figure = shown(line["figure"], line["unit"])
    return figure if line["ok"] else f"**{figure}**"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""Tunes five kinds of kernels from cold, and shows that the next process needs neither compiler nor
benchmark.

    python -m tools.gpu autotune [--results DIR]

It needs torch, Triton and a GPU, and runs from the checkout.  Each step runs in a process of its
own: tuned with empty directories under a recording; then called from the bundle alone, and from a
restored directory, with empty directories and a ptxas that refuses; beside it `@triton.autotune`,
with and without its disk cache.  Compiles are counted by Triton's listener and by the ptxas
wrapper, launches by Triton's launch hook and by torch's profiler.  Exit status 1 when any row is
wrong.  The raw result goes to docs/results/gpu-autotune.json.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu import launch_cost, steps
from tools.shared import measurement, programs
from tools.shared.measurement import in_turns, median, ratios, row

ROUNDS = 5
MOST_BEHIND = 1.03
MOST_COST = 1.1
SAMPLES = 9


def main() -> int:
    """Run every step, print the table, write the result."""
    if programs.run_step(STEPS):
        return 0
    about = "where gpu-autotune.json goes"
    options = programs.arguments(__doc__, results=(measurement.RESULTS, about))
    with tempfile.TemporaryDirectory(prefix="gpu-autotune.") as folder:
        raw = run_all(Path(folder))
    result = {"raw": raw, "rows": rows_of(raw)}
    return 1 if measurement.report("gpu-autotune", result, options.results) else 0


def run_all(folder: Path) -> dict[str, Any]:
    """Run the steps; returns what each of them said."""

    def step(name: str, *words: str, cache: str, refuse_ptxas: bool = False) -> dict[str, Any]:
        """`cache` names Triton's directory, which is empty unless a step before had it."""
        where = folder / cache
        return steps.step("autotune", folder, name, *words, cache=where, refuse_ptxas=refuse_ptxas)

    bundle = str(folder / "tuned.tbundle")
    raw = {"tuned": step("tune", bundle, cache="tune")}
    raw["exhaustive"] = step("measure", json.dumps(raw["tuned"]["chosen"]), cache="tune")
    for how in ("bundle", "restore"):
        words = ("replay", bundle, how)
        raw[f"replay by {how}"] = step(*words, cache=f"replay-{how}", refuse_ptxas=True)
        counted = step(*words, "profile", cache=f"counted-{how}", refuse_ptxas=True)
        raw[f"counted by {how}"] = counted
    raw["cost"] = step("cost", bundle, cache="tune")
    raw["untouched"] = step("untouched", cache="untouched")
    for name, results in (("without", "no"), ("with", "yes")):
        for state in ("cold", "warm"):
            found = step("triton", results, cache=f"triton-{name}")
            raw[f"triton {state}, {name} disk cache"] = found
    return raw


def rows_of(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table: what was counted, what became of the caller's tensors, times, winners,
    costs.
    """
    untouched = [
        row(f"{how}: the caller's tensor has what one launch makes of it", int(right), "", least=1)
        for how, right in raw["untouched"].items()
    ]
    times = [*_time_rows(raw), *_winner_rows(raw), *_cost_rows(raw)]
    return [*_counting_rows(raw), *untouched, *times]


# --------------------------------------------------------------------------------------------- Rows


def _counting_rows(raw: dict[str, Any]) -> list[dict[str, Any]]:
    tuned, found = raw["tuned"], []
    chosen, digests, launches = tuned["chosen"], tuned["digests"], sum(tuned["launches"].values())
    for how in ("bundle", "restore"):
        plain, counted = raw[f"replay by {how}"], raw[f"counted by {how}"]
        words, tuning = f"new process, by {how}", f"tuning: {_compiles(tuned)}"
        compiles = sum(run["compiles"] + run["ptxas_calls"] for run in (plain, counted))
        found.append(row(f"{words}: compiles", compiles, "", most=0, peer=tuning))
        for counter, runs in (
            ("launch hook", plain["launches"]),
            ("torch's profiler", counted["profiled"]),
        ):
            extra = abs(sum(runs.values()) - len(chosen))
            peer = f"tuning by the launch hook: {launches}; now {runs}"
            name = f"{words}: benchmark launches by {counter}"
            found.append(row(name, extra, "", most=0, peer=peer))
        equal = sum(plain["digests"][name] == digest for name, digest in digests.items())
        agreed = sum(plain["chosen"][name] == config for name, config in chosen.items())
        for what, figure, all_of in (
            ("results equal bit for bit", equal, len(digests)),
            ("the recorded winners", agreed, len(chosen)),
        ):
            found.append(row(f"{words}: {what}", figure, f"of {all_of}", least=all_of))
    return found


def _compiles(taken: dict[str, Any]) -> int:
    """Return how many kernels were compiled: those of other processes are counted by what came of
    them.
    """
    return max(int(taken["compiles"]), int(taken.get("kernels", 0)))


def _time_rows(raw: dict[str, Any]) -> list[dict[str, Any]]:
    names = {"ours, tuned from cold": "tuned"}
    names |= {f"ours, new process by {how}": f"replay by {how}" for how in ("bundle", "restore")}
    for name in ("without", "with"):
        for state in ("cold", "warm"):
            words = f"@triton.autotune, {state}, {name} its disk cache"
            names[words] = f"triton {state}, {name} disk cache"
    found = []
    for words, name in names.items():
        taken = raw[name]
        peer = f"{_compiles(taken)} compiles, {sum(taken['launches'].values())} launches"
        found.append(row(f"first call of all kernels: {words}", taken["first_s"], "s", peer=peer))
    return found


def _winner_rows(raw: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, times in raw["exhaustive"]["times_ms"].items():
        best = min(times, key=lambda config: median(times[config]))
        won = raw["tuned"]["chosen"][name]
        # Side by side in each round, since clocks drift from one round to the next.
        behind = median(ratios(times[won], times[best]))
        what = f"{name}: time of the winner by that of the best of {len(times)}"
        facts: dict[str, Any] = {"peer": f"{won} against {best}", "samples": times}
        found.append(row(what, behind, "x", most=MOST_BEHIND, **facts))
    return found


def _cost_rows(raw: dict[str, Any]) -> list[dict[str, Any]]:
    samples = raw["cost"]["samples_us"]
    handle = samples["static handle"]
    found = []
    for name, taken in samples.items():
        most = MOST_COST if name == "tuned kernel's handle" else None
        peer = f"{median(taken):.2f} us; the static handle {median(handle):.2f} us"
        ratio = median(ratios(taken, handle))
        found.append(row(f"CPU cost of a launch: {name}", ratio, "x", most=most, peer=peer))
    return found


# -------------------------------------------------------------- Steps, each in a process of its own


class Counts:
    """Compiles by Triton's listener, launches by Triton's launch hook."""

    def __init__(self) -> None:
        from triton import knobs

        self._listener, self._launches = steps.Listener(), Counter[str]()
        chain = knobs.runtime.launch_enter_hook
        if hasattr(chain, "add"):
            chain.add(self._launched)
        else:
            knobs.runtime.launch_enter_hook = self._launched

    def _launched(self, metadata: Any) -> None:
        lazy = hasattr(metadata, "get") and not isinstance(metadata, dict)
        self._launches[(metadata.get() if lazy else metadata)["name"]] += 1

    def told(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {"compiles": self._listener.compiles, "launches": dict(self._launches)}


def call_all(kernels: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """Call each kernel once; returns digests of the outputs, seconds, and the configs that were
    chosen.
    """
    import torch

    from tools.gpu import tuned_kernels

    given = {case.name: case.arguments(torch) for case in tuned_kernels.tuned()}
    torch.cuda.synchronize()
    started = time.monotonic()
    seconds: dict[str, float] = {}
    for case in tuned_kernels.tuned():
        begun = time.monotonic()
        kernels[case.name][case.grid](*given[case.name], **case.constants)
        torch.cuda.synchronize()
        seconds[case.name] = time.monotonic() - begun
    first_s = time.monotonic() - started
    digests = {
        case.name: hashlib.sha256(given[case.name][case.output].cpu().numpy().tobytes()).hexdigest()
        for case in tuned_kernels.tuned()
    }
    chosen = {name: describe(kernel.best_config) for name, kernel in kernels.items()}
    times = {"first_s": first_s, "seconds": seconds}
    return {**counts.told(), **times, "digests": digests, "chosen": chosen}


def describe(config: Any) -> str:
    """Return a config as one text, the same for Triton's and for ours."""
    kwargs = ",".join(f"{name}={value}" for name, value in sorted(config.kwargs.items()))
    return f"{kwargs} warps={config.num_warps} stages={config.num_stages}"


def ours(options: Any) -> dict[str, Any]:
    """Return each kernel under our decorator."""
    import bundler
    from tools.gpu import tuned_kernels

    return {
        case.name: bundler.autotune(case.configs, list(case.key), options=options)(case.function)
        for case in tuned_kernels.tuned()
    }


def tune(bundle: str) -> dict[str, Any]:
    """Tune from cold under a recording, and save the bundle."""
    import bundler
    from bundler.compile.service import CompileService
    from bundler.runtime import TunerOptions
    from bundler.runtime.tuning.tuning_winners import describe as words_of

    counts = Counts()
    with CompileService() as service, bundler.recording() as recording:
        kernels = ours(TunerOptions(service=service))
        result = call_all(kernels, counts)
        compiled = service.counters.compiled
    collected = recording.collect(keep="launch")
    collected.save(bundle)
    slim = bundler.winners_only(collected)
    timings = {
        t.record: [
            [words_of(x.config), x.time_ns, x.low_ns, x.high_ns, x.reason] for x in t.timings
        ]
        for t in collected.observed.tunings
    }
    return {
        **result,
        "compiles": result["compiles"] + compiled,
        "kernels": len(collected.kernels),
        "winners_only": len(slim.kernels),
        "timings": timings,
        "records": len(collected.tuning_records),
        "misses": {name: kernel.misses for name, kernel in kernels.items()},
    }


def measure(chosen: str) -> dict[str, Any]:
    """Measure every config of every kernel by Triton's own benchmark, in rounds; tuned kernels have
    no part in it.
    """
    import torch
    import triton

    from tools.gpu import tuned_kernels

    expected, times = json.loads(chosen), dict[str, dict[str, list[float]]]()
    for case in tuned_kernels.tuned():
        values = case.arguments(torch)
        runs: dict[str, Callable[[], None]] = {}
        for config in case.configs:
            run = _launch_of(case, config, values)
            try:
                run()
                runs[describe(config)] = run
            except triton.runtime.errors.OutOfResources:
                continue
        bench = functools.partial(triton.testing.do_bench, warmup=10, rep=50, return_mode="median")
        taken = in_turns(
            {name: functools.partial(bench, run) for name, run in runs.items()}, ROUNDS
        )
        if expected[case.name] not in taken:
            raise RuntimeError(
                f"{case.name}: the winner {expected[case.name]} cannot be launched by Triton"
            )
        times[case.name] = taken
    return {"times_ms": times}


def _launch_of(case: Any, config: Any, values: list[Any]) -> Callable[[], None]:
    def run() -> None:
        case.function[case.grid](*values, **case.constants, **config.all_kwargs())

    return run


def replay(bundle: str, how: str, counting: str = "") -> dict[str, Any]:
    """Call each kernel in a process that has only a bundle, or only what a restore wrote."""
    import torch

    import bundler
    from bundler.runtime import TunerOptions

    torch.cuda.init()
    counts = Counts()
    if how == "restore":
        bundler.restore(bundle)
    kernels = ours(TunerOptions(bundle=bundle if how == "bundle" else None))
    if not counting:
        return {
            **call_all(kernels, counts),
            "misses": {name: kernel.misses for name, kernel in kernels.items()},
        }
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = call_all(kernels, counts)
    profiled = Counter(event.name for event in profiler.events() if event.name in kernels)
    return {**result, "profiled": dict(profiled)}


def triton_itself(results: str) -> dict[str, Any]:
    """Call each kernel under `@triton.autotune`."""
    import torch
    import triton

    from tools.gpu import tuned_kernels

    torch.cuda.init()
    counts = Counts()
    kernels = {
        case.name: triton.autotune(
            list(case.configs), list(case.key), cache_results=results == "yes"
        )(case.function)
        for case in tuned_kernels.tuned()
    }
    return call_all(kernels, counts)


def cost(bundle: str) -> dict[str, Any]:
    """Return microseconds of CPU time a launch of the vector add takes, by way, one for
    each round.
    """
    import torch
    import triton

    import bundler.runtime
    from bundler.runtime import TunerOptions
    from tools.gpu import tuned_kernels

    case = next(case for case in tuned_kernels.tuned() if case.name == "add")
    tuned = ours(TunerOptions(bundle=bundle))["add"]
    big = case.arguments(torch)
    tuned[case.grid](*big)
    config = tuned.best_config
    stream = torch.cuda.current_stream().cuda_stream
    static = bundler.runtime.load(bundle)["add"]
    plain, own = static.handle(*big, **config.all_kwargs()), tuned.handle(*big)
    by_triton = triton.autotune(list(case.configs), list(case.key))(case.function)
    by_triton[case.grid](*big)
    # A grid of one block: what counts here is the CPU.
    one = (1, 1, 1)
    ways: dict[str, Callable[[], None]] = {
        "static handle": lambda: plain.launch(*one, stream, *big),
        "tuned kernel's handle": lambda: own.launch(*one, stream, *big),
        "static kernel[grid](...)": lambda: static[one](*big, **config.all_kwargs()),
        "tuned kernel[grid](...)": lambda: tuned[one](*big),
        "@triton.autotune kernel[grid](...)": lambda: by_triton[one](*big),
    }
    for launch in ways.values():
        launch()

    def batch(launch: Callable[[], None]) -> None:
        for _ in range(launch_cost.BATCH):
            launch()

    timed = {
        name: functools.partial(launch_cost.us_of, functools.partial(batch, launch))
        for name, launch in ways.items()
    }
    return {"samples_us": in_turns(timed, SAMPLES)}


def untouched() -> dict[str, Any]:
    """Tune a kernel that adds to its output, with clones on the device and with a copy on
    the host.
    """
    import torch
    import triton

    import bundler
    from bundler.runtime import TunerOptions
    from tools.gpu import tuned_kernels

    size, found = 1 << 24, {}
    configs = [triton.Config({"BLOCK": block}) for block in (512, 1024, 2048, 4096)]
    for how in ("restore_value", "reset_to_zero"):
        for staged in (False, True):
            chosen: dict[str, Any] = {how: ["out"]}
            kernel = bundler.autotune(configs, ["n"], **chosen, options=TunerOptions(record=False))
            x, out = torch.ones(size, device="cuda"), torch.full((size,), 2.0, device="cuda")
            if staged:
                # nothing more than this was ever used: no room for a clone
                torch.cuda.reset_peak_memory_stats()
            else:
                torch.empty(size * 4, device="cuda")  # given back at once: room for clones
            tuned = kernel(tuned_kernels.accumulate)
            tuned[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, out, size)
            found[f"{how}, {'copy on the host' if staged else 'clones'}"] = bool((out == 3.0).all())
    return found


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "tune": tune,
    "measure": measure,
    "replay": replay,
    "triton": triton_itself,
    "cost": cost,
    "untouched": untouched,
}

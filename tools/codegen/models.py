# SPDX-License-Identifier: Apache-2.0
"""Whole models of transformers and timm through our backend, judged as TorchInductor's dashboard
judges, and what is called beside what Inductor calls.

    python -m tools.codegen models --shard 1/3 --out FILE
        a third of the models; FILE is added to, while the sources stay the same
    python -m tools.codegen models --resume --out FILE
        what FILE has no answer for
    python -m tools.codegen models --only BertForMaskedLM --mode training
    python -m tools.codegen models --device cpu --no-inductor
        tiny sizes, in Triton's interpreter (TRITON_INTERPRET=1 is set)
    python -m tools.codegen models --merge FILE FILE --out FILE
        one result of several
    python -m tools.codegen models --time --out FILE
        judges nothing: wall, host and device time beside eager mode and Inductor
    python -m tools.codegen models --time --starts --workers 2 --only LlamaForCausalLM --out FILE
        first calls in new processes alone, of empty caches and of warm ones, beside the times that
        FILE has; of two models side by side, each on half of the cores
    python -m tools.codegen models --graphs --out FILE
        judged, or timed, with repeated calls as CUDA graphs
    python -m tools.codegen models --kind cnn --time --out FILE
        convolutional networks of timm, whole, on images of their own size
    python -m tools.codegen models --kind dashboard --time --out FILE
        models of the dashboard in their own sizes
    python -m tools.codegen models --kind multi-gpu
        cuda:1, and two ranks of DistributedDataParallel; needs two GPUs
    python -m tools.codegen models --check --out FILE
        runs nothing

Each model runs in a process of its own, `model_process`, and has to be right: three batch sizes,
inference in bfloat16, training in float32 with all gradients.  `cases` are uses that are no model
of a list: autocast, dropout, checkpoints, `generate`.  Exit status 1 when something is wrong,
raises, runs as torch has it, breaks the graph more often than with Inductor, or calls more
operators than Inductor does, sorts and lists of tensors excepted; of times, when a graph of ours
ran as torch has it while they were taken.
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import queue
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tools.codegen import bench_rows
from tools.codegen.command_line import parser
from tools.codegen.drawn_candidates import ASKED
from tools.shared import measurement
from tools.shared.processes import ROOT, command, python_path

Found = dict[str, Any]
# Library or kind of case, name, mode.
Task = tuple[str, str, str]
KINDS = ("transformers", "timm", "cnn", "dashboard", "cases", "multi-gpu")
MODES = ("inference", "training")
_STARTING = threading.Lock()
# Whose `main` a task's process runs.
_MODULES = dict.fromkeys(("cases", "multi-gpu"), "tools.codegen.model_cases")
_OF_LIBRARIES = "tools.codegen.model_process"
# What a task's process has imported when it begins.
_IMPORTED = [
    "torch._dynamo",
    "triton",
    "bundler.codegen.torch_backend",
    "tools.codegen.model_cases",
    "tools.codegen.transformers_models",
    "transformers",
    "timm",
]
# A model that is not done after so long counts as one that raises, by device.
LIMIT_S = {"cuda": 240.0, "cpu": 900.0}
_NAME = "codegen-models"
# The environment variable that names the file which processes lock while they measure.
TIMING_LOCK = "BUNDLER_TIMING_LOCK"
# The sides that compile, and what a process of one is asked for.
STARTED = ("inductor", "ours")
START = "start-"
# A second start finds what the first left; the shortest of two counts: what else goes on only makes
# it longer.
_STARTS = ("first", "second", "second")
# The least number of architectures of each library.
_LEAST = 40
# Operators that are not counted: sorts and lists of tensors are called here, and Inductor generates
# some of them.
_EXCEPTED = re.compile(r"sort|topk|kthvalue|median|unique|_foreach_|_fused_")


def main() -> int:
    """Run models, save after each; 1 when a target is missed."""
    line = parser(
        __doc__,
        "shard resume again device workers seconds drawn-candidates check",
        device="cuda",
        workers=len(os.sched_getaffinity(0)),
        seconds=520.0,
    )
    line.add_argument(
        "--out",
        type=Path,
        default=measurement.RESULTS / f"{_NAME}.json",
        help="the result, which is added to",
    )
    line.add_argument(
        "--kind",
        default="transformers,timm,cases",
        help=f"of {', '.join(KINDS)}, with commas between",
    )
    line.add_argument("--mode", default=",".join(MODES), help="inference, training, or both")
    line.add_argument("--only", action="append", default=[], metavar="NAME", help="repeatable")
    line.add_argument("--limit", type=float, help="seconds that a model may take")
    line.add_argument(
        "--time",
        action="store_true",
        help="judge nothing; how long a call takes beside eager mode and Inductor",
    )
    line.add_argument(
        "--starts",
        action="store_true",
        help="with --time: first calls in new processes instead, which share the cores",
    )
    line.add_argument(
        "--graphs",
        action="store_true",
        help="with calls as CUDA graphs, repeated until they are; what Inductor calls is left out",
    )
    line.add_argument(
        "--no-inductor",
        action="store_true",
        help="leave out what Inductor calls; a result that has it for this torch keeps it anyway",
    )
    line.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing; put results of the same sources together",
    )
    options = line.parse_args()
    if options.starts and not options.time:
        line.error("--starts goes with --time")
    if options.check:
        return show(json.loads(options.out.read_text()), whole=True)
    if options.merge:
        result = merged([json.loads(path.read_text()) for path in options.merge])
    else:
        tasks, result = chosen(options), begun(options.out, options.device)
        run(tasks, result, options)
    save(result, options.out)
    if options.time:
        times = importlib.import_module("tools.codegen.model_times")
        print(*times.lines(result["times"]), sep="\n")
        return int(any(map(fallbacks, result["times"].values())))
    return show(result)


def chosen(options: argparse.Namespace) -> list[Task]:
    """Return the tasks that the command line asks for; each shard has as much to do."""
    kinds, modes = options.kind.split(","), options.mode.split(",")
    unknown = sorted({*kinds} - {*KINDS} | {*modes} - {*MODES})
    if unknown:
        raise SystemExit(
            f"models: expected of {', '.join(KINDS + MODES)}, got {', '.join(unknown)}"
        )
    tasks = [task for kind in kinds for task in _tasks(kind, modes)]
    if options.only:
        missing = sorted({*options.only} - {name for _, name, _ in tasks})
        if missing:
            raise SystemExit(
                f"models: no model or case {', '.join(missing)}; there are"
                f" {', '.join(sorted({name for _, name, _ in tasks}))}"
            )
        tasks = [task for task in tasks if task[1] in options.only]
    took = _seconds_before()
    tasks.sort(key=lambda task: -took.get(key(task), 0.0))
    part, parts = options.shard
    return tasks[part - 1 :: parts]


def _tasks(kind: str, modes: list[str]) -> list[Task]:
    if kind in {"cases", "multi-gpu"}:
        from tools.codegen import model_cases

        return [(kind, name, "") for name in model_cases.names(kind)]
    models = importlib.import_module(f"tools.codegen.{kind}_models")
    return [
        (kind, name, mode) for name in models.ROWS for mode in models.modes(name) if mode in modes
    ]


def begun(path: Path, device: str) -> Found:
    """Return the result that a file has, without answers about other sources, and without what
    another torch's Inductor calls.
    """
    known, digest = path.exists(), sources()
    # What Inductor calls need not be counted anew for another file.
    committed = measurement.RESULTS / f"{_NAME}.json"
    result: Found = json.loads((path if known else committed).read_text())
    if not known:
        result = {"models": {}, "inductor": result["inductor"]}
    elif (result.get("sources"), result.get("device")) != (digest, device):
        result["models"] = {}
    result["inductor"] = {
        name: one for name, one in result["inductor"].items() if one.get("torch") == _torch()
    }
    return result | {"sources": digest, "device": device}


def _torch() -> str:
    """Return torch's version, without importing it."""
    return importlib.metadata.version("torch")


def sources() -> str:
    """Return a digest of what generates and runs programs: a machine may have no repository to ask
    for a commit.
    """
    digest = hashlib.sha256()
    folders = [ROOT / "bundler" / name for name in ("codegen", "runtime", "toolchain")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def merged(results: list[Found]) -> Found:
    """Return one result of several."""
    about = {(one["sources"], one["device"]) for one in results}
    if len(about) > 1:
        raise SystemExit(
            f"models: expected results of the same sources and device, got {sorted(about)}"
        )
    found = dict(results[0])
    for part in ("models", "inductor"):
        found[part] = {name: one for result in results for name, one in result[part].items()}
    return found


def run(tasks: Iterable[Task], result: Found, options: argparse.Namespace) -> None:
    """Run tasks side by side; each answer goes into the result, which is saved after it beside the
    facts of this machine.
    """
    facts = measurement.facts()
    result |= {name: value for name, value in facts.items() if name != "commit" or value}
    started = time.monotonic()
    waiting = [task for task in tasks if _asked(task, result, options)]
    limit_s = options.limit or LIMIT_S[options.device]

    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    usable = sorted(os.sched_getaffinity(0))
    share = max(1, len(usable) // options.workers)
    for number in range(options.workers):
        first = number * share % len(usable)
        shares.put(usable[first : first + share])

    def answer(task: Task) -> Found | None:
        if time.monotonic() - started > options.seconds:
            return None
        wanted = _inductor_wanted(task, result, options)
        cores = shares.get()
        try:
            if options.starts:
                return started_anew(task, options.device, limit_s, cores)
            return judged(
                task, options.device, limit_s, inductor=wanted, cores=cores[:1], kernels=kernels
            )
        finally:
            shares.put(cores)

    if options.drawn_candidates:
        os.environ[ASKED] = "1"
    result.setdefault("times", {})
    _ready(options)
    # Models have kernels in common, which are compiled once.
    with (
        tempfile.TemporaryDirectory(prefix="models.kernels.") as kernels,
        concurrent.futures.ThreadPoolExecutor(options.workers) as pool,
    ):
        futures = {pool.submit(answer, task): key(task) for task in waiting}
        for done in concurrent.futures.as_completed(futures):
            name, found = futures[done], done.result()
            if found is None:
                continue
            _keep(name, found, result)
            save(result, options.out)
            print(
                f"{time.monotonic() - started:6.1f} s "
                f" {line(name, found, result['inductor'].get(name))}",
                flush=True,
            )
    late = [key(task) for task in waiting if not _is_answered(task, result, options)]
    if late:
        print(
            f"not begun in {options.seconds:.0f} s, --resume goes on: {len(late)} of {len(waiting)}"
        )


def _ready(options: argparse.Namespace) -> None:
    """Start the servers before threads ask for them; starts wait until nobody imports any more."""
    servers = [_server(options.device, other) for other in {False, options.starts}]
    for server in servers if options.starts else ():
        _begun(server, int).join()


def _keep(name: str, found: Found, result: Found) -> None:
    """Put what was found of a model into the result."""
    counted = found.pop("inductor", None)
    if counted is not None:
        result["inductor"][name] = counted | {"torch": _torch()}
    if "times" in found:
        # Starts stand beside times, each of the last run that took them.
        result["times"][name] = result["times"].get(name, {}) | found["times"]
    else:
        result["models"][name] = found


def _seconds_before() -> dict[str, float]:
    """Return what each model took for the result that is committed: the longest begin first, so
    that few processors have nothing to do at the end.
    """
    path = measurement.RESULTS / f"{_NAME}.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    return {name: one.get("seconds", 0.0) for name, one in models.items()}


def _asked(task: Task, result: Found, options: argparse.Namespace) -> bool:
    if options.time and task[2] == "":
        return False
    if options.again and not options.time:
        found = result["models"].get(key(task))
        return found is not None and found["status"] != "right"
    return not (options.resume and _is_answered(task, result, options))


def _is_answered(task: Task, result: Found, options: argparse.Namespace) -> bool:
    if options.time:
        what = "second" if options.starts else "ours"
        return what in result.get("times", {}).get(key(task), {})
    return key(task) in result["models"]


def _inductor_wanted(task: Task, result: Found, options: argparse.Namespace) -> str:
    if options.time or options.graphs:
        return ("time" if options.time else "judge") + ("-graphs" if options.graphs else "")
    return "too" if _uncounted(task, result) and not options.no_inductor else "no"


def _uncounted(task: Task, result: Found) -> bool:
    """Whether nothing is known of what Inductor calls for a model; cases are not compared."""
    return task[2] != "" and key(task) not in result["inductor"]


def judged(
    task: Task,
    device: str,
    limit_s: float,
    *,
    inductor: str,
    cores: Iterable[int] | None = None,
    kernels: str | None = None,
    caches: str | None = None,
    other: bool = False,
) -> Found:
    """Return what a process of its own says of a task; a crash, and more time than there is, raise.

    Args:
        task: kind, name and mode.
        device: `cuda` or `cpu`.
        limit_s: how long it may take.
        inductor: whether what Inductor calls is counted, `no` or `too`; `time` and `time-graphs`
            take times alone, `judge-graphs` has calls as CUDA graphs, `start-` and a side is its
            first call.
        cores: that it runs on; None for all.
        kernels: Triton's directory; None for one of its own.
        caches: the folder of its caches; None for one of its own, which are empty.
        other: let it have other hashes of strings than who is not `other`.
    """
    kind, name, mode = task
    module = _MODULES.get(kind, _OF_LIBRARIES)
    with tempfile.TemporaryDirectory(prefix="models.") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        arguments = [kind, name, mode or "-", device, str(answer), inductor]
        # Who is timed compiles what it needs.
        shared = None if inductor.startswith("time") else kernels
        environment = {
            "TRITON_CACHE_DIR": shared or str(Path(caches or folder, "triton")),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(caches or folder, "inductor")),
            "XDG_CACHE_HOME": str(Path(caches or folder, "cache")),
            TIMING_LOCK: str(Path(kernels or folder, "timing.lock")),
        }
        started = time.monotonic()
        given = (module, arguments, environment, str(log), cores)
        process = _begun(_server(device, other), _run_here, *given)
        process.join(limit_s)
        ended = f"its process ended with {process.exitcode}"
        if process.exitcode is None:
            ended = f"not done in {limit_s:.0f} s"
            process.kill()
            with contextlib.suppress(ProcessLookupError):  # of what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            # It may have measured, and have stopped the others for that.
            for stopped in multiprocessing.active_children():
                if stopped.pid is not None:
                    os.kill(stopped.pid, signal.SIGCONT)
        seconds = round(time.monotonic() - started, 1)
        if answer.exists() and answer.stat().st_size:
            return {**json.loads(answer.read_text()), "seconds": seconds}
        text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    return {"status": "raises", "error": f"{ended}: {text[-1500:]}", "seconds": seconds}


def started_anew(task: Task, device: str, limit_s: float, cores: Iterable[int]) -> Found:
    """Return by start and side what a first call takes in a process of its own: with caches that
    are empty, and with those that a first start left.
    """
    found: Found = {"first": {}, "second": {}}
    for side in STARTED:
        with tempfile.TemporaryDirectory(prefix="start.") as caches:
            for start in _STARTS:
                said = judged(
                    task,
                    device,
                    limit_s,
                    inductor=f"{START}{side}",
                    cores=cores,
                    caches=caches,
                    other=start == "second",
                )
                if "start" not in said:
                    return said
                best = found[start].setdefault(side, said["start"])
                if said["start"]["whole_s"] < best["whole_s"]:
                    found[start][side] = said["start"]
    return {"status": "", "times": found}


@functools.cache
def _server(device: str, other: bool) -> forkserver.ForkServer:  # noqa: ARG001  # of the cache
    """Return what forks processes that have the libraries imported, and have not looked at the GPU.

    Those of one server have the same hashes of strings, as two runs of Python never have: `other`
    is another one, so that nobody finds a cache by the order of a set.
    """
    environment = {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks CUDA itself cannot be forked any more
        **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}),
    }
    server = forkserver.ForkServer()
    server.set_forkserver_preload(_IMPORTED)
    before = dict(os.environ)
    os.environ |= environment
    try:
        server.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return server


def _begun(server: forkserver.ForkServer, target: Callable[..., Any], *given: Any) -> Any:
    """Return a process that a server has forked."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=given)
    # multiprocessing has one server, and no way to name another.
    with (
        _STARTING,
        mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        process.start()
    return process


def _run_here(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    log: str,
    cores: Iterable[int] | None,
) -> None:
    """Be the process of a task."""
    os.setsid()
    os.environ |= environment
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    # a library did ask CUDA when it was imported
    if importlib.import_module("torch").cuda._is_in_bad_fork():  # noqa: SLF001
        # what stands there is this program
        os.execv(sys.executable, command(module, *arguments))  # noqa: S606
    sys.argv = [module, *arguments]
    try:
        sys.exit(importlib.import_module(module).main())
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001  # a forked process has to ask for it


def save(result: Found, path: Path) -> None:
    """Write a result with its rows."""
    result["rows"] = rows(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    partial.replace(path)


def key(task: Task) -> str:
    """Return the name of a task in a result."""
    return " ".join(part for part in task if part)


def rows(result: Found, *, whole: bool = False) -> list[Found]:
    """Return a line for each target; of a part of the lists nobody asks for 40 of each, nor for
    what Inductor calls.
    """
    models, inductor = result["models"], result["inductor"]
    made = []
    for library in ("transformers", "timm") if whole else ():
        judged = {
            name.split()[1]
            for name, one in models.items()
            if name.startswith(library) and one["status"] not in {"absent", "broken"}
        }
        words = f"models of {library} that were judged"
        made.append(measurement.row(words, len(judged), "", least=_LEAST))
    # Words, whether a model is meant, and how many may be.
    checks: list[tuple[str, Callable[[str, Found], Any], int | None]] = [
        ("models and cases that are wrong", lambda _, one: one["status"] == "wrong", 0),
        ("that raise", lambda _, one: one["status"] == "raises", 0),
        ("that eager mode cannot run", lambda _, one: one["status"] == "broken", 0),
        ("with a graph that runs as torch has it", lambda _, one: one.get("as_torch_has_them"), 0),
        (
            "with more graph breaks than Inductor",
            lambda name, one: name in inductor and _breaks(one) > _breaks(inductor[name]),
            0,
        ),
        (
            "that call more operators than Inductor",
            lambda name, one: name in inductor and _extra_calls(one, inductor[name]),
            0,
        ),
        (
            "right but for a gradient at the step of a function, by rounding",
            lambda _, one: one.get("steps"),
            None,
        ),
    ]
    if whole:
        checks.append(
            (
                "without Inductor's calls to compare with",
                lambda name, one: (
                    name.startswith(("transformers ", "timm "))
                    and one["status"] in {"right", "wrong"}
                    and "called" not in inductor.get(name, {})
                ),
                0,
            )
        )
    for words, is_meant, most in checks:
        names = sorted(name for name, one in models.items() if is_meant(name, one))
        made.append(measurement.row(words, len(names), f"of {len(models)}", names=names, most=most))
    times = result.get("times", {})
    if times:
        names = sorted(name for name, one in times.items() if fallbacks(one))
        words = "timed with a graph that runs as torch has it"
        made.append(measurement.row(words, len(names), f"of {len(times)}", names=names, most=0))
    return made


def fallbacks(times: Found) -> int:
    """Return how many graphs of ours ran as torch has them while a model was timed: the most of its
    processes.
    """
    runs = (times, times.get("first", {}), times.get("second", {}))
    return max(int(run.get("ours", {}).get("fallbacks", 0)) for run in runs)


def _breaks(found: Found) -> int:
    return sum(found.get("breaks", {}).values())


def _extra_calls(found: Found, inductor: Found) -> int:
    """Return how many operators a model calls beyond those that Inductor calls; of a model that
    raises, nothing is known.
    """
    if "called" not in inductor or found["status"] == "raises":
        return 0
    return max(0, _calls(found) - _calls(inductor))


def _calls(found: Found) -> int:
    return sum(
        count for name, count in found.get("called", {}).items() if not _EXCEPTED.search(name)
    )


def line(name: str, found: Found, inductor: Found | None) -> str:
    """Return what was found of one model, in words."""
    words = [f"{name}: {found['status']}"]
    if "graphs" in found:
        words.append(
            f"graphs {found['graphs']}, as torch has them {len(found['as_torch_has_them'])}, breaks"
            f" {sum(found['breaks'].values())}"
        )
        beside = (
            f" (Inductor {sum(inductor['called'].values())})"
            if inductor and "called" in inductor
            else ""
        )
        words.append(
            f"calls {sum(found['called'].values())}{beside}, launches {found['launches']}, first"
            f" call {found['first_call_s']} s"
        )
    words += [f"{at}: {'; '.join(lines)}" for at, lines in found.get("wrong", {}).items()]
    if "error" in found:
        words.append(f"{found.get('at', '')} {found['error']}".strip())
    return ", ".join(words)[:1200]


def show(result: Found, *, whole: bool = False) -> int:
    """Print what is not right, and the figures; 1 when a target is missed."""
    for name, found in sorted(result["models"].items()):
        if found["status"] != "right":
            print(line(name, found, result["inductor"].get(name)))
        if found["status"] == "skipped":
            print(f"{name}: SKIPPED, {found['error']}")
    absent = [name for name, found in result["models"].items() if found["status"] == "absent"]
    if absent:
        print(f"not in the releases that are installed: {', '.join(sorted(absent))}")
    missed: int = bench_rows.show({**result, "rows": rows(result, whole=whole)})
    return missed

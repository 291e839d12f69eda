# SPDX-License-Identifier: Apache-2.0
"""A Llama of 1 B parameters, BERT and a ViT from bundles, with neither torch nor Triton, beside eager
torch and torch.compile: writes docs/results/codegen-without-torch.json.

    python -m tools.codegen without-torch [llama] [bert-base] [vit-base] [bert-base-8] [vit-base-8]
        [--tiny] [--results DIR] [--check]

`examples/llama.py` is built on this machine for its GPU, and `examples/llama_run.py` generates 64
tokens in a process that cannot import torch.  Judged are the logits of each step, given the tokens
of eager torch, by the rule of TorchInductor's dashboard: not farther from float64's than three
times as far as eager's, and a tenth of the tolerance; the tokens, wherever the two best of eager
torch are farther apart than twice its own error; the time a token beside
torch.compile(mode="reduce-overhead"); the time from the start of a process to its first token
beside torch.compile's from cold and from warm caches; and memory.  Of BERT and the ViT, which
`encoder_sides.py` has, one example at a time or eight, the numbers are judged by the same rule, and
times and memory likewise; eight may take as long as torch.compile's.  Builds, references and cold
starts of all models run side by side, what is timed beside torch.compile's warm start by itself.
Models that are not named keep what the result has of them.  With `--check` nothing runs, and the
exit status is 1 where the result misses a target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.codegen import encoder_launch
from tools.codegen.command_line import parser
from tools.codegen.llama_files import ANSWER, BUNDLE, PROMPT, TOKENS, WEIGHTS
from tools.shared import measurement
from tools.shared.processes import ROOT

NAME = "codegen-without-torch"
_SEVERAL = ("bert-base-8", "vit-base-8")
LLAMA, ENCODERS = "llama", ("bert-base", "vit-base", *_SEVERAL)
# Builds, references and cold starts that run side by side: each has cores enough, and memory.
_AT_ONCE = 5
SIDES = ("greedy", "ours", "eager", "cold", "warm")
#: The dashboard's tolerance of inference, and its factor of half precision.
TOLERANCE, FACTOR = 1e-3, 3.0
MOST_TIME, MOST_START_S, SPARE_BYTES = 0.8, 2.0, 64 << 20
#: Of several examples at a time, which cuBLAS has the larger part of.
MOST_TIME_OF_SEVERAL = 1.0
#: Both fail where they are imported.
_WITHOUT = "import sys; sys.modules |= dict.fromkeys(('torch', 'triton')); import runpy; "


def main() -> int:
    """Run all sides, compare and save; 1 where a target is missed."""
    line = parser(__doc__, "results check")
    line.add_argument("names", nargs="*", metavar="NAME", help="models; without one all")
    line.add_argument("--tiny", action="store_true", help="small models, to try the program")
    options = line.parse_args()
    path = Path(options.results) / f"{NAME}.json"
    if options.check:
        return _told(json.loads(path.read_text()))
    names, tiny = options.names or (LLAMA, *ENCODERS), ("--tiny",) if options.tiny else ()
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    models: dict[str, Any] = result.setdefault("models", {})
    with tempfile.TemporaryDirectory() as whole, ThreadPoolExecutor(_AT_ONCE) as several:
        folders = {name: Path(whole, name) for name in names}
        prepared = dict(
            zip(names, several.map(partial(_prepared, tiny), folders.values()), strict=True)
        )
        for name, folder in folders.items():
            if name == LLAMA:
                result = {**llama(folder, tiny, prepared[name]), "models": models}
            else:
                found = encoder(folder, tiny, prepared[name])
                models[name] = {**measurement.facts(), **found}
            measurement.save(NAME, result, Path(options.results))
    return _told(result)


def _prepared(tiny: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what the sides of a model found whose times are beside the point, and those of a cold
    start of torch.compile, in which the others take part.
    """
    folder.mkdir()
    return {one: side(folder, one, *tiny) for one in ("build", "eager", "cold")}


def llama(folder: Path, tiny: Sequence[str], prepared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all sides of the Llama found; the machine is theirs."""
    result = {**prepared, "greedy": greedy(folder)}
    result["ours"] = _run([sys.executable, "-m", "tools.codegen.llama_launch", str(folder)])
    result["warm"] = side(folder, "warm", *tiny)
    result |= compared(folder, result["greedy"].pop("tokens"))
    result["memory"] = memory(folder / BUNDLE, folder / WEIGHTS, result["greedy"]["memory_bytes"])
    return result


def encoder(folder: Path, tiny: Sequence[str], prepared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all sides of an encoder found; the machine is theirs."""
    result = dict(prepared)
    result["ours"] = _run([sys.executable, "-m", "tools.codegen.encoder_launch", str(folder)])
    result["warm"] = side(folder, "warm", *tiny)
    found = [np.load(folder / f"{one}.npy").reshape(1, -1) for one in ("ours", "eager", "float64")]
    off, allowed, beside = (float(one[0]) for one in _judged(*found))
    result["results"] = {"off": off, "allowed": allowed, "beside_eager": beside}
    files = folder / encoder_launch.BUNDLE, folder / encoder_launch.WEIGHTS
    result["memory"] = memory(*files, result["ours"]["memory_bytes"])
    return result


def side(folder: Path, name: str, *tiny: str) -> dict[str, Any]:
    """Return what a side with torch found of the folder's model; caches of compilers are there, and
    torch.compile starts cold, then warm.
    """
    asked = "compiled" if name in ("cold", "warm") else name
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": f"triton-{asked}"}
    where = {variable: str(folder / cache) for variable, cache in caches.items()}
    of = LLAMA if folder.name == LLAMA else "encoder"
    words = [str(folder), *([] if of == LLAMA else [folder.name]), *tiny]
    return _run([sys.executable, "-m", f"tools.codegen.{of}_sides", asked, *words], where)


def greedy(folder: Path) -> dict[str, Any]:
    """Return what the example finds, and how long its process took to the first token."""
    script = str(ROOT / "examples" / "llama_run.py")
    prompt = ",".join(map(str, json.loads((folder / TOKENS).read_text())[:PROMPT]))
    words = [script, str(folder / BUNDLE), str(folder / WEIGHTS), "--prompt", prompt]
    words += ["--tokens", str(ANSWER)]
    code = f"{_WITHOUT}sys.argv = {words!r}; runpy.run_path({script!r}, run_name='__main__')"
    found = _run([sys.executable, "-c", code])
    if found["imported"]:
        raise AssertionError(f"imported: {found['imported']}")
    return found


def _run(line: list[str], more: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what a process prints, and the seconds to its first token or result where it says
    when.
    """
    environment = {**os.environ, "PYTHONPATH": _path(), **(more or {})}
    started = time.time()
    done = subprocess.run(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["process_s"] = time.time() - started
    for name in [name for name in found if name.endswith("_at")]:
        found[f"{name.removesuffix('_at')}_s"] = found.pop(name) - started
    return found


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def compared(folder: Path, answer: list[int]) -> dict[str, Any]:
    """Return how logits and tokens compare, step by step.

    Args:
        folder: with the logits of each side.
        answer: tokens that the example generated by itself.
    """
    ours, eager, wide = (np.load(folder / f"{name}.npy") for name in ("ours", "eager", "float64"))
    tokens = json.loads((folder / TOKENS).read_text())[PROMPT:]
    off, allowed, beside = _judged(ours, eager, wide)
    best = np.sort(eager, -1)
    gap, error = best[:, -1] - best[:, -2], np.abs(eager - wide).max(-1)
    sure = gap > 2 * error
    differing = ours.argmax(-1) != np.asarray(tokens)
    equal = [one == other for one, other in zip(answer, tokens, strict=True)]
    apart = None if all(equal) else equal.index(False)
    return {
        "logits": {
            "steps": len(ours),
            "wrong": int((~(off <= allowed)).sum()),
            "worst": float((off / allowed).max()),
            "beside_eager": float(beside.mean()),
        },
        "tokens": {
            "sure": int(sure.sum()),
            "wrong": int((differing & sure).sum()),
            "equal": int((~differing).sum()),
            # From there on the conversations differ: they may where eager torch is not sure.
            "first_apart": apart,
            "wrongly_apart": bool(apart is not None and sure[apart]),
        },
    }


def _judged(ours: Any, eager: Any, wide: Any) -> tuple[Any, Any, Any]:
    """Return how far each row is from float64's, how far it may be, and that beside eager's."""
    off, eagers = _distance(ours, wide), _distance(eager, wide)
    return off, FACTOR * eagers + TOLERANCE / 10, off / eagers


def _distance(one: Any, other: Any) -> Any:
    return np.sqrt(np.square(one.astype("float64") - other.astype("float64")).mean(-1))


def memory(bundle: Path, weights: Path, used: int) -> dict[str, Any]:
    """Return what may be in use, in bytes, and what was."""
    from bundler import Bundle
    from bundler.runtime.program.program_summary import programs_of

    programs = programs_of(Bundle.load(bundle))
    state = sum(_bytes(one.type) for one in programs[0].inputs)  # which all of a bundle share
    step = max(one.memory_bytes or 0 for one in programs)
    return {"used": used, "weights": weights.stat().st_size, "state": state, "step": step}


def _bytes(described: str) -> int:
    """Return the size of a tensor that is described as float32[2, 3]."""
    from bundler.runtime.program.device_tensors import item_bytes

    dtype, _, sizes = described.rstrip("]").partition("[")
    return item_bytes(dtype) * int(np.prod([int(size) for size in sizes.split(",")]))


def missed(result: dict[str, Any]) -> list[str]:
    """Return the targets that a result misses, in words."""
    found = _llama_missed(result) if "logits" in result else []
    for name, one in result.get("models", {}).items():
        most = MOST_TIME_OF_SEVERAL if name in _SEVERAL else MOST_TIME
        found += [f"{name}: {words}" for words in _encoder_missed(one, most)]
    return found


def _llama_missed(result: dict[str, Any]) -> list[str]:
    found = []
    if result["logits"]["wrong"]:
        found.append("logits are too far from float64's")
    if result["tokens"]["wrong"] or result["tokens"]["wrongly_apart"]:
        found.append("tokens are not eager torch's")
    theirs = min(result[kind]["ms_a_token"] for kind in ("cold", "warm"))
    ratio, first_s = result["ours"]["ms_a_token"] / theirs, result["greedy"]["first_token_s"]
    return found + _beyond("token", (ratio, MOST_TIME), first_s, result["memory"])


def _encoder_missed(result: dict[str, Any], most: float) -> list[str]:
    wrong = not result["results"]["off"] <= result["results"]["allowed"]
    theirs = min(result[kind]["ms"] for kind in ("cold", "warm") if kind in result)
    ours = result["ours"]
    beyond = _beyond("result", (ours["ms"] / theirs, most), ours["first_s"], result["memory"])
    return ["results are too far from float64's"] * wrong + beyond


def _beyond(
    what: str, time: tuple[float, float], first_s: float, room: dict[str, int]
) -> list[str]:
    """Return which bounds of time and memory are exceeded; the time with the most that it may
    take.
    """
    found, (ratio, most) = [], time
    if ratio > most:
        found.append(f"a {what} takes more than {most} of torch.compile's time")
    if first_s > MOST_START_S:
        found.append(f"the first {what} comes after more than {MOST_START_S} s")
    if room["used"] > room["weights"] + room["state"] + room["step"] + SPARE_BYTES:
        found.append("more memory than weights, state, one step and 64 MiB")
    return found


def _told(result: dict[str, Any]) -> int:
    for model, part in {LLAMA: result, **result.get("models", {})}.items():
        for name in ("build", "results", "logits", "tokens", "memory", *SIDES):
            if name in part:
                print(f"{model}, {name}: {json.dumps(part[name])}")
    for words in missed(result):
        print(f"missed: {words}")
    return int(bool(missed(result)))


if __name__ == "__main__":
    sys.exit(main())

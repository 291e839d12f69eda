# SPDX-License-Identifier: Apache-2.0
"""The part of the crash matrix that needs Triton: it compiles the kernels once, and looks kernels
up as programs do.

    python -m tools.crash.triton_process make FOLDER
    python -m tools.crash.triton_process serve

`serve` reads a JSON line {"cache": directory, "compile": bool} and answers one: what
Triton did about each kernel, and the digest of the binary it ended with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.shared import example_kernels

# One with a path in its metadata (gelu needs libdevice), one for another GPU vendor, two more.
WANTED = (
    ("gelu", "cuda:90"),
    ("softmax", "cuda:90"),
    ("histogram", "cuda:90"),
    ("row_sum", "hip:gfx942"),
)
TUNING = {f"{'T' * 52}/swiglu_kernel.autotune.json": '{"configs_timings": []}'}
INDUCTOR = {
    "ab/cabc.best_config": '{"XBLOCK": 64}',
    "fxgraph/xy/entry": "graph " * 500,
    "ab/cabc.py": "print()\n",
}


class WouldCompileError(Exception):
    """A lookup missed; compiling is not part of this question."""


def main() -> int:
    """Make or serve."""
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        serve()
    return 0


def make(folder: Path) -> None:
    """Fill a folder with two builds of the kernels (ours, theirs), bundles, and what the judges
    must know.
    """
    import bundler

    kernels = example_kernels.load()
    os.environ["TRITON_CACHE_DIR"] = str(folder / "ours")
    with bundler.recording() as recording:
        compile_wanted(kernels)
    other = Path(shutil.copy(example_kernels.PATH, folder / "elsewhere.py"))
    os.environ["TRITON_CACHE_DIR"] = str(folder / "theirs")
    compile_wanted(example_kernels.load(other))
    with recording.collect() as bundle:
        check_digests(bundle, folder / "ours")
        keys = sorted(kernel.key for kernel in bundle.kernels)
    small, inductor = folder / "tuned", folder / "inductor"
    shutil.copytree(folder / "ours", small)
    write(small, TUNING)
    placed = {
        f"triton/{device}/{key}": key for device, key in ((0, keys[0]), (0, keys[1]), (1, keys[1]))
    }
    for place, key in placed.items():
        shutil.copytree(folder / "ours" / key, inductor / place)
    write(inductor, INDUCTOR)
    for name, directory in (("small", small), ("inductor", inductor)):
        with bundler.pack(directory) as packed:
            check_digests(packed, folder / "ours")
            packed.save(folder / f"{name}.tbundle")
            if name == "small":
                packed.select(names="[gh]*").save(folder / "part.tbundle")
                packed.select(names="[rs]*").save(folder / "rest.tbundle")
                with bundler.open_store(f"file://{folder}/store") as store:
                    store.push(packed, "team/demo")
    facts = {
        "singles": {"small": TUNING, "inductor": INDUCTOR},
        "placed": {"small": {k: k for k in keys}, "inductor": placed},
    }
    for name, fact in facts.items():
        (folder / f"{name}.json").write_text(json.dumps(fact))


def compile_wanted(kernels: ModuleType) -> None:
    """Compile each kernel of the matrix."""
    for name, target in WANTED:
        kernels.compile_one(name, target)


def write(root: Path, files: dict[str, str]) -> None:
    """Write text files below a directory."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def check_digests(bundle: Any, cache: Path) -> None:
    """The judges compare with the files that Triton wrote: hold the manifest to the same digests
    first.
    """
    for kernel in bundle.kernels:
        for artifact in kernel.artifacts:
            found = hashlib.sha256(
                (cache / kernel.key / artifact.filename).read_bytes()
            ).hexdigest()
            assert artifact.spans or artifact.digest.endswith(found), (
                f"{kernel.key}/{artifact.filename}: {artifact.digest}"
            )


def serve() -> None:
    """Answer until the input ends."""
    from triton import knobs
    from triton.compiler import compiler

    kernels, real = example_kernels.load(), compiler.ASTSource.make_ir
    heard: list[bool] = []
    knobs.compilation.listener = lambda **facts: heard.append(facts["cache_hit"])

    def refuse(*_: Any, **__: Any) -> Any:
        raise WouldCompileError

    for line in sys.stdin:
        question = json.loads(line)
        os.environ["TRITON_CACHE_DIR"] = question["cache"]
        compiler.ASTSource.make_ir = real if question["compile"] else refuse
        print(
            json.dumps([look_up(kernels, name, target, heard) for name, target in WANTED]),
            flush=True,
        )


def look_up(kernels: ModuleType, name: str, target: str, heard: list[bool]) -> dict[str, str]:
    """Compile one kernel the way a program does; a miss when Triton would have to compile and may
    not.
    """
    heard.clear()
    try:
        (kernel,) = kernels.compile_one(name, target)
    except WouldCompileError:
        return {"name": name, "did": "missed"}
    except Exception as error:  # noqa: BLE001  # whatever a broken directory makes Triton raise is the finding
        return {"name": name, "did": f"raised {error!r}"}
    binary = kernel.asm["hsaco" if target.startswith("hip") else "cubin"]
    return {
        "name": name,
        "did": "hit" if heard == [True] else "compiled",
        "binary": hashlib.sha256(binary).hexdigest(),
    }


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Tools of these tests; none of it uses the code under test, but what its name says."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.shared import measurement

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "examples" / "kernels.py"
TARGETS = ("cuda:90", "hip:gfx942")
GROUP = "__grp__"

# What a program does that imports kernels: argv is the file of kernels, the names ("all" for all of
# them), targets.
_ASK = """
import importlib.util, json, sys
from triton import knobs
heard = []
knobs.compilation.listener = lambda **facts: heard.append([facts["metadata"]["name"], facts["metadata"]["hash"],
                                                           facts["cache_hit"]])
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
wanted = kernels.RECIPES if sys.argv[2] == "all" else sys.argv[2].split(",")
for target in sys.argv[3:]:
    for name in wanted:
        kernels.compile_one(name, target)
print(json.dumps(heard))
"""


def write_in_python(monkeypatch):
    """Let kernels be written by functions of `os`, which a test can replace, instead of by the
    extension.
    """
    from bundler.lifecycle import kernel_writer

    monkeypatch.setattr(kernel_writer, "compiled_writer", lambda: None)


def read_in_python(monkeypatch):
    """Let kernel directories be read by functions of `os`, which a test can replace, instead of by
    the extension.
    """
    from bundler.lifecycle import kernel_directory

    monkeypatch.setattr(kernel_directory, "compiled_reader", lambda: None)


def load(path, name):
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(code, *args, env=None, check=True, cwd=None):
    """Run code in a new Python; `env` is added to the environment of this process."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code, *map(str, args)],
        env={**os.environ, **{name: str(value) for name, value in (env or {}).items()}},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def answer(code, *args, env=None, cwd=None):
    """Run code in a new Python and return the JSON it printed last."""
    return json.loads(run(code, *args, env=env, cwd=cwd).stdout.splitlines()[-1])


def ask(cache, names="all", targets=TARGETS, env=None, cwd=None, kernels=KERNELS):
    """Compile kernels in a new process; returns what Triton's own listener heard: [entry point,
    hash, hit].
    """
    return answer(
        _ASK, kernels, names, *targets, env={"TRITON_CACHE_DIR": cache, **(env or {})}, cwd=cwd
    )


def refusing(folder):
    """Return an environment in which ptxas answers --version and nothing else, and the file that
    notes the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return measurement.refusing_ptxas(folder)


def hits_without_compiler(
    cache, folder, names="all", targets=TARGETS, cwd=None, kernels=KERNELS, env=None
):
    """Return (hits, compiles) of a new process whose ptxas refuses to work; a compile for CUDA
    would fail in it.
    """
    environment, log = refusing(folder)
    heard = ask(cache, names, targets, {**environment, **(env or {})}, cwd, kernels)
    assert not log.exists(), log.read_text()
    return sum(hit for *_, hit in heard), sum(not hit for *_, hit in heard)


def tree(directory):
    """Return relative path -> bytes of every file below a directory; a link counts as its text."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def temporaries(directory):
    """Names in a cache directory that are no kernel's, but for directories put aside."""
    return [
        name
        for name in os.listdir(directory)
        if name.startswith("tmp.") and not name.startswith("tmp.bundler.old.")
    ]


def put_aside(directory):
    """Directories that a repair renamed, sorted."""
    return sorted(Path(directory).glob("tmp.bundler.old.*"))


def plant(source, destination, keys):
    """Copy kernel directories to another cache directory with group files as Triton writes them
    there.
    """
    Path(destination).mkdir(parents=True, exist_ok=True)
    for key in keys:
        shutil.copytree(Path(source, key), Path(destination, key))
        name_group(Path(destination, key))
    return Path(destination)


def name_group(directory, where=None):
    """Write the group file of a kernel directory anew, naming its files in `where`."""
    for group in directory.glob(GROUP + "*"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(
            json.dumps(
                {"child_paths": {name: os.path.join(where or directory, name) for name in names}}
            )
        )


def one(directory, suffix):
    """Return the one file of a kernel directory with this suffix."""
    (found,) = [
        path
        for path in directory.iterdir()
        if path.name.endswith(suffix) and not path.name.startswith(GROUP)
    ]
    return found


def group_of(directory):
    """Return the group file of a kernel directory."""
    (found,) = directory.glob(GROUP + "*.json")
    return found


def is_whole(directory):
    """Whether Triton would find a kernel in a directory: a group file, and each child that it
    names.
    """
    groups = list(directory.glob(GROUP + "*.json"))
    return len(groups) == 1 and all(
        Path(path).is_file() for path in json.loads(groups[0].read_text())["child_paths"].values()
    )


#  Ways in which a kernel directory is found broken, each with a word of the reason that is to be given


def _remove(suffix):
    return lambda directory: one(directory, suffix).unlink()


def _write(suffix, data):
    return lambda directory: one(directory, suffix).write_bytes(data)


def _truncate_binary(directory):
    path = one(directory, ".cubin")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _cut_metadata(directory):
    path = one(directory, ".json")
    path.write_bytes(path.read_bytes()[:-40])


def _other_kernel(directory):
    path = one(directory, ".json")
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "hash": "00" * 32}))


def _absent_child(directory):
    group = group_of(directory)
    paths = json.loads(group.read_text())["child_paths"]
    group.write_text(
        json.dumps({"child_paths": {**paths, "more.ttir": str(directory / "more.ttir")}})
    )


def _symlink(directory):
    path = one(directory, ".cubin")
    elsewhere = directory.parent / "elsewhere.cubin"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _folder(directory):
    path = one(directory, ".ttir")
    path.unlink()
    path.mkdir()


def _pipe(directory):
    path = one(directory, ".ptx")
    path.unlink()
    os.mkfifo(path)


def _second_group(directory):
    shutil.copy(group_of(directory), directory / f"{GROUP}other.json")


BROKEN = {
    "no binary": (_remove(".cubin"), "is listed in the group file but not there"),
    "empty binary": (_write(".cubin", b""), "is empty"),
    "text instead of a binary": (_write(".cubin", b"no such thing\n"), "is not an ELF file"),
    "half a binary": (_truncate_binary, "truncated"),
    "no metadata": (_remove(".json"), "is listed in the group file but not there"),
    "half the metadata": (_cut_metadata, "is not valid metadata"),
    "metadata that is no object": (_write(".json", b"[]"), "is not valid metadata"),
    "metadata without a hash": (_write(".json", b'{"name": "k"}'), "is not valid metadata"),
    "metadata of another kernel": (_other_kernel, "is of another kernel"),
    "no group file": (lambda directory: group_of(directory).unlink(), "no group file"),
    "two group files": (_second_group, "several group files"),
    "an empty group file": (
        lambda directory: group_of(directory).write_bytes(b""),
        "is not a valid group file",
    ),
    "a group file that is a list": (
        lambda directory: group_of(directory).write_text("[]"),
        "is not a valid group file",
    ),
    "a group without children": (
        lambda directory: group_of(directory).write_text('{"child_paths": {}}'),
        "is not a valid group file",
    ),
    "a group that lists an absent file": (
        _absent_child,
        "more.ttir is listed in the group file but not there",
    ),
    "a symbolic link": (_symlink, "is a symbolic link"),
    "a directory where a file should be": (_folder, "is a directory"),
    "a pipe where a file should be": (_pipe, "is not a regular file"),
}

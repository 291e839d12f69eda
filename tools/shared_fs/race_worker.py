# SPDX-License-Identifier: Apache-2.0
"""One process of the race on a shared file system: does everything that stores and caches do, in
random order, for some seconds.

python -m tools.shared_fs.race_worker MOUNT BUNDLE SECONDS SEED      prints what happened as JSON

What it read that was wrong, and errors that are none of ours, are what must not happen; errors of
ours and misses may.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

OBJECTS, BYTES = 12, 20_000
COUNTER = "v1/counter"
TAG = "t"


def value_of(key: str) -> bytes:
    """Return the bytes that a key always has."""
    return hashlib.sha256(key.encode()).digest() * (BYTES // 32)


class Racer:
    """What one process does, and what it found.

    Args:
        mount: the shared directory as this client sees it.
        bundle: a bundle file.
        seed: of the order.
    """

    def __init__(self, mount: Path, bundle: str, seed: int) -> None:
        import bundler
        from bundler.backends.local import LocalBackend

        self._bundler, self._random = bundler, random.Random(seed)  # it must repeat
        self._backend = LocalBackend(str(mount / "objects"))
        self._store = bundler.open_store(f"file://{mount / 'store'}")
        self._bundle = bundler.Bundle.load(bundle)
        self._mount, self._cache = mount, mount / "cache"
        self._files = {
            f"{kernel.key}/{artifact.filename}": self._bundle.read(artifact)
            for kernel in self._bundle.kernels
            for artifact in kernel.artifacts
        }
        self.done: Counter[str] = Counter()
        self.typed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.peer: Counter[str] = Counter()
        self.counted = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Do things until the time is over."""
        from bundler.backends.backend_errors import BackendError

        twice = [self._get, self._count, self._restore]
        once = [self._put, self._delete, self._list, self._push, self._look, self._triton]
        acts: list[Callable[[], object]] = [*twice, *twice, *once, self._remove_kernel]
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            act = self._random.choice(acts)
            name = act.__name__.strip("_")
            self.done[name] += 1
            try:
                act()
            except (BackendError, self._bundler.BundlerError) as error:
                self.typed[f"{name}: {type(error).__name__}: {_without_paths(error)}"] += 1
            except Exception as error:  # noqa: BLE001  # what must not happen is what we look for
                self.wrong.append(f"{name} raised {type(error).__name__}: {error}")
        names = ("done", "typed", "wrong", "peer", "counted")
        return {name: getattr(self, name) for name in names}

    def _key(self) -> str:
        return f"u/{self._random.randrange(OBJECTS)}"

    def _put(self) -> None:
        key = self._key()
        self._backend.put({key: value_of(key)})

    def _get(self) -> None:
        for key, found in self._backend.get([self._key(), self._key()]).items():
            if found != value_of(key):
                self.wrong.append(f"{key} has {len(found)} bytes that are not its own")

    def _delete(self) -> None:
        self._backend.delete([self._key()])

    def _list(self) -> None:
        for stat in self._backend.list():
            if stat.size_bytes not in {0, len(value_of(stat.key))}:
                self.wrong.append(f"{stat.key} is listed with {stat.size_bytes} bytes")

    def _count(self) -> None:
        before = self._backend.read_ref(COUNTER)
        self.counted += self._backend.swap_ref(COUNTER, before, b"%d" % (int(before or b"0") + 1))

    def _push(self) -> None:
        self._store.push(self._bundle, TAG)

    def _restore(self) -> None:
        self._store.restore(TAG, cache_dir=self._cache, only="all")

    def _look(self) -> None:
        """Look at kernels as Triton does: one whose group file is there is whole."""
        for kernel in self._bundle.kernels:
            folder, group = self._cache / kernel.key, None
            with contextlib.suppress(OSError):
                group = next(
                    (name for name in os.listdir(folder) if name.startswith("__grp__")), None
                )
            for name, data in self._files.items() if group is not None else ():
                if name.startswith(kernel.key):
                    try:
                        found = (self._cache / name).read_bytes()
                    except OSError as error:
                        # Somebody removed the kernel meanwhile, which is what other processes of
                        # the race do.
                        if error.errno not in {errno.ENOENT, errno.ESTALE}:
                            raise
                        continue
                    # Of metadata restoring changes the paths.
                    right = json.loads(found) if name.endswith(".json") else found == data
                    if not right:
                        self.wrong.append(f"{name} has {len(found)} bytes that are not its own")

    def _remove_kernel(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(
                self._cache / self._random.choice(self._bundle.kernels).key, ignore_errors=True
            )

    def _triton(self) -> None:
        """Put a file into Triton's own cache, which is the peer: its errors are counted, and are
        not ours.
        """
        from triton.runtime.cache import FileCacheManager

        os.environ["TRITON_CACHE_DIR"] = str(self._mount / "triton")
        self.peer["puts"] += 1
        try:
            FileCacheManager(hashlib.sha256(self._key().encode()).hexdigest()).put(
                b"x" * BYTES, "kernel.cubin"
            )
        except OSError as error:
            self.peer[errno.errorcode.get(error.errno or 0, "OSError")] += 1


def _without_paths(error: BaseException) -> str:
    return " ".join(word for word in str(error).split() if "/" not in word)[:120]


def main(mount: str, bundle: str, seconds: str, seed: str) -> None:
    """Race, and say what happened."""
    warnings.simplefilter("ignore")
    print(json.dumps(Racer(Path(mount), bundle, int(seed)).run(float(seconds))))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""`LaunchDump`: writes down what tuned kernels are launched with: a line for each launch and, where
that is asked for, its tensors.

`TunerOptions.dump` holds one, and `LaunchWatch` writes to it.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bundler.errors import ConfigError
from bundler.format.bundle_file import os_errors, replace_file
from bundler.runtime.launch.calls.argument_types import is_tensor
from bundler.runtime.tuning.benchmark import pattern_of
from bundler.runtime.tuning.tuner_plugins import TunedLaunch
from bundler.toolchain import tuner_toolchain as toolchain

_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_KEY_CHARACTERS = 16


class LaunchDump:
    """Appends a line to a file for each launch: kernel, arguments, config, grid.

    Numbers and bools are written, everything else is `T`.  With `tensors`, each launch has a folder
    `<kernel>-<key>_run_<i>` with a file `tensor_<number of the argument>.pt` for each tensor, as it
    was before the launch; `torch.load` reads it with `weights_only=True`.  The folders of the last
    `runs` launches of each compiled kernel are kept, in turn.  Writing tensors waits for the
    device.  Any thread may launch.

    Args:
        path: the file.
        tensors: the directory of those folders; None writes no tensor.
        runs: how many launches of a kernel are kept.
        pattern: a regular expression; tensors are written for kernels alone whose name begins with
            a match.

    Raises:
        ConfigError: `runs` is below one, or the pattern no regular expression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensors: str | os.PathLike[str] | None = None,
        runs: int = 1,
        pattern: str | None = None,
    ) -> None:
        if type(runs) is not int or runs < 1:
            raise ConfigError(
                f"runs={runs!r}: expected how many launches are kept, at least 1", got=runs
            )
        self._pattern = pattern_of(pattern)
        self._path, self._lock = os.fspath(path), threading.Lock()
        self._tensors, self._runs = None if tensors is None else Path(tensors), runs
        self._counts: Counter[str] = Counter()

    def write(self, launch: TunedLaunch) -> None:
        """Write down one launch.

        Raises:
            AccessDenied, StoreFull, NotFound: a file cannot be written.
        """
        values = list(launch.arguments.items())
        args, keywords = values[: launch.by_position], dict(values[launch.by_position :])
        self.add(
            launch.kernel,
            [value for _, value in args],
            keywords,
            launch.config.all_kwargs(),
            launch.grid,
        )
        wanted = self._pattern is None or self._pattern.match(launch.kernel)
        if self._tensors is not None and wanted:
            self._write_tensors(self._tensors, launch)

    def add(
        self,
        kernel: str,
        args: Iterable[Any],
        keywords: Mapping[str, Any],
        config: Mapping[str, Any],
        grid: Any,
    ) -> None:
        """Append the line of one launch; raises as `write`."""
        words = [_word(value) for value in args]
        words += [f"{name}={_word(value)}" for name, value in keywords.items()]
        words += [f"{name}={value}" for name, value in config.items()]
        line = f"{kernel} | {' '.join(words)} | {grid}\n"
        with (
            self._lock,
            os_errors(self._path, "write"),
            open(self._path, "a", encoding="utf-8") as file,
        ):
            file.write(line)

    def _write_tensors(self, directory: Path, launch: TunedLaunch) -> None:
        name = _ODD.sub("_", f"{launch.kernel}-{launch.key[:_KEY_CHARACTERS]}".rstrip("-"))
        with self._lock:
            run = self._counts[name] % self._runs
            self._counts[name] += 1
        folder = directory / f"{name}_run_{run}"
        with os_errors(os.fspath(folder), "write"):
            folder.mkdir(parents=True, exist_ok=True)
        for number, value in enumerate(launch.arguments.values()):
            if is_tensor(value):
                replace_file(folder / f"tensor_{number}.pt", _saver(value))


def _saver(tensor: Any) -> Any:
    return lambda file: toolchain.save_tensor(tensor, file)


def _word(value: Any) -> str:
    return str(value) if isinstance(value, int | bool) else "T"

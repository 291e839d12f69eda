# SPDX-License-Identifier: Apache-2.0
"""`begin_metrics`, `serve_metrics`: this process's metrics, as a file at its end, over HTTP, or in
files that many processes share.

Sessions (`_process.py`) and commands (`bundler/cli`) call it; `prometheus_meters.py` is imported
when there is somebody to tell.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
from typing import TYPE_CHECKING

from bundler import observers
from bundler.config import metrics_file_setting
from bundler.errors import ConfigError
from bundler.integrations.user_directories import write_whole
from bundler.package_loggers import logger
from bundler.project import install

if TYPE_CHECKING:
    from bundler.integrations.prometheus_meters import EndpointServer, Meters

LOOPBACK = "127.0.0.1"
PID = "{pid}"
_LIBRARY = "prometheus_client"
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_LOG = logger("bundler.integrations")


class _Exported:
    """The meters of this process, and the files that get them at its end."""

    def __init__(self) -> None:
        self.meters: Meters | None = None
        # By path, the process that was asked to write it.
        self.files: dict[str, int] = {}

    def begin(self) -> Meters:
        if self.meters is None:
            from bundler.integrations.prometheus_meters import Meters

            self.meters = Meters()
            observers.listen(self.meters)
            atexit.register(self.end)
        return self.meters

    def end(self) -> None:
        """Write the files; a forked child writes one that has its own name."""
        if self.meters is None:
            return
        for path, owner in self.files.items():
            # A command that only started a program, which has the same settings, must not write
            # over what that one wrote.
            if self.meters.heard and (owner == os.getpid() or PID in path):
                try:
                    write_metrics(path, self.meters.text())
                except OSError as error:
                    _LOG.warning("the metrics file %s was not written: %s", path, error)
        self.meters.end()


_exported = _Exported()


def available() -> bool:
    """Tell whether the library is installed, without importing it."""
    return importlib.util.find_spec(_LIBRARY) is not None


def begin_metrics() -> None:
    """Begin to count where the user asked for it: by a file, or by the directory of
    `prometheus_client`'s multi-process mode.

    Nothing is imported where neither is set.

    Raises:
        ConfigError: a file was asked for, and the library is not installed.
    """
    path = metrics_file_setting()
    if path is not None:
        _require(f"TRITON_BUNDLER_METRICS_FILE={path}")
        _exported.files.setdefault(os.path.abspath(path), os.getpid())
    # The directory is not our setting: a server sets it for itself, and may have a library that we
    # lack.
    if path is not None or (os.environ.get(_MULTIPROCESS) and available()):
        _exported.begin()


def serve_metrics(listen: int | str) -> EndpointServer:
    """Show the metrics of this process over HTTP.

    Args:
        listen: a port of the loopback address, or `HOST:PORT`; port 0 for one that is free.

    Raises:
        ConfigError: the library is not installed, it is no address, or it cannot be listened on.
    """
    _require(f"metrics_port={listen!r}")
    from bundler.integrations.prometheus_meters import EndpointServer
    from bundler.store.store_server import listen_address

    host, port = listen_address(listen if isinstance(listen, str) else f"{LOOPBACK}:{listen}")
    try:
        return EndpointServer(_exported.begin(), host, port)
    except OSError as error:
        raise ConfigError(
            f"metrics_port={listen!r}: {host}:{port} cannot be listened on: {error}; give another"
            " port, or 0 for a free one",
            got=listen,
        ) from error


def metrics_text() -> str:
    """Return the metrics of this process in the text format of Prometheus; counts from the first
    call on, nothing without the library.
    """
    return _exported.begin().text() if available() else ""


def write_metrics(path: str, text: str) -> str:
    """Write metrics whole, in place of an older file; returns its path.

    Args:
        path: the file; `{pid}` in it stands for the process id.
        text: what to write.

    Raises:
        OSError: it cannot be written.
    """
    target = path.replace(PID, str(os.getpid()))
    # A collector of text files reads what ends in .prom, which a temporary file does not.
    write_whole(target, text.encode(), durable=True)
    return target


def _require(asked: str) -> None:
    if not available():
        raise ConfigError(f"{asked}: metrics need {_LIBRARY}; {install('metrics')}", name=_LIBRARY)

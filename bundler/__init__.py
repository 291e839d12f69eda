# SPDX-License-Identifier: Apache-2.0
"""Record, bundle and restore compiled Triton kernels.

Everything public is here; importing this module loads neither Triton, torch nor redis.  `docs/api.md` lists the
surface with its signatures.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.compile.declarations import prebuild
    from bundler.errors import BundlerError, BundlerWarning
    from bundler.format.bundle import Bundle
    from bundler.format.combine import Diff, diff, merge
    from bundler.format.entries import (
        Artifact,
        HelperLibrary,
        Kernel,
        Opaque,
        Target,
        Toolchain,
        TuningFile,
    )
    from bundler.format.keyparts import KeyParts
    from bundler.format.launch import LaunchFacts, LaunchSpec, TuningRecord
    from bundler.format.limits import Limits
    from bundler.integrations._process import install, register, session
    from bundler.integrations.comparing import Difference
    from bundler.integrations.counting import Counters
    from bundler.integrations.explaining import Explanation, explain
    from bundler.integrations.sessions import Session
    from bundler.lifecycle.checking import check
    from bundler.lifecycle.compiled_once import CompiledOnce, compile_once
    from bundler.lifecycle.packing import pack
    from bundler.lifecycle.recorder import Recording, begin_compile, collect, end_compile, recording
    from bundler.lifecycle.report import CheckReport, RecordReport, RestoreReport
    from bundler.lifecycle.restoring import restore
    from bundler.lifecycle.restoring import restore as read_and_emit
    from bundler.lifecycle.storing import Store, open_store
    from bundler.lifecycle.tuning import winners_only
    from bundler.runtime.tuning.autotuning import autotune
    from bundler.store.reports import PruneReport, PushReport, StoreStats, TagInfo, VerifyReport

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "format.entries",
    "Bundle": "format.bundle",
    "BundlerError": "errors",
    "BundlerWarning": "errors",
    "CheckReport": "lifecycle.report",
    "CompiledOnce": "lifecycle.compiled_once",
    "Counters": "integrations.counting",
    "Diff": "format.combine",
    "Difference": "integrations.comparing",
    "Explanation": "integrations.explaining",
    "HelperLibrary": "format.entries",
    "Kernel": "format.entries",
    "KeyParts": "format.keyparts",
    "LaunchFacts": "format.launch",
    "LaunchSpec": "format.launch",
    "Limits": "format.limits",
    "Opaque": "format.entries",
    "PruneReport": "store.reports",
    "PushReport": "store.reports",
    "RecordReport": "lifecycle.report",
    "Recording": "lifecycle.recorder",
    "RestoreReport": "lifecycle.report",
    "Session": "integrations.sessions",
    "Store": "lifecycle.storing",
    "StoreStats": "store.reports",
    "TagInfo": "store.reports",
    "Target": "format.entries",
    "Toolchain": "format.entries",
    "TuningFile": "format.entries",
    "TuningRecord": "format.launch",
    "VerifyReport": "store.reports",
    "autotune": "runtime.tuning.autotuning",
    "begin_compile": "lifecycle.recorder",
    "check": "lifecycle.checking",
    "collect": "lifecycle.recorder",
    "compile_once": "lifecycle.compiled_once",
    "diff": "format.combine",
    "end_compile": "lifecycle.recorder",
    "explain": "integrations.explaining",
    "install": "integrations._process",
    "merge": "format.combine",
    "open_store": "lifecycle.storing",
    "pack": "lifecycle.packing",
    "prebuild": "compile.declarations",
    "read_and_emit": "lifecycle.restoring",
    "recording": "lifecycle.recorder",
    "register": "integrations._process",
    "restore": "lifecycle.restoring",
    "session": "integrations._process",
    "winners_only": "lifecycle.tuning",
}

__all__ = [
    "Artifact",
    "Bundle",
    "BundlerError",
    "BundlerWarning",
    "CheckReport",
    "CompiledOnce",
    "Counters",
    "Diff",
    "Difference",
    "Explanation",
    "HelperLibrary",
    "Kernel",
    "KeyParts",
    "LaunchFacts",
    "LaunchSpec",
    "Limits",
    "Opaque",
    "PruneReport",
    "PushReport",
    "RecordReport",
    "Recording",
    "RestoreReport",
    "Session",
    "Store",
    "StoreStats",
    "TagInfo",
    "Target",
    "Toolchain",
    "TuningFile",
    "TuningRecord",
    "VerifyReport",
    "autotune",
    "begin_compile",
    "check",
    "collect",
    "compile_once",
    "diff",
    "end_compile",
    "explain",
    "install",
    "merge",
    "open_store",
    "pack",
    "prebuild",
    "read_and_emit",
    "recording",
    "register",
    "restore",
    "session",
    "winners_only",
]

logging.getLogger("bundler").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{home}")
    value = getattr(module, "restore" if name == "read_and_emit" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

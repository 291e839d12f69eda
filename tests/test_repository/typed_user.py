# SPDX-License-Identifier: Apache-2.0
"""A user's program as type checkers see it; test_typing.py has them check it, and nobody
runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import bundler
import bundler.runtime
from bundler.backends.redis import RedisBackend
from bundler.integrations.triton import BundlerCacheManager


def record(path: Path) -> tuple[bundler.Kernel, ...]:
    """Record, save and look."""
    with bundler.recording(children=True) as recorded:
        pass
    keep: bundler.Keep = "launch"
    bundle = recorded.collect(keep)
    assert_type(bundle, bundler.Bundle)
    assert_type(recorded.report, bundler.RecordReport)
    left_out: bundler.Reasons = recorded.report.left_out
    bundle.save(path)
    bundler.begin_compile()
    assert_type(bundler.collect(), bundler.Bundle)
    bundler.end_compile()
    return () if left_out else bundle.kernels


def restore(path: Path, store: bundler.Store) -> str:
    """Restore from a file, and from a store; both names of the function are the same."""
    only: bundler.Only = "all"
    trust: bundler.Trust = "code"
    try:
        report = bundler.restore(path, only=only, trust=trust)
        assert_type(report, bundler.RestoreReport)
        assert_type(bundler.read_and_emit(path), bundler.RestoreReport)
        assert_type(bundler.check(path), bundler.CheckReport)
        assert_type(store.restore("llama3/h200", missing_ok=True), bundler.RestoreReport)
    except bundler.StrictModeViolation as error:
        return error.message
    except (bundler.NotFound, bundler.DigestMismatch, bundler.StoreUnavailable) as error:
        return error.code
    except bundler.BundlerError as error:
        return str(error)
    return f"{report.usable} usable"


def share(bundle: bundler.Bundle) -> int:
    """Push, look, and compile once."""
    mode: bundler.PushMode = "create"
    when_down: bundler.WhenDown = "degrade"
    with bundler.open_store("memory:", when_down=when_down) as store:
        assert_type(store.push(bundle, "tag", mode), bundler.PushReport)
        assert_type(store.tags(), tuple[bundler.TagInfo, ...])
        assert_type(store.tiers, tuple[bundler.TierCounters, ...])
        once = bundler.compile_once(store, "key", lambda: bundle)
        assert_type(once.how, bundler.How)
        return store.prune(dry_run=True).kept_bytes


def serve(store: str) -> float:
    """Run a job in a session."""
    strict: bundler.Strict = "warn"
    with bundler.session(store, "tag", push=None, strict=strict) as session:
        session.arm_strict("error")
        assert_type(session.counters, bundler.Counters)
        return session.counters.seconds_saved


def launch(path: Path, *values: Any) -> bundler.Driver:
    """Launch without Triton, on a driver without a GPU."""
    driver: bundler.Driver = bundler.DryDriver("cuda", devices=2)
    module: bundler.Module
    with bundler.load(path, driver=driver) as kernels:
        kernel = kernels["add_kernel"]
        assert_type(kernel, bundler.StaticKernel)
        kernel[(1,)](*values)
        handle: bundler.Handle = kernel.handle(*values)
        handle.launch(1, 1, 1, 0, *handle.values(*values))
        module = driver.load(handle.plan, b"", 0)
        launcher: bundler.Launcher = driver.launcher(module)
        launcher(1, 1, 1, 0)
    assert_type(bundler.open_driver("hip"), bundler.runtime.Driver)
    return kernels.driver


@bundler.autotune(
    [bundler.Config({"BLOCK": 64})],
    key=["n"],
    options=bundler.TunerOptions(driver=bundler.DryDriver()),
)
def tuned(n: int) -> None:
    """Stand for a kernel."""


@bundler.prebuild({"n": "i32"}, targets=["cuda:90"])
def prebuilt(n: int) -> int:
    """Stand for a kernel, which keeps its type."""
    return n


def explain(error: bundler.CompileFailed) -> list[bundler.Status]:
    """Ask why something was compiled."""
    assert_type(prebuilt(1), int)
    plugged: tuple[type[Any], type[RedisBackend]] = (BundlerCacheManager, RedisBackend)
    return [found.status for found in bundler.explain(last=True) if plugged and error.code]

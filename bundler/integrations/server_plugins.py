# SPDX-License-Identifier: Apache-2.0
"""`vllm_plugin`, `sglang_plugin`: what vLLM and SGLang call in each of their processes, by entry points of this package.

::

    plug-in          the cache manager is installed; nothing is opened, no device is touched
    first kernel     the session of the environment begins: the tag is fetched, and replayed with TRITON_BUNDLER_REPLAY=1
    workers warm     vLLM: before its JIT monitor is armed; SGLang: before the event loop.  What was compiled is published, the tag pushed

`pyproject.toml` names both.  They act on TRITON_BUNDLER_* variables alone, do nothing where none is set, and never raise: what goes wrong is one
warning, and the server goes on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from bundler.config import PREFIX, disabled, registered_bundles, store_setting, user_variables
from bundler.integrations.import_wrappers import Around, wrap_when_imported
from bundler.package_loggers import logger
from bundler.user_warnings import show

_LOG = logger("bundler.integrations")
# Servers load plug-ins several times in a process; both are inherited by forks.
_plugged: set[str] = set()
_told: set[str] = set()


class _Moment(NamedTuple):
    """A function of a server at which something of ours is due.

    Attributes:
        module, name: of the function, or `Class.method`.
        around: makes the function that takes its place.
    """

    module: str
    name: str
    around: Around


def vllm_plugin() -> None:
    """Install the cache manager in a process of vLLM, and stand by for the end of its warm-up; never raises."""
    _seam(
        "this process of vLLM runs without triton-bundler", functools.partial(_plug, "vLLM", _VLLM)
    )


def sglang_plugin() -> None:
    """Install the cache manager in a process of SGLang, and stand by for the end of its warm-up; never raises."""
    _seam(
        "this process of SGLang runs without triton-bundler",
        functools.partial(_plug, "SGLang", _SGLANG),
    )


def _plug(server: str, moments: tuple[_Moment, ...]) -> None:
    stores = store_setting()
    if not (stores or user_variables()) or disabled():
        return
    if not stores and not registered_bundles():
        _complain(
            f"{server}: {', '.join(user_variables())} set, and {PREFIX}STORE is not, so no kernels are shared"
        )
        return
    if server in _plugged:
        return
    from bundler.integrations._process import install_from_environment

    install_from_environment()
    for moment in moments:
        wrap_when_imported(moment.module, moment.name, moment.around, _complain)
    _plugged.add(server)


def _seam(failing: str, act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:  # noqa: BLE001  # the seam: vLLM does not catch what a plug-in raises, and ends
        _complain(f"{failing} ({type(error).__name__}: {error})")


def _complain(sentence: str) -> None:
    _LOG.warning("%s", sentence)
    if sentence not in _told:
        _told.add(sentence)
        show(sentence)


def _replay() -> None:
    """Begin the session of the environment, which replays its tag, unless the first kernel began it."""
    from bundler.integrations._process import begin_from_environment

    begin_from_environment()


def _publish() -> None:
    from bundler.integrations._process import publish_from_environment

    publish_from_environment()


def _warm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do all that is due when a worker is warm, then go on."""

    def warm(*args: Any, **kwargs: Any) -> Any:
        _seam("nothing was replayed for this server", _replay)
        _seam("what the warm-up of this server made was not published", _publish)
        return original(*args, **kwargs)

    return warm


def _published(original: Callable[..., Any]) -> Callable[..., Any]:
    """Publish after a warm-up that no monitor is armed after."""

    def warmed_up(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _seam("what the warm-up of this server made was not published", _publish)
        return result

    return warmed_up


def _with_our_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let vLLM copy our variables to its Ray actors, which get none of TRITON_*.

    Not by VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY: that variable is among the factors of vLLM's hash, so to set it here would rename the
    compiled models of everybody who did not set it.
    """

    def names_to_copy(*args: Any, **kwargs: Any) -> Any:
        return set(original(*args, **kwargs)) | {
            name for name in os.environ if name.startswith(PREFIX)
        }

    return names_to_copy


_VLLM = (
    _Moment("vllm.utils.jit_monitor", "activate", _warm),
    # Where the monitor is off, as with enforce_eager, it is not armed after the warm-up.
    _Moment("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", _published),
    _Moment("vllm.ray.ray_env", "get_env_vars_to_copy", _with_our_variables),
    # It takes the function by name, maybe before the plug-ins are loaded.
    _Moment("vllm.v1.engine.utils", "get_env_vars_to_copy", _with_our_variables),
)
# A scheduler has loaded its model and captured its graphs when its event loop begins.
_SGLANG = (_Moment("sglang.srt.managers.scheduler", "Scheduler.run_event_loop", _warm),)

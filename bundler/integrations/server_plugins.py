# SPDX-License-Identifier: Apache-2.0
"""`vllm_plugin`, `sglang_plugin`: what vLLM and SGLang call in each of their processes, by entry
points of this package.

::

    plug-in          the cache manager is installed; nothing is opened, no device is touched
    first kernel     the session of the environment begins: the tag is fetched, and replayed with TRITON_BUNDLER_REPLAY=1
    workers warm     vLLM: before its JIT monitor is armed; SGLang: before the event loop.  What was compiled is published, the tag pushed

`pyproject.toml` names both.  They act on TRITON_BUNDLER_* variables alone, do nothing where none is
set, and never raise: what goes wrong is one warning, and the server goes on.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from bundler.config import PREFIX, disabled, registered_bundles, store_setting, user_variables
from bundler.package_loggers import logger
from bundler.user_warnings import show

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
Complain = Callable[[str], None]
_MARK = "_bundler_wrapped"
_LOG = logger("bundler.integrations")
# Servers load plug-ins several times in a process; both are inherited by forks.
_plugged: set[str] = set()
_told: set[str] = set()


class _Wrappers(MetaPathFinder):
    """Finds no module itself: of those that it waits for it lets the other finders look, and acts
    when the module was executed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted: dict[str, dict[str, tuple[Around, Complain]]] = {}
        self._looking = threading.local()

    def add(self, module: str, name: str, around: Around, complain: Complain) -> None:
        """Replace a function of a module by `around` of it: now if the module is imported, else
        when it is.

        Who imported the function by name before keeps the original.  A function is wrapped once,
        however often this is called.

        Args:
            module: its full name.
            name: of the function in it, or `Class.method`.
            around: gets the original and returns what to put in its place.
            complain: gets a sentence when the module has no such function.
        """
        with self._lock:
            self._wanted.setdefault(module, {})[name] = (around, complain)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        imported = sys.modules.get(module)
        # One that is being imported is wrapped at the end of that only if we were asked for it
        # before.
        if imported is not None:
            self._wrap(imported, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders say of a module that is waited for, with a loader that
        wraps; None for all others.
        """
        if fullname not in self._wanted or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            others = (finder for finder in sys.meta_path if finder is not self)
            found = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((one for one in found if one is not None), None)
        finally:
            self._looking.now = False
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is None:
            return spec

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            # The loader of a file is an object of that module alone, that of an archive is one for
            # all in it.
            if module.__name__ == fullname:
                self._wrap(module, fullname)

        vars(spec.loader)["exec_module"] = execute_and_wrap  # type: ignore[union-attr]
        return spec

    def _wrap(self, module: ModuleType, fullname: str) -> None:
        for name, (around, complain) in self._wanted[fullname].items():
            *owners, last = name.split(".")
            try:
                owner: Any = functools.reduce(getattr, owners, module)
                original = getattr(owner, last)
                if not hasattr(original, _MARK):
                    wrapped = functools.wraps(original)(around(original))
                    setattr(wrapped, _MARK, True)
                    setattr(owner, last, wrapped)
            except (AttributeError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
                complain(f"{fullname} has no {name} that can be wrapped ({why})")


# Waits for modules of servers; one for the process, as `sys.meta_path` is.
_wrappers = _Wrappers()


class _PatchPoint(NamedTuple):
    """A function of a server at which something of ours is due.

    Attributes:
        module, name: of the function, or `Class.method`.
        around: makes the function that takes its place.
    """

    module: str
    name: str
    around: Around


def vllm_plugin() -> None:
    """Install the cache manager in a process of vLLM, and stand by for the end of its warm-up;
    never raises.
    """
    _plugged_in("vLLM", _VLLM)


def sglang_plugin() -> None:
    """Install the cache manager in a process of SGLang, and stand by for the end of its warm-up;
    never raises.
    """
    _plugged_in("SGLang", _SGLANG)


def _plugged_in(server: str, points: tuple[_PatchPoint, ...]) -> None:
    failing = f"this process of {server} runs without triton-bundler"
    _seam(failing, functools.partial(_plug, server, points))


def _plug(server: str, points: tuple[_PatchPoint, ...]) -> None:
    stores = store_setting()
    if not (stores or user_variables()) or disabled():
        return
    if not stores and not registered_bundles():
        _complain(
            f"{server}: {', '.join(user_variables())} set, and {PREFIX}STORE is not, so no kernels"
            " are shared"
        )
        return
    if server in _plugged:
        return
    from bundler.integrations._process import install_from_environment

    install_from_environment()
    for point in points:
        _wrappers.add(point.module, point.name, point.around, _complain)
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
    """Begin the session of the environment, which replays its tag, unless the first kernel began
    it.
    """
    from bundler.integrations._process import begin_from_environment

    begin_from_environment()


def _publish() -> None:
    from bundler.integrations._process import publish_from_environment

    publish_from_environment()


def _publish_made() -> None:
    _seam("what the warm-up of this server made was not published", _publish)


def _warm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do all that is due when a worker is warm, then go on."""

    def warm(*args: Any, **kwargs: Any) -> Any:
        _seam("nothing was replayed for this server", _replay)
        _publish_made()
        return original(*args, **kwargs)

    return warm


def _published(original: Callable[..., Any]) -> Callable[..., Any]:
    """Publish after a warm-up that no monitor is armed after."""

    def warmed_up(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _publish_made()
        return result

    return warmed_up


def _with_our_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let vLLM copy our variables to its Ray actors, which get none of TRITON_*.

    Not by VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY: that variable is among the factors of vLLM's
    hash, so to set it here would rename the compiled models of everybody who did not set it.
    """

    def names_to_copy(*args: Any, **kwargs: Any) -> Any:
        ours = {name for name in os.environ if name.startswith(PREFIX)}
        return set(original(*args, **kwargs)) | ours

    return names_to_copy


_VLLM = (
    _PatchPoint("vllm.utils.jit_monitor", "activate", _warm),
    # Where the monitor is off, as with enforce_eager, it is not armed after the warm-up.
    _PatchPoint("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", _published),
    _PatchPoint("vllm.ray.ray_env", "get_env_vars_to_copy", _with_our_variables),
    # It takes the function by name, maybe before the plug-ins are loaded.
    _PatchPoint("vllm.v1.engine.utils", "get_env_vars_to_copy", _with_our_variables),
)
# A scheduler has loaded its model and captured its graphs when its event loop begins.
_SGLANG = (_PatchPoint("sglang.srt.managers.scheduler", "Scheduler.run_event_loop", _warm),)

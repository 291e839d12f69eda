# SPDX-License-Identifier: Apache-2.0
"""Makes Triton use our cache manager, in this process and in those that it starts, and gives back what was there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, cast

from bundler.config import INNER, PREFIX
from bundler.integrations.engine import Options
from bundler.lifecycle.storing import Store
from bundler.toolchain.children import MANAGER_VARIABLE, hidden_package_parent

MANAGER = "bundler.integrations.triton:BundlerCacheManager"
_PYTHONPATH = "PYTHONPATH"


class Plug:
    """Our cache manager, in place of what was configured, until it is pulled.

    Triton reads the environment each time, so that serves this process and its children; a manager that the program set in Python
    is replaced there too, and so it is for a store that children could not open.

    Args:
        variables: further environment variables for children.
        children: whether child processes are to use it.
    """

    def __init__(self, variables: Mapping[str, str], *, children: bool) -> None:
        self._set: dict[str, str] = {}
        self._before: dict[str, str | None] = {}
        self._in_code: tuple[type | None, type] | None = None
        if children:
            self._change({**variables, **_manager_variables()})
        if not children or "triton.knobs" in sys.modules:
            self._change_in_code(always=not children)

    def pull(self) -> None:
        """Give back what was there, but for what somebody changed since."""
        for name, value in self._set.items():
            before = self._before[name]
            if os.environ.get(name) != value:
                continue
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        self._set = {}
        if self._in_code is not None:
            from bundler.toolchain import cache_manager

            before_in_code, ours = self._in_code
            if cache_manager.manager_set_in_code() is ours:
                cache_manager.set_manager_in_code(before_in_code)
            self._in_code = None

    def _change(self, variables: Mapping[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in variables}
        self._set = dict(variables)
        os.environ.update(variables)

    def _change_in_code(self, *, always: bool) -> None:
        from bundler.integrations._process import keeper
        from bundler.toolchain import cache_manager

        before = cache_manager.manager_set_in_code()
        if before is None and not always:
            return
        if before is not None and issubclass(before, cache_manager.KeptCacheManager):
            return
        ours = (
            cache_manager.manager_class(keeper)
            if before is None
            else cache_manager.manager_before(keeper, cast(Any, before))
        )
        cache_manager.set_manager_in_code(ours)
        self._in_code = before, ours


def variables_for_children(store: Store, options: Options) -> dict[str, str]:
    """Return what makes a child process look where we look.  Tags are the parent's: it fetches and pushes for all."""
    chosen = {"STORE": " ".join(store.urls), "MODE": options.mode, "TRUST": options.trust, "STRICT": options.strict,
              "KEEP": options.keep}  # fmt: skip
    return {PREFIX + name: value for name, value in chosen.items()}


def _manager_variables() -> dict[str, str]:
    variables = {MANAGER_VARIABLE: MANAGER}
    before = os.environ.get(MANAGER_VARIABLE)
    if before and before != MANAGER:
        variables[INNER] = before
    package_parent = hidden_package_parent()
    if package_parent is not None:
        # Triton fails in a child that cannot import the manager that it is told.
        variables[_PYTHONPATH] = os.pathsep.join(filter(None, [package_parent, os.environ.get(_PYTHONPATH)]))
    return variables

# SPDX-License-Identifier: Apache-2.0
"""`always_ending`: an executor of Dask whose futures all end.

`distributed`'s own executor (2026.8) has futures that nothing ends: one whose result was on its way
when the scheduler was lost, and one of a task that was given to a client while it closed.  A build
would wait for them.  `ExecutorPool` takes executors through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

# A client that is none of these takes tasks and drops them.
_TAKES_TASKS = {"connecting", "running"}


def always_ending(executor: Executor) -> Executor:
    """Return an executor of Dask with futures of its client instead; any other as it is."""
    known = type(executor).__module__.partition(".")[0] == "distributed"
    if known and hasattr(executor, "_client") and hasattr(executor, "_kwargs"):
        return _DaskExecutor(executor)
    return executor


class _DaskExecutor(Executor):
    """Has tasks done by the client of an executor of Dask, with that one's options.

    Shutting it down does nothing: its pool waits for each future or cancels it, and Dask gives up
    what nobody refers to.
    """

    def __init__(self, executor: Any) -> None:
        self._client, self._options = executor._client, executor._kwargs  # noqa: SLF001

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        task = self._client.submit(function, *given, **self._options, **named)
        loop = self._client.loop.asyncio_loop
        return asyncio.run_coroutine_threadsafe(self._result(task), loop)

    async def _result(self, task: Any) -> Any:
        # In the client's own thread, in which it also closes: it ends what it was given before.
        if self._client.status not in _TAKES_TASKS:
            raise ConnectionError("Dask's client was closed")
        return await task

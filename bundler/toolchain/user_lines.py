# SPDX-License-Identifier: Apache-2.0
"""`recorded_lines`: while a function is traced, each node of the graph gets the line of the user's
program that it came from.

torch.compile's graphs have these lines as `meta["stack_trace"]`; make_fx records those of functions
named `forward` alone.  `trace` calls it, and imports torch already.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from bundler.toolchain.user_frames import user_place


class _LineRecorder(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Tells torch, before each of its functions that the user's program calls, from which line it
    is called.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        place = user_place()
        text = linecache.getline(place.file, place.line).strip()
        fx_traceback.set_stack_trace(
            [f'File "{place.file}", line {place.line}, in user\n    {text}']
        )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_lines() -> Iterator[None]:
    """Record lines for the nodes of graphs that are traced while the block runs."""
    with fx_traceback.preserve_node_meta(), _LineRecorder():
        yield

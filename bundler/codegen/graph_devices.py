# SPDX-License-Identifier: Apache-2.0
"""`program_device`: on which device the tensors of a graph lie; its kernels run there.  Nothing here imports torch.

`lower` asks for each graph.  A graph may also have tensors on the host: operators that make or take these are called as they are, and a kernel is given the
number of one that has a single element.  Two devices in one graph are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bundler.errors import UnsupportedOperator

CPU = "cpu"


def program_device(values: Iterable[Any]) -> str:
    """Return the device of a graph, as torch names it.

    Args:
        values: what the nodes of the graph are in the example: tensors, numbers, and lists of these.

    Raises:
        UnsupportedOperator: there are two devices beside the CPU.
    """
    found = sorted({str(tensor.device) for value in values for tensor in _tensors(value)} - {CPU})
    if len(found) > 1:
        raise UnsupportedOperator(
            f"tensors lie on {' and '.join(found)}: expected one device beside the CPU; "
            "generate a program for each device, and copy between them",
            operator="device",
        )
    return found[0] if found else CPU


def _tensors(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "device") and hasattr(value, "stride"):
        yield value

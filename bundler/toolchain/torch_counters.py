# SPDX-License-Identifier: Apache-2.0
"""`TorchCounters`: the counters by which programs of a launch wait for each other, on one of
torch's devices.

A barrier leaves its counters ready for the next one, so no launch has to set them to zero; but no
two launches that may run side by side may have the same ones.

* Launches of one of torch's streams follow each other: they share the stream's.
* A launch that is captured has its own, for as long as the process lives, since nobody says when
  its graph is gone. Launches of one graph follow each other, too.
* All others, as on a stream of another library, whose number a new stream may get while the old one
  still works, get new zeros, and so does each launch when there are no more of the others.

`TorchMemory` has those of its device.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

# All that a device has, and how many a stream has; each begins at a multiple of 16 bytes.
_ALL, _OF_STREAM = 1 << 14, 16


class TorchCounters:
    """Gives counters to launches; any thread may ask.

    Args:
        torch: the module.
        device: with its number.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._all: Any = None
        self._taken = 0
        self._of_streams: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, count: int) -> Any:
        """Return an int32 tensor of at least so many counters for a launch on the current
        stream.
        """
        stream = self._torch.cuda.current_stream(self._device)
        number, captured = stream.stream_id, self._torch.cuda.is_current_stream_capturing()
        if not captured and count <= _OF_STREAM:
            known = self._of_streams.get(number)
            if known is not None:
                return known
        # torch's own streams have odd numbers, the default one has 0, and others their address.
        if captured or (count <= _OF_STREAM and (number == 0 or number & 1)):
            with self._lock:
                if self._all is None and not captured:
                    made = self._zeros(_ALL)
                    stream.synchronize()  # they are 0 for every stream then
                    self._all = made
                found = self._part(count)
                if found is not None and not captured:
                    found = self._of_streams.setdefault(number, found)
            if found is not None:
                return found
        return self._zeros(count)

    def _part(self, count: int) -> Any:
        """Return counters that nobody else gets; None where there are no more."""
        start, end = self._taken, self._taken + -(-count // _OF_STREAM) * _OF_STREAM
        if self._all is None or end > _ALL:
            return None
        self._taken = end
        return self._all[start:end]

    def _zeros(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)


@functools.cache
def counters_of(torch: Any, device: Any) -> TorchCounters:
    """Return the counters of a device, the same ones for all programs."""
    return TorchCounters(torch, device)

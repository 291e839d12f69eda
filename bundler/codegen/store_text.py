# SPDX-License-Identifier: Apache-2.0
"""`store_lines`: what stores a value, or combines it atomically with what is there.  `kernel_body` calls it for each buffer that a kernel writes."""

from __future__ import annotations

_RELAXED = "sem='relaxed'"
# AMD's instruction for halves within one device takes pairs alone, which Triton 3.7 finds out too late; the one for all devices does not.
_ATOMIC_OPTIONS = {"float16": f"{_RELAXED}, scope='sys'"}


def store_lines(
    place: str, value: str, mask: str, dtype: str, *, atomic: str | None, shape: str, shared: bool
) -> list[str]:
    """Return the lines of a store.

    Args:
        place: text of the pointer.
        value: text of what is stored.
        mask: text of which lanes do, or `None`.
        dtype: of the buffer.
        atomic: name of Triton's function that combines; None for a plain store.
        shape: text of the shape of the block.
        shared: whether other warps hold the same element, and may read it in memory that the store changes.
    """
    if atomic is not None:
        options = _ATOMIC_OPTIONS.get(dtype, _RELAXED)
        return [f"tl.{atomic}({place}, tl.broadcast_to({value}, {shape}), {mask}, {options})"]
    # Every warp has to have read the element before it changes.
    return [*(["tl.debug_barrier()"] if shared else []), f"tl.store({place}, {value}, {mask})"]

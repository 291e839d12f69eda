# SPDX-License-Identifier: Apache-2.0
"""`FrameDecoding`: one zstd frame on its way into memory, in three steps of which the second needs
no interpreter.

`Container` makes one for each section that it decodes; `frames_ahead.py` has threads that do the
second step of several at once.
"""

from __future__ import annotations

import zstandard

from bundler.errors import FormatError
from bundler.format.container_layout import Section, dictionary, frame_bytes
from bundler.format.frame_buffers import FrameBuffers
from bundler.format.limits import Limits


class FrameDecoding:
    """A frame that is decoded.

    Args:
        section: where it lies, and what it should become.
        data: its bytes, verified.
        prefix: what it may copy from.
        limits: bounds.
        buffers: where memory for it is taken from.

    Raises:
        FormatError, LimitExceeded: what it declares of itself is not what the table says.
    """

    __slots__ = ("_data", "_raw_bytes", "_reader", "_room", "_section")

    def __init__(
        self, section: Section, data: bytes, prefix: bytes, limits: Limits, buffers: FrameBuffers
    ) -> None:
        try:
            check_frame(section, data, limits)
            self._room = buffers.take(section.raw_bytes)
            decoder = zstandard.ZstdDecompressor(dict_data=dictionary(prefix) if prefix else None)
            self._reader = decoder.stream_reader(data)
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        self._section, self._data, self._raw_bytes = section, data, 0

    def decode(self) -> None:
        """Decode; the interpreter is left to others meanwhile.  Raises `FormatError`."""
        try:
            self._raw_bytes = self._reader.readinto(self._room)
        except zstandard.ZstdError as error:
            raise undecodable(self._section, error) from error

    def finish(self) -> memoryview:
        """Return what was decoded; raises `FormatError` where it is not one whole frame."""
        section = self._section
        try:
            # Nothing follows; but the decoder compares the checksum when it is asked for more.
            whole = self._raw_bytes == section.raw_bytes and not self._reader.read(1)
            if not whole or frame_bytes(self._data) != len(self._data):
                raise FormatError(
                    f"section at offset {section.offset}: not one whole frame of"
                    f" {section.raw_bytes} bytes"
                )
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        return self._room.toreadonly()


def check_frame(section: Section, data: bytes, limits: Limits) -> None:
    """Check what a frame declares; the decoder makes room for it, whatever limit it is given."""
    frame = zstandard.get_frame_parameters(data)
    limits.check("window_bytes", frame.window_size, "zstd window")
    if frame.content_size != section.raw_bytes or not frame.has_checksum:
        raise FormatError(
            f"section at offset {section.offset}: the frame declares {frame.content_size} bytes "
            f"(checksum: {frame.has_checksum}), the table {section.raw_bytes}"
        )


def undecodable(section: Section, error: zstandard.ZstdError) -> FormatError:
    """Return the error for a frame that zstd refuses."""
    return FormatError(f"section at offset {section.offset}: {error}", offset=section.offset)

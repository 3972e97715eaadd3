"""Cuts the byte stream of a connection into frames.

Knows the length field and the limit, nothing of what is inside. After an error the stream has lost its place: the
connection must be dropped, and the splitter keeps raising.
"""

from __future__ import annotations

from rocketmq_spark.errors import RemoteProtocolError

_LENGTH_BYTES = 4


class FrameSplitter:
    """Collects bytes until frames are whole. ``max_frame`` bounds what a peer can make us keep."""

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()
        self._broken: RemoteProtocolError | None = None

    @property
    def buffered(self) -> int:
        """Bytes of a frame that has not ended yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Frames that ``data`` completes, without their length fields.

        An announced length above the limit raises before anything of that frame is kept, and so does every later call.
        """
        if self._broken is not None:
            raise self._broken
        self._buffer += data
        frames: list[bytes] = []
        at = 0
        available = len(self._buffer)
        with memoryview(self._buffer) as view:
            while available - at >= _LENGTH_BYTES:
                start = at + _LENGTH_BYTES
                length = int.from_bytes(view[at:start], "big")
                if length > self.max_frame:
                    self._broken = RemoteProtocolError(
                        f"The peer announces a frame of {length} bytes, the limit is {self.max_frame}"
                    )
                    break
                if available - start < length:
                    break
                at = start + length
                frames.append(bytes(view[start:at]))
        if self._broken is not None:
            self._buffer.clear()
            raise self._broken
        del self._buffer[:at]
        return frames

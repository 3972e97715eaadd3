"""What every decoder must stand, and the golden vectors. Also the entry of the fuzzers in ``tests/fuzz``.

A decoder, given any bytes, may return a value, ask for more, or raise ``RemoteProtocolError`` or ``DecodeError``. It
may do nothing else, and it may not take memory that its declared limit does not allow.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.errors import DecodeError, RemoteProtocolError
from rocketmq_spark.wire import bodies, compression, header, loose_json, messages
from rocketmq_spark.wire.header import FrameSplitter

VECTORS = Path(__file__).parent / "vectors"
MAX_FRAME = 1 << 20
REFUSALS = (RemoteProtocolError, DecodeError)

Decoder = Callable[[bytes], object]


def vectors(name: str) -> list[dict[str, Any]]:
    """Cases of a golden file, printed by the Java classes or captured from a live broker."""
    cases: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return cases


def unhex(text: str | None) -> bytes:
    return bytes.fromhex(text or "")


def commands(data: bytes) -> list[header.Command]:
    return [header.decode(frame) for frame in FrameSplitter(MAX_FRAME).feed(data)]


DECODERS: dict[str, Decoder] = {
    "commands": commands,
    "header": header.decode,
    "json": loose_json.read_json,
    "route": lambda data: bodies.route("T", data),
    "cluster": bodies.cluster,
    "topic_stats": lambda data: bodies.topic_stats("T", data),
    "consume_stats": bodies.consume_stats,
    "reset_offsets": bodies.reset_offsets,
    "topic_list": bodies.topic_list,
    "group_list": bodies.group_list,
    "consumer_ids": bodies.consumer_ids,
    "topic_config": bodies.topic_config,
    "subscription_groups": bodies.subscription_groups,
    "table": bodies.runtime_info,
    "locked_queues": bodies.locked_queues,
    "queues_to_lock": bodies.queues_to_lock,
    "read_config": bodies.read_config,
    "boundaries": lambda data: list(messages.boundaries(data)),
    "messages": lambda data: messages.decode_messages(data, check_crc=True, max_body_bytes=MAX_FRAME),
    "batch": messages.decode_batch,
    "zlib": lambda data: compression.decompress(data, SysFlag.ZLIB, MAX_FRAME),
    "lz4": lambda data: compression.decompress(data, SysFlag.LZ4, MAX_FRAME),
    "zstd": lambda data: compression.decompress(data, SysFlag.ZSTD, MAX_FRAME),
}


def samples(decoder: str) -> list[bytes]:
    """Well-formed inputs to start mutating from, taken from the golden vectors."""
    if decoder in ("commands", "header"):
        skip = 4 if decoder == "header" else 0
        return [
            unhex(case[key])[skip:] for case in vectors("remoting_frames") for key in ("frame_json", "frame_rocketmq")
        ]
    if decoder in ("messages", "boundaries"):
        return [unhex(case["stored"]) for case in vectors("stored_messages")]
    if decoder == "batch":
        return [unhex(case["encoded"]) for case in vectors("batch_bodies")]
    if decoder in ("zlib", "lz4", "zstd"):
        kind = {"zlib": SysFlag.ZLIB, "lz4": SysFlag.LZ4, "zstd": SysFlag.ZSTD}[decoder]
        return [compression.compress(b"compressed " * 40, kind)]
    if decoder == "read_config":
        return [b"brokerName=broker-a\nmaxMessageSize=4194304\n"]
    live = (header.decode(unhex(case["response"])[4:]).body for case in vectors("live_exchanges"))
    return [unhex(case["encoded"]) for case in vectors("json_bodies")] + [bytes(b) for b in live if b[:1] == b"{"]


def outcome(decode: Decoder, data: bytes) -> object:
    """The value, or the class of the refusal. Any other exception passes through and fails the test."""
    try:
        return decode(data)
    except REFUSALS as exc:
        return type(exc)


def check_decoder(decode: Decoder, data: bytes, expected: object) -> None:
    """Whole, from every kind of buffer, cut at every byte, and with bytes behind the end."""
    assert decode(data) == expected
    assert decode(memoryview(data)) == expected  # type: ignore[arg-type]
    step = max(1, len(data) // 200)
    for end in range(0, len(data), step):
        outcome(decode, data[:end])
    for tail in (b"\x00", b"}", data[:7]):
        outcome(decode, data + tail)


def check_stream(new: Callable[[], FrameSplitter], data: bytes, expected: Sequence[bytes], cuts: Sequence[int]) -> None:
    """The same frames however the stream is cut; what follows the last whole frame is kept."""
    assert new().feed(data) == list(expected)
    for pieces in (pieces_of(data, range(1, len(data))), pieces_of(data, cuts)):
        splitter = new()
        assert [frame for piece in pieces for frame in splitter.feed(piece)] == list(expected)
        assert splitter.buffered_bytes == len(data) - sum(len(frame) + 4 for frame in expected)


def pieces_of(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for cut in sorted({min(cut, len(data)) for cut in cuts}):
        yield data[at:cut]
        at = cut
    yield data[at:]


def peak_bytes(act: Callable[[], object]) -> int:
    """The most memory that ``act`` held at one time."""
    tracemalloc.start()
    try:
        outcome(lambda _: act(), b"")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forget_process_peak() -> None:
    """Let ``process_peak_bytes`` begin with the present memory of the process. Has an effect on Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_peak_bytes() -> int:
    """The most memory that the process held at one time, of Python and of libraries."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def left_behind(act: Callable[[], object], times: int) -> int:
    """The bytes of Python's and of Arrow's memory that are held after ``times`` calls and were not before them."""
    act()
    gc.collect()
    tracemalloc.start()
    arrow = pa.total_allocated_bytes()
    try:
        for _ in range(times):
            act()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    finally:
        tracemalloc.stop()


def store(
    topic: str,
    body: bytes,
    properties: str = "",
    queue_id: int = 0,
    queue_offset: int = 0,
    log_offset: int = 0,
    flag: int = 0,
    sys_flag: int = 0,
    born_ms: int = 0,
    store_ms: int = 0,
    born: tuple[bytes, int] = (b"\x7f\x00\x00\x01", 1),
    stored: tuple[bytes, int] = (b"\x7f\x00\x00\x01", 10911),
    reconsumed: int = 0,
    prepared: int = 0,
) -> bytes:
    """A message as a broker would store it, by a plain encoder of its own; version 2 for topics above 127 bytes."""
    name, text = topic.encode(), properties.encode()
    magic, length = (0xDAA320A7, struct.pack(">B", len(name))) if len(name) < 128 else (
        0xDAA320AB, struct.pack(">h", len(name)))  # fmt: skip
    sys_flag |= (0x10 if len(born[0]) == 16 else 0) | (0x20 if len(stored[0]) == 16 else 0)
    rest = b"".join(
        (
            struct.pack(">IIiiqqi", magic, messages.body_crc(body), queue_id, flag, queue_offset, log_offset, sys_flag),
            struct.pack(">q", born_ms) + born[0] + struct.pack(">i", born[1]),
            struct.pack(">q", store_ms) + stored[0] + struct.pack(">i", stored[1]),
            struct.pack(">iqi", reconsumed, prepared, len(body)) + body,
            length + name + struct.pack(">H", len(text)) + text,
        )
    )
    return struct.pack(">i", len(rest) + 4) + rest


def in_one_test(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize`` for hundreds of vectors: one test goes through all of them, and says which one failed."""
    given = [(names, case) for case in cases] if isinstance(names, str) else [(None, case) for case in cases]
    taken = {names} if isinstance(names, str) else set(names)
    assert given

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **others: Any) -> None:
            for number, (name, case) in enumerate(given):
                values = {name: case} if name else dict(zip(names, case, strict=True))
                try:
                    test(*arguments, **others, **values)
                except BaseException as e:
                    e.add_note(f"case {number} of {len(given)}: {str(values)[:1000]}")
                    raise

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in taken]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate

"""Readers without Spark: plain sockets that decode nothing, and the product's own layers one by one."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Sequence

from benchmarks import harness, workload
from benchmarks.harness import Result
from rocketmq_spark import LocalBroker
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.options import Options, parse
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.session import puller, routes
from rocketmq_spark.spark.source.batch_reader import RocketMQReader

_LENGTHS = struct.Struct(">II")
_HEADER = re.compile(rb'\{"code":0,.*"nextBeginOffset":"(\d+)".*"opaque":(\d+)')
_BUFFER_BYTES = 8 << 20


def _options(broker: LocalBroker, topic: str) -> Options:
    """Of a read, for defaults depend on the role."""
    given = {"nameServer": broker.name_server, "subscribe": topic, "group": "bench"}
    return parse(given).for_role("batch source")


def ranges_of(broker: LocalBroker, topic: str) -> list[OffsetRange]:
    return [OffsetRange(q, b.min_offset, b.max_offset) for q, b in sorted(broker.admin.describe_topic(topic).items())]


def sockets(broker: LocalBroker, topic: str, count: int, per_answer: int, depth: int) -> Result:
    """The ceiling: requests made beforehand, ``depth`` of them under way, answers only counted."""
    one = puller(_options(broker, topic))
    frames: list[bytes] = []
    ends: list[int] = []
    for r in ranges_of(broker, topic):
        template = one.template(r.queue)
        start = r.start
        while start < r.end:
            # No answer goes beyond the file of the index that it begins in.
            file_end = (start // workload.QUEUE_FILE + 1) * workload.QUEUE_FILE
            ends.append(min(r.end, start + per_answer, file_end))
            frames.append(template.frame(len(frames), start, ends[-1] - start))
            start = ends[-1]
    host, _, port = broker.address("broker-a").rpartition(":")
    with socket.create_connection((host, int(port))) as sock, harness.timed([pid_of(broker)], count) as result:
        _pump(sock, frames, ends, depth)
    return result


def _pump(sock: socket.socket, frames: Sequence[bytes], ends: Sequence[int], depth: int) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    sent, done, filled = min(depth, len(frames)), 0, 0
    sock.sendall(b"".join(frames[:sent]))
    while done < len(frames):
        filled += sock.recv_into(view[filled:])
        at = answered = 0
        while filled - at >= 8:
            length, header = _LENGTHS.unpack_from(view, at)
            if at + 4 + length > filled:
                break
            match = _HEADER.match(buffer, at + 8, at + 8 + header)
            if match is None or int(match[1]) != ends[int(match[2])]:
                raise harness.WrongCount(f"an answer that is short or no answer: {buffer[at + 8 : at + 300]!r}")
            answered += 1
            at += 4 + length
        done += answered
        upto = min(len(frames), sent + answered)
        if upto > sent:
            sock.sendall(b"".join(frames[sent:upto]))
            sent = upto
        view[: filled - at] = view[at:filled]
        filled -= at


def bulk(broker: LocalBroker, topic: str, count: int) -> Result:
    """The product's pulls with everything they promise, and no decoding."""
    reader = range_reader(broker, topic, ranges_of(broker, topic))
    with harness.timed([pid_of(broker)], count) as result:
        read = sum(min(p.next_offset, p.limit) - p.start for fetched in reader.fetch() for p in fetched.answers)
    harness.expect("bulk pull", read, count)
    return result


def range_reader(broker: LocalBroker, topic: str, ranges: list[OffsetRange]) -> RangeReader:
    """The product's reader of ranges, as a task makes it; a loss ends the run."""
    found = puller(_options(broker, topic))
    return found.reader(ranges, _lost, planned_address=broker.address("broker-a"))


def batch_reader(name_server: str, topic: str) -> RocketMQReader:
    """The source's reader of a whole topic, all columns."""
    return RocketMQReader(
        parse({"nameServer": name_server, "subscribe": topic}).for_role("batch source"), BASIC_COLUMNS
    )


def decoded(broker: LocalBroker, topic: str, count: int) -> Result:
    """The source's reader without Spark, one process."""
    reader = batch_reader(broker.name_server, topic)
    with harness.timed([pid_of(broker)], count) as result:
        rows = sum(len(batch) for partition in reader.partitions() for batch in reader.read(partition))
    harness.expect("read without Spark", rows, count)
    return result


def per_answer(broker: LocalBroker, topic: str) -> int:
    """Messages that the broker gives in one answer, when asked for many."""
    options = _options(broker, topic)
    routes(options).get(topic)
    one, r = puller(options), ranges_of(broker, topic)[0]
    reader = one.replica(r.queue)(Deadline.after(10))
    try:
        reader.send([one.template(r.queue).frame(0, r.start, 1024)], 10)
        while True:
            reader.receive(10)
            found, others = reader.scan()
            if others:
                raise harness.WrongCount(f"no messages: {others}")
            if found:
                return found[0][1] - r.start
    finally:
        reader.close()


def _lost(part: OffsetRange, cause: object) -> None:
    raise harness.WrongCount(f"{part} lost: {cause}")


def pid_of(broker: LocalBroker) -> int:
    pid = broker.pid("broker-a")
    assert pid is not None
    return pid

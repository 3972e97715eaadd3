"""A cluster that is a script: a name server and many brokers in one process, which answer late and never work.

``python -m benchmarks.scripted LAYOUT`` listens on a port for each server and is told by lines of JSON on its standard input
what happens next; ``Scripted`` starts it. Every broker answers after a fixed time and at a fixed rate, whatever is asked:
routes, statistics, times and offsets of queues, topic configurations, and pulls. All queues of a topic have the same messages.
Sent messages are acknowledged and counted, and not stored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rocketmq_spark.base.codes import MAX_FRAME_BYTES, MESSAGE_MAGIC_V1, Request, Response
from rocketmq_spark.wire import header, rpc
from rocketmq_spark.wire.header import Command, FrameSplitter
from rocketmq_spark.wire.messages import decode_batch

HOST = "127.0.0.1"
BEGIN = 1_000  # where every queue ends at first
_BODY = b"x" * 100
_PULLED = 32
_PORTION = 16
_STORED = struct.Struct(">iIIiiqqiq4siq4siiqi")


@dataclass(frozen=True, slots=True)
class Layout:
    """``queues`` are those of a topic on each of its ``spread`` brokers, and what was before ``first`` is deleted there; every
    broker answers ``per_s`` times a second.
    """

    brokers: int = 64
    topics: int = 1
    spread: int = 64
    queues: int = 16
    first: int = 500
    latency_ms: float = 0.5
    per_s: float = 50_000.0

    @property
    def total(self) -> int:
        return self.topics * self.spread * self.queues

    def names(self) -> list[str]:
        return [f"topic-{i:05d}" for i in range(self.topics)]

    def brokers_of(self, topic: int) -> list[int]:
        """Those of a topic: the next one begins where it ends, so that all have the same number of queues."""
        return [(topic * self.spread + i) % self.brokers for i in range(self.spread)]


class Topic:
    """What the queues of a topic have: a step for each growth, by which the time of a message is known."""

    def __init__(self, name: str, brokers: list[int], queues: int, first: int) -> None:
        self.name = name
        self.brokers = brokers
        self.queues = queues
        self.first = first
        self._ends, self._times = [BEGIN], [_now_ms()]
        self._keys: dict[tuple[int, int], list[bytes]] = {}
        self._sent: Counter[tuple[int, int]] = Counter()  # by broker and queue
        self._bodies: set[bytes] = set()

    @property
    def end(self) -> int:
        return self._ends[-1]

    def grow(self, count: int, now_ms: int) -> None:
        self._ends.append(self.end + count)
        self._times.append(max(now_ms, self._times[-1] + 1))

    def first_at(self, time_ms: int) -> int:
        """The first message that was stored at or after a time; the end if none was."""
        step = bisect_right(self._times, time_ms - 1)
        return self._ends[step - 1] if step else 0

    def stored_ms(self, offset: int) -> int:
        return self._times[bisect_right(self._ends, offset)]

    def stats(self, broker: int) -> bytes:
        keys = self._keys.get((broker, self.queues))
        if keys is None:
            keys = self._keys[broker, self.queues] = [
                b'{"brokerName":"%s","queueId":%d,"topic":"%s"}:' % (_name(broker).encode(), i, self.name.encode())
                for i in range(self.queues)
            ]
        bounds = b'{"lastUpdateTimestamp":%d,"maxOffset":%d,"minOffset":%d}' % (self._times[-1], self.end, self.first)
        return b'{"offsetTable":{%s%s},"topicPutTps":0.0}' % ((bounds + b",").join(keys), bounds)

    def send(self, broker: int, queue: int, bodies: Iterable[bytes]) -> int:
        """Count sent messages; returns the offset of the first."""
        found = list(bodies)
        first = self._sent[broker, queue]
        self._sent[broker, queue] += len(found)
        self._bodies.update(found)
        return first

    def sent(self) -> dict[str, int]:
        """How many messages were sent, how many different bodies they have, and to how many queues."""
        return {"messages": self._sent.total(), "bodies": len(self._bodies), "queues": len(self._sent)}

    def pulled(self, queue: int, offset: int, count: int) -> bytes:
        """Stored messages, as many as there are."""
        topic = self.name.encode()
        size = _STORED.size + len(_BODY) + 1 + len(topic) + 2
        host, port = b"\x7f\x00\x00\x01", 10911
        return b"".join(
            _STORED.pack(
                size, MESSAGE_MAGIC_V1, 0, queue, 0, at, at * size, 0, self.stored_ms(at), host, port,
                self.stored_ms(at), host, port, 0, 0, len(_BODY),
            ) + _BODY + bytes([len(topic)]) + topic + b"\x00\x00"
            for at in range(offset, min(offset + count, self.end))
        )  # fmt: skip


def _name(broker: int) -> str:
    return f"broker-{broker:02d}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Server(asyncio.Protocol):
    """One connection to one broker, or to the name server."""

    def __init__(self, cluster: Cluster, broker: int | None) -> None:
        self._cluster = cluster
        self._broker = broker
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._cluster.connected.setdefault(self._broker, set()).add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        assert self._transport is not None
        self._cluster.connected[self._broker].discard(self._transport)

    def data_received(self, data: bytes) -> None:
        frames = self._splitter.feed(data)
        if frames and self._broker == self._cluster.hanging:
            self._cluster.held.append(lambda: self._answer(frames))
        elif frames:
            self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        """In portions, between which the other servers have their turns, for all are one process."""
        loop, portion = asyncio.get_running_loop(), frames[:_PORTION]
        answers = [self._cluster.answer(self._broker, header.decode(frame)) for frame in portion]
        loop.call_later(self._cluster.delay_s(self._broker, len(portion)), self._write, answers)
        if len(frames) > _PORTION:
            loop.call_soon(self._answer, frames[_PORTION:])

    def _write(self, answers: list[bytes]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(answers)


class Cluster:
    """All servers, and what they say."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.topics = {
            name: Topic(name, layout.brokers_of(i), layout.queues, layout.first)
            for i, name in enumerate(layout.names())
        }
        self.ports: list[int] = []
        self.hanging: int | None = -1
        self.held: list[Callable[[], None]] = []
        self.connected: dict[int | None, set[asyncio.Transport]] = {}
        self.asked: dict[str, int] = {}
        self._busy_until: dict[int | None, float] = {}
        self._servers: dict[int | None, asyncio.Server] = {}

    async def listen(self) -> int:
        """The port of the name server."""
        self.ports = [await self._open(broker) for broker in range(self.layout.brokers)]
        return await self._open(None)

    async def _open(self, broker: int | None) -> int:
        loop = asyncio.get_running_loop()
        server = self._servers[broker] = await loop.create_server(lambda: Server(self, broker), HOST, 0, backlog=256)
        return int(server.sockets[0].getsockname()[1])

    def delay_s(self, broker: int | None, count: int) -> float:
        """When so many answers are ready: each takes its share of a second, and none is there before the latency is over."""
        now = time.monotonic()
        self._busy_until[broker] = max(now, self._busy_until.get(broker, 0.0)) + count / self.layout.per_s
        return max(self.layout.latency_ms / 1000, self._busy_until[broker] - now)

    async def told(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """One line of the standard input."""
        match what["do"]:
            case "grow":
                now_ms = _now_ms()
                for topic in list(self.topics.values())[:: what["every"]]:
                    topic.grow(what["count"], now_ms)
            case "hang":
                self.hanging, held = what["broker"], self.held
                self.held = []
                for answer in held:
                    answer()
            case "move":
                self._servers[what["broker"]].close()
                for transport in self.connected.get(what["broker"], ()):
                    transport.abort()
                self.ports[what["broker"]] = await self._open(what["broker"])
            case "widen":
                for topic in self.topics.values():
                    topic.queues += 1
        asked, self.asked = self.asked, {}
        sent = {name: topic.sent() for name, topic in self.topics.items()} if what["do"] == "count" else {}
        connections = sum(map(len, self.connected.values()))
        return {"cpu": time.process_time(), "asked": asked, "connections": connections, "sent": sent}

    def answer(self, broker: int | None, asked: Command) -> bytes:
        row = rpc.row_by_code[asked.code]
        self.asked[row.name] = self.asked.get(row.name, 0) + 1
        topic = self.topics.get(asked.ext.get("topic", asked.ext.get("b", "")))  # sends abbreviate their fields
        body, fields, code = b"", dict[str, Any](), Response.SUCCESS
        match asked.code:
            case Request.GET_ROUTEINFO_BY_TOPIC if topic is not None:
                body = _json({"brokerDatas": [self._data(i) for i in topic.brokers], "queueDatas": self._counts(topic)})
            case Request.GET_BROKER_CLUSTER_INFO:
                table = {_name(i): self._data(i) for i in range(len(self.ports))}
                body = _json({"brokerAddrTable": table, "clusterAddrTable": {"c": list(table)}})
            case Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
                body = _json({"topicList": list(self.topics)})
            case _ if topic is None or broker is None:
                code = Response.TOPIC_NOT_EXIST
            case Request.GET_TOPIC_STATS_INFO:
                body = topic.stats(broker)
            case Request.GET_TOPIC_CONFIG:
                counts = {"readQueueNums": topic.queues, "writeQueueNums": topic.queues, "perm": 6}
                body = _json({"topicName": topic.name, **counts, "attributes": {}})
            case Request.SEARCH_OFFSET_BY_TIMESTAMP:
                fields["offset"] = topic.first_at(int(asked.ext["timestamp"]))
            case Request.GET_MAX_OFFSET:
                fields["offset"] = topic.end
            case Request.GET_MIN_OFFSET:
                fields["offset"] = topic.first
            case Request.PULL_MESSAGE:
                code, body, fields = _pull(topic, row.arguments(asked))
            case Request.SEND_MESSAGE_V2 | Request.SEND_BATCH_MESSAGE:
                items = (
                    [item.body for item in decode_batch(asked.body)] if row is rpc.SEND_BATCH_MESSAGE else [asked.body]
                )
                queue = row.arguments(asked)["queueId"]
                offset = topic.send(broker, queue, map(bytes, items))
                fields = {"msgId": f"{offset:032X}", "queueId": queue, "queueOffset": offset}
            case _:
                code = Response.REQUEST_CODE_NOT_SUPPORTED
        reply = row.reply(asked, body, code, **fields)
        return header.encode(reply, max_frame=None)

    def _data(self, broker: int) -> dict[str, Any]:
        addresses = {"0": f"{HOST}:{self.ports[broker]}"}
        return {"brokerName": _name(broker), "cluster": "c", "brokerAddrs": addresses}

    def _counts(self, topic: Topic) -> list[dict[str, Any]]:
        counts = {"readQueueNums": topic.queues, "writeQueueNums": topic.queues, "perm": 6}
        return [{"brokerName": _name(broker), **counts} for broker in topic.brokers]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _pull(topic: Topic, asked: Mapping[str, Any]) -> tuple[Response, bytes, dict[str, Any]]:
    offset, count = asked["queueOffset"], min(_PULLED, asked["maxMsgNums"])
    there = max(0, min(topic.end - offset, count))
    fields = {
        "nextBeginOffset": offset + there,
        "minOffset": topic.first,
        "maxOffset": topic.end,
        "suggestWhichBrokerId": 0,
    }
    if not there:
        return Response.PULL_NOT_FOUND, b"", fields
    return Response.SUCCESS, topic.pulled(asked["queueId"], offset, count), fields


async def serve(layout: Layout) -> None:
    """Until the standard input ends."""
    cluster, lines = Cluster(layout), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"port": await cluster.listen()}), flush=True)
    while line := await lines.readline():
        print(json.dumps(await cluster.told(json.loads(line))), flush=True)


class Scripted:
    """Runs such a cluster while it is entered."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.name_server = ""

    def __enter__(self) -> Self:
        text = json.dumps(dataclasses.asdict(self.layout))
        command = [sys.executable, "-m", "benchmarks.scripted", text]
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=root)
        self.name_server = f"{HOST}:{self._line()['port']}"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        self._process.wait()

    def grow(self, count: int = 5, every: int = 1) -> dict[str, Any]:
        """So many more messages in each queue of every ``every``-th topic."""
        return self._tell(do="grow", count=count, every=every)

    def hang(self, broker: int | None) -> dict[str, Any]:
        """The broker takes requests and keeps silent; None: it answers again, first what it was asked meanwhile."""
        return self._tell(do="hang", broker=-1 if broker is None else broker)

    def move(self, broker: int) -> dict[str, Any]:
        """The broker has another address now."""
        return self._tell(do="move", broker=broker)

    def widen(self) -> dict[str, Any]:
        """Every topic has one queue more on each of its brokers."""
        return self._tell(do="widen")

    def counted(self) -> dict[str, Any]:
        """CPU seconds of the servers so far, how often each request was sent since the last such line, connections now, and what
        was sent to each topic.
        """
        return self._tell(do="count")

    def _tell(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the scripted cluster has ended")
        return dict(json.loads(line))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who measures; the end of the input follows
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve(Layout(**json.loads(sys.argv[1]))))

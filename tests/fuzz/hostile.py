"""A broker that is its own name server and means no good: each answer is right, or broken in one of many ways.

What it says follows from a seed and from the order in which it is asked.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.wire.header import Command
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import PUSHED, TARGETS
from tests.harness import store
from tests.mockbroker import Call, MockBroker, ok, route, topic_config

QUEUES, END = 2, 9
_NUMBERS = ("0", "-1", "7", "2147483648", "9223372036854775807", "9223372036854775808", "9" * 5000, "x", "", "1e9", "½")
_CODES = [*map(int, Response), -1, 0, 2**31 - 1]
# The fields of a reply that a broker passes on. A body that is marked as compressed inflates to 64 MiB.
_OF_REPLY = {
    "producerGroup": "g", "topic": "c_REPLY_TOPIC", "defaultTopic": "TBW102", "defaultTopicQueueNums": "1", "queueId": "0",
    "bornTimestamp": "1", "flag": "0", "properties": "CORRELATION_ID\x01no\x02", "reconsumeTimes": "0", "unitMode": "false",
    "bornHost": "h", "storeHost": "s", "storeTimestamp": "1",
}  # fmt: skip
_BOMB = zlib.compress(bytes(64 << 20), 9)
_MANY, _LARGE_BYTES = 300, 17 << 20


class Hostile(MockBroker):
    """``faults`` of a hundred answers are broken."""

    def __init__(self, seed: int, faults: int = 40) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self.faults = faults

    def arrived(self, call: Call) -> None:
        with self._changed:
            self.requests.append(call.command)
            good = self._good(call.command)
            fault = self._rng.choice(_FAULTS) if self._rng.randrange(100) < self.faults else None
            frames = [call.frame(good)] if fault is None else fault(self, call, good)
            self._changed.notify_all()
        if call.command.is_oneway or call.command.is_response:
            return
        for frame in frames:
            call.peer.send(frame)

    def _good(self, command: Command) -> Command:
        answers: dict[int, Callable[[], Command]] = {
            Request.GET_ROUTEINFO_BY_TOPIC: lambda: route(QUEUES, {"broker-a": self.address}),
            Request.GET_BROKER_CLUSTER_INFO: self._cluster,
            Request.GET_TOPIC_CONFIG: topic_config,
            Request.GET_TOPIC_STATS_INFO: self._stats,
            Request.GET_CONSUMER_LIST_BY_GROUP: self._members,
            Request.PULL_MESSAGE: lambda: _pulled(command),
            Request.SEND_MESSAGE_V2: lambda: ok(msgId="7F00000100002A9F0000000000000001", queueId=0, queueOffset=5),
            Request.SEND_BATCH_MESSAGE: lambda: ok(msgId="7F00000100002A9F0000000000000001", queueId=0, queueOffset=5),
            Request.GET_MAX_OFFSET: lambda: ok(offset=END),
            Request.GET_MIN_OFFSET: lambda: ok(offset=0),
            Request.SEARCH_OFFSET_BY_TIMESTAMP: lambda: ok(offset=3),
            Request.QUERY_CONSUMER_OFFSET: lambda: ok(offset=1),
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: lambda: ok(b'{"topicList":["t"]}'),
        }
        return answers.get(command.code, ok)()

    def _cluster(self) -> Command:
        broker = {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": self.address}}
        body = {"brokerAddrTable": {"broker-a": broker}, "clusterAddrTable": {"c": ["broker-a"]}}
        return ok(json.dumps(body).encode())

    def _members(self) -> Command:
        """Those whose heartbeats came."""
        beats = [json.loads(command.body) for command in self.requests if command.code == Request.HEART_BEAT]
        return ok(json.dumps({"consumerIdList": sorted({beat["clientID"] for beat in beats})}).encode())

    def _stats(self) -> Command:
        items = ",".join(
            f'{{"brokerName":"broker-a","queueId":{n},"topic":"t"}}:{{"lastUpdateTimestamp":1,"maxOffset":{END},"minOffset":0}}'
            for n in range(QUEUES)
        )
        return ok(f'{{"offsetTable":{{{items}}},"topicPutTps":0.0}}'.encode())

    # --- faults

    def _body(self, call: Call, good: Command) -> list[bytes]:
        seeds = [good.body or b"{}", *self._rng.choice(list(TARGETS.values())).samples]
        return [call.frame(replace(good, body=mutate(self._rng, seeds[:1] if self._rng.random() < 0.7 else seeds)))]

    def _fields(self, call: Call, good: Command) -> list[bytes]:
        ext = dict(good.ext)
        for name in self._rng.sample(sorted(ext), min(len(ext), 2)):
            ext[name] = self._rng.choice(_NUMBERS)
        return [call.frame(replace(good, ext=ext))]

    def _lacks(self, call: Call, good: Command) -> list[bytes]:
        return [call.frame(replace(good, ext={}))]

    def _code(self, call: Call, good: Command) -> list[bytes]:
        return [
            call.frame(replace(good, code=self._rng.choice(_CODES), remark=self._rng.choice((None, "no", "x" * 9999))))
        ]

    def _bytes(self, call: Call, good: Command) -> list[bytes]:
        return [mutate(self._rng, [call.frame(good)])]

    def _twice(self, call: Call, good: Command) -> list[bytes]:
        return [call.frame(good)] * 2

    def _asks(self, call: Call, good: Command) -> list[bytes]:
        """A request of its own, before the answer."""
        return [self._question(), call.frame(good)]

    def _floods(self, call: Call, good: Command) -> list[bytes]:
        """Many requests of its own, and perhaps one above the limit, before the answer."""
        many = [self._question() for _ in range(_MANY)]
        if self._rng.random() < 0.1:
            many.append(self.encode(Command(self._rng.choice(PUSHED), {"consumerGroup": "g"}, bytes(_LARGE_BYTES))))
        return [*many, call.frame(good)]

    def _question(self) -> bytes:
        code = self._rng.choice(PUSHED)
        packed = code == 326 and self._rng.random() < 0.5
        ext = {"consumerGroup": "g", "group": "g", "topic": "t", "jstackEnable": self._rng.choice(_NUMBERS)}
        if code == 326:
            ext = {**_OF_REPLY, "sysFlag": "1" if packed else self._rng.choice(_NUMBERS)}
        body = _BOMB if packed else mutate(self._rng, [b'{"offsetTable":{}}', store("t", b"x")])
        return self.encode(Command(code, ext, body, opaque=7, flag=self._rng.choice((0, 2))))

    def _nothing(self, call: Call, good: Command) -> list[bytes]:
        return []

    def _ends(self, call: Call, good: Command) -> list[bytes]:
        call.peer.close()
        return []


def _pulled(command: Command) -> Command:
    """Three messages, as long as there are any."""
    begin, queue_id = int(command.ext.get("queueOffset", 0)), int(command.ext.get("queueId", 0))
    end = min(END, begin + 3)
    bounds = {"suggestWhichBrokerId": 0, "nextBeginOffset": max(begin, end), "minOffset": 0, "maxOffset": END}
    if begin >= END:
        return Command(Response.PULL_NOT_FOUND, {name: str(value) for name, value in bounds.items()})
    found = (store("t", b"x%d" % n, "TAGS\x01t\x02UNIQ_KEY\x01id\x02", queue_id, n, 100 * n) for n in range(begin, end))
    return ok(b"".join(found), **bounds)


_FAULTS: list[Any] = [
    Hostile._body, Hostile._body, Hostile._body, Hostile._fields, Hostile._fields, Hostile._lacks, Hostile._code,
    Hostile._bytes, Hostile._bytes, Hostile._twice, Hostile._asks, Hostile._floods, Hostile._nothing, Hostile._ends,
]  # fmt: skip

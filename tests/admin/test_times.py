"""Messages by the time at which they were stored: of all queues, in that order, as many as are asked for, and no more is read."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from rocketmq_spark.admin import messages
from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.errors import AccessDenied, NotReadable, OptionError
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import NO_MEMORY
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.decode.fetching import stored
from tests.harness import peak_bytes
from tests.mockbroker import Call, MockBroker, ok, refuse, route

PULL, SEARCH = Request.PULL_MESSAGE, Request.SEARCH_OFFSET_BY_TIMESTAMP
FIRST = 5  # the first offset of every queue


class Queues:
    """A broker's queues of topic ``t``: by id, when their messages were stored. A pull gives ``most`` of them."""

    def __init__(self, broker: MockBroker, times: dict[int, list[int]], most: int = 2, name: str = "broker-a") -> None:
        self.times, self.most = times, most
        self.whole = False
        self.odd: dict[tuple[int, int], dict[str, Any]] = {}
        rows = (
            f'{{"brokerName":"{name}","queueId":{n},"topic":"t"}}:'
            + json.dumps({"minOffset": FIRST, "maxOffset": FIRST + len(of), "lastUpdateTimestamp": 0})
            for n, of in times.items()
        )
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(('{"offsetTable":{' + ",".join(rows) + "}}").encode()))
        broker.on(SEARCH, self.search)
        broker.on(PULL, self.pull)

    def search(self, call: Call) -> Command:
        of, wanted = self.times[int(call.ext("queueId"))], int(call.ext("timestamp"))
        at = next((n for n, time in enumerate(of) if time >= wanted), len(of))
        return rpc.SEARCH_OFFSET_BY_TIMESTAMP.reply(call.command, offset=FIRST + at)

    def pull(self, call: Call) -> Command:
        queue, at = int(call.ext("queueId")), int(call.ext("queueOffset"))
        of = self.times[queue]
        if at < FIRST:
            return pulled(FIRST, FIRST + len(of), code=Response.PULL_OFFSET_MOVED)
        count = self.most if self.whole else min(self.most, int(call.ext("maxMsgNums")))
        part = range(at, min(at + count, FIRST + len(of)))
        body = b"".join(
            stored(
                topic="t", queue_id=queue, queue_offset=n,
                **{"body": b"%d-%d" % (queue, n), "store_ms": of[n - FIRST], **self.odd.get((queue, n), {})},
            )
            for n in part
        )  # fmt: skip
        return pulled(part.stop, FIRST + len(of), body)


def pulled(next_offset: int, end: int, body: bytes = b"", code: int = Response.SUCCESS) -> Command:
    ext = {
        "nextBeginOffset": str(next_offset),
        "minOffset": str(FIRST),
        "maxOffset": str(end),
        "suggestWhichBrokerId": "0",
    }
    return Command(code, ext=ext, body=body)


def found(tools: Parts, begin: int | None = None, end: int | None = None, limit: int = 100) -> list[tuple[int, bytes]]:
    return [(m.store_timestamp, m.body) for m in messages.messages_of_time(tools, "t", begin, end, limit)]


def test_messages_between_two_times_merge_queues_in_store_order(broker: MockBroker, tools: Parts) -> None:
    Queues(broker, {0: [10, 20, 20, 50, 90], 1: [15, 20, 40, 60]})
    everything = [
        (10, b"0-5"), (15, b"1-5"), (20, b"0-6"), (20, b"0-7"), (20, b"1-6"), (40, b"1-7"), (50, b"0-8"), (60, b"1-8"),
        (90, b"0-9"),
    ]  # fmt: skip
    assert found(tools) == everything
    assert found(tools, 15, 50) == everything[1:7]
    assert found(tools, end=20) == everything[:5]
    assert found(tools, 61) == everything[8:]
    assert found(tools, 91) == found(tools, 30, 39) == found(tools, end=9) == []


def test_no_more_than_the_limit_is_given_and_no_more_is_read(broker: MockBroker, tools: Parts) -> None:
    Queues(broker, {0: list(range(0, 1000, 2)), 1: list(range(1, 1000, 2))})
    assert [time for time, _ in found(tools, limit=7)] == list(range(7))
    assert len(broker.seen(PULL)) <= 2 + 7
    Queues(broker, {0: [*range(10), *range(1000, 1900)], 1: []})
    read = len(broker.seen(PULL))
    assert len(found(tools, 4, 9)) == 6
    assert len(broker.seen(PULL)) - read <= 4  # behind the end of the time nothing is looked at
    for limit in (0, -1, messages.MAX_MESSAGES_BY_TIME + 1):
        with pytest.raises(OptionError, match=f"limit is {limit}; expected 1 to 10000"):
            found(tools, limit=limit)
    with pytest.raises(OptionError, match="ends at 4, before it begins at 5"):
        found(tools, 5, 4)


def test_what_is_asked(broker: MockBroker, tools: Parts) -> None:
    """Nothing that leaves a trace: no offset, no long poll; and room for what all queues hold together."""
    Queues(broker, {0: [10], 1: [10]})
    found(tools, 3)
    assert {c.ext["timestamp"] for c in broker.seen(SEARCH)} == {"3"}
    for command in broker.seen(PULL):
        ext = command.ext
        assert (ext["consumerGroup"], ext["topic"], ext["subscription"]) == ("rocketmq-spark-cli", "t", "*")
        assert (ext["sysFlag"], ext["suspendTimeoutMillis"], ext["maxMsgBytes"]) == ("4", "0", str(32 << 20))


def test_what_comes_while_it_is_read_is_left_out(broker: MockBroker, tools: Parts) -> None:
    """Also what a batch, which comes whole, has beyond the end."""
    queues = Queues(broker, {0: [10, 20], 1: []}, most=32)
    queues.times[0], queues.whole = [10, 20, 30], True
    assert [time for time, _ in found(tools)] == [10, 20]


def test_what_lies_before_the_time_is_left_out(broker: MockBroker, tools: Parts) -> None:
    """A broker may name a message before it: that of the whole batch, say."""
    Queues(broker, {0: [10, 20, 30], 1: []})
    broker.on(SEARCH, lambda call: rpc.SEARCH_OFFSET_BY_TIMESTAMP.reply(call.command, offset=FIRST - 1))
    assert [time for time, _ in found(tools, 11)] == [20, 30]


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (pulled(7, 9, code=Response.PULL_RETRY_IMMEDIATELY), [b"0-7", b"0-8"]),  # its messages are being removed
        (pulled(8, 9, code=Response.PULL_OFFSET_MOVED), [b"0-8"]),
        (pulled(0, 0, code=Response.PULL_OFFSET_MOVED), []),  # the topic was made again
        (pulled(5, 9, code=Response.PULL_NOT_FOUND), []),
        (pulled(8, 9, code=Response.PULL_NOT_FOUND), [b"0-8"]),  # the file of these offsets is missing
        (pulled(5, 9, code=Response.PULL_RETRY_IMMEDIATELY), []),
    ],
)
def test_a_queue_that_gives_nothing(answer: Command, left: list[bytes], broker: MockBroker, tools: Parts) -> None:
    """It goes on where the broker says, and never stands still."""
    queues = Queues(broker, {0: [10, 20, 30, 40], 1: []})
    first: list[Command] = [answer]
    broker.on(PULL, lambda call: first.pop() if first else queues.pull(call))
    assert [body for _, body in found(tools)] == left


def test_a_refusal_is_an_error(broker: MockBroker, tools: Parts) -> None:
    Queues(broker, {0: [10], 1: []})
    broker.on(PULL, refuse(Response.NO_PERMISSION, "not for you"))
    with pytest.raises(AccessDenied):
        found(tools)


def test_unreadable_topic_is_an_error_if_messages_match_the_time(broker: MockBroker, tools: Parts) -> None:
    """Not: no messages of that time."""
    Queues(broker, {0: [10], 1: []})
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}, perm=2))
    broker.on(PULL, refuse(Response.NO_PERMISSION, "the topic[t] pulling message is forbidden", forbiddenType=3))
    with pytest.raises(NotReadable, match="pulling message is forbidden"):
        found(tools)
    assert found(tools, 11) == []


def test_what_cannot_be_decoded_ends_nothing(broker: MockBroker, tools: Parts) -> None:
    """A damaged time is anybody's; one that is right counts."""
    queues = Queues(broker, {0: [10, 20, 30, 40], 1: []})
    bad = {"sys_flag": int(SysFlag.COMPRESSED)}
    queues.odd = {(0, 6): bad, (0, 7): {**bad, "store_ms": 1 << 60}}
    assert [time for time, _ in found(tools, 10, 40)] == [10, 20, 40]


def test_a_batch_of_damaged_ones_is_raw(broker: MockBroker, tools: Parts) -> None:
    queues = Queues(broker, {0: [10], 1: []})
    queues.odd = {(0, 5): {"sys_flag": int(SysFlag.COMPRESSED)}}
    (one,) = messages.messages_of_time(tools, "t", None, None, 1)
    assert one.decode_error is not None


def test_messages_of_one_millisecond_are_in_commit_log_order(broker: MockBroker, tools: Parts) -> None:
    queues = Queues(broker, {0: [10, 10], 1: [10]})
    queues.odd = {(0, 5): {"log_offset": 2}, (0, 6): {"log_offset": 3}, (1, 5): {"log_offset": 1}}
    assert found(tools) == [(10, b"1-5"), (10, b"0-5"), (10, b"0-6")]


def test_two_brokers(broker: MockBroker, tools: Parts) -> None:
    with MockBroker() as second:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": second.address}))
        Queues(broker, {0: [10, 30]})
        Queues(second, {0: [20, 40]}, name="broker-b")
        given = messages.messages_of_time(tools, "t", 11, 40, 9)
        assert [(m.store_timestamp, m.broker_name) for m in given] == [
            (20, "broker-b"),
            (30, "broker-a"),
            (40, "broker-b"),
        ]


def test_names_are_the_users(broker: MockBroker, tools: Parts) -> None:
    Queues(broker, {0: [10], 1: []})
    inside = Parts(broker.address, scope=Scope("ns"))
    stats = broker.script[Request.GET_TOPIC_STATS_INFO]
    assert isinstance(stats, Command)
    broker.on(Request.GET_TOPIC_STATS_INFO, ok(bytes(stats.body).replace(b'"t"', b'"ns%t"')))
    (one,) = messages.messages_of_time(inside, "t", 1, None, 9)
    ext = broker.seen(PULL)[0].ext
    assert (one.topic, one.queue.topic) == ("t", "t")
    assert (ext["topic"], ext["consumerGroup"]) == ("ns%t", "ns%rocketmq-spark-cli")
    inside.close()


def test_an_environment_has_its_queues(broker: MockBroker, tools: Parts) -> None:
    Queues(broker, {0: [10], 1: [20]})
    given = messages.messages_of_time(tools, "t", None, None, 9, Environment.of("2", 2))
    assert [m.queue_id for m in given] == [1]


def test_messages_of_a_time_take_no_more_memory_than_they_may(
    broker: MockBroker, tools: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = Queues(broker, {0: [10, 20, 30, 40], 1: [15]})
    body, packed = bytes(8 << 20), zlib.compress(bytes(8 << 20))
    queues.odd = {(0, offset): {"body": packed, "sys_flag": int(SysFlag.COMPRESSED)} for offset in range(5, 9)}
    monkeypatch.setattr(messages, "_MAX_RESULT_BYTES", 20 << 20)
    whole = peak_bytes(lambda: messages.messages_of_time(tools, "t", 10, 40, 9))
    given = messages.messages_of_time(tools, "t", 10, 40, 9)
    assert [(len(m.body), m.decode_error) for m in given] == [
        (len(body), None), (3, None), (len(body), None), (len(packed), NO_MEMORY), (len(packed), NO_MEMORY),
    ]  # fmt: skip
    assert whole < 40 << 20

"""Pulls of members: what goes out, to which replica, and what each answer means."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import BATCH_QUEUE, PullSysFlag, Request, Response, SysFlag
from rocketmq_spark.client import pulled_messages
from rocketmq_spark.client.long_polls import LongPolls, pull_command, replica
from rocketmq_spark.client.pulled_messages import _with_valid_offsets, requested_messages
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import (
    BrokerBusy,
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    DecodeError,
    OptionError,
    RocketMQError,
)
from rocketmq_spark.model import BrokerData, Filter, MessageQueue, PullAnswer, PullRequest, PullStatus
from rocketmq_spark.remoting.connection import STALL_S
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire import messages
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import NO_SCOPE, Scope
from tests.client.conftest import Parts
from tests.harness import store
from tests.helpers import no_more_threads, raising
from tests.mockbroker import WAIT_S, Held, MockBroker, ok, refuse, topic_config

QUEUE = MessageQueue("t", "broker-a", 1)
REQUEST = PullRequest("g", QUEUE, 5, count=32, version_ms=9, suspend_s=15.0)
BOUNDS = {"nextBeginOffset": 9, "minOffset": 2, "maxOffset": 20, "suggestWhichBrokerId": 1}
# "Aa" and "BB" have one hash, so that a broker lets both through.
SAME_HASH = b"".join(
    store("t", tag.encode(), f"TAGS\x01{tag}\x02", 1, offset) for offset, tag in ((5, "Aa"), (6, "BB"), (8, "Aa"))
)


class Told:
    """Gets the outcome of one pull."""

    def __init__(self) -> None:
        self.outcomes: list[PullAnswer | RocketMQError] = []
        self._there = threading.Event()

    def __call__(self, outcome: PullAnswer | RocketMQError) -> None:
        self.outcomes.append(outcome)
        self._there.set()

    @property
    def one(self) -> PullAnswer | RocketMQError:
        assert self._there.wait(WAIT_S)
        (outcome,) = self.outcomes
        return outcome


def pull(parts: Parts, request: PullRequest = REQUEST, seconds: float = 5.0) -> Any:
    parts.routes.get("t")
    told = Told()
    parts.member.pull(request, Deadline.after(seconds), told)
    return told.one


def test_pull_asks_for_32_messages_and_waits_15_seconds(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    answer = pull(parts)
    (asked,) = broker.seen(Request.PULL_MESSAGE)
    assert asked.ext == {
        "consumerGroup": "g", "topic": "t", "queueId": "1", "queueOffset": "5", "maxMsgNums": "32", "sysFlag": "2",
        "commitOffset": "0", "suspendTimeoutMillis": "15000", "subVersion": "9", "expressionType": "TAG",
        "bname": "broker-a",
    }  # fmt: skip
    assert (answer.status, answer.next_offset, answer.min_offset, answer.max_offset) == (PullStatus.FOUND, 9, 2, 20)
    assert answer.broker_id == 1
    assert [(m.queue, m.queue_offset, m.body) for m in answer.messages] == [
        (QUEUE, 5, b"Aa"), (QUEUE, 6, b"BB"), (QUEUE, 8, b"Aa"),
    ]  # fmt: skip


def test_batch_topic_is_pulled_unfiltered_and_tags_match_locally(broker: MockBroker, parts: Parts) -> None:
    """A broker would drop each batch whose own tag is another, or none."""
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(queue_type=BATCH_QUEUE))
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    wanted = replace(REQUEST, filter=Filter("BB"))
    assert [[m.queue_offset for m in pull(parts, wanted).messages] for _ in range(2)] == [[6], [6]]
    asked = broker.seen(Request.PULL_MESSAGE)
    assert [(one.ext["subscription"], one.ext["sysFlag"]) for one in asked] == [("*", "6")] * 2
    assert len(broker.seen(Request.GET_TOPIC_CONFIG)) == 1
    rejection = pull(parts, replace(REQUEST, filter=Filter("a > 5", "SQL92"), post_filter=True))
    assert isinstance(rejection, OptionError)
    assert "sql is 'a > 5', but t is a batch topic" in str(rejection)
    assert len(broker.seen(Request.PULL_MESSAGE)) == 2


def test_sql_filter_is_refused_for_a_compaction_topic(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(cleanup_policy="COMPACTION"))
    rejection = pull(parts, replace(REQUEST, filter=Filter("a > 5", "SQL92"), post_filter=True))
    assert "sql is 'a > 5', but t is a batch topic, or a compaction topic" in str(rejection)
    assert broker.seen(Request.PULL_MESSAGE) == []


@pytest.mark.parametrize("code", [Response.REQUEST_CODE_NOT_SUPPORTED, Response.NO_PERMISSION])
def test_tags_match_locally_while_the_topic_kind_is_unknown(code: Response, broker: MockBroker, parts: Parts) -> None:
    """A Proxy, and a user who may read and not ask: brokers still evaluate ``sql``."""
    broker.on(Request.GET_TOPIC_CONFIG, refuse(code))
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    for wanted in (Filter("BB"), Filter("a > 5", "SQL92")):
        pull(parts, replace(REQUEST, filter=wanted, post_filter=True))
    assert [one.ext["subscription"] for one in broker.seen(Request.PULL_MESSAGE)] == ["*", "a > 5"]
    assert len(broker.seen(Request.GET_TOPIC_CONFIG)) == 1


def test_nobody_is_held_up_while_the_kind_is_asked_for(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    pull(parts)  # from now on there is a connection
    held, told = Held(), Told()
    broker.on(Request.GET_TOPIC_CONFIG, held)
    parts.member.pull(replace(REQUEST, filter=Filter("BB"), commit_offset=4), Deadline.after(30.0), told)
    assert not told.outcomes
    (call,) = held.wait(1)
    call.answer(topic_config())
    assert isinstance(told.one, PullAnswer)
    # It is sent late: a reset, or the queue's next owner, may have stored another offset.
    assert broker.seen(Request.PULL_MESSAGE)[-1].ext["commitOffset"] == "0"


def test_a_broker_that_does_not_tell_the_kind_is_asked_again(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, refuse(Response.SYSTEM_BUSY))
    assert isinstance(pull(parts, replace(REQUEST, filter=Filter("BB"))), BrokerBusy)
    broker.on(Request.GET_TOPIC_CONFIG, topic_config())
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    assert len(pull(parts, replace(REQUEST, filter=Filter("BB"))).messages) == 1


def test_tags_with_an_equal_hash_are_told_apart(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    answer = pull(parts, replace(REQUEST, filter=Filter("Aa"), post_filter=True))
    (asked,) = broker.seen(Request.PULL_MESSAGE)
    assert (asked.ext["subscription"], asked.ext["sysFlag"]) == ("Aa", "6")
    assert [m.queue_offset for m in answer.messages] == [5, 8]


def test_large_answer_is_cut_and_the_next_pull_gets_the_rest(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 600)  # a message counts as an object, too
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    answer = pull(parts)
    assert ([m.queue_offset for m in answer.messages], answer.next_offset) == ([5, 6], 8)
    answer = pull(parts, replace(REQUEST, filter=Filter("Aa"), post_filter=True))
    assert ([m.queue_offset for m in answer.messages], answer.next_offset) == ([5, 8], 9)
    answer = pull(parts, replace(REQUEST, decoded=False))
    assert ([m.queue_offset for m in answer.read_messages()], answer.next_offset) == ([5, 6, 8], 9), (
        "as they are wanted"
    )


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Response.PULL_NOT_FOUND, PullStatus.NO_NEW_MSG),
        (Response.PULL_RETRY_IMMEDIATELY, PullStatus.NO_MATCHED_MSG),
        (Response.PULL_OFFSET_MOVED, PullStatus.OFFSET_ILLEGAL),
    ],
)
def test_an_answer_without_messages_says_where_to_go_on(
    broker: MockBroker, parts: Parts, code: int, status: PullStatus
) -> None:
    broker.on(Request.PULL_MESSAGE, refuse(code, **BOUNDS))
    assert pull(parts) == PullAnswer(status, 9, 2, 20, broker_id=1)


def test_pull_tells_an_operators_reset_from_an_illegal_offset(broker: MockBroker, parts: Parts) -> None:
    for remark in ("OFFSET_TOO_SMALL", "OFFSET_RESET"):
        broker.on(Request.PULL_MESSAGE, refuse(Response.PULL_OFFSET_MOVED, remark, **BOUNDS))
        assert pull(parts).is_reset == (remark == "OFFSET_RESET")


def test_any_other_answer_is_an_error(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, refuse(Response.FLOW_CONTROL, "slowly"))
    error = pull(parts)
    assert isinstance(error, BrokerBusy)
    assert error.queue == str(QUEUE)


def test_an_answer_that_cannot_be_decoded_now_is_an_error(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory for instance. Nobody would pull the queue again if this were told to no one."""
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(pulled_messages, "usual_messages", raising(MemoryError()))
        error = pull(parts)
    assert isinstance(error, DecodeError)
    assert "MemoryError" in str(error)
    assert [message.queue_offset for message in pull(parts).messages] == [5, 6, 8]


def test_a_broker_that_says_nothing_is_an_error_in_time(broker: MockBroker, parts: Parts) -> None:
    held = Held()
    broker.on(Request.PULL_MESSAGE, held)
    assert isinstance(pull(parts, seconds=0.2), CallTimeout)


def test_a_broker_that_is_gone_is_an_error(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.refuse_connections()
    broker.drop()
    told = Told()
    parts.member.pull(REQUEST, Deadline.after(30.0), told)
    assert isinstance(told.one, ConnectionLost)


def test_a_broker_that_nobody_knows_is_an_error(parts: Parts) -> None:
    assert isinstance(pull(parts, replace(REQUEST, queue=MessageQueue("t", "nobody", 0))), BrokerNotFound)


def test_without_a_thread_that_could_connect_a_pull_is_an_error(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears of it pulls again; a pull without an outcome would stop its queue."""
    parts.routes.get("t")
    told = Told()
    no_more_threads(monkeypatch, "rocketmq-aside")
    parts.member.pull(replace(REQUEST, filter=Filter("a")), Deadline.after(5.0), told)
    assert isinstance(told.one, ConnectionLost)


def test_messages_may_stay_as_they_are(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    answer = pull(parts, replace(REQUEST, filter=Filter("Aa"), decoded=False))
    assert bytes(answer.stored_messages) == SAME_HASH
    assert answer.messages == ()
    assert [m.queue_offset for m in answer.read_messages()] == [5, 8]


@pytest.mark.parametrize(
    ("commit", "to_master", "flag", "sent"), [(7, True, 3, 7), (7, False, 2, 0), (None, True, 2, 0)]
)
def test_an_offset_comes_along_to_a_master_only(commit: int | None, to_master: bool, flag: int, sent: int) -> None:
    command = pull_command(replace(REQUEST, commit_offset=commit), RpcClient(Pool(ConnectOptions())), to_master)
    assert (command.ext["sysFlag"], command.ext["commitOffset"]) == (str(flag), str(sent))


def test_pull_of_a_slave_brings_no_offset_along(broker: MockBroker, parts: Parts) -> None:
    with MockBroker({Request.PULL_MESSAGE: ok(b"", **BOUNDS)}) as slave:
        broker.on(Request.PULL_MESSAGE, ok(b"", **BOUNDS))
        data = {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address, "1": slave.address}}
        queues = {"brokerName": "broker-a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        body = json.dumps({"brokerDatas": [data], "queueDatas": [queues]}).encode()
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, ok(body))
        parts.routes.get("t")
        flags = {}
        for replica_id, one in ((0, broker), (1, slave)):
            pull(parts, replace(REQUEST, broker_id=replica_id, commit_offset=7))
            (seen,) = one.seen(Request.PULL_MESSAGE)
            flags[replica_id] = PullSysFlag(int(seen.ext["sysFlag"])), seen.ext["commitOffset"]
        waits = PullSysFlag.SUSPEND
        assert flags == {0: (waits | PullSysFlag.COMMIT_OFFSET, "7"), 1: (waits, "0")}


def test_what_does_not_wait_says_so() -> None:
    command = pull_command(
        replace(REQUEST, suspend_s=0.0, max_bytes=1000), RpcClient(Pool(ConnectOptions()), scope=Scope("ns")), True
    )
    assert (command.ext["sysFlag"], command.ext["suspendTimeoutMillis"], command.ext["maxMsgBytes"]) == (
        "0",
        "0",
        "1000",
    )
    assert (command.ext["topic"], command.ext["consumerGroup"]) == ("ns%t", "ns%g")


@pytest.mark.parametrize(
    ("addresses", "wanted", "asked"),
    [
        ({0: "m", 1: "s", 2: "u"}, 0, (0, "m")),
        ({0: "m", 1: "s", 2: "u"}, 1, (1, "s")),
        ({0: "m", 2: "u"}, 1, (2, "u")),
        ({0: "m"}, 1, (0, "m")),
        ({2: "u"}, 0, (2, "u")),
    ],
)
def test_the_replica_to_ask(addresses: dict[int, str], wanted: int, asked: tuple[int, str]) -> None:
    assert replica(BrokerData("b", "c", addresses), wanted) == asked


def test_a_message_of_a_retry_topic_belongs_to_its_first_topic() -> None:
    queue = MessageQueue("%RETRY%g", "broker-a", 0)
    stored = store("%RETRY%ns%g", b"x", "RETRY_TOPIC\x01ns%t\x02", queue_offset=5, reconsumed=2)
    (message,) = requested_messages(replace(REQUEST, queue=queue), stored, Scope("ns"), 6)
    assert (message.topic, message.queue, message.reconsume_times) == ("t", queue, 2)


@given(st.binary(max_size=200), st.integers(0, 3), st.sampled_from(["*", "Aa"]))
def test_junk_among_stored_messages_loses_no_message(junk: bytes, at: int, tags: str) -> None:
    """Of whole messages with junk between them none is lost, and offsets never go back to before what was asked for."""
    good = [store("t", b"%d" % i, "TAGS\x01Aa\x02", 1, 5 + i) for i in range(3)]
    stored = b"".join([*good[:at], junk, *good[at:]])
    found = list(requested_messages(replace(REQUEST, filter=Filter(tags)), stored, NO_SCOPE, 9))
    whole = [m.body for m in found if m.decode_error is None]
    assert whole[:at] == [b"%d" % i for i in range(at)]
    assert any(m.decode_error for m in found) == bool(junk)
    assert all(m.queue == QUEUE for m in found)
    assert all(m.queue_offset >= 0 for m in found)


@given(st.data())
def test_what_is_read_quickly_is_what_is_read_with_care(data: st.DataObject) -> None:
    """Also where a byte is damaged, whichever it is."""
    stored = bytearray(b"".join(store("t", b"body %d" % i, "TAGS\x01Aa\x02", 1, 5 + i) for i in range(3)))
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.sampled_from([0, *(1 << bit for bit in range(8))]))
    how = messages.DecodeSettings(QUEUE.broker_name, queue=QUEUE)
    careful = list(_with_valid_offsets(bytes(stored), messages.find_messages(bytes(stored)), REQUEST.offset, 8, how))
    assert list(requested_messages(REQUEST, stored, NO_SCOPE, 8)) == careful


def test_message_too_short_for_its_addresses_is_returned_raw() -> None:
    stored = [bytearray(store("t", b"%d" % n, queue_offset=n)) for n in (5, 6, 7)]
    stored[2][39] ^= int(SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6)
    found = list(requested_messages(REQUEST, b"".join(stored), NO_SCOPE, 8))
    assert [m.queue_offset for m in found] == [5, 6, 7]
    assert [m.decode_error is None for m in found] == [True, True, False]


@pytest.mark.parametrize("size", [0, 1, 50, 90, 91, 95, 100])
def test_message_with_too_small_size_is_raw_and_neighbours_read(size: int) -> None:
    """From 91 on what it leaves looks like one more: with an offset of its own, a commit would skip the next one."""
    stored = [store("t", b"%d" % n, "TAGS\x01Aa\x02", queue_offset=n) for n in (5, 6, 7)]
    stored[1] = size.to_bytes(4, "big") + stored[1][4:]
    found = list(requested_messages(REQUEST, b"".join(stored), NO_SCOPE, 8))
    assert [m.queue_offset for m in found] == [5, 6, 7]
    assert [m.body for m in found] == [b"5", stored[1], b"7"]


ODD = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 30)


@given(st.lists(st.none() | ODD, min_size=1, max_size=8))
def test_what_messages_say_of_their_offsets_moves_no_position(said: list[int | None]) -> None:
    """Where every offset has a message each has its own, whatever damage made of it, and on a queue that it shifted."""
    stored = b"".join(store("t", b"%d" % i, "", 1, 5 + i if odd is None else odd) for i, odd in enumerate(said))
    found = list(requested_messages(REQUEST, stored, NO_SCOPE, 5 + len(said)))
    assert [(m.queue_offset, m.body) for m in found] == [(5 + i, b"%d" % i) for i in range(len(said))]


@given(st.lists(st.tuples(st.integers(1, 3), st.none() | ODD), min_size=1, max_size=8))
def test_nor_where_a_filter_left_some_out(said: list[tuple[int, int | None]]) -> None:
    """Each still has its own, and none lies beyond where the broker went on."""
    places = [4 + sum(step for step, _ in said[: i + 1]) for i in range(len(said))]
    end = places[-1] + 1
    stored = b"".join(
        store("t", b"%d" % at, "TAGS\x01Aa\x02", 1, at if odd is None else odd)
        for at, (_, odd) in zip(places, said, strict=True)
    )
    found = list(requested_messages(replace(REQUEST, filter=Filter("Aa")), stored, NO_SCOPE, end))
    assert [m.body for m in found] == [b"%d" % at for at in places]
    assert [m.queue_offset for m in found] == sorted({m.queue_offset for m in found})
    assert all(5 <= m.queue_offset < end for m in found)
    if not any(odd is not None for _, odd in said):
        assert [m.queue_offset for m in found] == places


@pytest.mark.parametrize("lie", [0, 1 << 62])
def test_a_batch_that_cannot_be_where_it_was_asked_for_comes_raw(lie: int) -> None:
    flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    whole = [messages.encode_batch([messages.BatchItem(b"%d" % i) for i in range(n, n + 3)]) for n in (5, 8)]
    stored = store("t", whole[0], queue_offset=lie, sys_flag=flags) + store(
        "t", whole[1], queue_offset=8, sys_flag=flags
    )
    found = list(requested_messages(REQUEST, stored, NO_SCOPE, 11))
    assert [(m.queue_offset, m.body) for m in found] == [(5, whole[0]), (8, b"8"), (9, b"9"), (10, b"10")]
    assert [bool(m.decode_error) for m in found] == [True, False, False, False]


@given(st.data())
def test_behind_a_filter_no_position_passes_what_is_not_consumed(data: st.DataObject) -> None:
    """A commit at any message's position asks for it again, and for all behind it: also where one says what cannot be true."""
    places = sorted(data.draw(st.sets(st.integers(5, 60), min_size=1, max_size=8)))
    end, odd = data.draw(st.integers(places[-1] + 1, 70)), data.draw(st.integers(0, len(places) - 1))
    before, behind = (places[odd - 1] if odd else 4), (places[odd + 1] if odd + 1 < len(places) else end)
    lie = data.draw(ODD.filter(lambda said: not before < said < behind))
    said = [*places[:odd], lie, *places[odd + 1 :]]
    stored = b"".join(store("t", b"%d" % at, "TAGS\x01Aa\x02", 1, of) for at, of in zip(places, said, strict=True))
    found = list(requested_messages(replace(REQUEST, filter=Filter("Aa")), stored, NO_SCOPE, end))
    assert [m.body for m in found] == [b"%d" % at for at in places]
    assert all(m.queue_offset <= at for m, at in zip(found, places, strict=True))
    if lie < REQUEST.offset + odd:  # nothing can be there
        assert [m.queue_offset for m in found[:odd]] == places[:odd]


@pytest.mark.parametrize("count", [10, 3], ids=["a flipped bit", "more messages than offsets"])
@pytest.mark.parametrize("lie", [94, 97, 99, 101, 106, 108, 110])
def test_a_batch_with_offsets_of_others_comes_raw(lie: int, count: int) -> None:
    """Its messages would take the places of those, which then came to nobody."""
    flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    item = [messages.encode_item(b"%d" % i, "", 0) for i in range(10)]
    first = store("t", b"".join(item), queue_offset=lie if count == 10 else 100, sys_flag=flags)
    second = store("t", b"".join(item), queue_offset=100 + count, sys_flag=flags)
    answers = [(100, first, 100 + count), (100 + count, second, 110 + count)]
    given = [
        list(requested_messages(replace(REQUEST, offset=at), stored, NO_SCOPE, end)) for at, stored, end in answers
    ]
    together = list(requested_messages(replace(REQUEST, offset=100), first + second, NO_SCOPE, 110 + count))
    if lie > 100 or count < 10:
        assert [len(given[0]), len(given[1])] == [1, 10]
        assert given[0][0].queue_offset == 100
        assert given[0][0].decode_error
    for found in ([*given[0], *given[1]], together):
        assert [m.queue_offset for m in found] == sorted({m.queue_offset for m in found})
        assert all(100 <= m.queue_offset < 110 + count for m in found)


def test_a_read_goes_on_in_the_midst_of_a_batch() -> None:
    flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    stored = [
        store(
            "t",
            b"".join(messages.encode_item(b"%d" % i, "", 0) for i in range(n, n + 3)),
            queue_offset=n,
            sys_flag=flags,
        )
        for n in (4, 7)
    ]
    found = list(requested_messages(REQUEST, b"".join(stored), NO_SCOPE, 10))
    assert [(m.queue_offset, m.body, m.decode_error) for m in found] == [(n, b"%d" % n, None) for n in range(5, 10)]


def test_a_batch_that_says_two_offsets_comes_raw() -> None:
    """What brokers write for their index beside the offset tells a lie that no neighbour shows."""
    flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    body = messages.encode_batch([messages.BatchItem(b"%d" % i) for i in range(10)])
    for lie in (0, -3):
        stored = store("t", body, "INNER_NUM\x0110\x02INNER_BASE\x01100\x02", queue_offset=100 + lie, sys_flag=flags)
        found = list(requested_messages(replace(REQUEST, offset=100), stored, NO_SCOPE, 110))
        assert [m.queue_offset for m in found] == ([100] if lie else list(range(100, 110)))
        assert [bool(m.decode_error) for m in found] == ([True] if lie else [False] * 10)
    # Its own tag says nothing of its messages, so it passes every filter.
    tagged = store("t", body, "TAGS\x01a\x02INNER_NUM\x0110\x02INNER_BASE\x01100\x02", queue_offset=97, sys_flag=flags)
    (raw,) = requested_messages(replace(REQUEST, offset=100, filter=Filter("b")), tagged, NO_SCOPE, 110)
    assert (raw.tags, bool(raw.decode_error)) == ("a", True)


@pytest.mark.parametrize(("counted", "held"), [(1, 15), (15, 1), (3, 4)])
def test_a_batch_counted_otherwise_takes_no_offsets_of_others(counted: int, held: int) -> None:
    def batch(name: bytes, offset: int, held: int, counted: int) -> bytes:
        flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
        body = messages.encode_batch([messages.BatchItem(name)] * held)
        return store(
            "t", body, f"INNER_NUM\x01{counted}\x02INNER_BASE\x01{offset}\x02", queue_offset=offset, sys_flag=flags
        )

    behind = 3 + counted
    good, rest = batch(b"good", 0, 3, 3), batch(b"wrong", 3, held, counted) + batch(b"victim", behind, 20, 20)
    for start, stored in ((0, good + rest), (3, rest), (behind - 1, rest)):
        found = list(requested_messages(replace(REQUEST, offset=start), stored, NO_SCOPE, behind + 20))
        (raw,) = (message for message in found if message.decode_error)
        assert (raw.queue_offset, "its broker counted" in str(raw.decode_error)) == (max(start, 3), True)
        assert [m.queue_offset for m in found if m.body == b"victim"] == [*range(behind, behind + 20)]
        assert sum(m.body == b"good" for m in found) == max(0, 3 - start)


def test_large_answer_resumes_by_position_not_by_message_offset(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a queue that damage shifted by two."""
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    stored = b"".join(store("t", b"x", "", 1, offset + 2) for offset in range(5, 9))
    broker.on(Request.PULL_MESSAGE, ok(stored, **BOUNDS))
    answer = pull(parts)
    assert ([m.queue_offset for m in answer.messages], answer.next_offset) == ([5], 6)


def test_a_connection_is_made_aside_and_nobody_is_held_up(broker: MockBroker, parts: Parts) -> None:
    """Who asks goes on at once, also where nothing is connected yet."""
    held = Held()
    broker.on(Request.PULL_MESSAGE, held)
    parts.routes.get("t")
    polls = LongPolls(parts.rpc_client, parts.routes, parts.kinds)
    outcomes = [Told(), Told()]
    for told in outcomes:
        polls.pull(REQUEST, Deadline.after(30.0), told)
    assert not any(told.outcomes for told in outcomes)
    for call in held.wait(2):
        call.answer(refuse(Response.PULL_NOT_FOUND, **BOUNDS))
    assert all(isinstance(told.one, PullAnswer) for told in outcomes)


def test_blocked_connection_to_a_broker_holds_up_no_pull(broker: MockBroker, parts: Parts) -> None:
    """What a producer sends to it fills the connection; the pulls of all other brokers' queues are made on the same thread."""
    broker.on(Request.PULL_MESSAGE, ok(SAME_HASH, **BOUNDS))
    pull(parts)
    broker.may_read.clear()
    later, large, pulled = Deadline.after(WAIT_S), Command(Request.GET_TOPIC_CONFIG, body=bytes(1 << 20)), Told()
    connection = parts.rpc_client.pool.get(broker.address, later)
    for _ in range(12):  # more than all buffers on the way hold
        connection.call_each([(large, lambda _: None)], Deadline.after(0.0))
    pulls = threading.Thread(target=parts.member.pull, args=(REQUEST, later, pulled), daemon=True)
    pulls.start()
    pulls.join(STALL_S / 2)
    assert not pulls.is_alive()
    assert pulled.outcomes == []
    broker.may_read.set()
    assert isinstance(pulled.one, PullAnswer)

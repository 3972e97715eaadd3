"""Messages by id and by key: which broker is asked for what, and what counts as found."""

from __future__ import annotations

import json
import zlib

import pytest

from rocketmq_spark.admin import messages
from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.errors import AccessDenied, NotFound, OptionError
from rocketmq_spark.model import MessageQueue, PullRequest
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.identifiers import OffsetMessageId
from rocketmq_spark.wire.messages import NO_MEMORY
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.decode.fetching import stored, text
from tests.mockbroker import Call, MockBroker, ok, refuse, route

VIEW, QUERY = Request.VIEW_MESSAGE_BY_ID, Request.QUERY_MESSAGE
# The place that ``stored`` gives its messages.
AT = 4711


def offset_id(broker: MockBroker, offset: int = AT) -> str:
    host, port = broker.address.split(":")
    return str(OffsetMessageId(bytes(map(int, host.split("."))), int(port), offset))


def message(**fields: object) -> bytes:
    return stored(b"found", text(UNIQ_KEY="U1", KEYS="k other"), log_offset=AT, topic="t", **fields)


def test_an_offset_message_id_is_asked_of_its_broker(broker: MockBroker, tools: Parts) -> None:
    broker.on(VIEW, ok(message()))
    found = messages.message_by_id(tools, offset_id(broker))
    assert (found.body, found.topic, found.broker_name, found.msg_id) == (b"found", "t", "broker-a", "U1")
    (asked,) = broker.seen(VIEW)
    assert (asked.ext["offset"], asked.ext["bname"], "topic" in asked.ext) == (str(AT), "broker-a", False)
    assert messages.message_by_id(tools, offset_id(broker), "t").msg_id == "U1"
    assert broker.seen(VIEW)[1].ext["topic"] == "t"


def test_message_by_id_never_connects_to_a_foreign_address(broker: MockBroker, tools: Parts) -> None:
    """The id of a producer has the same form, and its first bytes are anything."""
    with (
        MockBroker({VIEW: ok(message())}) as stranger,
        pytest.raises(NotFound, match="does not belong to a message of these"),
    ):
        messages.message_by_id(tools, offset_id(stranger))
    assert (broker.seen(VIEW), stranger.requests) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [
        refuse(Response.SYSTEM_ERROR, "can not find message by the offset, 4711"),
        ok(b"\x00\x00\x00\x08odds"),
        ok(message()[:60]),
        ok(stored(b"elsewhere", log_offset=AT + 1, topic="t")),
    ],
)
def test_what_is_not_there_is_not_found(answer: object, broker: MockBroker, tools: Parts) -> None:
    """In the midst of a message a broker reads anything for one, and gives it away."""
    broker.on(VIEW, answer)
    with pytest.raises(NotFound, match="no message with id"):
        messages.message_by_id(tools, offset_id(broker))


def test_a_refusal_is_no_absence(broker: MockBroker, tools: Parts) -> None:
    broker.on(VIEW, refuse(Response.NO_PERMISSION, "not for you"))
    with pytest.raises(AccessDenied):
        messages.message_by_id(tools, offset_id(broker))


def test_message_lookup_fails_while_one_broker_refuses(broker: MockBroker, tools: Parts) -> None:
    """It may be the one that has the message: ``dlq resend`` would send a letter a second time."""
    with MockBroker({QUERY: refuse(Response.NO_PERMISSION, "not for you")}) as second:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": second.address}))
        for answer in (refuse(Response.QUERY_NOT_FOUND), ok(message())):
            broker.on(QUERY, answer)
            with pytest.raises(AccessDenied):
                messages.messages_by_key(tools, "t", "k")
            with pytest.raises(AccessDenied):
                messages.message_by_id(tools, "U1", "t")
        assert len(second.seen(QUERY)) == 4


def test_an_id_of_a_producer_is_looked_up_in_its_topic(broker: MockBroker, tools: Parts) -> None:
    """Of two with that id the one that was stored first; those that share its hash are left out."""
    other = stored(b"other", text(UNIQ_KEY="U2"), topic="t")
    twice = message(store_ms=9) + message(store_ms=5)
    broker.on(QUERY, [ok(other + twice), ok(other), refuse(Response.QUERY_NOT_FOUND)])
    assert messages.message_by_id(tools, "U1", "t").store_timestamp == 5
    ext = broker.seen(QUERY)[0].ext
    assert (ext["key"], ext["topic"], ext["_UNIQUE_KEY_QUERY"], ext["maxNum"]) == ("U1", "t", "true", "64")
    for _ in range(2):
        with pytest.raises(NotFound, match="no message with id U1"):
            messages.message_by_id(tools, "U1", "t")


def test_an_offset_message_id_of_another_topic(broker: MockBroker, tools: Parts) -> None:
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
    broker.on(VIEW, ok(message()))
    broker.on(QUERY, refuse(Response.QUERY_NOT_FOUND))
    with pytest.raises(NotFound):
        messages.message_by_id(tools, offset_id(broker), "another")


def test_keys_are_compared_and_messages_are_in_order(broker: MockBroker, tools: Parts) -> None:
    with MockBroker() as second:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": second.address}))
        broker.on(QUERY, ok(message(store_ms=3007) + stored(properties=text(KEYS="kk"), topic="t", store_ms=3006)))
        second.on(QUERY, ok(message(store_ms=3006)))
        found = messages.messages_by_key(tools, "t", "k", 3005, 3009, 4)
        assert [(m.store_timestamp, m.broker_name) for m in found] == [(3006, "broker-b"), (3007, "broker-a")]
        for server in (broker, second):
            ext = server.seen(QUERY)[0].ext
            assert (ext["beginTimestamp"], ext["endTimestamp"], ext["maxNum"]) == ("2005", "3009", "64")
            assert "_UNIQUE_KEY_QUERY" not in ext
        assert len(messages.messages_by_key(tools, "t", "U1")) == 2
        second.on(QUERY, refuse(Response.QUERY_NOT_FOUND))
        assert len(messages.messages_by_key(tools, "t", "other")) == 1
    with pytest.raises(OptionError, match="limit is 65; expected 1 to 64"):
        messages.messages_by_key(tools, "t", "k", limit=65)


def test_a_search_does_not_inflate_more_than_memory_holds(
    broker: MockBroker, tools: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_MAX_RESULT_BYTES", 3200)
    packed = zlib.compress(bytes(1000))
    one = stored(packed, text(KEYS="k"), topic="t", sys_flag=SysFlag.COMPRESSED)
    broker.on(QUERY, ok(one * 3 + stored(b"plain", text(KEYS="k"), topic="t")))
    found = messages.messages_by_key(tools, "t", "k")
    assert [(m.body, m.decode_error) for m in found] == [
        (bytes(1000), None), (bytes(1000), None), (packed, NO_MEMORY), (b"plain", None),
    ]  # fmt: skip


def test_of_each_broker_the_newest_are_shown(broker: MockBroker, tools: Parts) -> None:
    with MockBroker() as second:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": second.address}))
        for server, times in ((broker, (1, 2, 3)), (second, (7, 8, 9))):
            server.on(QUERY, ok(b"".join(message(store_ms=ms) for ms in times)))
        found = messages.messages_by_key(tools, "t", "k", limit=2)
    assert [one.store_timestamp for one in found] == [2, 3, 8, 9]


def test_an_index_knows_whole_seconds_only(broker: MockBroker, tools: Parts) -> None:
    """By its own times the one at 2500 was stored at 1900: it is asked for, and what is not of the time is left out."""

    def search(call: Call) -> Command:
        begin, end, most = (int(call.ext(name)) for name in ("beginTimestamp", "endTimestamp", "maxNum"))
        kept = [ms for ms in (1100, 2500, 2600, 2700, 2800) if begin <= (ms - 900) // 1000 * 1000 + 900 <= end]
        return ok(b"".join(message(store_ms=ms) for ms in kept[-most:]))

    broker.on(QUERY, search)

    def found(*wanted: int | None) -> list[int]:
        return [one.store_timestamp for one in messages.messages_by_key(tools, "t", "k", *wanted)]

    assert found(2500) == [2500, 2600, 2700, 2800]
    assert (found(2500, 2500), found(2501, 2599), found(None, 2499)) == ([2500], [], [1100])
    assert (found(None, 2600, 1), found(None, 2600, 2), found(2500, None, 1)) == ([2600], [2500, 2600], [2800])
    with pytest.raises(OptionError, match="ends at 4, before it begins at 5"):
        found(5, 4)


def test_message_lookup_ignores_topics_with_a_colliding_hash(broker: MockBroker, tools: Parts) -> None:
    """``Aa`` and ``BB`` have one in Java, and with them all that begins with them."""
    broker.on(QUERY, ok(message() + stored(b"other", text(UNIQ_KEY="U1", KEYS="k"), store_ms=0, topic="another")))
    assert [one.body for one in messages.messages_by_key(tools, "t", "k")] == [b"found"]
    assert messages.message_by_id(tools, "U1", "t").body == b"found"


def test_messages_of_one_millisecond_are_in_commit_log_order(broker: MockBroker, tools: Parts) -> None:
    later, earlier = ({"queue_id": n, "log_offset": 9 - n, "store_ms": 7, "topic": "t"} for n in range(2))
    broker.on(QUERY, ok(stored(properties=text(KEYS="k"), **later) + stored(properties=text(KEYS="k"), **earlier)))
    assert [m.queue.queue_id for m in messages.messages_by_key(tools, "t", "k")] == [1, 0]


def test_where_a_master_is_away_its_slave_is_asked(broker: MockBroker, tools: Parts) -> None:
    """Nothing found would say that there is no such message, and ``dlq resend`` would send a letter a second time."""
    with MockBroker({QUERY: ok(message(store_ms=3))}) as slave:
        table = json.loads(route(1, {"broker-a": broker.address, "broker-b": slave.address}).body)
        table["brokerDatas"][1]["brokerAddrs"] = {"1": slave.address}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, ok(json.dumps(table).encode()))
        broker.on(QUERY, refuse(Response.QUERY_NOT_FOUND))
        assert messages.message_by_id(tools, "U1", "t").broker_name == "broker-b"
        assert [m.broker_name for m in messages.messages_by_key(tools, "t", "k")] == ["broker-b"]
        assert [m.broker_name for m in tools.admin.messages_of_key("t", "k", 0, 9)] == ["broker-b"]


def test_names_are_the_users(broker: MockBroker, tools: Parts) -> None:
    inside = Parts(broker.address, scope=Scope("ns"))
    broker.on(VIEW, [ok(message()), ok(message()), ok(stored(log_offset=AT, topic="ns%t"))])
    broker.on(QUERY, refuse(Response.QUERY_NOT_FOUND))
    for topic in ("t", None):  # of outside: by this name the user has another topic
        with pytest.raises(NotFound):
            messages.message_by_id(inside, offset_id(broker), topic)
    assert messages.message_by_id(inside, offset_id(broker), "t").topic == "t"
    broker.on(QUERY, ok(stored(properties=text(KEYS="k"), topic="ns%t")))
    (found,) = messages.messages_by_key(inside, "t", "k")
    assert (found.topic, found.queue.topic, broker.seen(QUERY)[0].ext["topic"]) == ("t", "t", "ns%t")
    inside.close()


@pytest.mark.parametrize(("topic", "expected"), [("%DLQ%g", "%DLQ%g"), ("%RETRY%g", "t")])
def test_found_messages_show_the_storing_topic_not_a_claimed_one(
    broker: MockBroker, tools: Parts, topic: str, expected: str
) -> None:
    """Anyone who may write to a retry topic can claim another topic. Only members of its group believe that, as in Java."""
    kept = stored(b"found", text(UNIQ_KEY="U1", KEYS="k", RETRY_TOPIC="t"), log_offset=AT, topic=topic)
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
    broker.on(VIEW, ok(kept))
    broker.on(QUERY, ok(kept))
    by_id, by_key = messages.message_by_id(tools, offset_id(broker)), messages.messages_by_key(tools, topic, "k")
    by_both = messages.message_by_id(tools, offset_id(broker), expected)
    queue = MessageQueue(topic, "broker-a", 0)
    pulled = requested_messages(PullRequest(GROUP, queue, 0, 1), kept, Scope("", ""), 1)
    assert [(m.topic, m.queue.topic) for m in (by_id, *by_key, by_both)] == [(topic, topic)] * 3
    assert [(m.topic, m.queue.topic) for m in pulled] == [(expected, topic)]

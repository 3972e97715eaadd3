"""What brokers say about queues, groups and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.client import offsets as broker_module
from rocketmq_spark.client.offsets import first_offset_since
from rocketmq_spark.client.topic_attributes import TopicAttributesCache
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerNotFound,
    ConnectionLost,
    GroupNotFound,
    RemoteProtocolError,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, QueueBounds, SendRequest
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.harness import store
from tests.mockbroker import OF_PROXY, Call, MockBroker, eventually, offsets, ok, refuse, route, topic_config
from tests.source.scripted import stats as statistics

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC
QUEUES = [MessageQueue("t", "broker-a", i) for i in range(2)]


@pytest.fixture
def routed(parts: Parts) -> Parts:
    parts.routes.get("t")
    return parts


def stats(*bounds: tuple[int, int], last_ms: int = 5) -> bytes:
    """As a broker writes it: objects as keys."""
    items = [
        f'{{"brokerName":"broker-a","queueId":{i},"topic":"t"}}:'
        f'{{"lastUpdateTimestamp":{last_ms},"maxOffset":{high},"minOffset":{low}}}'
        for i, (low, high) in enumerate(bounds)
    ]
    return ('{"offsetTable":{' + ",".join(items) + "}}").encode()


class TestBounds:
    def test_one_question_per_topic_and_broker(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats((1, 9), (0, 4))))
        found = routed.offset_reader.bounds([*QUEUES, QUEUES[0]], routed.soon)
        assert found == {QUEUES[0]: QueueBounds(1, 9, 5), QUEUES[1]: QueueBounds(0, 4, 5)}
        assert [c.ext for c in broker.seen(Request.GET_TOPIC_STATS_INFO)] == [{"topic": "t", "bname": "broker-a"}]

    def test_a_queue_that_is_not_reported_is_missing(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats((1, 9))))
        assert set(routed.offset_reader.bounds(QUEUES, routed.soon)) == {QUEUES[0]}

    @pytest.mark.parametrize("by_queue", [True, False])
    def test_a_queue_that_was_never_written_begins_at_0(
        self, broker: MockBroker, routed: Parts, by_queue: bool
    ) -> None:
        """A store that has none says -1, which would be a position that no checkpoint can be read with."""
        broker.on(Request.GET_TOPIC_STATS_INFO, refuse(3) if by_queue else ok(stats((-1, 0))))
        broker.on(Request.GET_MIN_OFFSET, ok(offset=-1))
        broker.on(Request.GET_MAX_OFFSET, ok(offset=0))
        found = routed.offset_reader.bounds(QUEUES[:1], routed.soon)
        assert found == {QUEUES[0]: QueueBounds(0, 0, 0 if by_queue else 5)}

    def test_bounds_are_asked_per_queue_if_topic_stats_are_unknown(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_TOPIC_STATS_INFO, refuse(3, " request type 202 not supported"))
        broker.on(Request.GET_MIN_OFFSET, offsets({0: 1, 1: 2}))
        broker.on(Request.GET_MAX_OFFSET, offsets({0: 10, 1: 20}))
        found = routed.offset_reader.bounds(QUEUES, routed.soon)
        assert found == {QUEUES[0]: QueueBounds(1, 10, 0), QUEUES[1]: QueueBounds(2, 20, 0)}

    def test_queue_unreachable_by_a_proxy_is_a_transient_error(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_TOPIC_STATS_INFO, refuse(3, " request type 202 not supported"))
        broker.on(Request.GET_MIN_OFFSET, offsets({0: 1, 1: 2}))
        away = refuse(Response.SYSTEM_ERROR, "connect to 10.0.0.7:10911 failed")
        broker.on(Request.GET_MAX_OFFSET, lambda call: away if call.ext("queueId") == "1" else ok(offset=10))
        told: list[tuple[RocketMQError, MessageQueue]] = []
        found = routed.offset_reader.bounds(QUEUES, routed.soon, lambda error, queue: told.append((error, queue)))
        assert found == {QUEUES[0]: QueueBounds(1, 10, 0)}
        assert [(type(error), error.retriable, queue) for error, queue in told] == [
            (ServiceNotAvailable, True, QUEUES[1])
        ]
        with pytest.raises(ServerFault, match=r"10\.0\.0\.7"):
            routed.offset_reader.bounds(QUEUES, routed.soon)

    def test_without_queues_nothing_is_asked(self, broker: MockBroker, routed: Parts) -> None:
        assert routed.offset_reader.bounds([], routed.soon) == {}


class TestGroupOffsets:
    def test_no_offset_is_not_offset_zero(self, broker: MockBroker, routed: Parts) -> None:
        answers = {"0": ok(offset=17), "1": refuse(Response.QUERY_NOT_FOUND, "Not found")}
        broker.on(Request.QUERY_CONSUMER_OFFSET, lambda call: answers[call.ext("queueId")])
        assert routed.offset_reader.committed("g", QUEUES, routed.soon) == {QUEUES[0]: 17, QUEUES[1]: None}
        for command in broker.seen(Request.QUERY_CONSUMER_OFFSET):
            assert (command.ext["setZeroIfNotFound"], command.ext["consumerGroup"]) == ("false", "g")

    def test_commit(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.UPDATE_CONSUMER_OFFSET, [ok(), ok(), refuse(26, "Group g not exist!")])
        assert routed.committer.commit_each("g", {QUEUES[0]: 5, QUEUES[1]: 6}, routed.soon) == {}
        told = [(c.ext["queueId"], c.ext["commitOffset"]) for c in broker.seen(Request.UPDATE_CONSUMER_OFFSET)]
        assert told == [("0", "5"), ("1", "6")]
        failed = routed.committer.commit_each("g", {QUEUES[0]: 5}, routed.soon)
        assert isinstance(failed[QUEUES[0]], GroupNotFound)
        assert "not exist" in str(failed[QUEUES[0]])

    def test_first_offset_of_a_topic_is_stored_before_the_others(self, broker: MockBroker, routed: Parts) -> None:
        """Brokers lose one of two first offsets that arrive at the same time."""
        broker.on(Request.UPDATE_CONSUMER_OFFSET, refuse(26, "Group g not exist!"))
        failed = routed.committer.commit_each("g", dict.fromkeys(reversed(QUEUES), 5), routed.soon)
        assert {type(error) for error in failed.values()} == {GroupNotFound}
        assert failed.keys() == set(QUEUES)
        assert [c.ext["queueId"] for c in broker.seen(Request.UPDATE_CONSUMER_OFFSET)] == ["0"]


class TestSomeBrokersDoNotAnswer:
    @pytest.fixture
    def routed(self, broker: MockBroker, parts: Parts) -> Parts:
        broker.on(ROUTE, route(1, {"broker-a": broker.address, "broker-b": "127.0.0.1:1"}))
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats((1, 9))))
        parts.routes.get("t")
        return parts

    queues = (QUEUES[0], MessageQueue("t", "broker-b", 0), MessageQueue("t", "broker-c", 0))

    def test_their_errors_are_told_and_the_others_answer(self, routed: Parts) -> None:
        errors: list[RocketMQError] = []
        found = routed.offset_reader.bounds(self.queues, routed.soon, lambda error, queue: errors.append(error))
        assert found == {QUEUES[0]: QueueBounds(1, 9, 5)}
        assert [type(error) for error in errors] == [ConnectionLost, BrokerNotFound]

    def test_where_queues_are_asked_one_by_one_each_is_told_once(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MIN_OFFSET, ok(offset=1))
        broker.on(Request.GET_MAX_OFFSET, ok(offset=9))
        told: list[MessageQueue] = []
        queues = [*self.queues, MessageQueue("t", "broker-b", 1)]
        found = routed.offset_reader.bounds_by_queue(queues, routed.soon, lambda error, queue: told.append(queue))
        assert (found, told) == ({QUEUES[0]: QueueBounds(1, 9, 0)}, list(self.queues[1:]))

    def test_without_somebody_to_tell_they_are_raised(self, routed: Parts) -> None:
        with pytest.raises(ConnectionLost):
            routed.offset_reader.bounds(self.queues, routed.soon)

    def test_who_is_told_decides_what_will_pass(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_TOPIC_STATS_INFO, refuse(16, "no"))

        def told(error: RocketMQError, queue: MessageQueue) -> None:
            assert queue == self.queues[0]
            raise error

        with pytest.raises(AccessDenied) as caught:
            routed.offset_reader.bounds(self.queues[:1], routed.soon, told)
        assert (caught.value.addr, caught.value.topic) == (broker.address, "t")


def _pulled(next_offset: int) -> dict[str, int]:
    return {"nextBeginOffset": next_offset, "minOffset": 0, "maxOffset": 2000, "suggestWhichBrokerId": 0}


class TestSingleQuestions:
    def message(self, offset: int = 5, stored_ms: int = 777) -> bytes:
        return store("t", b"body", queue_offset=offset, store_ms=stored_ms)

    @pytest.mark.parametrize(
        ("answer", "time_ms"),
        [
            (ok(nextBeginOffset=6), None),
            (refuse(19, "OFFSET_OVERFLOW_ONE"), None),
            (refuse(20, "NO_MATCHED_MESSAGE"), None),
            (refuse(21, "OFFSET_TOO_SMALL"), None),
        ],
    )
    def test_the_store_time_of_nothing(
        self, answer: Command, time_ms: int | None, broker: MockBroker, routed: Parts
    ) -> None:
        broker.on(Request.PULL_MESSAGE, answer)
        assert routed.offset_reader.store_time_ms("g", QUEUES[0], 5, routed.soon) is time_ms

    def test_the_store_time_of_a_message_and_not_of_a_later_one(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.PULL_MESSAGE, [ok(self.message()), ok(self.message(6)), ok(b"garbage")])
        assert routed.offset_reader.store_time_ms("g", QUEUES[0], 5, routed.soon) == 777
        assert routed.offset_reader.store_time_ms("g", QUEUES[0], 5, routed.soon) is None
        assert routed.offset_reader.store_time_ms("g", QUEUES[0], 5, routed.soon) is None
        ext = broker.seen(Request.PULL_MESSAGE)[0].ext
        assert (ext["sysFlag"], ext["maxMsgNums"], ext["queueOffset"]) == ("4", "1", "5")

    def test_store_times_of_many_queues(self, broker: MockBroker, routed: Parts) -> None:
        of_queue = {"0": ok(self.message()), "1": refuse(19)}
        broker.on(Request.PULL_MESSAGE, lambda call: of_queue[call.ext("queueId")])
        offsets = dict.fromkeys(QUEUES, 5)
        assert routed.offset_reader.store_times_ms("g", offsets, routed.soon) == {QUEUES[0]: 777}
        of_queue.update({"0": refuse(Response.SYSTEM_BUSY, "busy"), "1": refuse(Response.NO_PERMISSION, "no")})
        assert routed.offset_reader.store_times_ms("g", offsets, routed.soon) == {}

    def test_a_sample_of_sizes(self, broker: MockBroker, routed: Parts) -> None:
        body = self.message() + self.message(6)
        broker.on(Request.PULL_MESSAGE, [ok(body, **_pulled(7)), refuse(19), ok(b"", **_pulled(7))])
        assert routed.offset_reader.sample("g", QUEUES[0], 5, routed.soon) == (len(body), 2)
        assert routed.offset_reader.sample("g", QUEUES[0], 5, routed.soon) == (0, 0)
        assert routed.offset_reader.sample("g", QUEUES[0], 5, routed.soon) == (0, 0)

    @pytest.mark.parametrize("asked", [5, 700])
    def test_messages_within_a_message_are_counted_one_by_one(
        self, asked: int, broker: MockBroker, routed: Parts
    ) -> None:
        """A batch comes whole, wherever in it was asked."""
        body = store("t", b"a thousand of them", queue_offset=5, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)
        broker.on(Request.PULL_MESSAGE, ok(body, **_pulled(1005)))
        assert routed.offset_reader.sample("g", QUEUES[0], asked, routed.soon) == (len(body), 1000)

    @pytest.mark.parametrize("body", [b"x" * 200, b"short"])
    def test_a_sample_of_what_cannot_be_decoded(self, body: bytes, broker: MockBroker, routed: Parts) -> None:
        """What a plan does about it is a matter of option badMessage, when it is read."""
        broker.on(Request.PULL_MESSAGE, ok(body, **_pulled(7)))
        assert routed.offset_reader.sample("g", QUEUES[0], 5, routed.soon) == (len(body), 2)

    def test_members_of_a_group(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(
            Request.GET_CONSUMER_LIST_BY_GROUP,
            [ok(b'{"consumerIdList":["b","a"]}'), refuse(1, "no consumer"), refuse(2)],
        )
        assert routed.committer.members("g", "broker-a", routed.soon) == ["a", "b"]
        assert routed.committer.members("g", "broker-a", routed.soon) == []
        with pytest.raises(BrokerBusy):
            routed.committer.members("g", "broker-a", routed.soon)

    def test_filters_are_compiled_by_the_broker_before_they_are_used(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.CHECK_CLIENT_CONFIG, [ok(), refuse(23, "ParseException: a >>> 1"), ok(**OF_PROXY)])
        assert routed.offset_reader.check_filter("broker-a", "g", "t", "a > 1", routed.soon)
        assert b'"SQL92"' in bytes(broker.seen(Request.CHECK_CLIENT_CONFIG)[0].body)
        with pytest.raises(RocketMQError, match="ParseException"):
            routed.offset_reader.check_filter("broker-a", "g", "t", "a >>> 1", routed.soon)
        assert not routed.offset_reader.check_filter("broker-a", "g", "t", "a >>> 1", routed.soon), (
            "a Proxy compiles nothing"
        )

    def test_a_proxy_is_recognised(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MAX_OFFSET, [refuse(2), ok(offset=1), ok(offset=1, **OF_PROXY)])
        assert [routed.offset_reader.is_proxy("t", "broker-a", routed.soon) for _ in range(3)] == [False, False, True]


def test_search_asks_for_the_lower_boundary(broker: MockBroker, routed: Parts) -> None:
    broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, lambda call: ok(offset=int(call.ext("timestamp")) + 1))
    assert routed.offset_reader.search_offsets({QUEUES[1]: 10, QUEUES[0]: 20}, routed.soon) == {
        QUEUES[1]: 11,
        QUEUES[0]: 21,
    }
    assert {c.ext["boundaryType"] for c in broker.seen(Request.SEARCH_OFFSET_BY_TIMESTAMP)} == {"LOWER"}


def test_a_time_that_java_does_not_have_is_its_last_one(broker: MockBroker, routed: Parts) -> None:
    broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, ok(offset=7))
    assert routed.offset_reader.search_offsets({QUEUES[0]: 10**20}, routed.soon) == {QUEUES[0]: 7}
    assert [c.ext["timestamp"] for c in broker.seen(Request.SEARCH_OFFSET_BY_TIMESTAMP)] == [str(2**63 - 1)]


def test_a_fault_at_a_queue_that_never_had_a_message_is_no_error(broker: MockBroker, routed: Parts) -> None:
    """As brokers of RocketMQ 5 fail, at a queue of a batch topic; at one with messages it is an error."""
    ends = {QUEUES[0]: 0, QUEUES[1]: 7}
    broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, lambda call: refuse(Response.SYSTEM_ERROR, "NullPointerException"))
    broker.on(Request.GET_MIN_OFFSET, lambda call: ok(offset=-1))
    broker.on(Request.GET_MAX_OFFSET, lambda call: ok(offset=list(ends.values())[int(call.ext("queueId"))]))
    assert routed.offset_reader.search_offsets({QUEUES[0]: 5}, routed.soon) == {QUEUES[0]: 0}
    with pytest.raises(ServerFault, match="NullPointerException"):
        routed.offset_reader.search_offsets(dict.fromkeys(ends, 5), routed.soon)
    failed = {}
    found = routed.offset_reader.search_offsets(dict.fromkeys(ends, 5), routed.soon, lambda e, q: failed.update({q: e}))
    assert (found, list(failed)) == ({QUEUES[0]: 0}, [QUEUES[1]])


@given(
    st.lists(st.integers(0, 12), max_size=40).map(sorted), st.integers(0, 5), st.integers(-3, 45), st.integers(0, 13)
)
def test_first_message_of_a_time_is_found_from_any_near_offset(
    times: list[int], expired: int, near: int, time_ms: int
) -> None:
    first, looks = min(expired, len(times)), 0

    def look(offset: int) -> int | None:
        nonlocal looks
        looks += 1
        return times[offset] if first <= offset < len(times) else None

    expected = next((i for i in range(first, len(times)) if times[i] >= time_ms), len(times))
    found = first_offset_since(look, near, time_ms)
    assert looks < 20
    if first <= near < len(times):
        assert found == expected
    else:
        assert (found, looks) == (near, 1), "callers clamp it"


class TestOldBrokersTakeTheNearestMessageOfATime:
    """As brokers before 5.1.4: of messages at 10, 20, 20, 20 and 30 the one that is nearest, whichever of several."""

    TIMES = (10, 20, 20, 20, 30)

    @pytest.fixture(params=[401, 438, 440, 513])
    def version(self, request: pytest.FixtureRequest, broker: MockBroker) -> int:
        def search(call: Call) -> Command:
            wanted = int(call.ext("timestamp"))
            nearest = min(reversed(range(5)), key=lambda i: abs(self.TIMES[i] - wanted))
            return replace(ok(offset=nearest), version=request.param)

        def pull(call: Call) -> Command:
            at = int(call.ext("queueOffset"))
            if at >= 5:
                return refuse(19, "OFFSET_OVERFLOW_ONE")
            return ok(store("t", b"x", queue_offset=at, store_ms=self.TIMES[at]), **_pulled(at + 1))

        broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, search)
        broker.on(Request.GET_TOPIC_CONFIG, topic_config())
        broker.on(Request.PULL_MESSAGE, pull)
        return int(request.param)

    @pytest.mark.parametrize(("time_ms", "expected"), [(0, 0), (11, 1), (19, 1), (20, 1), (21, 4), (30, 4), (31, 5)])
    def test_its_answer_is_corrected(
        self, routed: Parts, broker: MockBroker, version: int, time_ms: int, expected: int
    ) -> None:
        found = routed.offset_reader.search_offsets({QUEUES[0]: time_ms}, routed.soon, group="g")
        asked = {command.ext["consumerGroup"] for command in broker.seen(Request.PULL_MESSAGE)}
        if version < 440:
            assert (found, asked) == ({QUEUES[0]: expected}, {"g"})
        else:
            assert asked == set(), "newer brokers are believed"

    def test_without_a_group_nobody_looks(self, routed: Parts, broker: MockBroker, version: int) -> None:
        assert routed.offset_reader.search_offsets({QUEUES[0]: 20}, routed.soon) == {QUEUES[0]: 3}
        assert broker.seen(Request.PULL_MESSAGE) == []


class TestBrokersTakeTheLastBatchOfATime:
    """As brokers of RocketMQ 5, of a batch topic: from the time of the last one on they name that, also one that is older,
    or one of several of that time. A read up to a time behind it lacked it, one from that time on lacked those before it.
    """

    BATCHES = ((0, 10), (3, 20), (7, 30), (8, 30), (10, 30))  # first offset and time; the end is 12

    @pytest.fixture
    def batches(self, broker: MockBroker) -> None:
        def search(call: Call) -> Command:
            wanted = int(call.ext("timestamp"))
            if wanted >= 30:
                return replace(ok(offset=10), version=513)
            return replace(ok(offset=next(at for at, time in self.BATCHES if time >= wanted)), version=513)

        def pull(call: Call) -> Command:
            at = int(call.ext("queueOffset"))
            if not 0 <= at < 12:
                return refuse(Response.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE")
            base, time = [batch for batch in self.BATCHES if batch[0] <= at][-1]
            return ok(store("t", b"x", queue_offset=base, store_ms=time), **_pulled(at + 1))

        broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, search)
        broker.on(Request.PULL_MESSAGE, pull)

    @pytest.mark.parametrize("known", [True, False])
    @pytest.mark.parametrize(
        ("time_ms", "expected"), [(0, 0), (10, 0), (11, 3), (20, 3), (21, 7), (30, 7), (31, 12), (99, 12)]
    )
    def test_its_answer_is_corrected(
        self, routed: Parts, broker: MockBroker, batches: None, known: bool, time_ms: int, expected: int
    ) -> None:
        kind = topic_config(**{"queue.type": "BatchCQ"}) if known else refuse(Response.REQUEST_CODE_NOT_SUPPORTED)
        broker.on(Request.GET_TOPIC_CONFIG, kind)
        found = routed.offset_reader.search_offsets({QUEUES[0]: time_ms}, routed.soon, group="g")
        assert found == {QUEUES[0]: expected}

    def test_denied_check_of_offset_search_fails_for_batch_topics(
        self, routed: Parts, broker: MockBroker, batches: None
    ) -> None:
        broker.on(Request.PULL_MESSAGE, refuse(Response.NO_PERMISSION, "no"))
        assert routed.offset_reader.search_offsets({QUEUES[0]: 31}, routed.soon, group="g") == {QUEUES[0]: 10}
        broker.on(Request.GET_TOPIC_CONFIG, topic_config(**{"queue.type": "BatchCQ"}))
        with pytest.raises(AccessDenied):
            routed.offset_reader.search_offsets({QUEUES[0]: 31}, routed.soon, group="g")

    @pytest.mark.parametrize("told", range(1, 6))
    def test_an_operators_reset_says_nothing_of_what_is_stored(
        self, routed: Parts, broker: MockBroker, batches: None, told: int
    ) -> None:
        """A broker tells it to one pull of each queue, be that a look."""
        broker.on(Request.GET_TOPIC_CONFIG, topic_config(**{"queue.type": "BatchCQ"}))
        pull = broker.script[Request.PULL_MESSAGE]

        def reset(call: Call) -> Command:
            if len(broker.seen(Request.PULL_MESSAGE)) == told:
                return refuse(Response.PULL_OFFSET_MOVED, "OFFSET_RESET")
            return pull(call)

        broker.on(Request.PULL_MESSAGE, reset)
        assert routed.offset_reader.search_offsets({QUEUES[0]: 31}, routed.soon, group="g") == {QUEUES[0]: 12}

    def test_unanswered_check_of_an_offset_search_is_an_error(
        self, routed: Parts, broker: MockBroker, batches: None
    ) -> None:
        for code in (Request.GET_TOPIC_CONFIG, Request.PULL_MESSAGE):
            broker.on(code, refuse(Response.SERVICE_NOT_AVAILABLE, "shutting down"))
        with pytest.raises(ServiceNotAvailable):
            routed.offset_reader.search_offsets({QUEUES[0]: 31}, routed.soon, group="g")


def test_every_request_to_a_broker_names_it(broker: MockBroker, routed: Parts) -> None:
    """What a Proxy needs to find the broker; ``n`` is the short name in sends."""
    for code in (Request.GET_MIN_OFFSET, Request.GET_MAX_OFFSET, Request.SEARCH_OFFSET_BY_TIMESTAMP):
        broker.on(code, ok(offset=1))
    broker.on(Request.GET_TOPIC_STATS_INFO, [refuse(3), ok(stats((0, 1), (0, 1)))])
    broker.on(Request.QUERY_CONSUMER_OFFSET, ok(offset=1))
    for code in (Request.UPDATE_CONSUMER_OFFSET, Request.HEART_BEAT, Request.UNREGISTER_CLIENT):
        broker.on(code, ok())
    sent = ok(msgId="0A", queueId=1, queueOffset=7)
    broker.on(Request.SEND_MESSAGE_V2, sent)
    broker.on(Request.SEND_BATCH_MESSAGE, sent)
    broker.on(Request.RECALL_MESSAGE, ok(msgId="x"))
    broker.on(ROUTE, route(2, {"broker-a": broker.address}))
    one, soon = routed, routed.soon
    for _ in range(2):
        one.offset_reader.bounds(QUEUES, soon)
    one.offset_reader.search_offsets(dict.fromkeys(QUEUES, 1), soon)
    one.offset_reader.committed("g", QUEUES, soon)
    one.committer.commit_each("g", dict.fromkeys(QUEUES, 1), soon)
    one.sender.send(QUEUES[0], SendRequest("g", b"x"), soon)
    one.sender.send(QUEUES[0], SendRequest("g", b"x", batch=True), soon)
    one.sender.send_oneway(QUEUES[0], SendRequest("g", b"x"), soon)
    one.sender.recall("t", "broker-a", "h", "g", soon)
    one.sender.probe("broker-a", "t", soon)
    leave = one.sender.join("g", 0.0)
    one.instance.heartbeat(soon)
    leave(soon)
    asked = [command for command in broker.requests if command.code != ROUTE]
    assert len({command.code for command in asked}) == 11
    for command in asked:
        short = command.code in (Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE)
        assert command.ext["n" if short else "bname"] == "broker-a", command


class TestRealBroker:
    def test_bounds_follow_what_is_sent(self, real: Parts, topic: str) -> None:
        queues = list(real.sender.publish_queues(topic, real.soon))
        assert real.offset_reader.bounds(queues, real.soon) == dict.fromkeys(queues, QueueBounds(0, 0, 0))
        for _ in range(3):
            real.sender.send(queues[1], SendRequest("g", b"x"), real.soon)
        eventually(lambda: real.offset_reader.bounds(queues, real.soon)[queues[1]].max_offset == 3)
        assert real.offset_reader.max_offsets(queues[:2], real.soon) == {queues[0]: 0, queues[1]: 3}
        assert real.offset_reader.search_offsets({queues[1]: 0}, real.soon) == {queues[1]: 0}

    @pytest.mark.parametrize("batch", [False, True])
    def test_queues_without_a_message_have_offsets_of_any_time(
        self, real: Parts, rocketmq: LocalBroker, topic: str, batch: bool
    ) -> None:
        rocketmq.create_topic(f"{topic}-none", 2, batch=batch)
        queues = list(real.sender.publish_queues(f"{topic}-none", real.soon))
        assert real.offset_reader.search_offsets(dict.fromkeys(queues, 1), real.soon) == dict.fromkeys(queues, 0)

    def test_offsets_of_groups(self, real: Parts, topic: str) -> None:
        queues = list(real.sender.publish_queues(topic, real.soon))[:2]
        group = f"group-{topic}"
        assert real.offset_reader.committed(group, queues, real.soon) == dict.fromkeys(queues)
        failed = real.committer.commit_each(group, {queues[0]: 5}, real.soon)
        assert isinstance(failed[queues[0]], GroupNotFound)


def test_of_statistics_only_what_was_asked_for_is_kept(broker: MockBroker, parts: Parts) -> None:
    """A broker could name any number of queues for each topic."""
    table = {MessageQueue("t", "broker-a", i): (0, i) for i in range(2000)}
    broker.on(Request.GET_TOPIC_STATS_INFO, statistics(table))
    parts.routes.get("t")
    first, second, none = (MessageQueue("t", "broker-a", i) for i in (0, 1, 2000))
    assert parts.offset_reader.bounds([first, none], parts.soon).keys() == {first}
    kept = parts.offset_reader._stats_by_broker_and_topic["broker-a", "t"]
    assert kept.bounds.keys() == {first}
    assert parts.offset_reader.bounds([second], parts.soon)[second].max_offset == 1
    assert parts.offset_reader._stats_by_broker_and_topic["broker-a", "t"].bounds.keys() == {first, second}
    small = statistics(dict.fromkeys((first, second), (0, 5)))
    broker.on(Request.GET_TOPIC_STATS_INFO, small)
    for _ in range(2):
        assert parts.offset_reader.bounds([first], parts.soon).keys() == {first}
        assert parts.offset_reader.bounds([second, none], parts.soon).keys() == {second}


def test_statistics_of_brokers_that_left_the_route_are_forgotten(broker: MockBroker, parts: Parts) -> None:
    """A name server could list other brokers each time."""
    broker.on(
        Request.GET_TOPIC_STATS_INFO,
        lambda call: statistics({MessageQueue("t", call.ext("bname"), i): (0, 1) for i in range(1000)}),
    )
    for n in range(70):
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1000, {f"b{n}": broker.address}))
        queues = parts.routes.get("t", 0.0).readable_queues()
        assert len(parts.offset_reader.bounds(queues, parts.soon)) == 1000
        parts.kinds.stores_batches(queues[0], parts.soon)
        assert len(parts.offset_reader._stats_by_broker_and_topic) <= 7
    assert ("b69", "t") in parts.offset_reader._stats_by_broker_and_topic
    assert len(parts.kinds._cached_answers) < 70


def test_statistics_of_topics_without_a_route_are_forgotten(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(
        Request.GET_TOPIC_STATS_INFO, lambda call: statistics({MessageQueue(call.ext("topic"), "broker-a", 0): (0, 1)})
    )
    monkeypatch.setattr(broker_module, "_SWEEP_ABOVE_QUEUES", 32)
    parts.offset_reader._sweep_threshold = 32
    for n in range(300):
        parts.routes.get(f"t{n}")
        parts.offset_reader.bounds([MessageQueue(f"t{n}", "broker-a", 0)], parts.soon)
        parts.kinds.stores_batches(MessageQueue(f"t{n}", "broker-a", 0), parts.soon)
        if n != 7:
            parts.routes.forget(f"t{n}")
    assert ("broker-a", "t7") in parts.offset_reader._stats_by_broker_and_topic
    assert ("t7", "broker-a") in parts.kinds._cached_answers
    assert max(len(parts.offset_reader._stats_by_broker_and_topic), len(parts.kinds._cached_answers)) < 100


def test_only_used_topic_attributes_are_cached(broker: MockBroker, routed: Parts) -> None:
    many = {f"+{n}": "x" for n in range(50)}
    broker.on(Request.GET_TOPIC_CONFIG, [topic_config(**many), topic_config(**{f"{n}": "x" for n in range(101)})])
    assert routed.kinds.attributes("t", "broker-a", routed.soon) == {}
    with pytest.raises(RemoteProtocolError, match="101 is no whole number from 0 to 100"):
        TopicAttributesCache(routed.rpc_client, routed.routes).attributes("t", "broker-a", routed.soon)


def test_refreshed_queue_bounds_reuse_the_same_queue_objects(broker: MockBroker, routed: Parts) -> None:
    """Positions, marks and views of 100,000 queues share them, and compare faster."""
    broker.on(Request.GET_TOPIC_STATS_INFO, [ok(stats((1, 9), (0, 4))), ok(stats((1, 10), (2, 4)))])
    kept = []
    for _ in range(2):
        routed.offset_reader.bounds(QUEUES, routed.soon)
        kept.append(list(routed.offset_reader._stats_by_broker_and_topic["broker-a", "t"].bounds))
    assert [first is second for first, second in zip(*kept, strict=True)] == [True, True]
    assert routed.offset_reader._stats_by_broker_and_topic["broker-a", "t"].bounds == {
        QUEUES[0]: QueueBounds(1, 10, 5),
        QUEUES[1]: QueueBounds(2, 4, 5),
    }

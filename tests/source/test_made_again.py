"""Streams whose topics are made again, on a scripted broker; what decides is in test_recreation."""

from __future__ import annotations

import json
import time

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import CheckpointMismatch, DataLossError, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source import partition_reader
from rocketmq_spark.spark.source.poll_interval import PollInterval
from rocketmq_spark.spark.source.recreated_topics import RecreationWatch
from tests.harness import store
from tests.mockbroker import MockBroker, eventually, never, offsets, ok, refuse, topic_config
from tests.reading import Run, positions, ranges_of, read
from tests.source.scripted import route, stats

A, B = (MessageQueue("t", "broker-a", number) for number in range(2))
ELSEWHERE = MessageQueue("t", "broker-b", 0)
QUICK = {"subscribe": "t", "numRetries": 0, "requestTimeout": "5s"}
ROUTE, STATS, PULL = Request.GET_ROUTEINFO_BY_TOPIC, Request.GET_TOPIC_STATS_INFO, Request.PULL_MESSAGE
SEARCH = Request.SEARCH_OFFSET_BY_TIMESTAMP
MARK = 1000


@pytest.fixture
def scripted():
    """Name server and broker-a in one."""
    with MockBroker() as broker:
        broker.on(ROUTE, route({"broker-a": {0: broker.address}}, queues=2))
        yield broker
    session.close_all()


@pytest.fixture
def name_server(scripted):
    """A name server on its own, so that no request for a route connects to the broker again before a poll."""
    with MockBroker({ROUTE: route({"broker-a": {0: scripted.address}}, queues=2)}) as alone:
        yield alone


def log(at, marked=True, **more):
    """An offset with a mark of each queue."""

    def nested(values):
        found = {}
        for queue, value in values.items():
            found.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = value
        return found

    marks = {"marks": nested(dict.fromkeys(at, MARK))} if marked else {}
    return json.dumps({**marks, **more, "topics": nested(at), "v": 1}, separators=(",", ":"))


def younger(call, store_ms=2 * MARK):
    """All messages of the topic are new ones."""
    return ok(
        store("t", b"x", queue_offset=int(call.ext("queueOffset")), store_ms=store_ms),
        nextBeginOffset=0,
        minOffset=0,
        maxOffset=0,
    )


def test_queue_refilled_to_its_old_offset_is_noticed(scripted):
    """Its end says nothing, and it has nothing to be read; the other queue takes the stream on."""
    scripted.on(STATS, stats({A: (0, 100), B: (0, 9)}, newest={A: 2 * MARK, B: MARK}))
    begin = log({A: 100, B: 5})
    with pytest.raises(DataLossError, match=r"t/broker-a/0 from offset 100 on .offset went back"):
        Run(scripted.address, begin, **QUICK).latest()
    lenient = Run(scripted.address, begin, failOnDataLoss="warn", **QUICK)
    end = lenient.ahead()
    assert positions(end) == {A: 100, B: 9}
    assert ranges_of(lenient.plan(end)) == [[OffsetRange(A, 0, 100), OffsetRange(B, 5, 9)]]
    assert json.loads(end)["marks"] == {"t": {"broker-a": {"0": 2 * MARK, "1": MARK}}}


@pytest.mark.parametrize("minimum", [0, 5], ids=["another queue", "its minimum"])
@pytest.mark.parametrize(
    "given", [{}, {"available_now": True}, {"group": "g"}], ids=["stream", "available now", "group"]
)
def test_queue_refilled_by_a_restart_between_plans_is_noticed(scripted, name_server, given, minimum):
    """A quick one: no plan met the broker while it was away. The other queue of the topic, or the minimum, is as it was."""

    def search(call):
        return ok(offset=40 if call.ext("queueId") == "1" else 10)

    scripted.on(STATS, stats({A: (minimum, 10), B: (minimum, 50)}, MARK))
    scripted.on(SEARCH, search)
    scripted.on(PULL, younger)
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    given_options = {name: value for name, value in {**QUICK, **given}.items() if name != "available_now"}
    run = Run(name_server.address, log({A: 10, B: 50}), **given_options)
    polls = len(scripted.seen(STATS))
    eventually(lambda: run.latest() == run.offset and len(scripted.seen(STATS)) > polls + 2)
    # The reader's client is that of equal options.
    options_of_reader = options.parse({"nameServer": name_server.address, "routeRefresh": 0, **given_options})
    pool = session.client(options_of_reader.for_role("stream source")).rpc_client.pool
    scripted.drop()
    eventually(lambda: not pool.is_connected(scripted.address))
    scripted.on(STATS, stats({A: (minimum, 10), B: (minimum, 100)}, newest={A: MARK, B: 2 * MARK}))
    if given.get("available_now"):
        run.reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLossError, match=r"t/broker-a/1 from offset 50 on .offset went back"):
        run.ahead()


def test_queue_read_again_after_a_given_up_part_is_the_same(scripted):
    """The topic was narrowed, which lost B from 5 to 9, and widened again."""
    scripted.on(STATS, stats({A: (0, 20), B: (0, 9)}, 2 * MARK))
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=1))
    scripted.on(Request.GET_TOPIC_CONFIG, topic_config())
    scripted.on(Request.GET_MAX_OFFSET, ok(offset=9))
    run = Run(scripted.address, log({A: 10, B: 5}), failOnDataLoss="warn", routeRefresh=0, **QUICK)
    scripted.on(SEARCH, ok(offset=10))
    run.offset = run.ahead()
    assert positions(run.offset) == {A: 20, B: 9}
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=2))
    scripted.on(STATS, stats({A: (0, 25), B: (0, 9)}, 2 * MARK))
    strict = Run(scripted.address, run.offset, routeRefresh=0, **QUICK)
    assert positions(strict.ahead()) == {A: 25, B: 9}


def narrower(broker, new):
    """The topic was created again with one queue, which ends at ``new``."""
    broker.on(ROUTE, route({"broker-a": {0: broker.address}}, queues=1))
    broker.on(Request.GET_TOPIC_CONFIG, topic_config())
    broker.on(Request.GET_MAX_OFFSET, ok(offset=0))
    broker.on(STATS, stats({A: (0, new)}, 2 * MARK))


@pytest.mark.parametrize("available_now", [False, True])
@pytest.mark.parametrize("chosen", [{}, {"subscribe": None, "assign": '{"t":{"broker-a":[0,1]}}'}])
@pytest.mark.parametrize("new", [0, 3])
def test_vanished_queue_of_a_recreated_topic_is_a_loss(scripted, chosen, new, available_now):
    """Nothing was in A, so only the end of B shows it. The query starts again, and reads B from its start when B is back."""
    chosen = {**QUICK, **chosen, "routeRefresh": 0}
    begin = log({A: 0, B: 5})
    narrower(scripted, new)
    with pytest.raises(DataLossError, match=r"t/broker-a/1 offsets 0 to 5 .offset went back"):
        Run(scripted.address, begin, available_now=available_now, **chosen).ahead()
    lenient = Run(scripted.address, begin, available_now=available_now, failOnDataLoss="warn", **chosen)
    end = lenient.ahead()
    assert positions(end) == {A: new}
    assert Run(scripted.address, end, available_now=available_now, **chosen).latest() == end
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=2))
    scripted.on(STATS, stats({A: (0, new), B: (0, 8)}, 2 * MARK))
    wide = Run(scripted.address, end, available_now=available_now, **chosen)
    assert ranges_of(wide.plan(wide.ahead())) == [[OffsetRange(B, 0, 8)]]


def test_a_run_to_the_end_loses_what_a_vanished_queue_had(scripted, caplog):
    """It had nothing before the position, and messages when the run began."""
    scripted.on(STATS, stats({A: (0, 9), B: (0, 7)}, MARK))
    given = {**QUICK, "routeRefresh": 0, "failOnDataLoss": "warn"}
    run = Run(scripted.address, log({A: 9, B: 0}), available_now=True, **given)
    narrower(scripted, 0)
    run.offset = run.ahead()
    assert positions(run.offset) == {A: 0, B: 0}
    assert run.latest() == run.offset
    assert caplog.text.count("t/broker-a/1 offsets 0 to 7 (offset went back") == 1


def test_a_topic_that_is_made_again_before_the_first_batch(scripted):
    scripted.on(STATS, stats({A: (0, 10), B: (0, 0)}, MARK))
    run = Run(scripted.address, **QUICK)
    assert run.latest() == run.offset
    scripted.on(STATS, stats({A: (0, 10), B: (0, 0)}, 2 * MARK))
    with pytest.raises(DataLossError, match="t/broker-a/0 from offset 10 on"):
        eventually(lambda: run.latest() != run.offset)


@pytest.mark.parametrize(("minimum", "beside"), [(3, {}), (0, {B: (0, 50)})], ids=["its minimum", "another queue"])
def test_queue_end_refilled_while_a_batch_waits_is_still_lost(scripted, minimum, beside, caplog):
    """What stays proves nothing then, neither its minimum nor another queue of the topic."""
    scripted.on(STATS, stats({A: (minimum, 10), **beside}, MARK))
    scripted.on(SEARCH, ok(offset=5))
    scripted.on(PULL, younger)
    given = {"failOnDataLoss": "warn", "minOffsetsPerTrigger": 100, "maxTriggerDelay": "10m", **QUICK}
    run = Run(scripted.address, log({A: 10, **{queue: end for queue, (_, end) in beside.items()}}), **given)
    assert run.latest() == run.offset
    scripted.on(STATS, stats({A: (minimum, 5), **beside}, MARK))
    eventually(lambda: run.latest() == run.offset and "cannot be read any more" in caplog.text)
    assert run.latest() == run.offset
    assert "t/broker-a/0 offsets 5 to 10 (offset went back" in caplog.text
    scripted.on(STATS, stats({A: (minimum, 300), **beside}, MARK, newest={A: 2 * MARK}))
    assert ranges_of(run.plan(run.ahead())) == [[OffsetRange(A, minimum, 300)]]


@pytest.mark.parametrize("first", [True, False])
def test_a_clock_that_was_put_back_makes_no_topic_again(scripted, first):
    """What the query has read is of before that and younger than the newest message, until new ones are younger again."""

    def pull(call):
        return younger(call, {99: MARK, 100: MARK + 1}.get(int(call.ext("queueOffset")), 2 * MARK))

    scripted.on(STATS, stats({A: (0, 100)}, MARK))
    scripted.on(PULL, pull)
    scripted.on(SEARCH, ok(offset=5))
    given = {"maxOffsetsPerTrigger": 20, "startingOffsets": '{"t":{"broker-a":{"0":10}}}', **QUICK}
    logged = None if first else log({A: 9}, marked=False)
    earlier = Run(scripted.address, logged, **given)
    begin = earlier.offset if first else earlier.ahead()
    scripted.on(STATS, stats({A: (0, 101)}, MARK + 1))
    run = Run(scripted.address, begin, **given)
    before = run.positions[A]
    run.offset = run.ahead()
    assert run.positions[A] == before + 20


def test_available_now_run_waits_for_possibly_recreated_queues(scripted):
    """Their broker does not say it; what it has is waited for."""
    scripted.on(STATS, stats({A: (0, 100)}, newest={A: 2 * MARK}))
    scripted.on(SEARCH, refuse(Response.SYSTEM_BUSY, "busy"))
    run = Run(scripted.address, log({A: 5}), available_now=True, readDeadline="300ms", **QUICK)
    with pytest.raises(RocketMQError, match="busy"):
        run.latest()


def test_logged_batch_waits_until_recreation_of_queues_is_known(scripted):
    """Else the batch would be filled with another topic's messages."""
    scripted.on(STATS, stats({A: (0, 100)}, newest={A: 2 * MARK}))
    scripted.on(SEARCH, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError, match="busy"):
        Run(scripted.address, log({A: 0}, marked=False), readDeadline="300ms", **QUICK).plan(log({A: 20}))


def test_a_checkpoint_of_another_cluster_reads_nothing(scripted):
    """Topics and brokers have the same names there."""
    scripted.on(STATS, stats({A: (0, 10)}, MARK))
    scripted.on(SEARCH, ok(offset=10))
    end = Run(scripted.address, log({A: 5}), **QUICK).ahead()
    assert json.loads(end)["reads"]["clusters"] == ["c"]
    elsewhere = log({A: 10}, reads={"clusters": ["d"], "namespace": ""})
    for plan in (
        Run(scripted.address, elsewhere, **QUICK).latest,
        lambda: Run(scripted.address, log({A: 5}), **QUICK).plan(elsewhere),
    ):
        with pytest.raises(CheckpointMismatch, match="of cluster d, and this query of cluster c"):
            plan()


@pytest.mark.parametrize("restarted", [True, False])
def test_however_many_queues_move(scripted, restarted):
    queues = [MessageQueue("t", "broker-a", number) for number in range(300)]
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=300))
    scripted.on(STATS, stats(dict.fromkeys(queues, (0, 10)), MARK))
    scripted.on(PULL, younger)
    begin = log(dict.fromkeys(queues, 10))
    runs = {policy: Run(scripted.address, begin, failOnDataLoss=policy, **QUICK) for policy in ("fail", "warn")}
    if not restarted:
        assert {run.latest() for run in runs.values()} == {begin}
    scripted.on(STATS, stats(dict.fromkeys(queues, (0, 12)), 2 * MARK))
    scripted.on(SEARCH, ok(offset=0))
    with pytest.raises(DataLossError, match="offset went back"):
        eventually(lambda: runs["fail"].latest() != begin)
    end = runs["warn"].ahead()
    assert ranges_of(runs["warn"].plan(end)) == [[OffsetRange(queue, 0, 12) for queue in queues]]


def test_new_messages_cost_one_query_per_topic_and_broker(scripted):
    queues = [MessageQueue("t", "broker-a", number) for number in range(300)]
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=300))
    scripted.on(STATS, stats(dict.fromkeys(queues, (0, 10)), MARK))
    scripted.on(SEARCH, ok(offset=10))
    run = Run(scripted.address, log(dict.fromkeys(queues, 10)), **QUICK)
    assert run.latest() == run.offset
    scripted.on(STATS, stats(dict.fromkeys(queues, (0, 12)), 2 * MARK))
    run.offset = run.ahead()
    assert set(run.positions.values()) == {12}
    seen = len(scripted.seen(SEARCH))
    assert 0 < seen < 10, "one a plan"


def test_unchanged_bounds_are_checked_once_for_recreated_topics(scripted, monkeypatch):
    """A topic that is created again with more messages than before is noticed in the same run, and at a restart."""
    checks = []
    check = RecreationWatch.check
    monkeypatch.setattr(RecreationWatch, "check", lambda self, *given: checks.append(given) or check(self, *given))
    scripted.on(STATS, stats({A: (0, 10), B: (0, 10)}, MARK))
    begin = log({A: 10, B: 10})
    run = Run(scripted.address, begin, **QUICK)
    polls = len(scripted.seen(STATS))
    eventually(lambda: run.latest() == begin and len(scripted.seen(STATS)) > polls + 3)
    assert len(checks) == 1
    scripted.on(STATS, stats({A: (0, 15), B: (0, 10)}, newest={A: 2 * MARK, B: MARK}))
    run.offset = run.ahead()
    checked, polls = len(checks), len(scripted.seen(STATS))
    eventually(lambda: run.latest() == run.offset and len(scripted.seen(STATS)) > polls + 3)
    assert (run.positions, len(checks)) == ({A: 15, B: 10}, checked), (
        "a batch that reads everything leaves nothing to check"
    )
    scripted.on(STATS, stats({A: (0, 100), B: (0, 100)}, 3 * MARK))
    scripted.on(SEARCH, ok(offset=0))
    scripted.on(PULL, lambda call: ok(store("t", b"x", queue_offset=int(call.ext("queueOffset")), store_ms=3 * MARK),
                                      nextBeginOffset=0, minOffset=0, maxOffset=0))  # fmt: skip
    with pytest.raises(DataLossError, match=r"t/broker-a/0 from offset 15 on .*; t/broker-a/1 from offset 10 on"):
        eventually(lambda: run.latest() != run.offset)
    with pytest.raises(DataLossError, match=r"t/broker-a/0 from offset 15 on .*; t/broker-a/1 from offset 10 on"):
        Run(scripted.address, run.offset, **QUICK).latest()


@pytest.mark.parametrize("reads_batch", [False, True])
def test_equal_bounds_without_store_times_are_checked_again(scripted, reads_batch):
    """Through a Proxy, a topic that was created again may have the bounds of the old one."""
    scripted.on(STATS, stats({A: (0, 10), B: (0, 10)}, 0))
    scripted.on(SEARCH, ok(offset=20))
    scripted.on(PULL, lambda call: ok(store("t", b"x", queue_offset=int(call.ext("queueOffset")), store_ms=MARK),
                                      nextBeginOffset=0, minOffset=0, maxOffset=0))  # fmt: skip
    run = Run(scripted.address, log({A: 10, B: 10}), **QUICK)
    assert run.latest() == run.offset
    if reads_batch:
        scripted.on(STATS, stats({A: (0, 12), B: (0, 12)}, 0))
        run.offset = run.ahead()
    scripted.on(SEARCH, ok(offset=0))
    scripted.on(PULL, younger)
    with pytest.raises(DataLossError, match="offset went back"):
        eventually(lambda: run.latest() != run.offset)


def test_missing_queue_is_asked_about_while_bounds_stay_equal(scripted):
    """The route has one queue less, and the broker answers only later that it does not read that queue."""
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=1))
    scripted.on(STATS, stats({A: (0, 10)}, MARK))
    scripted.on(Request.GET_TOPIC_CONFIG, refuse(Response.SYSTEM_BUSY, "busy"))
    run = Run(scripted.address, log({A: 10, B: 5}), **QUICK)
    assert run.latest() == run.offset
    config = {"topicName": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    scripted.on(Request.GET_TOPIC_CONFIG, ok(json.dumps(config).encode()))
    scripted.on(Request.GET_MAX_OFFSET, ok(offset=9))
    with pytest.raises(DataLossError, match="t/broker-a/1 offsets 5 to 9"):
        eventually(lambda: run.latest() != run.offset)


def test_broker_silent_about_recreation_delays_no_other_broker(scripted):
    scripted.on(STATS, stats({A: (0, 15), B: (0, 10)}, 2 * MARK))
    with MockBroker({STATS: stats({ELSEWHERE: (0, 9)}, 2 * MARK), SEARCH: ok(offset=5)}) as other:
        both = {"broker-a": {0: scripted.address}, "broker-b": {0: other.address}}
        scripted.on(ROUTE, route(both))
        scripted.on(SEARCH, never)
        begin = log({A: 10, ELSEWHERE: 5})
        run = Run(scripted.address, begin, **{**QUICK, "requestTimeout": "300ms"})
        run.offset = run.ahead()
        assert run.positions == {A: 10, ELSEWHERE: 9}
        assert json.loads(run.offset)["marks"]["t"] == {"broker-a": {"0": MARK}, "broker-b": {"0": 2 * MARK}}
        scripted.on(SEARCH, ok(offset=10))
        run.offset = run.ahead()
        assert run.positions == {A: 15, ELSEWHERE: 9}


@pytest.mark.parametrize("minimum", [0, 100])
@pytest.mark.parametrize("marked", [True, False])
def test_recreated_topic_is_noticed_after_all_messages_expired(scripted, marked, minimum):
    """All of its messages had expired, so none could tell a time; what comes afterwards is of this hour."""
    scripted.on(STATS, stats({A: (100, 100)}, -1))
    begin = log({A: 100}) if marked else Run(scripted.address, startingOffsets="latest", **QUICK).offset
    later_ms = int(time.time() * 1000) + 3_600_000
    scripted.on(STATS, stats({A: (minimum, 150)}, later_ms))
    made = store("t", b"x", queue_offset=99, store_ms=later_ms)
    scripted.on(PULL, ok(made, nextBeginOffset=100, minOffset=minimum, maxOffset=150))
    scripted.on(SEARCH, ok(offset=minimum))
    run = Run(scripted.address, begin, **QUICK)
    if minimum:
        assert positions(run.ahead()) == {A: 150}
    else:
        with pytest.raises(DataLossError, match=r"t/broker-a/0 from offset 100 on .offset went back"):
            run.ahead()


@pytest.mark.parametrize("batch", [False, True], ids=["stream", "batch"])
@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("read_from", ["slave", "hint"])
def test_a_slave_that_has_the_old_messages_is_not_read(scripted, read_from, differs, batch, monkeypatch):
    """The topic was deleted on its master alone, and made again: the slave kept the index. Its master is read."""

    def messages(body, store_ms, suggested=0):
        def answer(call):
            offset = int(call.ext("queueOffset"))
            stored = store("t", body, queue_offset=offset, store_ms=store_ms)
            return ok(stored, nextBeginOffset=offset + 1, minOffset=0, maxOffset=3, suggestWhichBrokerId=suggested)

        return answer

    monkeypatch.setattr(partition_reader, "_SLAVE_TIMEOUT_S", 60.0)
    scripted.on(STATS, stats({A: (0, 3)}, 2 * MARK))
    scripted.on(PULL, messages(b"new", 2 * MARK, 1))
    with MockBroker({PULL: messages(b"old", MARK if differs else 2 * MARK, 1)}) as slave:
        scripted.on(ROUTE, route({"broker-a": {0: scripted.address, 1: slave.address}}))
        given = {"readFrom": read_from, "startingOffsets": "earliest", **QUICK}
        rows = read(scripted.address, **given) if batch else Run(scripted.address, **given).batch()
        found = {row["body"] for row in rows}
        assert found == {b"new"} if differs else b"old" in found


def test_hanging_slave_delays_no_batch_that_its_master_has(scripted, monkeypatch):
    monkeypatch.setattr(partition_reader, "_SLAVE_TIMEOUT_S", 0.05)
    scripted.on(STATS, stats({A: (0, 3)}, MARK))
    answers = {
        n: ok(store("t", b"x", queue_offset=n), nextBeginOffset=n + 1, minOffset=0, maxOffset=3) for n in range(3)
    }
    scripted.on(PULL, lambda call: answers[int(call.ext("queueOffset"))])
    with MockBroker({PULL: never}) as slave:
        scripted.on(ROUTE, route({"broker-a": {0: scripted.address, 1: slave.address}}))
        given = {**QUICK, "requestTimeout": "600s"}  # longer than a test may take
        run = Run(scripted.address, readFrom="hint", startingOffsets="earliest", **given)
        assert [row["body"] for row in run.batch()] == [b"x"] * 3
        assert slave.seen(PULL)


@pytest.mark.parametrize("who", ["master", "slave"])
def test_a_slave_is_not_read_where_the_comparison_failed(scripted, who):
    """One pull for the plan is refused; all is well when the task reads."""

    def messages(body, refused):
        left = [refuse(Response.SYSTEM_BUSY, "busy")] if refused else []

        def answer(call):
            if left:
                return left.pop()
            offset = int(call.ext("queueOffset"))
            return ok(store("t", body, queue_offset=offset), nextBeginOffset=offset + 1, minOffset=0, maxOffset=3)

        return answer

    scripted.on(STATS, stats({A: (0, 3)}, 2 * MARK))
    scripted.on(PULL, messages(b"new", who == "master"))
    with MockBroker({PULL: messages(b"old", who == "slave")}) as slave:
        scripted.on(ROUTE, route({"broker-a": {0: scripted.address, 1: slave.address}}))
        run = Run(scripted.address, readFrom="slave", startingOffsets="earliest", **QUICK)
        assert {row["body"] for row in run.batch()} == {b"new"}


@pytest.mark.parametrize("high", [19, 20, 30])
def test_logged_batch_is_not_filled_from_a_recreated_topic(scripted, high):
    """The topic was made again while the query was down, with fewer, as many and more messages than the batch had read."""
    scripted.on(STATS, stats({A: (0, high), B: (0, 9)}, newest={A: 2 * MARK, B: MARK}))
    scripted.on(SEARCH, ok(offset=0))
    scripted.on(PULL, younger)
    start, end = log({A: 0, B: 5}, marked=False), log({A: 20, B: 9})
    with pytest.raises(DataLossError, match=r"t/broker-a/0 offsets 0 to 20 .offset went back"):
        Run(scripted.address, start, **QUICK).plan(end)
    # The first batch of all carries where it began, and Spark asks for a start before it plans the batch again.
    first = log({A: 20, B: 9}, start={"t": {"broker-a": {"0": 0, "1": 5}}})
    with pytest.raises(DataLossError, match=r"t/broker-a/0 offsets 0 to 20 .offset went back"):
        Run(scripted.address, startingOffsets="earliest", **QUICK).plan(first)
    lenient = Run(scripted.address, start, failOnDataLoss="warn", **QUICK)
    assert ranges_of(lenient.plan(end)) == [[OffsetRange(B, 5, 9)]]
    lenient.offset = end
    after = lenient.ahead()
    assert ranges_of(lenient.plan(after)) == [[OffsetRange(A, 0, high)]]


def test_where_store_times_are_not_told_one_queue_is_watched(scripted):
    """Through a Proxy."""
    scripted.on(STATS, refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "a Proxy"))
    scripted.on(Request.GET_MIN_OFFSET, offsets({0: 0, 1: 0}))
    scripted.on(Request.GET_MAX_OFFSET, offsets({0: 12, 1: 7}))

    def before(call):
        made = store("t", b"x", queue_offset=int(call.ext("queueOffset")), store_ms=MARK)
        return ok(made, nextBeginOffset=0, minOffset=0, maxOffset=0)

    scripted.on(PULL, before)
    scripted.on(SEARCH, ok(offset=12))
    # What brokers told before says nothing of messages that are read now.
    run = Run(scripted.address, log({A: 10, B: 5}), **QUICK)
    run.offset = run.ahead()
    assert run.positions == {A: 12, B: 7}
    assert json.loads(run.offset)["marks"] == {"t": {"broker-a": {"0": MARK}}}
    assert run.latest() == run.offset
    scripted.on(Request.GET_MAX_OFFSET, offsets({0: 12, 1: 8}))
    scripted.on(PULL, younger)
    scripted.on(SEARCH, ok(offset=0))
    lenient = Run(scripted.address, run.offset, failOnDataLoss="warn", **QUICK)
    with pytest.raises(DataLossError, match=r"t/broker-a/0 .*; t/broker-a/1 .*offset went back"):
        eventually(lambda: run.latest() != run.offset)
    assert ranges_of(lenient.plan(lenient.ahead())) == [[OffsetRange(A, 0, 12), OffsetRange(B, 0, 8)]]


def test_what_has_expired_takes_no_share_of_a_batch(scripted):
    scripted.on(STATS, stats({A: (50, 100), B: (0, 12)}, 2 * MARK))
    scripted.on(SEARCH, ok(offset=10))
    run = Run(
        scripted.address,
        log({A: 10, B: 10}),
        maxOffsetsPerTrigger=26,
        failOnDataLoss="warn",
        startingOffsets="earliest",
        **QUICK,
    )
    assert positions(run.ahead()) == {A: 75, B: 11}


def test_a_batch_asks_brokers_once(scripted, monkeypatch):
    """Its report and its tasks use what its end was planned from."""
    scripted.on(STATS, stats({A: (0, 20), B: (0, 5)}, MARK))
    run = Run(scripted.address, log({A: 5, B: 5}), **QUICK)
    end = run.ahead()
    before = len(scripted.seen(STATS))
    monkeypatch.setattr(PollInterval, "is_due", lambda self, now_s: True)  # Spark writes its log meanwhile
    report, planned = run.reader.reportLatestOffset(), run.plan(end)
    assert (report["lag"], ranges_of(planned)) == (0, [[OffsetRange(A, 5, 20)]])
    assert len(scripted.seen(STATS)) == before


def test_start_with_a_logged_batch_asks_for_bounds_once(scripted):
    scripted.on(STATS, stats({A: (0, 20), B: (0, 5)}, MARK))
    run = Run(scripted.address, log({A: 5, B: 5}), **QUICK)
    assert ranges_of(run.plan(log({A: 20, B: 5}))) == [[OffsetRange(A, 5, 20)]]
    assert len(scripted.seen(STATS)) == 1

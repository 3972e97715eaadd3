"""A stream through outages that a test scripts: masters that are away, name servers that do not answer, starts that repeat."""

from __future__ import annotations

import itertools
import json

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    CheckpointMismatch,
    ConnectionLost,
    DataLossError,
    OffsetError,
    OptionError,
    RouteNotFound,
)
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source.planning import TriggerLimits
from rocketmq_spark.spark.source.recreated_topics import RecreationWatch
from rocketmq_spark.spark.source.stream import Stream
from tests.mockbroker import MockBroker, close, eventually, never, ok, refuse, topic_config
from tests.reading import Run, canonical, plan, positions, ranges_of, read
from tests.source.scripted import cluster, route, stats

A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)
QUICK = {"subscribe": "t", "numRetries": 0, "retryInterval": "10ms", "requestTimeout": "5s"}
ROUTE, STATS = Request.GET_ROUTEINFO_BY_TOPIC, Request.GET_TOPIC_STATS_INFO
SEARCH, CHECK = Request.SEARCH_OFFSET_BY_TIMESTAMP, Request.CHECK_CLIENT_CONFIG


@pytest.fixture
def scripted():
    """Name server and broker-a in one: topic ``t`` with one queue from 5 to 20."""
    with MockBroker() as broker:
        broker.on(ROUTE, route({"broker-a": {0: broker.address}}))
        broker.on(STATS, stats({A: (5, 20)}))
        yield broker
    session.close_all()


@pytest.fixture(params=["a slave", "a slave that acts as master"])
def master_gone(request):
    """Lets only a slave be left, which has these offsets."""

    def gone(broker, low, high):
        if request.param == "a slave":
            broker.on(ROUTE, route({"broker-a": {1: broker.address}}))
        else:  # supportActingMaster: the name server gives it the id of the master, and no write permission
            broker.on(ROUTE, route({"broker-a": {0: broker.address}}, perm=4, acting=True))
            broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker}, 1))
        broker.on(STATS, stats({A: (low, high)}))

    return gone


def log(position, **more):
    found = {**more, "topics": {"t": {"broker-a": {"0": position}}}, "v": 1}
    return json.dumps(found, separators=(",", ":"))


# --- only a master says what is lost


def test_a_slave_s_minimum_is_no_retention(master_gone, scripted, caplog):
    master_gone(scripted, 9, 20)
    run = Run(scripted.address, log(6), failOnDataLoss="warn", **QUICK)
    (task,) = run.plan(log(15))
    assert ranges_of([task]) == [[OffsetRange(A, 6, 15)]]
    assert "cannot be read any more" not in caplog.text
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}))
    (task,) = Run(scripted.address, log(6), failOnDataLoss="warn", **QUICK).plan(log(15))
    assert ranges_of([task]) == [[OffsetRange(A, 9, 15)]]


@pytest.mark.parametrize(
    "begin",
    [
        lambda mq, **o: Run(mq, startingOffsets="earliest", **o),
        read,
        lambda mq, **o: Run(mq, log(10), available_now=True, **o).latest(),
    ],
    ids=["stream", "batch", "run to the end"],
)
def test_start_with_only_a_slave_alive_waits_for_its_master(master_gone, scripted, begin):
    master_gone(scripted, 9, 12)
    with pytest.raises(BrokerNotFound) as caught:
        begin(scripted.address, readDeadline="50ms", **QUICK)
    for part in ("only slaves of broker-a are up", "may lack messages", "option 'readDeadline'"):
        assert part in str(caught.value)


def test_a_start_goes_on_when_the_master_is_there(scripted):
    slave, master = (route({"broker-a": {number: scripted.address}}) for number in (1, 0))
    scripted.on(ROUTE, [slave, slave, master])
    run = Run(scripted.address, startingOffsets="earliest", **QUICK)
    assert (run.positions, len(scripted.seen(ROUTE)) >= 3) == ({A: 5}, True)


def test_a_master_of_a_topic_that_may_not_be_written_to_is_one(scripted):
    """Where slaves may act for masters, its route looks like that of a slave that does."""
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, perm=4, acting=True))
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    run = Run(scripted.address, log(6), failOnDataLoss="warn", **QUICK)
    scripted.on(STATS, stats({A: (9, 20)}))
    (task,) = Run(scripted.address, log(6), failOnDataLoss="warn", **QUICK).plan(log(15))
    assert ranges_of([task]) == [[OffsetRange(A, 9, 15)]]
    assert run.positions == {A: 6}


@pytest.mark.parametrize(("newest_ms", "end"), [(99, 12), (100, 18)])
def test_slave_with_index_of_a_recreated_topic_is_not_believed(master_gone, scripted, newest_ms, end):
    """What it offers as new is older than what was read."""
    run = Run(scripted.address, log(12, marks={"t": {"broker-a": {"0": 100}}}), routeRefresh=0, **QUICK)
    master_gone(scripted, 0, 18)
    scripted.on(STATS, stats({A: (0, 18)}, newest_ms))
    for _ in range(3):
        found = positions(run.latest())
    assert found == {A: end}


def test_queue_known_only_from_a_slave_starts_with_its_master(scripted):
    run = Run(scripted.address, startingOffsets="earliest", routeRefresh=0, **QUICK)
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}, "broker-b": {1: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 25), B: (7, 9)}))
    eventually(lambda: positions(run.latest()) == {A: 25})
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 25), B: (2, 9)}))
    eventually(lambda: B in positions(run.latest()))
    assert json.loads(run.latest())["start"]["t"]["broker-b"] == {"0": 2}


def test_a_run_to_the_end_does_not_end_where_a_slave_s_copy_does(master_gone, scripted, caplog):
    run = Run(scripted.address, log(6), available_now=True, readDeadline="50ms", routeRefresh=0, **QUICK)
    master_gone(scripted, 5, 10)
    eventually(lambda: positions(run.latest()) == {A: 10})  # as far as the slave has it
    run.offset = log(10)
    with pytest.raises(
        BrokerNotFound,
        match=r"no broker answers for t/broker-a/0, which this run must .*: its master is down, and the slave",
    ):
        eventually(lambda: run.latest() != log(10))
    assert "cannot be read any more" not in caplog.text


def test_available_now_run_logs_once_for_which_broker_it_waits(scripted, caplog):
    """Each attempt polls the other broker without an error."""
    with MockBroker({STATS: stats({MessageQueue("t", "broker-b", 0): (0, 10)})}) as other:
        both = {"broker-a": {0: scripted.address}, "broker-b": {0: other.address}}
        scripted.on(ROUTE, route(both))
        run = Run(scripted.address, log(6), available_now=True, readDeadline="2s", routeRefresh=0, **QUICK)
        run.latest()
        scripted.on(ROUTE, route({"broker-a": both["broker-a"]}))
        polls = len(scripted.seen(STATS))
        with pytest.raises(BrokerNotFound, match="no broker answers for t/broker-b/0, which this run must read"):
            eventually(lambda: run.latest() == "")
        assert len(scripted.seen(STATS)) > polls + 3
    assert caplog.text.count("no broker answers for t/broker-b/0") == 1


def test_second_available_now_run_has_ends_of_its_own(scripted):
    """The first run ends before the last message, and brokers report the same bounds in both."""
    run = Run(scripted.address, log(6), available_now=True, **QUICK)
    scripted.on(STATS, stats({A: (5, 25)}))
    polls = len(scripted.seen(STATS))
    eventually(lambda: run.latest() != run.offset and len(scripted.seen(STATS)) > polls)
    run.offset = run.latest()
    assert run.positions == {A: 20}
    assert run.latest() == run.offset
    run.reader.prepareForTriggerAvailableNow()
    assert positions(run.latest()) == {A: 25}


def test_available_now_run_logs_that_it_ends_without_lost_broker(scripted, caplog):
    """Its positions stay: the next run goes on there."""
    known = '{"topics":{"t":{"broker-a":{"0":16},"broker-b":{"0":6}}},"v":1}'
    run = Run(scripted.address, known, available_now=True, routeRefresh=0, **QUICK)
    for _ in range(2):
        run.offset = run.latest()
        assert run.positions == {A: 20, B: 6}
    said = [record.getMessage() for record in caplog.records if "cannot read now" in record.getMessage()]
    assert said == [
        "the run ends without queues that it cannot read now: t/broker-b/0 (the route does not name its broker)"
    ]


def test_a_broker_that_hangs_is_left_out_of_a_batch(scripted):
    """A batch with its queues would wait for it, and the others' messages with that batch."""
    with MockBroker({STATS: stats({B: (0, 100)})}) as hanging:
        scripted.on(ROUTE, route({"broker-a": {0: scripted.address}, "broker-b": {0: hanging.address}}))
        patient = {**QUICK, "requestTimeout": "60s"}  # so that it hangs, and does not fail, for the whole test
        run = Run(scripted.address, startingOffsets="earliest", maxOffsetsPerTrigger=20, **patient)
        run.offset = run.ahead()
        before = run.positions
        assert 0 < before[B] < 100
        hanging.on(STATS, never)
        scripted.on(STATS, stats({A: (5, 30)}))
        eventually(lambda: positions(run.latest())[B] == before[B])  # it was heard a moment ago
        while run.positions[A] < 30:
            run.offset = run.ahead()
            assert run.positions[B] == before[B]
        hanging.on(STATS, stats({B: (0, 100)}))
        hanging.drop()
        eventually(lambda: positions(run.latest())[B] > before[B])


# --- what a stream tells of itself


def test_what_is_away_is_told_with_the_ends(scripted):
    both = route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}})
    scripted.on(ROUTE, both)
    scripted.on(STATS, stats({A: (5, 20), B: (0, 9)}))
    known = '{"topics":{"t":{"broker-a":{"0":16},"broker-b":{"0":6}}},"v":1}'
    run = Run(scripted.address, known, routeRefresh=0, maxOffsetsPerTrigger=1, **QUICK)
    run.latest()
    told = run.reader.reportLatestOffset()
    assert told["topics"] == {"t": {"broker-a": {"0": 20}, "broker-b": {"0": 9}}}
    assert (told["lag"], told["behindMs"], told["queues"], told["queuesAway"], told["brokersAway"]) == (
        5,
        None,
        2,
        0,
        [],
    )
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 20)}))
    eventually(lambda: run.latest() and run.reader.reportLatestOffset()["brokersAway"] == ["broker-b"])
    told = run.reader.reportLatestOffset()
    assert (told["lag"], told["queues"], told["queuesAway"]) == (3, 1, 1)
    assert told["losses"] == {}


def test_a_report_asks_brokers_nothing_that_a_plan_does_not_ask(scripted):
    run = Run(scripted.address, log(6), **QUICK)
    run.latest()
    before = len(scripted.requests)
    for _ in range(3):
        assert run.reader.reportLatestOffset()["lag"] == 0
    assert {command.code for command in scripted.requests[before:]} <= {STATS}


def test_stream_waiting_for_more_messages_pauses_between_queries(scripted):
    """Whatever comes meanwhile: each message is a new answer of the broker, and no reason to ask again at once."""
    ends, slept = itertools.count(20), []
    scripted.on(STATS, lambda call: stats({A: (5, next(ends))}))
    given = {"nameServer": scripted.address, "startingOffsets": "earliest", "maxTriggerDelay": "1h", **QUICK}
    options = options_table.parse(given).for_role("stream source")
    stream = Stream(options, Clock(sleep=slept.append))
    wanted = TriggerLimits(min_offsets=1000)
    begin = stream.latestOffset(stream.initialOffset(), wanted)
    eventually(lambda: stream.latestOffset(begin, wanted) is begin and slept[-1:] == [0.1])
    slept.clear()
    for _ in range(20):
        assert stream.latestOffset(begin, wanted) is begin
    assert slept == [0.1] * 20
    assert stream.latestOffset(begin, TriggerLimits()) is not begin


def test_without_a_sample_a_batch_is_small_and_one_line_says_why(scripted, caplog):
    """The broker tells offsets, and then nothing more."""
    scripted.on(STATS, stats({A: (0, 50_000_000)}))
    scripted.on(Request.PULL_MESSAGE, refuse(Response.SYSTEM_BUSY, "busy"))
    run = Run(scripted.address, startingOffsets="earliest", maxBytesPerTrigger="64m", **QUICK)
    for end in (16, 32):
        run.offset = run.latest()
        assert run.positions == {A: end}
    assert caplog.text.count("'maxBytesPerTrigger' is 67108864, but no broker returned a sample") == 1


# --- starts


def stream_begins(mq, **options):
    return Run(mq, **options).positions[A]


def batch_begins(mq, **options):
    ((found,),) = plan(mq, **options)
    return found.start


@pytest.mark.parametrize("begins", [stream_begins, batch_begins])
def test_broker_that_leaves_during_start_lookup_is_waited_for(scripted, begins):
    """It comes back at another address."""
    given = {**QUICK, "startingTimestamp": "1000"}
    scripted.on(SEARCH, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(Exception, match=r"tried \d+ times in .*: busy"):
        begins(scripted.address, readDeadline="3s", **given)
    session.close_all()
    with MockBroker() as elsewhere:
        elsewhere.on(SEARCH, ok(offset=11))
        elsewhere.on(STATS, stats({A: (5, 20)}))
        scripted.on(SEARCH, close)
        scripted.on(ROUTE, [route({"broker-a": {0: server.address}}) for server in (scripted, elsewhere)])
        assert begins(scripted.address, **given) == 11


@pytest.mark.parametrize("begins", [stream_begins, batch_begins])
def test_filter_check_on_a_busy_broker_is_repeated(scripted, begins):
    scripted.on(Request.GET_TOPIC_CONFIG, topic_config())
    scripted.on(CHECK, [refuse(Response.SYSTEM_BUSY, "busy"), ok()])
    assert begins(scripted.address, **QUICK, sql="a > 1", startingOffsets="earliest") == 5 * bool(scripted.seen(CHECK))


def test_wait_for_a_master_outlasts_silent_name_servers(scripted):
    slave, master = (route({"broker-a": {number: scripted.address}}) for number in (1, 0))
    scripted.on(ROUTE, [slave, close, close, master])
    assert (batch_begins(scripted.address, **QUICK), len(scripted.seen(ROUTE)) >= 4) == (5, True)


def test_unfinished_first_batch_begins_where_it_was_logged(scripted):
    """A queue that came meanwhile is not named by the starting offsets, which serve no more."""
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=2))
    scripted.on(STATS, stats({A: (5, 20), A._replace(queue_id=1): (0, 4)}))
    given = {**QUICK, "startingOffsets": '{"t":{"broker-a":{"0":7}}}'}
    end = log(12, start={"t": {"broker-a": {"0": 7}}})
    run = Run(scripted.address, **given)
    assert ranges_of(run.plan(end)) == [[OffsetRange(A, 7, 12)]]
    run.offset = end
    assert positions(run.ahead()) == {A: 20, A._replace(queue_id=1): 4}
    with pytest.raises(OffsetError, match="option 'startingOffsets' must name every queue; it lacks t/broker-a/1"):
        Run(scripted.address, **given).latest()


@pytest.mark.parametrize("first", ["latest", "plan"])
def test_a_run_that_goes_on_waits_for_a_name_server_that_is_away(scripted, first):
    there = route({"broker-a": {0: scripted.address}})
    scripted.on(ROUTE, [close, close, close, there])
    run = Run(scripted.address, log(6), **QUICK)
    if first == "plan":
        assert ranges_of(run.plan(log(15))) == [[OffsetRange(A, 6, 15)]]
    assert positions(run.ahead()) == {A: 20}


def test_what_stays_away_is_named_by_its_first_cause(scripted):
    scripted.on(ROUTE, close)
    with pytest.raises(ConnectionLost, match=r"no name server answers: .*; tried \d+ times in .* s \(at 127"):
        Run(scripted.address, log(6), readDeadline="2s", **QUICK).latest()


def test_unfinished_batch_waits_for_its_broker_and_names_remedy(scripted):
    scripted.on(STATS, close)
    with pytest.raises(ConnectionLost) as caught:
        Run(scripted.address, log(6), readDeadline="300ms", **QUICK).plan(log(15))
    text = str(caught.value)
    assert "topic t, queue t/broker-a/0" in text
    assert "Nothing is lost: a task waits for its broker" in text
    assert "rocketmq-spark checkpoint rewind" in text


def test_environment_keeps_its_queue_after_restart_in_an_outage(scripted):
    both = {"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}}
    scripted.on(ROUTE, route(both))
    scripted.on(STATS, stats({A: (5, 20), B: (0, 70)}))
    run = Run(scripted.address, startingOffsets="earliest", environment=1, **QUICK)
    run.offset = run.ahead()
    assert json.loads(run.offset)["environment"] == {"t": {"broker-a": {"0": 1}}}
    scripted.on(ROUTE, route({"broker-b": {0: scripted.address}}))
    session.close_all()
    again = Run(scripted.address, run.offset, environment=1, **QUICK)
    for _ in range(3):
        assert again.latest() == run.offset
    session.close_all()
    with pytest.raises(OptionError, match="option 'environment' is 2; expected a whole number from 1 to 1"):
        Run(scripted.address, startingOffsets="earliest", environment=2, **QUICK).latest()


@pytest.mark.parametrize("logged", ["finished", "batch 0"])
def test_available_now_run_takes_no_foreign_queue_in_an_outage(scripted, logged):
    """Spark says what is to be read before it says where the query stood."""
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 20), B: (0, 70)}))
    run = Run(scripted.address, startingOffsets="earliest", environment=1, **QUICK)
    end = run.ahead()
    scripted.on(ROUTE, route({"broker-b": {0: scripted.address}}))
    session.close_all()
    again = Run(scripted.address, end if logged == "finished" else None, available_now=True,
                startingOffsets="earliest", environment=1, **QUICK)  # fmt: skip
    if logged == "batch 0":
        assert ranges_of(again.plan(end)) == [[OffsetRange(A, 5, 20)]]
        again.offset = end
    for _ in range(2):
        assert positions(again.latest()) == {A: 20}
        assert json.loads(again.latest())["environment"] == {"t": {"broker-a": {"0": 1}}}


def test_old_first_batch_is_not_read_by_another_environment(scripted):
    """It says nothing of an environment, and a start that was not finished has nothing else to compare."""
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 20), B: (0, 70)}))
    end = log(12, start={"t": {"broker-a": {"0": 7}}})
    given = {**QUICK, "startingOffsets": "earliest"}
    with pytest.raises(CheckpointMismatch, match="records no environment and has positions of t/broker-a/0"):
        Run(scripted.address, environment=2, **given).plan(end)
    assert ranges_of(Run(scripted.address, environment=1, **given).plan(end)) == [[OffsetRange(A, 7, 12)]]


def test_a_batch_that_begins_before_what_is_kept_tells_the_loss(scripted, caplog):
    begin = {**QUICK, "startingOffsets": '{"t":{"broker-a":{"0":2}}}'}
    with pytest.raises(DataLossError, match="3 offsets cannot be read any more: t/broker-a/0 offsets 2 to 5"):
        plan(scripted.address, **begin)
    assert plan(scripted.address, failOnDataLoss="warn", **begin) == [[OffsetRange(A, 5, 20)]]
    assert "3 offsets cannot be read any more" in caplog.text


def test_available_now_run_reads_what_exists_without_waiting(scripted):
    run = Run(scripted.address, log(6), available_now=True, minOffsetsPerTrigger=1000, **QUICK)
    assert positions(run.latest()) == {A: 20}


def test_a_run_to_the_end_tells_a_loss_at_its_end_once(scripted, caplog):
    """What it had to read went away with the broker's store; the next plans know that."""
    run = Run(scripted.address, log(6), available_now=True, failOnDataLoss="warn", **QUICK)
    scripted.on(STATS, stats({A: (5, 12)}))
    run.offset = run.ahead()
    for _ in range(2):
        assert positions(run.latest()) == {A: 12}
        run.offset = run.latest()
    assert caplog.text.count("cannot be read any more") == 1


@pytest.mark.parametrize("layout", [{}, {"environments": 4}], ids=["by number alone", "of four"])
def test_environment_position_counts_all_queues_of_a_topic(scripted, layout):
    """The third queue is the third environment's, however few are assigned beside it."""
    four = [MessageQueue("t", "broker-a", number) for number in range(4)]
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, queues=4))
    scripted.on(STATS, stats(dict.fromkeys(four, (0, 10))))

    def start(environment, *numbers):
        given = {**QUICK, **layout, "subscribe": None, "assign": {"t": {"broker-a": numbers}}}
        return Run(scripted.address, startingOffsets="earliest", environment=environment, **given)

    run = start(3, 2)
    assert run.positions == {four[2]: 0}
    assert positions(run.ahead()) == {four[2]: 10}
    for environment, numbers, others in ((1, (2, 3), "t/broker-a/2, t/broker-a/3"), (3, (0, 2), "t/broker-a/0")):
        session.close_all()
        with pytest.raises(
            OptionError, match=f"'assign' names {others}, which environment '{environment}' does not own"
        ):
            start(environment, *numbers).latest()


def test_environment_waits_for_assigned_queue_of_absent_broker(scripted):
    """Of the queues that are left there, the environment has none."""
    both = route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}})
    scripted.on(ROUTE, both)
    scripted.on(STATS, stats({A: (5, 20), B: (0, 70)}))
    layout = '{"one":{"broker-a":[0]},"two":{"broker-b":[0]}}'
    given = {
        **QUICK,
        "subscribe": None,
        "assign": {"t": {"broker-a": [0]}},
        "environment": "one",
        "environments": layout,
    }
    run = Run(scripted.address, startingOffsets="earliest", routeRefresh=0, **given)
    run.offset = run.ahead()
    scripted.on(ROUTE, route({"broker-b": {0: scripted.address}}))
    for _ in range(3):
        assert positions(run.latest()) == {A: 20}
    scripted.on(STATS, stats({A: (5, 25), B: (0, 70)}))
    scripted.on(ROUTE, both)
    eventually(lambda: positions(run.latest()) == {A: 25})


def test_continued_run_waits_for_assigned_queue_of_absent_broker(scripted, caplog):
    """One that there are no positions of may be a slip of the pen."""
    both = route({"broker-a": {0: scripted.address}, "broker-b": {0: scripted.address}})
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}))
    scripted.on(STATS, stats({A: (5, 20), B: (0, 70)}))
    given = {**QUICK, "subscribe": None, "assign": {"t": {"broker-a": [0], "broker-b": [0]}}}
    logged = json.dumps({"topics": {"t": {"broker-a": {"0": 6}, "broker-b": {"0": 60}}}, "v": 1})
    run = Run(scripted.address, logged, routeRefresh=0, **given)
    assert positions(run.ahead()) == {A: 20, B: 60}
    assert "the stream waits for queues that it cannot read now: t/broker-b/0" in caplog.text
    to_the_end = Run(scripted.address, logged, available_now=True, routeRefresh=0, **given)
    assert positions(to_the_end.latest()) == {A: 20, B: 60}
    assert "the run ends without queues that it cannot read now: t/broker-b/0" in caplog.text
    scripted.on(ROUTE, both)
    eventually(lambda: positions(run.latest()) == {A: 20, B: 70})
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}))
    for begin in (None, log(6)):
        session.close_all()
        with pytest.raises(OptionError, match="option 'assign' names queues that do not exist: t/broker-b/0"):
            Run(scripted.address, begin, **given).latest()


def test_continued_run_waits_for_read_permission_of_its_topic(scripted):
    """What starts anew is told at once."""
    shut, there = (route({"broker-a": {0: scripted.address}}, perm=perm) for perm in (2, 6))
    scripted.on(ROUTE, [shut, shut, shut, there])
    run = Run(scripted.address, log(6), routeRefresh=0, **QUICK)
    assert positions(run.ahead()) == {A: 20}
    scripted.on(ROUTE, shut)
    for begin in (
        lambda: Run(scripted.address, startingOffsets="earliest", **QUICK).latest(),
        lambda: Run(scripted.address, log(6), readDeadline="300ms", **QUICK).latest(),
        lambda: Run(scripted.address, log(6), available_now=True, readDeadline="300ms", **QUICK).latest(),
    ):
        session.close_all()
        with pytest.raises(
            RouteNotFound, match=r"no queue of the topic is readable: no read permission.*topic t"
        ) as caught:
            begin()
        assert "Create it" not in str(caught.value)


@pytest.mark.parametrize("fails", ["question", "marks"])
def test_a_first_plan_that_could_not_see_all_is_none(scripted, fails, monkeypatch):
    """The next one takes what is unread, too, instead of waiting for more."""
    run = Run(scripted.address, log(5), minOffsetsPerTrigger=100, maxTriggerDelay="15m", **QUICK)
    if fails == "question":
        scripted.on(STATS, stats({A: (0, 20)}, newest_ms=1000))
        scripted.on(SEARCH, [refuse(2, "[PCBUSY] busy"), ok(offset=5)])
        run.offset = canonical({**json.loads(log(5)), "marks": {"t": {"broker-a": {"0": 500}}}})
    else:
        real, failures = RecreationWatch.newest_store_ms, [CallTimeout("a broker hangs")]

        def marks(*arguments):
            if failures:
                raise failures.pop()
            return real(*arguments)

        monkeypatch.setattr(RecreationWatch, "newest_store_ms", marks)
    assert run.latest() == run.offset
    assert positions(run.ahead()) == {A: 20}


# --- what is said


def test_a_loss_is_told_once_while_a_batch_waits_for_more(scripted, caplog):
    waiting = {**QUICK, "failOnDataLoss": "warn", "minOffsetsPerTrigger": 1000}
    run = Run(scripted.address, log(20), **waiting)
    assert run.latest() == log(20)
    scripted.on(STATS, stats({A: (5, 15)}))
    eventually(lambda: run.latest() == log(20) and "cannot be read any more" in caplog.text)
    for _ in range(4):
        assert run.latest() == log(20)
    assert caplog.text.count("cannot be read any more") == 1
    polls = len(scripted.seen(STATS))
    scripted.on(STATS, stats({A: (5, 18)}))  # the new topic grows
    eventually(lambda: run.latest() == log(20) and len(scripted.seen(STATS)) > polls + 2)
    assert caplog.text.count("cannot be read any more") == 1


def test_queues_that_may_not_be_read_any_more_are_told_of(scripted, caplog):
    run = Run(scripted.address, log(20), routeRefresh=0, **QUICK)
    assert run.latest() == log(20)
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}, perm=2))
    eventually(lambda: run.latest() and "cannot read now: t/broker-a/0 (no read permission)" in caplog.text)
    scripted.on(ROUTE, route({"broker-a": {0: scripted.address}}))
    eventually(lambda: run.latest() and "the stream can read these queues again: t/broker-a/0" in caplog.text)
    assert caplog.text.count("t/broker-a/0") == 2

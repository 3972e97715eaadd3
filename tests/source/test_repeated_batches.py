"""A batch that is repeated has the tasks of its first attempt, whatever was lost and whatever options changed since.

Ids of exactly-once contain the number of a task, so a row that another task reads would be stored again.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import DataLossError, OffsetError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source import partitioning
from rocketmq_spark.spark.source.partitioning import Partitioning
from tests.mockbroker import NO_ROUTE, MockBroker, refuse
from tests.reading import Run, ranges_of
from tests.scale import examples
from tests.source.scripted import cluster, route, stats

QUEUES = [MessageQueue(topic, "broker-a", number) for topic in "tu" for number in range(4)]
ROUTE, STATS = Request.GET_ROUTEINFO_BY_TOPIC, Request.GET_TOPIC_STATS_INFO
QUICK = {"subscribe": "t,u", "numRetries": 0, "requestTimeout": "5s", "routeRefresh": 0}
NOW = Partitioning("averagely", 500_000, 20_000, 10_000)


def user_strategy(consumer, queues, consumers, **config):
    return queues if consumer == consumers[0] else []


USERS = f"{__name__}:user_strategy"


@pytest.fixture(scope="module")
def broker():
    """Name server and broker-a in one; ``expose`` says which queues it has."""
    with MockBroker() as one:
        one.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": one}))
        yield one
    session.close_all()


def expose(broker, bounds):
    """The broker has topics with these queues alone."""
    there, topics = route({"broker-a": {0: broker.address}}, queues=4), {queue.topic for queue in bounds}

    def of_topic(call):
        topic = call.ext("topic")
        mine = {queue: of for queue, of in bounds.items() if queue.topic == topic}
        return stats(mine) if mine else refuse(Response.TOPIC_NOT_EXIST, "no such topic")

    broker.on(ROUTE, lambda call: there if call.ext("topic") in topics else NO_ROUTE)
    broker.on(STATS, of_topic)


def log(positions):
    nested = {}
    for queue, position in positions.items():
        nested.setdefault(queue.topic, {}).setdefault("broker-a", {})[str(queue.queue_id)] = position
    return json.dumps({"topics": nested, "v": 1}, separators=(",", ":"))


BEGIN = log(dict.fromkeys(QUEUES, 0))


def first_attempt(broker, sizes, **options):
    """The end of a batch of these queues as it is logged, and its tasks."""
    expose(broker, {queue: (0, size) for queue, size in zip(QUEUES, sizes, strict=True)})
    run = Run(broker.address, BEGIN, **QUICK, **options)
    end = run.latest()
    return end, ranges_of(run.plan(end))


def placed(tasks):
    return {
        (r.queue, offset): number for number, task in enumerate(tasks) for r in task for offset in range(r.start, r.end)
    }


options = st.fixed_dictionaries(
    {},
    optional={
        "numPartitions": st.integers(1, 9),
        "minPartitions": st.integers(1, 12),
        "maxRecordsPerPartition": st.integers(3, 60),
        "allocationStrategy": st.sampled_from(["averagely", "averagelyByCircle", "consistentHash"]),
    },
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 40), min_size=8, max_size=8),
    options,
    options,
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
    st.sampled_from(["", "t", "u"]),
    st.sets(st.sampled_from(QUEUES), max_size=2),
    st.integers(1, 50),
)
def test_each_row_that_remains_keeps_the_number_of_its_task(
    broker, sizes, before, after, minimums, deleted, went_back, rows_per_task
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioning, "ROWS_PER_TASK", rows_per_task)  # of another release
        end, first = first_attempt(broker, sizes, **before)
    if end == BEGIN:
        return
    bounds = {}
    for queue, size, minimum in zip(QUEUES, sizes, minimums, strict=True):
        if queue.topic != deleted:
            bounds[queue] = (0, size - 1) if queue in went_back and size else (min(minimum, size), size)
    expose(broker, bounds)
    again = ranges_of(Run(broker.address, BEGIN, failOnDataLoss="ignore", **QUICK, **after).plan(end))
    remains = placed(again)
    assert remains == {row: number for row, number in placed(first).items() if row in remains}
    assert len(again) == len(first), "the tasks of the next source of a union are numbered after these"
    left = {
        (queue, offset)
        for queue, (low, high) in bounds.items()
        for offset in range(low, high)
        if queue not in went_back or not sizes[QUEUES.index(queue)]
    }
    assert remains.keys() == left & placed(first).keys()


@pytest.mark.parametrize(
    "changed",
    [
        {"numPartitions": 3},
        {"minPartitions": 4},
        {"maxRecordsPerPartition": 10},
        {"allocationStrategy": "averagelyByCircle", "numPartitions": 2},
        {"allocationStrategy": "config", "allocationConfig": '{"t":{"broker-a":[3]}}'},
        {"allocationStrategy": USERS, "numPartitions": 2},
    ],
)
def test_changed_options_do_not_change_a_repeated_batch(broker, changed, caplog):
    end, first = first_attempt(broker, [20] * 8, numPartitions=5, minPartitions=7)
    assert ranges_of(Run(broker.address, BEGIN, **QUICK, **changed).plan(end)) == first
    assert "what decided its tasks" not in caplog.text


def test_options_of_the_first_attempt_that_are_gone_still_count(broker):
    given = {
        "numPartitions": 3,
        "minPartitions": 9,
        "maxRecordsPerPartition": 15,
        "allocationStrategy": "consistentHash",
    }
    end, first = first_attempt(broker, [20] * 8, **given)
    assert len(first) > 8
    assert ranges_of(Run(broker.address, BEGIN, **QUICK).plan(end)) == first


@pytest.mark.parametrize(
    "changed", [{"minPartitions": 4}, {"numPartitions": 2, "allocationStrategy": "consistentHash"}]
)
@pytest.mark.parametrize("available_now", [False, True])
def test_changed_options_with_nothing_new_give_no_batch(broker, changed, available_now):
    end, _ = first_attempt(broker, [3] * 8)
    assert "plan" in json.loads(end)
    again = Run(broker.address, end, available_now=available_now, **QUICK, **changed)
    assert again.latest() == end
    older = json.loads(end)
    del older["plan"]
    older = json.dumps(older, separators=(",", ":"))
    assert Run(broker.address, older, **QUICK, **changed).latest() == older


def test_the_next_batch_follows_the_present_options(broker):
    end, _ = first_attempt(broker, [3] * 8)
    expose(broker, dict.fromkeys(QUEUES, (0, 30)))
    run = Run(broker.address, end, minPartitions=16, **QUICK)
    assert len(run.plan(run.latest())) == 16


def test_a_loss_fails_the_query_before_it_has_tasks(broker):
    end, _ = first_attempt(broker, [20] * 8)
    expose(broker, dict.fromkeys(QUEUES, (5, 20)))
    with pytest.raises(DataLossError):
        Run(broker.address, BEGIN, **QUICK).plan(end)


# --- ends of other releases


def older(end):
    return json.dumps({name: value for name, value in json.loads(end).items() if name != "plan"})


def test_an_end_without_a_plan_is_split_anew_with_one_warning(broker, caplog):
    end, _ = first_attempt(broker, [20] * 8)
    run = Run(broker.address, BEGIN, minPartitions=4, **QUICK)
    assert len(run.plan(older(end))) == 4
    run.plan(older(end))
    (warning,) = [r for r in caplog.records if "what decided its tasks" in r.getMessage()]
    assert warning.levelno == logging.WARNING
    for part in ("numPartitions", "minPartitions", "rowsPerTask", "deliveryGuarantee=exactly-once may store rows"):
        assert part in warning.getMessage()


def test_an_older_batch_of_one_row_is_no_warning(broker, caplog):
    end, first = first_attempt(broker, [1, *[0] * 7])
    assert ranges_of(Run(broker.address, BEGIN, minPartitions=4, **QUICK).plan(older(end))) == first
    assert "what decided its tasks" not in caplog.text


def test_an_end_says_all_that_decides_its_tasks():
    """Also defaults and constants, which another release may change."""
    assert NOW.to_json() == {
        "allocationStrategy": "averagely",
        "maxRecordsPerPartition": 500_000,
        "maxTasks": 10_000,
        "rowsPerTask": 20_000,
    }


texts = st.text("ab-é", min_size=1, max_size=3)
plans = st.builds(
    Partitioning,
    st.sampled_from(["averagely", "averagelyByCircle", "machineRoomNearby", "environment"]),
    st.integers(1, 1 << 40),
    st.integers(1, 99),
    st.integers(1, 99),
    num_partitions=st.none() | st.integers(1, 99),
    min_partitions=st.none() | st.integers(1, 99),
    allocation_config=st.none() | st.just('{"t":{"broker-a":[0]}}'),
    machine_rooms=st.lists(texts, max_size=3, unique=True).map(tuple),
    partition_rooms=st.lists(texts, max_size=3).map(tuple),
    environment=st.none() | texts,
    environments=st.none() | st.just('{"a":[0]}'),
)


@given(plans, plans)
def test_a_partitioning_comes_back_from_the_log_as_it_was(then, now):
    assert partitioning.logged_partitioning(json.loads(json.dumps(then.to_json())), now) == (then, [])


def test_what_an_end_does_not_say_is_as_in_the_present_options():
    plan = {**NOW.to_json(), "shuffle": "none"}
    del plan["rowsPerTask"]
    now = Partitioning("averagely", 7, 5, 6)
    assert partitioning.logged_partitioning(plan, now) == (replace(NOW, rows_per_task=5), ["rowsPerTask", "shuffle"])


def test_a_checkpoint_chooses_no_code_to_run():
    """A callable of the log is called only if the option names it, too."""
    plan = {**NOW.to_json(), "allocationStrategy": "os:system"}
    assert partitioning.logged_partitioning(plan, NOW) == (NOW, ["allocationStrategy"])
    named = replace(NOW, allocation_strategy=USERS)
    assert partitioning.logged_partitioning(named.to_json(), named) == (named, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("minPartitions", 0), ("rowsPerTask", "x"), ("maxRecordsPerPartition", True), ("allocationStrategy", "nosuch")],
)
def test_a_value_that_no_release_writes_is_an_error(name, value):
    with pytest.raises(OffsetError, match=f"plan/{name}: {value!r} cannot be used; expected"):
        partitioning.logged_partitioning({**NOW.to_json(), name: value}, NOW)


# --- batch 0, before which Spark asks for the start of the query again


def never_finished(broker, **options):
    """Batch 0 of both topics was logged and not finished. Returns its end and its tasks."""
    expose(broker, dict.fromkeys(QUEUES, (0, 20)))
    run = Run(broker.address, startingOffsets="earliest", **QUICK, **options)
    end = run.latest()
    return end, ranges_of(run.plan(end))


@pytest.mark.parametrize("available_now", [False, True])
@pytest.mark.parametrize("deleted", ["t", "u", "tu"])
def test_batch_0_goes_on_without_topics_that_were_deleted(broker, deleted, available_now, caplog):
    end, first = never_finished(broker)
    expose(broker, {queue: (0, 20) for queue in QUEUES if queue.topic not in deleted})
    again = Run(broker.address, available_now=available_now, failOnDataLoss="warn", **QUICK)
    remains = placed(ranges_of(again.plan(end)))
    assert remains == {row: number for row, number in placed(first).items() if row[0].topic not in deleted}
    assert "(topic deleted)" in caplog.text
    again.offset = end
    again.offset = again.latest()
    assert {queue.topic for queue in again.positions} == {*"tu"} - {*deleted}
    assert again.latest() == again.offset


def test_batch_0_of_a_deleted_topic_is_a_loss(broker):
    """The error names option ``failOnDataLoss``; to create the topic would not bring its messages back."""
    end, _ = never_finished(broker)
    expose(broker, {queue: (0, 20) for queue in QUEUES if queue.topic != "u"})
    with pytest.raises(DataLossError, match="topic deleted"):
        Run(broker.address, **QUICK).plan(end)


def test_batch_0_goes_on_without_an_assigned_queue_that_is_gone(broker):
    options = {**QUICK, "subscribe": None, "assign": '{"t":{"broker-a":[0,9]}}'}
    assigned = [MessageQueue("t", "broker-a", number) for number in (0, 9)]
    broker.on(ROUTE, route({"broker-a": {0: broker.address}}, queues=10))
    broker.on(STATS, stats(dict.fromkeys(assigned, (0, 20))))
    first = Run(broker.address, startingOffsets="earliest", **options)
    end = first.latest()
    expose(broker, {assigned[0]: (0, 20)})
    again = Run(broker.address, failOnDataLoss="warn", **options)
    assert ranges_of(again.plan(end)) == ranges_of(first.plan(end))


def test_a_new_query_fails_with_the_error_of_its_start(broker):
    expose(broker, {queue: (0, 20) for queue in QUEUES if queue.topic != "u"})
    new = Run(broker.address, startingOffsets="earliest", **QUICK)
    for _ in range(2):
        with pytest.raises(RouteNotFound, match="rocketmq-spark topic create u"):
            new.latest()

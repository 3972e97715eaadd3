"""How queues and ranges become Spark partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.localbroker import LocalBroker, servers
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.allocation import allocate
from rocketmq_spark.spark.compat import EqualTo, LessThan
from rocketmq_spark.spark.source import batch_reader as batch_reader_module
from rocketmq_spark.spark.source.batch_reader import PushdownReader
from tests.reading import Run, batch_reader, bodies, feed, plan, ranges_of, read, rows


@pytest.fixture(scope="module")
def rooms() -> Iterator[LocalBroker]:
    """Two brokers, one in each of two machine rooms, as the Java client names them; topic ``orders`` on both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "broker_names", lambda count: [f"room{i + 1}@broker-{i + 1}" for i in range(count)])
        cluster = LocalBroker(brokers=2, quiet=True)
    with cluster as mq:
        mq.create_topic("orders", 4)
        mq.bodies = {}  # type: ignore[attr-defined]
        for broker in mq.brokers:
            mine = [MessageQueue("orders", broker, i) for i in range(4)]
            mq.bodies[broker] = set(feed(mq, "orders", 12, queues=mine))  # type: ignore[attr-defined]
        yield mq


def queues(tasks) -> list[set[MessageQueue]]:
    return [{r.queue for r in task} for task in tasks]


def shares(mq: LocalBroker, topic: str, strategy: str, count: int, **config) -> list[set[MessageQueue]]:
    """What the strategy itself says, without the empty shares."""
    every = mq.admin.route(topic).readable_queues()
    consumers = [f"partition-{i:05d}" for i in range(count)]
    given = [set(allocate(strategy, consumer, every, consumers, **config)) for consumer in consumers]
    return [share for share in given if share]


@pytest.mark.parametrize("strategy", ["averagely", "averagelyByCircle", "consistentHash"])
def test_allocation_strategy__maps_queues_to_partitions(rooms, strategy):
    tasks = plan(rooms, subscribe="orders", allocationStrategy=strategy, numPartitions=3)
    assert queues(tasks) == shares(rooms, "orders", strategy, 3)
    found = read(rooms, subscribe="orders", allocationStrategy=strategy, numPartitions=3)
    assert Counter(bodies(found)) == Counter(set().union(*rooms.bodies.values()))


def test_allocation_strategy__differs_between_strategies(rooms):
    found = [
        queues(plan(rooms, subscribe="orders", allocationStrategy=name, numPartitions=3))
        for name in ("averagely", "averagelyByCircle", "consistentHash")
    ]
    assert found[0] != found[1] != found[2] != found[0]


def last_first(queues, consumers):
    """A strategy of a user: all to the last partition."""
    return {consumers[-1]: list(queues)}


def only_even(consumer, queues, consumers):
    """A strategy of a user that leaves queues out."""
    return [q for q in queues if q.queue_id % 2 == 0] if consumer == consumers[0] else []


def test_allocation_strategy__callable_logs_omitted_queues(rooms, caplog):
    name = f"{__name__}:only_even"
    tasks = plan(rooms, subscribe="orders", allocationStrategy=name, numPartitions=2)
    assert [{q.queue_id for q in task} for task in queues(tasks)] == [{0, 2}]
    (line,) = [r.getMessage() for r in caplog.records if "to no partition" in r.getMessage()]
    assert all(f"orders/{broker}/{i}" in line for broker in rooms.brokers for i in (1, 3))
    run = Run(rooms, subscribe="orders", allocationStrategy=name, startingOffsets="earliest")
    assert {queue.queue_id for queue in run.positions} == {0, 2}


def test_allocation_config__fixes_queues_by_hand(rooms):
    first, second = rooms.brokers
    config = {"orders": {first: [0, 1], second: [3]}}
    tasks = plan(rooms, subscribe="orders", allocationStrategy="config", allocationConfig=config, numPartitions=1)
    assert queues(tasks) == [{MessageQueue("orders", first, 0), MessageQueue("orders", first, 1),
                              MessageQueue("orders", second, 3)}]  # fmt: skip
    by_consumer = {
        "partition-00000": {"orders": {first: [2]}},
        "partition-00001": {"orders": {first: [2], second: [2]}},
    }
    tasks = plan(rooms, subscribe="orders", allocationStrategy="config", allocationConfig=by_consumer, numPartitions=2)
    # Given twice, planned once: by the first.
    assert queues(tasks) == [{MessageQueue("orders", first, 2)}, {MessageQueue("orders", second, 2)}]
    with pytest.raises(OptionError, match="allocationConfig"):
        plan(rooms, subscribe="orders", allocationStrategy="config")


def test_machine_rooms__reads_the_queues_of_these_rooms(rooms, caplog):
    first, second = rooms.brokers
    for room, broker in (("room1", first), ("room2", second)):
        found = read(rooms, subscribe="orders", allocationStrategy="machineRoom", machineRooms=room)
        assert Counter(bodies(found)) == Counter(rooms.bodies[broker])
    assert f"orders/{first}/0" in caplog.text
    both = read(rooms, subscribe="orders", allocationStrategy="machineRoom", machineRooms="room1,room2")
    assert Counter(bodies(both)) == Counter(set().union(*rooms.bodies.values()))


def test_partition_rooms__assign_queues_to_partitions_of_room(rooms):
    nearby = {"allocationStrategy": "machineRoomNearby", "numPartitions": 2}
    first, second = rooms.brokers
    tasks = plan(rooms, subscribe="orders", partitionRooms="room2,room1", **nearby)
    assert [{q.broker_name for q in task} for task in queues(tasks)] == [{second}, {first}]
    tasks = plan(rooms, subscribe="orders", partitionRooms="room1,room2", **nearby)
    assert [{q.broker_name for q in task} for task in queues(tasks)] == [{first}, {second}]
    # A room without partitions is read by all.
    tasks = plan(rooms, subscribe="orders", partitionRooms="room1,room1", **nearby)
    assert set().union(*queues(tasks)) == set(rooms.admin.route("orders").readable_queues())


@pytest.fixture
def filled(rocketmq, make_topic):
    """Four queues with a hundred messages each."""
    topic = make_topic(queues=4)
    return topic, set(feed(rocketmq, topic, 400))


def test_num_partitions__shares_the_queues_among_so_many(rocketmq, filled):
    topic, everything = filled
    assert len(plan(rocketmq, subscribe=topic)) == 1  # a trickle is one task
    for count in (1, 2, 3, 4):
        assert len(plan(rocketmq, subscribe=topic, numPartitions=count)) == count
    assert len(plan(rocketmq, subscribe=topic, numPartitions=9)) == 4  # no task without work
    assert Counter(bodies(read(rocketmq, subscribe=topic, numPartitions=3))) == Counter(everything)


def test_min_partitions__split_big_ranges(rocketmq, filled):
    topic, everything = filled
    tasks = plan(rocketmq, subscribe=topic, minPartitions=10)
    assert len(tasks) >= 10
    assert sum(r.size for task in tasks for r in task) == 400
    assert Counter(bodies(read(rocketmq, subscribe=topic, minPartitions=10))) == Counter(everything)


def test_max_records_per_partition__splits_what_is_larger(rocketmq, filled):
    topic, everything = filled
    tasks = plan(rocketmq, subscribe=topic, maxRecordsPerPartition=30)
    assert max(sum(r.size for r in task) for task in tasks) <= 30
    assert Counter(bodies(read(rocketmq, subscribe=topic, maxRecordsPerPartition=30))) == Counter(everything)


def test_environment__reads_the_queues_of_one_environment(rocketmq, make_topic):
    topic = make_topic(queues=4)
    there = {queue: set(feed(rocketmq, topic, 2, queues=[queue])) for queue in range(4)}
    for number in (1, 2, 4):
        assert Counter(bodies(read(rocketmq, subscribe=topic, environment=number))) == Counter(there[number - 1])
    for wrong in (0, 5, "x"):
        with pytest.raises(OptionError, match="environment"):
            read(rocketmq, subscribe=topic, environment=wrong)
    run = Run(rocketmq, subscribe=topic, environment=2, startingOffsets="earliest")
    assert {queue.queue_id for queue in run.positions} == {1}
    as_strategy = read(rocketmq, subscribe=topic, environment=3, allocationStrategy="environment")
    assert Counter(bodies(as_strategy)) == Counter(there[2])


def test_environments__are_counted_or_listed_with_their_queues(rocketmq, make_topic):
    topic = make_topic(queues=4)
    there = {queue: set(feed(rocketmq, topic, 2, queues=[queue])) for queue in range(4)}
    assert Counter(bodies(read(rocketmq, subscribe=topic, environment=2, environments=2))) == Counter(
        there[1] | there[3]
    )
    layout = {"dev": [0], "test": {"broker-a": [1, 2]}}
    assert Counter(bodies(read(rocketmq, subscribe=topic, environment="dev", environments=layout))) == Counter(there[0])
    assert Counter(bodies(read(rocketmq, subscribe=topic, environment="test", environments=layout))) == Counter(
        there[1] | there[2]
    )
    for wrong in ({"environment": 3, "environments": 2}, {"environment": "prod", "environments": layout}):
        with pytest.raises(OptionError, match="environment"):
            read(rocketmq, subscribe=topic, **wrong)
    with pytest.raises(OptionError, match="'environment'"):
        read(rocketmq, subscribe=topic, environments=2)


def test_predicate_pushdown__keeps_batch_topic_tags_from_broker(rocketmq, make_topic, monkeypatch):
    """Its index has the tags of the batch, which here are those of nobody."""
    monkeypatch.setattr(batch_reader_module, "is_pushdown_enabled", lambda: True)
    ordinary, batched = make_topic(queues=1), make_topic(queues=1, attributes={"queue.type": "BatchCQ"})
    sent = {topic: feed(rocketmq, topic, 4, tags="a") for topic in (ordinary, batched)}
    feed(rocketmq, ordinary, 4, tags="b")
    reader = batch_reader(rocketmq, subscribe=f"{ordinary},{batched}", predicatePushdown=True)
    reader.pushFilters([EqualTo(("tags",), "a")])
    found = {row["body"].decode() for row in rows(reader, reader.partitions())}
    assert found == {*sent[ordinary], *sent[batched]}


def test_predicate_pushdown__is_off_unless_asked_for(rocketmq, filled, monkeypatch):
    """Whether Spark asks is seen in tests/spark; here, which reader it gets when it does."""
    topic, _ = filled
    monkeypatch.setattr(batch_reader_module, "is_pushdown_enabled", lambda: True)
    assert not isinstance(batch_reader(rocketmq, subscribe=topic), PushdownReader)
    reader = batch_reader(rocketmq, subscribe=topic, predicatePushdown=True, numPartitions=4)
    assert isinstance(reader, PushdownReader)
    predicates = [EqualTo(("queueId",), 2), LessThan(("queueOffset",), 10)]
    assert list(reader.pushFilters(predicates)) == predicates
    ((only,),) = ranges_of(reader.partitions())
    assert (only.queue.queue_id, only.start) == (2, 0)
    assert 10 <= only.end < 100


def test_environment_mode__suffix_reads_topics_by_users_names(rocketmq, make_topic):
    plain, in_suffix = make_topic(queues=2), {"environment": "dev1", "environmentMode": "suffix"}
    for name in (f"{plain}_dev1", f"{plain}_dev2"):
        rocketmq.create_topic(name, 2)
    inside, _, _ = (set(feed(rocketmq, f"{plain}{end}", 4)) for end in ("_dev1", "_dev2", ""))
    for found in (read(rocketmq, subscribe=plain, **in_suffix), read(rocketmq, subscribePattern=plain, **in_suffix)):
        assert Counter(bodies(found)) == Counter(inside)
        assert {row["topic"] for row in found} == {plain}
    run = Run(rocketmq, subscribe=plain, startingOffsets="earliest", group=f"g-{plain}", **in_suffix)
    run.drain(inside)
    run.batch()
    assert {queue.topic for queue in run.positions} == {plain}
    progress = rocketmq.admin.consume_stats(f"g-{plain}_dev1", f"{plain}_dev1")
    assert sum(one.consumer_offset for one in progress.values()) == 4
    with pytest.raises(OptionError, match="has topics of its own: omit it"):
        read(rocketmq, subscribe=plain, allocationStrategy="environment", **in_suffix)

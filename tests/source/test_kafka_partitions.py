"""Partition numbers and names of topics in a checkpoint (options ``kafkaColumns`` and ``topicNames``)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.model import MessageQueue
from tests.mockbroker import MockBroker, never
from tests.reading import Run, batch_reader
from tests.source.scripted import route, stats

A = [MessageQueue("t", "broker-a", number) for number in range(4)]
B = [MessageQueue("t", "broker-b", number) for number in range(4)]
OPTIONS = {"kafkaColumns": True, "numRetries": 0}


@pytest.fixture
def scripted() -> Iterator[MockBroker]:
    """Name server and both brokers in one."""
    with MockBroker() as broker:
        yield broker
    session.close_all()


def expose(scripted: MockBroker, queues: int, *brokers: str, ends: int = 10) -> None:
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route({name: {0: scripted.address} for name in brokers}, queues=queues))
    scripted.on(Request.GET_TOPIC_STATS_INFO, stats(dict.fromkeys((*A[:queues], *B[:queues]), (0, ends))))


def numbers(partitions) -> dict[MessageQueue, int]:
    return {
        part.queue: number
        for each in partitions
        for part, number in zip(each.ranges, each.partition_numbers, strict=bool(each.partition_numbers))
    }


def test_assigned_queues_are_numbered_by_their_place_in_route(scripted):
    expose(scripted, 2, "broker-a", "broker-b")
    assign = {"assign": {"t": {"broker-a": [1], "broker-b": [1]}}, **OPTIONS}
    expected = {A[1]: 1, B[1]: 3}
    assert numbers(batch_reader(scripted.address, **assign).partitions()) == expected
    run = Run(scripted.address, startingOffsets="earliest", **assign)
    end = run.ahead()
    assert numbers(run.plan(end)) == expected
    assert json.loads(end)["partitions"] == {"t": [["broker-a", 0, 2], ["broker-b", 0, 2]]}


def test_a_stream_keeps_its_numbers_while_the_option_is_off(scripted):
    """Otherwise a broker that came meanwhile would change them."""
    expose(scripted, 2, "broker-b")
    on = Run(scripted.address, startingOffsets="earliest", subscribe="t", **OPTIONS)
    on.offset = on.ahead()
    expose(scripted, 2, "broker-a", "broker-b", ends=20)
    off = Run(scripted.address, on.offset, subscribe="t", numRetries=0)
    off.offset = off.ahead()
    assert json.loads(off.offset)["partitions"] == {"t": [["broker-b", 0, 2]]}
    expose(scripted, 2, "broker-a", "broker-b", ends=30)
    again = Run(scripted.address, off.offset, subscribe="t", **OPTIONS)
    assert numbers(again.plan(again.ahead())) == {B[0]: 0, B[1]: 1, A[0]: 2, A[1]: 3}


def begun_without(scripted: MockBroker) -> tuple[str, str]:
    """The start and the end of a batch that was logged without the option, when there was broker-b alone."""
    expose(scripted, 2, "broker-b")
    off = Run(scripted.address, startingOffsets="earliest", subscribe="t", numRetries=0)
    return off.offset, off.ahead()


def test_a_repeated_batch_and_the_next_one_have_the_same_numbers(scripted):
    """Its log entry has none, because the option was off; meanwhile a broker may come."""
    start, end = begun_without(scripted)
    on = Run(scripted.address, start, subscribe="t", routeRefresh=0, **OPTIONS)
    assert numbers(on.plan(end)) == {B[0]: 0, B[1]: 1}
    expose(scripted, 2, "broker-a", "broker-b", ends=20)
    assert numbers(on.plan(end)) == {B[0]: 0, B[1]: 1}
    on.offset = end
    logged = on.latest()
    runs = json.loads(logged)["partitions"]
    assert runs["t"][0] == ["broker-b", 0, 2]
    assert json.loads(logged) == {k: v for k, v in json.loads(end).items() if k != "start"} | {"partitions": runs}
    assert on.plan(logged) == []
    on.offset = logged
    assert numbers(on.plan(on.ahead())) == {B[0]: 0, B[1]: 1, A[0]: 2, A[1]: 3}
    on.offset = start
    assert numbers(on.plan(end)) == {B[0]: 0, B[1]: 1}, "also if it is planned again later"
    on.offset = logged
    assert numbers(on.plan(on.ahead())) == {B[0]: 0, B[1]: 1, A[0]: 2, A[1]: 3}


def test_queues_added_while_option_was_off_are_numbered_once(scripted):
    expose(scripted, 1, "broker-b")
    on = Run(scripted.address, startingOffsets="earliest", subscribe="t", **OPTIONS)
    begun = on.ahead()
    expose(scripted, 2, "broker-b", ends=20)
    off = Run(scripted.address, begun, subscribe="t", numRetries=0)
    end = off.ahead()
    assert json.loads(end)["partitions"] == {"t": [["broker-b", 0, 1]]}
    on = Run(scripted.address, begun, subscribe="t", routeRefresh=0, **OPTIONS)
    assert numbers(on.plan(end)) == {B[0]: 0, B[1]: 1}
    expose(scripted, 2, "broker-a", "broker-b", ends=30)
    on.offset = end
    on.offset = on.latest()
    assert json.loads(on.offset)["partitions"]["t"][:2] == [["broker-b", 0, 1], ["broker-b", 1, 1]]
    assert numbers(on.plan(on.ahead())) == {B[0]: 0, B[1]: 1, A[0]: 2, A[1]: 3}
    on.offset = begun
    assert numbers(on.plan(end)) == {B[0]: 0, B[1]: 1}, "also if it is planned again later"


def test_numbered_stream_does_not_wait_for_a_hanging_broker(scripted):
    with MockBroker({Request.GET_TOPIC_STATS_INFO: never}) as other:
        both = route({"a": {0: other.address}, "broker-a": {0: scripted.address}})
        alone = route({"broker-a": {0: scripted.address}})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [both, alone])
        scripted.on(Request.GET_TOPIC_STATS_INFO, stats({A[0]: (0, 10)}))
        begun = {"topics": {"t": {"broker-a": {"0": 1}}}, "partitions": {"t": [["broker-a", 0, 1]]}, "v": 1}
        run = Run(scripted.address, json.dumps(begun), subscribe="t", routeRefresh=0, **OPTIONS)
        session.routes(run.reader._options).get("t")
        assert numbers(run.plan(run.ahead())) == {A[0]: 0}
        assert other.seen(Request.GET_TOPIC_STATS_INFO) == []


def test_partition_numbers_of_a_repeated_batch_are_logged(scripted):
    """Otherwise a later run would number the queues by another route."""
    start, end = begun_without(scripted)
    on = Run(scripted.address, start, subscribe="t", **OPTIONS)
    on.plan(end)
    on.offset = end
    on.offset = on.latest()
    assert on.latest() == on.offset
    expose(scripted, 2, "broker-a", "broker-b", ends=20)
    later = Run(scripted.address, on.offset, subscribe="t", **OPTIONS)
    assert numbers(later.plan(later.ahead())) == {B[0]: 0, B[1]: 1, A[0]: 2, A[1]: 3}


def test_a_repeated_batch_has_the_numbers_of_its_log_entry(scripted):
    expose(scripted, 2, "broker-b")
    first = Run(scripted.address, startingOffsets="earliest", subscribe="t", **OPTIONS)
    end = first.ahead()
    expose(scripted, 2, "broker-a", "broker-b", ends=20)
    again = Run(scripted.address, first.offset, subscribe="t", **OPTIONS)
    assert numbers(again.plan(end)) == {B[0]: 0, B[1]: 1}
    again.offset = end
    assert again.latest() != end
    assert json.loads(again.latest())["topics"] != json.loads(end)["topics"], "no batch for the numbers alone"


def test_a_topic_that_is_no_longer_read_leaves_no_numbers_behind(scripted):
    expose(scripted, 2, "broker-a")
    begun = {"topics": {"t": {"broker-a": {"0": 1}}}, "partitions": {"t": [["broker-a", 0, 1]], "u": [["b", 0, 9]]}}
    run = Run(scripted.address, json.dumps({**begun, "v": 1}), subscribe="t", **OPTIONS)
    assert json.loads(run.ahead())["partitions"] == {"t": [["broker-a", 0, 1], ["broker-a", 1, 1]]}


def test_checkpoint_has_rocketmq_names_with_or_without_option(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: scripted.address}}))
    scripted.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("a_b", "broker-a", 0): (0, 10)}))
    dotted = {"subscribe": "a.b", "topicNames": "dotsToUnderscores", **OPTIONS}
    plain = {"subscribe": "a_b", **OPTIONS}
    run = Run(scripted.address, startingOffsets="earliest", **dotted)
    run.offset = run.ahead()
    assert json.loads(run.offset)["topics"].keys() == json.loads(run.offset)["partitions"].keys() == {"a_b"}
    for ends, given in ((20, plain), (30, dotted)):
        scripted.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("a_b", "broker-a", 0): (0, ends)}))
        run = Run(scripted.address, run.offset, **given)
        run.offset = run.ahead()
        assert json.loads(run.offset)["topics"] == {"a_b": {"broker-a": {"0": ends}}}

"""Topics, queues and brokers that go away: which of it is loss, what it is called, and what is only waited for."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocketmq_spark.base.codes import Perm
from rocketmq_spark.errors import CallTimeout, DataLossError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.pull.progress_timeout import ProgressTimeout
from rocketmq_spark.wire import rpc
from tests.helpers import WAIT_S, awaited, killed, told
from tests.mockbroker import eventually
from tests.reading import Run, batch_reader, bodies, feed, names, positions, read, rows


def made_again(mq: LocalBroker, topic: str, queues: int = 2) -> None:
    delete(mq, topic)
    mq.create_topic(topic, queues)


def delete(mq: LocalBroker, topic: str) -> None:
    mq.admin.delete_topic(topic)
    eventually(lambda: topic not in mq.admin.topics(), 60)


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic(queues=2)


@pytest.fixture(params=["running", "down"])
def after(request: pytest.FixtureRequest, rocketmq: LocalBroker, topic: str) -> Callable[..., Run]:
    """The run that goes on: the same one, or another from its offset."""
    first = {policy: Run(rocketmq, subscribe=topic, startingOffsets="earliest", failOnDataLoss=policy)
             for policy in ("fail", "warn", "ignore")}  # fmt: skip
    sent = feed(rocketmq, topic, 20)
    for run in first.values():
        run.drain(sent)

    def go_on(policy: str = "fail") -> Run:
        run = first[policy]
        run.read.clear()
        if request.param == "running":
            return run
        return Run(rocketmq, run.offset, subscribe=topic, failOnDataLoss=policy)

    return go_on


def fails(run: Run, cause: str) -> None:
    with pytest.raises(DataLossError, match=cause):
        run.until(lambda: False, 30)


def test_a_topic_that_was_made_again_and_is_shorter_now(rocketmq, topic, after, lost_lines):
    made_again(rocketmq, topic)
    fresh = set(feed(rocketmq, topic, 6))
    fails(after(), "offset went back")
    for policy in ("warn", "ignore"):
        run = after(policy)
        run.drain(fresh)
        assert Counter(run.read) == Counter(fresh)  # all of it: the broker's own advice is to go on at the end
        assert sum(run.positions.values()) == 6
    assert len(lost_lines()) == 2
    assert f"{topic}/broker-a/0 offsets 3 to 10 (offset went back" in lost_lines()[0]


def test_recreated_topic_beyond_old_position_is_data_loss(rocketmq, topic, after, lost_lines):
    made_again(rocketmq, topic)
    fresh = set(feed(rocketmq, topic, 60))
    fails(after(), "offset went back")
    for policy in ("warn", "ignore"):
        run = after(policy)
        run.drain(fresh)
        assert Counter(run.read) == Counter(fresh)
        assert sum(run.positions.values()) == 60
    assert len(lost_lines()) == 2


@pytest.mark.parametrize("shares", [(10, 10), (3, 40), (10, 40)], ids=["as long", "shorter and longer", "one as long"])
def test_a_topic_that_was_made_again_and_filled_to_any_length(rocketmq, topic, after, shares, lost_lines):
    """Both queues were read up to offset 10."""
    made_again(rocketmq, topic)
    fresh = {body for queue, count in enumerate(shares) for body in feed(rocketmq, topic, count, queues=[queue])}
    fails(after(), "offset went back")
    run = after("warn")
    run.drain(fresh)
    assert Counter(run.read) == Counter(fresh)
    assert sum(run.positions.values()) == sum(shares)
    run.drain(more := feed(rocketmq, topic, 6))
    assert Counter(run.read) == Counter([*fresh, *more])
    assert lost_lines()


def test_a_topic_of_many_queues_that_was_made_again(rocketmq, make_topic):
    """All of them moved: none proves that it is the same."""
    topic = make_topic(queues=270)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", failOnDataLoss="warn")
    run.drain(feed(rocketmq, topic, 540))
    strict = Run(rocketmq, run.offset, subscribe=topic)
    assert strict.batch() == []
    made_again(rocketmq, topic, 270)
    fresh = feed(rocketmq, topic, 810)
    fails(strict, "offset went back")
    run.read.clear()
    run.drain(fresh)
    assert Counter(run.read) == Counter(fresh)


def test_a_topic_that_was_deleted(rocketmq, topic, after, lost_lines):
    """Its brokers answer questions about it with offset 0 or an error: neither is "empty" nor "went back"."""
    delete(rocketmq, topic)
    fails(after(), "topic deleted")
    run = after("warn")
    run.until(lambda: not run.positions)
    (line,) = lost_lines()
    assert f"{topic}/broker-a/0" in line
    assert "topic deleted" in line
    assert run.batch() == []
    rocketmq.create_topic(topic, 2)
    fresh = set(feed(rocketmq, topic, 6))
    run.drain(fresh)
    assert Counter(run.read) == Counter(fresh)
    assert len(lost_lines()) == 1


def test_one_topic_deleted_while_query_was_down_is_data_loss(rocketmq, topic, make_topic, lost_lines):
    other = make_topic(queues=1)
    both = {"subscribe": [topic, other], "numRetries": 0}
    run = Run(rocketmq, startingOffsets="earliest", **both)
    run.drain([*feed(rocketmq, topic, 4), *feed(rocketmq, other, 4)])
    more = feed(rocketmq, other, 4)
    left, unfinished = run.offset, run.ahead()
    delete(rocketmq, topic)
    fails(Run(rocketmq, left, **both), "topic deleted")
    fails(Run(rocketmq, left, available_now=True, **both), "topic deleted")
    for available_now in (False, True):
        again = Run(rocketmq, left, available_now=available_now, failOnDataLoss="warn", **both)
        again.drain(more)
        assert Counter(again.read) == Counter(more)
        assert {queue.topic for queue in again.positions} == {other}
    logged = Run(rocketmq, left, failOnDataLoss="warn", **both)
    assert Counter(row["body"].decode() for row in rows(logged.reader, logged.plan(unfinished))) == Counter(more)
    # A new query has lost nothing: it never had the topic.
    with pytest.raises(RouteNotFound, match=topic):
        Run(rocketmq, startingOffsets="earliest", **both).latest()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_topic_that_was_deleted_on_one_of_two_brokers(pair, lost_lines, available_now):
    topic = f"orders-{available_now}"
    pair.create_topic(topic, 2)
    both = {"subscribe": topic, "startingOffsets": "earliest"}
    run = Run(pair, **both)
    run.drain(feed(pair, topic, 8))
    left, unfinished = run.offset, feed(pair, topic, 8)
    end = run.ahead(8)
    delete_on(pair, topic, "broker-b")  # the name server goes on naming the broker
    fails(Run(pair, left, available_now=available_now, **both), f"{topic}/broker-b/0 .*topic deleted")
    lenient = Run(pair, left, available_now=available_now, failOnDataLoss="warn", **both)
    kept = set(unfinished) & set(bodies(read(pair, **both)))  # a new query reads what is left
    assert len(kept) == 4, "the other broker has all of its own"
    lenient.drain(kept)
    assert Counter(lenient.read) == Counter(kept)
    assert {queue.broker_name for queue in lenient.positions} == {"broker-a"}
    logged = Run(pair, left, failOnDataLoss="warn", **both)
    assert Counter(row["body"].decode() for row in rows(logged.reader, logged.plan(end))) == Counter(kept)
    assert any(f"{topic}/broker-b/1" in line and "topic deleted" in line for line in lost_lines())


def delete_on(mq: LocalBroker, topic: str, broker: str) -> None:
    mq.admin.offset_reader.rpc_client.request(
        mq.address(broker), rpc.DELETE_TOPIC_IN_BROKER.request(topic=topic, bname=broker)
    )


def test_a_queue_that_its_broker_does_not_read_any_more(rocketmq, make_topic, lost_lines):
    topic = make_topic(queues=4)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.drain(feed(rocketmq, topic, 8))
    feed(rocketmq, topic, 5, queues=[3])
    finished = run.offset
    rocketmq.admin.create_topic(topic, 2)
    fails(run, "5 offsets.*queue gone")
    fails(Run(rocketmq, finished, subscribe=topic), f"{topic}/broker-a/3 offsets 2 to 7 .queue gone")
    lenient = Run(rocketmq, finished, subscribe=topic, failOnDataLoss="warn")
    more = set(feed(rocketmq, topic, 4, queues=[0, 1]))
    lenient.drain(more)
    assert Counter(lenient.read) == Counter(more)
    assert len(lost_lines()) == 1
    assert lenient.batch() == []
    assert len(lost_lines()) == 1


def test_a_queue_that_was_read_to_its_end_may_go_quietly(rocketmq, make_topic, lost_lines):
    topic = make_topic(queues=4)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.drain(feed(rocketmq, topic, 8))
    rocketmq.admin.create_topic(topic, 2)
    for one in (run, Run(rocketmq, run.offset, subscribe=topic)):
        unseen = feed(rocketmq, topic, 4)  # the second time only by the other run
        one.drain(unseen)
    # Its position is kept: the broker may read it again.
    assert run.positions[MessageQueue(topic, "broker-a", 3)] == 2
    rocketmq.admin.create_topic(topic, 4)
    again = Run(rocketmq, run.offset, subscribe=topic)
    more = feed(rocketmq, topic, 8)
    again.drain(more)
    assert Counter(again.read) == Counter([*unseen, *more])
    assert lost_lines() == []


@pytest.mark.parametrize("policy", ["fail", "warn"])
def test_a_queue_of_a_topic_made_again_is_read_from_its_start(rocketmq, topic, lost_lines, policy):
    """The new topic has fewer queues at first: the loss of the other one is reported then. The one that comes later has more
    messages than the old one by then.
    """
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", failOnDataLoss="warn")
    run.drain(feed(rocketmq, topic, 20))
    made_again(rocketmq, topic, 1)
    run.drain(feed(rocketmq, topic, 15))
    run.until(lambda: f"{topic}/broker-a/1 offsets 0 to 10 (offset went back" in "".join(lost_lines()))
    run = Run(rocketmq, run.offset, subscribe=topic, failOnDataLoss=policy)
    run.drain(feed(rocketmq, topic, 5, queues=[0]))
    run.read.clear()
    rocketmq.create_topic(topic, 2, resize=True)
    more = feed(rocketmq, topic, 60)
    run.drain(more)
    assert Counter(run.read) == Counter(more)


def test_an_operator_s_reset_of_the_group_moves_nothing(rocketmq, topic):
    """The next pull of the group is answered with where the operator wants it: before, or past what is there."""
    group = f"g-{topic}"
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group)
    run.drain(feed(rocketmq, topic, 20))
    for time_ms in (0, -1):
        sent = feed(rocketmq, topic, 20)
        reset = rpc.INVOKE_BROKER_TO_RESET_OFFSET.request(
            group=group, topic=topic, timestamp=time_ms, isForce=True, queueId=-1
        )
        rocketmq.admin.offset_reader.rpc_client.request(rocketmq.address("broker-a"), reset)
        run.read.clear()
        run.drain(sent)
        assert sorted(run.read) == sorted(sent)


@pytest.mark.parametrize("change", ["fewer queues", "made again"])
def test_queues_that_vanish_between_batches_of_available_now(rocketmq, topic, change, lost_lines):
    """A run that may not end without what was there at its start fails, or reads each message that is left once."""
    old = {queue: feed(rocketmq, topic, 10, queues=[queue]) for queue in (0, 1)}
    given = {"available_now": True, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 8}
    strict, lenient = (Run(rocketmq, failOnDataLoss=policy, **given) for policy in ("fail", "ignore"))
    for run in (strict, lenient):
        assert len(run.batch()) == 8
    if change == "made again":
        made_again(rocketmq, topic, 1)
        left, cause = feed(rocketmq, topic, 7), "offset went back"
    else:
        rocketmq.admin.create_topic(topic, 1)
        left, cause = old[0][4:], "queue gone"
    fails(strict, cause)
    first = [*lenient.read]
    lenient.to_end()
    assert Counter(lenient.read) == Counter([*first, *left])
    assert lost_lines()


def test_a_topic_deleted_while_its_tasks_read_ends_no_run(rocketmq, topic, make_topic, lost_lines):
    """Its rows are too many to be handed over with the plan; another topic of the same tasks is read, and read on."""
    other = make_topic(queues=1)
    given = {"subscribe": [topic, other], "startingOffsets": "earliest", "readDeadline": "4s"}
    feed(rocketmq, topic, 1200)
    sent = feed(rocketmq, other, 5)
    strict, lenient = (Run(rocketmq, failOnDataLoss=policy, **given) for policy in ("fail", "ignore"))
    end = lenient.ahead(1205)
    planned = [(run, run.plan(end)) for run in (strict, lenient)]
    delete(rocketmq, topic)
    with ThreadPoolExecutor(2) as pool:
        failed, found = (pool.submit(rows, run.reader, tasks) for run, tasks in planned)
        with pytest.raises(DataLossError, match=f"{topic}/broker-a/[01] .*topic deleted"):
            failed.result(WAIT_S)
        assert Counter(bodies(found.result(WAIT_S))) == Counter(sent)
    lenient.offset = end
    more = feed(rocketmq, other, 4)
    lenient.drain(more)
    assert Counter(lenient.read) == Counter(more)
    assert {queue.topic for queue in lenient.positions} == {other}
    lost = "\n".join(lost_lines())
    assert all(f"{topic}/broker-a/{queue} offsets 0 to 600 (topic deleted)" in lost for queue in (0, 1))


@pytest.fixture
def own(make_cluster) -> LocalBroker:
    """A cluster that may be broken."""
    mq = make_cluster()
    mq.create_topic("orders", 2)
    return mq


SHORT = {"requestTimeout": "5s", "numRetries": 1}  # who is dead refuses at once


def test_a_broker_that_cannot_be_reached_is_waited_for(lone, lost_lines, caplog):
    (topic,) = names(1, "away")
    lone.create_topic(topic, 2)
    run = Run(lone, subscribe=topic, startingOffsets="earliest", **SHORT)
    sent = feed(lone, topic, 20)
    run.drain(sent)
    more = feed(lone, topic, 20)
    killed(lone, "broker-a")
    before = run.offset
    eventually(lambda: run.latest() and f"cannot read now: {topic}/broker-a/0" in caplog.text, 60)
    assert positions(run.latest()).keys() == positions(before).keys()
    assert lost_lines() == []
    lone.restart("broker-a")
    run.drain(more)
    assert sorted(run.read) == sorted([*sent, *more])
    # And while a task reads: it has its plan.
    third = feed(lone, topic, 20)
    end = run.ahead()
    tasks = run.plan(end)
    killed(lone, "broker-a")
    with told("the read waits for") as missed, ThreadPoolExecutor(1) as beside:
        read_on = beside.submit(rows, run.reader, tasks)
        awaited(missed.is_set)
        lone.restart("broker-a")
        assert Counter(row["body"].decode() for row in read_on.result(WAIT_S)) == Counter(third)
    run.offset = end
    killed(lone, "namesrv")
    eventually(lambda: run.batch() == [] and "no name server answers" in caplog.text, 60)
    assert run.offset == end
    lone.restart("namesrv")
    run.drain(feed(lone, topic, 4))
    assert lost_lines() == []


def test_a_broker_that_lost_its_store_went_back(own, lost_lines):
    runs = {policy: Run(own, subscribe="orders", startingOffsets="earliest", failOnDataLoss=policy, **SHORT)
            for policy in ("fail", "warn")}  # fmt: skip
    sent = feed(own, "orders", 20)
    for run in runs.values():
        run.drain(sent)
        run.read.clear()
    killed(own, "broker-a")
    store = own.data / "broker-a" / "store"
    for part in store.iterdir():
        if part.name != "config":
            shutil.rmtree(part) if part.is_dir() else part.unlink()
    own.restart("broker-a")
    fails(runs["fail"], "offset went back")
    fresh = set(feed(own, "orders", 6))
    runs["warn"].drain(fresh)
    assert Counter(runs["warn"].read) == Counter(fresh)
    assert any("offset went back" in line for line in lost_lines())


def test_read_permission_revoked_during_task_is_waited_for(rocketmq, topic, monkeypatch):
    """It is given back only when the patient one has been refused."""
    sent, was_refused, refused = feed(rocketmq, topic, 20), threading.Event(), ProgressTimeout.record_refusal
    impatient, patient = (batch_reader(rocketmq, subscribe=topic, readDeadline=wait) for wait in ("3s", "10m"))
    tasks = patient.partitions()
    rocketmq.admin.create_topic(topic, 2, perm=Perm.WRITE)
    with pytest.raises(CallTimeout, match=r"no message came within 3 s.*pulling message is forbidden"):
        rows(impatient, tasks)
    monkeypatch.setattr(ProgressTimeout, "record_refusal", lambda of, text: (refused(of, text), was_refused.set()))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(rows, patient, tasks)
        awaited(was_refused.is_set)
        rocketmq.admin.create_topic(topic, 2)
        assert Counter(bodies(found.result(WAIT_S))) == Counter(sent)

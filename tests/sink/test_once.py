"""Each row of a batch once, on a real broker: attempts that are repeated, answers that are lost, and what cannot be proved."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    CallTimeout,
    MessageRefused,
    OptionError,
    RocketMQError,
    UnprovedError,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import BrokerData, MessageQueue, QueueData, SendRequest, SendResult, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.ambiguity import SendOutcomeKind, classify
from rocketmq_spark.producer.retry import RetryPolicy, RetryState
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.spark.checkpoints import batch_notes
from rocketmq_spark.spark.checkpoints.files import checkpoint_folder
from rocketmq_spark.spark.sink import checks, exactly_once, exactly_once_checks
from rocketmq_spark.spark.sink.exactly_once import (
    ExactlyOncePlan,
    ExactlyOnceTask,
    NotedQueuesSender,
    plan_batch,
    plan_job,
)
from rocketmq_spark.spark.sink.report import Written, total
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.spark.sink.writer import RocketMQStreamWriter, RocketMQWriter
from tests.helpers import awaited, killed, stored
from tests.live.producer.recording import RecordingSender
from tests.live.writes import Make, bodies, frame, numbered, sink_options
from tests.reading import names
from tests.sink.test_notes import checkpoint

KINDS = pytest.mark.parametrize("attributes", [None, {"queue.type": "BatchCQ"}], ids=["ordinary", "batch topic"])
SETTLE_S = 0.3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once_checks, "MIN_SETTLE_S", 0.1)


class Losing(RecordingSender):
    """Answers of some sends are lost, after the broker has done what it was asked."""

    lose: Callable[[int], bool] = staticmethod(lambda number: False)
    refuse: Callable[[int], bool] = staticmethod(lambda number: False)

    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Any], None]
    ) -> None:
        number = len(self.sends)
        if self.refuse(number):
            self._note(queue, request)
            done(CallTimeout("never arrived"))
            return

        def lost(outcome: SendResult | RocketMQError) -> None:
            assert isinstance(outcome, SendResult)
            done(CallTimeout("no answer") if self.lose(number) else outcome)

        super().send_async(queue, request, deadline, lost)


class Sink:
    """Attempts of tasks as Spark would make them."""

    def __init__(self, mq: LocalBroker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mq = mq
        self.path = checkpoint(path / "checkpoint")
        self.monkeypatch = monkeypatch
        self.lose: Callable[[int], bool] = lambda number: False
        self.refuse: Callable[[int], bool] = lambda number: False
        self.sender: Losing | None = None

    def options(self, **given: object) -> Options:
        chosen = {"deliveryGuarantee": "exactly-once", "exactlyOnceSettle": f"{SETTLE_S}s", **given}
        return sink_options(self.mq.name_server, **chosen)

    def plan(self, options: Options) -> ExactlyOncePlan:
        return plan_batch(options, str(self.path))

    def attempt(
        self, plan: ExactlyOncePlan, options: Options, *batches: pa.RecordBatch, partition: int = 0, attempt: int = 0
    ) -> Written:
        client = session.client(options)
        self.sender = Losing(client)
        self.sender.lose, self.sender.refuse = self.lose, self.refuse  # type: ignore[method-assign]
        recorded = dataclasses.replace(client, sender=self.sender)
        with self.monkeypatch.context() as patched:
            patched.setattr(session, "client", lambda options: recorded)
            names = checks.check_sink(options, from_arrow_schema(batches[0].schema))
            mine = ExactlyOnceTask(options, pickle.loads(pickle.dumps(plan)), partition, attempt)
            return TaskWriter(options, names, partition, checks.environment_queues(options), mine).write(iter(batches))


@pytest.fixture
def sink(timerless: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    return Sink(timerless, tmp_path, monkeypatch)


@KINDS
def test_a_batch_that_was_begun_sends_what_is_not_stored(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, attributes: Any
) -> None:
    topic = make_timerless_topic(queues=4, attributes=attributes)
    options = sink.options(topic=topic, deliveryGuarantee="exactly-once", batchMaxBytes=2_000)
    first = sink.plan(options)
    assert not first.is_repeat
    done = sink.attempt(first, options, frame(body=numbered(300)))
    assert (done.sent, done.already_stored, done.confirmed, done.unmatched) == (300, 0, 0, 0)
    again = sink.plan(options)
    assert again.is_repeat
    rows = numbered(500)
    done = sink.attempt(again, options, frame(body=rows[250:]), frame(body=rows[:250][::-1]))
    assert (done.sent, done.already_stored, done.confirmed, done.unmatched) == (200, 300, 0, 0)
    found = stored(timerless, topic, 500)
    assert sorted(bodies(found)) == rows
    assert all(len(message.msg_id) == 56 for message in found)


def test_rows_with_kafkas_columns_are_stored_once(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=4)
    options = sink.options(topic=topic, kafkaColumns=True)
    keys = pa.array([None if i % 3 else b"\xff%d" % i for i in range(60)], pa.binary())
    partitions = pa.array([i % 4 if i % 2 else None for i in range(60)], pa.int32())
    rows = pa.RecordBatch.from_pydict({"value": numbered(60), "key": keys, "partition": partitions})
    done = sink.attempt(sink.plan(options), options, rows.slice(0, 40))
    assert (done.sent, done.already_stored) == (40, 0)
    done = sink.attempt(sink.plan(options), options, rows)
    assert (done.sent, done.already_stored, done.unmatched) == (20, 40, 0)
    assert sorted(bodies(stored(timerless, topic, 60))) == numbered(60)


@pytest.mark.parametrize("row_id", [None, "properties", "body", "deleted"])
def test_rows_without_values_are_stored_once(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, row_id: str | None
) -> None:
    topic = make_timerless_topic(queues=2)
    given = {} if row_id is None else {"messageId": row_id}
    options = sink.options(topic=topic, kafkaColumns=True, emptyBodies="mark", **given)
    values = pa.array([None if i % 3 == 0 else b"" if i % 3 == 1 else b"%d" % i for i in range(30)], pa.binary())
    columns = {"value": values, "key": pa.array([f"k{i}" for i in range(30)])}
    rows = pa.RecordBatch.from_pydict(columns if row_id is None else {**columns, row_id: numbered(30)})
    assert sink.attempt(sink.plan(options), options, rows.slice(0, 20)).sent == 20
    done = sink.attempt(sink.plan(options), options, rows)
    assert (done.sent, done.already_stored, done.unmatched) == (10, 20, 0)
    found = stored(timerless, topic, 30)
    assert Counter(message.properties.get("deleted") for message in found) == {"null": 10, "empty": 10, None: 10}
    assert len({message.properties.get("SPARK_ROW_ID") for message in found}) == (1 if row_id is None else 30)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("name", "values"), [("shardingKey", ["k", None]), ("queueId", [1, None])])
def test_rows_that_may_go_to_any_queue_are_stored_once(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, name: str, values: list[Any], given: bool
) -> None:
    topic = make_timerless_topic(queues=4)
    selector = {"queueSelector": {"shardingKey": "hash", "queueId": "column"}[name]} if given else {}
    options = sink.options(topic=topic, **selector, batchMaxBytes=200)
    rows = [values[i % 2] for i in range(40)]
    column = pa.array(rows, pa.int32() if name == "queueId" else pa.string())
    done = sink.attempt(sink.plan(options), options, frame(body=numbered(40), **{name: column}).slice(0, 30))
    assert done.sent == 30
    done = sink.attempt(sink.plan(options), options, frame(body=numbered(40), **{name: column}))
    assert (done.sent, done.already_stored, done.unmatched) == (10, 30, 0)
    found = stored(timerless, topic, 40)
    assert sorted(bodies(found)) == numbered(40)
    assert len({row.queue.queue_id for row in found if int(row.body) % 2}) > 1
    assert len({row.queue.queue_id for row in found if not int(row.body) % 2}) == 1


def test_a_batch_that_began_round_robin_is_finished_by_key(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    """As after an upgrade, since a column shardingKey selects hash: rows that are stored in any queue are not sent again."""
    topic = make_timerless_topic(queues=4)
    rows = frame(body=numbered(40), shardingKey=[f"k{i % 5}" for i in range(40)])
    before = sink.options(topic=topic, queueSelector="roundRobin", batchMaxBytes=200)
    assert sink.attempt(sink.plan(before), before, rows.slice(0, 25)).sent == 25
    after = sink.options(topic=topic, batchMaxBytes=200)
    done = sink.attempt(sink.plan(after), after, rows)
    assert (done.sent, done.already_stored, done.unmatched) == (15, 25, 0)
    found = stored(timerless, topic, 40)
    assert sorted(bodies(found)) == numbered(40)
    late = {(row.properties["__SHARDINGKEY"], row.queue.queue_id) for row in found if int(row.body) >= 25}
    assert len(late) == 5


def test_equal_rows_are_counted(timerless: LocalBroker, make_timerless_topic: Make, sink: Sink) -> None:
    topic = make_timerless_topic(queues=2)
    options = sink.options(topic=topic)
    sink.attempt(sink.plan(options), options, frame(body=["x"] * 3 + ["y"]))
    done = sink.attempt(sink.plan(options), options, frame(body=["x"] * 3), frame(body=["x"] * 2 + ["z"]))
    assert (done.sent, done.already_stored, done.unmatched) == (3, 3, 1)
    assert Counter(bodies(stored(timerless, topic, 7))) == {"x": 5, "y": 1, "z": 1}


def test_another_partition_sends_rows_that_moved_to_it(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=2)
    options = sink.options(topic=topic)
    sink.attempt(sink.plan(options), options, frame(body=["x"]), partition=0)
    plan = sink.plan(options)
    assert sink.attempt(plan, options, frame(body=["x"]), partition=1).sent == 1
    assert sink.attempt(plan, options, frame(body=["x"]), partition=0).already_stored == 1
    plan = sink.plan(options)
    done = [sink.attempt(plan, options, frame(body=["x"] * 2), partition=i) for i in range(2)]
    assert [(each.sent, each.already_stored) for each in done] == [(1, 1)] * 2, (
        "an equal row of another one is not its own"
    )


@pytest.mark.parametrize("max_ids", [exactly_once.MAX_PLANNED_IDS, 5])
def test_rows_of_tasks_missing_from_the_repeat_are_unmatched(
    make_timerless_topic: Make, sink: Sink, monkeypatch: pytest.MonkeyPatch, max_ids: int
) -> None:
    """Adaptive execution may make one task of three: then no other task sees what these stored."""
    monkeypatch.setattr(exactly_once, "MAX_PLANNED_IDS", max_ids)
    options = sink.options(topic=make_timerless_topic(queues=2))
    plan = sink.plan(options)
    parts = [frame(body=numbered(10, 10 * partition)) for partition in range(3)]
    for partition, part in enumerate(parts):
        sink.attempt(plan, options, part, partition=partition)
    again = sink.plan(options)
    assert total([sink.attempt(again, options, part, partition=i) for i, part in enumerate(parts)]).unmatched == 0
    for attempt, sent in enumerate((20, 0)):  # the later one finds what this run has stored, too
        done = total([sink.attempt(again, options, *parts, attempt=attempt)])
        assert (done.sent, done.already_stored, done.unmatched) == (sent, 30 - sent, 20)
    assert total([sink.attempt(again, options, parts[1], partition=1), None]).unmatched == 0, "others may follow"


def test_a_later_attempt_looks_by_itself(timerless: LocalBroker, make_timerless_topic: Make, sink: Sink) -> None:
    topic = make_timerless_topic(queues=4)
    options = sink.options(topic=topic, batchMaxBytes=500)
    plan = sink.plan(options)

    def half() -> Iterator[pa.RecordBatch]:
        yield frame(body=numbered(50))
        raise ZeroDivisionError("the task fails")

    names = checks.check_sink(options, from_arrow_schema(frame(body=["x"]).schema))
    with pytest.raises(ZeroDivisionError):
        TaskWriter(options, names, 0, {}, ExactlyOnceTask(options, plan)).write(half())
    done = sink.attempt(plan, options, frame(body=numbered(100)), attempt=1)
    assert done.already_stored + done.sent == 100
    assert done.already_stored > 0
    assert sorted(bodies(stored(timerless, topic, 100))) == numbered(100)


def test_topics_of_a_namespace_and_queues_of_an_environment(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=4)
    timerless.admin.create_topic(f"ns%{topic}", queues=4)
    given = {"namespace": "ns", "environment": "2", "environments": "4", "batchMaxBytes": 200}
    options = sink.options(topic=topic, **given)
    sink.attempt(sink.plan(options), options, frame(body=numbered(50)))
    assert sink.sender is not None
    assert {queue.queue_id for _, queue, _ in sink.sender.sends} == {1}
    done = sink.attempt(sink.plan(options), options, frame(body=numbered(60)))
    assert (done.sent, done.already_stored) == (10, 50)
    assert sorted(bodies(stored(timerless, f"ns%{topic}", 60))) == numbered(60)
    assert sum(bounds.max_offset for bounds in timerless.admin.describe_topic(topic).values()) == 0


def test_nothing_goes_to_a_queue_that_was_not_noted() -> None:
    """An environment that counts keeps its queue whatever the route says, and a repeat would not look there."""
    noted, other = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)
    sender, outcomes = Asked(), list[Any]()
    request = SendRequest("g", b"x", "")
    for queue in (noted, other):
        NotedQueuesSender(cast(Sender, sender), [noted]).send_async(queue, request, Deadline.after(1), outcomes.append)
    assert sender.asked == [noted]
    (refused,) = outcomes
    assert classify(refused) is SendOutcomeKind.REJECTED
    assert isinstance(RetryState(RetryPolicy(None, None), True).next_action(other, refused, (), 60.0), UnprovedError)


class Asked:
    """A sender that keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[MessageQueue] = []

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: object) -> None:
        self.asked.append(queue)


@pytest.mark.parametrize("layout", ['{"dev": {"broker-b": [0]}, "prod": {"broker-a": [0]}}', None])
def test_a_note_waits_for_the_queues_of_an_environment(monkeypatch: pytest.MonkeyPatch, layout: str | None) -> None:
    """Its tasks may send to no other ones."""
    given = {"environment": "dev" if layout else "2", **({"environments": layout} if layout else {})}
    a, b = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)
    monkeypatch.setattr(checks, "environment_queues", lambda options: {} if layout else {"t": (b,)})
    enough = exactly_once._master_check(sink_options("x:1", topic="t", deliveryGuarantee="exactly-once", **given))
    led = {name: BrokerData(name, "c", {0: f"{name}:1"}) for name in ("broker-a", "broker-b")}
    route = TopicRoute("t", tuple(QueueData(name, 1, 1, 6) for name in led), led)
    enough(route, {a, b})
    enough(route, {b})
    with pytest.raises(BrokerNotFound, match="broker-b"):
        enough(route, {a})


def test_tasks_of_a_process_share_what_an_environment_owns() -> None:
    """Each task has a sender of its own, and what is kept for a sender stays as long as the process."""
    how = checks.producer_settings(sink_options("x:1", topic="t", environment="2")).environment
    assert how is not None
    sender, queues = cast(Sender, object()), [MessageQueue("t", "a", i) for i in range(2)]
    first = queues_of_environment(NotedQueuesSender(sender, queues), how)  # type: ignore[arg-type]
    assert queues_of_environment(NotedQueuesSender(sender, queues[::-1]), how) is first  # type: ignore[arg-type]
    assert queues_of_environment(NotedQueuesSender(sender, queues[:1]), how) is not first  # type: ignore[arg-type]
    assert queues_of_environment(NotedQueuesSender(cast(Sender, object()), queues), how) is not first  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "place", [{"namespace": "n"}, {"environment": "dev", "environmentMode": "suffix"}, {"environment": "1"}]
)
def test_a_batch_is_finished_where_it_was_begun(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, place: dict[str, str]
) -> None:
    """The same names elsewhere are other topics or queues: what is stored there is not what was begun."""
    topic = make_timerless_topic(queues=2)
    for name in (f"n%{topic}", f"{topic}_env_dev"):
        timerless.create_topic(name, 2)
    sink.plan(sink.options(topic=topic))
    with pytest.raises(OptionError, match=rf"was begun for {topic}, and the query now writes to {topic} in "):
        sink.plan(sink.options(topic=topic, **place))
    assert sink.plan(sink.options(topic=topic)).is_repeat


def test_a_layout_of_environments_may_be_spelled_otherwise(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    layout = {"prod": {"broker-a": [0]}, "dev": {"broker-a": [1]}}
    given = {"topic": make_timerless_topic(queues=2), "environment": "dev"}
    assert not sink.plan(sink.options(**given, environments=json.dumps(layout))).is_repeat
    other = json.dumps(dict(reversed(layout.items())), indent=1)
    assert sink.plan(sink.options(**given, environments=other)).is_repeat
    layout["dev"]["broker-a"], layout["prod"]["broker-a"] = [0], [1]
    with pytest.raises(OptionError, match="was begun for "):
        sink.plan(sink.options(**given, environments=json.dumps(layout)))


@KINDS
def test_too_many_ids_are_read_again_by_the_tasks(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, monkeypatch: pytest.MonkeyPatch, attributes: Any
) -> None:
    monkeypatch.setattr(exactly_once, "MAX_PLANNED_IDS", 10)
    topic = make_timerless_topic(queues=4, attributes=attributes)
    options = sink.options(topic=topic)
    plan = sink.plan(options)
    for partition in range(2):
        sink.attempt(plan, options, frame(body=numbered(10, 10 * partition)), partition=partition)
    again = sink.plan(options)
    assert (again.stored_hashes, set(again.stored_ranges or ())) == (None, {0, 1})
    assert sink.attempt(again, options, frame(body=numbered(12)), partition=0).already_stored == 10
    assert sorted(bodies(stored(timerless, topic, 22))) == sorted([*numbered(20), "000010", "000011"])


@KINDS
@pytest.mark.parametrize("selector", ["roundRobin", "hash", "column"])
def test_lost_acknowledgements_are_confirmed_at_the_broker(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink, attributes: Any, selector: str
) -> None:
    topic = make_timerless_topic(queues=4, attributes=attributes)
    options = sink.options(topic=topic, batchMaxBytes=2_000, queueSelector=selector)
    sink.lose = lambda number: number % 5 == 1
    rows = numbered(400)
    more = {
        "hash": {"shardingKey": [f"k{i % 7}" for i in range(400)]},
        "column": {"queueId": [i % 4 for i in range(400)]},
    }
    done = sink.attempt(sink.plan(options), options, frame(body=rows, **more.get(selector, {})))
    assert done.rows == 400
    assert done.confirmed > 0
    assert sorted(bodies(stored(timerless, topic, 400))) == rows


def test_what_never_arrived_is_sent_again_after_a_look(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=4)
    options = sink.options(topic=topic, batchMaxBytes=500)
    sink.refuse = lambda number: number in (0, 2)
    done = sink.attempt(sink.plan(options), options, frame(body=numbered(100)))
    assert (done.sent, done.confirmed) == (100, 0)
    assert sorted(bodies(stored(timerless, topic, 100))) == numbered(100)


def test_an_equal_row_of_an_earlier_batch_part_confirms_nothing(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=1)
    options = sink.options(topic=topic)
    plan = sink.plan(options)
    sink.attempt(plan, options, frame(body=["x"]))
    sink.refuse = lambda number: number == 0
    done = sink.attempt(sink.plan(options), options, frame(body=["x", "x"]))
    assert (done.sent, done.already_stored, done.confirmed) == (1, 1, 0)
    assert bodies(stored(timerless, topic, 2)) == ["x", "x"]


def test_the_settle_time_is_waited_for(timerless: LocalBroker, make_timerless_topic: Make, sink: Sink) -> None:
    options = sink.options(topic=make_timerless_topic(queues=1))
    sink.plan(options)
    slow = sink_options(
        timerless.name_server, deliveryGuarantee="exactly-once", topic=options.topic, exactlyOnceSettle="2s"
    )
    began = time.monotonic()
    sink.plan(slow)
    assert time.monotonic() - began >= 2.0


def test_queues_added_since_the_plan_are_used_from_next_batch(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    topic = make_timerless_topic(queues=1)
    options = sink.options(topic=topic, batchMaxBytes=200)
    plan = sink.plan(options)
    timerless.admin.create_topic(topic, queues=4)
    sink.attempt(plan, options, frame(body=numbered(100)))
    assert sink.sender is not None
    assert {queue.queue_id for _, queue, _ in sink.sender.sends} == {0}
    with pytest.raises(MessageRefused, match="has no queue 3 that accepts messages"):
        sink.attempt(plan, options, frame(body=["x"], queueId=[3]))


def test_broker_without_master_at_first_start_is_used_on_restart(
    pair: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the batch can be there, so that its end may be noted later."""
    sink = Sink(pair, tmp_path, monkeypatch)
    (topic,) = names(1, "once")
    pair.create_topic(topic, queues=1)
    options = sink.options(topic=topic, sendTimeout="5s")
    rows = frame(body=["x", "y"], brokerName=["broker-a", "broker-b"], queueId=[0, 0])
    killed(pair, "broker-b")
    awaited(
        lambda: {q.broker_name for q in sink.plan(options).ends.end_offsets} == {"broker-a"} or forgotten(sink), bool
    )
    with pytest.raises(MessageRefused, match="has no queue 0 on broker 'broker-b' that accepts messages"):
        sink.attempt(sink.plan(options), options, rows)
    pair.restart("broker-b")
    assert sink.attempt(sink.plan(options), options, rows).sent == 2
    assert sink.attempt(sink.plan(options), options, rows).already_stored == 2
    assert sorted(bodies(stored(pair, topic, 2))) == ["x", "y"]


def forgotten(sink: Sink) -> bool:
    """No note any more; never true."""
    shutil.rmtree(sink.path / batch_notes.NOTES_FOLDER)
    return False


def test_allowed_topics_are_all_that_rows_may_name(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    one, two, other = (make_timerless_topic(queues=2) for _ in range(3))
    options = sink.options(allowedTopics=f"{one},{two}")
    plan = sink.plan(options)
    with pytest.raises(MessageRefused, match=rf"row 1: topic '{other}' is not in option 'allowedTopics': add it there"):
        sink.attempt(plan, options, frame(body=["a", "b"], topic=[one, other]))
    sink.attempt(plan, options, frame(body=["a", "b"], topic=[one, two]))
    done = sink.attempt(sink.plan(options), options, frame(body=["a", "a"], topic=[one, two]))
    assert (done.sent, done.already_stored, done.unmatched) == (1, 1, 1)
    with pytest.raises(OptionError, match="was begun for "):
        sink.plan(sink.options(topic=one))


def test_names_with_dots_have_the_ids_of_rocketmqs_names(timerless: LocalBroker, sink: Sink) -> None:
    """A batch that began with RocketMQ's names is finished with names that option ``topicNames`` replaces."""
    one, two = (f"{name}_shop_orders" for name in names(2, "db"))
    for topic in (one, two):
        timerless.create_topic(topic, 2)
    plain = sink.options(allowedTopics=f"{one},{two}")
    assert sink.attempt(sink.plan(plain), plain, frame(body=["a", "b"], topic=[one, two])).sent == 2
    dotted = sink.options(allowedTopics=f"{one},{two}".replace("_", "."), topicNames="dotsToUnderscores")
    topics = [topic.replace("_", ".") for topic in (one, two, one)]
    done = sink.attempt(sink.plan(dotted), dotted, frame(body=["a", "b", "c"], topic=topics))
    assert (done.sent, done.already_stored, done.unmatched) == (1, 2, 0)
    assert sorted(bodies(stored(timerless, one, 2))) == ["a", "c"]
    with pytest.raises(MessageRefused, match=rf"row 1: topics '{topics[0]}' and '{one}' are both '{one}'"):
        sink.attempt(sink.plan(dotted), dotted, frame(body=["a", "b"], topic=[topics[1], one]))


def test_row_ids_are_the_content(timerless: LocalBroker, make_timerless_topic: Make, sink: Sink) -> None:
    topic = make_timerless_topic(queues=2)
    options = sink.options(topic=topic, messageId="id")
    sink.attempt(sink.plan(options), options, frame(body=["a", "b"], id=["1", "2"]))
    plan = sink.plan(options)
    done = sink.attempt(plan, options, frame(body=["a in a new version", "c"], id=["1", "3"]))
    assert (done.sent, done.already_stored, done.unmatched) == (1, 1, 1)
    with pytest.raises(MessageRefused, match="have the same id in column 'id'"):
        sink.attempt(plan, options, frame(body=["a", "c"], id=["1", "1"]))


def denied(*given: object) -> None:
    raise AccessDenied("no")


@pytest.mark.parametrize(
    ("question", "answer", "error"),
    [
        ("offsets.RemotingOffsetReader.sample", denied, AccessDenied),
        ("offsets.RemotingOffsetReader.log_states", lambda *given: {"broker-a": AccessDenied("no")}, AccessDenied),
        ("offsets.RemotingOffsetReader.is_proxy", lambda *given: True, OptionError),
        ("pull_source.RemotingPulls.is_compacted", lambda *given: True, OptionError),
    ],
)
def test_rights_and_kinds_are_checked_at_the_start(
    make_timerless_topic: Make,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    answer: Any,
    error: type[RocketMQError],
) -> None:
    options = sink.options(topic=make_timerless_topic(queues=1))
    monkeypatch.setattr(f"rocketmq_spark.client.{question}", answer)
    with pytest.raises(error):
        sink.plan(options)
    assert not (sink.path / batch_notes.NOTES_FOLDER).exists(), "nothing was begun"


def test_first_pickling_of_a_writer_makes_and_fixes_the_note(make_timerless_topic: Make, sink: Sink) -> None:
    options = sink.options(topic=make_timerless_topic(queues=1))
    schema = from_arrow_schema(frame(body=["x"]).schema)
    unused = RocketMQStreamWriter(options, schema, str(sink.path))
    assert not (sink.path / batch_notes.NOTES_FOLDER).exists()
    first = RocketMQStreamWriter(options, schema, str(sink.path))
    plans = [pickle.loads(pickle.dumps(first))._writer.plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert not plans[0].is_repeat
    assert pickle.loads(pickle.dumps(unused))._writer.plan.is_repeat, "it comes after a batch that was begun"


def test_each_batch_write_is_another_job(make_timerless_topic: Make, sink: Sink) -> None:
    options = sink.options(topic=make_timerless_topic(queues=1))
    assert plan_job(options).name != plan_job(options).name
    writer = RocketMQWriter(options, from_arrow_schema(frame(body=["x"]).schema))
    plans = [pickle.loads(pickle.dumps(writer))._writer.plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert not plans[0].is_streaming


def test_a_rewound_batch_is_sent_again(timerless: LocalBroker, make_timerless_topic: Make, sink: Sink) -> None:
    topic = make_timerless_topic(queues=1)
    options = sink.options(topic=topic)
    sink.attempt(sink.plan(options), options, frame(body=["x"]))
    batch_notes.increment_epoch(checkpoint_folder(str(sink.path)))
    assert sink.attempt(sink.plan(options), options, frame(body=["x"])).sent == 1
    assert bodies(stored(timerless, topic, 2)) == ["x", "x"]

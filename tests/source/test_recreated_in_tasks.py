"""Tasks whose topic is deleted and created again after the plan: each row is read once, by the next batch."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.recreated import RecreatedTopics, store_times_ms
from rocketmq_spark.spark.source import partition_reader
from rocketmq_spark.spark.source.partition_reader import RangePartition
from tests.harness import store
from tests.mockbroker import MockBroker, ok, refuse, topic_config
from tests.reading import Run, feed, ranges_of, rows
from tests.source.scripted import route, stats

A, B = (MessageQueue("t", "broker-a", number) for number in range(2))
PLANNED_MS = 1000
OLD, NEW = PLANNED_MS - 1, PLANNED_MS + 1
END = 20


class Queue:
    """One queue: the store time of each message. It is another topic's from the ``remade_at``-th pull on."""

    def __init__(self, broker: MockBroker) -> None:
        self.times, self.later, self.remade_at, self.pulls = [OLD] * END, None, 0, 0
        self.busy_at = None
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: broker.address}}))
        broker.on(Request.GET_TOPIC_CONFIG, topic_config())
        broker.on(Request.PULL_MESSAGE, self.pull)
        broker.on(Request.GET_TOPIC_STATS_INFO, lambda _: stats({A: (0, len(self.times))}))

    def pull(self, call):
        if self.later is not None and self.pulls == self.remade_at:
            self.times, self.later = self.later, None
        self.pulls += 1
        at, count = int(call.ext("queueOffset")), min(5, int(call.ext("maxMsgNums")))
        if at == self.busy_at:
            self.busy_at = None
            return refuse(Response.SYSTEM_BUSY, "busy")
        found = range(at, min(at + count, len(self.times)))
        if not found:
            return refuse(Response.PULL_NOT_FOUND, "OFFSET_OVERFLOW_BADLY", nextBeginOffset=0, minOffset=0, maxOffset=0)
        stored = b"".join(store("t", b"x", queue_offset=i, store_ms=self.times[i]) for i in found)
        return ok(stored, nextBeginOffset=found.stop, minOffset=0, maxOffset=len(self.times), suggestWhichBrokerId=0)


@pytest.fixture
def broker():
    with MockBroker() as broker:
        yield broker
    session.close_all()


@pytest.fixture
def queue(broker):
    return Queue(broker)


def read(broker, *ranges, newest_ms=PLANNED_MS, **given):
    """Offsets that a task reads of a batch up to ``END``, their times, and its losses."""
    given = {
        "nameServer": broker.address,
        "subscribe": "t",
        "pullBatchSize": 5,
        "pullDepth": 1,
        "readDeadline": "2s",
        **given,
    }
    options = options_table.parse(given).for_role("stream source")
    known = (END,) * len(ranges), (newest_ms,) * len(ranges)
    partition = pickle.loads(pickle.dumps(RangePartition(ranges, (), frozenset(), *known)))
    lost = []
    on_loss = None if "failOnDataLoss" in given else lambda part, cause: lost.append((part.start, part.end, cause))
    found = partition_reader.read_partition(options, BASIC_COLUMNS, partition, is_streaming=True, on_loss=on_loss)
    offsets = [row["queueOffset"] for batch in found for row in batch.to_pylist()]
    return offsets, lost


ALL = OffsetRange(A, 0, END)


@pytest.mark.parametrize("given", [{}, {"tags": "a"}, {"pullDepth": 8}, {"readFrom": "master"}])
def test_a_new_topic_is_not_read_in_place_of_the_old_one(broker, queue, given):
    queue.times = [NEW] * 35
    assert read(broker, ALL, **given) == ([], [(0, END, Cause.WENT_BACK)])
    assert read(broker, OffsetRange(A, 5, 10), **given) == ([], [(5, 10, Cause.WENT_BACK)])


def test_a_new_topic_that_is_shorter_is_not_read(broker, queue):
    queue.times = [NEW] * 7
    offsets, lost = read(broker, ALL)
    assert offsets == []
    assert sorted(offset for start, end, _ in lost for offset in range(start, end)) == list(range(END))
    assert {cause for _, _, cause in lost} == {Cause.WENT_BACK}


def test_recreated_topic_growing_during_the_check_is_not_read(broker, queue):
    """Its last message of the batch does not exist yet, and its end is past the batch a moment later."""

    def grown(call):
        queue.times = [NEW] * 35
        return stats({A: (0, 35)})

    queue.times = [NEW] * 7
    broker.on(Request.GET_TOPIC_STATS_INFO, grown)
    offsets, lost = read(broker, ALL)
    assert offsets == []
    assert sorted(offset for start, end, _ in lost for offset in range(start, end)) == list(range(END))


def test_last_message_removed_by_compaction_is_no_recreation(broker, queue):
    """The queue is long enough, so the topic is the same; messages are younger because the broker's clock was set back."""
    queue.times = [NEW] * 12
    broker.on(Request.GET_TOPIC_STATS_INFO, stats({A: (0, 35)}))
    offsets, _ = read(broker, OffsetRange(A, 0, 10))
    assert offsets == list(range(10))
    asked = [int(call.ext["queueOffset"]) for call in broker.seen(Request.PULL_MESSAGE)]
    assert asked.count(END - 1) == 2, "the answer holds for the whole read"


@pytest.mark.parametrize("remade_at", range(1, 4))
def test_rows_of_the_old_topic_stay_read(broker, queue, remade_at):
    queue.later, queue.remade_at = [NEW] * END, remade_at
    offsets, lost = read(broker, ALL)
    assert offsets == list(range(5 * remade_at))
    assert lost == [(5 * remade_at, END, Cause.WENT_BACK)]


def test_later_rows_of_the_old_topic_stay_read(broker, queue):
    """Their answers came before that of an earlier offset, whose pull was repeated."""
    queue.busy_at, queue.later, queue.remade_at = 5, [NEW] * END, 4
    assert read(broker, ALL, pullDepth=8) == ([*range(5), *range(10, END)], [(5, 10, Cause.WENT_BACK)])


def test_a_clock_that_was_put_back_makes_no_other_topic(broker, queue):
    """The first messages are younger than the newest one, and the last one of the batch is the same."""
    queue.times = [NEW] * 12 + [OLD] * 8
    assert read(broker, ALL) == (list(range(END)), [])
    asked = sum(int(call.ext["maxMsgNums"]) == 1 for call in broker.seen(Request.PULL_MESSAGE))
    assert asked == 1, "the broker is asked once for each queue"


def test_a_topic_that_stayed_costs_no_question(broker, queue):
    assert read(broker, ALL) == (list(range(END)), [])
    assert not broker.seen(Request.GET_ROUTEINFO_BY_TOPIC)[1:]
    assert all(int(call.ext["maxMsgNums"]) > 1 for call in broker.seen(Request.PULL_MESSAGE))


def test_without_a_store_time_of_the_plan_tasks_read_on(broker, queue):
    queue.times = [NEW] * END
    assert read(broker, ALL, newest_ms=0) == (list(range(END)), [])


def test_fail_on_data_loss_decides_about_a_new_topic(broker, queue, caplog):
    queue.times = [NEW] * END
    with pytest.raises(DataLossError, match=r"offsets 0 to 20 .offset went back"):
        read(broker, ALL, failOnDataLoss="fail")
    assert read(broker, ALL, failOnDataLoss="warn") == ([], [])
    assert "20 offsets cannot be read any more: t/broker-a/0 offsets 0 to 20 (offset went back" in caplog.text


def test_a_plan_tells_its_tasks_what_it_saw(broker, queue):
    broker.on(Request.GET_TOPIC_STATS_INFO, stats({A: (0, END)}, PLANNED_MS))
    given = {"subscribe": "t", "minPartitions": 2, "numRetries": 0, "requestTimeout": "5s"}
    run = Run(broker.address, startingOffsets="earliest", **given)
    partitions = run.plan(run.latest())
    assert ranges_of(partitions) == [[OffsetRange(A, 0, 10)], [OffsetRange(A, 10, 20)]]
    for partition in partitions:
        travelled = pickle.loads(pickle.dumps(partition))
        assert (travelled.queue_ends, travelled.newest_store_ms) == ((END,), (PLANNED_MS,))


# --- the look at an answer


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1 << 50), st.booleans(), st.binary(max_size=9)), min_size=1, max_size=8))
def test_store_times_are_found_whatever_host_sent(messages):
    buffer, begins = b"", []
    for stored_ms, ipv6, body in messages:
        begins.append(len(buffer))
        born = (bytes(16), 1) if ipv6 else (bytes(4), 1)
        buffer += store("t", body, store_ms=stored_ms, born=born)
    found = store_times_ms(np.frombuffer(buffer, np.uint8), np.array(begins))
    assert found.tolist() == [stored_ms for stored_ms, _, _ in messages]


def test_a_piece_that_is_no_message_is_left_to_the_decoder():
    topics = RecreatedTopics([ALL], [PLANNED_MS], lambda queue: True)
    assert topics.find(np.zeros(10, np.uint8), [FetchedAnswer(0, 0, 5, 5, 0, 10)]) == []


def test_each_queue_is_asked_about_once():
    asked = []
    message = store("t", b"x", store_ms=NEW)
    buffer = np.frombuffer(message * 4, np.uint8)
    ranges = [ALL, OffsetRange(B, 0, END)]
    topics = RecreatedTopics(ranges, [PLANNED_MS] * 2, lambda queue: asked.append(queue) or queue == B)
    answers = [FetchedAnswer(n, at, at + 1, at + 1, i * len(message), (i + 1) * len(message)) for i, (n, at) in enumerate(
        [(0, 0), (0, 1), (1, 7), (1, 8)])]  # fmt: skip
    for _ in range(2):
        assert topics.find(buffer, answers) == answers[2:]
    assert asked == [A, B]


def test_each_row_of_a_topic_made_again_is_read_once(rocketmq, make_topic):
    topic = make_topic(queues=2)
    old = feed(rocketmq, topic, 3000)
    given = {"subscribe": topic, "failOnDataLoss": "ignore", "maxRecordsPerPartition": 700}
    run = Run(rocketmq, startingOffsets="earliest", **given)
    end = run.ahead(3000)
    planned = run.plan(end)
    rocketmq.admin.delete_topic(topic)
    rocketmq.create_topic(topic, 2)
    new = feed(rocketmq, topic, 3600)
    first = [row["body"].decode() for row in rows(run.reader, planned)]
    run.offset = end
    run.drain(new)
    counts = Counter(first + run.read)
    assert counts == Counter(new)
    assert not set(counts) & set(old)

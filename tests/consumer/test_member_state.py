from __future__ import annotations

import random
import threading

from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.model.membership import ConsumerStats
from tests.consumer.messages import messages
from tests.queues import q, qs


def holding(*names: str) -> MemberState:
    held = MemberState(Thresholds())
    held.queues = {queue: ProcessQueue(queue) for name in names for queue in qs(name)}
    return held


def test_lag_is_known_when_the_ends_of_all_queues_are() -> None:
    held = holding("a:0-1")
    assert held.stats() == ConsumerStats(lag=None)
    held.end_offsets, _ = {q("a:0"): 10, q("a:1"): 5}, held.offsets.force(q("a:0"), 7)
    assert held.stats().lag is None
    held.offsets.force(q("a:1"), 9)  # the end that was heard last may be old
    assert held.stats().lag == 3
    held.queues[q("a:0")].dropped = True
    assert held.stats().lag == 0


def test_where_a_queue_ends_is_what_was_said_last() -> None:
    held = holding("a:0")
    queue = held.queues[q("a:0")]
    held.end_offsets[queue.queue], queue.end_updated_ms = 7, 100  # by the answer to a pull
    for asked_ms, end, known in ((99, 5, 7), (99, None, 7), (101, 9, 9), (101, None, None)):
        held.record_end_offset(queue, end, asked_ms)
        assert held.end_offsets.get(queue.queue) == known
    held.queues.clear()
    held.record_end_offset(queue, 11, 101)
    assert not held.end_offsets


def test_what_is_cached_is_that_of_own_queues() -> None:
    held = holding("a:0-1")
    for queue in held.queues.values():
        queue.put(messages(1, 2, queue=queue.queue))
    held.queues[q("a:1")].dropped = True
    assert held.stats().cached == 2
    assert [each.queue for each in held.owned_queues()] == [q("a:0")]


def test_result_of_a_dropped_queue_changes_no_offset() -> None:
    held = holding("a:0")
    queue = held.queues[q("a:0")]
    held.record_finished_locked(queue, 5)
    held.record_finished_locked(queue, None)
    queue.dropped = True
    held.record_finished_locked(queue, 9)
    assert held.offsets.all_offsets() == {q("a:0"): 5}


def test_bounds_are_those_of_the_topic_where_it_has_some() -> None:
    held = holding()
    held.thresholds["T"] = Thresholds(max_count=3)
    assert (held.thresholds_of("T").max_count, held.thresholds_of("U").max_count) == (3, 1000)


def test_results_of_many_threads_only_raise_an_offset() -> None:
    held, queue, seen = MemberState(Thresholds()), ProcessQueue(q("a:0")), list[int]()
    held.queues[queue.queue] = queue

    def results(offsets: list[int]) -> None:
        for offset in offsets:
            with held.lock:
                held.record_finished_locked(queue, offset)
                seen.append(held.offsets.get(queue.queue) or 0)

    shuffled = random.Random(1).sample(range(1, 4001), 4000)
    threads = [threading.Thread(target=results, args=(shuffled[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4000
    assert seen == sorted(seen)
    assert seen[-1] == 4000

from __future__ import annotations

from rocketmq_spark.consumer.concurrent import ConcurrentCall, late_messages
from rocketmq_spark.consumer.process_queue import ProcessQueue
from tests.consumer.messages import QUEUE, message, messages

MINUTE = 60_000


def test_only_the_first_message_of_a_queue_can_time_out() -> None:
    queue, other = ProcessQueue(QUEUE), ProcessQueue(QUEUE)
    first, second = messages(1, 2)
    calls = [
        ConcurrentCall(queue, [second], 0),
        ConcurrentCall(other, [first], 0),
        ConcurrentCall(queue, [message(1)], 0),
    ]
    assert late_messages(queue, calls, 99 * MINUTE, 15 * MINUTE) == ()
    queue.put([first, second])
    assert late_messages(queue, calls, 99 * MINUTE, 15 * MINUTE) == ()
    calls.append(ConcurrentCall(queue, [first], MINUTE))
    assert late_messages(queue, calls, 16 * MINUTE, 15 * MINUTE) == ()
    assert late_messages(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == (first,)
    queue.remove([first])
    assert late_messages(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == (second,)
    queue.dropped = True
    assert late_messages(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == ()

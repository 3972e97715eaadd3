from __future__ import annotations

from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.concurrent import Call, expired
from tests.consumer.messages import QUEUE, message, messages

MINUTE = 60_000


def test_1_18_only_the_first_message_is_looked_at_and_only_when_its_listener_is_late() -> None:
    queue, other = ProcessQueue(QUEUE), ProcessQueue(QUEUE)
    first, second = messages(1, 2)
    calls = [Call(queue, [second], 0), Call(other, [first], 0), Call(queue, [message(1)], 0)]
    assert expired(queue, calls, 99 * MINUTE, 15 * MINUTE) == ()
    queue.put([first, second])
    assert expired(queue, calls, 99 * MINUTE, 15 * MINUTE) == ()
    calls.append(Call(queue, [first], MINUTE))
    assert expired(queue, calls, 16 * MINUTE, 15 * MINUTE) == ()
    assert expired(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == (first,)
    queue.remove([first])
    assert expired(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == (second,)
    queue.dropped = True
    assert expired(queue, calls, 16 * MINUTE + 1, 15 * MINUTE) == ()

from __future__ import annotations

from rocketmq_spark.consumer.expiry import expired
from rocketmq_spark.consumer.process_queue import ProcessQueue
from tests.consumer.messages import QUEUE, message, messages

MINUTE = 60_000


def test_1_18_only_the_first_message_is_looked_at_and_only_when_its_listener_is_late() -> None:
    queue = ProcessQueue(QUEUE)
    assert expired(queue, 99 * MINUTE, 15 * MINUTE) is None
    queue.put(messages(1, 2))
    assert expired(queue, 99 * MINUTE, 15 * MINUTE) is None
    queue.started([message(2)], 0)
    assert expired(queue, 99 * MINUTE, 15 * MINUTE) is None
    queue.started([message(1)], MINUTE)
    assert expired(queue, 16 * MINUTE, 15 * MINUTE) is None
    assert expired(queue, 16 * MINUTE + 1, 15 * MINUTE) == message(1)
    queue.remove([message(1)])
    assert expired(queue, 16 * MINUTE + 1, 15 * MINUTE) == message(2)
    queue.dropped = True
    assert expired(queue, 16 * MINUTE + 1, 15 * MINUTE) is None

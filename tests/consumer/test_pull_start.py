"""Where a pull consumer begins a queue of which its group has no offset yet."""

from __future__ import annotations

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import MessageQueue, PullAnswer, PullStatus, QueueBounds
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, bodies, made
from tests.fakes.group_member import QueueMember


def test_where_a_group_began_at_the_end_holds_for_who_is_next(fake: QueueMember, hand: Hand) -> None:
    """Else what came between would be lost after a crash, and where a queue changes hands before anything of it is finished."""
    fake.low.update({A: 50, B: 50})
    fake.high.update({A: 100, B: 100})
    latest = ConsumeFrom(ConsumeFromWhere.LATEST)
    with made(fake, hand, consume_from=latest) as consumer:
        consumer.subscribe("t")
        consumer.poll(AT_ONCE)
        assert fake.stored == {A: 100, B: 100}
        fake.add(A, 3)
        fake.add(B, 3)
        assert len(consumer.poll(AT_ONCE)) == 3
    fake.add(A, 2)
    with made(fake, hand, consume_from=latest) as again:
        again.assign([A])
        assert bodies(again.poll(AT_ONCE)) == [100, 101, 102, 103, 104]
        assert fake.commits == [{A: 100, B: 100}]


def test_where_a_young_queue_begins_is_committed(fake: QueueMember, hand: Hand) -> None:
    """A broker says 0 of it, as of an offset that it has, and "none" later: then the mode would skip what was not finished."""
    latest = ConsumeFrom(ConsumeFromWhere.LATEST)
    fake.add(A, 5)
    with made(fake, hand, consume_from=latest) as consumer:
        consumer.assign([A])
        assert bodies(consumer.poll(AT_ONCE)) == [0, 1, 2, 3, 4]
    fake.low[A] = 2
    with made(fake, hand, consume_from=latest) as again:
        again.assign([A])
        assert bodies(again.poll(AT_ONCE)) == [2, 3, 4]


def test_start_offset_is_committed_again_after_a_failed_commit(fake: QueueMember, hand: Hand) -> None:
    fake.low.update({A: 50, B: 50})
    fake.refused[A] = ConnectionLost("gone")
    with made(fake, hand, consume_from=ConsumeFrom(ConsumeFromWhere.LATEST)) as consumer:
        consumer.assign([A])
        del fake.refused[A]
        hand.now += 60
        consumer.poll(AT_ONCE)
        assert fake.stored == {A: 50}


def test_start_offset_is_committed_manually_without_auto_commit(fake: QueueMember, hand: Hand) -> None:
    fake.low.update({A: 50, B: 50})
    with made(fake, hand, consume_from=ConsumeFrom(ConsumeFromWhere.LATEST), auto_commit=False) as consumer:
        consumer.assign([A])
        assert fake.commits == []
        consumer.commit()
    assert fake.commits == [{A: 50}]


def test_returned_broker_gets_offsets_of_idle_queues_again(fake: QueueMember, hand: Hand) -> None:
    """It may have died before it kept that, and who has the queue next would begin elsewhere."""
    fake.low.update({A: 50, B: 50})
    with made(fake, hand, consume_from=ConsumeFrom(ConsumeFromWhere.LATEST)) as consumer:
        consumer.assign([A, B])
        request, done = fake.waiting.pop(0)
        assert request.queue == A
        fake.stored.clear()
        done(ConnectionLost("gone"))
        hand.now += 2
        consumer.poll(AT_ONCE)
        request, done = fake.waiting.pop()
        done(PullAnswer(PullStatus.NO_NEW_MSG, 50, 50, 50))
    assert fake.stored == {A: 50}


def test_a_group_has_no_offset_of_a_young_queue_either(fake: QueueMember, consumer: BasePullConsumer) -> None:
    assert consumer.committed(A) is None


def test_seek_reaches_compacted_messages_before_the_log_start() -> None:
    """Statistics tell where the log begins; who says which group asks is told what is kept."""

    class Compacted(QueueMember):
        def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
            return super().bounds(queue, deadline)._replace(min_offset=2 if group else 5)

    fake = Compacted([A], high=9)
    fake.low[A] = 2
    with made(fake) as consumer:
        consumer.assign([A])
        for seek in (consumer.seek, lambda queue, at: consumer.seek_to_timestamp(at, queue)):
            seek(A, 3)
            assert bodies(consumer.poll(AT_ONCE)) == list(range(3, 9))
        consumer.seek_to_beginning(A)
        assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))

"""Queues of a pull consumer, against a model: what a poll gave last is never among what may be committed."""

from __future__ import annotations

import pytest

from rocketmq_spark.consumer.assigned import ONE_ANSWER, AssignedQueues, FetchedPart, FetchRequest
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.model import MessageQueue, PullAnswer, PullStatus, ReceivedMessage

A, B = (MessageQueue("t", "b", i) for i in range(2))


def found(ask: FetchRequest, count: int) -> PullAnswer:
    return PullAnswer(PullStatus.FOUND, ask.offset + count, 0, 99, broker_id=1)


def part(queue: MessageQueue, start: int, end: int) -> FetchedPart:
    return FetchedPart(queue, start, [(end, 2)], b"12", lambda start, end, stored: [])


def assigned() -> AssignedQueues:
    one = AssignedQueues(4)
    one.assign({A: StartOffset(5), B: StartOffset(7)})
    return one


def test_of_a_pull_that_was_made_twice_the_first_answer_counts() -> None:
    one = assigned()
    first, _ = one.due_requests(0.0)
    one.cancel([first])
    (again,) = one.due_requests(0.0)
    assert again == first
    assert one.on_answer(first, found(first, 4))
    assert not one.on_answer(again, found(again, 4))
    assert one.states[A].cached_count == 4


def test_queue_has_one_pull_and_the_next_starts_at_next_offset() -> None:
    one = assigned()
    first, second = one.due_requests(0.0)
    assert (first.queue, first.offset, first.broker_id, second.offset) == (A, 5, 0, 7)
    assert one.due_requests(0.0) == []
    assert one.on_answer(first, found(first, 3))
    (again,) = one.due_requests(0.0)
    assert (again.queue, again.offset, again.broker_id) == (A, 8, 1)


def test_a_queue_is_not_pulled_on_while_too_much_waits() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, found(ask, 4))
    assert one.due_requests(0.0) == []
    one.ready_parts.take()
    assert [due.offset for due in one.due_requests(0.0)] == [9]


def test_a_queue_is_not_pulled_on_while_too_many_bytes_wait() -> None:
    one = AssignedQueues(1000, max_bytes=10)
    one.assign({A: StartOffset(0)})
    for _ in range(2):
        (ask,) = one.due_requests(0.0)
        one.on_answer(ask, PullAnswer(PullStatus.FOUND, ask.offset + 1, 0, 99, stored_messages=b"12345"))
    assert one.due_requests(0.0) == []
    one.ready_parts.take()
    assert [due.offset for due in one.due_requests(0.0)] == [2]


def test_read_ahead_is_given_in_order_and_suspends_pulls() -> None:
    one = assigned()
    first, _ = one.due_requests(0.0)
    one.on_answer(first, found(first, 1))
    ahead = FetchRequest(A, 6, 0, first.token)
    one.mark_read_ahead([ahead])
    assert one.due_requests(0.0) == []
    assert one.accept(ahead, part(A, 6, 8))
    assert one.accept(ahead, part(A, 8, 9))
    one.release([ahead], cooldown_until=5.0)
    assert [(ask.queue, ask.offset) for ask in one.due_requests(0.0)] == []  # 4 offsets wait already
    assert [(p.start, p.next_offset) for p in one.ready_parts.take(9)] == [(5, 6), (6, 8), (8, 9)]
    assert [(ask.queue, ask.offset) for ask in one.due_requests(0.0)] == [(A, 9)]
    assert one.states[A].cooldown_until == 5.0
    assert (one.states[A].cached_count, one.states[A].cached_bytes) == (0, 0)


def test_read_ahead_of_a_sought_or_dropped_queue_is_discarded() -> None:
    one = assigned()
    first, second = one.due_requests(0.0)
    one.seek(A, 50)
    one.assign({A: None})
    assert not one.accept(first, part(A, 5, 6))
    assert not one.accept(second, part(B, 7, 8))
    one.release([first, second], 9.0)
    assert one.states[A].cooldown_until == 0.0
    assert one.ready_parts.take(9) == []


def test_what_failed_is_asked_again_later_at_the_master() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, found(ask, 1))
    (again,) = one.due_requests(0.0)
    assert one.on_failure(again, 2.0)
    assert one.due_requests(1.9) == []
    assert one.next_retry_at(1.9) == 2.0
    (later,) = one.due_requests(2.0)
    assert (later.offset, later.broker_id) == (6, 0)
    assert one.next_retry_at(2.0) is None


def test_the_offset_of_a_broker_that_was_away_is_stored_again() -> None:
    """It may have come back without the last one."""
    one = assigned()
    ask = one.due_requests(0.0)[0]
    assert one.on_failure(ask, 2.0)
    assert one.offsets_to_commit() == {}
    (again,) = (each for each in one.due_requests(2.0) if each.queue == ask.queue)
    assert one.on_answer(again, found(again, 1))
    assert one.offsets_to_commit() == {A: 5}


def test_answers_older_than_a_seek_or_assignment_are_discarded() -> None:
    one = assigned()
    first, second = one.due_requests(0.0)
    one.seek(A, 50)
    one.assign({A: None})
    assert not one.on_answer(first, found(first, 3))
    assert not one.on_failure(second, 1.0)
    assert [(ask.queue, ask.offset) for ask in one.due_requests(0.0)] == [(A, 50)]
    assert one.offsets_to_commit() == {A: 50}


def test_a_queue_that_goes_and_comes_back_takes_no_old_answer() -> None:
    one = assigned()
    first, _ = one.due_requests(0.0)
    one.assign({B: None})
    one.assign({A: StartOffset(5), B: None})
    assert not one.on_answer(first, found(first, 3))


def test_offsets_without_a_wanted_message_are_passed_over() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, PullAnswer(PullStatus.NO_MATCHED_MSG, 20, 0, 99))
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {A: 20}


def test_skipped_gap_is_committed_only_after_waiting_messages() -> None:
    one = assigned()
    first, _ = one.due_requests(0.0)
    one.on_answer(first, found(first, 1))
    (second,) = one.due_requests(0.0)
    one.on_answer(second, PullAnswer(PullStatus.NO_MATCHED_MSG, 20, 0, 99))
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {}  # the message of offset 5 waits
    one.ready_parts.take()
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {}  # nor was it given yet
    (third,) = one.due_requests(0.0)
    one.on_answer(third, PullAnswer(PullStatus.NO_NEW_MSG, 21, 0, 99))
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {}
    one.ready_parts.mark_returned()
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {A: 21}


def test_gap_behind_a_fully_iterated_part_is_committed_with_it() -> None:
    one = assigned()
    first, _ = one.due_requests(0.0)
    one.on_answer(first, found(first, 2))
    one.ready_parts.take()
    (second,) = one.due_requests(0.0)
    one.on_answer(second, PullAnswer(PullStatus.NO_MATCHED_MSG, 20, 0, 99))
    one.ready_parts.mark_returned_up_to(7)
    one.ready_parts.take_back()
    one.finish_returned_messages()
    assert (one.ready_parts.take(), one.offsets_to_commit()) == ([], {A: 20})


def test_iteration_over_a_part_ends_when_the_part_is_invalidated() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, found(ask, 4))
    (part,) = one.ready_parts.take()
    one.ready_parts.mark_returned_up_to(6)
    one.finish_returned_messages()
    assert (one.ready_parts.may_return(part), one.offsets_to_commit()) == (True, {A: 6})
    one.pause([A])
    assert not one.ready_parts.may_return(part)
    one.pause([A], False)
    one.ready_parts.mark_returned_up_to(7)
    one.ready_parts.take_back()
    assert not one.ready_parts.may_return(part)
    assert (one.states[A].cached_count, one.queue_infos()[A].cached_min_offset) == (2, 7)
    (rest,) = one.ready_parts.take()
    one.ready_parts.take_back()  # by a poll that Ctrl-C ended
    (rest,) = one.ready_parts.take()
    assert (rest.first_offset, rest.next_offset, rest.offset_count) == (7, 9, 2)
    one.seek(A, 5)
    assert not one.ready_parts.may_return(rest)
    one.ready_parts.mark_returned_up_to(9)
    one.ready_parts.take_back()
    one.finish_returned_messages()
    assert (one.states[A].cached_count, one.ready_parts.take(), one.offsets_to_commit()) == (0, [], {A: 5})


def test_an_illegal_offset_is_put_right() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, PullAnswer(PullStatus.OFFSET_ILLEGAL, 60, 60, 99))
    assert one.states[A].position == 60
    assert [due.offset for due in one.due_requests(0.0)] == [60]


def test_messages_pulled_before_a_reset_are_dropped_uncommitted() -> None:
    one = assigned()
    first = one.due_requests(0.0)[0]
    one.on_answer(first, found(first, 3))
    one.ready_parts.take()
    one.on_answer(again := one.due_requests(0.0)[0], found(again, 1))
    last = one.due_requests(0.0)[0]
    assert one.on_answer(last, PullAnswer(PullStatus.OFFSET_ILLEGAL, 70, 0, 99, is_reset=True))
    assert one.ready_parts.take() == []
    one.ready_parts.mark_returned()
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {A: 70}
    assert [due.offset for due in one.due_requests(0.0)] == [70]
    one.seek(A, 20)
    assert one.on_answer(last, PullAnswer(PullStatus.OFFSET_ILLEGAL, 30, 0, 99, is_reset=True)), "no other pull is told"
    assert [due.offset for due in one.due_requests(0.0)] == [30]
    one.assign({B: None})
    assert not one.on_answer(last, PullAnswer(PullStatus.OFFSET_ILLEGAL, 30, 0, 99, is_reset=True))


def test_paused_queues_give_nothing_and_keep_what_they_have() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.pause([A])
    one.on_answer(ask, found(ask, 1))
    assert one.ready_parts.take() == []
    assert one.due_requests(0.0) == []
    one.pause([A], paused=False)
    assert [part.queue for part in one.ready_parts.take()] == [A]


def test_what_is_put_back_comes_again_first_and_is_not_finished() -> None:
    one = assigned()
    first, second = one.due_requests(0.0)
    one.on_answer(first, found(first, 1))
    one.on_answer(second, found(second, 1))
    parts = one.ready_parts.take(5)
    one.ready_parts.take_back()
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {}
    assert [(p.queue, p.first_offset, p.next_offset) for p in one.ready_parts.take(5)] == [
        (p.queue, p.start, p.next_offset) for p in parts
    ]


def test_what_was_committed_is_not_committed_again() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, found(ask, 1))
    one.ready_parts.take()
    one.ready_parts.mark_returned()
    one.finish_returned_messages()
    one.mark_committed({A: 6, MessageQueue("gone", "b", 0): 3})
    assert one.offsets_to_commit() == {}


@pytest.mark.parametrize("interrupted", [False, True])
def test_messages_of_old_topic_commit_nothing_of_recreated_topic(interrupted: bool) -> None:
    """The new one has messages already when the caller is through with those of the old one."""
    one = AssignedQueues(1000)
    one.assign({A: StartOffset(990)})
    old = one.due_requests(0.0)[0]
    one.on_answer(old, found(old, 10))
    one.ready_parts.take(3)
    if interrupted:
        one.ready_parts.take_back()
    lost = one.due_requests(0.0)[0]
    one.on_answer(lost, PullAnswer(PullStatus.OFFSET_ILLEGAL, 0, 0, 0))
    new = one.due_requests(0.0)[0]
    one.on_answer(new, found(new, 32))
    if interrupted:
        assert [part.start for part in one.ready_parts.take(3)] == [990, 0]
    else:
        one.ready_parts.mark_returned()
        one.finish_returned_messages()
        assert one.offsets_to_commit() == {A: 0}
        assert [part.start for part in one.ready_parts.take(3)] == [0]
    one.ready_parts.take_back()
    assert [(part.first_offset, part.next_offset) for part in one.ready_parts.take(3)][-1] == (0, 32)
    one.ready_parts.mark_returned()
    one.finish_returned_messages()
    assert one.offsets_to_commit() == {A: 32}


def test_a_dropped_queue_gives_what_is_finished() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    one.on_answer(ask, found(ask, 2))
    one.ready_parts.take()
    one.ready_parts.mark_returned()
    one.finish_returned_messages()
    assert one.assign({B: None}) == {A: 7}
    assert list(one.states) == [B]


def test_one_part_is_no_more_than_an_answer() -> None:
    one = assigned()
    ask = one.due_requests(0.0)[0]
    decoded: list[tuple[int, int, bytes]] = []

    def decode(start: int, end: int, stored: bytes | memoryview) -> list[ReceivedMessage]:
        decoded.append((start, end, bytes(stored)))
        return []

    one.accept(ask, FetchedPart(A, 5, [(7, 2), (8, 5), (11, 6)], b"aabbbc", decode))
    assert (one.states[A].cached_count, one.states[A].cached_bytes) == (6, 6)
    for expected in (1, 2, 3):
        (part,) = one.ready_parts.take()
        part.read()
        assert len(decoded) == expected
        if expected == 2:
            one.ready_parts.take_back()
            (again,) = one.ready_parts.take()
            assert (again.start, again.next_offset) == (7, 8)
        one.ready_parts.mark_returned()
    assert decoded == [(5, 7, b"aa"), (7, 8, b"bbb"), (8, 11, b"c")]
    assert (one.states[A].cached_count, one.states[A].cached_bytes, one.states[A].position) == (0, 0, 11)
    one.accept(ask, FetchedPart(A, 11, [(12, 1), (13, 2)], b"xy", decode))
    assert [part.next_offset for part in one.ready_parts.take(2)] == [13]


@pytest.mark.parametrize(
    ("returned_up_to", "expected"), [(6, [(5, 7), (7, 8), (8, 11)]), (7, [(5, 8), (8, 11)]), (9, [(5, 11)])]
)
def test_poll_after_an_abandoned_loop_returns_rest_of_an_answer(
    returned_up_to: int, expected: list[tuple[int, int]]
) -> None:
    one = assigned()
    one.accept(
        one.due_requests(0.0)[0], FetchedPart(A, 5, [(7, 2), (8, 5), (11, 6)], b"aabbbc", lambda start, end, stored: [])
    )
    (whole,) = one.ready_parts.take(1)
    assert (whole.start, whole.next_offset) == (5, 11)
    one.ready_parts.mark_returned_up_to(returned_up_to)
    one.ready_parts.take_back()
    for start, end in expected:
        (part,) = one.ready_parts.take(ONE_ANSWER)
        assert (part.start, part.first_offset, part.next_offset) == (start, max(start, returned_up_to), end)
        one.ready_parts.mark_returned()
    assert (one.states[A].cached_count, one.states[A].cached_bytes, one.states[A].position) == (0, 0, 11)


def test_poll_inspects_only_what_it_takes_not_all_waiting_parts() -> None:
    looked: list[FetchedPart] = []

    class Seen(FetchedPart):
        @property
        def count(self) -> int:
            looked.append(self)
            return super().offset_count

        @property
        def first(self) -> int:
            looked.append(self)
            return super().first_offset

    queues = [MessageQueue("t", "b", i) for i in range(64)]
    one = AssignedQueues(1000)
    one.assign(dict.fromkeys(queues, StartOffset(0)))
    for start in range(32):
        for queue in queues:
            one.ready_parts.add(Seen(queue, start, [(start + 1, 1)], b"1", lambda start, end, stored: []))
    one.ready_parts.take_back()
    looked.clear()
    for _ in range(10):
        one.ready_parts.take_back()
        one.ready_parts.take()
        one.ready_parts.mark_returned()
    assert len(looked) <= 10 * 5
    assert [one.states[queue].position for queue in queues[:11]] == [*[1] * 10, 0]

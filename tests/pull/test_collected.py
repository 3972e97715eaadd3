"""What was received and not read: what may be handed out, and what of the buffer is kept."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.pull.fetched import FetchedAnswer, ReceivedAnswers, offset_count

# Two queues; each answer has ten offsets in as many bytes.
ANSWERS = [
    FetchedAnswer(n, at, at + 10, at + 10, i * 10, i * 10 + 10) for i, (n, at) in enumerate(((0, 0), (0, 10), (1, 0)))
]


class Buffer:
    """Of a stream what is asked when answers were read. A turn puts what is kept to the front."""

    def __init__(self, filled: int = 30, room: int = 100, full: bool = False) -> None:
        self.filled_bytes, self.free_bytes, self.is_full = filled, room, full
        self.turns = 0

    def compact(self, keep: Iterable[tuple[int, int]]) -> dict[int, int]:
        moved = {}
        self.turns, self.filled_bytes = self.turns + 1, 0
        for begin, end in keep:
            moved[begin], self.filled_bytes = self.filled_bytes, self.filled_bytes + end - begin
        return moved


def collected(answers: Iterable[FetchedAnswer] = ANSWERS) -> ReceivedAnswers:
    known = ReceivedAnswers()
    for answer in answers:
        known.add(answer, 10)
    return known


@given(st.permutations(ANSWERS), st.tuples(st.integers(0, 2), st.integers(0, 20)))
def test_answers_before_first_missing_offset_may_be_handed_out(
    answers: list[FetchedAnswer], frontier: tuple[int, int]
) -> None:
    ready, rest = collected(answers).split_at(frontier)
    assert ready + rest == ANSWERS
    assert all(answer[:2] < frontier for answer in ready)
    assert all(answer[:2] >= frontier for answer in rest)


def test_the_rest_stays_for_the_next_time() -> None:
    known, buffer = collected(), Buffer()
    ready, rest = known.split_at((0, 10))
    known.delivered_answers = ready
    known.retain(rest, offset_count(rest), buffer)  # type: ignore[arg-type]
    assert (known.answers, known.offset_count, known.delivered_answers, buffer.turns) == (ANSWERS[1:], 20, [], 0)


def test_what_is_given_back_comes_again_before_the_rest() -> None:
    known, buffer = collected(), Buffer()
    ready, rest = known.split_at((1, 0))
    known.delivered_answers = ready
    known.give_back(ready[1:])
    known.retain(rest, offset_count(rest), buffer)  # type: ignore[arg-type]
    assert (known.answers, known.offset_count) == (ANSWERS[1:], 20)
    known.retain([], 0, buffer)  # type: ignore[arg-type]
    assert known.answers == []  # it was given back once


def test_buffer_is_compacted_when_the_next_answers_might_not_fit() -> None:
    known = collected()
    known.retain(ANSWERS[2:], 10, Buffer(filled=30, room=30))  # type: ignore[arg-type]
    assert known.answers == ANSWERS[2:]
    tight = Buffer(filled=70, room=39)  # the last answers took forty bytes
    known.retain(ANSWERS[2:], 10, tight)  # type: ignore[arg-type]
    assert (known.answers, tight.turns) == ([ANSWERS[2]._replace(begin=0, end=10)], 1)
    known.retain(known.answers, 10, Buffer(filled=10, room=0))  # type: ignore[arg-type]
    assert known.answers == [ANSWERS[2]._replace(begin=0, end=10)]  # what is at hand begins behind what was kept


def test_a_full_buffer_turns_at_once() -> None:
    known, full = collected(), Buffer(full=True)
    known.retain(ANSWERS[1:], 20, full)  # type: ignore[arg-type]
    assert [(answer.begin, answer.end) for answer in known.answers] == [(0, 10), (10, 20)]
    assert full.turns == 1


def test_without_its_buffer_everything_is_missing_again() -> None:
    known = collected([ANSWERS[0], FetchedAnswer(0, 10, 42, 30, 10, 20), FetchedAnswer(1, 0, 10, 15, 20, 30)])
    assert [(answer.range_number, answer.start) for answer in known.clear()] == [(0, 0), (0, 10), (1, 0)]
    assert (known.answers, known.offset_count) == ([], 0)
    assert known.clear() == []

"""What was received and not read: what may be handed out, and what of the buffer is kept."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.pull.fetched import FetchedAnswer, ReceivedAnswers, offset_count

# Two queues; each answer has ten offsets in as many bytes.
PIECES = [
    FetchedAnswer(n, at, at + 10, at + 10, i * 10, i * 10 + 10) for i, (n, at) in enumerate(((0, 0), (0, 10), (1, 0)))
]


class Buffer:
    """Of a stream what is asked when answers were read. A turn puts what is kept to the front."""

    def __init__(self, filled: int = 30, room: int = 100, full: bool = False) -> None:
        self.filled, self.room, self.full = filled, room, full
        self.turns = 0

    def turn(self, keep: Iterable[tuple[int, int]]) -> dict[int, int]:
        moved = {}
        self.turns, self.filled = self.turns + 1, 0
        for begin, end in keep:
            moved[begin], self.filled = self.filled, self.filled + end - begin
        return moved


def collected(pieces: Iterable[FetchedAnswer] = PIECES) -> ReceivedAnswers:
    known = ReceivedAnswers()
    for piece in pieces:
        known.add(piece, 10)
    return known


@given(st.permutations(PIECES), st.tuples(st.integers(0, 2), st.integers(0, 20)))
def test_what_lies_before_the_first_missing_offset_may_be_handed_out(
    pieces: list[FetchedAnswer], frontier: tuple[int, int]
) -> None:
    ready, rest = collected(pieces).before(frontier)
    assert ready + rest == PIECES
    assert all(piece[:2] < frontier for piece in ready)
    assert all(piece[:2] >= frontier for piece in rest)


def test_the_rest_stays_for_the_next_time() -> None:
    known, buffer = collected(), Buffer()
    ready, rest = known.before((0, 10))
    known.lent = ready
    known.keep(rest, offset_count(rest), buffer)  # type: ignore[arg-type]
    assert (known.pieces, known.rows, known.lent, buffer.turns) == (PIECES[1:], 20, [], 0)


def test_what_is_given_back_comes_again_before_the_rest() -> None:
    known, buffer = collected(), Buffer()
    ready, rest = known.before((1, 0))
    known.lent = ready
    known.give_back(ready[1:])
    known.keep(rest, offset_count(rest), buffer)  # type: ignore[arg-type]
    assert (known.pieces, known.rows) == (PIECES[1:], 20)
    known.keep([], 0, buffer)  # type: ignore[arg-type]
    assert known.pieces == []  # it was given back once


def test_the_buffer_turns_where_as_much_as_the_last_time_might_not_fit() -> None:
    known = collected()
    known.keep(PIECES[2:], 10, Buffer(filled=30, room=30))  # type: ignore[arg-type]
    assert known.pieces == PIECES[2:]
    tight = Buffer(filled=70, room=39)  # the last answers took forty bytes
    known.keep(PIECES[2:], 10, tight)  # type: ignore[arg-type]
    assert (known.pieces, tight.turns) == ([PIECES[2]._replace(begin=0, end=10)], 1)
    known.keep(known.pieces, 10, Buffer(filled=10, room=0))  # type: ignore[arg-type]
    assert known.pieces == [PIECES[2]._replace(begin=0, end=10)]  # what is at hand begins behind what was kept


def test_a_full_buffer_turns_at_once() -> None:
    known, full = collected(), Buffer(full=True)
    known.keep(PIECES[1:], 20, full)  # type: ignore[arg-type]
    assert [(piece.begin, piece.end) for piece in known.pieces] == [(0, 10), (10, 20)]
    assert full.turns == 1


def test_without_its_buffer_everything_is_missing_again() -> None:
    known = collected([PIECES[0], FetchedAnswer(0, 10, 42, 30, 10, 20), FetchedAnswer(1, 0, 10, 15, 20, 30)])
    assert [(piece.number, piece.start) for piece in known.drop()] == [(0, 0), (0, 10), (1, 0)]
    assert (known.pieces, known.rows) == ([], 0)
    assert known.drop() == []

"""Plain answers of ranges: all of them where nothing is odd, and nothing from there on where something is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import AccessDenied
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import OnLoss
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.pull.read_ahead import PlainRead
from rocketmq_spark.pull.recreated import RecreatedTopics
from rocketmq_spark.remoting.bulk import EmptyAnswer
from tests.pull.pull_model import Accidents, Model, Queue, offset_at

QUEUES = [MessageQueue("t", "b", i) for i in range(2)]
SIZE = Queue(0, 0).message_bytes


@dataclass
class Puller:
    """Over a model; its readers' ranges may be of any of the model's queues."""

    model: Model
    settings: PullSettings = field(default_factory=lambda: PullSettings(batch_size=8))
    is_compacted: Callable[[MessageQueue], bool] = bool

    def reader(
        self,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        filtered: Filter = NO_FILTER,
        known: str | None = None,
        recreated: RecreatedTopics | None = None,
    ) -> RangeReader:
        return self.model.reader(ranges, self.settings, on_loss)


def run(model: Model, *ranges: tuple[int, int, int], offsets: int = 64) -> PlainRead:
    wanted = [OffsetRange(QUEUES[number], start, end) for number, start, end in ranges]
    return PlainRead(Puller(model), wanted, offsets, 1 << 20)  # type: ignore[arg-type]


def offsets(found: PlainRead) -> dict[int, list[int]]:
    """By queue, the offsets that the bytes have, which are those that the answers say."""
    got: dict[int, list[int]] = {}
    for answers in found.fetch():
        for queue, start, ends, stored in answers:
            inside = [offset_at(np.frombuffer(stored, np.uint8), at) for at in range(0, len(stored), SIZE)]
            assert inside == list(range(start, ends[-1][0]))
            assert [(next_offset - start) * SIZE for next_offset, _ in ends] == [end for _, end in ends]
            got.setdefault(queue.queue_id, []).extend(inside)
    return got


def test_ranges_of_several_queues_in_turn_are_read_whole() -> None:
    model = Model([Queue(0, 500), Queue(0, 500)])
    one = run(model, (0, 10, 60), (1, 0, 50), (0, 60, 110), (1, 50, 100))
    assert offsets(one) == {0: list(range(10, 110)), 1: list(range(100))}
    assert one.had_only_plain_answers
    assert max(count for _, _, count in model.asked) == 8


def test_what_is_under_way_is_bounded() -> None:
    model = Model([Queue(0, 5000)])
    assert offsets(run(model, (0, 0, 5000), offsets=64)) == {0: list(range(5000))}
    assert model.max_in_flight <= 64 * SIZE


@pytest.mark.parametrize(
    "queue",
    [
        Queue(40, 500),  # its first messages are gone
        Queue(0, 40),  # it ends before it was told to end
        Queue(0, 500, deleted_at=0.0),
        Queue(0, 500, batches={40: 20}),  # across the end of a range
    ],
    ids=["truncated", "went back", "deleted", "inner batch"],
)
def test_it_ends_before_what_is_odd(queue: Queue) -> None:
    model = Model([queue])
    one = run(model, (0, 0, 50), (0, 50, 100))
    got = offsets(one).get(0, [])
    assert got == list(range(len(got)))
    assert len(got) <= 40
    assert not one.had_only_plain_answers
    assert model.time.now - 1000 < 5.0


def test_operator_reset_ends_the_plain_read_and_is_recorded() -> None:
    one = run(Model([Queue(0, 300), Queue(0, 300)], Accidents(reset_once=True)), (1, 0, 150), (0, 0, 150))
    assert offsets(one) == {}
    assert (one.had_only_plain_answers, one.resets) == (False, {QUEUES[1]: 0})


def reset_after(model: Model, pulls: int) -> dict[int, int]:
    """An operator resets both queues after so many pulls: what brokers have still to tell, one pull of each queue."""
    plain, untold = model.answer, {}

    def answer(queue: int, start: int, count: int) -> tuple[list[int], int] | EmptyAnswer:
        if len(model.asked) == pulls:
            untold.update({0: 290, 1: 280})
        return (
            EmptyAnswer(21, "OFFSET_RESET", untold.pop(queue), 0, 300, 0)
            if queue in untold
            else plain(queue, start, count)
        )

    model.answer = answer  # type: ignore[method-assign]
    return untold


@pytest.mark.parametrize("seed", range(5))
def test_a_reset_of_several_queues_is_noted_for_each(seed: int) -> None:
    model = Model([Queue(0, 300), Queue(0, 300)], seed=seed)
    untold = reset_after(model, 20)
    one = run(model, *((number, at, at + 30) for at in range(0, 300, 30) for number in (0, 1)), offsets=256)
    assert all(max(got) < 280 for got in offsets(one).values())
    assert (one.had_only_plain_answers, one.resets, untold) == (False, {QUEUES[0]: 290, QUEUES[1]: 280}, {})


@pytest.mark.parametrize("pulls", range(10, 60, 7))
def test_reset_in_an_answer_under_way_at_the_end_is_recorded(pulls: int) -> None:
    """Who reads has no room for more, say."""
    model = Model([Queue(0, 300), Queue(0, 300)])
    model.latency = lambda queue, start: 0.01 * queue
    untold = reset_after(model, pulls)
    one = run(model, *((number, at, at + 30) for at in range(0, 300, 30) for number in (0, 1)), offsets=64)
    for _ in one.fetch():
        if len(model.asked) >= pulls:
            break
    assert {**{QUEUES[number]: at for number, at in untold.items()}, **one.resets} == {QUEUES[0]: 290, QUEUES[1]: 280}
    assert not any(stream.owing for stream in model.streams)


def test_hanging_broker_delays_the_end_of_a_read_only_briefly() -> None:
    model = Model([Queue(0, 5000)])
    one = run(model, (0, 0, 5000))
    fetching = one.fetch()
    next(fetching)
    model.latency = lambda *given: 1e6
    next(fetching)
    before = model.time.now
    fetching.close()
    assert model.time.now - before < 1.1


def test_inner_batches_come_whole() -> None:
    one = run(Model([Queue(0, 500, batches=dict.fromkeys(range(0, 500, 20), 20))]), (0, 0, 60), (0, 60, 120))
    assert offsets(one) == {0: list(range(120))}
    assert one.had_only_plain_answers


def test_what_is_jumped_over_ends_it_too() -> None:
    model = Model([Queue(0, 200, frozenset(range(20, 24)))])
    one = run(model, (0, 0, 100))
    found = [answer for answers in one.fetch() for answer in answers]
    assert not one.had_only_plain_answers
    assert all(answer.ends[-1][0] <= 24 for answer in found)


def test_answer_that_skips_empty_offsets_ends_the_plain_read() -> None:
    """What it leaves out is for the broker to explain, in a long poll."""
    model = Model([Queue(0, 200)])
    plain = model.answer
    model.answer = lambda queue, start, count: (  # type: ignore[method-assign]
        EmptyAnswer(20, "NO_MATCHED_MESSAGE", 24, 0, 200, 0) if start == 16 else plain(queue, start, count)
    )
    one = run(model, (0, 0, 100))
    assert offsets(one) == {0: list(range(16))}
    assert not one.had_only_plain_answers


def test_it_ends_when_it_is_told_to() -> None:
    model = Model([Queue(0, 100_000)])
    one = run(model, (0, 0, 100_000))
    fetching = one.fetch()
    next(fetching)
    one.stop()
    assert list(fetching) == []
    assert all(stream.closed for stream in model.streams)


def test_what_a_broker_refuses_for_good_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Queue(0, 100)])
    monkeypatch.setattr(model, "answer", lambda *given: EmptyAnswer(16, "no", None, None, None, 0))
    with pytest.raises(AccessDenied):
        list(run(model, (0, 0, 100)).fetch())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), cut=st.floats(0, 0.02), short=st.floats(0, 0.5), busy=st.floats(0, 0.1))
def test_whatever_happens_on_the_way_everything_comes_once(seed: int, cut: float, short: float, busy: float) -> None:
    model = Model([Queue(0, 300), Queue(0, 300)], Accidents(cut=cut, short=short, busy=busy), seed)
    model.buffer_bytes = 1 << 12
    one = run(model, (0, 0, 150), (1, 0, 150), (0, 150, 300))
    assert offsets(one) == {0: list(range(300)), 1: list(range(150))}
    assert one.had_only_plain_answers

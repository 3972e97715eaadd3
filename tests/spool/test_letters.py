"""Dead letters of records that are given up, while their topic does not answer, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.model import Resent
from rocketmq_spark.spool.lanes import STEPS_S
from rocketmq_spark.spool.records import Record
from tests.spool.bench import Bench, record

REFUSED, AWAY = Resent(None, "no permission"), Resent(None, "no answer", passing=True)
ANSWER_S = 0.01  # until a broker that answers does so
TIMEOUT_S = 3.0
SLOTS = 16


class Letters:
    """Dead letters: each gets ``answer`` after ``after_s``, and ``most`` is how many were out together."""

    def __init__(self) -> None:
        self.answer, self.after_s = AWAY, TIMEOUT_S
        self.sent = self.out = self.most = 0
        self.later: Callable[[float, Callable[[], None]], object] = lambda after_s, call: None

    def send(self, given_up: Record, failure: Resent, done: Callable[[Resent], None]) -> bool:
        self.sent, self.out = self.sent + 1, self.out + 1
        self.most = max(self.most, self.out)

        def end() -> None:
            self.out -= 1
            done(self.answer)

        self.later(self.after_s, end)
        return True


@pytest.fixture
def letters() -> Letters:
    """Letters without an answer."""
    return Letters()


@pytest.fixture
def bench(tmp_path: Path, letters: Letters) -> Bench:
    """Brokers refuse the messages for topics whose names begin with "bad"."""
    bench = Bench(tmp_path / "s", max_out=SLOTS, letters=letters.send)
    letters.later, bench.answer_s = bench.timer.later, ANSWER_S
    bench.works = lambda one: REFUSED if one.target.startswith("topic bad") else Resent()
    return bench


def add_refused(bench: Bench, topics: int, each: int) -> None:
    bench.add(*(record(b"bad", target=f"topic bad{i}") for i in range(topics) for _ in range(each)), after_s=0)


def lateness(bench: Bench) -> list[float]:
    """Of good messages, whose payload is their due time."""
    return [second - float(payload) for second, payload in bench.tried if payload != b"bad"]


def test_letters_without_answers_delay_no_others(bench: Bench, letters: Letters) -> None:
    for i in range(200):
        bench.add(record(b"%.1f" % (i / 10), target="topic good"), after_s=i / 10)
    bench.time.advance(1)
    add_refused(bench, topics=6, each=100)
    bench.time.advance(30)
    late = lateness(bench)
    assert (len(late), letters.most) == (200, 1)
    assert max(late) < 0.5
    assert len(bench.store) == 600


def test_records_with_waiting_letters_follow_the_steps(bench: Bench, letters: Letters) -> None:
    add_refused(bench, topics=2, each=50)
    bench.time.advance(20_000)
    assert letters.most == 1
    assert len(bench.tried) <= 100 * (len(STEPS_S) + 20_000 // STEPS_S[-1])
    letters.answer, letters.after_s = Resent(), ANSWER_S
    bench.time.advance(2 * STEPS_S[-1])
    assert (len(bench.store), bench.store.totals.give_ups, bench.store.totals.dead) == (0, 100, 0)


def test_failures_of_letters_count_while_others_come(bench: Bench, letters: Letters) -> None:
    """A letter that goes out in the turn that settles the last one does not hide the failure of that one."""
    letters.after_s = ANSWER_S
    for i in range(1000):
        bench.add(record(b"bad", target="topic bad"), after_s=i / 100)
    bench.time.advance(10)
    assert letters.most == 1
    assert letters.sent < 30


@pytest.mark.parametrize("answer", [Resent(), REFUSED])
def test_a_letter_topic_that_answers_gets_all_soon(bench: Bench, letters: Letters, answer: Resent) -> None:
    letters.after_s = ANSWER_S
    add_refused(bench, topics=1, each=1)
    bench.time.advance(5)
    letters.answer = answer
    add_refused(bench, topics=3, each=50)
    bench.time.advance(100)
    assert len(bench.store) == 1  # the one whose letter failed
    bench.time.advance(STEPS_S[-1])
    assert (len(bench.store), bench.store.totals.give_ups) == (0, 151)
    assert bench.store.totals.dead == (0 if answer.error is None else 151)

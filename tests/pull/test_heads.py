"""What a filter hides: ends of shifted queues, and removed messages that look like skipped ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers, stored_offset_at
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.pull.reading import FilteredReadCheck, SingleMessageReader, with_true_ends
from tests.pull.pull_model import Model, Queue

Q = MessageQueue("t", "b", 0)
P = MessageQueue("t", "b", 1)


def heads(model: Model, sparse: bool = False) -> SingleMessageReader:
    """Over a broker whose queues miss messages because they were removed, not because of a filter."""

    def reader(ranges: Sequence[OffsetRange], on_loss: OnLoss) -> RangeReader:
        return model.reader(ranges, PullSettings(), on_loss)

    return SingleMessageReader(reader, lambda queue: sparse)


def test_each_place_has_its_message() -> None:
    model = Model([Queue(0, 20), Queue(5, 20)])
    assert heads(model)([(Q, 19), (P, 5), (Q, 0)]) == [19, 5, 0]
    assert len(model.streams) == 1


def test_what_lies_below_the_minimum_is_gone() -> None:
    assert heads(Model([Queue(10, 20)]))([(Q, 9), (Q, 10)]) == [None, 10]


def test_skipped_offsets_are_gone_by_minimum_or_after_grace_time() -> None:
    permanent = Model([Queue(0, 20, gaps=frozenset(range(7)))])
    assert heads(permanent)([(Q, 6), (Q, 7)]) == [None, 7]
    assert 15 <= permanent.time.now - 1000 < 20
    soon = Model([Queue(0, 20, gaps=frozenset(range(7)), truncate=(1001.0, 7))])
    assert heads(soon)([(Q, 6), (Q, 7)]) == [None, 7]
    assert soon.time.now - 1000 < 4


def test_compaction_topic_uses_next_message_for_a_missing_offset() -> None:
    model = Model([Queue(0, 20, gaps=frozenset(range(7)))])
    assert heads(model, sparse=True)([(Q, 3)]) == [7]
    assert model.time.now - 1000 < 1


def test_an_inner_batch_is_where_its_offsets_are() -> None:
    model = Model([Queue(0, 20, batches={4: 5})])
    assert heads(model)([(Q, 6)]) == [4]
    assert model.time.now - 1000 < 1


class Script:
    """Heads that a test decides; ``asked`` are the rounds of questions."""

    def __init__(self, there: dict[tuple[MessageQueue, int], int | None]) -> None:
        self.there = there
        self.asked: list[list[tuple[MessageQueue, int]]] = []

    def __call__(self, places: Sequence[tuple[MessageQueue, int]]) -> list[int | None]:
        self.asked.append(list(places))
        return [self.there[place] for place in places]


def beyond(number: int, limit: int) -> FetchedAnswer:
    return FetchedAnswer(number, limit - 10, limit, limit + 5, 0, 1)


def test_correct_answer_end_is_kept_with_all_ends_below_it() -> None:
    script = Script({(Q, 30): 30, (P, 50): 50})
    answers = [beyond(0, 10), beyond(0, 30), beyond(1, 50)]
    assert with_true_ends(answers, [Q, P], script) == answers  # type: ignore[arg-type]
    assert script.asked == [[(Q, 30), (P, 50)]]


def test_ends_of_a_shifted_queue_are_those_of_the_messages_there() -> None:
    script = Script({(Q, 10): 10, (Q, 20): 21, (Q, 30): 37, (P, 50): None})
    answers = [beyond(0, 10), beyond(0, 20), beyond(0, 30), beyond(1, 50)]
    found = with_true_ends(answers, [Q, P], script)  # type: ignore[arg-type]
    assert [answer.limit for answer in found] == [10, 21, 37, 50]
    assert all(answer.next_offset > answer.limit for answer in found)


@dataclass
class Filtered:
    """A filtered read of queue 0 whose filter wants every seventh message, on a broker whose log lost its front.

    Its minimum lags behind, so that answers go on behind what is gone as if the filter had skipped it.
    """

    gone: int = 0
    truncate: tuple[float, int] | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    removed_after_fetch: int | None = None

    def read(self, start: int, end: int, **settings: int) -> Filtered:
        front = frozenset(range(self.gone))
        log = Model([Queue(0, end + 10, gaps=front, truncate=self.truncate)])
        view = Model([Queue(0, end + 10, gaps=front | {n for n in range(end + 10) if n % 7}, truncate=self.truncate)])
        view.time = log.time
        if self.removed_after_fetch is not None:
            view.latency = lambda queue, at: at / 64
        ranges = [OffsetRange(Q, start, end)]
        check = FilteredReadCheck(ranges, heads(log), self._lost, log.time.clock)
        reader = view.reader(ranges, PullSettings(has_filter=True, **settings), check.record_loss)
        for fetched in reader.fetch():
            places = [at for answer in fetched.answers for at in range(answer.begin, answer.end, 40)]
            self.found += [stored_offset_at(fetched.buffer, at) for at in places]
            check.record_answers(fetched)
            if self.removed_after_fetch is not None:
                log.queues[0].low = self.removed_after_fetch
        check.check_all()
        self.questions = len(log.asked)
        return self

    def _lost(self, part: OffsetRange, cause: Cause) -> None:
        assert cause is Cause.TRUNCATED
        self.lost.append((part.start, part.end))


def test_a_filter_that_skips_is_no_loss_and_costs_one_question() -> None:
    read = Filtered().read(1, 900)
    assert (read.lost, read.questions) == ([], 1)


@pytest.mark.parametrize("truncate", [None, (1010.0, 300)])
def test_filtered_jump_over_removed_messages_is_a_loss(
    truncate: tuple[float, int] | None,
) -> None:
    read = Filtered(gone=300, truncate=truncate).read(1, 900)
    assert read.lost == [(1, 301)]
    assert [n for n in read.found if n < 900] == list(range(301, 900, 7))


def test_where_nothing_is_found_at_all_everything_is_in_doubt() -> None:
    assert Filtered(gone=900).read(701, 706).lost == [(701, 706)]


def test_a_loss_that_the_read_tells_is_told_once() -> None:
    assert Filtered(gone=300, truncate=(0.0, 300)).read(1, 900).lost == [(1, 300)]


def test_what_is_removed_after_it_was_looked_after_is_no_loss() -> None:
    """A long read at the front of the log: its first answers are read, and then their messages go."""
    read = Filtered(removed_after_fetch=250).read(0, 4000, batch_size=64, offsets_per_fetch=256)
    assert read.lost == []
    assert read.questions > 4


def test_of_a_topic_that_was_deleted_nothing_more_is_asked() -> None:
    told: list[tuple[OffsetRange, Cause]] = []
    script = Script({})
    check = FilteredReadCheck([OffsetRange(Q, 0, 10)], script, lambda *loss: told.append(loss))  # type: ignore[arg-type]
    check.record_loss(OffsetRange(Q, 4, 10), Cause.TOPIC_DELETED)
    check.check_all()
    assert (told, script.asked) == ([(OffsetRange(Q, 4, 10), Cause.TOPIC_DELETED)], [])


def test_what_was_read_before_it_was_removed_is_no_loss() -> None:
    told: list[tuple[OffsetRange, Cause]] = []
    check = FilteredReadCheck([OffsetRange(Q, 0, 10)], lambda places: [None], lambda *loss: told.append(loss))  # type: ignore[arg-type]
    buffer = np.zeros(64, np.uint8)  # a message whose offset is 0
    check.record_answers(FetchedAnswers(buffer, [FetchedAnswer(0, 0, 10, 10, 0, 64)]))
    check.check_all()
    assert told == []

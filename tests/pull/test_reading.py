"""The one way to read ranges, over a scripted broker: what holes and ends mean with a filter and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer, Hole, stored_offset_at
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.pull.reading import FilteredReadCheck, RangesReading, read
from rocketmq_spark.pull.recreated import RecreatedTopics
from tests.pull.pull_model import Model, Queue, holes

Q = MessageQueue("t", "b", 0)
TAGS = Filter("a")


class Puller:
    """Over a model; ``asked`` are the filters and planned addresses of its readers."""

    def __init__(self, model: Model, compacted: bool = False) -> None:
        self.model = model
        self.is_compacted = lambda queue: compacted
        self.asked: list[tuple[Filter, str | None]] = []

    def reader(
        self,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        filtered: Filter = NO_FILTER,
        planned_address: str | None = None,
        recreated: RecreatedTopics | None = None,
    ) -> RangeReader:
        self.asked.append((filtered, planned_address))
        return self.model.reader(ranges, PullSettings(has_filter=bool(filtered)), on_loss)


def reading(puller: Puller, end: int, filtered: Filter = NO_FILTER) -> tuple[RangesReading, list[Any]]:
    lost: list[Any] = []
    ranges = [OffsetRange(Q, 0, end)]
    made = read(puller, ranges, lambda part, cause: lost.append((part.start, part.end, cause)), filtered, "h:1")  # type: ignore[arg-type]
    assert made.queues == [Q]
    return made, lost


def offsets(found: RangesReading, model: Model) -> list[int]:
    got = []
    for fetched in found.fetch():
        usable = found.count_usable_answers(fetched.answers, holes(model, fetched))
        for answer in fetched.answers[:usable]:
            for at in range(answer.begin, answer.end, 40):
                offset = stored_offset_at(fetched.buffer, at)
                if answer.next_offset <= answer.limit or offset < answer.limit:
                    got.append(offset)
    return got


GAPPED = frozenset(range(3, 7))


def test_holes_become_losses_where_every_offset_has_a_message() -> None:
    model = Model([Queue(0, 20, GAPPED)])
    found, lost = reading(Puller(model), 20)
    assert offsets(found, model) == [0, 1, 2, *range(7, 20)]
    assert lost == [(3, 7, Cause.TRUNCATED)]
    assert model.time.now - 1000 >= 15


def test_holes_of_a_compaction_topic_are_right() -> None:
    model = Model([Queue(0, 20, GAPPED)])
    found, lost = reading(Puller(model, compacted=True), 20)
    assert offsets(found, model) == [0, 1, 2, *range(7, 20)]
    assert (lost, model.time.now - 1000 < 1) == ([], True)


def test_filter_explains_holes_and_first_message_is_looked_up() -> None:
    model = Model([Queue(0, 20, GAPPED)])
    puller = Puller(model)
    found, lost = reading(puller, 20, TAGS)
    assert offsets(found, model) == [0, 1, 2, *range(7, 20)]
    assert (lost, puller.asked) == ([], [(TAGS, "h:1"), (NO_FILTER, "h:1")])


def test_what_a_filter_hides_at_the_front_is_reported() -> None:
    model = Model([Queue(0, 20, frozenset(range(7)))])
    found, lost = reading(Puller(model), 20, TAGS)
    assert offsets(found, model) == [*range(7, 20)]
    assert lost == [(0, 7, Cause.TRUNCATED)]


def test_ends_are_asked_about_where_a_filter_hides_them() -> None:
    model = Model([Queue(0, 20, frozenset({9}))])
    beyond = [FetchedAnswer(0, 0, 9, 12, 0, 8)]
    whole, _ = reading(Puller(model), 20)
    assert whole.with_true_ends(beyond) is beyond
    filtered, _ = reading(Puller(model, compacted=True), 20, TAGS)
    assert filtered.with_true_ends(beyond) == [beyond[0]._replace(limit=10)]
    assert filtered.count_usable_answers(beyond, [Hole(0, 3, 4)]) == 1
    assert len(model.streams) == 1


def test_where_brokers_filter_nothing_holes_count() -> None:
    puller = Puller(Model([Queue(0, 20)]))
    found, lost = reading(puller, 20, NO_FILTER)
    assert offsets(found, puller.model) == [*range(20)]
    assert (lost, found.usable_answer_counter) == ([], found.count_usable_answers)
    assert [asked for asked, _ in puller.asked] == [NO_FILTER]
    by_broker, _ = reading(Puller(Model([Queue(0, 20)])), 20, TAGS)
    assert by_broker.usable_answer_counter is None


def test_loss_reported_mid_read_does_not_clear_earlier_offsets() -> None:
    """What a filter hid there may be gone, too."""
    lost: list[tuple[int, int]] = []
    check = FilteredReadCheck(
        [OffsetRange(Q, 0, 20)],
        lambda places: [None] * len(places),
        lambda part, _: lost.append((part.start, part.end)),
    )
    check.record_loss(OffsetRange(Q, 10, 12), Cause.TRUNCATED)
    check.check_all()
    assert lost == [(10, 12), (0, 20)]

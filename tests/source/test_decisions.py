"""What a plan decides: tables of what may happen to a queue, and what holds whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.source import data_loss, planning
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.planning import QueuesView

A, B, C = (MessageQueue(topic, broker, 0) for topic, broker in (("t", "a"), ("t", "b"), ("u", "a")))
BESIDE = MessageQueue("t", "a", 1)
AT_10 = Offsets({A: 10}, newest_store_ms={A: 700})
WENT_BACK, GONE, DELETED = Cause.WENT_BACK, Cause.QUEUE_GONE, Cause.TOPIC_DELETED


def view(bounds, newest_ms=900, **facts):
    found = {queue: QueueBounds(low, high, newest_ms) for queue, (low, high) in bounds.items()}
    return QueuesView(found, **{name: frozenset(values) for name, values in facts.items()})


# --- what exists


BOUNDS = {A: QueueBounds(5, 20, 0), B: QueueBounds(0, 7, 0)}


def test_a_topic_is_lacking_everywhere_or_on_one_broker():
    assert not QueuesView(BOUNDS).is_topic_deleted(A)
    assert QueuesView(deleted_topics=frozenset({"t"})).is_topic_deleted(A)
    forgotten = QueuesView(topics_missing_on_broker=frozenset({("t", "a")}))
    assert (forgotten.is_topic_deleted(A), forgotten.is_topic_deleted(B)) == (True, False)


def test_slaves_say_what_can_be_read_and_not_what_is_lost():
    view = QueuesView(BOUNDS, brokers_without_master=frozenset({"b"}))
    assert view.ends() == {A: 20, B: 7}
    assert view.master_bounds() == {A: BOUNDS[A]}


# --- what happened to a position


HAPPENED = {
    "nothing": (view({A: (0, 20)}), None, (), {}, None, []),
    "it is away": (view({}), None, (), {}, None, []),
    "its end went back": (view({A: (2, 9)}), None, (), {}, ({A: 2}, {A: 2}, {}), [(9, 10, WENT_BACK)]),
    "it was made again and grew": (view({A: (3, 20)}), None, [A], {}, ({A: 3}, {A: 3}, {}), [(10, 10, WENT_BACK)]),
    "its topic was deleted": (view({}, deleted_topics=["t"]), None, (), {}, ({}, {}, {}), [(10, 10, DELETED)]),
    "its broker forgot it": (
        view({}, topics_missing_on_broker=[("t", "a")]),
        None,
        (),
        {},
        ({}, {}, {}),
        [(10, 10, DELETED)],
    ),
    "another broker forgot": (view({}, topics_missing_on_broker=[("t", "b")]), None, (), {}, None, []),
    "it is not read, unread": (view({}), None, (), {A: 15}, ({A: 15}, {A: 15}, {}), [(10, 15, GONE)]),
    "it is not read, finished": (view({}), None, (), {A: 10}, None, []),
    "it is not read, and went back": (view({}), None, (), {A: 0}, ({}, {}, {}), [(0, 10, WENT_BACK)]),
    "it is not read, and went back in a run that ends": (
        view({}),
        {A: 20},
        (),
        {A: 4},
        ({}, {}, {}),
        [(4, 20, WENT_BACK)],
    ),
    "it is not read, and shrank in a run that ends": (view({}), {A: 20}, (), {A: 10}, None, [(10, 20, WENT_BACK)]),
    "it went back in a run that ends": (view({A: (0, 4)}), {A: 20}, (), {}, ({A: 0}, {A: 0}, {}), [(4, 20, WENT_BACK)]),
    "it shrank in a run that ends": (view({A: (0, 12)}), {A: 20}, (), {}, None, [(12, 20, WENT_BACK)]),
    "a slave has less in such a run": (view({A: (0, 12)}, brokers_without_master=["a"]), {A: 20}, (), {}, None, []),
    "it is as it was in such a run": (view({A: (0, 30)}), {A: 20}, (), {}, None, []),
}


@pytest.mark.parametrize("what", HAPPENED)
def test_what_happened_to_a_queue(what):
    seen, frozen, remade, hidden, expected, lost = HAPPENED[what]
    begin = replace(AT_10, source_identity={"tags": "x"})
    after, losses = planning.apply_queue_changes(begin, seen, frozen, remade, hidden)
    assert losses == [(OffsetRange(A, start, end), cause) for start, end, cause in lost]
    if expected is None:
        assert after is begin
    else:
        assert (after.positions, after.new_queue_starts, after.newest_store_ms) == expected
        assert after.source_identity == begin.source_identity


def test_losses_of_several_queues_are_reported_together():
    begin = Offsets({A: 10, B: 5, C: 8}, newest_store_ms={A: 1, B: 2, C: 3})
    after, losses = planning.apply_queue_changes(begin, view({A: (0, 4), B: (0, 9)}, deleted_topics=["u"]), None)
    assert [(part.queue, cause) for part, cause in losses] == [(A, WENT_BACK), (C, DELETED)]
    assert after == Offsets({A: 0, B: 5}, {A: 0}, {B: 2})


def test_a_vanished_queue_is_told_with_the_queues_beside_it():
    """The topic was created again with fewer queues."""
    begin = Offsets({A: 10, BESIDE: 5}, newest_store_ms={A: 1, BESIDE: 2})
    for seen, remade, lost in ((view({A: (0, 4)}), (), (4, 10)), (view({A: (0, 40)}), [A], (10, 10))):
        after, losses = planning.apply_queue_changes(begin, seen, None, remade, {BESIDE: 0})
        assert sorted(losses) == [(OffsetRange(A, *lost), WENT_BACK), (OffsetRange(BESIDE, 0, 5), WENT_BACK)]
        assert after == Offsets({A: 0}, {A: 0})
        with pytest.raises(DataLossError, match=r"t/a/1 offsets 0 to 5 \(offset went back"):
            data_loss.report_data_loss("fail", losses)


_QUEUES = st.sampled_from([A, B, C])
_POSITIONS = st.dictionaries(_QUEUES, st.integers(0, 20))
_BOUNDS = st.dictionaries(_QUEUES, st.tuples(st.integers(0, 10), st.integers(0, 12)).map(lambda b: (b[0], sum(b))))
_FROZEN = st.none() | st.dictionaries(_QUEUES, st.integers(0, 25))


@st.composite
def _moments(draw):
    """A plan's inputs: what is deleted has no bounds, what is hidden neither."""
    positions, marks = draw(_POSITIONS), draw(_POSITIONS)
    begin = Offsets(positions, newest_store_ms={queue: mark for queue, mark in marks.items() if queue in positions})
    bounds = draw(_BOUNDS)
    gone = {topic for topic in draw(st.sets(st.sampled_from("tu"))) if all(q.topic != topic for q in bounds)}
    seen = view(bounds, deleted_topics=gone, brokers_without_master=draw(st.sets(st.sampled_from("ab"))))
    remade = [queue for queue in draw(st.sets(_QUEUES)) if queue in begin.positions and queue in bounds]
    absent = [queue for queue in begin.positions if queue not in bounds and not seen.is_topic_deleted(queue)]
    hidden = {queue: draw(st.integers(0, 25)) for queue in absent if draw(st.booleans())}
    return begin, seen, draw(_FROZEN), sorted(remade), hidden


@given(_moments())
def test_a_position_only_moves_where_a_loss_is_reported(moment):
    begin, seen, frozen, remade, hidden = moment
    after, losses = planning.apply_queue_changes(*moment)
    told = {part.queue for part, _ in losses}
    vanished = {queue for queue, end in hidden.items() if end < begin.positions[queue]}
    assert vanished <= told
    assert after.positions.keys() == {queue for queue in begin.positions if not seen.is_topic_deleted(queue)} - vanished
    for queue, position in after.positions.items():
        assert position == begin.positions[queue] or queue in told
        assert queue not in seen.bounds or position <= seen.bounds[queue].max_offset
        assert (position != begin.positions[queue]) <= (queue in after.new_queue_starts), (
            "a restart must know where it began"
        )
    assert after.new_queue_starts.keys() <= after.positions.keys()
    assert after.newest_store_ms.keys() <= after.positions.keys()
    assert not after.newest_store_ms.keys() & set(remade), "the old mark says nothing of a new topic"
    assert (after is begin) == (after.positions.keys() == begin.positions.keys() and not after.new_queue_starts)
    assert all(0 <= part.start <= part.end for part, _ in losses)
    # Planned from there, nothing of it is told again.
    left = None if frozen is None else planning.capped_target_ends(seen, frozen, hidden)
    still = {queue: end for queue, end in hidden.items() if queue in after.positions}
    assert planning.apply_queue_changes(after, seen, left, (), still) == (after, [])


# --- a run that reads what is there and ends


@pytest.mark.parametrize(
    ("frozen", "bounds", "expected"),
    [
        ({A: 20}, {A: (0, 12)}, {A: 12}),
        ({A: 20}, {A: (0, 30)}, {A: 20}),
        ({A: 20}, {}, {A: 20}),
    ],
)
def test_ends_that_went_back_are_lowered(frozen, bounds, expected):
    assert planning.capped_target_ends(view(bounds), frozen, {}) == expected


def test_a_slave_lowers_no_end():
    assert planning.capped_target_ends(view({A: (0, 12)}, brokers_without_master=["a"]), {A: 20}, {}) == {A: 20}


@pytest.mark.parametrize(
    ("frozen", "expected"), [(None, {A: 30, B: 7}), ({A: 20}, {A: 20}), ({A: 40, C: 5}, {A: 30}), ({}, {})]
)
def test_how_far_may_be_read(frozen, expected):
    assert planning.readable_ends(view({A: (0, 30), B: (0, 7)}), frozen) == expected


@pytest.mark.parametrize(
    ("seen", "position", "waits"),
    [
        (view({A: (0, 20)}), 10, False),
        (view({}), 10, True),
        (view({}), 20, False),  # nothing is left of it to be read
        (view({}, deleted_topics=["t"]), 10, False),
        (view({A: (0, 12)}, brokers_without_master=["a"]), 10, False),  # first what the slave has
        (view({A: (0, 12)}, brokers_without_master=["a"]), 12, True),
        (view({A: (0, 20)}, brokers_without_master=["a"]), 12, False),
        (view({A: (0, 12)}), 12, False),  # of a master that is a loss
    ],
)
def test_what_a_run_to_the_end_waits_for(seen, position, waits):
    assert planning.pending_queues(Offsets({A: position}), seen, {A: 20}) == ([A] if waits else [])
    assert planning.pending_queues(Offsets({A: position}), seen, None) == []


# --- whom to believe


@pytest.mark.parametrize(
    ("bounds", "newest_ms", "believed"),
    [
        ((0, 20), 900, True),
        ((0, 10), 100, True),  # it has nothing new, whatever its clock says
        ((0, 20), 699, False),  # older than what was read: of a topic that was made again since
        ((11, 20), 900, False),
        ((0, 9), 900, False),
    ],
)
def test_a_slave_is_read_where_it_goes_on(bounds, newest_ms, believed):
    seen = view({A: bounds}, newest_ms, brokers_without_master=["a"])
    assert set(planning.without_stale_replicas(AT_10, seen).bounds) == ({A} if believed else set())
    assert planning.without_stale_replicas(Offsets({}), seen).bounds == {}, (
        "of a new queue only the master knows the beginning"
    )


def test_what_a_silent_broker_said_before_is_not_planned():
    seen = view({A: (0, 20), B: (0, 30)}, timed_out_brokers=["b"])
    assert planning.without_timed_out_brokers(seen).bounds == {A: seen.bounds[A]}
    told = view({A: (0, 20), B: (0, 30)})
    assert planning.without_timed_out_brokers(told) is told


def test_masters_are_believed():
    seen = view({A: (11, 20), B: (0, 1)})
    assert planning.without_stale_replicas(AT_10, seen) is seen
    of_both = planning.without_stale_replicas(AT_10, view({A: (11, 20), B: (0, 1)}, brokers_without_master=["a"]))
    assert set(of_both.bounds) == {B}


def test_topics_that_are_not_subscribed_to_leave():
    begin = Offsets({A: 1, C: 2}, {A: 0}, {A: 5, C: 6}, {"tags": "x"})
    assert planning.without_unsubscribed_topics(begin, {"t", "u", "v"}) is begin
    assert planning.without_unsubscribed_topics(begin, set()) is begin, "nobody could be asked"
    assert planning.without_unsubscribed_topics(begin, {"t"}) == Offsets({A: 1}, {}, {A: 5}, {"tags": "x"})


# --- the end of a batch


def test_an_end_says_what_a_restart_must_know():
    seen = view({A: (0, 20), B: (4, 9)}, 900)
    begin = AT_10
    plain = planning.batch_end(begin, begin, Offsets({A: 12, B: 6}, {B: 4}), seen, None)
    assert (plain.new_queue_starts, plain.newest_store_ms) == ({B: 4}, {A: 900, B: 900})
    again, _ = planning.apply_queue_changes(begin, seen, None, [A])
    restarted = planning.batch_end(begin, again, Offsets({A: 3, B: 6}, {B: 4}), seen, None)
    assert restarted.new_queue_starts == {A: 0, B: 4}
    assert planning.batch_end(begin, again, again, seen, None).new_queue_starts == {A: 0}
    first = planning.batch_end(begin, begin, Offsets({A: 12}), seen, Offsets({A: 10}, newest_store_ms={A: 700}))
    assert first.new_queue_starts == {A: 10}


# --- the ranges of a batch


def test_what_is_gone_is_not_read_and_told():
    ranges = [OffsetRange(A, 0, 9), OffsetRange(B, 0, 9), OffsetRange(C, 2, 4)]
    kept, losses = planning.readable_ranges(ranges, view({A: (4, 9), B: (12, 20)}, deleted_topics=["u"]))
    assert kept == [OffsetRange(A, 4, 9)]
    assert losses == [
        (OffsetRange(A, 0, 4), Cause.TRUNCATED),
        (OffsetRange(B, 0, 9), Cause.TRUNCATED),
        (OffsetRange(C, 2, 4), DELETED),
    ]


def test_a_slave_does_not_say_what_is_lost():
    ranges = [OffsetRange(A, 0, 9)]
    assert planning.readable_ranges(ranges, view({A: (4, 9)}, brokers_without_master=["a"])) == (ranges, [])


def test_ranges_of_recreated_topics_are_dropped_as_lost():
    ranges = [OffsetRange(A, 0, 9), OffsetRange(B, 3, 9)]
    seen = view({A: (0, 30), B: (0, 9)})
    assert planning.without_recreated_queues(ranges, seen, [A]) == ([ranges[1]], [(ranges[0], WENT_BACK)])
    assert planning.without_recreated_queues(ranges, seen, []) == (ranges, [])


def test_ranges_beyond_the_queue_end_are_left_to_the_next_batch():
    """It goes on at the start of such a queue: what was read here would come twice."""
    ranges = [OffsetRange(A, 0, 9), OffsetRange(B, 3, 9), OffsetRange(C, 0, 1)]
    seen = view({A: (0, 8), B: (0, 8)}, brokers_without_master=["b"])
    assert planning.without_recreated_queues(ranges, seen, []) == (ranges[1:], [(ranges[0], WENT_BACK)])


def test_what_was_logged_ends_at_its_marks():
    ranges = [OffsetRange(A, 0, 9), OffsetRange(C, 0, 1)]
    end = Offsets({A: 9, B: 7, C: 1}, newest_store_ms={A: 700, B: 800})
    assert planning.logged_end(ranges, end, view({A: (0, 30), B: (0, 9)})) == Offsets(
        {A: 9}, newest_store_ms={A: 700, B: 800}
    )


def test_the_remedy_says_what_is_read_of_a_queue_that_went_back():
    """Its new messages are not lost."""
    with pytest.raises(DataLossError) as back:
        data_loss.report_data_loss("fail", [(OffsetRange(A, 75, 1205), WENT_BACK)])
    assert back.value.remedy.endswith("a stream then reads all present messages of a queue that went back")
    with pytest.raises(DataLossError) as gone:
        data_loss.report_data_loss("fail", [(OffsetRange(A, 0, 4), Cause.TRUNCATED)])
    assert gone.value.remedy.endswith("to go on without these offsets")

"""Topics that were deleted and made again: what statistics prove, what is asked of brokers, and a model of all of it."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source import planning
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.recreated_topics import (
    RecreationEvidence,
    RecreationResult,
    RecreationWatch,
    evidence_of,
    expired_queues,
    queues_needing_store_time,
    queues_to_probe,
    recreated_queues,
)
from tests.fakes.ports import Fake
from tests.helpers import raising

A, B, C = (MessageQueue("t", "b", number) for number in range(3))
ELSEWHERE = MessageQueue("t", "c", 0)
MARK = 1000


# --- what statistics say


@pytest.mark.parametrize(
    ("position", "bounds", "expected"),
    [
        (10, (0, 9, 2000), RecreationEvidence.ENDS_BEFORE),
        (10, (0, 9, 500), RecreationEvidence.ENDS_BEFORE),
        (10, (10, 30, 2000), RecreationEvidence.EXPIRED),
        (0, (0, 30, 2000), RecreationEvidence.EXPIRED),
        (10, (0, 10, MARK), RecreationEvidence.SAME),
        (
            10,
            (0, 10, MARK + 1),
            RecreationEvidence.RECREATED,
        ),  # its newest message is the last one that was read, and is another
        (10, (0, 30, MARK), RecreationEvidence.SAME),  # a backlog that was seen before
        (
            10,
            (0, 30, MARK + 1),
            RecreationEvidence.UNDECIDED,
        ),  # what comes every day, and a topic that has overtaken the position
        (10, (0, 10, 0), RecreationEvidence.UNDECIDED),
        (10, (0, 10, -1), RecreationEvidence.UNDECIDED),
    ],
)
def test_what_statistics_say_of_a_queue(position, bounds, expected):
    assert evidence_of(position, MARK, QueueBounds(*bounds)) is expected


def test_a_queue_without_a_mark():
    assert evidence_of(10, 0, QueueBounds(0, 30, 2000)) is RecreationEvidence.NO_STORE_TIME
    assert evidence_of(10, 0, QueueBounds(0, 9, 2000)) is RecreationEvidence.ENDS_BEFORE
    assert evidence_of(10, 0, QueueBounds(10, 30, 2000)) is RecreationEvidence.EXPIRED


SHARE = {("t", "b")}


@pytest.mark.parametrize(
    ("seen", "watched", "asked"),
    [
        (
            {A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.UNDECIDED, C: RecreationEvidence.UNDECIDED},
            SHARE,
            [A],
        ),
        (
            {A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.UNDECIDED, C: RecreationEvidence.UNDECIDED},
            (),
            [A, B, C],
        ),
        ({A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.SAME, C: RecreationEvidence.UNDECIDED}, SHARE, []),
        (
            {A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.SAME, C: RecreationEvidence.UNDECIDED},
            (),
            [A, C],
        ),  # a broker that comes back may have lost a part
        ({A: RecreationEvidence.ENDS_BEFORE, B: RecreationEvidence.UNDECIDED, C: RecreationEvidence.SAME}, SHARE, [B]),
        (
            {A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.RECREATED, C: RecreationEvidence.UNDECIDED},
            SHARE,
            [A, C],
        ),
        ({A: RecreationEvidence.EXPIRED, B: RecreationEvidence.NO_STORE_TIME, C: RecreationEvidence.SAME}, (), []),
        (
            {B: RecreationEvidence.UNDECIDED, C: RecreationEvidence.UNDECIDED, ELSEWHERE: RecreationEvidence.UNDECIDED},
            SHARE | {("t", "c")},
            [B, ELSEWHERE],
        ),
        ({B: RecreationEvidence.SAME, ELSEWHERE: RecreationEvidence.UNDECIDED}, SHARE | {("t", "c")}, [ELSEWHERE]),
    ],
)
def test_what_is_asked(seen, watched, asked):
    assert sorted(queues_to_probe(seen, watched)) == asked


def test_unchanged_queues_are_probed_only_if_another_one_changed():
    for changed, asked in (({}, []), ({C: RecreationEvidence.ENDS_BEFORE}, [A, B])):
        assert (
            queues_to_probe(
                {A: RecreationEvidence.UNDECIDED, B: RecreationEvidence.UNDECIDED, **changed},
                SHARE,
                lambda queues: B in queues,
            )
            == asked
        )


def test_queues_without_a_mark_go_with_those_beside_them():
    seen = {
        A: RecreationEvidence.NO_STORE_TIME,
        B: RecreationEvidence.UNDECIDED,
        C: RecreationEvidence.SAME,
        ELSEWHERE: RecreationEvidence.NO_STORE_TIME,
    }
    assert recreated_queues(seen, []) == []
    assert recreated_queues(seen, [B]) == [A, B]
    assert recreated_queues({**seen, B: RecreationEvidence.ENDS_BEFORE}, []) == [A]
    assert recreated_queues({**seen, B: RecreationEvidence.RECREATED}, []) == [A, B]


# --- what is asked of brokers


def connected(reader, brokers="bc"):
    """The connections of a poll during which none of them changed."""
    return {name: (reader.connection(name),) * 2 for name in brokers}


class Brokers:
    """Says where messages younger than a time begin, and when messages were stored; ``silent`` brokers say nothing."""

    def __init__(self, younger, stored=(), silent=()):
        self.younger, self.stored, self.silent, self.asked = younger, dict(stored), silent, []
        self.connections = Counter()

    def connection(self, broker_name):
        return self.connections[broker_name]

    def search_offsets(self, times_ms, deadline, on_error):
        self.asked.append(dict(times_ms))
        for queue in times_ms:
            if queue.broker_name in self.silent:
                on_error(CallTimeout("no answer"), queue)
        return {queue: self.younger[queue] for queue in times_ms if queue.broker_name not in self.silent}

    def store_time_ms(self, group, queue, offset, deadline):
        if "pull" in self.silent:
            raise CallTimeout("no answer")
        return self.stored.get((queue, offset))

    def store_times_ms(self, group, offsets, deadline, on_error=None):
        asked = {queue: self.stored.get((queue, offset)) for queue, offset in offsets.items()}
        return {queue: ms for queue, ms in asked.items() if ms is not None and "pull" not in self.silent}


def watching(brokers, *clock):
    return RecreationWatch(lambda: Fake(ports.OffsetReader, brokers), "g", *clock)


def looked(brokers, read, bounds, watch=None):
    return (watch or watching(brokers)).check(read, bounds, Deadline.after(1), connected(brokers))


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        # The connections of each poll, and whether its statistics are of after the restart.
        ([((1, 1), False), ((1, 1), False), ((2, 2), True)], [[], [], [B]]),  # a commit connected after the second poll
        ([((1, 1), False), ((1, 2), True)], [[], [B]]),  # the poll itself connected
        ([((1, 1), False), ((1, 2), False), ((2, 2), True)], [[], [], [B]]),  # it had its answer before
        ([((1, 2), False), ((2, 2), True)], [[], [B]]),
    ],
)
def test_reconnect_counts_until_statistics_are_surely_newer(polls, expected):
    brokers = Brokers({A: 30, B: 5}, {(B, 9): 2 * MARK})
    watch, read = watching(brokers), Offsets({A: 10, B: 10}, newest_store_ms={A: MARK, B: MARK})
    told = {A: QueueBounds(0, 10, MARK), B: QueueBounds(0, 10, MARK)}
    refilled = {**told, B: QueueBounds(0, 30, 2 * MARK)}
    found = [
        watch.check(read, refilled if restarted else told, Deadline.after(30), {"b": pair}).recreated_queues
        for pair, restarted in polls
    ]
    assert found == expected
    assert brokers.asked == [{B: MARK + 1}]


def test_reconnect_after_the_bounds_of_a_start_counts():
    brokers, read = Brokers({B: 5}, {(B, 9): 2 * MARK}), Offsets({A: 10, B: 10}, newest_store_ms={A: MARK, B: MARK})
    refilled = {A: QueueBounds(0, 10, MARK), B: QueueBounds(0, 30, 2 * MARK)}
    watch = watching(brokers)
    watch.start({A: QueueBounds(0, 10, MARK), B: QueueBounds(0, 10, MARK)}, connected(brokers))
    brokers.connections["b"] += 1
    assert looked(brokers, read, refilled, watch).recreated_queues == [B]


def test_store_time_from_a_broker_that_restarted_is_no_mark():
    """It may be that of a new message, and then nothing would show that the old one is lost."""
    brokers = Brokers({B: 5}, {(B, 9): 2 * MARK, (B, 29): MARK})
    read = Offsets({B: 10}, newest_store_ms={B: MARK})
    bounds, watch = {B: QueueBounds(0, 30, MARK)}, watching(brokers)
    looked(brokers, read, bounds, watch)
    assert watch.newest_store_ms(read, bounds, Deadline.after(1)) == {B: 2 * MARK}
    brokers.connections["b"] += 1
    assert watch.newest_store_ms(read, bounds, Deadline.after(1)) == {}


def open_at_10(*queues):
    return Offsets(dict.fromkeys(queues, 10), newest_store_ms=dict.fromkeys(queues, MARK)), dict.fromkeys(
        queues, QueueBounds(0, 30, 2000)
    )


def found(younger, stored=()):
    brokers = Brokers({A: younger}, stored)
    result = looked(brokers, *open_at_10(A))
    assert brokers.asked == [{A: MARK + 1}]
    assert not result.errors
    return result.recreated_queues


def test_younger_messages_after_the_position_are_new_ones():
    assert found(10) == []
    assert found(15) == []


def test_younger_messages_before_the_position_are_another_topics():
    assert found(0, {(A, 9): 2000}) == [A]


@pytest.mark.parametrize("stored", [{(A, 9): MARK}, {(A, 9): 400, (A, 5): 2000}, {}])
def test_the_message_before_the_position_has_the_last_word(stored):
    """Clocks of masters differ; after a fail-over times may run backwards."""
    assert found(5, stored) == []


def test_all_that_are_suspected_are_asked_at_once(monkeypatch):
    """A broker that takes the nearest message makes all its queues look so; one by one they would need a plan's whole time."""
    queues = [MessageQueue("t", "a", i) for i in range(300)]
    brokers = Brokers(dict.fromkeys(queues, 9), {(queue, 9): MARK for queue in queues})
    monkeypatch.setattr(brokers, "store_time_ms", raising(AssertionError("one by one")))
    result = looked(brokers, *open_at_10(*queues))
    assert (result.recreated_queues, result.errors) == ([], {})


def test_where_compaction_removed_it_the_first_younger_one_has():
    assert found(5, {(A, 5): 2000}) == [A]
    assert found(5, {(A, 5): MARK}) == []


def test_one_probe_per_topic_and_broker_unless_a_sign_is_found():
    queues = [MessageQueue("t", "b", number) for number in range(300)]
    read, bounds = open_at_10(*queues)
    brokers = Brokers(dict.fromkeys(queues, 20))
    watch = watching(brokers)
    assert looked(brokers, read, bounds, watch) == RecreationResult([], {})
    assert [len(asked) for asked in brokers.asked] == [300], "a start asks about all"
    brokers.asked.clear()
    assert looked(brokers, read, bounds, watch) == RecreationResult([], {})
    assert brokers.asked == [{queues[0]: MARK + 1}]
    brokers.younger, brokers.stored = dict.fromkeys(queues, 0), {(queue, 9): 2000 for queue in queues}
    assert looked(brokers, read, bounds, watch).recreated_queues == queues
    assert [len(asked) for asked in brokers.asked] == [1, 1, 299]


def test_what_was_away_is_asked_about_as_at_a_start():
    read, bounds = open_at_10(A, B, ELSEWHERE)
    brokers = Brokers(dict.fromkeys(bounds, 20))
    watch = watching(brokers)
    for there in (bounds, {ELSEWHERE: bounds[ELSEWHERE]}, bounds):
        looked(brokers, read, there, watch)
    assert [sorted(asked) for asked in brokers.asked] == [[A, B, ELSEWHERE], [ELSEWHERE], [A, B, ELSEWHERE]]


@pytest.mark.parametrize("newest_of_a", [MARK, 3 * MARK])
def test_a_queue_that_is_read_again_is_asked_about_itself(newest_of_a):
    """The topic was made again with fewer queues, and later got more: that the others are its own says nothing of this one."""
    brokers = Brokers({A: 10, B: 0}, {(B, 9): 2 * MARK})
    watch, read = watching(brokers), Offsets({A: 10, B: 10}, newest_store_ms={A: MARK, B: MARK})
    assert looked(brokers, read, {A: QueueBounds(0, 10, MARK)}, watch).recreated_queues == []
    bounds = {A: QueueBounds(0, 30, newest_of_a), B: QueueBounds(0, 30, 2 * MARK)}
    assert looked(brokers, read, bounds, watch).recreated_queues == [B]
    read = Offsets({A: 30, B: 30}, newest_store_ms={A: newest_of_a, B: 2 * MARK})
    brokers.asked.clear()
    for newest in (3, 4):
        looked(brokers, read, {A: QueueBounds(0, 40, newest * MARK), B: QueueBounds(0, 40, newest * MARK)}, watch)
    assert [sorted(asked) for asked in brokers.asked[-1:]] == [[A]], "once"


def test_what_was_connected_to_anew_is_asked_about_as_at_a_start():
    """A broker that crashes and is back before the next batch was away for nobody, and may have lost messages all the same."""
    read, bounds = open_at_10(A, B, ELSEWHERE)
    brokers = Brokers(dict.fromkeys(bounds, 20))
    watch = watching(brokers)
    looked(brokers, read, bounds, watch)
    brokers.asked.clear()
    brokers.connections[A.broker_name] += 1
    looked(brokers, read, bounds, watch)
    looked(brokers, read, bounds, watch)
    assert [sorted(asked) for asked in brokers.asked] == [[A, B, ELSEWHERE], [A, ELSEWHERE]]


@pytest.mark.parametrize("silent", ["search", "pull"])
def test_broker_that_does_not_answer_leaves_its_queues_unproven(silent):
    read, bounds = open_at_10(A, B, ELSEWHERE)
    brokers = Brokers({A: 20, B: 0, ELSEWHERE: 20}, {(B, 9): 2000}, ["b"] if silent == "search" else ["pull"])
    watch = watching(brokers)
    for _ in range(2):
        result = looked(brokers, read, bounds, watch)
        assert result.recreated_queues == []
        assert result.errors.keys() == SHARE
    brokers.silent = ()
    assert looked(brokers, read, bounds, watch) == RecreationResult([B], {}), "all are asked about, as at a start"


def test_recreation_of_a_topic_waits_for_all_broker_answers():
    """Its queues leave the view of that plan, and one that is not in it can neither be moved nor lost."""
    read, bounds = open_at_10(A, B)
    bounds = {**bounds, A: QueueBounds(0, 10, 2000)}  # the newest of its messages is the one before the position
    brokers = Brokers({B: 0}, silent=["b"])
    watch = watching(brokers)
    result = looked(brokers, read, bounds, watch)
    assert (result.recreated_queues, result.errors.keys()) == ([], SHARE)
    brokers.silent, brokers.stored = (), {(B, 9): 2000}
    assert looked(brokers, read, bounds, watch) == RecreationResult([A, B], {})


def test_broker_that_stops_answering_is_not_asked_for_each_queue():
    read, bounds = open_at_10(A, B, C)
    brokers = Brokers({A: 0, B: 0, C: 0}, silent=["pull"])
    pulls = []
    answer = brokers.store_time_ms
    brokers.store_time_ms = lambda *asked: pulls.append(asked) or answer(*asked)
    assert looked(brokers, read, bounds).errors.keys() == SHARE
    assert len(pulls) == 1


def test_without_open_queues_nobody_is_asked():
    nobody = Brokers({})
    assert looked(nobody, Offsets({}), {}) == RecreationResult([], {}, is_decided=True)
    read = Offsets({A: 10, B: 10}, newest_store_ms={A: MARK, B: MARK})
    bounds = {A: QueueBounds(0, 10, MARK), B: QueueBounds(0, 10, MARK + 1)}
    assert looked(nobody, read, bounds) == RecreationResult([B], {}, is_decided=True)
    assert nobody.asked == []


@pytest.mark.parametrize(
    ("minimum", "later_ms", "newest_ms", "asked"),
    [(4, 59_000, 1, False), (4, 60_000, 1, True), (5, 0, 1, True), (0, 0, 1, True), (4, -1, 1, True), (4, 0, 0, True)],
    ids=["stayed", "too long ago", "moved", "nothing was removed", "a clock was put back", "at a Proxy"],
)
def test_a_minimum_that_stayed_proves_a_topic_for_a_while(minimum, later_ms, newest_ms, asked):
    """One that is made again begins at 0."""
    now_ms, queues, brokers = [1_000_000], (A, B, C), Brokers(dict.fromkeys((A, B, C), 20))
    watch, read = watching(brokers, lambda: now_ms[0]), open_at_10(*queues)[0]
    looked(brokers, read, dict.fromkeys(queues, QueueBounds(4 if minimum else 0, 30, 2000 * newest_ms)), watch)
    brokers.asked.clear()
    now_ms[0] += later_ms
    found = looked(brokers, read, dict.fromkeys(queues, QueueBounds(minimum, 31, 2001 * newest_ms)), watch)
    assert found == RecreationResult([], {})
    assert brokers.asked == ([{A: MARK + 1}] if asked else [])


def test_what_a_run_begins_with_is_not_looked_at_again():
    """Positions and marks are those of the bounds that were read a moment ago; a broker that was connected to since is."""
    (read, bounds), brokers = open_at_10(A, B, ELSEWHERE), Brokers(dict.fromkeys((A, B, ELSEWHERE), 20))
    watch = watching(brokers)
    watch.start(bounds, connected(brokers))
    looked(brokers, read, bounds, watch)
    assert brokers.asked == [{A: MARK + 1, ELSEWHERE: MARK + 1}]
    brokers.asked.clear()
    watch.start(bounds, connected(brokers))
    brokers.connections[A.broker_name] += 1
    looked(brokers, read, bounds, watch)
    assert brokers.asked == [{A: MARK + 1, B: MARK + 1, ELSEWHERE: MARK + 1}]


def test_many_questions_get_the_time_that_this_side_needs():
    deadlines, brokers = [], Brokers({})
    brokers.search_offsets = lambda times, deadline, note: deadlines.append(deadline) or {}
    looked(brokers, *open_at_10(*(MessageQueue("t", "b", number) for number in range(10_000))))
    assert 1.5 < deadlines[0].remaining() <= 2


# --- where a server tells no store times


def test_one_queue_of_each_topic_and_broker_gets_a_mark():
    untold = dict.fromkeys((A, B, C, ELSEWHERE), QueueBounds(0, 30, 0))
    read = Offsets({A: 0, B: 10, C: 10, ELSEWHERE: 5})
    assert queues_needing_store_time(read, untold) == [B, ELSEWHERE]
    assert queues_needing_store_time(Offsets(read.positions, newest_store_ms={C: MARK}), untold) == [ELSEWHERE]
    assert queues_needing_store_time(read, dict.fromkeys(untold, QueueBounds(10, 30, 0))) == []
    assert queues_needing_store_time(read, {}) == []


def test_marks_that_are_asked_for():
    untold = dict.fromkeys((A, B, ELSEWHERE), QueueBounds(0, 30, 0))
    read = Offsets({A: 3, B: 10, ELSEWHERE: 5})
    brokers = Brokers({}, {(A, 2): 77})
    watch = watching(brokers)
    assert watch.newest_store_ms(read, untold, Deadline.after(1)) == {A: 77}
    brokers.silent = ["pull"]
    assert watch.newest_store_ms(read, untold, Deadline.after(1)) == {}


@pytest.mark.parametrize(
    ("position", "bounds", "marked", "expected"),
    [
        (1, (1, 1, -1), False, True),  # one message, which expired
        (100, (100, 100, -1), False, True),
        (100, (150, 150, -1), False, True),
        (0, (0, 0, -1), False, False),  # none yet
        (1, (0, 1, -1), False, False),  # it may still be there
        (1, (1, 2, MARK), False, False),
        (1, (1, 1, 0), False, False),  # a Proxy tells no times
        (1, (1, 1, -1), True, False),
    ],
)
def test_queues_of_which_nothing_is_left_get_a_mark(position, bounds, marked, expected):
    read = Offsets({A: position}, newest_store_ms={A: MARK} if marked else {})
    assert expired_queues(read, {A: QueueBounds(*bounds)}) == ([A] if expected else [])


# --- clocks that were put back


def test_a_mark_of_a_backlog_is_no_older_than_what_was_read():
    """The last message that was read is of before the clock was put back, and the newest one of after it."""
    read = Offsets({A: 0, B: 10, C: 30})
    bounds = dict.fromkeys((A, B, C), QueueBounds(0, 30, MARK))
    assert queues_needing_store_time(read, bounds) == [B]
    assert queues_needing_store_time(read, dict.fromkeys(bounds, QueueBounds(10, 30, MARK))) == []
    for stored_ms, mark in ((MARK + 5, MARK + 5), (400, MARK)):
        brokers = Brokers({B: 7}, {(B, 9): stored_ms, (B, 29): MARK})
        marks = watching(brokers).newest_store_ms(read, bounds, Deadline.after(1))
        assert marks == {B: mark}
        # New messages come; the one before the position is younger than the newest one was.
        later = {B: QueueBounds(0, 31, MARK + 1)}
        assert looked(brokers, Offsets({B: 10}, newest_store_ms=marks), later).recreated_queues == []


@pytest.mark.parametrize(
    ("newest_ms", "marks"),
    [
        (MARK, {B: MARK + 5}),  # the clock was put back
        (MARK + 5, {}),  # another topic's message is there since the poll
        (MARK + 6, {}),
        (None, {}),
    ],
)
def test_mark_of_a_topic_created_again_after_a_poll_is_unused(newest_ms, marks):
    """With its mark, nothing would show that the messages before the batch are another topic's."""
    read, bounds = Offsets({B: 10}), {B: QueueBounds(0, 30, MARK)}
    brokers = Brokers({}, {(B, 9): MARK + 5, (B, 29): newest_ms})
    assert watching(brokers).newest_store_ms(read, bounds, Deadline.after(1)) == marks


def test_only_a_mark_newer_than_the_queue_is_checked():
    read, brokers = Offsets({A: 10, B: 10}), Brokers({}, {(A, 9): MARK - 5, (B, 9): 77})
    bounds = {A: QueueBounds(0, 30, MARK), B: QueueBounds(0, 30, 0)}  # a Proxy tells no times
    assert watching(brokers).newest_store_ms(read, bounds, Deadline.after(1)) == {A: MARK, B: 77}


def test_a_plan_waits_for_the_broker_that_may_have_another_topic(monkeypatch):
    read, bounds, brokers = Offsets({B: 10}), {B: QueueBounds(0, 30, MARK)}, Brokers({}, {(B, 9): MARK + 5})

    def times(group, offsets, deadline, on_error=None):
        if on_error is not None:
            on_error(CallTimeout("no answer"), B)
        return {B: MARK + 5}

    monkeypatch.setattr(brokers, "store_times_ms", times)
    with pytest.raises(CallTimeout):
        watching(brokers).newest_store_ms(read, bounds, Deadline.after(1))


# --- against a model


QUEUES = [MessageQueue(topic, broker, i) for topic in "tu" for broker in "ab" for i in range(3)]


class Model(RuleBasedStateMachine):
    """A cluster whose topics are deleted and made again and whose brokers lose the ends of queues, and a stream that plans
    batches from it. No two messages are stored at one time, so the last one that was read is known by it.

    Proxies tell no store times; a topic there has one mark.
    """

    @initialize(proxied=st.booleans())
    def start(self, proxied):
        self.proxied = proxied
        self.now = count(1_000_000)
        self.times = {queue: [] for queue in QUEUES}
        self.first = dict.fromkeys(QUEUES, 0)
        self.last = dict.fromkeys(QUEUES)
        self.offsets = Offsets(dict.fromkeys(QUEUES, 0))
        self.watch = watching(self, lambda: next(self.now))
        self.silent = frozenset()
        self.connections = Counter()
        self.cut = set()
        self.young = set()
        self.idle = None

    def connection(self, broker_name):
        return self.connections[broker_name]

    def reach(self, broker):
        """A request. The client connects again only for one."""
        if broker in self.cut:
            self.cut.remove(broker)
            self.connections[broker] += 1

    def polled(self, away, during=lambda: None):
        """Bounds, and the connections before and after they were told; ``during`` what happens between two topics."""
        brokers = sorted({*"ab"} - away)
        before = [self.connection(broker) for broker in brokers]
        bounds = {}
        for topic in "tu":
            for broker in brokers:
                self.reach(broker)
                bounds |= {queue: self.bounds(queue) for queue in QUEUES if queue[:2] == (topic, broker)}
            during()
        return bounds, dict(zip(brokers, zip(before, map(self.connection, brokers), strict=True), strict=True))

    def made(self, messages):
        return [next(self.now) for _ in range(messages)]

    @rule(queues=st.sets(st.sampled_from(QUEUES)), messages=st.integers(1, 5))
    def send(self, queues, messages):
        for queue in queues:
            self.times[queue] += self.made(messages)

    @rule(topic=st.sampled_from("tu"), broker=st.sampled_from("ab"), refilled=st.integers(0, 9) | st.none())
    def make_again(self, topic, broker, refilled):
        for queue in QUEUES:
            if queue[:2] == (topic, broker):
                size = self.offsets.positions[queue] if refilled is None else refilled
                self.times[queue], self.first[queue] = self.made(size), 0
                self.young.add(queue[:2])

    @precondition(lambda self: not self.proxied)
    @rule(
        broker=st.sampled_from("ab"),
        lost=st.lists(st.integers(0, 4), min_size=6, max_size=6),
        more=st.integers(0, 5),
        missed=st.booleans(),
    )
    def crash(self, broker, lost, more, missed):
        if missed:  # in a plan while it was away
            bounds, connections = self.polled({broker})
            self.watch.check(self.offsets, bounds, Deadline.after(9), connections)
        self.lose(broker, lost, more)

    @precondition(lambda self: not self.proxied)
    @rule(
        broker=st.sampled_from("ab"), lost=st.lists(st.integers(0, 4), min_size=6, max_size=6), more=st.integers(0, 5)
    )
    def crash_during_a_poll(self, broker, lost, more):
        """What it finds is not said here, for some bounds are of before. The next plan begins where this one did."""
        crashes = [lambda: self.lose(broker, lost, more), lambda: None]
        bounds, connections = self.polled(set(), lambda: crashes.pop(0)())
        self.watch.check(self.offsets, bounds, Deadline.after(9), connections)
        self.idle = None

    def lose(self, broker, lost, more):
        self.cut.add(broker)
        for queue, count_lost in zip((q for q in QUEUES if q.broker_name == broker), lost, strict=True):
            times = self.times[queue]
            self.times[queue] = times[: max(self.first[queue], len(times) - count_lost)] + self.made(more)

    @rule(queue=st.sampled_from(QUEUES))
    def expire(self, queue):
        """Messages expire when they are hours old; those of a topic that was made again since the last plan are not."""
        if queue[:2] in self.young:
            return
        self.first[queue] += (len(self.times[queue]) - self.first[queue] + 1) // 2

    @rule()
    def restart(self):
        self.watch = watching(self, lambda: next(self.now))
        self.offsets = Offsets.from_json(self.offsets.to_json())

    @rule(
        limit=st.none() | st.integers(1, 9),
        away=st.sets(st.sampled_from("ab"), max_size=1),
        silent=st.sets(st.sampled_from("ab"), max_size=1),
        waits=st.booleans(),
        made_again=st.tuples(st.sampled_from("tu"), st.sampled_from("ab")) | st.none(),
    )
    def plan(self, limit, away, silent, waits, made_again):
        """``made_again``: a topic and a broker of which another topic has all offsets when store times are asked for."""
        self.silent = silent
        begin, soon = self.offsets, Deadline.after(9)
        bounds, connections = self.polled(away)
        self.young -= {queue[:2] for queue in bounds}
        if self.idle == (begin, bounds, connections):  # the driver does not check an equal view again
            self.watch.note_unchanged()
            self.check(set(), bounds)
            return
        found, unanswered, is_decided = self.watch.check(begin, bounds, soon, connections)
        self.silent = frozenset()
        bounds = {queue: of for queue, of in bounds.items() if queue[:2] not in unanswered}
        told = {q for q in bounds if q in found or begin.positions[q] > bounds[q].max_offset}
        self.check(told, bounds)
        is_idle = is_decided and not told and begin.positions == {q: of.max_offset for q, of in bounds.items()}
        self.idle = (begin, bounds, connections) if is_idle else None
        if waits:  # for more messages: the next plan begins where this one did
            return
        restarted = {q: bounds[q].min_offset if q in told else p for q, p in begin.positions.items()}
        marks = {queue: mark for queue, mark in begin.newest_store_ms.items() if queue not in told}
        after = Offsets(restarted, newest_store_ms=marks)
        ends = {queue: of.max_offset for queue, of in bounds.items()}
        end = planning.next_end(planning.raised_to_min_offsets(after, bounds), ends, restarted, limit)
        self.offsets = Offsets(end.positions, newest_store_ms=planning.newest_store_ms(end.positions, after, bounds))
        self.last.update({queue: self.before(queue) for queue in bounds})
        if made_again and not self.proxied:  # bounds of a Proxy show nothing
            self.make_again(*made_again, None)
        asked = self.watch.newest_store_ms(self.offsets, bounds, soon)
        self.offsets = Offsets(end.positions, newest_store_ms={**self.offsets.newest_store_ms, **asked})

    def check(self, told, bounds):
        positions, marks = self.offsets.positions, self.offsets.newest_store_ms
        for queue, of in bounds.items():
            if queue in told:
                assert self.before(queue) != self.last[queue], f"{queue} is the same and was taken for another"
            elif positions[queue] > of.min_offset and self.before(queue) != self.last[queue]:
                assert queue not in marks, f"{queue} is another and nobody noticed"
                assert not any(one[:2] == queue[:2] for one in told), "queues of a topic at a Proxy go together"

    def before(self, queue):
        """The last message that was read, as it is now."""
        position = self.offsets.positions[queue]
        return self.times[queue][position - 1] if 0 < position <= len(self.times[queue]) else None

    def bounds(self, queue):
        times, first = self.times[queue], self.first[queue]
        newest = (times[-1] if len(times) > first else -1) if times else 0
        return QueueBounds(first, len(times), 0 if self.proxied else newest)

    def search_offsets(self, times_ms, deadline, on_error):
        found = {}
        for queue, time_ms in times_ms.items():
            if queue.broker_name in self.silent:
                on_error(CallTimeout("no answer"), queue)
            else:
                found[queue] = sum(stored < time_ms for stored in self.times[queue])
        return found

    def store_time_ms(self, group, queue, offset, deadline):
        return self.times[queue][offset] if self.first[queue] <= offset < len(self.times[queue]) else None

    def store_times_ms(self, group, offsets, deadline, on_error=None):
        asked = {queue: self.store_time_ms(group, queue, offset, deadline) for queue, offset in offsets.items()}
        return {queue: ms for queue, ms in asked.items() if ms is not None}


TestModel = Model.TestCase

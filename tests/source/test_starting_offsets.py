"""Starting offsets for words, numbers and times within the bounds of queues; what brokers say is in tests/live/options."""

from __future__ import annotations

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source import starting_offsets
from rocketmq_spark.spark.source.offsets import queues_text
from tests.fakes.ports import Fake

A, B = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
BOUNDS = {A: QueueBounds(5, 20, 0), B: QueueBounds(0, 0, 0)}
BY_QUEUE = ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp")


def check(role="batch source", **given):
    starting_offsets.check_start_and_end(
        options_table.parse({"nameServer": "h:1", "subscribe": "t", **given}).for_role(role), role
    )


def test_words():
    assert starting_offsets.resolve_offsets("earliest", BOUNDS, "x") == {A: 5, B: 0}
    assert starting_offsets.resolve_offsets("latest", BOUNDS, "x") == {A: 20, B: 0}


def test_numbers():
    assert starting_offsets.resolve_offsets({A: -2, B: -1}, BOUNDS, "x") == {A: 5, B: 0}
    assert starting_offsets.resolve_offsets({A: 20, B: 0}, BOUNDS, "x") == {A: 20, B: 0}
    # What lies below the minimum is loss, and found when it is planned.
    assert starting_offsets.resolve_offsets({A: 3, B: 0}, BOUNDS, "x") == {A: 3, B: 0}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({A: 0}, "option 'startingOffsets' must name every queue; it lacks t/b/1. Add them, with -2 for"),
        ({A: 0, B: 0, MessageQueue("t", "b", 2): 0}, "names queues that are not read: t/b/2"),
        ({A: 21, B: 0}, "t/b/0 is 21, but the queue ends at 20"),
    ],
)
def test_numbers_that_do_not_fit(given, problem):
    with pytest.raises(OffsetError) as caught:
        starting_offsets.resolve_offsets(given, BOUNDS, "startingOffsets")
    assert problem in str(caught.value)


C = MessageQueue("u", "b", 0)
MORE = {**BOUNDS, C: QueueBounds(3, 9, 0)}


@pytest.mark.parametrize("given", [{"t": -2, "u": -1}, {"t": -2, C: -1}, {A: -2, B: -1, "u": -1}])
def test_offsets_of_whole_topics_are_those_of_their_queues(given):
    assert starting_offsets.resolve_offsets(given, MORE, "startingOffsets") == {A: 5, B: 0, C: 9}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"t": -2},
            "it lacks u/b/0. Add them, with -2 for the first message that is kept, or -1 for the end; or name their",
        ),
        ({"t": -2, "u": -2, "v": -1}, "option 'startingOffsets' names topics that are not read: v"),
        ({A: 0, "u": -2}, "must name every queue; it lacks t/b/1"),
    ],
)
def test_topics_that_do_not_fit(given, problem):
    with pytest.raises(OffsetError) as caught:
        starting_offsets.resolve_offsets(given, MORE, "startingOffsets")
    assert problem in str(caught.value)


def committed(found, **given):
    """Where a start goes on for a group that has these offsets."""

    class Brokers:
        def committed(self, group, queues, deadline):
            assert (group, queues) == ("g", [A, B])
            return found

    parsed = options_table.parse(
        {"nameServer": "h:1", "subscribe": "t", "group": "g", "startingOffsets": "committed", **given}
    ).for_role("stream source")
    return starting_offsets.starting_offsets(Fake(ports.OffsetReader, Brokers()), parsed, BOUNDS, Deadline.after(1))


@pytest.mark.parametrize("fallback", ["error", "earliest", "latest"])
def test_a_committed_offset_0_is_an_offset(fallback):
    assert committed({A: 0, B: 0}, committedFallback=fallback) == {A: 0, B: 0}


def test_only_queues_without_a_committed_offset_fall_back():
    assert committed({A: None, B: 0}, committedFallback="latest") == {A: 20, B: 0}
    assert committed({A: 0, B: None}, committedFallback="latest") == {A: 0, B: 0}
    with pytest.raises(OffsetError, match=r"group 'g' has no offset of t/b/1\. Set option 'committedFallback'"):
        committed({A: 0, B: None}, committedFallback="error")


@pytest.mark.parametrize(("told", "taken"), [(2, 5), (-1, 5), (7, 7), (99, 20)])
@pytest.mark.parametrize("ways", [("startingTimestamp", "endingTimestamp"), BY_QUEUE])
def test_what_a_broker_says_of_a_time_is_taken_within_bounds(told, taken, ways):
    """Below its minimum it would be taken for loss, and past the end for messages that are to come."""

    class Brokers:
        def search_offsets(self, times, deadline, group=""):
            assert times == {A: 1000, B: 2000 if ways == BY_QUEUE else 1000}
            return {A: told, B: 0}

    for role, option, bound in zip(
        ("stream source", "batch source"), ways, ("starting_offsets", "ending_offsets"), strict=True
    ):
        time = '{"t":{"b":{"0":1000,"1":2000}}}' if ways == BY_QUEUE else "1000"
        given = {option: time, "startingOffsetsByTimestampStrategy": "latest"}
        parsed = options_table.parse({"nameServer": "h:1", "subscribe": "t", **given}).for_role(role)
        found = getattr(starting_offsets, bound)(Fake(ports.OffsetReader, Brokers()), parsed, BOUNDS, Deadline.after(1))
        assert found == {A: taken, B: 0}


@pytest.mark.parametrize(
    "given", [{"startingTimestamp": "1000"}, {"startingOffsetsByTimestamp": '{"t":{"b":{"0":1,"1":2}}}'}]
)
@pytest.mark.parametrize("low", [0, 7])
def test_an_empty_queue_starts_at_its_end(given, low):
    """It has no message that is older than the time; whether one was there and is deleted makes no difference."""
    old, empty = {A: QueueBounds(5, 20, 0)}, {B: QueueBounds(low, low, 0)}

    class Brokers:
        def search_offsets(self, times, deadline, group=""):
            return {queue: {**old, **empty}[queue].max_offset for queue in times}

    reader = Fake(ports.OffsetReader, Brokers())
    parsed = options_table.parse({"nameServer": "h:1", "subscribe": "t", **given}).for_role("stream source")
    if "startingTimestamp" in given:
        assert starting_offsets.starting_offsets(reader, parsed, empty, Deadline.after(1)) == {B: low}
    with pytest.raises(OffsetError, match=r"t/b/0 has no message stored at or after the time\. Give an earlier time"):
        starting_offsets.starting_offsets(reader, parsed, old | empty, Deadline.after(1))


@pytest.mark.parametrize(
    "end",
    [
        {"endingOffsets": '{"t":{"b":{"0":6,"1":0}}}'},
        {"endingTimestamp": "9"},
        {"endingOffsetsByTimestamp": '{"t":{"b":{"0":9,"1":9}}}'},
    ],
)
def test_a_start_after_the_end_names_both_options(end):
    parsed = options_table.parse({"nameServer": "h:1", "subscribe": "t", **end}).for_role("batch source")
    with pytest.raises(OffsetError) as caught:
        starting_offsets.check_start_before_end(parsed, {A: 7, B: 0}, {A: 6, B: 0}, BOUNDS)
    assert "after the end in t/b/0: t/b/0 starts at offset 7 (option 'startingOffsets')" in str(caught.value)
    assert f"ends at 6 (option '{next(iter(end))}')" in str(caught.value)
    starting_offsets.check_start_before_end(parsed, {A: 6, B: 0}, {A: 6, B: 0}, BOUNDS)


def test_a_group_may_be_past_the_time_at_which_a_batch_ends():
    given = {"nameServer": "h:1", "subscribe": "t", "group": "g", "startingOffsets": "committed"}
    by_time = options_table.parse({**given, "endingTimestamp": "9"}).for_role("batch source")
    starting_offsets.check_start_before_end(by_time, {A: 7, B: 0}, {A: 6, B: 0}, BOUNDS)
    by_offset = options_table.parse({**given, "endingOffsets": '{"t":{"b":{"0":6,"1":0}}}'}).for_role("batch source")
    for parsed, start in ((by_time, 21), (by_offset, 7)):
        with pytest.raises(OffsetError, match=f"t/b/0 starts at offset {start}"):
            starting_offsets.check_start_before_end(parsed, {A: start, B: 0}, {A: 6, B: 0}, BOUNDS)


@pytest.mark.parametrize(
    "start", [{"startingTimestamp": "2000"}, {"startingOffsetsByTimestamp": '{"t":{"b":{"0":1000,"1":2000}}}'}]
)
@pytest.mark.parametrize("end", ["endingTimestamp", "endingOffsetsByTimestamp"])
def test_times_in_the_wrong_order_are_an_error_without_a_broker(start, end):
    def ends(ms):
        return {end: ms if end == "endingTimestamp" else {"t": {"b": {"0": 5000, "1": ms}}}}

    check(**start, **ends(2000))
    with pytest.raises(OptionError, match=r"1970-01-01T00:00:02\.000Z, but option") as caught:
        check(**start, **ends(1999))
    assert all(f"'{name}'" in str(caught.value) for name in (*start, end))
    check(
        **{"startingTimestamp": "2000"} | {"endingTimestamp": "3000", "endingOffsetsByTimestamp": '{"t":{"b":{"0":1}}}'}
    )


def test_long_lists_are_cut():
    queues = [MessageQueue("t", "b", i) for i in range(13)]
    assert queues_text(reversed(queues)).endswith("t/b/9 and 3 more")
    assert queues_text([A]) == "t/b/0"


@pytest.mark.parametrize(
    ("role", "given", "problem"),
    [
        ("batch source", {"startingOffsets": "latest"}, "'latest'; a batch that starts at the end reads nothing"),
        ("batch source", {"startingOffsets": '{"t":"latest"}'}, "t is latest; a batch that starts at the end"),
        ("batch source", {"startingOffsets": '{"t":{"b":{"0":-1}}}'}, "t/b/0 is -1; a batch that starts at the end"),
        ("batch source", {"endingOffsets": '{"t":{"b":{"0":-2}}}'}, "t/b/0 is -2; a batch that ends at the beginning"),
        ("stream source", {"startingOffsets": "committed"}, "give the group with option 'group'"),
    ],
)
def test_what_makes_no_sense(role, given, problem):
    with pytest.raises(OptionError) as caught:
        check(role, **given)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("role", "given"),
    [
        ("stream source", {"startingOffsets": "latest"}),
        ("stream source", {"startingOffsets": '{"t":{"b":{"0":-1}}}'}),
        ("stream source", {"startingOffsets": '{"t":"latest"}'}),
        ("batch source", {"startingOffsets": '{"t":"earliest"}', "endingOffsets": '{"t":"latest"}'}),
        ("stream source", {"startingOffsets": "committed", "group": "g"}),
        ("batch source", {"startingOffsets": "earliest", "endingOffsets": "latest"}),
    ],
)
def test_what_makes_sense(role, given):
    check(role, **given)

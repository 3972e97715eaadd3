"""Where reads start and end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from rocketmq_spark import Message, Producer, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import parse
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, read

BROKER = "broker-a"


class Story:
    """A topic of two queues: five messages in each, and five more in each at a later time ``cut`` (epoch ms)."""

    def __init__(self, mq: LocalBroker, topic: str) -> None:
        self.topic = topic
        self.early = {queue: feed(mq, topic, 5, queues=[queue]) for queue in (0, 1)}
        stored = [row["storeTimestamp"] for row in read(mq, subscribe=topic)]
        self.cut = int(max(stored).timestamp() * 1000) + 1
        eventually(lambda: time.time() * 1000 > self.cut + 1)
        self.late = {queue: feed(mq, topic, 5, queues=[queue]) for queue in (0, 1)}

    def by_queue(self, **numbers: int) -> str:
        """JSON with a number for each queue: ``q0=…, q1=…``."""
        return json.dumps({self.topic: {BROKER: {name[1:]: number for name, number in numbers.items()}}})

    @property
    def all_early(self) -> set[str]:
        return {*self.early[0], *self.early[1]}

    @property
    def all_late(self) -> set[str]:
        return {*self.late[0], *self.late[1]}

    @property
    def everything(self) -> set[str]:
        return self.all_early | self.all_late


@pytest.fixture
def story(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> Story:
    return Story(rocketmq, make_topic(queues=2))


@pytest.fixture
def got(rocketmq: LocalBroker, story: Story) -> Callable[..., set[str]]:
    """The bodies of a batch read."""
    return lambda **options: set(bodies(read(rocketmq, subscribe=story.topic, **options)))


def test_starting_offsets__batch_takes_earliest_not_latest(got, story):
    assert got() == got(startingOffsets="earliest") == story.everything
    for wrong in ("latest", story.by_queue(q0=-1, q1=0)):
        with pytest.raises(OptionError, match="startingOffsets"):
            got(startingOffsets=wrong)


def test_starting_offsets__by_queue(got, story, rocketmq):
    assert got(startingOffsets=story.by_queue(q0=7, q1=-2)) == {*story.late[0][2:], *story.early[1], *story.late[1]}
    with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/1"):
        got(startingOffsets=story.by_queue(q0=1))
    with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/2"):
        got(startingOffsets=story.by_queue(q0=1, q1=1, q2=1))
    with pytest.raises(OffsetError, match="11"):
        got(startingOffsets=story.by_queue(q0=11, q1=1))
    run = Run(rocketmq, subscribe=story.topic, startingOffsets=story.by_queue(q0=7, q1=-1))
    more = feed(rocketmq, story.topic, 2, queues=[1])
    run.drain([*story.late[0][2:], *more])
    assert Counter(run.read) == Counter({*story.late[0][2:], *more})


def test_starting_offsets__by_topic(rocketmq, make_topic):
    a, b, c = (make_topic(queues=2) for _ in "abc")
    early = {topic: feed(rocketmq, topic, 4, queues=[0, 1]) for topic in (a, b, c)}
    whole = json.dumps({a: "earliest", b: "latest", c: {BROKER: {"0": 1, "1": -1}}})
    run = Run(rocketmq, subscribe=f"{a},{b},{c}", startingOffsets=whole)
    late = {topic: feed(rocketmq, topic, 2, queues=[0, 1]) for topic in (a, b, c)}
    run.drain([*early[a], early[c][1], *(body for bodies in late.values() for body in bodies)])
    assert len(run.read) == 4 + 1 + 6
    start, end = (
        json.dumps({a: "earliest", b: {BROKER: {"0": 0, "1": 2}}}),
        json.dumps({a: {BROKER: {"0": 1, "1": 1}}, b: "latest"}),
    )
    found = bodies(read(rocketmq, subscribe=f"{a},{b}", startingOffsets=start, endingOffsets=end))
    assert Counter(found) == Counter([*early[a][::2], *early[b][:2], *late[b]])
    with pytest.raises(OffsetError, match=f"topics that are not read: {c}"):
        read(rocketmq, subscribe=a, startingOffsets=json.dumps({a: "earliest", c: "earliest"}))


@pytest.mark.parametrize("where", ["earliest", "latest", None])
def test_starting_offsets__of_a_stream(rocketmq, story, where):
    run = Run(rocketmq, subscribe=story.topic, **({"startingOffsets": where} if where else {}))
    more = feed(rocketmq, story.topic, 4)
    run.drain(more)
    assert Counter(run.read) == Counter({*more} if where != "earliest" else story.everything | {*more})


def test_starting_offsets__do_not_beat_a_checkpoint_and_say_so(rocketmq, story, caplog):
    run = Run(rocketmq, subscribe=story.topic, startingOffsets="earliest")
    run.drain(story.everything)
    more = feed(rocketmq, story.topic, 4)
    again = Run(rocketmq, run.offset, subscribe=story.topic, startingOffsets="earliest")
    again.drain(more)
    assert Counter(again.read) == Counter(more)
    assert "the query continues from its checkpoint" in caplog.text


def commit(mq: LocalBroker, group: str, offsets: dict[MessageQueue, int]) -> None:
    mq.admin.create_group(group)
    parsed = parse({"nameServer": mq.name_server, "subscribe": "t"})
    assert session.committer(parsed).commit_each(group, offsets, Deadline.after(10)) == {}


def test_starting_offsets__committed(rocketmq, got, story):
    group = f"g-{story.topic}"
    with pytest.raises(OptionError, match="'group'"):
        got(startingOffsets="committed")
    commit(rocketmq, group, {MessageQueue(story.topic, BROKER, 0): 5, MessageQueue(story.topic, BROKER, 1): 10})
    assert got(startingOffsets="committed", group=group) == {*story.late[0]}


def test_committed_fallback__is_error_earliest_or_latest(rocketmq, got, story):
    group = f"g-{story.topic}"
    commit(rocketmq, group, {MessageQueue(story.topic, BROKER, 0): 5})
    asked = {"startingOffsets": "committed", "group": group}
    for options in (asked, {**asked, "committedFallback": "error"}):
        with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/1"):
            got(**options)
    assert got(**asked, committedFallback="earliest") == {*story.late[0], *story.early[1], *story.late[1]}
    assert got(**asked, committedFallback="latest") == {*story.late[0]}


def test_starting_timestamp__in_milliseconds_or_iso_8601(got, story):
    iso = datetime.fromtimestamp(story.cut / 1000, UTC).isoformat(timespec="milliseconds")
    assert got(startingTimestamp=story.cut) == story.all_late
    assert got(startingTimestamp=iso) == got(startingTimestamp=iso.replace("+00:00", "Z")) == story.all_late
    assert got(startingTimestamp=iso.removesuffix("+00:00")) == story.all_late


def test_starting_timestamp__before_everything_and_at_zero(got, story):
    assert got(startingTimestamp=0) == got(startingTimestamp=1) == story.everything
    assert got(startingTimestamp="1971-01-01T00:00:00Z") == story.everything


def test_starting_timestamp__beats_the_other_two(got, story):
    others = {"startingOffsetsByTimestamp": story.by_queue(q0=0, q1=0), "startingOffsets": story.by_queue(q0=9, q1=9)}
    assert got(startingTimestamp=story.cut, **others) == story.all_late


@pytest.mark.parametrize("start", [0, 1, None])
def test_starting_timestamp__of_a_topic_with_empty_queues(rocketmq, make_topic, start):
    topic = make_topic(queues=4)
    time_ms = int(time.time() * 1000) - 3_600_000 if start is None else start
    run = Run(rocketmq, subscribe=topic, startingTimestamp=time_ms)
    sent = feed(rocketmq, topic, 1, queues=[2])
    assert bodies(read(rocketmq, subscribe=topic, startingTimestamp=time_ms)) == sent
    assert (
        Counter(bodies(read(rocketmq, subscribe=topic, startingTimestamp=time_ms, endingTimestamp=time_ms)))
        == Counter()
    )
    run.drain(sent)


def test_starting_timestamp__of_a_stream(rocketmq, story):
    run = Run(rocketmq, subscribe=story.topic, startingTimestamp=story.cut)
    run.drain(story.all_late)
    assert Counter(run.read) == Counter(story.all_late)


def test_starting_offsets_by_timestamp__overrides_offsets(got, story):
    mixed = story.by_queue(q0=story.cut, q1=0)
    expected = {*story.late[0], *story.early[1], *story.late[1]}
    assert got(startingOffsetsByTimestamp=mixed) == expected
    assert got(startingOffsetsByTimestamp=mixed, startingOffsets=story.by_queue(q0=9, q1=9)) == expected
    with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/0"):
        got(startingOffsetsByTimestamp=story.by_queue(q1=0))


def test_starting_offsets_by_timestamp_strategy__for_future_time(rocketmq, got, story):
    future = story.cut + 10**9
    for option in ({"startingTimestamp": future}, {"startingOffsetsByTimestamp": story.by_queue(q0=0, q1=future)}):
        with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/1"):
            got(**option)
        with pytest.raises(OffsetError, match="startingOffsetsByTimestampStrategy"):
            got(**option, startingOffsetsByTimestampStrategy="error")
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    assert got(startingTimestamp=future, **latest) == set()
    run = Run(rocketmq, subscribe=story.topic, startingTimestamp=future, **latest)
    more = feed(rocketmq, story.topic, 2)
    run.drain(more)
    assert Counter(run.read) == Counter(more)


def test_ending_offsets__by_queue(got, story):
    assert got(endingOffsets=story.by_queue(q0=2, q1=-1)) == {*story.early[0][:2], *story.early[1], *story.late[1]}
    assert got(endingOffsets="latest") == story.everything
    for wrong in ("earliest", story.by_queue(q0=-2, q1=1)):
        with pytest.raises(OptionError, match="endingOffsets"):
            got(endingOffsets=wrong)
    with pytest.raises(OffsetError, match="start"):
        got(startingOffsets=story.by_queue(q0=5, q1=0), endingOffsets=story.by_queue(q0=4, q1=1))


def test_ending_timestamp__is_exclusive_and_beats_the_others(got, story):
    assert got(endingTimestamp=story.cut) == story.all_early
    others = {"endingOffsets": story.by_queue(q0=1, q1=1), "endingOffsetsByTimestamp": story.by_queue(q0=1, q1=1)}
    assert got(endingTimestamp=story.cut, **others) == story.all_early
    assert got(endingTimestamp=1) == set()
    assert got(endingTimestamp=story.cut + 10**9) == story.everything
    assert got(startingTimestamp=story.cut, endingTimestamp=story.cut) == set()
    for start in ({"startingTimestamp": story.cut + 1}, {"startingOffsets": story.by_queue(q0=6, q1=0)}):
        for end in (
            {"endingTimestamp": story.cut},
            {"endingOffsetsByTimestamp": story.by_queue(q0=story.cut, q1=story.cut)},
        ):
            with pytest.raises((OffsetError, OptionError), match=f"option '{next(iter(end))}'"):
                got(**start, **end)


def test_ending_offsets_by_timestamp__for_each_queue(got, story):
    ends = story.by_queue(q0=story.cut, q1=story.cut + 10**9)
    assert got(endingOffsetsByTimestamp=ends) == {*story.early[0], *story.early[1], *story.late[1]}
    assert got(endingOffsetsByTimestamp=ends, endingOffsets=story.by_queue(q0=1, q1=1)) == got(
        endingOffsetsByTimestamp=ends
    )


def test_times__of_a_batch_topic(rocketmq, make_topic):
    """A broker takes the last batch for one of any later time: a read up to then lacked it, one from then on had it."""
    topic = make_topic(queues=1, batch=True)
    queue = MessageQueue(topic, BROKER, 0)
    with Producer(rocketmq.name_server, "p") as producer:
        for batch in range(3):
            producer.send_batch([Message(topic, b"%d-%d" % (batch, n)) for n in range(4)], queue)
    everything = eventually_read(rocketmq, topic, 12)
    last = int(max(row["storeTimestamp"] for row in everything).timestamp() * 1000)
    whole = sorted(row["body"] for row in everything)
    for later in (last + 1, last + 10**9):
        assert sorted(row["body"] for row in read(rocketmq, subscribe=topic, endingTimestamp=later)) == whole
        late = {"startingTimestamp": later, "startingOffsetsByTimestampStrategy": "latest"}
        assert read(rocketmq, subscribe=topic, **late) == []


def eventually_read(mq, topic, count):
    eventually(lambda: len(read(mq, subscribe=topic)) == count)
    return read(mq, subscribe=topic)


@pytest.mark.parametrize("policy", ["fail", "ignore"])
@pytest.mark.parametrize("by", ["subscribePattern", "assign"])
def test_starts__are_alike_for_a_pattern_and_assigned_queues(rocketmq, story, by, policy):
    """Each start of a stream, with a restart in between; then a queue and a topic that only the pattern reads."""
    topic, new = story.topic, f"{story.topic}-new"
    chosen = {"subscribePattern": f"{topic}(-new)?", "assign": {topic: {BROKER: [0, 1]}}}[by]
    starts: dict[str, tuple[dict[str, object], set[str]]] = {
        "earliest": ({"startingOffsets": "earliest"}, story.everything),
        "latest": ({"startingOffsets": "latest"}, set()),
        "by queue": ({"startingOffsets": story.by_queue(q0=7, q1=-1)}, {*story.late[0][2:]}),
        "a time": ({"startingTimestamp": story.cut}, story.all_late),
        "times by queue": (
            {"startingOffsetsByTimestamp": story.by_queue(q0=story.cut, q1=0)},
            {*story.late[0], *story.early[1], *story.late[1]},
        ),
    }
    given = {name: {by: chosen, "failOnDataLoss": policy, **options} for name, (options, _) in starts.items()}
    runs = {name: Run(rocketmq, **options) for name, options in given.items()}
    more = feed(rocketmq, topic, 4)
    for name, run in runs.items():
        run.drain({*starts[name][1], *more})
    again = {name: Run(rocketmq, run.offset, **given[name]) for name, run in runs.items()}
    rocketmq.create_topic(topic, 3, resize=True)
    rocketmq.create_topic(new, 1)
    grown = [*feed(rocketmq, topic, 2, queues=[2]), *feed(rocketmq, new, 2)]
    last = feed(rocketmq, topic, 4, queues=[0, 1])
    for run in again.values():
        run.drain([*last, *(grown if by == "subscribePattern" else ())])
        assert run.batch() == []
    found = {name: Counter(runs[name].read + again[name].read) for name in runs}
    rest = [*more, *last, *(grown if by == "subscribePattern" else ())]
    assert found == {name: Counter([*first, *rest]) for name, (_, first) in starts.items()}


def test_starting_offsets_by_timestamp_strategy__of_a_pattern(rocketmq, story):
    future, every = story.cut + 10**9, {"subscribePattern": f"{story.topic}.*"}
    for option, before in (
        ({"startingTimestamp": future}, []),
        ({"startingOffsetsByTimestamp": story.by_queue(q0=0, q1=future)}, [*story.early[0], *story.late[0]]),
    ):
        with pytest.raises(OffsetError, match=f"{story.topic}/{BROKER}/1"):
            Run(rocketmq, **every, **option).latest()
        run = Run(rocketmq, **every, **option, startingOffsetsByTimestampStrategy="latest")
        more = feed(rocketmq, story.topic, 2, queues=[1])
        run.drain([*before, *more])
        assert Counter(run.read) == Counter([*before, *more])


def test_a_start_by_time_with_an_end_by_offset_and_the_reverse(rocketmq, story):
    early, late = story.early, story.late
    by_queue = story.by_queue
    for options, expected in (
        ({"startingTimestamp": story.cut, "endingOffsets": by_queue(q0=7, q1=-1)}, [*late[0][:2], *late[1]]),
        (
            {"startingOffsetsByTimestamp": by_queue(q0=story.cut, q1=0), "endingOffsets": by_queue(q0=6, q1=3)},
            [*late[0][:1], *early[1][:3]],
        ),
        ({"startingOffsets": by_queue(q0=2, q1=-2), "endingTimestamp": story.cut}, [*early[0][2:], *early[1]]),
        (
            {
                "startingOffsets": by_queue(q0=2, q1=6),
                "endingOffsetsByTimestamp": by_queue(q0=story.cut, q1=story.cut + 10**9),
            },
            [*early[0][2:], *late[1][1:]],
        ),
    ):
        assert Counter(bodies(read(rocketmq, subscribe=story.topic, **options))) == Counter(expected), options

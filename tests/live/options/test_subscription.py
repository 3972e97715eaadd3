"""What is read: topics, queues and filters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OptionError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.wire import rpc
from tests.reading import Run, bodies, feed, names, plan, post, read

MakeTopic = Callable[..., str]


@pytest.fixture
def two(rocketmq: LocalBroker, make_topic: MakeTopic) -> tuple[tuple[str, set[str]], tuple[str, set[str]]]:
    """Two topics with what is in them."""
    first, second = make_topic(queues=2), make_topic(queues=2)
    return (first, set(feed(rocketmq, first, 6))), (second, set(feed(rocketmq, second, 4)))


def tagged(mq: LocalBroker, topic: str, *tags: str | None) -> dict[str, str | None]:
    """A message per tag; tags by body."""
    made = dict(zip(names(len(tags)), tags, strict=True))
    post(mq, [Message(topic, body.encode(), tags=tag) for body, tag in made.items()])
    return made


def test_subscribe__names_the_topics_and_no_others(rocketmq, two):
    (first, in_first), (second, in_second) = two
    assert Counter(bodies(read(rocketmq, subscribe=first))) == Counter(in_first)
    assert Counter(bodies(read(rocketmq, subscribe=f"{first}, {second}"))) == Counter(in_first | in_second)
    assert Counter(bodies(read(rocketmq, subscribe=[second]))) == Counter(in_second)


def test_topic_names__with_dots_are_those_with_underscores(rocketmq):
    topic = f"{names(1, 'db')[0]}_shop_orders"
    rocketmq.create_topic(topic, 2)
    given = set(feed(rocketmq, topic, 6))
    dotted, rule = topic.replace("_", "."), {"topicNames": "dotsToUnderscores"}
    found = read(rocketmq, subscribe=dotted, startingOffsets=f'{{"{dotted}":"earliest"}}', **rule)
    assert Counter(bodies(found)) == Counter(given)
    assert {row["topic"] for row in found} == {topic}
    queues = f'{{"{dotted}":{{"{rocketmq.brokers[0]}":[0,1]}}}}'
    assert Counter(bodies(read(rocketmq, assign=queues, **rule))) == Counter(given)
    first = Run(rocketmq, subscribe=dotted, startingOffsets="earliest", **rule)
    assert Counter(bodies(first.batch())) == Counter(given)
    assert {queue.topic for queue in first.positions} == {topic}
    later = set(feed(rocketmq, topic, 4))
    assert Counter(bodies(Run(rocketmq, first.offset, subscribe=topic).batch())) == Counter(later)


def test_subscribe__missing_topic_error_lists_nearest_names(rocketmq, topic):
    with pytest.raises(RouteNotFound) as e:
        read(rocketmq, subscribe=topic + "x")
    assert e.value.topic == topic + "x"
    assert topic in str(e.value)
    assert rocketmq.name_server in str(e.value)


def test_subscribe_pattern__matches_whole_names_of_user_topics(rocketmq, two):
    (first, in_first), (second, in_second) = two
    assert Counter(bodies(read(rocketmq, subscribePattern=f"{first}|{second}"))) == Counter(in_first | in_second)
    assert Counter(bodies(read(rocketmq, subscribePattern=f"{first[:-1]}."))) == Counter(in_first)
    with pytest.raises(RouteNotFound):
        read(rocketmq, subscribePattern=first[:-1])
    # The doctor's tests leave topics on this broker that may not be read, which a batch read says at once.
    everything = {r.queue.topic for task in plan(rocketmq, subscribePattern="(?!doctor-).*") for r in task}
    assert {first, second} <= everything
    assert not {t for t in everything if t.startswith(("%RETRY%", "%DLQ%", "rmq_", "RMQ_", "SCHEDULE_", "TBW102"))}
    assert not everything & {"DefaultCluster", "broker-a", "BenchmarkTest", "OFFSET_MOVED_EVENT"}


def test_assign__reads_only_these_queues(rocketmq, make_topic):
    topic = make_topic(queues=4)
    there = {queue: set(feed(rocketmq, topic, 3, queues=[queue])) for queue in range(4)}
    assert Counter(bodies(read(rocketmq, assign={topic: {"broker-a": [1, 3]}}))) == Counter(there[1] | there[3])
    with pytest.raises(OptionError, match=f"{topic}/broker-a/4"):
        read(rocketmq, assign={topic: {"broker-a": [3, 4]}})


def internal(mq: LocalBroker, name: str) -> None:
    """A retry or dead-letter topic, as a broker makes them."""
    command = rpc.UPDATE_AND_CREATE_TOPIC.request(
        topic=name,
        defaultTopic="TBW102",
        readQueueNums=1,
        writeQueueNums=1,
        perm=6,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
    )
    mq.admin.offset_reader.rpc_client.request(mq.address("broker-a"), command)
    deadline = Deadline.after(20)
    while name not in mq.admin.topics():
        assert not deadline.expired
        time.sleep(0.01)


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
def test_include_internal__lets_pattern_match_internal_topics(rocketmq, make_topic, prefix):
    plain = make_topic(queues=1)
    special = f"{prefix}g-{plain}"
    internal(rocketmq, special)
    pattern = f".*{plain}"
    ours = set(feed(rocketmq, plain, 2))
    theirs = set(feed(rocketmq, special, 2))
    assert Counter(bodies(read(rocketmq, subscribePattern=pattern))) == Counter(ours)
    assert Counter(bodies(read(rocketmq, subscribePattern=pattern, includeInternal=True))) == Counter(ours | theirs)
    assert Counter(bodies(read(rocketmq, subscribe=special))) == Counter(theirs)


def test_tags__filter_on_the_broker(rocketmq, topic):
    made = tagged(rocketmq, topic, "vip", "new", "old", None)
    wanted = [b for b, t in made.items() if t in ("vip", "new")]
    assert Counter(bodies(read(rocketmq, subscribe=topic, tags="vip || new"))) == Counter(wanted)
    assert Counter(bodies(read(rocketmq, subscribe=topic, tags="*"))) == Counter(made.keys())


def test_tags__with_the_same_hash_are_told_apart(rocketmq, topic):
    made = tagged(rocketmq, topic, "Aa", "BB", "Aa", "BB")
    found = read(rocketmq, subscribe=topic, tags="Aa")
    assert {row["tags"] for row in found} == {"Aa"}
    assert Counter(bodies(found)) == Counter({b for b, t in made.items() if t == "Aa"})
    found = read(rocketmq, subscribe=topic, tags="BB", columns="body")
    assert Counter(bodies(found)) == Counter({b for b, t in made.items() if t == "BB"})


def test_tags__per_topic(rocketmq, make_topic):
    first, second = make_topic(queues=2), make_topic(queues=2)
    a, b = tagged(rocketmq, first, "x", "y"), tagged(rocketmq, second, "x", "y")
    found = read(rocketmq, subscribe=[first, second], tags={first: "x"})
    assert Counter(bodies(found)) == Counter({body for body, tag in a.items() if tag == "x"} | set(b))


def numbered(mq: LocalBroker, topic: str, count: int) -> list[str]:
    made = names(count)
    post(mq, [Message(topic, body.encode(), properties={"n": str(n)}) for n, body in enumerate(made)])
    return made


def test_sql__filters_on_the_broker(rocketmq, topic):
    made = numbered(rocketmq, topic, 20)
    assert Counter(bodies(read(rocketmq, subscribe=topic, sql="n >= 15"))) == Counter(made[15:])
    assert Counter(bodies(read(rocketmq, subscribe=topic, sql="n BETWEEN 3 AND 5 OR n = 7"))) == Counter(
        {*made[3:6], made[7]}
    )


def test_sql__that_is_invalid_is_refused(rocketmq, topic):
    numbered(rocketmq, topic, 5)
    with pytest.raises(OptionError, match="n >") as e:
        read(rocketmq, subscribe=topic, sql="n >")
    assert "sql" in str(e.value)
    with pytest.raises(OptionError):
        read(rocketmq, subscribe=topic, sql={topic: "n BETWEEN"})


def test_sql__per_topic(rocketmq, make_topic):
    first, second = make_topic(queues=2), make_topic(queues=2)
    a, b = numbered(rocketmq, first, 4), numbered(rocketmq, second, 4)
    found = read(rocketmq, subscribe=[first, second], sql={first: "n < 2", second: "n = 3"})
    assert Counter(bodies(found)) == Counter({*a[:2], b[3]})


def test_sql__and_tags_exclude_each_other(rocketmq, topic):
    with pytest.raises(OptionError, match="mutually exclusive"):
        read(rocketmq, subscribe=topic, sql="n = 1", tags="x")


def test_topic_wait__for_a_topic_that_does_not_exist_yet(rocketmq):
    late, never = f"late-{names(1)[0]}", f"never-{names(1)[0]}"
    started = time.monotonic()
    with pytest.raises(RouteNotFound):
        read(rocketmq, subscribe=never, topicWait="1s")
    assert time.monotonic() - started >= 1.0
    creation = threading.Timer(0.5, rocketmq.create_topic, (late, 2))
    creation.start()
    assert read(rocketmq, subscribe=late, topicWait="60s") == []
    creation.join()

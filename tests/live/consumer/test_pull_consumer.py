"""A pull consumer on a real broker: what a user does with it, next to what RocketMQ's own client stores and reads.

Each option that only a pull consumer has is tested here for its effect (tests/live/options/test_every_option.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import Producer, PullConsumer, session
from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, arrow_schema
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import LocalProtocolError, OffsetError, OptionError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, PullRequest, ReceivedMessage
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.loose_json import read_json
from rocketmq_spark.wire.properties import is_reserved
from tests.helpers import WAIT_S, awaited, freeze, killed, total
from tests.mockbroker import eventually
from tests.witness import content, java_read, java_send, md5

Make = Callable[..., PullConsumer]


@pytest.fixture
def group() -> str:
    return f"g_{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(rocketmq: LocalBroker, group: str) -> Make:
    def made(**options: Any) -> PullConsumer:
        return PullConsumer(**{"name_server": rocketmq.name_server, "group": group, **options})

    return made


def send(mq: LocalBroker, topic: str, *texts: str, queue: MessageQueue | None = None, tags: str | None = None) -> None:
    """Until the broker counts them: it acknowledges a message before it is in its queue."""
    with Producer(name_server=mq.name_server, group="p_pull") as producer:
        before = total(mq, topic)
        for text in texts:
            producer.send(Message(topic, text.encode(), tags=tags), queue=queue)
    total(mq, topic, before + len(texts))


def texts(consumer: PullConsumer, count: int, deadline: Deadline | None = None) -> list[str]:
    """So many messages, poll after poll."""
    found: list[str] = []
    deadline = deadline or Deadline.after(WAIT_S)
    while len(found) < count and not deadline.expired:
        found += [message.body.decode() for message in consumer.poll(1.0)]
    assert len(found) == count
    return found


def test_what_java_sent_is_polled_as_java_reads_it(rocketmq: LocalBroker, topic: str, make: Make) -> None:
    java_send(rocketmq.name_server, topic, 40)
    read = sorted((record.place, record.id, record.content) for record in java_read(rocketmq.name_server, topic, 40))
    with make(consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        messages = list(itertools.islice(consumer, 40))
    own = {message.msg_id: {k: v for k, v in message.properties.items() if not is_reserved(k)} for message in messages}
    found = sorted(
        (
            (message.broker_name, message.queue_id, message.queue_offset),
            message.msg_id,
            content(md5(message.body), message.tags, message.keys, own[message.msg_id]),
        )
        for message in messages
    )
    assert found == read


def test_rows_are_those_of_the_source(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=2)
    send(rocketmq, topic, *map(str, range(50)), tags="a")
    batches: list[pa.RecordBatch] = []
    with make(consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        while sum(batch.num_rows for batch in batches) < 50:
            batches.append(consumer.poll_arrow(WAIT_S))
            assert batches[-1].num_rows
        assert consumer.poll_arrow(0.1).num_rows == 0
    table = pa.Table.from_batches(batches)
    assert table.schema == arrow_schema(BASIC_COLUMNS)
    assert sorted(table["body"].to_pylist()) == sorted(str(i).encode() for i in range(50))
    assert set(table["tags"].to_pylist()) == {"a"}


@pytest.mark.parametrize("where", ["earliest", "latest"])
def test_consume_from_where_does_not_count_for_a_young_queue(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, where: str
) -> None:
    """One whose messages are all there begins at 0, as for Java. (Others: tests/consumer/test_pull_start.py.)"""
    topic = make_topic(queues=1)
    send(rocketmq, topic, "old")
    with make(consume_from_where=where) as consumer:
        consumer.assign(consumer.queues(topic))
        send(rocketmq, topic, "new")
        assert texts(consumer, 2) == ["old", "new"]


def test_a_time_to_consume_from(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, "old")
    with make(consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        (old,) = consumer.poll(WAIT_S)
        eventually(lambda: time.time() * 1000 > old.store_timestamp + 1)
        send(rocketmq, topic, "new")
        consumer.seek_to_timestamp(old.store_timestamp + 1)
        assert texts(consumer, 1) == ["new"]


def test_a_group_that_no_broker_knows_yet_commits(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    """Brokers make a group at its first pull, which may be behind the first commit."""
    topic = make_topic(queues=2)
    with make(auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.commit(dict.fromkeys(queues, 3))
        assert {consumer.committed(queue) for queue in queues} == {3}


def test_auto_commit_stores_finished_offsets_at_its_interval(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, "a")
    with make(auto_commit_interval="50ms", consume_from_where="earliest") as consumer:
        (queue,) = consumer.queues(topic)
        consumer.assign([queue])
        assert texts(consumer, 1) == ["a"]
        assert consumer.committed(queue) == 0
        eventually(lambda: consumer.poll(0.02) == [] and consumer.committed(queue) == 1)
    with make(auto_commit=False) as again:
        again.assign([queue])
        send(rocketmq, topic, "b")
        assert texts(again, 1) == ["b"]
        again.poll(0.0)
    with make() as third:
        assert third.committed(queue) == 1
        third.assign([queue])
        assert texts(third, 1) == ["b"]
        third.commit()
        assert third.committed(queue) == 2


def test_a_poll_that_nothing_follows_comes_again(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, "a", "b")
    for _ in range(2):
        with make(pull_batch_size=1, consume_from_where="earliest", auto_commit_interval="1ms") as consumer:
            consumer.assign(consumer.queues(topic))
            assert consumer.poll(WAIT_S)[0].body == b"a"


def test_loop_break_commits_yielded_messages_and_resumes_there(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, *map(str, range(40)))
    with make(consume_from_where="earliest") as consumer:
        (queue,) = consumer.queues(topic)
        consumer.assign([queue])
        found = [message.body.decode() for message in itertools.islice(consumer, 12)]
        for message in consumer:
            found.append(message.body.decode())
            if len(found) == 14:
                break
        consumer.commit()
        assert (found, consumer.committed(queue)) == ([str(i) for i in range(14)], 14)
        rows = consumer.poll_arrow(20.0)
        assert rows["body"].to_pylist()[:18] == [str(i).encode() for i in range(14, 32)]
    with make() as again:
        again.assign([queue])
        assert texts(again, 26) == [str(i) for i in range(14, 40)]


def test_assigned_queue_ignores_earlier_subscription_filter(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    topic = make_topic(queues=1)
    for tags in "abc":
        send(rocketmq, topic, tags, tags=tags)
    with make(consume_from_where="earliest", auto_commit=False) as consumer:
        consumer.subscribe(topic, tags="b")
        assert texts(consumer, 1) == ["b"]
        consumer.unsubscribe(topic)
        consumer.assign(consumer.queues(topic))
        assert texts(consumer, 3) == ["a", "b", "c"]


def test_pull_batch_size_bounds_a_poll(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, *map(str, range(10)))
    with make(pull_batch_size=4, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        assert [len(consumer.poll(WAIT_S)) for _ in range(3)] == [4, 4, 2]


def test_pull_threshold_for_queue_bounds_what_is_pulled_ahead(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, *map(str, range(8)))
    polled: list[str] = []
    ahead: list[int] = []
    pull = RemotingMember.pull

    def noted(member: RemotingMember, request: PullRequest, *how: Any) -> None:
        ahead.append(request.offset - len(polled))
        pull(member, request, *how)

    monkeypatch.setattr(RemotingMember, "pull", noted)
    with make(pull_batch_size=1, pull_threshold_for_queue=3, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        eventually(lambda: len(ahead) == 3)
        while len(polled) < 8:
            polled += [message.body.decode() for message in consumer.poll()]
    assert polled == list(map(str, range(8)))
    assert ahead[:3] == [0, 1, 2]
    assert max(ahead) <= 3  # of these one is just being given


def test_pull_threshold_size_for_queue_bounds_bytes_read_ahead(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(queues=1)
    send(rocketmq, topic, *("x" * 1000 for _ in range(8)))
    offsets: list[int] = []
    pull = RemotingMember.pull

    def noted(member: RemotingMember, request: PullRequest, *how: Any) -> None:
        offsets.append(request.offset)
        pull(member, request, *how)

    monkeypatch.setattr(RemotingMember, "pull", noted)
    with make(pull_batch_size=1, pull_threshold_size_for_queue="2500b", consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        eventually(lambda: len(offsets) == 3)
        assert len(consumer.poll(WAIT_S)) == 1
        eventually(lambda: len(offsets) == 4)
        assert offsets == [0, 1, 2, 3]


def test_allocation_strategy_shares_the_queues_as_the_group_does(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, group: str
) -> None:
    topic = make_topic(queues=4)
    with make(allocation_strategy="averagelyByCircle") as first:
        first.subscribe(topic)
        options = {"name_server": rocketmq.name_server, "group": group, "allocation_strategy": "averagelyByCircle"}
        with other_process(options) as second:
            second.subscribe(topic)
            eventually(lambda: len(first.assignment()) == len(second.assignment()) == 2, 30.0)
            ids = sorted({queue.queue_id for queue in one.assignment()} == {0, 2} for one in (first, second))
            assert ids == [False, True]


def test_allocation_config_and_machine_rooms_choose_queues(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make
) -> None:
    topic = make_topic(queues=4)
    fixed = json.dumps({topic: {rocketmq.brokers[0]: [1, 3]}})
    with make(allocation_strategy="config", allocation_config=fixed) as consumer:
        consumer.subscribe(topic)
        eventually(lambda: [queue.queue_id for queue in consumer.assignment()] == [1, 3])
    with make(allocation_strategy="machineRoom", machine_rooms="elsewhere") as consumer:
        consumer.subscribe(topic)
        eventually(lambda: consumer._group.is_balanced)
        assert consumer.assignment() == []


def test_environments_have_queues_and_offsets_of_their_own(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, group: str
) -> None:
    topic = make_topic(queues=4)
    send(rocketmq, topic, *"abcd")
    found: dict[str, set[int]] = {}
    for name in ("1", "2"):
        with make(environment=name, environments="2", consume_from_where="earliest") as consumer:
            consumer.subscribe(topic)
            found[name] = {m.queue_id for _ in range(2) for m in consumer.poll(20.0)}
            consumer.commit()
            assert {consumer.committed(queue) for queue in consumer.queues(topic)} == {1}
    assert found == {"1": {0, 2}, "2": {1, 3}}
    with make() as common:
        assert [common.committed(queue) for queue in common.queues(topic)] == [None] * 4


def test_suffix_environment_has_own_topics_under_users_names(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, group: str
) -> None:
    topic = make_topic(queues=1)
    rocketmq.create_topic(f"{topic}_dev", 1)
    send(rocketmq, f"{topic}_dev", *"ab")
    send(rocketmq, topic, *"xy")
    with make(environment="dev", environment_mode="suffix", consume_from_where="earliest") as consumer:
        consumer.subscribe(topic)
        found: list[ReceivedMessage] = []
        eventually(lambda: found.extend(consumer.poll(1.0)) or len(found) >= 2)
        consumer.commit()
    assert {(message.topic, message.body) for message in found} == {(topic, b"a"), (topic, b"b")}
    progress = rocketmq.admin.consume_stats(f"{group}_dev", f"{topic}_dev")
    assert [one.consumer_offset for one in progress.values()] == [2]


def test_queues_change_hands_while_nobody_polls(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, group: str
) -> None:
    topic = make_topic(queues=4)
    for queue in rocketmq.admin.describe_topic(topic):
        send(rocketmq, topic, f"{queue.queue_id}a", f"{queue.queue_id}b", queue=queue)
    # What is finished is stored at once: who gets a queue may ask for its offset before the other one has given it up.
    with make(consume_from_where="earliest", auto_commit_interval="1ms") as first:
        first.subscribe(topic)
        eventually(lambda: len(first.assignment()) == 4)
        finished, _given = [{message.body for message in first.poll()} for _ in range(2)]
        with other_process(
            {"name_server": rocketmq.name_server, "group": group, "consume_from_where": "earliest"}
        ) as second:
            second.subscribe(topic)
            eventually(lambda: len(first.assignment()) == len(second.assignment()) == 2, 30.0)
            theirs = {queue.queue_id for queue in second.assignment()}
            assert not theirs & {queue.queue_id for queue in first.assignment()}
            # What the first had not finished comes to the second, that which a poll had given included.
            left = {f"{queue}{half}".encode() for queue in theirs for half in "ab"} - finished
            came: list[bytes] = []
            eventually(
                lambda: came.extend(message.body for message in second.poll(0.5)) or len(came) >= len(left), 60.0
            )
            assert sorted(came) == sorted(left)
        eventually(lambda: len(first.assignment()) == 4, 30.0)


def test_seeking_and_pausing(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=2)
    with make(consume_from_where="earliest") as consumer:
        first, second = consumer.queues(topic)
        send(rocketmq, topic, "a", "b", queue=first)
        send(rocketmq, topic, "c", queue=second)
        consumer.assign([first, second])
        consumer.pause(second)
        assert texts(consumer, 2) == ["a", "b"]
        consumer.seek(first, 1)
        assert texts(consumer, 1) == ["b"]
        consumer.seek_to_beginning(first)
        assert texts(consumer, 2) == ["a", "b"]
        consumer.resume(second)
        assert texts(consumer, 1) == ["c"]
        with pytest.raises(OffsetError, match="expected one from 0 to 2"):
            consumer.seek(first, 3)


def test_tags_are_filtered_in_polls_and_rows(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=1)
    for tags, text in (("Aa", "1"), ("BB", "2"), ("c", "3"), ("Aa", "4")):
        send(rocketmq, topic, text, tags=tags)
    with make(consume_from_where="earliest") as consumer:
        consumer.subscribe(topic, tags="Aa || c")
        assert texts(consumer, 3) == ["1", "3", "4"]
        consumer.seek_to_beginning()
        found: list[bytes] = []
        while len(found) < 3:
            found += consumer.poll_arrow(5.0)["body"].to_pylist()
        assert found == [b"1", b"3", b"4"]


def other_process(options: dict[str, Any]) -> PullConsumer:
    """A second member needs a client of its own, as another process has: other connection options make one."""
    return PullConsumer(**options, connect_timeout="2999ms")


def test_two_members_share_the_queues_and_one_takes_over(
    rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make, group: str
) -> None:
    topic = make_topic(queues=4)
    with make(consume_from_where="earliest") as first:
        first.subscribe(topic)
        eventually(lambda: first.poll(0.05) == [] and len(first.assignment()) == 4)
        with pytest.raises(LocalProtocolError, match="has a member in this process"):
            make().subscribe(topic)
        second = other_process({"name_server": rocketmq.name_server, "group": group})
        with second:
            second.subscribe(topic)

            def shared() -> bool:
                for one in (first, second):
                    one.poll(0.05)
                return len(first.assignment()) == len(second.assignment()) == 2

            eventually(shared, 30.0)
            assert not set(first.assignment()) & set(second.assignment())
        eventually(lambda: first.poll(0.05) == [] and len(first.assignment()) == 4, 30.0)


def test_what_is_wrong_is_reported(rocketmq: LocalBroker, make: Make) -> None:
    with make() as consumer, pytest.raises(RouteNotFound, match="no_such_topic"):
        consumer.subscribe("no_such_topic")
    with make() as consumer, pytest.raises(OptionError, match=r"expected subscribe\(\) or assign\(\)"):
        consumer.poll()
    with pytest.raises(OptionError, match="'group' is required"):
        PullConsumer(name_server=rocketmq.name_server)
    with pytest.raises(OptionError, match="does not belong to a pull consumer"):
        make(auto_batch=True)


def test_the_client_is_shared_with_producers(rocketmq: LocalBroker, make: Make) -> None:
    with make() as consumer:
        given = options_table.parse({"nameServer": rocketmq.name_server})
        assert session.client(given.for_role("producer")) is session.client(given.for_role("pull consumer"))
        assert consumer.assignment() == []


@contextlib.contextmanager
def frozen(mq: LocalBroker, broker: str) -> Iterator[None]:
    """The broker takes connections and says nothing."""
    pid = mq.pid(broker)
    assert pid is not None
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_broker_that_hangs_holds_up_no_other(pair: LocalBroker, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own messages come when it is back, whatever became of the connection meanwhile.

    Nothing that waits for it is over before the test is: who asked it first would have no message in time.
    """
    topic, long_s = f"hangs_{group}", 5 * WAIT_S
    pair.create_topic(topic, queues=1)
    settings = ConsumerSettings.from_options
    monkeypatch.setattr(ConsumerSettings, "from_options", lambda *told: replace(settings(*told), pull_timeout_s=long_s))
    given = {"name_server": pair.name_server, "request_timeout": f"{long_s:g}s", "consume_from_where": "earliest"}
    with (
        PullConsumer(group=group, **given) as consumer,
        Producer(name_server=pair.name_server, group="p_pull") as producer,
    ):
        slow, quick = consumer.queues(topic)
        consumer.assign([slow, quick])
        with frozen(pair, slow.broker_name):
            deadline = Deadline.after(WAIT_S)  # for all of them: whatever a poll waits for first, it waits for in each
            for text in "abcdef":
                producer.send(Message(topic, text.encode()), queue=quick)
                assert texts(consumer, 1, deadline) == [text]
        producer.send(Message(topic, b"g"), queue=slow)
        assert texts(consumer, 1) == ["g"]


def test_a_broker_that_was_killed_is_read_again_when_it_is_back(
    pair: LocalBroker, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rocketmq_spark.consumer.polls")
    topic = f"killed_{group}"
    pair.create_topic(topic, queues=1)
    with PullConsumer(name_server=pair.name_server, group=group, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        victim = consumer.assignment()[0]
        send(pair, topic, "a", queue=victim)
        assert texts(consumer, 1) == ["a"]
        consumer.commit()
        killed(pair, victim.broker_name)
        eventually(lambda: consumer.poll(0.1) == [] and "failed, retrying" in caplog.text, WAIT_S)
        pair.restart(victim.broker_name)
        send(pair, topic, "b", queue=victim)
        assert texts(consumer, 1) == ["b"]


@pytest.mark.parametrize("agrees", [True, False])
def test_operators_get_its_stacks_only_if_it_agrees(
    rocketmq: LocalBroker, topic: str, make: Make, group: str, agrees: bool
) -> None:
    """As ``mqadmin consumerStatus -s`` requests them, through the broker."""
    with make(answer_stacks=agrees) as consumer, BaseAdmin(rocketmq.name_server) as admin:
        consumer.subscribe(topic)
        consumer.poll(0.1)
        names = {"consumerGroup": group, "clientId": consumer.client_id}
        command = rpc.GET_CONSUMER_RUNNING_INFO.request(**names, jstackEnable=True)
        calls = admin.name_servers.rpc_client
        address = rocketmq.address("broker-a")
        answer = awaited(lambda: calls.invoke(address, command, Deadline.after(WAIT_S)), lambda found: not found.code)
    info = read_json(answer.body)
    assert [each["topic"] for each in info["subscriptionSet"]] == [topic]
    assert ("MainThread" in (info.get("jstack") or "")) is agrees

"""RocketMQ's own commands against a member, as an operator calls them."""

from __future__ import annotations

import itertools
import threading

import pytest

from rocketmq_spark import PullConsumer
from tests import witness
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed


@pytest.fixture
def mqadmin(members: Members):
    return lambda command, *arguments: witness.mqadmin(command, "-n", members.mq.name_server, *arguments)


def test_consumer_status_shows_the_member_and_its_queues(members: Members, mqadmin) -> None:
    consumer = members.start()
    feed(members.mq, members.topic, 16)
    eventually(lambda: len(members.bodies()) == 16, 60)
    shown = mqadmin("consumerStatus", "-g", members.group, "-i", consumer.client_id)
    assert "CONSUME_PASSIVELY" in shown, shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(members.topic) and "broker-a" in line]
    assert {row[2] for row in rows} >= {str(i) for i in range(8)}, shown


def test_consumer_progress_shows_no_lag_once_offsets_are_stored(members: Members, mqadmin) -> None:
    """By the member that runs, again and again; it does not have to stop for that."""
    members.start(persist_interval_s=0.2)

    def progress() -> dict[str, tuple[str, str]]:
        shown = mqadmin("consumerProgress", "-g", members.group)
        lines = itertools.dropwhile(lambda line: not line.startswith("#Topic"), shown.splitlines())
        rows = [line.split() for line in lines if line.startswith(members.topic)]
        return {row[2]: (row[3], row[4]) for row in rows}

    for each in (2, 3):
        feed(members.mq, members.topic, 16 if each == 2 else 8)
        eventually(lambda each=each: set(members.stored().values()) == {each}, 60)
        assert progress() == {str(i): (str(each), str(each)) for i in range(8)}


def test_reset_offset_by_time_goes_back_while_the_member_runs(members: Members, mqadmin) -> None:
    members.start()
    sent = feed(members.mq, members.topic, 16)
    eventually(lambda: len(members.bodies()) == 16, 60)
    members.got.clear()
    shown = mqadmin("resetOffsetByTime", "-g", members.group, "-t", members.topic, "-s", "1")
    assert members.topic in shown, shown
    eventually(lambda: set(members.bodies()) == set(sent), 60)


@pytest.mark.parametrize(("ordered", "error"), [(False, SystemExit("mine")), (True, ZeroDivisionError("mine"))])
def test_direct_consumption_calls_listener_and_moves_no_offset(
    members: Members, mqadmin, ordered: bool, error: BaseException
) -> None:
    answers = [None, "retry", error, None]  # of the first time, and of three questions

    def listener(messages, context):
        answer = answers[len(members.got) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer if answer is None else context.suspend() if ordered else context.retry()

    consumer = members.start(listener, ordered=ordered)
    (body,) = feed(members.mq, members.topic, 1, queues=[3])
    eventually(lambda: 1 in members.stored().values(), 60)
    ((_, message),) = members.got
    where = ("-t", members.topic, "-g", members.group, "-d", consumer.client_id, "-i", message.msg_id)
    shown = [mqadmin("queryMsgByUniqueKey", *where) for _ in range(3)]
    for text, outcome in zip(shown, ("CR_LATER", "CR_THROW_EXCEPTION", "CR_SUCCESS"), strict=True):
        assert f"consumeResult={outcome}" in text, text
        assert f"order={str(ordered).lower()}" in text, text
    assert f"{type(error).__name__}: mine" in shown[1]
    assert members.bodies() == [body] * 4
    assert {m.msg_id for _, m in members.got} == {message.msg_id}
    stats = consumer.stats()
    assert (stats.consumed, stats.failed, stats.sent_back) == (1, 0, 0)
    assert sum(offset or 0 for offset in members.stored().values()) == 1


def polled(consumer: PullConsumer, count: int) -> list[str]:
    """So many messages, and one poll more, which finishes them."""
    found: list[str] = []
    while len(found) < count and (some := consumer.poll(30)):
        found += [message.body.decode() for message in some]
    consumer.poll(0)
    return found


def test_tools_show_and_reset_pull_consumer_like_push_consumer(members: Members, mqadmin) -> None:
    sent = feed(members.mq, members.topic, 16)
    options = {"name_server": members.mq.name_server, "group": members.group, "connect_timeout": "2998ms"}
    with PullConsumer(**options, consume_from_where="earliest") as consumer:
        consumer.subscribe(members.topic)
        assert sorted(polled(consumer, 16)) == sorted(sent)
        consumer.commit()
        shown = mqadmin("consumerStatus", "-g", members.group, "-i", consumer.client_id)
        assert "CONSUME_ACTIVELY" in shown, shown
        rows = [line.split() for line in shown.splitlines() if line.startswith(members.topic) and "broker-a" in line]
        assert {row[2] for row in rows} >= {str(i) for i in range(8)}, shown
        shown = mqadmin("consumerProgress", "-g", members.group)
        lines = itertools.dropwhile(lambda line: not line.startswith("#Topic"), shown.splitlines())
        rows = [line.split() for line in lines if line.startswith(members.topic)]
        assert {row[2]: (row[3], row[4]) for row in rows} == {str(i): ("2", "2") for i in range(8)}, shown
        shown = mqadmin("resetOffsetByTime", "-g", members.group, "-t", members.topic, "-s", "1")
        assert members.topic in shown, shown
        eventually(lambda: set(members.stored().values()) == {0}, 60)
        assert sorted(polled(consumer, 16)) == sorted(sent)


@pytest.mark.parametrize("queues", [[3], [0, 1, 2, 3]], ids=str)
def test_lagging_pull_consumer_follows_reset_of_its_group(
    members: Members, mqadmin, caplog: pytest.LogCaptureFixture, queues: list[int]
) -> None:
    """Brokers since 5.2.0 tell it to one pull of each queue, which is one of those that read ahead."""
    places = [f"{members.topic}/broker-a/{number}" for number in queues]
    feed(members.mq, members.topic, 4000 * len(queues), queues=queues)
    options = {"name_server": members.mq.name_server, "group": members.group, "pull_threshold_for_queue": 300}
    with PullConsumer(**options, consume_from_where="earliest") as consumer:
        consumer.subscribe(members.topic)
        given = consumer.poll(30)
        eventually(lambda: any(thread.name.startswith("rocketmq-ahead") for thread in threading.enumerate()), 30)
        consumer.commit()
        mqadmin("resetOffsetByTime", "-g", members.group, "-t", members.topic, "-s", "now")

        def told_all() -> bool:
            given.extend(consumer.poll(0.1))
            said = [text for record in caplog.records if "reset" in (text := record.getMessage())]
            return all(any(place in text for text in said) for place in places)

        eventually(told_all, 60)
        consumer.commit()
        assert {queue.queue_id: at for queue, at in members.stored().items() if at} == dict.fromkeys(queues, 4000)
        assert 0 < len(given) < 2000 * len(queues)
        (last,) = feed(members.mq, members.topic, 1, queues=[3])
        assert [message.body.decode() for message in consumer.poll(30)] == [last]

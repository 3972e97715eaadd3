"""Names that RocketMQ forbids are refused before any request: no server answers here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from rocketmq_spark import Admin, Consumer, Message, Producer, PullConsumer, SimpleConsumer
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests.schemas import struct

NOWHERE, TOPIC, LEGAL = "127.0.0.1:1", "dbserver1.inventory.orders", "dbserver1_inventory_orders"
PROXY: dict[str, Any] = {"transport": "grpc", "proxy_endpoint": NOWHERE}


def source(**given: str) -> RocketMQDataSource:
    return RocketMQDataSource({"nameServer": NOWHERE, **given})


def producer(act: Callable[[Producer], object], **given: Any) -> None:
    with Producer(**{"name_server": NOWHERE, "group": "g", **given}) as made:
        act(made)


USES: dict[str, Callable[[], object]] = {
    "subscribe": lambda: source(subscribe=TOPIC).reader(struct("body binary")),
    "subscribe of a stream": lambda: source(subscribe=TOPIC).streamReader(struct("body binary")),
    "assign": lambda: source(assign=f'{{"{TOPIC}":{{"b":[0]}}}}').reader(struct("body binary")),
    "group": lambda: source(subscribe="orders", group=TOPIC).streamReader(struct("body binary")),
    "topic": lambda: source(topic=TOPIC).writer(struct("body binary"), False),
    "topic of a stream": lambda: source(topic=TOPIC).streamWriter(struct("body binary"), False),
    "allowedTopics": lambda: source(allowedTopics=f"a,{TOPIC}").writer(struct("topic string, body binary"), False),
    "send": lambda: producer(lambda made: made.send(Message(TOPIC, b"x"))),
    "send over gRPC": lambda: producer(lambda made: made.send(Message(TOPIC, b"x")), name_server=None, **PROXY),
    "send with autoBatch": lambda: producer(
        lambda made: made.send_async(Message(TOPIC, b"x")).result(5), auto_batch=True
    ),
    "send_many": lambda: producer(lambda made: made.send_many([Message(TOPIC, b"x")])),
    "queues": lambda: producer(lambda made: made.queues(TOPIC)),
    "traceTopic": lambda: Producer(NOWHERE, "g", enable_trace=True, trace_topic=TOPIC),
    "group of a producer": lambda: Producer(NOWHERE, TOPIC),
    "group of a consumer": lambda: Consumer(NOWHERE, TOPIC),
    "subscribe of a consumer": lambda: Consumer(NOWHERE, "g").subscribe(TOPIC),
    "group of a pull consumer": lambda: PullConsumer(NOWHERE, TOPIC),
    "subscribe of a pull consumer": lambda: PullConsumer(NOWHERE, "g").subscribe(TOPIC),
    "group of a simple consumer": lambda: SimpleConsumer(group=TOPIC, **PROXY),
    "create_topic": lambda: Admin(NOWHERE).create_topic(TOPIC),
    "create_group": lambda: Admin(NOWHERE).create_group(TOPIC),
}


@pytest.mark.parametrize("use", USES)
def test_an_illegal_name_is_refused_with_a_legal_one(use: str) -> None:
    with pytest.raises(RocketMQError, match=r"illegal characters: '\.'; ") as caught:
        USES[use]()
    assert f"such as {LEGAL!r}" in str(caught.value)
    assert not caught.value.retriable


@pytest.mark.parametrize("use", ["subscribe", "assign", "topic", "allowedTopics"])
def test_the_option_that_keeps_names_with_dots_is_named(use: str) -> None:
    with pytest.raises(RocketMQError, match="; option 'topicNames' = dotsToUnderscores replaces dots"):
        USES[use]()
    with pytest.raises(RocketMQError) as caught:
        source(subscribe="a.b c").reader(struct("body binary"))
    assert "topicNames" not in str(caught.value)


@pytest.mark.parametrize("command", [["topic", "create", TOPIC], ["produce", TOPIC]])
def test_commands_refuse_illegal_names(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--name-server", NOWHERE], input="line\n")
    assert done.exit_code == 1
    assert f"illegal characters: '.'; expected letters, digits, '_', '-', '%' and '|', such as {LEGAL!r}" in done.stderr


@pytest.mark.parametrize("topic", ["%RETRY%group", "%DLQ%group", "%RETRY%group+orders", "ns%orders", "a|b", "t" * 127])
def test_names_that_brokers_have_are_read(topic: str) -> None:
    source(subscribe=topic).streamReader(struct("body binary"))


@pytest.mark.parametrize("given", [{"namespace": "shop"}, {"environment": "dev1", "environmentMode": "suffix"}])
def test_the_length_of_a_name_counts_what_is_added_to_it(given: dict[str, str]) -> None:
    source(subscribe="t" * 122, **given).streamReader(struct("body binary"))
    for use in (
        lambda: source(subscribe="t" * 123, **given).streamReader(struct("body binary")),
        lambda: source(topic="t" * 123, **given).writer(struct("body binary"), False),
        lambda: producer(lambda made: made.queues("t" * 123), **given),
        lambda: Producer(NOWHERE, "g" * 116, **given),
        lambda: Consumer(NOWHERE, "g" * 116, **given),
    ):
        with pytest.raises(RocketMQError, match=r"is longer than (topic|group) max length: (127|120)"):
            use()


@pytest.mark.parametrize("pattern", [r"dbserver1\.inventory\..*", "$Default|orders", ".*"])
def test_a_pattern_is_no_name(pattern: str) -> None:
    source(subscribePattern=pattern).reader(struct("body binary"))

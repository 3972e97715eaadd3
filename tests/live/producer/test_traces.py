"""Message traces on a real broker, read by RocketMQ's own tool."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace

from rocketmq_spark import Consumer, LocalBroker, Message, Producer, TransactionState
from tests.fix_clusters import WITHOUT_TIMERS
from tests.fix_spark import ROOT
from tests.helpers import awaited, stored
from tests.reading import names
from tests.witness import mqadmin


@pytest.fixture(scope="module")
def traced() -> Iterator[LocalBroker]:
    """One broker that keeps traces."""
    with LocalBroker(conf={**WITHOUT_TIMERS, "traceTopicEnable": "true"}, quiet=True) as mq:
        yield mq


def shown(mq: LocalBroker, msg_id: str, *arguments: str, until: Callable[[list[list[str]]], object]) -> list[list[str]]:
    """The lines of the trace of a message: Pub or Sub, the group, the host, date, time, duration, and how it ended."""

    def ask() -> list[list[str]]:
        said = mqadmin("queryMsgTraceById", "-n", mq.name_server, "-i", msg_id, *arguments)
        return [line.split() for line in said.splitlines() if line.startswith(("Pub", "Sub"))]

    return awaited(ask, until)


def ends(lines: list[list[str]]) -> list[tuple[str, str, str]]:
    return sorted((line[0], line[1], line[-1]) for line in lines)


def test_traces_are_shown_by_rocketmqs_own_tool(traced: LocalBroker) -> None:
    (topic,) = names(1, "traced")
    traced.create_topic(topic, 2)
    check = lambda message: TransactionState.UNKNOWN  # noqa: E731
    with Producer(traced.name_server, "shop", enable_trace=True, transaction_check=check) as producer:
        one = producer.send(Message(topic, b"one", tags="A", keys=["k1", "k2"])).msg_id
        first, second = producer.send_batch([Message(topic, b"b1"), Message(topic, b"b2")]).msg_id.split(",")
        with producer.transaction(Message(topic, b"half")) as half:
            pass
        later = producer.send_async(Message(topic, b"later")).result(30).msg_id
    expected = {one, first, second, half.result.msg_id, later}
    failed: set[str] = set()
    done: set[str] = set()
    over = threading.Event()

    def listen(messages: Any, context: Any) -> None:
        (message,) = messages
        if message.msg_id == one and one not in failed:
            failed.add(one)
            raise ValueError("once")
        done.add(message.msg_id)
        if done >= expected:
            over.set()

    with Consumer(traced.name_server, "billing", enable_trace=True, consume_from_where="earliest") as consumer:
        consumer.subscribe(topic)
        consumer.start(listen)
        assert over.wait(60), expected - done
    for msg_id in (first, second, half.result.msg_id, later):
        found = shown(traced, msg_id, until=lambda lines: len(lines) >= 2)
        assert ends(found) == [("Pub", "shop", "success"), ("Sub", "billing", "success")]
    found = shown(traced, one, until=lambda lines: len(lines) >= 3)
    assert ends(found) == [("Pub", "shop", "success"), ("Sub", "billing", "failed"), ("Sub", "billing", "success")]


def test_a_topic_of_ones_own_has_the_traces_of_its_clients(traced: LocalBroker) -> None:
    topic, traces = names(2, "own")
    for each in (topic, traces):
        traced.create_topic(each, 1)
    received = threading.Event()
    with Producer(traced.name_server, "shop", enable_trace=True, trace_topic=traces) as producer:
        msg_id = producer.send(Message(topic, b"x")).msg_id
    with Consumer(
        traced.name_server, "own", enable_trace=True, trace_topic=traces, consume_from_where="earliest"
    ) as consumer:
        consumer.subscribe(topic)
        consumer.start(lambda messages, context: received.set())
        assert received.wait(60)
    found = shown(traced, msg_id, "-t", traces, until=lambda lines: len(lines) >= 2)
    assert ends(found) == [("Pub", "shop", "success"), ("Sub", "own", "success")]


def test_a_broker_that_wants_no_traces_has_none(make_cluster: Callable[..., LocalBroker]) -> None:
    quiet = make_cluster({"traceOn": "false"})
    topic, traces = names(2, "own")
    for each in (topic, traces):
        quiet.create_topic(each, 1)
    with Producer(quiet.name_server, "shop", enable_trace=True, trace_topic=traces) as producer:
        producer.send(Message(topic, b"not traced"))
        producer.send(Message(topic, b"delayed"), delay_level=18)
    with Producer(quiet.name_server, "plain") as plain:  # behind all that could be there
        plain.send(Message(traces, b"last"))
    assert [message.body for message in stored(quiet, traces, 1)] == [b"last"]


def test_a_missing_trace_topic_fails_nothing(lone: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    (topic,) = names(1, "plain")
    lone.create_topic(topic, 1)
    with Producer(lone.name_server, "shop", enable_trace=True, trace_topic="no-such-topic") as producer:
        producer.send(Message(topic, b"x"))
    assert [message.body for message in stored(lone, topic, 1)] == [b"x"]
    assert "trace records of" in caplog.text


@pytest.mark.parametrize("page", ["traces.md", "opentelemetry.md"])
def test_the_programs_of_the_pages_run(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)  # it would stay for the whole process
    text = (ROOT / "docs" / page).read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(program, page, "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "True"

"""A producer in a process that was forked from its own: its sockets, batches, requests and traces are the parent's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import Message
from rocketmq_spark.producer import at_exit
from rocketmq_spark.producer.bulk import BulkProducer
from rocketmq_spark.producer.settings import ProducerSettings
from tests.consumer.messages import message
from tests.fakes.replies import FakeReplies
from tests.producer.bench import Bench
from tests.producer.test_request_reply import ASK, Office
from tests.producer.test_tracing import Sending, record

M = Message("T", b"x")


def half(producer: BulkProducer) -> None:
    with producer.transaction(M):
        pass


# What sends, asks or waits.
CALLS: dict[str, Callable[[BulkProducer], object]] = {
    "queues": lambda producer: producer.queues("T"),
    "send": lambda producer: producer.send(M),
    "send_async": lambda producer: producer.send_async(M),
    "send_oneway": lambda producer: producer.send_oneway(M),
    "send_batch": lambda producer: producer.send_batch([M]),
    "send_many": lambda producer: producer.send_many([M]),
    "send_arrow": lambda producer: producer.send_arrow([]),
    "send_half": lambda producer: producer.send_half(M),
    "transaction": half,
    "request": lambda producer: producer.request(M),
    "request_async": lambda producer: producer.request_async(M),
    "reply": lambda producer: producer.reply(message(7), b"yes"),
    "recall": lambda producer: producer.recall("T", "handle"),
    "flush": lambda producer: producer.flush(),
}
# What changes or shows state of this process only, what accumulators call, and ends, which have tests below.
OTHERS = {"add_hook", "faults", "spool_metrics", "enqueue_batch", "dispatch_ready", "close", "at_exit"}


@contextmanager
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The block runs as in a child of this process."""
    with monkeypatch.context() as forked:
        forked.setattr("rocketmq_spark.base.process._pid", [-1])
        yield


def opened(bench: Bench, **settings: Any) -> BulkProducer:
    chosen = {"group": "g", "heartbeat_s": 0, "route_refresh_s": 0, "transaction_check": lambda half: "COMMIT"}
    made = BulkProducer(
        bench.sender, ProducerSettings(**{**chosen, **settings}), replies=FakeReplies(), make_timer=bench.timer
    )
    bench.producers.append(made)
    return made


def test_every_public_method_is_among_these() -> None:
    assert {name for name in dir(BulkProducer) if not name.startswith("_")} == CALLS.keys() | OTHERS


@pytest.mark.parametrize("auto_batch", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_fork_sends_nothing_and_is_told_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, auto_batch: bool
) -> None:
    producer = opened(bench, auto_batch=auto_batch)
    waiting = [producer.send_async(M) for _ in range(20)]  # of a batch, the last ones wait for company
    assert all(result.done() for result in waiting) is not auto_batch
    before, requests = list(bench.sender.events), len(bench.sender.requests)
    with fork(monkeypatch), pytest.raises(ClosedError, match="from which this one was forked"):
        CALLS[name](producer)
    assert (bench.sender.events, len(bench.sender.requests)) == (before, requests)
    assert producer.flush()
    assert all(result.done() for result in waiting)


def test_a_fork_that_ends_leaves_waiting_batches_to_its_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``sys.exit``: with it, Python calls in the child what the parent has registered."""
    producer = opened(bench, auto_batch=True)
    waiting = [producer.send_async(M) for _ in range(20)]
    requests = len(bench.sender.requests)
    assert not waiting[-1].done()
    with fork(monkeypatch):
        at_exit._close_producers()
        assert producer.close() == []
    assert (len(bench.sender.requests), waiting[-1].done(), capsys.readouterr().err) == (requests, False, "")
    at_exit._close_producers()
    assert all(result.done() for result in waiting)
    assert len(bench.sender.requests) > requests


def test_closing_fork_leaves_requests_and_replies_to_parent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(bench)
    asked = office.ask()
    with fork(monkeypatch):
        assert office.producer.close() == []
    assert office.replies.events == [("join", "g"), "announce"], "nobody has left"
    office.arrive()
    assert asked.result(0).body == b"yes"
    office.producer.request_async(ASK)
    office.producer.close(0)
    assert office.replies.events[-1] == ("leave", "g")


@pytest.mark.parametrize("end", ["close", "at_exit"])
def test_a_fork_leaves_traces_to_its_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    sending = Sending(bench)
    sending.producer.append([record()])
    with fork(monkeypatch):
        getattr(sending.producer, end)(*[Deadline.after(1)] * (end == "at_exit"))
    assert (sending.bodies, caplog.records) == ([], [])
    sending.producer.append([record(1)])
    sending.producer.close()
    assert sending.bodies == ["0\x021\x02"]

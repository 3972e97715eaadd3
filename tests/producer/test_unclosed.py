"""What producers do that are open when the program ends; processes that end are in ``tests/live/producer/test_exit.py``."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import Message, SendStatus
from rocketmq_spark.producer import at_exit
from tests.fakes.spool import FakeSpool
from tests.producer.bench import Bench
from tests.producer.test_spool_bridge import producer


def test_what_waits_for_company_is_sent_and_what_fails_is_named(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [ConnectionLost("gone")] * 3
    lost = [producer.send_async(Message("T", b"x")) for _ in range(11)]
    at_exit._close_producers()
    assert all(result.done() for result in lost)
    assert "the producer of group 'g' was not closed, and 11 messages are not acknowledged: " in capsys.readouterr().err


def test_nothing_is_said_of_one_that_was_closed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.producer(auto_batch=True).close()
    at_exit._close_producers()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("auto_batch", [False, True])
def test_what_has_no_answer_is_spooled(bench: Bench, auto_batch: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """What was batched is sent only now, and its own time-out ends after that of the exit."""
    spool = FakeSpool()
    one = producer(bench, spool, auto_batch=auto_batch, send_timeout_s=0.2)
    bench.sender.script = [None] * 3
    sent = [one.send_async(Message("T", b"x")) for _ in range(3)]
    at_exit._close_producers()
    assert {each.result(0).status for each in sent} == {SendStatus.SPOOLED}
    assert [msg_id for send in spool.kept for msg_id in send.msg_ids] == [each.result(0).msg_id for each in sent]
    assert spool.closed
    assert capsys.readouterr().err == ""


def test_process_exit_is_bounded_whatever_the_producer_timeouts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of others may set a time-out of years, and those that come later have messages to send, too."""
    times: list[float] = []

    def wait_until(deadline: Deadline) -> dict[str, Any]:
        times.append(deadline.remaining())
        return {}

    class Waiting(SimpleNamespace):
        __hash__ = object.__hash__

    several = [Waiting(at_exit=wait_until) for _ in range(3)]
    monkeypatch.setattr(at_exit, "_open_producers", weakref.WeakSet(several))
    at_exit._close_producers()
    assert times == pytest.approx([at_exit.MAX_EXIT_S / 3, at_exit.MAX_EXIT_S / 2, at_exit.MAX_EXIT_S], abs=1)
    one = bench.producer(send_timeout_s=3650 * 86400.0)
    bench.sender.script = [None]
    one.send_async(Message("T", b"x"))
    before = time.monotonic()
    one.at_exit(Deadline.after(0.1))
    assert time.monotonic() - before < 60

"""What a spool kept goes through an engine like anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import ConnectionLost, RocketMQError, RouteNotFound
from rocketmq_spark.model import Resent, SendRequest, SpooledSend
from rocketmq_spark.producer.resending import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import owned
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import select
from tests.producer.scripted import Bench, ManualTimer, refused
from tests.producer.test_spooling import Sender
from tests.queues import q, qs

REQUEST = SendRequest("g", b"x", "UNIQ_KEY\x01ID\x02")


@pytest.fixture
def resender(bench: Bench) -> EngineResender:
    bench.sender = Sender(bench.time)
    settings = ProducerSettings(group="g", retries=None, pinned_retries=None, send_timeout_s=120, queues_stay_shut=True)
    return EngineResender(bench.sender, settings, ManualTimer(bench.time))


def resent(bench: Bench, resender: EngineResender, send: SpooledSend) -> Resent:
    found: list[Resent] = []
    resender.resend(send, found.append)
    bench.time.advance(4)
    (only,) = found
    return only


def test_it_goes_to_its_queue_as_it_was_kept(bench: Bench, resender: EngineResender) -> None:
    assert resent(bench, resender, SpooledSend("T", REQUEST, q("b:1"), ("ID",))) == Resent(q("b:1"))
    assert bench.sender.calls == [("async", q("b:1"), REQUEST)]


def test_without_a_queue_it_goes_to_any_and_is_tried_on_other_brokers(bench: Bench, resender: EngineResender) -> None:
    bench.sender.script = [ConnectionLost("down"), ConnectionLost("down")]
    found = resent(bench, resender, SpooledSend("T", REQUEST))
    assert found.queue in qs("a:0-1 b:0-1")
    assert len(bench.sender.calls) == 3


def test_it_stays_in_the_environment_that_its_process_counted_before_a_broker_left(bench: Bench) -> None:
    bench.sender = Sender(bench.time)
    settings = ProducerSettings(group="g", environment=Environment.of(1))
    owned(bench.sender, Environment.of(1))["T"] = (q("a:0"),)
    bench.sender.routes["T"] = tuple(qs("b:0-1"))
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    found = resent(bench, resender, SpooledSend("T", REQUEST))
    assert (found.queue, found.passing) == (None, True)
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    assert resent(bench, resender, SpooledSend("T", REQUEST)).queue == q("a:0")


def test_a_selector_chooses_now(bench: Bench, resender: EngineResender) -> None:
    found = resent(bench, resender, SpooledSend("T", REQUEST, selector="hash", arg="customer-7"))
    assert found.queue == select("hash", qs("a:0-1 b:0-1"), None, "customer-7")


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionLost("down"), True),
        (refused(Response.MESSAGE_ILLEGAL), False),
        (RouteNotFound("missing", "ns:1", Response.TOPIC_NOT_EXIST, "T"), True),
    ],
    ids=str,
)
def test_a_failure_says_whether_it_may_pass(
    bench: Bench, resender: EngineResender, error: RocketMQError, passing: bool
) -> None:
    bench.sender.by_broker = {name: lambda: error for name in "ab"}
    bench.sender.routes.clear()
    found = resent(bench, resender, SpooledSend("T", REQUEST, q("a:0")))
    assert (found.queue, found.passing) == (None, passing)
    assert found.error is not None
    assert error.message in found.error
    assert len(bench.sender.calls) == 1


def test_what_has_no_answer_at_the_close_has_not_failed_for_good(bench: Bench, resender: EngineResender) -> None:
    bench.sender.script = [None]
    found: list[Resent] = []
    resender.resend(SpooledSend("T", REQUEST), found.append)
    resender.close(Deadline.after(0))
    assert [(each.queue, each.passing) for each in found] == [(None, True)]


def test_what_is_handed_over_in_one_moment_is_sent_together(bench: Bench) -> None:
    bench.sender = Sender(bench.time)
    blocks: list[int] = []

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        before = len(bench.sender.calls)
        yield
        if len(bench.sender.calls) > before:
            blocks.append(len(bench.sender.calls) - before)

    resender = EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time), together)
    found: list[Resent] = []
    for _ in range(2):
        for number in range(5):
            resender.resend(SpooledSend("T", REQUEST, q("b:1"), (str(number),)), found.append)
        assert len(found) % 5 == 0
        bench.time.advance(1)
    assert (len(found), blocks) == (10, [5, 5])
    resender.close(Deadline.after(0))
    resender.resend(SpooledSend("T", REQUEST, q("b:1"), ("late",)), found.append)
    assert (found[-1].queue, found[-1].passing) == (None, True)

"""The engine where the system gives no more threads, as in a container with a limit of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import ConnectionLost, SendFailed, UnprovedError
from rocketmq_spark.model import Message, SendStatus
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from tests.helpers import no_more_threads, raising
from tests.producer.scripted import Bench, ManualTimer, refused
from tests.producer.test_confirming import Broker, batch, run
from tests.producer.test_spooling import FakeSpool, Sender, down, producer

M = Message("T", b"x")


@pytest.fixture
def threaded(bench: Bench) -> Iterator[BaseProducer]:
    """A producer whose timers have threads, which start when they are needed."""
    made = BaseProducer(bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0))
    yield made
    made.close(0.01)


def test_where_there_are_no_more_threads_nothing_is_sent_that_could_not_be_sent_again(
    bench: Bench, threaded: BaseProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        with pytest.raises(SendFailed, match="nothing was sent: can't start new thread"):
            threaded.send_async(M)
        with pytest.raises(RuntimeError):
            threaded.send_async(M, callback=print)
        with pytest.raises(RuntimeError):
            BaseProducer(bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, auto_batch=True))
    assert bench.sender.calls == []
    assert threaded.flush(0.0)


def test_a_failed_attempt_is_followed_by_another_one_although_there_are_no_more_threads(
    bench: Bench, threaded: BaseProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the route is asked for first, which has a thread beside the one that sends."""
    bench.sender.script = [None, refused(Response.SYSTEM_BUSY)]
    result = threaded.send_async(M)
    no_more_threads(monkeypatch)
    bench.sender.answer(0, ConnectionLost("broken"))
    assert result.result(60).status is SendStatus.SEND_OK
    assert len(bench.sender.calls) == 3


def test_what_waits_for_a_place_is_sent_although_there_are_no_more_threads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = BaseProducer(
        bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, max_in_flight=1)
    )
    bench.sender.script = [None]
    results = [producer.send_async(M) for _ in range(2)]
    no_more_threads(monkeypatch)
    bench.sender.answer()
    assert [result.result(60).status for result in results] == [SendStatus.SEND_OK] * 2
    producer.close(0.01)


def test_where_there_are_no_more_threads_a_failed_send_is_kept_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sender, spool = Sender(bench.time), FakeSpool()
    made = producer(bench, spool, retries=0)
    assert made._engine._spooling is not None
    monkeypatch.setattr(made._engine._spooling._timer, "later", raising(RuntimeError("can't start new thread")))
    bench.sender.script = [down()]
    assert made.send_async(M).result(0).status is SendStatus.SPOOLED
    assert len(spool.kept) == 1


def test_a_look_for_which_there_is_no_thread_is_an_outcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request would stay under way for good. The next one is looked up, where there is a thread again."""
    broker, threads, later = Broker([("all", "timeout")] * 2), [False, True], ManualTimer.later

    class Look(ManualTimer):
        def later(self, seconds: float, call: Callable[[], None]) -> None:
            if not threads.pop(0):
                raise RuntimeError("can't start new thread")
            later(self, seconds, call)

    def beside(timer: ManualTimer, name: str) -> ManualTimer:
        return (Look if name.startswith("confirm-") else ManualTimer)(timer.time)

    monkeypatch.setattr(ManualTimer, "beside", beside)
    unproved, confirmed = run(bench, broker, [batch("x"), batch("y")], [None, None])
    assert isinstance(unproved.outcome, UnprovedError)
    assert "can't start new thread" in unproved.outcome.message
    assert confirmed.confirmed == 1
    assert broker.stored == {"x": 1, "y": 1}
    assert threads == []

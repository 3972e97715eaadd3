"""The port: what is kept comes out of a resender, in memory and on real RocksDB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Resent, SendRequest, SpooledSend
from rocketmq_spark.spool import spool as spool_module
from rocketmq_spark.spool.database import is_in_use
from rocketmq_spark.spool.lanes import SteadyClock
from rocketmq_spark.spool.records import Record
from rocketmq_spark.spool.spool import SEND_KIND, SendSpool, broker_target
from rocketmq_spark.spool.store import Store
from tests.fakes.resender import FakeResender
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import no_more_threads, raising
from tests.queues import q


class Fixture:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = Time()
        self.wall_step_ms = 0
        self.open()

    def open(self) -> None:
        self.resender = FakeResender()
        store = Store(self.path, sync="never")
        clock = SteadyClock(self.wall_ms, self.monotonic_ms, store.totals.last_recorded_ms)
        self.spool = SendSpool(store, self.resender, ManualTimer(self.time), clock)

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.monotonic_ms() + self.wall_step_ms

    def monotonic_ms(self) -> int:
        return round(1000 * self.time.now)


def send(body: bytes, queue: str | None = None, topic: str = "T") -> SpooledSend:
    return SpooledSend(topic, SendRequest("g", body, "UNIQ_KEY\x01ID\x02"), q(queue, topic) if queue else None, ("ID",))


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "s")


def test_it_is_sent_again_as_it_was(fixture: Fixture) -> None:
    fixture.spool.keep([send(b"x", "a:1"), send(b"y")])
    fixture.time.advance(2.9)
    assert fixture.resender.sent == []
    fixture.time.advance(0.1)
    assert fixture.resender.sent == [send(b"x", "a:1"), send(b"y")]
    assert fixture.spool.metrics().depth == 0
    assert fixture.spool.metrics().delivered == 2


def test_spool_holds_back_sends_to_queue_with_waiting_records(fixture: Fixture) -> None:
    fixture.spool.keep([send(b"x", "a:1"), send(b"y")])
    assert fixture.spool.has_earlier_record(send(b"z", "a:1"))
    assert not fixture.spool.has_earlier_record(send(b"z", "a:2"))
    assert not fixture.spool.has_earlier_record(send(b"z"))
    fixture.time.advance(3)
    assert not fixture.spool.has_earlier_record(send(b"z", "a:1"))


def test_a_send_that_waits_behind_another_one_is_no_failure(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tried it. As a failure it would put off the next call of its broker."""
    failed: list[str] = []
    monkeypatch.setattr(fixture.spool.redelivery, "on_send_failed", failed.append)
    fixture.spool.keep([send(b"x", "a:1")])
    fixture.spool.keep([send(b"y", "a:1"), send(b"z", "b:1")])
    assert failed == [broker_target(q("a:1", "T")), broker_target(q("b:1", "T"))]


def test_broker_that_answers_again_makes_its_records_due_now(fixture: Fixture) -> None:
    fixture.resender.answer = lambda one: Resent(None, "down", passing=True)
    fixture.spool.keep([send(b"x", "a:1"), send(b"y", "b:1"), send(b"z", topic="U")])
    fixture.time.advance(40)
    fixture.resender.answer = lambda one: Resent(one.queue or q("a:0", one.topic))
    fixture.resender.sent.clear()
    fixture.spool.note_accepted_send(q("a:7"))
    fixture.time.advance(0)
    assert [one.request.body for one in fixture.resender.sent] == [b"x"]
    fixture.spool.note_accepted_send(q("c:7", "U"))
    fixture.time.advance(0)
    assert [one.request.body for one in fixture.resender.sent] == [b"x", b"z"]


def test_the_answer_to_a_send_of_the_spool_itself_counts_too(fixture: Fixture) -> None:
    """A producer that sends nothing more would else leave the others to their own pauses, of up to half an hour."""
    fixture.resender.answer = lambda one: Resent(None, "down", is_temporary=True)
    fixture.spool.keep([send(b"old", "a:1"), send(b"elsewhere", "b:1")])
    fixture.time.advance(40)
    fixture.spool.keep([send(b"new", "a:2")])
    fixture.resender.answer = lambda one: Resent(one.queue)
    fixture.resender.sent.clear()
    fixture.time.advance(3)
    assert [one.request.body for one in fixture.resender.sent] == [b"new", b"old"]


def test_after_restart_answer_of_broker_makes_its_records_due(fixture: Fixture) -> None:
    fixture.resender.answer = lambda one: Resent(None, "down", passing=True)
    fixture.spool.keep([send(b"x", "a:1")])
    fixture.time.advance(40)
    fixture.spool.close(Deadline.after(0))
    fixture.open()
    fixture.time.advance(1)
    assert fixture.resender.sent == []
    fixture.spool.note_accepted_send(q("b:0", "U"))
    fixture.spool.note_accepted_send(q("a:0"))
    fixture.time.advance(0)
    assert [one.request.body for one in fixture.resender.sent] == [b"x"]


@pytest.mark.parametrize("step_ms", [-60_000, -86_400_000, 60_000])
def test_wall_clock_step_changes_no_retry_pause(fixture: Fixture, step_ms: int) -> None:
    fixture.spool.keep([send(b"x")])
    fixture.wall_step_ms = step_ms
    fixture.time.advance(2.9)
    assert fixture.resender.sent == []
    fixture.time.advance(0.1)
    assert fixture.resender.sent == [send(b"x")]


def test_clock_put_back_between_processes_delays_no_record(fixture: Fixture) -> None:
    fixture.spool.keep([send(b"x")])
    fixture.spool.close(Deadline.after(0))
    fixture.wall_step_ms = -3_600_000
    fixture.open()
    fixture.time.advance(3)
    assert fixture.resender.sent == [send(b"x")]


def test_a_permanent_refusal_goes_to_the_dead_at_once(fixture: Fixture) -> None:
    fixture.resender.answer = lambda one: Resent(None, "no permission", is_temporary=False)
    fixture.spool.keep([send(b"x")])
    fixture.time.advance(1000)
    assert len(fixture.resender.sent) == 1
    assert (fixture.spool.metrics().dead, fixture.spool.metrics().give_ups) == (1, 1)


@pytest.mark.parametrize("fails", ["first", "second"])
def test_a_record_that_fits_no_batch_holds_up_no_other(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The spool of another user may have properties that no batch can contain: while joining, they raised out of the store."""

    def joins(first: SpooledSend) -> Callable[[SpooledSend], bool]:
        if fails == "first":
            raise MessageRefused("the flag does not fit the layout of a batch")
        return raising(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"))

    monkeypatch.setattr(fixture.resender, "batch_predicate", joins)
    fixture.spool.keep([send(b"1", "a:0"), send(b"2", "a:0"), send(b"3", "b:0")])
    fixture.time.advance(60)
    assert sorted(bytes(one.request.data) for one in fixture.resender.sent) == [b"1", b"2", b"3"]
    assert len(fixture.spool.store) == 0


def test_a_record_that_is_no_send_goes_to_the_dead(fixture: Fixture) -> None:
    fixture.spool.store.add([(Record(SEND_KIND, b"?", 1), 1)])
    fixture.spool.redelivery.wake()
    fixture.time.advance(1)
    assert fixture.spool.metrics().dead == 1


def test_metrics_say_nothing_of_an_age_while_nothing_is_due(fixture: Fixture) -> None:
    assert fixture.spool.metrics().oldest_due_age_s is None
    fixture.spool.keep([send(b"x")])
    assert (fixture.spool.metrics().depth, fixture.spool.metrics().oldest_due_age_s) == (1, None)
    fixture.time.now += 5  # and its thread had no time
    assert fixture.spool.metrics().oldest_due_age_s == 2.0


def test_interrupted_close_stops_sending_and_releases_folder(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(deadline: Deadline) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(fixture.spool.redelivery, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fixture.spool.close(Deadline.after(30.0))
    assert fixture.resender.closed
    assert fixture.spool.redelivery._is_closed
    fixture.open()


def test_the_close_sends_what_is_due_and_leaves_the_rest(fixture: Fixture) -> None:
    fixture.spool.keep([send(b"due")])
    fixture.time.now += 2
    fixture.spool.keep([send(b"later", topic="U")])
    fixture.time.now += 1
    fixture.spool.close(Deadline.after(30.0))
    assert [one.request.body for one in fixture.resender.sent] == [b"due"]
    assert fixture.resender.closed
    fixture.open()
    assert fixture.spool.metrics().depth == 1


def test_one_that_can_have_no_thread_leaves_its_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted, "spool")
        with pytest.raises(RuntimeError):
            SendSpool(Store(tmp_path / "s"), FakeResender(), Timer("spool"))
    SendSpool(Store(tmp_path / "s"), FakeResender(), Timer("spool")).close(Deadline.after(0))


def test_more_than_a_page_is_sent_now(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.spool.spool.PAGE_SIZE", 3)
    bodies = [b"%d" % i for i in range(20)]
    fixture.spool.keep(
        [send(body, topic=f"T{body.decode()}") for body in bodies]
    )  # an answer calls those of its target only
    monkeypatch.setattr(fixture.spool.redelivery, "drain", lambda deadline: fixture.time.advance(0))
    assert fixture.spool.send_all(60) == 0
    assert sorted(one.request.body for one in fixture.resender.sent) == sorted(bodies)


def test_a_spool_that_cannot_be_made_leaves_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the error is, and with all references to it, such as in a traceback that somebody keeps."""
    for place in ("_begun", "retry_earlier_records", "__init__"):
        error = KeyboardInterrupt(place)

        def fail(*_: object, error: KeyboardInterrupt = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            owner, name = (Timer, "start") if place == "_begun" else (spool_module.Redelivery, place)
            patch.setattr(owner, name, fail)
            store = Store(tmp_path / "s", sync="never")
            store.add([(Record("send", b"x", 1, "t"), 1)])
            with pytest.raises(KeyboardInterrupt, match=place):
                SendSpool(store, FakeResender(), Timer("spool"))
        assert not is_in_use(tmp_path / "s")

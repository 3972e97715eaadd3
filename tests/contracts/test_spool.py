"""``ports.Spool``: the one on RocksDB, and the one in memory of the producer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolFull
from rocketmq_spark.model import SpooledSend
from rocketmq_spark.ports import Spool
from rocketmq_spark.spool.spool import SendSpool, record_of
from rocketmq_spark.spool.store import Store
from tests.fakes.resender import FakeResender
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import ManualTimer, Time
from tests.queues import q
from tests.spool.test_spool import send

ROOM = 4


@pytest.fixture(params=["on RocksDB", "in memory"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    """With room for four sends of one byte to a queue; nothing that waits is due."""
    if request.param == "in memory":
        fake = FakeSpool()
        fake.room = ROOM
        yield fake
        return
    size = len(record_of(send(b"x", "a:1"), 1).encode())
    store = Store(tmp_path, sync="never", max_bytes=ROOM * size + size // 2)
    made = SendSpool(store, FakeResender(), ManualTimer(Time()), lambda: 1_700_000_000_000)
    yield made
    made.close(Deadline.after(0))


def by_selector(arg: object) -> SpooledSend:
    return SpooledSend("T", send(b"x").request, None, ("ID",), "hash", arg)


def test_what_is_kept_is_counted_and_answers_mean_something_then(spool: Spool) -> None:
    assert spool.metrics().depth == 0
    spool.keep([send(b"x"), send(b"y", "a:1")])
    assert (spool.metrics().depth, spool.metrics().dead, spool.metrics().trouble) == (2, 0, None)
    assert spool.needs_answers
    spool.note_accepted_send(q("b:0"))
    assert spool.metrics().depth == 2, "it was the answer of another broker"


def test_what_has_a_queue_or_a_choice_holds_up_what_goes_there(spool: Spool) -> None:
    assert not spool.has_earlier_record(send(b"x", "a:1"))
    spool.keep([send(b"any")])
    assert not spool.has_earlier_record(send(b"any")), "what may go anywhere has no order"
    spool.keep([send(b"x", "a:1"), by_selector("k")])
    assert spool.has_earlier_record(send(b"y", "a:1"))
    assert spool.has_earlier_record(by_selector("k"))
    assert not spool.has_earlier_record(send(b"y", "a:0"))
    assert not spool.has_earlier_record(send(b"y", "a:1", topic="U"))
    assert not spool.has_earlier_record(by_selector("l"))


def test_of_sends_for_which_there_is_no_room_none_is_kept(spool: Spool) -> None:
    spool.keep([send(b"x", "a:1")] * (ROOM - 1))
    with pytest.raises(SpoolFull):
        spool.keep([send(b"x", "b:1")] * 2)
    assert spool.metrics().depth == ROOM - 1
    assert not spool.has_earlier_record(send(b"x", "b:1"))
    spool.keep([send(b"x", "b:1")])
    assert spool.metrics().depth == ROOM

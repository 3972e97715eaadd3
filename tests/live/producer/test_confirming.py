"""Producers whose answers are lost: with ``confirm_ambiguous`` each message is stored once, without it some are twice."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import OptionError, SendFailed, UnprovedError
from rocketmq_spark.localbroker import LocalBroker
from tests.helpers import stored
from tests.kill.pipes import Swallowing
from tests.live.writes import Make
from tests.reading import names
from tests.witness import java_read

CONFIRMING = {"confirm_ambiguous": True, "exactly_once_settle": "2100ms", "request_timeout": "1s"}
COUNT = 24


@contextlib.contextmanager
def lossy_producer(
    mq: LocalBroker, every: int, loses: type[Swallowing] = Swallowing, **given: Any
) -> Iterator[tuple[Producer, Swallowing]]:
    """A producer that gets each answer to a send but the ``every``-th."""
    address = mq.address(mq.brokers[0])
    with loses(address, every) as lossy:
        given = {"send_timeout": "40s", "address_map": json.dumps({address: lossy.address}), **given}
        with Producer(mq.name_server, "confirming", **given) as producer:
            yield producer, lossy


def one_by_one(producer: Producer, topic: str, bodies: list[str]) -> None:
    for body in bodies:
        producer.send(Message(topic, body.encode()))


def at_once(producer: Producer, topic: str, bodies: list[str]) -> None:
    hashed = [producer.send_async(Message(topic, body.encode()), selector="hash", arg=body) for body in bodies]
    for sent in hashed:  # their queues are fixed: no other attempt is made
        sent.result(60)


def in_batches(producer: Producer, topic: str, bodies: list[str]) -> None:
    for first in range(0, COUNT, 4):
        producer.send_batch([Message(topic, body.encode()) for body in bodies[first : first + 4]])


def batched(producer: Producer, topic: str, bodies: list[str]) -> None:
    for first in range(0, COUNT, 4):
        sent = [producer.send_async(Message(topic, body.encode())) for body in bodies[first : first + 4]]
        assert producer.flush(60)
        assert all(each.done() and each.exception() is None for each in sent)


@pytest.fixture
def topic(make_timerless_topic: Make) -> str:
    return make_timerless_topic()


@pytest.mark.parametrize(("how", "every"), [(one_by_one, 20), (at_once, 11), (in_batches, 5), (batched, 5)])
def test_no_message_is_stored_twice_when_answers_are_lost(
    timerless: LocalBroker, topic: str, how: Callable[[Producer, str, list[str]], None], every: int
) -> None:
    bodies = names(COUNT, "row")
    with lossy_producer(timerless, every, auto_batch=how is batched, **CONFIRMING) as (producer, lossy):
        how(producer, topic, bodies)
    assert lossy.swallowed > 0
    read = Counter(record.body.decode() for record in java_read(timerless.name_server, topic, COUNT, bodies=True))
    assert read == Counter(bodies)


def test_without_it_who_sends_again_stores_twice(timerless: LocalBroker, topic: str) -> None:
    """So the test above can see repeats."""
    bodies = names(COUNT, "row")
    with lossy_producer(timerless, 11, send_timeout="1s") as (producer, lossy):
        for body in bodies:
            with contextlib.suppress(SendFailed):
                producer.send(Message(topic, body.encode()))
                continue
            producer.send(Message(topic, body.encode()), timeout_s=40.0)
    assert lossy.swallowed > 0
    read = Counter(record.body.decode() for record in java_read(timerless.name_server, topic, bodies=True))
    assert set(read) == set(bodies)
    assert read.total() >= COUNT + lossy.swallowed  # and once more where the machine was slower than the send timeout


class Deafening(Swallowing):
    """Nothing comes through any more when an answer is lost."""

    def _lost(self, frame: bytes) -> bool:
        lost = super()._lost(frame)
        if lost:
            self.black_hole()
        return lost


def test_what_cannot_be_looked_up_is_an_error_of_its_own(timerless: LocalBroker, topic: str) -> None:
    with lossy_producer(timerless, 2, Deafening, **{**CONFIRMING, "send_timeout": "6s"}) as (producer, lossy):
        producer.send(Message(topic, b"first"))
        with pytest.raises(UnprovedError, match="the message may be stored"):
            producer.send(Message(topic, b"second"))
        lossy.heal()
    assert len(stored(timerless, topic, 2)) == 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"confirm_ambiguous": True}, r"'sendTimeout' is 3 s; with 'confirmAmbiguous' expected more than 13 s"),
        (
            {"confirm_ambiguous": True, "exactly_once_settle": "2s"},
            "'exactlyOnceSettle' is 2 s; expected more than 2 s",
        ),
        ({"confirm_ambiguous": True, "require_store_ok": "ok"}, "'requireStoreOk' is 'ok'"),
        ({"confirm_ambiguous": True, "on_send_failure": "spool", "spool_dir": "/tmp/x"}, "'onSendFailure' is 'spool'"),
        ({"exactly_once_settle": "5s"}, "has no effect without 'confirmAmbiguous'"),
    ],
)
def test_what_it_cannot_do_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        Producer("127.0.0.1:1", "confirming", **given)

"""The end of a block against what its user has said in it, which could not be sent; and what holds a half message."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.errors import CallTimeout, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from rocketmq_spark.model.send import HalfState, TransactionState
from rocketmq_spark.producer import transactions
from rocketmq_spark.producer.transactions import HalfMessage
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import refused
from tests.mockbroker import eventually
from tests.producer.test_transactions import COPY, Shop, shop, unsent

__all__ = ["shop"]
COMMIT, ROLLBACK = TransactionState.COMMIT, TransactionState.ROLLBACK


@pytest.mark.parametrize("said", [COMMIT, ROLLBACK])
def test_the_end_of_a_block_says_what_could_not_be_sent_in_it(shop: Shop, said: TransactionState) -> None:
    """Its user goes on, for the broker asks in any case."""
    shop.sender.ends = [unsent()]
    with shop.producer.transaction(Message("T", b"x")) as half, contextlib.suppress(CallTimeout):
        (half.commit if said is COMMIT else half.rollback)()
    assert [decision for _, decision in shop.ends()] == [said, said]


def test_block_raising_after_unsent_commit_leaves_it_to_checker(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """What it was to deliver is saved, most likely: the error is that of the commit."""
    shop.sender.ends = [unsent()]
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CallTimeout),
        shop.producer.transaction(Message("T", b"x")) as half,
    ):
        half.commit()
    assert [decision for _, decision in shop.ends()] == [COMMIT]
    assert half.state is HalfState.UNKNOWN
    assert "the commit could not be sent" in caplog.text
    shop.answers = [COMMIT]
    assert shop.question(half.result.msg_id) is COMMIT


def test_block_raising_after_unsent_rollback_rolls_back(shop: Shop) -> None:
    shop.sender.ends = [unsent()]
    with pytest.raises(CallTimeout), shop.producer.transaction(Message("T", b"x")) as half:
        half.rollback()
    assert [decision for _, decision in shop.ends()] == [ROLLBACK, ROLLBACK]
    assert half.state is HalfState.ROLLED_BACK


@pytest.mark.parametrize("error", [lambda: refused(Response.SERVICE_NOT_AVAILABLE), lambda: CallTimeout("no answer")])
def test_what_only_garbage_holds_is_not_held(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: Callable[[], RocketMQError]
) -> None:
    """The traceback of a try that failed has the frame of its caller, with all that is in it by now."""
    monkeypatch.setattr(transactions, "_next_collection_deadline", Deadline.after(0))

    def left() -> str:
        for _ in range(2):
            with contextlib.suppress(CallTimeout):
                half = shop.producer.send_half(Message("T", b"x"))
        return half.result.msg_id

    shop.sender.script = [lambda queue, request: error()]
    gc.disable()
    try:
        msg_id = left()
        assert msg_id in transactions._registry._referenced_messages, "the test shows nothing"
        shop.answers = [COMMIT]
        assert shop.question(msg_id) is COMMIT
    finally:
        gc.enable()


class Order:
    """Is garbage from the beginning, and rolls back when it is collected."""

    def __init__(self, half: HalfMessage) -> None:
        self.half, self.me = half, self

    def __del__(self) -> None:
        self.half.rollback()


def test_garbage_collected_rollback_during_a_send_does_not_hang(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a half message is noted, on the same thread, which waited for itself with all others behind it."""
    gc.freeze()  # for good: what other tests have left takes seconds, longer than a send may
    Order(shop.producer.send_half(Message("T", b"x")))

    class Collecting(Deadline):
        @classmethod
        def after(cls, seconds: float) -> Deadline:
            gc.collect()
            return Deadline.after(seconds)

    ended = threading.Event()

    def send() -> None:
        monkeypatch.setattr(transactions, "Deadline", Collecting)
        shop.producer.send_half(Message("T", b"y"), timeout_s=60)
        ended.set()

    threading.Thread(target=send, daemon=True).start()
    assert ended.wait(30)
    eventually(lambda: [decision for _, decision in shop.ends()] == [ROLLBACK])


@pytest.mark.parametrize("ending", [False, True])
def test_garbage_collected_block_is_rolled_back_in_other_thread(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, ending: bool
) -> None:
    """It comes where the thread holds any lock, of a connection for example, or reads the answers. In a program that ends,
    there is no other thread.
    """
    threads: list[threading.Thread] = []
    end = shop.sender.end_transaction

    def ended(*given: Any) -> bool:
        threads.append(threading.current_thread())
        return end(*given)

    def rows(mine: list[object]) -> Iterator[None]:
        with shop.producer.transaction(Message("T", b"x")):
            yield

    monkeypatch.setattr(shop.sender, "end_transaction", ended)
    monkeypatch.setattr("sys.is_finalizing", lambda: ending)
    mine: list[object] = []
    mine.append(begun := rows(mine))
    next(begun)
    del mine, begun
    gc.collect()
    if not ending:
        eventually(lambda: [decision for _, decision in shop.ends()] == [ROLLBACK])
    assert threading.current_thread() not in threads
    assert len(threads) == (not ending)


@pytest.fixture
def deciding(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[HalfMessage]:
    """Its commit is on its way, from another thread."""
    half = shop.producer.send_half(Message("T", b"x"))
    begun, may_end = threading.Event(), threading.Event()

    def end(*given: object) -> bool:
        begun.set()
        return may_end.wait(60)

    with monkeypatch.context() as slow:
        slow.setattr(shop.sender, "end_transaction", end)
        thread = threading.Thread(target=half.commit)
        thread.start()
        assert begun.wait(60)
        yield half
        may_end.set()
        thread.join()
    assert half.state is HalfState.COMMITTED


def test_a_decision_waits_no_longer_for_another_one_than_it_may(deciding: HalfMessage) -> None:
    with pytest.raises(CallTimeout, match="another decision") as late:
        deciding.rollback(timeout_s=0.01)
    assert late.value.unsent
    assert deciding.state is HalfState.UNKNOWN


def test_forked_child_does_not_wait_for_a_decision_under_way(deciding: HalfMessage) -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.alarm(30)
        with contextlib.suppress(BaseException):
            try:
                deciding.rollback(timeout_s=0.01)
            except CallTimeout:
                os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_decided_holds_no_producer_that_was_closed(lost: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what is logged holds the traceback of its error
    made = Shop()
    made.sender.ends = [CallTimeout("no answer")] if lost else []
    with made.producer.transaction(Message("T", b"x")):
        pass
    made.sender.script = [lambda queue, request: CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        made.producer.send_half(Message("T", b"x"))
    made.producer.close()
    seen = weakref.ref(made.producer)
    del made
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("name", ["a", ""])
def test_check_before_the_send_answer_does_not_ask_user_function(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is saved yet. The decision is about the copy that the broker has written."""
    heard: list[TransactionState] = []
    send = shop.sender.send
    copy = COPY._replace(broker_name=name)

    def slow(queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        heard.append(shop.question(decode_properties(request.properties)[Property.UNIQ_KEY], copy))
        return send(queue._replace(broker_name="a"), request, deadline)

    monkeypatch.setattr(shop.sender, "send", slow)
    shop.producer.send_half(Message("T", b"x")).commit()
    assert (heard, shop.asked, shop.ends()) == ([TransactionState.UNKNOWN], [], [(COPY, COMMIT)])


def test_unanswered_half_is_rolled_back_after_many_later_sends(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker asks when it is back, and the function would find what was sent instead."""
    monkeypatch.setattr(transactions, "MAX_REMEMBERED_FATES", 3)
    shop.sender.script = [lambda queue, request: CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        shop.producer.send_half(Message("T", b"x", keys=["7"]))
    for _ in range(5):
        with shop.producer.transaction(Message("T", b"x", keys=["7"])):
            pass
    first = shop.sender.requests[0]
    assert shop.question(decode_properties(first.properties)[Property.UNIQ_KEY], properties={"KEYS": "7"}) is ROLLBACK
    assert shop.asked == []


def test_remembered_unanswered_half_messages_are_bounded(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_REMEMBERED_FATES", 3)
    shop.sender.script = [lambda queue, request: CallTimeout("no answer")] * 5
    for _ in range(5):
        with pytest.raises(CallTimeout):
            shop.producer.send_half(Message("T", b"x"))
    ids = [decode_properties(request.properties)[Property.UNIQ_KEY] for request in shop.sender.requests]
    shop.answers = [COMMIT, COMMIT]
    assert [shop.question(msg_id) for msg_id in ids] == [COMMIT, COMMIT, ROLLBACK, ROLLBACK, ROLLBACK]

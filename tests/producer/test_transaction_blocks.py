"""The end of a block against what its user has said in it, which could not be sent; and what holds a half message."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import CallTimeout, RocketMQError
from rocketmq_spark.model import Message
from rocketmq_spark.model.send import TransactionState
from rocketmq_spark.producer import transactions
from rocketmq_spark.producer.transactions import HalfState
from tests.producer.scripted import refused
from tests.producer.test_transactions import Shop, shop, unsent

__all__ = ["shop"]
COMMIT, ROLLBACK = TransactionState.COMMIT, TransactionState.ROLLBACK


@pytest.mark.parametrize("said", [COMMIT, ROLLBACK])
def test_the_end_of_a_block_says_what_could_not_be_sent_in_it(shop: Shop, said: TransactionState) -> None:
    """Its user goes on, for the broker asks in any case."""
    shop.sender.ends = [unsent()]
    with shop.producer.transaction(Message("T", b"x")) as half, contextlib.suppress(CallTimeout):
        (half.commit if said is COMMIT else half.rollback)()
    assert [decision for _, decision in shop.ends()] == [said, said]


def test_a_block_that_raises_behind_a_commit_that_could_not_be_sent_leaves_it_to_the_function(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "its commit could not be sent" in caplog.text
    shop.answers = [COMMIT]
    assert shop.question(half.result.msg_id) is COMMIT


def test_a_block_that_raises_behind_a_rollback_that_could_not_be_sent_rolls_back(shop: Shop) -> None:
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
    monkeypatch.setattr(transactions, "_swept", Deadline.after(0))

    def left() -> str:
        for _ in range(2):
            with contextlib.suppress(CallTimeout):
                half = shop.producer.send_half(Message("T", b"x"))
        return half.result.msg_id

    shop.sender.script = [lambda queue, request: error()]
    gc.disable()
    try:
        msg_id = left()
        assert msg_id in transactions._halves._held, "the test shows nothing"
        shop.answers = [COMMIT]
        assert shop.question(msg_id) is COMMIT
    finally:
        gc.enable()

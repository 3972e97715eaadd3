"""The ``Resender`` port over an engine: what a spool kept is sent like anything else, but not spooled again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ClosedError, RocketMQError, RouteNotFound
from rocketmq_spark.model import Resent, SpooledSend
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.outgoing import Ended, Outgoing
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spooling import cause_of, chooser, passing
from rocketmq_spark.timer import Timer

# Java's send timeout: who sends to a producer's is not kept waiting by a long one of a sink.
TRY_S = 3.0


class EngineResender:
    """Sends through an engine of its own, so that the bounds of its producer are for new messages."""

    def __init__(self, sender: Sender, settings: ProducerSettings, timer: Timer) -> None:
        once = dataclasses.replace(
            settings,
            send_timeout_s=TRY_S,
            attempt_timeout_s=None,
            retries=2,
            pinned_retries=0,
            queues_stay_shut=False,
            max_in_flight=1024,
            max_in_flight_per_broker=None,
            max_async_messages=None,
        )
        self._sender = sender
        self._engine = Engine(sender, once, timer)

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        candidates = None
        if send.queue is None and send.selector is not None:
            candidates = chooser(send.topic, send.selector, send.arg)

        def ended(end: Ended) -> None:
            outcome = end.outcome
            if isinstance(outcome, RocketMQError):
                # A topic that was there may be back, too: while brokers register some are, and some are not yet. And
                # what the close gave up has not failed.
                soon = isinstance(cause_of(outcome), RouteNotFound | ClosedError)
                done(Resent(None, str(outcome), soon or passing(outcome, self._sender)))
            else:
                done(Resent(outcome.queue))

        self._engine.submit(
            Outgoing(
                send.topic,
                send.request,
                Deadline.after(TRY_S),
                send.queue,
                candidates=candidates,
                done=ended,
                msg_ids=send.msg_ids,
            )
        )

    def close(self, deadline: Deadline) -> None:
        self._engine.close(deadline)

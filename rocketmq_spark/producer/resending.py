"""The ``Resender`` port over an engine: what a spool kept is sent like anything else, but not spooled again."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ClosedError, RocketMQError, RouteNotFound
from rocketmq_spark.model import Resent, SpooledSend
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.engine import Engine, Together
from rocketmq_spark.producer.outgoing import Ended, Outgoing
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spooling import cause_of, chooser, passing
from rocketmq_spark.timer import Timer

# Java's send timeout: who sends to a producer's is not kept waiting by a long one of a sink.
TRY_S = 3.0
# So long what is to be written together is gathered.
GATHER_S = 0.002


class EngineResender:
    """Sends through an engine of its own, so that the bounds of its producer are for new messages.

    With ``together``, a context in which what is sent is written at once, all that is handed over in one moment is.
    """

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        timer: Timer,
        together: Together | None = None,
    ) -> None:
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
        self._engine = Engine(sender, once, timer, together=together or contextlib.nullcontext)
        self._timer = timer
        self._gathers = together is not None
        self._pumps = threading.Lock()  # held while a pump is to come

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

        outgoing = Outgoing(
            send.topic,
            send.request,
            Deadline.after(TRY_S),
            send.queue,
            candidates=candidates,
            done=ended,
            msg_ids=send.msg_ids,
        )
        if not self._gathers or not self._engine.enqueue(outgoing):
            self._engine.submit(outgoing)  # which also says that it is closed
        elif self._pumps.acquire(blocking=False):
            self._timer.later(GATHER_S, self._pump)

    def _pump(self) -> None:
        self._pumps.release()
        self._engine.pump()

    def close(self, deadline: Deadline) -> None:
        self._engine.close(deadline)

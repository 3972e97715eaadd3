"""What a caller hands to the engine, and what it is told in the end.

Tuples, because there is one for every message that travels alone: a frozen dataclass takes eight times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult

Outcome = SendResult | RocketMQError
Queues = Sequence[MessageQueue]


class Ended(NamedTuple):
    """How one request ended: the result or the error, after so many attempts, and the brokers that were tried in turn.

    An attempt that found no queue counts, and has no broker.
    """

    outgoing: Outgoing
    outcome: Outcome
    attempts: int = 0
    brokers: Sequence[str] = ()


def nobody(ended: Ended) -> None:
    """For callers who need not be told."""


class Outgoing(NamedTuple):
    """One request that is to be sent: a message or a batch.

    ``queue`` is the one that the caller or a selector chose; without it each attempt chooses, at random among the
    ``candidates`` of the topic's queues if that is given. Those that are ``ordered`` go one after the other to their
    queue. ``selection``, a selector's name and argument, is what a spool keeps of a choice that could not be made yet;
    what is not ``spoolable`` is of use now or never. ``timeout`` is a deadline, or seconds from the first attempt on, so
    that the time in which earlier ones of its queue are sent does not count. ``done`` is called once, on any thread, and
    must not block. Hooks are shown ``message`` and ``msg_ids``.
    """

    topic: str
    request: SendRequest
    timeout: Deadline | float
    queue: MessageQueue | None = None
    ordered: bool = False
    candidates: Callable[[Queues], Queues] | None = None
    done: Callable[[Ended], None] = nobody
    message: Message | None = None
    msg_ids: Sequence[str] = ()
    selection: tuple[str, Any] | None = None
    spoolable: bool = True

    @property
    def ordered_queue(self) -> MessageQueue | None:
        """The queue whose order it must keep."""
        return self.queue if self.ordered else None

    @property
    def size(self) -> int:
        """Its bytes on the wire, without the header."""
        return len(self.request.body) + len(self.request.properties)

    @property
    def deadline(self) -> Deadline:
        """When all attempts must be over if the first one is made now."""
        return self.timeout if isinstance(self.timeout, Deadline) else Deadline.after(self.timeout)

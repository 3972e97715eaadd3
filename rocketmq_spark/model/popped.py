"""Messages that a Proxy hands out for a while, and what it says of a consumer group (POP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocketmq_spark.model import MessageQueue


@dataclass(slots=True)
class PoppedMessage:
    """A message that a Proxy handed out for a while (POP): invisible to others until it is acknowledged or the time is over.

    Args:
        topic: The one it was sent to.
        queue: Where it lies.
        queue_offset: Its offset there.
        body: As it was sent.
        tags: Its tag, None without one.
        keys: Its business keys.
        properties: The user's own.
        born_timestamp: When it was sent, in ms since 1970.
        store_timestamp: When it was stored, in ms since 1970; None where the Proxy does not tell.
        msg_id: The id that its producer gave it.
        delivery_attempt: How often it was handed out, this time included.
        message_group: Within which it keeps its order; None without one.
        receipt: What the Proxy knows this delivery by; another one after its time was changed.
        endpoint: The address of the Proxy that gave it.
        decode_error: Why its body could not be decompressed: it is as it is stored then. None where it could.
    """

    topic: str
    queue: MessageQueue
    queue_offset: int
    body: bytes
    tags: str | None
    keys: list[str]
    properties: Mapping[str, str]
    born_timestamp: int
    store_timestamp: int | None
    msg_id: str
    delivery_attempt: int
    message_group: str | None
    receipt: str
    endpoint: str
    decode_error: str | None = None

    @property
    def reconsume_times(self) -> int:
        """How often it was handed out before, in vain."""
        return self.delivery_attempt - 1


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """What a Proxy says of a consumer group: in how many attempts a message is given up, whether its messages keep their
    order, and the pauses in seconds before a message is handed out again, the last one for all that follow.
    """

    max_attempts: int
    ordered: bool
    pauses_s: Sequence[float]

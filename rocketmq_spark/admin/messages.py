"""Stored messages by their ids and keys."""

from __future__ import annotations

from typing import NamedTuple

from rocketmq_spark.admin.tools import AdminTools, ask_each
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.groups import own
from rocketmq_spark.errors import LocalProtocolError, NotFound, OptionError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.identifiers import OffsetMessageId
from rocketmq_spark.wire.messages import decode_leniently

# A broker gives 32 to a question unless it is configured to give more, and 64 at most (maxMsgsNumBatch).
MOST = 64
_EVER_MS = (1 << 63) - 1


class IndexSearch(NamedTuple):
    """What the index of a broker is asked for; ``unique``: an id that a producer gave."""

    key: str
    begin_ms: int
    end_ms: int
    limit: int
    unique: bool = False


def by_id(tools: AdminTools, message_id: str, topic: str | None = None) -> ReceivedMessage:
    """The message with an id: an offset message id, or with ``topic`` also the id that its producer gave it.

    Both have the same form. An offset message id names a broker's address, so one that names none of this cluster's is
    taken for a producer's. Raises ``NotFound``. Mirrors ``DefaultMQAdminExtImpl.queryMessage``.
    """
    place = _place(message_id)
    at = None if place is None else _broker_at(tools, place.host)
    if place is not None and at is not None:
        message = _at(tools, at, place, topic)
        if message is not None and (topic is None or topic in (message.topic, message.queue.topic)):
            return message
    if topic is None:
        if at is not None:
            raise _not_found(message_id)
        raise NotFound(
            f"id {message_id} is not of a message of these brokers",
            remedy="For an id that its producer gave, give the topic, too; an offset message id names one of the brokers",
        )
    search = IndexSearch(message_id, 0, _EVER_MS, MOST, True)
    found = [m for m in _indexed(tools, topic, search) if m.msg_id == message_id]
    if not found:
        raise _not_found(message_id, topic)
    return min(found, key=lambda message: message.store_timestamp)


def by_key(
    tools: AdminTools, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, limit: int = 32
) -> list[ReceivedMessage]:
    """Messages of a topic with a business key, or whose producer gave them this id, as they were stored.

    The newest ``limit`` of each broker, stored from ``begin_ms`` to ``end_ms``.
    """
    if not 0 < limit <= MOST:
        raise OptionError(f"limit is {limit}; expected 1 to {MOST}, what a broker gives to one question")
    search = IndexSearch(key, begin_ms or 0, _EVER_MS if end_ms is None else end_ms, limit)
    # What an index finds has the hash of the key.
    return [m for m in _indexed(tools, topic, search) if key in m.keys or key == m.msg_id]


def _place(message_id: str) -> OffsetMessageId | None:
    try:
        return OffsetMessageId.parse(message_id)
    except LocalProtocolError:
        return None


def _broker_at(tools: AdminTools, host: str) -> str | None:
    """The name of the broker at an address; only those of the cluster are asked."""
    for name, data in tools.admin.cluster().items():
        if host in data.addresses.values():
            return name
    return None


def _at(tools: AdminTools, broker: str, place: OffsetMessageId, topic: str | None) -> ReceivedMessage | None:
    on_wire = None if topic is None else tools.calls.on_wire(topic)
    command = rpc.VIEW_MESSAGE_BY_ID.request(offset=place.offset, topic=on_wire, bname=broker)
    # "can not find message by the offset": code 1
    answer = tools.calls.ask(place.host, command, accept=(Response.SUCCESS, Response.SYSTEM_ERROR))
    if answer.code != Response.SUCCESS:
        return None
    # What a broker reads in the midst of a message is anything.
    found = [m for m in decode_leniently(answer.body, broker) if m.commit_log_offset == place.offset]
    return own(found[0], tools.calls.scope) if found else None


def _indexed(tools: AdminTools, topic: str, search: IndexSearch) -> list[ReceivedMessage]:
    """What the indexes of the topic's masters have, in the order of storing. Where a master is away its slave is asked."""
    route = tools.admin.routes.existing(topic, 0.0)
    asked = {
        name: (
            address,
            rpc.QUERY_MESSAGE.request(
                topic=tools.calls.on_wire(topic),
                key=search.key,
                maxNum=search.limit,
                beginTimestamp=search.begin_ms,
                endTimestamp=search.end_ms,
                _UNIQUE_KEY_QUERY=search.unique or None,
                bname=name,
            ),
        )
        for name, data in sorted(route.brokers.items())
        if (address := data.replica("hint"))
    }
    found: list[ReceivedMessage] = []
    for name, answer in ask_each(tools, asked, (Response.SUCCESS, Response.QUERY_NOT_FOUND)):
        if answer.code == Response.SUCCESS:
            found += (own(message, tools.calls.scope) for message in decode_leniently(answer.body, name))
    return sorted(found, key=lambda message: (message.store_timestamp, message.queue, message.queue_offset))


def _not_found(message_id: str, topic: str | None = None) -> NotFound:
    return NotFound(f"there is no message with id {message_id}", topic=topic)

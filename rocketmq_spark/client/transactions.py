"""Half messages over remoting: decisions, and what brokers ask about those without one.

Mirrors ``MQClientAPIImpl.endTransactionOneway`` and ``ClientRemotingProcessor.checkTransactionState``.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.client.instance import Asked
from rocketmq_spark.errors import RemoteProtocolError, RocketMQError
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import decode_messages

logger = logging.getLogger(__name__)

# ``MessageSysFlag`` by decision. A broker does nothing about the last one, and does not answer.
_KINDS = {
    TransactionState.COMMIT: int(SysFlag.TRANSACTION_COMMIT),
    TransactionState.ROLLBACK: int(SysFlag.TRANSACTION_ROLLBACK),
    TransactionState.UNKNOWN: 0,
}


def end(calls: Calls, address: str, place: HalfPlace, decision: TransactionState, deadline: Deadline,
        asked: bool = False) -> None:  # fmt: skip
    """A decision for the master at ``address``; ``asked`` if it is the answer to a question."""
    known = decision is not TransactionState.UNKNOWN
    row = rpc.END_TRANSACTION
    command = (row.request if known else row.oneway)(
        topic=calls.on_wire(place.topic),
        producerGroup=calls.on_wire(place.group),
        tranStateTableOffset=place.half_offset,
        commitLogOffset=place.commit_log_offset,
        commitOrRollback=_KINDS[decision],
        fromTransactionCheck=asked,
        msgId=place.msg_id,
        transactionId=place.transaction_id,
        bname=place.broker_name,
    )
    if known:
        calls.ask(address, command, deadline)
    else:
        calls.tell(address, command, deadline)


def answering(calls: Calls, group: str, question: HalfCheck) -> Asked:
    """What a broker's question does: the answer is a request of its own, to the broker that asked."""

    def asked(address: str, command: Command) -> Command:
        fields = rpc.CHECK_TRANSACTION_STATE.arguments(command)
        messages = decode_messages(command.body, command.ext.get("bname", ""))
        if len(messages) != 1:
            raise RemoteProtocolError(f"a broker asks about {len(messages)} half messages at once, expected 1", address)
        topic, queue = calls.scope.plain(messages[0].topic), messages[0].queue
        message = replace(messages[0], topic=topic, queue=queue._replace(topic=topic))
        msg_id = message.properties.get(Property.UNIQ_KEY) or fields["msgId"] or message.msg_id
        place = HalfPlace(
            message.topic,
            command.ext.get("bname", ""),
            group,
            msg_id,
            fields["transactionId"] or msg_id,
            fields["tranStateTableOffset"],
            fields["commitLogOffset"],
        )
        decision = question(message, place)
        try:
            end(calls, address, place, decision, Deadline.after(calls.request_timeout_s), asked=True)
        except RocketMQError as e:
            logger.warning(
                "the broker at %s will ask again about half message %s: %s did not arrive: %s",
                address, msg_id, decision.value, e,
            )  # fmt: skip
        return rpc.CHECK_TRANSACTION_STATE.reply(command)

    return asked

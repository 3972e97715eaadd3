"""Half messages over remoting: decisions about half messages, and brokers' checks of undecided half messages.

Mirrors ``MQClientAPIImpl.endTransactionOneway`` and ``ClientRemotingProcessor.checkTransactionState``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from dataclasses import replace

from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.base.copies import MAX_COMMITTED_KEYS, RACE_WINDOW_S, CheckCoalescer
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import DecodeError, RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState, stored_content_digest
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import decompressed, single_message

logger = logging.getLogger(__name__)

# ``MessageSysFlag`` by decision. A broker ignores UNKNOWN, and does not answer it.
_DECISION_FLAGS = {
    TransactionState.COMMIT: int(SysFlag.TRANSACTION_COMMIT),
    TransactionState.ROLLBACK: int(SysFlag.TRANSACTION_ROLLBACK),
    TransactionState.UNKNOWN: 0,
}


class _ConfirmedCommits:
    """The master that confirmed the commit of each half message. If this master still checks the message, it sent the check
    before the commit arrived. If another master checks, it was promoted meanwhile, and may lack the commit.
    """

    def __init__(self) -> None:
        self._masters: OrderedDict[str, tuple[Deadline, str]] = OrderedDict()

    def add(self, place_key: str, address: str) -> None:
        with process.registry_lock():  # reentrant: garbage collection may run here and call this method
            # For ``RACE_WINDOW_S``, checks of copies are answered with ROLLBACK. The master must be known for longer.
            self._masters[place_key] = Deadline.after(2 * RACE_WINDOW_S), address
            self._masters.move_to_end(place_key)
            with contextlib.suppress(RuntimeError):  # garbage collection may change the table here
                while len(self._masters) > MAX_COMMITTED_KEYS or next(iter(self._masters.values()))[0].expired:
                    self._masters.popitem(last=False)

    def is_at_other_master(self, place_key: str, address: str) -> bool:
        """Whether another master than the one at ``address`` confirmed the commit."""
        with process.registry_lock():
            return self._masters.get(place_key, (None, address))[1] != address


def _confirmed_commits() -> _ConfirmedCommits:
    return process.get_or_create("copies", "confirmed over remoting", _ConfirmedCommits)


def send_decision(rpc_client: RpcClient, address: str, place: HalfPlace, decision: TransactionState, deadline: Deadline,
        answers_check: bool = False) -> bool:  # fmt: skip
    """Send a decision to the master at ``address``. ``answers_check`` says that a check of the broker asked for the decision.

    Returns whether the broker confirmed the decision. A Proxy answers without waiting for the broker, and forwards no decision
    at all before the first check of a message (``TransactionActivity``).
    """
    is_decided = decision is not TransactionState.UNKNOWN
    rpc_row = rpc.END_TRANSACTION
    command = (rpc_row.request if is_decided else rpc_row.oneway)(
        topic=rpc_client.name_on_wire(place.topic),
        producerGroup=rpc_client.name_on_wire(place.group),
        tranStateTableOffset=place.half_offset,
        commitLogOffset=place.commit_log_offset,
        commitOrRollback=_DECISION_FLAGS[decision],
        fromTransactionCheck=answers_check,
        msgId=place.msg_id,
        transactionId=place.transaction_id,
        bname=place.broker_name,
    )
    if not is_decided:
        rpc_client.invoke_oneway(address, command, deadline)
        return False
    is_confirmed = not rpc_client.request(address, command, deadline).is_from_proxy
    if is_confirmed and decision is TransactionState.COMMIT:
        _confirmed_commits().add(place.key, address)
    return is_confirmed


# The address of the broker that checks, and the copy of the half message.
_Copy = tuple[str, HalfPlace]


def _address_of(copy: _Copy) -> str:
    return copy[0]


class HalfChecks:
    """Handles checks of half messages: calls the user's function, and sends its decision to the broker that checks.

    A broker stores a new copy of an undecided half message every 30 s. A decision about an earlier copy leaves the new copy
    undecided. The user's function may be slow, so it is called once for all copies that arrive meanwhile. The decision of the
    function is sent for the newest copy. A copy that is checked soon after a commit is rolled back.
    """

    def __init__(self, rpc_client: RpcClient, group: str, check: HalfCheck) -> None:
        self._rpc_client = rpc_client
        self._group = group
        self._check = check
        state = TransactionState
        self._coalescer = CheckCoalescer(
            self._answer,
            _address_of,
            state.COMMIT,
            state.ROLLBACK,
            state.UNKNOWN,
            ("remoting", rpc_client.name_on_wire(group)),
        )
        self.leave = self._coalescer.leave

    def on_check(self, address: str, command: Command) -> Command:
        message, place = self._decode(address, command)
        result = self._check(message, place)
        copy = address, place
        held_bytes = len(message.body) + len(command.body)
        decision = (
            result
            if isinstance(result, TransactionState)
            else self._coalescer.request_decision(place.key, copy, result, held_bytes)
        )
        if decision is not None:
            self._coalescer.send_decision(place.key, copy, decision)
        return rpc.CHECK_TRANSACTION_STATE.reply(command)

    def _decode(self, address: str, command: Command) -> tuple[ReceivedMessage, HalfPlace]:
        fields = rpc.CHECK_TRANSACTION_STATE.arguments(command)
        max_bytes = self._rpc_client.pool.connect_options.max_pushed_bytes  # also the limit of a decompressed body
        stored_message = decompressed(
            single_message(command.body, command.ext.get("bname", ""), "as a half message", address), max_bytes
        )
        if stored_message.decode_error is not None:
            raise DecodeError(f"a half message cannot be decoded: {stored_message.decode_error}", address)
        topic, queue = self._rpc_client.scope.user_name(stored_message.topic), stored_message.queue
        message = replace(stored_message, topic=topic, queue=queue._replace(topic=topic))
        msg_id = message.properties.get(Property.UNIQ_KEY) or fields["msgId"] or message.msg_id
        return message, HalfPlace(
            message.topic,
            command.ext.get("bname", ""),
            self._group,
            msg_id,
            fields["transactionId"] or msg_id,
            fields["tranStateTableOffset"],
            fields["commitLogOffset"],
            stored_content_digest(message),
        )

    def _answer(self, copy: _Copy, decision: TransactionState) -> bool:
        address, place = copy
        if decision is TransactionState.ROLLBACK and _confirmed_commits().is_at_other_master(place.key, address):
            # This master may lack the first commit. If it has the first commit, a second commit delivers the message twice,
            # which is better than losing the message.
            decision = TransactionState.COMMIT
        try:
            return send_decision(
                self._rpc_client,
                address,
                place,
                decision,
                Deadline.after(self._rpc_client.request_timeout_s),
                answers_check=True,
            )
        except RocketMQError as e:
            logger.warning(
                "the broker at %s will check half message %s again, because %s did not arrive: %s",
                address, place.msg_id, decision.value, e,
            )  # fmt: skip
            return False

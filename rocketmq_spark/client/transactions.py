"""Half messages over remoting: decisions, and what brokers ask about those without one.

Mirrors ``MQClientAPIImpl.endTransactionOneway`` and ``ClientRemotingProcessor.checkTransactionState``.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.base.threads import Aside, Failure, attempt
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.errors import RemoteProtocolError, RocketMQError
from rocketmq_spark.model import ReceivedMessage
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


# Questions that wait for a user's function: what is more is asked again.
MOST_WAITING = 1000
# A broker notes an answer some seconds later, and may ask about a new copy until then.
CROSSING_S = 60.0
MOST_ANSWERED = 100_000


# Who asks, and about which copy.
_Copy = tuple[str, HalfPlace]


class HalfChecks:
    """What a broker's question does: the answer is a request of its own, to the broker that asked.

    User code may be slow, or hang. It has a thread of its own, so that what is known without it is said at once: a broker
    writes its copies anew every 30 s, and an answer about an earlier one leaves the later one open. So the function is asked
    once about all copies that came meanwhile, its answer is about the newest, and what comes soon after a commit is rolled back.
    """

    def __init__(self, calls: Calls, group: str, question: HalfCheck) -> None:
        self._calls = calls
        self._group = group
        self._question = question
        self._aside = Aside(MOST_WAITING)
        self._left = False
        self._lock = threading.Lock()
        self._newest: dict[str, _Copy] = {}  # of those that wait for the function
        self._committed: OrderedDict[str, Deadline] = OrderedDict()

    def asked(self, address: str, command: Command) -> Command:
        message, place = self._read(address, command)
        known = self._question(message, place)
        decision = known if isinstance(known, TransactionState) else self._later(address, place, known)
        if decision is not None:
            self._answer(address, place, decision)
        return rpc.CHECK_TRANSACTION_STATE.reply(command)

    def leave(self) -> None:
        """What waits is not decided here any more."""
        self._left = True

    def _read(self, address: str, command: Command) -> tuple[ReceivedMessage, HalfPlace]:
        fields = rpc.CHECK_TRANSACTION_STATE.arguments(command)
        messages = decode_messages(command.body, command.ext.get("bname", ""))
        if len(messages) != 1:
            raise RemoteProtocolError(f"a broker asks about {len(messages)} half messages at once, expected 1", address)
        topic, queue = self._calls.scope.plain(messages[0].topic), messages[0].queue
        message = replace(messages[0], topic=topic, queue=queue._replace(topic=topic))
        msg_id = message.properties.get(Property.UNIQ_KEY) or fields["msgId"] or message.msg_id
        return message, HalfPlace(
            message.topic,
            command.ext.get("bname", ""),
            self._group,
            msg_id,
            fields["transactionId"] or msg_id,
            fields["tranStateTableOffset"],
            fields["commitLogOffset"],
        )

    def _later(self, address: str, place: HalfPlace, decide: Callable[[], TransactionState]) -> TransactionState | None:
        """Has the function asked, unless it is going to be, or was: then its answer is about this copy, too."""
        with self._lock:
            lately = self._committed.get(place.msg_id)
            if lately is not None and not lately.expired:
                return TransactionState.ROLLBACK
            waits = place.msg_id in self._newest
            self._newest[place.msg_id] = address, place
        if not waits:
            try:
                self._aside.run(self._group, functools.partial(self._decide, place.msg_id, decide))
            except RuntimeError as e:
                self._done(place.msg_id)
                logger.warning("the broker at %s will ask again about half message %s: %s", address, place.msg_id, e)
        return None

    def _decide(self, msg_id: str, decide: Callable[[], TransactionState]) -> None:
        if self._left:
            self._done(msg_id)
            return
        made = attempt(decide)
        if isinstance(made, Failure):  # what is noted of it must not stay
            made.log(logger, "half message %s could not be decided", msg_id)
        decision = TransactionState.UNKNOWN if isinstance(made, Failure) else made
        newest: _Copy | None = self._newest[msg_id]
        while newest is not None:  # another copy may come while one is decided
            address, place = newest
            committed = self._answer(address, place, decision) and decision is TransactionState.COMMIT
            newest = self._done(msg_id, newest, committed)
            decision = TransactionState.ROLLBACK if committed else decision

    def _done(self, msg_id: str, last: _Copy | None = None, committed: bool = False) -> _Copy | None:
        """It does not wait any more, unless a question came after the ``last``, which is returned."""
        with self._lock:
            if committed:
                self._committed[msg_id] = Deadline.after(CROSSING_S)
                while len(self._committed) > MOST_ANSWERED or next(iter(self._committed.values())).expired:
                    self._committed.popitem(last=False)
            newest = self._newest[msg_id]
            if last is not None and newest is not last:
                return newest
            del self._newest[msg_id]
            return None

    def _answer(self, address: str, place: HalfPlace, decision: TransactionState) -> bool:
        try:
            end(self._calls, address, place, decision, Deadline.after(self._calls.request_timeout_s), asked=True)
        except RocketMQError as e:
            logger.warning(
                "the broker at %s will ask again about half message %s: %s did not arrive: %s",
                address, place.msg_id, decision.value, e,
            )  # fmt: skip
            return False
        return True

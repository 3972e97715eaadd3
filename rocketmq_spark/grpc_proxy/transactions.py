"""Half messages through a Proxy: decisions, and what it asks about those without one.

A Proxy takes the topic for the producer group. It asks a client that has said on its telemetry stream that it sends to the
topic, and knows a half message for 30 s after it has sent or checked it. So a decision goes to the endpoint that took the
message, or asked last. It passes decisions on without waiting for the broker: its OK proves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import NAMESPACE_SEPARATOR
from rocketmq_spark.base.copies import CopyQuestions
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import CallTimeout, ClosedError, ConnectionLost, RocketMQError
from rocketmq_spark.grpc_proxy import facts
from rocketmq_spark.grpc_proxy.facts import ClientType, TransactionResolution, TransactionSource
from rocketmq_spark.grpc_proxy.member import HEARTBEAT_S, popped
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.proxy import Proxy, Telemetry, checked
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState

logger = logging.getLogger(__name__)

_Copies = CopyQuestions[HalfPlace, TransactionState]
_Topics = dict[str, tuple[str, ...]]  # with the groups that sent to it, the last one first


def _endpoint(place: HalfPlace) -> str:
    return place.broker_name


_RESOLUTIONS = {
    TransactionState.COMMIT: TransactionResolution.COMMIT,
    TransactionState.ROLLBACK: TransactionResolution.ROLLBACK,
}


class ProxyTransactions:
    """The questions of one Proxy to the producers of this process. ``unpack`` opens bodies that were compressed."""

    def __init__(self, proxy: Proxy, unpack: Callable[[bytes], bytes]) -> None:
        self._proxy = proxy
        self._unpack = unpack
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # who has it may change what Proxies hear, and wait for their answers
        self._checks: dict[object, tuple[str, HalfCheck, _Copies]] = {}
        self._topics: _Topics = {}
        self._taken: set[str] = set()  # those of them that a Proxy has accepted
        self._streams: dict[str, Telemetry] = {}
        self._timer: Timer | None = None

    def join(self, group: str, check: HalfCheck) -> Callable[[Deadline], None]:
        """From now on ``check`` answers for half messages of this group. Returns what ends that."""
        me, state = object(), TransactionState
        copies: _Copies = CopyQuestions(
            self._say, _endpoint, state.COMMIT, state.ROLLBACK, state.UNKNOWN, ("grpc", group)
        )
        with self._lock:
            self._checks[me] = group, check, copies

        def leave(deadline: Deadline) -> None:
            copies.leave()
            with self._lock:
                self._checks.pop(me, None)
                if self._checks:
                    there = {whose for whose, _, _ in self._checks.values()}
                    self._topics = {name: its for name, its in self._topics.items() if not there.isdisjoint(its)}
                    return
                streams, self._streams = self._streams, {}
                timer, self._timer = self._timer, None
                self._topics = {}
            with contextlib.ExitStack() as rest:  # each of these is done, whatever interrupts what is before it
                for stream in streams.values():
                    rest.callback(stream.close, deadline)
                if timer is not None:
                    rest.callback(timer.close)

        return leave

    def publish(self, topic: str, group: str, address: str, deadline: Deadline) -> None:
        """A half message is to be sent to ``topic``: the endpoint that gets it must know before that it can ask here.

        A Proxy refuses all topics because of one, and does not say which. So one that is refused beside others is named alone.
        """
        deadline = deadline.within(self._proxy.access.request_timeout_s)
        try:
            error = self._beside_others(topic, group, address, deadline)
            if error is not None and not error.retriable:
                error = self._alone(topic, group, address, deadline)
        except RuntimeError as e:
            error = ConnectionLost(f"there is no thread for what the Proxy asks: {e}", address)
        if error is not None:
            self._proxy.noted(address, error)
            error.unsent = True
            raise error

    def _beside_others(self, topic: str, group: str, address: str, deadline: Deadline) -> RocketMQError | None:
        while True:  # when another thread names its topic alone, that is accepted without this one
            if not self._turn.acquire(timeout=deadline.remaining()):
                return CallTimeout("the Proxy has not answered about another topic in time", address)
            try:
                stream = self._tell(group, lambda topics: _with(topics, topic, group))[address]
            finally:
                self._turn.release()
            error = stream.wait(deadline)
            if error is not None:
                return error
            with self._lock:  # who names its topic alone leaves out what is not taken by then
                if topic in self._topics:
                    self._taken.add(topic)
                    return None

    def _alone(self, topic: str, group: str, address: str, deadline: Deadline) -> RocketMQError | None:
        """Nothing is named by other threads meanwhile: the answer would be about that, too."""
        if not self._turn.acquire(timeout=deadline.remaining()):
            return CallTimeout("the Proxy has not answered about another topic in time", address)

        def named(change: Callable[[_Topics], _Topics]) -> RocketMQError | None:
            return self._tell(group, change)[address].wait(deadline)

        try:
            # Another thread may have taken back what was refused.
            error = named(lambda topics: _with(topics, topic, group))
            if error is None:
                self._taken.add(topic)
            if error is None or error.retriable:
                return error
            mine = _with({topic: self._topics.get(topic, ())}, topic, group)
            others = {name: its for name, its in self._topics.items() if name != topic}
            error = named(lambda topics: mine)
            if error is not None:
                self._taken.discard(topic)
                self._tell(group, lambda topics: others)
                return error
            self._taken.add(topic)
            before = {name: its for name, its in others.items() if name in self._taken}  # new ones are named anew
            error = named(lambda topics: {**before, **mine}) if before else None
            if error is not None and not error.retriable:
                logger.warning(
                    "the Proxy at %s rejects one of the topics %s, so it checks half messages of none of them",
                    address,
                    [*before],
                )
                error = named(lambda topics: mine)
            return error
        finally:
            self._turn.release()

    def _tell(self, group: str, change: Callable[[_Topics], _Topics]) -> Mapping[str, Telemetry]:
        """What is sent to, for every endpoint. Returns their streams."""
        begun: list[Telemetry] = []
        try:
            with self._lock:
                there = {whose for whose, _, _ in self._checks.values()}
                if group not in there:  # a send that outlasted its producer; what is begun for it would not end
                    raise ClosedError("the producer was closed")
                changed = {name: its for name, its in change(self._topics).items() if not there.isdisjoint(its)}
                begun += self._streams.values() if self._topics.keys() != changed.keys() else ()
                self._topics = changed
                self._begin()
                return dict(self._streams)
        finally:
            for one in begun:
                one.tell()

    def _begin(self) -> None:
        """With the lock. What there is no thread for is begun the next time."""
        if self._timer is None:
            timer = Timer("rocketmq-transactions-heartbeat")
            timer.every(HEARTBEAT_S, self._beat, HEARTBEAT_S)
            self._timer = timer
        for name in self._proxy.addresses:
            if name not in self._streams:
                asked = partial(self._asked, name)
                self._streams[name] = Telemetry(self._proxy.at(name), self._settings, lambda settings: None, asked)

    def end(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Sends a decision to the endpoint that knows the half message; False, for its broker does not answer."""
        channel = self._proxy.at(place.broker_name)
        request = self._request(place, decision, TransactionSource.SOURCE_CLIENT)
        checked(channel.ask(facts.END_TRANSACTION, request, deadline), channel.address, place.topic)
        return False

    def _request(self, place: HalfPlace, decision: TransactionState, source: TransactionSource) -> Any:
        return proto("EndTransactionRequest")(
            topic=self._proxy.resource(place.topic),
            message_id=place.msg_id,
            transaction_id=place.transaction_id,
            resolution=_RESOLUTIONS[decision],
            source=source,
        )

    def _asked(self, address: str, command: Any) -> None:
        """On the thread of a stream, which must not run a user's function."""
        asked = command.message.topic
        # A Proxy takes names apart, also those that were given to it in one piece.
        name = NAMESPACE_SEPARATOR.join(filter(None, (asked.resource_namespace, asked.name)))
        with self._lock:
            mine = {self._proxy.on_wire(topic): (topic, groups) for topic, groups in self._topics.items()}
            topic, groups = mine.get(name, ("", ()))
            there = list(self._checks.values())
        found = [one for group in groups for one in there if one[0] == group]
        if not found:
            logger.info(
                "the Proxy at %s checks a half message of topic %s, to which this process does not send", address, name
            )
            return
        message = popped(command.message, topic, (address, address), self._unpack)
        group, check, copies = found[0]
        place = HalfPlace(topic, address, group, message.msg_id, command.transaction_id)
        known = check(message, place)
        decision = known if isinstance(known, TransactionState) else copies.ask(message.msg_id, place, known)
        if decision is not None:
            self._say(place, decision, wait=False)

    def _say(self, place: HalfPlace, decision: TransactionState, wait: bool = True) -> bool:
        """An answer to a question. False: a Proxy proves nothing. The thread of a stream does not ``wait`` for it."""
        if decision is TransactionState.UNKNOWN:
            return False
        deadline = Deadline.after(self._proxy.access.request_timeout_s)
        request = self._request(place, decision, TransactionSource.SOURCE_SERVER_CHECK)

        def answered(answer: Any) -> None:
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                checked(answer, place.broker_name, place.topic)
            except RocketMQError as e:
                logger.warning(
                    "the Proxy at %s will ask again about half message %s: %s did not arrive: %s",
                    place.broker_name, place.msg_id, decision.value, e,
                )  # fmt: skip

        channel = self._proxy.at(place.broker_name)
        try:
            if wait:
                answered(channel.ask(facts.END_TRANSACTION, request, deadline))
            else:
                channel.ask_async(facts.END_TRANSACTION, request, deadline, answered)
        except RocketMQError as e:
            answered(e)
        return False

    def _beat(self) -> None:
        """A Proxy forgets producers without heartbeats."""
        request = proto("HeartbeatRequest")(client_type=ClientType.PRODUCER)
        deadline = Deadline.after(self._proxy.access.request_timeout_s)
        for address in self._proxy.addresses:
            try:
                self._proxy.at(address).ask_async(facts.HEARTBEAT, request, deadline, lambda answer: None)
            except RocketMQError as e:
                logger.info("no heartbeat for transactions at %s: %s", address, e)
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.repeat()

    def _settings(self) -> Any:
        made = self._proxy.settings(ClientType.PRODUCER)
        made.publishing.SetInParent()
        for topic in list(self._topics):
            made.publishing.topics.add().CopyFrom(self._proxy.resource(topic))
        return made


def _with(topics: _Topics, topic: str, group: str) -> _Topics:
    return {**topics, topic: (group, *[other for other in topics.get(topic, ()) if other != group])}

"""Half messages through a Proxy: decisions, and checks of half messages without a decision.

A Proxy uses the topic as the producer group. It sends checks to a client whose telemetry stream has named the
topic, and remembers a half message for 30 s after it has sent or checked it. So a decision must go to the endpoint that accepted
the message, or that checked it last. The Proxy forwards decisions without waiting for the broker, so its OK proves nothing.
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
from rocketmq_spark.grpc_proxy import tables
from rocketmq_spark.grpc_proxy.member import HEARTBEAT_S, popped
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.proxy import Proxy, Telemetry, checked
from rocketmq_spark.grpc_proxy.tables import ClientType, TransactionResolution, TransactionSource
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState, content_of_stored

logger = logging.getLogger(__name__)

_Copies = CopyQuestions[HalfPlace, TransactionState]
_Topics = dict[str, tuple[str, ...]]  # topics with the groups that sent to them, the latest first


def _endpoint(place: HalfPlace) -> str:
    return place.broker_name


_RESOLUTIONS = {
    TransactionState.COMMIT: TransactionResolution.COMMIT,
    TransactionState.ROLLBACK: TransactionResolution.ROLLBACK,
}


class ProxyTransactions:
    """The checks of one Proxy for the producers of this process. ``unpack`` decompresses bodies."""

    def __init__(self, proxy: Proxy, unpack: Callable[[bytes], bytes]) -> None:
        self._proxy = proxy
        self._unpack = unpack
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held to change the topics that Proxies receive, and to wait for their answers
        self._checks: dict[object, tuple[str, HalfCheck, _Copies]] = {}
        self._topics: _Topics = {}
        self._taken: set[str] = set()  # topics that a Proxy has accepted
        self._streams: dict[str, Telemetry] = {}
        self._timer: Timer | None = None

    def join(self, group: str, check: HalfCheck) -> Callable[[Deadline], None]:
        """Register ``check`` for half messages of this group. Returns a function that unregisters it."""
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
            with contextlib.ExitStack() as rest:  # every step runs, even if an earlier one is interrupted
                for stream in streams.values():
                    rest.callback(stream.close, deadline)
                if timer is not None:
                    rest.callback(timer.close)

        return leave

    def publish(self, topic: str, group: str, address: str, deadline: Deadline) -> None:
        """Announce ``topic`` before a half message is sent to it, so that the endpoint can send its checks to this client.

        A Proxy rejects all topics because of one, and does not say which. So if it rejects this topic together with others, this
        topic is announced alone.
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
        while True:  # repeated if another thread announced its topic alone: then this one was not accepted
            if not self._turn.acquire(timeout=deadline.remaining()):
                return CallTimeout("the Proxy has not answered about another topic in time", address)
            try:
                stream = self._tell(group, lambda topics: _with(topics, topic, group))[address]
            finally:
                self._turn.release()
            error = stream.wait(deadline)
            if error is not None:
                return error
            with self._lock:  # a thread that announces its topic alone drops topics that are not accepted yet
                if topic in self._topics:
                    self._taken.add(topic)
                    return None

    def _alone(self, topic: str, group: str, address: str, deadline: Deadline) -> RocketMQError | None:
        """Announce a topic alone. Other threads announce nothing meanwhile, because the answer would cover their topics, too."""
        if not self._turn.acquire(timeout=deadline.remaining()):
            return CallTimeout("the Proxy has not answered about another topic in time", address)

        def named(change: Callable[[_Topics], _Topics]) -> RocketMQError | None:
            return self._tell(group, change)[address].wait(deadline)

        try:
            # Try with the others once more, because another thread may have removed the rejected topic.
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
            before = {name: its for name, its in others.items() if name in self._taken}  # threads of new ones repeat it
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
        """Change the announced topics at every endpoint. Returns the streams by endpoint."""
        begun: list[Telemetry] = []
        try:
            with self._lock:
                there = {whose for whose, _, _ in self._checks.values()}
                if group not in there:  # a send after its producer was closed; nothing would end a stream it starts
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
        """Start missing streams and the timer, with the lock held. If a thread cannot be started, the next call does it."""
        if self._timer is None:
            timer = Timer("rocketmq-transactions-heartbeat")
            timer.every(HEARTBEAT_S, self._beat, HEARTBEAT_S)
            self._timer = timer
        for name in self._proxy.addresses:
            if name not in self._streams:
                asked = partial(self._asked, name)
                self._streams[name] = Telemetry(self._proxy.at(name), self._settings, lambda settings: None, asked)

    def end(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Send a decision to the endpoint that remembers the half message. Returns False, because no broker has confirmed it."""
        channel = self._proxy.at(place.broker_name)
        request = self._request(place, decision, TransactionSource.SOURCE_CLIENT)
        checked(channel.ask(tables.END_TRANSACTION, request, deadline), channel.address, place.topic)
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
        """Receives a check on a stream's thread, which must not call a user's function."""
        asked = command.message.topic
        # A Proxy returns namespace and name separately, even if they were sent as one name.
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
        place = HalfPlace(
            topic, address, group, message.msg_id, command.transaction_id, content=content_of_stored(message)
        )
        known = check(message, place)
        held_bytes = len(message.body) + command.ByteSize()
        decision = known if isinstance(known, TransactionState) else copies.ask(place.what, place, known, held_bytes)
        if decision is not None:
            copies.say(place.what, place, decision)

    def _say(self, place: HalfPlace, decision: TransactionState) -> bool:
        """Send the answer to a check. Returns False, because a Proxy confirms nothing."""
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
            answered(channel.ask(tables.END_TRANSACTION, request, deadline))
        except RocketMQError as e:
            answered(e)
        return False

    def _beat(self) -> None:
        """Send heartbeats, because a Proxy forgets producers without them."""
        request = proto("HeartbeatRequest")(client_type=ClientType.PRODUCER)
        deadline = Deadline.after(self._proxy.access.request_timeout_s)
        for address in self._proxy.addresses:
            try:
                self._proxy.at(address).ask_async(tables.HEARTBEAT, request, deadline, lambda answer: None)
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

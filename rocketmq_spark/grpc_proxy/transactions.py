"""Transactions through a Proxy: sends decisions, and answers checks of half messages.

A Proxy uses the topic as the producer group, and sends checks to a client that has announced the topic on its telemetry stream.
An endpoint remembers a half message for 30 s after it has accepted or checked the message. So a decision must go to the
endpoint that accepted the message, or that checked it last. The Proxy forwards a decision without waiting for the broker, so
the Proxy's OK does not confirm the decision.
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
from rocketmq_spark.base.copies import CheckCoalescer
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import CallTimeout, ClosedError, ConnectionLost, RocketMQError
from rocketmq_spark.grpc_proxy import tables
from rocketmq_spark.grpc_proxy.member import HEARTBEAT_S, to_popped_message
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.proxy import Proxy, TelemetryStream, require_success
from rocketmq_spark.grpc_proxy.tables import ClientType, TransactionResolution, TransactionSource
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState, stored_content_digest

logger = logging.getLogger(__name__)

_Coalescer = CheckCoalescer[HalfPlace, TransactionState]
_GroupsByTopic = dict[str, tuple[str, ...]]  # topics, with the groups that sent to them, the latest first


def _endpoint_of(place: HalfPlace) -> str:
    return place.broker_name


_RESOLUTIONS = {
    TransactionState.COMMIT: TransactionResolution.COMMIT,
    TransactionState.ROLLBACK: TransactionResolution.ROLLBACK,
}


class ProxyTransactions:
    """The transactions of the producers of this process at one Proxy. ``unpack`` decompresses bodies."""

    def __init__(self, proxy: Proxy, unpack: Callable[[bytes], bytes]) -> None:
        self._proxy = proxy
        self._unpack = unpack
        self._lock = threading.Lock()
        # Held while the announced topics change. If one topic is announced alone, the lock is also held until the Proxy has
        # answered.
        self._announce_lock = threading.Lock()
        # By registration: the producer group, the function that decides, and the coalescer of the group's checks.
        self._checks: dict[object, tuple[str, HalfCheck, _Coalescer]] = {}
        self._groups_by_topic: _GroupsByTopic = {}
        self._accepted_topics: set[str] = set()  # topics that the Proxy has accepted
        self._streams: dict[str, TelemetryStream] = {}  # by endpoint
        self._timer: Timer | None = None

    def join(self, group: str, check: HalfCheck) -> Callable[[Deadline], None]:
        """Register ``check`` for half messages of this group. Returns a function that unregisters it."""
        registration, state = object(), TransactionState
        coalescer: _Coalescer = CheckCoalescer(
            self._send_answer, _endpoint_of, state.COMMIT, state.ROLLBACK, state.UNKNOWN, ("grpc", group)
        )
        with self._lock:
            self._checks[registration] = group, check, coalescer

        def leave(deadline: Deadline) -> None:
            coalescer.leave()
            with self._lock:
                self._checks.pop(registration, None)
                if self._checks:
                    groups = {each_group for each_group, _, _ in self._checks.values()}
                    self._groups_by_topic = {
                        name: topic_groups
                        for name, topic_groups in self._groups_by_topic.items()
                        if not groups.isdisjoint(topic_groups)
                    }
                    return
                streams, self._streams = self._streams, {}
                timer, self._timer = self._timer, None
                self._groups_by_topic = {}
            with contextlib.ExitStack() as cleanup:  # runs every step, even if an earlier step is interrupted
                for stream in streams.values():
                    cleanup.callback(stream.close, deadline)
                if timer is not None:
                    cleanup.callback(timer.close)

        return leave

    def announce(self, topic: str, group: str, address: str, deadline: Deadline) -> None:
        """Announce ``topic`` before a half message is sent to it, so that the endpoint can send checks to this client.

        A Proxy that rejects one topic rejects all topics of the same announcement, and does not report which topic is the
        reason. So this topic is announced together with the other topics first. If the Proxy rejects this announcement, the topic
        is announced alone.
        """
        deadline = deadline.within(self._proxy.connect_options.request_timeout_s)
        try:
            error = self._announce_with_other_topics(topic, group, address, deadline)
            if error is not None and not error.retriable:
                error = self._announce_alone(topic, group, address, deadline)
        except RuntimeError as e:
            error = ConnectionLost(f"there is no thread for the checks of the Proxy: {e}", address)
        if error is not None:
            self._proxy.record_result(address, error)
            error.unsent = True
            raise error

    def _announce_with_other_topics(
        self, topic: str, group: str, address: str, deadline: Deadline
    ) -> RocketMQError | None:
        while True:  # repeated if another thread has meanwhile announced only its own topic
            if not self._announce_lock.acquire(timeout=deadline.remaining()):
                return CallTimeout("the Proxy has not answered about another topic in time", address)
            try:
                stream = self._announce(group, lambda topics: _groups_with_topic(topics, topic, group))[address]
            finally:
                self._announce_lock.release()
            error = stream.wait(deadline)
            if error is not None:
                return error
            # The lock is held for the check and the addition. A thread that announces its topic alone drops topics that are not
            # accepted, and must not drop this topic between the two steps.
            with self._lock:
                if topic in self._groups_by_topic:
                    self._accepted_topics.add(topic)
                    return None

    def _announce_alone(self, topic: str, group: str, address: str, deadline: Deadline) -> RocketMQError | None:
        """Announce a topic alone. Meanwhile, no other thread may announce topics, because the Proxy's answer would then be about
        those topics, too.
        """
        if not self._announce_lock.acquire(timeout=deadline.remaining()):
            return CallTimeout("the Proxy has not answered about another topic in time", address)

        def announce(change: Callable[[_GroupsByTopic], _GroupsByTopic]) -> RocketMQError | None:
            return self._announce(group, change)[address].wait(deadline)

        try:
            # Try with the other topics once more, because another thread may have removed the rejected topic.
            error = announce(lambda topics: _groups_with_topic(topics, topic, group))
            if error is None:
                self._accepted_topics.add(topic)
            if error is None or error.retriable:
                return error
            groups_of_this_topic = _groups_with_topic({topic: self._groups_by_topic.get(topic, ())}, topic, group)
            groups_of_other_topics = {name: groups for name, groups in self._groups_by_topic.items() if name != topic}
            error = announce(lambda topics: groups_of_this_topic)
            if error is not None:
                self._accepted_topics.discard(topic)
                self._announce(group, lambda topics: groups_of_other_topics)
                return error
            self._accepted_topics.add(topic)
            # Announce the accepted topics again. The topics that are not accepted yet are announced again by their own threads.
            accepted_topics = {
                name: groups for name, groups in groups_of_other_topics.items() if name in self._accepted_topics
            }
            error = announce(lambda topics: {**accepted_topics, **groups_of_this_topic}) if accepted_topics else None
            if error is not None and not error.retriable:
                logger.warning(
                    "the Proxy at %s rejects one of the topics %s, so it checks no half messages of these topics",
                    address,
                    [*accepted_topics],
                )
                error = announce(lambda topics: groups_of_this_topic)
            return error
        finally:
            self._announce_lock.release()

    def _announce(
        self, group: str, change_topics: Callable[[_GroupsByTopic], _GroupsByTopic]
    ) -> Mapping[str, TelemetryStream]:
        """Change the announced topics at every endpoint. Returns the streams by endpoint."""
        changed_streams: list[TelemetryStream] = []
        try:
            with self._lock:
                open_groups = {each_group for each_group, _, _ in self._checks.values()}
                # A send must not start streams after its producer was closed, because nothing would end these streams.
                if group not in open_groups:
                    raise ClosedError("the producer was closed")
                new_topics = {
                    name: groups
                    for name, groups in change_topics(self._groups_by_topic).items()
                    if not open_groups.isdisjoint(groups)
                }
                changed_streams += self._streams.values() if self._groups_by_topic.keys() != new_topics.keys() else ()
                self._groups_by_topic = new_topics
                self._start_streams()
                return dict(self._streams)
        finally:
            for stream in changed_streams:
                stream.send_settings()

    def _start_streams(self) -> None:
        """Start the timer and the missing streams, with the lock held. If a thread cannot start, the next call repeats this."""
        if self._timer is None:
            timer = Timer("rocketmq-transactions-heartbeat")
            timer.call_repeatedly(HEARTBEAT_S, self._send_heartbeats, HEARTBEAT_S)
            self._timer = timer
        for address in self._proxy.addresses:
            if address not in self._streams:
                on_check = partial(self._on_check, address)
                self._streams[address] = TelemetryStream(
                    self._proxy.channel_of(address), self._settings, lambda settings: None, on_check
                )

    def send_decision(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Send a decision to the endpoint that remembers the half message. Returns False, because the broker confirms nothing."""
        channel = self._proxy.channel_of(place.broker_name)
        request = self._request(place, decision, TransactionSource.SOURCE_CLIENT)
        require_success(channel.invoke(tables.END_TRANSACTION, request, deadline), channel.address, place.topic)
        return False

    def _request(self, place: HalfPlace, decision: TransactionState, source: TransactionSource) -> Any:
        return proto("EndTransactionRequest")(
            topic=self._proxy.resource(place.topic),
            message_id=place.msg_id,
            transaction_id=place.transaction_id,
            resolution=_RESOLUTIONS[decision],
            source=source,
        )

    def _on_check(self, address: str, command: Any) -> None:
        """Receive a check on the thread of a stream, which must not call a user's function."""
        resource = command.message.topic
        # A Proxy splits a name into namespace and name, although this client sends one name.
        name = NAMESPACE_SEPARATOR.join(filter(None, (resource.resource_namespace, resource.name)))
        with self._lock:
            topics_by_wire_name = {
                self._proxy.name_on_wire(topic): (topic, groups) for topic, groups in self._groups_by_topic.items()
            }
            topic, groups = topics_by_wire_name.get(name, ("", ()))
            registrations = list(self._checks.values())
        matching_checks = [
            registration for group in groups for registration in registrations if registration[0] == group
        ]
        if not matching_checks:
            logger.info(
                "the Proxy at %s checks a half message of topic %s, to which this process sends nothing", address, name
            )
            return
        message = to_popped_message(command.message, topic, (address, address), self._unpack)
        group, check, coalescer = matching_checks[0]
        place = HalfPlace(
            topic, address, group, message.msg_id, command.transaction_id, digest=stored_content_digest(message)
        )
        check_result = check(message, place)
        held_bytes = len(message.body) + command.ByteSize()
        decision = (
            check_result
            if isinstance(check_result, TransactionState)
            else coalescer.request_decision(place.key, place, check_result, held_bytes)
        )
        if decision is not None:
            coalescer.send_decision(place.key, place, decision)

    def _send_answer(self, place: HalfPlace, decision: TransactionState) -> bool:
        """Send the answer to a check. Returns False, because the broker confirms nothing."""
        if decision is TransactionState.UNKNOWN:
            return False
        deadline = Deadline.after(self._proxy.connect_options.request_timeout_s)
        request = self._request(place, decision, TransactionSource.SOURCE_SERVER_CHECK)

        def on_answer(answer: Any) -> None:
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                require_success(answer, place.broker_name, place.topic)
            except RocketMQError as e:
                logger.warning(
                    "the Proxy at %s will check half message %s again, because %s did not arrive: %s",
                    place.broker_name, place.msg_id, decision.value, e,
                )  # fmt: skip

        channel = self._proxy.channel_of(place.broker_name)
        try:
            on_answer(channel.invoke(tables.END_TRANSACTION, request, deadline))
        except RocketMQError as e:
            on_answer(e)
        return False

    def _send_heartbeats(self) -> None:
        """Send heartbeats and settings, because a Proxy forgets producers without them."""
        request = proto("HeartbeatRequest")(client_type=ClientType.PRODUCER)
        deadline = Deadline.after(self._proxy.connect_options.request_timeout_s)
        for address in self._proxy.addresses:
            try:
                self._proxy.channel_of(address).invoke_async(tables.HEARTBEAT, request, deadline, lambda answer: None)
            except RocketMQError as e:
                logger.info("the heartbeat for transactions at %s failed: %s", address, e)
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.resend_settings()

    def _settings(self) -> Any:
        settings = self._proxy.settings(ClientType.PRODUCER)
        settings.publishing.SetInParent()
        for topic in list(self._groups_by_topic):
            settings.publishing.topics.add().CopyFrom(self._proxy.resource(topic))
        return settings


def _groups_with_topic(topics: _GroupsByTopic, topic: str, group: str) -> _GroupsByTopic:
    return {**topics, topic: (group, *[other for other in topics.get(topic, ()) if other != group])}

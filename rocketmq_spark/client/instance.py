"""The client instance, as RocketMQ's ``MQClientInstance``: the group members of this process, and their heartbeats.

Producers and consumers that share connections share an instance. The client instance has the client id, reports all groups in one
heartbeat, and passes the requests of brokers to the members of groups. Each group handles its requests on its own thread, never
on the thread that reads answers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocketmq_spark.base import dropped
from rocketmq_spark.base.clock import Deadline, RateLimit
from rocketmq_spark.base.codes import Property, Request, Response
from rocketmq_spark.base.threads import Failure, KeyedExecutor, Timer, TracebackLimit, capture
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import LocalProtocolError, NotSupported, RocketMQError
from rocketmq_spark.model import BrokerData
from rocketmq_spark.remoting.connection import ServerRequest
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import decode_leniently

logger = logging.getLogger(__name__)

FIRST_HEARTBEAT_DELAY_S = 1.0
HEARTBEAT_TIMEOUT_S = 3.0  # also the longest wait for dropped consumers, and for brokers at the end of ``_reregister``
# The maximum time of the request for the list of brokers. It is long enough to try another name server if the first name server
# hangs, and far below the 120 s after which brokers forget a client.
CLUSTER_TIMEOUT_S = 10.0
_MAX_LINGERING_GROUPS = 50
_MAX_PARALLEL_BROKERS = 64  # number of brokers that are contacted in parallel
LOG_PAUSE_S = 10.0  # pause between log lines about rejected requests
_traceback_limit = TracebackLimit()  # limits the log: a server may send thousands of requests that fail
_MAX_WAITING_REQUESTS = 1000  # waiting requests of brokers per group; more are rejected

# Requests of brokers to consumers, with the field that names the group. Requests to producers name the group in the message.
_GROUP_FIELDS = {
    Request.NOTIFY_CONSUMER_IDS_CHANGED: "consumerGroup",
    Request.RESET_CONSUMER_CLIENT_OFFSET: "group",
    Request.GET_CONSUMER_STATUS_FROM_CLIENT: "group",
    Request.GET_CONSUMER_RUNNING_INFO: "consumerGroup",
    Request.CONSUME_MESSAGE_DIRECTLY: "consumerGroup",
}

_Addresses = Sequence[tuple[str, str]]  # pairs of broker name and address
# Takes the broker's address and its request, and returns the answer, or None to reject the request. The handler may block.
RequestHandler = Callable[[str, Command], Command | None]
# Handles a forwarded reply, on the thread that reads answers. The second argument runs the rest of the work on another thread.
# Returns False to reject the reply.
ReplyHandler = Callable[[ServerRequest, Callable[[Callable[[], None]], None]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredMember:
    """A member of a group. A member with a ``membership`` is a consumer, and every heartbeat has its subscriptions. A member
    without a ``membership`` is a producer.

    ``request_handler`` handles requests of brokers. With ``heartbeat_s`` 0, the member needs no heartbeat. With
    ``needs_all_brokers``, heartbeats go to all brokers of the cluster, because each of them may send requests. With
    ``receives_replies``, the member gets the replies that brokers forward to the client id.
    """

    group: str
    heartbeat_s: float = 30.0
    request_handler: RequestHandler | None = None
    membership: Callable[[], GroupMembership] | None = None
    needs_all_brokers: bool = False
    receives_replies: bool = False

    @property
    def consumes(self) -> bool:
        return self.membership is not None


class MemberRegistry:
    """The members by their group's name on brokers. Passes requests of brokers to members. Thread-safe."""

    def __init__(self, on_reply: ReplyHandler | None = None) -> None:
        self._on_reply = on_reply
        self._lock = threading.Lock()
        self._members: dict[tuple[bool, str], tuple[RegisteredMember, ...]] = {}  # no value is empty, even after Ctrl-C
        self._executor = KeyedExecutor(_MAX_WAITING_REQUESTS)
        self._reply_executor = KeyedExecutor()  # needs no limit: each reply belongs to a waiting request
        self._log_limit = RateLimit(LOG_PAUSE_S)

    def add(self, group_on_wire: str, member: RegisteredMember) -> None:
        """Add a member. A group may have several producers here, but only one consumer, because two consumers with one client id
        would read the same queues.
        """
        with self._lock:
            key = member.consumes, group_on_wire
            members = self._members.get(key, ())
            if member.consumes and members:
                raise LocalProtocolError(
                    f"consumer group {member.group!r} has a member in this process already",
                    remedy="Close the other member first, or run this member in another process",
                )
            self._members[key] = (*members, member)

    def remove(self, group_on_wire: str, member: RegisteredMember) -> bool:
        """Remove a member. Returns whether the group has no more members here. Removing a member twice is allowed."""
        with self._lock:
            key = member.consumes, group_on_wire
            if other_members := tuple(
                other_member for other_member in self._members.get(key, ()) if other_member is not member
            ):
                self._members[key] = other_members
            else:
                self._members.pop(key, None)
            return not other_members

    def has_consumer(self, group_on_wire: str) -> bool:
        """Whether the group has a consumer here."""
        with self._lock:
            return (True, group_on_wire) in self._members

    def one_member_per_group(self) -> list[tuple[str, RegisteredMember]]:
        """One member of every group, with the group's name on the wire."""
        with self._lock:
            return [(group_on_wire, members[0]) for (_, group_on_wire), members in sorted(self._members.items())]

    def shortest_heartbeat_s(self) -> float:
        """The shortest interval of all members, 0 if no member needs heartbeats."""
        with self._lock:
            intervals = [member.heartbeat_s for members in self._members.values() for member in members]
        return min(filter(None, intervals), default=0.0)

    def needs_all_brokers(self) -> bool:
        """Whether any member sends heartbeats to all brokers."""
        with self._lock:
            return any(member.needs_all_brokers for members in self._members.values() for member in members)

    def reply_groups(self) -> list[str]:
        """Return a list with the name of one group that has a member with ``receives_replies``. The name is the group's name on
        brokers. The list is empty if there is no such group.
        """
        with self._lock:
            return [
                name
                for (_, name), members in self._members.items()
                if any(member.receives_replies for member in members)
            ][:1]

    def on_request(self, request: ServerRequest) -> bool:
        """Dispatch a request of a broker; runs on the thread that reads answers. Returns False if no member accepts the
        request.
        """
        code, ext = request.command.code, request.command.ext
        try:
            if code == Request.CHECK_TRANSACTION_STATE:  # the message in the request has the group's name
                if not self._has_transaction_check():
                    return False
                self._executor.run(code, functools.partial(self._dispatch_check, request))
                return True
            if code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT and self._on_reply is not None:
                return self._on_reply(request, functools.partial(self._reply_executor.run, code))
            group_field = _GROUP_FIELDS.get(Request(code)) if code in _GROUP_FIELDS else None
            return group_field is not None and self._dispatch((True, ext.get(group_field, "")), request)
        except RuntimeError as e:  # no more threads, or too many requests wait
            self._log_rejected(request, e)
            return False

    def _has_transaction_check(self) -> bool:
        """Whether any producer can decide about half messages."""
        with self._lock:
            return any(
                member.request_handler is not None and not member.consumes
                for members in self._members.values()
                for member in members
            )

    def _dispatch_check(self, request: ServerRequest) -> None:
        is_dispatched = False
        try:
            # The body stays compressed, because only a property is needed: the name of the group.
            messages = itertools.islice(decode_leniently(request.command.body, max_body_bytes=None), 2)
            groups = [message.properties.get(Property.PRODUCER_GROUP, "") for message in messages]
            is_dispatched = len(groups) == 1 and self._dispatch((False, groups[0]), request)
        except RuntimeError as e:
            self._log_rejected(request, e)
        finally:
            if not is_dispatched:
                request.reject()

    def _log_rejected(self, request: ServerRequest, error: RuntimeError) -> None:
        if self._log_limit.due():  # a broker may send thousands of such requests
            logger.warning("request %s of %s is refused: %s", request.command.code, request.address, error)

    def _dispatch(self, key: tuple[bool, str], request: ServerRequest) -> bool:
        with self._lock:
            handling_members = [member for member in self._members.get(key, ()) if member.request_handler is not None]
        if not handling_members:
            return False
        # A message that an operator sent (``consumeMessageDirectly``) gets its own thread, because the listener may hang while
        # it handles such a message.
        is_direct = request.command.code == Request.CONSUME_MESSAGE_DIRECTLY
        self._executor.run((key, is_direct), functools.partial(_answer, handling_members[0], request))
        return True


def _answer(member: RegisteredMember, request: ServerRequest) -> None:
    assert member.request_handler is not None
    reply = capture(member.request_handler, request.address, request.command)
    if isinstance(
        reply, Failure
    ):  # the member's error is the answer, so that the broker does not wait until the request times out
        text, traceback = "group %s could not handle request %s: %s", _traceback_limit.due(reply)
        capture(logger.error, text, member.group, request.command.code, str(reply), exc_info=traceback)
        reply = Command(Response.SYSTEM_ERROR, remark=str(reply))
    if reply is None:
        request.reject()
    else:
        request.answer(reply)


class ClientInstance:
    """Registers the members of this process at brokers, and sends their heartbeats. Thread-safe."""

    def __init__(
        self,
        registry: MemberRegistry,
        rpc_client: RpcClient,
        routes: Routes,
        client_id: str | None = None,
        make_timer: Callable[[str], Timer] = Timer,
    ) -> None:
        self.client_id = client_id or f"{platform.node()}@{os.getpid()}#{time.monotonic_ns()}"
        self._registry = registry
        self._rpc_client = rpc_client
        self._routes = routes
        self._make_timer = make_timer
        self._lock = threading.Lock()
        self._cluster: Mapping[str, BrokerData] = {}
        # Held while heartbeats are sent, and while groups are unregistered. Without this lock, a heartbeat that was prepared
        # earlier could register a group again that has just been unregistered.
        self._registration_lock = threading.Lock()
        self._lingering_groups: dict[
            str, None
        ] = {}  # groups whose last producer has left and that are still registered
        self._checked_groups: set[str] = set()  # producer groups that brokers send transaction checks to
        # Whether brokers may have stopped forwarding replies, because producer groups were unregistered.
        self._is_reply_connection_lost = False
        self._timer: Timer | None = None
        self._heartbeat_due_ms = math.inf

    def join(self, member: RegisteredMember) -> None:
        """Add ``member``, and send its first heartbeat soon. Raises ``LocalProtocolError`` if the group has a consumer here."""
        group_on_wire = self._rpc_client.name_on_wire(member.group)
        if member.consumes and self._registry.has_consumer(group_on_wire):
            # An earlier consumer that was not closed and is no longer referenced may wait for garbage collection.
            dropped.wait_for_dropped(Deadline.after(HEARTBEAT_TIMEOUT_S))
        try:
            self._registry.add(group_on_wire, member)
            if member.request_handler is not None and not member.consumes:
                self._checked_groups.add(group_on_wire)
            if member.heartbeat_s:
                with self._lock:
                    self._timer = self._timer or self._make_timer("rocketmq-instance")
                    self._schedule(self._timer, FIRST_HEARTBEAT_DELAY_S)
        except BaseException:  # also for Ctrl-C, because then the caller cannot call ``leave``
            self._registry.remove(group_on_wire, member)
            self._stop_timer(unless_needed=True)
            raise

    def leave(self, member: RegisteredMember, deadline: Deadline) -> None:
        """Remove ``member``. If its group has no other member here, also unregister the group, now or later. Failures of single
        brokers are logged. After an interruption, the call may be repeated.
        """
        group_on_wire = self._rpc_client.name_on_wire(member.group)
        was_last_member = self._registry.remove(group_on_wire, member)
        self._stop_timer(unless_needed=True)
        if not was_last_member:
            return
        with self._registration_lock:
            if member.consumes:
                self._unregister("consumerGroup", [group_on_wire], self._addresses(True, False), deadline)
            else:
                self._unregister_producer_group(group_on_wire, deadline)

    def _unregister_producer_group(self, group_on_wire: str, deadline: Deadline) -> None:
        """Unregister a producer group. While members receive replies, a group without transaction checks stays registered for a
        while, because brokers lose replies in flight when a group is unregistered.
        """
        reply_groups = self._registry.reply_groups()
        if (
            reply_groups
            and group_on_wire not in self._checked_groups
            and len(self._lingering_groups) < _MAX_LINGERING_GROUPS
        ):
            self._lingering_groups[group_on_wire] = None
            return
        producer_groups = {name for name, member in self._registry.one_member_per_group() if not member.consumes}
        groups_to_unregister = [
            name for name in {group_on_wire: None, **self._lingering_groups} if name not in producer_groups
        ]
        self._is_reply_connection_lost = True
        self._reregister([*groups_to_unregister, *reply_groups], deadline)
        self._lingering_groups.clear()  # only now, so that after an interruption heartbeats still include these groups
        self._checked_groups.difference_update(groups_to_unregister)
        self._is_reply_connection_lost = not reply_groups  # see ``register_connection``

    def heartbeat(self, deadline: Deadline) -> None:
        """Send heartbeats of all groups now: to masters, and to slaves if any group consumes."""
        with self._registration_lock:
            self._heartbeat(deadline)

    def register_connection(self, deadline: Deadline, up_to_date_brokers: Container[str] | None) -> bool:
        """Make all brokers but those at the addresses ``up_to_date_brokers`` forward replies over the current connection.
        Returns False if there was only time for a plain heartbeat.

        A broker forwards replies over the connection on which the client last registered a new producer group. The broker
        forgets this connection when any of the client's groups is unregistered, or when an older connection ends. Plain
        heartbeats do not make the broker use the connection again.
        """
        # Another thread may hold the lock for long, because a broker hangs.
        if not self._registration_lock.acquire(timeout=deadline.remaining() / 2):
            self._send_heartbeats(self._registry.reply_groups(), [], self._addresses(False, True), deadline)
            return False
        try:
            if up_to_date_brokers is not None or self._is_reply_connection_lost:
                self._reregister(
                    self._registry.reply_groups(),
                    deadline,
                    () if self._is_reply_connection_lost else up_to_date_brokers or (),
                )
            else:
                self._heartbeat(deadline)
            self._is_reply_connection_lost = False
        finally:
            self._registration_lock.release()
        return True

    def _reregister(self, groups: Sequence[str], deadline: Deadline, up_to_date_brokers: Container[str] = ()) -> None:
        """Unregister producer groups, except at ``up_to_date_brokers``, and send a heartbeat if a member receives replies.

        Between the two requests, a broker forwards no replies. To keep this time short, no broker's heartbeat waits for the
        answers of other brokers.
        """

        def reregister_at(name_and_address: tuple[str, str]) -> None:
            if name_and_address[1] not in up_to_date_brokers:
                self._unregister("producerGroup", groups, [name_and_address], deadline)
            if self._registry.reply_groups():
                self._heartbeat(deadline, [name_and_address], groups)

        executor, addresses = KeyedExecutor(), self._addresses(False, True)
        for i, name_and_address in enumerate(addresses[1:]):
            try:
                executor.run(i % _MAX_PARALLEL_BROKERS, functools.partial(reregister_at, name_and_address))
            except RuntimeError:  # no more threads can start, so this thread sends the requests
                reregister_at(name_and_address)
        for name_and_address in addresses[:1]:
            reregister_at(name_and_address)
        for i in range(min(len(addresses) - 1, _MAX_PARALLEL_BROKERS)):
            executor.wait(i, deadline.remaining() + HEARTBEAT_TIMEOUT_S)

    def _heartbeat(
        self, deadline: Deadline, addresses: _Addresses = (), unregistered_groups: Sequence[str] = ()
    ) -> None:
        members = self._registry.one_member_per_group()
        if not members:
            return
        lingering_groups = [name for name in self._lingering_groups if name not in unregistered_groups]
        producer_groups = list(
            dict.fromkeys((*(name for name, member in members if not member.consumes), *lingering_groups))
        )
        memberships = [self._membership(group_on_wire, member) for group_on_wire, member in members if member.consumes]
        self._send_heartbeats(
            producer_groups,
            memberships,
            addresses or self._addresses(bool(memberships), self._registry.needs_all_brokers()),
            deadline,
        )

    def _send_heartbeats(
        self, producer_groups: list[str], memberships: list[GroupMembership], addresses: _Addresses, deadline: Deadline
    ) -> None:
        body = bodies.heartbeat(self.client_id, producer_groups, memberships)
        self._send_all([(address, rpc.HEART_BEAT.request(body, bname=name)) for name, address in addresses], deadline)

    def _unregister(self, field_name: str, groups: Sequence[str], addresses: _Addresses, deadline: Deadline) -> None:
        group_fields: list[dict[str, Any]] = [{field_name: group} for group in groups]
        self._send_all(
            [
                (address, rpc.UNREGISTER_CLIENT.request(clientID=self.client_id, bname=name, **group_field))
                for name, address in addresses
                for group_field in group_fields
            ],
            deadline,
        )

    def close(self) -> None:
        """Stop heartbeats. Groups stay registered until brokers forget them."""
        self._stop_timer()

    def _membership(self, group_on_wire: str, member: RegisteredMember) -> GroupMembership:
        assert member.membership is not None
        return replace(member.membership().with_names_on_wire(self._rpc_client.name_on_wire), group=group_on_wire)

    def refresh_cluster(self, deadline: Deadline) -> None:
        """Fetch the list of all brokers, if any member sends heartbeats to all brokers."""
        if not self._registry.needs_all_brokers():
            return
        try:
            self._cluster = self._routes.cluster(deadline)
        except RocketMQError as e:  # a Proxy cannot list brokers
            logger.info("cannot list the brokers of the cluster; only those of topics in use get heartbeats: %s", e)

    def _addresses(self, with_slaves: bool, all_brokers: bool) -> list[tuple[str, str]]:
        routed_brokers = {data.broker_name: data for data in self._routes.brokers()}
        return [
            (data.broker_name, address)
            for data in ({**self._cluster, **routed_brokers} if all_brokers else routed_brokers).values()
            for address in (data.master, *(data.slaves if with_slaves else ()))
            if address
        ]

    def _schedule(self, timer: Timer, delay_s: float) -> None:
        """Schedule a heartbeat, unless an earlier heartbeat is scheduled. The caller holds the lock."""
        due_ms = timer.now_ms() + 1000 * delay_s
        if due_ms < self._heartbeat_due_ms:
            timer.call_later(delay_s, functools.partial(self._heartbeat_tick, timer, due_ms))
            self._heartbeat_due_ms = due_ms  # set last, because nothing is scheduled if ``call_later`` raises an error

    def _heartbeat_tick(self, timer: Timer, due_ms: float) -> None:
        with self._lock:
            if due_ms != self._heartbeat_due_ms:  # another heartbeat has replaced this one
                return
        try:
            self.refresh_cluster(
                Deadline.after(CLUSTER_TIMEOUT_S)
            )  # a separate deadline, because a name server may hang
            self.heartbeat(Deadline.after(HEARTBEAT_TIMEOUT_S))
        except RocketMQError as e:
            logger.info("no heartbeat was sent: %s", e)
        finally:
            with self._lock:
                if self._timer is timer:
                    self._heartbeat_due_ms = math.inf
                    self._schedule(timer, self._registry.shortest_heartbeat_s() or FIRST_HEARTBEAT_DELAY_S)

    def _stop_timer(self, unless_needed: bool = False) -> None:
        with self._lock:
            if unless_needed and self._registry.shortest_heartbeat_s():
                return
            timer, self._timer, self._heartbeat_due_ms = self._timer, None, math.inf
        if timer is not None:
            timer.close()

    def _send_all(self, requests: Sequence[tuple[str, Command]], deadline: Deadline) -> None:
        """Send all requests at once, so that a broker that hangs does not delay the others. Logs failures."""
        answers = self._rpc_client.invoke_each(requests, deadline.within(self._rpc_client.request_timeout_s))
        for (address, command), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Command) and answer.code == Response.SUCCESS:
                continue
            error = error_from_response(answer, address) if isinstance(answer, Command) else answer
            if isinstance(error, NotSupported):
                logger.debug("the server at %s does not support heartbeats", address)
            else:
                logger.info("request %s to %s failed: %s", command.code, address, error)

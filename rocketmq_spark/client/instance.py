"""One client instance, as RocketMQ's ``MQClientInstance``: the members of groups in this process, and their heartbeats.

All producers and consumers of a process that share connections share an instance. It has the client id, reports to brokers
all groups in one heartbeat, and passes requests of brokers to the members concerned. Each group has a thread for its requests
while there are any; none is handled on the thread that reads answers.

This module does not know what members do with a request, nor whether they are producers or consumers.
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
from rocketmq_spark.base.clock import Deadline, NowAndThen
from rocketmq_spark.base.codes import Property, Request, Response
from rocketmq_spark.base.threads import Aside, Failure, Timer, Tracebacks, attempt
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

FIRST_HEARTBEAT_S = 1.0
TIMEOUT_S = 3.0
# Longer than one name server that hangs may take, and far less than the 120 s after which brokers forget a client.
CLUSTER_TIMEOUT_S = 10.0
_MAX_LINGERING = 50
_MAX_PARALLEL = 64  # brokers that are contacted in parallel
LOG_PAUSE_S = 10.0  # how often a rejected request is logged
_tracebacks = Tracebacks()  # a server may send thousands of requests that cannot be read
_MAX_WAITING_REQUESTS = 1000  # requests of brokers that may wait for one group; more are rejected

# Requests of brokers to consumers, with the field that names the group. Requests to producers name it in the message.
_GROUP_FIELDS = {
    Request.NOTIFY_CONSUMER_IDS_CHANGED: "consumerGroup",
    Request.RESET_CONSUMER_CLIENT_OFFSET: "group",
    Request.GET_CONSUMER_STATUS_FROM_CLIENT: "group",
    Request.GET_CONSUMER_RUNNING_INFO: "consumerGroup",
    Request.CONSUME_MESSAGE_DIRECTLY: "consumerGroup",
}

_Addresses = Sequence[tuple[str, str]]  # pairs of broker name and address
# Takes the broker's address and its request, and returns the answer, or None to reject it. It may block.
RequestHandler = Callable[[str, Command], Command | None]
# Handles a forwarded reply, on the thread that reads answers. The second argument runs the rest of the work on another thread.
# Returns False to reject the reply.
ReplyHandler = Callable[[ServerRequest, Callable[[Callable[[], None]], None]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredMember:
    """A producer or, with ``membership``, a consumer, whose subscriptions are in every heartbeat.

    ``request_handler`` handles requests of brokers. With ``heartbeat_s`` 0, the member needs no heartbeat. With ``all_brokers``,
    heartbeats go to all brokers of the cluster, because any of them may send requests. With ``receives_replies``, brokers forward
    replies to the member by the client id.
    """

    group: str
    heartbeat_s: float = 30.0
    request_handler: RequestHandler | None = None
    membership: Callable[[], GroupMembership] | None = None
    all_brokers: bool = False
    receives_replies: bool = False

    @property
    def consumes(self) -> bool:
        return self.membership is not None


class MemberRegistry:
    """Members by group name on the wire, and the requests of brokers to them."""

    def __init__(self, on_reply: ReplyHandler | None = None) -> None:
        self._on_reply = on_reply
        self._lock = threading.Lock()
        self._members: dict[tuple[bool, str], tuple[RegisteredMember, ...]] = {}  # never empty, even after Ctrl-C
        self._executor = Aside(_MAX_WAITING_REQUESTS)
        self._reply_executor = Aside()  # needs no limit: each reply in it belongs to a waiting request
        self._log_limit = NowAndThen(LOG_PAUSE_S)

    def add(self, on_wire: str, member: RegisteredMember) -> None:
        """A group may have several producers, but only one consumer: two with one client id would read the same queues."""
        with self._lock:
            key = member.consumes, on_wire
            members = self._members.get(key, ())
            if member.consumes and members:
                raise LocalProtocolError(
                    f"consumer group {member.group!r} has a member in this process already",
                    remedy="Close the other one first, or run this one in another process",
                )
            self._members[key] = (*members, member)

    def remove(self, on_wire: str, member: RegisteredMember) -> bool:
        """Remove a member. Returns whether the group has no more members here. Removing a member twice is allowed."""
        with self._lock:
            key = member.consumes, on_wire
            if others := tuple(other for other in self._members.get(key, ()) if other is not member):
                self._members[key] = others
            else:
                self._members.pop(key, None)
            return not others

    def has_consumer(self, on_wire: str) -> bool:
        """Whether the group has a consumer here."""
        with self._lock:
            return (True, on_wire) in self._members

    def one_per_group(self) -> list[tuple[str, RegisteredMember]]:
        """One member of every group, with the group's name on the wire."""
        with self._lock:
            return [(on_wire, members[0]) for (_, on_wire), members in sorted(self._members.items())]

    def shortest_heartbeat_s(self) -> float:
        """The shortest interval of all members, 0 if no member needs heartbeats."""
        with self._lock:
            intervals = [member.heartbeat_s for members in self._members.values() for member in members]
        return min(filter(None, intervals), default=0.0)

    def needs_all_brokers(self) -> bool:
        """Whether any member wants all brokers to know its group."""
        with self._lock:
            return any(member.all_brokers for members in self._members.values() for member in members)

    def reply_groups(self) -> list[str]:
        """The wire name of one group with a member to which brokers forward messages, or an empty list."""
        with self._lock:
            return [
                name
                for (_, name), members in self._members.items()
                if any(member.receives_replies for member in members)
            ][:1]

    def on_request(self, request: ServerRequest) -> bool:
        """Handles a request of a broker, on the thread that reads answers. Returns False if no member takes it."""
        code, ext = request.command.code, request.command.ext
        try:
            if code == Request.CHECK_TRANSACTION_STATE:  # the group is in its message
                if not self._has_transaction_check():
                    return False
                self._executor.run(code, functools.partial(self._dispatch_check, request))
                return True
            if code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT and self._on_reply is not None:
                return self._on_reply(request, functools.partial(self._reply_executor.run, code))
            field = _GROUP_FIELDS.get(Request(code)) if code in _GROUP_FIELDS else None
            return field is not None and self._dispatch((True, ext.get(field, "")), request)
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
        dispatched = False
        try:
            # Only the properties are needed, which name the group. So the body stays compressed.
            messages = itertools.islice(decode_leniently(request.command.body, max_body_bytes=None), 2)
            groups = [message.properties.get(Property.PRODUCER_GROUP, "") for message in messages]
            dispatched = len(groups) == 1 and self._dispatch((False, groups[0]), request)
        except RuntimeError as e:
            self._log_rejected(request, e)
        finally:
            if not dispatched:
                request.reject()

    def _log_rejected(self, request: ServerRequest, error: RuntimeError) -> None:
        if self._log_limit.due():  # there may be thousands of them
            logger.warning("request %s of %s is refused: %s", request.command.code, request.address, error)

    def _dispatch(self, key: tuple[bool, str], request: ServerRequest) -> bool:
        with self._lock:
            handlers = [member for member in self._members.get(key, ()) if member.request_handler is not None]
        if not handlers:
            return False
        # A listener may take long, or hang, with a message that an operator sent to it (``consumeMessageDirectly``).
        is_direct = request.command.code == Request.CONSUME_MESSAGE_DIRECTLY
        self._executor.run((key, is_direct), functools.partial(_answer, handlers[0], request))
        return True


def _answer(member: RegisteredMember, request: ServerRequest) -> None:
    assert member.request_handler is not None
    reply = attempt(member.request_handler, request.address, request.command)
    if isinstance(reply, Failure):  # the broker must not wait for an answer that never comes
        text, traceback = "group %s could not handle request %s: %s", _tracebacks.due(reply)
        attempt(logger.error, text, member.group, request.command.code, str(reply), exc_info=traceback)
        reply = Command(Response.SYSTEM_ERROR, remark=str(reply))
    if reply is None:
        request.reject()
    else:
        request.answer(reply)


class ClientInstance:
    """Sends heartbeats for the members of this process, while there are any."""

    def __init__(
        self,
        groups: MemberRegistry,
        calls: RpcClient,
        routes: Routes,
        client_id: str | None = None,
        make_timer: Callable[[str], Timer] = Timer,
    ) -> None:
        self.client_id = client_id or f"{platform.node()}@{os.getpid()}#{time.monotonic_ns()}"
        self._groups = groups
        self._calls = calls
        self._routes = routes
        self._make_timer = make_timer
        self._lock = threading.Lock()
        self._cluster: Mapping[str, BrokerData] = {}
        self._registration_lock = threading.Lock()  # so that no heartbeat registers a group again that has just left
        self._lingering: dict[str, None] = {}  # groups without producers here that are still registered on brokers
        self._request_groups: set[str] = (
            set()
        )  # groups of producers to which brokers send requests while they are registered
        self._reply_connection_lost = False  # brokers dropped the connection when the last group was unregistered
        self._timer: Timer | None = None
        self._due_ms = math.inf

    def join(self, member: RegisteredMember) -> None:
        """Include ``member`` in heartbeats, the first one soon. A group may have only one consumer with this client id."""
        on_wire = self._calls.on_wire(member.group)
        if member.consumes and self._groups.has_consumer(on_wire):
            dropped.settle(Deadline.after(TIMEOUT_S))  # the other consumer may have been dropped without close()
        try:
            self._groups.add(on_wire, member)
            if member.request_handler is not None and not member.consumes:
                self._request_groups.add(on_wire)
            if member.heartbeat_s:
                with self._lock:
                    self._timer = self._timer or self._make_timer("rocketmq-instance")
                    self._schedule(self._timer, FIRST_HEARTBEAT_S)
        except BaseException:  # Ctrl-C, too: the caller would get no function to leave
            self._groups.remove(on_wire, member)
            self._stop_timer(unless_needed=True)
            raise

    def leave(self, member: RegisteredMember, deadline: Deadline) -> None:
        """Remove ``member``. The last member unregisters the group, perhaps later. Failures of single brokers are logged. The
        call may be repeated after an interruption.
        """
        on_wire = self._calls.on_wire(member.group)
        is_last = self._groups.remove(on_wire, member)
        self._stop_timer(unless_needed=True)
        if not is_last:
            return
        with self._registration_lock:
            if member.consumes:
                self._unregister("consumerGroup", [on_wire], self._addresses(True, False), deadline)
            else:
                self._leave_producers(on_wire, deadline)

    def _leave_producers(self, on_wire: str, deadline: Deadline) -> None:
        """Groups to which brokers send no requests stay registered while replies may be in flight, which would be lost."""
        reply_groups = self._groups.reply_groups()
        if reply_groups and on_wire not in self._request_groups and len(self._lingering) < _MAX_LINGERING:
            self._lingering[on_wire] = None
            return
        others = {name for name, other in self._groups.one_per_group() if not other.consumes}
        left_groups = [name for name in {on_wire: None, **self._lingering} if name not in others]
        self._reply_connection_lost = True
        self._reregister([*left_groups, *reply_groups], deadline)
        self._lingering.clear()  # only now: after an interruption heartbeats must continue
        self._request_groups.difference_update(left_groups)
        self._reply_connection_lost = not reply_groups  # see ``register_connection``

    def heartbeat(self, deadline: Deadline) -> None:
        """Send heartbeats of all groups now: to masters, and to slaves if any group consumes."""
        with self._registration_lock:
            self._heartbeat(deadline)

    def register_connection(self, deadline: Deadline, up_to_date: Container[str] | None) -> bool:
        """Make brokers note the current connection, even if they should have done so already; not those in ``up_to_date``.
        Returns False if there was only time for a plain heartbeat.

        Brokers forward messages over a connection that they noted when a group of producers was new on it. They drop it when any
        of the client's groups is unregistered, and when an older connection ends; other heartbeats do not restore it.
        """
        if not self._registration_lock.acquire(timeout=deadline.remaining() / 2):  # a broker hangs in another thread
            self._send_heartbeats(self._groups.reply_groups(), [], self._addresses(False, True), deadline)
            return False
        try:
            if up_to_date is not None or self._reply_connection_lost:
                self._reregister(
                    self._groups.reply_groups(), deadline, () if self._reply_connection_lost else up_to_date or ()
                )
            else:
                self._heartbeat(deadline)
            self._reply_connection_lost = False
        finally:
            self._registration_lock.release()
        return True

    def _reregister(self, groups: Sequence[str], deadline: Deadline, up_to_date: Container[str] = ()) -> None:
        """Unregister groups of producers, except at ``up_to_date``, then send a heartbeat of the others if a member is addressed.

        Between the two a broker forwards no replies, so each broker gets its heartbeat without waiting for other brokers.
        """

        def reregister_at(name_and_address: tuple[str, str]) -> None:
            if name_and_address[1] not in up_to_date:
                self._unregister("producerGroup", groups, [name_and_address], deadline)
            if self._groups.reply_groups():
                self._heartbeat(deadline, [name_and_address], groups)

        executor, addresses = Aside(), self._addresses(False, True)
        for i, name_and_address in enumerate(addresses[1:]):
            try:
                executor.run(i % _MAX_PARALLEL, functools.partial(reregister_at, name_and_address))
            except RuntimeError:  # no more threads: one after the other
                reregister_at(name_and_address)
        for name_and_address in addresses[:1]:
            reregister_at(name_and_address)
        for i in range(min(len(addresses) - 1, _MAX_PARALLEL)):
            executor.wait(i, deadline.remaining() + TIMEOUT_S)

    def _heartbeat(self, deadline: Deadline, addresses: _Addresses = (), left_groups: Sequence[str] = ()) -> None:
        members = self._groups.one_per_group()
        if not members:
            return
        lingering = [name for name in self._lingering if name not in left_groups]
        producers = list(dict.fromkeys((*(name for name, member in members if not member.consumes), *lingering)))
        consumers = [self._membership(on_wire, member) for on_wire, member in members if member.consumes]
        self._send_heartbeats(
            producers,
            consumers,
            addresses or self._addresses(bool(consumers), self._groups.needs_all_brokers()),
            deadline,
        )

    def _send_heartbeats(
        self, producers: list[str], consumers: list[GroupMembership], to: _Addresses, until: Deadline
    ) -> None:
        body = bodies.heartbeat(self.client_id, producers, consumers)
        self._send_all([(address, rpc.HEART_BEAT.request(body, bname=name)) for name, address in to], until)

    def _unregister(self, field: str, groups: Sequence[str], addresses: _Addresses, deadline: Deadline) -> None:
        group_fields: list[dict[str, Any]] = [{field: group} for group in groups]
        self._send_all(
            [
                (address, rpc.UNREGISTER_CLIENT.request(clientID=self.client_id, bname=name, **group))
                for name, address in addresses
                for group in group_fields
            ],
            deadline,
        )

    def close(self) -> None:
        """Sends no more heartbeats, and unregisters nothing."""
        self._stop_timer()

    def _membership(self, on_wire: str, member: RegisteredMember) -> GroupMembership:
        assert member.membership is not None
        return replace(member.membership().on_wire(self._calls.on_wire), group=on_wire)

    def refresh_cluster(self, deadline: Deadline) -> None:
        """Ask for the brokers of the cluster, if any member registers its group on all of them."""
        if not self._groups.needs_all_brokers():
            return
        try:
            self._cluster = self._routes.cluster(deadline)
        except RocketMQError as e:  # a Proxy does not answer this
            logger.info("cannot list the brokers of the cluster; only those of topics in use get heartbeats: %s", e)

    def _addresses(self, slaves: bool, all_brokers: bool) -> list[tuple[str, str]]:
        routed = {data.broker_name: data for data in self._routes.brokers()}
        return [
            (data.broker_name, address)
            for data in ({**self._cluster, **routed} if all_brokers else routed).values()
            for address in (data.master, *(data.slaves if slaves else ()))
            if address
        ]

    def _schedule(self, timer: Timer, in_s: float) -> None:
        """Call with the lock. Several callers share the next heartbeat."""
        due_ms = timer.now_ms() + 1000 * in_s
        if due_ms < self._due_ms:
            timer.later(in_s, functools.partial(self._heartbeat_tick, timer, due_ms))
            self._due_ms = due_ms  # only now: without a thread no call is due

    def _heartbeat_tick(self, timer: Timer, due_ms: float) -> None:
        with self._lock:
            if due_ms != self._due_ms:  # an earlier one is due
                return
        try:
            self.refresh_cluster(Deadline.after(CLUSTER_TIMEOUT_S))  # its own deadline: a name server may hang
            self.heartbeat(Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.info("no heartbeat was sent: %s", e)
        finally:
            with self._lock:
                if self._timer is timer:
                    self._due_ms = math.inf
                    self._schedule(timer, self._groups.shortest_heartbeat_s() or FIRST_HEARTBEAT_S)

    def _stop_timer(self, unless_needed: bool = False) -> None:
        with self._lock:
            if unless_needed and self._groups.shortest_heartbeat_s():
                return
            timer, self._timer, self._due_ms = self._timer, None, math.inf
        if timer is not None:
            timer.close()

    def _send_all(self, requests: Sequence[tuple[str, Command]], deadline: Deadline) -> None:
        """Send all requests at once, so that a broker that hangs does not delay others. Failures are logged."""
        answers = self._calls.invoke_each(requests, deadline.within(self._calls.request_timeout_s))
        for (address, command), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Command) and answer.code == Response.SUCCESS:
                continue
            error = error_from_response(answer, address) if isinstance(answer, Command) else answer
            if isinstance(error, NotSupported):
                logger.debug("%s takes no heartbeats", address)
            else:
                logger.info("request %s to %s failed: %s", command.code, address, error)

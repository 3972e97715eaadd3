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
from rocketmq_spark.client.calls import RpcClient, error_from_response
from rocketmq_spark.client.route import Routes
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

    ``asked`` handles requests of brokers. ``heartbeat_s`` 0: this member needs no heartbeat. For ``everywhere``,
    heartbeats go to all brokers of the cluster, because any of them may send requests. With ``addressed``, brokers forward
    messages to the member by the client id.
    """

    group: str
    heartbeat_s: float = 30.0
    asked: RequestHandler | None = None
    membership: Callable[[], GroupMembership] | None = None
    everywhere: bool = False
    addressed: bool = False

    @property
    def consumes(self) -> bool:
        return self.membership is not None


class MemberRegistry:
    """Members by group name on the wire, and the requests of brokers to them."""

    def __init__(self, replies: ReplyHandler | None = None) -> None:
        self._replies = replies
        self._lock = threading.Lock()
        self._members: dict[tuple[bool, str], tuple[RegisteredMember, ...]] = {}  # never empty, even after Ctrl-C
        self._aside = Aside(_MAX_WAITING_REQUESTS)
        self._replying = Aside()  # needs no limit: each reply in it belongs to a waiting request
        self._say_so = NowAndThen(LOG_PAUSE_S)

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
            if others := tuple(one for one in self._members.get(key, ()) if one is not member):
                self._members[key] = others
            else:
                self._members.pop(key, None)
            return not others

    def consumes(self, on_wire: str) -> bool:
        """Whether the group has a consumer here."""
        with self._lock:
            return (True, on_wire) in self._members

    def each(self) -> list[tuple[str, RegisteredMember]]:
        """One member of every group, with the group's name on the wire."""
        with self._lock:
            return [(on_wire, members[0]) for (_, on_wire), members in sorted(self._members.items())]

    def heartbeat_s(self) -> float:
        """The shortest interval of all members, 0 if no member needs heartbeats."""
        with self._lock:
            wanted = [member.heartbeat_s for members in self._members.values() for member in members]
        return min(filter(None, wanted), default=0.0)

    def everywhere(self) -> bool:
        """Whether any member wants all brokers to know its group."""
        with self._lock:
            return any(member.everywhere for members in self._members.values() for member in members)

    def addressed(self) -> list[str]:
        """The wire name of one group with a member to which brokers forward messages, or an empty list."""
        with self._lock:
            return [name for (_, name), members in self._members.items() if any(one.addressed for one in members)][:1]

    def asked(self, request: ServerRequest) -> bool:
        """Handles a request of a broker, on the thread that reads answers. Returns False if no member takes it."""
        code, ext = request.command.code, request.command.ext
        try:
            if code == Request.CHECK_TRANSACTION_STATE:  # the group is in its message
                if not self._has_transaction_check():
                    return False
                self._aside.run(code, functools.partial(self._check, request))
                return True
            if code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT and self._replies is not None:
                return self._replies(request, functools.partial(self._replying.run, code))
            field = _GROUP_FIELDS.get(Request(code)) if code in _GROUP_FIELDS else None
            return field is not None and self._hand((True, ext.get(field, "")), request)
        except RuntimeError as e:  # no more threads, or too many requests wait
            self._say_refused(request, e)
            return False

    def _has_transaction_check(self) -> bool:
        """Whether any producer can decide about half messages."""
        with self._lock:
            return any(
                member.asked is not None and not member.consumes
                for members in self._members.values()
                for member in members
            )

    def _check(self, request: ServerRequest) -> None:
        taken = False
        try:
            # Only the properties are needed, which name the group. So the body stays compressed.
            first_two = itertools.islice(decode_leniently(request.command.body, max_body_bytes=None), 2)
            groups = [message.properties.get(Property.PRODUCER_GROUP, "") for message in first_two]
            taken = len(groups) == 1 and self._hand((False, groups[0]), request)
        except RuntimeError as e:
            self._say_refused(request, e)
        finally:
            if not taken:
                request.refuse()

    def _say_refused(self, request: ServerRequest, why: RuntimeError) -> None:
        if self._say_so.due():  # there may be thousands of them
            logger.warning("request %s of %s is refused: %s", request.command.code, request.address, why)

    def _hand(self, key: tuple[bool, str], request: ServerRequest) -> bool:
        with self._lock:
            able = [member for member in self._members.get(key, ()) if member.asked is not None]
        if not able:
            return False
        # A listener may take long, or hang, with a message that an operator sent to it (``consumeMessageDirectly``).
        apart = request.command.code == Request.CONSUME_MESSAGE_DIRECTLY
        self._aside.run((key, apart), functools.partial(_answer, able[0], request))
        return True


def _answer(member: RegisteredMember, request: ServerRequest) -> None:
    assert member.asked is not None
    reply = attempt(member.asked, request.address, request.command)
    if isinstance(reply, Failure):  # the broker must not wait for an answer that never comes
        text, traceback = "group %s could not handle request %s: %s", _tracebacks.due(reply)
        attempt(logger.error, text, member.group, request.command.code, str(reply), exc_info=traceback)
        reply = Command(Response.SYSTEM_ERROR, remark=str(reply))
    if reply is None:
        request.refuse()
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
        self._all: Mapping[str, BrokerData] = {}
        self._telling = threading.Lock()  # so that no heartbeat registers a group again that has just left
        self._lingering: dict[str, None] = {}  # groups without producers here that are still registered on brokers
        self._asked: set[str] = set()  # groups of producers to which brokers send requests while they are registered
        self._forgotten = False  # brokers dropped the connection when the last group was unregistered
        self._timer: Timer | None = None
        self._due_ms = math.inf

    def join(self, member: RegisteredMember) -> None:
        """Include ``member`` in heartbeats, the first one soon. A group may have only one consumer with this client id."""
        on_wire = self._calls.on_wire(member.group)
        if member.consumes and self._groups.consumes(on_wire):
            dropped.settle(Deadline.after(TIMEOUT_S))  # the other consumer may have been dropped without close()
        try:
            self._groups.add(on_wire, member)
            if member.asked is not None and not member.consumes:
                self._asked.add(on_wire)
            if member.heartbeat_s:
                with self._lock:
                    self._timer = self._timer or self._make_timer("rocketmq-instance")
                    self._schedule(self._timer, FIRST_HEARTBEAT_S)
        except BaseException:  # Ctrl-C, too: the caller would get no function to leave
            self._groups.remove(on_wire, member)
            self._rest(unless_wanted=True)
            raise

    def leave(self, member: RegisteredMember, deadline: Deadline) -> None:
        """Remove ``member``. The last member unregisters the group, perhaps later. Failures of single brokers are logged. The
        call may be repeated after an interruption.
        """
        on_wire = self._calls.on_wire(member.group)
        last = self._groups.remove(on_wire, member)
        self._rest(unless_wanted=True)
        if not last:
            return
        with self._telling:
            if member.consumes:
                self._unregister("consumerGroup", [on_wire], self._addresses(True, False), deadline)
            else:
                self._leave_producers(on_wire, deadline)

    def _leave_producers(self, on_wire: str, deadline: Deadline) -> None:
        """Groups to which brokers send no requests stay registered while replies may be in flight, which would be lost."""
        addressed = self._groups.addressed()
        if addressed and on_wire not in self._asked and len(self._lingering) < _MAX_LINGERING:
            self._lingering[on_wire] = None
            return
        others = {name for name, other in self._groups.each() if not other.consumes}
        gone = [name for name in {on_wire: None, **self._lingering} if name not in others]
        self._forgotten = True
        self._anew([*gone, *addressed], deadline)
        self._lingering.clear()  # only now: after an interruption heartbeats must continue
        self._asked.difference_update(gone)
        self._forgotten = not addressed  # see ``connect``

    def heartbeat(self, deadline: Deadline) -> None:
        """Send heartbeats of all groups now: to masters, and to slaves if any group consumes."""
        with self._telling:
            self._heartbeat(deadline)

    def connect(self, deadline: Deadline, knowing: Container[str] | None) -> bool:
        """Make brokers note the current connection, even if they should have done so already; not those in ``knowing``.
        Returns False if there was only time for a plain heartbeat.

        Brokers forward messages over a connection that they noted when a group of producers was new on it. They drop it when any
        of the client's groups is unregistered, and when an older connection ends; other heartbeats do not restore it.
        """
        if not self._telling.acquire(timeout=deadline.remaining() / 2):  # a broker hangs in another thread
            self._beat_of(self._groups.addressed(), [], self._addresses(False, True), deadline)
            return False
        try:
            if knowing is not None or self._forgotten:
                self._anew(self._groups.addressed(), deadline, () if self._forgotten else knowing or ())
            else:
                self._heartbeat(deadline)
            self._forgotten = False
        finally:
            self._telling.release()
        return True

    def _anew(self, groups: Sequence[str], deadline: Deadline, knowing: Container[str] = ()) -> None:
        """Unregister groups of producers, except at ``knowing``, then send a heartbeat of the others if a member is addressed.

        Between the two a broker forwards no replies, so each broker gets its heartbeat without waiting for other brokers.
        """

        def tell(one: tuple[str, str]) -> None:
            if one[1] not in knowing:
                self._unregister("producerGroup", groups, [one], deadline)
            if self._groups.addressed():
                self._heartbeat(deadline, [one], groups)

        aside, addresses = Aside(), self._addresses(False, True)
        for i, one in enumerate(addresses[1:]):
            try:
                aside.run(i % _MAX_PARALLEL, functools.partial(tell, one))
            except RuntimeError:  # no more threads: one after the other
                tell(one)
        for one in addresses[:1]:
            tell(one)
        for i in range(min(len(addresses) - 1, _MAX_PARALLEL)):
            aside.wait(i, deadline.remaining() + TIMEOUT_S)

    def _heartbeat(self, deadline: Deadline, addresses: _Addresses = (), gone: Sequence[str] = ()) -> None:
        each = self._groups.each()
        if not each:
            return
        lingering = [name for name in self._lingering if name not in gone]
        producers = list(dict.fromkeys((*(name for name, member in each if not member.consumes), *lingering)))
        consumers = [self._membership(on_wire, member) for on_wire, member in each if member.consumes]
        self._beat_of(
            producers, consumers, addresses or self._addresses(bool(consumers), self._groups.everywhere()), deadline
        )

    def _beat_of(self, producers: list[str], consumers: list[GroupMembership], to: _Addresses, until: Deadline) -> None:
        body = bodies.heartbeat(self.client_id, producers, consumers)
        self._tell([(address, rpc.HEART_BEAT.request(body, bname=name)) for name, address in to], until)

    def _unregister(self, field: str, groups: Sequence[str], addresses: _Addresses, deadline: Deadline) -> None:
        each: list[dict[str, Any]] = [{field: group} for group in groups]
        self._tell(
            [
                (address, rpc.UNREGISTER_CLIENT.request(clientID=self.client_id, bname=name, **group))
                for name, address in addresses
                for group in each
            ],
            deadline,
        )

    def close(self) -> None:
        """Sends no more heartbeats, and unregisters nothing."""
        self._rest()

    def _membership(self, on_wire: str, member: RegisteredMember) -> GroupMembership:
        assert member.membership is not None
        return replace(member.membership().on_wire(self._calls.on_wire), group=on_wire)

    def look_around(self, deadline: Deadline) -> None:
        """Ask for the brokers of the cluster, if any member registers its group on all of them."""
        if not self._groups.everywhere():
            return
        try:
            self._all = self._routes.cluster(deadline)
        except RocketMQError as e:  # a Proxy does not answer this
            logger.info("cannot list the brokers of the cluster; only those of topics in use get heartbeats: %s", e)

    def _addresses(self, slaves: bool, everywhere: bool) -> list[tuple[str, str]]:
        known = {data.broker_name: data for data in self._routes.brokers()}
        return [
            (data.broker_name, address)
            for data in ({**self._all, **known} if everywhere else known).values()
            for address in (data.master, *(data.slaves if slaves else ()))
            if address
        ]

    def _schedule(self, timer: Timer, in_s: float) -> None:
        """Call with the lock. Several callers share the next heartbeat."""
        due_ms = timer.now_ms() + 1000 * in_s
        if due_ms < self._due_ms:
            timer.later(in_s, functools.partial(self._beat, timer, due_ms))
            self._due_ms = due_ms  # only now: without a thread no call is due

    def _beat(self, timer: Timer, due_ms: float) -> None:
        with self._lock:
            if due_ms != self._due_ms:  # an earlier one is due
                return
        try:
            self.look_around(Deadline.after(CLUSTER_TIMEOUT_S))  # its own deadline: a name server may hang
            self.heartbeat(Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.info("no heartbeat was sent: %s", e)
        finally:
            with self._lock:
                if self._timer is timer:
                    self._due_ms = math.inf
                    self._schedule(timer, self._groups.heartbeat_s() or FIRST_HEARTBEAT_S)

    def _rest(self, unless_wanted: bool = False) -> None:
        with self._lock:
            if unless_wanted and self._groups.heartbeat_s():
                return
            timer, self._timer, self._due_ms = self._timer, None, math.inf
        if timer is not None:
            timer.close()

    def _tell(self, requests: Sequence[tuple[str, Command]], deadline: Deadline) -> None:
        """Send all requests at once, so that a broker that hangs does not delay others. Failures are logged."""
        answers = self._calls.exchange_each(requests, deadline.within(self._calls.request_timeout_s))
        for (address, command), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Command) and answer.code == Response.SUCCESS:
                continue
            error = error_from_response(answer, address) if isinstance(answer, Command) else answer
            if isinstance(error, NotSupported):
                logger.debug("%s takes no heartbeats", address)
            else:
                logger.info("request %s to %s failed: %s", command.code, address, error)

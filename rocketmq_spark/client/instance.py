"""One client instance, as RocketMQ's ``MQClientInstance``: who belongs to which group here, and brokers' view of it.

All producers and consumers of a process that share connections share an instance. It has the client id, reports to brokers
all groups in one heartbeat, and hands what brokers ask to the members it concerns: each group has a thread for that while
there is something to do, and nothing of it runs on the thread that reads answers.

It does not know what members do with a question, nor who they are.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocketmq_spark.base.clock import Deadline, NowAndThen
from rocketmq_spark.base.codes import Property, Request, Response
from rocketmq_spark.base.threads import Aside, Failure, Timer, attempt
from rocketmq_spark.client.calls import Calls, refused
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
# More than one name server takes that hangs, and with it far less than the 120 s after which brokers forget.
LOOK_S = 10.0
_MOST_LINGERING = 50
_AT_ONCE = 64  # brokers of which none waits for another one
SAID_S = 10.0  # how often the log says that a request is refused
_MAX_ASKED = 1000  # requests of servers that wait for one group: more are refused

# What a broker asks a consumer, with the field that names the group. What it asks a producer says so in the message.
_GROUP_FIELDS = {
    Request.NOTIFY_CONSUMER_IDS_CHANGED: "consumerGroup",
    Request.RESET_CONSUMER_CLIENT_OFFSET: "group",
    Request.GET_CONSUMER_STATUS_FROM_CLIENT: "group",
    Request.GET_CONSUMER_RUNNING_INFO: "consumerGroup",
    Request.CONSUME_MESSAGE_DIRECTLY: "consumerGroup",
}

_Addresses = Sequence[tuple[str, str]]  # with the names of brokers before them
# Gets the broker's address and its request; gives the answer, or None to refuse. It may block.
Asked = Callable[[str, Command], Command | None]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A producer, or with ``membership`` a consumer, which says in every heartbeat what it subscribes to.

    ``asked`` is the group's worker. ``heartbeat_s`` 0: no heartbeat for this one's sake. One that is ``everywhere`` has
    heartbeats sent to all brokers of the cluster: any of them may have something to ask. With ``addressed`` brokers pass
    messages on to it by the client id.
    """

    group: str
    heartbeat_s: float = 30.0
    asked: Asked | None = None
    membership: Callable[[], GroupMembership] | None = None
    everywhere: bool = False
    addressed: bool = False

    @property
    def consumes(self) -> bool:
        return self.membership is not None


class Groups:
    """Members by group, as brokers call it, and what brokers ask of them."""

    def __init__(self, replies: Callable[[ServerRequest], None] | None = None) -> None:
        self._replies = replies  # what takes a reply that a broker passes on
        self._lock = threading.Lock()
        self._members: dict[tuple[bool, str], tuple[Member, ...]] = {}  # none is empty, wherever Ctrl-C comes
        self._aside = Aside(_MAX_ASKED)
        self._replying = Aside()  # there are no more replies than requests, and each is waited for
        self._say_so = NowAndThen(SAID_S)

    def add(self, on_wire: str, member: Member) -> None:
        """Several producers may be of one group; a consumer would take another one's queues, for they have one id."""
        with self._lock:
            key = member.consumes, on_wire
            members = self._members.get(key, ())
            if member.consumes and members:
                raise LocalProtocolError(
                    f"consumer group {member.group!r} has a member in this process already",
                    remedy="Run the second one in another process, or with other connection options",
                )
            self._members[key] = (*members, member)

    def remove(self, on_wire: str, member: Member) -> bool:
        """Whether the group has no more members here. One that is not there any more may be removed again."""
        with self._lock:
            key = member.consumes, on_wire
            if others := tuple(one for one in self._members.get(key, ()) if one is not member):
                self._members[key] = others
            else:
                self._members.pop(key, None)
            return not others

    def each(self) -> list[tuple[str, Member]]:
        """One member of every group, with the group's name on the wire."""
        with self._lock:
            return [(on_wire, members[0]) for (_, on_wire), members in sorted(self._members.items())]

    def heartbeat_s(self) -> float:
        """The shortest that is wanted, 0 if none is."""
        with self._lock:
            wanted = [member.heartbeat_s for members in self._members.values() for member in members]
        return min(filter(None, wanted), default=0.0)

    def everywhere(self) -> bool:
        """Whether any member wants all brokers to know its group."""
        with self._lock:
            return any(member.everywhere for members in self._members.values() for member in members)

    def addressed(self) -> list[str]:
        """One group, as brokers call it, that has a member to which they pass messages on, if any has."""
        with self._lock:
            return [name for (_, name), members in self._members.items() if any(one.addressed for one in members)][:1]

    def asked(self, request: ServerRequest) -> bool:
        """Handles a request of a broker, on the thread that reads answers. Returns False if no member takes it."""
        code, ext = request.command.code, request.command.ext
        try:
            if code == Request.CHECK_TRANSACTION_STATE:  # its message must be taken apart to know the group
                self._aside.run(code, functools.partial(self._check, request))
                return True
            if code == Request.PUSH_REPLY_MESSAGE_TO_CLIENT and self._replies is not None:
                self._replying.run(code, functools.partial(self._replies, request))
                return True
            field = _GROUP_FIELDS.get(Request(code)) if code in _GROUP_FIELDS else None
            return field is not None and self._hand((True, ext.get(field, "")), request)
        except RuntimeError as e:  # there can be no more threads, or too many wait
            self._say_refused(request, e)
            return False

    def _check(self, request: ServerRequest) -> None:
        groups = [m.properties.get(Property.PRODUCER_GROUP, "") for m in decode_leniently(request.command.body)]
        try:
            taken = len(groups) == 1 and self._hand((False, groups[0]), request)
        except RuntimeError as e:
            self._say_refused(request, e)
            taken = False
        if not taken:
            request.refuse()

    def _say_refused(self, request: ServerRequest, why: RuntimeError) -> None:
        if self._say_so.due():  # thousands of them may come
            logger.warning("request %s of %s is refused: %s", request.command.code, request.address, why)

    def _hand(self, key: tuple[bool, str], request: ServerRequest) -> bool:
        with self._lock:
            able = [member for member in self._members.get(key, ()) if member.asked is not None]
        if not able:
            return False
        # A listener may take long, or hang, with a message that is consumed by order.
        apart = request.command.code == Request.CONSUME_MESSAGE_DIRECTLY
        self._aside.run((key, apart), functools.partial(_answer, able[0], request))
        return True


def _answer(member: Member, request: ServerRequest) -> None:
    assert member.asked is not None
    reply = attempt(member.asked, request.address, request.command)
    if isinstance(reply, Failure):  # the broker must not wait for an answer that never comes
        reply.log(logger, "group %s could not handle request %s", member.group, request.command.code)
        reply = Command(Response.SYSTEM_ERROR, remark=str(reply))
    if reply is None:
        request.refuse()
    else:
        request.answer(reply)


class Instance:
    """Sends heartbeats for the members of this process, while there are any."""

    def __init__(
        self,
        groups: Groups,
        calls: Calls,
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
        self._telling = threading.Lock()  # so that no heartbeat brings back a group that has just left
        self._lingering: dict[str, None] = {}  # groups that producers left, which brokers still have
        self._asked: set[str] = set()  # groups of producers that brokers ask as long as they have them
        self._forgotten = False  # brokers forgot the connection when the last group was unregistered
        self._timer: Timer | None = None
        self._due_ms = math.inf

    def join(self, member: Member) -> None:
        """From now on ``member`` is in heartbeats, the first of them soon. A consumer's id must be new to its group."""
        on_wire = self._calls.on_wire(member.group)
        try:
            self._groups.add(on_wire, member)
            if member.asked is not None and not member.consumes:
                self._asked.add(on_wire)
            if member.heartbeat_s:
                with self._lock:
                    self._timer = self._timer or self._make_timer("rocketmq-instance")
                    self._schedule(self._timer, FIRST_HEARTBEAT_S)
        except BaseException:  # Ctrl-C, too: who joins is given no way to leave then
            self._groups.remove(on_wire, member)
            self._rest(unless_wanted=True)
            raise

    def leave(self, member: Member, deadline: Deadline) -> None:
        """The last member unregisters the group, if need be later. Failures of single brokers are logged. May be repeated
        after an interruption.
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
        """A group that no broker asks anything lingers while replies may be under way, which an unregistration loses."""
        addressed = self._groups.addressed()
        if addressed and on_wire not in self._asked and len(self._lingering) < _MOST_LINGERING:
            self._lingering[on_wire] = None
            return
        others = {name for name, other in self._groups.each() if not other.consumes}
        gone = [name for name in {on_wire: None, **self._lingering} if name not in others]
        self._forgotten = True
        self._anew([*gone, *addressed], deadline)
        self._lingering.clear()  # not before: of an interrupted one heartbeats go on, or brokers would end the connection
        self._asked.difference_update(gone)
        self._forgotten = not addressed  # see ``connect``

    def heartbeat(self, deadline: Deadline) -> None:
        """Tell brokers of all groups now: masters, and slaves too if any group consumes."""
        with self._telling:
            self._heartbeat(deadline)

    def connect(self, deadline: Deadline, knowing: Container[str] | None) -> bool:
        """A heartbeat after which brokers know the client's connection; all but ``knowing`` whatever they should know already.
        False if there was no time for more than a heartbeat.

        To pass messages on, they note it when a group of producers is new on it. They forget it when any of the client's groups
        is unregistered, and when an older connection ends, and other heartbeats do not bring it back (ProducerManager in 5.5.0).
        """
        if not self._telling.acquire(timeout=deadline.remaining() / 2):  # who tells them now waits for one that hangs
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
        """Unregister groups of producers, but not at ``knowing``, with a heartbeat of what stays if something is addressed.

        Between the two a broker passes no replies on: so none waits for what another one answers.
        """

        def tell(one: tuple[str, str]) -> None:
            if one[1] not in knowing:
                self._unregister("producerGroup", groups, [one], deadline)
            if self._groups.addressed():
                self._heartbeat(deadline, [one], groups)

        aside, addresses = Aside(), self._addresses(False, True)
        for i, one in enumerate(addresses[1:]):
            try:
                aside.run(i % _AT_ONCE, functools.partial(tell, one))
            except RuntimeError:  # no more threads: then one waits for the other
                tell(one)
        for one in addresses[:1]:
            tell(one)
        for i in range(min(len(addresses) - 1, _AT_ONCE)):
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

    def _membership(self, on_wire: str, member: Member) -> GroupMembership:
        assert member.membership is not None
        return replace(member.membership().on_wire(self._calls.on_wire), group=on_wire)

    def look_around(self, deadline: Deadline) -> None:
        """Ask which brokers there are, if any member wants all of them to know its group."""
        if not self._groups.everywhere():
            return
        try:
            self._all = self._routes.cluster(deadline)
        except RocketMQError as e:  # a Proxy does not say
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
        """With the lock. The next heartbeat is one, however many want it."""
        due_ms = timer.now_ms() + 1000 * in_s
        if due_ms < self._due_ms:
            timer.later(in_s, functools.partial(self._beat, timer, due_ms))
            self._due_ms = due_ms  # not before: without a thread nothing is due

    def _beat(self, timer: Timer, due_ms: float) -> None:
        with self._lock:
            if due_ms != self._due_ms:  # another one is due before
                return
        try:
            self.look_around(Deadline.after(LOOK_S))  # a name server that hangs takes no time from heartbeats
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
        """All of them at once, so that one that hangs takes no time from the others; failures are logged."""
        answers = self._calls.exchange_each(requests, deadline.within(self._calls.request_timeout_s))
        for (address, command), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Command) and answer.code == Response.SUCCESS:
                continue
            error = refused(answer, address) if isinstance(answer, Command) else answer
            if isinstance(error, NotSupported):
                logger.debug("%s takes no heartbeats", address)
            else:
                logger.info("request %s to %s failed: %s", command.code, address, error)

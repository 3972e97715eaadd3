"""The ``GroupMember`` port over remoting: membership of a group, its offsets, pulls, locks, and messages sent back."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import Complaints
from rocketmq_spark.client.broker import RemotingOffsetReader
from rocketmq_spark.client.committer import OffsetCommit
from rocketmq_spark.client.groups import BrokerRequests, group_membership
from rocketmq_spark.client.instance import ClientInstance, RegisteredMember
from rocketmq_spark.client.pulls import Done, LongPolls
from rocketmq_spark.client.questions import BrokerClient, BrokerCommand
from rocketmq_spark.client.route import Routes
from rocketmq_spark.client.sender import RemotingSendBack, RemotingSender
from rocketmq_spark.errors import (
    BrokerNotFound,
    GroupNotFound,
    RemoteProtocolError,
    RocketMQError,
    ServerFault,
)
from rocketmq_spark.model import Filter, MessageQueue, PullRequest, QueueBounds, ReceivedMessage
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.remoting.connection import OTHER_TRANSPORTS
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

UNKNOWN_GROUP = "If this lasts, create the group: brokers with autoCreateSubscriptionGroup=false do not create groups"
UNKNOWN_AT_PROXY = (
    "If this lasts, the Proxy does not reach its brokers: check the brokers, and the log of the Proxy. In LOCAL mode "
    f"(mqbroker --enable-proxy) a Proxy serves no Remoting clients: {OTHER_TRANSPORTS}"
)


class RemotingMember:
    """Implements ``ports.GroupMember``."""

    def __init__(
        self,
        questions: BrokerClient,
        routes: Routes,
        instance: ClientInstance,
        sender: RemotingSender,
        polls: LongPolls,
        rng: random.Random | None = None,
    ) -> None:
        self._questions = questions
        self._offsets = RemotingOffsetReader(questions)
        self._calls = questions.calls
        self._routes = routes
        self._instance = instance
        self._polls = polls
        self._back = RemotingSendBack(questions, sender)
        self._rng = rng or random.Random()
        self._lock_complaints = Complaints()  # of brokers that did not answer the last request for locks

    # --- the group

    @property
    def client_id(self) -> str:
        return self._instance.client_id

    @property
    def has_notices(self) -> bool:
        return not any(self._calls.pool.is_proxy(data.master) for data in self._routes.brokers() if data.master)

    def join(
        self, group: str, membership: Callable[[], Membership], asked: Asked, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        answers = BrokerRequests(self._calls, group, asked)
        member = RegisteredMember(group, heartbeat_s, answers, lambda: group_membership(group, membership()))
        leave = functools.partial(self._instance.leave, member)  # created first: nothing may fail once it is a member
        self._instance.join(member)
        return leave

    def heartbeat(self, deadline: Deadline) -> None:
        self._instance.heartbeat(deadline)

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        try:
            answer = self._ask_any(topic, rpc.GET_CONSUMER_LIST_BY_GROUP, group, deadline)
        except ServerFault as e:
            # A Proxy forgets members if it does not reach the brokers of their topics.
            if self._calls.pool.is_proxy(e.addr or ""):
                words = None if e.remark and "is null" in e.remark else e.remark
                why = "the Proxy knows no member of the group"
                raise ServerFault(why, e.addr, e.broker_code, topic, remark=words, remedy=UNKNOWN_AT_PROXY) from e
            # A broker that does not create groups accepts the heartbeats of an unknown group, too.
            raise ServerFault(e.message, e.addr, e.broker_code, topic, remark=e.remark, remedy=UNKNOWN_GROUP) from e
        return bodies.consumer_ids(answer.body)

    def filters(self, group: str, topic: str, deadline: Deadline, broker_name: str = "") -> dict[str, Filter]:
        answer = self._ask_any(topic, rpc.GET_CONSUMER_CONNECTION_LIST, group, deadline, broker_name)
        found = bodies.group_filters(answer.body)
        scope = self._calls.scope
        return {scope.plain(name): wanted for name, wanted in found.items() if scope.reaches(name)}

    def consume_modes(self, group: str, topics: Iterable[str], deadline: Deadline) -> dict[tuple[str, str], str]:
        wire_group = self._calls.on_wire(group)
        questions = []
        for topic in topics:
            body = bodies.consume_mode_query(wire_group, self._calls.on_wire(topic), self.client_id)
            try:
                brokers = sorted(self._routes.recent(topic, deadline).brokers)
            except RocketMQError as e:
                logger.debug("the brokers of %s are unknown: %s", topic, e)
                continue
            questions += [
                BrokerCommand(name, rpc.QUERY_ASSIGNMENT.request(body, bname=name), topic) for name in brokers
            ]
        modes = {}
        for question, answer in zip(questions, self._questions.ask_each(questions, deadline), strict=True):
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                mode = bodies.consume_mode(answer.body)
            except RocketMQError as e:  # such as NotSupported from a broker before 5.0, or from a Proxy
                logger.debug(
                    "%s does not report how group %s consumes %s: %s", question.broker_name, group, question.topic, e
                )
                continue
            if mode is not None:
                modes[question.topic, question.broker_name] = mode
        return modes

    def _ask_any(self, topic: str, row: rpc.Row, group: str, deadline: Deadline, broker_name: str = "") -> Command:
        """Ask this broker of the topic, or a random one: all receive the same heartbeats of the group's members of this topic."""
        known = self._routes.recent(topic, deadline).brokers.values()
        brokers = [data for data in known if data.addresses and broker_name in ("", data.broker_name)]
        if not brokers:
            which = f"{broker_name} is no broker of the topic that" if broker_name else "no broker of the topic"
            raise BrokerNotFound(f"{which} has an address", topic=topic)
        chosen = self._rng.choice(brokers)
        address = chosen.master or self._rng.choice(chosen.slaves)
        command = row.request(consumerGroup=self._calls.on_wire(group), bname=chosen.broker_name)
        return self._calls.ask(address, command, deadline)

    # --- queues and their offsets

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        return self._routes.recent(topic, deadline, refresh).subscribe_set

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, young_at_zero: bool = True) -> int | None:
        data = self._routes.broker(queue.broker_name)
        of_slave = data is not None and data.master is None
        young = young_at_zero and not of_slave
        offset = self._offsets.committed_of_member(group, [queue], deadline, young, "hint")[queue]
        if offset is None and of_slave:
            raise BrokerNotFound(
                "the master is away, and its slave may not have the group's offset yet", queue=str(queue)
            )
        return offset

    def connection(self, broker_name: str) -> object:
        data = self._routes.broker(broker_name)
        live = data is not None and data.master is not None and self._calls.pool.live(data.master)
        return self._offsets.connection(broker_name) if live else None

    def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
        bounds = self._offsets.bounds_by_queue([queue], deadline)[queue]
        if group is None or not bounds.min_offset:
            return bounds
        kept = self._offsets.kept_from(group, [queue], deadline, _raise)
        return bounds._replace(min_offset=min(bounds.min_offset, kept.get(queue, bounds.min_offset)))

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        return self._offsets.search_offsets({queue: epoch_ms}, deadline, group=group)[queue]

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        commit = OffsetCommit(self._questions, group, deadline, read_from="hint")
        failed = commit(offsets)
        young = {queue: offsets[queue] for queue, e in failed.items() if isinstance(e, GroupNotFound)}
        if not young:
            return failed
        self._polls.introduce(group, young, deadline)
        return {queue: e for queue, e in failed.items() if queue not in young} | commit(young)

    # --- messages

    def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
        self._polls.pull(request, deadline, done)

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        self._back.send_back(group, message, delay_level, max_reconsume_times, deadline)

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        self._back.send_to_retry(group, message, max_reconsume_times, deadline)

    # --- locks

    def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        locked: set[MessageQueue] = set()
        for of_broker, answer in self._ask_locks(rpc.LOCK_BATCH_MQ, group, queues, deadline):
            try:
                ours = set(bodies.locked_queues(answer.body))
            except RemoteProtocolError as e:
                logger.warning("cannot decode the answer to the lock request for %s: %s", of_broker, e)
                continue
            locked |= {queue for queue in of_broker if self._calls.queue_on_wire(queue) in ours}
        return locked

    def unlock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
        self._ask_locks(rpc.UNLOCK_BATCH_MQ, group, queues, deadline)

    def _ask_locks(
        self, row: rpc.Row, group: str, queues: Iterable[MessageQueue], deadline: Deadline
    ) -> list[tuple[list[MessageQueue], Command]]:
        """Send one request per broker, all at once. Returns the answers that arrived."""
        of_broker: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            of_broker.setdefault(queue.broker_name, []).append(queue)
        wire = self._calls.on_wire(group)
        asked = [
            BrokerCommand(
                name,
                row.request(
                    bodies.lock(wire, self.client_id, [self._calls.queue_on_wire(queue) for queue in mine]), bname=name
                ),
                "",
            )
            for name, mine in of_broker.items()
        ]
        found = []
        for (name, mine), answer in zip(of_broker.items(), self._questions.ask_each(asked, deadline), strict=True):
            if isinstance(answer, RocketMQError):
                logger.log(self._lock_complaints.level(name, answer), "%s of %s failed: %s", row.name, mine, answer)
            else:
                self._lock_complaints.over(name)
                found.append((mine, answer))
        return found


def _raise(error: RocketMQError, queue: MessageQueue) -> None:
    raise error

"""The ``GroupMember`` port over remoting: membership, offsets, pulls, locks, and messages that are sent back."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.client.broker_client import BrokerClient, BrokerCommand
from rocketmq_spark.client.broker_requests import BrokerRequests, group_membership
from rocketmq_spark.client.committer import OffsetCommit
from rocketmq_spark.client.instance import ClientInstance, RegisteredMember
from rocketmq_spark.client.long_polls import LongPolls, OnPulled
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.send_back import RemotingSendBack
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import (
    BrokerNotFound,
    GroupNotFound,
    RemoteProtocolError,
    RocketMQError,
    ServerFault,
)
from rocketmq_spark.model import Filter, MessageQueue, PullRequest, QueueBounds, ReceivedMessage
from rocketmq_spark.model.membership import Membership, RequestCallback
from rocketmq_spark.remoting.connection import OTHER_TRANSPORTS_REMEDY
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

UNKNOWN_GROUP_REMEDY = (
    "If this lasts, create the group: brokers with autoCreateSubscriptionGroup=false do not create groups"
)
UNKNOWN_AT_PROXY_REMEDY = (
    "If this lasts, the Proxy does not reach its brokers: check the brokers, and the log of the Proxy. In LOCAL mode "
    f"(mqbroker --enable-proxy) a Proxy serves no Remoting clients: {OTHER_TRANSPORTS_REMEDY}"
)


class RemotingMember:
    """Implements ``ports.GroupMember``."""

    def __init__(
        self,
        broker_client: BrokerClient,
        routes: Routes,
        instance: ClientInstance,
        sender: RemotingSender,
        polls: LongPolls,
        rng: random.Random | None = None,
    ) -> None:
        self._broker_client = broker_client
        self._offset_reader = RemotingOffsetReader(broker_client)
        self._rpc_client = broker_client.rpc_client
        self._routes = routes
        self._instance = instance
        self._polls = polls
        self._send_back = RemotingSendBack(broker_client, sender)
        self._rng = rng or random.Random()
        self._lock_log_throttle = LogThrottle()  # log levels for brokers that fail to lock

    # --- the group

    @property
    def client_id(self) -> str:
        return self._instance.client_id

    @property
    def receives_notices(self) -> bool:
        return not any(self._rpc_client.pool.is_proxy(data.master) for data in self._routes.brokers() if data.master)

    def join(
        self, group: str, membership: Callable[[], Membership], on_request: RequestCallback, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        broker_requests = BrokerRequests(self._rpc_client, group, on_request)
        member = RegisteredMember(group, heartbeat_s, broker_requests, lambda: group_membership(group, membership()))
        leave = functools.partial(
            self._instance.leave, member
        )  # created before ``join``: after an error between ``join`` and ``return``, nobody could call ``leave``
        self._instance.join(member)
        return leave

    def heartbeat(self, deadline: Deadline) -> None:
        self._instance.heartbeat(deadline)

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        try:
            answer = self._request_from_any(topic, rpc.GET_CONSUMER_LIST_BY_GROUP, group, deadline)
        except ServerFault as e:
            # A Proxy forgets the members whose brokers it cannot reach.
            if self._rpc_client.pool.is_proxy(e.addr or ""):
                remark = None if e.remark and "is null" in e.remark else e.remark
                message = "the Proxy knows no member of the group"
                raise ServerFault(
                    message, e.addr, e.broker_code, topic, remark=remark, remedy=UNKNOWN_AT_PROXY_REMEDY
                ) from e
            # A broker accepts the heartbeats of an unknown group even if it does not create groups.
            raise ServerFault(
                e.message, e.addr, e.broker_code, topic, remark=e.remark, remedy=UNKNOWN_GROUP_REMEDY
            ) from e
        return bodies.consumer_ids(answer.body)

    def filters(self, group: str, topic: str, deadline: Deadline, broker_name: str = "") -> dict[str, Filter]:
        answer = self._request_from_any(topic, rpc.GET_CONSUMER_CONNECTION_LIST, group, deadline, broker_name)
        filters = bodies.group_filters(answer.body)
        scope = self._rpc_client.scope
        return {
            scope.user_name(name): topic_filter for name, topic_filter in filters.items() if scope.is_reversible(name)
        }

    def consume_modes(self, group: str, topics: Iterable[str], deadline: Deadline) -> dict[tuple[str, str], str]:
        group_on_wire = self._rpc_client.name_on_wire(group)
        commands = []
        for topic in topics:
            body = bodies.consume_mode_query(group_on_wire, self._rpc_client.name_on_wire(topic), self.client_id)
            try:
                brokers = sorted(self._routes.recent_route(topic, deadline).brokers)
            except RocketMQError as e:
                logger.debug("the brokers of %s are unknown: %s", topic, e)
                continue
            commands += [BrokerCommand(name, rpc.QUERY_ASSIGNMENT.request(body, bname=name), topic) for name in brokers]
        modes = {}
        for command, answer in zip(commands, self._broker_client.request_each(commands, deadline), strict=True):
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                mode = bodies.consume_mode(answer.body)
            except RocketMQError as e:  # such as NotSupported from a broker before 5.0, or from a Proxy
                logger.debug(
                    "%s does not report how group %s consumes %s: %s", command.broker_name, group, command.topic, e
                )
                continue
            if mode is not None:
                modes[command.topic, command.broker_name] = mode
        return modes

    def _request_from_any(
        self, topic: str, rpc_row: rpc.RequestRow, group: str, deadline: Deadline, broker_name: str = ""
    ) -> Command:
        """Send a request to broker ``broker_name`` of the topic; by default to a random broker of the topic, because all of
        these brokers get the same heartbeats.
        """
        routed_brokers = self._routes.recent_route(topic, deadline).brokers.values()
        brokers = [data for data in routed_brokers if data.addresses and broker_name in ("", data.broker_name)]
        if not brokers:
            problem = f"{broker_name} is not a broker of the topic that" if broker_name else "no broker of the topic"
            raise BrokerNotFound(f"{problem} has an address", topic=topic)
        chosen_broker = self._rng.choice(brokers)
        address = chosen_broker.master or self._rng.choice(chosen_broker.slaves)
        command = rpc_row.request(consumerGroup=self._rpc_client.name_on_wire(group), bname=chosen_broker.broker_name)
        return self._rpc_client.request(address, command, deadline)

    # --- queues and their offsets

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        return self._routes.recent_route(topic, deadline, refresh).subscribe_set

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        data = self._routes.broker(queue.broker_name)
        is_slave = data is not None and data.master is None
        zero_if_in_memory = zero_if_new and not is_slave
        offset = self._offset_reader.committed_of_member(group, [queue], deadline, zero_if_in_memory, "hint")[queue]
        if offset is None and is_slave:
            raise BrokerNotFound(
                "the master is down, and its slave may not have the group's offset yet", queue=str(queue)
            )
        return offset

    def connection(self, broker_name: str) -> object:
        data = self._routes.broker(broker_name)
        is_connected = data is not None and data.master is not None and self._rpc_client.pool.is_connected(data.master)
        return self._offset_reader.connection(broker_name) if is_connected else None

    def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
        bounds = self._offset_reader.bounds_by_queue([queue], deadline)[queue]
        if group is None or not bounds.min_offset:
            return bounds
        first_offsets = self._offset_reader.first_kept_offsets(group, [queue], deadline, _raise)
        return bounds._replace(min_offset=min(bounds.min_offset, first_offsets.get(queue, bounds.min_offset)))

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        return self._offset_reader.search_offsets({queue: epoch_ms}, deadline, group=group)[queue]

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        commit = OffsetCommit(self._broker_client, group, deadline, read_from="hint")
        errors = commit(offsets)
        offsets_of_unknown_group = {
            queue: offsets[queue] for queue, e in errors.items() if isinstance(e, GroupNotFound)
        }
        if not offsets_of_unknown_group:
            return errors
        self._polls.create_group_by_pull(group, offsets_of_unknown_group, deadline)
        return {queue: e for queue, e in errors.items() if queue not in offsets_of_unknown_group} | commit(
            offsets_of_unknown_group
        )

    # --- messages

    def pull(self, request: PullRequest, deadline: Deadline, done: OnPulled) -> None:
        self._polls.pull(request, deadline, done)

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        self._send_back.send_back(group, message, delay_level, max_reconsume_times, deadline)

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        self._send_back.send_to_retry(group, message, max_reconsume_times, deadline)

    # --- locks

    def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        locked_queues: set[MessageQueue] = set()
        for broker_queues, answer in self._request_locks(rpc.LOCK_BATCH_MQ, group, queues, deadline):
            try:
                locked_queues_on_wire = set(bodies.locked_queues(answer.body))
            except RemoteProtocolError as e:
                logger.warning("cannot decode the answer to the lock request for %s: %s", broker_queues, e)
                continue
            locked_queues |= {
                queue for queue in broker_queues if self._rpc_client.queue_on_wire(queue) in locked_queues_on_wire
            }
        return locked_queues

    def unlock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
        self._request_locks(rpc.UNLOCK_BATCH_MQ, group, queues, deadline)

    def _request_locks(
        self, rpc_row: rpc.RequestRow, group: str, queues: Iterable[MessageQueue], deadline: Deadline
    ) -> list[tuple[list[MessageQueue], Command]]:
        """Send one request per broker, all at once. Returns the answers that arrived."""
        queues_of_broker: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            queues_of_broker.setdefault(queue.broker_name, []).append(queue)
        group_on_wire = self._rpc_client.name_on_wire(group)
        commands = [
            BrokerCommand(
                name,
                rpc_row.request(
                    bodies.lock_request(
                        group_on_wire,
                        self.client_id,
                        [self._rpc_client.queue_on_wire(queue) for queue in broker_queues],
                    ),
                    bname=name,
                ),
                "",
            )
            for name, broker_queues in queues_of_broker.items()
        ]
        answers = []
        for (name, broker_queues), answer in zip(
            queues_of_broker.items(), self._broker_client.request_each(commands, deadline), strict=True
        ):
            if isinstance(answer, RocketMQError):
                logger.log(
                    self._lock_log_throttle.level(name, answer),
                    "%s of %s failed: %s",
                    rpc_row.name,
                    broker_queues,
                    answer,
                )
            else:
                self._lock_log_throttle.mark_resolved(name)
                answers.append((broker_queues, answer))
        return answers


def _raise(error: RocketMQError, queue: MessageQueue) -> None:
    raise error

"""Administration of topics, groups and brokers, for commands and tests. Needs more permissions than reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, BATCH_QUEUE, FIRST_VERSION_WITH_ATTRIBUTES, QUEUE_TYPE, Perm
from rocketmq_spark.base.process import Closeable
from rocketmq_spark.base.secret import Secret
from rocketmq_spark.client.broker_client import BrokerClient
from rocketmq_spark.client.name_servers import NameServers
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.routes import Routes, masters_of, require_brokers
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import (
    CallTimeout,
    ConnectionLost,
    NotFound,
    NotSupported,
    OptionError,
    RocketMQError,
    RouteNotFound,
    TopicNotFound,
)
from rocketmq_spark.model import BrokerData, MessageQueue, QueueBounds, QueueData, ReceivedMessage, TopicRoute
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire import bodies, names, rpc
from rocketmq_spark.wire.bodies import ConsumeProgress, TopicConfig
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import DecodeBudget, decode_leniently

_ROUTE_POLL_S = 0.01
# A broker registers a change of a topic together with the current version of the broker's data. If a name server already has
# this version, the name server ignores the change of a known topic. If two topics change at once, both changes may have the
# same version, and routes may never show one of the changes. If routes do not show a change for ``_REGISTER_AGAIN_S``, this
# client registers the change again.
_REGISTER_AGAIN_S = 3.0
# The maximum number of messages that a broker returns for a key by default, and the maximum decoded size of these messages in
# bytes.
_MAX_MESSAGES_OF_KEY, _MAX_DECODED_BYTES = 32, 16 << 20


class BaseAdmin(Closeable):
    """Sends administrative requests over its own connections, or over the connections of ``rpc_client``. ``close`` does not
    close the connections of ``rpc_client``.
    """

    def __init__(self, name_server: str | Sequence[str], rpc_client: RpcClient | None = None) -> None:
        addresses = name_server.replace(",", ";").split(";") if isinstance(name_server, str) else name_server
        self._owns_pool = rpc_client is None
        self._rpc_client = rpc_client or RpcClient(Pool(ConnectOptions()))
        self.name_servers = NameServers(self._rpc_client, addresses)
        self.routes = Routes(self.name_servers)
        self.offset_reader = RemotingOffsetReader(BrokerClient(self._rpc_client, self.routes))

    def close(self) -> None:
        if self._owns_pool:
            self._rpc_client.pool.close()

    def cluster(self) -> dict[str, BrokerData]:
        """Brokers by name."""
        return self.routes.cluster()

    def topics(self) -> list[str]:
        """All topics, including system topics."""
        return self.routes.topics()

    def route(self, topic: str) -> TopicRoute:
        return self.routes.get(topic, 0.0)

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        brokers: Sequence[str] | None = None,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = 6,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> TopicRoute:
        """Create or change a topic on the masters of ``brokers`` (default: all), and wait until the route shows it.

        A batch topic has the attributes ``batch_attributes()``.
        """
        _raise_if_problem(names.topic_problem(topic, self._rpc_client.scope))
        deadline, masters = Deadline.after(timeout_s), masters_of(self.cluster(), brokers)
        read_queue_count = queues if read_queues is None else read_queues
        write_queue_count = queues if write_queues is None else write_queues
        config = TopicConfig(topic, read_queue_count, write_queue_count, perm, "SINGLE_TAG", 0, False, attributes or {})
        configs = dict.fromkeys(masters, config)
        for name, address, answer in _configure_topic(self._rpc_client, topic, configs, masters, deadline):
            if attributes and answer.version < FIRST_VERSION_WITH_ATTRIBUTES:
                raise NotSupported(
                    f"broker {name} is older than RocketMQ 5.0 and ignored the attributes {', '.join(sorted(attributes))}",
                    address,
                    topic=topic,
                    remedy="This broker created an ordinary topic. Use a newer broker, or delete the topic",
                )
        return self._await_route(topic, configs, deadline)

    def queues_of(self, topic: str, brokers: Sequence[str] | None = None) -> dict[str, QueueData]:
        """The numbers of queues of a topic on each of ``brokers`` (default: all). Omits brokers without the topic."""
        route = _route_or_none(self.routes, topic)
        queues = route.queues if route is not None else ()
        return {data.broker_name: data for data in queues if brokers is None or data.broker_name in brokers}

    def resize_topic(self, topic: str, queues: int, brokers: Sequence[str], timeout_s: float = 30.0) -> TopicRoute:
        """Set the number of a topic's queues on each of ``brokers``, and wait until the route shows it. Messages in removed
        queues are not read until the queues are added again.
        """
        current_configs = {name: self.topic_config(topic, name) for name in brokers}
        resized_configs = {
            name: replace(config, read_queues=queues, write_queues=queues, attributes={})
            for name, config in current_configs.items()
        }
        return self.change_topic(topic, resized_configs, timeout_s)

    def change_topic(self, topic: str, configs: Mapping[str, TopicConfig], timeout_s: float = 30.0) -> TopicRoute:
        """Set the configuration of a topic on each broker, and wait until the route shows it. Attributes that a configuration
        does not name stay as they are.
        """
        deadline = Deadline.after(timeout_s)
        for _ in _configure_topic(
            self._rpc_client, topic, configs, masters_of(self.cluster(), sorted(configs)), deadline
        ):
            pass
        return self._await_route(topic, configs, deadline)

    def _await_route(self, topic: str, configs: Mapping[str, TopicConfig], deadline: Deadline) -> TopicRoute:
        """Wait until the route shows the queue numbers and permissions that brokers report for the topic."""
        requested_queues_and_perms = {name: _queues_and_perm(config) for name, config in configs.items()}
        expected_queues_and_perms, checked_brokers, registration_due = (
            dict(requested_queues_and_perms),
            set[str](),
            deadline.within(_REGISTER_AGAIN_S),
        )
        while True:
            route = _route_or_none(self.routes, topic)
            route_queues_and_perms = _queues_and_perms_in_route(route)
            if route is not None and all(
                route_queues_and_perms.get(name) == queues_and_perm
                for name, queues_and_perm in expected_queues_and_perms.items()
            ):
                return route
            for name, (read_queue_count, write_queue_count, perm) in requested_queues_and_perms.items():
                if (
                    name not in checked_brokers
                    and route_queues_and_perms.get(name, ())[:2] == (read_queue_count, write_queue_count)
                    and route_queues_and_perms[name] != expected_queues_and_perms[name]
                ):
                    checked_brokers.add(name)
                    with suppress(RocketMQError, ValueError):  # an unknown permission only prolongs the wait
                        expected_queues_and_perms[name] = (
                            read_queue_count,
                            write_queue_count,
                            perm & _broker_permission(self, name),
                        )
            if deadline.expired:
                remedy = (
                    "The brokers have applied the change. If a name server withholds write permission from a broker, run: "
                    "mqadmin addWritePerm"
                )
                raise CallTimeout("the name server does not show the topic in time", topic=topic, remedy=remedy)
            if registration_due.expired:
                shown_queues_and_perms = {
                    name: route_queues_and_perms.get(name)
                    for name, queues_and_perm in expected_queues_and_perms.items()
                    if route_queues_and_perms.get(name) != queues_and_perm
                }
                _register_topic(self, topic, shown_queues_and_perms, deadline)
                registration_due = deadline.within(_REGISTER_AGAIN_S)
            deadline.pause(_ROUTE_POLL_S)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its data: on masters, then on slaves, then on name servers. Raises ``RouteNotFound`` if the topic
        does not exist. The error of a slave or a name server is raised at the end.

        When a master deletes a topic, its slaves delete the topic, too, but keep the index of the topic. A new topic of the
        same name would inherit this index. Therefore slaves also get a request, as from Java's DeleteTopicSubCommand.
        """
        self.route(topic)
        name_on_wire = self._rpc_client.name_on_wire(topic)
        cluster = self.cluster()

        def delete(name: str, address: str) -> Command:
            return self._rpc_client.request(address, rpc.DELETE_TOPIC_IN_BROKER.request(topic=name_on_wire, bname=name))

        for _ in _change_each(masters_of(cluster), delete):
            pass
        errors: list[RocketMQError] = []
        for name, data in sorted(cluster.items()):
            for address in data.slaves:
                try:
                    delete(name, address)
                except RocketMQError as e:
                    errors.append(e)
        try:
            self.name_servers.request_all_servers(lambda: rpc.DELETE_TOPIC_IN_NAMESRV.request(topic=name_on_wire))
        except RocketMQError as e:
            note = f"Topic {topic} is deleted on all masters, but this server may still have it"
            e.remedy = f"{note}. {e.remedy}" if e.remedy else note
            errors.append(e)
        self.routes.forget(topic)
        if errors:
            raise errors[0]

    def describe_topic(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """The bounds of every queue, including queues without read permission."""
        return self.offset_reader.bounds(self.route(topic).stored_queues(), Deadline.after(10.0))

    def topic_config(self, topic: str, broker: str) -> TopicConfig:
        name_on_wire = self._rpc_client.name_on_wire(topic)
        try:
            return bodies.topic_config(
                self._request_master(broker, rpc.GET_TOPIC_CONFIG.request(topic=name_on_wire, bname=broker)).body
            )
        except NotSupported:  # brokers before 5.0 can only report all topics at once, and a Proxy reports no topic
            return bodies.topic_config(
                self._request_master(broker, rpc.GET_ALL_TOPIC_CONFIG.request(bname=broker)).body, name_on_wire
            )

    def create_group(
        self, group: str, brokers: Sequence[str] | None = None, settings: Mapping[str, object] | None = None
    ) -> None:
        """Create or change a consumer group on the masters of ``brokers`` (default: all).

        ``settings`` are fields of ``SubscriptionGroupConfig``, such as ``retryMaxTimes``. Other fields have the brokers'
        defaults.
        """
        _raise_if_problem(names.group_problem(group, self._rpc_client.scope))
        body = bodies.subscription_group(self._rpc_client.name_on_wire(group), **(settings or {}))

        def put_group(name: str, address: str) -> Command:
            return self._rpc_client.request(address, rpc.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP.request(body, bname=name))

        for _ in _change_each(masters_of(self.cluster(), brokers), put_group):
            pass

    def messages_of_key(self, topic: str, key: str, begin_ms: int, end_ms: int) -> list[ReceivedMessage]:
        """Return messages that have a key and were stored in this period, from the indexes of the topic's brokers.

        Each broker returns at most ``_MAX_MESSAGES_OF_KEY`` messages. Messages beyond ``_MAX_DECODED_BYTES`` stay compressed,
        because callers need only their ids. If a master is down, its slave gets the request.
        """
        messages: list[ReceivedMessage] = []
        decode_budget = DecodeBudget(_MAX_DECODED_BYTES)
        for name, broker in self.route(topic).brokers.items():
            if (address := broker.replica("hint")) is None:
                continue
            command = rpc.QUERY_MESSAGE.request(
                topic=self._rpc_client.name_on_wire(topic),
                key=key,
                maxNum=_MAX_MESSAGES_OF_KEY,
                beginTimestamp=begin_ms,
                endTimestamp=end_ms,
                bname=name,
            )
            try:
                answer = self._rpc_client.request(address, command)
                messages += decode_leniently(answer.body, name, budget=decode_budget)
            except NotFound:
                continue
        return [message for message in messages if key in message.keys]  # an index compares only hashes of keys

    def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeProgress]:
        """The progress of a group in all queues of the topic."""
        return consume_progress(self._rpc_client, self.route(topic), self._rpc_client.name_on_wire(group))

    def consumed_topics(self, group: str) -> list[str]:
        """Topics for which brokers have offsets of a group, including the group's retry topic. If a master is down, its slave
        gets the request.
        """
        topics: set[str] = set()
        for name, broker in require_brokers(self.cluster()).items():
            if address := broker.replica("hint"):
                command = rpc.GET_CONSUME_STATS.request(consumerGroup=self._rpc_client.name_on_wire(group), bname=name)
                topics |= {q.topic for q in bodies.consume_stats(self._rpc_client.request(address, command).body)}
        scope = self._rpc_client.scope
        return sorted(scope.user_name(topic) for topic in topics if scope.is_reversible(topic))

    def broker_config(self, broker: str, allow_plain_text: bool = False) -> dict[str, Secret]:
        """Return all settings, among them passwords of users and the keys of the broker's own client. Raises ``OptionError`` if
        others on the network could read the settings. With ``allow_plain_text``, an explicit ``tls=false`` permits the request
        without TLS.
        """
        address = masters_of(self.cluster(), [broker])[broker]
        self._rpc_client.check_private(address, f"the settings of {broker}, with its passwords,", allow_plain_text)
        answer = self._rpc_client.request(address, rpc.GET_BROKER_CONFIG.request(bname=broker))
        return {name: Secret(value) for name, value in bodies.read_config(answer.body).items()}

    def update_broker_config(self, broker: str, values: Mapping[str, str]) -> None:
        """Change settings of a running broker, which also writes them to its configuration file."""
        self._request_master(broker, rpc.UPDATE_BROKER_CONFIG.request(bodies.write_config(values), bname=broker))

    def _request_master(self, broker: str, command: Command) -> Command:
        return self._rpc_client.request(masters_of(self.cluster(), [broker])[broker], command)


def consume_progress(
    rpc_client: RpcClient, route: TopicRoute, group_on_wire: str
) -> dict[MessageQueue, ConsumeProgress]:
    """The progress of a group in a topic. ``group_on_wire`` is the group's name on brokers, so the group may be in another
    namespace.
    """
    progress: dict[MessageQueue, ConsumeProgress] = {}
    for name, broker in route.brokers.items():
        if broker.master:
            command = rpc.GET_CONSUME_STATS.request(
                consumerGroup=group_on_wire, topic=rpc_client.name_on_wire(route.topic), bname=name
            )
            progress_of_broker = bodies.consume_stats(rpc_client.request(broker.master, command).body)
            progress.update(
                {MessageQueue(route.topic, q.broker_name, q.queue_id): p for q, p in progress_of_broker.items()}
            )
    return progress


def _configure_topic(
    rpc_client: RpcClient,
    topic: str,
    configs: Mapping[str, TopicConfig],
    masters: Mapping[str, str],
    deadline: Deadline,
) -> Iterator[tuple[str, str, Command]]:
    name_on_wire = rpc_client.name_on_wire(topic)
    return _change_each(
        masters,
        lambda name, address: rpc_client.request(
            address, put_topic_request(name_on_wire, name, configs[name]), deadline
        ),
    )


def _register_topic(
    admin: BaseAdmin, topic: str, shown_queues_and_perms: Mapping[str, _QueuesAndPerm | None], deadline: Deadline
) -> None:
    """Register the topic at name servers on behalf of its brokers. A second change request with the same configuration would
    not help, because a broker does not register a configuration that it already has. Repeats the registration until the
    brokers' configurations are equal to the registered configurations. ``shown_queues_and_perms`` has the queues and the
    permission that name servers have, by broker.

    A broker with ``enableSingleTopicRegister`` sends the same request (``registerSingleTopicAll``).
    """
    registered_configs, name_on_wire = dict[str, TopicConfig](), admin._rpc_client.name_on_wire(topic)
    while (
        not deadline.expired
        and (configs := _configs_to_register(admin, topic, shown_queues_and_perms, registered_configs))
        != registered_configs
    ):
        # Name servers before 5.0 reject this request. Then the caller waits longer for the route.
        with suppress(RocketMQError):
            make_request = partial(
                rpc.REGISTER_TOPIC_IN_NAMESRV.request, bodies.topic_registration(configs), topic=name_on_wire
            )
            if (
                not configs
                and not _queues_and_perms_in_route(_route_or_none(admin.routes, topic)).keys()
                - registered_configs.keys()
            ):
                # If no broker has the topic any more, the topic has been deleted.
                make_request = partial(rpc.DELETE_TOPIC_IN_NAMESRV.request, topic=name_on_wire)
            admin.name_servers.request_all_servers(make_request, deadline)
        registered_configs = configs


def _configs_to_register(
    admin: BaseAdmin,
    topic: str,
    shown_queues_and_perms: Mapping[str, _QueuesAndPerm | None],
    registered_configs: Mapping[str, TopicConfig],
) -> dict[str, TopicConfig]:
    """Return the current configurations to register, by broker. Omits a broker if ``wipeWritePerm`` may have removed the write
    permission of the broker.
    """
    configs = dict[str, TopicConfig]()
    for name, shown_queues_and_perm in shown_queues_and_perms.items():
        try:
            current_config = admin.topic_config(topic, name)
            config = replace(current_config, perm=current_config.perm & _broker_permission(admin, name))
            if name in registered_configs or shown_queues_and_perm != _queues_and_perm(
                replace(config, perm=config.perm & ~Perm.WRITE)
            ):
                configs[name] = config
        except (RocketMQError, ValueError) as e:
            # If the current configuration of the broker is unknown, register the previous one again, unless the topic is gone.
            configs |= (
                {}
                if name not in registered_configs or isinstance(e, TopicNotFound)
                else {name: registered_configs[name]}
            )
    return configs


_QueuesAndPerm = tuple[int, int, int]


def _queues_and_perm(config: TopicConfig | QueueData) -> _QueuesAndPerm:
    """The numbers of queues for reading and writing, and the permission."""
    return config.read_queues, config.write_queues, config.perm


def _change_each(
    masters: Mapping[str, str], change: Callable[[str, str], Command]
) -> Iterator[tuple[str, str, Command]]:
    """Change one master after the other; yields name, address and answer. If a master fails, the raised error names the masters
    that have applied the change.
    """
    changed_brokers: list[str] = []
    for name, address in masters.items():
        try:
            answer = change(name, address)
        except RocketMQError as e:
            add_partial_result(
                e,
                changed_brokers,
                {other: e if other == name else None for other in masters if other not in changed_brokers},
            )
            raise
        except KeyboardInterrupt as e:
            if len(masters) > 1:
                e.add_note(
                    _partial_result(
                        changed_brokers, [name], [other for other in masters if other not in (*changed_brokers, name)]
                    )
                )
            raise
        changed_brokers.append(name)
        yield name, address, answer


def add_partial_result(
    error: RocketMQError, changed_brokers: Sequence[str], errors_of_others: Mapping[str, RocketMQError | None]
) -> None:
    """Add to the remedy of ``error`` which brokers have applied a change, which may have applied it, and which have not.

    ``errors_of_others`` are the brokers that are not in ``changed_brokers``, with their errors. A broker that did not answer may
    have applied the change.
    """
    perhaps_changed_brokers = [
        name
        for name, error_of_broker in errors_of_others.items()
        if isinstance(error_of_broker, CallTimeout | ConnectionLost)
    ]
    unchanged_brokers = [name for name in errors_of_others if name not in perhaps_changed_brokers]
    if bool(changed_brokers) + bool(perhaps_changed_brokers) + bool(unchanged_brokers) > 1:
        note = _partial_result(changed_brokers, perhaps_changed_brokers, unchanged_brokers)
        error.remedy = f"{note}. {error.remedy}" if error.remedy else note


def _partial_result(
    changed_brokers: Sequence[str], perhaps_changed_brokers: Sequence[str], unchanged_brokers: Sequence[str]
) -> str:
    broker_lists = [("on ", changed_brokers), ("perhaps on ", perhaps_changed_brokers), ("not on ", unchanged_brokers)]
    return f"It is done {', and '.join(preposition + ', '.join(names) for preposition, names in broker_lists if names)}"


def _broker_permission(admin: BaseAdmin, broker: str) -> int:
    """The permission of a broker; -1 if it limits nothing. A broker's permission limits the permissions of its topics in
    routes.
    """
    read_and_write = Perm.READ | Perm.WRITE
    permission = bodies.config_number(admin.broker_config(broker), "brokerPermission")
    return -1 if permission is None or permission & read_and_write == read_and_write else permission


def put_topic_request(topic_on_wire: str, broker: str, config: TopicConfig) -> Command:
    """Return the request that creates or changes a topic on a broker. Attributes without a value stay as they are."""
    return rpc.UPDATE_AND_CREATE_TOPIC.request(
        topic=topic_on_wire,
        defaultTopic=AUTO_CREATE_TOPIC,
        readQueueNums=config.read_queues,
        writeQueueNums=config.write_queues,
        perm=config.perm,
        topicFilterType=config.filter_type,
        topicSysFlag=config.sys_flag,
        order=config.order,
        attributes=",".join(f"+{k}={v}" for k, v in config.attributes.items()) or None,
        bname=broker,
    )


def batch_attributes(attributes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``attributes`` with the type of a batch topic, which stores batches whole."""
    merged_attributes = dict(attributes or {})
    if merged_attributes.setdefault(QUEUE_TYPE, BATCH_QUEUE) != BATCH_QUEUE:
        raise OptionError(
            f"attribute {QUEUE_TYPE!r} is {merged_attributes[QUEUE_TYPE]!r}, but that of a batch topic is {BATCH_QUEUE!r}",
            remedy="Leave out this attribute, or create a topic that is not a batch topic",
        )
    return merged_attributes


def _route_or_none(routes: Routes, topic: str) -> TopicRoute | None:
    try:
        return routes.get(topic, 0.0)
    except (RouteNotFound, TopicNotFound):
        return None


def _raise_if_problem(problem: str | None) -> None:
    if problem:
        raise OptionError(problem)


def _queues_and_perms_in_route(route: TopicRoute | None) -> dict[str, _QueuesAndPerm]:
    return {data.broker_name: _queues_and_perm(data) for data in (route.queues if route is not None else ())}

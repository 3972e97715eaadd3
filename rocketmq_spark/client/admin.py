"""Administration of topics, groups and brokers, for commands and tests. Needs more permissions than reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, BATCH_QUEUE, FIRST_VERSION_WITH_ATTRIBUTES, QUEUE_TYPE, Perm
from rocketmq_spark.base.process import Closeable
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
from rocketmq_spark.options.parsing import Secret
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire import bodies, names, rpc
from rocketmq_spark.wire.bodies import ConsumeProgress, TopicConfig
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import DecodeBudget, decode_leniently

_ROUTE_POLL_S = 0.01
# Brokers register a change with their current version, and name servers ignore changes of a known topic with a version that they
# have. Of two changes at once, for example of another topic, one may never appear, so it is registered again after this time.
_REGISTER_AGAIN_S = 3.0
# The most messages that a broker returns for a key by default, and the limit of their decoded size.
_MAX_MESSAGES_OF_KEY, _MAX_DECODED_BYTES = 32, 16 << 20


class BaseAdmin(Closeable):
    """Sends administrative requests, over its own connections or over those of ``calls``, which ``close`` leaves open."""

    def __init__(self, name_server: str | Sequence[str], calls: RpcClient | None = None) -> None:
        addresses = name_server.replace(",", ";").split(";") if isinstance(name_server, str) else name_server
        self._owns_pool = calls is None
        self._calls = calls or RpcClient(Pool(ConnectOptions()))
        self.name_servers = NameServers(self._calls, addresses)
        self.routes = Routes(self.name_servers)
        self.brokers = RemotingOffsetReader(BrokerClient(self._calls, self.routes))

    def close(self) -> None:
        if self._owns_pool:
            self._calls.pool.close()

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
        _check(names.topic_problem(topic, self._calls.scope))
        deadline, masters = Deadline.after(timeout_s), masters_of(self.cluster(), brokers)
        reads = queues if read_queues is None else read_queues
        writes = queues if write_queues is None else write_queues
        config = TopicConfig(topic, reads, writes, perm, "SINGLE_TAG", 0, False, attributes or {})
        configs = dict.fromkeys(masters, config)
        for name, address, answer in _configure_topic(self._calls, topic, configs, masters, deadline):
            if attributes and answer.version < FIRST_VERSION_WITH_ATTRIBUTES:
                raise NotSupported(
                    f"broker {name} is older than RocketMQ 5.0 and ignored the attributes {', '.join(sorted(attributes))}",
                    address,
                    topic=topic,
                    remedy="The topic is an ordinary one there now; use newer brokers, or delete it",
                )
        return self._await_route(topic, configs, deadline)

    def queues_of(self, topic: str, brokers: Sequence[str] | None = None) -> dict[str, QueueData]:
        """The numbers of queues of a topic on each of ``brokers`` (default: all). Omits brokers without the topic."""
        route = _route_or_none(self.routes, topic)
        queues = route.queues if route is not None else ()
        return {data.broker_name: data for data in queues if brokers is None or data.broker_name in brokers}

    def resize_topic(self, topic: str, queues: int, brokers: Sequence[str], timeout_s: float = 30.0) -> TopicRoute:
        """Set the number of a topic's queues on each of ``brokers``, and wait until the route shows it. Messages in removed
        queues are not read until the queues are back.
        """
        current = {name: self.topic_config(topic, name) for name in brokers}
        resized = {
            name: replace(config, read_queues=queues, write_queues=queues, attributes={})
            for name, config in current.items()
        }
        return self.change_topic(topic, resized, timeout_s)

    def change_topic(self, topic: str, configs: Mapping[str, TopicConfig], timeout_s: float = 30.0) -> TopicRoute:
        """Set the configurations of a topic, by broker, and wait until the route shows them.

        Attributes that a configuration does not name stay as they are.
        """
        deadline = Deadline.after(timeout_s)
        for _ in _configure_topic(self._calls, topic, configs, masters_of(self.cluster(), sorted(configs)), deadline):
            pass
        return self._await_route(topic, configs, deadline)

    def _await_route(self, topic: str, configs: Mapping[str, TopicConfig], deadline: Deadline) -> TopicRoute:
        """Wait until the route shows the numbers of queues and the permissions that brokers report for the topic."""
        requested = {name: _shape(config) for name, config in configs.items()}
        expected, checked, next_registration = dict(requested), set[str](), deadline.within(_REGISTER_AGAIN_S)
        while True:
            route = _route_or_none(self.routes, topic)
            in_route = _shapes_in_route(route)
            if route is not None and all(in_route.get(name) == shape for name, shape in expected.items()):
                return route
            for name, (reads, writes, perm) in requested.items():
                if (
                    name not in checked
                    and in_route.get(name, ())[:2] == (reads, writes)
                    and in_route[name] != expected[name]
                ):
                    checked.add(name)
                    with suppress(RocketMQError, ValueError):  # only shortens the wait
                        expected[name] = reads, writes, perm & _broker_permission(self, name)
            if deadline.expired:
                remedy = "The brokers have applied the change; if a name server withholds write permission: mqadmin addWritePerm"
                raise CallTimeout("the name server does not show the topic in time", topic=topic, remedy=remedy)
            if next_registration.expired:
                missing = {name: in_route.get(name) for name, shape in expected.items() if in_route.get(name) != shape}
                _register_topic(self, topic, missing, deadline)
                next_registration = deadline.within(_REGISTER_AGAIN_S)
            deadline.pause(_ROUTE_POLL_S)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its data: on masters, then on slaves, then on name servers. Raises ``RouteNotFound`` if it is
        absent. The error of a slave or a name server is raised at the end.

        A slave deletes the topic with its master, but keeps its index, which a new topic of the same name would inherit. So
        slaves are asked, too, as by DeleteTopicSubCommand.
        """
        self.route(topic)
        on_wire = self._calls.on_wire(topic)
        cluster = self.cluster()

        def delete(name: str, address: str) -> Command:
            return self._calls.request(address, rpc.DELETE_TOPIC_IN_BROKER.request(topic=on_wire, bname=name))

        for _ in _change_each(masters_of(cluster), delete):
            pass
        failed: list[RocketMQError] = []
        for name, data in sorted(cluster.items()):
            for address in data.slaves:
                try:
                    delete(name, address)
                except RocketMQError as e:
                    failed.append(e)
        try:
            self.name_servers.request_at_all(lambda: rpc.DELETE_TOPIC_IN_NAMESRV.request(topic=on_wire))
        except RocketMQError as e:
            note = f"Topic {topic} is deleted on all masters, but this server may still have it"
            e.remedy = f"{note}. {e.remedy}" if e.remedy else note
            failed.append(e)
        self.routes.forget(topic)
        if failed:
            raise failed[0]

    def describe_topic(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """The bounds of every queue, including queues without read permission."""
        return self.brokers.bounds(self.route(topic).stored_queues(), Deadline.after(10.0))

    def topic_config(self, topic: str, broker: str) -> TopicConfig:
        on_wire = self._calls.on_wire(topic)
        try:
            return bodies.topic_config(
                self._ask(broker, rpc.GET_TOPIC_CONFIG.request(topic=on_wire, bname=broker)).body
            )
        except NotSupported:  # brokers before 5.0 only report all topics at once; a Proxy reports none
            return bodies.topic_config(self._ask(broker, rpc.GET_ALL_TOPIC_CONFIG.request(bname=broker)).body, on_wire)

    def create_group(
        self, group: str, brokers: Sequence[str] | None = None, settings: Mapping[str, object] | None = None
    ) -> None:
        """Create or change a consumer group on the masters of ``brokers`` (default: all).

        ``broker_config`` are fields of ``SubscriptionGroupConfig``, such as ``retryMaxTimes``; others have the brokers' defaults.
        """
        _check(names.group_problem(group, self._calls.scope))
        body = bodies.subscription_group(self._calls.on_wire(group), **(settings or {}))

        def put(name: str, address: str) -> Command:
            return self._calls.request(address, rpc.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP.request(body, bname=name))

        for _ in _change_each(masters_of(self.cluster(), brokers), put):
            pass

    def messages_of_key(self, topic: str, key: str, begin_ms: int, end_ms: int) -> list[ReceivedMessage]:
        """Return messages of a topic with a key that were stored in this period, from the indexes of its brokers. If there are
        many, returns some of them, most as they are stored: callers identify them by id. If a master is down, its slave is asked.
        """
        messages: list[ReceivedMessage] = []
        room = DecodeBudget(_MAX_DECODED_BYTES)
        for name, broker in self.route(topic).brokers.items():
            if (address := broker.replica("hint")) is None:
                continue
            command = rpc.QUERY_MESSAGE.request(
                topic=self._calls.on_wire(topic),
                key=key,
                maxNum=_MAX_MESSAGES_OF_KEY,
                beginTimestamp=begin_ms,
                endTimestamp=end_ms,
                bname=name,
            )
            try:
                answer = self._calls.request(address, command)
                messages += decode_leniently(answer.body, name, budget=room)
            except NotFound:
                continue
        return [message for message in messages if key in message.keys]  # the index only compares hashes

    def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeProgress]:
        """The progress of a group in all queues of the topic."""
        return consume_progress(self._calls, self.route(topic), self._calls.on_wire(group))

    def consumed_topics(self, group: str) -> list[str]:
        """Topics for which brokers have offsets of a group, with its retry topic. If a master is down, its slave is asked."""
        topics: set[str] = set()
        for name, broker in require_brokers(self.cluster()).items():
            if address := broker.replica("hint"):
                command = rpc.GET_CONSUME_STATS.request(consumerGroup=self._calls.on_wire(group), bname=name)
                topics |= {q.topic for q in bodies.consume_stats(self._calls.request(address, command).body)}
        scope = self._calls.scope
        return sorted(scope.user_name(topic) for topic in topics if scope.is_reversible(topic))

    def broker_config(self, broker: str, allow_plain_text: bool = False) -> dict[str, Secret]:
        """Return all settings, among them passwords of users and the keys of the broker's own client.

        Raises ``OptionError`` if the network could read them. With ``allow_plain_text``, an explicit ``tls=false`` permits
        the request without TLS.
        """
        address = masters_of(self.cluster(), [broker])[broker]
        self._calls.check_private(address, f"the settings of {broker}, with its passwords,", allow_plain_text)
        answer = self._calls.request(address, rpc.GET_BROKER_CONFIG.request(bname=broker))
        return {name: Secret(value) for name, value in bodies.read_config(answer.body).items()}

    def update_broker_config(self, broker: str, values: Mapping[str, str]) -> None:
        """Change settings of a running broker. It also rewrites its configuration file."""
        self._ask(broker, rpc.UPDATE_BROKER_CONFIG.request(bodies.write_config(values), bname=broker))

    def _ask(self, broker: str, command: Command) -> Command:
        return self._calls.request(masters_of(self.cluster(), [broker])[broker], command)


def consume_progress(calls: RpcClient, route: TopicRoute, group_on_wire: str) -> dict[MessageQueue, ConsumeProgress]:
    """The progress of a group in a topic. The group has its name on brokers, so it may be in another namespace."""
    progress: dict[MessageQueue, ConsumeProgress] = {}
    for name, broker in route.brokers.items():
        if broker.master:
            command = rpc.GET_CONSUME_STATS.request(
                consumerGroup=group_on_wire, topic=calls.on_wire(route.topic), bname=name
            )
            of_broker = bodies.consume_stats(calls.request(broker.master, command).body)
            progress.update({MessageQueue(route.topic, q.broker_name, q.queue_id): p for q, p in of_broker.items()})
    return progress


def _configure_topic(
    calls: RpcClient, topic: str, configs: Mapping[str, TopicConfig], masters: Mapping[str, str], deadline: Deadline
) -> Iterator[tuple[str, str, Command]]:
    on_wire = calls.on_wire(topic)
    return _change_each(masters, lambda name, at: calls.request(at, put_topic(on_wire, name, configs[name]), deadline))


def _register_topic(admin: BaseAdmin, topic: str, shown: Mapping[str, _Shape | None], deadline: Deadline) -> None:
    """Register the topic at name servers on behalf of its brokers, which do not register a change that changes nothing. Repeats
    until their configurations stay the same. ``shown`` is what name servers have, by broker.

    A broker with ``enableSingleTopicRegister`` sends the same request (``registerSingleTopicAll``).
    """
    registered, on_wire = dict[str, TopicConfig](), admin._calls.on_wire(topic)
    while not deadline.expired and (configs := _configs_to_register(admin, topic, shown, registered)) != registered:
        with suppress(RocketMQError):  # only shortens the wait; servers before 5.0 do not support it
            make_request = partial(
                rpc.REGISTER_TOPIC_IN_NAMESRV.request, bodies.topic_registration(configs), topic=on_wire
            )
            if not configs and not _shapes_in_route(_route_or_none(admin.routes, topic)).keys() - registered.keys():
                # The topic has been deleted.
                make_request = partial(rpc.DELETE_TOPIC_IN_NAMESRV.request, topic=on_wire)
            admin.name_servers.request_at_all(make_request, deadline)
        registered = configs


def _configs_to_register(
    admin: BaseAdmin, topic: str, shown: Mapping[str, _Shape | None], registered: Mapping[str, TopicConfig]
) -> dict[str, TopicConfig]:
    """The current configurations to register, without brokers whose write permission ``wipeWritePerm`` may have removed."""
    configs = dict[str, TopicConfig]()
    for name, shown_shape in shown.items():
        try:
            current = admin.topic_config(topic, name)
            config = replace(current, perm=current.perm & _broker_permission(admin, name))
            if name in registered or shown_shape != _shape(replace(config, perm=config.perm & ~Perm.WRITE)):
                configs[name] = config
        except (RocketMQError, ValueError) as e:  # unknown: keep what was registered, unless the topic is gone
            configs |= {} if name not in registered or isinstance(e, TopicNotFound) else {name: registered[name]}
    return configs


_Shape = tuple[int, int, int]


def _shape(config: TopicConfig | QueueData) -> _Shape:
    """The numbers of queues for reading and writing, and the permission."""
    return config.read_queues, config.write_queues, config.perm


def _change_each(
    masters: Mapping[str, str], change: Callable[[str, str], Command]
) -> Iterator[tuple[str, str, Command]]:
    """Change one master after the other; yields name, address and answer. An error names the masters that have changed."""
    done: list[str] = []
    for name, address in masters.items():
        try:
            answer = change(name, address)
        except RocketMQError as e:
            add_partial_result(e, done, {other: e if other == name else None for other in masters if other not in done})
            raise
        except KeyboardInterrupt as e:
            if len(masters) > 1:
                e.add_note(_partial_result(done, [name], [other for other in masters if other not in (*done, name)]))
            raise
        done.append(name)
        yield name, address, answer


def add_partial_result(error: RocketMQError, done: Sequence[str], others: Mapping[str, RocketMQError | None]) -> None:
    """Add to the remedy of ``error`` which brokers have applied a change, which may have, and which have not.

    ``others`` are the brokers that are not ``done``, with their errors. A broker that did not answer may have applied the change.
    """
    perhaps = [
        name for name, error_of_broker in others.items() if isinstance(error_of_broker, CallTimeout | ConnectionLost)
    ]
    rest = [name for name in others if name not in perhaps]
    if bool(done) + bool(perhaps) + bool(rest) > 1:
        note = _partial_result(done, perhaps, rest)
        error.remedy = f"{note}. {error.remedy}" if error.remedy else note


def _partial_result(done: Sequence[str], perhaps: Sequence[str], rest: Sequence[str]) -> str:
    where = [("on ", done), ("perhaps on ", perhaps), ("not on ", rest)]
    return f"It is done {', and '.join(preposition + ', '.join(names) for preposition, names in where if names)}"


def _broker_permission(admin: BaseAdmin, broker: str) -> int:
    """The permission of a broker, which limits those of its topics in routes; -1 if it limits nothing."""
    both = Perm.READ | Perm.WRITE
    permission = bodies.config_number(admin.broker_config(broker), "brokerPermission")
    return -1 if permission is None or permission & both == both else permission


def put_topic(topic_on_wire: str, broker: str, config: TopicConfig) -> Command:
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
    merged = dict(attributes or {})
    if merged.setdefault(QUEUE_TYPE, BATCH_QUEUE) != BATCH_QUEUE:
        raise OptionError(
            f"attribute {QUEUE_TYPE!r} is {merged[QUEUE_TYPE]!r}, but that of a batch topic is {BATCH_QUEUE!r}",
            remedy="Leave one of them out",
        )
    return merged


def _route_or_none(routes: Routes, topic: str) -> TopicRoute | None:
    try:
        return routes.get(topic, 0.0)
    except (RouteNotFound, TopicNotFound):
        return None


def _check(problem: str | None) -> None:
    if problem:
        raise OptionError(problem)


def _shapes_in_route(route: TopicRoute | None) -> dict[str, _Shape]:
    return {data.broker_name: _shape(data) for data in (route.queues if route is not None else ())}

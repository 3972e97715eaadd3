"""Topics, groups and statistics, for commands and tests. Needs more rights than reading and writing do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, BATCH_QUEUE, FIRST_WITH_ATTRIBUTES, QUEUE_TYPE, Perm
from rocketmq_spark.base.process import Closing
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
from rocketmq_spark.wire.messages import DecodeRoom, decode_leniently

_ROUTE_POLL_S = 0.01
# Brokers register a change with the version of the moment, and name servers leave out changes of a topic that they know if they
# have that version: of two changes at once (another topic, a group that begins) one may never show.
_REGISTER_AGAIN_S = 3.0
# More a broker does not give unless it is configured to.
_MAX_MESSAGES_OF_KEY, _MAX_DECODED_BYTES = 32, 16 << 20


class BaseAdmin(Closing):
    """Administration over connections of its own, or over those of ``calls``, which ``close`` leaves open."""

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
        """All topics, system ones too."""
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

        Those of a batch topic are ``batch_attributes()``.
        """
        _check(names.topic_problem(topic, self._calls.scope))
        deadline, masters = Deadline.after(timeout_s), masters_of(self.cluster(), brokers)
        reads = queues if read_queues is None else read_queues
        writes = queues if write_queues is None else write_queues
        config = TopicConfig(topic, reads, writes, perm, "SINGLE_TAG", 0, False, attributes or {})
        configs = dict.fromkeys(masters, config)
        for name, address, answer in _configure_topic(self._calls, topic, configs, masters, deadline):
            if attributes and answer.version < FIRST_WITH_ATTRIBUTES:
                raise NotSupported(
                    f"broker {name} is older than RocketMQ 5.0 and leaves attributes out: {', '.join(sorted(attributes))}",
                    address,
                    topic=topic,
                    remedy="The topic is an ordinary one there now; use newer brokers, or delete it",
                )
        return self._await_route(topic, configs, deadline)

    def queues_of(self, topic: str, brokers: Sequence[str] | None = None) -> dict[str, QueueData]:
        """How many queues a topic has on each of ``brokers`` (default: all); those where it is not are left out."""
        route = _route_or_none(self.routes, topic)
        queues = route.queues if route is not None else ()
        return {data.broker_name: data for data in queues if brokers is None or data.broker_name in brokers}

    def resize_topic(self, topic: str, queues: int, brokers: Sequence[str], timeout_s: float = 30.0) -> TopicRoute:
        """Give a topic so many queues on each of ``brokers``, where it is, and wait until the route shows them. What lies in
        queues that it has no more is not read until it has them again.
        """
        current = {name: self.topic_config(topic, name) for name in brokers}
        resized = {
            name: replace(config, read_queues=queues, write_queues=queues, attributes={})
            for name, config in current.items()
        }
        return self.change_topic(topic, resized, timeout_s)

    def change_topic(self, topic: str, configs: Mapping[str, TopicConfig], timeout_s: float = 30.0) -> TopicRoute:
        """Give a topic these configurations, by the names of brokers that have it, and wait until the route shows them.

        Attributes that a configuration does not name stay as they are.
        """
        deadline = Deadline.after(timeout_s)
        for _ in _configure_topic(self._calls, topic, configs, masters_of(self.cluster(), sorted(configs)), deadline):
            pass
        return self._await_route(topic, configs, deadline)

    def _await_route(self, topic: str, configs: Mapping[str, TopicConfig], deadline: Deadline) -> TopicRoute:
        """Until it shows the queues for reading and writing, and the permissions, as far as a broker has them itself."""
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
                    with suppress(RocketMQError, ValueError):  # it is only to know earlier
                        expected[name] = reads, writes, perm & _broker_permission(self, name)
            if deadline.expired:
                remedy = "Brokers have taken it; mqadmin addWritePerm opens one that is closed for writers on name servers alone"
                raise CallTimeout("the name server does not show the topic in time", topic=topic, remedy=remedy)
            if next_registration.expired:
                missing = {name: in_route.get(name) for name, shape in expected.items() if in_route.get(name) != shape}
                _register_topic(self, topic, missing, deadline)
                next_registration = deadline.within(_REGISTER_AGAIN_S)
            deadline.pause(_ROUTE_POLL_S)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its data, on masters, then on slaves, then on name servers. Absent topics raise ``RouteNotFound``;
        an error of a slave or a name server is raised when all the others are done.

        A slave drops the topic with its master, but not the index, which a topic of the same name would inherit there
        (DeleteTopicSubCommand asks both kinds, too).
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
            note = f"Topic {topic} is deleted on all masters, but this name server may show it"
            e.remedy = f"{note}. {e.remedy}" if e.remedy else note
            failed.append(e)
        self.routes.forget(topic)
        if failed:
            raise failed[0]

    def describe_topic(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Offsets of every queue, whether or not it may be read now."""
        return self.brokers.bounds(self.route(topic).kept(), Deadline.after(10.0))

    def topic_config(self, topic: str, broker: str) -> TopicConfig:
        on_wire = self._calls.on_wire(topic)
        try:
            return bodies.topic_config(
                self._ask(broker, rpc.GET_TOPIC_CONFIG.request(topic=on_wire, bname=broker)).body
            )
        except NotSupported:  # brokers before 5.0 tell of all topics at once; a Proxy says neither
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
        """Messages of a topic with a key, stored in this time, as the indexes of its brokers have them: some of many, most of
        them as they are stored: callers need ids. Where a master is away its slave is asked.
        """
        messages: list[ReceivedMessage] = []
        room = DecodeRoom(_MAX_DECODED_BYTES)
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
                messages += decode_leniently(answer.body, name, room=room)
            except NotFound:
                continue
        return [message for message in messages if key in message.keys]  # what an index finds has its hash

    def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeProgress]:
        """How far a group is, over all brokers of the topic."""
        return consume_progress(self._calls, self.route(topic), self._calls.on_wire(group))

    def consumed_topics(self, group: str) -> list[str]:
        """Topics of which brokers keep offsets of a group, its retry topic among them; a slave while its master is away."""
        topics: set[str] = set()
        for name, broker in require_brokers(self.cluster()).items():
            if address := broker.replica("hint"):
                command = rpc.GET_CONSUME_STATS.request(consumerGroup=self._calls.on_wire(group), bname=name)
                topics |= {q.topic for q in bodies.consume_stats(self._calls.request(address, command).body)}
        scope = self._calls.scope
        return sorted(scope.plain(topic) for topic in topics if scope.reaches(topic))

    def broker_config(self, broker: str, allow_plain_text: bool = False) -> dict[str, Secret]:
        """Return all settings, among them passwords of users and the keys of the broker's own client.

        Raises ``OptionError`` if the network could read them. With ``allow_plain_text``, an explicit ``tls=false`` permits that.
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
    """How far a group is, by its name on brokers: one outside the namespace or environment has no other."""
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
    """Tell name servers what these brokers have, until it is what they have still: a broker that is put what it has already does
    not (``registerSingleTopicAll`` of a broker's ``enableSingleTopicRegister`` is the same request). ``shown`` is what they say.
    """
    registered, on_wire = dict[str, TopicConfig](), admin._calls.on_wire(topic)
    while not deadline.expired and (configs := _configs_to_register(admin, topic, shown, registered)) != registered:
        with suppress(RocketMQError):  # it is only to show earlier, and those before 5.0 do not know the request
            make_request = partial(rpc.REGISTER_TOPIC_IN_NAMESRV.request, bodies.topic_queues(configs), topic=on_wire)
            if (
                not configs and not _shapes_in_route(_route_or_none(admin.routes, topic)).keys() - registered.keys()
            ):  # it has been deleted
                make_request = partial(rpc.DELETE_TOPIC_IN_NAMESRV.request, topic=on_wire)
            admin.name_servers.request_at_all(make_request, deadline)
        registered = configs


def _configs_to_register(
    admin: BaseAdmin, topic: str, shown: Mapping[str, _Shape | None], registered: Mapping[str, TopicConfig]
) -> dict[str, TopicConfig]:
    """Without brokers that somebody may have closed for writers on the name server (``wipeWritePerm``)."""
    configs = dict[str, TopicConfig]()
    for name, shown_shape in shown.items():
        try:
            current = admin.topic_config(topic, name)
            config = replace(current, perm=current.perm & _broker_permission(admin, name))
            if name in registered or shown_shape != _shape(replace(config, perm=config.perm & ~Perm.WRITE)):
                configs[name] = config
        except (RocketMQError, ValueError) as e:  # nobody can know what it has, unless it has nothing
            configs |= {} if name not in registered or isinstance(e, TopicNotFound) else {name: registered[name]}
    return configs


_Shape = tuple[int, int, int]


def _shape(of: TopicConfig | QueueData) -> _Shape:
    """How many queues for reading and writing, and the permission."""
    return of.read_queues, of.write_queues, of.perm


def _change_each(
    masters: Mapping[str, str], change: Callable[[str, str], Command]
) -> Iterator[tuple[str, str, Command]]:
    """Name, address and answer of each that has done it, one by one. The error of one that has not names those."""
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
    """Where some brokers have taken a change, or perhaps, its error names all, so that nobody takes it for none.

    ``others`` are the others, with their errors: one that was asked and did not answer may have it.
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
    return f"It is done {', and '.join(how + ', '.join(names) for how, names in where if names)}"


def _broker_permission(admin: BaseAdmin, broker: str) -> int:
    """What a broker lets routes show of any topic's permission: all of it, unless it is closed for readers or writers."""
    both = Perm.READ | Perm.WRITE
    permission = bodies.setting_number(admin.broker_config(broker), "brokerPermission")
    return -1 if permission is None or permission & both == both else permission


def put_topic(topic_on_wire: str, broker: str, config: TopicConfig) -> Command:
    """The request that makes a topic on a broker, or changes it. Attributes that are not named stay as they are."""
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
    """``attributes`` with the one that makes a topic store batches whole."""
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

"""Small Protocols with the methods of a transport that other packages may call. They are about sends and pulls, not about frames.

Other packages call no other methods of a client. A transport implements the Protocols that it supports. Every method raises only
``RocketMQError``s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RocketMQError, RouteNotFound
from rocketmq_spark.model import (
    BatchStorage,
    BrokerData,
    Filter,
    LogState,
    Message,
    MessageQueue,
    PullAnswer,
    PullRequest,
    QueueBounds,
    ReceivedMessage,
    Reply,
    SendRequest,
    SendResult,
    SpoolMetrics,
    TopicRoute,
)
from rocketmq_spark.model.membership import Membership, RequestCallback
from rocketmq_spark.model.message import GroupPolicy, PoppedMessage, PopTarget
from rocketmq_spark.model.send import HalfCheck, HalfPlace, MessageEncoder, Resent, SpooledSend, TransactionState

OnSent = Callable[[SendResult | RocketMQError], None]
OnPulled = Callable[[PullAnswer | RocketMQError], None]
OnError = Callable[[RocketMQError, MessageQueue], None]


class Sender(Protocol):
    """The methods that producers call. No method takes longer than its deadline."""

    @property
    def encoder(self) -> MessageEncoder:
        """The encoder of batches for this transport."""

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """Return the queues that accept sends, in Java's publish order. Returns the same object while the route is unchanged.

        Raises ``RouteNotFound`` if the topic has no route or no writable queue. If the topic exists, the error has no
        ``broker_code``. Raises ``BrokerNotFound`` if no broker of the topic has a master.
        """

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """Return the readable queues, sorted. Some queues may not accept sends now."""

    def partition_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """Return the queues in the order of Kafka's partitions: the queue at index n is partition n. Some queues may not accept
        sends now.

        The route is fetched; if no name server answers, the cached route is used. Raises ``BrokerNotFound`` while the route may
        lack queues, because name servers do not list a broker that had queues of the topic and may be up.
        """

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        """Return the error with the names of similar topics added, if the transport can list topics."""

    def has_broker(self) -> bool:
        """Whether any broker is registered. If a broker is registered, a topic without a route does not exist."""

    def has_master(self) -> bool:
        """Whether any master is registered. While no master is registered, it is unknown which topics exist."""

    def max_timer_delays_ms(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> Mapping[str, int]:
        """Return the longest timer delay of each broker in ms, 0 if it has no timers. Omits brokers that do not answer."""

    def has_online_consumer(self, topic: str, deadline: Deadline) -> bool:
        """Whether any consumer group has a member that subscribes to the topic. Raises ``RouteNotFound``."""

    def batch_storage(self, topic: str, deadline: Deadline) -> BatchStorage | None:
        """Return how brokers store the batches of a topic. Returns None if unknown: a Proxy does not report the storage."""

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        """Send to one queue, without retries. ``SendResult.msg_id`` stays empty: the producer sets it."""

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: OnSent) -> None:
        """As ``send``, without waiting. Calls ``done`` exactly once, on any thread; ``done`` must not block. Never raises."""

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        """Write the request to the socket. The server does not answer."""

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        """Cancel a timer message that is not delivered yet; returns its id."""

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Commit or roll back a half message; returns whether its broker confirmed. Two commits deliver the message twice."""

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        """Whether the master of ``broker_name`` answers GET_MAX_OFFSET of queue 0. Returns False if no address of the broker is
        known.
        """

    @property
    def client_id(self) -> str:
        """The client id under which this process is registered. All objects that use the connections of this client have the
        same id.
        """

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        """Join a producer group. Heartbeats report the group soon, and then every ``heartbeat_s`` seconds. If ``heartbeat_s``
        is 0, no heartbeat is sent.

        With ``check``, heartbeats go to all brokers of the cluster, which call ``check`` for undecided half messages. Returns
        a function that leaves the group. If this client has no other member of the group, the function also unregisters the
        group, now or later. Failures of single brokers are logged.
        """

    def refresh_routes(self, deadline: Deadline) -> None:
        """Refresh the routes of all topics in use, and drop connections to brokers that no route contains."""


class Replies(Protocol):
    """The methods for requests and replies, which a Proxy does not support."""

    def join(self, group: str, heartbeat_s: float) -> Callable[[Deadline], None]:
        """Join a group. Its heartbeats go to all brokers, because any broker may forward a reply.

        Returns a function that leaves the group.
        """

    def announce(self, deadline: Deadline) -> None:
        """Send the heartbeat to all brokers now. Logs failures of single brokers. Raises ``NotSupported`` if a Proxy answers."""

    def expect(self, correlation_id: str, done: Callable[[Reply | RocketMQError], object]) -> Callable[[], None]:
        """Call ``done`` at most once, with the reply to the request that has this correlation id. ``done`` may block.

        Returns a function. After you have called this function, ``done`` is not called.
        """

    def reply(self, request: ReceivedMessage, reply: Message, group: str, deadline: Deadline) -> None:
        """Send ``reply``, whose topic is ignored, through a broker. Raises ``MessageRefused`` if the message ``request`` does
        not ask for a reply.
        """


class Resender(Protocol):
    """Sends the records of a spool."""

    def batch_predicate(self, first_send: SpooledSend) -> Callable[[SpooledSend], bool]:
        """Return a function that decides about sends, in their order: it accepts a send if the batch of ``first_send`` has the
        same destination and room for the send.
        """

    def join_sends(self, sends: Sequence[SpooledSend]) -> SpooledSend:
        """Return one batch of sends that ``batch_predicate`` accepted, in their order. A broker stores the whole batch or
        nothing.
        """

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        """Send with retries. Calls ``done`` once, on any thread; ``done`` must not block."""

    def close(self, deadline: Deadline) -> None:
        """Wait for answers until ``deadline``; sends without an answer fail."""


class Spool(Protocol):
    """Stores messages that a producer cannot send for temporary reasons, and sends them later."""

    @property
    def needs_answers(self) -> bool:
        """Whether ``note_accepted_send`` has an effect now. The engine reads this after each send."""

    def has_earlier_record(self, send: SpooledSend) -> bool:
        """Whether a stored record must be sent before ``send``."""

    def keep(self, sends: Sequence[SpooledSend]) -> None:
        """Store ``sends`` durably. Raises ``SpoolFull`` if the spool has no room for the sends, and ``SpoolError`` if the spool
        cannot write.
        """

    def note_accepted_send(self, queue: MessageQueue) -> None:
        """Note that the broker of ``queue`` accepted a send. Records that wait for this broker become due."""

    def metrics(self) -> SpoolMetrics:
        """Return the current figures."""

    def close(self, deadline: Deadline) -> None:
        """Send due records until ``deadline``, keep the rest on disk, and unlock the folder."""


class RouteReader(Protocol):
    """Topics, and the brokers that have them."""

    def get(self, topic: str, max_age_s: float = 30.0, deadline: Deadline | None = None) -> TopicRoute:
        """Return the route, at most ``max_age_s`` seconds old; an unchanged route stays the same object.

        Raises ``RouteNotFound``.
        """

    def refresh(self, topics: Iterable[str], max_age_s: float, deadline: Deadline | None = None) -> frozenset[str]:
        """Refresh the routes that are older than ``max_age_s`` seconds, in parallel, and return their topics.

        If only one route is old, nothing is refreshed, because ``get`` refreshes a single route. Failures are not reported,
        because ``get`` reports them.
        """

    def fetch(self, topic: str, deadline: Deadline | None = None) -> TopicRoute:
        """Return the route from the name server, and do not cache it. Raises ``RouteNotFound``."""

    def unlisted_queues(self, topic: str, deadline: Deadline) -> list[MessageQueue]:
        """Return the queues that earlier routes contain and the current route lacks, if their broker still has the topic; sorted.
        After a restart of a name server, a route lacks the brokers that have not registered yet. If a broker gives no clear
        answer before ``deadline``, its queues are returned.
        """

    def address(self, broker_name: str, read_from: str = "master") -> str:
        """Return the address of a broker from the cached routes. Raises ``BrokerNotFound``."""

    def topics(self, deadline: Deadline | None = None) -> list[str]:
        """Return all topics, including system topics. Raises ``NotSupported`` if the server cannot list them."""

    def cluster(self, deadline: Deadline | None = None) -> dict[str, BrokerData]:
        """Return all brokers by name. Raises ``NotSupported`` if the server cannot list them."""

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        """Return the error with the names of similar topics added."""


class OffsetReader(Protocol):
    """Offsets of queues, and facts about the messages in the queues."""

    @property
    def late_brokers(self) -> frozenset[str]:
        """The brokers that an earlier call of ``bounds`` or ``commit_each`` did not wait for, and that have not answered yet,
        not even with an error.
        """

    def connection(self, broker_name: str) -> object:
        """Return a token of the connection to the broker's master. If two calls return equal tokens, the connection was not
        interrupted between the calls. Returns None if this client has not connected to the master yet, or if no route has a
        master.
        """

    def bounds(
        self, queues: Iterable[MessageQueue], deadline: Deadline, on_error: OnError | None = None,
        read_from: str = "master", grace_s: float | None = None,
    ) -> dict[MessageQueue, QueueBounds]:  # fmt: skip
        """Return minimum and maximum offset of each queue. Omits queues that brokers do not report.

        If a request fails, ``on_error`` is called with one queue of the request, and the result omits all queues of the request;
        without ``on_error``, the error is raised. With ``grace_s``, this method does not wait for the slowest brokers: it
        returns when some brokers have answered, and no other answer has come for ``grace_s`` seconds. The queues of a broker
        that has not answered keep the bounds of its previous answer.
        """

    def first_kept_offsets(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline, on_error: OnError
    ) -> dict[MessageQueue, int]:
        """Return the first offset that can be pulled from each queue of a compaction topic. This offset may be below the minimum
        offset.
        """

    def max_offsets(self, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        """Return the end offset of each queue, including queues that are no longer readable."""

    def read_queue_count(self, topic: str, broker_name: str, deadline: Deadline) -> int | None:
        """Return the broker's number of read queues of a topic; None if unknown (a Proxy, an old broker, no permission)."""

    def search_offsets(
        self, times_ms: Mapping[MessageQueue, int], deadline: Deadline, on_error: OnError | None = None,
        group: str | None = None,
    ) -> dict[MessageQueue, int]:  # fmt: skip
        """Return for each queue the offset of the first message that was stored at or after the queue's time. An offset may be
        below the minimum offset; callers then use the minimum offset.

        ``on_error`` is as in ``bounds``. Some brokers answer with a wrong offset. With ``group``, such an offset is corrected:
        messages are pulled as this group to find the right offset.
        """

    def committed(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue, None for a queue without one."""

    def store_time_ms(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> int | None:
        """Return the store time of the message at ``offset`` in ms since 1970; None if no message has that offset."""

    def store_times_ms(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, read_from: str = "master",
        on_error: OnError | None = None,
    ) -> dict[MessageQueue, int]:  # fmt: skip
        """Like ``store_time_ms``, for many queues. Omits queues without a message at their offset. ``on_error`` is as in
        ``bounds``.
        """

    def sample(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> tuple[int, int]:
        """Pull a few messages at ``offset``. Returns their size in bytes, and the number of offsets that they span; (0, 0) if
        there are no messages.
        """

    def log_states(self, brokers: Sequence[str], deadline: Deadline) -> dict[str, LogState | RocketMQError]:
        """Return the state of the commit log of each broker's master, or the broker's error. The requests run in parallel."""

    def broker_indexes_after_replication(self, broker_name: str, deadline: Deadline) -> bool:
        """Whether a broker indexes messages only after its replicas have confirmed them. Returns True if unknown."""

    def is_proxy(self, topic: str, broker_name: str, deadline: Deadline) -> bool:
        """Whether a Proxy answers for the broker."""

    def check_filter(self, broker_name: str, group: str, topic: str, sql: str, deadline: Deadline) -> bool:
        """Have a broker compile an SQL expression. Raises ``BrokerError`` with the broker's text if the expression is invalid.

        Returns False if a Proxy answers for the broker, because a Proxy compiles no expressions.
        """


class SourcePorts(NamedTuple):
    """The ports with which a source plans its batches."""

    routes: RouteReader
    offsets: OffsetReader


class OffsetCommitter(Protocol):
    """Commits offsets of a group."""

    def commit_each(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        """Commit the next offset of each queue; returns the errors of the queues that failed. ``grace_s`` is as in ``bounds``."""

    def members(self, group: str, broker_name: str, deadline: Deadline) -> list[str]:
        """Return the client ids of the members of ``group``, as one broker knows them."""

    def lists_all_members(self, broker_name: str) -> bool:
        """Whether ``members`` returns all members. A Proxy does not see the members that connect directly to its broker."""

    def create_group(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Create the group on the brokers of these queues. If the group exists, the brokers' defaults replace its settings.

        A Proxy does not forward the request. Behind a Proxy, a pull at these offsets makes the brokers create the group. Raises
        ``GroupNotFound`` with a remedy if this user may not create the group, or if brokers behind a Proxy do not create it.
        """

    def create_retry_topic(self, group: str, timeout_s: float) -> None:
        """Create the retry topic, by which tools find a group; returns when the name server has its route."""


class PullSource(Protocol):
    """The methods for reading ranges of offsets, except the pulls themselves, which have connections of their own."""

    def name_on_wire(self, name: str) -> str:
        """Return the topic or group as brokers know it, with its namespace."""

    def signing_keys(self) -> tuple[str, str, str | None] | None:
        """Return the access key, secret key and token that sign the next pulls; None if requests are not signed."""

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        """Return the current route. Each request takes at most the request timeout."""

    def is_compacted(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        """Whether the topic is a compaction topic, in which offsets without a message are normal."""

    def stores_batches(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        """Whether brokers cannot filter single messages of the topic, as in a batch or compaction topic. Returns True if the type
        of the topic is unknown.
        """


class GroupMember(Protocol):
    """The methods that a member of a consumer group calls. Topics and groups have the user's names, without a namespace."""

    @property
    def client_id(self) -> str:
        """The client id of this process, which brokers and the other members see."""

    @property
    def receives_notices(self) -> bool:
        """Whether brokers report changes of the group to its members. A Proxy reports no changes."""

    def join(
        self, group: str, membership: Callable[[], Membership], on_request: RequestCallback, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        """Join the group. Each heartbeat reports ``membership()``; requests of brokers go to ``on_request``.

        Returns a function that leaves and unregisters the member; failures of single brokers are logged. Raises
        ``LocalProtocolError`` if this process already has a member of the group.
        """

    def heartbeat(self, deadline: Deadline) -> None:
        """Send a heartbeat to all brokers of the cached routes. Failures of single brokers are logged."""

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """Return the readable queues, sorted. Without ``refresh``, these are the cached queues if no name server answers.

        Raises ``RouteNotFound`` if the topic does not exist. Returns the same object while the route is unchanged.
        """

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        """Return the client ids of the group's members that a random broker of the topic knows."""

    def filters(self, group: str, topic: str, deadline: Deadline, broker_name: str = "") -> dict[str, Filter]:
        """Return the group's subscriptions, as the last heartbeat of a member reported them to this broker; without
        ``broker_name``, to a random broker of the topic.
        """

    def consume_modes(self, group: str, topics: Iterable[str], deadline: Deadline) -> Mapping[tuple[str, str], str]:
        """Return the consume mode that operators have set for the group, ``PULL`` or ``POP``, for each topic and broker.

        The result omits a topic and broker if the mode is unknown: brokers before 5.0 and Proxies do not report the mode.
        """

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        """Return the committed offset. Returns None only if the master reports that the queue has no committed offset: the same
        report of a slave is not proof, because a slave may lack recent offsets.

        With ``zero_if_new``, the broker returns 0 for a queue without a committed offset if the queue's first message is still in
        memory (``ConsumerManageProcessor``). Java's members also set this flag, so that no member skips the messages of a new
        topic.
        """

    def connection(self, broker_name: str) -> object:
        """As ``OffsetReader.connection``, but None while there is no connection."""

    def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
        """Return the first and the end offset that the master reports.

        With ``group``, the first offset of a queue of a compaction topic is the first one that the group can pull.
        """

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        """Like ``OffsetReader.search_offsets``, but for one queue."""

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        """Commit offsets; returns the errors of the queues that failed. Without a master, a slave stores the offsets.

        If a broker is allowed to create groups, it creates an unknown group first.
        """

    def pull(self, request: PullRequest, deadline: Deadline, done: OnPulled) -> None:
        """Send one long poll. Calls ``done`` exactly once, on any thread; ``done`` must not block. Never raises, never blocks."""

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        """Return the message to the broker for a later delivery (request 36). With ``delay_level`` 0, the broker chooses the
        delay. With -1, the message becomes a dead letter.
        """

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        """Send a copy to the retry topic, with delay level 3 + ``reconsume_times``. Raises ``MessageRefused`` if no broker stores
        it.
        """

    def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        """Lock queues for 60 s (a setting of brokers); returns the locked queues. Failures of single brokers are logged."""

    def unlock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
        """Release the locks. Failures of single brokers are logged."""


class PopMember(Protocol):
    """The methods that a consumer calls to pop messages (POP). A member that pops has no queues: a Proxy delivers messages one by
    one.

    A message that is not acknowledged within its invisible time is delivered again, to any member of the group.
    """

    @property
    def client_id(self) -> str:
        """The client id of this consumer at the Proxy."""

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        """Report the subscriptions now, and again on each new connection. The first call, and the first call after ``close``,
        joins the group.

        Returns when a Proxy has confirmed the subscriptions. Raises ``RocketMQError`` if no Proxy confirms the subscriptions in
        time.
        """

    def policy(self) -> GroupPolicy:
        """Return the settings of the group that the Proxy reported."""

    def target_count(self, topic: str, deadline: Deadline) -> int:
        """Return the number of brokers that have the topic. Raises ``RouteNotFound``."""

    def receive(
        self, target: PopTarget, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        """Return up to ``count`` messages; an empty sequence if none arrives within ``wait_s``.

        The invisible time of a message may have begun long before the message arrives.
        """

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        """Acknowledge a message. Raises ``NotFound`` if the message's invisible time is over."""

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        """Let the invisible time of a message end ``invisible_s`` from now. Replaces the ``receipt`` of the message."""

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        """Move a message to the group's dead-letter topic."""

    def close(self, deadline: Deadline) -> None:
        """Leave the group."""

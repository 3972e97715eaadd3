"""The methods of a transport that other rooms may call, as small Protocols: the seam is at verbs, not at frames.

``producer/``, ``consumer/``, ``spark/`` and ``pull/`` call these methods and no others of a client. The remoting
client implements them; another transport implements those it can offer. All raise ``RocketMQError`` subclasses only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RocketMQError, RouteNotFound
from rocketmq_spark.model import (
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
    Resent,
    SendRequest,
    SendResult,
    SpooledSend,
    SpoolMetrics,
    TopicRoute,
)
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.model.message import GroupPolicy, Place, PoppedMessage
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState

Sent = Callable[[SendResult | RocketMQError], None]
Pulled = Callable[[PullAnswer | RocketMQError], None]
OnError = Callable[[RocketMQError, MessageQueue], None]


class Sender(Protocol):
    """Verbs of a producer. Each honours the deadline it is given."""

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """Queues that accept sends, in Java's publish order. The object stays identical while the route is unchanged.

        Raises ``RouteNotFound``, with the server's code when there is no such topic and without one when it takes no
        writes, and ``BrokerNotFound`` while it has no master.
        """

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """Queues that are there to be read, sorted; some of them may take no sends now."""

    def missing_topic(self, error: RouteNotFound) -> RouteNotFound:
        """The same error with the names that come nearest, as far as the transport can tell them."""

    def any_broker(self) -> bool:
        """Whether any broker is up, so that a topic without a route does not exist."""

    def any_master(self) -> bool:
        """Whether any master is up: while none is, the topics are unknown."""

    def timers(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> Mapping[str, int]:
        """The longest delay in ms that each broker's timers do, 0 where it has none; without those that do not answer."""

    def consumed(self, topic: str, deadline: Deadline) -> bool:
        """Whether a member of some consumer group subscribes to the topic now. Raises ``RouteNotFound`` without such a topic."""

    def keeps_batches(self, topic: str, deadline: Deadline) -> bool:
        """Whether the topic stores a batch with an id of its own as one message (``queue.type=BatchCQ``); no while unknown."""

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        """One attempt on one queue. ``SendResult.msg_id`` is left empty: ids are the producer's business."""

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Sent) -> None:
        """One attempt; ``done`` is called exactly once, on any thread, and must not block. Never raises."""

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        """Hand the request to the socket; no answer is awaited."""

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        """Take back a timer message that has not fired; returns its id."""

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Deliver a half message or drop it, once; whether its broker has confirmed it. Two commits are two deliveries."""

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        """Whether the master of ``broker_name`` answers (GET_MAX_OFFSET of queue 0); False when it has no address."""

    @property
    def client_id(self) -> str:
        """How brokers know this process: all that share its connections have one id."""

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        """Belong to a producer group, which heartbeats report to brokers soon and then every ``heartbeat_s``, if that is not 0.
        With ``check`` all brokers of the cluster hear of it, and may ask what became of half messages. Returns a function
        that leaves the group. The last member unregisters it. Failures of single brokers are logged.
        """

    def refresh_routes(self, deadline: Deadline) -> None:
        """Ask the name server again for all known topics and forget brokers that no route names any more."""


class Replies(Protocol):
    """Verbs of request and reply. A Proxy has none."""

    def join(self, group: str, heartbeat_s: float) -> Callable[[Deadline], None]:
        """Heartbeats go to all brokers of the cluster now: any may have a reply. Returns a function that leaves the group."""

    def announce(self, deadline: Deadline) -> None:
        """Such a heartbeat now; failures of single brokers are logged."""

    def expect(self, correlation_id: str, done: Callable[[Reply | RocketMQError], object]) -> Callable[[], None]:
        """``done`` gets the reply of that id, at most once, on a thread that may block. Returns a function that forgets it."""

    def reply(self, to: ReceivedMessage, reply: Message, group: str, deadline: Deadline) -> None:
        """Have a broker pass a reply on; its topic means nothing. ``MessageRefused``: ``to`` is no request."""


class Resender(Protocol):
    """Sends once more what a spool kept."""

    def joins(self, first: SpooledSend) -> Callable[[SpooledSend], bool]:
        """What says of one send after the other, all for one queue, whether it may go as one with ``first`` and those it took."""

    def joined(self, sends: Sequence[SpooledSend]) -> SpooledSend:
        """Several that may as one, in their order: brokers have all of them or none."""

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        """One send with its attempts; ``done`` is called once, on any thread, and must not block."""

    def close(self, deadline: Deadline) -> None:
        """A call without an answer by then fails."""


class Spool(Protocol):
    """Keeps what a producer cannot send for passing reasons, and sends it later."""

    @property
    def listens(self) -> bool:
        """Whether ``answered`` may mean something now: it is asked after each send."""

    def holds(self, send: SpooledSend) -> bool:
        """Whether something waits that ``send`` must not overtake."""

    def keep(self, sends: Sequence[SpooledSend]) -> None:
        """Each is durable when this returns. Raises ``SpoolFull``, or ``SpoolError`` when they cannot be written."""

    def answered(self, queue: MessageQueue) -> None:
        """A broker took something for this queue."""

    def metrics(self) -> SpoolMetrics:
        """How it stands."""

    def close(self, deadline: Deadline) -> None:
        """Send what is due as long as ``deadline`` allows, leave the rest where it is, and give the folder free."""


class RouteReader(Protocol):
    """Which topics there are, and which brokers have them."""

    def get(self, topic: str, max_age_s: float = 30.0, deadline: Deadline | None = None) -> TopicRoute:
        """The route, at most ``max_age_s`` old. An unchanged route stays the same object. Raises ``RouteNotFound``."""

    def refresh(self, topics: Iterable[str], max_age_s: float, deadline: Deadline | None = None) -> None:
        """Ask for all routes that are older, at once. What cannot be had so is left to ``get``."""

    def fetch(self, topic: str, deadline: Deadline | None = None) -> TopicRoute:
        """Ask now, and keep nothing; raises ``RouteNotFound``."""

    def address(self, broker_name: str, read_from: str = "master") -> str:
        """Where a broker is, by the routes at hand. Raises ``BrokerNotFound``."""

    def topics(self, deadline: Deadline | None = None) -> list[str]:
        """All topics, system ones too; raises ``NotSupported`` where they cannot be listed."""

    def cluster(self, deadline: Deadline | None = None) -> dict[str, BrokerData]:
        """Brokers by name; raises ``NotSupported`` where they cannot be listed."""

    def missing_topic(self, error: RouteNotFound) -> RouteNotFound:
        """The same error with the names that come nearest."""


class OffsetReader(Protocol):
    """Which offsets queues have, and what brokers say about messages there."""

    @property
    def late(self) -> frozenset[str]:
        """Brokers that keep a question of ``bounds`` or of a commit waiting that others were not held up by."""

    def connection(self, broker_name: str) -> object:
        """Something that stays equal as long as one connection to the broker's master serves: it was not away meanwhile."""

    def bounds(
        self, queues: Iterable[MessageQueue], deadline: Deadline, on_error: OnError | None = None,
        read_from: str = "master", grace_s: float | None = None,
    ) -> dict[MessageQueue, QueueBounds]:  # fmt: skip
        """Minimum and maximum offset of each queue; those that brokers do not report are left out, with ``on_error`` also
        those whose question failed. A broker that keeps the others waiting for ``grace_s`` is not waited for: what it said
        before holds.
        """

    def max_offsets(self, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        """The end of each queue, also of those that are not read any more."""

    def read_queues(self, topic: str, broker_name: str, deadline: Deadline) -> int | None:
        """How many queues of a topic the broker reads; None where that is unknown (a Proxy, an old broker, no permission)."""

    def search_offsets(
        self, times_ms: Mapping[MessageQueue, int], deadline: Deadline, on_error: OnError | None = None,
        group: str | None = None,
    ) -> dict[MessageQueue, int]:  # fmt: skip
        """First offset stored at or after each queue's time. It may lie below the minimum: callers clamp it.

        With ``on_error`` queues whose question failed are left out. Old brokers give a message that is near: with a
        ``group`` that is corrected.
        """

    def committed(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> dict[MessageQueue, int | None]:
        """The group's offset of each queue, None where there is none."""

    def store_time_ms(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> int | None:
        """When the message at ``offset`` was stored; None when there is none at exactly that offset."""

    def store_times_ms(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, read_from: str = "master",
        on_error: OnError | None = None,
    ) -> dict[MessageQueue, int]:  # fmt: skip
        """``store_time_ms`` of many queues at once, without those that have no message there or fail (``on_error``)."""

    def sample(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> tuple[int, int]:
        """Bytes of some messages from ``offset`` on, and how many offsets they take; 0 and 0 where there are none."""

    def log_states(self, brokers: Sequence[str], deadline: Deadline) -> dict[str, LogState | RocketMQError]:
        """How the commit log of each broker's master stands, all asked at once, or the error of that one."""

    def confirms_late(self, broker_name: str, deadline: Deadline) -> bool:
        """Whether a broker indexes what its copies have confirmed only; True where it does not say."""

    def is_proxy(self, topic: str, broker_name: str, deadline: Deadline) -> bool:
        """Whether a Proxy answers for a broker: it compiles no filters."""

    def check_filter(self, broker_name: str, group: str, topic: str, sql: str, deadline: Deadline) -> None:
        """Let a broker compile an SQL expression; raises ``BrokerError`` with its words."""


class OffsetCommitter(Protocol):
    """Stores a group's offsets."""

    def commit_each(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        """Store the next offsets to read where they can be; the errors of the others. ``grace_s`` as in ``bounds``."""

    def members(self, group: str, broker_name: str, deadline: Deadline) -> list[str]:
        """Ids of clients that consume as ``group`` now, as one broker knows them."""

    def create_group(self, group: str, brokers: Sequence[str]) -> None:
        """Make the group on these brokers, by name. Where it exists its settings become the brokers' defaults."""

    def create_retry_topic(self, group: str, timeout_s: float) -> None:
        """Make the topic by which tools look a group up; returns when it can be seen."""


class PullSource(Protocol):
    """What reads of offset ranges ask beside their pulls, which have connections of their own."""

    def on_wire(self, name: str) -> str:
        """A topic or group as brokers know it."""

    def keys(self) -> tuple[str, str, str | None] | None:
        """Access key, secret key and token that sign pulls from now on; None without signing."""

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        """The route as it is now; one question takes no longer than the time of a request."""

    def compacted(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic keeps the last message of a key only, so that offsets without one are right."""

    def batched(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic stores batches whole, so that its brokers know no properties of single messages.

        Where that is unknown, it may be so.
        """


class GroupMember(Protocol):
    """Verbs of a member of a consumer group: all that ``consumer/`` asks of a transport. Names are the user's, as everywhere."""

    @property
    def client_id(self) -> str:
        """How brokers and the other members know this process."""

    def join(
        self, group: str, membership: Callable[[], Membership], asked: Asked, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        """Belong to the group: every heartbeat carries ``membership``, ``asked`` gets what brokers ask.

        Raises ``LocalProtocolError`` when the group has a member in this process. Returns a function that leaves
        the group and unregisters it; failures of single brokers are logged.
        """

    def heartbeat(self, deadline: Deadline) -> None:
        """Tell all brokers of the routes at hand now; failures of single brokers are logged."""

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """Queues that may be read, sorted; as they were known while no name server answers, unless ``refresh``.

        Raises ``RouteNotFound`` when there is no such topic. The object stays identical while the route is unchanged.
        """

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        """Ids of the group's members as one broker of the topic, chosen at random, knows them."""

    def filters(self, group: str, topic: str, deadline: Deadline) -> dict[str, Filter]:
        """What the group wants of each topic, as one broker heard it from the member that spoke last."""

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, young_at_zero: bool = True) -> int | None:
        """The group's offset, None only where the master says that there is none; any other failure is raised. A slave may not
        have heard of an offset yet.

        With ``young_at_zero`` the broker also says 0 for a queue without an offset whose first message is still in its
        memory: so do members in Java start, and no member skips the messages of a new topic (``ConsumerManageProcessor``).
        """

    def bounds(self, queue: MessageQueue, deadline: Deadline) -> QueueBounds:
        """First offset kept and next offset to be written, as the master says."""

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        """As ``search_offsets``: of brokers before 5.1.4 the nearest to that time where no ``group`` may look at messages."""

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        """Store the group's offsets where they can be, on a slave where there is no master; the errors of the others.

        A broker that does not know the group makes it first, if it may (``autoCreateSubscriptionGroup``).
        """

    def pull(self, request: PullRequest, deadline: Deadline, done: Pulled) -> None:
        """One long poll; ``done`` is called exactly once, on any thread, and must not block. Never raises, never blocks."""

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        """Have the message delivered again later (request 36). Levels: 0: the broker decides; -1: to the DLQ now."""

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        """What is left where ``send_back`` failed: a copy to the group's retry topic, at delay level 3 + times.

        Raises ``DecodeError`` for a message that could not be decoded: its body is not what was sent.
        """

    def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        """Those that are this client's from now on, for the broker's 60 s; failures of single brokers are logged."""

    def unlock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
        """Give them back; failures of single brokers are logged."""


class PopMember(Protocol):
    """Verbs of one consumer that is handed out messages, each for a while, and has no queues (POP).

    A message that is not acknowledged in its time is handed out again, to any member of the group.
    """

    @property
    def client_id(self) -> str:
        """How the Proxy knows this consumer."""

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        """Tell what the group wants of which topics, now and on each new connection; the first call, after ``close``, too, joins.

        Waits until a Proxy knows; raises ``RocketMQError`` when none does in time.
        """

    def policy(self) -> GroupPolicy:
        """What the Proxy said of the group."""

    def places(self, topic: str, deadline: Deadline) -> int:
        """From how many brokers the topic's messages come. Raises ``RouteNotFound``."""

    def receive(
        self, place: Place, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        """At most ``count``, in turn; none where ``wait_s`` brought none. Their time may have begun long before they are here."""

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        """It is done. Raises ``NotFound`` when it is not this consumer's any more, since its time is over."""

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        """It is handed out again so many seconds from now, unless it is acknowledged; its ``receipt`` becomes another one."""

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        """It goes to the group's dead-letter topic, and is done."""

    def close(self, deadline: Deadline) -> None:
        """Leave the group."""

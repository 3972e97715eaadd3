"""The settings of one producer, and the hooks that run before and after each attempt (Java's ``SendMessageHook``).

The defaults are those of ``DefaultMQProducer``; a sink has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocketmq_spark.base import codes
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from rocketmq_spark.model.send import HalfCheck
from rocketmq_spark.options import Options
from rocketmq_spark.options.transport import FEATURES, REMOTING, TransportFeatures, features
from rocketmq_spark.producer.accumulator import BatchLimits
from rocketmq_spark.producer.fault_tolerance import CURRENT_RELEASE, FaultTables, fault_tables
from rocketmq_spark.producer.retry import RETRY_CODES, RetryPolicy
from rocketmq_spark.queues.environment import Environment, environment_of, scope_of
from rocketmq_spark.wire.names import NO_SCOPE, Scope, group_problem

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SendContext:
    """One attempt of a send, as hooks see it. Only the hook ``after`` gets ``latency_ms``, and ``result`` or ``error``.

    ``message`` is None for a batch. ``mode`` is sync, async or oneway; a oneway send has neither result nor error.
    """

    group: str
    queue: MessageQueue
    request: SendRequest
    mode: str
    attempt: int
    message: Message | None = None
    msg_ids: Sequence[str] = ()
    latency_ms: int = 0
    result: SendResult | None = None
    error: RocketMQError | None = None


Hook = Callable[[SendContext], None]


class Hooks:
    """The registered hooks. An error of a hook is logged and does not affect the send."""

    def __init__(self) -> None:
        self._before_hooks: list[Hook] = []
        self._after_hooks: list[Hook] = []

    def __bool__(self) -> bool:
        return bool(self._before_hooks or self._after_hooks)

    def add(self, before: Hook | None = None, after: Hook | None = None) -> None:
        if before is not None:
            self._before_hooks.append(before)
        if after is not None:
            self._after_hooks.append(after)

    def call_before(self, context: SendContext) -> None:
        self._call(self._before_hooks, context)

    def call_after(self, context: SendContext, outcome: SendResult | RocketMQError | None, latency_ms: int) -> None:
        context.latency_ms = latency_ms
        if isinstance(outcome, SendResult):
            context.result = outcome
        else:
            context.error = outcome
        self._call(self._after_hooks, context)

    def _call(self, hooks: Sequence[Hook], context: SendContext) -> None:
        for hook in hooks:
            capture_result = capture(hook, context)
            if isinstance(capture_result, Failure):
                capture_result.log(logger, "a send hook failed")


COMPRESSIONS = {"none": None, "zlib": codes.SysFlag.ZLIB, "lz4": codes.SysFlag.LZ4, "zstd": codes.SysFlag.ZSTD}
_TEMPLATE_GROUPS = ("DEFAULT_PRODUCER", "DEFAULT_CONSUMER")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerSettings:
    """Settings of one producer. An error about a value names its option, if there is one.

    If ``retries`` or ``pinned_retries`` is None, a send is retried until its timeout; ``attempt_timeout_s`` then limits one
    attempt. If ``batch_*`` is None, the limit of a shared accumulator does not change. ``heartbeat_s`` or ``route_refresh_s``
    may be 0, which means never. A producer that is closed soon needs neither heartbeats nor refreshed routes. If a send fails,
    sends that wait behind it in its ordered queue fail, too. With ``failed_queues_stay_closed``, all later sends to the queue
    also fail. ``max_in_flight`` limits the requests at all brokers together. If ``max_in_flight`` is None, there is a limit for
    each broker instead: ``max_in_flight_per_broker``, or a limit that adapts. ``max_async_messages`` and ``max_async_bytes``
    limit the sends without an outcome. If ``max_async_messages`` is None, only the bytes of these sends are limited.
    ``features`` are those of the transport. ``scope`` converts the topic in a recall handle, because the handle has the name on
    the wire. All other names in the settings are those of the user. ``transaction_check`` decides about half messages when
    brokers ask.
    """

    group: str
    send_timeout_s: float = 3.0
    attempt_timeout_s: float | None = None
    retries: int | None = 2
    pinned_retries: int | None = 0
    retry_codes: frozenset[int] = RETRY_CODES
    store_must_be_ok: bool = False
    max_message_size: int = codes.MAX_BODY_BYTES
    compress_above: int = 4096
    compression: str = "zlib"
    default_topic_queues: int = 4
    auto_create_topics: bool = True
    send_latency_fault: bool = False
    fault_tables: FaultTables = CURRENT_RELEASE
    detector: bool = False
    detect_interval_ms: int = 2000
    detect_timeout_ms: int = 200
    auto_batch: bool = False
    batch_max_bytes: int | None = None
    batch_max_delay_ms: int | None = None
    total_batch_max_bytes: int | None = None
    environment: Environment | None = None
    scope: Scope = NO_SCOPE
    features: TransportFeatures = FEATURES[REMOTING]
    transaction_check: HalfCheck | None = None
    long_delay: str = "error"
    max_in_flight: int | None = 1024
    max_in_flight_per_broker: int | None = None
    failed_queues_stay_closed: bool = False
    max_async_messages: int | None = 50_000
    max_async_bytes: int = 100 * 1024 * 1024
    heartbeat_s: float = 30.0
    route_refresh_s: float = 30.0

    @classmethod
    def of(cls, options: Options) -> ProducerSettings:
        """Return the settings of a producer with these options."""
        transport_features = features(options)
        return cls(
            group=options.group,
            send_timeout_s=options.send_timeout,
            attempt_timeout_s=options.request_timeout if options.confirm_ambiguous else None,
            store_must_be_ok=options.require_store_ok == "ok",
            max_message_size=options.max_message_size,
            compress_above=options.compress_above,
            compression=options.compression if transport_features.accepts_compressed else "none",
            auto_create_topics=transport_features.creates_topics,
            features=transport_features,
            send_latency_fault=bool(options.send_latency_fault),
            fault_tables=fault_tables(
                options.send_latency_fault or "current", options.latency_max, options.not_available_duration
            ),
            environment=environment_of(options),
            scope=scope_of(options),
            long_delay=options.long_delay,
            auto_batch=options.auto_batch,
            batch_max_bytes=options.batch_max_bytes,
            batch_max_delay_ms=None if options.batch_max_delay is None else round(1000 * options.batch_max_delay),
            total_batch_max_bytes=options.total_batch_max_bytes,
        )

    def __post_init__(self) -> None:
        problems = [f"{setting} is {value!r}; expected {expected}" for setting, value, expected in self._problems()]
        try:
            self.batch_limits(BatchLimits())
        except OptionError as e:
            problems += e.problems or [e.message]
        if problems:
            raise OptionError.of(problems)

    def _problems(self) -> list[tuple[str, object, str]]:
        problem = group_problem(self.group, self.scope)
        if not problem and self.group in _TEMPLATE_GROUPS:
            problem = f"The specified group: {self.group} is a template"
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("option 'group'", self.group, problem is None, f"the name of a producer group ({problem})"),
            ("option 'sendTimeout'", self.send_timeout_s, self.send_timeout_s > 0, "a duration above zero"),
            (
                "setting 'attempt_timeout_s'",
                self.attempt_timeout_s,
                (self.attempt_timeout_s or 1) > 0,
                "a duration above zero",
            ),
            ("setting 'retries'", self.retries, (self.retries or 0) >= 0, "a whole number of at least 0"),
            ("option 'maxMessageSize'", self.max_message_size, self.max_message_size >= 1, "a size of at least 1 byte"),
            ("option 'compressAbove'", self.compress_above, self.compress_above >= 0, "a size of at least 0 bytes"),
            (
                "option 'compression'",
                self.compression,
                self.compression in COMPRESSIONS,
                f"one of {', '.join(COMPRESSIONS)}",
            ),
            (
                "setting 'max_in_flight'",
                self.max_in_flight,
                self.max_in_flight is None or self.max_in_flight >= 1,
                "a whole number of at least 1",
            ),
        )
        return [(setting, value, expected) for setting, value, is_valid, expected in checks if not is_valid]

    @property
    def retry_policy(self) -> RetryPolicy:
        # Over gRPC, an ordered queue does not belong to one broker, so ordered sends may be retried at another endpoint.
        pinned_retries = (
            self.retries
            if self.features.queue_choice_problem and self.pinned_retries is not None
            else self.pinned_retries
        )
        return RetryPolicy(self.retries, pinned_retries, self.retry_codes, self.store_must_be_ok)

    def batch_limits(self, shared_limits: BatchLimits) -> BatchLimits:
        """The limits of a shared accumulator after this producer joined it: the producer's own limits override the others."""
        return BatchLimits(
            shared_limits.max_bytes if self.batch_max_bytes is None else self.batch_max_bytes,
            shared_limits.max_delay_ms if self.batch_max_delay_ms is None else self.batch_max_delay_ms,
            shared_limits.total_max_bytes if self.total_batch_max_bytes is None else self.total_batch_max_bytes,
            min(shared_limits.max_encoded_bytes, self.max_message_size),
            max_messages_per_queue=self.features.max_single_requests,
        )

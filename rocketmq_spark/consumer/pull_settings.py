"""The settings of one ``PullConsumer``; names and defaults are those of ``DefaultLitePullConsumer`` unless it says why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rocketmq_spark.consumer.rebalance import Allocate
from rocketmq_spark.consumer.settings import OnWire, allocation, group_problems, isolated
from rocketmq_spark.consumer.start_offset import ConsumeFrom
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options
from rocketmq_spark.queues.allocation import allocate
from rocketmq_spark.queues.environment import Environment

_MAX_PULL_BATCH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PullConsumerSettings:
    """What a pull consumer is told once.

    Java asks for 10 messages a pull; 32 is what a broker gives at most unless it is configured otherwise.
    """

    group: str
    environment: Environment | None = None
    allocate: Allocate = field(default=partial(allocate, "averagely"))
    consume_from: ConsumeFrom = field(default_factory=ConsumeFrom)
    pull_batch_size: int = 32
    max_waiting: int = 1000
    max_bytes: int = 100 << 20
    auto_commit: bool = True
    auto_commit_interval_s: float = 5.0
    suspend_s: float = 15.0
    pull_timeout_s: float = 30.0
    request_timeout_s: float = 3.0
    retry_s: float = 1.0
    busy_retry_s: float = 0.02
    route_refresh_s: float = 30.0

    @classmethod
    def of(cls, options: Options, on_wire: OnWire = str) -> PullConsumerSettings:
        """Those of a pull consumer with these options, whose names stand ``on_wire`` in a namespace or environment."""
        environment, group = isolated(options)
        return cls(
            group=group,
            environment=environment,
            allocate=allocation(options, on_wire),
            consume_from=ConsumeFrom.of(options.consume_from_where),
            pull_batch_size=options.pull_batch_size,
            max_waiting=options.pull_threshold_for_queue,
            max_bytes=options.pull_threshold_size_for_queue,
            auto_commit=options.auto_commit,
            auto_commit_interval_s=options.auto_commit_interval,
            request_timeout_s=options.request_timeout,
        )

    def __post_init__(self) -> None:
        problems = group_problems(self.group)
        if not 1 <= self.pull_batch_size <= _MAX_PULL_BATCH:
            problems.append(
                f"option 'pullBatchSize' is {self.pull_batch_size}; expected a whole number from 1 to {_MAX_PULL_BATCH}"
            )
        if problems:
            raise OptionError.of(problems)

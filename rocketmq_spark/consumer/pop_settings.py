"""The settings of one consumer with a listener whose messages come from a Proxy (POP)."""

from __future__ import annotations

from dataclasses import dataclass

from rocketmq_spark.consumer.settings import group_problems
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options

# What a broker hands out at once, and for how long a question for which there is nothing yet waits at a Proxy.
MAX_MESSAGES, MAX_WAIT_S = 32, 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PopSettings:
    """What a consumer is told once; times in seconds.

    ``threads`` call the listener, and as many messages may wait for them before no more are asked for. A listener that has a
    message for longer than ``consume_timeout_s`` keeps it from nobody any more.
    """

    group: str
    ordered: bool = False
    threads: int = 20
    batch_size: int = MAX_MESSAGES
    suspend_time_s: float = 1.0
    consume_timeout_s: float = 900.0
    error_pause_s: float = 1.0
    request_timeout_s: float = 3.0

    @classmethod
    def of(cls, options: Options) -> PopSettings:
        """Those of a consumer with these options."""
        return cls(
            group=options.group,
            ordered=options.ordered,
            threads=options.consume_thread_min,
            batch_size=options.pull_batch_size,
            suspend_time_s=options.suspend_current_queue_time,
            consume_timeout_s=options.consume_timeout,
            error_pause_s=options.pull_time_delay_when_exception,
            request_timeout_s=options.request_timeout,
        )

    @property
    def retry_topic(self) -> bool:
        """Whether what failed comes through a topic that the consumer subscribes to: the Proxy sees to that."""
        return False

    def __post_init__(self) -> None:
        problems = group_problems(self.group)
        if not 1 <= self.batch_size <= MAX_MESSAGES:
            problems.append(
                f"option 'pullBatchSize' is {self.batch_size}; expected 1 to {MAX_MESSAGES}, which is what a Proxy hands out"
            )
        if problems:
            raise OptionError.of(problems)

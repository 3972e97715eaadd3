"""Repeats the requests of a call of Spark until they succeed. ``retry_until`` is the only loop of the source's driver that
repeats requests.

``WaitLimits`` says how long requests are repeated. The time depends on what is missing:

* a server or a master: up to ``readDeadline``, with new routes for each attempt. But if a query starts and no server has answered
  yet, there are only ``numRetries`` more attempts, because an address may be misspelt;
* a topic that did not exist before: up to ``topicWait``, because its name may be misspelt. The time and the attempts for a server
  begin only when the topic exists.

A stream logs the queues for which it waits, because a waiting stream looks like an idle stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.retry import RetryErrors
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.source import checkpoint_identity
from rocketmq_spark.spark.source.bounds_reader import BoundsReader
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions, queues_text
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.subscribed_topics import no_matching_topic_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_PAUSE_S, _MAX_RETRY_PAUSE_S = 0.2, 1.0
_MAX_PAUSE_OF_START_S = 10.0


@dataclass(slots=True)
class WaitLimits:
    """How long a call of Spark waits. If a call finds out where a query starts, ``max_attempts`` limits its attempts until
    servers have answered.
    """

    deadline: Deadline
    topic_deadline: Deadline
    max_attempts: int | None = None
    retry_interval_s: float = _RETRY_PAUSE_S
    read_deadline_s: float = 0.0

    @classmethod
    def of_start(cls, options: Options) -> WaitLimits:
        """Return the limits of a call that finds out where a new query or a batch read starts."""
        return cls(
            Deadline.after(options.read_deadline),
            Deadline.after(options.topic_wait),
            1 + options.num_retries,
            options.retry_interval,
            options.read_deadline,
        )

    @classmethod
    def of_batch(cls, options: Options, has_waited_for_topics: bool = False) -> WaitLimits:
        """Return the limits of a call for a query that has positions."""
        topic_wait_s = 0.0 if has_waited_for_topics else options.topic_wait
        return cls(
            Deadline.after(options.read_deadline),
            Deadline.after(topic_wait_s),
            read_deadline_s=options.read_deadline,
        )

    def restart_deadline(self) -> None:
        """Restart the deadline for servers, because the wait for a missing topic used some of the time."""
        self.deadline = Deadline.after(self.read_deadline_s)


def retry_until(reader: BoundsReader, attempt: Callable[[], T], wait_limits: WaitLimits) -> T:
    """Call ``attempt`` until it succeeds, and return its result. Raises a permanent error at once.

    If a limit of ``wait_limits`` is reached, raises the last retriable error together with the first retriable error.
    """
    retry_errors = RetryErrors()
    pauses_of_start = backoff(wait_limits.retry_interval_s, _MAX_PAUSE_OF_START_S)
    pauses = backoff(_RETRY_PAUSE_S, _MAX_RETRY_PAUSE_S)
    while True:
        # ``attempt`` checks the same deadline later. If the deadline expires between the two checks, another attempt follows.
        is_topic_wait_over = wait_limits.topic_deadline.expired
        try:
            return attempt()
        except RocketMQError as e:
            is_start = wait_limits.max_attempts is not None
            is_new_topic = isinstance(e, RouteNotFound) and (is_start or not reader.is_known_topic(e.topic))
            lacks_permission = e.topic is not None and e.broker_code is None
            if not e.retriable or (is_new_topic and lacks_permission):
                raise
            if is_new_topic and not reader.is_known_topic(e.topic):
                if is_topic_wait_over:
                    raise _with_similar_topics(reader, e) from None
                logger.info("waiting for %s", f"a topic: {e.message}" if e.topic is None else f"topic {e.topic}")
                wait_limits.topic_deadline.pause(next(pauses))
                retry_errors.clear()
                wait_limits.restart_deadline()
                continue
            retry_errors.record(e, reader.clock.now())
            if wait_limits.max_attempts is not None and not reader.have_brokers_answered:
                if retry_errors.attempt_count >= wait_limits.max_attempts:
                    raise
                wait_limits.deadline.pause(next(pauses_of_start))
            else:
                if wait_limits.deadline.expired:
                    retry_errors.raise_final(e, reader.clock.now())
                reader.note_retriable_error(e)
                wait_limits.deadline.pause(next(pauses))


def _with_similar_topics(reader: BoundsReader, error: RocketMQError) -> RocketMQError:
    """Return ``error`` with the names of similar topics. The returned error has all details, so it needs no cause."""
    if not isinstance(error, RouteNotFound) or error.topic is None:
        return error
    return reader.ports.routes.with_similar_topics(error)


def fetch_bounds_of_masters(reader: BoundsReader, options: Options, wait_limits: WaitLimits) -> QueuesView:
    """Return the bounds that masters report. Raises ``BrokerNotFound`` if only slaves of a broker are up, because slaves may lack
    messages. If no topic matches the pattern, raises ``RouteNotFound`` until the topic deadline of ``wait_limits``, and
    after this deadline returns a view without queues.
    """
    view = reader.fetch_complete_view()
    if not view.topics and not wait_limits.topic_deadline.expired:
        raise no_matching_topic_error(options)
    if brokers_without_master := sorted({queue.broker_name for queue in view.bounds} & view.brokers_without_master):
        raise BrokerNotFound(
            f"only slaves of {', '.join(brokers_without_master)} are up, which may lack messages that the master has",
            remedy="Start the master, or raise option 'readDeadline' to wait longer for it",
        )
    return view


def with_compaction_start(reader: BoundsReader, options: Options, view: QueuesView, start: Positions) -> QueuesView:
    """Return the view for a read from ``start``. In this view, the minimum offset of a queue of a compaction topic is the offset
    of the first message that the broker keeps, which may be before the begin of the log. So messages that compaction removed are
    not reported as lost.
    """
    if all(offset >= view.bounds[queue].min_offset for queue, offset in start.items()):
        return view
    reader.set_checkpoint_offsets(Offsets(start, source_identity=checkpoint_identity.source_identity(options)))
    return reader.fetch_complete_view()


class UnavailableQueuesLog:
    """Logs which queues with a position become unavailable, and which queues become available again."""

    def __init__(self) -> None:
        self._unavailable_queues: set[MessageQueue] = set()

    @property
    def is_empty(self) -> bool:
        """Whether the last call of ``update`` had no unavailable queues."""
        return not self._unavailable_queues

    def update(
        self,
        queues: Iterable[MessageQueue],
        bounds: Bounds,
        reason_of: Callable[[MessageQueue], str],
        is_run_ending: bool = False,
    ) -> None:
        """Log the changes since the last call. ``queues`` are unavailable unless they have bounds. ``reason_of`` returns the
        reason for a queue. ``is_run_ending`` is whether the run ends without these queues.
        """
        unavailable_queues = {queue for queue in queues if queue not in bounds}
        newly_unavailable_queues, queues_available_again = (
            unavailable_queues - self._unavailable_queues,
            {queue for queue in self._unavailable_queues - unavailable_queues if queue in bounds},
        )
        self._unavailable_queues = unavailable_queues
        if newly_unavailable_queues:
            action = "the run ends without" if is_run_ending else "the stream waits for"
            logger.warning(
                "%s queues that it cannot read now: %s", action, _text_by_reason(newly_unavailable_queues, reason_of)
            )
        if queues_available_again:
            logger.warning("the stream can read these queues again: %s", queues_text(queues_available_again))


def _text_by_reason(queues: Iterable[MessageQueue], reason_of: Callable[[MessageQueue], str]) -> str:
    queues_by_reason: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        queues_by_reason.setdefault(reason_of(queue), []).append(queue)
    return "; ".join(
        f"{queues_text(queues_of_reason)} ({reason})" for reason, queues_of_reason in queues_by_reason.items()
    )

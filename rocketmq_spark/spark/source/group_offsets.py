"""Commits the positions of finished batches as the offsets of a consumer group, for dashboards and for new queries.

The query itself continues from Spark's checkpoint. A committed offset is the next offset to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.source import checkpoint_identity
from rocketmq_spark.spark.source.offsets import Positions

logger = logging.getLogger(__name__)

# After the first answers, a commit waits this long for the brokers that have not answered.
COMMIT_GRACE_S = 0.2
# The least time between two checks whether another process commits offsets of the group.
_COMMITTER_CHECK_INTERVAL_S = 10.0
_MIN_RETRY_PAUSE_S, _MAX_RETRY_PAUSE_S = 1.0, 60.0


class GroupOffsets:
    """Commits those offsets of a group that have changed. Does nothing unless option ``group`` is given. Confined to one
    thread.
    """

    def __init__(self, options: Options, now: Callable[[], float] | None = None) -> None:
        self._options = options
        self._now = now or Clock().now
        # The offsets that this object has committed, and that brokers have stored.
        self._committed_offsets: dict[MessageQueue, int] = {}
        # The offsets whose commit failed. A failed offset is sent again after a pause, but a newer offset of the same queue is
        # sent at once.
        self._failed_offsets: dict[MessageQueue, int] = {}
        self._next_retry_s = 0.0
        self._retry_pause_s = _MIN_RETRY_PAUSE_S
        # Whether a failed commit was logged, and some offsets are not stored yet.
        self._is_commit_failing = False
        self._has_checked_members = False
        # Whether a warning was logged because another process commits offsets of the group, and the time of the next check.
        self._has_warned_of_other_committer = False
        self._next_committer_check_s = 0.0

    def commit(self, positions: Positions, source_identity: Mapping[str, object] = MappingProxyType({})) -> None:
        """Commit the positions that changed. Retriable failures are retried by a later call; other errors are raised.

        ``source_identity`` is the identity of the source that has these positions. Positions of another cluster are not
        committed. A broker that hangs delays the call only briefly.
        """
        if "group" not in self._options.given_fields:
            return
        delayed_offsets = self._failed_offsets if self._now() < self._next_retry_s else {}
        changed_offsets = {
            q: o for q, o in positions.items() if self._committed_offsets.get(q) != o and delayed_offsets.get(q) != o
        }
        if self._has_checked_members and not changed_offsets:
            return
        offsets_to_commit = self._offsets_of_existing_topics(changed_offsets, source_identity)
        if not self._has_checked_members:
            self._has_checked_members = True
            self._warn_of_members(positions)
        self._warn_of_other_committer(offsets_to_commit)
        errors = self._commit_or_create_group(offsets_to_commit)
        # If a commit failed, the offset that the broker has is unknown. If a queue no longer has a position, another process may
        # commit offsets of this queue now. In both cases, the offset of the queue no longer counts as committed.
        stored_offsets = {
            q: offset for q, offset in {**self._committed_offsets, **offsets_to_commit}.items() if q in positions
        }
        self._committed_offsets = {q: offset for q, offset in stored_offsets.items() if q not in errors}
        for error in errors.values():
            if not error.retriable:
                raise error
        self._schedule_retry(positions, changed_offsets, errors)

    def _commit_or_create_group(self, offsets: Positions) -> dict[MessageQueue, RocketMQError]:
        group, timeout_s = self._options.group, self._options.request_timeout
        committer = session.committer(self._options)
        errors = committer.commit_each(group, offsets, Deadline.after(timeout_s), COMMIT_GRACE_S)
        unknown_group_offsets = {q: offsets[q] for q, error in errors.items() if isinstance(error, GroupNotFound)}
        if unknown_group_offsets:
            try:
                self._create_group(unknown_group_offsets)
            except RocketMQError as e:
                if not e.retriable:
                    raise
                return {**errors, **dict.fromkeys(unknown_group_offsets, e)}
            new_errors = committer.commit_each(group, unknown_group_offsets, Deadline.after(timeout_s), COMMIT_GRACE_S)
            errors = {**{q: error for q, error in errors.items() if q not in unknown_group_offsets}, **new_errors}
        return errors

    def _schedule_retry(
        self, positions: Positions, changed_offsets: Positions, errors: Mapping[MessageQueue, RocketMQError]
    ) -> None:
        """Remember the failed offsets for the next attempt. Logs one line at the first failure, and one line when all offsets are
        stored.
        """
        unfinished_offsets, failed_offsets_before = {**self._failed_offsets, **changed_offsets}, self._failed_offsets
        self._failed_offsets = {
            q: o for q, o in unfinished_offsets.items() if q in positions and self._committed_offsets.get(q) != o
        }
        if errors and not self._is_commit_failing:
            self._is_commit_failing = True
            error = next(iter(errors.values()))
            logger.warning("the offsets of group %s are committed later: %s", self._options.group, error)
        if not self._failed_offsets:
            if self._is_commit_failing and failed_offsets_before.keys() & self._committed_offsets.keys():
                # If no failed offset was stored, the failed queues have only lost their positions, so nothing is logged.
                logger.warning("the offsets of group %s are committed now, after earlier failures", self._options.group)
            self._is_commit_failing, self._retry_pause_s = False, _MIN_RETRY_PAUSE_S
        if self._failed_offsets.keys() & changed_offsets.keys():
            self._next_retry_s = self._now() + self._retry_pause_s
            self._retry_pause_s = min(2 * self._retry_pause_s, _MAX_RETRY_PAUSE_S)

    def _warn_of_other_committer(self, offsets: Positions) -> None:
        """Warn once if another process, most likely another query, commits offsets of the group."""
        offsets_before = {q: self._committed_offsets[q] for q in sorted(offsets) if q in self._committed_offsets}
        if self._has_warned_of_other_committer or not offsets_before or self._now() < self._next_committer_check_s:
            return
        self._next_committer_check_s = self._now() + _COMMITTER_CHECK_INTERVAL_S
        queue = next(iter(offsets_before))
        try:
            deadline = Deadline.after(min(COMMIT_GRACE_S, self._options.request_timeout))
            committed_offset = session.offsets(self._options).committed(self._options.group, [queue], deadline)[queue]
        except RocketMQError:
            return  # a later call repeats the check
        # The source and a ``GroupOffsetListener`` commit the same offsets, in any order.
        if committed_offset is not None and committed_offset not in (offsets_before[queue], offsets[queue]):
            self._has_warned_of_other_committer = True
            logger.warning(
                "group %s: the offset of %s was stored as %d by this query and is %d now: another query or consumer uses the "
                "group, or an operator reset it. Two queries with one group overwrite each other's offsets; give each a "
                "group of its own",
                self._options.group,
                queue,
                offsets_before[queue],
                committed_offset,
            )

    def _offsets_of_existing_topics(
        self, positions: Positions, source_identity: Mapping[str, object]
    ) -> dict[MessageQueue, int]:
        """Return the positions of topics that exist in their cluster. The routes are fetched first, because a listener may have
        no routes yet.
        """
        existing_topics, routes = set(), session.routes(self._options)
        for topic in sorted({queue.topic for queue in positions}):
            try:
                route = routes.get(topic)
            except RocketMQError as e:
                logger.info("the offsets of topic %s are not committed now: %s", topic, e)
                continue
            if foreign_clusters := checkpoint_identity.other_clusters(
                source_identity, checkpoint_identity.clusters_of([route])
            ):
                logger.info(
                    "topic %s is of cluster %s: its offsets are not committed", topic, ", ".join(foreign_clusters)
                )
            else:
                existing_topics.add(topic)
        return {queue: offset for queue, offset in positions.items() if queue.topic in existing_topics}

    def _create_group(self, offsets: Positions) -> None:
        """Create the group on the brokers of ``offsets``, which do not have the group. Other brokers keep their settings of the
        group.
        """
        group, committer = self._options.group, session.committer(self._options)
        committer.create_group(group, offsets)
        logger.info("consumer group %s was created", group)
        try:
            # Every consumer group has a retry topic, and RocketMQ's own tools find a group by its retry topic.
            committer.create_retry_topic(group, self._options.request_timeout)
        except RocketMQError as e:
            logger.info("the retry topic of group %s was not created: %s", group, e)

    def _warn_of_members(self, positions: Positions) -> None:
        """Warn if the group has members, because members commit offsets, too. Also warn if a Proxy may hide members."""
        deadline = Deadline.after(min(1.0, self._options.request_timeout))
        committer = session.committer(self._options)
        brokers = sorted({queue.broker_name for queue in positions})
        for broker in brokers:
            try:
                members = committer.members(self._options.group, broker, deadline)
            except RocketMQError as e:
                logger.info("cannot check whether group %s has members: %s", self._options.group, e)
                continue
            if members:
                logger.warning(
                    "group %s has %d live members (%s): their offsets and ours overwrite each other; use a group of its own",
                    self._options.group,
                    len(members),
                    ", ".join(members[:3]),
                )
                return
        if not all(map(committer.lists_all_members, brokers)):
            logger.warning(
                "group %s: its offsets are stored through a Proxy, which does not see members that are connected to brokers: if "
                "there are such members, their offsets and ours overwrite each other; use a group of its own",
                self._options.group,
            )

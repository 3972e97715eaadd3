"""Finished positions as a group's offsets on the brokers: a mirror for dashboards and for later starts.

Spark's checkpoint stays the truth. What is published is the next offset to read, from completed work only.
"""

from __future__ import annotations

import logging

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import RETRY_PREFIX
from rocketmq_spark.errors import AccessDenied, GroupNotFound, NotSupported, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.session import Client, client
from rocketmq_spark.source.offsets import Positions

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes positions that changed. Does nothing unless the user named a group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._published: dict[MessageQueue, int] = {}
        self._greeted = False

    def publish(self, positions: Positions) -> None:
        """Store ``positions`` where they differ from what was stored. Brokers that do not answer are asked next time."""
        if "group" not in self._options.given:
            return
        one = client(self._options)
        if not self._greeted:
            self._greeted = True
            self._look_for_members(one, self._routed(one, positions))
        changed = {q: offset for q, offset in positions.items() if self._published.get(q) != offset}
        if not changed:
            return
        deadline = Deadline.after(self._options.request_timeout)
        try:
            changed = self._routed(one, changed)
            try:
                one.brokers.commit(self._options.group, changed, deadline)
            except GroupNotFound:
                self._create_group(one)
                one.brokers.commit(self._options.group, changed, deadline)
        except RocketMQError as e:
            if not e.retriable:
                raise
            logger.warning("the offsets of group %s are published later: %s", self._options.group, e)
            return
        self._published.update(changed)

    def _routed(self, one: Client, positions: Positions) -> dict[MessageQueue, int]:
        """Those whose topic exists; a listener may be the first in its process to ask for it."""
        known = set()
        for topic in sorted({queue.topic for queue in positions}):
            try:
                one.routes.get(topic)
            except RocketMQError as e:
                logger.info("the offsets of topic %s are not published now: %s", topic, e)
            else:
                known.add(topic)
        return {queue: offset for queue, offset in positions.items() if queue.topic in known}

    def _create_group(self, one: Client) -> None:
        group = self._options.group
        try:
            one.admin.create_group(group)
        except (AccessDenied, NotSupported) as e:
            denied = isinstance(e, AccessDenied)
            raise GroupNotFound(
                f"the broker does not know group {group!r}, and "
                + ("this user may not create it" if denied else "a Proxy does not let it be created"),
                e.addr,
                e.broker_code,
                remark=e.remark,
                remedy=f"Let an administrator create it: mqadmin updateSubGroup -g {group} -c <cluster>",
            ) from e
        logger.info("consumer group %s was created", group)
        try:
            # Every consumer has one, and RocketMQ's own tools look a group up by it.
            one.admin.create_topic(RETRY_PREFIX + group, 1, timeout_s=self._options.request_timeout)
        except RocketMQError as e:
            logger.info("the retry topic of group %s was not created: %s", group, e)

    def _look_for_members(self, one: Client, positions: Positions) -> None:
        """Members of a live group commit offsets of their own, in turns with ours."""
        for broker in sorted({queue.broker_name for queue in positions}):
            try:
                members = one.brokers.members(
                    self._options.group, broker, Deadline.after(self._options.request_timeout)
                )
            except RocketMQError as e:
                logger.info("whether group %s has members is not known: %s", self._options.group, e)
                continue
            if members:
                logger.warning(
                    "group %s has %d live members (%s): their offsets and ours overwrite each other; use a group of its own",
                    self._options.group,
                    len(members),
                    ", ".join(members[:3]),
                )
                return

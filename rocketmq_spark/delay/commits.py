"""A node's progress in a queue, as brokers store it: four numbers, which are offsets of four consumer groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.release import Progress
from rocketmq_spark.errors import GroupNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

REQUEST_S = 3.0


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the consumer group, and of the groups whose offsets are the other numbers of a ``Committed``."""

    group: str

    @property
    def all(self) -> tuple[str, str, str, str]:
        return self.group, f"{self.group}_stored", f"{self.group}_done_ms", f"{self.group}_newest_ms"


class Committed(NamedTuple):
    """The progress in a queue, and the latest store time of the messages read (0 if unknown). With the store time, the next owner
    can detect that the topic was created again, so that the progress is about other messages.
    """

    progress: Progress
    newest_ms: int = 0

    @property
    def read(self) -> tuple[int, int]:
        """The end of the messages read, and their latest store time."""
        return self.progress.stored, self.newest_ms


class Commits:
    """The committed numbers of one group of nodes. Not thread-safe."""

    def __init__(
        self, member: GroupMember, names: Names, make_group: Callable[[str, Mapping[MessageQueue, int]], None]
    ) -> None:
        self._member = member
        self._names = names
        self._make_group = make_group
        self._told_all = True

    def of(self, queue: MessageQueue) -> Committed | None:
        """The last committed progress of a queue, or None. Raises the errors of requests."""
        deadline = Deadline.after(REQUEST_S)
        oldest, stored, done_ms, newest_ms = (
            self._member.committed(group, queue, deadline, False) for group in self._names.all
        )
        if oldest is None:
            return None
        return Committed(Progress(oldest, stored if stored is not None else oldest, done_ms or 0), newest_ms or 0)

    def tell(self, news: dict[MessageQueue, Committed]) -> bool:
        """Commit ``news``, and remove from it what brokers did not accept. Returns whether they accepted everything.

        ``done_ms`` is committed first: it may go back, and if the other commits fail then, a too late value would claim too much.
        The store time is committed last: if it is missing, messages only count as another topic's, and are read again.
        """
        count, groups = len(news), self._names.all
        for number in (2, 1, 0, 3):
            group = groups[number]
            offsets = {queue: (*committed.progress, committed.newest_ms)[number] for queue, committed in news.items()}
            errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
            if new := {queue: offsets[queue] for queue, e in errors.items() if isinstance(e, GroupNotFound)}:
                self._make_group(group, new)
                errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
            for queue in errors:
                del news[queue]
            if errors:
                error = next(iter(errors.values()))
                # Once when it begins.
                level = logging.WARNING if self._told_all else logging.INFO
                logger.log(
                    level, "cannot commit the positions of %d queues as group %s now: %s", len(errors), group, error
                )
        self._told_all = len(news) == count
        return self._told_all

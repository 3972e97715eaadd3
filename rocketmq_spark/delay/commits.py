"""What the nodes of a group say of a queue: numbers that they commit as offsets of consumer groups, of which a node has four."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
    """The consumer group, and those whose offsets are the other numbers of a ``Committed``."""

    group: str

    @property
    def all(self) -> tuple[str, str, str, str]:
        return self.group, f"{self.group}_stored", f"{self.group}_done_ms", f"{self.group}_newest_ms"


class Committed(NamedTuple):
    """How far a queue is, and the latest store time of what was read of it: by that its next owner knows the messages that are
    spoken of from those of a topic that was made again. 0 where that was not said.
    """

    progress: Progress
    newest_ms: int = 0

    @property
    def read(self) -> tuple[int, int]:
        """Up to which offset, and the store time."""
        return self.progress.stored, self.newest_ms


class Commits:
    """The committed numbers of one group of nodes. Not thread-safe."""

    def __init__(self, member: GroupMember, names: Names, make_group: Callable[[str, Sequence[str]], None]) -> None:
        self._member = member
        self._names = names
        self._make_group = make_group
        self._told_all = True

    def of(self, queue: MessageQueue) -> Committed | None:
        """What was committed last; None for nothing. Raises what questions raise."""
        deadline = Deadline.after(REQUEST_S)
        oldest, stored, done_ms, newest_ms = (
            self._member.committed(group, queue, deadline, False) for group in self._names.all
        )
        if oldest is None:
            return None
        return Committed(Progress(oldest, stored if stored is not None else oldest, done_ms or 0), newest_ms or 0)

    def tell(self, news: dict[MessageQueue, Committed]) -> bool:
        """Drops of ``news`` what brokers did not take; whether they took all.

        The moment first: it may go back, and with the old one a broker that gets no more commits would have too much. The store
        time last: with an older one those before it are taken for another topic's, and read again.
        """
        count, groups = len(news), self._names.all
        for number in (2, 1, 0, 3):
            group = groups[number]
            offsets = {queue: (*committed.progress, committed.newest_ms)[number] for queue, committed in news.items()}
            errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
            if new := sorted({queue.broker_name for queue, e in errors.items() if isinstance(e, GroupNotFound)}):
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

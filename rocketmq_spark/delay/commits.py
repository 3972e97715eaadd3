"""A node's progress in a queue, as brokers store it: offsets of consumer groups.

The commit of one offset is atomic, that of several is not: a node may be killed between two of them, and a paused node may commit
its offsets between those of the node that took over its queue. So each number is valid alone, whatever the others are:

``GROUP``: all envelopes before this offset are done. Members of the group, and tools, read it as the position of the group.
``GROUP_progress``: of the envelopes before an offset, all that were due by a moment are done. Both are in one number: the seconds
since 1970, and the last 31 bits of the offset; the offset before which all are done, up to 2^30 away, has the others.
``GROUP_progress_ms``: the milliseconds of that moment, and a digest of the other numbers. It is ignored if these have changed.
``GROUP_newest_ms``: the latest store time of the envelopes read.

Releases up to 0.1 commit the moment and the offset as two numbers, ``GROUP_done_ms`` and ``GROUP_stored``. If these are from two
nodes, they may claim that waiting envelopes are done. So this release does not read them, and sets ``GROUP_done_ms`` to 0, which
claims nothing: otherwise a node of an earlier release would combine it with newer numbers.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.java import LONG_MAX
from rocketmq_spark.delay.release import Progress
from rocketmq_spark.errors import GroupNotFound, RemoteProtocolError, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

REQUEST_S = 3.0

_OFFSET_BITS, _MS_BITS = 31, 10
_MAX_DISTANCE = 1 << _OFFSET_BITS - 1  # the last bits of an offset identify it within this distance from another offset
_LAST_S = (1 << 63 - _OFFSET_BITS) - 1
_SEALED = struct.Struct(">3Q")


@dataclass(frozen=True, slots=True)
class GroupNames:
    """The names of the consumer groups whose offsets are a node's numbers. The first one is the node's group."""

    group: str

    @property
    def all(self) -> tuple[str, str, str, str]:
        """In the order of ``CommittedOffsets``."""
        return self.group, f"{self.group}_progress", f"{self.group}_progress_ms", f"{self.group}_newest_ms"

    @property
    def legacy(self) -> str:
        """The group of ``GROUP_done_ms``, from releases up to 0.1."""
        return f"{self.group}_done_ms"


class CommittedOffsets(NamedTuple):
    """The committed offsets that the module's docstring describes."""

    oldest: int
    progress: int
    progress_ms: int
    newest_ms: int


class CommittedProgress(NamedTuple):
    """The progress in a queue, and the latest store time of the messages read (0 if unknown). By the store time, the next owner
    detects that the topic was created again, so that the progress is about other messages.
    """

    progress: Progress
    newest_ms: int = 0

    @property
    def read_end(self) -> tuple[int, int]:
        """The end of the messages read, and their latest store time."""
        return self.progress.read_end, self.newest_ms

    def encode(self) -> CommittedOffsets:
        oldest, read_end, done_ms = self.progress
        seconds, milliseconds = divmod(done_ms, 1000)
        # Numbers that are too large are lowered, so that they claim less.
        offset = min(read_end, oldest + _MAX_DISTANCE - 1) & ((1 << _OFFSET_BITS) - 1)
        progress = min(seconds, _LAST_S) << _OFFSET_BITS | offset
        return CommittedOffsets(
            oldest, progress, _seal(oldest, progress, self.newest_ms) << _MS_BITS | milliseconds, self.newest_ms
        )

    @classmethod
    def decode(cls, numbers: CommittedOffsets) -> CommittedProgress:
        """The progress that the numbers prove. They may be from several nodes. Messages that are done have been read, so the end
        of what was read is not before ``oldest``.
        """
        oldest, progress, progress_ms, newest_ms = numbers
        read_ahead = ((progress - oldest + _MAX_DISTANCE) & ((1 << _OFFSET_BITS) - 1)) - _MAX_DISTANCE
        done_ms = (progress >> _OFFSET_BITS) * 1000
        seal, milliseconds = divmod(progress_ms, 1 << _MS_BITS)
        if seal == _seal(oldest, progress, newest_ms):
            done_ms += milliseconds
        return cls(Progress(oldest, oldest + max(0, read_ahead), done_ms), newest_ms)


def _seal(*numbers: int) -> int:
    digest = hashlib.blake2b(_SEALED.pack(*numbers), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 + _MS_BITS


class ProgressCommits:
    """The committed numbers of one group of nodes. Not thread-safe."""

    def __init__(
        self, member: GroupMember, names: GroupNames, make_group: Callable[[str, Mapping[MessageQueue, int]], None]
    ) -> None:
        self._member = member
        self._names = names
        self._make_group = make_group
        self._all_accepted, self._any_accepted = True, False
        # Queues with a number of an earlier release that is not 0.
        self._with_legacy_offset: set[MessageQueue] = set()

    def fetch(self, queue: MessageQueue) -> CommittedProgress | None:
        """The last committed progress of a queue, or None. Raises the errors of requests, and ``RemoteProtocolError`` if a number
        is no offset.
        """
        deadline = Deadline.after(REQUEST_S)
        oldest, progress, *others = (self._fetch_offset(group, queue, deadline) for group in self._names.all)
        if self._fetch_offset(self._names.legacy, queue, deadline):
            self._with_legacy_offset.add(queue)
        if oldest is None:
            return None
        progress_ms, newest_ms = (number or 0 for number in others)
        if progress is None:
            return CommittedProgress(Progress(oldest, oldest, 0), newest_ms)
        return CommittedProgress.decode(CommittedOffsets(oldest, progress, progress_ms, newest_ms))

    def _fetch_offset(self, group: str, queue: MessageQueue, deadline: Deadline) -> int | None:
        offset = self._member.committed(group, queue, deadline, False)
        if offset is not None and not 0 <= offset <= LONG_MAX:
            raise RemoteProtocolError(f"a broker says that group {group} has the offset {offset}", queue=str(queue))
        return offset

    def commit(self, progress: dict[MessageQueue, CommittedProgress]) -> bool:
        """Commit the progress of queues, and remove from ``progress`` what brokers did not accept. Returns whether they accepted
        all.

        The store time is committed after the offsets: if it is missing, messages count as those of another topic, and are only
        read again.
        """
        count = len(progress)
        if legacy := self._with_legacy_offset & progress.keys():
            self._commit(self._names.legacy, dict.fromkeys(legacy, 0), progress)
            self._with_legacy_offset -= progress.keys()
        groups, numbers = self._names.all, {queue: committed.encode() for queue, committed in progress.items()}
        for number in (1, 0, 3, 2):
            self._commit(groups[number], {queue: numbers[queue][number] for queue in progress}, progress)
        self._all_accepted = len(progress) == count
        return self._all_accepted

    def _commit(
        self, group: str, offsets: Mapping[MessageQueue, int], progress: dict[MessageQueue, CommittedProgress]
    ) -> None:
        errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
        self._any_accepted = self._any_accepted or len(errors) < len(offsets)
        if without_group := {queue: offsets[queue] for queue, e in errors.items() if isinstance(e, GroupNotFound)}:
            errors = {
                **{queue: e for queue, e in errors.items() if queue not in without_group},
                **self._create_group(group, without_group),
            }
        for queue in errors:
            del progress[queue]
        if errors:
            error = next(iter(errors.values()))
            # A warning only for the first failure.
            level = logging.WARNING if self._all_accepted else logging.INFO
            logger.log(level, "cannot commit the positions of %d queues as group %s now: %s", len(errors), group, error)

    def _create_group(self, group: str, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Create the group on brokers that do not know it, and commit these offsets. Returns the errors.

        Raises an error only if no broker has ever accepted a commit: later an error concerns a single broker.
        """
        errors: dict[MessageQueue, RocketMQError] = {}
        for name in sorted({queue.broker_name for queue in offsets}):
            of_broker = {queue: offset for queue, offset in offsets.items() if queue.broker_name == name}
            try:
                self._make_group(group, of_broker)
                errors.update(self._member.commit(group, of_broker, Deadline.after(REQUEST_S)))
            except RocketMQError as e:
                errors.update(dict.fromkeys(of_broker, e))
        self._any_accepted = self._any_accepted or len(errors) < len(offsets)
        if not self._any_accepted:
            raise next(iter(errors.values()))
        return errors

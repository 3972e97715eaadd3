"""A node's progress in a queue, as brokers store it: offsets of consumer groups.

The commit of one offset is atomic, but the commits of several offsets are not. A node may be killed between two commits. A node
that was paused may commit between two commits of the queue's next owner. Therefore each committed number is valid alone, whatever
the other numbers are. The numbers are the offsets of these groups:

``GROUP``: an offset before which all envelopes are done. Members of the group, and tools, read this number as the position of the
group. ``GROUP_progress``: a moment (seconds since 1970) and the last 31 bits of an offset, packed into one number. All envelopes
before this offset that were due by this moment are done. The higher bits of this offset follow from the offset of ``GROUP``,
because the two offsets differ by at most 2^30. ``GROUP_progress_ms``: the milliseconds of this moment, and a digest of the other
numbers. The milliseconds are ignored if another number has changed. ``GROUP_newest_ms``: the latest store time of the envelopes
that were read.

Releases up to 0.1 commit the moment and the offset as two numbers, ``GROUP_done_ms`` and ``GROUP_stored``. This release does not
read these two numbers: if they are from different nodes, they may claim that waiting envelopes are done. This release sets
``GROUP_done_ms`` to 0, which claims nothing. Without this 0, a node of an earlier release would combine the old moment with
newer numbers.
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

REQUEST_TIMEOUT_S = 3.0

_OFFSET_BITS, _MS_BITS = 31, 10
_MAX_DISTANCE = 1 << _OFFSET_BITS - 1  # the last bits determine an offset that is at most this far from a known offset
_MAX_DONE_S = (1 << 63 - _OFFSET_BITS) - 1
_DIGESTED_NUMBERS = struct.Struct(">3Q")


@dataclass(frozen=True, slots=True)
class GroupNames:
    """The names of the consumer groups whose committed offsets are the numbers of a node's progress. The first name is the
    node's group.
    """

    group: str

    @property
    def all_groups(self) -> tuple[str, str, str, str]:
        """The names of the groups, in the order of the fields of ``CommittedOffsets``."""
        return self.group, f"{self.group}_progress", f"{self.group}_progress_ms", f"{self.group}_newest_ms"

    @property
    def legacy_group(self) -> str:
        """The group of ``GROUP_done_ms``, from releases up to 0.1."""
        return f"{self.group}_done_ms"


class CommittedOffsets(NamedTuple):
    """The committed offsets that the module's docstring describes."""

    oldest_offset: int
    packed_progress: int
    progress_ms: int
    newest_store_ms: int


class CommittedProgress(NamedTuple):
    """The progress in a queue, and the latest store time of the messages read (0 if unknown). If the topic was created again, the
    progress is about messages of the old topic; the next owner notices this by the store time.
    """

    progress: Progress
    newest_store_ms: int = 0

    @property
    def end_and_newest_store_ms(self) -> tuple[int, int]:
        """The end offset of the messages that were read, and their latest store time."""
        return self.progress.read_end, self.newest_store_ms

    def encode(self) -> CommittedOffsets:
        oldest_offset, read_end, done_ms = self.progress
        seconds, milliseconds = divmod(done_ms, 1000)
        # If a number is too large for its bits, a lower number is committed. It claims less progress, which is safe.
        offset_bits = min(read_end, oldest_offset + _MAX_DISTANCE - 1) & ((1 << _OFFSET_BITS) - 1)
        packed_progress = min(seconds, _MAX_DONE_S) << _OFFSET_BITS | offset_bits
        return CommittedOffsets(
            oldest_offset,
            packed_progress,
            _digest_of_numbers(oldest_offset, packed_progress, self.newest_store_ms) << _MS_BITS | milliseconds,
            self.newest_store_ms,
        )

    @classmethod
    def decode(cls, numbers: CommittedOffsets) -> CommittedProgress:
        """Return the progress that the numbers prove; the numbers may be from several nodes. ``read_end`` is at least
        ``oldest_offset``, because every message that is done was read.
        """
        oldest_offset, packed_progress, progress_ms, newest_store_ms = numbers
        distance = ((packed_progress - oldest_offset + _MAX_DISTANCE) & ((1 << _OFFSET_BITS) - 1)) - _MAX_DISTANCE
        done_ms = (packed_progress >> _OFFSET_BITS) * 1000
        numbers_digest, milliseconds = divmod(progress_ms, 1 << _MS_BITS)
        if numbers_digest == _digest_of_numbers(oldest_offset, packed_progress, newest_store_ms):
            done_ms += milliseconds
        return cls(Progress(oldest_offset, oldest_offset + max(0, distance), done_ms), newest_store_ms)


def _digest_of_numbers(*numbers: int) -> int:
    digest = hashlib.blake2b(_DIGESTED_NUMBERS.pack(*numbers), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 + _MS_BITS


class ProgressCommits:
    """The committed numbers of one group of nodes. Not thread-safe."""

    def __init__(
        self,
        member: GroupMember,
        group_names: GroupNames,
        make_group: Callable[[str, Mapping[MessageQueue, int]], None],
    ) -> None:
        self._member = member
        self._group_names = group_names
        self._make_group = make_group
        self._were_all_commits_accepted, self._was_any_commit_accepted = True, False
        # Queues for which an earlier release has committed a ``GROUP_done_ms`` above 0.
        self._queues_with_legacy_offset: set[MessageQueue] = set()

    def fetch(self, queue: MessageQueue) -> CommittedProgress | None:
        """Return the last committed progress of a queue; None if no progress was committed. Raises the errors of requests, and
        ``RemoteProtocolError`` if a number is no offset.
        """
        deadline = Deadline.after(REQUEST_TIMEOUT_S)
        oldest_offset, packed_progress, *other_numbers = (
            self._fetch_offset(group, queue, deadline) for group in self._group_names.all_groups
        )
        if self._fetch_offset(self._group_names.legacy_group, queue, deadline):
            self._queues_with_legacy_offset.add(queue)
        if oldest_offset is None:
            return None
        progress_ms, newest_store_ms = (number or 0 for number in other_numbers)
        if packed_progress is None:
            return CommittedProgress(Progress(oldest_offset, oldest_offset, 0), newest_store_ms)
        return CommittedProgress.decode(CommittedOffsets(oldest_offset, packed_progress, progress_ms, newest_store_ms))

    def _fetch_offset(self, group: str, queue: MessageQueue, deadline: Deadline) -> int | None:
        offset = self._member.committed(group, queue, deadline, False)
        if offset is not None and not 0 <= offset <= LONG_MAX:
            raise RemoteProtocolError(f"a broker says that group {group} has the offset {offset}", queue=str(queue))
        return offset

    def commit(self, progress: dict[MessageQueue, CommittedProgress]) -> bool:
        """Commit the progress of queues, and remove from ``progress`` the queues whose brokers did not accept it. Returns
        whether the brokers accepted all commits.

        The store time is committed after the offsets. If the node is killed between these commits, the next owner takes messages
        after the older store time for new ones, and reads them again.
        """
        queue_count = len(progress)
        if legacy_queues := self._queues_with_legacy_offset & progress.keys():
            self._commit(self._group_names.legacy_group, dict.fromkeys(legacy_queues, 0), progress)
            self._queues_with_legacy_offset -= progress.keys()
        groups, numbers = (
            self._group_names.all_groups,
            {queue: committed.encode() for queue, committed in progress.items()},
        )
        for index in (1, 0, 3, 2):
            self._commit(groups[index], {queue: numbers[queue][index] for queue in progress}, progress)
        self._were_all_commits_accepted = len(progress) == queue_count
        return self._were_all_commits_accepted

    def _commit(
        self, group: str, offsets: Mapping[MessageQueue, int], progress: dict[MessageQueue, CommittedProgress]
    ) -> None:
        errors = self._member.commit(group, offsets, Deadline.after(REQUEST_TIMEOUT_S))
        self._was_any_commit_accepted = self._was_any_commit_accepted or len(errors) < len(offsets)
        if offsets_without_group := {
            queue: offsets[queue] for queue, e in errors.items() if isinstance(e, GroupNotFound)
        }:
            errors = {
                **{queue: e for queue, e in errors.items() if queue not in offsets_without_group},
                **self._create_group(group, offsets_without_group),
            }
        for queue in errors:
            del progress[queue]
        if errors:
            error = next(iter(errors.values()))
            # Only the first failure is logged as a warning.
            level = logging.WARNING if self._were_all_commits_accepted else logging.INFO
            logger.log(level, "cannot commit the positions of %d queues as group %s now: %s", len(errors), group, error)

    def _create_group(self, group: str, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Create the group on brokers that do not know it, and commit ``offsets``. Returns the errors by queue.

        If no broker has ever accepted a commit, raises the first error. Once a broker has accepted a commit, an error concerns
        only one broker, and is returned.
        """
        errors: dict[MessageQueue, RocketMQError] = {}
        for broker_name in sorted({queue.broker_name for queue in offsets}):
            broker_offsets = {queue: offset for queue, offset in offsets.items() if queue.broker_name == broker_name}
            try:
                self._make_group(group, broker_offsets)
                errors.update(self._member.commit(group, broker_offsets, Deadline.after(REQUEST_TIMEOUT_S)))
            except RocketMQError as e:
                errors.update(dict.fromkeys(broker_offsets, e))
        self._was_any_commit_accepted = self._was_any_commit_accepted or len(errors) < len(offsets)
        if not self._was_any_commit_accepted:
            raise next(iter(errors.values()))
        return errors

"""Where the offsets of a group are stored: on brokers, or in a file if the group broadcasts.

Members of a group that shares its queues commit to brokers. A broadcasting member keeps a file, as Java's
``LocalFileOffsetStore``. Each write replaces the file atomically and keeps the previous file as ``.bak``, so one of the two is
complete whatever happens to the process. If both files are unreadable, loading raises an error, because starting without
offsets would repeat or lose messages. One consumer at a time owns a file. If two consumers shared a file, the slower consumer
would continue at the offsets of the faster consumer.

Each cluster has its own file, because brokers of two clusters may have the same names. Name servers identify a cluster: two lists
of name servers with an address in common belong to the same cluster.

``RunningConsumer`` calls ``persist`` every ``persist_interval_s``, and ``Ownership`` calls ``persist`` when a queue is
released. ``OffsetRequests`` sends the offset requests of a ``PullConsumer``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import safe_text
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.rebalance import StartOffset, StartOffsetRequests, start_offset
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.queues.environment import EnvironmentQueues

logger = logging.getLogger(__name__)

# The files that this process has locked (see ``_file_identity``). The set is needed, because the operating system lets a
# process lock the same file a second time.
_locked_files: set[tuple[int, int, int]] = set()
_locked_files_guard = threading.Lock()


def _replace_guard() -> None:
    """Replace the lock in a forked child, because the thread that may hold the lock does not exist in the child."""
    global _locked_files_guard
    _locked_files_guard = threading.Lock()


os.register_at_fork(after_in_child=_replace_guard)


FILE_NAME = "offsets.json"
_MAX_SHOWN_FILES = 10
MAX_NAME_BYTES = 255  # the longest name that Linux and macOS accept


def offsets_path(folder: Path, client: str, group: str, name_servers: Iterable[str]) -> Path:
    """Return the path of a group's offsets at one cluster.

    ``group`` is the group's name on the wire. ``client`` must be the same after a restart.
    """
    return folder / client / group / cluster_folder(name_servers) / FILE_NAME


def cluster_folder(name_servers: Iterable[str]) -> str:
    """Return the name of a cluster's folder: its name servers in sorted order, as many as fit into the name of a folder.

    Each name server identifies its cluster, so name servers that do not fit can be left out.
    """
    name = ""
    for server in sorted({server.lower() for server in name_servers}):
        longer_name = f"{name},{server}" if name else server
        if name and len(longer_name.encode()) > MAX_NAME_BYTES:
            break
        name = longer_name
    return name


def _modified_at(path: Path) -> float:
    """Return when a file was written; minus infinity if it does not exist or cannot be read."""
    try:
        return path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return -math.inf
    except OSError as e:
        logger.warning("%s may have offsets of the group, but cannot be read: %s", path, e)
        return -math.inf


class LocalOffsets:
    """The offsets in the file ``path``. A consumer locks the file with ``lock`` before it changes the offsets.

    ``depth`` is the number of folders from ``localOffsetsDir`` down to the file.
    """

    def __init__(self, path: Path, depth: int = 4) -> None:
        self._path = path
        self._depth = depth
        self._backup = path.with_name(f"{path.name}.bak")
        self._lock_path = path.with_name(f"{path.name}.lock")
        # The descriptor and the identity of the lock file; None while this object has not locked the file.
        self._lock: tuple[int, tuple[int, int, int]] | None = None

    def __str__(self) -> str:
        return str(self._path)

    def lock(self) -> None:
        """Lock the file until ``unlock``, or until the process ends. Raises ``OptionError`` if another consumer has locked it,
        and ``OffsetError`` if the file, its lock or a folder above belongs to another user.
        """
        if self._lock is not None:
            return
        self.check_owner()
        path = self._lock_path
        with _locked_files_guard:
            # If this process already has the lock, opening and closing the file again would release the lock. So the set is
            # checked first.
            if _file_identity(path) in _locked_files:
                raise self._locked_error()
            try:
                folders.make_folders(path.parent)
                descriptor = folders.open_lock(path, os.O_RDWR | os.O_CREAT)
            except OSError as e:
                logger.info("%s cannot be created: %s", path, e)
                return  # ``store`` raises, because offsets cannot be stored in this folder either
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                os.close(descriptor)
                if e.errno in (errno.EACCES, errno.EAGAIN):
                    raise self._locked_error() from e
                logger.info("%s cannot be locked: %s", path, e)  # the file system has no locks
                return
            self._lock = descriptor, _file_identity(descriptor)
            _locked_files.add(self._lock[1])

    def unlock(self) -> None:
        """Unlock the file."""
        with _locked_files_guard:
            if self._lock is not None:
                descriptor, identity = self._lock
                self._lock = None
                _locked_files.discard(identity)
                os.close(descriptor)

    def _locked_error(self) -> OptionError:
        return OptionError(
            f"another broadcasting consumer of this group stores its offsets in {self._path}; two consumers that share a "
            "file would lose messages",
            remedy="Set a different 'localOffsetsDir' for each consumer on a machine, and keep it across restarts",
        )

    @property
    def exists(self) -> bool:
        """Whether offsets were ever stored in this file or its backup."""
        return any(path.exists() for path in (self._path, self._backup))

    def legacy_file(self) -> LocalOffsets:
        """Return the group's file of earlier releases, which stored the offsets of all clusters in one file."""
        return LocalOffsets(self._path.parents[1] / self._path.name, self._depth - 1)

    def adopt_renamed_file(self) -> None:
        """If this file does not exist, but the group has a file under another list of the cluster's name servers, move that
        file to this path.

        Raises ``OptionError`` if another consumer has locked a file for another list, and ``OffsetError`` if the file cannot be
        moved.
        """
        files_of_cluster = self._other_files_of_cluster()
        for other_file in files_of_cluster:  # a file may be locked even if no offset is stored yet
            other_file.lock()
            other_file.unlock()
        if _modified_at(self._path) > -math.inf:
            return
        newest_file = max(files_of_cluster, key=lambda other_file: other_file._modification_times, default=None)
        if newest_file is None or newest_file._modification_times <= self._modification_times:
            return
        newest_file.lock()
        try:
            self._move_from(newest_file)
        finally:
            newest_file.unlock()

    def _other_files_of_cluster(self) -> list[LocalOffsets]:
        """Return the group's other files for the same cluster: their lists of name servers have an address in common with the
        list of this file.

        Files of other users are left out; ``other_files`` returns them.
        """
        servers = set(self._path.parent.name.split(","))
        try:
            cluster_folders = [
                folder for folder in self._path.parents[1].iterdir() if servers & set(folder.name.split(","))
            ]
        except OSError:  # if the folder cannot be read, ``load`` raises the error
            return []
        files = [LocalOffsets(folder / self._path.name) for folder in cluster_folders if folder != self._path.parent]
        return [other_file for other_file in files if other_file._foreign_file() is None]

    def _foreign_file(self) -> folders.ForeignFile | None:
        folders_above = self._path.parents[: self._depth]  # the owner of a folder can replace what is in the folder
        paths = (*reversed(folders_above), self._path, self._backup, self._lock_path)
        return next(filter(None, map(folders.foreign_file, paths)), None)

    def check_owner(self) -> None:
        """Raise ``OffsetError`` if another user owns the file, or a folder up to ``localOffsetsDir``, because that user could
        make this consumer skip messages.
        """
        if (foreign_file := self._foreign_file()) is not None:
            raise OffsetError(
                f"the offsets in {self._path} are not used: {foreign_file}",
                remedy="Choose another 'localOffsetsDir'. If you trust these offsets, root can first move them below a "
                "folder that only root may change, and then give them to you",
            )

    def warn_if_shared(self) -> None:
        """Log once if other users may read, write or replace the file."""
        with contextlib.suppress(OSError):  # ``store`` raises the error
            folders.warn_if_replaceable(self._path.parent, "the folder of 'localOffsetsDir'")
            folders.warn_if_others_have_rights(self._path.parent, "offsets")

    @property
    def _modification_times(self) -> tuple[float, float]:
        """The times when the file and its backup were written. They are compared to find the newer one of two files. A backup
        without its file counts as older than any file, because an interrupted move leaves only the backup behind.
        """
        return _modified_at(self._path), _modified_at(self._backup)

    def _move_from(self, source: LocalOffsets) -> None:
        try:
            folders.make_folders(self._path.parent)
            for target_path, source_path in ((self._path, source._path), (self._backup, source._backup)):
                with contextlib.suppress(FileNotFoundError):
                    source_path.replace(target_path)
        except OSError as e:
            raise OffsetError(
                f"offsets cannot be moved from {source._path} to {self._path}: {e}",
                remedy="Make both folders writable, or move the file",
            ) from e
        logger.info("offsets of %s are now in %s: the list of name servers has changed", source._path, self._path)

    def other_files(self) -> list[Path]:
        """Return the files of the group for other hosts and other name servers, if this host has no file for these name
        servers.
        """
        group_folder = self._path.parents[1]
        with contextlib.suppress(OSError):  # if the folder cannot be read, ``load`` raises the error
            if not self.exists and not self.legacy_file().exists:
                patterns = (f"*/{group_folder.name}/{FILE_NAME}", f"*/{group_folder.name}/*/{FILE_NAME}")
                return sorted(file for pattern in patterns for file in group_folder.parents[1].glob(pattern))
        return []

    def load(self) -> dict[MessageQueue, int]:
        """Return the stored offsets; empty if there is no file. Raises ``OffsetError`` if file and backup are both damaged, or
        belong to another user.
        """
        self.check_owner()
        problems = []
        for path in (self._path, self._backup):
            try:
                return _from_json(path.read_text("utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as e:
                problems.append(f"{path}: {e}")
        if problems:
            raise OffsetError(
                f"stored offsets cannot be read: {'; '.join(problems)}",
                remedy=f"Repair {self._path}, or remove it and its .bak to start without offsets",
            )
        return {}

    def store(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Replace the stored offsets. Raises ``OffsetError`` if the file cannot be written."""
        text = _to_json(offsets)
        try:
            folders.make_folders(self._path.parent)
            if _is_valid(self._path):
                _replace_file(self._backup, self._path.read_text("utf-8"))
            _replace_file(self._path, text)
        except OSError as e:
            raise OffsetError(
                f"offsets cannot be stored in {self._path}: {e}",
                remedy="Make the folder writable, or choose another one",
            ) from e

    def remove(self) -> None:
        """Remove the file and its backup. Raises ``OffsetError`` if a file cannot be removed."""
        try:
            for path in (self._backup, self._path):  # in this order, because ``load`` reads a backup without a file
                path.unlink(missing_ok=True)
        except OSError as e:
            raise OffsetError(
                f"offsets cannot be removed from {self._path}: {e}", remedy="Make the folder writable"
            ) from e


def _file_identity(file: Path | int) -> tuple[int, int, int]:
    """Return the process id, the device and the inode of a file; zeros if there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return os.getpid(), 0, 0
    return os.getpid(), status.st_dev, status.st_ino


def _replace_file(path: Path, text: str) -> None:
    # The name is unique, because several processes may store at the same time.
    temporary_path = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = folders.open_regular(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
        with contextlib.suppress(OSError):  # some file systems have no fsync for folders
            _fsync_folder(path.parent)
    finally:
        temporary_path.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    """Write a folder to disk, so that the new names of its files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_valid(path: Path) -> bool:
    """Return whether a file can be read. A damaged file must not replace a good backup."""
    try:
        _from_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _to_json(offsets: Mapping[MessageQueue, int]) -> str:
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, offset in sorted(offsets.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return json.dumps({"topics": topics, "v": 1}, separators=(",", ":"))


def _from_json(text: str) -> dict[MessageQueue, int]:
    try:
        document: Any = json.loads(text)
        return {
            MessageQueue(topic, broker, int(number)): _check_offset(offset)
            for topic, brokers in document["topics"].items()
            for broker, queues in brokers.items()
            for number, offset in queues.items()
        }
    except (AttributeError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f'expected {{"topics":{{"orders":{{"broker-a":{{"0":12}}}}}},"v":1}} ({e!r})') from e


def _check_offset(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not an offset; expected a whole number of at least 0")
    return value


class CommitFailureLog:
    """Logs when a broker fails to store a group's offsets: at the first failure, sometimes while failures continue, and when
    the broker can store offsets again.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._log_throttle = LogThrottle()  # by broker

    def log_changes(self, queues: Iterable[MessageQueue], errors: Mapping[MessageQueue, RocketMQError]) -> None:
        """Log what changed with a commit of ``queues`` that had these ``errors``."""
        # If a broker has several errors, only the first error counts. The order is reversed, so that the first error is
        # assigned last, and replaces the other errors.
        first_error_by_broker = {queue.broker_name: error for queue, error in reversed([*errors.items()])}
        for broker, error in first_error_by_broker.items():
            text = "group %s: offsets cannot be stored on broker %s, they are sent again: %s"
            logger.log(self._log_throttle.level(broker, error), text, self._group, broker, error)
        for broker in sorted({queue.broker_name for queue in queues} - first_error_by_broker.keys()):
            if self._log_throttle.mark_resolved(broker):
                logger.warning("group %s: broker %s can store offsets again", self._group, broker)


class OffsetStore(Protocol):
    """Reads and stores the offsets of a member. Errors of reads are raised; failed stores are logged, and repeated later."""

    def open(self) -> None:
        """Lock the file. Raises ``OptionError`` if another member has locked the file, and ``OffsetError`` if the file is
        damaged.
        """

    def close(self) -> None:
        """Unlock the file."""

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        """Return the stored offset; None if it is certain that no offset is stored."""

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store the offsets that have changed. If ``queues`` is given, store only the offsets of these queues."""


class BrokerOffsets:
    """``OffsetStore`` of a group that shares its queues.

    If ``is_ready`` is False for a queue, the offset of the queue is not stored, because another member may have locked the
    queue. That member stores the offset.
    """

    def __init__(
        self,
        port: GroupMember,
        group: str,
        state: MemberState,
        is_ready: Callable[[ProcessQueue], bool] = lambda queue: True,
    ) -> None:
        self._port = port
        self._group = group
        self._member_state = state
        self._is_ready = is_ready
        self._failure_log = CommitFailureLog(group)
        self._queues_in_flight: set[MessageQueue] = set()  # queues with a commit in flight
        self._commit_ended = threading.Condition(state.lock)

    def open(self) -> None:
        """Do nothing: brokers keep the offsets."""

    def close(self) -> None:
        """Do nothing: offsets on brokers need no open file."""

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        return self._port.committed(self._group, queue, deadline)

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        """Commit offsets. A queue has one commit in flight at a time, so that an old offset cannot arrive after the offset of a
        reset.

        Queues with a commit in flight are committed after the other queues. Queues that still have a commit in flight at
        ``deadline`` are left out.
        """
        with self._member_state.lock:
            remaining_queues = (
                set(queues)
                if queues is not None
                else self._member_state.offsets.changed_offsets().keys() - self._queues_in_flight
            )
        has_offsets = True
        while has_offsets:
            offsets: dict[MessageQueue, int] = {}
            committed_offsets: Mapping[MessageQueue, int] = {}
            try:
                if has_offsets := self._start_commit(remaining_queues, deadline, offsets):
                    errors = self._port.commit(self._group, offsets, deadline)
                    self._failure_log.log_changes(offsets, errors)
                    committed_offsets = {queue: offset for queue, offset in offsets.items() if queue not in errors}
            finally:
                with self._member_state.lock:
                    self._member_state.offsets.mark_committed(committed_offsets)
                    self._queues_in_flight -= offsets.keys()
                    self._commit_ended.notify_all()
            remaining_queues -= offsets.keys()

    def _may_store(self, queue: MessageQueue) -> bool:
        process_queue = self._member_state.queues.get(queue)
        return process_queue is None or self._is_ready(process_queue)

    def _start_commit(
        self, queues: Collection[MessageQueue], deadline: Deadline, started_offsets: dict[MessageQueue, int]
    ) -> bool:
        """Wait until one of ``queues`` has an offset to commit and no commit in flight. Returns False at the deadline, or if no
        queue has an offset to commit. Adds the offsets to ``started_offsets`` before the commits of the queues count as in
        flight, so that the caller can free the queues after Ctrl-C.
        """
        with self._member_state.lock:
            while True:
                changed_offsets = self._member_state.offsets.changed_offsets()
                offsets = {
                    queue: changed_offsets[queue]
                    for queue in queues
                    if queue in changed_offsets and self._may_store(queue)
                }
                offsets_to_send = {
                    queue: offset for queue, offset in offsets.items() if queue not in self._queues_in_flight
                }
                if offsets_to_send or not offsets or not self._commit_ended.wait(deadline.remaining()):
                    started_offsets.update(offsets_to_send)
                    self._queues_in_flight |= offsets_to_send.keys()
                    return bool(offsets_to_send)


class FileOffsets:
    """``OffsetStore`` of a broadcasting member. The file keeps the offsets of queues that the member does not have now.

    A queue without an offset in ``file`` adopts its offset from the earlier file, in which earlier releases stored the offsets
    of all clusters. The earlier file does not say to which cluster an offset belongs. Therefore, the first member that
    starts the queue adopts the offset, unless the offset is greater than the end offset of the queue. The member stores the
    offset in ``file`` before it removes the offset from the earlier file, so that a crash loses no offset.
    """

    def __init__(
        self, file: LocalOffsets, state: MemberState, end_offset_of: Callable[[MessageQueue, Deadline], int]
    ) -> None:
        self._file = file
        self._legacy_file = file.legacy_file()
        self._member_state = state
        self._end_offset_of = end_offset_of
        self._is_failing = False
        self._write_lock = threading.Lock()

    def open(self) -> None:
        for file in (self._legacy_file, self._file):  # checked before a file is created in another user's folder
            file.check_owner()
        self._file.lock()
        self._file.warn_if_shared()
        self._file.adopt_renamed_file()
        # ``load`` raises the error of a damaged file now, and not when the first queue is started.
        stored_offsets, legacy_offsets = self._file.load(), self._legacy_file.load()
        # The offsets of ``adopted_queues`` are in both files, because a process crashed between the two writes of
        # ``_adopt_offset``. If the offsets stayed in the earlier file, another cluster would adopt them, too.
        if adopted_queues := {queue for queue, offset in legacy_offsets.items() if stored_offsets.get(queue) == offset}:
            self._remove_adopted_offsets(adopted_queues)
        if other_files := self._file.other_files():
            text = (
                "this broadcasting consumer starts without offsets, because %s does not exist. Its group has offsets for other "
                "hosts or name servers: %s. If one of these files belongs to this consumer, stop the consumer and move the file "
                "to the first path. A container needs a host name that stays the same after a restart"
            )
            # The log line names only some files, because other users may have created any number of files.
            more_text = (
                f" and {len(other_files) - _MAX_SHOWN_FILES} more" if len(other_files) > _MAX_SHOWN_FILES else ""
            )
            logger.warning(text, self._file, ", ".join(map(str, other_files[:_MAX_SHOWN_FILES])) + more_text)

    def close(self) -> None:
        self._file.unlock()

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        offset = self._file.load().get(queue)
        if offset is None and queue in self._legacy_file.load():
            end_offset = self._end_offset_of(queue, deadline)
            with self._write_lock:
                return self._adopt_offset(queue, end_offset)
        return offset

    def _adopt_offset(self, queue: MessageQueue, end_offset: int) -> int | None:
        """Move the offset of ``queue`` from the earlier file. Returns None if the offset belongs to another cluster, or was
        moved already.
        """
        self._legacy_file.lock()
        try:
            legacy_offsets = self._legacy_file.load()
            offset = legacy_offsets.pop(queue, None)
            if offset is None:
                return None
            if offset > end_offset:
                text = (
                    "offset %d of %s in %s is greater than the end of the queue, %d: it belongs to another cluster, or the topic "
                    "was created again. This consumer does not use the offset"
                )
                logger.warning(text, offset, queue, self._legacy_file, end_offset)
                return None
            self._file.store({queue: offset, **self._file.load()})
            self._replace_legacy_offsets(legacy_offsets)
            return offset
        finally:
            self._legacy_file.unlock()

    def _remove_adopted_offsets(self, queues: Set[MessageQueue]) -> None:
        try:
            self._legacy_file.lock()
        except OptionError:  # a member of an earlier release uses the file, and may have changed the offsets
            return
        try:
            self._replace_legacy_offsets(
                {queue: offset for queue, offset in self._legacy_file.load().items() if queue not in queues}
            )
        finally:
            self._legacy_file.unlock()

    def _replace_legacy_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        if offsets:
            self._legacy_file.store(offsets)
        else:
            self._legacy_file.remove()

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._write_lock:
            self._persist()

    def _persist(self) -> None:
        with self._member_state.lock:
            changed_offsets, offsets = (
                self._member_state.offsets.changed_offsets(),
                self._member_state.offsets.all_offsets(),
            )
        if not changed_offsets:
            return
        try:
            self._file.store({**self._file.load(), **offsets})
        except RocketMQError as e:
            if not self._is_failing:
                logger.warning("offsets are not stored yet: %s", e)
            self._is_failing = True
            return
        if self._is_failing:
            self._is_failing = False
            logger.warning("offsets can be stored again")
        with self._member_state.lock:
            self._member_state.offsets.mark_committed(offsets)


MAX_OFFSET = 2**63 - 1


def check_offset(queue: MessageQueue, offset: object) -> None:
    """Raise ``OffsetError`` if a value that a user passed is not an offset."""
    is_integer = isinstance(offset, Integral) and not isinstance(offset, bool)
    if not is_integer or not 0 <= offset <= MAX_OFFSET:  # type: ignore[operator]
        raise OffsetError(
            f"the offset is {safe_text(offset)}; expected a whole number from 0 to {MAX_OFFSET}",
            topic=queue.topic,
            queue=str(queue),
        )


class OffsetRequests:
    """Sends the offset requests of a consumer, and raises their errors."""

    def __init__(self, member: GroupMember, settings: ConsumerSettings) -> None:
        self._member = member
        self._settings = settings
        self._environment_queues = EnvironmentQueues(settings.environment)
        self._failure_log = CommitFailureLog(settings.group)

    def queues(self, topic: str, refresh: bool = False) -> Sequence[MessageQueue]:
        """Return the readable queues of a topic in the environment; ``refresh`` fetches the route again."""
        return self._environment_queues(self._member.queues(topic, self.request_deadline(), refresh))

    def start_offset_of(self, queue: MessageQueue) -> StartOffset:
        """Return the start offset of a new queue. Raises ``OptionError`` if the queue belongs to another environment."""
        queues = self.queues(queue.topic)  # the request also fetches the address of the broker
        if self._settings.environment is not None and queue not in queues:
            name = self._settings.environment.name
            raise OptionError(f"queue {queue} does not belong to environment {name!r}; expected one of {list(queues)}")
        requests = StartOffsetRequests(
            committed_offset=lambda: self._member.committed(self._settings.group, queue, self.request_deadline()),
            max_offset=lambda: self.bounds(queue).max_offset,
            offset_at_time=lambda epoch_ms: self.offset_at_time(queue, epoch_ms),
        )
        return start_offset(queue, self._settings.consume_from, requests)

    def bounds(self, queue: MessageQueue, for_group: bool = False) -> QueueBounds:
        """Return the bounds of a queue; with ``for_group``, those that the group can pull (see ``GroupMember.bounds``)."""
        return self._member.bounds(queue, self.request_deadline(), self._settings.group if for_group else None)

    def offset_at_time(self, queue: MessageQueue, epoch_ms: int) -> int:
        """Return the first offset stored at or after a time; the end offset if all messages are older."""
        offset = self._member.search_offset(queue, epoch_ms, self.request_deadline(), self._settings.group)
        return self.bounds(queue, for_group=True).clamp(offset)

    def checked_offset(self, queue: MessageQueue, offset: int) -> int:
        """Return ``offset``. Raises ``OffsetError`` if the queue has no such offset; the end offset is allowed."""
        check_offset(queue, offset)
        bounds = self.bounds(queue, for_group=True)
        if bounds.clamp(offset) != offset:
            raise OffsetError(
                f"seek to offset {offset}; expected one from {bounds.min_offset} to {bounds.max_offset}",
                topic=queue.topic,
                queue=str(queue),
                remedy="Seek the beginning or the end instead",
            )
        return offset

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset; None if the group has no offset."""
        self.queues(queue.topic)
        return self._member.committed(self._settings.group, queue, self.request_deadline(), zero_if_new=False)

    def commit(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit offsets, and return the errors by queue. Logs when a broker starts to fail, and when the broker works again."""
        if not offsets:
            return {}
        errors = self._member.commit(self._settings.group, offsets, self.request_deadline())
        self._failure_log.log_changes(offsets, errors)
        return errors

    def request_deadline(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)

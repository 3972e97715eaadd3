"""The folders of spools: one in ``spoolDir`` for each writing process. A process sends the records of its own folder, and of the
folders that it has adopted.

A process leaves its folder behind when it ends. RocksDB's lock shows whether the process is alive, because the lock ends with the
process. Other processes adopt the folders of dead processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import shlex
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base import extras, folders, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import OptionError, RocketMQError, SpoolError, SpoolFull
from rocketmq_spark.model import MessageQueue, SpooledSend
from rocketmq_spark.options import Options, option_name
from rocketmq_spark.options.paths import check_safe, expand_home
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment, environment_of, is_by_position, layout_text
from rocketmq_spark.remoting.connection import batch_writes
from rocketmq_spark.session import SPOOLS_KIND, connection_key, sender
from rocketmq_spark.spool.database import Database, is_database, is_in_use
from rocketmq_spark.spool.files import EMPTIED_PREFIX, SPOOL_PREFIXES, WORKER_PREFIX, copy_instruction
from rocketmq_spark.spool.lanes import BatchPredicate
from rocketmq_spark.spool.records import LASTING_PREFIX, RECORD, Done, Record, SpoolOwner, area_end
from rocketmq_spark.spool.recovery import DAMAGED_FOLDER, locked
from rocketmq_spark.spool.store import Store

if TYPE_CHECKING:
    from rocketmq_spark.spool.spool import RedeliveryPolicy, SendSpool

logger = logging.getLogger(__name__)

_SPOOL_FIELDS = ("spool_dir", "spool_sync", "spool_max_bytes")
SPOOL_OPTIONS = ("on_send_failure", *_SPOOL_FIELDS)


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """The folder of a spool, the durability of added records, and the limit of their bytes."""

    folder: Path
    sync: str
    max_bytes: int

    @classmethod
    def of(cls, options: Options) -> SpoolSettings | None:
        """Return the settings in ``options``; None if the options name no spool. Raises one ``OptionError`` that lists all
        problems.
        """
        problems = option_problems(options)
        if problems:
            raise OptionError.of(problems)
        if options.on_send_failure != "spool":
            return None
        assert options.spool_dir is not None
        folder = check_safe(expand_home(options.spool_dir, "spoolDir"), "spoolDir")
        return cls(folder, options.spool_sync, options.spool_max_bytes)


def option_problems(options: Options) -> list[str]:
    """The problems of these options, as sentences without full stops."""
    if options.on_send_failure != "spool":
        return [
            f"option {option_name(field)!r} has no effect without 'onSendFailure' spool"
            for field in _SPOOL_FIELDS
            if field in options.given_fields
        ]
    problems = []
    if options.spool_dir is None:
        problems.append(
            "option 'onSendFailure' is 'spool', which needs option 'spoolDir': a folder on a disk that stays"
        )
    if not extras.is_installed("rocksdict"):
        command = extras.install_command(extras.SPOOL)
        problems.append(f"option 'onSendFailure' is 'spool', which needs the package rocksdict: {command}")
    return problems


def owner_of(options: Options, purpose: str = "") -> SpoolOwner:
    """The owner of the records in a spool that is opened with these options."""
    environment_text = (
        f"environment {options.environment!r} ({options.environment_mode})" if options.environment else ""
    )
    if environment_text and options.environments is not None:
        environment_text += f", of {layout_text(options.environments)}"
    return SpoolOwner(tuple(sorted(options.cluster)), options.namespace or "", environment_text, purpose)


_PAGE_RECORDS, _PAGE_BYTES = (
    250,
    4 << 20,
)  # limits of a page: for the first records of lanes, and again for the records that follow them in the lanes
_FAR_FUTURE_MS = 2**63


def spools_in(folder: Path) -> list[Path]:
    """Return the spools of all users in a folder: the folder itself, and the spools of workers in the folder. Raises
    ``SpoolError`` if this user may not read the folder.
    """
    candidates = sorted(folder / name for name in _list_names(folder) if name.startswith(WORKER_PREFIX))
    worker_spools = [path for path in candidates if is_database(path)]
    return [folder, *worker_spools] if is_database(folder) else worker_spools


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise SpoolError(
            f"the spools in {folder} cannot be read by uid {os.geteuid()}: {e.strerror}",
            remedy="Name a folder of this user. If several users share the folder, create it for all of them: mkdir -m 1777",
        ) from e


class _EntriesByOwner(NamedTuple):
    """Those entries of a folder whose names begin with a prefix: the paths of this user's entries, and the names of other
    users' entries by user id.
    """

    own_paths: list[Path]
    foreign_names: dict[int, list[str]]


def _entries_by_owner(folder: Path, prefix: str) -> _EntriesByOwner:
    """List the entries of a folder by owner. Opens nothing of another user, and follows no link of another user."""
    entries = _EntriesByOwner([], {})
    for name in _list_names(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):  # the entry no longer exists, or this user may not read its status
                uid = folders.owner_uid(os.lstat(f"{folder}/{name}"))
                if uid == os.geteuid():
                    entries.own_paths.append(folder / name)
                else:  # only the name is kept, because there may be very many
                    entries.foreign_names.setdefault(uid, []).append(name)
    entries.own_paths.sort()
    return entries


def _adoptable_spools(folder: Path) -> list[Path]:
    """Return the spools that no running process uses. Spools of other users are left out, with one warning for each user.

    ``folder`` itself counts as a spool only if no other user may put files into it.
    """
    entries, adoptable_paths = _entries_by_owner(folder, WORKER_PREFIX), []
    for uid, names in entries.foreign_names.items():
        foreign_file = folders.ForeignFile(folder / min(names), uid)
        warn = functools.partial(_warn_of_foreign_spools, foreign_file.path, foreign_file, len(names))
        process.get_or_create("foreign spools", (folder, uid), warn)
    for path in filter(is_database, (folder, *entries.own_paths)):
        reason: object = folders.foreign_file_in(path, SPOOL_PREFIXES, root_may_own=path == folder)
        if reason is None and path == folder:
            reason = next(folders.exposures_of(folder, ()), None)
        if reason is not None:
            process.get_or_create("foreign spools", path, functools.partial(_warn_of_foreign_spools, path, reason))
        elif not is_in_use(path):
            adoptable_paths.append(path)
    return adoptable_paths


def _warn_of_foreign_spools(path: Path, reason: object, count: int = 1) -> None:
    more_text = f", as are {count - 1} more of that user in this folder" if count > 1 else ""
    logger.warning(
        "the spool in %s is left alone%s: %s. If no process uses it, %s",
        path,
        more_text,
        reason,
        copy_instruction(path),
    )


def _open_abandoned_store(folder: Path, path: Path, make_store: Callable[[Path], Store]) -> Store:
    """Open the store of a dead process: ``folder`` itself, which is never removed, or a worker's folder in ``folder``."""
    store = make_store(path)
    try:
        if path != folder:
            _remove_mark(path)
    except BaseException:
        store.close()
        raise
    return store


def _remove_mark(path: Path) -> None:
    """Remove the mark of an emptied folder from a folder that is used again.

    ``_remove_folder`` renames a folder and then marks it. After a power cut, the folder may have the mark, but still its old
    name. While the mark is there, a user who may rename the folder could make this package delete the records in the folder.
    """
    try:
        with folders.open_subfolder(path.parent, (path.name,)) as folder_fd:
            if _EMPTIED_MARK in os.listdir(folder_fd):
                os.unlink(_EMPTIED_MARK, dir_fd=folder_fd)
    except OSError as e:
        raise SpoolError(
            f"{path / _EMPTIED_MARK} cannot be removed: {e.strerror}",
            remedy="Remove this file: it marks a folder whose records may be deleted",
        ) from e


def claim_store(folder: Path, make_store: Callable[[Path], Store]) -> Store:
    """Open a store for this process: the store of a dead process, or a new store."""
    for path in _adoptable_spools(folder):
        try:
            return _open_abandoned_store(folder, path, make_store)
        except (SpoolError, OptionError) as e:  # another process was faster, or the folder is damaged or not safe
            logger.warning("skipping the spool in %s: %s", path, e)
    return make_store(folder / f"{WORKER_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}")


def adopt_records(folder: Path, target_store: Store, make_store: Callable[[Path], Store], now_ms: int) -> int:
    """Move the records of dead processes into a store of this process. Returns the number of moved records.

    Records are added to ``target_store`` before they are deleted from the other store, so a kill may duplicate records but
    loses none. Dead letters stay in their folder. If ``target_store`` has no room for a record, the record stays in its folder,
    too, and no error is raised. Remaining delays stay the same even if the clock of the other process was ahead of ``now_ms``.
    """
    moved_count = 0
    # If a process was killed while it removed an empty folder, the folder is still there. So remove it now.
    for emptied_folder in _entries_by_owner(folder, EMPTIED_PREFIX).own_paths:
        _remove_emptied_folder(emptied_folder)
    for path in _adoptable_spools(folder):
        try:
            store = _open_abandoned_store(folder, path, make_store)
            try:
                for count in _move_records(store, target_store, max(0, store.totals.last_recorded_ms - now_ms)):
                    moved_count += count
                is_empty = store.totals.all_bytes == 0
            finally:
                store.close()
            if is_empty and path != folder and not any(path.glob(f"{DAMAGED_FOLDER}-*")):
                _remove_folder(path)
        except SpoolFull as e:
            logger.warning("the records of the spool in %s stay there for now: %s", path, e)
            break
        except (SpoolError, OptionError) as e:
            logger.warning("skipping the spool in %s: %s", path, e)
    return moved_count


def _remove_folder(path: Path) -> None:
    """Remove an empty store's folder.

    The caller must have closed the store. When RocksDB closes a store, it deletes unknown files in the folder that now has the
    store's name, even the files of another process. The folder is renamed first, under the lock, so that another process finds
    either the whole folder or no folder.
    """
    emptied_folder = path.with_name(f"{EMPTIED_PREFIX}{uuid.uuid4().hex}")
    with locked(path), folders.open_subfolder(path.parent, (path.name,)) as folder_fd:
        db = Database(path, read_only=True)
        try:
            contents = next(db.scan(RECORD, area_end(RECORD)), None) or db.gaps or db.damage
        finally:
            db.close()
        if contents:  # another process has used the folder meanwhile
            return
        path.rename(emptied_folder)
        os.close(os.open(_EMPTIED_MARK, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd))
    _remove_emptied_folder(emptied_folder)


# The file that marks a folder without records. Users who may rename the folders of others in a ``spoolDir`` cannot create a file
# in these folders.
_EMPTIED_MARK = "emptied"


def _remove_emptied_folder(path: Path) -> None:
    """Remove a folder that a process of this user has marked as emptied. The mark is removed last. Another process may remove the
    folder at the same time, so errors of the file system are ignored.
    """
    with contextlib.suppress(OSError), folders.open_subfolder(path.parent, (path.name,)) as folder_fd:
        entries = os.listdir(folder_fd)
        if entries and _EMPTIED_MARK not in entries:
            text = "%s is left alone: no process has marked it as empty. If it may have messages, rename it to %s…"
            process.get_or_create("unmarked spools", path, lambda: logger.warning(text, path, WORKER_PREFIX))
            return
        for name in sorted(entries, key=_EMPTIED_MARK.__eq__):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=folder_fd)
            else:
                os.unlink(name, dir_fd=folder_fd)
        path.rmdir()


def _move_records(store: Store, target_store: Store, clock_ahead_ms: int) -> Iterator[int]:
    while store.next_due_ms() is not None:  # unreadable records become dead letters, so a page may be empty
        page = store.take(_FAR_FUTURE_MS, _PAGE_RECORDS, _PAGE_BYTES, _page_predicate())
        notes = {name: value for name, value in store.notes().items() if value}  # an empty note counts as deleted
        records_and_due_times, record_states = [], []
        for leased in page:
            due_ms = max(0, leased.due.due_ms - clock_ahead_ms)
            records_and_due_times += [
                (leased.record, due_ms),
                *((follower.record, due_ms) for follower in leased.followers),
            ]
            record_states += [leased.state, *(follower.state for follower in leased.followers)]
        target_store.add(records_and_due_times, notes, record_states)
        store.settle([(leased, Done()) for leased in page], 0)
        yield len(records_and_due_times)


def _page_predicate() -> BatchPredicate:
    """Return a predicate for the records that follow the first record of their lane. It accepts at most one page of records,
    for all lanes together.
    """
    added_count, added_bytes = 0, 0

    def has_room(record: Record) -> bool:
        nonlocal added_count, added_bytes
        added_count, added_bytes = added_count + 1, added_bytes + len(record.payload)
        return added_count <= _PAGE_RECORDS and added_bytes <= _PAGE_BYTES

    return lambda first: has_room


def open_store(
    path: Path, options: Options, spool_settings: SpoolSettings | None = None, keep_owner: bool = False
) -> Store:
    """Open the store of a folder, whose records must belong to the options' cluster, namespace and environment. With
    ``keep_owner``, the folder may belong to another user, and the stored owner is not changed, so that the owner's process can
    open the store again. In this case, the caller must not add records.
    """
    if spool_settings is not None:
        check_safe(path, "spoolDir")  # RocksDB opens files by their names, and follows links
    store = (
        Store(path, spool_settings.sync, spool_settings.max_bytes)
        if spool_settings is not None
        else Store(path, any_owner=keep_owner)
    )
    try:
        environment, noted_queues = environment_of(options), _noted_queues(store)
        if environment is not None and not environment.is_by_position:
            _check_noted_queues(store, noted_queues, environment)  # if this fails, the owner stays unchanged
        store.set_owner(owner_of(options), keep_owner=keep_owner)
        if environment is not None and environment.is_by_position:
            _use_noted_queues(store, noted_queues, queues_of_environment(sender(options), environment))
    except BaseException:
        store.close()
        raise
    return store


# Prefix of the notes with an environment's queues. If these queues follow from the environment's number, there is a note for
# each topic. Without these notes, records that were spooled while a broker was down would later go to other queues.
_QUEUES_PREFIX = LASTING_PREFIX + b"queues of "
_QueuesByTopic = dict[str, tuple[MessageQueue, ...]]


def _noted_queues(store: Store) -> _QueuesByTopic:
    """The queues in a store's notes. The notes of an empty store are deleted."""
    queues_by_topic = {}
    for name, value in store.notes().items():
        if not name.startswith(_QUEUES_PREFIX) or not value:
            continue
        if store.totals.all_bytes:
            topic, queues = _parse_queues_note(name, value, store.path)
            queues_by_topic[topic] = queues
        else:
            store.add([], {name: b""})
    return queues_by_topic


def _parse_queues_note(name: bytes, value: bytes, path: Path) -> tuple[str, tuple[MessageQueue, ...]]:
    try:
        topic = name.removeprefix(_QUEUES_PREFIX).decode()
        queues = [(str(broker), int(queue_id)) for broker, queue_id in json.loads(value)]
    except (ValueError, TypeError, RecursionError) as e:
        raise SpoolError(
            f"in the spool in {path}, the note about the queues of its environment cannot be read, so no message is sent",
            remedy=f"Read the messages with: rocketmq-spark spool export {shlex.quote(str(path))}",
        ) from e
    return topic, tuple(MessageQueue(topic, *broker_and_id) for broker_and_id in queues)


def _check_noted_queues(store: Store, noted_queues: _QueuesByTopic, environment: Environment) -> None:
    """Raise ``SpoolError`` if a queue in the store's notes does not belong to ``environment``."""
    for topic, queues in noted_queues.items():
        if tuple(environment.owned(queues, possibly_empty_topics=(topic,))) != queues:
            raise SpoolError(
                f"the records in {store.path} are for {', '.join(map(str, queues))}; their environment "
                "had these queues by its number, but option 'environments' gives other queues to environment "
                f"{environment.name!r}",
                remedy="If the records belong to this environment, assign these queues to it in option 'environments', such as "
                + _sample_option(environment, queues),
            )


def _sample_option(environment: Environment, queues: Sequence[MessageQueue]) -> str:
    return json.dumps({environment.name: {queue.broker_name: [queue.queue_id] for queue in queues}})


def _use_noted_queues(store: Store, noted_queues: _QueuesByTopic, counted_queues: _QueuesByTopic) -> None:
    """Add the queues in the store's notes to ``counted_queues``. Raises ``SpoolError`` if ``counted_queues`` already has other
    queues for a topic.
    """
    for topic, queues in noted_queues.items():
        if counted_queues.setdefault(topic, queues) != queues:
            raise SpoolError(
                f"the records in {store.path} are for {', '.join(map(str, queues))}, but this process uses "
                f"{', '.join(map(str, counted_queues[topic]))} as the queues of the same environment",
                remedy="Set option 'environments' to the number of environments, or to their queues",
            )


def _queues_notes(counted_queues: _QueuesByTopic, sends: Sequence[SpooledSend]) -> Mapping[bytes, bytes]:
    """Return the notes about the queues of the topics of ``sends``."""
    return {
        _QUEUES_PREFIX + topic.encode(): json.dumps(
            [(queue.broker_name, queue.queue_id) for queue in counted_queues[topic]]
        ).encode()
        for topic in {send.topic for send in sends} & counted_queues.keys()
    }


def open_send_spool(
    store: Store,
    sender_: Sender,
    settings: ProducerSettings,
    clock: Callable[[], int] | None = None,
    policy: RedeliveryPolicy | None = None,
) -> SendSpool:
    """Return a spool that sends the records of an open ``store``. Closes the store if the spool cannot be created."""
    try:
        from rocketmq_spark.producer.resender import EngineResender
        from rocketmq_spark.spool.spool import SEND_POLICY, SendSpool

        timer_name = f"rocketmq-{settings.group}-spool"
        resender = EngineResender(sender_, settings, Timer(f"{timer_name}-send"), batch_writes)
        policy, environment = policy or SEND_POLICY, settings.environment
        if environment is not None and not environment.is_by_position:
            resender.pin_queues(_noted_queues(store))
        elif environment is not None:
            policy = policy._replace(
                notes_of_sends=functools.partial(_queues_notes, queues_of_environment(sender_, environment))
            )
        return SendSpool(store, resender, Timer(timer_name), clock, policy=policy)
    except BaseException:
        store.close()
        raise


def worker_spool(options: Options, settings: ProducerSettings) -> Spool | None:
    """Return the spool of this worker process in ``spoolDir``, with the records of dead processes. Return None if the options
    name no spool.

    The spool lives as long as the process, across tasks, and continues to send.
    """
    spool_settings = SpoolSettings.of(options)
    if spool_settings is None:
        return None

    def make_store(path: Path) -> Store:
        return open_store(path, options, spool_settings)

    def make_adopted_store(path: Path) -> Store:
        store = make_store(path)
        if not is_by_position(options) and _noted_queues(store):  # the sender of the spool does not know these queues
            store.close()
            raise SpoolError(
                f"the records in {path} are for queues that their environment had by its number, and this process does not know "
                "these queues"
            )
        return store

    key = (spool_settings, owner_of(options), options.environments, connection_key(options), settings)
    with process.entry_lock(SPOOLS_KIND, spool_settings.folder):
        spools_by_key: dict[object, SendSpool] = process.entries(SPOOLS_KIND)
        if key not in spools_by_key:
            sender_ = sender(options)  # this call may fail, so it comes before the store is opened
            spools_by_key[key] = open_send_spool(claim_store(spool_settings.folder, make_store), sender_, settings)
        own_spool = spools_by_key[key]
        if adopt_records(spool_settings.folder, own_spool.store, make_adopted_store, own_spool.now_ms()):
            own_spool.redelivery.retry_earlier_records()
    return own_spool


# Modules that ``open_drainer`` and the sender import on first use.
_LAZY_IMPORTS = ("encodings.idna", "pyarrow", "rocketmq_spark.producer.resender", "rocketmq_spark.spool.spool")
_PRELOAD_TIMEOUT_S = 5.0


def preload(options: Options, paths: Sequence[Path]) -> None:
    """Read modules, TLS files and keys before root changes to the owners of the spools, because perhaps only root can read
    these files.

    A request to the name server makes the client read the files; the answer is ignored. Raises ``OptionError`` if a file cannot
    be used.
    """
    if os.geteuid() != folders.ROOT_ID or not any(map(folders.foreign_file, paths)):
        return
    for module in _LAZY_IMPORTS:
        with contextlib.suppress(ImportError):  # the module is optional; a later import reports the error
            importlib.import_module(module)
    try:
        sender(options).publish_queues(AUTO_CREATE_TOPIC, Deadline.after(_PRELOAD_TIMEOUT_S))
    except OptionError:
        raise
    except RocketMQError as e:
        logger.debug("no route before the spools are opened: %s", e)


def open_drainer(path: Path, options: Options) -> SendSpool:
    """Return a spool that sends all records of a folder, for commands."""
    # This call may fail, so it comes before the store is opened.
    sender_, settings = sender(options), ProducerSettings.of(options)
    return open_send_spool(open_store(path, options, keep_owner=True), sender_, settings)

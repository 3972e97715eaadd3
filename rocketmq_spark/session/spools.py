"""Spool folders, one below ``spoolDir`` for each process that writes, opened in the process that sends what they hold.

A process leaves its folder as it is when it ends. RocksDB's lock shows whether the process is alive, because the lock ends
with it. Folders of dead processes are adopted.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocketmq_spark.base import extras, process
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import OptionError, SpoolError, SpoolFull
from rocketmq_spark.model import MessageQueue, SpooledSend
from rocketmq_spark.options import Options, option_name
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import owned
from rocketmq_spark.queues.environment import Environment, by_position, environment_of, layout_text
from rocketmq_spark.remoting.connection import together
from rocketmq_spark.session import SPOOLS, connection_key, sender
from rocketmq_spark.spool.database import Database, in_use, is_database
from rocketmq_spark.spool.records import LASTING, RECORD, Done, SpoolOwner, behind
from rocketmq_spark.spool.recovery import DAMAGED, held
from rocketmq_spark.spool.store import Store

if TYPE_CHECKING:
    from rocketmq_spark.spool.spool import RedeliveryPolicy, SendSpool

logger = logging.getLogger(__name__)

_OF_SPOOL = ("spool_dir", "spool_sync", "spool_max_bytes")


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where a spool is, how safe ``add`` is when it returns, and how many bytes it may hold."""

    folder: Path
    sync: str
    max_bytes: int

    @classmethod
    def of(cls, options: Options) -> SpoolSettings | None:
        """None where sends may fail. One ``OptionError`` lists what is wrong."""
        found = problems(options)
        if found:
            raise OptionError.of(found)
        if options.on_send_failure != "spool":
            return None
        assert options.spool_dir is not None
        return cls(Path(options.spool_dir).expanduser(), options.spool_sync, options.spool_max_bytes)


def problems(options: Options) -> list[str]:
    """What is wrong with them, each a sentence without its full stop."""
    if options.on_send_failure != "spool":
        return [
            f"option {option_name(field)!r} has no effect without 'onSendFailure' spool"
            for field in _OF_SPOOL
            if field in options.given
        ]
    found = []
    if options.spool_dir is None:
        found.append("option 'onSendFailure' is 'spool', which needs option 'spoolDir': a folder on a disk that stays")
    if not extras.installed("rocksdict"):
        command = extras.command(extras.SPOOL)
        found.append(f"option 'onSendFailure' is 'spool', which needs the package rocksdict: {command}")
    return found


def owner_of(options: Options, purpose: str = "") -> SpoolOwner:
    """Whose records a spool holds that is opened with these options."""
    environment = f"environment {options.environment!r} ({options.environment_mode})" if options.environment else ""
    if environment and options.environments is not None:
        environment += f", of {layout_text(options.environments)}"
    return SpoolOwner(tuple(sorted(options.cluster)), options.namespace or "", environment, purpose)


_PREFIX, _EMPTIED = "worker-", "emptied-"
_PAGE, _PAGE_BYTES = 500, 8 << 20
_ENDLESS_MS = 2**63


def spools(folder: Path) -> list[Path]:
    """The spools of a folder: itself, and those of workers below it."""
    if not folder.is_dir():
        return []
    below = sorted(each for each in folder.iterdir() if each.name.startswith(_PREFIX) and is_database(each))
    return [folder, *below] if is_database(folder) else below


def claim(folder: Path, make: Callable[[Path], Store]) -> Store:
    """A store of this process's own: that of a dead process, or a new one."""
    for path in spools(folder):
        if in_use(path):
            continue
        try:
            return make(path)
        except SpoolError as e:  # another process was quicker, or the folder is in trouble
            logger.warning("skipping the spool in %s: %s", path, e)
    return make(folder / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}")


def adopt(folder: Path, into: Store, make: Callable[[Path], Store], now_ms: int) -> int:
    """Move what other dead processes left into a store of this one; how many records.

    A portion is added to the one before it leaves the other, so that a kill may double some and loses none. The dead
    letters stay, with their folder, and so does what ``into`` has no room for: it is no trouble of who adopts. What was due
    by a clock that was ahead of ``now_ms`` keeps its distance.
    """
    moved = 0
    for emptied in folder.glob(f"{_EMPTIED}*"):  # of who was killed while it removed one
        shutil.rmtree(emptied, ignore_errors=True)
    for path in spools(folder):
        if in_use(path):
            continue
        try:
            store = make(path)
            try:
                for count in _move(store, into, max(0, store.totals.last_ms - now_ms)):
                    moved += count
                empty = store.totals.all_bytes == 0
            finally:
                store.close()
            if empty and path != folder and not any(path.glob(f"{DAMAGED}-*")):
                _remove(path)
        except SpoolFull as e:
            logger.warning("the records of the spool in %s stay there for now: %s", path, e)
            break
        except SpoolError as e:
            logger.warning("skipping the spool in %s: %s", path, e)
    return moved


def _remove(path: Path) -> None:
    """Remove a folder of which nothing is left.

    Not while it is open: when RocksDB closes, it deletes what it does not know in the folder of that name, also the log of
    a process that has made the folder again. By one rename, with the lock: who opens it meanwhile finds all of it or nothing.
    """
    emptied = path.with_name(f"{_EMPTIED}{uuid.uuid4().hex}")
    with held(path):
        db = Database(path, read_only=True)
        try:
            left = next(db.scan(RECORD, behind(RECORD)), None) or db.gaps or db.damage
        finally:
            db.close()
        if not left:  # else another process was there in between
            path.rename(emptied)
    shutil.rmtree(emptied, ignore_errors=True)


def _move(store: Store, into: Store, ahead_ms: int) -> Iterator[int]:
    while taken := store.take(_ENDLESS_MS, _PAGE, _PAGE_BYTES):
        notes = {name: value for name, value in store.notes().items() if value}  # what is empty says nothing
        into.add([(work.record, max(0, work.due.due_ms - ahead_ms)) for work in taken], notes)
        store.settle([(work, Done()) for work in taken], 0)
        yield len(taken)


def open_store(path: Path, options: Options, spool: SpoolSettings | None = None, lent: bool = False) -> Store:
    """The store of a folder, which holds sends of the cluster, namespace and environment of the options only. One that is
    ``lent`` is opened by who keeps nothing there: its owner, who may know less of its environment, opens it again.
    """
    store = Store(path, spool.sync, spool.max_bytes) if spool is not None else Store(path)
    try:
        environment, noted = environment_of(options), _noted(store)
        if environment is not None and not environment.by_position:
            _check(store, noted, environment)  # before it says that it is of these options
        store.belong(owner_of(options), lent=lent)
        if environment is not None and environment.by_position:
            _recall(store, noted, owned(sender(options), environment))
    except BaseException:
        store.close()
        raise
    return store


# The queues of an environment by its number alone, a note for each topic: what was kept while a broker was away would
# go where the number points by then.
_POSITIONS = LASTING + b"queues of "
_Owned = dict[str, tuple[MessageQueue, ...]]


def _noted(store: Store) -> _Owned:
    """What a store says of them. One that is empty says nothing."""
    found = {}
    for name, value in store.notes().items():
        if not name.startswith(_POSITIONS) or not value:
            continue
        topic = name.removeprefix(_POSITIONS).decode()
        if store.totals.all_bytes:
            found[topic] = tuple(MessageQueue(topic, *place) for place in json.loads(value))
        else:
            store.add([], {name: b""})
    return found


def _check(store: Store, noted: _Owned, environment: Environment) -> None:
    """Raises ``SpoolError`` where what a store holds is for queues that option 'environments' gives to another one."""
    for topic, queues in noted.items():
        if tuple(environment.owned(queues, may_lack=(topic,))) != queues:
            raise SpoolError(
                f"the records in {store.path} are for {', '.join(map(str, queues))}, which their environment had by its number, "
                f"and option 'environments' gives environment {environment.name!r} others",
                remedy=f"If it is theirs, set it so that these are among them, such as {_sample(environment, queues)}",
            )


def _sample(environment: Environment, queues: Sequence[MessageQueue]) -> str:
    return json.dumps({environment.name: {queue.broker_name: [queue.queue_id] for queue in queues}})


def _recall(store: Store, noted: _Owned, known: _Owned) -> None:
    """Whose records a store holds keeps the queues that it had. Raises ``SpoolError`` where this process counted others."""
    for topic, queues in noted.items():
        if known.setdefault(topic, queues) != queues:
            raise SpoolError(
                f"the records in {store.path} are for {', '.join(map(str, queues))}, and this process counted "
                f"{', '.join(map(str, known[topic]))} as the queues of the same environment",
                remedy="Set option 'environments' to the number of environments, or to their queues",
            )


def _positions(known: _Owned, sends: Sequence[SpooledSend]) -> Mapping[bytes, bytes]:
    """The notes for what is kept."""
    return {
        _POSITIONS + topic.encode(): json.dumps(
            [(queue.broker_name, queue.queue_id) for queue in known[topic]]
        ).encode()
        for topic in {send.topic for send in sends} & known.keys()
    }


def resending(
    store: Store,
    send: Sender,
    settings: ProducerSettings,
    clock: Callable[[], int] | None = None,
    trade: RedeliveryPolicy | None = None,
) -> SendSpool:
    """Redelivery of a store that was opened in the process that uses it."""
    from rocketmq_spark.producer.resending import EngineResender
    from rocketmq_spark.spool.spool import SENDS, SendSpool

    name = f"rocketmq-{settings.group}-spool"
    resender = EngineResender(send, settings, Timer(f"{name}-send"), together)
    trade, environment = trade or SENDS, settings.environment
    if environment is not None and not environment.by_position:
        resender.pin(_noted(store))
    elif environment is not None:
        trade = trade._replace(notes=functools.partial(_positions, owned(send, environment)))
    return SendSpool(store, resender, Timer(name), clock, trade=trade)


def worker_spool(options: Options, settings: ProducerSettings) -> Spool | None:
    """The spool of this worker process, below ``spoolDir``; what dead processes left there is in it, too. None without one.

    It lives as long as the process, whatever tasks come and go, and sends meanwhile.
    """
    spool = SpoolSettings.of(options)
    if spool is None:
        return None

    def make(path: Path) -> Store:
        return open_store(path, options, spool)

    def left(path: Path) -> Store:
        store = make(path)
        if not by_position(options) and _noted(store):  # what sends already has no such queues
            store.close()
            raise SpoolError(f"the records in {path} are for queues that their environment had by its number")
        return store

    with process.lock():
        connection = options.transport, options.proxy_endpoint, connection_key(options)
        key = (spool, owner_of(options), options.environments, connection, settings)
        kept: dict[object, SendSpool] = process.kept(SPOOLS)
        if key not in kept:
            kept[key] = resending(claim(spool.folder, make), sender(options), settings)
        mine = kept[key]
        if adopt(spool.folder, mine.store, left, mine.now_ms()):
            mine.redelivery.begin()
    return mine


def drainer(path: Path, options: Options) -> SendSpool:
    """What sends all that lies in a folder, for commands."""
    return resending(open_store(path, options, lent=True), sender(options), ProducerSettings.of(options))

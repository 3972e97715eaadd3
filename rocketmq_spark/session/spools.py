"""Folders of sends that failed for passing reasons, opened in the process that sends them again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocketmq_spark.base import process
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import MessageQueue, SpooledSend
from rocketmq_spark.options import Options
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import owned
from rocketmq_spark.queues.environment import Environment, by_position, environment_of
from rocketmq_spark.remoting.connection import together
from rocketmq_spark.session import SPOOLS, connection_key, sender
from rocketmq_spark.spool.folders import SpoolSettings, owner_of
from rocketmq_spark.spool.records import LASTING

if TYPE_CHECKING:
    from rocketmq_spark.spool.spool import RedeliveryPolicy, SendSpool
    from rocketmq_spark.spool.store import Store


def open_store(path: Path, options: Options, spool: SpoolSettings | None = None, lent: bool = False) -> Store:
    """The store of a folder, which holds sends of the cluster, namespace and environment of the options only. One that is
    ``lent`` is opened by who keeps nothing there: its owner, who may know less of its environment, opens it again.
    """
    from rocketmq_spark.spool.store import Store

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
    from rocketmq_spark.spool import folders

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
        spools: dict[object, SendSpool] = process.kept(SPOOLS)
        if key not in spools:
            spools[key] = resending(folders.claim(spool.folder, make), sender(options), settings)
        mine = spools[key]
        if folders.adopt(spool.folder, mine.store, left, mine.now_ms()):
            mine.redelivery.begin()
    return mine


def drainer(path: Path, options: Options) -> SendSpool:
    """What sends all that lies in a folder, for commands."""
    return resending(open_store(path, options, lent=True), sender(options), ProducerSettings.of(options))

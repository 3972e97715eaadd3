"""The demo's broker and topics, and the folder of its run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rocketmq_spark.base import folders
from rocketmq_spark.base.process import on_signals
from rocketmq_spark.cli.command import INTERRUPTED_EXIT_CODE
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import LocalBrokerError, RocketMQError
from rocketmq_spark.localbroker import LocalBroker, distribution
from rocketmq_spark.localbroker.cluster import disk_problem
from rocketmq_spark.localbroker.servers import NAME_SERVER, PROXY
from rocketmq_spark.localbroker.workspace import LOCK_FILE

# Few queues and partitions keep a micro-batch short, because most of its time is the set-up of its tasks.
QUEUES = 4
# The line that the driver reads when all orders are written.
FINISH = b"finish"
# The longest time from the first Ctrl-C to the end of the process.
_STOP_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """A cluster, the two topics on it, and the folder of this run. ``broker_data`` is None if the demo did not start the cluster.

    ``proxy`` is the Proxy through which totals are written, over gRPC; None if totals are written to the broker. Only the
    process of the demo has ``lock``, the descriptor of the folder's lock, and ``servers``, which this process started.
    """

    name_server: str
    orders: str
    totals: str
    folder: Path
    broker_data: Path | None
    proxy: str | None = None
    lock: int | None = field(default=None, compare=False)
    servers: LocalBroker | None = field(default=None, compare=False)

    @property
    def starts_broker(self) -> bool:
        return self.broker_data is not None

    @property
    def exactly_once(self) -> bool:
        """Whether totals are written exactly once. Over gRPC, totals are written at least once."""
        return self.proxy is None

    @property
    def spark_log(self) -> Path:
        return self.folder / "spark.log"

    @property
    def remedy(self) -> str:
        return f"Read Spark's messages in {self.spark_log}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def to_json(self) -> bytes:
        """Return the environment as a line of JSON, for the process that runs the query."""
        return json.dumps(asdict(replace(self, lock=None, servers=None)), default=str).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> DemoEnvironment:
        values = json.loads(line)
        data = values.pop("broker_data")
        return cls(**values | {"folder": Path(values["folder"]), "broker_data": Path(data) if data else None})

    def check(self) -> None:
        """Raise ``LocalBrokerError`` if the disk of the run is full, or if a server of the run has ended. Each of these problems
        causes other errors.
        """
        if problem := disk_problem(self.folder, for_broker=self.starts_broker):
            remedy = f"Free some space, or set {distribution.CACHE_VARIABLE} to a folder on another disk"
            raise LocalBrokerError(problem, remedy=remedy)
        for local_broker, name in self._own_servers():
            if local_broker.pid(name) is None:
                raise LocalBrokerError(
                    f"{name}, a server of the demo, has ended", remedy=f"Read its output in {local_broker.data / name}"
                )

    def create_topics(self) -> None:
        """Create the topics of the orders and of the totals. Nothing deletes these topics."""
        with BaseAdmin(self.name_server) as admin:
            for topic in (self.orders, self.totals):
                admin.create_topic(topic, QUEUES)

    def kill_servers(self) -> None:
        """Kill the servers of the demo. A clean stop may take 20 s, and is useless, because the data is not used again."""
        for local_broker, name in self._own_servers():
            local_broker.kill(name)

    def _own_servers(self) -> Iterator[tuple[LocalBroker, str]]:
        """Yield the cluster and the name of each server that the demo has started."""
        if self.servers is not None:
            for name in [NAME_SERVER, *self.servers.brokers, *([PROXY] if self.proxy is not None else [])]:
                yield self.servers, name


@contextlib.contextmanager
def demo_environment(
    name_server: str | None, with_own_proxy: bool = False, proxy: str | None = None
) -> Iterator[DemoEnvironment]:
    """Without ``name_server``, start a broker with new data, and a Proxy if ``with_own_proxy``. With ``name_server``, use
    the cluster of this name server, and its Proxy ``proxy``.

    At the end of the block, this function stops the servers that it has started. If an error occurs in the block because a
    server has ended or the disk is full, a ``LocalBrokerError`` about this cause replaces the error.
    """
    demo_folder = distribution.cache_folder() / "demo"
    with contextlib.ExitStack() as stack:
        with distribution.writing_to(demo_folder):
            with distribution.file_locked(demo_folder / "lock"):
                folder, lock = _free_folder(demo_folder)
            stack.callback(os.close, lock)
            if name_server is None:
                local_broker = stack.enter_context(
                    LocalBroker(data=folder / "broker", proxy=with_own_proxy, queues=QUEUES)
                )
                own_proxy = local_broker.proxy_grpc if with_own_proxy else None
                environment = DemoEnvironment(
                    local_broker.name_server,
                    "orders",
                    "order-totals",
                    folder,
                    folder / "broker",
                    own_proxy,
                    lock,
                    local_broker,
                )
            else:
                suffix = uuid.uuid4().hex[:6]
                topics = f"demo-orders-{suffix}", f"demo-totals-{suffix}"
                environment = DemoEnvironment(name_server, *topics, folder, None, proxy, lock)
        try:
            yield environment
        except RocketMQError as e:
            try:
                environment.check()
            except LocalBrokerError as cause:
                raise cause from e
            raise
        except KeyboardInterrupt:
            environment.kill_servers()
            raise


def _free_folder(demo_folder: Path) -> tuple[Path, int]:
    """Empty the first of the folders run-1, run-2, ... that is not in use, and return it with the descriptor of its lock. A
    folder is in use if a broker runs on its data. Folders in which other users may create files are skipped.
    """
    for number in itertools.count(1):
        folder = demo_folder / f"run-{number}"
        created = folders.make_folders(folder)
        if not folders.is_writable_by_owner_only(folder):
            if created:
                folder.rmdir()
                raise LocalBrokerError(
                    f"{folder}, which was just created, belongs to another user or lets others write",
                    remedy=f"Set {distribution.CACHE_VARIABLE} to a folder on a disk that keeps owners and modes",
                )
            continue
        lock = _open_lock(folder / LOCK_FILE)
        if folders.try_lock(lock) and _has_no_broker(folder / "broker"):
            _empty(folder)
            return folder, lock
        os.close(lock)
    raise AssertionError  # unreachable, for mypy


def _has_no_broker(data: Path) -> bool:
    """Whether no broker runs on the data."""
    if not folders.is_writable_by_owner_only(data):
        return not data.exists()
    lock = _open_lock(data / LOCK_FILE)
    try:
        return folders.try_lock(lock)
    finally:
        os.close(lock)


def _open_lock(lock: Path) -> int:
    return folders.open_lock(lock, os.O_WRONLY | os.O_CREAT)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In the block, the first Ctrl-C or SIGTERM raises ``KeyboardInterrupt``. The second signal ends this process at once. The
    process also ends if the block runs for ten more seconds after the first signal. The servers and Spark's driver end with the
    process.
    """
    is_stopping = False

    def end_process() -> None:
        _write_to_stderr("Ended before everything was closed")
        os._exit(INTERRUPTED_EXIT_CODE)

    def interrupt() -> None:
        nonlocal is_stopping
        if is_stopping:
            end_process()
        is_stopping = True
        signal.alarm(_STOP_TIMEOUT_S)
        _write_to_stderr("Stopping ...")
        raise KeyboardInterrupt

    with on_signals(interrupt, signal.SIGINT, signal.SIGTERM), on_signals(end_process, signal.SIGALRM):
        try:
            yield
        finally:
            if is_stopping:
                signal.alarm(0)


def _write_to_stderr(text: str) -> None:
    """Write a line to standard error. A signal handler cannot print, because it may have interrupted another print."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())

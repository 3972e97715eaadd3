"""The demo's broker and topics, and the folder of its run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from rocketmq_spark.base import folders
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.localbroker import LocalBroker, distro
from rocketmq_spark.localbroker.site import IN_USE

# What a micro-batch costs is mostly set-up of tasks: few queues and few partitions make it quick.
QUEUES = 4
# What the process that runs the query is told when all orders are written.
FINISH = b"finish"


@dataclass(frozen=True, slots=True)
class Stage:
    """A broker to use, the two topics on it, and the folder of this run; ``broker_data`` None: it is not ours.

    ``proxy`` is the Proxy through which totals are written, over gRPC; None: they go to the broker. ``lock`` is the descriptor
    of the folder's lock, in the process of the demo only.
    """

    name_server: str
    orders: str
    totals: str
    folder: Path
    broker_data: Path | None
    proxy: str | None = None
    lock: int | None = field(default=None, compare=False)

    @property
    def spark_log(self) -> Path:
        return self.folder / "spark.log"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def to_json(self) -> bytes:
        """One line, for the process that runs the query."""
        return json.dumps(asdict(self) | {"lock": None}, default=str).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Stage:
        values = json.loads(line)
        data = values.pop("broker_data")
        return cls(**values | {"folder": Path(values["folder"]), "broker_data": Path(data) if data else None})


@contextlib.contextmanager
def stage(name_server: str | None, grpc: bool = False, proxy: str | None = None) -> Iterator[Stage]:
    """A broker of our own with fresh data (``grpc``: and a Proxy), or new topics on one that exists, with its ``proxy``."""
    base = distro.cache_folder() / "demo"
    with contextlib.ExitStack() as stack:
        with distro.writing_to(base):
            with distro.exclusive(base / "lock"):
                folder, lock = _free_folder(base)
            stack.callback(os.close, lock)
            if name_server is None:
                mq = stack.enter_context(LocalBroker(data=folder / "broker", proxy=grpc, queues=QUEUES))
                own_proxy = mq.proxy_grpc if grpc else None
                made = Stage(mq.name_server, "orders", "order-totals", folder, folder / "broker", own_proxy, lock)
            else:
                suffix = uuid.uuid4().hex[:6]
                made = Stage(name_server, f"demo-orders-{suffix}", f"demo-totals-{suffix}", folder, None, proxy, lock)
        with BaseAdmin(made.name_server) as admin:
            for topic in (made.orders, made.totals):
                admin.create_topic(topic, QUEUES)
        yield made


def _free_folder(base: Path) -> tuple[Path, int]:
    """The first of run-1, run-2, ... that is not in use, emptied, with the descriptor that locks it. A broker started on its data
    counts as use. A folder in which other users may create files is left alone.
    """
    for number in itertools.count(1):
        folder = base / f"run-{number}"
        folders.make(folder)
        if not folders.only_own(folder):
            continue
        lock = _opened(folder / IN_USE)
        if folders.try_lock(lock) and _is_free(folder / "broker"):
            _empty(folder)
            return folder, lock
        os.close(lock)
    raise AssertionError


def _is_free(data: Path) -> bool:
    if not folders.only_own(data):
        return not data.exists()
    lock = _opened(data / IN_USE)
    try:
        return folders.try_lock(lock)
    finally:
        os.close(lock)


def _opened(lock: Path) -> int:
    return folders.open_regular(lock, os.O_WRONLY | os.O_CREAT)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != IN_USE:
            path.unlink()


@contextlib.contextmanager
def one_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` once; a second one does not disturb the tidying up after the first."""
    handle_ctrl_c(stop_once)
    try:
        yield
    finally:
        handle_ctrl_c(signal.default_int_handler)


def stop_once(number: int, frame: FrameType | None) -> None:
    handle_ctrl_c(signal.SIG_IGN)
    print("Stopping ...", file=sys.stderr)
    raise KeyboardInterrupt


def handle_ctrl_c(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)

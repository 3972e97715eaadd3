"""What a Python process that was killed leaves: a data folder, and where the kernel does not help, JVMs.

Each cluster holds two locks while it runs: on a record in the cache, and in its data folder. A record that no process holds
belongs to the dead: the next start ends those JVMs whose command line carries the record's data folder, and deletes a
temporary folder, unless the folder has a new owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.distro import exclusive
from rocketmq_spark.localbroker.process import MARK

TEMPORARY = "rocketmq-spark-"
_LOCK = "in-use"


@dataclass(slots=True)
class Claim:
    """A data folder that is ours until ``release``."""

    data: Path
    temporary: bool
    _record: Path
    _locks: tuple[IO[str], ...]

    def release(self, delete: bool) -> None:
        if delete:
            shutil.rmtree(self.data, ignore_errors=True)
        self._record.unlink(missing_ok=True)
        for lock in self._locks:
            lock.close()


def claim(run: Path, data: Path | None, keep: bool) -> Claim:
    """Clean up after the dead, then take ``data`` (or a new temporary folder) for this process."""
    with exclusive(run / "lock"):
        for record in run.glob("*.json"):
            _bury(record)
        path = data or Path(tempfile.mkdtemp(prefix=TEMPORARY))
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock_data(path)
        record = run / f"{uuid.uuid4().hex}.json"
        holder = record.open("w", encoding="utf-8")
        fcntl.flock(holder, fcntl.LOCK_EX)
        json.dump({"data": str(path), "delete": data is None and not keep}, holder)
        holder.flush()
    return Claim(path, data is None, record, (holder, lock))


def _lock_data(data: Path) -> IO[str]:
    lock = (data / _LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        lock.close()
        raise LocalBrokerError(
            f"The data folder {data} is in use by another LocalBroker", remedy="Stop that one, or choose another folder"
        ) from e
    return lock


def _bury(record: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError, ValueError), record.open("r+") as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left = json.load(f)
        data = Path(left["data"])
        # The folder may have a new owner, which keeps its records in another cache: then the servers there are its own.
        with _unused(data):
            for pid in _running_on(data):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if left["delete"] and data.name.startswith(TEMPORARY):
                shutil.rmtree(data, ignore_errors=True)
        record.unlink()


@contextlib.contextmanager
def _unused(data: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process takes it meanwhile. Raises BlockingIOError if one has it."""
    if not data.is_dir():
        yield
        return
    with (data / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _running_on(data: Path) -> list[int]:
    mark = f"{MARK}{data}"
    return [pid for pid, command in _processes() if mark in command]


def _processes() -> Iterator[tuple[int, list[str]]]:
    proc = Path("/proc")
    if not (proc / "self" / "cmdline").exists():
        listed = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            pid, *command = line.split()
            yield int(pid), command
        return
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace").split("\0")

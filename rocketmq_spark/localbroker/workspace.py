"""The data folder, ports and child processes of one cluster, and how a child is started.

Here servers are only programs with ports; ``cluster_servers`` knows their relations. A start may fail without a fault of the
user. If another process took a port that was chosen at random, the start is repeated on other ports. If the cause is unknown and
the start used a class-data archive, the start is repeated without the archive.

A cluster holds two locks while it runs: one lock on its record in the cache, and one lock in its data folder. A record whose lock
is free belongs to a killed Python process. The next start ends the JVMs whose command line contains the record's data folder, and
deletes the folder if it is temporary. The next start changes nothing if another process uses the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import processes
from rocketmq_spark.localbroker.distribution import file_locked
from rocketmq_spark.localbroker.java import Archive, Java
from rocketmq_spark.localbroker.moved_folders import moved_folder_problem, revoke_write_if_safe
from rocketmq_spark.localbroker.processes import DATA_FLAG, Program, Server, program_port_error, spawn
from rocketmq_spark.localbroker.servers import NAME_SERVER, PROXY

TEMPORARY_PREFIX = "rocketmq-spark-"
# A file in a data folder. The process that uses the folder holds the lock of this file.
LOCK_FILE = "in-use"
_PORTS_FILE = "ports.json"


@dataclass(slots=True)
class Reservation:
    """A data folder that this process has reserved until ``release``."""

    data: Path
    is_temporary: bool
    _record_file: Path
    _locks: tuple[IO[str], ...]

    def release(self, delete: bool) -> None:
        if delete:
            shutil.rmtree(self.data, ignore_errors=True)
        self._record_file.unlink(missing_ok=True)
        for lock in self._locks:
            if not lock.closed:
                fcntl.flock(
                    lock, fcntl.LOCK_UN
                )  # unlocked explicitly, because forked processes have the file open, too, and would keep the lock
            lock.close()


def reserve(run_folder: Path, data: Path | None, keeps_data: bool) -> Reservation:
    """Clean up after killed processes, then reserve ``data`` (or a new temporary folder) for this process."""
    with file_locked(run_folder / "lock"):
        for record_path in run_folder.glob("*.json"):
            _clean_up(record_path)
        folder = data or Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        _check_data_folder(folder)
        lock = _lock_data(folder)
        record_path = run_folder / f"{uuid.uuid4().hex}.json"
        record_file = _new_record(record_path)
        fcntl.flock(record_file, fcntl.LOCK_EX)
        json.dump({"data": str(folder), "delete": data is None and not keeps_data}, record_file)
        record_file.flush()
    return Reservation(folder, data is None, record_path, (record_file, lock))


def _check_data_folder(data: Path) -> None:
    """Create a data folder if it is missing. Remove the right of other users to write to it, and to the files of clusters in it.

    Raises ``LocalBrokerError`` if another user owns one of these files, or may still change one, because that user could change
    the configuration of the servers, or replace files by links. Also raises ``LocalBrokerError`` if others may have moved a
    folder to the name of one of these files.
    """
    folders.make_folders(data)
    problem = _data_folder_problem(data)
    if problem is not None:
        raise LocalBrokerError(
            f"The data folder {data} is not used: {problem}",
            remedy="Choose another folder, such as a new one in it; or let its owner replace links by copies and run: chmod go-w",
        )
    folders.warn_if_replaceable(data, "the data folder of LocalBroker")


def _data_folder_problem(data: Path) -> str | None:
    """Revoke the right of other users to write to a data folder, and to the files of clusters in it. If servers must not use the
    folder, return a clause that says why. A rejected folder keeps its mode, so that the next start rejects it, too.
    """
    if (foreign_file := folders.foreign_file(data)) is not None:
        return str(foreign_file)
    status = data.stat()
    if folders.is_shared_folder(status):
        return f"all users may write to it (mode {stat.S_IMODE(status.st_mode):04o}): name a new folder in it"
    return revoke_write_if_safe(
        data,
        lambda others_could_write: _entries_problem(data, others_could_write),
        lambda: _revoke_write_of_entries(data),
    )


def _entries_problem(data: Path, others_could_write: bool) -> str | None:
    """Return a clause about the first entry of a data folder that servers must not use; None if servers may use all entries."""
    for entry in _cluster_entries(data):
        if others_could_write:
            return moved_folder_problem(entry, others_could_write)
        if (foreign_file := folders.foreign_file(entry)) is not None:
            return str(foreign_file)
        if (problem := folders.irregularity(entry)) is not None:
            return f"{problem}, to which servers would write"
        if (problem := moved_folder_problem(entry, others_could_write, folders.subfolders(entry))) is not None:
            return problem
        if (foreign_file := folders.foreign_file_in(entry)) is not None:
            return str(foreign_file)
        if (problem := folders.irregularity_in(entry, _TEMPORARY_FOLDERS)) is not None:
            return f"{problem}, to which servers would write"
    return None


def _revoke_write_of_entries(data: Path) -> str | None:
    """Revoke the right of other users to write to the files of clusters in a data folder, when others can no longer write to
    the folder itself. Returns a clause about the first problem that remains.
    """
    for entry in _cluster_entries(data):
        folders.revoke_write_all(entry)
    if (problem := _entries_problem(data, False)) is not None:
        return problem
    for entry in _cluster_entries(data):
        if (exposure := next(folders.exposures_in(entry, (), os.geteuid()), None)) is not None:
            return f"{exposure.users_text} may write to {exposure.path}"
    return None


def _cluster_entries(data: Path) -> list[Path]:
    return [
        data / name for name in sorted(os.listdir(data)) if name in _ENTRY_NAMES or name.startswith(_ENTRY_PREFIXES)
    ]


# Names of the files and folders of a cluster in its data folder. A user may have other files there.
_ENTRY_NAMES = (LOCK_FILE, _PORTS_FILE, PROXY)
_ENTRY_PREFIXES = (NAME_SERVER, "broker-")
# Names of the temporary folders of a JVM, which may leave a socket there. The next start of the server deletes these folders.
_TEMPORARY_FOLDERS = ("tmp",)


def _new_record(path: Path) -> IO[str]:
    return open(folders.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8")


def _open_lock(data: Path) -> IO[str]:
    return open(folders.open_private(data / LOCK_FILE, os.O_RDWR | os.O_CREAT), "a", encoding="utf-8")


def _lock_data(data: Path) -> IO[str]:
    lock = _open_lock(data)
    if not folders.try_lock(lock):
        lock.close()
        raise LocalBrokerError(
            f"The data folder {data} is in use by another LocalBroker", remedy="Stop that one, or choose another folder"
        )
    return lock


def _clean_up(record: Path) -> None:
    """Clean up after a killed process: end the servers in the data folder that its record names, and remove the folder if it is
    temporary. Ignores a record that other users could have written.
    """
    if folders.foreign_file(record) is not None:
        return
    with contextlib.suppress(OSError, ValueError), open(folders.open_regular(record, os.O_RDWR), "r+") as record_file:
        if folders.others_may_write(os.fstat(record_file.fileno())):
            record.unlink()
            return
        if not folders.try_lock(record_file):
            return
        record_fields = json.load(record_file)
        data = Path(record_fields["data"])
        # After this folder was removed, another user may have created a folder of the same name.
        is_own_folder = folders.foreign_file(data) is None
        was_reserved = folders.foreign_file(data / LOCK_FILE) is None and (data / LOCK_FILE).is_file()
        # If a process with another cache uses the folder now, the servers belong to that process.
        with _locked_if_unused(data) if is_own_folder else contextlib.nullcontext():
            for pid in _server_pids(data):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if is_own_folder and was_reserved and record_fields["delete"] and data.name.startswith(TEMPORARY_PREFIX):
                shutil.rmtree(data, ignore_errors=True)
        record.unlink()


@contextlib.contextmanager
def _locked_if_unused(data: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process can reserve the folder. Raises BlockingIOError if another process holds
    the lock.
    """
    if not data.is_dir():
        yield
        return
    with _open_lock(data) as lock:
        if not folders.try_lock(lock):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", str(data / LOCK_FILE))
        yield


def _server_pids(data: Path) -> list[int]:
    data_argument = f"{DATA_FLAG}{data}"
    return [pid for pid, command in _command_lines() if data_argument in command]


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    proc = Path("/proc")
    if not (proc / "self" / "cmdline").exists():
        ps_output = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=False)
        for line in ps_output.stdout.splitlines():
            pid, *command = line.split()
            yield int(pid), command
        return
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace").split("\0")


_START_ATTEMPTS = 4
_STOP_TIMEOUT_S = 20.0


class Workspace:
    """The children of one cluster by name, in the order of their first start."""

    def __init__(
        self, reservation: Reservation, java: Java, archive_folder: Path, requested_ports: Mapping[str, int]
    ) -> None:
        self.data = reservation.data
        self.servers: dict[str, Server] = {}
        self._reservation = reservation
        self._java = java
        self._archive_folder = archive_folder
        self._archives_by_jars: dict[tuple[Path, ...], Archive] = {}
        self._ports = processes.PortAssignments(reservation.data / _PORTS_FILE, requested_ports)

    def bring_up(
        self,
        name: str,
        distances: tuple[int, ...],
        make_program: Callable[[int], Program],
        is_ready: Callable[[Server], bool],
        deadline: Deadline,
    ) -> Server:
        """Start the server that ``make_program`` describes for a port, and return when it is ready."""
        port = self._ports.assign(name, distances)
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            program = make_program(port)
            server = self.servers[name] = Server(program, self._java, self._archive(program.jars), self.data)
            try:
                self._start(server, is_ready, deadline)
                return server
            except LocalBrokerError as e:
                del self.servers[name]
                if not attempts_left or deadline.expired or not self._may_retry(name, port, distances, program, e):
                    raise
                port = self._ports.assign(name, distances)
        raise AssertionError

    def _may_retry(
        self, name: str, port: int, distances: tuple[int, ...], program: Program, failure: LocalBrokerError
    ) -> bool:
        """Whether another attempt to start may succeed. If another process has taken a port, an attempt on other ports may
        succeed. If no cause is known, an attempt without the archive, which this method removes, may succeed.
        """
        if not processes.are_all_free(port, distances):
            return self._ports.may_change(name)
        return failure.remark is not None and self._archive(program.jars).discard()

    def restart(self, server: Server, is_ready: Callable[[Server], bool], deadline: Deadline) -> None:
        """Start a server that has ended, on its old ports, because clients use them."""
        self._start(server, is_ready, deadline)

    def _start(self, server: Server, is_ready: Callable[[Server], bool], deadline: Deadline) -> None:
        if not all(map(processes.is_free, server.program.ports)):
            raise program_port_error(server.program)
        server.start()
        try:
            server.wait_until(lambda: is_ready(server), deadline)
        except BaseException:
            server.kill()
            raise

    def make_archives(self) -> None:
        """Make class-data archives in the background, for later starts."""
        for jars, archive in self._archives_by_jars.items():
            server_folders = [server.program.home for server in self.servers.values() if server.program.jars == jars]
            archive.start_dump(server_folders, spawn)

    def stop(self, servers: Iterable[Server], is_clean: bool) -> None:
        """Stop servers, all at the same time. With ``is_clean``, they flush their memory to disk; otherwise they are killed."""
        servers, deadline = list(servers), Deadline.after(_STOP_TIMEOUT_S if is_clean else 0.0)
        try:
            for server in servers if is_clean else ():
                server.ask_to_stop()
            for server in servers if is_clean else ():
                server.wait_stopped(deadline)
        finally:  # the servers are killed even after a second Ctrl-C
            for server in servers:
                server.kill()

    def close(self, keeps_data: bool) -> None:
        """End every child and release the folder. Children are killed if the folder will be deleted, because a kill is faster
        than a clean stop.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._reservation.release, delete=not keeps_data)
            for archive in self._archives_by_jars.values():
                stack.callback(archive.stop)
            self.stop(self.servers.values(), is_clean=keeps_data)

    def _archive(self, jars: tuple[Path, ...]) -> Archive:
        return self._archives_by_jars.setdefault(jars, Archive(self._archive_folder, self._java, jars))

"""One server as a child process: a JVM with little memory that ends with this process. The log of the server is in a file, and
its ports are on loopback.

The child has its own session, so Ctrl-C reaches only Python, which then ends the child. With ``watchdog.py`` the child ends even
if Python is killed. The kernel kills the child when the *thread* that started it ends, so one permanent thread starts all
children.

Free ports are chosen below the kernel's range for outgoing connections, so that no connection takes a port between the choice and
the start. Each process chooses from its own blocks of ports, and chooses no port twice. So a server that was killed finds its
ports free when it is restarted. If a process cannot lock blocks of ports, it may choose a port that another process chose. The
server that starts later then fails, and is started again on other ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.distribution import cache_folder
from rocketmq_spark.localbroker.java import Archive, Java

HOST = "127.0.0.1"
_PORT_RANGE = range(20_000, 32_000)
_BLOCK_SIZE = 60

# A broker's ports relative to listenPort: listenPort itself, the fast port, and the port for replication (on all interfaces).
BROKER_PORT_DISTANCES = (0, -2, 1)
# A proxy's ports relative to its first port: Remoting, and gRPC one above.
PROXY_PORT_DISTANCES = (0, 1)
# A broker's ports relative to listenPort, and the ports of a proxy in the broker's process.
LOCAL_PROXY_PORT_DISTANCES = (*BROKER_PORT_DISTANCES, 2, 3)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now, on loopback and on all interfaces."""
    with socket.socket() as socket_:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            socket_.bind(("", port))
        except OSError:
            return False
    return True


def are_all_free(port: int, distances: Iterable[int] = (0,)) -> bool:
    return all(is_free(port + d) for d in distances)


def free_port(distances: Iterable[int] = (0,), ports_to_avoid: Iterable[int] = ()) -> int:
    """Return a port such that the ports at all ``distances`` from it are free, were not chosen, and are not to be avoided."""
    distances, avoided_ports = tuple(distances), set(ports_to_avoid)
    with _blocks.lock:
        for port in _blocks.candidates():
            ports = {port + d for d in distances}
            if (
                avoided_ports.isdisjoint(ports)
                and _blocks.chosen_ports.isdisjoint(ports)
                and are_all_free(port, distances)
            ):
                _blocks.chosen_ports |= ports
                return port
    raise LocalBrokerError(
        f"No free ports between {_PORT_RANGE.start} and {_PORT_RANGE.stop}", remedy="Stop some servers"
    )


class _PortBlocks:
    """The blocks of ports that this process has reserved, and the chosen ports. The kernel releases the lock of a block when the
    process ends.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chosen_ports: set[int] = set()
        self._own_block_starts: set[int] = set()

    def candidates(self) -> Iterator[int]:
        """Yield the ports of this process's blocks, then of other free blocks. If ports cannot be locked, yields any ports."""
        rng = random.SystemRandom()
        starts = list(range(_PORT_RANGE.start, _PORT_RANGE.stop, _BLOCK_SIZE))
        for start in [*self._own_block_starts, *rng.sample(starts, len(starts))]:
            if self._reserve_block(start):
                # The first and last ports of the block are not used, because their neighbours are in other blocks.
                yield from rng.sample(range(start + 2, start + _BLOCK_SIZE - 1), _BLOCK_SIZE - 3)
        for _ in range(1000):
            yield rng.choice(_PORT_RANGE)

    def _reserve_block(self, start: int) -> bool:
        if start in self._own_block_starts:
            return True
        folder = cache_folder() / "ports"
        with contextlib.suppress(OSError):
            folders.make_folders(folder, folders.READABLE_MODE)
            # The lock is a bare descriptor instead of a file object, because it must stay open until the process ends.
            lock = folders.open_private(folder / str(start), os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(OSError):
                if folders.try_lock(lock):
                    self._own_block_starts.add(start)
                    return True
            os.close(lock)
        return False


_blocks = _PortBlocks()


def is_listening(port: int) -> bool:
    """Whether a process listens on this port."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def check_ports_free(requested_ports: Mapping[str, int]) -> None:
    """Raise an error if a requested port (by server name) is in use, before anything is downloaded or started."""
    for name, port in requested_ports.items():
        if not is_free(port):
            raise port_in_use_error(name, [port])


def port_in_use_error(name: str, ports: Iterable[int]) -> LocalBrokerError:
    """Return the error for a server that cannot listen on one of its ports."""
    text = " or ".join(map(str, ports))
    return LocalBrokerError(
        f"{name} cannot listen: port {text} is in use",
        remedy="Stop what uses it, choose another (ports=, or --port of broker start), or name none: a free one is found",
    )


class PortAssignments:
    """The ports of the servers of a data folder. A server gets the requested port. Without a request, it gets its previous port
    if this port is free, otherwise a new port.
    """

    def __init__(self, path: Path, requested_ports: Mapping[str, int]) -> None:
        self._path = path
        self._requested_ports = dict(requested_ports)
        self._lock = threading.Lock()
        self._ports: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            self._ports = json.loads(path.read_text(encoding="utf-8"))

    def assign(self, name: str, distances: tuple[int, ...]) -> int:
        """Return the port for a server that is about to start."""
        with self._lock:
            port = self._requested_ports.get(name) or self._ports.get(name)
            if port is None or (name not in self._requested_ports and not are_all_free(port, distances)):
                # The port must also differ from the requested ports of servers that start later.
                assigned_ports = {**self._ports, **self._requested_ports}.values()
                port = free_port(
                    distances, ports_to_avoid=[p + d for p in assigned_ports for d in BROKER_PORT_DISTANCES]
                )
            self._ports[name] = port
            folders.replace_file(self._path, json.dumps(self._ports, indent=1) + "\n")
        return port

    def may_change(self, name: str) -> bool:
        return name not in self._requested_ports


_POLL_INTERVAL_S = 0.01
_TAIL_LINES = 8
_PORT_IN_USE_TEXT = "Address already in use"
DATA_FLAG = "-Drocketmq.spark.data="
# Variables that servers do not need. They are removed from the environment of a server, because other processes can read this
# environment while the server runs.
_SECRET_VARIABLES = ("ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY", "ROCKETMQ_NEW_PASSWORD")

_JVM_FLAGS = (
    "-Xss256k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # for a fast start: the second compiler would take more time than it saves
    "-XX:MaxDirectMemorySize=1g",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)


@dataclass(frozen=True, slots=True)
class Program:
    """One server: its name, folder, command and ports. The first port is for clients."""

    name: str
    home: Path
    ports: tuple[int, ...]
    main_class: str
    arguments: tuple[str, ...]
    jars: tuple[Path, ...]
    heap_mb: int
    flags: tuple[str, ...] = ()


class Server:
    """A JVM that can be started, killed, stopped and started again in its folder."""

    def __init__(self, program: Program, java: Java, archive: Archive, data: Path) -> None:
        self.program = program
        self._java = java
        self._archive = archive
        self._data = data
        self._child: subprocess.Popen[bytes] | None = None
        self._log_sizes_at_start: dict[Path, int] = {}

    def start(self) -> None:
        program = self.program
        self._log_sizes_at_start = {path: path.stat().st_size for path in self._log_files() if path.exists()}
        command = [
            str(self._java.path), f"-Xmx{program.heap_mb}m", *_JVM_FLAGS, *self._archive.flags(program.home),
            f"{DATA_FLAG}{self._data}", f"-Duser.home={program.home}", *program.flags,
            "-cp", os.pathsep.join(map(str, program.jars)), program.main_class, *program.arguments,
        ]  # fmt: skip
        spawn(command, program.home / "out.txt", home=program.home, on_started=self._set_child)

    def _set_child(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.program.ports[0]}"

    def wait_until(self, is_ready: Callable[[], bool], deadline: Deadline) -> None:
        """Return when ``is_ready`` returns true. Raise an error with the end of the log when the child ends, or at
        the deadline.
        """
        while not is_ready():
            # A broker that cannot listen takes ten seconds to exit, so do not wait for its exit.
            if self.pid is None or _PORT_IN_USE_TEXT in self.output_since_start():
                raise self._start_error("ended while starting")
            if deadline.expired:
                raise self._start_error("was not ready in time")
            deadline.pause(_POLL_INTERVAL_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def wait_stopped(self, deadline: Deadline) -> None:
        """Wait for a child that was asked to stop; kill it at the deadline."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(deadline.remaining())
            self.kill()

    def log(self) -> str:
        """The output and logs of the server, oldest lines first in each file."""
        return "".join(_read(path) for path in self._log_files())

    def output_since_start(self) -> str:
        """The output of the server since its last start."""
        path = self._log_files()[0]
        return _read(path)[self._log_sizes_at_start.get(path, 0) :]

    def _log_files(self) -> tuple[Path, ...]:
        return tuple(self.program.home / name for name in ("out.txt", "server.1.log", "server.log"))

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _start_error(self, event: str) -> LocalBrokerError:
        output_text, *log_texts = (_read(path)[self._log_sizes_at_start.get(path, 0) :] for path in self._log_files())
        return start_error(self.program, event, output_text, "".join(log_texts))


def program_port_error(program: Program) -> LocalBrokerError:
    return port_in_use_error(program.name, program.ports)


def start_error(program: Program, event: str, output_text: str, log_text: str) -> LocalBrokerError:
    """Return the error for a failed start: one sentence if the cause is known, otherwise the last lines of the output."""
    name, home, all_text = program.name, program.home, output_text + log_text
    if _PORT_IN_USE_TEXT in all_text:
        return program_port_error(program)
    for cause in ("No space left on device", "Permission denied", "Read-only file system", "Disk quota exceeded"):
        if cause in all_text:
            return LocalBrokerError(
                f"{name} could not write to {home}: {cause}", remedy="Free some space, or choose another folder (data=)"
            )
    if "MQ already started" in all_text:
        return LocalBrokerError(
            f"{name} is already running on {home}", remedy="Stop it, or choose another folder (data=)"
        )
    if "OutOfMemoryError" in all_text or "Could not reserve enough space" in all_text:
        return LocalBrokerError(f"{name} ran out of memory", remedy="Raise heap_mb=, or close other programs")
    tail = "\n".join(output_text.splitlines()[-_TAIL_LINES:] + log_text.splitlines()[-_TAIL_LINES:])
    return LocalBrokerError(f"{name} {event}; the end of its output", remark=f"\n{tail}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def spawn(
    command: list[str],
    log: Path,
    home: Path | None = None,
    on_started: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` so that it ends with this process; its output is appended to ``log``.

    ``on_started`` receives the child even if Ctrl-C interrupts this call, so that the caller can end the child.
    """
    watchdog_command = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("watchdog.py")),
        str(os.getpid()),
        *command,
    ]
    env = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES} | {
        "MALLOC_ARENA_MAX": "2"
    }
    if home is not None:
        env |= {"ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}

    def start_child() -> subprocess.Popen[bytes]:
        with open(folders.open_private(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as out:
            child = subprocess.Popen(
                watchdog_command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
                umask=0o077,  # whatever the umask of this process is, other users may not access files of servers
            )  # fmt: skip
        if on_started is not None:
            on_started(child)
        return child

    return _run_on_spawner(start_child)


_SpawnCall = tuple[Callable[[], "subprocess.Popen[bytes]"], "Future[subprocess.Popen[bytes]]"]
# The process that started the thread for spawns, and the calls that wait for this thread.
_spawner: tuple[int, queue.SimpleQueue[_SpawnCall]] | None = None
_spawner_lock = threading.Lock()


def _run_on_spawner(call: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Run ``call`` in the thread that starts all children. This thread never ends. A forked process starts its own thread."""
    global _spawner
    with _spawner_lock:
        if _spawner is None or _spawner[0] != os.getpid():
            _spawner = (os.getpid(), queue.SimpleQueue())
            threading.Thread(
                target=_run_spawn_calls, args=(_spawner[1],), name="localbroker spawner", daemon=True
            ).start()
    future: Future[subprocess.Popen[bytes]] = Future()
    try:
        _spawner[1].put((call, future))
        return future.result()
    except BaseException:
        if not future.cancel():
            future.exception()  # waits until the call, which has begun, ends
        raise


def _run_spawn_calls(spawn_calls: queue.SimpleQueue[_SpawnCall]) -> None:
    while True:
        call, future = spawn_calls.get()
        if not future.set_running_or_notify_cancel():
            continue
        outcome = capture(call)  # the waiting caller gets any error, and this thread continues
        if isinstance(outcome, Failure):
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)

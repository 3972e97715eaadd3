"""One server as a child process: a JVM with little memory that dies with us, its log in a file; and its ports on loopback.

The child gets a session of its own, so Ctrl-C reaches only Python, which then ends it. ``guard.py`` lets it end even
when Python is killed; the kernel ties that to the *thread* that started the child, so one lasting thread starts all.

Free ports are chosen below the range from which the kernel gives out ports for outgoing connections, so that no connection takes
one between the choice and the start. Each process chooses from blocks of its own, and no port twice: a server that was
killed finds its ports free when it starts again. Where blocks cannot be had, two processes can choose alike: the later
start fails, and is tried on other ports.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.distro import cache_folder
from rocketmq_spark.localbroker.java import Archive, Java

HOST = "127.0.0.1"
_RANGE = range(20_000, 32_000)
_BLOCK = 60

# What a broker listens on, relative to listenPort: itself, the fast port, replication (on all interfaces).
BROKER_PORTS = (0, -2, 1)
# A proxy: Remoting and, one above, gRPC.
PROXY_PORTS = (0, 1)


def is_free(port: int) -> bool:
    """Whether a server could listen here now, on loopback and on all interfaces."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def all_free(port: int, around: Iterable[int] = (0,)) -> bool:
    return all(is_free(port + d) for d in around)


def free_port(around: Iterable[int] = (0,), taken: Iterable[int] = ()) -> int:
    """A port whose neighbours at the given distances are free as well, none of them in ``taken`` or given out before."""
    around, avoid = tuple(around), set(taken)
    with _blocks.lock:
        for port in _blocks.candidates():
            wanted = {port + d for d in around}
            if avoid.isdisjoint(wanted) and _blocks.given.isdisjoint(wanted) and all_free(port, around):
                _blocks.given |= wanted
                return port
    raise LocalBrokerError(f"No free ports between {_RANGE.start} and {_RANGE.stop}", remedy="Stop some servers")


class _Blocks:
    """Parts of the range that are this process's, each by a lock that ends with it, and the ports that it gave out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.given: set[int] = set()
        self._own: set[int] = set()

    def candidates(self) -> Iterator[int]:
        """Ports of the blocks that this process has, then of others that are free; any, if there are no locks."""
        rng = random.SystemRandom()
        starts = list(range(_RANGE.start, _RANGE.stop, _BLOCK))
        for start in [*self._own, *rng.sample(starts, len(starts))]:
            if self._has(start):
                # Without those at its ends, whose neighbours are in other blocks.
                yield from rng.sample(range(start + 2, start + _BLOCK - 1), _BLOCK - 3)
        for _ in range(1000):
            yield rng.choice(_RANGE)

    def _has(self, start: int) -> bool:
        if start in self._own:
            return True
        folder = cache_folder() / "ports"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # A bare descriptor, for it is to stay open until the process ends.
            lock = os.open(folder / str(start), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._own.add(start)
            return True
        return False


_blocks = _Blocks()


def accepts(port: int) -> bool:
    """Whether a process listens here."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def refuse_taken(wished: Mapping[str, int]) -> None:
    """Raise the error for a wish, by the name of a server, that cannot be had now: before anything is fetched or started."""
    for name, port in wished.items():
        if not is_free(port):
            raise taken(name, [port])


def taken(name: str, ports: Iterable[int]) -> LocalBrokerError:
    """The error of a server that cannot listen on one of its ports."""
    text = " or ".join(map(str, ports))
    return LocalBrokerError(
        f"{name} cannot listen: port {text} is in use",
        remedy="Stop what uses it, choose another (ports=, or --port of broker start), or name none: a free one is found",
    )


class PortBook:
    """Which server of a data folder has which port: the user's wish, else last time's if free, else a new one."""

    def __init__(self, path: Path, wished: Mapping[str, int]) -> None:
        self._path = path
        self._wished = dict(wished)
        self._lock = threading.Lock()
        self._ports: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            self._ports = json.loads(path.read_text(encoding="utf-8"))

    def assign(self, name: str, around: tuple[int, ...]) -> int:
        """The port for a server that is about to start."""
        with self._lock:
            port = self._wished.get(name) or self._ports.get(name)
            if port is None or (name not in self._wished and not all_free(port, around)):
                # Also not what a server wants that starts later.
                known = {**self._ports, **self._wished}.values()
                port = free_port(around, taken=[p + d for p in known for d in BROKER_PORTS])
            self._ports[name] = port
            self._path.write_text(json.dumps(self._ports, indent=1) + "\n", encoding="utf-8")
        return port

    def may_change(self, name: str) -> bool:
        return name not in self._wished


_PAUSE_S = 0.01
_TAIL_LINES = 8
_PORT_TAKEN = "Address already in use"
MARK = "-Drocketmq.spark.data="
# What a server has no use for, and what would stand in its environment for as long as it runs.
_SECRETS = ("ROCKETMQ_ACCESS_KEY", "ROCKETMQ_SECRET_KEY")

_FLAGS = (
    "-Xss256k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # quick to start; the second compiler would cost more than it brings here
    "-XX:MaxDirectMemorySize=1g",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)


@dataclass(frozen=True, slots=True)
class Program:
    """One server: its name, its folder, what it runs and the ports it listens on, the one for clients first."""

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
        self._seen: dict[Path, int] = {}

    def start(self) -> None:
        program = self.program
        self._seen = {path: path.stat().st_size for path in self._log_files() if path.exists()}
        command = [
            str(self._java.path), f"-Xmx{program.heap_mb}m", *_FLAGS, *self._archive.flags(program.home),
            f"{MARK}{self._data}", f"-Duser.home={program.home}", *program.flags,
            "-cp", os.pathsep.join(map(str, program.jars)), program.main_class, *program.arguments,
        ]  # fmt: skip
        spawn(command, program.home / "out.txt", home=program.home, started=self._adopt)

    def _adopt(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.program.ports[0]}"

    def wait_until(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Return when ``ready``; a child that ended, or the deadline, is an error with the end of its log."""
        while not ready():
            # A broker that cannot listen takes ten seconds to give up.
            if self.pid is None or _PORT_TAKEN in self.printed():
                raise self._failure("ended while starting")
            if deadline.expired:
                raise self._failure("was not ready in time")
            deadline.pause(_PAUSE_S)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it away."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def wait_stopped(self, deadline: Deadline) -> None:
        """Wait for a child that was asked; kill it at the deadline."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(deadline.remaining())
            self.kill()

    def log(self) -> str:
        """What it printed and logged, oldest first within each of its files."""
        return "".join(_read(path) for path in self._log_files())

    def printed(self) -> str:
        """What it printed since its last start."""
        path = self._log_files()[0]
        return _read(path)[self._seen.get(path, 0) :]

    def _log_files(self) -> tuple[Path, ...]:
        return tuple(self.program.home / name for name in ("out.txt", "server.1.log", "server.log"))

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _failure(self, what: str) -> LocalBrokerError:
        printed, *logged = (_read(path)[self._seen.get(path, 0) :] for path in self._log_files())
        return explain(self.program, what, printed, "".join(logged))


def port_in_use(program: Program) -> LocalBrokerError:
    return taken(program.name, program.ports)


def explain(program: Program, what: str, printed: str, logged: str) -> LocalBrokerError:
    """The error for a failed start: one sentence where the cause is known, else its last words."""
    name, home, log = program.name, program.home, printed + logged
    if _PORT_TAKEN in log:
        return port_in_use(program)
    for cause in ("No space left on device", "Permission denied", "Read-only file system", "Disk quota exceeded"):
        if cause in log:
            return LocalBrokerError(
                f"{name} could not write to {home}: {cause}", remedy="Free some space, or choose another folder (data=)"
            )
    if "MQ already started" in log:
        return LocalBrokerError(
            f"{name} is already running on {home}", remedy="Stop it, or choose another folder (data=)"
        )
    if "OutOfMemoryError" in log or "Could not reserve enough space" in log:
        return LocalBrokerError(f"{name} ran out of memory", remedy="Raise heap_mb=, or close other programs")
    tail = "\n".join(printed.splitlines()[-_TAIL_LINES:] + logged.splitlines()[-_TAIL_LINES:])
    return LocalBrokerError(f"{name} {what}; the end of its output", remark=f"\n{tail}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def spawn(
    command: list[str],
    log: Path,
    home: Path | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` so that it ends with this process; what it prints is appended to ``log``.

    ``started`` gets the child in any case, even if Ctrl-C comes meanwhile and nothing is returned: so it can be ended.
    """
    guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(os.getpid()), *command]
    env = {name: value for name, value in os.environ.items() if name not in _SECRETS} | {"MALLOC_ARENA_MAX": "2"}
    if home is not None:
        env |= {"ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            child = subprocess.Popen(
                guard, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        if started is not None:
            started(child)
        return child

    return _on_spawner(start)


_Call = tuple[Callable[[], "subprocess.Popen[bytes]"], "Future[subprocess.Popen[bytes]]"]
_spawner: tuple[int, queue.SimpleQueue[_Call]] | None = None
_spawner_lock = threading.Lock()


def _on_spawner(call: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Run ``call`` in the one thread that lives as long as the process (a fork gets a thread of its own)."""
    global _spawner
    with _spawner_lock:
        if _spawner is None or _spawner[0] != os.getpid():
            _spawner = (os.getpid(), queue.SimpleQueue())
            threading.Thread(target=_serve, args=(_spawner[1],), name="localbroker spawner", daemon=True).start()
    future: Future[subprocess.Popen[bytes]] = Future()
    try:
        _spawner[1].put((call, future))
        return future.result()
    except BaseException:
        if not future.cancel():
            future.exception()  # what has begun is waited for
        raise


def _serve(calls: queue.SimpleQueue[_Call]) -> None:
    while True:
        call, future = calls.get()
        if not future.set_running_or_notify_cancel():
            continue
        outcome = attempt(call)  # whatever it is: who waits must hear of it, and the thread must start what comes next
        if isinstance(outcome, Failure):
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)

"""The background process that runs the local broker, and its recorded state. The process outlives ``broker start``. The command
of the process is ``python -m rocketmq_spark.cli.background``. The process holds a lock while it runs. To find out whether the
process runs, commands test the lock, not a process id. ``state.json`` beside the lock has the addresses of the servers.
``broker start`` reads the outcome of the start from a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import rocketmq_spark
from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.base.process import python_call
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import LocalBroker, distribution, processes
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.localbroker.servers import NAME_SERVER, broker_names

_LOCK_CHECK_INTERVAL_S = 0.02
_FOLDER_NAME, _DATA_NAME = distribution.BACKGROUND_DATA
_LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """The recorded state of the local broker. ``servers`` are addresses and process ids by name.

    ``conf`` has only the names of the settings, because values may be secrets.
    """

    pid: int
    name_server: str
    data: str
    started_ms: int
    servers: dict[str, tuple[str, int]]
    conf: list[str] = field(default_factory=list)

    def is_up(self, server: str) -> bool:
        """Whether the server accepts connections now. The server may have died after the state was recorded."""
        return processes.is_listening(int(self.servers[server][0].rpartition(":")[2]))


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The arguments of ``broker start``."""

    brokers: int
    slaves: int
    data: str
    conf: Mapping[str, str]
    port: int | None


def default_data() -> Path:
    return _folder() / _DATA_NAME


def stored_brokers(data: Path) -> dict[str, int]:
    """Return the brokers of a data folder, in the order of their names, each with the number of its slaves."""
    server_folders = [conf.parent.name for conf in data.glob("*/broker.conf")]
    names = itertools.takewhile(
        lambda name: name in server_folders, (broker_names(i + 1)[i] for i in itertools.count())
    )
    return {name: sum(home.startswith(f"{name}-slave-") for home in server_folders) for name in names}


def log_path() -> Path:
    """The file with the output of the background process."""
    return _path("log.txt")


def running_broker() -> RunningBroker | None:
    """Return the local broker; None if none runs."""
    if not _is_locked():
        return None
    try:
        state = json.loads(_read_state())
    except (FileNotFoundError, ValueError):
        return None  # the process is starting or ending
    servers = {name: (address, pid) for name, (address, pid) in state.pop("servers").items()}
    return RunningBroker(**state, servers=servers)


def start(request: StartRequest) -> RunningBroker:
    """Start the local broker and return when it is ready. The first start of a user downloads RocketMQ, with a progress bar."""
    _check_not_running()
    find_java()
    processes.check_ports_free(_ports(request))
    distribution.fetch()
    _check_not_running()  # during the download, another command may have started a local broker
    with distribution.writing_to(_folder()):
        folders.make_folders(_folder())
        _check_no_foreign_files()
        _state_path().unlink(missing_ok=True)
        with open(folders.open_private(log_path(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as log:
            return _spawn(request, log)


def _check_no_foreign_files() -> None:
    """Raise ``LocalBrokerError`` if the folder has a file of another user, because such a file shows that this user could once
    write to the folder. The data folder is not checked here, because ``LocalBroker`` checks it.
    """
    if (foreign_file := folders.foreign_file_in(_folder(), (_DATA_NAME,))) is not None:
        raise _foreign_file_error(foreign_file)


def _check_not_running() -> None:
    if _is_locked():
        broker = running_broker()
        where_text = f": {broker.name_server}, process {broker.pid}" if broker else " and is starting or stopping"
        raise LocalBrokerError(
            f"A local broker is running already{where_text}", remedy="Stop it with: rocketmq-spark broker stop"
        )


def _spawn(request: StartRequest, log: IO[str]) -> RunningBroker:
    read_fd, write_fd = os.pipe()
    package_root = str(Path(rocketmq_spark.__file__).parent.parent)
    arguments = python_call("-P", "-m", __name__, str(write_fd), first_import_folders=[package_root])
    if distribution.CACHE_VARIABLE in arguments["env"]:
        # The child gets an absolute path, because it has another current folder than this process.
        arguments["env"][distribution.CACHE_VARIABLE] = str(distribution.cache_folder())
    with open(read_fd, encoding="utf-8") as answers:
        child = subprocess.Popen(
            **arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_fd], start_new_session=True
        )
        os.close(write_fd)
        try:
            assert child.stdin is not None
            # The request is not passed as an argument, because every user can see arguments with 'ps', and settings may be
            # secrets.
            with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
                stdin.write(json.dumps(asdict(request)).encode())
            answer = json.loads(answers.readline() or "{}")
        except BaseException:
            child.terminate()
            child.wait()
            raise
    broker = running_broker() if answer.get("ready") else None
    if broker is None:
        child.wait()
        reason = answer.get("message") or f"The local broker ended while starting; see {log_path()}"
        raise LocalBrokerError(reason, remedy=answer.get("remedy"))
    child.returncode = 0  # prevents a ResourceWarning about the process, which continues to run
    return broker


def stop(timeout_s: float = 40.0) -> RunningBroker:
    """Stop the local broker cleanly, and return its state when it has ended."""
    broker = running_broker()
    if broker is None:
        raise not_running_error()
    with contextlib.suppress(ProcessLookupError):
        os.kill(broker.pid, signal.SIGTERM)
    if not wait_until(lambda: not _is_locked(), Deadline.after(timeout_s), _LOCK_CHECK_INTERVAL_S):
        raise LocalBrokerError(
            f"The local broker did not end within {timeout_s:g} s", remedy=f"End it with: kill -9 {broker.pid}"
        )
    return broker


def not_running_error() -> LocalBrokerError:
    return LocalBrokerError("No local broker is running", remedy="Start one with: rocketmq-spark broker start")


def _folder() -> Path:
    return distribution.cache_folder() / _FOLDER_NAME


def _path(name: str) -> Path:
    """Return a path in the folder. Raises ``LocalBrokerError`` if the path is a file of another user."""
    path = _folder() / name
    if (foreign_file := folders.foreign_file(path)) is not None:
        raise _foreign_file_error(foreign_file)
    return path


def _foreign_file_error(foreign_file: folders.ForeignFile) -> LocalBrokerError:
    return LocalBrokerError(
        f"The local broker does not use files of another user: {foreign_file}",
        remedy=f"Remove {foreign_file.path}",
    )


def _state_path() -> Path:
    return _path("state.json")


def _read_state() -> bytes:
    """Return the recorded state. Raises ``LocalBrokerError`` if other users may write the file, because these users could
    redirect commands to other servers.
    """
    path = _state_path()
    with open(folders.open_regular(path), "rb") as file:
        if folders.others_may_write(os.fstat(file.fileno())):
            raise LocalBrokerError(f"Others may write to {path}", remedy="Stop the local broker, and remove this file")
        return file.read()


def _is_locked() -> bool:
    """Whether the background process runs, and holds the lock."""
    try:
        with open(folders.open_private(_path("lock"), os.O_RDONLY)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):  # no lock file, or a cache of root: this user has no local broker
        return False
    except BlockingIOError:
        return True
    return False


# --- the process itself


def _run(answers: IO[str], request: StartRequest) -> None:
    """Hold the lock, run the servers, write the outcome of the start to ``answers``, and wait for SIGTERM."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    with _lock(), contextlib.ExitStack() as stack:
        try:
            local_broker = stack.enter_context(_servers(request))
            stack.callback(_state_path().unlink, missing_ok=True)
            _write_state(local_broker, list(request.conf))
        except LocalBrokerError as e:
            print(json.dumps({"message": " ".join([e.message, e.remark or ""]), "remedy": e.remedy}), file=answers)
            return
        print(json.dumps({"ready": True}), file=answers)
        answers.close()
        Latch().wait()  # unlike signal.pause(), this wait also ends if the signal came just before the wait


def _servers(request: StartRequest) -> LocalBroker:
    return LocalBroker(
        brokers=request.brokers,
        slaves=request.slaves,
        conf=request.conf,
        data=request.data,
        ports=_ports(request),
        quiet=True,
    )


def _ports(request: StartRequest) -> dict[str, int]:
    return {NAME_SERVER: request.port} if request.port else {}


def _write_state(local_broker: LocalBroker, conf: list[str]) -> None:
    names = [NAME_SERVER, *local_broker.brokers, *local_broker.slaves]
    state = RunningBroker(
        pid=os.getpid(),
        name_server=local_broker.name_server,
        data=str(local_broker.data),
        started_ms=time.time_ns() // 1_000_000,
        servers={name: (local_broker.address(name), local_broker.pid(name) or 0) for name in names},
        conf=conf,
    )
    folders.replace_file(_state_path(), json.dumps(asdict(state)))


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    deadline = Deadline.after(_LOCK_TIMEOUT_S)
    with open(folders.open_private(_path("lock"), os.O_RDWR | os.O_CREAT), "a") as lock:
        while not folders.try_lock(lock):  # a status command may hold the lock for a moment
            if deadline.expired:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", lock.name)
            deadline.pause(_LOCK_CHECK_INTERVAL_S)
        yield


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "w", encoding="utf-8") as _answers:
        _run(_answers, StartRequest(**json.load(sys.stdin)))

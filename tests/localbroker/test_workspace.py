"""Bringing a server up, and what can go wrong between the choice of a port and the start. One server stands for all."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import distribution, processes, servers
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.localbroker.processes import Program, Server
from rocketmq_spark.localbroker.workspace import Workspace, reserve


@pytest.fixture
def make_workspace(tmp_path: Path) -> Iterator[Callable[..., Workspace]]:
    made: list[Workspace] = []

    def make(wished: Mapping[str, int] | None = None) -> Workspace:
        claimed = reserve(tmp_path / "run", tmp_path / f"data-{len(made)}", keeps_data=True)
        made.append(Workspace(claimed, find_java(), tmp_path / "archives", wished or {}))
        return made[-1]

    yield make
    for ws in made:
        ws.close(keeps_data=False)


@pytest.fixture
def fork() -> Iterator[Callable[[], None]]:
    """Forks a process that lives until the end of the test, with what is open now."""
    children: list[int] = []

    def make() -> None:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        children.append(child)

    yield make
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_that_lives_on_holds_no_lock(tmp_path: Path, fork: Callable[[], None]) -> None:
    """The folder was in use by "another LocalBroker" for as long as it lived, and all starts waited for it without a word."""
    first = reserve(tmp_path / "run", tmp_path / "data", keeps_data=True)
    fork()
    first.release(delete=False)
    with distribution.file_locked(tmp_path / "run" / "lock"):
        fork()
    waited: list[bool] = []

    def waits() -> None:
        waited.append(True)
        raise TimeoutError

    with distribution.file_locked(tmp_path / "run" / "lock", waits):
        pass
    assert not waited
    reserve(tmp_path / "run", tmp_path / "data", keeps_data=True).release(delete=False)


def _ready(server: Server) -> bool:
    return "success" in server.output_since_start() and processes.is_listening(server.program.ports[0])


def _bring_up(ws: Workspace, make: Callable[[int], Program] | None = None) -> Server:
    jars = tuple(distribution.fetch(["core"]))
    make = make or (lambda port: servers.prepare_name_server(ws.data, jars, "namesrv", port))
    return ws.bring_up("namesrv", (0,), make, _ready, Deadline.after(30))


def test_up_and_away(make_workspace: Callable[..., Workspace]) -> None:
    ws = make_workspace()
    server = _bring_up(ws)
    assert ws.servers == {"namesrv": server}
    assert processes.is_listening(server.program.ports[0])
    ws.close(keeps_data=False)
    assert server.pid is None
    assert not ws.data.exists()


def test_closing_twice_is_fine(make_workspace: Callable[..., Workspace]) -> None:
    ws = make_workspace()
    ws.close(keeps_data=True)
    ws.close(keeps_data=True)
    assert ws.data.exists()


def test_a_port_taken_at_the_last_moment(
    make_workspace: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    ws = make_workspace()
    with socket.create_server((processes.HOST, processes.free_port())) as other:
        taken = other.getsockname()[1]
        candidates = [
            taken,
            *(processes.free_port() for _ in range(9)),
        ]  # others on this machine may take one meanwhile
        monkeypatch.setattr(processes._blocks, "chosen_ports", set())
        really_free, looked = processes.is_free, []

        def free_when_first_looked_at(port: int) -> bool:
            looked.append(port)
            return looked.count(taken) == 1 if port == taken else really_free(port)

        monkeypatch.setattr(processes._blocks, "candidates", lambda: iter(candidates))
        monkeypatch.setattr(processes, "is_free", free_when_first_looked_at)
        server = _bring_up(ws)
    assert looked.count(taken) > 1
    assert server.program.ports[0] in candidates[1:]


def test_a_port_that_only_the_server_finds_taken(
    make_workspace: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = processes.free_port()
    ws = make_workspace({"namesrv": port})
    with socket.create_server((processes.HOST, port)):
        monkeypatch.setattr(processes, "is_free", lambda port: True)
        with pytest.raises(LocalBrokerError, match=rf"namesrv cannot listen: port {port} is in use"):
            _bring_up(ws)
    assert ws.servers == {}


def test_a_wished_port_that_is_taken(make_workspace: Callable[..., Workspace]) -> None:
    port = processes.free_port()
    ws = make_workspace({"namesrv": port})
    in_use = pytest.raises(LocalBrokerError, match=rf"namesrv cannot listen: port {port} is in use")
    with socket.create_server((processes.HOST, port)), in_use:
        _bring_up(ws)


def test_the_archive_is_given_up_when_nothing_else_is_to_blame(
    make_workspace: Callable[..., Workspace], tmp_path: Path
) -> None:
    ws = make_workspace()
    (tmp_path / "archives").mkdir()
    starts = []

    def make(port: int) -> Program:
        home = ws.data / "namesrv"
        home.mkdir(exist_ok=True)
        starts.append(port)
        return Program("namesrv", home, (port,), "no.such.Main", (), (), 32)

    archive = ws._archive(())
    archive.path.write_bytes(b"not an archive")
    with pytest.raises(LocalBrokerError, match="ended while starting"):
        _bring_up(ws, make)
    assert len(starts) == 2
    assert not archive.path.exists()


def test_archives_are_made_from_running_servers(make_workspace: Callable[..., Workspace]) -> None:
    ws = make_workspace()
    server = _bring_up(ws)
    ws.make_archives()
    archive = ws._archive(server.program.jars)
    server.wait_until(archive.path.exists, Deadline.after(180))
    second = make_workspace()
    assert _bring_up(second).pid is not None
    assert not (second.data / "namesrv" / "classes.lst").exists()

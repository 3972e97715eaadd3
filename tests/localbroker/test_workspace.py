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
from rocketmq_spark.localbroker.workspace import Site, claim


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(wished: Mapping[str, int] | None = None) -> Site:
        claimed = claim(tmp_path / "run", tmp_path / f"data-{len(made)}", keep=True)
        made.append(Site(claimed, find_java(), tmp_path / "archives", wished or {}))
        return made[-1]

    yield make
    for site in made:
        site.close(keep=False)


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
    first = claim(tmp_path / "run", tmp_path / "data", keep=True)
    fork()
    first.release(delete=False)
    with distribution.exclusive(tmp_path / "run" / "lock"):
        fork()
    waited: list[bool] = []

    def waits() -> None:
        waited.append(True)
        raise TimeoutError

    with distribution.exclusive(tmp_path / "run" / "lock", waits):
        pass
    assert not waited
    claim(tmp_path / "run", tmp_path / "data", keep=True).release(delete=False)


def _ready(server: Server) -> bool:
    return "success" in server.printed() and processes.accepts(server.program.ports[0])


def _bring_up(site: Site, make: Callable[[int], Program] | None = None) -> Server:
    jars = tuple(distribution.fetch(["core"]))
    make = make or (lambda port: servers.name_server(site.data, jars, "namesrv", port))
    return site.bring_up("namesrv", (0,), make, _ready, Deadline.after(30))


def test_up_and_away(make_site: Callable[..., Site]) -> None:
    site = make_site()
    server = _bring_up(site)
    assert site.servers == {"namesrv": server}
    assert processes.accepts(server.program.ports[0])
    site.close(keep=False)
    assert server.pid is None
    assert not site.data.exists()


def test_closing_twice_is_fine(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.close(keep=True)
    site.close(keep=True)
    assert site.data.exists()


def test_a_port_taken_at_the_last_moment(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site()
    with socket.create_server((processes.HOST, processes.free_port())) as other:
        taken = other.getsockname()[1]
        candidates = [
            taken,
            *(processes.free_port() for _ in range(9)),
        ]  # others on this machine may take one meanwhile
        monkeypatch.setattr(processes._blocks, "given", set())
        really_free, looked = processes.is_free, []

        def free_when_first_looked_at(port: int) -> bool:
            looked.append(port)
            return looked.count(taken) == 1 if port == taken else really_free(port)

        monkeypatch.setattr(processes._blocks, "candidates", lambda: iter(candidates))
        monkeypatch.setattr(processes, "is_free", free_when_first_looked_at)
        server = _bring_up(site)
    assert looked.count(taken) > 1
    assert server.program.ports[0] in candidates[1:]


def test_a_port_that_only_the_server_finds_taken(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = processes.free_port()
    site = make_site({"namesrv": port})
    with socket.create_server((processes.HOST, port)):
        monkeypatch.setattr(processes, "is_free", lambda port: True)
        with pytest.raises(LocalBrokerError, match=rf"namesrv cannot listen: port {port} is in use"):
            _bring_up(site)
    assert site.servers == {}


def test_a_wished_port_that_is_taken(make_site: Callable[..., Site]) -> None:
    port = processes.free_port()
    site = make_site({"namesrv": port})
    in_use = pytest.raises(LocalBrokerError, match=rf"namesrv cannot listen: port {port} is in use")
    with socket.create_server((processes.HOST, port)), in_use:
        _bring_up(site)


def test_the_archive_is_given_up_when_nothing_else_is_to_blame(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site()
    (tmp_path / "archives").mkdir()
    starts = []

    def make(port: int) -> Program:
        home = site.data / "namesrv"
        home.mkdir(exist_ok=True)
        starts.append(port)
        return Program("namesrv", home, (port,), "no.such.Main", (), (), 32)

    archive = site._archive(())
    archive.path.write_bytes(b"not an archive")
    with pytest.raises(LocalBrokerError, match="ended while starting"):
        _bring_up(site, make)
    assert len(starts) == 2
    assert not archive.path.exists()


def test_archives_are_made_from_running_servers(make_site: Callable[..., Site]) -> None:
    site = make_site()
    server = _bring_up(site)
    site.make_archives()
    archive = site._archive(server.program.jars)
    server.wait_until(archive.path.exists, Deadline.after(180))
    second = make_site()
    assert _bring_up(second).pid is not None
    assert not (second.data / "namesrv" / "classes.lst").exists()

"""Free ports: neighbours too, remembered per data folder, never somebody else's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import processes
from rocketmq_spark.localbroker.distribution import CACHE_VARIABLE
from rocketmq_spark.localbroker.processes import BROKER_PORT_DISTANCES, PortAssignments


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((processes.HOST, processes.free_port(BROKER_PORT_DISTANCES))) as s:
        yield s


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_listener_on_loopback_takes_the_port(listener: socket.socket) -> None:
    assert not processes.is_free(_port(listener))
    assert processes.is_listening(_port(listener))


def test_a_broker_needs_its_neighbours(listener: socket.socket) -> None:
    for distance in BROKER_PORT_DISTANCES:
        assert not processes.are_all_free(_port(listener) - distance, BROKER_PORT_DISTANCES)


def test_free_port_avoids_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of its own: another test of this process may have been given one of these.
    monkeypatch.setattr(processes, "_blocks", processes._PortBlocks())
    monkeypatch.setattr(processes._blocks, "candidates", lambda: iter([25_000, 25_001, 25_002, 25_003]))
    monkeypatch.setattr(processes, "is_free", lambda port: True)
    assert processes.free_port((0, -2), ports_to_avoid=[24_998, 25_001]) == 25_002


def test_no_port_is_given_out_twice_and_none_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the server that had it is dead, either: its ports are free then, and still its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(processes, "_blocks", processes._PortBlocks())
    own = [processes.free_port(BROKER_PORT_DISTANCES) for _ in range(60)]
    asked = "from rocketmq_spark.localbroker.processes import *\nprint(*[free_port(BROKER_PORT_DISTANCES) for _ in range(60)])"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    all_of_them = [port + d for port in [*own, *map(int, told.stdout.split())] for d in BROKER_PORT_DISTANCES]
    assert len(set(all_of_them)) == len(all_of_them) == 360


def test_a_folder_that_cannot_be_written_leaves_any_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "under"))
    monkeypatch.setattr(processes, "_blocks", processes._PortBlocks())
    assert processes.free_port()


def test_nobody_accepts_on_a_free_port() -> None:
    assert not processes.is_listening(processes.free_port())


def test_the_book_keeps_ports(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    port = PortAssignments(path, {}).assign("broker-a", BROKER_PORT_DISTANCES)
    assert PortAssignments(path, {}).assign("broker-a", BROKER_PORT_DISTANCES) == port
    assert json.loads(path.read_text()) == {"broker-a": port}


def test_the_book_gives_another_port_when_the_old_one_is_taken(tmp_path: Path, listener: socket.socket) -> None:
    path = tmp_path / "ports.json"
    path.write_text(json.dumps({"broker-a": _port(listener)}))
    assert PortAssignments(path, {}).assign("broker-a", BROKER_PORT_DISTANCES) != _port(listener)


def test_a_wish_is_kept_even_when_it_cannot_work(tmp_path: Path, listener: socket.socket) -> None:
    book = PortAssignments(tmp_path / "ports.json", {"namesrv": _port(listener)})
    assert book.assign("namesrv", (0,)) == _port(listener)
    assert not book.may_change("namesrv")
    assert book.may_change("broker-a")


def test_servers_of_one_book_do_not_meet(tmp_path: Path) -> None:
    book = PortAssignments(tmp_path / "ports.json", {})
    ports = [book.assign(f"broker-{i}", BROKER_PORT_DISTANCES) + d for i in range(20) for d in BROKER_PORT_DISTANCES]
    assert len(set(ports)) == len(ports)


def test_requested_ports_and_their_neighbours_are_not_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of its own: another test of this process may have been given one of these.
    monkeypatch.setattr(processes, "_blocks", processes._PortBlocks())
    monkeypatch.setattr(processes._blocks, "candidates", lambda: iter([25_000, 24_998, 25_001, 25_005]))
    monkeypatch.setattr(processes, "is_free", lambda port: True)
    book = PortAssignments(tmp_path / "ports.json", {"broker-a": 25_000})
    assert book.assign("namesrv", (0,)) == 25_005


def test_a_damaged_book_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    path.write_text("{")
    assert PortAssignments(path, {}).assign("namesrv", (0,)) > 0

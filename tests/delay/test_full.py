"""A node whose disk has no room reads nothing more, sends what it holds, and says so again and again. The store is real."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.delay import envelope_records, service
from rocketmq_spark.errors import CallTimeout, SpoolFull
from rocketmq_spark.spool import files
from tests.delay.nodes import QUEUES, Node, World, envelope
from tests.mockbroker import eventually

ONE, TWO = QUEUES


class Disk:
    """What is left of the disk beyond the reserve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 20
        monkeypatch.setattr(files, "SPACE_CHECK_S", 0.0)
        monkeypatch.setattr(
            os, "statvfs", lambda path: SimpleNamespace(f_bavail=files.RESERVE_BYTES + self.left, f_frsize=1)
        )


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(envelope_records, "FULL_DISK_PAUSE_S", 0.0)
    return Disk(monkeypatch)


class Clock:
    """The one that deadlines look at, which a test puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s, real = 0.0, time.monotonic
        moved = SimpleNamespace(monotonic=lambda: real() + self.ahead_s, time_ns=time.time_ns, sleep=time.sleep)
        monkeypatch.setattr("rocketmq_spark.base.clock.time", moved)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def refused(node: Node) -> None:
    """Its queue is begun first, perhaps."""

    def turns() -> None:
        for _ in range(4):
            node.turn(ONE)

    with pytest.raises(SpoolFull):
        turns()


@pytest.mark.parametrize("restarted", [False, True])
def test_full_disk_still_sends_stored_messages_and_rest_later(
    world: World, disk: Disk, clock: Clock, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """A node that begins holds what is due back for a minute, whatever it meets: it may be taken back in what is not read."""
    node = world.node("a")
    for i in range(3):
        world.topic.put(envelope(f"held{i}", 5))
    for _ in range(6):
        node.turn(ONE)
    disk.left = 0
    for i in range(3):
        world.topic.put(envelope(f"unread{i}", 5))
    if restarted:
        node.service.close()
        node.open()
    world.time.advance(6)
    for _ in range(5):
        refused(node)
    monkeypatch.setattr(envelope_records, "FULL_DISK_PAUSE_S", 600.0)
    refused(node)
    clock.ahead_s += service.CATCH_UP_S
    node.turn(ONE)
    node.turn(ONE)
    assert sorted(node.sends.bodies) == [b"held0", b"held1", b"held2"]
    disk.left = 1 << 20
    for _ in range(5):
        node.turn(ONE)
    assert (len(node.store), len(node.sends.bodies)) == (0, 3), "nothing is read for a while"
    clock.ahead_s += 600.0
    for _ in range(5):
        node.turn(ONE)
    assert sorted(node.sends.bodies[3:]) == [b"unread0", b"unread1", b"unread2"]
    assert world.offsets()[:2] == (6, 6)


def test_queue_assigned_while_disk_is_full_is_not_read(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.node("a")
    node.turn(ONE)
    disk.left = 0
    world.topic.put(envelope("one", 5), ONE)
    monkeypatch.setattr(envelope_records, "FULL_DISK_PAUSE_S", 60.0)
    refused(node)
    world.topic.put(envelope("two", 5), TWO)
    for _ in range(3):
        node.turn(ONE, TWO)
    assert node.reader.paused == {ONE, TWO}
    disk.left = 1 << 20
    node.service._back_pressure._pause_deadline = service.Deadline(0.0)
    for _ in range(6):
        node.turn(ONE, TWO)
    assert node.reader.paused == set()
    world.time.advance(6)
    assert sorted(node.sends.bodies) == [b"one", b"two"]


def test_the_node_goes_on_and_says_so_again_and_again(
    world: World, disk: Disk, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "PAUSE_S", 0.0)
    node, over, times = world.node("a"), threading.Event(), list[int]()
    noted = node.service._back_pressure.on_full
    monkeypatch.setattr(node.service._back_pressure, "on_full", lambda *given: (noted(*given), times.append(1)))
    node.reader.own(ONE)
    world.topic.put(envelope("m", 5))
    disk.left = 0
    running = threading.Thread(target=node.service.run, args=(over,), daemon=True)
    running.start()
    try:
        for said in (1, 2, 3):
            before = len(times)
            eventually(lambda before=before: len(times) > before + 5)
            assert caplog.text.count("no room for more delayed messages") == said, "not each time"
            clock.ahead_s += envelope_records.FULL_DISK_LOG_S
        disk.left = 1 << 20
        eventually(lambda: node.service.stored_count > 0, 60)
    finally:
        over.set()
        running.join(60)
    assert caplog.text.count("there is room again") == 1
    assert node.service.stored_count == 1


def test_repeated_errors_delay_due_messages_at_most_one_minute(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each began all queues again, and with them the minute. It reads one message a turn, and does not come to their end."""
    monkeypatch.setattr(service, "PAGE", 1)
    node = world.node("a")
    world.topic.put(envelope("due", 1))
    for _ in range(3):
        node.turn(ONE)
    node.kill()
    world.time.advance(2)
    for i in range(50):
        world.topic.put(envelope(f"m{i}", 500))
    assert node.sends.bodies == []
    keep: Any = node.service._store_envelopes

    def fails(messages: Any) -> None:
        raise CallTimeout("no answer")

    for turn in range(12):
        monkeypatch.setattr(node.service, "_store_envelopes", keep if turn % 2 else fails)
        if turn % 2:
            node.turn(ONE)
            assert (node.sends.bodies == []) == (clock.ahead_s < service.CATCH_UP_S)
        else:
            with pytest.raises(CallTimeout):
                node.turn(ONE)
        clock.ahead_s += service.CATCH_UP_S / 4
    assert node.sends.bodies == [b"due"]

"""What many envelopes cost a node: counts, for times and native memory are measured by ``benchmarks/delay.py``."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.delay import service
from rocketmq_spark.spool.records import Record
from rocketmq_spark.wire.envelope import cancel_envelope
from tests.delay.nodes import QUEUES, START_MS, World, envelope
from tests.scale import SCALE

ONE = QUEUES[0]
FAR_S = 30 * 86_400


def test_page_of_envelopes_costs_one_write_and_no_send(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    node.turn(ONE)
    for i in range(service.PAGE):
        world.topic.put(envelope(f"m{i}", FAR_S))
    writes: list[int] = []
    write = node.store.add

    def add(records: Sequence[tuple[Record, int]], *notes: Any) -> None:
        writes.append(len(records))
        write(records, *notes)

    monkeypatch.setattr(node.store, "add", add)
    node.turn(ONE)
    assert [written for written in writes if written] == [service.PAGE]
    assert (len(node.store), node.sends.sent) == (service.PAGE, [])


def test_large_envelopes_are_written_before_many_are_in_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GATHER_BYTES", 10 * len(envelope("m0", FAR_S)))
    node = world.node("a")
    node.turn(ONE)
    for i in range(25):
        world.topic.put(envelope(f"m{i % 10}", FAR_S + i))
    held = []
    for _ in range(3):
        node.turn(ONE)
        held.append(len(node.store))
    assert held == [10, 20, 25]


def test_what_waits_is_on_the_disk_and_not_in_memory(world: World) -> None:
    total = 1_000_000 if SCALE >= 1 else 8 * service.PAGE
    bodies = [envelope(f"m{i}", FAR_S + i) for i in range(total)]
    tracemalloc.start()
    try:
        node = world.node("a")
        held = {}
        for share in (total // 4, total):
            for body in bodies[len(node.store) : share]:
                world.topic.put(body)
            for _ in range(2 + share // service.PAGE):
                node.turn(ONE)
            assert len(node.store) == share
            held[share] = _held()
        node.kill()
        node.turn(ONE)
        assert len(node.store) == total
        assert max(_held(), held[total]) < held[total // 4] + 10 * total
    finally:
        tracemalloc.stop()
    assert node.sends.sent == []


def _held() -> int:
    """Bytes that lines of the product hold."""
    gc.collect()
    product = tracemalloc.Filter(inclusive=True, filename_pattern=f"{Path(service.__file__).parents[1]}/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([product]).traces)


def test_due_message_is_not_sent_before_cancel_read_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that stood still for a while: it was taken back long before it was due, and the thread that sends is quick."""
    node = world.node("a")
    node.turn(ONE)
    node.turn(ONE)
    for name in "xy":
        world.topic.put(envelope(name, 50))
    world.topic.put(cancel_envelope("orders", START_MS + 50_000, "x", START_MS + 20_000))
    world.time.advance(60)
    poll, forget = node.reader.poll, node.store.drop_records

    def meanwhile(marks: Any) -> int:
        assert node.service._spool is not None
        node.service._spool.redelivery.wake()
        world.time.run_due()
        return forget(marks)

    monkeypatch.setattr(node.reader, "poll", lambda timeout_s=5.0: [each for _ in range(3) for each in poll(0)])
    monkeypatch.setattr(node.store, "drop_records", meanwhile)
    node.turn(ONE)
    assert (node.sends.bodies, len(node.store)) == ([b"y"], 0)

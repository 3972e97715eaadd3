"""Issue 14: what a producer said it has is at the broker in the end, at whatever moment it was killed (kill -9)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.wire.properties import decode_properties
from tests.mockbroker import Call, Command, MockBroker, ok, refuse, route
from tests.scale import SCALE

ROOT = Path(__file__).parents[2]
KILLS = 20 if SCALE >= 1 else 4
BUSY = refuse(Response.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
UNDER_WAY = 64  # what a redelivery hands out at once


class Broker(MockBroker):
    """Its own name server. Refuses half of the sends while it is ``busy``, in runs; counts what it took by id."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._refusing = 0
        self.busy = True
        self.taken: Counter[str] = Counter()
        self.on(Request.SEND_MESSAGE_V2, self._send)
        self.on(Request.HEART_BEAT, ok())
        self.on(Request.UNREGISTER_CLIENT, ok())

    def _send(self, call: Call) -> Command:
        if self.busy and self._refusing == 0 and self._rng.random() < 0.05:
            self._refusing = 20
        if self.busy and self._refusing:
            self._refusing -= 1
            return BUSY
        self.taken[decode_properties(str(call.ext("i")))["UNIQ_KEY"]] += 1
        return ok(msgId="x", queueId=call.ext("e"), queueOffset=1)


def run(broker: Broker, folder: Path, seed: int, more: int | None) -> list[str]:
    """The whole lines that the producer said. It is killed ``more`` lines after the first send that was spooled."""
    what = "drain" if more is None else "send"
    command = [sys.executable, "-m", "tests.spool.producing", broker.address, str(folder), str(seed), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as producer:
        try:
            return drained(producer) if more is None else killed_after(producer, more)
        finally:
            producer.kill()  # whatever the test missed


def drained(producer: subprocess.Popen[str]) -> list[str]:
    lines = producer.communicate(timeout=180)[0].splitlines()
    assert producer.returncode == 0
    return lines


def killed_after(producer: subprocess.Popen[str], more: int) -> list[str]:
    assert producer.stdout is not None
    text = ""
    while "SPOOLED" not in text or more:
        line = producer.stdout.readline()
        assert line, "it ended by itself"
        text += line
        more -= "SPOOLED" in text and more > 0
    os.kill(producer.pid, signal.SIGKILL)
    text += producer.stdout.read()
    assert producer.wait(60) == -signal.SIGKILL, "it ended by itself"
    return text[: text.rfind("\n") + 1].splitlines()


def test_messages_confirmed_by_killed_producer_arrive(tmp_path: Path) -> None:
    rng = random.Random()
    with Broker(rng) as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(4, {"broker-a": broker.address}))
        said: list[str] = []
        for _ in range(KILLS):
            said += run(broker, tmp_path / "s", rng.randrange(1 << 30), rng.randrange(40))
        broker.busy = False
        assert run(broker, tmp_path / "s", 1, None) == ["dead 0"]
    status = {line.split()[1]: line.split()[0] for line in said}
    spooled = {msg_id for msg_id, name in status.items() if name == "SPOOLED"}
    assert spooled
    assert status.keys() <= broker.taken.keys()
    twice = {msg_id: times for msg_id, times in broker.taken.items() if times > 1}
    # Taken, and its settlement was not on the disk when the process died: what was out then, and nothing else.
    assert sum(twice.values()) - len(twice) <= KILLS * UNDER_WAY
    assert not {msg_id for msg_id in twice if status.get(msg_id) == "SEND_OK"}
    print(f"{KILLS} kills: {len(status)} said, {len(spooled)} of them spooled, {len(twice)} arrived more than once")

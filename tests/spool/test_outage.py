"""Row 3-24: thirty minutes without a broker, on a scripted one, with the clock as an argument; the full count at scale 1."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, ConnectionLost
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.lanes import SteadyClock
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import Outcome, ScriptedSender, ok
from tests.producer.bench import Bench, bench
from tests.scale import SCALE, scaled

__all__ = ["bench"]

OUTAGE_S = 1800
COUNT = scaled(100_000) if SCALE >= 1 else 500
LOST_EACH = 97


class Broker(ScriptedSender):
    """Down until it is told; now and then it stores a message all the same, and its answer is lost."""

    up = False

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.time)
        self.attempts = 0
        self.taken: Counter[str] = Counter()
        self.answers_lost: Counter[str] = Counter()

    def has_master(self) -> bool:
        return self.up

    def _outcome(self, mode: str, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> Outcome:
        self.attempts += 1
        msg_id = decode_properties(request.properties)["UNIQ_KEY"]
        if self.up:
            self.taken[msg_id] += 1
            return ok(queue, request, self.attempts)
        if self.attempts % LOST_EACH:
            return ConnectionLost("down")
        self.taken[msg_id] += 1
        self.answers_lost[msg_id] += 1
        return CallTimeout("stored, and no answer came")


@pytest.mark.timeout(3000 if SCALE >= 1 else 900)
def test_long_outage_loses_no_id_and_repeats_only_lost_answers(bench: Bench, tmp_path: Path) -> None:
    broker, time = Broker(bench), bench.time
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)

    def wall_ms() -> int:
        return 1_700_000_000_000 + round(1000 * time.now)

    def monotonic_ms() -> int:
        return round(1000 * time.now)

    resender = EngineResender(broker, settings, bench.timer("outage-resend"))
    clock = SteadyClock(wall_ms, monotonic_ms, 0)
    spool = SendSpool(Store(tmp_path / "s", "never"), resender, bench.timer("outage-spool"), clock)
    producer = BaseProducer(broker, settings, None, bench.timer, spool)
    bench.producers.append(producer)
    given: list[Future[SendResult]] = []
    for number in range(COUNT):
        given.append(producer.send_async(Message("T", b"%d" % number)))
        time.advance(OUTAGE_S / COUNT)
    results = [future.result(0) for future in given]
    assert {result.status for result in results} == {SendStatus.SPOOLED}
    ids = Counter(result.msg_id for result in results)
    assert (len(ids), max(ids.values())) == (COUNT, 1)
    assert spool.metrics().depth == COUNT

    broker.up = True
    assert producer.send(Message("T", b"back")).status is SendStatus.SEND_OK  # it answers: what waits is due at once
    time.advance(1)
    metrics = spool.metrics()
    assert (metrics.depth, metrics.dead, metrics.delivered) == (0, 0, COUNT)
    arrived = {msg_id: broker.taken[msg_id] for msg_id in ids}
    assert min(arrived.values()) == 1
    more_than_once = {msg_id: times for msg_id, times in arrived.items() if times > 1}
    assert more_than_once == {msg_id: 1 + lost for msg_id, lost in broker.answers_lost.items()}  # each with its cause
    assert more_than_once
    print(f"{COUNT} ids, {broker.attempts} attempts, {len(more_than_once)} arrived more than once: answers were lost")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")

"""The delay pipeline as a user submits it, killed in the middle and started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyspark
import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.fix_spark import CONF, ROOT, environment
from tests.helpers import awaited, stored, stored_now, total
from tests.scale import scaled

EXAMPLE = ROOT / "examples" / "delay_pipeline.py"
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
KILLS = scaled(20) - 1


class Job:
    def __init__(self, log: Path, *arguments: str) -> None:
        conf = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [SUBMIT, "--master", "local[2]", *conf, EXAMPLE, *arguments],
                env=environment(), stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def check(self, log: Path) -> None:
        assert self._process.poll() is None, log.read_text()[-4000:]

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Given:
    """Messages that wait for their time, and when each is ``due``."""

    def __init__(self, name_server: str, inner: str, target: str) -> None:
        self.due: dict[str, int] = {}
        self._name_server, self._inner, self._target = name_server, inner, target
        self._chance, self._began_ms = random.Random(4), int(time.time() * 1000)

    def __call__(self, count: int, earliest_s: int, latest_s: int) -> None:
        """So many more, due so many seconds from now."""
        now_ms, first = int(time.time() * 1000), len(self.due)
        with Producer(name_server=self._name_server, group="delays") as producer:
            for name in (f"ID{i:04}" for i in range(first, first + count)):
                due = self.due[name] = now_ms + self._chance.randrange(1000 * earliest_s, 1000 * latest_s)
                properties = f"UNIQ_KEY\x01{name}\x02"
                body = Envelope(self._target, due, name, self._began_ms, 0, properties, name.encode()).pack()
                producer.send(Message(self._inner, body))


@pytest.mark.timeout(1200 + 60 * KILLS)
def test_killed_delay_pipeline_loses_nothing_and_is_never_early(
    rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    inner, target, log = make_topic(queues=4), make_topic(queues=4), tmp_path / "log"
    give, chance = Given(rocketmq.name_server, inner, target), random.Random(3)
    due = give.due
    arguments = ("--name-server", rocketmq.name_server, "--inner-topic", inner, "--checkpoint", str(tmp_path / "c"))

    def ids() -> set[str]:
        return {message.properties["SPARK_ROW_ID"] for message in stored_now(rocketmq, target)}

    give(1, 0, 1)
    job = Job(log, *arguments)
    try:
        _wait(rocketmq, target, 1, job, log)  # a job takes long to start: only now times mean what they say
        # Some fall due while there is no job, and all after it has begun to hold them.
        give(1499, 3, 12 + 10 * KILLS)
        for number in range(KILLS + 3):
            some = 1500 * (number + 1) // (KILLS + 2) if number < KILLS else len(due)
            if number >= KILLS - 1:  # so that there is something to lose; more, and later, for a machine that is slow
                give(500, *((12, 20) if number < KILLS else (60, 90)))
            _wait(rocketmq, target, some, job, log)
            time.sleep(chance.random())  # into the middle of some micro-batch
            job.check(log)
            job.kill()
            lost = ids() < due.keys()
            job = Job(log, *arguments)
            if lost and number >= KILLS - 1:
                break
        else:
            pytest.fail("there was nothing left to lose")

        def all_came() -> bool:  # what came twice is none of them
            job.check(log)
            return total(rocketmq, target) >= len(due) and ids() == due.keys()

        awaited(all_came, seconds=400)
    finally:
        job.kill()
    found = stored(rocketmq, target, len(due))
    sent = Counter(message.properties["SPARK_ROW_ID"] for message in found)
    assert sent.keys() == due.keys()
    # A micro-batch that was killed while it was written is written again, whole.
    assert max(sent.values()) <= 2 + number
    assert not [message for message in found if message.store_timestamp < due[message.properties["SPARK_ROW_ID"]]]


def _wait(mq: LocalBroker, topic: str, count: int, job: Job, log: Path) -> None:
    def enough() -> bool:
        job.check(log)
        return total(mq, topic) >= count

    awaited(enough, seconds=400)

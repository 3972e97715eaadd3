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
from rocketmq_spark.clock import Deadline, wait_until
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.fix_spark import CONF, ROOT, environment
from tests.live.writes import stored
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


@pytest.mark.timeout(200 + 60 * KILLS)
def test_3_24_killed_at_any_moment_it_loses_nothing_and_is_never_early(
    rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    inner, target, log = make_topic(queues=4), make_topic(queues=4), tmp_path / "log"
    chance = random.Random(3)
    began_ms = int(time.time() * 1000)
    # Some fall due while there is no job, and all after the first has begun to hold them.
    due = {f"ID{i:04}": began_ms + chance.randrange(10_000, 20_000 + 15_000 * KILLS) for i in range(2000)}
    with Producer(name_server=rocketmq.name_server, group="delays") as producer:
        for name, due_ms in due.items():
            body = Envelope(target, due_ms, name, began_ms, 0, f"UNIQ_KEY\x01{name}\x02", name.encode()).pack()
            producer.send(Message(inner, body))
    arguments = ("--name-server", rocketmq.name_server, "--inner-topic", inner, "--checkpoint", str(tmp_path / "c"))
    job = Job(log, *arguments)
    try:
        for number in range(KILLS):
            some = len(due) * (number + 1) // (KILLS + 2)
            _wait(rocketmq, target, some, job, log)
            time.sleep(chance.random())  # into the middle of some micro-batch
            job.kill()
            job = Job(log, *arguments)

        def all_came() -> bool:  # what came twice is none of them
            job.check(log)
            return {m.properties["SPARK_ROW_ID"] for m in stored(rocketmq, target, 0)} == due.keys()

        wait_until(all_came, Deadline.after(150), 1.0)
    finally:
        job.kill()
    found = stored(rocketmq, target, len(due))
    sent = Counter(message.properties["SPARK_ROW_ID"] for message in found)
    assert sent.keys() == due.keys()
    # A micro-batch that was killed while it was written is written again, whole.
    assert max(sent.values()) <= 1 + KILLS
    assert not [message for message in found if message.store_timestamp < due[message.properties["SPARK_ROW_ID"]]]


def _wait(mq: LocalBroker, topic: str, count: int, job: Job, log: Path) -> None:
    def enough() -> bool:
        job.check(log)
        return sum(bounds.max_offset for bounds in mq.admin.describe_topic(topic).values()) >= count

    assert wait_until(enough, Deadline.after(150), 0.2), f"fewer than {count} messages after 150 s"

"""The example as a user submits it: workers that Spark forks, one after the other, each with channels of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pyspark

from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.base.codes import Property
from tests.fix_spark import CONF, ROOT, environment
from tests.live.grpc.proxied import forgotten, new_topic, rows_now, stored_rows

__all__ = ["forgotten"]
EXAMPLE = ROOT / "examples" / "grpc_sink.py"
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
ROWS = 3000


def test_rows_of_a_stream_arrive_in_the_order_of_their_groups(proxied, tmp_path):
    topic = new_topic(proxied, "FIFO")
    conf = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    arguments = [
        "--proxy",
        proxied.proxy_grpc,
        "--topic",
        topic,
        "--checkpoint",
        str(tmp_path / "c"),
        "--rows",
        str(ROWS),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [SUBMIT, "--master", "local[2]", *conf, EXAMPLE, *arguments],
            env=environment(), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    def came() -> bool:
        assert job.poll() is None, log.read_text()[-4000:]
        return len({row["msgId"] for row in rows_now(proxied, topic)}) >= ROWS

    try:
        assert wait_until(came, Deadline.after(400), 0.5), log.read_text()[-4000:]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    found = defaultdict(list)
    for row in stored_rows(proxied, topic, ROWS):
        found[row["properties"][Property.SHARDING_KEY]].append(json.loads(row["body"])["order"])
    assert found == {f"customer-{n}": list(range(n, ROWS, 17)) for n in range(17)}

"""A program that ends without closing its producer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rocketmq_spark.localbroker import LocalBroker
from tests.helpers import stored
from tests.live.writes import bodies, numbered

PROGRAM = """
import sys
from rocketmq_spark import Message, Producer
server, topic, timeout, warm = sys.argv[1:]
producer = Producer(name_server=server, group="g_exit", auto_batch=True, batch_max_delay="30s", send_timeout=timeout)
if warm:
    producer.send(Message(topic, b"first"), timeout_s=10)
for i in range(100):
    producer.send_async(Message(topic, f"{i:06}".encode()))
print("end")
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("warm", ["", "warm"])
def test_what_waits_for_company_is_sent_at_exit(rocketmq: LocalBroker, topic: str, warm: str) -> None:
    done = run(rocketmq.name_server, topic, "20s", warm)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    wanted = [*numbered(100), *(["first"] if warm else [])]
    assert sorted(bodies(stored(rocketmq, topic, len(wanted)))) == sorted(wanted)


def test_what_cannot_be_sent_at_exit_is_named() -> None:
    done = run("127.0.0.1:1", "t", "3s", "")
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "the producer of group 'g_exit' was not closed, and 100 messages are not acknowledged: " in done.stderr
    assert "no name server answers: cannot connect" in done.stderr

"""A producer that ends by itself, with SIGKILL, between two steps of a transaction: options, topic, folder, then the step.

A step has a number, the place, and at which message. Its database is a file of the folder, a line for each order that was saved.
The place is ``half``, ``saved``, ``committed``, or ``under way``: then the commit of that message is on its way, or is not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rocketmq_spark import Message, PoppedMessage, Producer
from rocketmq_spark.model import ReceivedMessage

ROOT = Path(__file__).parents[3]
GROUP = "killed"
# What becomes of messages in turn; no one decides those that were saved or left, before a broker asks.
KINDS = ("commit", "rollback", "saved", "left")


def saved(folder: Path) -> set[str]:
    """The orders whose lines are whole."""
    texts = [path.read_text() for path in sorted(folder.glob("*.saved"))]
    return {line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()}


def was_saved(folder: Path, message: ReceivedMessage | PoppedMessage) -> str:
    return "COMMIT" if message.body.decode() in saved(folder) else "ROLLBACK"


def killed(options: dict[str, Any], topic: str, folder: Path, number: int, last: int) -> None:
    """Run this program, which dies at its message ``last``, somewhere else for each number."""
    where = ("half", "saved", "committed", "under way")[number % 4]
    command = [sys.executable, "-m", "tests.live.producer.halving", json.dumps(options), topic, str(folder)]
    done = subprocess.run([*command, str(number), where, str(last)], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, "it ended by itself"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(options: dict[str, Any], topic: str, folder: Path, step: tuple[int, str, int]) -> None:
    number, where, last = step
    with (
        (folder / f"{number}.saved").open("a") as database,
        Producer(group=GROUP, transaction_check=lambda message: was_saved(folder, message), **options) as producer,
    ):
        for i in range(last + 1):
            dies, order = where if i == last else "", f"{number}-{i}"
            kind = KINDS[0 if dies else i % len(KINDS)]
            half = producer.send_half(Message(topic, order.encode()))
            if dies == "half":
                _die()
            if kind in ("commit", "saved"):
                database.write(order + "\n")
                database.flush()
                os.fsync(database.fileno())
            if dies == "saved":
                _die()
            if dies == "under way":
                threading.Timer(number % 7 / 2000, _die).start()
            if kind == "commit":
                half.commit()
            elif kind == "rollback":
                half.rollback()
        _die()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), (int(sys.argv[4]), sys.argv[5], int(sys.argv[6])))

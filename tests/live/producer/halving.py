"""A producer that ends by itself, with SIGKILL, between two steps of a transaction: name server, folder, number, where, at which.

Its database is a file of the folder, a line for each order that was saved. ``where`` is ``half``, ``saved``, ``committed``, or
``under way``: then the commit of that message is on its way, or is not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from rocketmq_spark import Message, Producer
from rocketmq_spark.model import ReceivedMessage

TOPIC = GROUP = "killed"
# What becomes of messages in turn; no one decides those that were saved or left, before a broker asks.
KINDS = ("commit", "rollback", "saved", "left")


def saved(folder: Path) -> set[str]:
    """The orders whose lines are whole."""
    texts = [path.read_text() for path in sorted(folder.glob("*.saved"))]
    return {line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()}


def was_saved(folder: Path, message: ReceivedMessage) -> str:
    return "COMMIT" if message.body.decode() in saved(folder) else "ROLLBACK"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(name_server: str, folder: Path, number: int, where: str, last: int) -> None:
    with (
        (folder / f"{number}.saved").open("a") as database,
        Producer(name_server, GROUP, transaction_check=lambda message: was_saved(folder, message)) as producer,
    ):
        for i in range(last + 1):
            dies, order = where if i == last else "", f"{number}-{i}"
            kind = KINDS[0 if dies else i % len(KINDS)]
            half = producer.send_half(Message(TOPIC, order.encode()))
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
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))

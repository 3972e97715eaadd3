"""Offsets of a broadcasting member, which nobody else has: a file, as Java's ``LocalFileOffsetStore`` has one.

A write replaces the file at once, and the file before it stays beside it as ``.bak``. So one of the two is whole whatever
happens to the process; when neither can be read, it is said, for starting from nothing would repeat or lose messages.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue


def file_of(folder: Path, client: str, group: str) -> Path:
    """Where the offsets of a group lie, which is named as on the wire, under a ``client`` that is the same after a restart."""
    return folder / client / group / "offsets.json"


class LocalOffsets:
    """Offsets in ``path``. One process writes there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._backup = path.with_name(f"{path.name}.bak")

    def load(self) -> dict[MessageQueue, int]:
        """What was stored; nothing if never anything was. Raises ``OffsetError`` when file and backup are both damaged."""
        problems = []
        for path in (self._path, self._backup):
            try:
                return _parsed(path.read_text("utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as e:
                problems.append(f"{path}: {e}")
        if problems:
            raise OffsetError(
                f"stored offsets cannot be read: {'; '.join(problems)}",
                remedy=f"Put the file right, or remove {self._path.parent} to begin anew",
            )
        return {}

    def store(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Replace what is stored. Raises ``OffsetError`` when the file cannot be written."""
        text = _text(offsets)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if _is_whole(self._path):
                _replace(self._backup, self._path.read_text("utf-8"))
            _replace(self._path, text)
        except OSError as e:
            raise OffsetError(
                f"offsets cannot be stored in {self._path}: {e}",
                remedy="Make the folder writable, or choose another one",
            ) from e


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # two processes that store at once mix nothing
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether it may become the backup: a damaged file must not replace a good one."""
    try:
        _parsed(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _text(offsets: Mapping[MessageQueue, int]) -> str:
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, offset in sorted(offsets.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return json.dumps({"topics": topics, "v": 1}, separators=(",", ":"))


def _parsed(text: str) -> dict[MessageQueue, int]:
    found: Any = json.loads(text)
    try:
        return {
            MessageQueue(topic, broker, int(number)): _offset(offset)
            for topic, brokers in found["topics"].items()
            for broker, queues in brokers.items()
            for number, offset in queues.items()
        }
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f'expected {{"topics":{{"orders":{{"broker-a":{{"0":12}}}}}},"v":1}} ({e!r})') from e


def _offset(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no offset; expected a whole number of at least 0")
    return value

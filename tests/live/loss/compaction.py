"""A broker that compacts its topics every second, and messages for such a topic."""

from __future__ import annotations

from collections.abc import Sequence

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from tests.mockbroker import eventually
from tests.reading import post, read

# An index file of 2,000 bytes has 43 entries of 46 bytes, so the broker begins a new log file at the latest after 43 messages.
COMPACTION = {
    "enableCompaction": True,
    "compactionScheduleInternal": 1000,
    "compactionMappedFileSize": 20_000,
    "compactionCqMappedFileSize": 2000,
}
_MESSAGES_PER_FILE = 43


def post_to_compacted_topic(mq: LocalBroker, messages: Sequence[Message], key_count: int) -> None:
    """Send messages, of which the last ``key_count`` have all the keys, to a topic with one queue.

    The last messages are sent when the broker has nothing to compact. While a broker replaces its compacted files
    (``CompactionLog.replaceFiles`` in 5.5.0), it forgets a file that it begins at that moment, and the messages in it.
    """
    topic = messages[0].topic
    post(mq, messages[:-key_count])
    # A broker compacts all files but the last one.
    eventually(lambda: len(read(mq, subscribe=topic)) <= key_count + _MESSAGES_PER_FILE)
    post(mq, messages[-key_count:])

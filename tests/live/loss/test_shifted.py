"""A queue whose index was shifted by a damaged message: positions and the offsets inside of messages differ for ever.

On a broker that no other test has: what it skips with such a message is whatever others sent at that moment, and when it is
killed later it takes the message for the end of its log.
"""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import ports, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.client import sender as sender_module
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest
from tests.mockbroker import eventually
from tests.reading import Run, names, read
from tests.reading import bodies as bodies_of


def passed(mq: LocalBroker, sender: ports.Sender, queue: MessageQueue) -> bool:
    """Whether the index has come behind all that was stored. What stands behind a damaged message in the same read of it is
    skipped, a probe too, which is sent again then.
    """

    def end() -> int:
        return mq.admin.describe_topic(queue.topic)[queue].max_offset

    before, soon = end(), Deadline.after(1.0)
    sender.send(queue, SendRequest("g", b"probe"), Deadline.after(30.0))
    while not (there := end() > before) and not soon.expired:
        soon.pause(0.005)
    return there


@pytest.mark.parametrize("filtered", [{}, {"tags": "a"}])
def test_no_message_at_end_of_part_is_skipped_or_read_twice(make_cluster, lost_lines, filtered, monkeypatch):
    """The broker looks through more than the part for a filter, and sends what it finds there."""
    mq, (topic, probes) = make_cluster(), names(2, "shifted")
    for one in (topic, probes):
        mq.create_topic(one, queues=1)
    options = options_table.parse({"nameServer": mq.name_server, "subscribe": topic}).for_role("batch source")
    sender, queue = session.client(options).sender, MessageQueue(topic, "broker-a", 0)
    monkeypatch.setattr(sender_module, "SENDABLE_SYS_FLAGS", -1)  # ours refuses what others send
    sent = names(11)
    for i, body in enumerate(sent):
        if i in (3, 7):  # acknowledged, stored with a wrong length, and never seen again
            damaged = SendRequest("g", b"lost", "TAGS\x01a\x02", sys_flag=int(SysFlag.BORNHOST_V6))
            sender.send(queue, damaged, Deadline.after(30.0))
            eventually(lambda: passed(mq, sender, queue._replace(topic=probes)))
        sender.send(queue, SendRequest("g", body.encode(), f"TAGS\x01{'ba'[i % 2]}\x02"), Deadline.after(30.0))
    eventually(lambda: mq.admin.describe_topic(topic)[queue].max_offset == len(sent), 60)
    found = read(mq, subscribe=topic, maxRecordsPerPartition=2, **filtered)
    wanted = slice(1, None, 2) if filtered else slice(None)
    sent, offsets = sent[wanted], [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12][wanted]
    assert [row["queueOffset"] for row in found] == offsets
    assert Counter(bodies_of(found)) == Counter(sent)
    run = Run(mq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3, **filtered)
    run.drain(sent)
    assert Counter(run.read) == Counter(sent)
    assert lost_lines() == []

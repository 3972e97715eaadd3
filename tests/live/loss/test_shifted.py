"""A queue whose index was shifted by a damaged message: positions and the offsets inside of messages differ for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.client import sender as sender_module
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.wire import bodies, rpc
from tests.mockbroker import eventually
from tests.reading import Run, names, read
from tests.reading import bodies as bodies_of


def indexed(mq: LocalBroker) -> bool:
    """Whether the index has all that is stored. What stands behind a damaged message in the same read of it is skipped."""
    calls, address = mq.admin.brokers.calls, mq.address("broker-a")
    answer = calls.ask(address, rpc.GET_BROKER_RUNTIME_INFO.request(), Deadline.after(30))
    return bodies.table(answer.body)["dispatchBehindBytes"] == "0"


@pytest.mark.parametrize("filtered", [{}, {"tags": "a"}])
def test_no_message_at_the_end_of_a_part_is_left_out_or_read_twice(
    rocketmq, make_topic, lost_lines, filtered, monkeypatch
):
    """The broker looks through more than the part for a filter, and sends what it finds there."""
    topic = make_topic(queues=1)
    options = options_table.parse({"nameServer": rocketmq.name_server, "subscribe": topic}).for_role("batch source")
    sender, queue = session.client(options).sender, MessageQueue(topic, "broker-a", 0)
    monkeypatch.setattr(sender_module, "SENDABLE_SYS_FLAGS", -1)  # ours refuses what others send
    sent = names(11)
    for i, body in enumerate(sent):
        if i in (3, 7):  # acknowledged, stored with a wrong length, and never seen again
            damaged = SendRequest("g", b"lost", "TAGS\x01a\x02", sys_flag=int(SysFlag.BORNHOST_V6))
            sender.send(queue, damaged, Deadline.after(30.0))
            eventually(lambda: indexed(rocketmq))
        sender.send(queue, SendRequest("g", body.encode(), f"TAGS\x01{'ba'[i % 2]}\x02"), Deadline.after(30.0))
    eventually(lambda: rocketmq.admin.describe_topic(topic)[queue].max_offset == len(sent), 60)
    found = read(rocketmq, subscribe=topic, maxRecordsPerPartition=2, **filtered)
    wanted = slice(1, None, 2) if filtered else slice(None)
    sent, offsets = sent[wanted], [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12][wanted]
    assert [row["queueOffset"] for row in found] == offsets
    assert Counter(bodies_of(found)) == Counter(sent)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3, **filtered)
    run.drain(sent)
    assert Counter(run.read) == Counter(sent)
    assert lost_lines() == []

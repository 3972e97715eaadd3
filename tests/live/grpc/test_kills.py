"""A Proxy that is killed while rows are sent through it and messages received, and comes back: nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import Message, session
from rocketmq_spark.clock import Deadline, wait_until
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.localbroker.servers import PROXY
from rocketmq_spark.popped import PoppedMessage
from rocketmq_spark.session import SimpleConsumer
from rocketmq_spark.sink import checks
from rocketmq_spark.sink.task import TaskWriter
from tests.live.grpc.proxied import forgotten, new_topic, parsed, producer, stored
from tests.live.writes import frame, numbered
from tests.scale import scaled

__all__ = ["forgotten"]
KILLS, FRAMES, ROWS = scaled(1), 8, 500


def killed(mq: LocalBroker) -> threading.Thread:
    """The Proxy is dead, and comes back while the caller goes on."""
    mq.kill(PROXY)
    back = threading.Thread(target=mq.restart, args=(PROXY,))
    back.start()
    return back


def sent_through(mq: LocalBroker, topic: str) -> set[str]:
    """The bodies of rows that a task wrote while the Proxy died."""
    back: list[threading.Thread] = []

    def frames() -> Iterator[pa.RecordBatch]:
        for number in range(FRAMES):
            yield frame(body=numbered(ROWS, number * ROWS))
            if number == FRAMES // 2:
                back.append(killed(mq))

    options = parsed(mq, topic=topic, batchMaxBytes="4k", sendTimeout="90s")
    columns = checks.check(options, from_arrow_schema(frame(body=["x"]).schema))
    written = TaskWriter(options, columns).write(frames())
    back[0].join()
    assert written.rows == FRAMES * ROWS
    return set(numbered(FRAMES * ROWS))


def received_through(mq: LocalBroker, topic: str) -> tuple[set[str], list[PoppedMessage]]:
    """Ids that were sent, and what a consumer was handed while the Proxy died, each acknowledged."""
    found: list[PoppedMessage] = []
    with SimpleConsumer(proxy_endpoint=mq.proxy_grpc, group=f"pop-{topic}") as consumer:
        consumer.subscribe(topic)
        with producer(mq) as sends:
            ids = {sends.send(Message(topic, f"{n}".encode())).msg_id for n in range(100)}
        found += consumer.receive(invisible="10s")
        back = killed(mq)

        def all_came() -> bool:
            try:
                got = consumer.receive(invisible="10s")
                for message in got:
                    consumer.ack(message)
                    found.append(message)
            except RocketMQError:
                return False
            return {message.msg_id for message in found if message not in first} >= ids

        first = list(found)  # never acknowledged, so that they come again
        wait_until(all_came, Deadline.after(150), 0.1)
        back.join()
    return ids, found


def test_nothing_is_lost(make_cluster):
    mq = make_cluster(proxy=True)
    for _ in range(KILLS):
        topic, taken = new_topic(mq), new_topic(mq)
        sent = sent_through(mq, topic)
        assert {row["body"].decode() for row in stored(mq, topic, len(sent))} == sent
        ids, found = received_through(mq, taken)
        assert {message.msg_id for message in found} == ids
        assert any(message.reconsume_times for message in found)
        session.close_all()

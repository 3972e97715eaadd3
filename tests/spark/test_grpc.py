"""Jobs that write through a Proxy, which is killed meanwhile and comes back; RocketMQ's Java client reads from brokers.

200,000 rows with ``make soak``, a few thousand otherwise.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark import TaskContext

from rocketmq_spark.base.codes import RESERVED_PROPERTIES, Property
from rocketmq_spark.localbroker.servers import PROXY
from tests.helpers import killed
from tests.live.grpc.proxied import forgotten, new_topic
from tests.mockbroker import eventually
from tests.scale import SCALE
from tests.witness import content, java_read, md5

__all__ = ["forgotten"]
ROWS = 200_000 if SCALE >= 1 else 3_000
GROUPS = 97
# Rows of a group are in one partition, in their order: else they have none.
COLUMNS = (
    "rpad(concat('body:', id, ':'), 100, 'x') body",
    "concat('tag', id % 7) tags",
    "array(concat('key', id), 'all') keys",
    "map('number', cast(id as string), 'ü', 'ö') properties",
)
GROUP = f"concat('group-', id % {GROUPS})"


def expected(n):
    return content(
        md5(f"body:{n}:".ljust(100, "x").encode()), f"tag{n % 7}", [f"key{n}", "all"], {"number": str(n), "ü": "ö"}
    )


def of(record):
    own = {name: value for name, value in record.properties.items() if name not in RESERVED_PROPERTIES}
    return content(record.md5, record.tags, record.keys, own)


def held(until):
    """Of four partitions the last two begin when the file ``until`` is there."""

    def wait(batches):
        while TaskContext.get().partitionId() >= 2 and not until.exists():
            time.sleep(0.01)
        yield from batches

    return wait


def killed_when(mq, topic, count, dead):
    """The Proxy dies once so many messages are there, which makes the file ``dead``, and comes back; when that was, in ms."""

    def there():
        return sum(bounds.max_offset for bounds in mq.admin.describe_topic(topic).values())

    eventually(lambda: there() >= count, 300)
    died = time.time_ns() // 1_000_000
    killed(mq, PROXY)
    assert there() < ROWS, "it was killed too late"
    dead.touch()
    mq.restart(PROXY)
    return died


def written(mq, frame, topic, dead):
    """What the brokers have of a frame that was written while the Proxy died, and when that was."""
    writer = (
        frame.mapInArrow(held(dead), frame.schema).write.format("rocketmq").mode("append").option("transport", "grpc")
    )
    writer = writer.option("proxyEndpoint", mq.proxy_grpc).option("topic", topic).option("batchMaxBytes", "4k")
    with ThreadPoolExecutor(1) as beside:
        died = beside.submit(killed_when, mq, topic, ROWS // 3, dead)
        begun = time.monotonic()
        writer.save()
        seconds = time.monotonic() - begun
    seen = java_read(mq.name_server, topic, ROWS)
    repeats = len(seen) - ROWS
    print(f"{topic}: {ROWS} rows in {seconds:.1f} s, {repeats} repeats, killed after {ROWS // 3}")
    return seen, died.result()


def account(seen, died):
    """Every row once, but for requests that were sent again because of the kill; the messages without these."""
    first, again = {}, []
    for record in sorted(seen, key=lambda record: (record.broker, record.queue, record.offset)):
        again.append(record) if record.id in first else first.setdefault(record.id, record)
    assert Counter(map(of, first.values())) == Counter(map(expected, range(ROWS)))
    by_id = Counter(record.id for record in seen)
    late = Counter(record.id for record in seen if record.stored >= died)
    assert all(late[record.id] >= by_id[record.id] - 1 for record in again), "a repeat from before the kill"
    return list(first.values())


@pytest.fixture(scope="module")
def killable():
    from rocketmq_spark.localbroker import LocalBroker

    with LocalBroker(proxy=True, quiet=True) as mq:
        yield mq


def test_rows_survive_the_proxys_death(spark, killable, tmp_path):
    frame = spark.range(0, ROWS, 1, 4).selectExpr(*COLUMNS)
    seen, died = written(killable, frame, new_topic(killable), tmp_path / "dead")
    assert {record.queue for record in account(seen, died)} == set(range(4))


def test_groups_keep_their_order_over_the_proxys_death(spark, killable, tmp_path):
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id", *COLUMNS, f"{GROUP} shardingKey")
    frame = rows.repartition(4, "shardingKey").sortWithinPartitions("id").drop("id")
    seen, died = written(killable, frame, new_topic(killable, "FIFO"), tmp_path / "dead")
    groups = defaultdict(list)
    for record in account(seen, died):
        groups[record.properties[Property.SHARDING_KEY]].append((record.queue, int(record.properties["number"])))
    assert len(groups) == GROUPS
    for group, placed in groups.items():
        assert len({queue for queue, _ in placed}) == 1
        assert [n for _, n in placed] == list(range(int(group.partition("-")[2]), ROWS, GROUPS))

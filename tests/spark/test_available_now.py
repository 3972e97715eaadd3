"""``availableNow`` and ``once``: Spark before 4.2 runs one batch, newer ones as many as the limits say."""

from __future__ import annotations

import pytest

from rocketmq_spark import Admin
from tests.fix_spark import ONE_BATCH
from tests.reading import feed

SCRIPT = """
import pathlib
from rocketmq_spark import explain

server, topic, group, folder = sys.argv[1:5]
conf = dict(pair.split("=") for pair in sys.argv[5:])
spark = new_session()
for name, value in conf.items():
    spark.conf.set(name, value)

def run(limit, wrapper=False, **trigger):
    spark.conf.set("spark.sql.streaming.triggerAvailableNowWrapper.enabled", str(wrapper).lower())
    frame = spark.readStream.format("rocketmq").option("nameServer", server).option("subscribe", topic)
    frame = frame.option("startingOffsets", "earliest").option("group", group)
    if limit:
        frame = frame.option("maxOffsetsPerTrigger", limit)
    sizes = []
    query = (
        frame.load().writeStream.foreachBatch(lambda rows, number: sizes.append([number, rows.count()]))
        .option("checkpointLocation", folder).trigger(**(trigger or {"availableNow": True})).start()
    )
    try:
        finish(query)
        return sizes
    except Exception as e:
        return explain(e)

def logged():
    return sorted(path.name for path in pathlib.Path(folder).glob("*/[0-9]*"))

"""


@pytest.fixture
def run(run_script, rocketmq, topic, tmp_path):
    def ran(steps: str):
        return run_script(SCRIPT + steps, rocketmq.name_server, topic, f"{topic}-group", tmp_path / "checkpoint")

    return ran


def test_limits_hold_and_what_they_leave_is_named(run, rocketmq, topic):
    feed(rocketmq, topic, 100, queues=[0])
    done = run("report([run(40), run(40), run(40), run(None), run(40, once=True)])")
    if ONE_BATCH:
        assert done.report == [[[0, 40]], [[1, 40]], [[2, 20]], [], []]
        assert done.err.count("leaves 60 messages unread after the first batch of this run") == 1
        assert done.err.count("leaves 20 messages unread after the first batch of this run") == 1
        assert done.err.count("messages unread after the first batch") == 2
    else:
        assert done.report == [[[0, 40], [1, 40], [2, 20]], [], [], [], []]
        assert "messages unread" not in done.err


def test_after_a_crash_the_logged_batch_comes_first(run, rocketmq, topic):
    feed(rocketmq, topic, 100, queues=[0])
    done = run(
        "first = run(40)\n"
        "newest = max(int(path.name) for path in pathlib.Path(folder, 'commits').glob('[0-9]*'))\n"
        "for path in pathlib.Path(folder, 'commits').glob(f'*{newest}*'):\n"
        "    path.unlink()\n"
        "report([first, run(None), run(None)])"
    )
    if ONE_BATCH:
        assert done.report == [[[0, 40]], [[0, 40]], [[1, 60]]]
    else:
        assert done.report == [[[0, 40], [1, 40], [2, 20]], [[2, 20]], []]


def test_spark_s_wrapper_reads_nothing_twice(run, rocketmq, topic):
    """It asks for an end before it says what the checkpoint has. Newer versions do not wrap this source."""
    feed(rocketmq, topic, 100, queues=[0])
    done = run(
        "new, before = run(40, wrapper=True), logged()\n"
        "again, after = run(40, wrapper=True), logged()\n"
        "report([new, again, before == after])"
    )
    new, again, untouched = done.report
    assert untouched
    assert committed(rocketmq, topic) == (0 if ONE_BATCH else 100), "the next run commits"
    if ONE_BATCH:
        assert new == [[0, 40]]
        assert "triggerAvailableNowWrapper.enabled" in again
        assert run("report([run(None), run(None)])").report == [[[1, 60]], []]
    else:
        assert (new, again) == ([[0, 40], [1, 40], [2, 20]], [])
    assert committed(rocketmq, topic) == 100


def committed(rocketmq, topic):
    with Admin(rocketmq.name_server) as admin:
        queues = admin.describe_group(f"{topic}-group").queues
    return sum(queue.position or 0 for queue in queues)

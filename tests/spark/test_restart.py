"""Queries that stop, die and come back: the checkpoint decides, and every message is read exactly once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark import Message, Producer
from rocketmq_spark.cli.command import app
from tests.fix_spark import drain, wait_until
from tests.helpers import awaited
from tests.reading import feed
from tests.scale import scaled
from tests.source.stored import VERSIONS, adopted
from tests.spark.pipelines import once, read_stream, records, rows_of, same
from tests.witness import java_send

COUNT = scaled(20_000)


class Batches(dict):
    """What ``foreachBatch`` saw, by batch number: a batch that comes again must hold the same."""

    def __call__(self, frame, number):
        rows = rows_of(frame)
        if number in self:
            assert sorted(self[number]) == sorted(rows)
        self[number] = rows

    def rows(self):
        return once(row for rows in self.values() for row in rows)


@pytest.fixture
def start(spark, broker_cluster, tmp_path):
    """Starts a query over a topic that fills ``Batches``."""

    def started(topic, batches, available_now=True, **options):
        frame = read_stream(spark, broker_cluster.name_server, topic, **{"startingOffsets": "earliest", **options})
        writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", str(tmp_path / "checkpoint"))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    return started


def test_stopped_after_some_batches_and_started_again(broker_cluster, topic, start):
    """The stop comes wherever it comes; more messages arrive while nothing runs."""
    sent = java_send(broker_cluster.name_server, topic, COUNT, batch=50)
    batches = Batches()
    small = COUNT // 100  # so that it is not at the end when a slow machine stops it
    query = start(topic, batches, available_now=False, maxOffsetsPerTrigger=small)
    wait_until(query, lambda: len(batches) >= 3)
    query.stop()
    seen = len(batches.rows())
    assert seen < COUNT
    sent += java_send(broker_cluster.name_server, topic, 100, first=COUNT)
    drain(lambda: start(topic, batches, maxOffsetsPerTrigger=COUNT // 10))
    same(batches.rows(), records(sent))
    drain(lambda: start(topic, batches))
    same(batches.rows(), records(sent))


def forget_commit(checkpoint: Path, number: int) -> None:
    """As if the driver had died after the tasks of a batch and before its commit."""
    (checkpoint / "commits" / str(number)).unlink()
    (checkpoint / "commits" / f".{number}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize(("per_trigger", "last"), [(1000, 0), (80, 4)])
def test_without_its_commit_a_batch_is_read_again_as_it_was(broker_cluster, topic, start, tmp_path, per_trigger, last):
    sent = java_send(broker_cluster.name_server, topic, 400, batch=10)
    batches = Batches()
    drain(lambda: start(topic, batches, maxOffsetsPerTrigger=per_trigger))
    assert max(batches) == last
    forget_commit(tmp_path / "checkpoint", last)
    sent += java_send(broker_cluster.name_server, topic, 50, first=400)
    first_run = Batches(batches)
    again = Batches()
    drain(lambda: start(topic, again, maxOffsetsPerTrigger=100))
    assert sorted(again.pop(last)) == sorted(first_run[last])
    assert again, "then come the new messages"
    assert min(again) == last + 1
    same(Batches({**first_run, **again}).rows(), records(sent))


def test_offsets_in_the_log_are_sorted_and_readable(broker_cluster, topic, start, tmp_path):
    java_send(broker_cluster.name_server, topic, 80)
    drain(lambda: start(topic, Batches(), maxOffsetsPerTrigger=40))
    for number in (0, 1):
        text = (tmp_path / "checkpoint" / "offsets" / str(number)).read_text().splitlines()[-1]
        found = json.loads(text)
        assert text == json.dumps(found, sort_keys=True)  # Spark's runner puts the blanks in
        assert found["topics"] == {topic: {"broker-a": {str(i): 5 * (number + 1) for i in range(8)}}}
        assert ("start" in found) == (number == 0)


def test_a_person_may_edit_the_log(broker_cluster, topic, start, tmp_path):
    """The documented form without the optional keys is enough to go back."""
    sent = java_send(broker_cluster.name_server, topic, 80)
    drain(lambda: start(topic, Batches()))
    log = tmp_path / "checkpoint" / "offsets" / "0"
    lines = log.read_text().splitlines()
    lines[-1] = json.dumps({"topics": {topic: {"broker-a": {str(i): 6 for i in range(8)}}}, "v": 1})
    log.write_text("\n".join(lines))
    (log.parent / ".0.crc").unlink(missing_ok=True)
    again = Batches()
    drain(lambda: start(topic, again))
    same(again.rows(), {n: row for n, row in records(sent).items() if row[0][2] >= 6})


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_a_released_version_is_gone_on_from(spark, broker_cluster, make_topic, tmp_path, version):
    orders, prices = make_topic(queues=2), make_topic(queues=1)
    sent = [feed(broker_cluster, orders, 5, queues=[queue], tags="a") for queue in (0, 1)]
    feed(broker_cluster, prices, 2, tags="a")
    folder = adopted(version, "filtered", tmp_path, orders=orders, prices=prices)
    found: dict[int, list[str]] = {}

    def keep(frame, number):
        found[number] = sorted(row.body.decode() for row in frame.select("body").collect())

    def run():
        frame = read_stream(spark, broker_cluster.name_server, f"{orders},{prices}", tags="a")
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder))
        drain(writer.trigger(availableNow=True).start)

    run()
    assert found == {2: sorted(sent[1][3:])}, "as it was begun"
    more = feed(broker_cluster, orders, 6, tags="a")
    run()
    assert found.pop(3) == sorted(more)
    logged = json.loads((folder / "offsets" / "3").read_text().splitlines()[-1])
    assert logged["reads"] == {
        "clusters": ["DefaultCluster"],
        "namespace": "",
        "subscribe": sorted([orders, prices]),
        "tags": "a",
    }


def test_commands_report_and_rewind_a_query_with_state(spark, broker_cluster, topic, tmp_path):
    """Lag, what each batch read, differences, and a rewind, of a folder that Spark itself wrote: counts stay exact."""
    folder = str(tmp_path / "checkpoint")
    counts: dict[int, dict[int, int]] = {}

    def keep(frame, number):
        counts[number] = {row["queueId"]: row["count"] for row in frame.collect()}

    def count():
        counts.clear()
        options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 40}
        frame = read_stream(spark, broker_cluster.name_server, topic, **options).groupBy("queueId").count()
        writer = frame.writeStream.outputMode("complete").foreachBatch(keep).option("checkpointLocation", folder)
        drain(writer.trigger(availableNow=True).start)

    def run(*arguments):
        done = CliRunner(env={"ROCKETMQ_NAMESRV": broker_cluster.name_server}).invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    java_send(broker_cluster.name_server, topic, 80)
    count()
    assert counts == {0: dict.fromkeys(range(8), 5), 1: dict.fromkeys(range(8), 10)}
    java_send(broker_cluster.name_server, topic, 8, first=80)
    (lag,) = awaited(lambda: run("lag", "--checkpoint", folder), lambda found: found[0]["lag"] == 8)
    assert (lag["batchId"], lag["lag"], lag["lost"], lag["unknownQueues"]) == (1, 8, 0, 0)
    shown = run("checkpoint", "show", folder)
    assert [(b["batchId"], b["offsets"], len(b["ranges"])) for b in shown] == [(0, 40, 8), (1, 40, 8)]
    assert all(b["begun"] <= b["done"] for b in shown)
    assert {row["state"] for row in run("checkpoint", "diff", folder)} == {"behind"}
    (rewound,) = run("checkpoint", "rewind", folder, "--to-batch", "0", "--yes", "--force")
    assert (rewound["again"], sum(part["offsets"] for part in rewound["ranges"])) == ([1], 40)
    assert not list(Path(folder, "state").rglob("2.*")), "of batch 1, which is to be another one"
    count()
    assert min(counts) == 1
    assert counts[max(counts)] == dict.fromkeys(range(8), 11)


READ_TO_FILES = """
    name_server, topic, folder, mode = sys.argv[1:]
    import threading
    from pathlib import Path
    spark = new_session()
    report(spark.sparkContext._gateway.proc.pid)

    def keep(frame, number):
        if mode == "forever":
            threading.Event().wait()  # so that the first batch is never finished
        rows = [(r.brokerName, r.queueId, r.queueOffset) for r in frame.select("brokerName", "queueId", "queueOffset").collect()]
        scratch = Path(folder, f"batch-{number}.new")
        scratch.write_text(json.dumps(rows))
        scratch.rename(Path(folder, f"batch-{number}.json"))

    query = (
        spark.readStream.format("rocketmq").option("nameServer", name_server).option("subscribe", topic).load()
        .writeStream.foreachBatch(keep).option("checkpointLocation", folder + "/checkpoint")
    )
    if mode == "once":
        drain(query.trigger(availableNow=True).start)
    else:
        query.start().awaitTermination()
"""


def test_latest_start_killed_after_first_log_entry_loses_nothing(
    broker_cluster, topic, start_script, run_script, tmp_path
):
    """What was sent after the query had started is read after the crash, though Spark never logs where it started."""
    java_send(broker_cluster.name_server, topic, 50)
    checkpoint = tmp_path / "checkpoint"
    stop = threading.Event()
    sent: list[tuple[str, int, int]] = []
    with Producer(name_server=broker_cluster.name_server, group="restart") as producer:

        def send() -> None:
            while not stop.wait(0.003):
                result = producer.send(Message(topic, b"later"))
                sent.append((result.queue.broker_name, result.queue.queue_id, result.queue_offset))

        sender = threading.Thread(target=send)
        sender.start()
        try:
            script = start_script(READ_TO_FILES, broker_cluster.name_server, topic, tmp_path, "forever")
            deadline = time.monotonic() + 120
            while not (checkpoint / "offsets" / "0").exists():
                assert script.process.poll() is None, script.so_far().err
                assert time.monotonic() < deadline, script.so_far().err
                time.sleep(0.001)
            count = len(sent)
            awaited(lambda: len(sent) > count + 1)  # the second was sent since; the first batch may be empty
            os.kill(script.so_far().reports[0], signal.SIGKILL)
        finally:
            stop.set()
            sender.join()
    script.kill()
    assert not (checkpoint / "commits" / "0").exists(), "it had its first commit"
    logged = json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[-1])
    begin = logged.get("start", logged["topics"])[topic]
    after_start = {(broker, queue, offset) for broker, queue, offset in sent if offset >= begin[broker][str(queue)]}
    assert after_start
    assert run_script(READ_TO_FILES, broker_cluster.name_server, topic, tmp_path, "once").code == 0
    batches = [json.loads(path.read_text()) for path in tmp_path.glob("batch-*.json")]
    found = [tuple(row) for rows in batches for row in rows]
    assert len(found) == len(set(found))
    assert set(found) >= after_start
    assert not {row for row in found if row[2] < begin[row[0]][str(row[1])]}, "nothing from before the start"

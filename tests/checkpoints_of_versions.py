"""Each version of PySpark continues checkpoints of each other version: every message is read once.

``python -m tests.checkpoints_of_versions VENV...`` takes one virtual environment for each version, the oldest version first.
``make soak ONLY=pyspark`` runs it. A query without state runs on a sequence of versions in which each ordered pair of two
versions stands once; every second run leaves its last batch uncommitted for the next one. A query with state runs from the oldest
to the newest version only, because Spark does not promise the other direction.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rocketmq_spark import LocalBroker
from tests.reading import feed

MESSAGES = 500
LIMIT = 180


def run(name_server: str, topic: str, folder: str, kind: str) -> None:
    """Read all messages in batches of at most ``LIMIT``; runs in the environment of one version."""
    from rocketmq_spark import low_latency_conf
    from tests.fix_spark import drain, new_session

    spark = new_session(**{name.replace(".", "_"): value for name, value in low_latency_conf().items()})
    frame = spark.readStream.format("rocketmq").option("nameServer", name_server).option("subscribe", topic)
    rows = frame.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", LIMIT).load()
    if kind == "state":
        counts = Path(folder, "counts.json")

        def keep(batch: object, number: int) -> None:
            counts.write_text(json.dumps({row["queueId"]: row["count"] for row in batch.collect()}))  # type: ignore[attr-defined]

        writer = rows.groupBy("queueId").count().writeStream.outputMode("complete").foreachBatch(keep)
    else:
        writer = rows.selectExpr("cast(body as string)").writeStream.format("text").option("path", f"{folder}/out")
    drain(writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start)
    if kind == "last":
        found = [row[0] for row in spark.read.text(f"{folder}/out").collect()]
        Path(folder, "found.json").write_text(json.dumps(found))
    spark.stop()


def over_each_pair(count: int) -> list[int]:
    """A sequence of the numbers below ``count`` in which each ordered pair of two numbers stands once (Hierholzer)."""
    left = {one: [other for other in range(count) if other != one] for one in range(count)}
    walk, path = [], [0]
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]


def forget_last_commit(folder: Path) -> None:
    """Leave the checkpoint as a driver does that is killed between the last batch's files and its commit."""
    commits = folder / "checkpoint" / "commits"
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for name in (f"{newest}", f".{newest}.crc"):
        (commits / name).unlink(missing_ok=True)


def main(venvs: list[str]) -> None:
    pythons = [str(Path(venv).absolute() / "bin" / "python") for venv in venvs]

    def read(number: int, topic: str, folder: Path, kind: str) -> None:
        python = pythons[number]
        command = [python, "-m", "tests.checkpoints_of_versions", "--run", broker.name_server, topic, str(folder), kind]
        env = {**os.environ, "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}
        env.pop("SPARK_SUBMIT_OPTS", None)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{venvs[number]}: {done.stderr[-6000:]}"

    with LocalBroker() as broker, tempfile.TemporaryDirectory() as scratch:
        for topic in ("plain", "state"):
            broker.create_topic(topic, queues=4)
        folder, sent = Path(scratch, "plain"), []
        folder.mkdir()
        walk = over_each_pair(len(venvs))
        for step, number in enumerate(walk):
            sent += feed(broker, "plain", MESSAGES)
            read(number, "plain", folder, "last" if step == len(walk) - 1 else "rows")
            if step % 2 and step < len(walk) - 1:
                forget_last_commit(folder)
        found = json.loads((folder / "found.json").read_text())
        assert Counter(found) == Counter(sent), f"{len(found)} of {len(sent)}"
        state, total = Path(scratch, "state"), 0
        state.mkdir()
        for number in range(len(venvs)):
            total += len(feed(broker, "state", MESSAGES))
            read(number, "state", state, "state")
            counts = json.loads((state / "counts.json").read_text())
            assert counts == {str(queue): total // 4 for queue in range(4)}, (venvs[number], counts)
    print(
        f"{len(sent)} messages once each, over {len(walk)} runs of {len(venvs)} versions; counts right in {len(venvs)}"
    )


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1] == "--run" else main(sys.argv[1:])

"""What a task and a stream's driver load: pandas costs every new worker more than a tenth of a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
import sys
from rocketmq_spark.options import parse
from rocketmq_spark.spark.source.batch_reader import RocketMQReader
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
options = parse({"nameServer": sys.argv[1], "subscribe": sys.argv[2], "startingOffsets": "earliest"})
"""
BATCH = """
reader = RocketMQReader(options.for_role("batch source"), BASIC_COLUMNS)
print(sum(len(batch) for partition in reader.partitions() for batch in reader.read(partition)))
"""
STREAM = """
reader = RocketMQStreamReader(options.for_role("stream source"), BASIC_COLUMNS)
start = reader.initialOffset()
end = reader.latestOffset(start, reader.getDefaultReadLimit())
assert "rocketmq_spark.columnar.decode.decoder" not in sys.modules  # before the first batch that it reads itself
print(sum(r.size for partition in reader.partitions(start, end) for r in partition.ranges))
"""


@pytest.mark.parametrize("steps", [BATCH, STREAM])
def test_no_more_is_imported_than_needed(rocketmq, topic, steps):
    from tests.reading import feed

    feed(rocketmq, topic, 8, tags="t", keys=["a", "b"], properties={"n": "1"})
    script = READ + steps + "print('pandas' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, rocketmq.name_server, topic], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["8", "False"], done.stderr

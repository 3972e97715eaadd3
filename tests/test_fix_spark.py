"""What tests show of a driver that failed."""

from __future__ import annotations

from tests.fix_spark import without_frames

OUTPUT = """\
WARN TaskSetManager: Lost task 0.0
\tat org.apache.spark.Some.frame(Some.scala:1)
Traceback (most recent call last):
  File "pyspark.zip/pyspark/daemon.py", line 264, in manager
  File "pyspark.zip/pyspark/daemon.py", line 95, in worker
BrokenPipeError: [Errno 32] Broken pipe
Traceback (most recent call last):
  File "job.py", line 3, in <module>
    query.awaitTermination()
ValueError: the cause
Traceback (most recent call last):
  File "pyspark/daemon.py", line 264, in manager
    code = worker(sock)
  File "pyspark/daemon.py", line 95, in worker
    outfile.flush()
BrokenPipeError: [Errno 32] Broken pipe
"""


def test_output_of_a_driver_shows_causes_only() -> None:
    assert without_frames(OUTPUT).splitlines() == [
        "WARN TaskSetManager: Lost task 0.0",
        "Traceback (most recent call last):",
        '  File "job.py", line 3, in <module>',
        "    query.awaitTermination()",
        "ValueError: the cause",
    ]

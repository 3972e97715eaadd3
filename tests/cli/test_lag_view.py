"""What ``lag`` shows, from looks that are made up."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.lag_view import (
    LagSnapshot,
    document,
    duration,
    fold,
    prometheus,
    rate,
    screen,
    summary,
    table,
    unfinished_batch,
    unfinished_batch_text,
)
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.model.admin import QueueLag
from rocketmq_spark.spark.checkpoints.offset_log import BatchRead, LoggedBatch

NOW_MS = 1_800_000_000_000
LARGE = 9_876_543_210


def queue(number: int, topic: str = "orders", broker: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker, number)


def sight(*rows: QueueLag, before: tuple[QueueLag, ...] = (), **about: object) -> LagSnapshot:
    return LagSnapshot(about or {"group": "billing"}, rows, NOW_MS, before, 2.0 if before else 0.0)


ROW = QueueLag(queue(1), 0, 4, 10, NOW_MS - 192_000)
EMPTY = QueueLag(queue(0), 0, None, 0)


def test_what_programs_get() -> None:
    told = document(sight(EMPTY, ROW, before=(ROW._replace(position=2, max_offset=9),), checkpoint="/c", batchId=7))
    queues = told.pop("queues")
    assert told == {
        "checkpoint": "/c", "batchId": 7, "lag": 6, "lost": 0, "behindMs": 192_000, "readPerSecond": 1.0,
        "writtenPerSecond": 0.5, "catchUpMs": 12_000, "unknownQueues": 1, "wentBackQueues": 0,
    }  # fmt: skip
    assert isinstance(queues, list)
    assert [(q["queueId"], q["lag"], q["readPerSecond"], q["catchUpMs"]) for q in queues] == [
        (0, None, None, None), (1, 6, 1.0, 12_000),
    ]  # fmt: skip


def test_a_batch_that_is_not_done() -> None:
    read = BatchRead(LoggedBatch(7, {}, NOW_MS - 65_000), [OffsetRange(queue(1, broker="broker-b"), 3, 9)], [], None)
    told = unfinished_batch(read, {"broker-b"}, NOW_MS)
    assert told == {"batchId": 7, "forMs": 65_000, "waitsFor": ["broker-b"]}
    assert unfinished_batch_text(told) == "batch 7 was begun 1 m 5 s ago and is not done: broker-b does not answer"
    assert unfinished_batch_text({**told, "waitsFor": ["a", "b"]}).endswith("is not done: a, b do not answer")
    ended = "not done: it runs, or its query has ended"
    assert unfinished_batch_text(unfinished_batch(read, (), NOW_MS)) == f"batch 7 was begun 1 m 5 s ago and is {ended}"
    assert (
        unfinished_batch_text(unfinished_batch(read._replace(batch=LoggedBatch(7, {})), (), NOW_MS))
        == f"batch 7 is begun and {ended}"
    )
    found = sight(ROW, checkpoint="/c", batchId=6, underWay=told)
    behind = ["6 messages behind in 1 queues", "the oldest for 3 m 12 s"]
    assert summary(found) == ["checkpoint /c", *behind, unfinished_batch_text(told)], (
        "what is behind, and for how long, stand together"
    )
    assert document(found)["underWay"] == told
    assert summary(sight(ROW, checkpoint="/c", batchId=6, underWay=None))[2].startswith("the oldest")


def test_queues_that_are_not_known_are_not_counted() -> None:
    away, back = QueueLag(queue(2), None, 4, None), QueueLag(queue(3), 0, 1205, 75)
    assert summary(sight(ROW))[1] == "6 messages behind in 1 queues"
    assert summary(sight(ROW, away))[1:] == ["6 messages behind in 1 of 2 queues", "the oldest for 3 m 12 s"]
    assert summary(sight(away))[1:] == ["lag unknown in 1 queues"]
    found = sight(ROW, away, back)
    behind = ["6 messages behind in 1 of 3 queues", "the oldest for 3 m 12 s"]
    assert summary(found)[1:] == [*behind, "1 queues went back"]
    assert (document(found)["unknownQueues"], document(found)["wentBackQueues"]) == (2, 1)
    assert table(found)[-1].split() == ["orders", "broker-a", "3", "0", "1,205", "75", "-", "-"]
    assert "lag_messages{" not in prometheus(sight(back))


def test_prometheus_text() -> None:
    odd = ROW._replace(queue=queue(1, broker='b"\\'))
    lines = prometheus(sight(EMPTY, odd)).splitlines()
    assert "# TYPE rocketmq_spark_reader_lag_messages gauge" in lines
    label = r'{broker="b\"\\",group="billing",queue="1",topic="orders"}'
    samples = [line for line in lines if not line.startswith("#")]
    assert [line.partition("reader_")[2] for line in samples if 'queue="1"' in line] == [
        f"lag_messages{label} 6.0", f"lag_seconds{label} 192.0", f"lost_messages{label} 0.0", f"position{label} 4.0",
        f"first_offset{label} 0.0", f"end_offset{label} 10.0",
    ]  # fmt: skip
    assert [line.partition("{")[0] for line in samples if 'queue="0"' in line] == [
        "rocketmq_spark_reader_first_offset", "rocketmq_spark_reader_end_offset",
    ]  # fmt: skip
    assert prometheus(sight(checkpoint="/c", batchId=1)).count("# HELP") == 6


def test_a_table_for_a_pipe_has_everything() -> None:
    heading, line = table(sight(ROW))
    assert heading.split() == ["TOPIC", "BROKER", "QUEUE", "FIRST", "NEXT", "END", "BEHIND", "AGE"]
    assert line.split("  ")[-1] == "3 m 12 s"
    assert table(sight(ROW, before=(ROW,)))[0].endswith("READ/S  SENT/S  DONE IN")


WIDE = [
    QueueLag(queue(n, "orders-of-all-regions", "broker-of-frankfurt-01"), LARGE, LARGE + n, 2 * LARGE, NOW_MS - 9 * 86_400_000)
    for n in range(40)
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("height", [12, 24, 200])
def test_no_line_is_wrapped_cut_or_empty(width: int, height: int) -> None:
    before = tuple(row._replace(position=(row.position or 0) - 2000) for row in WIDE)
    lines = screen(sight(*WIDE, before=before, group="billing-of-the-whole-company"), width, height)
    assert all(0 < len(line) <= width for line in lines), "\n".join(lines)
    assert len(lines) <= height
    assert "orders-of-all-regions" in lines
    assert all(name in " ".join(lines) for name in ("QUEUE", "BEHIND", "billing-of-the-whole-company"))
    assert ("and" in lines[-1].split()) == (height < 200)


def test_the_queues_furthest_behind_are_shown_first() -> None:
    rows = [QueueLag(queue(n), 0, 10 - n, 10, NOW_MS) for n in range(10)]
    lines = screen(sight(*rows), 80, 6)
    assert [line.split()[1] for line in lines[3:-1]] == ["8", "9"]
    assert lines[-1] == "and 8 more queues, 7 of them behind"


def test_topics_stand_above_their_queues() -> None:
    lines = screen(sight(QueueLag(queue(0, "a"), 0, 0, 0), QueueLag(queue(0, "b"), 0, 0, 0)), 80)
    assert [line.split()[0] for line in lines] == ["group", "BROKER", "a", "broker-a", "b", "broker-a"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"), (0, "0 s"), (850, "0.8 s"), (9_949, "9.9 s"), (9_950, "10 s"), (59_400, "59 s"), (59_600, "1 m 0 s"),
        (192_000, "3 m 12 s"), (3_600_000, "1 h 0 m"), (11_520_000, "3 h 12 m"), (200_000_000, "2 d 7 h"),
    ],
)  # fmt: skip
def test_durations(ms: float | None, text: str) -> None:
    assert duration(ms) == text


def test_rates_and_folds() -> None:
    assert [rate(value) for value in (None, 0.0, 0.25, 9.96, 12.4, 1234.5)] == ["-", "0", "0.2", "10.0", "12", "1,234"]
    assert fold(["one", "two", "three"], 9) == ["one, two,", "three"]
    assert fold(["x" * 12], 5) == ["xxxxx", "xxxxx", "xx"]

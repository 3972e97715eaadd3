"""The example's program: orders with known ids and sums, totals read back. ``test_readme`` runs it as a process of its own."""

from __future__ import annotations

import json
import runpy
import sys
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark import Message, Producer, options
from rocketmq_spark.cli.topic_reader import TopicReader, earliest
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_spark import ROOT

EXAMPLE = ROOT / "examples" / "orders_pipeline.py"
START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
REGIONS = ("asia", "europe", "africa")


def order(number: int, at: datetime, region: str) -> dict[str, object]:
    return {"order_id": f"o-{number}", "region": region, "amount": number / 100, "ts": at.isoformat()}


def totals(name_server: str, topic: str) -> dict[tuple[str, str], tuple[int, Decimal]]:
    """Each total once: a window and region that comes twice fails."""
    parsed = options.parse({"name_server": name_server}).for_role("batch source")
    reader = TopicReader(parsed, topic, lambda part, cause: pytest.fail(str(cause)))
    reader.seek(earliest)
    found = {}
    for message in reader.messages():
        total = json.loads(message.body, parse_float=Decimal)
        window = total["window_start"]
        key = (window, total["region"])
        assert key not in found
        assert message.tags == total["region"]
        assert message.keys == [f"{total['region']}@{datetime.fromisoformat(window):%Y%m%dT%H%M%S}"]
        found[key] = (total["orders"], total["amount"])
    return found


@pytest.mark.timeout(1800)
def test_totals_of_all_orders_over_two_runs(
    spark: SparkSession, rocketmq: LocalBroker, make_topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink = make_topic(queues=2), make_topic(queues=2)
    expected: dict[tuple[str, str], tuple[int, Decimal]] = defaultdict(lambda: (0, Decimal()))

    def write(producer: Producer, numbers: range) -> None:
        for number in numbers:
            at, region = START + timedelta(milliseconds=100 * number), REGIONS[number % 3]
            producer.send(Message(source, json.dumps(order(number, at, region)).encode(), keys=[f"o-{number}"]))
            window = START + timedelta(seconds=number // 100 * 10)
            count, amount = expected[f"{window:%Y-%m-%dT%H:%M:%S.000Z}", region]
            expected[f"{window:%Y-%m-%dT%H:%M:%S.000Z}", region] = (count + 1, amount + Decimal(number) / 100)

    run = [
        str(EXAMPLE), "--name-server", rocketmq.name_server, "--input", source, "--output", sink,
        "--checkpoint", str(tmp_path / "checkpoint"), "--available-now",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", run)
    monkeypatch.setattr(SparkSession, "stop", lambda session: None)  # other tests use it, too
    with Producer(name_server=rocketmq.name_server, group="example") as producer:
        write(producer, range(250))
        producer.send(Message(source, b"this is no order"))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        # The newest order is at 24.9 s, so the watermark of ten seconds has passed one window.
        assert {window for window, _ in totals(rocketmq.name_server, sink)} == {"2026-01-31T12:00:00.000Z"}
        write(producer, range(250, 400))
        last = order(0, START + timedelta(days=1), "closing")
        producer.send(Message(source, json.dumps(last).encode()))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert totals(rocketmq.name_server, sink) == expected
    assert len(expected) == 12

"""The pages for users say only what works: their programs run, in their order, and do what the text says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rocketmq_spark import Message
from tests.fix_spark import ROOT
from tests.reading import bodies, post, read
from tests.spark.guides import placed

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

NAMES = ("orders", "orders-big", "orders-per-tag")
ORDERS = [json.dumps({"id": number, "amount": 50.0 * number}) for number in range(10)]


class Page:
    """A page whose programs run against the test's broker, topics and folder, in one namespace."""

    def __init__(self, name, spark, rocketmq, make_topic, folder: Path):
        self.text = (ROOT / "docs" / name).read_text("utf-8")
        self.mq = rocketmq
        self.topics = {name: make_topic(queues=2) for name in NAMES}
        self.folder = folder
        self.values = {"spark": spark}
        order = [Message(self.topics["orders"], o.encode(), tags="a", keys=[f"k{i % 3}"]) for i, o in enumerate(ORDERS)]
        post(rocketmq, order)

    def run(self, **meant):
        """All programs; ``meant`` are lines that stand for others here, by their number."""
        programs = re.findall(r"^```python\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)
        for program in programs:
            for shown, here in meant.get("instead", {}).items():
                program = program.replace(shown, here)
            for name, topic in self.topics.items():
                program = program.replace(f'"{name}"', f'"{topic}"')
            program = program.replace("127.0.0.1:9876", self.mq.name_server)
            program = placed(program, self.folder)
            exec(compile(program, "page", "exec"), self.values)
        return self.values

    def stored(self, name):
        return read(self.mq, subscribe=self.topics[name])


@pytest.fixture
def page(spark, rocketmq, make_topic, tmp_path):
    return lambda name: Page(name, spark, rocketmq, make_topic, tmp_path)


def test_links_of_all_pages_lead_somewhere():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")) if "://" not in link]
        assert [link for link in links if not (path.parent / link).exists()] == [], path.name


def test_coming_from_kafka(page):
    kafka = page("coming-from-kafka.md")
    two_words = Message(kafka.topics["orders"], b'{"id": 10, "amount": 1.0}', keys="John Smith")
    without_keys = [Message(kafka.topics["orders"], b'{"id": %d, "amount": %d}' % (i, 1000 + i)) for i in (11, 12)]
    post(kafka.mq, [two_words, *without_keys])
    ends = "query.processAllAvailable()\nquery.stop()"
    kafka.run(instead={"query.awaitTermination()": ends})
    big = kafka.stored("orders-big")
    amounts = [*(50.0 * number for number in range(3, 10)), 1011.0, 1012.0]
    assert sorted(json.loads(body)["amount"] for body in bodies(big)) == amounts
    with_keys = [row for row in big if row["keys"]]
    assert len(with_keys) == 7
    places = {row["keys"][0]: set() for row in with_keys}
    for row in with_keys:
        places[row["keys"][0]].add(row["queueId"])
    assert all(len(queues) == 1 for queues in places.values())


def test_writing(page, capsys):
    writing = page("writing.md")
    values = writing.run()
    assert sorted(bodies(writing.stored("orders"))) == sorted([*ORDERS, "one", "one", "two", "two"])
    assert "2 rows in 2 batches, 0 failed attempts" in capsys.readouterr().out  # one of each of two tasks
    assert sorted(bodies(writing.stored("orders-per-tag"))) == ["a:12", "b:2"]
    assert values["writer"].total.rows == values["writer"].last_report.rows == 2


def test_monitoring(page, spark, capsys):
    monitoring = page("monitoring.md")
    values = monitoring.run()
    try:
        assert values["state"]["lag"] == 0
        said = capsys.readouterr().out
        assert "0 messages behind in 2 queues; away: []" in said
        assert re.search(
            r"^\[ROCKETMQ_ROUTE_NOT_FOUND\].*rocketmq-spark topic create no-such-topic$", said, re.MULTILINE
        )
        assert "'rows': 10" in said
    finally:
        values["query"].stop()
        for name in ("listener", "committing"):
            spark.streams.removeListener(values[name])

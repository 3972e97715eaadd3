import json
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.cli.demo.batch_totals import Batches
from rocketmq_spark.cli.demo.environment import DemoEnvironment
from rocketmq_spark.cli.demo.watch import DemoWatch, ReturnedTotals
from rocketmq_spark.errors import AccessDenied, CallTimeout, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source.offsets import Offsets
from tests.helpers import awaited
from tests.reading import canonical


class Driver:
    """What the process of the driver reports, made up."""

    def __init__(self):
        self.unread = []

    def reports(self):
        unread, self.unread = self.unread, []
        return unread


@pytest.fixture
def watched(rocketmq, make_topic, tmp_path):
    environment = DemoEnvironment(rocketmq.name_server, make_topic(queues=2), make_topic(queues=1), tmp_path, None)
    driver = Driver()
    return environment, driver, DemoWatch(environment, driver)


def log(environment: DemoEnvironment, name: str, batch: int, text: str) -> None:
    path = Path(environment.checkpoint, name, str(batch))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def offsets(environment: DemoEnvironment, position: int) -> str:
    """An entry of Spark's offset log: the second queue is read up to ``position``."""
    return f"v1\n{{}}\n{canonical(Offsets({MessageQueue(environment.orders, 'broker-a', 1): position}).to_json())}"


def test_reports_of_several_drivers_add_up(watched):
    _, driver, watch = watched
    driver.unread = [{"progress": {"rows": 10, "ms": 100, "late": 2}}, {"progress": {"rows": 0, "ms": 200, "late": 0}}]
    watch.refresh()
    driver.unread = [{"progress": {"rows": 5, "ms": 300, "late": 1}}]
    state = watch.refresh()
    assert (state.batch_ms, state.dropped_late) == ([100, 300], 3), "batches without rows take no part"
    assert watch.returned_totals is None
    driver.unread = [{"totals": {"different": 3, "repeated": 0, "orders": 15, "cents": 99}}]
    watch.refresh()
    assert watch.returned_totals == ReturnedTotals(different=3, repeated=0, orders=15, cents=99)


def test_a_failed_query_ends_it_with_its_reason(watched):
    _, driver, watch = watched
    driver.unread = [{"failed": "Python worker failed to connect back"}]
    with pytest.raises(RocketMQError, match=r"Python worker failed to connect back.*spark\.log"):
        watch.refresh()


def test_orders_read_are_those_of_the_last_finished_batch(watched):
    environment, _, watch = watched
    assert watch.batches() == Batches(-1, -1)
    assert watch.refresh().read == 0
    log(environment, "offsets", 0, offsets(environment, 7))
    assert watch.batches() == Batches(0, -1)
    assert watch.refresh().read == 0, "it may have to be read again"
    log(environment, "commits", 0, "v1\n{}")
    log(environment, "offsets", 1, offsets(environment, 12))
    assert watch.batches() == Batches(1, 0)
    assert watch.refresh().read == 7
    assert watch.newest_finished == 0


def test_lag_and_newest_totals_come_from_the_broker(rocketmq, watched):
    environment, _, watch = watched
    totals = [
        {"window_start": "2026-01-31T12:00:00.000Z", "region": "asia", "orders": 1, "amount": 1.5},
        {"window_start": "2026-01-31T12:00:05.000Z", "region": "asia", "orders": 2, "amount": 1234.5},
    ]
    with Producer(name_server=rocketmq.name_server, group="cli-watch") as producer:
        for _ in range(3):
            producer.send(Message(environment.orders, b"x"), queue=MessageQueue(environment.orders, "broker-a", 1))
        for total in totals:
            producer.send(Message(environment.totals, json.dumps(total).encode()))
    log(environment, "offsets", 0, offsets(environment, 1))
    log(environment, "commits", 0, "v1\n{}")
    state = awaited(watch.refresh, lambda state: state.totals_seen == 2 and sum(state.lag.values()) == 2)
    assert state.lag == {"broker-a/0": 0, "broker-a/1": 2}
    assert (state.window, state.window_totals) == ("2026-01-31T12:00:05.000Z", {"asia": (2, "1,234.50")})
    assert state.orders_in_totals == 3
    assert watch.stored_totals() == 2


def test_a_broker_that_does_not_answer_leaves_the_totals_unknown(watched, monkeypatch):
    _, _, watch = watched

    def fail(error):
        def bounds(*arguments):
            raise error

        monkeypatch.setattr(watch._client.offset_reader, "bounds", bounds)

    fail(CallTimeout("no answer"))
    assert watch.stored_totals() is None
    fail(AccessDenied("not yours"))
    with pytest.raises(AccessDenied):
        watch.stored_totals()

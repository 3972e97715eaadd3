import json
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.cli.demo.aim import Batches
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.cli.demo.watch import DemoWatch, Returned
from rocketmq_spark.errors import AccessDenied, CallTimeout, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source.offsets import Offsets
from tests.helpers import awaited
from tests.reading import canonical


class Driver:
    """What the process of the driver reports, made up."""

    def __init__(self):
        self.said = []

    def reports(self):
        said, self.said = self.said, []
        return said


@pytest.fixture
def watch(rocketmq, make_topic, tmp_path):
    made = Stage(rocketmq.name_server, make_topic(queues=2), make_topic(queues=1), tmp_path, None)
    driver = Driver()
    return made, driver, DemoWatch(made, driver)


def log(made: Stage, name: str, batch: int, text: str) -> None:
    path = Path(made.checkpoint, name, str(batch))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def offsets(made: Stage, position: int) -> str:
    """An entry of Spark's offset log: the second queue is read up to ``position``."""
    return f"v1\n{{}}\n{canonical(Offsets({MessageQueue(made.orders, 'broker-a', 1): position}).to_json())}"


def test_reports_of_several_drivers_add_up(watch):
    _, driver, one = watch
    driver.said = [{"progress": {"rows": 10, "ms": 100, "late": 2}}, {"progress": {"rows": 0, "ms": 200, "late": 0}}]
    one.look()
    driver.said = [{"progress": {"rows": 5, "ms": 300, "late": 1}}]
    state = one.look()
    assert (state.batch_ms, state.dropped_late) == ([100, 300], 3), "batches without rows take no part"
    assert one.returned is None
    driver.said = [{"totals": {"different": 3, "repeated": 0, "orders": 15, "cents": 99}}]
    one.look()
    assert one.returned == Returned(different=3, repeated=0, orders=15, cents=99)


def test_a_failed_query_ends_it_with_its_reason(watch):
    _, driver, one = watch
    driver.said = [{"failed": "Python worker failed to connect back"}]
    with pytest.raises(RocketMQError, match=r"Python worker failed to connect back.*spark\.log"):
        one.look()


def test_what_is_read_are_the_positions_of_the_last_finished_batch(watch):
    made, _, one = watch
    assert one.batches() == Batches(-1, -1)
    assert one.look().read == 0
    log(made, "offsets", 0, offsets(made, 7))
    assert one.batches() == Batches(0, -1)
    assert one.look().read == 0, "it may have to be read again"
    log(made, "commits", 0, "v1\n{}")
    log(made, "offsets", 1, offsets(made, 12))
    assert one.batches() == Batches(1, 0)
    assert one.look().read == 7
    assert one.finished == 0


def test_lag_and_newest_totals_come_from_the_broker(rocketmq, watch):
    made, _, one = watch
    totals = [
        {"window_start": "2026-01-31T12:00:00.000Z", "region": "asia", "orders": 1, "amount": 1.5},
        {"window_start": "2026-01-31T12:00:05.000Z", "region": "asia", "orders": 2, "amount": 1234.5},
    ]
    with Producer(name_server=rocketmq.name_server, group="cli-watch") as producer:
        for _ in range(3):
            producer.send(Message(made.orders, b"x"), queue=MessageQueue(made.orders, "broker-a", 1))
        for total in totals:
            producer.send(Message(made.totals, json.dumps(total).encode()))
    log(made, "offsets", 0, offsets(made, 1))
    log(made, "commits", 0, "v1\n{}")
    state = awaited(one.look, lambda state: state.totals_seen == 2 and sum(state.lag.values()) == 2)
    assert state.lag == {"broker-a/0": 0, "broker-a/1": 2}
    assert (state.window, state.window_totals) == ("2026-01-31T12:00:05.000Z", {"asia": (2, "1,234.50")})
    assert state.orders_in_totals == 3
    assert one.stored_totals() == 2


def test_a_broker_that_does_not_answer_leaves_the_totals_unknown(watch, monkeypatch):
    _, _, one = watch

    def fail(error):
        def bounds(*arguments):
            raise error

        monkeypatch.setattr(one._client.brokers, "bounds", bounds)

    fail(CallTimeout("no answer"))
    assert one.stored_totals() is None
    fail(AccessDenied("not yours"))
    with pytest.raises(AccessDenied):
        one.stored_totals()

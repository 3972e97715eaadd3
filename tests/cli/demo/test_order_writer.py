import contextlib
import json
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from rocketmq_spark.cli.demo.order_writer import OrderWriter
from rocketmq_spark.errors import RocketMQError
from tests.cli.conftest import documents
from tests.helpers import awaited


@pytest.fixture
def orders(run, topic):
    def read(count):
        orders_read = awaited(
            lambda: documents(run("tail", topic, "--no-follow", "--json").stdout),
            lambda orders_read: len(orders_read) >= count,
        )
        return [json.loads(message["body"], parse_float=Decimal) for message in orders_read]

    return read


def wait_until_done(writer):
    assert awaited(lambda: writer.is_done, bool)


def test_it_writes_what_it_says(rocketmq, topic, orders):
    begin = time.monotonic()
    with OrderWriter(rocketmq.name_server, topic, rate=200, seconds=0.5) as writer:
        assert (writer.sent_count, writer.is_done) == (1, False)
        writer.start()
        wait_until_done(writer)
        lasted = time.monotonic() - begin
        assert lasted >= 0.5
        orders_read = orders(writer.sent_count)
        assert len({order["order_id"] for order in orders_read}) == len(orders_read) == writer.sent_count
        assert 2 < writer.sent_count <= 2 + 200 * lasted  # one at first, one at once, no more than the rate allows
        assert sum(order["amount"] for order in orders_read) * 100 == writer.cents
        writer.end_windows()
        (last,) = (order for order in orders(writer.sent_count + 1) if order["region"] == "closing")
    assert datetime.fromisoformat(last["ts"]).timestamp() > datetime.now(UTC).timestamp() + 80_000


def test_leaving_stops_it(rocketmq, topic):
    with OrderWriter(rocketmq.name_server, topic, rate=10, seconds=3600) as writer:
        writer.start()
    assert writer.is_done


def test_what_ended_it_early_is_raised(rocketmq, topic, monkeypatch):
    with OrderWriter(rocketmq.name_server, topic, rate=100, seconds=3600) as writer:

        def fail(*arguments):
            raise RocketMQError("the broker has gone")

        monkeypatch.setattr(writer._producer, "send_async", fail)
        writer.start()
        with pytest.raises(RocketMQError, match="the broker has gone"):
            awaited(lambda: writer.is_done, bool)


def test_a_failed_run_does_not_wait_for_a_broker_that_is_silent(rocketmq, topic, monkeypatch):
    """Whose answers may come for the whole send timeout."""
    answer, timeouts = Future(), []
    writer = OrderWriter(rocketmq.name_server, topic, rate=100, seconds=3600)
    close = writer._producer.close

    def closed(timeout_s=None):
        timeouts.append(timeout_s)
        answer.cancel()
        return close(timeout_s)

    with contextlib.suppress(KeyboardInterrupt), writer:
        monkeypatch.setattr(writer._producer, "send_async", lambda message: answer)
        monkeypatch.setattr(writer._producer, "close", closed)
        writer.start()
        raise KeyboardInterrupt
    assert timeouts == [1.0, None]
    assert writer._write_future.done()

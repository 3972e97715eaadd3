"""What is asked of brokers."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.codes import Request
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull import puller as puller_module
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.puller import Puller
from tests.client.conftest import Parts

QUEUE = MessageQueue("t", "broker-a", 3)


@pytest.fixture
def puller(parts: Parts) -> Puller:
    return Puller(parts.pulls, parts.pool.dialling, "g", PullSettings(depth=3), "hint")


def test_a_pull_leaves_nothing_behind_on_the_broker(puller: Puller) -> None:
    frame = puller.template(QUEUE).frame(7, 100, 32)
    header = json.loads(frame[8:])
    assert header["code"] == Request.PULL_MESSAGE
    assert header["opaque"] == 7
    fields = header["extFields"]
    expected = {"consumerGroup": "g", "topic": "t", "queueId": "3", "bname": "broker-a", "subscription": "*"}
    assert expected.items() <= fields.items()
    # No suspension, no offset committed: the subscription travels with the pull.
    assert (fields["sysFlag"], fields["suspendTimeoutMillis"]) == ("4", "0")
    assert (fields["queueOffset"], fields["maxMsgNums"]) == ("100", "32")


@pytest.mark.parametrize("filtered", [NO_FILTER, Filter("a || b"), Filter("n > 3", "SQL92")])
def test_a_reader_has_the_settings_the_filter_and_the_replica(
    puller: Puller, monkeypatch: pytest.MonkeyPatch, filtered: Filter
) -> None:
    monkeypatch.setattr(puller_module, "RangeReader", lambda *a, **how: (*a, how))
    ranges = [OffsetRange(QUEUE, 0, 5), OffsetRange(QUEUE._replace(queue_id=4), 0, 5)]
    found, replica, templates, settings, on_loss, how = puller.reader(ranges, print, filtered, "known:1")  # type: ignore[misc]
    assert (found, on_loss, how) == (ranges, print, {"on_hint": replica.hint})
    assert (replica.broker_name, replica.topic, replica.read_from, replica.known) == (
        "broker-a",
        "t",
        "hint",
        "known:1",
    )
    assert (settings.depth, settings.filtered) == (3, bool(filtered))
    asked = [json.loads(template.frame(0, 0, 1)[8:])["extFields"] for template in templates]
    assert [fields["queueId"] for fields in asked] == ["3", "4"]
    assert {(fields["subscription"], fields["expressionType"]) for fields in asked} == {
        (filtered.expression, filtered.kind)
    }

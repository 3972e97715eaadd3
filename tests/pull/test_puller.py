"""What is asked of brokers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull import puller as puller_module
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.puller import Puller
from tests.client.conftest import Parts
from tests.fakes.ports import Fake

QUEUE = MessageQueue("t", "broker-a", 3)
TAGS, SQL = Filter("a || b"), Filter("n > 3", "SQL92")
_NOTHING: Any = None
PULLER = Puller(_NOTHING, _NOTHING, "g", PullSettings())


@pytest.fixture
def puller(parts: Parts) -> Puller:
    return Puller(parts.pulls, parts.pool.connect_options, "g", PullSettings(depth=3), "hint")


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


def test_a_pull_is_of_the_namespace_and_signed() -> None:
    """Else it would read what others have under the same name, or be refused."""
    source: Any = SimpleNamespace(
        name_on_wire=lambda name: f"ns%{name}", signing_keys=lambda: ("me", "secret", "token")
    )
    template = replace(PULLER, source=source).template(QUEUE)
    fields = json.loads(template.frame(0, 0, 1)[8:])["extFields"]
    expected = {"consumerGroup": "ns%g", "topic": "ns%t", "AccessKey": "me", "SecurityToken": "token"}
    assert expected.items() <= fields.items()
    assert "Signature" in fields
    assert "secret" not in fields.values()


@pytest.mark.parametrize("filtered", [NO_FILTER, TAGS, SQL])
def test_a_reader_has_the_settings_the_filter_and_the_replica(
    puller: Puller, monkeypatch: pytest.MonkeyPatch, filtered: Filter
) -> None:
    monkeypatch.setattr(puller_module, "RangeReader", lambda *a, **how: (*a, how))
    ranges = [OffsetRange(QUEUE, 0, 5), OffsetRange(QUEUE._replace(queue_id=4), 0, 5)]
    found, replica, templates, settings, on_loss, how = puller.reader(ranges, print, filtered, "known:1")  # type: ignore[misc]
    assert (found, on_loss, how) == (ranges, print, {"on_hint": replica.follow_hint, "recreated_topics": None})
    assert (replica.broker_name, replica.topic, replica.read_from, replica.planned_address) == (
        "broker-a",
        "t",
        "hint",
        "known:1",
    )
    assert (settings.depth, settings.has_filter) == (3, bool(filtered))
    asked = [json.loads(template.frame(0, 0, 1)[8:])["extFields"] for template in templates]
    assert [fields["queueId"] for fields in asked] == ["3", "4"]
    assert {(fields["subscription"], fields["expressionType"]) for fields in asked} == {
        (filtered.expression, filtered.kind)
    }


class Batched:
    """The one thing that is asked of a ``PullSource`` here."""

    def __init__(self, answer: bool | RocketMQError) -> None:
        self.answer = answer
        self.left_s = 0.0

    def stores_batches(self, queue: MessageQueue, deadline: Deadline) -> bool:
        self.left_s = deadline.remaining()
        if isinstance(self.answer, RocketMQError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [(True, True), (False, False), (ConnectionLost("refused"), True), (BrokerNotFound("away"), True)],
)
def test_read_begins_although_the_topic_kind_is_unknown(answer: bool | RocketMQError, found: bool) -> None:
    """It waits for its broker, longer than that question does."""
    assert replace(PULLER, source=Fake(ports.PullSource, Batched(answer))).stores_batches(QUEUE) is found  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [TAGS, SQL])
def test_a_question_takes_no_longer_than_its_read_may_wait(wanted: Filter) -> None:
    """The driver reads for a second what a task reads for two minutes."""
    source = Batched(False)
    brief = replace(PULLER, source=Fake(ports.PullSource, source), settings=PullSettings(read_deadline_s=1.0))  # type: ignore[arg-type]
    brief.broker_filter(QUEUE, wanted)
    assert 0.0 < source.left_s <= 1.0


@pytest.mark.parametrize(
    ("answer", "wanted", "told"),
    [
        (False, TAGS, TAGS),
        (True, TAGS, NO_FILTER),
        (ConnectionLost("refused"), TAGS, NO_FILTER),
        (False, SQL, SQL),
        (ConnectionLost("refused"), SQL, SQL),
        (True, NO_FILTER, NO_FILTER),
    ],
)
def test_what_brokers_filter_by(answer: bool | RocketMQError, wanted: Filter, told: Filter) -> None:
    """Who decodes knows tags, and no expressions: one that brokers are not told would let everything through."""
    assert replace(PULLER, source=Fake(ports.PullSource, Batched(answer))).broker_filter(QUEUE, wanted) == told  # type: ignore[arg-type]


def test_sql_filter_is_refused_once_a_topic_proves_a_batch_topic() -> None:
    with pytest.raises(OptionError, match="option 'sql' is 'n > 3', but t is a batch topic"):
        replace(PULLER, source=Fake(ports.PullSource, Batched(True))).broker_filter(QUEUE, SQL)  # type: ignore[arg-type]
    with pytest.raises(AccessDenied):
        replace(PULLER, source=Fake(ports.PullSource, Batched(AccessDenied("no")))).broker_filter(QUEUE, SQL)  # type: ignore[arg-type]


def test_who_may_not_ask_what_kind_it_is_is_reported() -> None:
    with pytest.raises(AccessDenied):
        replace(PULLER, source=Fake(ports.PullSource, Batched(AccessDenied("no")))).stores_batches(QUEUE)  # type: ignore[arg-type]

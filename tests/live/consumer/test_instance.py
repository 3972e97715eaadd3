"""What a process tells brokers of its groups, as they hear it, and how the members in it keep out of each other's way."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Consumer, Message, Producer, options, session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.consumer.push import BaseConsumer as Member
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import BrokerError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.header import Command
from tests.fix_clusters import Tap
from tests.live.consumer.members import EARLIEST, Members
from tests.mockbroker import eventually
from tests.reading import feed

# What clients of 4.4 uploaded: REGISTER_FILTER_SERVER, REGISTER_MESSAGE_FILTER_CLASS.
FILTER_CLASSES = {301, 302}
GET_PRODUCER_CONNECTION_LIST = 204


def codes(tap: Tap) -> set[int]:
    return {int(code) for code in re.findall(rb'\{"code": ?(\d+)', bytes(tap.data))}


def heartbeats(tap: Tap) -> Iterator[dict[str, Any]]:
    text = bytes(tap.data).decode("latin-1")
    for match in re.finditer(r'\{"clientID"', text):
        yield json.JSONDecoder().raw_decode(text, match.start())[0]


def knows(mq: LocalBroker, broker: str, producer_group: str) -> bool:
    try:
        asked = Command(GET_PRODUCER_CONNECTION_LIST, {"producerGroup": producer_group})
        return b'"clientId"' in bytes(mq.admin.offset_reader.rpc_client.request(mq.address(broker), asked).body)
    except BrokerError:
        return False


def test_masters_hear_of_producers_and_slaves_of_consumers_too(
    slaved: LocalBroker, make_tap: Callable[[str], Tap]
) -> None:
    topic, (slave,) = f"told-{time.time_ns()}", slaved.slaves
    slaved.create_topic(topic)
    to_master, to_slave = (make_tap(slaved.address(name)) for name in ("broker-a", slave))
    mapped = {slaved.address("broker-a"): to_master.address, slaved.address(slave): to_slave.address}
    common = {"name_server": slaved.name_server, "address_map": mapped}
    with Producer(group=f"p-{topic}", **common) as producer:
        producer.send(Message(topic, b"x"))
        eventually(lambda: knows(slaved, "broker-a", f"p-{topic}"), 60)
        (beat,) = heartbeats(to_master)
        assert beat["producerDataSet"] == [{"groupName": f"p-{topic}"}]
        assert beat["consumerDataSet"] == []
        assert (bytes(to_slave.data), knows(slaved, slave, f"p-{topic}")) == (b"", False)
        with Consumer(group=f"g-{topic}", **common) as consumer:
            consumer.subscribe(topic, tags="a || b")
            consumer.start(lambda messages, context: None)
            eventually(lambda: any(heartbeats(to_slave)), 60)
    for tap in (to_master, to_slave):
        (told,) = next(beat for beat in heartbeats(tap) if beat["consumerDataSet"])["consumerDataSet"]
        wanted = {each["topic"]: each["subString"] for each in told["subscriptionDataSet"]}
        assert wanted == {topic: "a || b", f"%RETRY%g-{topic}": "*"}
        assert (told["groupName"], told["consumeType"], told["messageModel"], told["consumeFromWhere"]) == (
            f"g-{topic}", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET",
        )  # fmt: skip
        assert Request.HEART_BEAT in codes(tap)
        assert not codes(tap) & FILTER_CLASSES


def test_member_rebalances_on_one_thread_from_start_to_stop(members: Members) -> None:
    """Java has one for all groups of a client; design-consumer.md says why each has its own here."""

    def rebalancing() -> int:
        names = [thread.name for thread in threading.enumerate()]
        return sum(members.group in name and name.endswith("-rebalance") for name in names)

    consumer = members.make()
    consumer.subscribe(members.topic)
    assert rebalancing() == 0
    consumer.start(lambda messages, context: None)
    eventually(lambda: members.owned(consumer) == 8, 60)
    assert rebalancing() == 1
    assert consumer.stop() == []
    assert rebalancing() == 0


def test_strategy_that_raises_is_the_trouble_of_its_group_alone(members: Members, caplog) -> None:
    def raises(*given: object) -> Any:
        raise ZeroDivisionError("mine")

    port = session.member(options.parse({"nameServer": members.mq.name_server}).for_role("producer"))
    got: list[str] = []

    def listener(messages, context) -> None:
        got.extend(message.body.decode() for message in messages)

    for group, how in ((f"a-{members.group}", {"allocate": raises}), (members.group, {})):
        consumer = Member(port, ConsumerSettings(group=group, consume_from=EARLIEST, **how))
        members.all.append(consumer)
        consumer.subscribe(members.topic)
        consumer.start(listener)
    troubled, fine = members.all
    sent = feed(members.mq, members.topic, 16)
    eventually(lambda: sorted(got) == sorted(sent), 60)
    eventually(lambda: "the allocation strategy failed: ZeroDivisionError: mine" in caplog.text, 60)
    assert (members.owned(troubled), members.owned(fine)) == (0, 8)


def test_new_queues_are_owned_once_their_route_is_old(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.client.routes.ROUTE_MAX_AGE_S", 0.0)
    consumer = members.start(rebalance_interval_s=1.0)
    eventually(lambda: members.owned(consumer) == 8, 60)
    members.mq.create_topic(members.topic, 11, resize=True)
    eventually(lambda: members.owned(consumer) == 11, 60)
    sent = feed(members.mq, members.topic, 11)
    eventually(lambda: sorted(members.bodies()) == sorted(sent), 60)

"""A group that an operator switched to POP: members that pull warn, and ``doctor`` has the remedy."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import Consumer, PullConsumer
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor import command
from rocketmq_spark.cli.doctor.findings import Level
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.header import Command
from tests import witness
from tests.fix_clusters import Secured
from tests.helpers import told

SET_MESSAGE_REQUEST_MODE = 401  # what ``mqadmin setConsumeMode`` sends


@pytest.fixture
def popped(rocketmq: LocalBroker, topic: str) -> str:
    """A group that pops the topic."""
    group = f"g-{topic}"
    server = ("-n", rocketmq.name_server, "-c", "DefaultCluster")
    assert "success" in witness.mqadmin("setConsumeMode", *server, "-t", topic, "-g", group, "-m", "POP", "-q", "0")
    return group


def warning(topic: str) -> str:
    return f"the consume mode of topic {topic} is POP at broker-a, but this member pulls"


def test_a_consumer_warns_when_it_starts(rocketmq: LocalBroker, topic: str, popped: str) -> None:
    consumer = Consumer(name_server=rocketmq.name_server, group=popped)
    consumer.subscribe(topic)
    with told(warning(topic)) as warned:
        consumer.start(lambda messages, context: None)
        assert warned.wait(60)
    consumer.stop()


def test_a_pull_consumer_warns_with_its_first_poll(rocketmq: LocalBroker, topic: str, popped: str) -> None:
    with told(warning(topic)) as warned, PullConsumer(name_server=rocketmq.name_server, group=popped) as consumer:
        consumer.subscribe(topic)
        consumer.poll(0.1)
        assert warned.wait(60)


def test_doctor_advises_to_switch_the_group_back(rocketmq: LocalBroker, topic: str, popped: str) -> None:
    with PullConsumer(name_server=rocketmq.name_server, group=popped) as consumer:
        consumer.subscribe(topic)
        consumer.poll(0.1)
        target, subject = Target({"name_server": rocketmq.name_server}), command.Subject(group=popped)
        findings = [finding for finding in command.examine(target, subject) if "consume mode" in finding.text]
    assert [(found.check, found.level) for found in findings] == [(f"group {popped}", Level.ADVICE)]
    assert "mqadmin setConsumeMode -m PULL" in str(findings[0].remedy)


def test_a_member_needs_no_right_of_an_administrator(secured: Secured) -> None:
    topic, group = "switched", "g-switched"
    secured.admin.create_topic(topic, 2)
    secured.admin.create_group(group)
    mode = json.dumps({"topic": topic, "consumerGroup": group, "mode": "POP", "popShareQueueNum": 0}).encode()
    secured.admin.offset_reader.rpc_client.request(
        secured.mq.address("broker-a"), Command(SET_MESSAGE_REQUEST_MODE, {}, body=mode)
    )
    user = secured.user("switched-member", (f"Topic:{topic}", "Sub"), (f"Group:{group}", "Sub"))
    consumer = Consumer(name_server=secured.mq.name_server, group=group, **user)
    consumer.subscribe(topic)
    with told(warning(topic)) as warned:
        consumer.start(lambda messages, context: None)
        assert warned.wait(60)
    consumer.stop()

"""From stored properties to the messages of a request."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.encoder import ProxyBatch, ProxyEncoder, RequestEncoder, TopicName
from rocketmq_spark.grpc_proxy.protos import get_ms, proto
from rocketmq_spark.grpc_proxy.tables import MessageType
from rocketmq_spark.model.send import SentMessage

TOPIC = TopicName("t", "ns%t")
BORN = 1_767_225_600_123


def read(*parts: SentMessage):
    """The messages of a request of these parts, as protobuf itself reads them."""
    ((request,),) = ProxyBatch.from_items(map(RequestEncoder(TOPIC, BORN, "host"), parts)).chains
    return proto("SendMessageRequest").FromString(request.data).messages


def made(flag: int = 0, **properties: str):
    (message,) = read(SentMessage(b"body", properties, flag))
    return message


def test_what_has_a_field_goes_there_and_the_users_own_stay():
    told = made(TAGS="a", KEYS="k1 k2", UNIQ_KEY="ID", WAIT="true", color="red")
    system = told.system_properties
    assert (told.topic.name, told.body) == ("ns%t", b"body")
    assert dict(told.user_properties) == {"color": "red"}
    assert (system.tag, list(system.keys), system.message_id, system.born_host) == ("a", ["k1", "k2"], "ID", "host")
    assert get_ms(system.born_timestamp) == BORN
    assert system.message_type == MessageType.NORMAL


def test_several_messages_of_any_size_make_one_request():
    """What protobuf itself would write, but for the order of fields; lengths of one, two and three bytes."""
    bodies = [b"", b"x" * 127, memoryview(b"y" * 128), b"z" * (1 << 14), b"w" * ((1 << 21) + 3)]
    parts = [SentMessage(body, {"UNIQ_KEY": f"ID{n}", "größe": "ß" * 130 * n or "0"}) for n, body in enumerate(bodies)]
    found = read(*parts)
    assert [message.body for message in found] == bodies
    assert [dict(message.user_properties) for message in found] == [
        {"größe": part.properties["größe"]} for part in parts
    ]
    made = ProxyBatch.from_items(items := [RequestEncoder(TOPIC, BORN, "host")(part) for part in parts])
    assert [request.ids for (request,) in made.chains] == ["ID0,ID1,ID2,ID3,ID4"]
    assert len(made) == sum(map(len, items)) == len(made.chains[0][0].data)


def test_what_is_absent_is_not_set():
    system = made().system_properties
    assert not any(map(system.HasField, ("tag", "message_group", "delivery_timestamp", "priority")))
    assert not system.keys


def test_a_sharding_key_is_a_message_group():
    system = made(**{Property.SHARDING_KEY: "g"}).system_properties
    assert (system.message_type, system.message_group) == (MessageType.FIFO, "g")


def test_a_priority_is_one():
    system = made(**{Property.PRIORITY: "0"}).system_properties
    assert (system.message_type, system.HasField("priority")) == (MessageType.PRIORITY, True)


@pytest.mark.parametrize(
    ("name", "value", "due"),
    [
        (Property.TIMER_DELIVER_MS, str(BORN + 5), BORN + 5),
        (Property.TIMER_DELAY_MS, "1500", BORN + 1500),
        (Property.TIMER_DELAY_SEC, "3", BORN + 3000),
        (Property.DELAY, "1", BORN + 1000),
        (Property.DELAY, "18", BORN + 7_200_000),
    ],
)
def test_every_delay_is_a_moment(name, value, due):
    system = made(**{name: value}).system_properties
    assert (system.message_type, get_ms(system.delivery_timestamp)) == (MessageType.DELAY, due)


@pytest.mark.parametrize(
    ("flag", "properties", "said"),
    [
        (3, {}, "flag is 3"),
        (0, {Property.DELAY: "19"}, "level 19"),
        (0, {Property.DELAY: "1", Property.SHARDING_KEY: "g"}, "FIFO and DELAY"),
        (0, {Property.BUYER_ID: "b"}, "BUYER_ID"),
    ],
)
def test_what_grpc_cannot_carry_is_refused(flag, properties, said):
    with pytest.raises(MessageRefused, match=said) as caught:
        made(flag, **properties)
    assert caught.value.topic == "t"


def test_grouped_delayed_and_priority_messages_are_sent_alone():
    """A real Proxy spreads requests of several messages over queues, though they are of one group."""
    groups = {Property.SHARDING_KEY: "g"}, {Property.SHARDING_KEY: "h"}, {Property.DELAY: "1"}, {}
    parts = [SentMessage(bytes([n]), groups[n % 4]) for n in range(8)] + [
        SentMessage(b"\x08", {Property.PRIORITY: "1"})
    ]
    made = ProxyBatch.from_items(map(RequestEncoder(TOPIC, BORN, "host"), parts))
    read = proto("SendMessageRequest").FromString
    found = [[[each.body[0] for each in read(request.data).messages] for request in chain] for chain in made.chains]
    assert sorted(found) == [[[0], [4]], [[1], [5]], [[2]], [[3, 7]], [[6]], [[8]]]


def test_a_batch_reads_its_messages_back():
    """For a spool: all but what the Proxy sets itself, a delay as the moment."""
    own = {Property.UNIQ_KEY: "ID", "color": "red", "größe": "ß"}
    groups: list[dict[str, str]] = [
        {Property.TAGS: "a", Property.KEYS: "k1 k2"},
        {Property.SHARDING_KEY: "g"},
        {Property.PRIORITY: "0"},
        {Property.TIMER_DELIVER_MS: str(BORN + 5)},
    ]
    parts = [SentMessage(b"body", {**own, **more}) for more in groups]
    made = ProxyBatch.from_items(map(RequestEncoder(TOPIC, BORN, "host"), parts))
    assert made.messages() == parts


def test_interleaved_messages_keep_their_own_topic_and_times():
    """What is made once for a topic and a moment is not for another topic, nor for a delay that was counted from another one."""
    encoder = ProxyEncoder(lambda topic: f"ns%{topic}", "host", lambda request: ())
    delayed = SentMessage(b"x", {Property.TIMER_DELAY_MS: "1000"})
    asked = [("t", BORN), ("u", BORN), ("u", BORN + 5), ("t", BORN + 5), ("t", BORN), ("t", BORN)]
    found = []
    for topic, born in asked:
        ((request,),) = ProxyBatch.from_items([encoder.encoder_of(topic, born)(delayed)]).chains
        (message,) = proto("SendMessageRequest").FromString(request.data).messages
        system = message.system_properties
        found.append((message.topic.name, get_ms(system.born_timestamp), get_ms(system.delivery_timestamp)))
    assert found == [(f"ns%{topic}", born, born + 1000) for topic, born in asked]

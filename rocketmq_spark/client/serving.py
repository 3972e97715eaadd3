"""What brokers do for a topic beyond keeping it: for how long their timers hold a message, and whether anybody consumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import FIRST_WITH_TIMERS, TIMER_MAX_DELAY_S, Response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command


def longest_timers(calls: Calls, topic: str, masters: Mapping[str, str], deadline: Deadline) -> dict[str, int]:
    """The longest delay, in ms, of each of ``masters``, addresses by broker name, that answers; 0 without timers."""
    wire = calls.on_wire(topic)
    asked = [
        (address, rpc.GET_MAX_OFFSET.request(topic=wire, queueId=0, bname=name)) for name, address in masters.items()
    ]
    answers = dict(zip(masters, calls.exchange_each(asked, deadline), strict=True))
    versions = {name: answer.version for name, answer in answers.items() if not isinstance(answer, RocketMQError)}
    found = dict.fromkeys(versions, 0)
    able = [name for name, version in versions.items() if version >= FIRST_WITH_TIMERS]
    configs = [(masters[name], rpc.GET_BROKER_CONFIG.request(bname=name)) for name in able]
    for name, config in zip(able, calls.exchange_each(configs, deadline), strict=True):
        found[name] = _longest_timer(config)
    return found


def consumed(calls: Calls, topic: str, masters: Sequence[str], deadline: Deadline) -> bool:
    """Whether a member of any group that is online at one of ``masters``, addresses, has subscribed to the topic.

    Raises the error of a broker that does not say, where no other one knows of a member.
    """
    wire = calls.on_wire(topic)
    by_broker = calls.exchange_each(
        [(address, rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=wire)) for address in masters], deadline
    )
    answers = [_success(answer, address, topic) for answer, address in zip(by_broker, masters, strict=True)]
    groups = [
        (address, rpc.GET_CONSUMER_CONNECTION_LIST.request(consumerGroup=group))
        for address, answer in zip(masters, answers, strict=True)
        if isinstance(answer, Command)
        for group in bodies.group_list(answer.body)
    ]
    for members in calls.exchange_each(groups, deadline):
        if isinstance(members, RocketMQError) or members.code != Response.SUCCESS:
            continue  # nobody of the group is online
        if wire in bodies.group_filters(members.body):
            return True
    for answer in answers:
        if isinstance(answer, RocketMQError):
            raise answer
    return False


def _longest_timer(config: Command | RocketMQError) -> int:
    """In ms, 0 with timers switched off; RocketMQ's default where the broker does not tell its configuration."""
    told: dict[str, str] = {}
    if isinstance(config, Command) and config.code == Response.SUCCESS:
        told = bodies.read_config(config.body)
    if told.get("timerWheelEnable", "true") != "true":
        return 0
    return 1000 * int(told.get("timerMaxDelaySec", TIMER_MAX_DELAY_S))


def _success(answer: Command | RocketMQError, address: str, topic: str) -> Command | RocketMQError:
    if isinstance(answer, RocketMQError) or answer.code == Response.SUCCESS:
        return answer
    return refused(answer, address, topic)

"""The commands ``topic``, and which queues are read in order.

Made-up orders for the demo and for ``produce --rate``, and the rhythm in which they are sent.

``rocketmq-spark topic``: administration of topics. The cluster must permit it.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import Target, connected, pairs
from rocketmq_spark.cli.output import Output, moment
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import Message

if TYPE_CHECKING:
    from rocketmq_spark.model import QueueData, TopicRoute

REGIONS = ("africa", "america", "asia", "europe", "oceania")
_CHANNELS = ("app", "shop", "web")
# Sending in small groups costs little; waking up for every message would not.
_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """An order as it travels: a JSON body, tags with the channel, its id as key."""

    order_id: str
    region: str
    cents: int
    channel: str
    at_s: float

    def message(self, topic: str) -> Message:
        # A double prints the shortest text that reads back as itself, so two decimals stay exact.
        moment = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = {"order_id": self.order_id, "region": self.region, "amount": self.cents / 100, "ts": moment}
        return Message(topic, json.dumps(body).encode(), tags=self.channel, keys=[self.order_id])


class Orders:
    """An endless supply. Times never go back, even when the clock of the machine does."""

    def __init__(self, prefix: str = "o", rng: random.Random | None = None) -> None:
        self._prefix = prefix
        self._rng = rng or random.Random()
        self._number = 0
        self._ahead_s = time.time() - time.monotonic()

    def next(self) -> Order:
        self._number += 1
        rng = self._rng
        cents = rng.randrange(100, 50_000)
        return Order(
            f"{self._prefix}-{self._number}",
            rng.choice(REGIONS),
            cents,
            rng.choice(_CHANNELS),
            self._ahead_s + time.monotonic(),
        )


def parse_rate(text: str) -> float:
    """``100``, ``100/s`` or ``30/m`` as messages per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|m))?", text.strip())
    rate = float(match[1]) / (60 if match[2] == "m" else 1) if match else 0.0
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate such as 100/s or 30/m")
    return rate


def paced(per_second: float, count: int | None, stop: threading.Event) -> Iterator[int]:
    """How many to send now, again and again, until ``count`` is reached or ``stop`` is set.

    A sender that was held up catches up: the rate holds over the whole time.
    """
    begin = time.monotonic()
    sent = 0
    while not stop.is_set() and (count is None or sent < count):
        due = int((time.monotonic() - begin) * per_second) + 1
        due = due if count is None else min(due, count)
        if due > sent:
            yield due - sent
            sent = due
        else:
            stop.wait(max(_TICK_S, begin + sent / per_second - time.monotonic()))


@click.group(cls=CliGroup)
def topic() -> None:
    """Create, list, describe, widen, shrink and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues on each broker.")
@click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all).")
@click.option("--attribute", multiple=True, callback=pairs, metavar="NAME=VALUE", help="Such as message.type=FIFO.")
@click.option(
    "--batch", is_flag=True, help="A batch topic: it stores batches whole, which is quicker (docs/batch-topics.md)."
)
@connected
@click.pass_obj
def create(output: Output, /, target: Target, name: str, queues: int, brokers: tuple[str, ...], **kind: Any) -> None:
    """Create a topic where it is not yet."""
    from rocketmq_spark.client.admin import batch_attributes, shown_queues

    admin = target.client().admin
    attributes = batch_attributes(kind["attribute"]) if kind["batch"] else kind["attribute"]
    if there := admin.queues_of(name, brokers or None):
        raise OptionError(
            f"topic {name} is there: it has {shown_queues(there)}",
            remedy=f"To change that: rocketmq-spark topic widen {name} --queues N, or topic shrink; to create it on another "
            "broker, name that with --broker",
        )
    _show(output, admin.create_topic(name, queues, brokers or None, attributes=attributes))


def _show(output: Output, route: TopicRoute, hidden: int | None = None) -> None:
    """How many queues the topic has now, and how many messages went out of sight."""
    where = sorted(data.broker_name for data in route.queues)
    total = sum(data.write_queues for data in route.queues)
    text = f"Topic {route.topic} has {total} queues on {', '.join(where)}"
    told = {"topic": route.topic, "brokers": where, "queues": total}
    if hidden is not None:
        text, told = f"{text}; {hidden} messages are out of sight", {**told, "outOfSight": hidden}
    output.item(told, text)


def _resized(function: Callable[..., None]) -> Callable[..., None]:
    """What commands take that change the number of queues."""
    for add in (
        click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all)."),
        click.option("--queues", type=click.IntRange(1), required=True, help="Queues on each broker from now on."),
        click.argument("name"),
    ):
        function = add(function)
    return function


@topic.command()
@_resized
@connected
@click.pass_obj
def widen(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...]) -> None:
    """Give a topic more queues.

    Messages stay where they are. Keys that choose their queue choose among all of them from then on.
    """
    there = _there(target, name, brokers)
    if any(max(data.read_queues, data.write_queues) > queues for data in there.values()):
        raise _wrong_way(name, queues, there, "shrink")
    _show(output, target.client().admin.resize_topic(name, queues, list(there)))


@topic.command()
@_resized
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
@click.pass_obj
def shrink(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...], yes: bool) -> None:
    """Take queues away from a topic: those with the highest numbers.

    Nobody reads what lies in them until the topic has them again. How many messages that are is said before.
    """
    there = _there(target, name, brokers)
    if any(min(data.read_queues, data.write_queues) < queues for data in there.values()):
        raise _wrong_way(name, queues, there, "widen")
    admin = target.client().admin
    gone = {q: b for q, b in admin.describe_topic(name).items() if q.broker_name in there and q.queue_id >= queues}
    hidden = sum(bounds.max_offset - bounds.min_offset for bounds in gone.values())
    _confirm(f"Take {len(gone)} queues away from topic {name}: {hidden} messages go out of sight", yes)
    _show(output, admin.resize_topic(name, queues, list(there)), hidden)


def _there(target: Target, name: str, brokers: tuple[str, ...]) -> dict[str, QueueData]:
    """What a topic has on the brokers that are named. Raises an error where it is not."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    there = admin.queues_of(name, brokers or None)
    if missing := sorted(set(brokers) - there.keys()):
        raise OptionError(
            f"topic {name} is not on {', '.join(missing)}",
            remedy=f"Create it there: rocketmq-spark topic create {name} --broker {missing[0]}",
        )
    return there


def _wrong_way(name: str, queues: int, there: dict[str, QueueData], other: str) -> OptionError:
    from rocketmq_spark.client.admin import shown_queues

    more = "fewer than" if other == "shrink" else "more than"
    return OptionError(
        f"--queues is {queues}, {more} topic {name} has: {shown_queues(there)}",
        remedy=f"That is for: rocketmq-spark topic {other}",
    )


def _confirm(what: str, yes: bool) -> None:
    """Go on if the user says so, by ``--yes`` or on a terminal."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"{what}. There is no terminal to ask on: give --yes")
        click.confirm(f"{what}?", abort=True, err=True)


@topic.command("list")
@click.option("--all", "everything", is_flag=True, help="RocketMQ's own topics, too.")
@connected
@click.pass_obj
def list_topics(output: Output, target: Target, everything: bool) -> None:
    """The topics of a cluster, one a line."""
    from rocketmq_spark.wire.names import is_user_topic

    admin = target.client().admin
    cluster = admin.cluster()
    own = {*cluster, *(data.cluster for data in cluster.values())}
    names = [name for name in admin.topics() if everything or is_user_topic(name, own)]
    for name in names:
        output.item({"topic": name}, name)
    if not names:
        output.note("There are no topics. Create one with: rocketmq-spark topic create NAME")


@topic.command()
@click.argument("name")
@connected
@click.pass_obj
def describe(output: Output, target: Target, name: str) -> None:
    """Offsets and age of each queue of a topic."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    bounds = admin.describe_topic(name)
    rows = [
        {
            "topic": name,
            "brokerName": queue.broker_name,
            "queueId": queue.queue_id,
            "minOffset": b.min_offset,
            "maxOffset": b.max_offset,
            "messages": b.max_offset - b.min_offset,
            "lastUpdate": moment(b.last_update_ms),
        }
        for queue, b in bounds.items()
    ]
    headings = {
        "brokerName": "BROKER",
        "queueId": "QUEUE",
        "minOffset": "FIRST",
        "maxOffset": "END",
        "messages": "MESSAGES",
        "lastUpdate": "LAST MESSAGE",
    }
    output.rows(headings, rows)
    total = sum(b.max_offset - b.min_offset for b in bounds.values())
    output.note(f"{total} messages in {len(rows)} queues")


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
@click.pass_obj
def delete(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete a topic with all its messages."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    _confirm(f"Delete topic {name} with all its messages", yes)
    admin.delete_topic(name)
    output.item({"topic": name, "deleted": True}, f"Topic {name} is deleted")

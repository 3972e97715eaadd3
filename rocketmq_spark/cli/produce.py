"""``rocketmq-spark produce``: lines of a file or of standard input as messages, or orders at a rate."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import IO, TYPE_CHECKING

import click

from rocketmq_spark.cli.command import SendingCommand, on_ctrl_c
from rocketmq_spark.cli.connection import Target, connected, pairs
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.model import Message, SendResult
    from rocketmq_spark.producer.producer import BaseProducer

# Sends without an answer yet; more would only wait in memory.
_UNDER_WAY = 1000


def _rate(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    from rocketmq_spark.cli.topic import parse_rate

    try:
        return parse_rate(value) if value is not None else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


@click.command(cls=SendingCommand)
@click.argument("topic")
@click.option("--file", "file", type=click.File("rb"), help="Read lines from this file [default: standard input].")
@click.option("--tags", help="Tags of every message.")
@click.option("--key", "keys", multiple=True, help="A key of every message (may be repeated).")
@click.option("--property", "properties", multiple=True, callback=pairs, metavar="NAME=VALUE", help="A property.")
@click.option("--rate", callback=_rate, metavar="N/s", help="Send made-up orders at this rate instead of lines.")
@click.option("--count", type=click.IntRange(1), help="Stop after so many messages.")
@connected
@click.pass_obj
def produce(
    output: Output,
    target: Target,
    topic: str,
    file: IO[bytes] | None,
    tags: str | None,
    keys: tuple[str, ...],
    properties: dict[str, str],
    rate: float | None,
    count: int | None,
) -> None:
    """Send messages to TOPIC: one for each line that is not empty, or orders at --rate until --count or Ctrl-C."""
    from dataclasses import replace

    from rocketmq_spark.model import Message

    if rate is not None and file is not None:
        raise click.UsageError("--rate makes up its messages: leave --file out")
    _check_topic(target, topic)
    report = _Report(output, topic)
    with target.producer() as producer:
        if rate is None:
            lines = (Message(topic, line, tags, keys, properties) for line in _lines(file, output))
            _send(producer, islice(lines, count), report)
            return
        stop = threading.Event()
        orders = (
            replace(order, tags=tags or order.tags, keys=keys or order.keys, properties=properties)
            for order in _orders(topic, rate, count, stop)
        )
        with on_ctrl_c(stop.set):
            _send(producer, orders, report)
    if stop.is_set():
        raise KeyboardInterrupt


def _lines(file: IO[bytes] | None, output: Output) -> Iterator[bytes]:
    """Brokers refuse empty messages, so empty lines are left out."""
    if file is None and sys.stdin.isatty():
        output.note("One message a line; Ctrl-D ends")
    for line in file or sys.stdin.buffer:
        text = line.rstrip(b"\r\n")
        if text:
            yield text


def _orders(topic: str, rate: float, count: int | None, stop: threading.Event) -> Iterator[Message]:
    from rocketmq_spark.cli.topic import Orders, paced

    supply = Orders()
    for due in paced(rate, count, stop):
        for _ in range(due):
            yield supply.next().message(topic)


def _check_topic(target: Target, topic: str) -> None:
    """A misspelt name is told with the nearest ones. Brokers that create topics on demand would make it a topic."""
    from rocketmq_spark.errors import RouteNotFound

    routes = target.client().routes
    try:
        routes.get(topic)
    except RouteNotFound as e:
        raise routes.missing_topic(e) from e


class _Report:
    """Counts what was acknowledged; one object for each message, or one line for all."""

    def __init__(self, output: Output, topic: str) -> None:
        self._output = output
        self._topic = topic
        self._begin = time.monotonic()
        self.sent = self.spooled = 0

    def acknowledged(self, result: SendResult) -> None:
        self.sent += 1
        self.spooled += result.status.name == "SPOOLED"
        if self._output.machine:
            queue = result.queue
            place = {
                "brokerName": queue.broker_name if queue is not None else None,
                "queueId": queue.queue_id if queue is not None else None,
                "queueOffset": result.queue_offset,
                "status": result.status.name,
            }
            self._output.item({"topic": self._topic, "msgId": result.msg_id, **place}, "")

    def end(self, interrupted: bool = False) -> None:
        took = time.monotonic() - self._begin
        text = f"Sent {self.sent} messages to {self._topic} in {took:.1f} s"
        if self.spooled:
            text += f", {self.spooled} of them to the spool"
        if not self._output.machine and not interrupted:
            self._output.item({}, text)
        elif interrupted:
            self._output.note(text)


def _send(producer: BaseProducer, messages: Iterable[Message], report: _Report) -> None:
    """In order, many under way. What was acknowledged before a failure or Ctrl-C is said in any case."""
    under_way: deque[Future[SendResult]] = deque()

    def settle(max_under_way: int) -> None:
        while under_way and (under_way[0].done() or len(under_way) > max_under_way):
            result = under_way[0].result()  # stays in line until it is there: Ctrl-C may come meanwhile
            under_way.popleft()
            report.acknowledged(result)

    try:
        for message in messages:
            under_way.append(producer.send_async(message))
            settle(_UNDER_WAY)
        settle(0)
    except BaseException:
        # The first failure is the one that is told; of the others under way, some arrive all the same.
        for future in under_way:
            if future.exception() is None:
                report.acknowledged(future.result())
        report.end(interrupted=True)
        raise
    report.end()

"""``rocketmq-spark produce``: sends lines of a file or of standard input, or generated orders at a given rate."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import IO, TYPE_CHECKING

import click

from rocketmq_spark.base.process import on_signals
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.command import SendingCommand
from rocketmq_spark.cli.connection import Target, parse_pairs, with_connection_options
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import Message

if TYPE_CHECKING:
    from rocketmq_spark.model import SendResult
    from rocketmq_spark.producer.producer import BaseProducer

REGIONS = ("africa", "america", "asia", "europe", "oceania")
_CHANNELS = ("app", "shop", "web")
# The shortest pause between groups of messages. Waking up for each message would cost more CPU.
_MIN_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """A generated order. Its message has a JSON body, the channel as tags, and the id as key."""

    order_id: str
    region: str
    cents: int
    channel: str
    time_s: float

    def message(self, topic: str) -> Message:
        # A float prints as the shortest text that is parsed as the same float, so amounts with two decimals stay exact.
        time_text = datetime.fromtimestamp(self.time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = {"order_id": self.order_id, "region": self.region, "amount": self.cents / 100, "ts": time_text}
        return Message(topic, json.dumps(body).encode(), tags=self.channel, keys=[self.order_id])


class Orders:
    """Generates orders without end. Their times never go back, even if the system clock does."""

    def __init__(self, prefix: str = "o", rng: random.Random | None = None) -> None:
        self._prefix = prefix
        self._rng = rng or random.Random()
        self._order_number = 0
        self._clock_offset_s = time.time() - time.monotonic()

    def next(self) -> Order:
        self._order_number += 1
        rng = self._rng
        cents = rng.randrange(100, 50_000)
        return Order(
            f"{self._prefix}-{self._order_number}",
            rng.choice(REGIONS),
            cents,
            rng.choice(_CHANNELS),
            self._clock_offset_s + time.monotonic(),
        )


def parse_rate(text: str) -> float:
    """Parse ``100``, ``100/s`` or ``30/m``. Returns messages per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|m))?", text.strip())
    rate = float(match[1]) / (60 if match[2] == "m" else 1) if match else 0.0
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate such as 100/s or 30/m")
    return rate


def due_counts(per_second: float, count: int | None, stop_latch: Latch) -> Iterator[int]:
    """Yield how many messages are due now, until ``count`` is reached or ``stop_latch`` is set.

    The rate is an average over the whole time, so more messages are due after a delay.
    """
    started_s = time.monotonic()
    sent_count = 0
    while not stop_latch.is_set() and (count is None or sent_count < count):
        due_count = int((time.monotonic() - started_s) * per_second) + 1
        due_count = due_count if count is None else min(due_count, count)
        if due_count > sent_count:
            yield due_count - sent_count
            sent_count = due_count
        else:
            stop_latch.wait(max(_MIN_PAUSE_S, started_s + sent_count / per_second - time.monotonic()))


# The maximum number of sends that wait for an answer. More sends would only use memory.
_MAX_UNACKNOWLEDGED = 1000


def _parse_rate(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:

    try:
        return parse_rate(value) if value is not None else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def rate_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option ``--rate``, whose value is in messages per second."""
    return click.option("--rate", callback=_parse_rate, metavar="N/s", help=help)


@click.command(cls=SendingCommand)
@click.argument("topic")
@click.option("--file", "file", type=click.File("rb"), help="Read lines from this file [default: standard input].")
@click.option("--tags", help="Tag of every message.")
@click.option("--key", "keys", multiple=True, help="A key of every message (may be repeated).")
@click.option(
    "--property",
    "properties",
    multiple=True,
    callback=parse_pairs,
    metavar="NAME=VALUE",
    help="A property of every message (may be repeated).",
)
@rate_option("Send generated orders at this rate instead of lines.")
@click.option("--count", type=IntRange(1), help="Stop after this many messages.")
@with_connection_options
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
    """Send messages to TOPIC: one for each line that is not empty.

    With --rate, send generated orders instead, until --count or Ctrl-C.
    """
    from dataclasses import replace

    from rocketmq_spark.model import Message

    if rate is not None and file is not None:
        raise click.UsageError("--rate generates its messages: omit --file")
    if rate is None and file is None and sys.stdin is None:
        raise OptionError("standard input is closed", remedy="Write lines to it, or use --file")
    _check_topic(target, topic)
    report = SendReport(output, topic)
    with target.producer() as producer:
        if rate is None:
            line_messages = (Message(topic, line, tags, keys, properties) for line in _read_lines(file, output))
            _send_all(producer, islice(line_messages, count), report)
            if not report.sent_count:
                output.note("There were no lines to send. To send generated orders: --rate 100/s")
            return
        stop_latch = Latch()
        order_messages = (
            replace(order, tags=tags or order.tags, keys=keys or order.keys, properties=properties)
            for order in _orders(topic, rate, count, stop_latch)
        )
        with on_signals(stop_latch.set, signal.SIGINT):
            _send_all(producer, order_messages, report)
    if stop_latch.is_set():
        raise KeyboardInterrupt


def _read_lines(file: IO[bytes] | None, output: Output) -> Iterator[bytes]:
    """Yield the lines without line breaks. Empty lines are skipped, because brokers reject empty messages."""
    if file is None and sys.stdin.isatty():
        output.note("One message a line; Ctrl-D ends")
    for line in file or sys.stdin.buffer:
        body = line.rstrip(b"\r\n")
        if body:
            yield body


def _orders(topic: str, rate: float, count: int | None, stop_latch: Latch) -> Iterator[Message]:

    orders = Orders()
    for due_count in due_counts(rate, count, stop_latch):
        for _ in range(due_count):
            if stop_latch.is_set():  # if the rate is too high, the number of due messages grows without limit
                return
            yield orders.next().message(topic)


def _check_topic(target: Target, topic: str) -> None:
    """Check that the topic exists, because brokers might create a missing topic. For a missing topic, the error suggests similar
    names.
    """
    from rocketmq_spark.errors import RouteNotFound
    from rocketmq_spark.wire.names import topic_problem

    routes = target.client().routes
    if problem := topic_problem(topic, routes.scope):
        raise OptionError(problem)
    try:
        routes.get(topic)
    except RouteNotFound as e:
        raise routes.with_similar_topics(e) from e


class SendReport:
    """Counts acknowledged messages, and prints one object for each message, or one line for all."""

    def __init__(self, output: Output, topic: str) -> None:
        self._output = output
        self._topic = topic
        self._started_s = time.monotonic()
        self.sent_count = self.spooled_count = 0

    def add_acknowledged(self, result: SendResult) -> None:
        self.sent_count += 1
        self.spooled_count += result.status.name == "SPOOLED"
        if self._output.is_for_programs:
            queue = result.queue
            place_fields = {
                "brokerName": queue.broker_name if queue is not None else None,
                "queueId": queue.queue_id if queue is not None else None,
                "queueOffset": result.queue_offset,
                "status": result.status.name,
            }
            self._output.item({"topic": self._topic, "msgId": result.msg_id, **place_fields}, "")

    def warn_of_failure(self, number: int) -> None:
        self._output.warning(f"Message {number} failed (empty lines do not count)")

    def end(self, is_interrupted: bool = False) -> None:
        elapsed_s = time.monotonic() - self._started_s
        text = f"Sent {self.sent_count} messages to {self._topic} in {elapsed_s:.1f} s"
        if self.spooled_count:
            text += f", {self.spooled_count} of them to the spool"
        if not self._output.is_for_programs and not is_interrupted:
            self._output.item({}, text)
        elif is_interrupted:
            self._output.note(text)


def _send_all(producer: BaseProducer, messages: Iterable[Message], report: SendReport) -> None:
    """Send in order, with many unacknowledged sends at a time. After a failure or Ctrl-C, the acknowledged messages are reported,
    too.
    """
    unacknowledged_sends: deque[Future[SendResult]] = deque()

    def report_finished(max_unacknowledged: int) -> None:
        while unacknowledged_sends and (
            unacknowledged_sends[0].done() or len(unacknowledged_sends) > max_unacknowledged
        ):
            # Ctrl-C may interrupt ``result()``. The future is removed afterwards, so that its message is still reported.
            result = unacknowledged_sends[0].result()
            unacknowledged_sends.popleft()
            report.add_acknowledged(result)

    try:
        for message in messages:
            unacknowledged_sends.append(producer.send_async(message))
            report_finished(_MAX_UNACKNOWLEDGED)
        report_finished(0)
    except BaseException as e:
        if isinstance(e, RocketMQError):
            has_first_failed = (
                unacknowledged_sends
                and unacknowledged_sends[0].done()
                and unacknowledged_sends[0].exception() is not None
            )
            number = report.sent_count + 1 + (0 if has_first_failed else len(unacknowledged_sends))
            report.warn_of_failure(number)
        # The first failure is raised. Some of the other sends still succeed.
        for future in unacknowledged_sends:
            if future.exception() is None:
                report.add_acknowledged(future.result())
        report.end(is_interrupted=True)
        raise
    report.end()

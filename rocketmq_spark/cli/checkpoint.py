"""``rocketmq-spark checkpoint``: what Spark's folder of a query says, what brokers have now, and back to an earlier batch."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import TIMES, CliGroup, time_option, with_yes
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output, moment
from rocketmq_spark.errors import AccessDenied, NotSupported, OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model.admin import GROUP

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, OffsetRange
    from rocketmq_spark.session import Client
    from rocketmq_spark.spark.checkpoints.files import Folder
    from rocketmq_spark.spark.checkpoints.offset_log import BatchRead, LoggedBatch
    from rocketmq_spark.spark.checkpoints.rewind import Drift, RewindPlan

_BATCHES = {"batchId": "BATCH", "begun": "BEGUN", "done": "DONE", "offsets": "OFFSETS", "queues": "QUEUES"}
_RANGES = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "start": "FROM",
    "end": "TO",
    "offsets": "OFFSETS",
}
_DRIFT = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "position": "NEXT",
    "minOffset": "FIRST",
    "maxOffset": "END",
    "state": "STATE",
    "offsets": "OFFSETS",
}
_UNSEEN = (
    "This command cannot see: whether the query runs, because an idle one writes nothing (stop it first); what these batches "
    "wrote, which stays and is written again; sinks that keep batch numbers (files with _spark_metadata, Delta with txnVersion), "
    "which skip the ones they had; whether brokers still have the messages (rocketmq-spark checkpoint diff)."
)


@click.group(cls=CliGroup)
def checkpoint() -> None:
    """Inspect and rewind the checkpointLocation of a query.

    FOLDER is a path, or a URI that pyarrow supports: s3://, gs://, hdfs://, abfs://.
    """


@checkpoint.command()
@click.argument("folder")
@click.option("--last", type=IntRange(1), default=10, show_default=True, help="Number of batches to show.")
@click.option(
    "--batch",
    "number",
    type=IntRange(0),
    help="Show only this batch, queue by queue, and how to see its messages.",
)
@click.pass_obj
def show(output: Output, folder: str, last: int, number: int | None) -> None:
    """Show what each batch read, and what the query reads next.

    A batch without DONE was started but not finished: the query reads the same ranges again when it starts. --json prints one
    object per batch, with its ranges.
    """
    from rocketmq_spark.spark.checkpoints.files import open_folder as opened
    from rocketmq_spark.spark.checkpoints.offset_log import history

    found = history(opened(folder))
    if not found:
        raise OffsetError(f"{folder} has no batch yet", remedy="Wait for the first one")
    shown = [read for read in found if read.batch.number == number] if number is not None else found[-last:]
    if not shown:
        first, newest = found[0].batch.number, found[-1].batch.number
        raise OffsetError(f"batch {number} is not kept in {folder}", remedy=f"Batches {first} to {newest} are")
    if number is not None and not output.machine:
        output.rows(_RANGES, map(_range, shown[0].ranges))
        for command in _tails(shown[0].ranges):
            output.note(f"Its messages: {command}")
    else:
        output.rows(_BATCHES, [_batch(read, output.machine) for read in shown])
    for read in shown:
        if read.unknown:
            output.note(f"Batch {read.batch.number}: its start is not kept any more for {len(read.unknown)} queues")
    output.note(_next(found[-1]))


def _batch(read: BatchRead, machine: bool) -> dict[str, object]:
    row = {
        "batchId": read.batch.number,
        "begun": moment(read.batch.planned_ms),
        "done": moment(read.done_ms),
        "offsets": read.size,
    }
    if not machine:
        return {**row, "queues": len({part.queue for part in read.ranges})}
    return {**row, "ranges": list(map(_range, read.ranges)), "unknownQueues": len(read.unknown)}


def _tails(ranges: Sequence[OffsetRange]) -> Iterator[str]:
    """The commands that show the messages of a batch, topic by topic."""
    from rocketmq_spark.spark.source.offsets import Offsets

    for topic in sorted({part.queue.topic for part in ranges if part.size}):
        mine = [part for part in ranges if part.queue.topic == topic and part.size]
        begin = Offsets({part.queue: part.start for part in mine}).to_json()["topics"]
        end = Offsets({part.queue: part.end for part in mine}).to_json()["topics"]
        yield shlex.join(["rocketmq-spark", "tail", topic, "--from", json.dumps(begin), "--to", json.dumps(end)])


def _range(part: OffsetRange) -> dict[str, object]:
    return {**_queue(part.queue), "start": part.start, "end": part.end, "offsets": part.size}


def _queue(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _next(last: BatchRead) -> str:
    number = last.batch.number
    if last.done_ms is None:
        return (
            f"Next: batch {number} again as it was begun, {last.size if last.size is not None else 'unknown'} offsets"
        )
    topics = sorted({queue.topic for queue in last.batch.positions})
    return f"Next: batch {number + 1}, from where batch {number} ended in {', '.join(topics) or 'no topic of RocketMQ'}"


@checkpoint.command()
@click.argument("folder")
@connected
@click.pass_obj
@click.pass_context
def diff(ctx: click.Context, output: Output, target: Target, folder: str) -> None:
    """Compare the positions of a query with what the brokers have now.

    Each queue has one of these states.

    No problem: read (nothing new), behind, and new (the query will read the queue from its beginning).

    Data loss: lost (messages were deleted before the query read them), made again (it is certain that the topic was deleted and
    created again), went back (the queue ends before the query's position, for that reason or because the broker lost messages),
    and gone (the topic or the queue does not exist).

    No loss, but not readable now: not registered (the broker is down) and unknown (the broker does not answer).

    The exit code is 1 if any queue has lost data or is not readable now.
    """
    from rocketmq_spark.cli.query import clusters, left_out
    from rocketmq_spark.spark.checkpoints.files import open_folder as opened
    from rocketmq_spark.spark.checkpoints.offset_log import last_batch

    batch = last_batch(opened(folder))
    if batch is None:
        raise OffsetError(f"{folder} has no finished batch yet", remedy="Wait for the first one")
    if not batch.sources:
        raise OffsetError(f"batch {batch.number} in {folder} reads no RocketMQ topic", remedy="Name another query's")
    client = target.within(batch.source_identities).client()
    batch, elsewhere = batch.of_clusters(clusters(client))
    found, errors = differences(client, batch)
    if elsewhere:
        errors.append(left_out(elsewhere))
    output.rows(_DRIFT, map(_drifted, found))
    bad = [one for one in found if not one.state.is_lossless]
    for line in errors:
        output.note(line)
    waiting = [one.queue.broker_name for one in bad if one.state.is_unavailable]
    if lost := len(bad) - len(waiting):
        output.note(
            f"{lost} of {len(found)} queues have lost what was to be read next. With failOnDataLoss=warn the query continues at "
            "the first message that is kept, and reads a topic that was created again from its start"
        )
    if waiting:
        names = ", ".join(sorted(set(waiting)))
        output.note(
            f"{len(waiting)} of {len(found)} queues wait for {names}: start it on its data, and nothing of them is lost"
        )
    if not bad:
        output.note("Nothing is lost")
    ctx.exit(1 if bad else 0)


def differences(client: Client, batch: LoggedBatch) -> tuple[list[Drift], list[str]]:
    """Compare the queues that the query reads next with the brokers. Returns a ``Drift`` for each queue, and errors as texts."""
    from rocketmq_spark.admin import deadline, with_kept_minimums
    from rocketmq_spark.cli.query import unplanned
    from rocketmq_spark.spark.checkpoints.rewind import drift
    from rocketmq_spark.spark.source.recreated_topics import RecreationWatch, topic_broker

    away: set[str] = set()
    errors: list[str] = []

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        away.add(queue.broker_name)
        errors.append(str(error))

    new, failed = unplanned(client, batch)
    errors += map(str, failed)
    positions: dict[MessageQueue, int | None] = {**batch.positions, **dict.fromkeys(new)}
    missing_topics = {error.topic for error in failed if isinstance(error, RouteNotFound)}
    queues = {queue for queue in positions if queue.topic not in missing_topics}
    bounds = with_kept_minimums(client, client.brokers.bounds(queues, deadline(client), note), positions, note)
    recreated: list[MessageQueue] = []
    for offsets in batch.sources.values():
        found = RecreationWatch(lambda: client.brokers, GROUP).check(offsets, bounds, deadline(client))
        recreated += found.recreated
        for one, error in found.unanswered.items():
            away.add(one[1])
            errors.append(str(error))
            bounds = {queue: of for queue, of in bounds.items() if topic_broker(queue) != one}
    # A new queue may be in the route only: if its broker answers and does not have the queue, the query reads no such queue.
    existing = {q: at for q, at in positions.items() if q not in new or q in bounds or q.broker_name in away}
    return drift(existing, bounds, recreated, away, _unregistered(client, batch)), errors


def _unregistered(client: Client, batch: LoggedBatch) -> set[str]:
    """Return the brokers of a batch that are not registered at a name server now. Through a Proxy this is unknown."""
    try:
        return {queue.broker_name for queue in batch.positions} - client.routes.cluster().keys()
    except (AccessDenied, NotSupported):
        return set()


def _drifted(one: Drift) -> dict[str, object]:
    return {
        **_queue(one.queue),
        "position": one.position,
        "minOffset": one.bounds.min_offset if one.bounds else None,
        "maxOffset": one.bounds.max_offset if one.bounds else None,
        "state": one.state.value,
        "offsets": one.offsets,
    }


def _duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    from rocketmq_spark.options.parsing import duration

    try:
        return duration(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


@checkpoint.command()
@click.argument("folder")
@click.option("--to-batch", "number", type=IntRange(0), metavar="N", help="Rewind to the end of batch N.")
@time_option("--to-time", "time_ms", help="Rewind to the end of the last batch that began at or before this time: everything "
             f"stored since is read again, and perhaps messages stored before. {TIMES}.")  # fmt: skip
@with_yes
@click.option("--quiet-for", "quiet_s", callback=_duration, default="60s", show_default=True, metavar="DURATION",
              help="Fail if anything in FOLDER changed within this time.")  # fmt: skip
@click.option("--force", is_flag=True, help="Rewind even if FOLDER changed recently.")
@click.pass_obj
def rewind(
    output: Output, /, folder: str, number: int | None, time_ms: int | None, really: bool, **when: float
) -> None:
    """Rewind a stopped query to the end of an earlier batch: give --to-batch or --to-time.

    The query reads the messages after that batch again. The command removes the files of later batches, after it has
    copied them to a backup beside FOLDER. Nothing is sent to brokers.
    """
    from rocketmq_spark.spark.checkpoints import rewind as back
    from rocketmq_spark.spark.checkpoints.files import open_folder as opened
    from rocketmq_spark.spark.checkpoints.offset_log import history

    if (number is None) == (time_ms is None):
        raise click.UsageError("rewind needs either --to-batch N or --to-time TIME")
    found = opened(folder)
    with found.as_owner():
        reads = history(found)
        planned = back.plan_rewind(found, reads, back.choose_batch(reads, number, time_ms))
        if really and planned.removed and not when["force"]:
            _refuse_restless(found, when["quiet_s"])
    lines = list(_will_be_read(planned))
    if not planned.removed:
        output.item(
            {"rewound": False, "batchId": planned.batch.number},
            f"Batch {planned.batch.number} is the last: nothing to do",
        )
        return
    backup = None
    if really:
        backup = back.execute(found, planned, datetime.now(UTC)).name
        lines.append(f"Done. To undo it, {found.advice_to_owner(f'copy the files of {backup} back into {folder}')}")
    else:
        lines.append("Nothing was changed: use --yes to apply")
    ranges = list(map(_range, planned.ranges))
    row = {
        "rewound": really,
        "batchId": planned.batch.number,
        "again": planned.rolled_back,
        "ranges": ranges,
        "backup": backup,
    }
    output.item(row, *lines)
    output.note(_UNSEEN)


def _will_be_read(planned: RewindPlan) -> Iterator[str]:
    """The exact words."""
    if planned.rolled_back:
        batches = (
            f"batch {planned.rolled_back[0]}"
            if len(planned.rolled_back) == 1
            else f"batches {planned.rolled_back[0]} to {planned.rolled_back[-1]}"
        )
        count = sum(part.size for part in planned.ranges)
        yield f"What {batches} read is read again, {count} offsets, in new batches from number {planned.batch.number + 1} on:"
    for part in planned.ranges:
        yield f"  {part.queue}  from {part.start}, before {part.end}  ({part.size})"  # the end as in 'show' and 'lag'


def _refuse_restless(folder: Folder, quiet_s: float) -> None:
    from rocketmq_spark.spark.checkpoints.rewind import changed_ms

    changed = changed_ms(folder)
    if changed is None:
        raise OffsetError(
            f"{folder.name}: its file system does not say when files changed", remedy="Stop the query, and use --force"
        )
    age_s = time.time() - changed / 1000
    if age_s < quiet_s:
        raise OffsetError(
            f"{folder.name} changed {max(0.0, age_s):.0f} s ago, and the query may still run",
            remedy=f"Stop it, wait until {quiet_s:g} s have passed (--quiet-for), or use --force",
        )

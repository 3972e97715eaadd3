"""``rocketmq-spark checkpoint``: shows the checkpoint of a query, compares it with the brokers, and rewinds it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import TIMES, CliGroup, time_option, with_yes
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output, time_text
from rocketmq_spark.errors import AccessDenied, NotSupported, OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model.admin import GROUP

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, OffsetRange
    from rocketmq_spark.session import Client
    from rocketmq_spark.spark.checkpoints.files import Folder
    from rocketmq_spark.spark.checkpoints.offset_log import BatchRead, LoggedBatch
    from rocketmq_spark.spark.checkpoints.rewind import Drift, RewindPlan

_BATCH_COLUMNS = {"batchId": "BATCH", "begun": "BEGUN", "done": "DONE", "offsets": "OFFSETS", "queues": "QUEUES"}
_RANGE_COLUMNS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "start": "FROM",
    "end": "TO",
    "offsets": "OFFSETS",
}
_DRIFT_COLUMNS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "position": "NEXT",
    "minOffset": "FIRST",
    "maxOffset": "END",
    "state": "STATE",
    "offsets": "OFFSETS",
}
_REWIND_LIMITS = (
    "This command cannot see: whether the query runs, because an idle query writes nothing (stop it first); the output of "
    "these batches, which stays and is written again; sinks that record batch numbers (files with _spark_metadata, Delta with "
    "txnVersion) and skip batches that they have; whether brokers still have the messages (rocketmq-spark checkpoint diff)."
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
    from rocketmq_spark.spark.checkpoints.files import open_folder
    from rocketmq_spark.spark.checkpoints.offset_log import history

    batch_reads = history(open_folder(folder))
    if not batch_reads:
        raise OffsetError(f"{folder} has no batch yet", remedy="Wait for the first batch")
    shown_reads = (
        [batch_read for batch_read in batch_reads if batch_read.batch.number == number]
        if number is not None
        else batch_reads[-last:]
    )
    if not shown_reads:
        first_number, last_number = batch_reads[0].batch.number, batch_reads[-1].batch.number
        raise OffsetError(
            f"batch {number} is not kept in {folder}", remedy=f"Name a batch from {first_number} to {last_number}"
        )
    if number is not None and not output.is_for_programs:
        output.rows(_RANGE_COLUMNS, map(_range_row, shown_reads[0].ranges))
        for command in _tail_commands(shown_reads[0].ranges):
            output.note(f"Its messages: {command}")
    else:
        output.rows(_BATCH_COLUMNS, [_batch_row(batch_read, output.is_for_programs) for batch_read in shown_reads])
    for batch_read in shown_reads:
        if batch_read.queues_without_start:
            output.note(
                f"Batch {batch_read.batch.number}: the checkpoint no longer has the start offsets of "
                f"{len(batch_read.queues_without_start)} queues"
            )
    output.note(_next_batch_text(batch_reads[-1]))


def _batch_row(batch_read: BatchRead, for_programs: bool) -> dict[str, object]:
    row = {
        "batchId": batch_read.batch.number,
        "begun": time_text(batch_read.batch.planned_ms),
        "done": time_text(batch_read.done_ms),
        "offsets": batch_read.size,
    }
    if not for_programs:
        return {**row, "queues": len({offset_range.queue for offset_range in batch_read.ranges})}
    return {
        **row,
        "ranges": list(map(_range_row, batch_read.ranges)),
        "unknownQueues": len(batch_read.queues_without_start),
    }


def _tail_commands(ranges: Sequence[OffsetRange]) -> Iterator[str]:
    """The commands that show the messages of a batch, one for each topic."""
    from rocketmq_spark.spark.source.offsets import Offsets

    for topic in sorted({offset_range.queue.topic for offset_range in ranges if offset_range.size}):
        topic_ranges = [
            offset_range for offset_range in ranges if offset_range.queue.topic == topic and offset_range.size
        ]
        starts = Offsets({offset_range.queue: offset_range.start for offset_range in topic_ranges}).to_json()["topics"]
        ends = Offsets({offset_range.queue: offset_range.end for offset_range in topic_ranges}).to_json()["topics"]
        yield shlex.join(["rocketmq-spark", "tail", topic, "--from", json.dumps(starts), "--to", json.dumps(ends)])


def _range_row(offset_range: OffsetRange) -> dict[str, object]:
    return {
        **_queue_columns(offset_range.queue),
        "start": offset_range.start,
        "end": offset_range.end,
        "offsets": offset_range.size,
    }


def _queue_columns(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _next_batch_text(last_read: BatchRead) -> str:
    number = last_read.batch.number
    if last_read.done_ms is None:
        return (
            f"Next: batch {number} again with the same ranges, "
            f"{last_read.size if last_read.size is not None else 'unknown'} offsets"
        )
    topics = sorted({queue.topic for queue in last_read.batch.positions})
    return f"Next: batch {number + 1}, from where batch {number} ended in {', '.join(topics) or 'no topic of RocketMQ'}"


@checkpoint.command()
@click.argument("folder")
@with_connection_options
@click.pass_obj
@click.pass_context
def diff(ctx: click.Context, output: Output, target: Target, folder: str) -> None:
    """Compare the positions of a query with what the brokers have now.

    Each queue has one of these states.

    No problem: read (nothing new), behind, and new (the query will read the queue from its beginning).

    Data loss: lost (messages were deleted before the query read them), made again (the topic was certainly deleted and created
    again), went back (the queue ends before the query's position: the broker lost messages, or the topic was created again), and
    gone (the topic or the queue does not exist).

    No loss, but not readable now: not registered (the broker is down) and unknown (the broker does not answer).

    The exit code is 1 if any queue has lost data or is not readable now.
    """
    from rocketmq_spark.cli.query import clusters, other_clusters_note
    from rocketmq_spark.spark.checkpoints.files import open_folder
    from rocketmq_spark.spark.checkpoints.offset_log import last_batch

    batch = last_batch(open_folder(folder))
    if batch is None:
        raise OffsetError(f"{folder} has no finished batch yet", remedy="Wait for the first batch")
    if not batch.sources:
        raise OffsetError(
            f"batch {batch.number} in {folder} reads no RocketMQ topic", remedy="Name the checkpoint of another query"
        )
    client = target.in_checkpoint_scope(batch.source_identities).client()
    batch, other_clusters = batch.batch_of_clusters(clusters(client))
    drifts, errors = compare_with_brokers(client, batch)
    if other_clusters:
        errors.append(other_clusters_note(other_clusters))
    output.rows(_DRIFT_COLUMNS, map(_drift_row, drifts))
    problems = [drift for drift in drifts if not drift.state.is_lossless]
    for line in errors:
        output.note(line)
    brokers_of_waiting_queues = [drift.queue.broker_name for drift in problems if drift.state.is_unavailable]
    if lost_count := len(problems) - len(brokers_of_waiting_queues):
        output.note(
            f"{lost_count} of {len(drifts)} queues have lost what was to be read next. With failOnDataLoss=warn the query "
            "continues at the first message that is kept, and reads a topic that was created again from its start"
        )
    if brokers_of_waiting_queues:
        broker_names = ", ".join(sorted(set(brokers_of_waiting_queues)))
        output.note(
            f"{len(brokers_of_waiting_queues)} of {len(drifts)} queues wait for {broker_names}: start it on its data, "
            "and nothing of them is lost"
        )
    if not problems:
        output.note("Nothing is lost")
    ctx.exit(1 if problems else 0)


def compare_with_brokers(client: Client, batch: LoggedBatch) -> tuple[list[Drift], list[str]]:
    """Compare the queues that the query reads next with the brokers. Returns a ``Drift`` for each queue, and error messages."""
    from rocketmq_spark.admin import deadline, with_kept_minimums
    from rocketmq_spark.cli.query import unplanned_queues
    from rocketmq_spark.spark.checkpoints.rewind import drift
    from rocketmq_spark.spark.source.recreated_topics import RecreationWatch, topic_broker

    unavailable_brokers: set[str] = set()
    errors: list[str] = []

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        unavailable_brokers.add(queue.broker_name)
        errors.append(str(error))

    new_queues, route_errors = unplanned_queues(client, batch)
    errors += map(str, route_errors)
    positions: dict[MessageQueue, int | None] = {**batch.positions, **dict.fromkeys(new_queues)}
    missing_topics = {error.topic for error in route_errors if isinstance(error, RouteNotFound)}
    queues = {queue for queue in positions if queue.topic not in missing_topics}
    bounds = with_kept_minimums(
        client, client.offset_reader.bounds(queues, deadline(client), note_error), positions, note_error
    )
    recreated_queues: list[MessageQueue] = []
    for offsets in batch.sources.values():
        recreation = RecreationWatch(lambda: client.offset_reader, GROUP).check(offsets, bounds, deadline(client), {})
        recreated_queues += recreation.recreated_queues
        for topic_at_broker, error in recreation.errors.items():
            unavailable_brokers.add(topic_at_broker[1])
            errors.append(str(error))
            bounds = {
                queue: queue_bounds for queue, queue_bounds in bounds.items() if topic_broker(queue) != topic_at_broker
            }
    # The query will not read a new queue that is in the route but not on the broker.
    compared_positions = {
        q: position
        for q, position in positions.items()
        if q not in new_queues or q in bounds or q.broker_name in unavailable_brokers
    }
    return drift(
        compared_positions, bounds, recreated_queues, unavailable_brokers, _unregistered_brokers(client, batch)
    ), errors


def _unregistered_brokers(client: Client, batch: LoggedBatch) -> set[str]:
    """Return the brokers of a batch that are not registered at a name server. The result is empty for a Proxy, because a Proxy
    does not report registrations.
    """
    try:
        return {queue.broker_name for queue in batch.positions} - client.routes.cluster().keys()
    except (AccessDenied, NotSupported):
        return set()


def _drift_row(queue_drift: Drift) -> dict[str, object]:
    return {
        **_queue_columns(queue_drift.queue),
        "position": queue_drift.position,
        "minOffset": queue_drift.bounds.min_offset if queue_drift.bounds else None,
        "maxOffset": queue_drift.bounds.max_offset if queue_drift.bounds else None,
        "state": queue_drift.state.value,
        "offsets": queue_drift.offsets,
    }


def _parse_duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
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
@click.option("--quiet-for", "quiet_s", callback=_parse_duration, default="60s", show_default=True, metavar="DURATION",
              help="Fail if anything in FOLDER changed within this time.")  # fmt: skip
@click.option("--force", is_flag=True, help="Rewind even if FOLDER changed recently.")
@click.pass_obj
def rewind(
    output: Output, /, folder: str, number: int | None, time_ms: int | None, apply_change: bool, **limits: float
) -> None:
    """Rewind a stopped query to the end of an earlier batch: give --to-batch or --to-time.

    When the query is restarted, it reads all messages after the end of this batch again. The command removes the files of later
    batches, after it has copied them to a backup beside FOLDER. Nothing is sent to brokers.
    """
    from rocketmq_spark.spark.checkpoints import rewind as rewinding
    from rocketmq_spark.spark.checkpoints.files import open_folder
    from rocketmq_spark.spark.checkpoints.offset_log import history

    if (number is None) == (time_ms is None):
        raise click.UsageError("rewind needs either --to-batch N or --to-time TIME")
    checkpoint_folder = open_folder(folder)
    with checkpoint_folder.as_owner():
        batch_reads = history(checkpoint_folder)
        plan = rewinding.plan_rewind(
            checkpoint_folder, batch_reads, rewinding.choose_batch(batch_reads, number, time_ms)
        )
        if apply_change and plan.files_to_remove and not limits["force"]:
            _check_quiet(checkpoint_folder, limits["quiet_s"])
    lines = list(_reread_lines(plan))
    if not plan.files_to_remove:
        output.item(
            {"rewound": False, "batchId": plan.batch.number},
            f"Batch {plan.batch.number} is the last: nothing to do",
        )
        return
    backup = None
    if apply_change:
        backup = rewinding.execute(checkpoint_folder, plan, datetime.now(UTC)).name
        lines.append(
            f"Done. To undo it, {checkpoint_folder.advice_to_owner(f'copy the files of {backup} back into {folder}')}"
        )
    else:
        lines.append("Nothing was changed: use --yes to apply")
    ranges = list(map(_range_row, plan.ranges))
    row = {
        "rewound": apply_change,
        "batchId": plan.batch.number,
        "again": plan.later_batches,
        "ranges": ranges,
        "backup": backup,
    }
    output.item(row, *lines)
    output.note(_REWIND_LIMITS)


def _reread_lines(plan: RewindPlan) -> Iterator[str]:
    """The lines that say what the query will read again, with the range of each queue."""
    if plan.later_batches:
        batches_text = (
            f"batch {plan.later_batches[0]}"
            if len(plan.later_batches) == 1
            else f"batches {plan.later_batches[0]} to {plan.later_batches[-1]}"
        )
        count = sum(offset_range.size for offset_range in plan.ranges)
        yield (
            f"The query reads the {count} offsets of {batches_text} again, "
            f"in new batches from number {plan.batch.number + 1} on:"
        )
    for offset_range in plan.ranges:
        # The end is exclusive, as in 'show' and 'lag'.
        yield f"  {offset_range.queue}  from {offset_range.start}, before {offset_range.end}  ({offset_range.size})"


def _check_quiet(folder: Folder, quiet_s: float) -> None:
    from rocketmq_spark.spark.checkpoints.rewind import changed_ms

    last_change_ms = changed_ms(folder)
    if last_change_ms is None:
        raise OffsetError(
            f"{folder.name}: its file system does not report when files changed",
            remedy="Stop the query, and use --force",
        )
    age_s = time.time() - last_change_ms / 1000
    if age_s < quiet_s:
        raise OffsetError(
            f"{folder.name} changed {max(0.0, age_s):.0f} s ago, and the query may still run",
            remedy=f"Stop it, wait until {quiet_s:g} s have passed (--quiet-for), or use --force",
        )

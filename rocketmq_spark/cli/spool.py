"""``rocketmq-spark spool``: the folders with the messages that producers and sinks could not send. ``rocketmq-spark delay``: a
node of the service for delays of any length (docs/delay.md).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from rocketmq_spark.base import folders, terminal
from rocketmq_spark.base.clock import Deadline, utc_text
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.process import on_signals, tune_gc
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.command import CliGroup, SendingCommand
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.numbers import FloatRange, SizeType
from rocketmq_spark.cli.output import Output
from rocketmq_spark.delay import DEAD_TOPIC, INNER_TOPIC
from rocketmq_spark.errors import OptionError, RocketMQError, SpoolError
from rocketmq_spark.model.admin import GROUP

if TYPE_CHECKING:
    from rocketmq_spark.delay.release import Original
    from rocketmq_spark.options import Options
    from rocketmq_spark.spool.copying import CopyResult
    from rocketmq_spark.spool.records import Record, SpoolOwner
    from rocketmq_spark.spool.spool import SpoolEntry, SpoolReading
    from rocketmq_spark.wire.envelope import DecodedEnvelope


class _Closable(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closable)

# The path is made absolute, because ``become_owner`` changes the current folder.
_FOLDER = click.argument("folder", type=click.Path(path_type=Path), callback=lambda _, __, folder: folder.absolute())
# This module is imported before ``become_owner``, because afterwards this process may not be able to read the package.
_PRELOADED_MODULE = "rocketmq_spark.delay.envelope_records"
_SUMMARY = {
    "path": "SPOOL",
    "depth": "WAITING",
    "bytes": "BYTES",
    "oldestDueAge": "OVERDUE S",
    "dead": "DEAD",
    "giveUps": "GIVEN UP",
    "owner": "OF",
}


@click.group(cls=CliGroup)
def spool() -> None:
    """Inspect, copy, send or export the spool of a producer, or the spools of a sink's workers.

    FOLDER is a spool, or a spoolDir that contains the spools of workers.
    """
    if os.geteuid() == folders.ROOT_ID:
        terminal.continue_in_child()  # in a child, ``become_owner`` can give up the terminal, and the session keeps it


@spool.command()
@_FOLDER
@click.option(
    "--records",
    "with_records",
    is_flag=True,
    help="Also show each record: when it is due, how often it failed, and why.",
)
@click.pass_obj
def show(output: Output, folder: Path, with_records: bool) -> None:
    """Show the state of the spools in FOLDER. Processes may use the spools while the command runs.

    The exit code is 1 if a damaged folder could not be read completely.
    """
    from rocketmq_spark.spool.spool import SpoolReading

    importlib.import_module(_PRELOADED_MODULE)
    rows: list[dict[str, object]] = []
    errors: list[Exception] = []
    for path in _paths(folder):
        with _collecting_errors(errors), _opened_as_owner(path, SpoolReading) as reading:
            totals, first_due_ms = reading.totals, reading.first_due_ms
            notes = {_text(name): _text(value) for name, value in reading.lasting_notes().items()}
            overdue_ms = None if first_due_ms is None else time.time_ns() // 1_000_000 - first_due_ms
            rows.append(
                {
                    "path": str(path),
                    "depth": totals and totals.depth,
                    "bytes": totals and totals.all_bytes,
                    "oldestDueAge": None if overdue_ms is None or overdue_ms < 0 else overdue_ms // 1000,
                    "dead": totals and totals.dead,
                    "giveUps": totals and totals.give_ups,
                    "owner": str(reading.owner),
                    "notes": notes,
                    "damaged": False,
                }
            )
            for name, value in notes.items():
                output.note(f"{path} has a note that decides where records are sent: {name}: {value}")
            if with_records:
                for entry in reading.entries():
                    row = _record_row(path, entry, _summary_fields)
                    output.item(row, _record_line(row))
            if damage_errors := _damage_errors(path, reading):
                rows[-1]["damaged"] = True
                errors += damage_errors
    if rows:
        output.rows(_SUMMARY, rows)
    _raise_first(output, errors)


@spool.command()
@_FOLDER
@click.pass_obj
def export(output: Output, folder: Path) -> None:
    """Print every record of FOLDER as JSON, one object per line, with its body (base64) and properties.

    The exit code is 1 if not all records could be read, because a folder is damaged.
    """
    from rocketmq_spark.spool.spool import SpoolReading

    importlib.import_module(_PRELOADED_MODULE)
    count = 0
    errors: list[Exception] = []
    for path in _paths(folder):
        with _collecting_errors(errors), _opened_as_owner(path, SpoolReading) as reading:
            for entry in reading.entries():
                row = _record_row(path, entry, _summary_fields, _content_fields)
                output.item(row, json.dumps(row, ensure_ascii=False))
                count += 1
            errors += _damage_errors(path, reading)
    output.note(f"{count} records of {folder}")
    _raise_first(output, errors)


@spool.command(cls=SendingCommand)
@_FOLDER
@click.option("--dead", "with_dead_letters", is_flag=True, help="Also send dead letters: records that were given up.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time limit for each spool, in seconds.",
)
@with_connection_options
@click.pass_obj
def send(output: Output, target: Target, folder: Path, with_dead_letters: bool, timeout_s: float) -> None:
    """Send all records of FOLDER now, even those that are not due.

    Records that fail are kept, and retried on their usual schedule; in this case, the exit code is 1. The printed numbers count
    records; a record may have several messages. Folders that another process uses are reported and not sent; the others are sent.
    """
    from rocketmq_spark import options
    from rocketmq_spark.queues.environment import is_by_position, position_problem
    from rocketmq_spark.session import spools
    from rocketmq_spark.spool.owner_rights import become_owner

    parsed_options = options.parse({"group": GROUP, **target.settings()}).for_role("producer")
    if is_by_position(parsed_options):  # the records could go to another environment's queues
        raise OptionError(
            position_problem(parsed_options, "a command does not know the count of the programs that filled the spool")
        )
    errors: list[Exception] = []
    paths = _paths(folder)
    spools.preload(parsed_options, paths)
    for path in paths:
        with _collecting_errors(errors):
            become_owner(path)
            drainer = spools.open_drainer(path, parsed_options)
            try:
                dead_count_before = 0 if with_dead_letters else drainer.store.totals.dead
                left_count = drainer.send_all(timeout_s, with_dead_letters)
            finally:
                delivered_count = drainer.finish()
            row = {"path": str(path), "sent": delivered_count, "left": left_count, "dead": drainer.store.totals.dead}
            output.item(row, f"{path}: {delivered_count} sent, {left_count} left, {row['dead']} dead")
            if unsent_count := left_count + max(0, drainer.store.totals.dead - dead_count_before):
                raise SpoolError(
                    f"{unsent_count} records of {path} were not sent, and are kept",
                    remedy=f"See why: rocketmq-spark spool show {shlex.quote(str(path))} --records",
                )
    _raise_first(output, errors)


@spool.command()
@_FOLDER
@click.option(
    "--delay-group",
    help="Group of the delay service that owns FOLDER, if the folder is damaged and no longer names it.",
)
@with_connection_options
@click.pass_obj
def assign(output: Output, target: Target, folder: Path, delay_group: str | None) -> None:
    """Assign the records of FOLDER to the cluster, namespace and environment that the options name.

    Use the command, for example, after all addresses of the cluster changed. The records are sent to that cluster when a
    producer, a sink's worker, a delay node or 'spool send' opens the folder. Folders that another process uses are reported and
    not assigned; the others are assigned.
    """
    from rocketmq_spark import options
    from rocketmq_spark.spool.store import Store

    parsed_options = options.parse({"group": GROUP, **target.settings()}).for_role("producer")
    errors: list[Exception] = []
    find_owners = _owners_finder(parsed_options, delay_group)
    for path in _paths(folder):
        with _collecting_errors(errors), _opened_as_owner(path, functools.partial(Store, any_owner=True)) as store:
            old_owner, new_owner = find_owners(path)
            store.set_owner(new_owner, force=True)
            output.item(
                {"path": str(path), "before": str(old_owner), "owner": str(new_owner)},
                f"{path}: {old_owner} -> {new_owner}",
            )
    _raise_first(output, errors)


@spool.command()
@_FOLDER
@click.pass_obj
def repair(output: Output, folder: Path) -> None:
    """Repair damaged spools in FOLDER without sending anything: keep what can be read.

    Folders that another process uses are reported and not repaired; the others are repaired.
    """
    from rocketmq_spark.spool.store import Store

    errors: list[Exception] = []
    for path in _paths(folder):
        with _collecting_errors(errors), _opened_as_owner(path, functools.partial(Store, any_owner=True)) as store:
            store.verify()
            row = {
                "path": str(path),
                "waiting": store.totals.depth,
                "dead": store.totals.dead,
                "damages": store.damage_count,
            }
            outcome = "damaged, and repaired" if store.damage_count else "not damaged"
            output.item(row, f"{path}: {outcome}; {row['waiting']} wait, {row['dead']} dead")
    _raise_first(output, errors)


@spool.command()
@_FOLDER
@click.argument("destination", metavar="COPY", type=click.Path(path_type=Path))
@click.option(
    "--timeout",
    "timeout_s",
    type=FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Time limit for reading all spools of FOLDER, in seconds.",
)
@click.option(
    "--max-bytes",
    type=SizeType(),
    default="4g",
    show_default=True,
    help="Limit of what is copied, each key and value counted with 512 bytes more.",
)
@click.pass_obj
def copy(output: Output, folder: Path, destination: Path, timeout_s: float, max_bytes: int) -> None:
    """Copy the spools in FOLDER, also those of other users, into the new folder COPY.

    COPY must not exist; it belongs to you alone. A process with the rights of the owner reads FOLDER. Each entry is checked and
    written into a new database, so 'spool export' of the copy shows what 'spool send' sends from the copy. The command does not
    change FOLDER, and no process may use FOLDER while the command runs. The owner of FOLDER deletes it after the copy is sent.
    COPY is a spool if FOLDER is a spool without other spools in it; otherwise COPY contains the spools worker-1, worker-2 and so
    on. The exit code is 1 if not everything could be copied.
    """
    from rocketmq_spark.delay.envelope_records import COPY_RULES
    from rocketmq_spark.spool.copying import CopyLimits, copy_spool, new_folder
    from rocketmq_spark.spool.files import WORKER_PREFIX

    errors: list[Exception] = []
    limits = CopyLimits(Deadline.after(timeout_s), max_bytes)
    paths = _paths(folder)
    rows: list[tuple[dict[str, object], str]] = []
    with _exit_on(signal.SIGTERM, signal.SIGHUP), new_folder(destination, folder) as copy_folder:
        for number, path in enumerate(paths, 1):
            name = "" if paths == [folder] else f"{WORKER_PREFIX}{number}"
            with _collecting_errors(errors):
                result = copy_spool(path, copy_folder / name, limits, rules=COPY_RULES)
                for warning in result.warnings:
                    output.warning(f"{path}: its reader reports: {warning}")
                row = {
                    "path": str(path),
                    "copy": str(destination / name),
                    "waiting": result.waiting_count,
                    "dead": result.dead_count,
                }
                text = f"{path} -> {row['copy']}: {result.waiting_count} wait, {result.dead_count} dead"
                if result.left_out_note_count:
                    text += (
                        f"; {result.left_out_note_count} notes of a delay node about its queues are not copied: a node with the "
                        "copy reads the queues again from their committed offsets"
                    )
                more_fields = {
                    "leftOut": result.left_out_count_by_reason,
                    "notesLeftOut": result.left_out_note_count,
                    "damaged": result.is_damaged,
                }
                rows.append(({**row, **more_fields}, text))
                errors += _copy_errors(path, result)
    for values, line in rows:
        output.item(values, line)
    _raise_first(output, errors)


@contextlib.contextmanager
def _exit_on(*numbers: signal.Signals) -> Iterator[None]:
    """Inside the block, these signals raise ``SystemExit``, so that the program removes its temporary files."""
    with contextlib.ExitStack() as handlers:
        for number in numbers:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup ignores SIGHUP
                continue
            handlers.enter_context(on_signals(functools.partial(sys.exit, 128 + number), number))
        yield


def _copy_errors(path: Path, result: CopyResult) -> list[SpoolError]:
    """Return the error if a spool was not copied completely."""
    problems = [f"{count} entries were left out: {reason}" for reason, count in result.left_out_count_by_reason.items()]
    if result.is_damaged:
        problems.insert(0, "it is damaged, and not all of it could be read")
    if not problems:
        return []
    remedy = "The spool still has the rest; look at the copy before you send it"
    return [SpoolError(f"the spool in {path} was copied in part: {'; '.join(problems)}", remedy=remedy)]


def _raise_first(output: Output, errors: Sequence[Exception]) -> None:
    """Raise the first error of several folders, and print the others."""
    for error in errors[1:]:
        output.note(str(error))
    if errors:
        raise errors[0]


def _owners_finder(parsed_options: Options, delay_group: str | None) -> Callable[[Path], tuple[SpoolOwner, SpoolOwner]]:
    """Return a function that returns the old and the new owner of a folder's records.

    The returned function imports nothing, because it is called after ``become_owner``. By then, this process may not be able to
    read the package.
    """
    from rocketmq_spark.delay.envelope_records import DEAD_LETTER_KIND, DELAYED_KIND
    from rocketmq_spark.delay.node import purpose_of
    from rocketmq_spark.session.spools import owner_of
    from rocketmq_spark.spool.records import UNKNOWN_OWNER, Record
    from rocketmq_spark.spool.spool import SpoolReading

    def find_owners(path: Path) -> tuple[SpoolOwner, SpoolOwner]:
        reading = SpoolReading(path)
        try:
            old_owner = reading.owner
            if old_owner != UNKNOWN_OWNER:
                if delay_group is not None:
                    raise SpoolError(
                        f"--delay-group is {delay_group!r}, but the records in {path} belong to {old_owner}",
                        remedy="Omit --delay-group",
                    )
                return old_owner, owner_of(parsed_options, old_owner.purpose)
            kinds = (entry.record.kind for entry in reading.entries() if isinstance(entry.record, Record))
            if delay_group is None and next(kinds, None) in (DELAYED_KIND, DEAD_LETTER_KIND):
                raise SpoolError(
                    f"the records in {path} belong to a delay service, whose group was in a damaged block",
                    remedy="Name the group with --delay-group",
                )
            return old_owner, owner_of(parsed_options, "" if delay_group is None else purpose_of(delay_group))
        finally:
            reading.close()

    return find_owners


@contextlib.contextmanager
def _collecting_errors(errors: list[Exception]) -> Iterator[None]:
    """Add the error of one folder to ``errors``, so that the command continues with the other folders. Every type of error is
    added, because other users may decide what is in a folder, and so cause any error. Only errors of the output are raised.
    """
    try:
        yield
    except (BrokenPipeError, click.ClickException, click.Abort):
        raise
    except Exception as e:  # noqa: BLE001 - ``_raise_first`` raises it after the other folders
        errors.append(_without_frames(e))


@contextlib.contextmanager
def _opened_as_owner(path: Path, open_spool: Callable[[Path], _Opened]) -> Iterator[_Opened]:
    """Open a spool with the rights of its owner. ``open_spool`` must import nothing: see ``become_owner``."""
    from rocketmq_spark.spool.owner_rights import become_owner

    become_owner(path)
    with contextlib.closing(open_spool(path)) as opened_spool:
        yield opened_spool


def _without_frames(error: Exception) -> Exception:
    """Return the error without the frames in which it was raised, because the variables of these frames would keep a database
    open while the command uses other folders. For ``--debug``, a note says where an unexpected error was raised.
    """
    if not isinstance(error, RocketMQError):
        places = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__))
        error.add_note(f"It was raised in {', '.join(places)}")
    current_error: BaseException | None
    pending_errors: list[BaseException | None] = [error]
    while pending_errors:
        if (current_error := pending_errors.pop()) is not None and current_error.__traceback__ is not None:
            current_error.__traceback__ = None
            pending_errors += [current_error.__cause__, current_error.__context__]
    return error


def _damage_errors(path: Path, reading: SpoolReading) -> list[SpoolError]:
    """The error for a damaged folder."""
    from rocketmq_spark.spool.database import REPAIR_REMEDY

    problem = f"{path} is damaged, and not all of it could be read"
    return [SpoolError(problem, remedy=REPAIR_REMEDY)] if reading.is_damaged else []


def _paths(folder: Path) -> list[Path]:
    from rocketmq_spark.session.spools import spools_in
    from rocketmq_spark.spool.owner_rights import sort_own_spools_first

    spools = spools_in(folder)
    if not spools:
        raise SpoolError(f"there is no spool in {folder}", remedy="Name the folder of option 'spoolDir'")
    return sort_own_spools_first(spools)


def _record_row(
    path: Path, entry: SpoolEntry, *field_functions: Callable[[SpoolEntry], dict[str, object]]
) -> dict[str, object]:
    """Return the row of a record. Other users may decide the content of a record. If this content causes an error, the row has
    the error, and the command continues with the other records.
    """
    row: dict[str, object] = {"path": str(path), "record": entry.sequence, "standing": entry.standing}
    for fields_of in field_functions:
        try:
            row |= fields_of(entry)
        except Exception as e:  # noqa: BLE001 - see above
            row["error"] = f"{type(e).__name__}: {e}"
    return row


def _summary_fields(entry: SpoolEntry) -> dict[str, object]:
    """The fields that ``show`` and ``export`` print of a record. Unknown values are null."""
    from rocketmq_spark.delay.envelope_records import DEAD_LETTER_KIND, DELAYED_KIND
    from rocketmq_spark.errors import DecodeError
    from rocketmq_spark.spool.spool import SEND_KIND, send_of

    record, state = entry.record, entry.state
    row: dict[str, object] = {
        "due": None if entry.due_ms is None else utc_text(entry.due_ms),
        "tries": None if state is None else state.tries,
        "reason": (state.reason or None) if state is not None else None,
        "kind": None,
    }
    if isinstance(record, DecodeError):
        return {**row, "error": record.message}
    row |= {"kind": record.kind, "stored": utc_text(record.stored_ms)}
    if record.kind == SEND_KIND:
        try:
            send = send_of(record)
        except DecodeError as e:
            return {**row, "error": e.message}
        row |= {
            "topic": send.topic,
            "queue": None if send.queue is None else str(send.queue),
            "msgIds": list(send.msg_ids),
        }
    if record.kind in (DELAYED_KIND, DEAD_LETTER_KIND):
        try:
            envelope, original, give_up_reason = _decode_delayed(record)
        except DecodeError as e:
            return {**row, "error": e.message}
        row |= {} if give_up_reason is None else {"givenUp": give_up_reason}
        row |= {
            "topic": envelope.topic,
            "queue": None if original.queue is None else str(original.queue),
            "msgIds": [original.properties[Property.UNIQ_KEY]] if Property.UNIQ_KEY in original.properties else [],
            "delayedUntil": utc_text(envelope.due_ms),
        }
    return row


def _decode_delayed(record: Record) -> tuple[DecodedEnvelope, Original, str | None]:
    """Return the envelope in a record, the message that a node which may send to all topics would send, and why the message was
    given up. The last value is None if the message was not given up. Raises ``DecodeError`` if the envelope cannot be
    delivered.
    """
    from rocketmq_spark.delay.envelope_records import DEAD_LETTER_KIND, open_dead_letter
    from rocketmq_spark.delay.release import delivery
    from rocketmq_spark.errors import DecodeError

    record, reason = open_dead_letter(record) if record.kind == DEAD_LETTER_KIND else (record, None)
    envelope, original = delivery(record.payload, max_bytes=len(record.payload))
    if original is None:
        raise DecodeError("the envelope cancels another one")
    return envelope, original, reason


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _content_fields(entry: SpoolEntry) -> dict[str, object]:
    from rocketmq_spark.delay.envelope_records import DEAD_LETTER_KIND, DELAYED_KIND
    from rocketmq_spark.errors import DecodeError
    from rocketmq_spark.spool.spool import send_of
    from rocketmq_spark.wire.properties import decode_properties

    record = entry.record
    if isinstance(record, DecodeError):
        return {}
    try:
        if record.kind in (DELAYED_KIND, DEAD_LETTER_KIND):
            envelope, original, _ = _decode_delayed(record)
            return {
                "flag": envelope.flag,
                "bornTimestamp": envelope.born_ms,
                "properties": original.properties,
                "body": base64.b64encode(envelope.body).decode(),
            }
        send = send_of(record)
    except DecodeError:
        return {"payload": base64.b64encode(record.payload).decode()}
    request = send.request
    return {
        "group": request.group,
        "selector": send.selector,
        "arg": None if send.arg is None else json.dumps(send.arg),
        "reconsumeTimes": request.reconsume_times,
        "maxReconsumeTimes": request.max_reconsume_times,
        "defaultTopicQueues": request.default_topic_queues,
        "batch": request.batch,
        "flag": request.flag,
        "sysFlag": request.sys_flag,
        "bornTimestamp": request.born_timestamp_ms,
        "properties": decode_properties(request.properties),
        "body": base64.b64encode(request.data).decode(),
    }


_LINE_FIELDS = ("due", "tries", "topic", "queue", "delayedUntil", "reason", "givenUp", "error")


def _record_line(row: dict[str, object]) -> str:
    parts = [f"{row['record']} {row['standing']}"]
    parts += [f"{name} {row[name]}" for name in _LINE_FIELDS if row.get(name)]
    ids = row.get("msgIds")
    return "  ".join([*parts, *(ids if isinstance(ids, list) else [])])


@click.group(cls=CliGroup)
def delay() -> None:
    """Deliver messages after delays that the timers of brokers do not support."""


@delay.command()
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Folder of this node alone; created if missing."
)
@click.option(
    "--group",
    default="rocketmq_delay",
    show_default=True,
    help="Consumer group; nodes of one group share the load. Nodes of another --inner-topic need another group.",
)
@click.option(
    "--topic",
    "topics",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="A topic that messages may be delivered to, or a pattern such as 'orders-*' (may be repeated). '*' means all topics"
    " except RocketMQ's own, and those of retries and dead letters. Messages for other topics go to --dead-topic.",
)
@click.option("--inner-topic", default=INNER_TOPIC, show_default=True, help="Topic in which messages wait.")
@click.option(
    "--dead-topic",
    default=DEAD_TOPIC,
    show_default=True,
    help="Topic for messages that cannot be read, may not be delivered to their topic, or were given up.",
)
@click.option(
    "--dead",
    "with_dead_letters",
    is_flag=True,
    help="Also send the dead letters in --data again: messages that were given up and that --dead-topic refused.",
)
@with_connection_options
@click.pass_obj
def serve(
    output: Output,
    target: Target,
    data: Path,
    group: str,
    topics: tuple[str, ...],
    inner_topic: str,
    dead_topic: str,
    with_dead_letters: bool,
) -> None:
    """Run a node of the delay service, until Ctrl-C or SIGTERM.

    A node holds messages of --inner-topic in --data, and sends them when they are due.

    With environmentMode=queues, the default, one service serves all environments, and the command refuses --environment and
    ROCKETMQ_ENVIRONMENT. With -o environmentMode=suffix, run one service for each environment, and name the environment with
    --environment.
    """
    from rocketmq_spark.delay.node import NodeSettings, open_node

    stop_latch = Latch()
    with on_signals(stop_latch.set, signal.SIGINT, signal.SIGTERM):
        node_settings = NodeSettings(
            data, inner_topic, dead_topic, topics=topics, resends_dead_letters=with_dead_letters
        )
        node = open_node(node_settings, **{**target.settings(), "group": group})
        tune_gc()
        row_at_start = {"group": group, "topic": inner_topic, "data": str(data), "waiting": node.waiting_count}
        output.item(
            row_at_start, f"group {group} holds messages of {inner_topic} in {data}; {node.waiting_count} wait now"
        )
        node.run(stop_latch)
    row = {"stored": node.stored_count, "sent": node.sent_count, "waiting": node.waiting_count}
    output.item(row, f"{node.stored_count} messages stored, {node.sent_count} sent, {node.waiting_count} wait")

"""Counts of acknowledged rows: of one task, and of all tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rocketmq_spark.errors import RocketMQError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerCounts:
    """The counts of one broker. ``failures`` counts attempts that the broker did not acknowledge."""

    rows: int = 0
    bytes: int = 0
    batches: int = 0
    failures: int = 0

    def __add__(self, other: BrokerCounts) -> BrokerCounts:
        return BrokerCounts(
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.batches + other.batches,
            self.failures + other.failures,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """How many rows brokers have, how many bytes (bodies and properties on the wire) these rows have, and how many batches and
    retries there were.

    ``brokers`` has the rows, bytes, batches and failed attempts of each broker. ``batches`` counts requests: batches, and rows
    that were sent alone. ``spooled`` rows are in the spool of their worker, and not included in ``rows``.

    With ``deliveryGuarantee`` exactly-once, ``rows`` includes ``confirmed`` rows: the sink got no acknowledgement, but found
    these rows in the topic. ``already_stored`` rows were stored by an earlier attempt, and are not included in ``rows``.
    ``unmatched`` is the number of messages of earlier attempts that match no row of this attempt. ``found`` is the number of
    messages that earlier runs of the batch stored for the counted tasks. ``found_of_batch`` is the number of messages that
    earlier runs stored for all tasks of the batch.

    ``left_out`` headers of ``kafkaColumns`` were not stored.
    """

    rows: int = 0
    bytes: int = 0
    batches: int = 0
    retries: int = 0
    brokers: Mapping[str, BrokerCounts] = field(default_factory=dict)
    spooled: int = 0
    already_stored: int = 0
    confirmed: int = 0
    unmatched: int = 0
    found: int = 0
    found_of_batch: int = 0
    left_out: int = 0

    @property
    def sent(self) -> int:
        """Rows that were acknowledged."""
        return self.rows - self.confirmed

    def __add__(self, other: Written) -> Written:
        no_counts = BrokerCounts()
        names = sorted({*self.brokers, *other.brokers})
        return Written(
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.batches + other.batches,
            self.retries + other.retries,
            {name: self.brokers.get(name, no_counts) + other.brokers.get(name, no_counts) for name in names},
            self.spooled + other.spooled,
            self.already_stored + other.already_stored,
            self.confirmed + other.confirmed,
            self.unmatched + other.unmatched,
            self.found + other.found,
            max(self.found_of_batch, other.found_of_batch),
            self.left_out + other.left_out,
        )

    def of_all_tasks(self) -> Written:
        """Return these counts, with a larger ``unmatched``: it also counts the stored messages of tasks that only an earlier run
        had, because no row of this run can match them.
        """
        return replace(self, unmatched=self.unmatched + max(0, self.found_of_batch - self.found))

    def __str__(self) -> str:
        text = f"{self.rows} rows in {self.batches} batches, {self.bytes} bytes, {self.retries} retries"
        if self.spooled:
            text += f", and {self.spooled} rows spooled"
        for count, description in (
            (self.already_stored, "stored before and not sent"),
            (self.confirmed, "of them confirmed without an acknowledgement"),
            (self.unmatched, "stored before that match no row"),
            (self.left_out, "headers left out"),
        ):
            text += f", {count} {description}" if count else ""
        parts = [
            f"{name} {broker_counts.rows} rows in {broker_counts.batches} batches"
            + (f" and {broker_counts.failures} failed attempts" if broker_counts.failures else "")
            for name, broker_counts in sorted(self.brokers.items())
        ]
        return f"{text} ({'; '.join(parts)})" if parts else text


def total(counts_by_task: Iterable[Written | None]) -> Written:
    """Return the sum of the counts of all tasks. None stands for a task that did not finish."""
    written, all_finished = Written(), True
    for task_counts in counts_by_task:
        if task_counts is not None:
            written += task_counts
        else:
            all_finished = False
    return written.of_all_tasks() if all_finished else written


def warn_of_unmatched_messages(written: Written, write_text: str) -> None:
    """Log one warning per batch with unmatched messages.

    An unmatched message may be an earlier copy of a row: if a row changed or moved to another task, it was sent again.
    """
    if written.unmatched:
        max_duplicates = min(written.unmatched, written.rows)
        logger.warning(
            "%s: %d messages that an earlier attempt stored match no row of the repeat: rows of the source are lost, or the "
            "query produced other rows, or split them into other tasks. These messages stay in the topic; %s",
            write_text,
            written.unmatched,
            f"up to {max_duplicates} rows may be there twice"
            if max_duplicates
            else "no row is there twice because of them",
        )


def warn_of_omitted_headers(written: Written, write_text: str) -> None:
    """Log one warning per write with headers that were not stored."""
    if written.left_out:
        logger.warning(
            "%s: %d headers were left out, because they have no value, their name is empty, is reserved for RocketMQ or has "
            "control characters, or their row has a later header with the same name. The logs of the tasks (level INFO) have "
            "the first of these names",
            write_text,
            written.left_out,
        )


def with_counts(error: RocketMQError, written: Written) -> RocketMQError:
    """Return ``error`` with the counts of its task. The counts are on the error's line, because Spark shows only the last line of
    a traceback.
    """
    notes = [*getattr(error, "__notes__", ()), f"Acknowledged before that: {written}"]
    remedy = ". ".join([*(note.removesuffix(".") for note in notes), *([error.remedy] if error.remedy else [])])
    error_with_counts = type(error)(
        error.message, error.addr, error.broker_code, error.topic, error.queue, error.remark, remedy=remedy
    )
    error_with_counts.__cause__ = error.__cause__
    return error_with_counts.with_traceback(error.__traceback__)


class TaskCounts:
    """Counts of a running task. They are changed in place, because there may be many batches."""

    def __init__(self) -> None:
        self._rows = self._bytes = self._batches = self._retries = self._spooled = 0
        self._already_stored = self._confirmed = 0
        self.left_out = self.unmatched = self.found = self.found_of_batch = 0
        # For each broker, the numbers of rows, bytes, batches and failed attempts.
        self._counts_by_broker: dict[str, list[int]] = {}

    def count_acknowledged(
        self, broker: str, rows: int, size: int, retries: int = 0, failed_brokers: Iterable[str] = ()
    ) -> None:
        """Count a batch that ``broker`` has stored. ``failed_brokers`` are the brokers of its failed attempts."""
        self._rows += rows
        self._bytes += size
        self._batches += 1
        self._retries += retries
        broker_counts = self._counts_of(broker)
        broker_counts[0] += rows
        broker_counts[1] += size
        broker_counts[2] += 1
        for name in failed_brokers:
            self._counts_of(name)[3] += 1

    def count_spooled(self, rows: int) -> None:
        """Count rows that are in the spool."""
        self._spooled += rows

    def count_already_stored(self, rows: int) -> None:
        """Count rows that were omitted, because they are stored."""
        self._already_stored += rows

    def count_confirmed(self, rows: int) -> None:
        """Count rows whose acknowledgement was lost, but which are stored. Such rows are also counted as acknowledged."""
        self._confirmed += rows

    def written(self) -> Written:
        brokers = {name: BrokerCounts(*counts) for name, counts in sorted(self._counts_by_broker.items())}
        counts = self._rows, self._bytes, self._batches, self._retries
        exactly_once_counts = self._already_stored, self._confirmed, self.unmatched, self.found, self.found_of_batch
        return Written(*counts, brokers, self._spooled, *exactly_once_counts, self.left_out)

    def _counts_of(self, broker: str) -> list[int]:
        return self._counts_by_broker.setdefault(broker, [0, 0, 0, 0])

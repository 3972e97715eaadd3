"""Finds the rows that the sink would reject. This is useful if the rows of a job come from other users, because one bad row would
end the query.

The module runs the same checks as a task of the sink, so it returns the reasons that the sink would report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import RocketMQError, RouteNotFound
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.topic_names import TopicNames
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.routing import RouteCache
from rocketmq_spark.producer.rows.routing import Router, with_rocketmq_topics
from rocketmq_spark.producer.rows.sender import RowChecks, StoragePlan, batch_bytes
from rocketmq_spark.spark.sink import checks

_REQUEST_TIMEOUT_S = 3.0
# How long the result for a topic is kept, and the maximum number of topics whose results are kept.
_CACHE_S, _MAX_TOPICS = 5.0, 1000
_ARROW_TYPES = {"body": pa.binary(), "flag": pa.int32(), "properties": pa.map_(pa.string(), pa.string())}


class SinkChecks:
    """The checks of a sink with these options, for rows with these ``columns``.

    The columns include ``topic``, ``shardingKey`` and ``properties``, whose values are dicts. ``make_sender`` replaces the sender
    in tests.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        columns: Sequence[str],
        make_sender: Callable[[Options], Sender] = session.sender,
    ) -> None:
        self._options = options_table.parse(options).for_role("sink")
        self._settings = checks.producer_settings(self._options)
        self._names = columns
        self._columns = {"messageid" if name == "msgId" else name.lower(): name for name in columns}
        self._make_sender = make_sender
        self.max_bytes = self._settings.max_message_size
        self._topic_names = TopicNames(self._options.topic_names, self._options.written_topics)
        self._topic_problems: dict[str, tuple[Deadline, str | None]] = {}
        # These objects are created when they are first used, because a driver does not use them.
        self._tools: tuple[RouteCache, RowChecks] | None = None

    def refusal(self, topic: str) -> str | None:
        """Return why no message can be sent to the topic; None if messages can be sent. Raises the error of a failed request,
        as the sink would.
        """
        cached_problem = self._topic_problems.get(topic)
        if cached_problem is None or cached_problem[0].expired:
            if len(self._topic_problems) >= _MAX_TOPICS:  # other users may name any number of topics
                self._topic_problems.clear()
            cached_problem = self._topic_problems[topic] = Deadline.after(_CACHE_S), self._topic_problem(topic)
        return cached_problem[1]

    def rejection_reasons(self, rows: Sequence[Sequence[Any]]) -> dict[int, str]:
        """Return the reason for each row that the sink rejects, by row number. Raises retriable errors, as the sink would."""
        reasons: dict[int, str] = {}
        self._find_bad_rows(rows, list(range(len(rows))), reasons)
        return reasons

    def _find_bad_rows(self, rows: Sequence[Sequence[Any]], row_numbers: list[int], reasons: dict[int, str]) -> None:
        """Add the bad rows to ``reasons``. If an error names no row, the rows are bisected to find the bad row."""
        while row_numbers:
            bad_rows = BadRows()
            try:
                self._check_rows([rows[number] for number in row_numbers], bad_rows)
                return
            except (RocketMQError, ValueError, ArithmeticError) as e:
                if getattr(e, "retriable", False):
                    raise
                new_reasons = {row_numbers[i]: reason for i, reason in bad_rows.reasons_by_row()}
                if not new_reasons and len(row_numbers) == 1:
                    new_reasons = {row_numbers[0]: str(e)}
            if not new_reasons:
                self._find_bad_rows(rows, row_numbers[: len(row_numbers) // 2], reasons)
                row_numbers = row_numbers[len(row_numbers) // 2 :]
            reasons |= new_reasons
            row_numbers = [number for number in row_numbers if number not in new_reasons]

    def _check_rows(self, rows: Sequence[Sequence[Any]], bad_rows: BadRows) -> None:
        """Check rows as a task of the sink does. Raises an error if there are bad rows. Adds bad rows to ``bad_rows``, except
        those that the check cannot name.
        """
        batch = self._batch(rows)
        if self._options.topic is None:
            batch = with_rocketmq_topics(batch, "topic", self._topic_names, bad_rows)
            bad_rows.raise_if_any()
        _, check = self._make_tools()
        check(batch, bad_rows, 0)
        topics = batch.column("topic").to_pylist()
        deadline = Deadline.after(_REQUEST_TIMEOUT_S)
        accepted_types = {topic: session.message_types(self._options, topic, deadline) for topic in set(topics)}
        for number, (topic, key) in enumerate(zip(topics, batch.column("shardingKey").to_pylist(), strict=True)):
            message_type, topic_types = transport.message_type(False, bool(key), False), accepted_types[topic]
            if topic_types and message_type not in topic_types:
                bad_rows.add_rows(np.array([number]), f"topic {topic} takes no {message_type} messages")
        bad_rows.raise_if_any()

    def _batch(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        arrays = []
        for name, values in zip(self._names, zip(*rows, strict=True), strict=True):
            cells = [list(value.items()) for value in values] if name == "properties" else list(values)
            arrays.append(pa.array(cells, _ARROW_TYPES.get(name, pa.string())))
        return pa.RecordBatch.from_arrays(arrays, names=list(self._names))

    def _topic_problem(self, topic: str) -> str | None:
        routes, _ = self._make_tools()
        try:
            routes.queues(topic, Deadline.after(_REQUEST_TIMEOUT_S))
        except RouteNotFound as e:
            return f"no message can go to topic {topic}: {e.message}"
        return None

    def _make_tools(self) -> tuple[RouteCache, RowChecks]:
        if self._tools is not None:
            return self._tools
        options, columns, sender = self._options, self._columns, self._make_sender(self._options)
        ids = UniqueIds(bytes(8), epoch_ms)
        encoder = session.row_encoder(options)(columns, options.max_message_size, ids, batch_bytes(options))
        routes = RouteCache(sender, self._settings)

        def queues(topic: str, refresh: bool) -> Any:
            return routes.queues(topic, Deadline.after(_REQUEST_TIMEOUT_S), refresh)

        # Rows are checked as if they were sent in batches. These checks find more bad rows: a broker may silently drop a bad
        # message of a batch, although it rejects the same message if the message is sent alone.
        storage = StoragePlan(replace(options, auto_batch=True), columns, sender, epoch_ms)
        self._tools = routes, RowChecks(encoder, Router(options, columns, queues), storage, lambda topic: None)
        return self._tools

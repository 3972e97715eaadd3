"""Batches of a batch topic: brokers store each as one message, so it has an id, and tag and keys where they are those of all.

A broker filters such batches by their own tags. So rows of one tag go together, where their order allows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Property
from rocketmq_spark.encode.about import About, Rows
from rocketmq_spark.encode.identifiers import UniqueIds
from rocketmq_spark.options import Options
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.accumulator import MAX_KEYWORD_BYTES
from rocketmq_spark.sink.routing import RoutingPlan, RowRange

# With more tags in an Arrow batch each batch would have few rows.
MAX_TAGS = 16


class Whole:
    """Those of one task."""

    def __init__(self, options: Options, columns: Mapping[str, str], sender: Sender, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._columns = columns
        self._sender = sender
        self._ids = UniqueIds(os.urandom(8), now_ms)
        self._about: About | None = None

    def look(self, batch: pa.RecordBatch, plan: RoutingPlan) -> RoutingPlan:
        """The plan of ``batch`` with a share for each tag where that is right; ``properties`` are of its rows from now on."""
        self._about = None
        if not self._options.auto_batch or not any(
            self._stored_whole(topic) for topic in {s.topic for s in plan.shares}
        ):
            return plan
        self._about = About(batch, self._columns, MAX_KEYWORD_BYTES)
        return together(plan, self._about, self._stored_whole, self._options.batch_by_tag)

    def properties(self, topic: str, rows: Rows) -> dict[str, str]:
        """Those of a batch of these rows; none where its messages are stored one by one."""
        if self._about is None or not self._stored_whole(topic):
            return {}
        said = self._about.properties(rows)
        if said is None:
            return {}
        batch_id = np.empty((1, 32), np.uint8)
        self._ids.fill(batch_id)
        return {Property.UNIQ_KEY: batch_id.tobytes().decode(), **said}

    def _stored_whole(self, topic: str) -> bool:
        return self._sender.keeps_batches(topic, Deadline.after(self._options.request_timeout))


def together(plan: RoutingPlan, about: About, stored_whole: Callable[[str], bool], by_tag: str) -> RoutingPlan:
    """The plan with a share for each tag. ``by_tag`` is the option.

    Rows that name their queue keep their order there unless the option is ``true``: then those of one tag do.
    """
    if by_tag == "false" or not about.tags or (by_tag == "auto" and about.tags > MAX_TAGS):
        return plan
    orders, shares, at = [], [], 0
    for share in plan.shares:
        rows = plan.rows(share)
        mixed = stored_whole(share.topic) and (share.queue is None or by_tag == "true")
        for part in about.by_tag(rows) if mixed else [rows]:
            orders.append(part)
            shares.append(RowRange(share.topic, share.queue, at, at + len(part)))
            at += len(part)
    return plan if len(shares) == len(plan.shares) else RoutingPlan(np.concatenate(orders), shares)

"""Option ``emptyBodies``: a message for a row without a body, such as Kafka's tombstones. Brokers reject empty bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID, BadRows
from rocketmq_spark.wire.properties import DELETED_PROPERTY, EMPTY_BODY, NULL_BODY, STAND_IN_BODY

_MAP_TYPE = pa.map_(pa.string(), pa.string())


def batch_with_stand_ins(batch: pa.RecordBatch, names: Mapping[str, str], bad_rows: BadRows) -> pa.RecordBatch:
    """``batch`` with the body ``STAND_IN_BODY`` and the property ``DELETED_PROPERTY`` in rows whose body is null or empty.

    ``names`` has the names of the columns for ``body`` and ``properties``. A column for ``properties`` is added if ``batch`` has
    none. A row without a body is a bad row if its properties already contain ``DELETED_PROPERTY``, or if option ``messageId``
    names the column of the body.
    """
    body = arrow.as_bytes(batch.column(names["body"]))
    is_empty = arrow.to_mask(pc.fill_null(pc.equal(pc.binary_length(body), 0), True))
    columns = {each: batch.column(index) for index, each in enumerate(batch.schema.names)}
    properties = columns.setdefault(names["properties"], arrow.null_column(_MAP_TYPE, len(batch)))
    if is_empty.any():
        entries = _MapEntries.of_column(properties)
        bad_rows.add(
            is_empty & entries.rows_with_name(DELETED_PROPERTY.encode()),
            f"its {names['body']} is null or empty, and its {names['properties']} have {DELETED_PROPERTY!r}, which option "
            "'emptyBodies' sets: rename it",
        )
        if names.get(MESSAGE_ID) == names["body"]:
            bad_rows.add(
                is_empty,
                f"its {names['body']} is null or empty, and option 'messageId' names this column, so the row has no id: name "
                "another column",
            )
        columns[names["body"]] = pc.if_else(pa.array(is_empty), pa.scalar(STAND_IN_BODY, pa.binary()), body)
        columns[names["properties"]] = entries.map_with_marks(is_empty, arrow.to_mask(body.is_valid()))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


class _MapEntries(NamedTuple):
    """The entries of a column of maps as bytes, because Spark does not check that texts are UTF-8. Row ``i`` has the entries from
    ``bounds[i]`` to ``bounds[i + 1]``.
    """

    names: pa.Array
    values: pa.Array
    bounds: npt.NDArray[np.int64]

    @classmethod
    def of_column(cls, column: Any) -> _MapEntries:
        maps = arrow.one_array(column)
        if maps.null_count:  # a null map may have hidden entries
            maps = pc.if_else(maps.is_valid(), maps, pa.scalar([], maps.type))
        ends = arrow.offsets(maps).astype(np.int64)
        entries = slice(int(ends[0]), int(ends[-1]))
        return cls(arrow.as_bytes(maps.keys[entries]), arrow.as_bytes(maps.items[entries]), ends - ends[0])

    def rows_with_name(self, name: bytes) -> npt.NDArray[np.bool_]:
        """Which rows have an entry of this name."""
        entries = np.flatnonzero(arrow.to_mask(pc.equal(self.names, pa.scalar(name, pa.binary()))))
        has_entry = np.zeros(len(self.bounds) - 1, np.bool_)
        has_entry[np.searchsorted(self.bounds, entries, side="right") - 1] = True
        return has_entry

    def map_with_marks(self, is_empty: npt.NDArray[np.bool_], has_body: npt.NDArray[np.bool_]) -> pa.Array:
        """The maps. Rows where ``is_empty`` is true have one more entry, which says whether the body is empty or null."""
        count, mark_counts_before = len(self.names), np.concatenate(([0], np.cumsum(is_empty)))
        bounds = self.bounds + mark_counts_before
        entry_indexes = np.empty(bounds[-1], np.int64)
        entry_indexes[np.arange(count) + np.repeat(mark_counts_before[:-1], np.diff(self.bounds))] = np.arange(count)
        entry_indexes[bounds[1:][is_empty] - 1] = count + has_body[is_empty]
        marks = [NULL_BODY.encode(), EMPTY_BODY.encode()]
        names = pa.concat_arrays([self.names, pa.array([DELETED_PROPERTY.encode()] * 2, pa.binary())]).take(
            pa.array(entry_indexes)
        )
        values = pa.concat_arrays([self.values, pa.array(marks, pa.binary())]).take(pa.array(entry_indexes))
        offsets = arrow.integers(bounds.astype(np.int32), pa.int32())
        return pa.MapArray.from_arrays(offsets, names.view(pa.string()), values.view(pa.string()))

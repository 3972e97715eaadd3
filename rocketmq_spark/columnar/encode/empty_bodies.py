"""Option ``emptyBodies``: a message for a row without a body, such as Kafka's tombstones. Brokers refuse empty bodies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.wire.properties import DELETED, EMPTY_BODY, NULL_BODY, STAND_IN_BODY

_MAP = pa.map_(pa.string(), pa.string())


def marked(batch: pa.RecordBatch, names: Mapping[str, str], bad_rows: BadRows) -> pa.RecordBatch:
    """``batch`` with the body ``STAND_IN_BODY`` and the property ``DELETED`` in rows whose body is null or empty.

    ``names`` has the columns of the roles ``body`` and ``properties``; the latter is added if ``batch`` lacks it. A row without
    a body that has this property already is a bad row.
    """
    body = arrow.as_bytes(batch.column(names["body"]))
    empty = arrow.flags(pc.fill_null(pc.equal(pc.binary_length(body), 0), True))
    name = names["properties"]
    has_properties = name in batch.schema.names
    if not empty.any():
        return batch if has_properties else batch.append_column(name, arrow.null_column(_MAP, len(batch)))
    given = batch.column(name).to_pylist() if has_properties else [None] * len(batch)
    for row in np.flatnonzero(empty).tolist():
        entries = list(given[row] or ())
        if any(each == DELETED for each, _ in entries):
            bad_rows.rows(
                np.array([row]),
                f"its {names['body']} is null or empty, and its {name} have {DELETED!r}, which option 'emptyBodies' sets",
            )
        given[row] = [*entries, (DELETED, EMPTY_BODY if body[row].is_valid else NULL_BODY)]
    made = {each: batch.column(at) for at, each in enumerate(batch.schema.names)}
    made[names["body"]] = pc.if_else(pa.array(empty), pa.scalar(STAND_IN_BODY, pa.binary()), body)
    made[name] = pa.array(given, _MAP)
    return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))

"""``DataFrame.mapInArrow`` without pandas, and with an error that names the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def map_in_arrow(df: DataFrame, function: Callable[..., Any], schema: str, instead: str) -> DataFrame:
    """``df.mapInArrow``. PySpark's own function requires pandas, and warns of its newest versions, without using it.

    ``function`` is not a lambda: Spark would have to pickle its code, while workers import a function by its name.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            return df.mapInArrow(function, schema)
    except ImportError as e:
        raise OptionError(
            f"PySpark cannot run a function over Arrow batches here: {e}", remedy=f"Install pandas, or {instead}"
        ) from e

"""``DataFrame.mapInArrow`` without warnings about pandas, and with an error that names a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def map_in_arrow(df: DataFrame, function: Callable[..., Any], schema: str, alternative: str) -> DataFrame:
    """Return ``df.mapInArrow(function, schema)``. Suppresses PySpark's warning about new versions of pandas. PySpark requires
    pandas for ``mapInArrow``, although ``mapInArrow`` does not use pandas.

    Args:
        function: A function of a module, or a ``partial`` of such a function: workers import it. A lambda does not work, because
            Spark would pickle its code.
        alternative: How to do the same without pandas, for the remedy of the error.

    Raises:
        OptionError: pandas is not installed, or is too old for PySpark.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            return df.mapInArrow(function, schema)
    except ImportError as e:
        raise OptionError(f"PySpark cannot use mapInArrow: {e}", remedy=f"Install pandas, or {alternative}") from e

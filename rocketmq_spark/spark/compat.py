"""The classes of PySpark's data source API, real or stand-ins. No other module knows which classes a version of
PySpark may lack.

Vendors add parts of newer versions to older versions, so this module looks for the classes and ignores the version number. A
missing class has a stand-in, so that the readers and writers can be defined with every PySpark. A PySpark without the class
does not call the methods that would use the class. ``require_classes`` raises an error if PySpark lacks a class that the caller
needs.
"""

from __future__ import annotations

import importlib
from dataclasses import make_dataclass
from typing import TYPE_CHECKING

import pyspark

from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource as DataSource
    from pyspark.sql.datasource import DataSourceArrowWriter as DataSourceArrowWriter
    from pyspark.sql.datasource import DataSourceReader as DataSourceReader
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as DataSourceStreamArrowWriter
    from pyspark.sql.datasource import DataSourceStreamReader as DataSourceStreamReader
    from pyspark.sql.datasource import EqualNullSafe as EqualNullSafe
    from pyspark.sql.datasource import EqualTo as EqualTo
    from pyspark.sql.datasource import Filter as Filter
    from pyspark.sql.datasource import GreaterThan as GreaterThan
    from pyspark.sql.datasource import GreaterThanOrEqual as GreaterThanOrEqual
    from pyspark.sql.datasource import In as In
    from pyspark.sql.datasource import InputPartition as InputPartition
    from pyspark.sql.datasource import LessThan as LessThan
    from pyspark.sql.datasource import LessThanOrEqual as LessThanOrEqual
    from pyspark.sql.datasource import WriterCommitMessage as WriterCommitMessage
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxBytes as ReadMaxBytes
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import ReadMinRows as ReadMinRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow

_API = "pyspark.sql.datasource"
_STREAMING_API = "pyspark.sql.streaming.datasource"
MODULE_BY_CLASS = {
    **dict.fromkeys(("DataSource", "DataSourceReader", "DataSourceStreamReader", "InputPartition"), _API),
    **dict.fromkeys(("DataSourceArrowWriter", "DataSourceStreamWriter", "DataSourceStreamArrowWriter"), _API),
    "WriterCommitMessage": _API,
    **dict.fromkeys(("Filter", "EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual"), _API),
    **dict.fromkeys(("LessThan", "LessThanOrEqual", "In"), _API),
    **dict.fromkeys(("ReadLimit", "ReadAllAvailable", "ReadMaxRows", "ReadMaxBytes", "ReadMinRows"), _STREAMING_API),
    "SupportsTriggerAvailableNow": _STREAMING_API,
}


def _load_class(name: str) -> type | None:
    module = MODULE_BY_CLASS[name]
    try:
        class_: type | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as e:
        if e.name != module:  # the module exists, but a package that it imports does not
            raise
        return None
    return class_


_classes_by_name = {name: _load_class(name) for name in MODULE_BY_CLASS}
_stream_writer, _arrow_writer = _classes_by_name["DataSourceStreamWriter"], _classes_by_name["DataSourceArrowWriter"]
if _classes_by_name["DataSourceStreamArrowWriter"] is None and _stream_writer is not None and _arrow_writer is not None:
    # PySpark 4.0 lacks this class, but passes Arrow batches to every DataSourceArrowWriter, also to the writer of a stream.
    _classes_by_name["DataSourceStreamArrowWriter"] = type(
        "DataSourceStreamArrowWriter", (_stream_writer, _arrow_writer), {}
    )
# The stand-ins for the classes of limits and predicates have the fields of the real classes, so that the source handles stand-ins
# and real classes in the same way.
_STAND_IN_FIELDS = {
    **dict.fromkeys(("EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual"), ("attribute", "value")),
    **dict.fromkeys(("LessThan", "LessThanOrEqual", "In"), ("attribute", "value")),
    "ReadAllAvailable": (),
    "ReadMaxRows": ("max_rows",),
    "ReadMaxBytes": ("max_bytes",),
    "ReadMinRows": ("min_rows",),
}


def _stand_in(name: str) -> type:
    return make_dataclass(name, _STAND_IN_FIELDS[name], frozen=True) if name in _STAND_IN_FIELDS else type(name, (), {})


globals().update({name: loaded_class or _stand_in(name) for name, loaded_class in _classes_by_name.items()})


def has_class(name: str) -> bool:
    """Whether this PySpark has the class ``name`` of ``MODULE_BY_CLASS``, or other classes with the same effect."""
    return _classes_by_name[name] is not None


def require_classes(use: str, *names: str) -> None:
    """Raises ``OptionError`` if this PySpark lacks one of the classes ``names``. ``use`` is the name of the feature that needs
    these classes, such as "register".
    """
    missing_classes = [f"{MODULE_BY_CLASS[name]}.{name}" for name in names if not has_class(name)]
    if missing_classes:
        raise OptionError(
            f"{use} needs {' and '.join(missing_classes)}, which the installed PySpark ({pyspark.__version__}) does not have",
            remedy="Read with read_rocketmq(spark, ...), and write with foreach_batch_writer or write_rocketmq",
        )

"""Options of Spark's own methods: paths, and the options of asynchronous progress tracking.

Spark passes the path of ``load``, ``save`` and ``start`` as option ``path``, several paths as ``paths``, and all options of
``writeStream`` to the sink. A table of Spark's catalog has no option ``path`` here, because Spark does not pass its location.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.errors import OptionError

ASYNC_PROGRESS = "asyncProgressTrackingEnabled"
# The last one lets Spark skip its list of sinks that support asynchronous progress tracking.
_PROGRESS_OPTIONS = (
    ASYNC_PROGRESS,
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
_NAMES_BY_LOWER = {name.lower(): name for name in ("path", "paths", *_PROGRESS_OPTIONS)}
_METHODS = {"batch source": "load", "stream source": "load", "batch sink": "save", "stream sink": "start"}


def split(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of this package, and Spark's by their names in its documentation."""
    ours, spark = {}, {}
    for name, value in given.items():
        if (key := name.lower()) in _NAMES_BY_LOWER:
            spark[_NAMES_BY_LOWER[key]] = value
        else:
            ours[name] = value
    return ours, spark


def check(spark: Mapping[str, str], kind: str) -> None:
    """Raise ``OptionError`` for an option that would have no effect in a reader or writer of this ``kind`` (``_METHODS``)."""
    for name in ("path", "paths"):
        if name in spark:
            raise _unexpected_path(name, spark[name], kind)
    misplaced = [name for name in _PROGRESS_OPTIONS if name in spark]
    if misplaced and kind != "stream sink":
        raise OptionError(
            f"option {misplaced[0]!r} does not belong to a {kind}; it is for: stream sink",
            remedy="Set it on the writeStream of the query",
        )


def _unexpected_path(name: str, value: str, kind: str) -> OptionError:
    method = _METHODS[kind]
    if kind.endswith("source"):
        option, does = "subscribe", "reads the topics of option 'subscribe', 'subscribePattern' or 'assign'"
    else:
        option, does = "topic", "writes to the topic of option 'topic' or column 'topic'"
    shown = repr(value) if name == "path" else value
    return OptionError(
        f"option {name!r} is {shown} (the argument of {method}); expected none, because a {kind} {does}",
        remedy=f"If it is a topic: .option('{option}', ...).{method}()",
    )


def tracks_asynchronously(spark: Mapping[str, str]) -> bool:
    """Whether Spark writes its logs of offsets and commits later than the batches they belong to."""
    return spark.get(ASYNC_PROGRESS, "false").strip().lower() == "true"

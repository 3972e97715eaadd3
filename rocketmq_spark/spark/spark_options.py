"""Options of Spark's own methods: paths, and the options of asynchronous progress tracking.

Spark passes the path of ``load``, ``save`` and ``start`` as option ``path``, several paths as ``paths``, and all options of
``writeStream`` to the sink. For a table of Spark's catalog, Spark passes no option ``path``, although the table may have a
location.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.errors import OptionError

ASYNC_PROGRESS = "asyncProgressTrackingEnabled"
# The last of these options makes Spark skip its check whether the sink supports asynchronous progress tracking.
_PROGRESS_OPTIONS = (
    ASYNC_PROGRESS,
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
_NAMES_BY_LOWER = {name.lower(): name for name in ("path", "paths", *_PROGRESS_OPTIONS)}
_METHODS = {"batch source": "load", "stream source": "load", "batch sink": "save", "stream sink": "start"}


def split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of this package, and Spark's options by their names in Spark's documentation."""
    own_options, options_of_spark = {}, {}
    for name, value in options.items():
        if (key := name.lower()) in _NAMES_BY_LOWER:
            options_of_spark[_NAMES_BY_LOWER[key]] = value
        else:
            own_options[name] = value
    return own_options, options_of_spark


def check(options_of_spark: Mapping[str, str], kind: str) -> None:
    """Raise ``OptionError`` for an option that would have no effect in a reader or writer of this ``kind`` (``_METHODS``)."""
    for name in ("path", "paths"):
        if name in options_of_spark:
            raise _unexpected_path(name, options_of_spark[name], kind)
    progress_options = [name for name in _PROGRESS_OPTIONS if name in options_of_spark]
    if progress_options and kind != "stream sink":
        raise OptionError(
            f"option {progress_options[0]!r} does not belong to a {kind}; it is for: stream sink",
            remedy="Set it on the writeStream of the query",
        )


def _unexpected_path(name: str, value: str, kind: str) -> OptionError:
    method = _METHODS[kind]
    if kind.endswith("source"):
        option, effect = "subscribe", "reads the topics of option 'subscribe', 'subscribePattern' or 'assign'"
    else:
        option, effect = "topic", "writes to the topic of option 'topic' or column 'topic'"
    value_text = repr(value) if name == "path" else value
    return OptionError(
        f"option {name!r} is {value_text} (the argument of {method}); expected none, because a {kind} {effect}",
        remedy=f"If it is a topic: .option('{option}', ...).{method}()",
    )


def tracks_asynchronously(options_of_spark: Mapping[str, str]) -> bool:
    """Whether Spark may write the log entries of a batch (offsets and commits) after it has run the batch."""
    return options_of_spark.get(ASYNC_PROGRESS, "false").strip().lower() == "true"

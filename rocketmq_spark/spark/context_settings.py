"""Passes settings of the Spark context to the processes that plan a write.

Spark passes its settings to tasks, but not to the other processes of a Python data source. ``register`` writes the settings that
exactly-once needs into an environment variable of these processes. The variable remains after the context has ended, so its value
also names the context to which the settings belong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from pyspark import SparkFiles

from rocketmq_spark.spark.conf import exactly_once_conf

SETTINGS_VARIABLE = "ROCKETMQ_SPARK_CONTEXT_SETTINGS"


def encoded_settings(get_setting: Callable[[str], str | None]) -> str:
    """Return the value of ``SETTINGS_VARIABLE``: JSON with the id of this process's context and the context's settings. A setting
    that has no value is null.
    """
    return json.dumps({"context": _context_id(), "settings": {name: get_setting(name) for name in exactly_once_conf()}})


def registered_settings() -> dict[str, str | None] | None:
    """Return the settings that ``register`` recorded for this process's context; None if ``register`` was not called for it."""
    text = os.environ.get(SETTINGS_VARIABLE)
    recorded_values: dict[str, Any] = json.loads(text) if text else {}
    return recorded_values["settings"] if recorded_values and recorded_values["context"] == _context_id() else None


def _context_id() -> str | None:
    """Return the folder of the context's files, which identifies the context; None if there is no context."""
    try:
        return SparkFiles.getRootDirectory()
    except AssertionError:
        return None

"""A PySpark connector for Apache RocketMQ, and the pure-Python client under it.

A name is imported when it is first used. So a Spark worker that only sends imports only the modules for sending.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rocketmq_spark.base import extras
from rocketmq_spark.spark import workers

if TYPE_CHECKING:
    from rocketmq_spark.consumer.listener import Context, Listener, OrderedContext
    from rocketmq_spark.errors import RocketMQError
    from rocketmq_spark.localbroker import LocalBroker
    from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, Reply, SendResult, SendStatus
    from rocketmq_spark.model.membership import ConsumerStats
    from rocketmq_spark.model.message import PoppedMessage
    from rocketmq_spark.model.send import TransactionState
    from rocketmq_spark.producer.rows.sent import SentRows
    from rocketmq_spark.producer.transactions import HalfMessage
    from rocketmq_spark.session.admin import Admin
    from rocketmq_spark.session.consumers import Consumer, PullConsumer, SimpleConsumer
    from rocketmq_spark.session.producers import Producer
    from rocketmq_spark.spark.conf import exactly_once_conf, low_latency_conf
    from rocketmq_spark.spark.datasource import register
    from rocketmq_spark.spark.monitoring.explain import explain
    from rocketmq_spark.spark.monitoring.group_offset_listener import GroupOffsetListener
    from rocketmq_spark.spark.monitoring.metrics_listener import MetricsListener
    from rocketmq_spark.spark.monitoring.queries import progress
    from rocketmq_spark.spark.read import read_rocketmq
    from rocketmq_spark.spark.sink.foreach import foreach_batch_writer, write_rocketmq

__version__ = "0.1.0"

_MODULE_BY_NAME = {
    "Admin": "session.admin",
    "Consumer": "session.consumers",
    "ConsumerStats": "model.membership",
    "Context": "consumer.listener",
    "GroupOffsetListener": "spark.monitoring.group_offset_listener",
    "HalfMessage": "producer.transactions",
    "Listener": "consumer.listener",
    "LocalBroker": "localbroker",
    "Message": "model",
    "MessageQueue": "model",
    "MetricsListener": "spark.monitoring.metrics_listener",
    "OrderedContext": "consumer.listener",
    "PoppedMessage": "model.message",
    "Producer": "session.producers",
    "PullConsumer": "session.consumers",
    "ReceivedMessage": "model",
    "Reply": "model",
    "RocketMQError": "errors",
    "SendResult": "model",
    "SendStatus": "model",
    "SentRows": "producer.rows.sent",
    "SimpleConsumer": "session.consumers",
    "TransactionState": "model.send",
    "exactly_once_conf": "spark.conf",
    "explain": "spark.monitoring.explain",
    "foreach_batch_writer": "spark.sink.foreach",
    "low_latency_conf": "spark.conf",
    "progress": "spark.monitoring.queries",
    "read_rocketmq": "spark.read",
    "register": "spark.datasource",
    "write_rocketmq": "spark.sink.foreach",
}

__all__ = [
    "Admin",
    "Consumer",
    "ConsumerStats",
    "Context",
    "GroupOffsetListener",
    "HalfMessage",
    "Listener",
    "LocalBroker",
    "Message",
    "MessageQueue",
    "MetricsListener",
    "OrderedContext",
    "PoppedMessage",
    "Producer",
    "PullConsumer",
    "ReceivedMessage",
    "Reply",
    "RocketMQError",
    "SendResult",
    "SendStatus",
    "SentRows",
    "SimpleConsumer",
    "TransactionState",
    "exactly_once_conf",
    "explain",
    "foreach_batch_writer",
    "low_latency_conf",
    "progress",
    "read_rocketmq",
    "register",
    "write_rocketmq",
]

# The packages that modules of ``_MODULE_BY_NAME`` need; a module that is not listed needs none. ``__all__`` omits names whose
# packages are not installed, so that ``import *``, ``help`` and ``inspect.getmembers`` work without extras.
_ARROW_PACKAGES = ("pyarrow", "numpy", "xxhash")
_PACKAGES_BY_MODULE = {
    "producer.rows.sent": ("numpy",),
    "spark.datasource": ("pyspark",),
    "spark.monitoring.group_offset_listener": ("pyspark",),
    "spark.monitoring.metrics_listener": ("pyspark",),
    "spark.read": ("pyspark", *_ARROW_PACKAGES),
    "spark.sink.foreach": ("pyspark", *_ARROW_PACKAGES),
}


def _missing_packages(name: str) -> list[str]:
    return [
        package for package in _PACKAGES_BY_MODULE.get(_MODULE_BY_NAME[name], ()) if not extras.is_installed(package)
    ]


if not TYPE_CHECKING:  # type checkers read the literal list
    __all__ = [name for name in __all__ if not _missing_packages(name)]


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module(f"{__name__}.aio")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if missing_packages := _missing_packages(name):
        extra = extras.SPARK if "pyspark" in missing_packages else extras.ARROW
        problem = (
            f"{__name__}.{name} needs packages that are not installed: {', '.join(missing_packages)}. Install them: "
            f"{extras.install_command(extra)}"
        )
        # ``hasattr`` handles only an AttributeError. An import statement replaces an AttributeError by its own error, which does
        # not name the missing package.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ModuleNotFoundError(problem, name=missing_packages[0])
        raise AttributeError(problem)
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aio"})


workers.check_workers_with_pyspark()

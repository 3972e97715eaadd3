"""What the options say of a spool; checked at the start, and that RocksDB is there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark import extras
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options, option_name
from rocketmq_spark.spool.records import SpoolOwner

_OF_SPOOL = ("spool_dir", "spool_sync", "spool_max_bytes")


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where a spool is, how safe ``add`` is when it returns, and how many bytes it may hold."""

    folder: Path
    sync: str
    max_bytes: int

    @classmethod
    def of(cls, options: Options) -> SpoolSettings | None:
        """None where sends may fail. One ``OptionError`` lists what is wrong."""
        found = problems(options)
        if found:
            raise OptionError.of(found)
        if options.on_send_failure != "spool":
            return None
        assert options.spool_dir is not None
        return cls(Path(options.spool_dir).expanduser(), options.spool_sync, options.spool_max_bytes)


def problems(options: Options) -> list[str]:
    """What is wrong with them, each a sentence without its full stop."""
    if options.on_send_failure != "spool":
        return [
            f"option {option_name(field)!r} means nothing without 'onSendFailure' spool"
            for field in _OF_SPOOL
            if field in options.given
        ]
    found = []
    if options.spool_dir is None:
        found.append("option 'onSendFailure' is 'spool', which needs option 'spoolDir': a folder on a disk that stays")
    if not extras.installed("rocksdict"):
        command = extras.command(extras.SPOOL)
        found.append(f"option 'onSendFailure' is 'spool', which needs the package rocksdict: {command}")
    return found


def owner_of(options: Options, purpose: str = "") -> SpoolOwner:
    """Whose records a spool holds that is opened with these options."""
    environment = f"environment {options.environment!r} ({options.environment_mode})" if options.environment else ""
    if environment and options.environments is not None:
        environment += f", of {_compact(options.environments)}"
    return SpoolOwner(tuple(sorted(options.cluster)), options.namespace or "", environment, purpose)


def _compact(layout: str) -> str:
    """However it was written down."""
    try:
        return json.dumps(json.loads(layout), sort_keys=True)
    except ValueError:
        return layout

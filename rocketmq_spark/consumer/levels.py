"""When a message that failed comes again: RocketMQ's delay levels and the count of attempts.

The broker decides (``AbstractSendMessageProcessor.consumerSendMsgBack``); the fallback of send-back and tests must come to
the same. Durations of levels are a setting of the broker, ``messageDelayLevel``.
"""

from __future__ import annotations

from rocketmq_spark.codes import DELAY_LEVELS

MAX_RECONSUME_TIMES = 16  # of concurrent consumers; orderly ones try for ever
ORDERLY_MAX_RECONSUME_TIMES = (1 << 31) - 1
FIRST_LEVEL = 3  # the broker adds it to how often the message came again
TO_DEAD_LETTERS = -1  # as a delay level: no more attempts

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def delay_s(level: int, table: tuple[str, ...] = DELAY_LEVELS) -> int:
    """Seconds of a level: none for 0, those of the last one above the table."""
    if level <= 0:
        return 0
    text = table[min(level, len(table)) - 1]
    return int(text[:-1]) * _UNITS_S[text[-1]]


def retry_level(reconsume_times: int, asked: int = 0) -> int:
    """The level at which a failed message comes again: the one asked for, or 0 to leave it to how often it came."""
    return asked if asked > 0 else FIRST_LEVEL + reconsume_times


def is_dead(reconsume_times: int, max_reconsume_times: int, asked: int = 0) -> bool:
    """Whether the next failure of a message that came again so often ends in the group's dead-letter topic."""
    return asked < 0 or reconsume_times >= max_reconsume_times

"""Brokers: which there are, what they report of themselves, and their settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from rocketmq_spark.admin.tools import AdminTools, deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.calls import refused
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import BrokerData
from rocketmq_spark.model.admin import BrokerState
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command


def cluster(tools: AdminTools) -> list[BrokerData]:
    """All brokers by name."""
    return [data for _, data in sorted(tools.admin.cluster().items())]


def states(tools: AdminTools) -> list[BrokerState]:
    """What every master and slave reports of itself, all asked at once. One that does not answer has an ``error``."""
    places = [(data, number, at) for data in cluster(tools) for number, at in sorted(data.addresses.items())]
    asked = [(at, rpc.GET_BROKER_RUNTIME_INFO.request(bname=data.broker_name)) for data, _, at in places]
    limit = deadline(tools)
    answers = tools.calls.exchange_each(asked, limit)
    young = limit.within(_YOUNG_S)
    while any(_is_young(answer) for answer in answers) and not young.expired:
        young.pause(_PAUSE_S)
        answers = tools.calls.exchange_each(asked, limit)
    return [
        _state(BrokerState(data.broker_name, data.cluster, number, at), answer)
        for (data, number, at), answer in zip(places, answers, strict=True)
    ]


# A broker that has just started has counted nothing yet, and fails at this question for a second.
_YOUNG_S, _PAUSE_S = 5.0, 0.2


def _is_young(answer: Command | RocketMQError) -> bool:
    remark = answer.remark or ""
    return getattr(answer, "code", None) == Response.SYSTEM_ERROR and "NoSuchElementException" in remark


def _state(there: BrokerState, answer: Command | RocketMQError) -> BrokerState:
    who = there.broker_name, there.cluster, there.broker_id, there.address
    if isinstance(answer, Command) and answer.code != Response.SUCCESS:
        answer = refused(answer, there.address)
    if isinstance(answer, RocketMQError):
        return BrokerState(*who, error=str(answer))
    facts = bodies.table(answer.body)
    started = facts.get("bootTimestamp", "")
    return BrokerState(
        *who,
        version=facts.get("brokerVersionDesc"),
        started_ms=int(started) if started.isdecimal() else None,
        put_per_s=_first_number(facts.get("putTps")),
        # 4.9 has the other spelling.
        get_per_s=_first_number(facts.get("getTransferredTps") or facts.get("getTransferedTps")),
        disk_used=_first_number(facts.get("commitLogDiskRatio")),
        facts=facts,
    )


def _first_number(text: str | None) -> float | None:
    """Rates come as three numbers: of 10 s, of a minute, of ten minutes. A ratio that is not known is -1."""
    try:
        number = float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
    return number if number >= 0 else None


def update_config(tools: AdminTools, broker: str, values: Mapping[str, str]) -> dict[str, str]:
    """Change settings of a master while it runs; the settings as it has them then. It also writes its configuration file.

    A broker takes names that it does not know without a word, and keeps a value that it cannot read: both are an
    ``OptionError`` here.
    """
    before = tools.admin.broker_config(broker)
    if unknown := sorted(values.keys() - before.keys()):
        near = difflib.get_close_matches(unknown[0], before, n=2, cutoff=0.6)
        raise OptionError(
            f"broker {broker} has no setting {', '.join(map(repr, unknown))}; nothing was changed",
            remedy=f"Did you mean {' or '.join(near)}?" if near else None,
        )
    tools.admin.update_broker_config(broker, values)
    after = tools.admin.broker_config(broker)
    kept = sorted(n for n, value in values.items() if after.get(n) == before[n] and not _same(before[n], value))
    if kept:
        raise OptionError(f"broker {broker} kept {kept[0]}={before[kept[0]]} and did not take {values[kept[0]]!r}")
    return after


def _same(one: str, other: str) -> bool:
    return one.strip().lower() == other.strip().lower()

"""Topics, rights, groups and how far readers are: what keeps messages from their readers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rocketmq_spark.cli.doctor.findings import Finding, advice, broken, failed, ok
from rocketmq_spark.cli.lag_view import duration, waiting
from rocketmq_spark.codes import CLEANUP_POLICY, COMPACTION, QUEUE_TYPE, Perm
from rocketmq_spark.errors import AccessDenied, RocketMQError
from rocketmq_spark.lag import QueueLag, total
from rocketmq_spark.model import Filter, TopicRoute
from rocketmq_spark.source.drift import Drift, DriftState

_TYPE = "message.type"
# A reader that is further behind than this share of the time for which messages are kept is close to losing some.
_CLOSE = 0.5
_WAITING = (
    (DriftState.UNREGISTERED, "is not registered", "Start it on its data; nothing is lost"),
    (DriftState.AWAY, "does not answer", "See what is said of the broker; nothing is lost while it is away"),
)


def topic(route: TopicRoute, told: Mapping[str, str] | None) -> Iterator[Finding]:
    """Where it is, what may be done there, and its kind by its attributes, None if they are not known."""
    check, attributes = f"topic {route.topic}", told or {}
    kind = attributes.get(_TYPE, "NORMAL") if told is not None else "not told"
    more = [f"{name}={attributes[name]}" for name in (QUEUE_TYPE, CLEANUP_POLICY) if name in attributes]
    places = ", ".join(f"{data.read_queues} on {data.broker_name}" for data in route.queues)
    yield ok(check, f"queues: {places}; type {', '.join([kind, *more])}")
    for bit, verb in ((Perm.READ, "read"), (Perm.WRITE, "written")):
        barred = sorted(data.broker_name for data in route.queues if not data.perm & bit)
        if barred:
            text = f"cannot be {verb} on {', '.join(barred)}: its permission there"
            remedy = "mqadmin updateTopicPerm -p 6 (4 read, 2 write)"
            whole = len(barred) == len(route.queues)
            yield broken(check, text, remedy) if whole else advice(check, text, remedy)
    if attributes.get(_TYPE, "NORMAL") not in ("NORMAL", "UNSPECIFIED", "MIXED"):
        yield advice(
            check, f"is of type {kind}: a Proxy refuses other messages", "Create it without message.type for a sink"
        )
    if attributes.get(CLEANUP_POLICY) == COMPACTION:
        yield advice(
            check, "keeps the last message of each key only", "Expect gaps in offsets; retention does not apply"
        )


def rights(topic: str, user: str | None, told: Mapping[str, RocketMQError | None]) -> Iterator[Finding]:
    """``told`` is what came of each question: ``source`` and ``sink``; None where it was let through."""
    who = f"user {user}" if user else "who has no accessKey"
    needed = {"source": "Sub and Get on the topic, Sub on the group", "sink": "Pub on the topic"}
    for role, error in told.items():
        check, what = f"rights {role}", "read" if role == "source" else "write"
        if error is None:
            yield ok(check, f"{who} may {what} {topic}")
        elif isinstance(error, AccessDenied):
            text = f"{who} may not {what} {topic}: {error.remark or error.message}"
            remedy = f"Grant {needed[role]}, or give options 'accessKey' and 'secretKey'"
            yield (
                broken(check, text, remedy)
                if role == "source"
                else advice(check, text, f"{remedy}; readers do without")
            )
        else:
            yield failed(check, error, "Look at the broker's log")


def subscriptions(group: str, members: Mapping[str, Mapping[str, Filter] | None]) -> Finding:
    """What each member wants, by topic; None where it did not say."""
    check = f"group {group}"
    silent = sorted(name for name, wanted in members.items() if wanted is None)
    known = {name: wanted for name, wanted in members.items() if wanted is not None}
    if not members:
        return ok(check, "has no member now")
    kinds = {_meaning(wanted): name for name, wanted in reversed(known.items())}
    if len(kinds) > 1:
        shown = "; ".join(f"{name} wants {_shown(known[name])}" for name in sorted(kinds.values()))
        return broken(
            check,
            f"its members do not want the same: {shown}",
            "Let all subscribe to the same, or give them groups of their own: messages are lost to some",
        )
    if silent:
        return advice(check, f"{len(members)} members, of which {', '.join(silent[:3])} did not say what they want",
                      "Look at their logs")  # fmt: skip
    return ok(check, f"{len(members)} members, all want {_shown(next(iter(known.values())))}")


def _meaning(wanted: Mapping[str, Filter]) -> frozenset[tuple[str, str, frozenset[str]]]:
    return frozenset(
        (
            topic,
            f.kind,
            frozenset(f.expression.replace(" ", "").split("||")) if f.kind == "TAG" else frozenset([f.expression]),
        )
        for topic, f in wanted.items()
    )


def _shown(wanted: Mapping[str, Filter]) -> str:
    return ", ".join(f"{topic} ({f.expression})" for topic, f in sorted(wanted.items())) or "nothing"


def retention(whose: str, rows: Sequence[QueueLag], kept_ms: int | None, now_ms: int) -> Finding:
    """How far a reader is, next to how long messages are kept; None where brokers do not tell."""
    every = total(rows, now_ms)
    remedy = "Raise fileReservedTime, or read faster; what is gone needs failOnDataLoss=warn to be passed over"
    if every.lost:
        return broken(whose, f"{every.lost} messages were removed before they were read", remedy)
    if every.lag is None:
        return advice(whose, "how far it is behind is not known", "Let it commit, or finish a batch, first")
    told = f"{every.lag} messages behind{f', the oldest for {duration(every.behind_ms)}' if every.behind_ms else ''}"
    if kept_ms is not None and every.behind_ms is not None and every.behind_ms > _CLOSE * kept_ms:
        return advice(whose, f"{told}, and messages are kept for {duration(kept_ms)}", remedy)
    kept = "" if kept_ms is None else f"; messages are kept for {duration(kept_ms)}"
    return ok(whose, told + kept)


def under_way(whose: str, told: Mapping[str, Any]) -> Finding:
    """The batch of a query that is not done, as ``lag_view.under_way`` has it: whether it waits for a broker."""
    brokers = ", ".join(told["waitsFor"])
    if not brokers:
        return ok(whose, waiting(told))
    return broken(
        whose,
        f"{waiting(told)}: no answer",
        f"Start {brokers}: nothing is lost, and the batch goes on. To go on without: rocketmq-spark checkpoint rewind",
    )


def drifted(whose: str, queues: Iterable[Drift]) -> Iterator[Finding]:
    """What became of the queues of a checkpoint."""
    every = list(queues)
    bad = [one for one in every if not one.state.lossless and not one.state.waits]
    if bad:
        shown = ", ".join(f"{one.queue} {one.state.value}" for one in bad[:3])
        yield broken(
            whose,
            f"{len(bad)} of {len(every)} queues do not go with it: {shown}",
            "See: rocketmq-spark checkpoint diff; failOnDataLoss=warn goes on without what is gone",
        )
    for state, what, remedy in _WAITING:
        waiting = [one.queue.broker_name for one in every if one.state is state]
        for name in sorted(set(waiting)):
            yield broken(whose, f"{name} {what}, and {waiting.count(name)} of {len(every)} queues wait for it", remedy)
    if all(one.state.lossless for one in every):
        yield ok(whose, f"goes with what brokers have, in all {len(every)} queues")

"""The doctor's checks of name servers, brokers, topics and groups. Pure.

Servers: whether they answer, their settings, disks and clocks. Topics and groups: types, permissions, subscriptions and lag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rocketmq_spark.base.codes import CLEANUP_POLICY, QUEUE_TYPE, Perm
from rocketmq_spark.cli.doctor.findings import Finding, advice_finding, broken_finding, failed_finding, ok_finding
from rocketmq_spark.cli.lag_view import duration, unfinished_batch_text, went_back_count
from rocketmq_spark.client.topic_attributes import is_compacted
from rocketmq_spark.consumer.group_health import POP, POP_REMEDY
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CallTimeout,
    CertificateRefused,
    NotSupported,
    RocketMQError,
)
from rocketmq_spark.model import BrokerData, Filter, TopicRoute
from rocketmq_spark.model.admin import RETENTION_NOT_KNOWN, QueueLag, total
from rocketmq_spark.options.names import kafka_port_remedy
from rocketmq_spark.remoting.transport import CANNOT_CONNECT
from rocketmq_spark.spark.checkpoints.rewind import Drift, DriftState
from rocketmq_spark.wire import bodies

# Settings that make reads slow if they are lower than these values (docs/performance.md).
PULL_MINIMUMS = {"maxTransferCountOnMessageInMemory": 1024, "maxTransferBytesOnMessageInMemory": 4_194_304}
COLD_PULL_MINIMUMS = {"maxTransferCountOnMessageInDisk": 1024, "maxTransferBytesOnMessageInDisk": 4_194_304}
# Limits for the used part of a disk. Above ``ADVISED_MAX_DISK_USAGE``, RocketMQ deletes messages before their retention ends.
# Above ``BROKEN_DISK_USAGE``, RocketMQ rejects new messages.
ADVISED_MAX_DISK_USAGE, BROKEN_DISK_USAGE = 0.85, 0.90
# The comparison of clocks is not exact, because a broker reports its uptime in whole seconds.
CLOCK_TOLERANCE_MS = 5_000
CHECK_PROXY_REMEDY = "Check that the Proxy and the broker run, and firewalls"
_UPTIME_PATTERN = re.compile(r"\[ (\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds \]")


def name_server_finding(address: str, error: RocketMQError | None, tls: bool) -> Finding:
    check = "name server"
    if error is None:
        return ok_finding(check, f"{address} answers{', in TLS' if tls else ''}")
    if isinstance(error, NotSupported):
        return ok_finding(check, f"{address} is a Proxy, behind which brokers are not seen")
    if isinstance(error, AccessDenied):
        return advice_finding(
            check, f"{address} does not let this user list brokers", "These checks are skipped: try another user"
        )
    remedy = (
        kafka_port_remedy([address]) or error.remedy or "Check option 'nameServer', DNS and firewalls, and that it runs"
    )
    return _unreachable_finding(check, f"{address} cannot be used", error, tls, remedy)


def not_a_name_server_finding(address: str) -> Finding:
    return broken_finding(
        "name server",
        f"{address} is a broker's port: it answers as one, and knows no routes",
        "Give host and port of the name server, 9876 unless it was changed",
    )


def brokers_finding(cluster: Mapping[str, BrokerData]) -> Finding:
    """Report the registered brokers, and those without a master."""
    if not cluster:
        return broken_finding("brokers", "none is registered", "Start one, or look at its namesrvAddr and its log")
    masterless_brokers = sorted(name for name, data in cluster.items() if not data.master)
    if masterless_brokers:
        return broken_finding(
            "brokers",
            f"{', '.join(masterless_brokers)} without a master: nothing can be written there",
            "Start the master",
        )
    slave_count = sum(len(data.slaves) for data in cluster.values())
    return ok_finding(
        "brokers", f"{', '.join(sorted(cluster))}; {slave_count} slaves. Brokers that are down are not listed"
    )


def broker_address_finding(
    name: str, address: str, connected_address: str, error: RocketMQError | None, tls: bool
) -> Finding:
    """Report whether the address that a broker advertises can be reached, or the address to which ``addressMap`` maps it."""
    check, shown_address = (
        f"broker {name}",
        address if connected_address == address else f"{address}, dialled as {connected_address}",
    )
    if error is None:
        return ok_finding(check, f"{shown_address} answers")
    port = address.rpartition(":")[2]
    return _unreachable_finding(
        check,
        f"advertises {shown_address}, which cannot be reached from here",
        error,
        tls,
        f"Let it advertise a reachable one (brokerIP1 in broker.conf), or set option 'addressMap', here: "
        f'-o \'addressMap={{"{address}":"<reachable host>:{port}"}}\'',
    )


def advertised_address_findings(address: str, errors: Mapping[str, RocketMQError], tls: bool) -> Iterator[Finding]:
    """Yield findings about an address in the routes of a Proxy. ``errors`` are the errors of requests to this address, by broker
    name.
    """
    check = "Proxy"
    if not errors:
        yield ok_finding(check, f"{address} answers for its brokers")
    for broker, error in errors.items():
        if isinstance(error, BrokerError | CallTimeout) and not error.message.startswith(CANNOT_CONNECT):
            yield failed_finding(check, error, CHECK_PROXY_REMEDY, f"{address} does not reach broker {broker}: ")
            continue
        text = f"advertises {address}, which cannot be reached from here"
        yield _unreachable_finding(check, text, error, tls, error.remedy or CHECK_PROXY_REMEDY)
        return  # the other brokers behind this address have the same error


def unchecked_addresses_finding(error: RocketMQError) -> Finding:
    """Advise to name a topic, because only the route of a topic contains the addresses that a Proxy advertises.

    Without a named topic, ``doctor`` requests the route of TBW102, which only brokers with autoCreateTopicEnable=true have.
    """
    return advice_finding(
        "Proxy", f"what it advertises is not checked: {error.remark or error.message}", "Name a topic with --topic"
    )


def not_a_broker_finding(name: str, error: RocketMQError) -> Finding:
    """Report a server that is not a broker. Option 'addressMap' maps the address of broker ``name`` to this server."""
    return failed_finding(f"broker {name}", error, "Check option 'addressMap'")


def _unreachable_finding(check: str, text: str, error: RocketMQError, tls: bool, remedy: str) -> Finding:
    if isinstance(error, CertificateRefused):
        return failed_finding(check, error, "Check option 'tlsCaFile'")
    hint = "; or it does not speak TLS, which option 'tls' asks for" if tls else ""
    return broken_finding(check, f"{text}: {error.message}{f': {error.remark}' if error.remark else ''}", remedy + hint)


def settings_findings(name: str, config: Mapping[str, str], uses_sql: bool) -> Iterator[Finding]:
    """Check settings of broker.conf. A setting that the broker does not report is not checked."""
    check = f"broker {name}"
    for limits, pull_kind in ((PULL_MINIMUMS, "a pull"), (COLD_PULL_MINIMUMS, "a pull of old messages")):
        too_low_settings = {
            key: value
            for key, value in limits.items()
            if key in config and (number := bodies.config_number(config, key)) is not None and number < value
        }
        if too_low_settings:
            max_count, max_bytes = (config.get(key, "?") for key in limits)
            settings_text = ", ".join(f"{key}={value}" for key, value in too_low_settings.items())
            yield advice_finding(
                check,
                f"{pull_kind} gives at most {max_count} messages or {max_bytes} bytes",
                f"In broker.conf {settings_text}: the broker then needs 60 % less CPU for each small message "
                "(docs/performance.md)",
            )
    if config.get("messageIndexEnable") == "false":
        yield advice_finding(
            check, "messages are not indexed: none is found by its key or id", "Set messageIndexEnable=true"
        )
    if config.get("enablePropertyFilter") == "false":
        text = "SQL filters are switched off"
        remedy = "Set enablePropertyFilter=true, and restart it"
        yield (
            broken_finding(check, f"{text}, and option 'sql' is given", remedy)
            if uses_sql
            else advice_finding(check, text, remedy)
        )


def unreadable_settings_finding(name: str, error: RocketMQError) -> Finding:
    """Report a broker that does not return its settings: only administrators may request them."""
    return advice_finding(
        f"broker {name}",
        f"does not report its settings: {error.remark or error.message}",
        "These checks are skipped: check options 'accessKey' and 'secretKey', or run doctor as an administrator",
    )


def unrequested_settings_finding() -> Finding:
    """Report that the settings of some brokers are not requested, because others on the network could read the passwords in the
    answers.
    """
    return advice_finding(
        "settings of brokers",
        f"{RETENTION_NOT_KNOWN}, nor are other settings: the answer would contain passwords in clear text",
        "Set option 'tls', or run doctor on the machine of the broker",
    )


def unknown_user_finding(name: str, error: AccessDenied) -> Finding:
    """Report a broker that rejects a request which every known user may make."""
    return broken_finding(f"broker {name}", f"does not know this user: {error.remark or error.message}",
                  "Check options 'accessKey' and 'secretKey'")  # fmt: skip


def unreadable_state_finding(name: str, error: RocketMQError) -> Finding:
    """Report a broker that does not return its state.

    In the first seconds after its start, a broker of RocketMQ 5.5.0 returns an error instead of its state (docs/upstream.md).
    """
    return advice_finding(
        f"broker {name}",
        f"does not report its version, disk and clock: {error.remark or error.message}",
        "These checks are skipped: if the broker has just started, try again in some seconds",
    )


def disk_finding(name: str, runtime: Mapping[str, str]) -> Finding | None:
    """Check the fullest disk of a broker; None if the broker does not report disks."""
    used_fractions = [float(runtime[key]) for key in ("commitLogDiskRatio", "consumeQueueDiskRatio") if key in runtime]
    if not used_fractions or max(used_fractions) < 0:
        return None
    check, usage_text = f"broker {name}", f"its disk is {max(used_fractions):.0%} full"
    remedy = "Free space, or lower fileReservedTime"
    if max(used_fractions) > BROKEN_DISK_USAGE:
        return broken_finding(check, f"{usage_text}: it refuses messages", remedy)
    if max(used_fractions) > ADVISED_MAX_DISK_USAGE:
        return advice_finding(check, f"{usage_text}: soon it deletes messages before their time", remedy)
    return ok_finding(check, usage_text)


def clock_finding(name: str, runtime: Mapping[str, str], now_ms: int) -> Finding | None:
    """Compare the clock of a broker with ours; None if the broker does not report its uptime."""
    match = _UPTIME_PATTERN.match(runtime.get("runtime", ""))
    if match is None or "bootTimestamp" not in runtime:
        return None
    days, hours, minutes, seconds = map(int, match.groups())
    up_ms = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000
    difference_ms = int(runtime["bootTimestamp"]) + up_ms - now_ms
    check = f"broker {name}"
    if abs(difference_ms) <= CLOCK_TOLERANCE_MS:
        return ok_finding(check, "its clock and ours agree")
    return advice_finding(
        check,
        f"its clock is {duration(abs(difference_ms))} {'ahead of' if difference_ms > 0 else 'behind'} ours",
        "Set both by NTP: starting times, delays and the ages in lag depend on the broker's clock",
    )


def version_finding(name: str, runtime: Mapping[str, str]) -> Finding | None:
    """Check the release of a broker; None if the broker does not report it."""
    release = runtime.get("brokerVersionDesc")
    if release is None:
        return None
    match = re.match(r"V(\d+)_", release)
    if match is not None and int(match[1]) < 5:
        return advice_finding(
            f"broker {name}", f"RocketMQ {release}", "Upgrade to 5.x for delays of any length and attributes of topics"
        )
    return ok_finding(f"broker {name}", f"RocketMQ {release}")


_TYPE_ATTRIBUTE = "message.type"
# A reader is close to losing messages if its lag is more than this fraction of the retention.
_ADVISED_MAX_LAG_FRACTION = 0.5
# If a batch has been unfinished for longer than this, its query may have ended.
LONG_BATCH_MS = 300_000
_UNAVAILABLE_STATES = (
    (DriftState.UNREGISTERED, "is not registered", "Start it on its data; nothing is lost"),
    (DriftState.UNAVAILABLE, "does not answer", "See the finding about the broker; nothing is lost while it is away"),
)


def topic_findings(route: TopicRoute, config: Mapping[str, str] | None) -> Iterator[Finding]:
    """Report the queues, permissions and type of a topic. ``config`` are its attributes, None if they are unknown."""
    check, attributes = f"topic {route.topic}", config or {}
    message_type = attributes.get(_TYPE_ATTRIBUTE, "NORMAL") if config is not None else "unknown"
    other_attributes = [f"{name}={attributes[name]}" for name in (QUEUE_TYPE, CLEANUP_POLICY) if name in attributes]
    queue_counts = ", ".join(f"{data.read_queues} on {data.broker_name}" for data in route.queues)
    yield ok_finding(check, f"queues: {queue_counts}; type {', '.join([message_type, *other_attributes])}")
    for bit, verb in ((Perm.READ, "read"), (Perm.WRITE, "written")):
        forbidden_brokers = sorted(data.broker_name for data in route.queues if not data.perm & bit)
        if forbidden_brokers:
            text = f"cannot be {verb} on {', '.join(forbidden_brokers)}: its permission there forbids that"
            remedy = "mqadmin updateTopicPerm -p 6 (4 read, 2 write)"
            is_everywhere = len(forbidden_brokers) == len(route.queues)
            yield broken_finding(check, text, remedy) if is_everywhere else advice_finding(check, text, remedy)
    if attributes.get(_TYPE_ATTRIBUTE, "NORMAL") not in ("NORMAL", "UNSPECIFIED", "MIXED"):
        yield advice_finding(
            check,
            f"is of type {message_type}: a Proxy refuses other messages",
            "Create it without message.type for a sink",
        )
    if is_compacted(attributes):
        yield advice_finding(
            check, "keeps the last message of each key only", "Expect gaps in offsets; retention does not apply"
        )


def rights_findings(
    topic: str, user: str | None, errors_by_role: Mapping[str, RocketMQError | None]
) -> Iterator[Finding]:
    """Report the rights of a user. ``errors_by_role`` has the error of a trial request for each of ``source`` and ``sink``, None
    if the request was allowed.
    """
    user_text = f"user {user}" if user else "a user without accessKey"
    needed_rights = {"source": "Sub and Get on the topic, Sub on the group", "sink": "Pub on the topic"}
    for role, error in errors_by_role.items():
        check, verb = f"rights {role}", "read" if role == "source" else "write"
        if error is None:
            yield ok_finding(check, f"{user_text} may {verb} {topic}")
        elif isinstance(error, AccessDenied):
            where_text = f" (at {error.addr})" if error.addr else ""
            text = f"{user_text} may not {verb} {topic}: {error.remark or error.message}{where_text}"
            remedy = f"Grant {needed_rights[role]}, or give options 'accessKey' and 'secretKey'"
            yield (
                broken_finding(check, text, remedy)
                if role == "source"
                else advice_finding(check, text, f"{remedy}; readers do not need it")
            )
        else:
            yield failed_finding(check, error, "Look at the broker's log")


def unknown_members_finding(group: str, error: NotSupported) -> Finding:
    """Report that the server, such as a Proxy, does not return what the members of a group subscribe to."""
    text = f"what its members subscribe to is unknown: {error.message}"
    return advice_finding(f"group {group}", text, error.remedy or "Name another server")


def subscriptions_finding(group: str, filters_by_member: Mapping[str, Mapping[str, Filter] | None]) -> Finding:
    """Check that all members have the same subscriptions. ``filters_by_member`` has None for a member that did not report
    them.
    """
    check = f"group {group}"
    silent_members = sorted(name for name, filters in filters_by_member.items() if filters is None)
    subscriptions_by_member = {name: filters for name, filters in filters_by_member.items() if filters is not None}
    if not filters_by_member:
        return ok_finding(
            check, "has no member now that brokers know; only a Proxy knows members that consume over gRPC"
        )
    members_by_subscription = {
        _normalized_filters(filters): name for name, filters in reversed(subscriptions_by_member.items())
    }
    if len(members_by_subscription) > 1:
        examples = "; ".join(
            f"{name} wants {_subscription_text(subscriptions_by_member[name])}"
            for name in sorted(members_by_subscription.values())
        )
        return broken_finding(
            check,
            f"its members have different subscriptions: {examples}",
            "Let all subscribe to the same, or give them groups of their own: otherwise some members miss messages",
        )
    if silent_members:
        return advice_finding(
            check,
            f"{len(filters_by_member)} members, of which {', '.join(silent_members[:3])} did not say what they subscribe to: "
            "they hang, cannot be reached, or their clients do not answer such questions",
            f"Restart members that hang: nobody reads their queues. rocketmq-spark group describe {group} has the addresses",
        )
    members_text = (
        "1 member, which subscribes"
        if len(filters_by_member) == 1
        else f"{len(filters_by_member)} members, all of which subscribe"
    )
    return ok_finding(check, f"{members_text} to {_subscription_text(next(iter(subscriptions_by_member.values())))}")


def consume_modes_findings(group: str, modes: Mapping[tuple[str, str], str]) -> Iterator[Finding]:
    """Yield advice for each topic whose consume mode is POP. ``modes`` has the mode for each topic and broker."""
    popped_topics_and_brokers = sorted(topic_and_broker for topic_and_broker, mode in modes.items() if mode == POP)
    for topic in dict.fromkeys(topic for topic, _ in popped_topics_and_brokers):
        brokers = ", ".join(broker for name, broker in popped_topics_and_brokers if name == topic)
        yield advice_finding(
            f"group {group}",
            f"its consume mode for topic {topic} is POP at {brokers}: if some members pull (such as consumers of this package "
            "over remoting) and others pop, each message is delivered twice",
            POP_REMEDY,
        )


def _normalized_filters(filters: Mapping[str, Filter]) -> frozenset[tuple[str, str, frozenset[str]]]:
    return frozenset(
        (
            topic,
            topic_filter.kind,
            frozenset(topic_filter.expression.replace(" ", "").split("||"))
            if topic_filter.kind == "TAG"
            else frozenset([topic_filter.expression]),
        )
        for topic, topic_filter in filters.items()
    )


def _subscription_text(filters: Mapping[str, Filter]) -> str:
    return (
        ", ".join(f"{topic} ({topic_filter.expression})" for topic, topic_filter in sorted(filters.items()))
        or "nothing"
    )


def retention_finding(reader: str, rows: Sequence[QueueLag], retention_ms: int | None, now_ms: int) -> Finding:
    """Compare the lag of a reader with ``retention_ms``: the time for which brokers keep messages, None if it is unknown."""
    totals = total(rows, now_ms)
    if went_back_queues := went_back_count(rows):
        return broken_finding(
            reader,
            f"{went_back_queues} of {len(rows)} queues end before its offsets: their topic was created again, or their broker "
            "lost messages",
            f"See: rocketmq-spark lag --{reader}. To read all that is there now: rocketmq-spark offsets set "
            f"{reader.partition(' ')[2]} --to earliest --yes",
        )
    remedy = "Raise fileReservedTime, or read faster"
    if reader.startswith("checkpoint "):  # a group needs no option: it skips removed messages
        remedy += "; to continue after removed messages, start the query once with failOnDataLoss=warn"
    if totals.lost:
        return broken_finding(reader, f"{totals.lost} messages were removed before they were read", remedy)
    if totals.lag is None:
        return advice_finding(reader, "how far it is behind is not known", "Let it commit, or finish a batch, first")
    counted_text = f" in {len(rows) - totals.unknown_queues} of {len(rows)} queues" if totals.unknown_queues else ""
    oldest_text = f", the oldest for {duration(totals.behind_ms)}" if totals.behind_ms else ""
    behind_text = f"{totals.lag} messages behind{counted_text}{oldest_text}"
    if (
        retention_ms is not None
        and totals.behind_ms is not None
        and totals.behind_ms > _ADVISED_MAX_LAG_FRACTION * retention_ms
    ):
        return advice_finding(reader, f"{behind_text}, and messages are kept for {duration(retention_ms)}", remedy)
    retention_text = "" if retention_ms is None else f"; messages are kept for {duration(retention_ms)}"
    return ok_finding(reader, behind_text + retention_text)


def unfinished_batch_finding(reader: str, batch_state: Mapping[str, Any]) -> Finding:
    """Report the unfinished batch of a query. ``batch_state`` is from ``lag_view.unfinished_batch``. The query may have ended."""
    brokers = ", ".join(batch_state["waitsFor"])
    if not brokers and (batch_state["forMs"] or 0) < LONG_BATCH_MS:
        return ok_finding(reader, unfinished_batch_text(batch_state))
    if not brokers:
        return advice_finding(
            reader,
            unfinished_batch_text(batch_state),
            "Look at the log of the query's driver. If the driver has ended, start it: it repeats the batch",
        )
    return broken_finding(
        reader,
        unfinished_batch_text(batch_state),
        f"Start {brokers}: nothing is lost, and the batch goes on. To go on without {brokers}: rocketmq-spark checkpoint "
        "rewind",
    )


def reads_other_topics_finding(reader: str, read_topics: Iterable[str], topics: Iterable[str]) -> Finding:
    """Advise if the query of a checkpoint reads none of the given topics."""
    topic_names = ", ".join(sorted(set(topics)))
    return advice_finding(
        reader,
        f"its query reads {', '.join(sorted(read_topics))}, not {topic_names}",
        f"If the query is to read {topic_names}, give its own checkpointLocation; if it writes {topic_names}, this is right",
    )


def checkpoint_drift_findings(reader: str, queues: Iterable[Drift]) -> Iterator[Finding]:
    """Report the queues of a checkpoint that do not match the brokers."""
    drifts = list(queues)
    lossy_drifts = [drift for drift in drifts if not drift.state.is_lossless and not drift.state.is_unavailable]
    if lossy_drifts:
        examples = ", ".join(f"{drift.queue} {drift.state.value}" for drift in lossy_drifts[:3])
        yield broken_finding(
            reader,
            f"{len(lossy_drifts)} of {len(drifts)} queues do not match what brokers have: {examples}",
            "See: rocketmq-spark checkpoint diff; with failOnDataLoss=warn the query continues at the first message that is "
            "kept, and reads a topic that was created again from its start",
        )
    for state, problem, remedy in _UNAVAILABLE_STATES:
        broker_names = [drift.queue.broker_name for drift in drifts if drift.state is state]
        for name in sorted(set(broker_names)):
            yield broken_finding(
                reader,
                f"{name} {problem}, and {broker_names.count(name)} of {len(drifts)} queues wait for it",
                remedy,
            )
    if all(drift.state.is_lossless for drift in drifts):
        yield ok_finding(reader, f"matches what brokers have, in all {len(drifts)} queues")

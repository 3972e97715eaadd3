"""``Finding``, the result of one check, and the checks of this machine (Java, Python, packages), of rights, and of Proxies.

Functions without a client or a target are pure.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.admin import deadline
from rocketmq_spark.base import extras
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import TopicType
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CertificateRefused,
    GroupNotFound,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.grpc_proxy.tables import Code
from rocketmq_spark.model import MessageQueue, SendRequest, TopicRoute
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.options.transport import GRPC


class Level(enum.Enum):
    """``ADVICE``: the checked thing works but could be better, or it fails only for some users. ``BROKEN``: the checked thing
    will fail.
    """

    OK = "ok"
    ADVICE = "advice"
    BROKEN = "broken"


class Finding(NamedTuple):
    """One line of output: the checked thing, the level, the observation, and the remedy."""

    check: str
    level: Level
    text: str
    remedy: str | None = None


def ok_finding(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def advice_finding(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.ADVICE, text, remedy)


def broken_finding(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.BROKEN, text, remedy)


def failed_finding(check: str, error: RocketMQError, remedy: str, prefix: str = "") -> Finding:
    """Return a finding of level ``BROKEN`` for an error. Its remedy is the error's own, or ``remedy`` if the error has none."""
    reason = error.message if not error.remark else f"{error.message}: {error.remark}"
    where_text = f" (at {error.addr})" if error.addr else ""
    return broken_finding(check, " ".join(f"{prefix}{reason}{where_text}".split()), error.remedy or remedy)


def exit_code(findings: list[Finding], strict: bool) -> int:
    """Return the exit code: 1 if anything is broken, with ``strict`` also if there is advice."""
    bad_levels = {Level.BROKEN, Level.ADVICE} if strict else {Level.BROKEN}
    return 1 if any(finding.level in bad_levels for finding in findings) else 0


# The oldest supported version of each package in the extra ``spark``, and the first version that is too new.
_VERSION_BOUNDS = {
    name: (low, high) for name, low, high in map(extras.requirement_parts, extras.REQUIREMENTS[extras.SPARK])
}
OLDEST_VERSIONS = {name: low for name, (low, _) in _VERSION_BOUNDS.items()}
FIRST_TOO_NEW_VERSIONS = {name: high for name, (_, high) in _VERSION_BOUNDS.items() if high}


def java_finding(java_or_error: tuple[str, int] | RocketMQError) -> Finding:
    """Report the path and version of Java, or why there is none."""
    if isinstance(java_or_error, RocketMQError):
        return broken_finding("java", java_or_error.message, java_or_error.remedy or "Install a Java runtime")
    return ok_finding("java", f"Java {java_or_error[1]}, {java_or_error[0]}")


def python_finding(version: str, versions: Mapping[str, str | None]) -> Finding:
    """Check the packages. ``versions`` has their versions by name, None for a missing package."""
    packages_text = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    missing_packages = [name for name, number in versions.items() if number is None and name in OLDEST_VERSIONS]
    # PySpark's version is not checked, because vendors add parts of newer versions to older versions; see
    # ``no_data_sources_finding``.
    checked_packages = {name: low for name, low in OLDEST_VERSIONS.items() if name != "pyspark"}
    too_old_packages = [
        n
        for n, v in versions.items()
        if v is not None and n in checked_packages and _release_numbers(v) < checked_packages[n]
    ]
    too_new_packages = [
        n
        for n, v in versions.items()
        if v is not None and n in FIRST_TOO_NEW_VERSIONS and _release_numbers(v) >= FIRST_TOO_NEW_VERSIONS[n]
    ]
    if missing_packages or too_old_packages:
        needed_packages = (*missing_packages, *too_old_packages)
        requirements = " ".join(f"'{name}>={'.'.join(map(str, OLDEST_VERSIONS[name]))}'" for name in needed_packages)
        return broken_finding("python", f"Python {version}, {packages_text}; missing or too old: {', '.join(needed_packages)}",
                      f"pip install {requirements}")  # fmt: skip
    if too_new_packages:
        name = too_new_packages[0]
        return advice_finding(
            "python",
            f"Python {version}, {packages_text}; PySpark does not support {name} {versions[name]} yet",
            f"pip install '{name}<{FIRST_TOO_NEW_VERSIONS[name][0]}'",
        )
    return ok_finding("python", f"Python {version}, {packages_text}")


def no_data_sources_finding(version: str) -> Finding:
    """Advise what to use if PySpark does not support data sources in Python, such as ``format("rocketmq")``."""
    return advice_finding(
        "pyspark",
        f'PySpark {version} lacks pyspark.sql.datasource, so format("rocketmq") does not exist',
        "Read with read_rocketmq(spark, ...), write with foreach_batch_writer or write_rocketmq; to read streams, use a PySpark "
        "that has it: pip install 'pyspark>=4.0'",
    )


def workers_finding(program: str, executable: str, can_import: bool) -> Finding:
    """Check the Python that Spark's workers run."""
    if can_import:
        return ok_finding("workers", f"Spark's workers on this machine run {program}, which has this package")
    return broken_finding(
        "workers",
        f"Spark's workers on this machine run {program}, which cannot import rocketmq_spark and pyarrow",
        f"Activate the virtual environment, or set PYSPARK_PYTHON={executable}",
    )


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (4, 3, 0) for ``4.3.0.dev1``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


if TYPE_CHECKING:
    from rocketmq_spark.session import Client


def worst_read_error(
    client: Client, route: TopicRoute, queues: Sequence[MessageQueue], group: str
) -> RocketMQError | None:
    """Return the most important error of reads from the brokers of these queues; None if all succeed."""
    return _worst_error(queues, lambda queue: _read_error(client, route, queue, group))


def worst_write_error(client: Client, route: TopicRoute, queues: Sequence[MessageQueue]) -> RocketMQError | None:
    """Return the most important error of sends to the brokers of these queues; None if all succeed."""
    return _worst_error(queues, lambda queue: _write_error(client, route, queue))


def _worst_error(
    queues: Sequence[MessageQueue], error_of: Callable[[MessageQueue], RocketMQError | None]
) -> RocketMQError | None:
    """Call ``error_of`` for one queue of each broker, because each broker has its own rights and groups. Denied access is more
    important than other errors.
    """
    errors = [error_of(queue) for queue in {queue.broker_name: queue for queue in queues}.values()]
    actual_errors = [error for error in errors if error is not None]
    return next(
        (error for error in actual_errors if isinstance(error, AccessDenied)),
        actual_errors[0] if actual_errors else None,
    )


def _read_error(client: Client, route: TopicRoute, queue: MessageQueue, group: str) -> RocketMQError | None:
    """Return the error of the requests that a source makes: offsets, then a pull as the group.

    The pull is for a queue that does not exist. In an existing queue, the pull could consume an operator's offset reset, because
    a broker returns the reset to the next pull of the group.
    """
    missing_queue = queue._replace(queue_id=max(data.read_queues for data in route.queues) + 1_000)
    request_deadline = deadline(client)
    try:
        client.offset_reader.bounds([queue], request_deadline)
    except RocketMQError as e:
        return e
    try:
        client.offset_reader.sample(group, missing_queue, 0, request_deadline)
    except RocketMQError as e:
        return e if isinstance(e, AccessDenied | GroupNotFound) or e.broker_code is None else None
    return None


def _write_error(client: Client, route: TopicRoute, queue: MessageQueue) -> RocketMQError | None:
    """Send a message to a queue that does not exist: the broker checks the rights, and then cannot store the message."""
    missing_queue = queue._replace(queue_id=max(data.write_queues for data in route.queues) + 1_000)
    try:
        client.sender.send(missing_queue, SendRequest(GROUP, b"x"), deadline(client))
    except AccessDenied as e:
        return e
    except RocketMQError as e:
        return None if e.broker_code is not None else e
    return None


if TYPE_CHECKING:
    from rocketmq_spark.options import Options

PROXY_CHECK = "proxy"
_TYPES_THAT_TAKE_NORMAL_MESSAGES = frozenset({TopicType.NORMAL, "UNSPECIFIED", "MIXED"})
_TYPE_REMEDIES = {
    TopicType.FIFO: "Give each row a shardingKey, and option queueSelector=hash",
    TopicType.DELAY: "Give each row a delayMs, delayLevel or deliverAt",
    TopicType.PRIORITY: "Give each row a priority",
}


def proxy_endpoint_finding(address: str, error: RocketMQError | None, tls: bool) -> Finding:
    """Report whether a Proxy answers. ``error`` is the error of a request for a route. An error that the Proxy itself returned is
    an answer, too.
    """
    if error is None or _is_answer_of_proxy(error):
        return ok_finding(PROXY_CHECK, f"{address} answers over gRPC{', in TLS' if tls else ''}")
    if isinstance(error, AccessDenied):
        return broken_finding(
            PROXY_CHECK,
            f"{address} does not know this user: {_error_text(error)}",
            "Check options 'accessKey' and 'secretKey'",
        )
    if isinstance(error, CertificateRefused):
        return failed_finding(PROXY_CHECK, error, "Check option 'tlsCaFile'")
    if isinstance(error, NotSupported | RemoteProtocolError):
        return broken_finding(
            PROXY_CHECK,
            f"{address} is not the gRPC port of a Proxy: {_error_text(error)}",
            "Check option 'proxyEndpoint'",
        )
    if isinstance(error, OptionError):
        return failed_finding("options", error, "Look at docs/options.md")
    remedy = error.remedy or "Check whether the Proxy hangs, or a firewall drops its packets"
    return broken_finding(PROXY_CHECK, f"{address} cannot be used: {_error_text(error)}", remedy)


def _is_answer_of_proxy(error: RocketMQError) -> bool:
    """Whether the Proxy itself returned the error: for example, the topic does not exist, or this user has no right to it."""
    is_broker_answer = isinstance(error, BrokerError) and error.broker_code not in (None, Code.UNAUTHORIZED)
    return is_broker_answer or isinstance(error, RouteNotFound)


def _error_text(error: RocketMQError) -> str:
    return " ".join(f"{error.message}{f': {error.remark}' if error.remark else ''}".split())


def proxy_topic_finding(address: str, name: str, types_or_error: frozenset[str] | RocketMQError) -> Finding:
    """Report whether a sink can write to a topic. ``types_or_error`` are the types of messages that the topic takes, or the error
    of the request for these types.
    """
    check = f"topic {name}"
    if isinstance(types_or_error, RocketMQError):
        return failed_finding(check, types_or_error, "Check its name: rocketmq-spark topic list, at a name server")
    types = ", ".join(sorted(types_or_error)) or "no type that is known here"
    text = f"the Proxy at {address} routes it, and takes {types}"
    if types_or_error & _TYPES_THAT_TAKE_NORMAL_MESSAGES:
        return ok_finding(check, text)
    remedy = next((_TYPE_REMEDIES[kind] for kind in sorted(types_or_error) if kind in _TYPE_REMEDIES), None)
    return advice_finding(check, f"{text}: other messages are refused", remedy or "A sink needs a topic of type NORMAL")


# Options that only brokers or only Proxies use, in the spelling that ``_normalized_name`` returns.
_BROKER_OPTIONS = frozenset({"nameserver", "namesrvaddr", "addressmap", "tlscheckhostname", "tlskeypassword"})
_PROXY_OPTIONS = frozenset({"proxyendpoint", "tlsservername", "transport"})


def _normalized_name(name: str) -> str:
    """Return the same text for all spellings of an option's name."""
    return name.replace("_", "").lower()


def _names_a_proxy(target: Target) -> bool:
    given_options = {_normalized_name(name): value for name, value in target.given_options.items() if value}
    return "proxyendpoint" in given_options or given_options.get("transport") == GRPC


def broker_target(target: Target) -> Target | None:
    """Return the target of requests to name servers and brokers; None if only a Proxy is given."""
    given_names = {_normalized_name(name) for name, value in target.given_options.items() if value}
    if _names_a_proxy(target) and not given_names & {"nameserver", "namesrvaddr"}:
        return None
    return Target(
        {name: value for name, value in target.given_options.items() if _normalized_name(name) not in _PROXY_OPTIONS}
    )


def proxy_options(target: Target) -> dict[str, object] | None:
    """Return the options that apply to a Proxy; None if no Proxy is given."""
    from rocketmq_spark.options import TABLE

    if not _names_a_proxy(target):
        return None
    names_not_for_sinks = {
        _normalized_name(name) for row in TABLE if "sink" not in row.roles for name in (row.name, *row.aliases)
    }
    omitted_names = _BROKER_OPTIONS | names_not_for_sinks | {"transport"}
    return {
        **{name: value for name, value in target.given_options.items() if _normalized_name(name) not in omitted_names},
        "transport": GRPC,
    }


def check_proxies(target: Target, topics: Sequence[str]) -> Iterator[Finding]:
    """Check each endpoint of a Proxy, and each topic there. Yields nothing if no Proxy is given."""
    from rocketmq_spark import options as table

    given_options = proxy_options(target)
    if given_options is None:
        return
    try:
        options = table.parse(given_options).for_role("sink")
    except RocketMQError as e:
        yield failed_finding("options", e, "Look at docs/options.md")
        return
    for address in options.proxy_endpoint:
        # The options have only this address, so that no other Proxy answers.
        options_of_address = dataclasses.replace(options, proxy_endpoint=(address,))
        # The topic need not exist, because even the answer that the topic is unknown shows that a Proxy is there.
        answer = _message_types(options_of_address, GROUP)
        finding = proxy_endpoint_finding(address, answer if isinstance(answer, RocketMQError) else None, options.tls)
        yield finding
        if finding.level is Level.OK:
            for name in topics:
                yield proxy_topic_finding(address, name, _message_types(options_of_address, name))


def _message_types(options: Options, topic: str) -> frozenset[str] | RocketMQError:
    from rocketmq_spark import session

    try:
        request_deadline = Deadline.after(options.request_timeout)
        session.sender(options).publish_queues(topic, request_deadline, refresh=True)
        return session.message_types(options, topic, request_deadline) or frozenset()
    except RocketMQError as e:
        return e

"""``Finding``, the result of one check, and the checks of this machine (Java, Python, packages), of rights, and of Proxies.

Only the functions that get a client ask servers.
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
    """``ADVICE`` is what works and could be better, or would matter for some; ``BROKEN`` is what will fail."""

    OK = "ok"
    ADVICE = "advice"
    BROKEN = "broken"


class Finding(NamedTuple):
    """One line: what was looked at, how it is, what was found, and what can be done."""

    check: str
    level: Level
    found: str
    remedy: str | None = None


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def advice(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.ADVICE, found, remedy)


def broken(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.BROKEN, found, remedy)


def failed(check: str, error: RocketMQError, remedy: str, what: str = "") -> Finding:
    """A question that was not answered as it should be; the error's own remedy comes first."""
    words = error.message if not error.remark else f"{error.message}: {error.remark}"
    where = f" (at {error.addr})" if error.addr else ""
    return broken(check, " ".join(f"{what}{words}{where}".split()), error.remedy or remedy)


def code(findings: list[Finding], strict: bool) -> int:
    """The exit code: 1 where something is broken, with ``strict`` also where there is advice."""
    bad = {Level.BROKEN, Level.ADVICE} if strict else {Level.BROKEN}
    return 1 if any(one.level in bad for one in findings) else 0


# The oldest supported version of each package in the extra ``spark``, and the first one that is too new.
_BOUNDS = {name: (low, high) for name, low, high in map(extras.version_bounds, extras.REQUIREMENTS[extras.SPARK])}
OLDEST = {name: low for name, (low, _) in _BOUNDS.items()}
TOO_NEW = {name: high for name, (_, high) in _BOUNDS.items() if high}


def java(found: tuple[str, int] | RocketMQError) -> Finding:
    """Its path and version, or why there is none."""
    if isinstance(found, RocketMQError):
        return broken("java", found.message, found.remedy or "Install a Java runtime")
    return ok("java", f"Java {found[1]}, {found[0]}")


def python(version: str, versions: Mapping[str, str | None]) -> Finding:
    """``versions`` are those of packages by name, None where one is missing."""
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    lacking = [name for name, number in versions.items() if number is None and name in OLDEST]
    # PySpark's version is not checked, because vendors add parts of newer versions to older ones; see ``no_data_sources``.
    checked = {name: low for name, low in OLDEST.items() if name != "pyspark"}
    old = [n for n, v in versions.items() if v is not None and n in checked and _parts(v) < checked[n]]
    new = [n for n, v in versions.items() if v is not None and n in TOO_NEW and _parts(v) >= TOO_NEW[n]]
    if lacking or old:
        wanted = " ".join(f"'{name}>={'.'.join(map(str, OLDEST[name]))}'" for name in (*lacking, *old))
        return broken("python", f"Python {version}, {packages}; missing or too old: {', '.join((*lacking, *old))}",
                      f"pip install {wanted}")  # fmt: skip
    if new:
        name = new[0]
        return advice("python", f"Python {version}, {packages}; PySpark does not support {name} {versions[name]} yet",
                      f"pip install '{name}<{TOO_NEW[name][0]}'")  # fmt: skip
    return ok("python", f"Python {version}, {packages}")


def no_data_sources(version: str) -> Finding:
    """The finding if PySpark has no data sources in Python; ``format("rocketmq")`` is one."""
    return advice(
        "pyspark",
        f'PySpark {version} lacks pyspark.sql.datasource, so format("rocketmq") does not exist',
        "Read with read_rocketmq(spark, ...), write with foreach_batch_writer or write_rocketmq; to read streams, use a PySpark "
        "that has it: pip install 'pyspark>=4.0'",
    )


def workers(program: str, executable: str, can_import: bool) -> Finding:
    """The Python that Spark gives its workers."""
    if can_import:
        return ok("workers", f"Spark's workers on this machine run {program}, which has this package")
    return broken(
        "workers",
        f"Spark's workers on this machine run {program}, which cannot import rocketmq_spark and pyarrow",
        f"Activate the virtual environment, or set PYSPARK_PYTHON={executable}",
    )


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers: ``4.3.0.dev1`` is (4, 3, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


if TYPE_CHECKING:
    from rocketmq_spark.session import Client


def to_read(client: Client, route: TopicRoute, queues: Sequence[MessageQueue], group: str) -> RocketMQError | None:
    """The worst answer of the brokers of these queues to a source."""
    return _worst(queues, lambda queue: _read(client, route, queue, group))


def to_write(client: Client, route: TopicRoute, queues: Sequence[MessageQueue]) -> RocketMQError | None:
    """The worst answer of the brokers of these queues to a sink."""
    return _worst(queues, lambda queue: _written(client, route, queue))


def _worst(queues: Sequence[MessageQueue], ask: Callable[[MessageQueue], RocketMQError | None]) -> RocketMQError | None:
    """What a queue of each broker led to, denials first: each broker has rights and groups of its own."""
    errors = [ask(queue) for queue in {queue.broker_name: queue for queue in queues}.values()]
    found = [error for error in errors if error is not None]
    return next((error for error in found if isinstance(error, AccessDenied)), found[0] if found else None)


def _read(client: Client, route: TopicRoute, queue: MessageQueue, group: str) -> RocketMQError | None:
    """What comes of the questions that a source asks: offsets, then messages as the group.

    Those of a queue that there is not: an operator's reset waits at a broker for the next pull of the group.
    """
    nowhere = queue._replace(queue_id=max(data.read_queues for data in route.queues) + 1_000)
    within = deadline(client)
    try:
        client.brokers.bounds([queue], within)
    except RocketMQError as e:
        return e
    try:
        client.brokers.sample(group, nowhere, 0, within)
    except RocketMQError as e:
        return e if isinstance(e, AccessDenied | GroupNotFound) or e.broker_code is None else None
    return None


def _written(client: Client, route: TopicRoute, queue: MessageQueue) -> RocketMQError | None:
    """What a broker says to a message for a queue that there is not, which it cannot store; rights are looked at before."""
    nowhere = queue._replace(queue_id=max(data.write_queues for data in route.queues) + 1_000)
    try:
        client.sender.send(nowhere, SendRequest(GROUP, b"x"), deadline(client))
    except AccessDenied as e:
        return e
    except RocketMQError as e:
        return None if e.broker_code is not None else e
    return None


if TYPE_CHECKING:
    from rocketmq_spark.options import Options

CHECK = "proxy"
_TAKEN = frozenset({TopicType.NORMAL, "UNSPECIFIED", "MIXED"})
_NEEDS = {
    TopicType.FIFO: "Give each row a shardingKey, and option queueSelector=hash",
    TopicType.DELAY: "Give each row a delayMs, delayLevel or deliverAt",
    TopicType.PRIORITY: "Give each row a priority",
}


def endpoint(address: str, error: RocketMQError | None, tls: bool) -> Finding:
    """``error`` is what came of the question for a route, None where there is one. A refusal is an answer, too."""
    if error is None or _answered(error):
        return ok(CHECK, f"{address} answers over gRPC{', in TLS' if tls else ''}")
    if isinstance(error, AccessDenied):
        return broken(
            CHECK, f"{address} does not know this user: {_said(error)}", "Check options 'accessKey' and 'secretKey'"
        )
    if isinstance(error, CertificateRefused):
        return failed(CHECK, error, "Check option 'tlsCaFile'")
    if isinstance(error, NotSupported | RemoteProtocolError):
        return broken(
            CHECK, f"{address} is not the gRPC port of a Proxy: {_said(error)}", "Check option 'proxyEndpoint'"
        )
    if isinstance(error, OptionError):
        return failed("options", error, "Look at docs/options.md")
    remedy = error.remedy or "Check whether the Proxy hangs, or a firewall drops its packets"
    return broken(CHECK, f"{address} cannot be used: {_said(error)}", remedy)


def _answered(error: RocketMQError) -> bool:
    """Whether a Proxy said it: that there is no such topic, or that this user may not ask for it."""
    known = isinstance(error, BrokerError) and error.broker_code not in (None, Code.UNAUTHORIZED)
    return known or isinstance(error, RouteNotFound)


def _said(error: RocketMQError) -> str:
    return " ".join(f"{error.message}{f': {error.remark}' if error.remark else ''}".split())


def topic(address: str, name: str, answer: frozenset[str] | RocketMQError) -> Finding:
    """``answer`` is which types of messages may be written to it, or why there is no route."""
    check = f"topic {name}"
    if isinstance(answer, RocketMQError):
        return failed(check, answer, "Check its name: rocketmq-spark topic list, at a name server")
    kinds = ", ".join(sorted(answer)) or "no type that is known here"
    text = f"the Proxy at {address} routes it, and takes {kinds}"
    if answer & _TAKEN:
        return ok(check, text)
    remedy = next((_NEEDS[kind] for kind in sorted(answer) if kind in _NEEDS), None)
    return advice(check, f"{text}: other messages are refused", remedy or "A sink needs a topic of type NORMAL")


# What means something to one of the two only, as ``_plain`` names it.
_OF_BROKERS = frozenset({"nameserver", "namesrvaddr", "addressmap", "tlscheckhostname", "tlskeypassword"})
_OF_PROXIES = frozenset({"proxyendpoint", "tlsservername", "transport"})


def _plain(name: str) -> str:
    """An option's name, however it is written."""
    return name.replace("_", "").lower()


def _names_a_proxy(target: Target) -> bool:
    given = {_plain(name): value for name, value in target.given.items() if value}
    return "proxyendpoint" in given or given.get("transport") == GRPC


def at_brokers(target: Target) -> Target | None:
    """Where name servers and brokers are asked; None where a Proxy is named, and no name server."""
    named = {_plain(name) for name, value in target.given.items() if value}
    if _names_a_proxy(target) and not named & {"nameserver", "namesrvaddr"}:
        return None
    return Target({name: value for name, value in target.given.items() if _plain(name) not in _OF_PROXIES})


def at_proxies(target: Target) -> dict[str, object] | None:
    """What is given for a Proxy; None where none is named."""
    from rocketmq_spark.options import TABLE

    if not _names_a_proxy(target):
        return None
    others = {_plain(name) for row in TABLE if "sink" not in row.roles for name in (row.name, *row.aliases)}
    left_out = _OF_BROKERS | others | {"transport"}
    return {
        **{name: value for name, value in target.given.items() if _plain(name) not in left_out},
        "transport": GRPC,
    }


def of_proxies(target: Target, topics: Sequence[str]) -> Iterator[Finding]:
    """Each endpoint: reached or not, and what it says of each topic. Nothing where no Proxy is named."""
    from rocketmq_spark import options as table

    given = at_proxies(target)
    if given is None:
        return
    try:
        options = table.parse(given).for_role("sink")
    except RocketMQError as e:
        yield failed("options", e, "Look at docs/options.md")
        return
    for address in options.proxy_endpoint:
        # So that no other one answers in its place.
        alone = dataclasses.replace(options, proxy_endpoint=(address,))
        # A topic that there may not be: what is answered, if only that it is not known, comes from a Proxy.
        answer = _types(alone, GROUP)
        found = endpoint(address, answer if isinstance(answer, RocketMQError) else None, options.tls)
        yield found
        if found.level is Level.OK:
            for name in topics:
                yield topic(address, name, _types(alone, name))


def _types(options: Options, topic: str) -> frozenset[str] | RocketMQError:
    from rocketmq_spark import session

    try:
        within = Deadline.after(options.request_timeout)
        session.sender(options).publish_queues(topic, within, refresh=True)
        return session.message_types(options, topic, within) or frozenset()
    except RocketMQError as e:
        return e

"""Parses the texts of options. Each function raises only ``ValueError``, whose text says what was expected.

Spark passes values as text, and Python calls as values; ``text`` converts the latter, so that both are parsed in the same way.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from numbers import Integral
from typing import Any, TypeGuard

from rocketmq_spark.model import MessageQueue

EARLIEST = -2
LATEST = -1

# Without leading zeros: otherwise one queue could be named twice in an option.
QUEUE_ID = re.compile("0|[1-9][0-9]{0,9}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_DURATION_S = {None: 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZE = re.compile(r"(\d+)\s*([kmg]?)b?", re.IGNORECASE)
_SIZE_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Secret(str):
    """A text that is hidden in output: ``repr`` and ``str`` return asterisks, ``reveal`` the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "***"

    def reveal(self) -> str:
        return str.__str__(self)


def text(value: object) -> str:
    """Return the option text of a Python value: booleans in lower case, containers as JSON, everything else by ``str``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes))):
        return json.dumps(value)
    return str(value)


def of_table(given: Mapping[str, object]) -> Mapping[str, object]:
    """Merge the options of a table in Spark's catalog, which are stored as ``option.name``; options of ``WITH`` override them."""
    own = {name[7:]: value for name, value in given.items() if name.startswith("option.")}
    plain = {name: value for name, value in given.items() if not name.startswith("option.")}
    known = {name.lower() for name in plain}
    return {**{name: value for name, value in own.items() if name.lower() not in known}, **plain}


def string(value: str) -> str:
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def secret(value: str) -> Secret:
    return Secret(value)


def boolean(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("true or false")
    return lowered == "true"


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(expected) from None
        if number < low or (high is not None and number > high):
            raise ValueError(expected)
        return number

    return parse


def is_whole(number: object) -> TypeGuard[int]:
    """Whether an argument of a Python call is a whole number; those of numpy are, True is not."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def duration(value: str) -> float:
    """Seconds from ``500ms``, ``3s``, ``5m``, ``1h`` or plain milliseconds."""
    match = _DURATION.fullmatch(value.strip())
    if not match:
        raise ValueError("a duration such as 500ms, 3s, 5m, or plain milliseconds")
    return float(match[1]) * _DURATION_S[match[2]]


def positive_duration(value: str) -> float:
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError("a duration above zero, such as 500ms, 3s, 5m, or plain milliseconds")
    return seconds


def durations_ms(value: str) -> tuple[int, ...]:
    """Durations separated by commas, as milliseconds."""
    return tuple(round(1000 * duration(item)) for item in value.strip("[] ").split(",") if item.strip())


def fault_preset(value: str) -> str:
    """``true``, ``false``, or the name of a preset; returns the name, empty for ``false``."""
    named = {"true": "current", "false": "", "current": "current", "4.x": "4.x"}
    try:
        return named[value.strip().lower()]
    except KeyError:
        raise ValueError("true, false, current or 4.x") from None


def size(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """Bytes from ``256k``, ``4m`` or plain bytes, within bounds."""
    bounds = f" from {low} to {high} bytes" if high is not None else f" of at least {low} bytes" if low > 1 else ""

    def parse(value: str) -> int:
        match = _SIZE.fullmatch(value.strip())
        count = int(match[1]) * _SIZE_BYTES[match[2].lower()] if match else -1
        if count < low or (high is not None and count > high):
            raise ValueError(f"a size such as 256k, 4m, or plain bytes{bounds}")
        return count

    return parse


def choice(*names: str) -> Callable[[str], str]:
    """One of ``names``, case-insensitive; returns the name as listed."""
    by_lower = {name.lower(): name for name in names}

    def parse(value: str) -> str:
        try:
            return by_lower[value.strip().lower()]
        except KeyError:
            raise ValueError("one of " + ", ".join(names)) from None

    return parse


def names(value: str) -> tuple[str, ...]:
    """Names from comma-separated text or a JSON array, in order, without duplicates."""
    is_json = value.lstrip()[:1] == "["
    parts = _json(value, list, "names separated by commas, or a JSON array of texts") if is_json else value.split(",")
    if not all(isinstance(item, str) for item in parts):
        raise ValueError("names separated by commas, or a JSON array of texts")
    items = tuple(dict.fromkeys(item.strip() for item in parts if item.strip()))
    if not items:
        raise ValueError("at least one name; several separated by commas, or as a JSON array")
    return items


_ADDRESSES = "host:port, several separated by ; or ,"
# A domain name, an IPv4 address, or an IPv6 address in brackets; then the port.
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def addresses(value: str) -> tuple[str, ...]:
    """``host:port`` items separated by ``;`` or ``,``.

    Consoles of hosted clusters show ``http://host:port``: the scheme is removed, as in Java (``NameServerAddressUtils``).
    """
    items = tuple(dict.fromkeys(_address(item.strip()) for item in re.split("[;,]", value) if item.strip()))
    if not items:
        raise ValueError(_ADDRESSES)
    return items


def _address(text: str) -> str:
    scheme, mark, rest = text.rpartition("://")
    address = rest if scheme.lower() == "http" else text
    if mark and address is text:
        remedy = "host:port without a scheme" + (", and option 'tls' = true" if scheme.lower() == "https" else "")
        raise ValueError(f"{_ADDRESSES} ({text!r} has the scheme {scheme!r}; give {remedy})")
    if "/" in address:
        raise ValueError(f"{_ADDRESSES} ({text!r} has a path; give host:port alone)")
    match = _ADDRESS.fullmatch(address)
    if match is None and _is_ipv6(address.rpartition(":")[0] or address, address):
        raise ValueError(f"{_ADDRESSES} (in {text!r} the IPv6 address needs brackets: [::1]:9876)")
    if match is None or not 0 < int(match["port"]) < 65536 or (match["ipv6"] and not _is_ipv6(match["ipv6"])):
        raise ValueError(f"{_ADDRESSES} ({text!r} is not)")
    return address


def _is_ipv6(*texts: str) -> bool:
    """Whether one of ``texts`` is an IPv6 address without brackets."""
    for text in texts:
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(text)
            return True
    return False


_INSTANCE = re.compile(r"(MQ_INST_\w+_\w+)\..+")


def instance_namespace(name_servers: Sequence[str]) -> str | None:
    """The namespace in addresses of hosted instances: ``MQ_INST_1_2`` of ``MQ_INST_1_2.region.example:80``; None without one.

    Java's clients derive it in the same way (``ClientConfig.getNamespace``). Raises ``ValueError`` if addresses differ in it.
    """
    namespaces = {match[1] if (match := _INSTANCE.match(address)) else None for address in name_servers}
    if len(namespaces) > 1:
        raise ValueError("addresses of one instance: each begins with the same MQ_INST_…, or none does")
    return namespaces.pop() if namespaces else None


def address_map(value: str) -> dict[str, str]:
    expected = 'JSON such as {"10.0.0.5:10911": "localhost:10911"}'
    found: dict[str, str] = {}
    for pair in _json(value, dict, expected).items():
        advertised, reachable = (_mapped_address(item, expected) for item in pair)
        found[advertised] = reachable
    return found


def _mapped_address(item: object, expected: str) -> str:
    try:
        if isinstance(item, str):
            return _address(item.strip())
    except ValueError:
        pass
    raise ValueError(f"{expected} ({item!r} is not host:port)")


def regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as e:
        raise ValueError(f"a regular expression ({e})") from None
    return value


def assignment(value: str) -> tuple[MessageQueue, ...]:
    """``{"t":{"broker-a":[0,1]}}`` as sorted queues."""
    expected = 'JSON such as {"orders":{"broker-a":[0,1]}}'
    queues = []
    for topic, by_broker in _json(value, dict, expected).items():
        for broker, ids in _by_broker(by_broker, expected).items():
            if not isinstance(ids, list) or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
                raise ValueError(expected)
            queues += [MessageQueue(topic, broker, i) for i in ids]
    if not queues:
        raise ValueError(f"{expected} with at least one queue")
    return tuple(sorted(set(queues)))


def queue_numbers(example: str, low: int) -> Callable[[str], dict[MessageQueue, int]]:
    """``{"t":{"broker-a":{"0":17}}}`` as numbers by queue, each at least ``low``."""
    expected = f"JSON such as {example}"

    def parse(value: str) -> dict[MessageQueue, int]:
        numbers: dict[MessageQueue, int] = {}
        for topic, by_broker in _json(value, dict, expected).items():
            for broker, by_id in _by_broker(by_broker, expected).items():
                for queue_id, number in _mapping(by_id, expected).items():
                    where = f"{topic}/{broker}/{queue_id}"
                    if not QUEUE_ID.fullmatch(queue_id):
                        raise ValueError(f"{expected} ({where}: the queue id is not a whole number)")
                    if not isinstance(number, int) or isinstance(number, bool) or number < low:
                        raise ValueError(f"{expected} ({where}: {number!r} is not a whole number of at least {low})")
                    numbers[MessageQueue(topic, broker, int(queue_id))] = number
        if not numbers:
            raise ValueError(f"{expected} with at least one queue")
        return numbers

    return parse


_OFFSETS = queue_numbers('{"orders":{"broker-a":{"0":17,"1":-2}}} (-2 earliest, -1 latest)', EARLIEST)


def offsets(*words: str) -> Callable[[str], str | dict[MessageQueue, int]]:
    """One of ``words``, or offsets by queue as JSON."""

    def parse(value: str) -> str | dict[MessageQueue, int]:
        if value.lstrip()[:1] == "{":
            return _OFFSETS(value)
        try:
            return choice(*words)(value)
        except ValueError:
            raise ValueError(f"{', '.join(words)}, or JSON such as " + '{"orders":{"broker-a":{"0":17}}}') from None

    return parse


def timestamp(value: str) -> int:
    """Epoch milliseconds from a number or ISO-8601 text; a text without a zone is UTC."""
    stripped = value.strip()
    if stripped.isdecimal():
        return int(stripped)
    try:
        moment = datetime.fromisoformat(stripped)
    except ValueError:
        raise ValueError("epoch milliseconds or ISO-8601 such as 2026-01-31T12:00:00Z") from None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def consume_from(value: str) -> str | int:
    """``latest``, ``earliest``, or epoch milliseconds."""
    word = value.strip().lower()
    if word in ("latest", "earliest"):
        return word
    try:
        return timestamp(value)
    except ValueError as e:
        raise ValueError(f"latest, earliest, or {e}") from None


def dotted(value: str) -> str:
    module, _, name = value.strip().partition(":")
    if not module or not name.isidentifier():
        raise ValueError("module:callable")
    return value.strip()


STRATEGIES = (
    "averagely",
    "averagelyByCircle",
    "consistentHash",
    "config",
    "machineRoom",
    "machineRoomNearby",
    "environment",
)


def strategy(value: str) -> str:
    if ":" in value:
        return dotted(value)
    try:
        return choice(*STRATEGIES)(value)
    except ValueError as e:
        raise ValueError(f"{e}, or module:callable") from None


SELECTORS = ("roundRobin", "random", "hash", "machineRoom", "environment", "column")


def selector(value: str) -> str:
    if ":" in value:
        return dotted(value)
    try:
        return choice(*SELECTORS)(value)
    except ValueError as e:
        raise ValueError(f"{e}, or module:callable") from None


def auto_integer(value: str) -> int | None:
    """A whole number, or None for ``auto``."""
    if value.strip().lower() == "auto":
        return None
    try:
        return integer(1)(value)
    except ValueError:
        raise ValueError("auto, or a whole number of at least 1") from None


def names_with_repeats(value: str) -> tuple[str, ...]:
    """Names from comma-separated text or a JSON array, in order; a name may occur several times."""
    is_json = value.lstrip()[:1] == "["
    parts = _json(value, list, "names separated by commas, or a JSON array of texts") if is_json else value.split(",")
    if not all(isinstance(item, str) and item.strip() for item in parts):
        raise ValueError("names separated by commas, or a JSON array of texts")
    return tuple(item.strip() for item in parts)


PROPERTY_TYPES = ("string", "boolean", "int", "bigint", "float", "double", "date", "timestamp", "binary")


def property_columns(value: str) -> tuple[tuple[str, str], ...]:
    """``name:type`` items separated by commas, or a JSON object; a name without a type is a string."""
    expected = f"items such as amount:bigint, region:string (types: {', '.join(PROPERTY_TYPES)})"
    if value.lstrip()[:1] == "{":
        items = [(str(k), str(v)) for k, v in _json(value, dict, expected).items()]
    else:
        parts = (item.strip().rpartition(":") for item in value.split(",") if item.strip())
        items = [(name or kind, kind if name else "string") for name, _, kind in parts]
    columns = tuple(
        (name.strip(), {"long": "bigint", "integer": "int"}.get(k := kind.strip().lower(), k)) for name, kind in items
    )
    if not columns or any(not name or kind not in PROPERTY_TYPES for name, kind in columns):
        raise ValueError(expected)
    if len({name for name, _ in columns}) < len(columns):
        raise ValueError(f"{expected}, each name once")
    return columns


def per_topic(value: str) -> str | dict[str, str]:
    """One filter for all topics, or JSON ``{"topic": "filter"}``."""
    if value.lstrip()[:1] != "{":
        return string(value)
    filters = _json(value, dict, 'a filter, or JSON such as {"orders": "vip || new"}')
    if not filters or any(not isinstance(v, str) or not v.strip() for v in filters.values()):
        raise ValueError('a filter, or JSON such as {"orders": "vip || new"}')
    return {topic: v.strip() for topic, v in filters.items()}


def json_object(example: str) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        return dict(_json(value, dict, f"JSON such as {example}"))

    return parse


def _json(value: str, kind: type, expected: str) -> Any:
    try:
        document = json.loads(value)
    except ValueError as e:
        raise ValueError(f"{expected} ({e})") from None
    if not isinstance(document, kind):
        raise ValueError(expected)
    return document


def _by_broker(value: object, expected: str) -> dict[str, Any]:
    """The part of a topic in JSON, by broker. For Kafka's form (partition numbers), the error says why these do not suffice."""
    partitions = isinstance(value, dict) and any(n.isdecimal() and isinstance(at, int) for n, at in value.items())
    if partitions or isinstance(value, list):
        raise ValueError(f"{expected}: each queue is of a broker, so its number alone is not enough")
    return _mapping(value, expected)


def _mapping(value: object, expected: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value

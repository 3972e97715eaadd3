"""Name servers and brokers: reached or not, how they are set, their disks and clocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rocketmq_spark.cli.doctor.findings import Finding, advice, broken, failed, ok
from rocketmq_spark.cli.lag_view import duration
from rocketmq_spark.errors import AccessDenied, CertificateRefused, NotSupported, RocketMQError
from rocketmq_spark.model import BrokerData

# Settings that make reads slow, with what they should be at least (docs/performance.md).
PULLS = {"maxTransferCountOnMessageInMemory": 1024, "maxTransferBytesOnMessageInMemory": 4_194_304}
COLD_PULLS = {"maxTransferCountOnMessageInDisk": 1024, "maxTransferBytesOnMessageInDisk": 4_194_304}
# Shares of a disk: RocketMQ begins to delete what is not due at the first, and refuses messages from the second on.
DISK_ADVICE, DISK_BROKEN = 0.85, 0.90
# A broker tells its time to the second.
CLOCKS_MS = 5_000
_UPTIME = re.compile(r"\[ (\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds \]")


def name_server(address: str, error: RocketMQError | None, tls: bool) -> Finding:
    check = "name server"
    if error is None:
        return ok(check, f"{address} answers{', in TLS' if tls else ''}")
    if isinstance(error, NotSupported):
        return ok(check, f"{address} is a Proxy, behind which brokers are not seen")
    if isinstance(error, AccessDenied):
        return advice(
            check, f"{address} does not let this user list brokers", "Their checks are left out: try another user"
        )
    return _unreached(
        check, f"{address} is of no use", error, tls, "Check option 'nameServer', DNS and firewalls, and that it runs"
    )


def of_a_broker(address: str) -> Finding:
    return broken(
        "name server",
        f"{address} is a broker's port: it answers as one, and knows no routes",
        "Give host and port of the name server, 9876 unless it was changed",
    )


def brokers(cluster: Mapping[str, BrokerData]) -> Finding:
    """Which are registered, and whether all have a master."""
    if not cluster:
        return broken("brokers", "none is registered", "Start one, or look at its namesrvAddr and its log")
    orphans = sorted(name for name, data in cluster.items() if not data.master)
    if orphans:
        return broken(
            "brokers", f"{', '.join(orphans)} without a master: nothing can be written there", "Start the master"
        )
    slaves = sum(len(data.slaves) for data in cluster.values())
    return ok("brokers", f"{', '.join(sorted(cluster))}; {slaves} slaves")


def reached(name: str, address: str, dialled: str, error: RocketMQError | None, tls: bool) -> Finding:
    """The address that a broker advertises, and what is dialled in its place."""
    check, told = f"broker {name}", address if dialled == address else f"{address}, dialled as {dialled}"
    if error is None:
        return ok(check, f"{told} answers")
    port = address.rpartition(":")[2]
    return _unreached(
        check,
        f"advertises {told}, which cannot be reached from here",
        error,
        tls,
        f"Let it advertise a reachable one (brokerIP1 in broker.conf), or set option 'addressMap', here: "
        f'-o \'addressMap={{"{address}":"<reachable host>:{port}"}}\'',
    )


def _unreached(check: str, what: str, error: RocketMQError, tls: bool, remedy: str) -> Finding:
    if isinstance(error, CertificateRefused):
        return failed(check, error, "Check options 'tlsCaFile' and 'tlsCheckHostname'")
    hint = "; or it does not speak TLS, which option 'tls' asks for" if tls else ""
    return broken(check, f"{what}: {error.message}{f': {error.remark}' if error.remark else ''}", remedy + hint)


def settings(name: str, config: Mapping[str, str], wants_sql: bool) -> Iterator[Finding]:
    """Lines of broker.conf; what a broker does not tell is not judged."""
    check = f"broker {name}"
    for told, what in ((PULLS, "a pull"), (COLD_PULLS, "a pull of old messages")):
        low = {key: value for key, value in told.items() if key in config and int(config[key]) < value}
        if low:
            count, size = (config.get(key, "?") for key in told)
            yield advice(
                check,
                f"{what} gives at most {count} messages or {size} bytes",
                f"In broker.conf {', '.join(f'{key}={value}' for key, value in low.items())}: the broker then needs four tenths "
                "of the CPU for each small message (docs/performance.md)",
            )
    if config.get("messageIndexEnable") == "false":
        yield advice(check, "messages are not indexed: none is found by its key or id", "Set messageIndexEnable=true")
    if config.get("enablePropertyFilter") == "false":
        text = "SQL filters are switched off"
        remedy = "Set enablePropertyFilter=true, and restart it"
        yield broken(check, f"{text}, and option 'sql' is given", remedy) if wants_sql else advice(check, text, remedy)


def untold(name: str, error: RocketMQError) -> Finding:
    """A broker that does not tell its settings, which only administrators may ask for."""
    return advice(
        f"broker {name}",
        f"does not tell its settings: {error.remark or error.message}",
        "Nothing is said of them: check options 'accessKey' and 'secretKey', or look as an administrator",
    )


def locked_out(name: str, error: AccessDenied) -> Finding:
    """A broker that refuses what needs no right but to be known."""
    return broken(f"broker {name}", f"does not know this user: {error.remark or error.message}",
                  "Check options 'accessKey' and 'secretKey'")  # fmt: skip


def untold_state(name: str, error: RocketMQError) -> Finding:
    """A broker that does not tell how it is; in the first seconds after its start 5.5.0 fails over that (docs/upstream.md)."""
    return advice(
        f"broker {name}",
        f"does not tell its version, disk and clock: {error.remark or error.message}",
        "Nothing is said of them: if it has just started, look again in some seconds",
    )


def disk(name: str, runtime: Mapping[str, str]) -> Finding | None:
    """The fullest of its disks; None where it does not tell."""
    shares = [float(runtime[key]) for key in ("commitLogDiskRatio", "consumeQueueDiskRatio") if key in runtime]
    if not shares or max(shares) < 0:
        return None
    check, told = f"broker {name}", f"its disk is {max(shares):.0%} full"
    remedy = "Free space, or lower fileReservedTime"
    if max(shares) > DISK_BROKEN:
        return broken(check, f"{told}: it refuses messages", remedy)
    if max(shares) > DISK_ADVICE:
        return advice(check, f"{told}: soon it deletes messages before their time", remedy)
    return ok(check, told)


def clock(name: str, runtime: Mapping[str, str], now_ms: int) -> Finding | None:
    """Its clock next to ours; None where it does not tell."""
    match = _UPTIME.match(runtime.get("runtime", ""))
    if match is None or "bootTimestamp" not in runtime:
        return None
    days, hours, minutes, seconds = map(int, match.groups())
    up_ms = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000
    difference_ms = int(runtime["bootTimestamp"]) + up_ms - now_ms
    check = f"broker {name}"
    if abs(difference_ms) <= CLOCKS_MS:
        return ok(check, "its clock and ours agree")
    return advice(
        check,
        f"its clock is {duration(abs(difference_ms))} {'ahead of' if difference_ms > 0 else 'behind'} ours",
        "Set both by NTP: times to start at, delays and what lag says of age go by the broker's",
    )


def version(name: str, runtime: Mapping[str, str]) -> Finding | None:
    """Its release; None where it does not tell."""
    told = runtime.get("brokerVersionDesc")
    if told is None:
        return None
    match = re.match(r"V(\d+)_", told)
    if match is not None and int(match[1]) < 5:
        return advice(
            f"broker {name}", f"RocketMQ {told}", "Upgrade to 5.x for delays of any length and attributes of topics"
        )
    return ok(f"broker {name}", f"RocketMQ {told}")

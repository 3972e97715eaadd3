"""``make bench``: every figure next to its peers, measured in one run, and whether the targets are held."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    asynchronous,
    codec,
    consume,
    growth,
    grpc,
    harness,
    idle,
    latency,
    memory,
    planning,
    read,
    restart,
    scale,
    spark,
    targets,
    trips,
    workload,
    write,
)
from benchmarks.harness import Found
from benchmarks.kafka import KafkaNode, connector_jars

SECTIONS = ("codec", "read", "write", "grpc", "consume", "idle", "latency", "planning", "memory")
# Takes long, and is asked for by name.
MORE = ("asyncio", "growth", "restart", "scale", "trips")
QUICK = ("codec", "read", "write", "consume")


def main() -> None:
    options = harness.arguments(__doc__ or "")
    wanted = _wanted(options)
    found: Found = {}
    with contextlib.ExitStack() as stack:
        kafka = None
        if not options.no_kafka and {"read", "write", "latency"}.intersection(wanted):
            kafka = stack.enter_context(KafkaNode())
        if {"codec", "read", "consume", "idle", "latency", "memory", "asyncio"}.intersection(wanted):
            broker = stack.enter_context(workload.broker())
        if "codec" in wanted:
            codec.run(broker, found, options.repeats)
        if {"read", "write", "grpc"}.intersection(wanted):
            session = spark.session(connector_jars() if kafka else ())
            if "read" in wanted:
                read.run(broker, session, kafka, options, found)
            if "write" in wanted:
                write.run(session, kafka, options, found)
            if "grpc" in wanted:
                grpc.run(session, options, found)
            session.stop()
        for section, code in (("consume", consume), ("asyncio", asynchronous), ("idle", idle)):
            if section in wanted:
                code.run(broker, options, found)
        if "latency" in wanted:
            latency.run(broker, kafka, options, found)
        if "memory" in wanted:
            memory.run(broker, options, found)
    for section, alone in (("planning", planning), ("scale", scale), ("trips", trips)):
        if section in wanted:
            alone.run(options, found)
    if "growth" in wanted:
        session = spark.plain_session((), spark.FAST, growth.SLOTS)
        growth.run(session, options, found)
        session.stop()
    if "restart" in wanted:
        session = spark.plain_session((), spark.FAST)
        restart.run(session, found)
        session.stop()
    results = list(targets.verdicts(found))
    harness.show(targets.table([v for v in results if v.value is not None or not options.sections]))
    if options.json:
        document = {
            "machine": {"cores": harness.CORES, "python": platform.python_version(), "system": platform.platform()},
            "messages": options.messages,
            "repeats": options.repeats,
            "figures": found,
            "targets": [v.as_json() for v in results],
        }
        Path(options.json).write_text(json.dumps(document, indent=1), "utf-8")


def _wanted(options: argparse.Namespace) -> Sequence[str]:
    """The sections that are measured; of a quick run few of their cases are."""
    if options.quick:
        harness.ONLY = targets.QUICK
        options.sections = options.sections or list(QUICK)
    unknown = set(options.sections).difference(SECTIONS + MORE)
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS + MORE)}")
    return options.sections or SECTIONS


if __name__ == "__main__":
    main()

"""Decode and encode on one core: no broker, no socket."""

from __future__ import annotations

import time

from benchmarks import harness, workload
from benchmarks.harness import Case, Cpu, Found, Result
from benchmarks.raw import range_reader, ranges_of
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.pull.fetched import FetchedAnswers

ROWS = 20_000
TIMES = 50
PLAIN = ("topic", "brokerName", "queueId", "queueOffset", "body", "bornTimestamp", "storeTimestamp")


def run(broker: LocalBroker, found: Found, repeats: int) -> None:
    for size in harness.SIZES:
        topic = f"codec-{size}"
        workload.fill(broker, topic, ROWS, size)
        cases = [*_decodes(broker, topic), *_encodes(size)]
        harness.rounds(cases, repeats)
        title = f"One core, {size} B (thousand messages a second)"
        figures = harness.report(title, cases, size)
        # The targets are told in millions.
        found[f"codec {size}"] = {name: _millions(row) for name, row in figures.items()}


def _decodes(broker: LocalBroker, topic: str) -> list[Case]:
    ranges = ranges_of(broker, topic)
    reader = range_reader(broker, topic, ranges)
    # The buffer is valid until more is fetched.
    copies = [FetchedAnswers(fetched.buffer.copy(), list(fetched.answers)) for fetched in reader.fetch()]
    queues = [r.queue for r in ranges]
    plain = tuple(column for column in BASIC_COLUMNS if column.name in PLAIN)
    return [
        Case("decode, all columns", lambda: _decode(Decoder(queues, BASIC_COLUMNS), copies)),
        Case("decode, without properties", lambda: _decode(Decoder(queues, plain), copies)),
    ]


def _decode(decoder: Decoder, copies: list[FetchedAnswers]) -> Result:
    begin = time.process_time()
    rows = sum(len(decoder(fetched)) for _ in range(TIMES) for fetched in copies)
    harness.expect("decode", rows, ROWS * TIMES)
    return _of(rows, time.process_time() - begin)


def _encodes(size: int) -> list[Case]:
    names = {name: name for name in ("body", "tags", "keys", "properties")}
    encoder = Encoder(names, 4 << 20, UniqueIds(b"benchmrk", lambda: 0))
    batch = workload.frame(ROWS // 2, size)

    def run() -> Result:
        begin, rows = time.process_time(), 0
        for _ in range(TIMES):
            rows += sum(chunk.row_count for chunk in encoder(batch).chunks(1 << 20))
        harness.expect("encode", rows, len(batch) * TIMES)
        return _of(rows, time.process_time() - begin)

    return [Case("encode", run)]


def _of(rows: int, seconds: float) -> Result:
    return Result(rows, seconds, Cpu(python=seconds))


def _millions(row: dict[str, float]) -> dict[str, float]:
    return {name: value / 1000 if name in ("min", "median", "max") else value for name, value in row.items()}

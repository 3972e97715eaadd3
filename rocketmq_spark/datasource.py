"""``format("rocketmq")``: options and schema to a reader or a writer. Knows how nothing is done.

Spark makes this object in several processes and several times, so the constructor only parses; whatever depends on
being source or sink, batch or stream is checked where the reader or writer is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rocketmq_spark.decode.schema import Column
    from rocketmq_spark.sink.writers import RocketMQStreamWriter, RocketMQWriter
    from rocketmq_spark.source.readers import RocketMQReader, RocketMQStreamReader


class RocketMQDataSource(DataSource):
    """Apache RocketMQ as a Spark data source; see docs/options.md."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._parsed = options_table.parse(options)

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> str:
        from rocketmq_spark.decode.schema import columns_of, ddl

        return ddl(columns_of(self._parsed))

    def reader(self, schema: StructType) -> RocketMQReader:
        from rocketmq_spark.source import pushdown
        from rocketmq_spark.source.readers import PrunedReader, RocketMQReader

        kind = PrunedReader if self._parsed.predicate_pushdown and pushdown.enabled() else RocketMQReader
        return kind(*self._source("batch source", schema))

    def streamReader(self, schema: StructType) -> RocketMQStreamReader:
        from rocketmq_spark.source.readers import RocketMQStreamReader

        return RocketMQStreamReader(*self._source("stream source", schema))

    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        from rocketmq_spark.sink.writers import RocketMQWriter

        if overwrite:
            raise OptionError("rocketmq topics cannot be overwritten", remedy='Write with .mode("append")')
        return RocketMQWriter(self._parsed.for_role("sink"), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RocketMQStreamWriter:
        from rocketmq_spark.sink.writers import RocketMQStreamWriter

        if overwrite:
            raise OptionError(
                "rocketmq topics cannot be overwritten",
                remedy='Use outputMode("append"), or foreachBatch with foreach_batch_writer for other modes',
            )
        return RocketMQStreamWriter(self._parsed.for_role("sink"), schema)

    def _source(self, role: str, schema: StructType) -> tuple[options_table.Options, tuple[Column, ...]]:
        """The options of a source, checked as far as no broker is needed, and the columns to build."""
        from rocketmq_spark.decode.schema import chosen, columns_of
        from rocketmq_spark.queues.environment import check_chosen, environment_of
        from rocketmq_spark.source import filters, starting_offsets

        options = self._parsed.for_role(role)
        ways = [name for name in ("subscribe", "subscribe_pattern", "assign") if name in options.given]
        if len(ways) != 1:
            raise OptionError(
                "exactly one of the options 'subscribe', 'subscribePattern' and 'assign' says what to read; "
                f"{'none is' if not ways else 'several are'} given"
            )
        filters.check(options)
        starting_offsets.check(options, role)
        environment_of(options)
        if options.allocation_strategy == "environment":
            check_chosen(options, "allocationStrategy")
        min_offsets, max_offsets = options.min_offsets_per_trigger, options.max_offsets_per_trigger
        if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
            raise OptionError(
                f"option 'minOffsetsPerTrigger' is {min_offsets}, more than 'maxOffsetsPerTrigger' {max_offsets}"
            )
        return options, chosen(columns_of(self._parsed), schema)

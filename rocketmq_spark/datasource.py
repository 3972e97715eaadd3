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
from rocketmq_spark.source.schema import BASIC, ddl

if TYPE_CHECKING:
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
        return ddl()

    def reader(self, schema: StructType) -> RocketMQReader:
        from rocketmq_spark.source.readers import RocketMQReader

        return RocketMQReader(self._source("batch source", schema), BASIC)

    def streamReader(self, schema: StructType) -> RocketMQStreamReader:
        from rocketmq_spark.source.readers import RocketMQStreamReader

        return RocketMQStreamReader(self._source("stream source", schema), BASIC)

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

    def _source(self, role: str, schema: StructType) -> options_table.Options:
        expected = [(column.name, column.ddl) for column in BASIC]
        actual = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if actual != expected:
            raise OptionError("the source has a fixed schema", remedy=f"Leave .schema() out; the columns are: {ddl()}")
        found = self._parsed.for_role(role)
        if not found.subscribe:
            raise OptionError("option 'subscribe' is required: name the topics to read")
        return found

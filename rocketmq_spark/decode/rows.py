"""Located messages as the fast builders of the table (``schema``) see them: a method per kind of column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import slices
from rocketmq_spark.decode import header, stored_messages
from rocketmq_spark.decode import properties as props
from rocketmq_spark.decode.schema import PROPERTIES
from rocketmq_spark.decode.stored_messages import StoredMessages
from rocketmq_spark.model import MessageQueue


@dataclass(frozen=True, slots=True)
class Located:
    """The messages that were fetched, with what their properties are and the queues that the pieces are of."""

    messages: StoredMessages
    made: props.Columns
    queues: Sequence[MessageQueue]

    def of_queue(self, field: str) -> pa.Array:
        """A text that depends on the queue alone, which mostly means the same in every row."""
        names = [getattr(queue, field) for queue in self.queues]
        if len(set(names)) == 1:
            return slices.repeated(names[0], len(self.messages))
        number_of_row = stored_messages.field(self.messages.pieces, "number")[self.messages.piece_of_row]
        return pa.array(names, pa.string()).take(slices.integers(number_of_row, pa.int64()))

    def number(self, field: str, kind: pa.DataType) -> pa.Array:
        return header.number(self.messages, field, kind)

    def moment(self, field: str, kind: pa.DataType) -> pa.Array:
        return header.moment(self.messages, field, kind)

    def host(self, field: str) -> pa.Array:
        return header.hosts(self.messages, field)

    def flags(self, kind: pa.DataType) -> pa.Array:
        return slices.integers(header.flags(self.messages), kind)

    def tags(self) -> pa.Array:
        return self.made.tags

    def keys(self) -> pa.Array:
        return self.made.keys

    def properties(self) -> pa.Array:
        made = self.made.properties
        return made if made is not None else slices.nulls(PROPERTIES, len(self.messages))

    def offset_message_id(self) -> pa.Array:
        return header.offset_message_ids(self.messages)

    def message_id(self) -> pa.Array:
        """The client's id, and where a message has none the offset message id, as Java consumers show it."""
        unique = self.made.msg_id
        assert unique is not None
        if not unique.null_count:
            return unique
        return pc.coalesce(unique, header.offset_message_ids(self.messages))

    def null(self, kind: pa.DataType) -> pa.Array:
        return slices.nulls(kind, len(self.messages))

"""The counts that check the result of the demo.

The result is right if the numbers of orders written, of orders read, and of orders in the totals are the same. The amounts
written and read back must also be the same. The numbers can be equal exactly, because each order belongs to one window and one
region, and append mode emits the total of a window once. It emits the total when the watermark has passed the window's end. A
last order, dated far ahead, moves the watermark past the end of every window with orders. No total includes this last order,
because its window stays open.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rocketmq_spark.options.names import camel_case


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of orders and totals at each step of the demo. Amounts are in cents. ``totals_repeated`` is the number of totals
    that are stored more than once. With ``exactly_once``, this number must be 0. All other fields count each total once.
    """

    orders_written: int
    orders_read: int
    orders_returned: int
    totals_returned: int
    totals_repeated: int
    cents_written: int
    cents_returned: int
    dropped_late: int
    exactly_once: bool

    @property
    def balanced(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """Return the differences as sentences without a full stop."""
        comparisons = (
            ("orders", self.orders_written, "read by the query", self.orders_read),
            ("orders", self.orders_written, "in the totals read back", self.orders_returned),
            ("cents", self.cents_written, "in the totals read back", self.cents_returned),
        )
        differences = [
            f"{written} {unit} written, but {count} {source}"
            for unit, written, source, count in comparisons
            if written != count
        ]
        if self.exactly_once and self.totals_repeated:
            differences.append(f"{self.totals_repeated} totals are stored more than once")
        if differences and self.dropped_late:
            differences.append(f"{self.dropped_late} rows came later than the watermark allows and were dropped")
        return differences

    def document(self) -> Mapping[str, object]:
        return {camel_case(name): value for name, value in asdict(self).items()} | {"balanced": self.balanced}

    def lines(self) -> list[str]:
        """Return the counts as lines of text."""
        written, returned = (f"{cents / 100:,.2f}" for cents in (self.cents_written, self.cents_returned))
        sign = "=" if self.cents_written == self.cents_returned else "≠"
        # Without exactly-once a batch that is repeated sends its totals again.
        repeated_text = (
            f"{self.totals_repeated:,} of them stored more than once"
            if self.totals_repeated
            else "none of them stored twice"
        )
        return [
            f"orders written to the broker      {self.orders_written:>9,}",
            f"orders read by the query          {self.orders_read:>9,}",
            f"orders in the totals read back    {self.orders_returned:>9,}  in {self.totals_returned:,} totals, {repeated_text}",
            f"amount written and read back      {written} {sign} {returned}",
        ]

    def verdict(self) -> str:
        """Return the three counts of orders in one line, and whether the result is right."""
        counts = (self.orders_written, self.orders_read, self.orders_returned)
        signs = ("=" if a == b else "≠" for a, b in itertools.pairwise(counts))
        text = f"{counts[0]:,}" + "".join(f" {sign} {count:,}" for sign, count in zip(signs, counts[1:], strict=True))
        return f"{text}. {'All agree.' if self.balanced else 'The result is wrong.'}"

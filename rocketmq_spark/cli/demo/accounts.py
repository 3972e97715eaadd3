"""The demo's books: what was written, read, aggregated, and found again. Pure sums; the demo is right when they agree.

Why they can agree exactly: an order belongs to one window and one region, a window's total is sent once, when the
watermark has passed its end, and a last order dated far ahead moves the watermark past the end of every window that
holds orders. That order's own window stays open, so it is in no total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

CLOSING_ORDERS = 1


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of orders and of totals along the way. Amounts are in cents."""

    orders_written: int
    orders_read: int
    orders_aggregated: int
    orders_returned: int
    totals_written: int
    totals_returned: int
    cents_written: int
    cents_returned: int
    dropped_late: int

    @property
    def balanced(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """What does not agree, as sentences without full stops."""
        pairs = (
            ("orders", "written", self.orders_written, "read by the query", self.orders_read),
            ("orders", "written", self.orders_written, "in the totals that were sent", self.orders_aggregated),
            ("orders", "written", self.orders_written, "in the totals read back", self.orders_returned),
            ("totals", "sent", self.totals_written, "read back", self.totals_returned),
            ("cents", "written", self.cents_written, "in the totals read back", self.cents_returned),
        )
        differences = [f"{a} {what} {first}, but {b} {second}" for what, first, a, second, b in pairs if a != b]
        if differences and self.dropped_late:
            differences.append(f"{self.dropped_late} rows came later than the watermark allows and were dropped")
        return differences

    def document(self) -> Mapping[str, object]:
        return {_camel(name): value for name, value in asdict(self).items()} | {"balanced": self.balanced}

    def lines(self) -> list[str]:
        """The books for a person."""
        amount = f"{self.cents_written / 100:,.2f}"
        returned = f"{self.cents_returned / 100:,.2f}"
        sign = "=" if self.cents_written == self.cents_returned else "≠"
        return [
            f"orders written to the broker      {self.orders_written:>9,}",
            f"orders read by the query          {self.orders_read:>9,}",
            f"orders in the totals it sent      {self.orders_aggregated:>9,}  in {self.totals_written:,} totals",
            f"orders in the totals read back    {self.orders_returned:>9,}  in {self.totals_returned:,} totals",
            f"amount written and read back      {amount} {sign} {returned}",
        ]


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(map(str.capitalize, rest))

"""What the demo shows while it runs: a live picture on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from rocketmq_spark.cli.demo.watch import DemoState

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BATCH_BARS = 40


class DemoView(Protocol):
    """Shows a ``DemoState`` every ``interval_s``."""

    interval_s: float

    def show(self, state: DemoState) -> None: ...


@contextlib.contextmanager
def view(output: Output, seconds: float, rate: float) -> Iterator[DemoView]:
    """Yield a picture for a terminal that can show it, and lines otherwise."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    # ``sys.stdout`` is None if standard output is closed (`>&-`). A terminal may be dumb, or unable to show the picture's
    # characters.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if output.is_for_programs or not is_terminal or console.is_dumb_terminal or not console.encoding.startswith("utf"):
        yield _LineView(output)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _PictureView(live, seconds, rate)


class _LineView:
    """One line every five seconds if something has changed, and one for each event."""

    interval_s = 5.0

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown_event_count = 0
        self._last_text = ""

    def show(self, state: DemoState) -> None:
        for event in state.events[self._shown_event_count :]:
            self._output.item({"event": "note", "text": event}, event)
        self._shown_event_count = len(state.events)
        batch = f"{state.batch_ms[-1]} ms" if state.batch_ms else "-"
        lag = " ".join(f"{queue}:{count}" for queue, count in state.lag.items())
        text = (
            f"{state.phase}: {state.sent} orders in, {state.orders_read} read, {state.totals_seen} totals out, "
            f"batch {batch}, lag {lag or '-'}"
        )
        if text != self._last_text:
            self._output.item(state.document(), f"{state.elapsed_s:4.0f} s  {text}")
        self._last_text = text


class _PictureView:
    """A live picture on a terminal."""

    interval_s = 0.5

    def __init__(self, live: Live, seconds: float, rate: float) -> None:
        self._live = live
        self._title = f"rocketmq-spark demo: {rate:g} orders a second for {seconds:g} s"

    def show(self, state: DemoState) -> None:
        self._live.update(_picture(self._title, state), refresh=True)


def _picture(title: str, state: DemoState) -> Group:
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    counts_table = Table(title="messages", title_justify="left", show_header=False)
    counts_table.add_column()
    counts_table.add_column(justify="right")
    for name, count in (
        ("orders in", state.sent),
        ("orders read", state.orders_read),
        ("totals out", state.totals_seen),
        ("orders in totals", state.orders_in_totals),
    ):
        counts_table.add_row(name, f"{count:,}")
    lag_table = Table("queue", title="lag", title_justify="left")
    lag_table.add_column("messages", justify="right")
    for queue, count in state.lag.items():
        lag_table.add_row(queue, f"{count:,}")
    window_table = Table("region", title=f"newest window: {state.window[11:19] or '-'}", title_justify="left")
    window_table.add_column("orders", justify="right")
    window_table.add_column("amount", justify="right")
    for region, (orders, amount) in sorted(state.window_totals.items()):
        window_table.add_row(region, f"{orders:,}", amount)
    headline = Text(f"{title}  ·  {state.elapsed_s:.0f} s  ·  {state.phase}", style="bold")
    events = [Text(event, style="bold red" if event.startswith("kill") else "green") for event in state.events]
    return Group(
        headline,
        Columns([counts_table, lag_table, window_table], padding=(0, 3)),
        Text(_batches(state.batch_ms)),
        *events,
    )


def _batches(times_ms: list[int]) -> str:
    """Return the newest batches as bars, and the last batch in numbers. The first batch of a driver starts Python, and takes
    much longer. So that the other bars stay visible, the highest bar stands for four times the median or more.
    """
    if not times_ms:
        return "batches: none yet"
    newest_ms = times_ms[1:][-_MAX_BATCH_BARS:]
    highest_ms = int(4 * statistics.median(newest_ms)) if newest_ms else 0
    bars = "".join(_BARS[min(t, highest_ms) * len(_BARS) // (highest_ms + 1)] for t in newest_ms)
    return f"batches: {len(times_ms)}, last {times_ms[-1]} ms  {bars}  (longest {max(times_ms)} ms)"

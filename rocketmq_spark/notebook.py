"""A chart of a running query in a notebook: its lag, and the duration of its micro-batches.

``from rocketmq_spark.notebook import LagChart; LagChart(query)``. Requires matplotlib (extra ``notebook``). A thread reads the
progress that Spark keeps and redraws the cell while the query runs; it sends no requests to brokers.
"""

from __future__ import annotations

import io
import json
import logging
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketmq_spark.spark.monitoring.queries import figures_of_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

_FIGURE_SIZE = (8.0, 4.5)
_BLUE, _ORANGE = "#1f77b4", "#d95f02"


class Point(NamedTuple):
    """A micro-batch: when it began (epoch s), its rows, its duration, and the lag after it."""

    batch_id: int
    begun_s: float
    rows: int
    batch_ms: int
    lag: int | None
    behind_ms: int | None


class LagChart:
    """Draws the lag and the batch durations of ``query`` until the query ends or ``stop`` is called.

    In a notebook, the chart appears below the cell and is updated while other cells run. Outside a notebook, use the attribute
    ``figure``, a matplotlib figure. ``summary`` returns the values as numbers.

    Args:
        query: A running query with a rocketmq source.
        every_s: Seconds between updates.
    """

    def __init__(self, query: StreamingQuery, every_s: float = 1.0) -> None:
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=_FIGURE_SIZE, facecolor="white", layout="constrained")
        self._query = query
        self._every_s = every_s
        self._points: dict[int, Point] = {}
        self._lock = threading.Lock()
        self._stop_event = threading.Event()
        draw(self.figure, [])
        self._cell_output = _display(self.figure)
        self._thread = threading.Thread(target=self._watch, name="rocketmq-spark lag chart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Update the chart once more, then stop watching the query. The query continues."""
        self._stop_event.set()
        self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Return figures of all micro-batches with rows so far.

        Returns:
            ``batches`` and ``rows``, counts; ``rowsPerSecond``, rows per second of batch time; ``batchMs``, durations in ms
            (``median``, ``longest``); ``lag`` (messages) and ``behindMs`` (as in ``progress``), each with
            ``largest`` and ``last``. Unknown values are None.
        """
        self._read_progress()
        with self._lock:
            points = [point for point in self._points.values() if point.rows]
        durations_ms = sorted(point.batch_ms for point in points)
        rows, total_s = sum(point.rows for point in points), sum(durations_ms) / 1000
        return {
            "batches": len(points),
            "rows": rows,
            "rowsPerSecond": round(rows / total_s) if total_s else None,
            "batchMs": {
                "median": durations_ms[len(durations_ms) // 2] if durations_ms else None,
                "longest": durations_ms[-1] if durations_ms else None,
            },
            "lag": _largest_and_last([point.lag for point in points]),
            "behindMs": _largest_and_last([point.behind_ms for point in points]),
        }

    def _watch(self) -> None:
        drawn_count = -1
        while True:
            is_last = self._stop_event.wait(self._every_s) or not self._is_active()
            self._read_progress()
            if is_last or len(self._points) != drawn_count:
                drawn_count = len(self._points)
                self._draw_chart()
            if is_last:
                return

    def _is_active(self) -> bool:
        try:
            return bool(self._query.isActive)
        except Exception:  # no caller would handle the error; Spark's session may have ended
            logger.info("the chart ends: the query no longer answers", exc_info=True)
            return False

    def _read_progress(self) -> None:
        try:
            reports = [json.loads(report.json) for report in self._query.recentProgress]
        except Exception:  # no caller would handle the error; the points so far are kept
            logger.info("cannot read the progress of the query", exc_info=True)
            return
        with self._lock:
            for progress_of_batch in reports:
                point = _point(progress_of_batch)
                earlier_point = self._points.get(point.batch_id)
                if (
                    earlier_point is None or point.rows >= earlier_point.rows
                ):  # an idle query reports the same batch without rows
                    self._points[point.batch_id] = point

    def _draw_chart(self) -> None:
        with self._lock:
            points = sorted(self._points.values())
        self.figure.clear()
        draw(self.figure, points)
        if self._cell_output is not None:
            self._cell_output.update(_picture(self.figure))


def draw(figure: Figure, points: list[Point]) -> None:
    """Draw lag and durations as two charts, one above the other, over the seconds since the first batch."""
    lag_axes, duration_axes = figure.subplots(2, 1, sharex=True)
    first_s = points[0].begun_s if points else 0.0
    times_s = [point.begun_s - first_s for point in points]
    known_lags = [(time_s, point.lag) for time_s, point in zip(times_s, points, strict=True) if point.lag is not None]
    # Clipping would cut off half of each point at 0, and a query that keeps up has only points at 0.
    lag_axes.step(
        [time_s for time_s, _ in known_lags],
        [lag for _, lag in known_lags],
        where="post",
        color=_BLUE,
        marker=".",
        clip_on=False,
    )
    _label(lag_axes, "messages behind")
    points_with_rows = [(time_s, point) for time_s, point in zip(times_s, points, strict=True) if point.rows]
    duration_axes.vlines(
        [time_s for time_s, _ in points_with_rows],
        0,
        [point.batch_ms for _, point in points_with_rows],
        color=_ORANGE,
        linewidth=3,
    )
    _label(duration_axes, "batch (ms)")
    duration_axes.set_xlabel("seconds since the first micro-batch")


def _label(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0, top=None if axes.has_data() else 1)
    axes.grid(alpha=0.3)


def _point(progress: dict[str, Any]) -> Point:
    figures = figures_of_progress(progress)
    begun_at = datetime.fromisoformat(figures["timestamp"])
    return Point(
        figures["batchId"],
        begun_at.timestamp(),
        figures["rows"],
        figures["batchMs"] or 0,
        figures["lag"],
        figures["behindMs"],
    )


def _largest_and_last(values: list[int | None]) -> dict[str, int | None]:
    known_values = [value for value in values if value is not None]
    return {"largest": max(known_values, default=None), "last": values[-1] if values else None}


def _display(figure: Figure) -> Any:
    """The display below the cell; None outside a notebook."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    if get_ipython() is None:
        return None
    return display(_picture(figure), display_id=True)  # type: ignore[no-untyped-call]


def _picture(figure: Figure) -> Any:
    """The figure as an image, because notebooks by themselves show only figures of pyplot."""
    from IPython.display import Image

    image_file = io.BytesIO()
    figure.savefig(image_file, format="png")
    return Image(image_file.getvalue())  # type: ignore[no-untyped-call]

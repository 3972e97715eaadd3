"""What reads ask of an ordinary topic, in a namespace and with signed requests."""

from __future__ import annotations

from rocketmq_spark import ports
from tests.fakes.ports import Fake
from tests.fakes.route_reader import ROUTE


def pull_source(compacted: bool = False) -> Fake:
    return Fake(
        ports.PullSource,
        name_on_wire=lambda name: f"ns%{name}",
        signing_keys=lambda: ("me", "hush", None),
        route=lambda topic, deadline: ROUTE,
        is_compacted=lambda queue, deadline=None: compacted,
        stores_batches=lambda queue, deadline=None: False,
    )

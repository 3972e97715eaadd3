"""The table of options as docs/options.md shows it."""

from __future__ import annotations

from rocketmq_spark.options import ROLES, SOURCE_ROLES, TABLE

_SHOWN_ROLE = {
    "batch source": "batch",
    "stream source": "stream",
    "sink": "sink",
    "producer": "`Producer`",
    "consumer": "`Consumer`",
    "pull consumer": "`PullConsumer`",
}


def markdown() -> str:
    """The table as it stands in docs/options.md."""
    connection = [row for row in TABLE if row.roles == ROLES or row.field == "route_refresh"]
    source = [row for row in TABLE if set(row.roles) & set(SOURCE_ROLES) and row not in connection]
    parts = []
    for title, rows in (
        ("Connection", connection),
        ("Source", source),
        (
            "Sink and producer",
            [row for row in TABLE if set(row.roles) & {"sink", "producer"} and row not in connection + source],
        ),
        ("Consumers", [row for row in TABLE if set(row.roles) <= {"consumer", "pull consumer"}]),
    ):
        lines = [f"## {title}", "", "| option | default | meaning |", "| --- | --- | --- |"]
        for r in rows:
            alias = f" (or {', '.join(f'`{a}`' for a in r.aliases)})" if r.aliases else ""
            where = "" if len(r.roles) > 1 else f" *({_SHOWN_ROLE[r.roles[0]]} only)*"
            default = r.shown if r.shown == "–" or "`" in r.shown or " " in r.shown else f"`{r.shown}`"
            lines.append(f"| `{r.name}`{alias} | {default} | {r.help}{where} |".replace("||", "\\|\\|"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"

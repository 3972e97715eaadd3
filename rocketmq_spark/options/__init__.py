"""Options: the table of all options, how their texts are parsed, and which of them each transport supports."""

from rocketmq_spark.options.table import (
    DEFAULT_GROUP,
    ENVIRONMENT_VARIABLE,
    ROLES,
    SOURCE_ROLES,
    TABLE,
    TOLERATED_OPTIONS,
    DefaultByRole,
    Option,
    Options,
    logger,
    option_name,
    parse,
)

__all__ = [
    "DEFAULT_GROUP",
    "ENVIRONMENT_VARIABLE",
    "ROLES",
    "SOURCE_ROLES",
    "TABLE",
    "TOLERATED_OPTIONS",
    "DefaultByRole",
    "Option",
    "Options",
    "logger",
    "option_name",
    "parse",
]

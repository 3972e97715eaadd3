"""Options: the one table, how texts become values, and which go with which transport."""

from rocketmq_spark.options.table import (
    DEFAULT_GROUP,
    ENVIRONMENT_VARIABLE,
    ROLES,
    SOURCE_ROLES,
    TABLE,
    TOLERATED,
    ByRole,
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
    "TOLERATED",
    "ByRole",
    "Option",
    "Options",
    "logger",
    "option_name",
    "parse",
]

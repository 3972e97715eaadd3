"""Checks of a source's options that need no broker."""

from __future__ import annotations

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import check_environment_set, environment_of
from rocketmq_spark.spark.source import subscription
from rocketmq_spark.spark.source.starting_offsets import check_start_and_end


def check_source(parsed_options: Options, role: str) -> Options:
    """Return the options of ``role``, which is "batch source" or "stream source". Raises ``OptionError`` for wrong options."""
    options = parsed_options.for_role(role)
    topic_options = [name for name in ("subscribe", "subscribe_pattern", "assign") if name in options.given_fields]
    if len(topic_options) != 1:
        raise OptionError(
            "exactly one of the options 'subscribe', 'subscribePattern' and 'assign' says what to read; "
            f"{'none is' if not topic_options else 'several are'} given"
        )
    subscription.check_subscription(options)
    check_start_and_end(options, role)
    environment_of(options)
    if options.allocation_strategy == "environment":
        check_environment_set(options, "allocationStrategy")
    min_offsets, max_offsets = options.min_offsets_per_trigger, options.max_offsets_per_trigger
    if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
        raise OptionError(
            f"option 'minOffsetsPerTrigger' is {min_offsets}, more than 'maxOffsetsPerTrigger' {max_offsets}"
        )
    return options

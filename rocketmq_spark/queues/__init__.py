"""Choice of queues: pure functions over lists of ``MessageQueue``, for producers, for groups and for Spark's planner.

These modules contact no broker, read no clock and start no thread. ``selection`` chooses one queue for a producer. ``allocation``
chooses the queues of a consumer. Both modules use ``environment``.
"""

"""Choice of queues: pure functions over lists of ``MessageQueue``, for producers, for groups and for Spark's planner.

Nothing here contacts a broker, reads a clock or starts a thread. ``selection`` chooses one queue for a producer, ``allocation``
a consumer's share of all queues. Both use ``environment``.
"""

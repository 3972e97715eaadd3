"""Which queue: pure functions over lists of ``MessageQueue``, for producers, for groups and for Spark's planner.

Nothing here asks a broker, reads a clock or starts a thread. ``selection`` is a producer's choice of one queue,
``allocation`` a consumer's share of all queues; ``environment`` serves both.
"""

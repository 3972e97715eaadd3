"""Choice of queues: pure functions over lists of ``MessageQueue``, for producers, for groups and for Spark's planner.

Nothing here contacts a broker, reads a clock or starts a thread. ``selection`` chooses one queue for a producer,
``allocation`` the share of a consumer; ``environment`` is for both.
"""

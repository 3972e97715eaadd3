"""Which queue: pure functions over lists of ``MessageQueue``, for producers, for groups and for Spark's planner.

Nothing here asks a broker, reads a clock or starts a thread. In import order: ``named``, ``java_hash``,
``hash_columns``, ``environment``, ``selection`` (a producer's choice of one queue), ``consistent_hash``,
``configured``, ``allocation`` (a consumer's share of all queues).
"""

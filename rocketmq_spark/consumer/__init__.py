"""A member of a consumer group: which queues are its own, what was pulled of them, and how far they are finished.

What decides (rebalance, start offsets, the process queue, results, flow control) is pure: no thread, no clock, no question.
What acts is thin, and asks brokers through ``ports.GroupMember``.
"""

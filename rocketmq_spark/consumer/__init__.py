"""Members of a consumer group: their queues, the messages they pulled, and the offsets they finished.

Decisions (rebalance, start offsets, the process queue, results, flow control) are pure: no threads, clocks or requests. The
modules that act on them are thin, and send requests through ``ports.GroupMember``.
"""

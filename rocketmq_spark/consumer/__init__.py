"""Members of a consumer group: ``push``, ``pull`` and ``simple`` have the three kinds, which users call.

Decisions (rebalance, start offsets, the process queue, results, flow control) are pure: no threads, clocks or requests. The
modules that act on them are thin, and send requests through ``ports.GroupMember``.
"""

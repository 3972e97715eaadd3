"""Consumers, which are members of a group. The modules ``push``, ``pull`` and ``simple`` have the consumers that users create.

The modules that decide (about rebalances, start offsets, the process queue, results and flow control) are pure: they use no
threads, clocks or requests. The modules that act on the decisions are thin, and send requests through ``ports.GroupMember``.
"""

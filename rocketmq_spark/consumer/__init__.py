"""Consumers, which are members of a group. ``push``, ``pull`` and ``simple`` have the three kinds that users create.

Decisions (rebalance, start offsets, the process queue, results, flow control) are pure: no threads, clocks or requests. The
modules that act on them are thin, and send requests through ``ports.GroupMember``.
"""

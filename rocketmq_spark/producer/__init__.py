"""Everything between "a message" and "one send verb" of the port ``Sender``.

In import order: ``settings``, ``faults``, ``attempts``, ``results``, ``encoding``, ``accumulator``, ``lanes`` are pure;
``clockwork``, ``delivery``, ``batching``, ``upkeep`` and ``producer`` drive them with threads and locks.
"""

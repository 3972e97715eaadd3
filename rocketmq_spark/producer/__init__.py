"""Everything between "a message" and "one send verb" of the port ``Sender``.

In import order: ``faults``, ``accumulator``, ``lanes``, ``attempts``, ``results``, ``settings``, ``encoding``,
``hooks`` and ``topics`` are pure or ask the sender only; ``clockwork``, ``pending``, ``delivery``, ``batching``,
``upkeep`` and ``producer`` drive them and are the ones with threads and locks.
"""

"""Everything between "a message" and "one send verb" of the port ``Sender``.

In import order: ``accumulator``, ``attempts``, ``results``, ``hooks``, ``ordered_queues``, ``settings``, ``in_flight``,
``outgoing`` and ``encoding`` are pure, ``faults`` is but for its lock, ``topics``, ``choice`` and ``destination`` ask the
sender only; ``under_way``, ``pending``, ``batching``, ``engine``, ``housekeeping`` and ``producer`` have the threads
and locks. All that is sent goes through ``engine``.
"""

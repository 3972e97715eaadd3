"""Everything between "a message" and "one send verb" of the port ``Sender``. All sends go through ``engine``.

``ORDER`` in tests/test_house.py has the modules in import order. ``accumulator``, ``attempts``, ``outgoing``, ``settings``
and ``encoding`` are pure; ``topics`` and ``destination`` only ask the sender; ``in_flight``, ``confirming``, ``batching``,
``engine``, ``topics``, ``resending`` and ``producer`` have the threads and locks. See docs/design-producer.md.
"""

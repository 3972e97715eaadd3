"""Everything between a message and a single send of the port ``Sender``. All sends go through ``engine``.

``ORDER`` in tests/test_house.py has the modules in import order. ``accumulator``, ``attempts``, ``outgoing``, ``settings``
and ``encoding`` are pure; ``destination`` only sends requests through the port; ``in_flight``, ``confirming``,
``batching``, ``engine``, ``topics``, ``resending`` and ``producer`` have the threads and locks. See docs/design-producer.md.
"""

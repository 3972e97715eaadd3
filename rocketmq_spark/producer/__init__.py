"""Everything between a message and a single send of the port ``Sender``. All sends go through ``engine``.

``ORDER`` in tests/test_house.py has the modules in import order. ``accumulator``, ``retry``, ``outgoing``, ``settings`` and
``encoding`` are pure. ``routing`` has no lock, and sends requests through the port. ``futures``, ``send_queue``, ``ambiguity``,
``batching``, ``engine``, ``resender`` and ``producer`` have the threads and locks. See docs/design-producer.md.
"""

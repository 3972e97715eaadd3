"""RocketMQ's remoting protocol as bytes and values: no sockets, no threads, no clocks.

``ORDER`` in tests/test_house.py has the modules in import order.
"""

"""A PySpark connector for Apache RocketMQ, and the pure-Python client under it."""

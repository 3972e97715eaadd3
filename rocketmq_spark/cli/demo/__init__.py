"""The command ``rocketmq-spark demo``."""

"""The base of all other packages: numbers of the protocol, clocks, threads, retries. Nothing here knows RocketMQ's objects."""

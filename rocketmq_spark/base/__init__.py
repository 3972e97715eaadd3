"""What every part stands on: numbers of the protocol, clocks, threads, retries. Nothing here knows RocketMQ's objects."""

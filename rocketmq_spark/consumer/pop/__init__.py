"""Consumers over gRPC (POP): a Proxy delivers messages one by one, and each is acknowledged."""

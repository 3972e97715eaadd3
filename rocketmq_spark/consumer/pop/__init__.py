"""Consumers over gRPC: a Proxy hands out messages one by one, and each is acknowledged."""

"""RocketMQ 5's own protocol for clients, gRPC through the Proxy: the second transport, behind the same ports as the first."""

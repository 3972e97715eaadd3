"""RocketMQ 5's own protocol for clients, gRPC through the Proxy: the second transport, behind the same ports as the first."""

import os

# Unset, gRPC's core handles forks and its layer for Python does not: then a child that was forked from a process with calls
# under way, for whatever purpose, may end with a segmentation fault. It is read when gRPC is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

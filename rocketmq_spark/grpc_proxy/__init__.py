"""The gRPC protocol of RocketMQ 5 through the Proxy: the second transport, behind the same ports as remoting."""

import os

# If it is unset, gRPC's core handles forks but its Python layer does not: then a child that is forked while calls are running,
# for any purpose, may crash with a segmentation fault. gRPC reads the variable when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

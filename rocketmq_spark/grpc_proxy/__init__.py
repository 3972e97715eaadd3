"""The gRPC protocol of RocketMQ 5 through the Proxy: the second transport, behind the same ports as remoting."""

import os

# If this variable is unset, gRPC's core handles forks but its Python layer does not. A child process that is forked while calls
# are running may then crash with a segmentation fault. gRPC reads the variable when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

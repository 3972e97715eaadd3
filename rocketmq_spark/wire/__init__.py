"""RocketMQ's remoting protocol as bytes and values: no sockets, no threads, no clocks.

Modules, each using only those before it: header, frame, compression, names, properties, identifiers, subscription,
messages, rpc, loose_json, bodies, acl.
"""

"""Reads offset ranges of one broker with pipelined pulls: in order, completely, and within a limit of bytes. This package does
not decode messages into columns.
"""

"""Offset ranges of one broker as pipelined pulls: in order, complete, within a bound of bytes; nothing of columns."""

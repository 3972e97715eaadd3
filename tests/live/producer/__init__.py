"""Tests against a real name server and real brokers."""

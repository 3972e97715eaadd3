"""A durable store, on RocksDB, of records that are due later. Most records are sends that a producer could not complete; this
package sends them again.
"""

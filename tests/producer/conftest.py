from tests.producer.bench import bench

__all__ = ["bench"]

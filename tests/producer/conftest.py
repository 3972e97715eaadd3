from tests.producer.scripted import bench

__all__ = ["bench"]

"""Train one model over devices in several directions: replicas and shards of data, and matrices that are divided."""

from tr_dist.mesh.strategy import Mesh

__all__ = ["Mesh"]

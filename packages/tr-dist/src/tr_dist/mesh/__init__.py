"""Train one model over devices in several directions: replicas and shards of data, layers, sequences and matrices."""

from typing import Any

from tr_dist.mesh.direction import sizes_of
from tr_dist.mesh.pipelined import PipelinedMesh
from tr_dist.mesh.strategy import Mesh

__all__ = ["Mesh", "PipelinedMesh", "of_arguments"]


def of_arguments(args: Any) -> Mesh:
    """Build the strategy that `parallelism_config` of the training arguments wants; see `Mesh.from_arguments`."""
    return (PipelinedMesh if sizes_of(args)["pp_size"] > 1 else Mesh).from_arguments(args)

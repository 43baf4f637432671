"""Hand-written CUDA and CPU kernels for JAX, differentiable and shardable."""

from importlib.metadata import version as _version

from jax_baracuda import forward_mode
from jax_baracuda._core.op import precision_guarantee
from jax_baracuda.ops.segment import segment_max, segment_max_backward, unsorted_segment_max_backward

__version__ = _version("jax_baracuda")

__all__ = [
    "forward_mode",
    "precision_guarantee",
    "segment_max",
    "segment_max_backward",
    "unsorted_segment_max_backward",
]

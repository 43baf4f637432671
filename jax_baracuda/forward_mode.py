"""The differentiable functions of jax_baracuda, for forward-mode differentiation.

JAX cannot apply forward mode to a function whose reverse mode is a kernel (``jax.custom_vjp``). Here are the same
functions, bound straight to the primitives: use them under ``jax.jvp``, ``jax.jacfwd`` and ``jax.linearize``. Their
value comes from the same kernels, and so does the tangent where the function is linear (sums, means, rotations,
selections, written windows); other tangents come from plain JAX. For ``jax.grad``, ``jax.vjp``, ``jax.jacrev`` and
``jax.hessian`` use the functions of :mod:`jax_baracuda`, whose backward pass is a kernel too. The ``..._backward``
functions serve both modes as they are.
"""

from jax_baracuda._core.autodiff import in_forward_mode
from jax_baracuda.ops import causal_conv1d as convolution
from jax_baracuda.ops import rope as rotation
from jax_baracuda.ops import segment
from jax_baracuda.ops import where as selection
from jax_baracuda.ops import write_slice as slices

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "rope",
    "rope_qk",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_softmax",
    "segment_sum",
    "where",
    "write_slice",
    "write_slices",
]

causal_conv1d = in_forward_mode(convolution.causal_conv1d)
causal_conv1d_update = in_forward_mode(convolution.causal_conv1d_update)
rope = in_forward_mode(rotation.rope)
rope_qk = in_forward_mode(rotation.rope_qk)
segment_max = in_forward_mode(segment.segment_max)
segment_mean = in_forward_mode(segment.segment_mean)
segment_min = in_forward_mode(segment.segment_min)
segment_prod = in_forward_mode(segment.segment_prod)
segment_softmax = in_forward_mode(segment.segment_softmax)
segment_sum = in_forward_mode(segment.segment_sum)
where = in_forward_mode(selection.where)
write_slice = in_forward_mode(slices.write_slice)
write_slices = in_forward_mode(slices.write_slices)

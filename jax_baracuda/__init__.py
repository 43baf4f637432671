"""Hand-written CUDA and CPU kernels for JAX, differentiable and shardable."""

from importlib.metadata import version as _version

from jax_baracuda import forward_mode
from jax_baracuda._core import jax_versions as _jax_versions
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.op import disabled_export_checks as _disabled_export_checks
from jax_baracuda._core.op import precision_guarantee
from jax_baracuda._core.selection import Implementation, implementation
from jax_baracuda._redirect import RedirectReport, redirect
from jax_baracuda.ops.causal_conv1d import Activation, causal_conv1d, causal_conv1d_backward
from jax_baracuda.ops.causal_conv1d_ragged import causal_conv1d_ragged
from jax_baracuda.ops.causal_conv1d_update import causal_conv1d_update
from jax_baracuda.ops.rope import HeadLayout, rope, rope_backward, rope_qk, rope_qk_backward
from jax_baracuda.ops.rope_frequencies import rope_frequencies
from jax_baracuda.ops.rope_write import rope_write
from jax_baracuda.ops.segment.arg_extremum import segment_argmax, segment_argmin
from jax_baracuda.ops.segment.arguments import TieBreak
from jax_baracuda.ops.segment.attention import graph_additive_attention, graph_dot_product_attention, segment_attention
from jax_baracuda.ops.segment.extremum import (
    segment_max,
    segment_max_backward,
    segment_min,
    segment_min_backward,
    unsorted_segment_max_backward,
)
from jax_baracuda.ops.segment.gather_dot import gather_segment_dot
from jax_baracuda.ops.segment.gather_extremum import gather_segment_max, gather_segment_min
from jax_baracuda.ops.segment.gather_sum import gather_segment_mean, gather_segment_sum
from jax_baracuda.ops.segment.logsumexp import segment_logsumexp
from jax_baracuda.ops.segment.mean import segment_mean, segment_mean_backward
from jax_baracuda.ops.segment.plan import SegmentPlan, segment_plan
from jax_baracuda.ops.segment.product import segment_prod, segment_prod_backward
from jax_baracuda.ops.segment.softmax import segment_softmax, segment_softmax_backward
from jax_baracuda.ops.segment.sum import segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.take_rows import take_rows
from jax_baracuda.ops.segment.variance import segment_std, segment_var
from jax_baracuda.ops.where import where, where_backward
from jax_baracuda.ops.write_rows import write_rows
from jax_baracuda.ops.write_slice import WriteMode, write_slice, write_slices

__version__ = _version("jax_baracuda")

for _folder in __path__:  # an editable installation has two
    _jax_versions.hide_frames_of(_folder)

DISABLE_JAX_EXPORT_CHECKS = _disabled_export_checks()
"""For ``jax.export.export(..., disabled_checks=DISABLE_JAX_EXPORT_CHECKS)`` of a program that calls functions of this
package. The process that runs the program must first import the same version of this package."""

__all__ = [
    "Activation",
    "DISABLE_JAX_EXPORT_CHECKS",
    "Guarantee",
    "HeadLayout",
    "Implementation",
    "RedirectReport",
    "SegmentPlan",
    "TieBreak",
    "WriteMode",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_ragged",
    "causal_conv1d_update",
    "forward_mode",
    "gather_segment_dot",
    "gather_segment_max",
    "gather_segment_mean",
    "gather_segment_min",
    "gather_segment_sum",
    "graph_additive_attention",
    "graph_dot_product_attention",
    "implementation",
    "precision_guarantee",
    "redirect",
    "rope",
    "rope_backward",
    "rope_frequencies",
    "rope_qk",
    "rope_qk_backward",
    "rope_write",
    "segment_argmax",
    "segment_argmin",
    "segment_attention",
    "segment_logsumexp",
    "segment_max",
    "segment_max_backward",
    "segment_mean",
    "segment_mean_backward",
    "segment_min",
    "segment_min_backward",
    "segment_plan",
    "segment_prod",
    "segment_prod_backward",
    "segment_softmax",
    "segment_softmax_backward",
    "segment_std",
    "segment_sum",
    "segment_sum_backward",
    "segment_var",
    "take_rows",
    "unsorted_segment_max_backward",
    "where",
    "where_backward",
    "write_rows",
    "write_slice",
    "write_slices",
]

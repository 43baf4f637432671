"""Segment reductions: rows of an array reduced by an integer label, with the semantics of ``jax.ops.segment_*``.

Message passing on graphs, point clouds and recommender models aggregate with them. Each op has one module, which reads
top to bottom: public functions, reference in plain JAX, program of one shard, ops (one per native kernel), derivative
rules. :mod:`.arguments` checks arguments; :mod:`.definitions` has the common parts of op definitions, :mod:`.edges`
those of ops that gather rows along edges, and :mod:`.cells` those of references. :mod:`.take_rows` computes its value
by an XLA gather and its gradient by a segment sum.
"""

from jax_baracuda.ops.segment.arg_extremum import segment_argmax, segment_argmin
from jax_baracuda.ops.segment.arguments import TieBreak
from jax_baracuda.ops.segment.attention import segment_attention
from jax_baracuda.ops.segment.extremum import (
    segment_max,
    segment_max_backward,
    segment_min,
    segment_min_backward,
    unsorted_segment_max_backward,
)
from jax_baracuda.ops.segment.gather_extremum import gather_segment_max, gather_segment_min
from jax_baracuda.ops.segment.gather_sum import gather_segment_mean, gather_segment_sum
from jax_baracuda.ops.segment.mean import segment_mean, segment_mean_backward
from jax_baracuda.ops.segment.plan import SegmentPlan, segment_plan
from jax_baracuda.ops.segment.product import segment_prod, segment_prod_backward
from jax_baracuda.ops.segment.softmax import segment_softmax, segment_softmax_backward
from jax_baracuda.ops.segment.sum import segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.take_rows import take_rows

__all__ = [
    "SegmentPlan",
    "TieBreak",
    "gather_segment_max",
    "gather_segment_mean",
    "gather_segment_min",
    "gather_segment_sum",
    "segment_argmax",
    "segment_argmin",
    "segment_attention",
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
    "segment_sum",
    "segment_sum_backward",
    "take_rows",
    "unsorted_segment_max_backward",
]

"""Segment reductions: rows of an array reduced by an integer label, with the semantics of ``jax.ops.segment_*``.

Message passing on graphs, point clouds and recommender models aggregate with them. Each op has one module, which reads
top to bottom: public functions, reference in plain JAX, program of one shard, ops (one per native kernel), derivative
rules. :mod:`.arguments` checks arguments; :mod:`.definitions` has the common parts of op definitions, :mod:`.edges`
those of ops that gather rows along edges, :mod:`.cells` those of references, and :mod:`.comparisons` how numbers
compare. :mod:`.take_rows` computes its value by an XLA gather and its gradient by a segment sum.
"""

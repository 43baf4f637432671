"""Properties of segment_argmax and segment_argmin alone: the first of many ties."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import ARGMAX, ARGMIN, Reduction
from support import cases
from support.cases import Shape
from support.kernels import Batch

each_arg = pytest.mark.parametrize("reduction", [ARGMAX, ARGMIN], ids=str)


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@each_arg
def test_first_of_many_ties(rng: np.random.Generator, reduction: Reduction, is_sorted: bool) -> None:
    """The lowest of equal rows wins, whatever its position, also if the rows equal the identity."""
    batch = Batch()
    for dtype in ("float32", "bfloat16", "int32", "uint32", "int8", "uint8", "bool"):
        info_or_none = None if dtype == "bool" else jnp.iinfo(dtype) if "int" in dtype else jnp.finfo(dtype)
        for fill in (0, 1) if info_or_none is None else (0, info_or_none.min, info_or_none.max):
            for shape in (Shape(5000, (), 7), Shape(3000, (33,), 3), Shape(300, (3,), 1000)):
                data = np.full((shape.rows, *shape.row_shape), fill, jnp.dtype(dtype))
                ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
                expected = reduction.value(data, ids, shape.segments)
                batch.add(
                    lambda x, i, s=shape.segments: reduction(x, i, s, indices_are_sorted=is_sorted),
                    (data, ids),
                    lambda actual, e=expected, where=f"{dtype} {fill} {shape}": e.check(actual, where),
                )
    batch.run()

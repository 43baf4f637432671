"""The workload of sanitizers: programs of the matrix that reach every strategy of the CPU kernels.

Their results are checked, too, because a sanitizer's module is another build of the same sources.
"""

from __future__ import annotations

from support import matrix  # isort: skip  (sets the environment before JAX is loaded)

import pytest
from support.matrix.calls import FAMILIES
from support.matrix.run import Compiled
from support.matrix.strategies import BATCH_SIZE, covering

assert matrix


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family: str) -> None:
    cases, problems = covering(family, ["cpu"])
    assert cases and not problems
    for case in cases:
        print(case.recipe(), flush=True)
        Compiled(case, BATCH_SIZE).check()

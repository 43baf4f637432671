"""What sanitizers watch: all public functions and their gradients, at sizes that reach every strategy of CPU kernels.

Their results are compared with plain JAX by other tests; here, a second call must give the bits of the first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from small_programs import Program, middle_programs, other_programs, tiny_programs, unreached_strategies

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def unreached() -> Iterator[set[tuple[str, str]]]:
    with unreached_strategies() as strategies:
        yield strategies


def check(program: Program) -> None:
    for first, second in zip(program.results(), program.results(), strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("program", [*tiny_programs(RNG), *middle_programs(RNG)], ids=lambda program: program.name)
def test_small_program(program: Program) -> None:
    check(program)


@pytest.mark.parametrize("program", other_programs(RNG), ids=lambda program: program.name)
def test_program(program: Program) -> None:
    check(program)


def test_every_strategy_was_reached(unreached: set[tuple[str, str]]) -> None:
    """By the programs above, which must have run."""
    assert not unreached

"""Decoding with a KV cache that a loop carries, where each example has its own position: the time of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_baracuda as jb
from benchmarks.decoder import Decoder, Functions, Layout, Ours, Plain
from benchmarks.harness import Case, Contender, Effort, JaxContender
from benchmarks.record import FORWARD, OURS, PROGRAMS, XLA

LAYOUTS: tuple[Layout, ...] = ("BSHD", "BHSD")
GPU_DECODERS = tuple(Decoder(layout, 16, 4096, 32, 8, 128, 4, 64, "bfloat16") for layout in LAYOUTS)
CPU_DECODERS = tuple(Decoder(layout, 4, 512, 8, 2, 64, 4, 16, "float32") for layout in LAYOUTS)
QUICK_DECODERS = tuple(Decoder(layout, 2, 32, 4, 2, 16, 2, 8, "float32") for layout in LAYOUTS)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """A case for each layout of the cache."""
    for decoder in QUICK_DECODERS if quick else GPU_DECODERS if backend == "gpu" else CPU_DECODERS:
        heads = f"{decoder.heads}/{decoder.kv_heads} heads × {decoder.features}"
        yield Case(
            op=PROGRAMS,
            size=f"decode {decoder.examples} examples, cache {decoder.layout} of {decoder.length}, {heads}",
            variant=f"{decoder.layers} layers, {decoder.dtype}, a step",
            what=FORWARD,
            floor_bytes=floor_bytes(decoder),
            make_contenders=functools.partial(contenders, decoder),
            tolerance=2e-2,  # Products in TF32, and features rounded to 16 bits in each layer.
            effort=Effort(seconds_per_contender=2.0),  # a call is many steps
        )


def floor_bytes(decoder: Decoder) -> int:
    """Bytes of the weights, the caches and the written rows. A step moves each of them once."""
    weights = sum(map(math.prod, decoder.weight_shapes().values()))
    rows = decoder.examples * decoder.kv_heads * decoder.features
    elements = decoder.layers * (weights + 2 * math.prod(decoder.cache_shape()) + 2 * rows)
    return elements * jnp.dtype(decoder.dtype).itemsize


def contenders(decoder: Decoder) -> Iterator[Contender]:
    """This package with its default choices, this package with kernels everywhere, and plain JAX."""
    for library, formulation, functions, implementation in (
        (OURS, "", Ours(), None),
        (OURS, "kernels", Ours(), "kernel"),
        (XLA, "", Plain(), None),
    ):
        embeddings, positions = decoder.make_inputs()
        operands: tuple[Any, ...] = (decoder.make_caches(), decoder.make_weights(), embeddings, positions)
        yield JaxContender(
            library,
            formulation,
            functools.partial(decode, decoder, functions, implementation),
            *operands,
            repetitions=decoder.steps,
            carries_first=True,
        )


def decode(decoder: Decoder, functions: Functions, implementation: Any, *operands: Any) -> tuple[Any, jax.Array]:
    with jb.implementation(implementation):
        return decoder.decode(functions, *operands)

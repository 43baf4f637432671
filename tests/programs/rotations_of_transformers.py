"""Rotations of queries and keys by the modules of Hugging Face's transformers, without JAX."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import torch

HEADS, KV_HEADS, SIZE, TRAINED = 4, 2, 64, 256
"""Heads of queries and of keys, their features, and the length that the model was trained for."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 40 for i in range(SIZE // 2)],
    "long_factor": [1.0 + i for i in range(SIZE // 2)],
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's rotation. The names of its classes and of its module follow from `name`."""

    module: str
    name: str
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    """``rope_parameters`` of the model, beside the base."""
    length: int = TRAINED
    """Positions are below it."""
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    """The pairs of each of a token's positions, as in ``mrope_section``."""
    sections_interleaved: bool = False
    config: str = ""
    """The configuration's class, if it has another name."""

    @property
    def rope_parameters(self) -> dict[str, Any]:
        sections = {"mrope_section": list(self.sections)} if self.sections else {}
        return {"rope_type": "default", "rope_theta": 10000.0, **self.parameters, **sections}

    def rotate(self, q: np.ndarray, k: np.ndarray, positions: np.ndarray, dtype: str) -> list[np.ndarray]:
        """Queries and keys ``[B, H, S, D]``, rotated in this dtype, as float32."""
        package = importlib.import_module(f"transformers.models.{self.module}")
        code = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        config = getattr(package, self.config or f"{self.name}Config")(
            hidden_size=HEADS * SIZE,
            num_attention_heads=HEADS,
            head_dim=SIZE,
            max_position_embeddings=TRAINED,
            rope_parameters=self.rope_parameters,
        )
        queries, keys = (torch.tensor(x).to(getattr(torch, dtype)) for x in (q, k))
        embedding = getattr(code, f"{self.name}RotaryEmbedding")(config)
        cos, sin = embedding(queries, torch.tensor(positions))
        size = cos.shape[-1]
        if self.module in ("glm", "glm4", "gpt_neox"):  # their function passes the other features through
            rotated = code.apply_rotary_pos_emb(queries, keys, cos, sin)
        else:
            first = code.apply_rotary_pos_emb(queries[..., :size], keys[..., :size], cos, sin)
            rotated = [torch.cat([y, x[..., size:]], dim=-1) for y, x in zip(first, (queries, keys), strict=True)]
        return [x.float().numpy() for x in rotated]


PART = {"partial_rotary_factor": 0.5}
MODELS = {
    "llama": Model("llama", "Llama"),
    "llama, linear": Model("llama", "Llama", {"rope_type": "linear", "factor": 4.0}, 4 * TRAINED),
    "llama, dynamic": Model("llama", "Llama", DYNAMIC),
    "llama, dynamic beyond its length": Model("llama", "Llama", DYNAMIC, 3 * TRAINED),
    "llama, yarn": Model("llama", "Llama", YARN, 4 * TRAINED),
    "llama, yarn without truncation": Model("llama", "Llama", {**YARN, "truncate": False}, 4 * TRAINED),
    "llama, yarn with scales": Model(
        "llama", "Llama", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0}, 4 * TRAINED
    ),
    "llama, longrope": Model("llama", "Llama", LONGROPE),
    "llama, longrope beyond its length": Model("llama", "Llama", LONGROPE, 4 * TRAINED),
    "llama, llama3": Model("llama", "Llama", LLAMA3, 8 * TRAINED),
    "phi": Model("phi", "Phi", PART),
    "phi, linear": Model("phi", "Phi", {**PART, "rope_type": "linear", "factor": 2.0}, 2 * TRAINED),
    "stablelm": Model("stablelm", "StableLm", {"partial_rotary_factor": 0.25}),
    "gpt_neox": Model("gpt_neox", "GPTNeoX", {"partial_rotary_factor": 0.25}),
    "glm": Model("glm", "Glm", PART, interleaved=True),
    "glm4": Model("glm4", "Glm4", PART, interleaved=True),
    "cohere": Model("cohere", "Cohere", interleaved=True),
    "qwen2_vl": Model("qwen2_vl", "Qwen2VL", sections=(8, 12, 12), config="Qwen2VLTextConfig"),
    "qwen3_vl": Model("qwen3_vl", "Qwen3VLText", sections=(12, 10, 10), sections_interleaved=True),
}


def rotate_by_gptj(q: np.ndarray, k: np.ndarray, positions: np.ndarray, rotary_dim: int) -> list[np.ndarray]:
    """GPT-J's rotation of queries and keys ``[B, S, H, D]``, which has a table of sines and cosines."""
    from transformers.models.gptj import modeling_gptj

    sines, cosines = torch.chunk(modeling_gptj.create_sinusoidal_positions(TRAINED, rotary_dim), 2, dim=-1)
    at = torch.tensor(positions)
    rotated = []
    for x in (torch.tensor(q), torch.tensor(k)):
        first = modeling_gptj.apply_rotary_pos_emb(x[..., :rotary_dim], sines[at], cosines[at])
        rotated.append(torch.cat([first, x[..., rotary_dim:]], dim=-1).numpy())
    return rotated

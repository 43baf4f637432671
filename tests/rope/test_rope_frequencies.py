"""rope_frequencies: published schemes against values computed by hand and against their definitions, and errors."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from support import cases

from jax_baracuda import rope_frequencies

LONG = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0], "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PLAIN = [1, 0.1, 0.01, 0.001]
"""The frequencies of 8 features and base 10000."""


def scaling(rope_type: str, **parameters: Any) -> dict[str, Any]:
    """The argument for a scheme, with parameters that it needs unless others are given."""
    usual = {"yarn": YARN, "llama3": LLAMA3, "longrope": LONG}.get(rope_type, {})
    return {"scaling": {"rope_type": rope_type, **usual, **parameters}}


OF_YARN, SCALE_OF_YARN = [1, 0.1, 0.00625, 0.00025], 0.1 * math.log(4) + 1
"""The frequencies and the scale of YARN."""

# Arguments other than dim=8, the expected frequencies, and the scale if it is not 1.
BY_HAND: dict[str, tuple[Any, ...]] = {
    "no scaling": ({}, PLAIN),
    "no parameters": ({"scaling": {}}, PLAIN),
    "default": (scaling("default"), PLAIN),
    "base": ({"dim": 4, "base": 100}, [1, 0.1]),
    "base in the parameters": ({"dim": 4, "scaling": {"rope_theta": 100.0}}, [1, 0.1]),
    "base in both": ({"dim": 4, "base": 100.0, "scaling": {"rope_theta": 100}}, [1, 0.1]),
    "part": ({"dim": 16, **scaling("default", partial_rotary_factor=0.5)}, PLAIN),
    # 0.4 of 8 features are 3, and the last one gets a frequency, too.
    "odd part": ({"base": 8, "scaling": {"partial_rotary_factor": 0.4}}, [1, 0.25]),
    "linear": (scaling("linear", factor=4), [0.25, 0.025, 0.0025, 0.00025]),
    "older name": ({"dim": 4, "scaling": {"type": "linear", "factor": 4}}, [0.25, 0.0025]),
    "both names": ({"dim": 4, "scaling": {"type": "mrope", "rope_type": "linear", "factor": 4}}, [0.25, 0.0025]),
    "linear part": (
        {"dim": 16, **scaling("linear", factor=4, partial_rotary_factor=0.5)},
        [0.25, 0.025, 0.0025, 0.00025],
    ),
    # The base is multiplied by (2 * 150 / 100 - 1)^(4/2) = 4.
    "dynamic": (
        {"dim": 4, "base": 16, "seq_len": 150, "max_position_embeddings": 100, **scaling("dynamic", factor=2.0)},
        [1, 1 / 8],
    ),
    "dynamic, length among the parameters": (
        {"dim": 4, "base": 16, "seq_len": 150, **scaling("dynamic", factor=2.0, original_max_position_embeddings=100)},
        [1, 1 / 8],
    ),
    "dynamic within the trained length": (
        {"dim": 4, "base": 16, "seq_len": 99, "max_position_embeddings": 100, **scaling("dynamic", factor=2.0)},
        [1, 1 / 4],
    ),
    "dynamic, any length": ({"dim": 4, "base": 16, **scaling("dynamic", factor=2.0)}, [1, 1 / 4]),
    "dynamic, one pair": (
        {"dim": 2, "seq_len": 150, "max_position_embeddings": 100, **scaling("dynamic", factor=2.0)},
        [1],
    ),
    # 32 turns in 4096 positions are at pair 1.31, truncated to 1. One turn is at pair 2.81, rounded up to 3.
    "yarn": (scaling("yarn"), OF_YARN, SCALE_OF_YARN),
    "yarn, factor from the lengths": (
        {"max_position_embeddings": 16384, **scaling("yarn", factor=None)},
        OF_YARN,
        SCALE_OF_YARN,
    ),
    "yarn, original length from the model": (
        {"scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096},
        OF_YARN,
        SCALE_OF_YARN,
    ),
    "longrope, original length from the model": (
        {
            "dim": 4,
            "base": 16,
            "scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0], "factor": 16.0},
            "seq_len": 257,
            "max_position_embeddings": 256,
        },
        [1 / 4, 1 / 32],
        math.sqrt(1.5),
    ),
    "yarn that shrinks": (scaling("yarn", factor=0.5), [1, 0.1, 0.015, 0.002]),
    # The ramp goes from pair 1.3090 to 2.8142: pair 2 is at 0.4591 of it.
    "yarn without truncation": (scaling("yarn", truncate=False), [1, 0.1, 0.006557, 0.00025], SCALE_OF_YARN),
    # 4096 / (2 pi) turns are at pair 0, one half at pair 3.12, rounded up to 4.
    "yarn with other bounds": (
        scaling("yarn", beta_fast=4096 / (2 * math.pi), beta_slow=0.5),
        [1, 0.1 * (0.75 + 0.25 / 4), 0.01 * (0.5 + 0.5 / 4), 0.001 * (0.25 + 0.75 / 4)],
        SCALE_OF_YARN,
    ),
    "yarn with a scale": (scaling("yarn", attention_factor=0.5, mscale=3.0), OF_YARN, 0.5),
    "yarn, scales of DeepSeek": (scaling("yarn", mscale=1.0, mscale_all_dim=1.0), OF_YARN),
    "yarn, other scales of DeepSeek": (
        scaling("yarn", mscale=2.0, mscale_all_dim=1.0),
        OF_YARN,
        1.2772588722 / SCALE_OF_YARN,
    ),
    "yarn, one scale of DeepSeek is absent": (scaling("yarn", mscale=2.0, mscale_all_dim=0), OF_YARN, SCALE_OF_YARN),
    # Pair 1 turns 2.5 times in 8192 positions, half of the way from 1 to 4.
    "llama3": (
        {"dim": 4, "base": (8192 / (5 * math.pi)) ** 2, **scaling("llama3")},
        [1, 5 * math.pi / 8192 * (1 / 2 + 1 / 16)],
    ),
    # Pair 1 turns less than once.
    "llama3, slow": ({"dim": 4, "base": 1e8, **scaling("llama3")}, [1, 1e-4 / 8]),
    "longrope": (
        {"dim": 4, "base": 100, "max_position_embeddings": 1024, **scaling("longrope")},
        [1, 0.05],
        math.sqrt(1.25),
    ),
    "longrope, as long as trained": (
        {"dim": 4, "base": 100, "seq_len": 256, **scaling("longrope", factor=4.0)},
        [1, 0.05],
        math.sqrt(1.25),
    ),
    "longrope, longer": (
        {"dim": 4, "base": 100, "seq_len": 257, **scaling("longrope", factor=4.0)},
        [1 / 4, 0.1 / 8],
        math.sqrt(1.25),
    ),
    "longrope with a scale": ({"dim": 4, "base": 100, **scaling("longrope", attention_factor=1.19)}, [1, 0.05], 1.19),
    "longrope, not longer": ({"dim": 4, "base": 100, **scaling("longrope", factor=0.5)}, [1, 0.05]),
    # The base is multiplied by 9^(4/2) = 81 for every length.
    "dynamic with alpha": ({"dim": 4, "base": 16, "seq_len": 10**6, **scaling("dynamic", alpha=9.0)}, [1, 1 / 36]),
    "dynamic with alpha, one pair": ({"dim": 2, **scaling("dynamic", alpha=9.0)}, [1]),
    "longrope with a scale for each length": (
        {"dim": 4, "base": 100, **scaling("longrope", short_mscale=1.25, long_mscale=2)},
        [1, 0.05],
        1.25,
    ),
    "longrope with a scale for each length, longer": (
        {"dim": 4, "base": 100, "seq_len": 257, **scaling("longrope", short_mscale=1.25, long_mscale=2)},
        [1 / 4, 0.1 / 8],
        2.0,
    ),
    "yarn, its scale multiplied": (scaling("yarn", attn_factor=0.5), OF_YARN, 0.56931471806),
    "yarn, its scale given and not multiplied": (scaling("yarn", attn_factor=0.5, attention_factor=3), OF_YARN, 3.0),
    # Pair 1 turns twice in 8192 positions, pair 2 less than once.
    "llama3, bounds are equal": (
        {"dim": 6, "base": (8192 / (4 * math.pi)) ** 3, **scaling("llama3", high_freq_factor=1.0, low_freq_factor=1.0)},
        [1, 4 * math.pi / 8192, (4 * math.pi / 8192) ** 2 / 8],
    ),
    "lengths are floats": (
        {
            "dim": 4,
            "base": 100,
            "seq_len": np.float32(257),
            "max_position_embeddings": 1024.0,
            **scaling("longrope", original_max_position_embeddings=256.0),
        },
        [1 / 4, 0.1 / 8],
        math.sqrt(1.25),
    ),
    "proportional": (scaling("proportional", partial_rotary_factor=0.5, rope_theta=10000.0), [1, 0.1, 0, 0]),
    "proportional with a factor": (
        scaling("proportional", partial_rotary_factor=0.9, factor=2.0),
        [0.5, 0.05, 0.005, 0],
    ),
    "proportional, all": (scaling("proportional"), PLAIN),
    "keys without values": (scaling("yarn", attention_factor=None, truncate=None), OF_YARN, SCALE_OF_YARN),
}


def test_by_hand() -> None:
    for case, (arguments, expected, *scales) in BY_HAND.items():
        inv_freq, scale = rope_frequencies(**({"dim": 8} | arguments))
        assert inv_freq.dtype == np.float64 and type(scale) is float, case
        rtol = 2e-5 if case == "yarn without truncation" else 1e-12
        np.testing.assert_allclose(inv_freq, expected, rtol, err_msg=case)
        assert scale == pytest.approx(*scales or [1.0], rel=1e-9), case


def test_exactness() -> None:
    """Frequencies have the precision of float64, even with JAX's 64-bit types off."""
    for dim in (2, 64, 96, 128, 256):
        with jax.enable_x64(False):
            inv_freq, _ = rope_frequencies(dim, 500000.0)
        exponents = -2 * np.arange(dim // 2).astype(np.longdouble) / dim
        np.testing.assert_allclose(inv_freq, np.longdouble(500000) ** exponents, rtol=1e-15)


def published(dim: int, base: float, scaling: dict[str, Any], scale: float = 1.0, **lengths: int) -> Any:
    """The arguments of a published model, and its scale."""
    return {"dim": dim, "base": base, "scaling": scaling, **lengths}, scale


MROPE_SECTION = {"mrope_section": [16, 24, 24]}
FACTORS = {"short_factor": [1 + i / 40 for i in range(48)], "long_factor": [1 + i for i in range(48)]}
OF_HUNYUAN = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

# As in model cards, except the lists of "longrope".
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Llama 4 Scout": published(
        128, 500000.0, {"rope_type": "llama3", **LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
    ),
    "Phi-3 mini": published(
        96,
        10000.0,
        {"type": "su", **FACTORS, "original_max_position_embeddings": 4096},
        math.sqrt(1 + math.log(32) / math.log(4096)),
        max_position_embeddings=131072,
    ),
    "Phi-3 mini, long": published(
        96,
        10000.0,
        {"type": "su", **FACTORS, "original_max_position_embeddings": 4096},
        math.sqrt(1 + math.log(32) / math.log(4096)),
        max_position_embeddings=131072,
        seq_len=4097,
    ),
    "Phi-3.5 MoE": published(
        96,
        10000.0,
        {
            "type": "longrope",
            **FACTORS,
            "original_max_position_embeddings": 4096,
            "short_mscale": 1.243163121016122,
            "long_mscale": 1.243163121016122,
        },
        1.243163121016122,
        seq_len=5000,
    ),
    "Qwen2-VL": published(128, 1e6, {"type": "mrope", **MROPE_SECTION}),
    "Qwen2.5-VL": published(128, 1e6, {"type": "default", "rope_type": "default", **MROPE_SECTION}),
    "Qwen3-VL": published(128, 5e6, {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}),
    "Qwen3-Omni": published(
        128,
        1e6,
        {"rope_type": "default", "interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    ),
    "DeepSeek-R1-0528-Qwen3-8B": published(
        128,
        1e6,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419,
        },
    ),
    "Yarn-Llama-2": published(
        128,
        10000.0,
        {"type": "yarn", "factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096},
        0.1 * math.log(16) + 1,
    ),
    "Ministral 3": published(
        128,
        1e6,
        {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "HunYuan": published(
        128, 10000.0, {"type": "dynamic", **OF_HUNYUAN}, seq_len=200000, max_position_embeddings=32768
    ),
    "HunYuan-OCR": published(128, 10000.0, {"type": "xdrope", **OF_HUNYUAN, "xdrope_section": [16, 16, 16, 16]}),
    "linear with a length": published(
        64, 10000.0, {"type": "linear", "factor": 4, "original_max_position_embeddings": 2048}
    ),
}


def as_published(dim: int, base: float, scaling: dict[str, Any], seq_len: int = 0) -> np.ndarray:
    """Frequencies pair by pair, by the number of turns within the trained length."""
    rope_type = scaling.get("rope_type", scaling.get("type"))
    factor, trained = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if "alpha" in scaling:
        base *= scaling["alpha"] ** (dim / (dim - 2))

    def pair_of(turns: float) -> float:
        return dim / 2 * math.log(trained / (2 * math.pi * turns), base)

    def frequency(pair: int) -> float:
        plain = base ** (-2 * pair / dim)
        if rope_type == "linear":
            return plain / factor
        if rope_type == "llama3":
            return plain if plain * trained / (2 * math.pi) >= scaling["low_freq_factor"] else plain / factor
        if rope_type in ("su", "longrope"):
            return plain / scaling["long_factor" if seq_len > trained else "short_factor"][pair]
        if rope_type == "yarn":
            first, last = math.floor(pair_of(32)), math.ceil(pair_of(1))
            share = min(max((pair - first) / (last - first), 0), 1)
            return (1 - share) * plain + share * plain / factor
        return plain

    return np.array([frequency(pair) for pair in range(dim // 2)])


def test_published_configurations() -> None:
    for model, (arguments, expected_scale) in PUBLISHED.items():
        inv_freq, scale = rope_frequencies(**arguments)
        expected = as_published(arguments["dim"], arguments["base"], arguments["scaling"], arguments.get("seq_len", 0))
        np.testing.assert_allclose(inv_freq, expected, rtol=1e-12, err_msg=model)
        assert scale == pytest.approx(expected_scale, rel=1e-12), model


def test_arrays_and_numpy_numbers() -> None:
    """Factors may be arrays, and numbers may be NumPy scalars."""
    scaling = {"rope_type": "longrope", **LONG, "factor": np.float32(4), "short_factor": np.array([1, 2])}
    inv_freq, scale = rope_frequencies(np.int64(4), np.float64(100), scaling, seq_len=np.int32(5))
    np.testing.assert_allclose(inv_freq, [1, 0.05])
    assert scale == pytest.approx(math.sqrt(1.25))


REQUIRED = {"linear": {"factor": 2.0}, "dynamic": {"factor": 2.0}, "yarn": YARN, "llama3": LLAMA3, "longrope": LONG}


def test_missing_and_unknown_keys() -> None:
    for rope_type in ("default", "proportional", *REQUIRED):
        required = REQUIRED.get(rope_type, {})
        for key in required:
            scaling = {"rope_type": rope_type, **required, "factor": 2.0}
            del scaling[key]
            message = rf"^rope_frequencies: scaling of rope_type '{rope_type}' lacks the keys \['{key}'\]"
            with pytest.raises(ValueError, match=message):
                rope_frequencies(4, 10000.0, scaling, seq_len=4)
        for key in ("facter", "low_freq_factors", "long_mscales", 3):
            message = (
                rf"^rope_frequencies: scaling of rope_type '{rope_type}' has unknown keys \[{key!r}\]; it takes \["
            )
            with pytest.raises(ValueError, match=message):
                rope_frequencies(4, 10000.0, {"rope_type": rope_type, **required, key: 1.0}, max_position_embeddings=8)


def test_keys_of_another_scheme() -> None:
    """Keys of another scheme are refused, also if rope_type is absent, which means 'default'."""
    with pytest.raises(ValueError, match=r"rope_type 'default' has unknown keys \['factor'\]; it takes .*'rope_type'"):
        rope_frequencies(8, scaling={"factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_type 'linear' has unknown keys \['beta_fast', 'truncate'\]"):
        rope_frequencies(8, scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 32, "truncate": True})
    with pytest.raises(ValueError, match=r"rope_type 'dynamic' has unknown keys \['mscale'\]"):
        rope_frequencies(8, scaling={"rope_type": "dynamic", "factor": 2.0, "mscale": 1.0})
    with pytest.raises(ValueError, match=r"rope_type 'xdrope' lacks the keys \['alpha'\]"):
        rope_frequencies(8, scaling={"rope_type": "xdrope", "factor": 2.0})


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "dim is odd": ({"dim": 7}, "ValueError: dim must be even, got 7"),
    "dim is zero": ({"dim": 0}, "ValueError: dim must be 2 or more, got 0"),
    "dim is a float": ({"dim": 8.0}, "TypeError: dim must be an integer, got 8.0"),
    "base is zero": ({"base": 0.0}, "ValueError: base must be finite and positive, got 0.0"),
    "base is infinite": ({"base": math.inf}, "ValueError: base must be finite and positive, got inf"),
    "base is text": ({"base": "10000"}, "TypeError: base must be a real number, got '10000'"),
    "base is tiny": ({"base": 5e-324, **scaling("linear", factor=1e-300)}, "ValueError: .*finite freq"),
    "base and rope_theta differ": (
        {"base": 20000.0, "scaling": {"rope_theta": 10000.0}},
        "ValueError: base is 20000.0, but scaling has the key 'rope_theta' with another value, 10000.0",
    ),
    "base is contradicted where it is the usual one": (
        {"base": 10000.0, "scaling": {"rope_theta": 500000.0}},
        "ValueError: base is 10000.0, but scaling has the key 'rope_theta' with another value, 500000.0",
    ),
    "rope_theta is negative": (
        {"scaling": {"rope_theta": -1.0}},
        r"ValueError: scaling\['rope_theta'\] must be finite and positive, got -1.0",
    ),
    "seq_len is negative": ({"seq_len": -1}, "ValueError: seq_len must be 0 or more, got -1"),
    "seq_len is a float": ({"seq_len": 5.5}, "TypeError: seq_len must be an integer, got 5.5"),
    "max_position_embeddings is zero": (
        {"max_position_embeddings": 0},
        "ValueError: max_position_embeddings must be 1 or more, got 0",
    ),
    "scaling is a list": ({"scaling": [("factor", 2)]}, "TypeError: scaling must be a dict or None, got list"),
    "scaling is a name": ({"scaling": "yarn"}, "TypeError: scaling must be a dict or None, got str"),
    "scheme is unknown": (
        scaling("ntk", factor=2.0),
        r"ValueError: scaling\['rope_type'\] must be one of \['default', 'dynamic', 'linear', 'llama3', 'longrope', "
        r"'mrope', 'proportional', 'su', 'xdrope', 'yarn'\], got 'ntk'",
    ),
    "scheme is None": (
        {"scaling": {"rope_type": None}},
        r"ValueError: scaling\['rope_type'\] must be one of .*got None",
    ),
    "scheme is a list": (
        {"scaling": {"rope_type": []}},
        r"ValueError: scaling\['rope_type'\] must be one of .*got \[\]",
    ),
    "older name is unknown": ({"scaling": {"type": "ntk"}}, r"ValueError: scaling\['rope_type'\] must be .*got 'ntk'"),
    "factor is zero": (
        scaling("linear", factor=0),
        r"ValueError: scaling\['factor'\] must be finite and positive, got 0",
    ),
    "factor is None": (
        scaling("linear", factor=None),
        r"TypeError: scaling\['factor'\] must be a real number, got None",
    ),
    "factor is text": (scaling("yarn", factor="4"), r"TypeError: scaling\['factor'\] must be a real number, got '4'"),
    "factor is None, and no lengths": (
        scaling("yarn", factor=None),
        r"TypeError: scaling\['factor'\] must be a real number, got None",
    ),
    "length has a fraction": (
        scaling("yarn", original_max_position_embeddings=4096.5),
        r"TypeError: scaling\['original_max_position_embeddings'\] must be an integer, got 4096.5",
    ),
    "length is one": (
        scaling("longrope", original_max_position_embeddings=1),
        r"ValueError: scaling\['original_max_position_embeddings'\] must be 2 or more, got 1",
    ),
    "part is zero": (
        {"scaling": {"partial_rotary_factor": 0}},
        r"ValueError: scaling\['partial_rotary_factor'\] must be finite and positive, got 0",
    ),
    "part is more than all": (
        {"scaling": {"partial_rotary_factor": 1.5}},
        r"ValueError: scaling\['partial_rotary_factor'\] must be at most 1, got 1.5",
    ),
    "part is nothing": (
        {"scaling": {"partial_rotary_factor": 0.1}},
        r"ValueError: scaling\['partial_rotary_factor'\] must leave something of dim = 8 to rotate, got 0.1",
    ),
    "dynamic without a length": (
        {"seq_len": 100, **scaling("dynamic", factor=2.0)},
        "ValueError: max_position_embeddings must be given for a seq_len with rope_type 'dynamic', got None",
    ),
    "yarn with base 1": ({"base": 1, **scaling("yarn")}, "ValueError: base must not be 1"),
    "beta is zero": (
        scaling("yarn", beta_slow=0),
        r"ValueError: scaling\['beta_slow'\] must be finite and positive, got 0",
    ),
    "truncate is a number": (scaling("yarn", truncate=1), r"TypeError: scaling\['truncate'\] must be a bool, got 1"),
    "llama3, bounds are swapped": (
        scaling("llama3", high_freq_factor=0.5),
        r"ValueError: scaling\['high_freq_factor'\] must not be less than scaling\['low_freq_factor'\], got "
        "0.5 and 1.0",
    ),
    "longrope, too few factors": (
        scaling("longrope", factor=2.0),
        r"ValueError: scaling\['short_factor'\] must have 4 numbers, one per frequency, got 2",
    ),
    "longrope, one factor": (
        scaling("longrope", long_factor=2.0, short_factor=[1.0] * 4),
        r"TypeError: scaling\['long_factor'\] must be a list of numbers, got 2.0",
    ),
    "longrope, a factor is zero": (
        {"dim": 4, **scaling("longrope", long_factor=[1.0, 0.0])},
        r"ValueError: scaling\['long_factor'\]\[1\] must be finite and positive, got 0.0",
    ),
    "longrope without its length": (
        {
            "scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "max_position_embeddings": 131072,
        },
        r"ValueError: scaling of rope_type 'su' lacks the keys \['original_max_position_embeddings'\]",
    ),
    "seq_len is infinite": ({"seq_len": math.inf}, "TypeError: seq_len must be an integer, got inf"),
    "longrope without a growth": (
        {"dim": 4, **scaling("longrope")},
        "ValueError: rope_type 'longrope' needs the key 'factor' or 'attention_factor' in scaling, or the argument "
        "max_position_embeddings",
    ),
}


def test_errors() -> None:
    for arguments, error in ERRORS.values():
        with cases.raises(error, "^rope_frequencies: "):
            rope_frequencies(**({"dim": 8} | arguments))

"""The angles per position of rotary embeddings, and the published schemes that scale them for longer contexts.

Everything is NumPy in float64, because these are constants of a model. The schemes and their keys follow the
`rope_parameters` (formerly `rope_scaling`) in the configurations of Hugging Face models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import real_number, whole_number

NAME = "rope_frequencies"
DEFAULT_BASE = 10000.0
ORIGINAL_LENGTH = "original_max_position_embeddings"
"""The key of the length that a model was originally trained for. Default: `max_position_embeddings`."""


@jax_versions.hiding_frames
def rope_frequencies(
    dim: int,
    base: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    *,
    seq_len: float | None = None,
    max_position_embeddings: float | None = None,
) -> tuple[np.ndarray, float]:
    """Inverse frequencies and scale of a rotary embedding, for the arguments `inv_freq` and `scale` of ``rope``.

    Without scaling, ``inv_freq[i] = base^(-2i/dim)`` and the scale is 1. The key "rope_type" (older name: "type";
    default: "default") selects a scheme. All schemes take "rope_theta" and "partial_rotary_factor", and also:

    - "default", also called "mrope": no other keys.
    - "linear" (kaiokendev, 2023; Chen et al., 2023): `factor`, which divides all frequencies.
    - "dynamic" (NTK-aware; bloc97 and emozilla, 2023): `factor`, and optionally `original_max_position_embeddings`,
      which stands in for `max_position_embeddings`. The base grows if `seq_len` exceeds that length. Or `alpha`, as in
      HunYuan: the base grows by ``alpha^(dim/(dim-2))`` for every length, and `factor`, `beta_fast`, `beta_slow`,
      `mscale` and `mscale_all_dim` have no effect. The variant with `alpha` is also called "xdrope".
    - "yarn" (Peng et al., 2023): `factor` and `original_max_position_embeddings`; optionally `attention_factor`,
      `attn_factor` (1), `beta_fast` (32), `beta_slow` (1), `mscale`, `mscale_all_dim`, `truncate` (True). A factor of
      None means `max_position_embeddings` over the original length. The scale is `attention_factor`; without that key,
      it follows from `factor`, `mscale` and `mscale_all_dim` and is multiplied by `attn_factor`, as in the code of
      YaRN's authors (Hugging Face's code does not read `attn_factor`).
    - "llama3" (Llama 3.1): `factor`, `original_max_position_embeddings`, `low_freq_factor`, `high_freq_factor`. If the
      last two are equal, as in Llama 4, each frequency is either divided by the factor or kept.
    - "longrope" (Ding et al., 2024), also called "su": `short_factor` and `long_factor`, each with one number per
      frequency, and `original_max_position_embeddings`; optionally `attention_factor`, `short_mscale`, `long_mscale`
      and `factor`, by default `max_position_embeddings` over the original length. If `seq_len` exceeds the original
      length, the frequencies use `long_factor` and the scale is `long_mscale`; else `short_factor` and `short_mscale`.
    - "proportional": optionally `factor` (1). Only the first `partial_rotary_factor` of the frequencies of the whole
      head are used; the others are zero.

    If `factor` is given, the argument `max_position_embeddings` stands in for the key
    `original_max_position_embeddings`. Some configurations, such as Phi-3's, keep the original length outside of these
    parameters. Add it to them: ``{**rope_scaling, "original_max_position_embeddings": 4096}``.

    Every scheme accepts these keys, which have no effect on frequencies and scale:
    `original_max_position_embeddings` if the scheme does not need it, "finetuned", "llama_4_scaling_beta" (a scale of
    queries), and "mrope_section", "mrope_interleaved", "interleaved" and "xdrope_section". The last four belong to
    multimodal models, where each token has several positions (time, height, width) and the keys say which of them
    rotates a pair: pass them to ``rope`` as `sections` and `sections_interleaved`.

    Args:
      dim: the size of the head, even.
      base: finite and positive. Default: the key "rope_theta", or 10,000 without it. If both are given, they must
        agree.
      scaling: the parameters of a scheme, or None. An optional key with the value None counts as absent.
      seq_len: the sequence length, for schemes that depend on it. None: a length without scaling ("dynamic") or a short
        one ("longrope").
      max_position_embeddings: the length that the model is configured for, for schemes that depend on it. Lengths may
        be floats without a fraction.

    Returns:
      ``(inv_freq, scale)``: a float64 array ``[rotary_dim / 2]``, and a Python float. With ``partial_rotary_factor``,
      rotary_dim is that part of `dim` (except for "proportional": all of it). Pass ``rotary_dim=2 * len(inv_freq)`` to
      ``rope``.

    Raises:
      TypeError: an argument or the value of a key has an unsuitable type.
      ValueError: an argument or the value of a key is out of range; the scheme is unknown, lacks a required key, or
        does not take a given key.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> inv_freq, scale = jb.rope_frequencies(8, 10_000.0, {"rope_type": "linear", "factor": 2.0})
      >>> print(inv_freq, scale)
      [0.5    0.05   0.005  0.0005] 1.0
      >>> y = jb.rope(jnp.ones((1, 2, 16, 8)), inv_freq=inv_freq, scale=scale)
    """
    dim = whole_number(NAME, "dim", dim, minimum=2)
    if dim % 2:
        raise ValueError(f"{NAME}: dim must be even, got {dim}")
    base = None if base is None else real_number(NAME, "base", base, positive=True)
    seq_len = None if seq_len is None else _length("seq_len", seq_len, minimum=0)
    if max_position_embeddings is not None:
        max_position_embeddings = _length("max_position_embeddings", max_position_embeddings, minimum=1)
    scheme, keys = _checked_keys({} if scaling is None else scaling, max_position_embeddings)
    model = _Model(dim, DEFAULT_BASE if base is None else base, seq_len, max_position_embeddings, keys)
    theta = model.number("rope_theta", model.base)
    if base not in (None, theta):
        raise ValueError(f"{NAME}: base is {base}, but scaling has the key 'rope_theta' with another value, {theta}")
    if model.rotated_part > 1:
        raise ValueError(f"{NAME}: scaling['partial_rotary_factor'] must be at most 1, got {model.rotated_part}")
    with np.errstate(over="ignore", under="ignore"):
        inv_freq, scale = scheme.compute(model._replace(base=theta))
    if not np.isfinite(inv_freq).all():
        raise ValueError(f"{NAME}: base and scaling must give finite frequencies, got base = {theta} and {scaling!r}")
    return inv_freq, float(scale)


def _length(argument: str, value: Any, *, minimum: int) -> int:
    """A number of positions. Some configurations store it as a float."""
    is_whole_float = isinstance(value, float | np.floating) and float(value).is_integer()
    return whole_number(NAME, argument, int(value) if is_whole_float else value, minimum=minimum)


def _checked_keys(scaling: Mapping[str, Any], max_position_embeddings: int | None) -> tuple[_Scheme, Mapping[str, Any]]:
    """The scheme and the given keys, after checking that none is missing or unknown."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{NAME}: scaling must be a dict or None, got {type(scaling).__name__}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    scheme = SCHEMES.get(rope_type) if isinstance(rope_type, str) else None
    if scheme is None:
        raise ValueError(f"{NAME}: scaling['rope_type'] must be one of {sorted(SCHEMES)}, got {rope_type!r}")
    if rope_type == "dynamic" and scaling.get("alpha") is not None:
        scheme = DYNAMIC_OF_ALPHA
    known = dict(scaling)
    if scaling.get("factor") is not None and max_position_embeddings is not None:
        known.setdefault(ORIGINAL_LENGTH, max_position_embeddings)
    if missing := [key for key in scheme.required if key not in known]:
        raise ValueError(f"{NAME}: scaling of rope_type {rope_type!r} lacks the keys {missing}")
    allowed = (*scheme.required, *scheme.optional, *COMMON_KEYS)
    if unknown := [key for key in scaling if key not in allowed]:
        raise ValueError(
            f"{NAME}: scaling of rope_type {rope_type!r} has unknown keys {unknown}; it takes {sorted(allowed)}"
        )
    return scheme, {key: value for key, value in known.items() if value is not None}


class _Model(NamedTuple):
    """The arguments of :func:`rope_frequencies`, whose values are checked when a scheme asks for them."""

    head_dim: int
    base: float
    seq_len: int | None
    max_position_embeddings: int | None
    keys: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return real_number(NAME, f"scaling[{key!r}]", self.keys.get(key, default), positive=True)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{NAME}: scaling[{key!r}] must be a bool, got {value!r}")
        return bool(value)

    def numbers(self, key: str, count: int) -> np.ndarray:
        """A positive number for each frequency."""
        value = self.keys.get(key)
        if not isinstance(value, list | tuple | np.ndarray):
            raise TypeError(f"{NAME}: scaling[{key!r}] must be a list of numbers, got {value!r}")
        if len(value) != count:
            raise ValueError(f"{NAME}: scaling[{key!r}] must have {count} numbers, one per frequency, got {len(value)}")
        return np.array(
            [real_number(NAME, f"scaling[{key!r}][{i}]", number, positive=True) for i, number in enumerate(value)]
        )

    def original_length(self) -> int:
        """The length that the model was originally trained for."""
        # At least 2, because its logarithm may be a divisor.
        return _length(f"scaling[{ORIGINAL_LENGTH!r}]", self.keys.get(ORIGINAL_LENGTH), minimum=2)

    def factor(self) -> float:
        """The growth of the context; if the key is missing, the ratio of the lengths."""
        if "factor" in self.keys or self.max_position_embeddings is None:
            return self.number("factor")
        return self.max_position_embeddings / self.original_length()

    @property
    def rotated_part(self) -> float:
        return self.number("partial_rotary_factor", 1.0)

    @property
    def rotary_dim(self) -> int:
        dim = int(self.head_dim * self.rotated_part)
        if dim < 1:
            raise ValueError(
                f"{NAME}: scaling['partial_rotary_factor'] must leave something of dim = {self.head_dim} to rotate, "
                f"got {self.rotated_part}"
            )
        return dim

    def inv_freq(self, base: float | None = None) -> np.ndarray:
        """The frequencies without scaling. If the number of dimensions is odd, the last one gets a frequency, too."""
        return _inv_freq(self.rotary_dim, self.base if base is None else base)


def _inv_freq(dim: int, base: float) -> np.ndarray:
    return 1 / base ** (np.arange(0, dim, 2) / dim)


Frequencies = tuple[np.ndarray, float]
"""inv_freq and scale"""


def _dynamic(model: _Model) -> Frequencies:
    """Increases the base, so that the slowest pair turns no further in `seq_len` positions than it did in training."""
    factor, dim = model.number("factor"), model.rotary_dim
    if model.seq_len is None or dim <= 2:
        return model.inv_freq(), 1.0
    trained = model.max_position_embeddings
    if trained is None and ORIGINAL_LENGTH in model.keys:
        trained = model.original_length()
    if trained is None:
        raise ValueError(
            f"{NAME}: max_position_embeddings must be given for a seq_len with rope_type 'dynamic', got None"
        )
    growth = factor * max(model.seq_len, trained) / trained - (factor - 1)
    return model.inv_freq(model.base * growth ** (dim / (dim - 2))), 1.0


def _dynamic_of_alpha(model: _Model) -> Frequencies:
    alpha, dim = model.number("alpha"), model.rotary_dim
    return model.inv_freq(model.base * alpha ** (dim / (dim - 2)) if dim > 2 else None), 1.0


def _yarn(model: _Model) -> Frequencies:
    """Keeps pairs with many turns within the trained length, interpolates pairs with few turns, and blends between."""
    factor, trained, dim = model.factor(), model.original_length(), model.rotary_dim
    if model.base == 1:
        raise ValueError(f"{NAME}: base must not be 1 with rope_type 'yarn'")

    def pair_with_turns(turns: float) -> float:
        """The (fractional) index of the pair that makes this many turns within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(model.base))

    low, high = (pair_with_turns(model.number(*beta)) for beta in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if model.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    inv_freq = model.inv_freq()
    interpolated = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0, 1)
    inv_freq = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)
    if "attention_factor" in model.keys:
        return inv_freq, model.number("attention_factor")

    def logarithmic(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    # In configurations, zero means that the key is not used.
    weights = [real_number(NAME, f"scaling[{k!r}]", model.keys.get(k, 0)) for k in ("mscale", "mscale_all_dim")]
    scale = logarithmic(weights[0]) / logarithmic(weights[1]) if all(weights) else logarithmic(1.0)
    return inv_freq, scale * model.number("attn_factor", 1.0)


def _llama3(model: _Model) -> Frequencies:
    """Keeps pairs with many turns within the trained length and divides those with few turns by the factor."""
    trained, factor = model.original_length(), model.number("factor")
    few, many = model.number("low_freq_factor"), model.number("high_freq_factor")
    if many < few:
        raise ValueError(
            f"{NAME}: scaling['high_freq_factor'] must not be less than scaling['low_freq_factor'], got {many} and "
            f"{few}"
        )
    inv_freq = model.inv_freq()
    turns = trained * inv_freq / (2 * math.pi)
    kept = turns >= few if many == few else np.clip((turns - few) / (many - few), 0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq, 1.0


def _longrope(model: _Model) -> Frequencies:
    trained, inv_freq = model.original_length(), model.inv_freq()
    short, long = (model.numbers(key, len(inv_freq)) for key in ("short_factor", "long_factor"))
    is_long = model.seq_len is not None and model.seq_len > trained
    inv_freq = inv_freq / (long if is_long else short)
    for key in ("long_mscale" if is_long else "short_mscale", "attention_factor"):
        if key in model.keys:
            return inv_freq, model.number(key)
    if "factor" not in model.keys and model.max_position_embeddings is None:
        raise ValueError(
            f"{NAME}: rope_type 'longrope' needs the key 'factor' or 'attention_factor' in scaling, or the argument "
            "max_position_embeddings"
        )
    factor = model.factor()
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def _proportional(model: _Model) -> Frequencies:
    whole = _inv_freq(model.head_dim, model.base)
    num_rotated = int(model.rotated_part * model.head_dim // 2)
    is_rotated = np.arange(len(whole)) < num_rotated
    return np.where(is_rotated, whole / model.number("factor", 1.0), 0.0), 1.0


class _Scheme(NamedTuple):
    compute: Callable[[_Model], Frequencies]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


NO_EFFECT = (
    ORIGINAL_LENGTH,
    "finetuned",
    "llama_4_scaling_beta",
    "mrope_section",
    "mrope_interleaved",
    "interleaved",
    "xdrope_section",
)
"""Keys of published configurations that change neither frequencies nor scale, unless a scheme reads them."""

COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *NO_EFFECT)

OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")

DEFAULT = _Scheme(lambda model: (model.inv_freq(), 1.0))
DYNAMIC_OF_ALPHA = _Scheme(_dynamic_of_alpha, required=("alpha",), optional=("factor", *OF_YARN))
LONGROPE = _Scheme(
    _longrope,
    required=("short_factor", "long_factor", ORIGINAL_LENGTH),
    optional=("factor", "attention_factor", "short_mscale", "long_mscale"),
)

SCHEMES: dict[str, _Scheme] = {
    "default": DEFAULT,
    "mrope": DEFAULT,
    "linear": _Scheme(lambda model: (model.inv_freq() / model.number("factor"), 1.0), required=("factor",)),
    "dynamic": _Scheme(_dynamic, required=("factor",)),
    "xdrope": DYNAMIC_OF_ALPHA,
    "yarn": _Scheme(
        _yarn,
        required=("factor", ORIGINAL_LENGTH),
        optional=("attention_factor", "attn_factor", "truncate", *OF_YARN),
    ),
    "llama3": _Scheme(_llama3, required=("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor")),
    "longrope": LONGROPE,
    "su": LONGROPE,
    "proportional": _Scheme(_proportional, optional=("factor",)),
}

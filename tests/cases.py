"""What every property is tested over, and the float64 truth it is held to (REF in CONTRACTS)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

import linrope
from linrope import (
    DPFP,
    T2R,
    AxialRotary,
    CosFormer,
    DynamicNTKScaling,
    FavorPlus,
    FeatureMap,
    LearnedRotary,
    LinearScaling,
    Llama3Scaling,
    LogFeatureMap,
    LongRoPE,
    NTKScaling,
    OnePlusCosine,
    PositionBias,
    Rotary,
    Rotation,
    T5Bias,
    YaRN,
    linear_attention,
)
from linrope.attention import RMS_EPSILON, Backend, Normalizer
from linrope.attention.backends import why_not

# Every concrete map that linrope exports: one exported tomorrow is covered tomorrow.
EXPORTED: dict[str, Callable[[int], FeatureMap]] = {
    name: thing
    for name in linrope.__all__
    if inspect.isclass(thing := getattr(linrope, name))
    and issubclass(thing, FeatureMap)
    and not inspect.isabstract(thing)
}
# Where a map takes a floor and has none by default, both are tried.
MAPS: dict[str, Callable[[int], FeatureMap]] = {
    **EXPORTED,
    "FavorPlus-16": partial(FavorPlus, num_features=16),
    **{f"{kind.__name__}-floor": partial(kind, floor=0.01) for kind in (CosFormer, DPFP, OnePlusCosine, T2R)},
}
# One of each kind: elementwise; random, with log-scales, two widths; signed of odd width; learned; with positions;
# with a kernel that can be negative. What is long is done for these in every run, and for the others where there is time.
CORE = ("EluPlusOne", "FavorPlus", "FavorPlus-16", "Taylor", "Hedgehog", "CosFormer-floor", "RandomFourier")
# Every concrete bias that linrope exports, made for a number of heads.
POSITION_BIASES: dict[str, Callable[[int], PositionBias]] = {
    **{
        name: thing
        for name in linrope.__all__
        if inspect.isclass(thing := getattr(linrope, name))
        and issubclass(thing, PositionBias)
        and not inspect.isabstract(thing)
    },
    # Few buckets, so that a few tokens reach the wide ones and the last.
    "T5Bias-few": partial(T5Bias, num_buckets=6, max_distance=7),
    "T5Bias-bidirectional": partial(T5Bias, num_buckets=12, max_distance=7, bidirectional=True),
}
PLACEMENTS = ("none", "numerator", "before")
CHUNK_SIZES = (1, 3, 16, 64)


class Path(NamedTuple):
    """One way through ``linear_attention``."""

    name: str
    causal: bool
    options: dict[str, Any]


def has_compiler() -> bool:
    """Whether there is a C compiler; one that fails to build the kernel is no reason to leave it untested."""
    return "no C compiler" not in (why_not(torch.float32) or "")


def _paths() -> list[Path]:
    paths = []
    for backend in get_args(Backend):
        if backend == "native" and not has_compiler():
            continue
        for size in CHUNK_SIZES if backend == "chunked" else (None,):
            name = backend if size is None else f"{backend}-{size}"
            paths.append(Path(name, True, {"backend": backend, "chunk_size": size}))
        paths.append(Path(f"{backend}-noncausal", False, {"backend": backend}))
    return paths


PATHS = _paths()
CAUSAL_PATHS = [path for path in PATHS if path.causal]


def mostly_slow(names: Iterable[str]) -> list[Any]:
    """Parameters for pytest; those that name no map of ``CORE`` are slow."""
    core = {f"{name}{rest}" for name in CORE for rest in ("", *(f"-{placement}" for placement in PLACEMENTS))}
    return [pytest.param(n, marks=[] if n in core or n not in _OF_MAPS else [pytest.mark.slow]) for n in names]


def paths_and_maps(paths: Iterable[Path], names: Iterable[str]) -> list[Any]:
    """Pairs for pytest: maps of ``CORE`` go every path, the others the default one, and are slow."""
    pairs = [(path, name) for name in names for path in paths if name in CORE or path.name.startswith("auto")]
    slow = [[] if name in CORE or name not in MAPS else [pytest.mark.slow] for _, name in pairs]
    return [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}", marks=m) for pair, m in zip(pairs, slow, strict=True)]


_OF_MAPS = {f"{name}{rest}" for name in MAPS for rest in ("", *(f"-{placement}" for placement in PLACEMENTS))}


def normalizer_of(feature_map: FeatureMap) -> Normalizer:
    """Return what the map's numerators can be divided by."""
    return "features" if feature_map.kernel_is_positive else "rms"


# Maps whose sums can be divided by.
DIVIDED = [name for name, make in MAPS.items() if make(4).kernel_is_positive]


def attention_options(name: str, placement: str, rotary: Rotary | None = None) -> dict[str, Any]:
    """Return the arguments of a layer with this map and placement."""
    return {
        "feature_map": MAPS[name],
        "rotary": None if placement == "none" else rotary or Rotary(),
        "rotary_placement": "before" if placement == "before" else "numerator",
        "normalizer": "features" if name in DIVIDED else "rms",
    }


def make_map(name: str, head_dim: int, dtype: torch.dtype = torch.float64) -> FeatureMap:
    """Return the map, with its parameters in ``dtype``."""
    return MAPS[name](head_dim).to(dtype)


def make_bias(name: str, num_heads: int) -> PositionBias:
    """Return the bias in float64, its parameters, if it has any, drawn at random."""
    bias = POSITION_BIASES[name](num_heads).double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    return bias


def randn(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Assert equality within ``tolerance`` of each number and of the largest one."""
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * largest)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the error in units of the RMS of the truth."""
    return ((actual.double() - expected).square().mean() / expected.square().mean()).sqrt().item()


def turn(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10_000.0,
    width: int | None = None,
    pairing: str = "interleaved",
) -> Tensor:
    """Rotate as complex numbers do: pair i of ``width`` times exp(1j · position · base^(-2i/width))."""
    width = x.shape[-1] // 2 * 2 if width is None else width
    part, still = x[..., :width], x[..., width:]
    real, imaginary = (part[..., 0::2], part[..., 1::2]) if pairing == "interleaved" else part.chunk(2, dim=-1)
    frequency = torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angle = positions.double()[..., None] * frequency
    if positions.ndim == 2 and x.ndim == 4:
        angle = angle[:, None]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    parts = (turned.real, turned.imag)
    turned = torch.stack(parts, -1).flatten(-2) if pairing == "interleaved" else torch.cat(parts, -1)
    return torch.cat((turned, still), dim=-1)


def _scaled(scaling: linrope.Scaling | None = None, **settings: Any) -> Callable[[], Rotary]:
    return partial(Rotary, 100.0, scaling=scaling, **settings)


# Every kind of rotation, for 3 heads of 8 features; scalings are of texts of 4 tokens, so that those of tests are longer.
ROTATIONS: dict[str, Callable[[], Rotation]] = {
    "interleaved": _scaled(),
    "half": _scaled(pairing="half"),
    "partial": _scaled(fraction=0.5),
    "bases": partial(Rotary, (10.0, 100.0, 1000.0)),
    "bases-half": partial(Rotary, (10.0, 100.0, 1000.0), fraction=0.5, pairing="half"),
    "linear": _scaled(LinearScaling(4.0)),
    "NTK": _scaled(NTKScaling(4.0)),
    "NTK-bases": partial(Rotary, (10.0, 100.0, 1000.0), scaling=NTKScaling(4.0)),
    "dynamic-NTK": _scaled(DynamicNTKScaling(4, 2.0)),
    "dynamic-NTK-half": _scaled(DynamicNTKScaling(4, 2.0), pairing="half"),
    "dynamic-NTK-fixed": _scaled(DynamicNTKScaling(4, 2.0, seq_len=20)),
    "dynamic-NTK-bases": partial(Rotary, (10.0, 100.0, 1000.0), scaling=DynamicNTKScaling(4, 2.0)),
    "YaRN": _scaled(YaRN(4.0, 16, beta_fast=2.0)),
    "Llama3": _scaled(Llama3Scaling(4.0, 16)),
    "LongRoPE": _scaled(LongRoPE((1.0, 1.5, 2.0, 2.5), (2.0, 3.0, 4.0, 5.0), 4)),
    "learned": partial(LearnedRotary, 100.0, num_features=8),
    "learned-heads": partial(LearnedRotary, 100.0, 0.5, "half", num_heads=3, num_features=8),
    "axial": partial(AxialRotary, 3),
    "axial-half": partial(AxialRotary, 3, pairing="half"),
}
# One of each kind is tried in every run, the others where there is time.
CORE_ROTATIONS = ("interleaved", "half", "bases", "dynamic-NTK", "YaRN", "learned-heads", "axial")
DYNAMIC = [name for name, make in ROTATIONS.items() if make().is_dynamic]


def true_frequencies(rotation: Rotation, width: int, seq_len: float) -> Tensor:
    """Frequencies of the pairs (or of heads and pairs) as the published formulas give them, one number at a time."""

    def of_base(base: float) -> list[float]:
        scaling, pairs = rotation.scaling, width // 2  # type: ignore[attr-defined]
        plain = [base ** (-2 * i / width) for i in range(pairs)]
        match scaling:
            case None:
                return plain
            case LinearScaling():
                return [f / scaling.factor for f in plain]
            case NTKScaling() | DynamicNTKScaling():
                factor = scaling.factor
                if isinstance(scaling, DynamicNTKScaling):
                    length = max(scaling.seq_len or seq_len, scaling.original_seq_len)
                    factor = factor * length / scaling.original_seq_len - factor + 1
                return [f * factor ** (-2 * i / (width - 2)) for i, f in enumerate(plain)]
            case YaRN():
                ends = [
                    width * math.log(scaling.original_seq_len / (2 * math.pi * beta)) / (2 * math.log(base))
                    for beta in (scaling.beta_fast, scaling.beta_slow)
                ]
                low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
                share = [min(max((i - low) / (high - low), 0), 1) for i in range(pairs)]
                return [f * (1 - x + x / scaling.factor) for f, x in zip(plain, share, strict=True)]
            case Llama3Scaling():
                turns = [scaling.original_seq_len * f / (2 * math.pi) for f in plain]
                low, high = scaling.low_freq_factor, scaling.high_freq_factor
                kept = [min(max((r - low) / (high - low), 0), 1) for r in turns]
                return [f * (x + (1 - x) / scaling.factor) for f, x in zip(plain, kept, strict=True)]
            case LongRoPE():
                long = (scaling.seq_len or seq_len) > scaling.original_seq_len
                return [
                    f / x for f, x in zip(plain, scaling.long_factor if long else scaling.short_factor, strict=True)
                ]
        raise AssertionError(scaling)

    if isinstance(rotation, LearnedRotary):
        return (
            rotation.log_inv_freq.double().exp().flatten(0, -2)
            if rotation.num_heads
            else rotation.log_inv_freq.double().exp()
        )  # type: ignore[union-attr]
    bases = rotation.base if isinstance(rotation.base, tuple) else (rotation.base,)  # type: ignore[attr-defined]
    frequencies = torch.tensor([of_base(base) for base in bases], dtype=torch.float64)
    return frequencies if rotation.num_heads else frequencies[0]


def true_turn(rotation: Rotation, x: Tensor, positions: Tensor, seq_len: float | None = None) -> Tensor:
    """Turn (b, h, n, m) features row by row, by complex numbers; lengths are from the first position to the last."""
    width = round(rotation.fraction * x.shape[-1])
    rows = []
    for row, at in zip(x.double(), positions.double().expand(x.shape[0], -1), strict=True):
        if isinstance(rotation, AxialRotary):
            frequency = torch.tensor(
                [rotation.base ** (-4 * i / width) for i in range(width // 4)], dtype=torch.float64
            )
            line, column = torch.div(at, rotation.columns, rounding_mode="floor"), at.remainder(rotation.columns)
            angle = torch.cat((line[:, None] * frequency, column[:, None] * frequency), dim=-1)
        else:
            length = float(at.max() - at.min() + 1) if seq_len is None else seq_len
            angle = at[:, None] * true_frequencies(rotation, width, length)[..., None, :]
        part, still = row[..., :width], row[..., width:]
        halves = rotation.pairing == "half"
        first, second = part.chunk(2, -1) if halves else (part[..., 0::2], part[..., 1::2])
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        parts = (turned.real, turned.imag)
        rows.append(torch.cat((torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2), still), -1))
    return torch.stack(rows)


class Truth(NamedTuple):
    """Output, final sums and normalizer of linear attention."""

    output: Tensor
    kv: Tensor
    key_sum: Tensor
    normalizer: Tensor


def truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    log_scale: Tensor | None = None,
    normalizer: Normalizer = "features",
    epsilon: float = RMS_EPSILON,
) -> Truth:
    """REF: explicit n × s matrices in float64, from mapped queries and keys; differentiable."""
    query, key, value = query.double(), key.double(), value.double()
    b, n, s = query.shape[0], query.shape[2], key.shape[2]
    query_positions = torch.arange(n) if query_positions is None else query_positions
    key_positions = (query_positions if causal else torch.arange(s)) if key_positions is None else key_positions
    rotated_query, rotated_key = query, key
    if rotate is not None:
        rotated_query, rotated_key = rotate(query, query_positions), rotate(key, key_positions)

    key_valid = torch.ones(b, s, dtype=torch.bool) if key_mask is None else key_mask
    allowed = key_valid[:, None, None, :].expand(-1, query.shape[1], n, -1)
    if causal:
        allowed = allowed & (torch.arange(s) <= torch.arange(n)[:, None])
    weight = allowed.double()
    weight_at_end = key_valid[:, None].double()
    if log_scale is not None:
        c = log_scale.double()
        c_row = c[:, :, None].masked_fill(~allowed, -torch.inf)
        c_end = c.masked_fill(~key_valid[:, None], -torch.inf)
        # The top is common to numerator and normalizer, and whatever it is when no key is allowed.
        weight, weight_at_end = (
            (x - x.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp() for x in (c_row, c_end)
        )
    numerator = (torch.einsum("bhnm,bhsm->bhns", rotated_query, rotated_key) * weight) @ value
    key_sums = (torch.einsum("bhnm,bhsm->bhns", query, key) * weight).sum(-1)
    empty = ~allowed.any(-1)
    output = divided(numerator, key_sums, normalizer, epsilon=0.0 if log_scale is not None else epsilon, empty=empty)
    kv = torch.einsum("bhs,bhsm,bhse->bhme", weight_at_end.expand(key.shape[:3]), rotated_key, value)
    key_sum = torch.einsum("bhs,bhsm->bhm", weight_at_end.expand(key.shape[:3]), key)
    return Truth(output, kv, key_sum, key_sums)


def divided(
    numerator: Tensor, key_sums: Tensor, normalizer: Normalizer, *, epsilon: float, empty: Tensor | None = None
) -> Tensor:
    """Divide as each ``normalizer`` promises; rows that are ``empty`` stay 0."""
    if normalizer is None:
        return numerator
    if normalizer == "features":
        return numerator / (key_sums if empty is None else key_sums.masked_fill(empty, 1.0))[..., None]
    square = numerator.square().mean(-1, keepdim=True) + epsilon
    return numerator / square.masked_fill(square == 0, 1.0).sqrt()


def epsilon_of(feature_map: FeatureMap) -> float:
    """Return the ε of the "rms" normalizer, which features with log-scales do without."""
    dtype = next((parameter.dtype for parameter in feature_map.parameters()), torch.float32)
    has_log_scale = feature_map.scaled_key(torch.zeros(1, feature_map.head_dim, dtype=dtype))[1] is not None
    return 0.0 if has_log_scale else RMS_EPSILON


def rotary_for(feature_map: FeatureMap, placement: str, rotary: Rotary | None = None) -> Rotary | None:
    """Return the rotation in the numerator, if that is its placement."""
    return (rotary or Rotary()).for_width(feature_map.num_features) if placement == "numerator" else None


def attend(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    placement: str = "none",
    scaled: bool = True,
    **options: Any,
) -> Tensor:
    """Map raw queries and keys, then attend; ``scaled`` as layers do, else with φ as it is."""
    if placement == "before":
        query, key = (Rotary()(x, torch.arange(x.shape[2])) for x in (query, key))
    query, key, log_scale = mapped(feature_map, query, key, scaled, options.get("query_positions"))
    return linear_attention(
        query,
        key,
        value,
        rotary=rotary_for(feature_map, placement),
        key_log_scale=log_scale,
        normalizer=normalizer_of(feature_map),
        **options,
    )


def mapped(
    feature_map: FeatureMap, query: Tensor, key: Tensor, scaled: bool, positions: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return φ(q), φ(k) and the log-scale that φ(k) lacks; ``positions`` are 0, 1, … by default."""
    where = (positions,) if positions is not None and feature_map.uses_positions else ()
    if scaled:
        return feature_map.scaled_query(query, *where), *feature_map.scaled_key(key, *where)
    return feature_map.map_query(query, *where), feature_map.map_key(key, *where), None


def true_attend(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    placement: str = "none",
    scaled: bool = True,
    **options: Any,
) -> Tensor:
    """Return REF from raw queries and keys, with φ as it is; ``feature_map`` holds float64 parameters."""
    query, key = query.double(), key.double()
    if placement == "before":
        query, key = (turn(x, torch.arange(x.shape[2])) for x in (query, key))
    rotate = turn if placement == "numerator" else None
    mapped_pair = feature_map.map_query(query), feature_map.map_key(key)
    how = {"normalizer": normalizer_of(feature_map), "epsilon": epsilon_of(feature_map) if scaled else RMS_EPSILON}
    return truth(*mapped_pair, value, rotate=rotate, **how, **options).output


def log_split(feature_map: FeatureMap, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 features that do not underflow and the logarithm of what the keys' lack."""
    feature_map, query, key = deepcopy(feature_map).double(), query.double(), key.double()
    if isinstance(feature_map, LogFeatureMap):
        log_query, log_key = feature_map.log_query(query), feature_map.log_key(key)
        tops = log_query.amax(-1, keepdim=True), log_key.amax(-1, keepdim=True)
        return (log_query - tops[0]).exp(), (log_key - tops[1]).exp(), tops[1][..., 0]
    features, log_scale = feature_map.scaled_key(key)
    log_scale = features.new_zeros(features.shape[:-1]) if log_scale is None else log_scale
    return feature_map.scaled_query(query), features, log_scale


class PeakedTruth(NamedTuple):
    """Output, and the sum of the absolute products it is made of: its rounding error scales with that."""

    output: Tensor
    terms: Tensor


def peaked_truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_scale: Tensor,
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None,
    normalizer: Normalizer = "features",
    epsilon: float = 0.0,
    block: int = 512,
) -> PeakedTruth:
    """Causal REF in log space, a block of rows at a time: exact where plain sums underflow."""
    value = value.double()
    n = query.shape[2]
    rotated_query, rotated_key = query, key
    if rotate is not None:
        rotated_query, rotated_key = (rotate(x, torch.arange(n)) for x in (query, key))
    outputs, terms = [], []
    for begin in range(0, n, block):
        end = min(begin + block, n)
        rows, c, v = slice(begin, end), log_scale[:, :, None, :end], value[:, :, :end]
        future = torch.arange(end) > torch.arange(begin, end)[:, None]
        kernel = query[:, :, rows] @ key[:, :, :end].mT
        log_kernel = (kernel.abs().log() + c).masked_fill(future, -torch.inf)
        if normalizer == "features":
            assert (kernel.masked_fill(future, 1.0) != 0).all(), "the truth itself underflows"
        # Features without log-scales keep their size, which ε is measured by.
        top = c.new_zeros(()) if epsilon else log_kernel.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weight = (c - top).masked_fill(future, -torch.inf).exp()
        score = kernel if rotate is None else rotated_query[:, :, rows] @ rotated_key[:, :, :end].mT
        numerator = (score * weight) @ v
        by = (kernel * weight).sum(-1)
        outputs.append(divided(numerator, by, normalizer, epsilon=epsilon))
        if normalizer == "rms":
            by = (numerator.square().mean(-1) + epsilon).sqrt()
        products = rotated_query[:, :, rows].abs() @ rotated_key[:, :, :end].abs().mT
        terms.append((products * weight) @ v.abs() / by.abs()[..., None])
    return PeakedTruth(torch.cat(outputs, 2), torch.cat(terms, 2))

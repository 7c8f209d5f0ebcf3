import math
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from linrope import Rotary, State, linear_attention, stream_linear_attention
from linrope.attention import Normalizer
from tests.cases import (
    CAUSAL_PATHS,
    CHUNK_SIZES,
    CORE,
    DIVIDED,
    MAPS,
    PATHS,
    PLACEMENTS,
    Path,
    attend,
    close,
    epsilon_of,
    log_split,
    make_map,
    mapped,
    mostly_slow,
    normalizer_of,
    paths_and_maps,
    peaked_truth,
    randn,
    relative_rms,
    rotary_for,
    true_attend,
    truth,
    turn,
)

every_map = pytest.mark.parametrize("name", mostly_slow(MAPS))
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
every_causal_path = pytest.mark.parametrize("path", CAUSAL_PATHS, ids=lambda path: path.name)
every_path_and_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(PATHS, MAPS))
every_causal_path_and_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(CAUSAL_PATHS, MAPS))
every_path_and_divided_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(PATHS, DIVIDED))
every_causal_path_and_divided_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(CAUSAL_PATHS, DIVIDED))
scaled_or_not = pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
wide = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

NON_CAUSAL_PATH = next(path for path in PATHS if not path.causal)


def positive(*shape, grad=False):
    """Features as a positive map would make them."""
    return (randn(*shape).abs() + 0.1).requires_grad_(grad)


# C1: strict causality.


@every_causal_path_and_map
@every_placement
@scaled_or_not
@wide
def test_later_keys_and_values_do_not_exist(path, name, placement, scaled, dtype):
    n, feature_map = 8, make_map(name, 4, dtype)
    query, key, value = (randn(2, 3, n, 4, dtype=dtype) for _ in range(3))
    louder = 30 if scaled else 3  # exponentials as they are, without their log-scales, overflow
    call = partial(attend, feature_map, query, placement=placement, scaled=scaled, **path.options)
    output = call(key, value)
    for t in range(n - 1):
        later_key, later_value = key.clone(), value.clone()
        later_key[:, :, t + 1 :] *= louder
        later_value[:, :, t + 1 :] = 7
        later_key.requires_grad_()
        later_value.requires_grad_()
        changed = call(later_key, later_value)
        assert torch.equal(changed[:, :, : t + 1], output[:, :, : t + 1])
        grads = torch.autograd.grad(changed[:, :, t].sum(), (later_key, later_value))
        for grad in grads:
            assert (grad[:, :, t + 1 :] == 0).all()
        assert (grads[1][:, :, : t + 1] != 0).any()


@every_causal_path
@pytest.mark.parametrize("normalizer", ["features", "rms", None])
@pytest.mark.parametrize("placement", ["none", "numerator"])
def test_a_later_infinity_stays_later(path, normalizer, placement):
    """A key of inf features times a weight of 0 is NaN, unless it is never multiplied."""
    query, key, value = positive(1, 2, 8, 4), positive(1, 2, 8, 4), randn(1, 2, 8, 4)
    options = {"rotary": Rotary() if placement == "numerator" else None, "normalizer": normalizer, **path.options}
    output = linear_attention(query, key, value, **options)
    key[:, :, 5:] = torch.inf
    value[:, :, 5:] = 1e30
    assert torch.equal(linear_attention(query, key, value, **options)[:, :, :5], output[:, :, :5])


@every_causal_path_and_map
def test_a_far_louder_key_stays_later(path, name):
    feature_map = make_map(name, 4)
    query, key, value = (randn(1, 2, 8, 4) for _ in range(3))
    output = attend(feature_map, query, key, value, **path.options)
    key[:, :, 5:] *= 1e4
    value[:, :, 5:] = 1e30
    assert torch.equal(attend(feature_map, query, key, value, **path.options)[:, :, :5], output[:, :, :5])


# C2: every path equals REF.


class Problem(NamedTuple):
    """Leaves of an attention call and what REF makes of them."""

    leaves: list[Tensor]
    has_log_scale: bool
    rotary: Rotary | None
    normalizer: Normalizer
    cotangent: Tensor
    output: Tensor
    grads: tuple[Tensor, ...]
    kv: Tensor
    key_sum: Tensor


# Neither batch nor heads equals another axis, nor any of the lengths.
def sizes(n):
    return (3, 4) if n < 1000 else (2, 1)


@lru_cache(maxsize=2)
def problem(n, name, placement, causal, dtype) -> Problem:
    torch.manual_seed(n)
    b, h = sizes(n)
    feature_map = make_map(name, 6)
    with torch.no_grad():
        query, key, log_scale = mapped(feature_map, randn(b, h, n, 6), randn(b, h, n, 6), scaled=True)
    # Peaks of e^30 serve float32's range; brought down, features, values and gradients are of one size.
    query, key = query / query.abs().amax(), key / key.abs().amax()
    tensors = (query, key, randn(b, h, n, 5), log_scale)
    leaves = [x.to(dtype).requires_grad_() for x in tensors if x is not None]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    rotary = rotary_for(feature_map, placement)
    found = truth(
        *exact[:3],
        rotate=None if rotary is None else turn,
        causal=causal,
        log_scale=exact[3] if log_scale is not None else None,
        normalizer=normalizer_of(feature_map),
    )
    cotangent = randn(*found.output.shape)
    grads = torch.autograd.grad(found.output, exact, cotangent)
    tensors = (cotangent, found.output.detach(), grads, found.kv.detach(), found.key_sum.detach())
    return Problem(leaves, log_scale is not None, rotary, normalizer_of(feature_map), *tensors)


def options_of(case: Problem, path: Path):
    scale = {"key_log_scale": case.leaves[3]} if case.has_log_scale else {}
    return {"rotary": case.rotary, "normalizer": case.normalizer, **path.options, **scale}


def lengths_and_maps():
    for n in (1, 2, 7, 8, 63, 64, 65, 127, 129, 1334):
        for name in CORE:  # features are features: those of other maps tell a path nothing new
            slow = n > 1000 and name not in ("EluPlusOne", "FavorPlus", "RandomFourier")
            yield pytest.param(n, name, marks=[pytest.mark.slow] if slow else [])


@every_path
@wide
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize(("n", "name"), lengths_and_maps())
def test_every_path_is_the_reference(path, dtype, placement, name, n):
    case = problem(n, name, placement, path.causal, dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    output = linear_attention(*case.leaves[:3], causal=path.causal, **options_of(case, path))
    close(output.double(), case.output, tolerance)
    grads = torch.autograd.grad(output, case.leaves, case.cotangent.to(dtype))
    # Where a gradient vanishes (of a lone key's scale, say), its error is that of the terms of the others.
    terms = max(1.0, *(expected.abs().max().item() for expected in case.grads))
    for grad, expected in zip(grads, case.grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance * terms)
    if path.causal:
        streamed, state = stream_linear_attention(*case.leaves[:3], **options_of(case, path))
        close(streamed.double(), case.output, tolerance)
        close(state.kv.double(), case.kv, tolerance)
        close(state.key_sum.double(), case.key_sum, tolerance)
        assert state.position.tolist() == [n] * len(state.position)
        top = case.leaves[3].amax(-1) if case.has_log_scale else torch.zeros(sizes(n), dtype=dtype)
        assert torch.equal(state.log_scale, top)


@every_path_and_map
@every_placement
@scaled_or_not
def test_raw_queries_and_keys_attend_as_the_reference(path, name, placement, scaled):
    feature_map = make_map(name, 6)
    query, key, value = (randn(2, 3, 37, 6, grad=True) for _ in range(3))
    output = attend(
        feature_map, query, key, value, placement=placement, scaled=scaled, causal=path.causal, **path.options
    )
    expected = true_attend(feature_map, query, key, value, placement=placement, scaled=scaled, causal=path.causal)
    close(output, expected, 1e-10)
    cotangent = randn(*output.shape)
    inputs = (query, key, value, *feature_map.parameters())
    grads, expected_grads = (torch.autograd.grad(x, inputs, cotangent) for x in (output, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        close(grad, expected_grad, 1e-10)


@every_path
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize("has_log_scale", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(path, placement, has_log_scale, masked):
    n = 5
    query, key, value = positive(1, 1, n, 2, grad=True), positive(1, 1, n, 2, grad=True), randn(1, 1, n, 3, grad=True)
    mask = torch.tensor([[False, True, True, False, True]]) if masked else None

    def call(query, key, value, *log_scale):
        return linear_attention(
            query,
            key,
            value,
            rotary=Rotary() if placement == "numerator" else None,
            causal=path.causal,
            key_mask=mask,
            key_log_scale=log_scale[0] if log_scale else None,
            **path.options,
        )

    inputs = (query, key, value, randn(1, 1, n, grad=True))[: 4 if has_log_scale else 3]
    assert torch.autograd.gradcheck(call, inputs)


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x):
    return torch.stack((torch.full_like(x, 1e6), x), dim=-1).flatten(-2)[..., 1::2]


def cut_from_a_longer_one(x):
    return torch.cat((torch.full_like(x, torch.nan), x), dim=2)[:, :, x.shape[2] :]


def expanded(x):
    return x[:, :1].expand_as(x)


@every_path
@pytest.mark.parametrize("view", [transposed, sliced, cut_from_a_longer_one, expanded])
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize("has_log_scale", [False, True])
def test_strides_do_not_matter(path, view, placement, has_log_scale):
    leaves = [positive(2, 3, 21, 4), positive(2, 3, 21, 4), randn(2, 3, 21, 5)]
    leaves += [randn(2, 3, 21, 1)] if has_log_scale else []
    rotary = Rotary() if placement == "numerator" else None

    def run(view_of, leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        *views, scale = [view_of(x) for x in leaves] + ([] if has_log_scale else [None])
        scale = None if scale is None else scale[..., 0]
        output = linear_attention(*views, rotary=rotary, causal=path.causal, key_log_scale=scale, **path.options)
        output.sum().backward()  # its gradient is an expanded 1
        return output, [x.grad for x in leaves]

    output, grads = run(view, leaves)
    same = run(lambda x: view(x).contiguous(), leaves)
    close(output, same[0], 1e-13)
    expected = truth(
        *(view(x) for x in leaves[:3]),
        rotate=None if rotary is None else turn,
        causal=path.causal,
        log_scale=view(leaves[3])[..., 0] if has_log_scale else None,
    )
    close(output, expected.output, 1e-10)
    for grad, other in zip(grads, same[1], strict=True):
        close(grad, other, 1e-10)


@every_path
def test_a_value_wider_than_features_is_as_good(path):
    query, key, value = positive(2, 1, 19, 2), positive(2, 1, 19, 2), randn(2, 1, 19, 9)
    output = linear_attention(query, key, value, rotary=Rotary(), causal=path.causal, **path.options)
    close(output, truth(query, key, value, rotate=turn, causal=path.causal).output, 1e-10)


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_the_value(path, dtype):
    value = randn(1, 2, 9, 4, dtype=dtype)
    query, key = positive(1, 2, 9, 4).float(), positive(1, 2, 9, 4).float()
    output = linear_attention(query, key, value, causal=path.causal, **path.options)
    assert output.dtype == dtype
    close(output.double(), truth(query, key, value, causal=path.causal).output, 2 * torch.finfo(dtype).eps + 1e-6)


@every_path
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize("level", [-5000.0, 0.0, 5000.0])
@pytest.mark.parametrize("masked", [False, True])
def test_log_scales_of_any_size(path, placement, level, masked):
    """Sums without the scale of their largest key would overflow or vanish, even in float64."""
    query, key, value = positive(2, 3, 37, 4), positive(2, 3, 37, 4), randn(2, 3, 37, 5)
    log_scale = level + 300 * randn(2, 3, 37)
    mask = None
    if masked:
        mask = torch.rand(2, 37) < 0.5
        mask[:, 0] = True
        log_scale = log_scale.masked_fill(~mask[:, None], 9000.0)  # what a pad says does not count
    rotary, rotate = (None, None) if placement == "none" else (Rotary(), turn)
    common = {"causal": path.causal, "key_mask": mask}
    output = linear_attention(query, key, value, rotary=rotary, key_log_scale=log_scale, **common, **path.options)
    close(output, truth(query, key, value, rotate=rotate, log_scale=log_scale, **common).output, 1e-10)


NORMALIZERS = ("features", "rms", None)


@every_path
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize("masked", [False, True])
def test_every_normalizer_is_its_formula(path, normalizer, placement, masked):
    tokens = positive(2, 3, 21, 4, grad=True), positive(2, 3, 21, 4, grad=True), randn(2, 3, 21, 5, grad=True)
    mask = torch.rand(2, 21) < 0.6 if masked else None
    rotary, rotate = (None, None) if placement == "none" else (Rotary(), turn)
    common = {"causal": path.causal, "key_mask": mask, "normalizer": normalizer}
    output = linear_attention(*tokens, rotary=rotary, **common, **path.options)
    expected = truth(*tokens, rotate=rotate, **common).output
    close(output, expected, 1e-10)
    cotangent = randn(*output.shape)
    for grad, exact in zip(*(torch.autograd.grad(o, tokens, cotangent) for o in (output, expected)), strict=True):
        close(grad, exact, 1e-10)


@every_path
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rms_of_features_with_log_scales_has_no_size(path, size):
    """No ε: a head whose numerators are tiny is normed as any other, and squares neither overflow nor vanish."""
    tokens = [positive(2, 3, 9, 4).float(), positive(2, 3, 9, 4).float(), randn(2, 3, 9, 5).float()]
    options = {"normalizer": "rms", "causal": path.causal, "key_log_scale": torch.zeros(2, 3, 9), **path.options}
    output = linear_attention(*tokens[:2], size * tokens[2], **options)
    close(output, linear_attention(*tokens, **options), 1e-5)
    close(output.square().mean(-1), torch.ones(2, 3, 9), 1e-5)


@every_path
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-3, 1.0, 1e30])
def test_rms_of_features_without_log_scales_fades_at_zero(path, size):
    """Numerators of rounding noise do not become outputs of size 1, nor gradients without bound."""
    query, key, value = positive(2, 3, 9, 4).float(), positive(2, 3, 9, 4).float(), randn(2, 3, 9, 5).float()
    value = (size * value).requires_grad_()
    options = {"causal": path.causal, **path.options}
    output = linear_attention(query, key, value, normalizer="rms", **options)
    numerator = linear_attention(query, key, value.detach(), normalizer=None, **options).double()
    close(output.double(), numerator / (numerator.square().mean(-1, keepdim=True) + 1e-6).sqrt(), 1e-5)
    (grad,) = torch.autograd.grad(output.sum(), value)
    assert grad.isfinite().all()


# C3: rotation in the numerator alone.


@every_path_and_map
def test_all_positions_zero_is_no_rotation(path, name):
    feature_map = make_map(name, 6)
    query, key, value = (randn(2, 3, 20, 6) for _ in range(3))
    positions = {"query_positions": torch.zeros(20).long(), "key_positions": torch.zeros(20).long()}
    call = partial(attend, feature_map, query, key, value, causal=path.causal, **positions, **path.options)
    close(call(placement="numerator"), call(placement="none"), 1e-13)


@every_path_and_map
@pytest.mark.parametrize("shift", [1000, 2**20])
def test_a_shift_of_all_positions_changes_nothing(path, name, shift):
    feature_map = make_map(name, 6)
    if feature_map.uses_positions:
        feature_map.max_positions = 2**21
    query, key, value = (randn(2, 3, 20, 6) for _ in range(3))
    positions = torch.arange(20) + shift
    call = partial(attend, feature_map, query, key, value, placement="numerator", causal=path.causal, **path.options)
    close(call(query_positions=positions, key_positions=positions), call(), 1e-9)


@every_path
def test_a_shift_of_the_keys_alone_changes_the_output(path):
    query, key, value = positive(1, 2, 9, 4), positive(1, 2, 9, 4), randn(1, 2, 9, 3)
    positions = {"query_positions": torch.arange(9), "key_positions": torch.arange(9) + 4}
    output = linear_attention(query, key, value, rotary=Rotary(), causal=path.causal, **positions, **path.options)
    close(output, truth(query, key, value, rotate=turn, causal=path.causal, **positions).output, 1e-10)
    assert not torch.allclose(output, truth(query, key, value, rotate=turn, causal=path.causal).output, rtol=0.1)


@every_path
def test_rows_of_a_batch_have_positions_of_their_own(path):
    query, key, value = positive(3, 2, 9, 4), positive(3, 2, 9, 4), randn(3, 2, 9, 5)
    positions = torch.randint(0, 500, (3, 9))
    kinds = {"query_positions": positions, "key_positions": positions.flip(1)}
    for given_positions in (kinds, {"query_positions": positions, "key_positions": positions}):
        call = partial(linear_attention, rotary=Rotary(), causal=path.causal, **path.options)
        output = call(query, key, value, **given_positions)
        close(output, truth(query, key, value, rotate=turn, causal=path.causal, **given_positions).output, 1e-10)
    if path.causal:  # keys stand where the queries do
        close(call(query, key, value, query_positions=positions), output, 1e-14)


@every_causal_path_and_divided_map
@scaled_or_not
def test_the_normalizer_is_the_unrotated_sum(path, name, scaled):
    feature_map = make_map(name, 6)
    query, key, log_scale = mapped(feature_map, randn(2, 3, 20, 6), randn(2, 3, 20, 6), scaled)
    value = randn(2, 3, 20, 6)
    run = partial(stream_linear_attention, query, key, value, key_log_scale=log_scale, **path.options)
    plain, rotated = run()[1], run(rotary=rotary_for(feature_map, "numerator"))[1]
    assert torch.equal(rotated.key_sum, plain.key_sum)
    assert not torch.allclose(rotated.kv, plain.kv)
    factor = torch.zeros(2, 3, 20) if log_scale is None else log_scale - log_scale.amax(-1, keepdim=True)
    close(rotated.key_sum, (key * factor.double().exp()[..., None]).sum(2), 1e-12)
    assert ((query[:, :, -1] * rotated.key_sum).sum(-1) > 0).all()


@pytest.mark.parametrize("path", [p for p in PATHS if not p.causal], ids=lambda path: path.name)
def test_the_example_by_hand(path):
    """φ = (1, 1), one frequency of 1 rad, keys at 0 and 3, query at 3: normalizer 4, weights 2·cos 3 and 2."""
    ones = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    output = linear_attention(
        ones,
        ones.expand(1, 1, 2, 2),
        torch.eye(2, dtype=torch.float64)[None, None],
        rotary=Rotary(),
        causal=False,
        query_positions=torch.tensor([3]),
        key_positions=torch.tensor([0, 3]),
        **path.options,
    )
    weights = torch.tensor([2 * math.cos(3), 2], dtype=torch.float64) / 4
    close(output[0, 0, 0], weights, 1e-14)
    # So a weight may be negative, and weights do not sum to 1.
    assert weights[0] < 0
    assert abs(weights.sum() - 1) > 0.9


@every_causal_path_and_divided_map
@every_placement
@scaled_or_not
def test_the_first_output_is_the_first_value(path, name, placement, scaled):
    query, key, value = (randn(2, 3, 5, 6) for _ in range(3))
    output = attend(make_map(name, 6), query, key, value, placement=placement, scaled=scaled, **path.options)
    close(output[:, :, 0], value[:, :, 0], 1e-12)


@every_causal_path_and_divided_map
@pytest.mark.parametrize("placement", ["none", "before"])
def test_without_a_rotated_numerator_weights_sum_to_one(path, name, placement):
    query, key = randn(2, 3, 20, 6), randn(2, 3, 20, 6)
    ones = torch.ones(2, 3, 20, 1, dtype=torch.float64)
    close(attend(make_map(name, 6), query, key, ones, placement=placement, **path.options), ones, 1e-12)


# C5: padding.


def layouts():
    real = {
        "right": [*range(8)],
        "left": [*range(8, 16)],
        "interior": [0, 1, 2, 5, 6, 11, 12, 15],
        "both": [*range(4, 12)],
    }
    return [pytest.param(rows, id=name) for name, rows in real.items()]


@every_path_and_map
@every_placement
@pytest.mark.parametrize("real", layouts())
@pytest.mark.parametrize("b", [1, 2])
def test_pads_do_not_exist(path, name, placement, real, b):
    feature_map = make_map(name, 6)
    tokens = [randn(b, 3, 8, 6, grad=True) for _ in range(3)]
    padded = []
    for x in tokens:
        filled = torch.full((b, 3, 16, 6), 1e4, dtype=torch.float64)
        filled[:, :, real] = x.detach()
        padded.append(filled.requires_grad_())
    positions = torch.tensor(real)
    mask = torch.zeros(b, 16, dtype=torch.bool)
    mask[:, real] = True

    def run(query, key, value, positions, **options):
        if placement == "before":
            query, key = Rotary()(query, positions), Rotary()(key, positions)
        query, key, log_scale = mapped(feature_map, query, key, True, positions)
        return linear_attention(
            query,
            key,
            value,
            rotary=rotary_for(feature_map, placement),
            causal=path.causal,
            query_positions=positions,
            key_positions=positions,
            key_log_scale=log_scale,
            normalizer=normalizer_of(feature_map),
            **path.options,
            **options,
        )

    expected = run(*tokens, positions)
    output = run(*padded, torch.arange(16), key_mask=mask)[:, :, real]
    close(output, expected, 1e-10)
    cotangent = randn(*expected.shape)
    grads, expected_grads = (torch.autograd.grad(o, i, cotangent) for o, i in ((output, padded), (expected, tokens)))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        close(grad[:, :, real], expected_grad, 1e-9)
        assert (grad[:, :, ~mask[0]] == 0).all()


@every_path_and_map
@every_placement
@wide
def test_a_row_of_pads_alone_gives_zero(path, name, placement, dtype):
    feature_map = make_map(name, 6, dtype)
    query, key, value = (randn(2, 3, 9, 6, dtype=dtype, grad=True) for _ in range(3))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    call = partial(attend, feature_map, query, placement=placement, causal=path.causal, **path.options)
    output = call(key, value, key_mask=mask)
    assert (output[0] == 0).all()
    close(output[1], call(key, value)[1], 1e-10 if dtype == torch.float64 else 1e-5)
    grads = torch.autograd.grad(output, (query, key, value), randn(*output.shape, dtype=dtype))
    for grad in grads:
        assert (grad[0] == 0).all()
        assert grad[1].isfinite().all()
        assert grad[1].abs().max() > 1e-4


@every_path
def test_pads_may_hold_anything(path):
    query, key, value = positive(1, 2, 6, 4), positive(1, 2, 6, 4), randn(1, 2, 6, 3)
    mask = torch.tensor([[True, True, False, True, False, True]])
    call = partial(linear_attention, query, key_mask=mask, rotary=Rotary(), causal=path.causal, **path.options)
    expected = call(key, value)
    for junk in (torch.nan, torch.inf):
        absent = ~mask[:, None, :, None]
        assert torch.equal(call(key.masked_fill(absent, junk), value.masked_fill(absent, junk)), expected)


@every_causal_path
def test_pads_before_the_first_real_token_give_zero(path):
    query, key, value = positive(1, 2, 6, 4), positive(1, 2, 6, 4), randn(1, 2, 6, 3)
    mask = torch.tensor([[False, False, True, True, True, True]])
    output = linear_attention(query, key, value, key_mask=mask, **path.options)
    assert (output[:, :, :2] == 0).all()
    close(output[:, :, 2], value[:, :, 2], 1e-13)


# C7: low precision and range.

LOW = {
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


@every_map
@every_placement
@pytest.mark.parametrize(
    ("precision", "scale", "head_dim"),
    [*((precision, scale, 16) for precision in LOW for scale in (1, 10, 30)), ("bfloat16", 30, 64)],
)
def test_low_precision_and_large_inputs(name, placement, precision, scale, head_dim):
    n = 4096
    dtype, autocast = LOW[precision]
    feature_map = make_map(name, head_dim, torch.float32)
    tokens = [(scale * randn(1, 1, n, head_dim)).to(dtype).requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output = attend(feature_map, *tokens, placement=placement)
    assert output.dtype == dtype

    query, key, value = (x.detach().double() for x in tokens)
    if placement == "before":  # rotated, then rounded, as the map sees them
        query, key = (turn(x, torch.arange(n)).to(dtype).double() for x in (query, key))
    rotate = turn if placement == "numerator" else None
    query, key, log_scale = log_split(feature_map, query, key)
    how = normalizer_of(feature_map), epsilon_of(feature_map)
    exact, terms = peaked_truth(query, key, value, log_scale, rotate, *how)
    if placement == "numerator":
        # Where φ is peaked the exact value itself outgrows the dtype.
        most = torch.finfo(dtype).max / 2
        assert output[exact.abs().amax(-1) < most].isfinite().all()
        # Rotated terms cancel: the error is measured in units of the terms, in rows where they fit.
        rows = terms.amax(-1) < most
        assert rows.double().mean() > 0.5
        assert ((output - exact)[rows] / terms[rows]).square().mean().sqrt() < 2e-2
        return
    assert output.isfinite().all()
    assert relative_rms(output, exact) < 2e-2
    for grad in torch.autograd.grad(output, tokens, randn(*output.shape).to(dtype)):
        assert grad.isfinite().all()
        assert grad.dtype == dtype


@every_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1, 10])
def test_gradients_under_a_rotated_numerator_are_finite(name, dtype, scale):
    feature_map = make_map(name, 16, torch.float32)
    tokens = [(scale * randn(1, 1, 256, 16)).to(dtype).requires_grad_() for _ in range(3)]
    output = attend(feature_map, *tokens, placement="numerator")
    query, key, value = (x.detach() for x in tokens)
    query, key, log_scale = log_split(feature_map, query, key)
    how = normalizer_of(feature_map), epsilon_of(feature_map)
    exact = peaked_truth(query, key, value, log_scale, turn, *how).output
    if exact.abs().max() < 1e3:
        for grad in torch.autograd.grad(output, tokens, torch.ones_like(output)):
            assert grad.isfinite().all()


@every_path_and_divided_map
@every_placement
@pytest.mark.parametrize("scale", [1, 10, 30])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_lone_token_gives_its_value_however_large(path, name, placement, scale, head_dim):
    """A query and key that peak apart must not lose their product: the row is not empty."""
    feature_map = make_map(name, head_dim, torch.float32)
    query, key, value = (scale * randn(64, 1, 1, head_dim, dtype=torch.float32, grad=True) for _ in range(3))
    output = attend(feature_map, query, key, value, placement=placement, causal=path.causal, **path.options)
    # Numerator and normalizer are the same sum in two orders; where signed terms cancel, rounding shows.
    features = log_split(feature_map, query.detach(), key.detach())[:2]
    kernel, terms = (f[0].unsqueeze(-2) @ f[1].unsqueeze(-1) for f in (features, [x.abs() for x in features]))
    condition = 1.0 if feature_map.is_positive else (terms / kernel).max().item()
    close(output, value, 1e-5 + 1e-6 * condition)
    for grad in torch.autograd.grad(output.sum(), (query, key, value)):
        assert grad.isfinite().all()


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_wider_than_the_inputs(path, dtype):
    """5,000 ones add up to 5,000, though bfloat16 sums stop at 256 and float16 sums at 2,048."""
    n = 5000
    if path.name.startswith("reference"):
        n = 3000  # quadratic
    ones = torch.ones(1, 1, n, 2, dtype=dtype)
    value = torch.zeros(1, 1, n, 1, dtype=dtype)
    value[:, :, 0] = n
    output = linear_attention(ones, ones, value, causal=path.causal, **path.options)
    close(output[0, 0, -1], torch.ones(1, dtype=dtype), 1e-3)


# Errors, extremes, cross-attention.


@pytest.mark.parametrize("path", [p for p in PATHS if not p.causal], ids=lambda path: path.name)
@every_map
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize(("n", "s"), [(7, 19), (19, 7), (1, 5), (5, 1)])
def test_cross_attention(path, name, placement, n, s):
    feature_map = make_map(name, 6)
    query, key, value = randn(2, 3, n, 6), randn(2, 3, s, 6), randn(2, 3, s, 4)
    mask = torch.rand(2, s) < 0.6
    mask[:, 0] = True
    output = attend(feature_map, query, key, value, placement=placement, causal=False, key_mask=mask, **path.options)
    expected = true_attend(feature_map, query, key, value, placement=placement, causal=False, key_mask=mask)
    close(output, expected, 1e-10)


@every_path
@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("placement", ["none", "numerator"])
def test_extremes(path, n, placement):
    """No token, one token; one head, one feature pair, one value."""
    query, key, value = positive(1, 1, n, 2), positive(1, 1, n, 2), randn(1, 1, n, 1)
    rotary = Rotary() if placement == "numerator" else None
    output = linear_attention(query, key, value, rotary=rotary, causal=path.causal, **path.options)
    assert output.shape == (1, 1, n, 1)
    close(output, value, 1e-14)


@pytest.mark.parametrize("path", [p for p in PATHS if not p.causal], ids=lambda path: path.name)
def test_nothing_to_attend_to_is_zero(path):
    output = linear_attention(
        positive(2, 3, 4, 2), positive(2, 3, 0, 2), randn(2, 3, 0, 5), causal=False, **path.options
    )
    assert torch.equal(output, torch.zeros(2, 3, 4, 5, dtype=torch.float64))


def f(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


MISTAKES = {
    "lengths of key and value": ((f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 6, 3)), {}, r"same length.*5, 4.*6, 3"),
    "lengths of query and key": ((f(1, 2, 5, 4), f(1, 2, 6, 4), f(1, 2, 6, 3)), {}, r"6 keys and 5 queries"),
    "features": ((f(1, 2, 5, 4), f(1, 2, 5, 6), f(1, 2, 5, 3)), {}, r"number of features.*4\).*6\)"),
    "batch": ((f(1, 2, 5, 4), f(3, 2, 5, 4), f(3, 2, 5, 3)), {}, r"batch and heads.*\(1, .*\(3, "),
    "heads": ((f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 1, 5, 3)), {}, r"batch and heads"),
    "axes": ((f(2, 5, 4), f(2, 5, 4), f(2, 5, 3)), {}, r"\(b, h, n, m\).*\(2, 5, 4\)"),
    "integers": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3, dtype=torch.long)),
        {},
        r"floating.*int64",
    ),
    "mask shape": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)),
        {"key_mask": torch.ones(1, 6, dtype=torch.bool)},
        r"key_mask must be.*\(1, 5\).*got.*\(1, 6\)",
    ),
    "mask of heads": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)),
        {"key_mask": torch.ones(1, 2, 5, dtype=torch.bool)},
        r"key_mask must be.*got.*\(1, 2, 5\)",
    ),
    "mask dtype": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)),
        {"key_mask": torch.ones(1, 5)},
        r"key_mask must be bool.*got torch.float32",
    ),
    "odd width": ((f(1, 2, 5, 3), f(1, 2, 5, 3), f(1, 2, 5, 3)), {"rotary": Rotary()}, r"even width, got 3"),
    "positions": (
        (f(2, 2, 5, 4), f(2, 2, 5, 4), f(2, 2, 5, 3)),
        {"rotary": Rotary(), "query_positions": torch.arange(6)},
        r"positions must be.*5.*got \(6,\)",
    ),
    "log-scale": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)),
        {"key_log_scale": f(1, 2, 4)},
        r"key_log_scale must be.*\(1, 2, 5\), got \(1, 2, 4\)",
    ),
    "chunk size": ((f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)), {"chunk_size": 0}, r"chunk_size .* got 0"),
    "backend": ((f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)), {"backend": "fast"}, r"backend must be.*'fast'"),
    "normalizer": ((f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)), {"normalizer": "sum"}, r"normalizer must be.*'sum'"),
    "nothing to divide a scale out": (
        (f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3)),
        {"normalizer": None, "key_log_scale": f(1, 2, 5)},
        r"normalizer=None.*without key_log_scale",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("call", [linear_attention, stream_linear_attention])
def test_a_mistake_is_named(call, mistake):
    tensors, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        call(*tensors, **options)


def test_a_state_of_another_shape_is_named():
    state = stream_linear_attention(f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 3))[1]
    with pytest.raises(ValueError, match=r"state.kv must be.*\(1, 2, 4, 6\), got \(1, 2, 4, 3\)"):
        stream_linear_attention(f(1, 2, 5, 4), f(1, 2, 5, 4), f(1, 2, 5, 6), state)


# C10: independence.


@every_path_and_map
@every_placement
@pytest.mark.parametrize("axis", [0, 1])
def test_items_and_heads_are_alone(path, name, placement, axis):
    feature_map = make_map(name, 6)
    tokens = [randn(3, 4, 20, 6) for _ in range(3)]
    call = partial(attend, feature_map, placement=placement, causal=path.causal, **path.options)
    for i in (0, 2):
        loud = [100 * x for x in tokens]
        for x, y in zip(loud, tokens, strict=True):
            x.select(axis, i).copy_(y.select(axis, i))
        alone = call(*(x.narrow(axis, i, 1) for x in tokens))
        close(call(*loud).narrow(axis, i, 1), alone, 1e-12)


# All of it at once.


@st.composite
def situations(draw):
    size = st.integers(1, 4)
    n = draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4))) if n > 1 else []
    return {
        "b": draw(size),
        "h": draw(size),
        "n": n,
        "m": 2 * draw(size),
        "e": draw(st.integers(1, 6)),
        "cuts": [0, *cuts, n],
        "chunk_sizes": draw(st.lists(st.sampled_from([None, *CHUNK_SIZES, 7]), min_size=2, max_size=2)),
        "masked": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "rotated": draw(st.booleans()),
        "spread": draw(st.sampled_from([None, 1.0, 40.0])),
        "offsets": draw(st.booleans()),
        "seed": draw(st.integers(0, 10_000)),
    }


@given(situations())
@example(
    {"b": 1, "h": 1, "n": 2, "m": 2, "e": 1, "cuts": [0, 1, 2], "chunk_sizes": [None, 1], "masked": 1.0}
    | {"rotated": True, "spread": 40.0, "offsets": True, "seed": 0}
)
def test_any_situation_is_the_reference(case):
    torch.manual_seed(case["seed"])
    b, h, n, m = (case[x] for x in "bhnm")
    query, key, value = positive(b, h, n, m), positive(b, h, n, m), randn(b, h, n, case["e"])
    log_scale = None if case["spread"] is None else case["spread"] * randn(b, h, n)
    mask = torch.rand(b, n) >= case["masked"] if case["masked"] else None
    positions = torch.arange(n) + (torch.randint(0, 100, (b, 1)) if case["offsets"] else torch.zeros(b, 1).long())
    expected = truth(
        query,
        key,
        value,
        rotate=turn if case["rotated"] else None,
        key_mask=mask,
        query_positions=positions,
        log_scale=log_scale,
    )
    rotary = Rotary() if case["rotated"] else None
    whole = linear_attention(
        query,
        key,
        value,
        rotary=rotary,
        key_mask=mask,
        query_positions=positions,
        chunk_size=case["chunk_sizes"][0],
        key_log_scale=log_scale,
    )
    close(whole, expected.output, 1e-10)
    outputs, state = [], None
    for begin, end in pairwise(case["cuts"]):
        rows = slice(begin, end)
        output, state = stream_linear_attention(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            state,
            rotary=rotary,
            key_mask=None if mask is None else mask[:, rows],
            query_positions=positions[:, rows] if state is None else None,
            chunk_size=case["chunk_sizes"][1],
            key_log_scale=None if log_scale is None else log_scale[:, :, rows],
        )
        outputs.append(output)
    close(torch.cat(outputs, 2), expected.output, 1e-10)
    assert isinstance(state, State)
    close(state.kv, expected.kv, 1e-10)
    close(state.key_sum, expected.key_sum, 1e-10)
    assert torch.equal(state.position, positions[:, -1] + 1)

"""Attention that forgets with distance: C1 to C5, C7 and C10 with a decay in the numerator or in both sums."""

import itertools
import math
from functools import partial

import pytest
import torch

from linrope import (
    ByteTransformer,
    ConstantDecay,
    CosFormer,
    FavorPlus,
    KernelAttention,
    LearnedDecay,
    LinearAttention,
    RetNetDecay,
    Rotary,
    SoftmaxAttention,
    TransNormerDecay,
    XPos,
    linear_attention,
    stream_linear_attention,
)
from linrope.attention import RMS_EPSILON
from linrope.diagnostics import attention_weights
from tests.cases import CAUSAL_PATHS, close, divided, randn, relative_rms, true_turn

B, H, N, M, E = 2, 3, 13, 8, 5
LOG_DECAY = torch.tensor([0.9, 0.5, 1.0], dtype=torch.float64).log()
ROTATIONS = {
    "none": lambda: None,
    "interleaved": lambda: Rotary(100.0),
    "half": lambda: Rotary(100.0, pairing="half"),
    "XPos": lambda: XPos(100.0, scale_base=8.0),
    "XPos-half": lambda: XPos(100.0, fraction=0.5, pairing="half", scale_base=8.0),
}
# The others where there is time.
every_rotation = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("interleaved", "XPos") else pytest.mark.slow) for n in ROTATIONS]
)
both_placements = pytest.mark.parametrize("placement", ["numerator", "both"])
with_scales = pytest.mark.parametrize("scaled", [False, True])
every_path = pytest.mark.parametrize(
    "path",
    [p for p in CAUSAL_PATHS if p.name in ("native", "chunked-3", "chunked-64", "reference")],
    ids=lambda path: path.name,
)


def inputs_of(n=N, scaled=False, grad=False):
    """φ(q), φ(k), values, and log-scales of keys or None."""
    leaves = [*(randn(B, H, n, M).abs() + 0.1 for _ in range(2)), randn(B, H, n, E)]
    leaves = [x.requires_grad_(grad) for x in leaves]
    return [*leaves, (3 * randn(B, H, n)).requires_grad_(grad) if scaled else None]


def xpos_zeta(rotary):
    """ζ of each feature that turns, by the paper's formula, in the order of the pairing."""
    width = round(rotary.fraction * M)
    zeta = [(i / (width / 2) + rotary.gamma) / (1 + rotary.gamma) for i in range(width // 2)]
    features = zeta * 2 if rotary.pairing == "half" else [z for z in zeta for _ in range(2)]
    return torch.tensor(features + [1.0] * (M - width), dtype=torch.float64)


def true(query, key, value, scale, *, rotary, log_decay, placement, mask=None, positions=None, normalizer="features"):
    """Explicit sums: each weight times λ^distance, and each product of features times ζ^(distance/scale_base)."""
    n = query.shape[2]
    at = (torch.arange(n) if positions is None else positions).double().expand(len(query), n)
    distance = (at[:, :, None] - at[:, None]).tril()  # what is later is hidden anyway
    faded = torch.ones(1, 1, 1, M, dtype=torch.float64)
    rotated_query, rotated_key = query, key
    if rotary is not None:
        if isinstance(rotary, XPos):
            faded = xpos_zeta(rotary) ** (distance[..., None] / rotary.scale_base)
            plain = Rotary(rotary.base, rotary.fraction, rotary.pairing)
        else:
            plain = rotary
        rotated_query, rotated_key = (true_turn(plain, x, at) for x in (query, key))
    allowed = torch.ones(n, n).tril().bool().expand(len(query), 1, n, n)
    allowed = allowed if mask is None else allowed & mask[:, None, None]
    weight = allowed.double() if scale is None else allowed * scale.exp()[:, :, None]
    decay = 1.0 if log_decay is None else (log_decay[:, None, None] * distance[:, None]).exp()
    products = torch.einsum("bhtm,bhsm,btsm->bhts", rotated_query, rotated_key, faded.expand(len(query), n, n, M))
    numerator = (products * decay * weight) @ value
    key_sums = (query @ key.mT * (decay if placement == "both" else 1.0) * weight).sum(-1)
    epsilon = RMS_EPSILON if scale is None else 0.0
    return divided(numerator, key_sums, normalizer, epsilon=epsilon, empty=~allowed.any(-1))


def attend(query, key, value, scale, *, placement, mask=None, positions=None, **options):
    return linear_attention(
        query,
        key,
        value,
        key_log_scale=scale,
        key_mask=mask,
        query_positions=positions,
        decay_placement=placement,
        **options,
    )


def stream(inputs, parts, *, placement, **options):
    state, outputs = None, []
    for first, last in parts:
        query, key, value, scale = (None if x is None else x[:, :, first:last] for x in inputs)
        y, state = stream_linear_attention(
            query, key, value, state, key_log_scale=scale, decay_placement=placement, **options
        )
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


# C2
@every_path
@every_rotation
@both_placements
@with_scales
@pytest.mark.parametrize("masked", [False, True])
def test_every_path_is_the_formula(path, name, placement, scaled, masked):
    inputs, rotary = inputs_of(scaled=scaled, grad=True), ROTATIONS[name]()
    log_decay = LOG_DECAY.clone().requires_grad_()
    mask = torch.rand(B, N) > 0.4 if masked else None
    positions = torch.randint(0, 30, (B, N)).sort().values if masked else None
    options = {"rotary": rotary, "log_decay": log_decay, "placement": placement, "mask": mask, "positions": positions}
    output, expected = attend(*inputs, **options, **path.options), true(*inputs, **options)
    close(output, expected, 1e-10)
    g, wanted = randn(*output.shape), [x for x in (*inputs, log_decay) if x is not None]
    for actual, right in zip(
        torch.autograd.grad(output, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True
    ):
        close(actual, right, 1e-9)


@pytest.mark.parametrize("normalizer", ["rms", None])
@both_placements
@every_path
def test_without_a_normalizer_the_numerator_alone_forgets(path, placement, normalizer):
    inputs, options = inputs_of(), {"rotary": Rotary(), "log_decay": LOG_DECAY, "placement": placement}
    output = attend(*inputs, normalizer=normalizer, **options, **path.options)
    close(output, true(*inputs, normalizer=normalizer, **options), 1e-10)


@pytest.mark.parametrize("n", [1024, 1025, pytest.param(2100, marks=pytest.mark.slow)])
@both_placements
def test_blocks_join_without_a_seam(n, placement):
    inputs = [x[:1, :2] for x in inputs_of(n, scaled=True)]
    options = {"rotary": XPos(), "log_decay": LOG_DECAY[:2], "placement": placement}
    close(attend(*inputs, **options), true(*inputs, **options), 1e-10)


@both_placements
def test_positions_may_leap(placement):
    """Over a million tokens all is forgotten, and nothing overflows."""
    inputs, at = inputs_of(), torch.tensor([0, 1, 2, 3, 4, 10**6, 10**6 + 1, *range(2 * 10**6, 2 * 10**6 + 6)])
    options = {"rotary": XPos(), "log_decay": LOG_DECAY, "placement": placement}
    close(attend(*inputs, positions=at, **options), true(*inputs, positions=at, **options), 1e-10)
    output = attend(*(x if x is None else x.float() for x in inputs), positions=at, **options)
    close(output.double(), true(*inputs, positions=at, **options), 1e-4)


@every_path
@every_rotation
@both_placements
@pytest.mark.parametrize("where", [-(10**9), 10**5])
def test_a_masked_key_may_stand_anywhere(path, name, placement, where):
    """In float32, whose logarithms would have no fractions left out there."""
    inputs, at = [x if x is None else x.float() for x in inputs_of(60)], torch.arange(60)
    mask = torch.ones(B, 60, dtype=torch.bool)
    mask[:, [0, 20, 21]] = False
    options = {"rotary": ROTATIONS[name](), "log_decay": LOG_DECAY, "placement": placement, "mask": mask}
    expected = attend(*inputs, positions=at, **options, **path.options)
    elsewhere = at.clone()
    elsewhere[[0, 20, 21]] = where
    valid = mask[0]
    close(attend(*inputs, positions=elsewhere, **options, **path.options)[:, :, valid], expected[:, :, valid], 1e-4)


@every_path
@both_placements
@pytest.mark.parametrize(("decay", "leap"), [(0.5, 10**4), (0.5, 10**6), (0.9, 10**7), (1e-30, 3)])
def test_float32_keeps_its_precision_over_a_leap(path, placement, decay, leap):
    inputs, at = [x[:1, :1] for x in inputs_of(60)[:3]], torch.arange(60)
    at[1:] += leap
    options = {"log_decay": torch.tensor([decay]).double().log(), "placement": placement, "positions": at}
    expected = true(*inputs, None, rotary=None, **options)
    close(attend(*(x.float() for x in inputs), None, **options, **path.options).double(), expected, 1e-4)


@every_path
@both_placements
@pytest.mark.parametrize("log_decay", [-8.0, math.log(1e-30)])
def test_keys_before_a_gap_of_masked_ones_are_still_seen(path, placement, log_decay):
    """In both sums what is left of them cancels, however small; by single steps too."""
    query, key, value, _ = (x if x is None else x[:, :1].float() for x in inputs_of(30))
    mask = torch.arange(30).expand(B, -1) < 5
    options = {"log_decay": torch.tensor([log_decay]), "placement": placement}
    output = attend(query, key, value, None, mask=mask, **options, **path.options)
    if placement == "both":
        # The last key weighs e^8 times the one before, and so on; together they are an average.
        expected = true(*(x.double() for x in (query, key, value)), None, rotary=None, mask=mask, log_decay=torch.tensor([log_decay]).double().clamp_min(-20), placement=placement)  # fmt: skip
        close(output[:, :, 5:].double(), expected[:, :, 5:], 1e-4)
    state, steps = None, []
    for t in range(30):
        part = (x[:, :, t : t + 1] for x in (query, key, value))
        y, state = stream_linear_attention(
            *part, state, key_mask=mask[:, t : t + 1], log_decay=options["log_decay"], decay_placement=placement, **path.options
        )  # fmt: skip
        steps.append(y)
    close(torch.cat(steps, dim=2), output, 1e-4)


@both_placements
@pytest.mark.parametrize("decay", [1e-30, 1e-6, 0.1])
@pytest.mark.parametrize("normalizer", ["features", None])
def test_float32_sums_of_strong_decays(decay, placement, normalizer):
    inputs = inputs_of(1024)[:3]
    options = {"log_decay": torch.full((H,), decay).double().log(), "placement": placement, "normalizer": normalizer}
    wide = attend(*inputs, None, **options)
    close(attend(*(x.float() for x in inputs), None, **options).double(), wide, 2e-6 if normalizer is None else 1e-4)


@both_placements
def test_a_training_step_goes_on_from_a_state_of_inference(placement):
    layer, x = layer_of("learned", placement, rotary=XPos()), randn(B, N, H * M)
    with torch.inference_mode():
        _, state = layer.stream(x[:, :5])
    output, _ = layer.stream(x[:, 5:], state)
    output.square().sum().backward()
    assert layer.kernel.decay.logit.grad.abs().min() > 0
    close(output, layer(x)[:, 5:], 1e-10)


@pytest.mark.parametrize("placement", ["numerator", pytest.param("both", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rotary", [pytest.param(None, marks=pytest.mark.slow), pytest.param(Rotary(), marks=pytest.mark.slow), XPos()]
)
def test_exported_for_any_length(placement, rotary):
    layer = LinearAttention(8, 2, rotary=rotary, decay=RetNetDecay(), decay_placement=placement).eval()
    length = {1: torch.export.Dim("n", min=2, max=4096)}
    program = torch.export.export(layer, (torch.randn(2, 70, 8),), dynamic_shapes=(length,)).module()
    for n in (2, 70, 1500):
        x = torch.randn(2, n, 8)
        close(program(x), layer(x), 1e-4)


@both_placements
def test_traced_positions_may_leap(placement):
    """No block can be cut by numbers that are not known: float64 takes them in one."""
    at = torch.arange(60) * 1000
    query, key, value, _ = (x if x is None else x.float() for x in inputs_of(60))
    expected = attend(query, key, value, None, positions=at, placement=placement, rotary=XPos())
    call = partial(attend, scale=None, positions=at, placement=placement, rotary=XPos())
    torch._dynamo.reset()
    close(torch.compile(call, backend="eager", fullgraph=True)(query, key, value), expected, 1e-4)
    rows = torch.func.vmap(lambda *row: call(*(x[None] for x in row))[0])(query, key, value)
    close(rows, expected, 1e-4)


@pytest.mark.parametrize("rotary", [XPos(scale_base=float("inf")), XPos(gamma=1e30)])
def test_xpos_that_fades_nothing_is_a_rotation(rotary):
    *inputs, _ = inputs_of()
    close(linear_attention(*inputs, rotary=rotary), linear_attention(*inputs, rotary=Rotary()), 1e-12)


# C1
@every_path
@both_placements
@with_scales
def test_later_keys_and_values_do_not_exist(path, placement, scaled):
    inputs, t = inputs_of(scaled=scaled, grad=True), 6
    options = {"rotary": Rotary(), "log_decay": LOG_DECAY, "placement": placement, **path.options}
    output = attend(*inputs, **options)
    louder = [x if x is None else x.detach().clone() for x in inputs]
    louder[1][:, :, t + 1 :] *= 30
    louder[2][:, :, t + 1 :] = 7
    if scaled:
        louder[3][:, :, t + 1 :] += 30
    assert torch.equal(attend(*louder, **options)[:, :, : t + 1], output[:, :, : t + 1])
    grads = torch.autograd.grad(output[:, :, t].sum(), [x for x in inputs if x is not None])
    assert all((g[:, :, t + 1 :] == 0).all() for g in grads)


# C3
@every_path
@every_rotation
@both_placements
def test_at_one_position_nothing_is_forgotten(path, name, placement):
    *inputs, _ = inputs_of()
    zeros = torch.zeros(N, dtype=torch.long)
    output = attend(*inputs, None, rotary=ROTATIONS[name](), log_decay=LOG_DECAY, placement=placement, positions=zeros, **path.options)  # fmt: skip
    close(output, linear_attention(*inputs), 1e-12)


@every_rotation
@both_placements
@pytest.mark.parametrize("shift", [1000, -(10**6)])
def test_a_shift_of_all_positions_changes_nothing(name, placement, shift):
    inputs, options = inputs_of(scaled=True), {"rotary": ROTATIONS[name](), "log_decay": LOG_DECAY}
    shifted = attend(*inputs, positions=torch.arange(N) + shift, placement=placement, **options)
    close(shifted, attend(*inputs, placement=placement, **options), 1e-9)


@every_rotation
@both_placements
def test_the_first_output_is_the_first_value(name, placement):
    inputs = inputs_of()
    output = attend(*inputs, rotary=ROTATIONS[name](), log_decay=LOG_DECAY, placement=placement)
    close(output[:, :, 0], inputs[2][:, :, 0], 1e-12)


def test_in_both_sums_weights_still_sum_to_one():
    query, key, _, scale = inputs_of(scaled=True)
    ones = torch.ones(B, H, N, 1, dtype=torch.float64)
    close(attend(query, key, ones, scale, log_decay=LOG_DECAY, placement="both"), ones, 1e-12)


def test_the_example_by_hand():
    """φ = 1, keys at 0 and 3, query at 3, λ = 1/2: the older weighs 1/8."""
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    value = torch.tensor([8.0, 1.0], dtype=torch.float64)[None, None, :, None]
    at, log_decay = torch.tensor([0, 3]), torch.tensor([0.5], dtype=torch.float64).log()
    for placement, expected in (("both", (1 + 1) / (1 / 8 + 1)), ("numerator", (1 + 1) / 2)):
        output = attend(ones, ones, value, None, positions=at, log_decay=log_decay, placement=placement)
        assert output[0, 0, 1, 0].item() == pytest.approx(expected, rel=1e-14)


# C4
@every_path
@every_rotation
@both_placements
@with_scales
def test_any_split_is_the_whole(path, name, placement, scaled):
    inputs = inputs_of(scaled=scaled)
    options = {"rotary": ROTATIONS[name](), "log_decay": LOG_DECAY, "placement": placement, **path.options}
    whole = attend(*inputs, **options)
    for split in range(N + 1):
        close(stream(inputs, [(0, split), (split, N)], **options)[0], whole, 1e-10)
    steps, state = stream(inputs, [(t, t + 1) for t in range(N)], **options)
    close(steps, whole, 1e-10)
    assert state.position.tolist() == [N] * B


@both_placements
def test_a_state_is_left_as_it_is_and_rows_go_on_from_positions_of_their_own(placement):
    inputs = inputs_of(scaled=True)
    options = {"rotary": XPos(), "log_decay": LOG_DECAY, "decay_placement": placement}

    def part(row, first, last):
        return [x[row : row + 1, :, first:last] for x in inputs]

    states = []
    for row, length in ((0, 4), (1, 9)):
        query, key, value, scale = part(row, 0, length)
        states.append(stream_linear_attention(query, key, value, key_log_scale=scale, **options)[1])
    joined = type(states[0])(*(torch.cat(pair) for pair in zip(*states, strict=True)))
    before = [x.clone() for x in joined]
    parts = [part(0, 4, 8), part(1, 9, 13)]
    query, key, value, scale = (torch.cat(pair) for pair in zip(*parts, strict=True))
    output, _ = stream_linear_attention(query, key, value, joined, key_log_scale=scale, **options)
    assert all(torch.equal(x, y) for x, y in zip(joined, before, strict=True))
    whole = attend(*inputs, rotary=XPos(), log_decay=LOG_DECAY, placement=placement)
    close(output[0], whole[0, :, 4:8], 1e-10)
    close(output[1], whole[1, :, 9:13], 1e-10)


# No overflow, however long
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["native", "chunked"])
@both_placements
def test_a_hundred_thousand_tokens_at_nine_tenths(backend, placement, dtype):
    """Against the recurrence, and λ^(-n) would be 10^4576."""
    n, log_decay = 100_000, torch.tensor([0.9], dtype=torch.float64).log()
    torch.manual_seed(0)
    query, key = (torch.rand(1, 1, n, 2, dtype=torch.float64) + 0.5 for _ in range(2))
    value = torch.randn(1, 1, n, 1, dtype=torch.float64)
    # Σ_s λ^(t-s) k_s v_s is a filter with one pole; where its memory has faded it can begin anywhere.
    checked = range(n - 300, n)
    start = n - 1200
    kv, plain_sum, aged_sum = torch.zeros(2).double(), key[0, 0, :start].sum(0), torch.zeros(2).double()
    expected = []
    for t in range(start, n):
        kv = 0.9 * kv + key[0, 0, t] * value[0, 0, t]
        plain_sum, aged_sum = plain_sum + key[0, 0, t], 0.9 * aged_sum + key[0, 0, t]
        if t in checked:
            expected.append(query[0, 0, t] @ kv / (query[0, 0, t] @ (aged_sum if placement == "both" else plain_sum)))
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    options = {"log_decay": log_decay, "decay_placement": placement, "backend": backend}
    output = linear_attention(*leaves, **options)
    close(output[0, 0, -300:, 0], torch.stack(expected).to(dtype), 1e-9 if dtype == torch.float64 else 1e-4)
    output.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert leaves[1].grad[0, 0, -5:].abs().min() > 0
    first, state = stream_linear_attention(*(x[:, :, : n // 2] for x in leaves), **options)
    rest, state = stream_linear_attention(*(x[:, :, n // 2 :] for x in leaves), state, **options)
    close(torch.cat((first, rest), dim=2), output, 1e-10 if dtype == torch.float64 else 1e-4)
    assert all(x.isfinite().all() for x in state)
    assert state.log_scale.abs().max() < 1  # relative to the last key, so that it does not grow


@pytest.mark.parametrize("decay", [1e-3, 0.03, 0.5, 0.999])
@both_placements
def test_float32_keeps_its_precision_at_any_decay(decay, placement):
    inputs = inputs_of(3000)[:3]
    options = {"log_decay": torch.full((H,), math.log(decay)), "decay_placement": placement, "rotary": Rotary()}
    wide = linear_attention(*inputs, **options)
    close(linear_attention(*(x.float() for x in inputs), **options).double(), wide, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both_placements
def test_low_precision(placement, dtype):
    inputs = [x.to(dtype) for x in inputs_of(2000)[:3]]
    options = {"rotary": XPos(), "log_decay": LOG_DECAY, "decay_placement": placement}
    output = linear_attention(*inputs, **options)
    assert output.dtype == dtype
    assert relative_rms(output, linear_attention(*(x.double() for x in inputs), **options)) < 2e-2


# Layers
DECAYS = {
    "constant": partial(ConstantDecay, 0.9),
    "by head": partial(ConstantDecay, [0.9, 0.5, 1.0]),
    "RetNet": RetNetDecay,
    "TransNormer": partial(TransNormerDecay, 0.5),
    "learned": LearnedDecay,
}
every_decay = pytest.mark.parametrize("which", DECAYS)
every_map = pytest.mark.parametrize(
    "feature_map",
    [None, partial(FavorPlus, num_features=8, scaled_dtype="float64"), partial(CosFormer, floor=0.01)],
    ids=["elu+1", "FAVOR+", "cosFormer"],
)


def layer_of(which, placement, feature_map=None, rotary_placement="numerator", rotary=None):
    options = {} if feature_map is None else {"feature_map": feature_map}
    return LinearAttention(
        H * M,
        H,
        rotary=Rotary() if rotary is None else rotary,
        rotary_placement=rotary_placement,
        decay=DECAYS[which](),
        decay_placement=placement,
        **options,
    ).double()


@every_decay
@both_placements
@pytest.mark.parametrize("rotary_placement", ["numerator", "before"])
@every_map
def test_any_split_of_a_layer_is_the_whole(which, placement, rotary_placement, feature_map):
    layer, x = layer_of(which, placement, feature_map, rotary_placement), randn(B, N, H * M)
    whole = layer(x)
    for split in (1, 7):
        first, state = layer.stream(x[:, :split])
        close(torch.cat((first, layer.stream(x[:, split:], state)[0]), dim=1), whole, 1e-10)
    undecayed = LinearAttention(H * M, H, rotary=Rotary(), rotary_placement=rotary_placement, **({} if feature_map is None else {"feature_map": feature_map})).double()  # fmt: skip
    undecayed.load_state_dict(layer.state_dict(), strict=False)
    assert (undecayed(x) - whole).abs().max() > 1e-3


@both_placements
@pytest.mark.parametrize("layout", ["left", "right", "interior"])
@every_map
def test_pads_do_not_exist(placement, layout, feature_map):
    layer, x = layer_of("by head", placement, feature_map, rotary=XPos()), randn(B, 16, H * M)
    real = {
        "left": torch.arange(8, 16),
        "right": torch.arange(8),
        "interior": torch.tensor([0, 1, 5, 6, 7, 12, 14, 15]),
    }
    real = real[layout]
    mask = torch.zeros(B, 16, dtype=torch.bool).index_fill(1, real, True)
    x = x.masked_fill(~mask[..., None], 1e4).requires_grad_()
    output = layer(x, key_mask=mask)[:, real]
    close(output, layer(x[:, real], positions=real), 1e-9)
    (grad,) = torch.autograd.grad(output.square().sum(), x)
    assert (grad[:, ~mask[0]] == 0).all()
    assert layer(x, key_mask=torch.zeros_like(mask)).abs().max() == 0


@both_placements
def test_items_and_heads_are_alone(placement):
    layer, x = layer_of("by head", placement, rotary=XPos()), randn(B, N, H * M)
    close(layer(torch.cat((x[:1], 100 * x[1:])))[:1], layer(x[:1]), 1e-12)
    inputs = inputs_of()
    louder = [x if x is None else torch.cat((x[:, :1], 100 * x[:, 1:]), dim=1) for x in inputs]
    options = {"log_decay": LOG_DECAY, "placement": placement}
    close(attend(*louder, **options)[:, 0], attend(*inputs, **options)[:, 0], 1e-12)


@both_placements
def test_packed_sequences_forget_each_their_own(placement):
    layer, x, offsets = layer_of("by head", placement, rotary=XPos()), randn(1, 20, H * M), [0, 7, 7, 20]
    packed = layer(x, offsets=torch.tensor(offsets))
    for first, last in itertools.pairwise(offsets):
        if last > first:
            close(packed[:, first:last], layer(x[:, first:last]), 1e-10)


@pytest.mark.slow
@both_placements
@pytest.mark.parametrize("which", ["constant", "learned"])
@every_map
def test_compiled_equals_eager(which, placement, feature_map):
    torch._dynamo.reset()
    layer = layer_of(which, placement, feature_map, rotary=XPos()).float()
    compiled = torch.compile(layer, fullgraph=True)
    for n in (33, 65):
        x = torch.randn(B, n, H * M)
        close(compiled(x), layer(x), 1e-5)


@both_placements
def test_transforms_give_the_gradients_of_each_sample(placement):
    layer, x = layer_of("learned", placement, rotary=XPos()), randn(B, N, H * M)
    parameters = dict(layer.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row[None],)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for row in range(B):
        expected = torch.autograd.grad(layer(x[row : row + 1]).square().sum(), list(parameters.values()))
        for name, right in zip(parameters, expected, strict=True):
            close(grads[name][row], right, 1e-6 if right.dtype == torch.float32 else 1e-9)


@both_placements
@pytest.mark.parametrize("normalizer", ["features", "rms"])
@pytest.mark.parametrize("rotary", [None, Rotary(), XPos(scale_base=16.0)], ids=["none", "Rotary", "XPos"])
def test_diagnosed_weights_times_values_are_the_output(placement, normalizer, rotary):
    layer = KernelAttention(
        M, H, rotary=rotary, decay=ConstantDecay([0.9, 0.5, 1.0]), decay_placement=placement, normalizer=normalizer
    ).double()
    query, key, value = randn(B, H, N, M), randn(B, H, N, M), randn(B, H, N, E)
    (found,) = attention_weights(layer, query, key, value).values()
    close(found.weights @ value, layer(query, key, value), 1e-9)


def test_a_model_that_forgets_streams():
    model = ByteTransformer(
        num_layers=2, d_model=H * M, attention=lambda d: LinearAttention(d, H, rotary=XPos(), decay=RetNetDecay())
    ).double()
    tokens = torch.randint(0, 256, (2, N))
    first, states = model.stream(tokens[:, :5])
    rest, _ = model.stream(tokens[:, 5:], states)
    close(torch.cat((first, rest), dim=1), model(tokens), 1e-10)


# The decays themselves
def test_decays_are_their_formulas():
    def decay_of(decay):
        return decay(4).exp().tolist()

    assert decay_of(RetNetDecay()) == pytest.approx([1 - 2 ** (-5 - i) for i in range(4)], rel=1e-14)
    assert decay_of(TransNormerDecay(0.25)) == pytest.approx(
        [math.exp(-8 * i / 4 * (1 - 0.25)) for i in (1, 2, 3, 4)], rel=1e-14
    )
    assert decay_of(ConstantDecay(0.7)) == pytest.approx([0.7] * 4, rel=1e-14)
    assert decay_of(ConstantDecay([0.1, 0.2, 0.3, 1.0])) == pytest.approx([0.1, 0.2, 0.3, 1.0], rel=1e-14)
    learned = LearnedDecay(4)
    assert decay_of(learned) == pytest.approx([1 - 2 ** (-5 - i) for i in range(4)], rel=1e-6)
    with torch.no_grad():
        learned.logit.copy_(torch.tensor([-100.0, 0.0, 100.0, 0.0]))
    assert learned(4).tolist() == pytest.approx([-100.0, math.log(0.5), 0.0, math.log(0.5)], rel=1e-6)


def test_layers_learn_decays_of_their_own():
    settings = LearnedDecay()
    layers = [LinearAttention(H * M, H, decay=settings) for _ in range(2)]
    assert len({id(p) for layer in layers for name, p in layer.named_parameters() if "logit" in name}) == 2
    layers[0](torch.randn(2, N, H * M)).square().sum().backward()
    assert layers[0].kernel.decay.logit.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ConstantDecay(1.5), r"decay must lie in \(0, 1\], got 1.5"),
        (lambda: ConstantDecay(0.0), r"decay must lie in \(0, 1\], got 0.0"),
        (lambda: ConstantDecay([0.5, float("nan")]), r"decay must lie in \(0, 1\]"),
        (lambda: LinearAttention(8, 2, decay=ConstantDecay([0.5] * 3)), "one number or 2, one for each head, got 3"),
        (lambda: TransNormerDecay(1.0), r"depth must lie in \[0, 1\), got 1.0"),
        (lambda: LearnedDecay(0), "num_heads must be at least 1, got 0"),
        (lambda: LearnedDecay()(2), "no parameters yet"),
        (lambda: LinearAttention(8, 2, decay=LearnedDecay(3)), "learned for 3 heads, got 2"),
        (lambda: LinearAttention(8, 2, decay=RetNetDecay(), causal=False), "for causal attention, got causal=False"),
        (lambda: LinearAttention(8, 2, rotary=XPos(), causal=False), "for causal attention, got causal=False"),
        (lambda: LinearAttention(8, 2, rotary=XPos(), rotary_placement="before"), "XPos decays with distance"),
        (lambda: SoftmaxAttention(8, 2, rotary=XPos()), "XPos decays with distance"),
        (lambda: LinearAttention(8, 2, decay_placement="none"), "decay_placement must be 'numerator' or 'both', got 'none'"),
        (lambda: XPos(scale_base=0.0), "scale_base must be positive, got 0.0"),
        (lambda: XPos(gamma=-1.0), "gamma must be positive, got -1.0"),
        (lambda: attend(*inputs_of(), log_decay=torch.zeros(2), placement="both"), r"log_decay must be \(h,\) = \(3,\), got \(2,\)"),
        (lambda: attend(*inputs_of(), log_decay=LOG_DECAY, placement="all"), "decay_placement must be"),
        (lambda: attend(*inputs_of(), log_decay=-LOG_DECAY, placement="both"), "log_decay must be finite and at most 0"),
        (lambda: attend(*inputs_of(), log_decay=LOG_DECAY - torch.inf, placement="both"), "log_decay must be finite"),
        (lambda: LinearAttention(8, 2, decay=0.9), "decay must be a linrope.Decay or None, got 0.9"),
        (lambda: LinearAttention(8, 2, decay=RetNetDecay), "decay must be a linrope.Decay or None, got <class"),
        (
            lambda: stream_linear_attention(*inputs_of()[:3], query_positions=torch.arange(N) / 2),
            "a state's position is a whole number, so key_positions must be, got torch.float32",
        ),
        (lambda: attend(*inputs_of(), log_decay=LOG_DECAY, placement="both", causal=False), "is for causal attention"),
        (lambda: attend(*inputs_of(), rotary=XPos(), placement="both", causal=False), "is for causal attention"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()

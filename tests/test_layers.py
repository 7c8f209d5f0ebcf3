import math
from functools import partial

import pytest
import torch
from torch import nn

from linrope import EluPlusOne, FavorPlus, FeatureMap, LinearAttention, Rotary, SoftmaxAttention, Taylor
from tests.cases import (
    CHUNK_SIZES,
    CORE,
    DIVIDED,
    MAPS,
    PATHS,
    PLACEMENTS,
    attention_options,
    close,
    epsilon_of,
    log_split,
    mostly_slow,
    normalizer_of,
    paths_and_maps,
    peaked_truth,
    randn,
    relative_rms,
    truth,
    turn,
)

B, N, D_MODEL, HEADS = 2, 13, 12, 3
HEAD_DIM = D_MODEL // HEADS


class LearnedMap(FeatureMap):
    """A user's map with parameters, which must be trained through."""

    is_positive = True

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim, self.num_features = head_dim, 7
        self.weight = nn.Linear(head_dim, 7)

    def map_query(self, query):
        return self.weight(query).exp()

    def map_key(self, key):
        return self.weight(key).exp()


LAYER_MAPS = {**MAPS, "LearnedMap": LearnedMap}

every_map = pytest.mark.parametrize("name", mostly_slow(LAYER_MAPS))
every_path_and_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(PATHS, LAYER_MAPS))
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
both_kinds = pytest.mark.parametrize("kind", ["linear", "softmax"])


def make_layer(name, placement="none", dtype=torch.float64, **options):
    of_map = attention_options(name if name in MAPS else "EluPlusOne", placement) | {"feature_map": LAYER_MAPS[name]}
    return LinearAttention(D_MODEL, HEADS, **of_map, **options).to(dtype)


def make_softmax(placement="none", dtype=torch.float64, **options):
    return SoftmaxAttention(D_MODEL, HEADS, rotary=None if placement == "none" else Rotary(), **options).to(dtype)


def make(kind, placement, **options):
    if kind == "softmax":
        return make_softmax(placement, **options)
    return make_layer("FavorPlus-16" if kind == "linear" else kind, placement, **options)


def heads(linear, x, num_heads=HEADS):
    """Head i is slice i of the projection: (b, h, n, d)."""
    y = x @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    return torch.stack(y.chunk(num_heads, dim=-1), dim=1)


def join(layer, heads_out):
    y = torch.cat(heads_out.unbind(1), dim=-1)
    return y @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


def by_hand(layer, x, context=None, *, placement="none", positions=None, context_positions=None, **options):
    """The layer as REF writes it, from its own weights."""
    context_given = context is not None
    context = context if context_given else x
    query, key, value = heads(layer.query, x), heads(layer.key, context), heads(layer.value, context)
    positions = torch.arange(x.shape[1]) if positions is None else positions
    if context_positions is None:
        context_positions = torch.arange(context.shape[1]) if context_given else positions
    options.update(causal=layer.causal, query_positions=positions, key_positions=context_positions)
    if placement == "before":
        query, key = turn(query, positions), turn(key, context_positions)
    rotate = turn if placement == "numerator" else None
    where = ((positions,), (context_positions,)) if layer.feature_map.uses_positions else ((), ())
    mapped = layer.feature_map.map_query(query, *where[0]), layer.feature_map.map_key(key, *where[1])
    options |= {"normalizer": layer.kernel.normalizer, "epsilon": epsilon_of(layer.feature_map)}
    return join(layer, truth(*mapped, value, rotate=rotate, **options).output)


def softmax_by_hand(layer, x, context=None, *, rotated=False, key_mask=None, positions=None):
    context = x if context is None else context
    query, key, value = heads(layer.query, x), heads(layer.key, context), heads(layer.value, context)
    n, s = query.shape[2], key.shape[2]
    if rotated:
        positions = torch.arange(n) if positions is None else positions
        query, key = turn(query, positions), turn(key, positions if context is x else torch.arange(s))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    allowed = torch.ones(x.shape[0], 1, n, s, dtype=torch.bool)
    if layer.causal:
        allowed = allowed & (torch.arange(s) <= torch.arange(n)[:, None])
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    weight = scores.exp() * allowed
    total = weight.sum(-1, keepdim=True)
    return join(layer, (weight / torch.where(total == 0, 1.0, total)) @ value)


# The formula.


@every_path_and_map
@every_placement
def test_a_layer_is_the_formula(path, name, placement):
    layer = make_layer(name, placement, causal=path.causal, **path.options)
    x = randn(B, N, D_MODEL, grad=True)
    output, expected = layer(x), by_hand(layer, x, placement=placement)
    close(output, expected, 1e-10)
    inputs, cotangent = (x, *layer.parameters()), randn(B, N, D_MODEL)
    for grad, exact in zip(*(torch.autograd.grad(o, inputs, cotangent) for o in (output, expected)), strict=True):
        close(grad, exact, 1e-9)


@every_map
@every_placement
@causal_or_not
@pytest.mark.parametrize("batched", [False, True])
def test_positions_and_masks_of_a_layer(name, placement, causal, batched):
    layer, x = make_layer(name, placement, causal=causal), randn(B, N, D_MODEL)
    positions = torch.randint(0, 1000, (B, N) if batched else (N,))
    mask = torch.rand(B, N) < 0.6
    mask[1] = False
    output = layer(x, key_mask=mask, positions=positions)
    close(output, by_hand(layer, x, placement=placement, key_mask=mask, positions=positions), 1e-10)
    assert (output[1] == 0).all()


@every_map
@every_placement
@pytest.mark.parametrize("s", [1, 5, 29])
def test_cross_attention_of_different_lengths(name, placement, s):
    layer = make_layer(name, placement, causal=False)
    x, context = randn(B, N, D_MODEL), randn(B, s, D_MODEL)
    mask = torch.rand(B, s) < 0.6
    mask[:, 0] = True
    close(layer(x, context), by_hand(layer, x, context, placement=placement), 1e-10)
    output = layer(x, context, key_mask=mask)
    close(output, by_hand(layer, x, context, placement=placement, key_mask=mask), 1e-10)
    positions = {"positions": torch.arange(N) + 7, "context_positions": torch.randint(0, 99, (B, s))}
    output = layer(x, context, **positions)
    close(output, by_hand(layer, x, context, placement=placement, **positions), 1e-10)


@every_map
@every_placement
def test_causal_attention_to_a_context_of_the_same_length(name, placement):
    layer = make_layer(name, placement)
    x, context = randn(B, N, D_MODEL), randn(B, N, D_MODEL)
    close(layer(x, context), by_hand(layer, x, context, placement=placement), 1e-10)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("name", ["FavorPlus-16", "Taylor"])
def test_settings_of_the_rotation_reach_the_numerator(pairing, fraction, name):
    rotary = Rotary(base=50.0, fraction=fraction, pairing=pairing)
    layer = LinearAttention(D_MODEL, HEADS, feature_map=LAYER_MAPS[name], rotary=rotary).double()
    width = {("FavorPlus-16", 0.5): 8, ("FavorPlus-16", 1.0): 16, ("Taylor", 0.5): 8, ("Taylor", 1.0): 14}
    rotate = partial(turn, base=50.0, pairing=pairing, width=width[name, fraction])
    x = randn(B, N, D_MODEL)
    query, key, value = (heads(linear, x) for linear in (layer.query, layer.key, layer.value))
    query, key = layer.feature_map.map_query(query), layer.feature_map.map_key(key)
    close(layer(x), join(layer, truth(query, key, value, rotate=rotate).output), 1e-10)


@every_placement
def test_a_map_of_odd_width_passes_its_last_feature_through(placement):
    assert Taylor(HEAD_DIM).num_features == 15
    layer, x = make_layer("Taylor", placement), randn(B, N, D_MODEL)
    query, key, value = (heads(linear, x) for linear in (layer.query, layer.key, layer.value))
    if placement == "before":
        query, key = turn(query, torch.arange(N)), turn(key, torch.arange(N))
    query, key = Taylor(4).map_query(query), Taylor(4).map_key(key)

    def first_fourteen(features, positions):
        return torch.cat((turn(features[..., :14], positions), features[..., 14:]), -1)

    rotate = first_fourteen if placement == "numerator" else None
    close(layer(x), join(layer, truth(query, key, value, rotate=rotate).output), 1e-10)


@both_kinds
def test_biases_are_used(kind):
    layer, x = make(kind, "none", bias=True), randn(B, N, D_MODEL)
    assert sum(name.endswith("bias") for name, _ in layer.named_parameters()) == 4
    close(layer(x), by_hand(layer, x) if kind == "linear" else softmax_by_hand(layer, x), 1e-10)


@pytest.mark.parametrize("rotated", [False, True])
@causal_or_not
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_attention_is_the_formula(rotated, causal, masked):
    layer = make_softmax("before" if rotated else "none", causal=causal)
    x = randn(B, N, D_MODEL, grad=True)
    mask = None
    if masked:
        mask = torch.rand(B, N) < 0.6
        mask[1] = False
    positions = torch.randint(0, 1000, (B, N))
    output = layer(x, key_mask=mask, positions=positions)
    expected = softmax_by_hand(layer, x, rotated=rotated, key_mask=mask, positions=positions)
    close(output, expected, 1e-10)
    inputs, cotangent = (x, *layer.parameters()), randn(B, N, D_MODEL)
    for grad, exact in zip(*(torch.autograd.grad(o, inputs, cotangent) for o in (output, expected)), strict=True):
        close(grad, exact, 1e-9)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("s", [1, 5, 29])
def test_softmax_cross_attention(rotated, s):
    layer = make_softmax("before" if rotated else "none", causal=False)
    x, context = randn(B, N, D_MODEL), randn(B, s, D_MODEL)
    close(layer(x, context), softmax_by_hand(layer, x, context, rotated=rotated), 1e-10)


def test_favor_attention_approaches_softmax_attention():
    """Many features of the softmax kernel and the same weights make the same layer."""
    num_features = 20_000
    exact = SoftmaxAttention(16, 2).double()
    layer = LinearAttention(16, 2, feature_map=partial(FavorPlus, num_features=num_features)).double()
    layer.load_state_dict(
        {**exact.state_dict(), "kernel.feature_map.projection.rows": layer.feature_map.projection.rows}
    )
    x = randn(2, 40, 16) / 2
    query, key, value = (heads(linear, x, 2) for linear in (exact.query, exact.key, exact.value))
    length = ((query[:, :, :, None] + key[:, :, None]) / 8**0.25).square().sum(-1)
    # Relative variance of a weight (Choromanski et al. 2021, lemma 2, over the kernel squared).
    deviation = (length.amax().exp() / num_features).sqrt()
    error, softmax = layer(x) - exact(x), exact(x)
    assert deviation < 0.1
    assert error.abs().max() < deviation * value.abs().max() * exact.out.weight.abs().sum(-1).max()
    assert relative_rms(layer(x), softmax) < deviation


# C1.


@pytest.mark.parametrize("kind", mostly_slow([*LAYER_MAPS, "softmax"]))
@every_placement
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_later_keys_and_values_do_not_exist(kind, placement, dtype, chunk_size):
    n = 8
    options = {} if kind == "softmax" else {"chunk_size": chunk_size}
    layer = make(kind, placement, dtype=dtype, **options)
    x = randn(B, n, D_MODEL, dtype=dtype)
    output = layer(x)
    for t in range(n - 1):
        caught = {}

        def louder(linear, _, keys, t=t, caught=caught):
            caught["key"] = torch.cat((keys[:, : t + 1], 30 * keys[:, t + 1 :]), 1).detach().requires_grad_()
            return caught["key"]

        def sevens(linear, _, values, t=t, caught=caught):
            caught["value"] = torch.cat((values[:, : t + 1], 0 * values[:, t + 1 :] + 7), 1).detach().requires_grad_()
            return caught["value"]

        hooks = layer.key.register_forward_hook(louder), layer.value.register_forward_hook(sevens)
        changed = layer(x)
        for hook in hooks:
            hook.remove()
        assert torch.equal(changed[:, : t + 1], output[:, : t + 1])
        grads = torch.autograd.grad(changed[:, t].sum(), (caught["key"], caught["value"]))
        for grad in grads:
            assert (grad[:, t + 1 :] == 0).all()
        assert (grads[1][:, : t + 1] != 0).any()


@pytest.mark.parametrize("kind", mostly_slow([*LAYER_MAPS, "softmax"]))
@every_placement
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_do_not_exist(kind, placement, dtype):
    layer = make(kind, placement, dtype=dtype)
    x = randn(B, 8, D_MODEL, dtype=dtype)
    output = layer(x)
    for t in range(7):
        later = x.clone()
        later[:, t + 1 :] *= 30
        later.requires_grad_()
        changed = layer(later)
        assert torch.equal(changed[:, : t + 1], output[:, : t + 1])
        (grad,) = torch.autograd.grad(changed[:, t].sum(), later)
        assert (grad[:, t + 1 :] == 0).all()
        assert (grad[:, t] != 0).any()


# C5.

PAD_LAYOUTS = {"right": range(8), "left": range(8, 16), "interior": (0, 1, 2, 5, 6, 11, 12, 15)}


@pytest.mark.parametrize("kind", mostly_slow([*LAYER_MAPS, "softmax"]))
@every_placement
@causal_or_not
@pytest.mark.parametrize("layout", PAD_LAYOUTS)
@pytest.mark.parametrize("b", [1, 2])
def test_pads_do_not_exist(kind, placement, causal, layout, b):
    layer = make(kind, placement, causal=causal)
    real = list(PAD_LAYOUTS[layout])
    mask = torch.zeros(b, 16, dtype=torch.bool)
    mask[:, real] = True
    tokens = randn(b, 8, D_MODEL)
    padded = torch.full((b, 16, D_MODEL), 1e4, dtype=torch.float64)
    if kind == "LearnedMap":
        padded.fill_(10.0)  # exp of thousands is infinite: such a map says so itself
    padded[:, real] = tokens
    tokens.requires_grad_()
    padded.requires_grad_()
    expected = layer(tokens, positions=torch.tensor(real))
    output = layer(padded, key_mask=mask)[:, real]
    close(output, expected, 1e-10)
    cotangent = randn(*expected.shape)
    weights = list(layer.parameters())
    grad, *weight_grads = torch.autograd.grad(output, [padded, *weights], cotangent)
    exact, *exact_weight_grads = torch.autograd.grad(expected, [tokens, *weights], cotangent)
    close(grad[:, real], exact, 1e-9)
    assert (grad[:, ~mask[0]] == 0).all()
    for found, wanted in zip(weight_grads, exact_weight_grads, strict=True):
        close(found, wanted, 1e-9)


@both_kinds
@every_placement
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_pads_alone_gives_zero(kind, placement, causal, dtype):
    layer = make(kind, placement, causal=causal, dtype=dtype)
    x = randn(2, 9, D_MODEL, dtype=dtype, grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    output = layer(x, key_mask=mask)
    assert (output[0] == 0).all()
    close(output[1], layer(x)[1], 1e-10 if dtype == torch.float64 else 1e-5)
    grads = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
    assert (grads[0][0] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


# C7.


@pytest.mark.parametrize("name", mostly_slow(MAPS))
@pytest.mark.parametrize("placement", ["none", "before"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "autocast"])
@pytest.mark.parametrize("scale", [1, 10, 30])
def test_low_precision_and_large_inputs(name, placement, precision, scale):
    n, head_dim = 4096, 16
    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
    layer = LinearAttention(head_dim, 1, **attention_options(name, placement)).to(dtype)
    with torch.no_grad():  # queries and keys as large as the inputs
        for linear in (layer.query, layer.key, layer.value):
            linear.weight.copy_(torch.linalg.qr(torch.randn(head_dim, head_dim))[0])
    x = (scale * randn(1, n, head_dim)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        projected = [linear(x).detach()[:, None] for linear in (layer.query, layer.key, layer.value)]
        output = layer(x)
    assert output.dtype == projected[0].dtype
    assert precision == "autocast" or output.dtype == dtype
    query, key, value = (y.double() for y in projected)
    if placement == "before":
        query, key = (turn(y, torch.arange(n)).to(projected[0].dtype).double() for y in (query, key))
    query, key, log_scale = log_split(layer.feature_map, query, key)
    how = {"normalizer": normalizer_of(layer.feature_map), "epsilon": epsilon_of(layer.feature_map)}
    exact = peaked_truth(query, key, value, log_scale, **how).output[:, 0]
    exact = exact @ layer.out.weight.detach().double().T
    assert output.isfinite().all()
    assert relative_rms(output, exact) < 2e-2
    for grad in torch.autograd.grad(output, (x, *layer.parameters()), randn(*output.shape).to(output.dtype)):
        assert grad.isfinite().all()


# C10.


@pytest.mark.parametrize("kind", mostly_slow([*LAYER_MAPS, "softmax"]))
@every_placement
@causal_or_not
def test_items_are_alone(kind, placement, causal):
    layer = make(kind, placement, causal=causal)
    x = randn(3, N, D_MODEL)
    if kind == "LearnedMap":
        x = x / 10  # exp of a hundred times that stays finite
    for i in range(3):
        loud = 100 * x
        loud[i] = x[i]
        close(layer(loud)[i : i + 1], layer(x[i : i + 1]), 1e-11)


@pytest.mark.parametrize("kind", mostly_slow([*LAYER_MAPS, "softmax"]))
@every_placement
def test_heads_are_alone(kind, placement):
    layer = make(kind, placement)
    x = randn(B, N, D_MODEL)
    layer.out = nn.Identity()
    output = layer(x).chunk(HEADS, -1)
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value):
            linear.weight[:HEAD_DIM] += randn(HEAD_DIM, D_MODEL)
            linear.weight[2 * HEAD_DIM :] += randn(HEAD_DIM, D_MODEL)
    changed = layer(x).chunk(HEADS, -1)
    close(changed[1], output[1], 1e-12)
    assert not torch.allclose(changed[0], output[0])


COMPILED = [
    *(
        pytest.param("eager", name, "numerator", n, id=f"{name}-{n}", marks=[] if name in CORE else pytest.mark.slow)
        for name in MAPS
        for n in (33, 65)
    ),
    pytest.param("aot_eager", "FavorPlus-16", "before", 65, id="aot-before-65"),
    pytest.param("aot_eager", "FavorPlus-16", "numerator", 33, id="aot-numerator-33"),
    pytest.param("inductor", "FavorPlus-16", "numerator", 33, id="inductor-33", marks=pytest.mark.slow),
    pytest.param("inductor", "FavorPlus-16", "numerator", 65, id="inductor-65", marks=pytest.mark.slow),
    pytest.param("inductor", "EluPlusOne", "numerator", 33, id="inductor-elu-33", marks=pytest.mark.slow),
    pytest.param("inductor", "EluPlusOne", "numerator", 65, id="inductor-elu-65", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "name", "placement", "n"), COMPILED)
def test_compiled_equals_eager(backend, name, placement, n):
    torch.compiler.reset()
    layer = make_layer(name, placement, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = randn(B, n, D_MODEL, dtype=torch.float32, grad=True)
    inputs = (x, *layer.parameters())
    output, expected = compiled(x), layer(x)
    close(output, expected, 1e-5)
    grads, exact = (torch.autograd.grad(o.square().sum(), inputs) for o in (output, expected))
    for grad, wanted in zip(grads, exact, strict=True):
        close(grad, wanted, 1e-4)


@pytest.mark.slow
@both_kinds
def test_compiled_once_for_lengths_that_change(kind):
    torch.compiler.reset()
    layer = make(kind, "numerator", dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for n in (33, 65, 34):
        x = randn(B, n, D_MODEL, dtype=torch.float32)
        close(compiled(x), layer(x), 1e-5)


# Errors and extremes.


@both_kinds
def test_causal_attention_to_another_length_is_refused(kind):
    with pytest.raises(ValueError, match="5 keys and 7 queries"):
        make(kind, "none")(randn(B, 7, D_MODEL), randn(B, 5, D_MODEL))


@both_kinds
@pytest.mark.parametrize("mask", [torch.ones(B, 6).bool(), torch.ones(B, 7), torch.ones(B, HEADS, 7).bool()])
def test_a_wrong_mask_is_refused(kind, mask):
    layer = make(kind, "none")
    for call in (layer, layer.stream):
        with pytest.raises(ValueError, match=r"key_mask must be bool.*\(2, 7\).*got"):
            call(randn(B, 7, D_MODEL), key_mask=mask)


@both_kinds
def test_a_wrong_width_is_refused(kind):
    with pytest.raises(ValueError, match=r"x must be.*d_model = 12, got \(2, 7, 11\)"):
        make(kind, "none")(randn(B, 7, 11))
    with pytest.raises(ValueError, match=r"context must be.*d_model = 12, got \(7, 12\)"):
        make(kind, "none")(randn(B, 7, 12), randn(7, 12))


@both_kinds
@pytest.mark.parametrize("placement", ["numerator", "before"])
def test_wrong_positions_are_refused(kind, placement):
    with pytest.raises(ValueError, match=r"positions must be.*7.*got \(8,\)"):
        make(kind, placement)(randn(B, 7, D_MODEL), positions=torch.arange(8))


@pytest.mark.parametrize("make_class", [LinearAttention, SoftmaxAttention])
@pytest.mark.parametrize("num_heads", [0, 5])
def test_heads_that_do_not_divide_are_refused(make_class, num_heads):
    with pytest.raises(ValueError, match=f"num_heads={num_heads} and d_model=12"):
        make_class(12, num_heads)


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="'numerator' or 'before', got 'after'"):
        LinearAttention(12, 3, rotary_placement="after")


@pytest.mark.parametrize("name", [name for name in MAPS if name not in DIVIDED])
def test_a_division_by_what_can_be_zero_is_refused(name):
    message = r"kernel of \w+ can be 0 or negative.*pass normalizer='rms' or None, or give the map a floor"
    with pytest.raises(ValueError, match=message):
        LinearAttention(12, 3, feature_map=MAPS[name])
    x = randn(2, 5, 12)
    for normalizer in ("rms", None):
        layer = LinearAttention(12, 3, feature_map=MAPS[name], normalizer=normalizer).double()
        close(layer(x), by_hand(layer, x), 1e-10)


@pytest.mark.parametrize("name", mostly_slow(MAPS))
@pytest.mark.parametrize("normalizer", ["rms", None])
@every_placement
def test_every_map_goes_undivided(name, normalizer, placement):
    layer = LinearAttention(D_MODEL, HEADS, **attention_options(name, placement) | {"normalizer": normalizer}).double()
    x = randn(B, N, D_MODEL)
    close(layer(x), by_hand(layer, x, placement=placement), 1e-10)


def test_an_unknown_normalizer_is_refused():
    with pytest.raises(ValueError, match="'features', 'rms' or None, got 'sum'"):
        LinearAttention(12, 3, normalizer="sum")


def test_a_rotation_of_no_pair_is_refused():
    with pytest.raises(ValueError, match="at least one pair, got 1"):
        LinearAttention(3, 3, rotary=Rotary())


@both_kinds
def test_a_state_of_another_batch_is_refused(kind):
    layer = make(kind, "numerator")
    state = layer.stream(randn(3, 2, D_MODEL))[1]
    with pytest.raises(ValueError, match="state is of 3 rows, x of 2"):
        layer.stream(randn(2, 1, D_MODEL), state)


@both_kinds
@every_placement
@causal_or_not
@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token(kind, placement, causal, n):
    layer, x = make(kind, placement, causal=causal), randn(B, n, D_MODEL)
    output = layer(x)
    assert output.shape == (B, n, D_MODEL)
    close(output, join(layer, heads(layer.value, x)), 1e-12)


@both_kinds
def test_one_head_of_one_pair(kind):
    layer = (LinearAttention if kind == "linear" else SoftmaxAttention)(2, 1, rotary=Rotary()).double()
    x = randn(B, N, 2)
    query, key, value = (heads(linear, x, 1) for linear in (layer.query, layer.key, layer.value))
    if kind == "linear":
        expected = truth(*(nn.functional.elu(y) + 1 for y in (query, key)), value, rotate=turn).output
        return close(layer(x), join(layer, expected), 1e-10)
    query, key = turn(query, torch.arange(N)), turn(key, torch.arange(N))
    scores = (query @ key.mT / math.sqrt(2)).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    return close(layer(x), join(layer, scores.softmax(-1) @ value), 1e-10)


def test_the_default_is_elu_plus_one_without_rotation():
    layer = LinearAttention(D_MODEL, HEADS)
    assert isinstance(layer.feature_map, EluPlusOne)
    assert layer.rotary is None
    assert layer.causal


@both_kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_the_input(kind, dtype):
    layer, x = make(kind, "numerator", dtype=dtype), randn(B, N, D_MODEL, dtype=dtype)
    assert layer(x).dtype == layer.stream(x)[0].dtype == dtype


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_the_chunk_size_changes_nothing(chunk_size):
    layer, x = make_layer("FavorPlus-16", "numerator", chunk_size=chunk_size), randn(B, 70, D_MODEL)
    close(layer(x), by_hand(layer, x, placement="numerator"), 1e-10)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_no_tokens_leave_a_state_that_goes_on(kind):
    layer = (LinearAttention if kind == "linear" else SoftmaxAttention)(8, 2).double()
    x = randn(2, 5, 8)
    _, state = layer.stream(x[:, :0])
    assert torch.equal(state.position, torch.zeros(2, dtype=torch.long))
    first, state = layer.stream(x[:, :3], state)
    _, state = layer.stream(x[:, 3:3], state)
    rest, state = layer.stream(x[:, 3:], state)
    close(torch.cat((first, rest), dim=1), layer(x), 1e-12)
    assert torch.equal(state.position, torch.full((2,), 5))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_layer_on_the_meta_device_gives_shapes_and_then_loads(kind):
    build = partial(LinearAttention, feature_map=FavorPlus) if kind == "linear" else SoftmaxAttention
    layer = build(8, 2, rotary=Rotary())
    with torch.device("meta"):
        blank = build(8, 2, rotary=Rotary())
    assert blank(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    blank.to_empty(device="cpu").load_state_dict(layer.state_dict(), strict=True)
    x = randn(2, 3, 8, dtype=torch.float32)
    assert torch.equal(blank(x), layer(x))

"""Position biases of softmax attention: their formulas, and what layers promise with them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from einops import rearrange
from torch import nn

from linrope import (
    ALiBi,
    ByteTransformer,
    KeyValueState,
    LinearAttention,
    PositionBias,
    Rotary,
    SoftmaxAttention,
    T5Bias,
)
from linrope.diagnostics import attention_weights, diagnose
from linrope.distillation import fit_to_softmax
from linrope.layers.position_bias import alibi_slopes
from tests.cases import MAPS, POSITION_BIASES, close, make_bias, randn, relative_rms, turn

B, N, D_MODEL, HEADS = 2, 13, 12, 3

every_bias = pytest.mark.parametrize("name", POSITION_BIASES)
rotated_or_not = pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])


def make(name, *, rotated=False, causal=True, dtype=torch.float64, heads=HEADS, d_model=D_MODEL):
    rotary = Rotary() if rotated else None
    layer = SoftmaxAttention(d_model, heads, rotary=rotary, causal=causal, position_bias=make_bias(name, heads))
    return layer.to(dtype)


def true_bias(bias, query_positions, key_positions):
    """Head by head and pair by pair, from the papers' formulas; (b, h, n, s), one b for positions of all rows."""
    at, of = (p if p.ndim == 2 else p[None] for p in (query_positions, key_positions))
    before = [[[t - s for s in of_row] for t in row] for row, of_row in zip(at.tolist(), of.tolist(), strict=True)]
    distances = sorted({d for row in before for part in row for d in part})
    entries = torch.stack([entry(bias, d) for d in distances])
    places = {d: i for i, d in enumerate(distances)}
    index = torch.tensor([[[places[d] for d in part] for part in row] for row in before])
    return rearrange(entries[index], "b n s h -> b h n s")


def entry(bias, before):
    """What is added for a key so many tokens before its query, for each head."""
    if isinstance(bias, ALiBi):
        return torch.tensor([-slope * abs(before) for slope in true_slopes(bias.num_heads)], dtype=torch.float64)
    return bias.table.weight[true_bucket(before, bias.num_buckets, bias.max_distance, bias.bidirectional)]


def true_slopes(h):
    """A geometric sequence from 2^(-8/p) with that ratio for p heads, and between its numbers for further ones."""
    p = 2 ** math.floor(math.log2(h))
    return [2.0 ** (-8 * (i + 1) / p) for i in range(p)] + [2.0 ** (-4 * (2 * i + 1) / p) for i in range(h - p)]


def true_bucket(before, num_buckets, max_distance, bidirectional):
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if before < 0 else 0
    distance = abs(before) if bidirectional else max(before, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    wide = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + min(exact + math.floor(wide + 1e-9), num_buckets - 1)


def weights_by_hand(layer, x, context=None, *, key_mask=None, positions=None, context_positions=None):
    """softmax(q·k/√d + bias), explicitly."""
    own = context is None
    context = x if own else context
    n, s = x.shape[1], context.shape[1]
    positions = torch.arange(n) if positions is None else positions
    if context_positions is None:
        context_positions = positions if own else torch.arange(s)
    query, key = heads(layer, layer.query, x), heads(layer, layer.key, context)
    if layer.rotary is not None:
        query, key = turn(query, positions), turn(key, context_positions)
    rows = [p.expand(x.shape[0], -1) for p in (positions, context_positions)]  # each may be (n,) or (b, n)
    scores = query @ key.mT / math.sqrt(query.shape[-1]) + true_bias(layer.position_bias, *rows)
    allowed = torch.ones(x.shape[0], 1, n, s, dtype=torch.bool)
    if layer.causal:
        allowed = allowed & (torch.arange(s) <= torch.arange(n)[:, None])
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).masked_fill(~allowed, 0.0)


def heads(layer, linear, x):
    return rearrange(x @ linear.weight.T, "b n (h d) -> b h n d", h=layer.num_heads)


def by_hand(layer, x, context=None, **options):
    """The layer's output from its weights; 0 where there is nothing to attend to."""
    value = heads(layer, layer.value, x if context is None else context)
    output = weights_by_hand(layer, x, context, **options) @ value
    return rearrange(output, "b h n e -> b n (h e)") @ layer.out.weight.T


# The biases.


def test_slopes_are_the_papers():
    """Press et al., section 3: 1/2 … 1/2^8 for 8 heads; for 16, 1/2^0.5, 1/2^1, … 1/2^8."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)], rel=1e-15)
    for h in range(1, 40):
        assert alibi_slopes(h) == pytest.approx(true_slopes(h), rel=1e-15)
        assert len(set(alibi_slopes(h))) == h


@pytest.mark.parametrize("h", [1, 3, 4, 12, 16, 25])
def test_alibi_is_blooms(h):
    """Bloom adds slope times the key's position, the same up to what all keys of a query share."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, N), h, torch.float64).reshape(1, h, 1, N)
    ours = ALiBi(h)(torch.arange(N), torch.arange(N), torch.float64)
    past = torch.ones(N, N).tril().bool()
    close((ours - ours[..., :1]).masked_fill(~past, 0), (theirs - theirs[..., :1]).masked_fill(~past, 0), 1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (6, 7), (64, 1000), (4, 2**20)])
def test_buckets_are_the_formula(bidirectional, num_buckets, max_distance):
    bias = T5Bias(2, num_buckets, max_distance, bidirectional)
    far = torch.tensor([2**16, 2**20 - 1, 2**20, 2**40])
    before = torch.cat((torch.arange(-1100, 1100), far, -far))
    expected = [true_bucket(d, num_buckets, max_distance, bidirectional) for d in before.tolist()]
    assert bias.bucket(before).tolist() == expected
    assert max(expected) == num_buckets - 1


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 256), (16, 50)])
def test_t5s_bias_is_transformers(bidirectional, num_buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(
        d_model=8,
        d_kv=4,
        num_heads=HEADS,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(HEADS, num_buckets, max_distance, bidirectional)
    ours.table.load_state_dict(theirs.relative_attention_bias.state_dict())
    before = torch.arange(-3000, 3000)
    expected = t5.T5Attention._relative_position_bucket(-before, bidirectional, num_buckets, max_distance)
    assert torch.equal(ours.bucket(before), expected)
    assert torch.equal(ours(torch.arange(40), torch.arange(50)), theirs.compute_bias(40, 50))


@every_bias
@pytest.mark.parametrize("h", [1, 3, 4, 12])
def test_a_bias_is_the_formula(name, h):
    bias = make_bias(name, h)
    for shape in ((), (B,)):
        positions = torch.randint(0, 300, (*shape, 5)), torch.randint(0, 300, (*shape, 7))
        found = bias(*positions, torch.float64)
        assert found.shape == (*(shape or (1,)), h, 5, 7)
        close(found, true_bias(bias, *positions), 1e-14)


@every_bias
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("start", [65_536, 2**20, 2**30])
def test_positions_are_exact_far_away(name, dtype, start):
    """Distances are: one token is told from the next at any position, however narrow the parameters."""
    bias = make_bias(name, 4).to(dtype)
    for at, of in (
        (torch.arange(start, start + 9), torch.arange(start, start + 9)),
        (torch.tensor([start, start + 1]), torch.arange(9)),
    ):
        torch.testing.assert_close(bias(at, of).double(), true_bias(bias, at, of).double(), rtol=1e-7, atol=0.0)


def test_the_table_is_trained_through():
    bias = make_bias("T5Bias-few", 2)

    def of(weight):
        positions = torch.arange(9)
        return torch.func.functional_call(bias, {"table.weight": weight}, (positions, positions, torch.float64))

    assert torch.autograd.gradcheck(of, bias.table.weight)


def test_a_table_begins_at_zero_and_draws_nothing():
    torch.manual_seed(0)
    bias = T5Bias(4)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(bias.table.weight, torch.zeros(32, 4))
    assert bias.table.weight.requires_grad


# Layers.


@every_bias
@rotated_or_not
@causal_or_not
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_is_the_formula(name, rotated, causal, masked):
    layer, x = make(name, rotated=rotated, causal=causal), randn(B, N, D_MODEL, grad=True)
    mask = None
    if masked:
        mask = torch.rand(B, N) < 0.6
        mask[1] = False
    for positions in (None, torch.randint(0, 40, (N,)), torch.randint(0, 40, (B, N))):
        output = layer(x, key_mask=mask, positions=positions)
        expected = by_hand(layer, x, key_mask=mask, positions=positions)
        close(output, expected, 1e-10)
        inputs, cotangent = (x, *layer.parameters()), randn(B, N, D_MODEL)
        for grad, exact in zip(*(torch.autograd.grad(o, inputs, cotangent) for o in (output, expected)), strict=True):
            close(grad, exact, 1e-9)


@every_bias
@rotated_or_not
@pytest.mark.parametrize("s", [1, 5, 29])
def test_cross_attention(name, rotated, s):
    layer = make(name, rotated=rotated, causal=False)
    x, context, mask = randn(B, N, D_MODEL), randn(B, s, D_MODEL), torch.rand(B, s) < 0.6
    close(layer(x, context), by_hand(layer, x, context), 1e-10)
    for of in (torch.randint(0, 40, (s,)), torch.randint(0, 40, (B, s))):
        options = {"key_mask": mask, "positions": torch.arange(N) + 7, "context_positions": of}
        close(layer(x, context, **options), by_hand(layer, x, context, **options), 1e-10)


@pytest.mark.parametrize("name", ["T5Bias-few", "T5Bias-bidirectional"])
@causal_or_not
def test_gradients_of_the_table(name, causal):
    layer, x = make(name, causal=causal, heads=2, d_model=4), randn(1, 5, 4)
    table = "position_bias.table.weight"

    def of(weight):
        return torch.func.functional_call(layer, {table: weight}, (x,))

    assert torch.autograd.gradcheck(of, layer.get_parameter(table))


@every_bias
@rotated_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_keys_and_values_do_not_exist(name, rotated, dtype):
    layer, n = make(name, rotated=rotated, dtype=dtype), 8
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
        for grad in torch.autograd.grad(changed[:, t].sum(), (caught["key"], caught["value"])):
            assert (grad[:, t + 1 :] == 0).all()
            assert t == 0 or (grad[:, : t + 1] != 0).any()


@every_bias
@rotated_or_not
@causal_or_not
@pytest.mark.parametrize(
    "real", [range(8), range(8, 16), (0, 1, 2, 5, 6, 11, 12, 15)], ids=["right", "left", "interior"]
)
@pytest.mark.parametrize("b", [1, 2])
def test_pads_do_not_exist(name, rotated, causal, real, b):
    layer, real = make(name, rotated=rotated, causal=causal), list(real)
    mask = torch.zeros(b, 16, dtype=torch.bool)
    mask[:, real] = True
    tokens = randn(b, 8, D_MODEL, grad=True)
    padded = torch.full((b, 16, D_MODEL), 1e4, dtype=torch.float64)
    padded[:, real] = tokens.detach()
    padded.requires_grad_()
    expected = layer(tokens, positions=torch.tensor(real))
    output = layer(padded, key_mask=mask)[:, real]
    close(output, expected, 1e-10)
    cotangent, weights = randn(*expected.shape), list(layer.parameters())
    grad, *weight_grads = torch.autograd.grad(output, [padded, *weights], cotangent)
    exact, *exact_weight_grads = torch.autograd.grad(expected, [tokens, *weights], cotangent)
    close(grad[:, real], exact, 1e-9)
    assert (grad[:, ~mask[0]] == 0).all()
    for found, wanted in zip(weight_grads, exact_weight_grads, strict=True):
        close(found, wanted, 1e-9)


@every_bias
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_of_pads_alone_gives_zero(name, causal, dtype):
    layer = make(name, causal=causal, dtype=dtype)
    x, mask = randn(2, 9, D_MODEL, dtype=dtype, grad=True), torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    output = layer(x, key_mask=mask)
    assert (output[0] == 0).all()
    assert torch.equal(output[1], layer(x, key_mask=torch.ones_like(mask))[1])
    grads = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
    assert (grads[0][0] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@every_bias
@causal_or_not
def test_items_are_alone(name, causal):
    layer, x = make(name, causal=causal), randn(3, N, D_MODEL)
    for i in range(3):
        loud = 100 * x
        loud[i] = x[i]
        close(layer(loud)[i : i + 1], layer(x[i : i + 1]), 1e-11)


@every_bias
@rotated_or_not
@causal_or_not
@pytest.mark.parametrize("shift", [1000, 2**20])
def test_a_shift_of_all_positions_changes_nothing(name, rotated, causal, shift):
    layer, x = make(name, rotated=rotated, causal=causal), randn(B, N, D_MODEL)
    close(layer(x, positions=torch.arange(N) + shift), layer(x), 1e-9)


@pytest.mark.parametrize("n", [33, pytest.param(65, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "T5Bias" else pytest.mark.slow) for name in POSITION_BIASES],
)
def test_compiled_equals_eager(name, n):
    torch.compiler.reset()
    layer, x = make(name, dtype=torch.float32), randn(B, n, D_MODEL, dtype=torch.float32, grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if name == "T5Bias" else "eager")
    inputs = (x, *layer.parameters())
    output, expected = compiled(x), layer(x)
    close(output, expected, 1e-5)
    grads, exact = (torch.autograd.grad(o.square().sum(), inputs) for o in (output, expected))
    for grad, wanted in zip(grads, exact, strict=True):
        close(grad, wanted, 1e-4)


@every_bias
@causal_or_not
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "autocast"])
@pytest.mark.parametrize("apart", [0, 2**20])
def test_low_precision(name, causal, precision, apart):
    """Also of queries far from all keys, where a bias itself is out of float16's range."""
    dtype = torch.float32 if precision == "autocast" else getattr(torch, precision)
    layer, x = make(name, causal=causal, dtype=dtype), randn(B, 65, D_MODEL, dtype=dtype, grad=True)
    exact = make(name, causal=causal)
    exact.load_state_dict(layer.state_dict())
    where = {"positions": torch.arange(65) + apart, "context_positions": torch.arange(65)}
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        output = layer(x, x, **where)
    assert output.dtype == (torch.bfloat16 if precision == "autocast" else dtype)
    assert relative_rms(output, by_hand(exact, x.double(), x.double(), **where)) < 2e-2
    for grad in torch.autograd.grad(output, (x, *layer.parameters()), torch.ones_like(output)):
        assert grad.isfinite().all()


@every_bias
@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token(name, n):
    layer, x = make(name), randn(B, n, D_MODEL)
    expected = x @ layer.value.weight.T @ layer.out.weight.T
    close(layer(x), expected, 1e-12)
    output, state = layer.stream(x)
    close(output, expected, 1e-12)
    assert state.key_positions.tolist() == [list(range(n))] * B


def test_alibi_is_a_decay_of_the_weights():
    """Weights without it times exp(-slope) for each token of distance, normalized again."""
    layer, x = make("ALiBi"), randn(B, N, D_MODEL)
    without = SoftmaxAttention(D_MODEL, HEADS).double()
    without.load_state_dict(layer.state_dict())
    (found,), (plain,) = (attention_weights(which, x).values() for which in (layer, without))
    decay = torch.tensor([math.exp(-slope) for slope in true_slopes(HEADS)], dtype=torch.float64)
    apart = (torch.arange(N)[:, None] - torch.arange(N)).clamp_min(0)
    weights = plain.weights * decay[:, None, None] ** apart
    close(found.weights, weights / weights.sum(-1, keepdim=True), 1e-10)


@every_bias
@rotated_or_not
@causal_or_not
def test_diagnostics_know_the_bias(name, rotated, causal):
    layer, x = make(name, rotated=rotated, causal=causal), randn(B, N, D_MODEL)
    options = {"key_mask": torch.rand(B, N) > 0.3, "positions": torch.randint(0, 40, (B, N))}
    (found,) = attention_weights(layer, x, **options).values()
    value = rearrange(layer.value(x), "b s (h e) -> b h s e", h=HEADS)
    output = layer.out(rearrange(found.weights @ value, "b h n e -> b n (h e)"))
    close(output, by_hand(layer, x, **options), 1e-10)
    assert diagnose(layer, x)[""].softmax_error.abs().max() == 0
    if causal:
        (cut,) = attention_weights(layer, x, max_tokens=4, **options).values()
        close(cut.weights, found.weights[:, :, :4, :4], 1e-12)


def test_distillation_knows_the_bias():
    """The first loss is the cross-entropy of the student's own weights to those of the teacher, by hand."""
    teacher = make("T5Bias-few", rotated=True)
    student = LinearAttention(D_MODEL, HEADS, feature_map=MAPS["Hedgehog"]).double()
    x = randn(B, N, D_MODEL)
    fit_to_softmax(student, teacher, [])  # the projections alone
    (own,) = attention_weights(student, x).values()
    expected = -(weights_by_hand(teacher, x) * own.weights.masked_fill(~own.attended, 1.0).log()).sum(-1).mean()
    assert fit_to_softmax(student, teacher, [x])[0] == pytest.approx(expected.item(), rel=1e-10)


class Window(PositionBias):
    """A user's bias: nothing three tokens away or more is attended to, and by the first head nothing at all."""

    num_heads = HEADS

    def forward(self, query_positions, key_positions, dtype=torch.float32):
        far = (query_positions[..., :, None] - key_positions[..., None, :]).abs() > 2
        bias = torch.zeros(far.shape, dtype=dtype).masked_fill(far, -torch.inf).view(-1, 1, *far.shape[-2:])
        return torch.cat((torch.full_like(bias, -torch.inf), bias.expand(-1, HEADS - 1, -1, -1)), 1)


@causal_or_not
@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_may_forbid_keys(causal, masked):
    layer = SoftmaxAttention(D_MODEL, HEADS, causal=causal, position_bias=Window()).double()
    x, mask = randn(B, N, D_MODEL, grad=True), torch.ones(B, N, dtype=torch.bool)
    if masked:
        mask[0, 3:10] = False  # of the query at 6 nothing is left
    query, key, value = (heads(layer, linear, x) for linear in (layer.query, layer.key, layer.value))
    apart = torch.arange(N)[:, None] - torch.arange(N)
    near = ((apart <= 2) & (apart >= (0 if causal else -2)))[None] & mask[:, None]
    weight = (query @ key.mT / math.sqrt(D_MODEL / HEADS)).exp() * near[:, None]
    weight[:, 0] = 0.0
    total = weight.sum(-1, keepdim=True)
    expected = (weight / total.masked_fill(total == 0, 1.0)) @ value
    expected = layer.out(rearrange(expected, "b h n e -> b n (h e)"))
    output = layer(x, key_mask=mask if masked else None)
    close(output, expected, 1e-10)
    close(*(torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (output, expected)), 1e-9)
    if causal:
        first, state = layer.stream(x[:, :5], key_mask=mask[:, :5])
        rest, _ = layer.stream(x[:, 5:], state, key_mask=mask[:, 5:])
        close(torch.cat((first, rest), 1), expected, 1e-10)


# Models.


@every_bias
@pytest.mark.parametrize("shared", [False, True])
def test_layers_share_one_object(name, shared):
    bias = make_bias(name, 2)
    own = partial(SoftmaxAttention, num_heads=2)
    make_attention = partial(own, position_bias=bias) if shared else lambda d: own(d, position_bias=make_bias(name, 2))
    model = ByteTransformer(num_layers=2, d_model=8, attention=make_attention).double()
    tables = [n for n, _ in model.named_parameters() if "table" in n]
    assert len(tables) == (0 if name == "ALiBi" else 1 if shared else 2)
    assert (model.blocks[0].attention.position_bias is model.blocks[1].attention.position_bias) == shared
    tokens = torch.randint(256, (B, N))
    first, states = model.stream(tokens[:, :5])
    rest, _ = model.stream(tokens[:, 5:], states)
    close(torch.cat((first, rest), 1), model(tokens), 1e-10)
    twin = ByteTransformer(num_layers=2, d_model=8, attention=make_attention).double()
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(twin(tokens), model(tokens))


@every_bias
def test_a_layer_on_the_meta_device_then_loads(name):
    layer = make(name, dtype=torch.float32)
    with torch.device("meta"):
        blank = SoftmaxAttention(D_MODEL, HEADS, position_bias=POSITION_BIASES[name](HEADS))
    x = randn(B, N, D_MODEL, dtype=torch.float32)
    assert blank(x.to("meta")).shape == x.shape
    blank.to_empty(device="cpu").load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(blank(x), layer(x))


# Errors.


@every_bias
def test_another_number_of_heads_is_refused(name):
    with pytest.raises(ValueError, match=r"num_heads=3 as the layer is, got one for 4"):
        SoftmaxAttention(12, 3, position_bias=POSITION_BIASES[name](4))


@every_bias
def test_wrong_positions_are_refused(name):
    layer = make(name)
    for call in (layer, layer.stream):
        for wrong in (torch.arange(8), torch.zeros(3, 7).long(), torch.tensor(3)):
            with pytest.raises(ValueError, match=r"positions must be.*7.*got \("):
                call(randn(B, 7, D_MODEL), positions=wrong)
        with pytest.raises(ValueError, match=r"query_positions must be integers.*got torch.float32 of shape \(7,\)"):
            call(randn(B, 7, D_MODEL), positions=torch.arange(7.0))


def test_a_state_without_positions_is_refused():
    state = SoftmaxAttention(D_MODEL, HEADS).double().stream(randn(B, 3, D_MODEL))[1]
    assert type(state) is KeyValueState
    with pytest.raises(ValueError, match="needs the positions of past keys, got a KeyValueState"):
        make("ALiBi").stream(randn(B, 3, D_MODEL), state)


def test_a_bias_of_the_wrong_shape_is_refused():
    class Flat(PositionBias):
        num_heads = HEADS

        def forward(self, query_positions, key_positions, dtype=torch.float32):
            return torch.zeros(HEADS, len(query_positions), len(key_positions), dtype=dtype)

    with pytest.raises(ValueError, match=r"\(1 or b, h, n, s\) = \(1 or 2, 3, 5, 5\), got \(3, 5, 5\)"):
        SoftmaxAttention(D_MODEL, HEADS, position_bias=Flat())(randn(B, 5, D_MODEL).float())


@pytest.mark.parametrize(
    ("make_bias", "message"),
    [
        (partial(ALiBi, 0), "num_heads must be at least 1, got 0"),
        (partial(T5Bias, 0), "num_heads must be at least 1, got 0"),
        (partial(T5Bias, 4, num_buckets=1), "num_buckets must be at least 2, got 1"),
        (partial(T5Bias, 4, num_buckets=7, bidirectional=True), "num_buckets must be even and at least 4, got 7"),
        (partial(T5Bias, 4, num_buckets=2, bidirectional=True), "num_buckets must be even and at least 4, got 2"),
        (partial(T5Bias, 4, max_distance=16), "max_distance must be above 16, .* got 16"),
        (partial(T5Bias, 4, max_distance=8, bidirectional=True), "max_distance must be above 8, .* got 8"),
    ],
)
def test_settings_that_make_no_bias_are_refused(make_bias, message):
    with pytest.raises(ValueError, match=message):
        make_bias()


def test_the_contract_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        PositionBias()
    assert isinstance(T5Bias(1).table, nn.Embedding)

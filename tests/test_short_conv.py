"""Short convolutions, alone and in both layers: the formula in loops, and every promise of layers once more."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from einops import rearrange
from torch.func import functional_call, grad, jvp, vmap

from linrope import (
    ByteTransformer,
    Hedgehog,
    KeyValueState,
    LinearAttention,
    Rotary,
    ShortConv,
    ShortConvState,
    SoftmaxAttention,
    State,
)
from linrope.diagnostics import attention_weights
from linrope.distillation import fit_to_softmax
from linrope.layers.short_conv import short_conv, stream_short_conv
from tasks.optimizers import split_parameters
from tests.cases import (
    CAUSAL_PATHS,
    CORE,
    MAPS,
    PLACEMENTS,
    attention_options,
    close,
    epsilon_of,
    randn,
    truth,
    turn,
)

N, D_MODEL, HEADS, WIDTH = 13, 12, 3, 4

LINEAR = {
    f"{name}-{placement}": partial(LinearAttention, D_MODEL, HEADS, **attention_options(name, placement))
    for name in MAPS
    for placement in PLACEMENTS
}
LAYERS = LINEAR | {
    "softmax": partial(SoftmaxAttention, D_MODEL, HEADS),
    "softmax-rotary": partial(SoftmaxAttention, D_MODEL, HEADS, rotary=Rotary()),
}
# One of each kind, where the attention behind the convolution is tested elsewhere.
FEW = ("EluPlusOne-numerator", "FavorPlus-16-before", "CosFormer-floor-none", "softmax-rotary")
QUICK = {*FEW, "softmax", *(f"{name}-numerator" for name in CORE)}
every_layer = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in LAYERS]
)
few_layers = pytest.mark.parametrize("kind", FEW)
both_layers = pytest.mark.parametrize("kind", ["EluPlusOne-numerator", "softmax-rotary"])


def make(kind, dtype=torch.float64, **options):
    """A layer whose convolutions do something."""
    layer = LAYERS[kind](short_conv=WIDTH, **options).to(dtype)
    with torch.no_grad():
        for conv in (layer.query_conv, layer.key_conv, layer.value_conv):
            conv.weight += 0.3 * randn(*conv.weight.shape)
    return layer


def looped(x, weight, mask=None, offsets=None):
    """The formula, token by token: itself and the present ones before it in its own sequence."""
    n, width = x.shape[1], weight.shape[-1]
    starts = [0] * n if offsets is None else [max(int(o) for o in offsets[:-1] if o <= t) for t in range(n)]
    rows = []
    for b in range(x.shape[0]):
        row = []
        for t in range(n):
            before = [s for s in range(starts[t], t) if mask is None or mask[b, s]]
            used = [t, *reversed(before)][:width]
            row.append(sum(weight[:, 0, width - 1 - i] * x[b, s] for i, s in enumerate(used)))
        rows.append(torch.stack(row) if row else x[b])
    return torch.stack(rows)


def by_hand(layer, x, context=None, **options):
    """The layer from its weights: projections, loops, then REF."""
    context = x if context is None else context
    mask = options.get("key_mask")
    query, key, value = (
        rearrange(looped(linear(y), conv.weight, mask=m), "b n (h d) -> b h n d", d=layer.head_dim)
        for linear, conv, y, m in (
            (layer.query, layer.query_conv, x, mask if context is x else None),
            (layer.key, layer.key_conv, context, mask),
            (layer.value, layer.value_conv, context, mask),
        )
    )
    key, value = (y.repeat_interleave(query.shape[1] // y.shape[1], 1) for y in (key, value))
    return layer.out(rearrange(attended(layer, query, key, value, **options), "b h n e -> b n (h e)"))


def attended(layer, query, key, value, key_mask=None):
    at = torch.arange(query.shape[2])
    if isinstance(layer, SoftmaxAttention):
        if layer.rotary is not None:
            query, key = turn(query, at), turn(key, at)
        hidden = at > at[:, None]
        if key_mask is not None:
            hidden = hidden | ~key_mask[:, None, None]
        scores = (query @ key.mT / layer.head_dim**0.5).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ value
    kernel, where = layer.kernel, (at,) if layer.feature_map.uses_positions else ()
    if kernel.rotary is not None and kernel.rotary_placement == "before":
        query, key = turn(query, at), turn(key, at)
    rotates = kernel.rotary is not None and kernel.rotary_placement == "numerator"
    return truth(
        layer.feature_map.map_query(query, *where),
        layer.feature_map.map_key(key, *where),
        value,
        rotate=turn if rotates else None,
        key_mask=key_mask,
        normalizer=kernel.normalizer,
        epsilon=epsilon_of(layer.feature_map),
    ).output


# ---- the function ----


@pytest.mark.parametrize("n", [0, 1, 2, 5, 13])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [None, [13], [3, 1, 0, 8, 0, 1], [1] * 13, [0, 5, 8]])
def test_the_function_is_the_formula(n, width, masked, lengths):
    if lengths is not None and n != 13:
        return
    x, weight = randn(1 if lengths else 3, n, 5, grad=True), randn(5, 1, width, grad=True)
    mask = torch.rand(x.shape[:2]) < 0.6 if masked else None
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    output, expected = short_conv(x, weight, mask=mask, offsets=offsets), looped(x, weight, mask, offsets)
    close(output, expected, 1e-12)
    if n:
        cotangent = randn(*x.shape)
        grads = (torch.autograd.grad(y, (x, weight), cotangent) for y in (output, expected))
        for found, exact in zip(*grads, strict=True):
            close(found, exact, 1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_the_function(masked):
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 1]]).bool() if masked else None
    inputs = randn(2, 5, 3, grad=True), randn(3, 1, 4, grad=True), randn(2, 3, 3, grad=True)
    assert torch.autograd.gradcheck(partial(stream_short_conv, mask=mask), inputs)
    assert torch.autograd.gradgradcheck(partial(stream_short_conv, mask=mask), inputs)


@pytest.mark.parametrize("masked", [False, True])
def test_the_function_streams_and_keeps_the_last_present_tokens(masked):
    x, weight = randn(3, N, 5), randn(5, 1, WIDTH)
    mask = torch.rand(3, N) < 0.5 if masked else torch.ones(3, N, dtype=torch.bool)
    mask[0] = not masked  # a row that is absent from end to end
    whole = looped(x, weight, mask)
    for cuts in [[0, cut, N] for cut in range(N + 1)] + [list(range(N + 1))]:
        outputs, last = [], None
        for begin, end in pairwise(cuts):
            part = slice(begin, end)
            kept = None if last is None else last.clone()
            y, after = stream_short_conv(x[:, part], weight, last, mask=mask[:, part] if masked else None)
            assert kept is None or torch.equal(last, kept)
            outputs.append(y)
            last = after
        close(torch.cat(outputs, 1), whole, 1e-12)
        for b in range(3):
            present = torch.cat((torch.zeros(3, 5, dtype=x.dtype), x[b, mask[b]]))
            assert torch.equal(last[b], present[-3:])
        assert last.untyped_storage().nbytes() == 3 * 3 * 5 * 8  # no more than it says


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_sums_are_float32_or_wider(dtype, largest, masked):
    """One by one, 1 + 1 would be lost beside the largest."""
    weight = torch.tensor([[[largest, 1.0, 1.0, 2.0]]], dtype=dtype)
    mask = torch.ones(1, 6, dtype=torch.bool) if masked else None
    y, last = stream_short_conv(torch.ones(1, 6, 1, dtype=dtype), weight, mask=mask)
    assert y.dtype == last.dtype == dtype
    assert (y[:, 3:] == largest + 4).all()


def test_what_does_not_fit_is_refused():
    x, weight = randn(2, 7, 5), randn(5, 1, 4)
    with pytest.raises(ValueError, match=r"weight must be \(c, 1, w\) with w of at least 2, got \(5, 1, 1\)"):
        short_conv(x, weight[..., :1])
    with pytest.raises(ValueError, match=r"x must be \(b, n, c\) with c = 5, got \(2, 7, 4\)"):
        short_conv(x[..., :4], weight)
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(b, n\) = \(2, 7\).*got torch.bool.*\(2, 6\)"):
        short_conv(x, weight, mask=torch.ones(2, 6).bool())
    with pytest.raises(ValueError, match=r"last inputs must be \(b, w - 1, c\) = \(2, 3, 5\), got \(3, 3, 5\)"):
        stream_short_conv(x, weight, randn(3, 3, 5))
    with pytest.raises(ValueError, match="b must be 1 with offsets, got 2"):
        short_conv(x, weight, offsets=torch.tensor([0, 7]))


# ---- the layers ----


@every_layer
def test_at_the_start_a_layer_is_the_one_without(kind):
    torch.manual_seed(1)
    without, x = LAYERS[kind]().double(), randn(2, N, D_MODEL)
    torch.manual_seed(1)
    layer = LAYERS[kind](short_conv=WIDTH).double()
    mask = torch.rand(2, N) < 0.6
    assert torch.equal(layer(x), without(x))
    close(layer(x, key_mask=mask), without(x, key_mask=mask), 1e-12)
    assert layer.state_dict().keys() - without.state_dict().keys() == {
        f"{name}_conv.weight" for name in ("query", "key", "value")
    }
    assert not any(isinstance(module, ShortConv) for module in without.modules())


@every_layer
def test_a_layer_is_the_formula(kind):
    is_the_formula(make(kind))


@pytest.mark.parametrize("path", CAUSAL_PATHS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", FEW[:3])
def test_a_layer_is_the_formula_by_every_path(path, kind):
    is_the_formula(make(kind, **path.options))


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_fewer_heads_of_keys(kv_heads):
    layer = make("EluPlusOne-numerator", num_kv_heads=kv_heads)
    assert layer.key_conv.weight.shape == (kv_heads * 4, 1, WIDTH)
    is_the_formula(layer)


def is_the_formula(layer):
    x = randn(2, N, D_MODEL, grad=True)
    output, expected = layer(x), by_hand(layer, x)
    close(output, expected, 1e-10)
    inputs, cotangent = (x, *layer.parameters()), randn(*output.shape)
    for found, exact in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (output, expected)), strict=True):
        close(found, exact, 1e-9)


@both_layers
def test_gradients_of_a_layer(kind):
    layer = make(kind)
    weights = {name: p for name, p in layer.named_parameters() if "conv" in name}
    assert len(weights) == 3

    def output(x, *convs):
        return functional_call(layer, dict(zip(weights, convs, strict=True)), (x,))

    convs = (p.detach().requires_grad_() for p in weights.values())
    assert torch.autograd.gradcheck(output, (randn(1, 5, D_MODEL, grad=True), *convs))


@both_layers
def test_a_context_has_convolutions_of_its_own(kind):
    layer, x, context = make(kind), randn(2, N, D_MODEL), randn(2, N, D_MODEL)
    mask = torch.rand(2, N) < 0.6
    close(layer(x, context), by_hand(layer, x, context), 1e-10)
    close(layer(x, context, key_mask=mask), by_hand(layer, x, context, key_mask=mask), 1e-10)


@pytest.mark.parametrize("kind", ["EluPlusOne-none", "softmax"])
def test_what_is_not_causal_and_what_is_too_short_is_refused(kind):
    with pytest.raises(ValueError, match=r"short_conv=4 would look one way.*causal=True or short_conv=None"):
        LAYERS[kind](short_conv=4, causal=False)
    for width in (1, 0, -3):
        with pytest.raises(ValueError, match=f"width of at least 2, got {width}"):
            LAYERS[kind](short_conv=width)


# C1.


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_do_not_exist(kind, dtype):
    layer, x = make(kind, dtype), randn(2, 8, D_MODEL, dtype=dtype)
    output = layer(x)
    for t in range(7):
        later = x.clone()
        later[:, t + 1 :] *= 30
        later.requires_grad_()
        changed = layer(later)
        assert torch.equal(changed[:, : t + 1], output[:, : t + 1])
        (found,) = torch.autograd.grad(changed[:, t].sum(), later)
        assert (found[:, t + 1 :] == 0).all()
        assert (found[:, t] != 0).any()


# C4.


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_any_split_is_the_whole(kind, masked):
    layer, x = make(kind), randn(3, N, D_MODEL)
    mask = torch.rand(3, N) < 0.6
    mask[0, :5] = False  # pads from the start, in pieces that hold nothing else
    mask = mask if masked else torch.ones_like(mask)
    whole = by_hand(layer, x, key_mask=mask)
    for cuts in [[0, cut, N] for cut in range(1, N)] + [list(range(N + 1))]:
        outputs, state = [], None
        for begin, end in pairwise(cuts):
            part = slice(begin, end)
            output, state = layer.stream(x[:, part], state, key_mask=mask[:, part] if masked else None)
            outputs.append(output)
        close(torch.cat(outputs, 1), whole, 1e-10)
        assert state.position.tolist() == [N] * 3
        for linear, kept in zip((layer.query, layer.key, layer.value), state[1:], strict=True):
            for b in range(3):
                present = torch.cat((torch.zeros(3, D_MODEL), linear(x)[b, mask[b]]))
                close(kept[b], present[-3:], 1e-12)


@few_layers
def test_a_state_is_left_as_it_is(kind):
    layer, x = make(kind), randn(3, N, D_MODEL)
    state = layer.stream(x[:, :6])[1]
    assert isinstance(state, ShortConvState)
    assert isinstance(state.attention, KeyValueState if "softmax" in kind else State)
    kept = copy.deepcopy([t.detach() for t in (*state.attention, *state[1:])])
    first = layer.stream(x[:, 6:], state)[0]
    layer.stream(randn(3, 4, D_MODEL), state, key_mask=torch.rand(3, 4) < 0.5)
    assert torch.equal(layer.stream(x[:, 6:], state)[0], first)
    assert all(map(torch.equal, (*state.attention, *state[1:]), kept))


@few_layers
def test_rows_go_on_from_positions_of_their_own(kind):
    layer, x = make(kind), randn(2, N, D_MODEL)
    positions = torch.arange(N) + torch.tensor([[0], [300]])
    first, state = layer.stream(x[:, :5], positions=positions[:, :5])
    rest, state = layer.stream(x[:, 5:], state)
    close(torch.cat((first, rest), 1), layer(x, positions=positions), 1e-10)
    assert state.position.tolist() == [13, 313]


def test_states_of_different_rows_may_be_joined():
    """Two texts of different lengths, read apart, then continued as one batch."""
    layer, x = make("EluPlusOne-numerator"), randn(2, N, D_MODEL)
    lengths = 7, 2
    states = [layer.stream(x[i : i + 1, :length])[1] for i, length in enumerate(lengths)]
    attention = State(*(torch.cat(pair) for pair in zip(*(state.attention for state in states), strict=True)))
    joined = ShortConvState(
        attention, *(torch.cat(pair) for pair in zip(*(state[1:] for state in states), strict=True))
    )
    output, state = layer.stream(x[:, 7:], joined)
    for i, length in enumerate(lengths):
        text = torch.cat((x[i : i + 1, :length], x[i : i + 1, 7:]), 1)
        close(output[i : i + 1], by_hand(layer, text)[:, length:], 1e-10)
    assert state.position.tolist() == [13, 8]


@both_layers
def test_no_tokens_and_states_that_do_not_fit(kind):
    layer, x = make(kind), randn(2, 5, D_MODEL)
    assert layer(x[:, :0]).shape == (2, 0, D_MODEL)
    _, state = layer.stream(x[:, :0])
    first, state = layer.stream(x[:, :3], state)
    _, state = layer.stream(x[:, 3:3], state)
    rest, state = layer.stream(x[:, 3:], state)
    close(torch.cat((first, rest), 1), layer(x), 1e-12)
    with pytest.raises(ValueError, match="goes on from a ShortConvState, got"):
        layer.stream(x, state.attention)
    with pytest.raises(ValueError, match=r"\(3, 3, 12\), got \(2, 3, 12\)"):
        layer.stream(randn(3, 1, D_MODEL), state)
    with pytest.raises(ValueError, match="without short_conv"):
        LAYERS[kind]().double().stream(x, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@both_layers
def test_dtypes_and_the_size_of_a_state(kind, dtype):
    layer, x = make(kind, dtype), randn(2, 200, D_MODEL, dtype=dtype)
    output, many = layer.stream(x)
    assert output.dtype == layer(x).dtype == dtype
    one = layer.stream(x[:, :1])[1]
    for state in (one, many):
        assert [t.dtype for t in state[1:]] == [dtype] * 3
        assert [tuple(t.shape) for t in state[1:]] == [(2, 3, D_MODEL)] * 3
    if "softmax" not in kind:
        assert [t.shape for t in one.attention] == [t.shape for t in many.attention]
        assert many.attention.kv.dtype == torch.float32
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            output, state = layer.stream(x, many)
        assert output.dtype == state.query.dtype == torch.bfloat16


# C5.

PAD_LAYOUTS = {"right": range(8), "left": range(8, 16), "interior": (0, 1, 2, 5, 6, 11, 12, 15)}


@every_layer
@pytest.mark.parametrize("layout", PAD_LAYOUTS)
@pytest.mark.parametrize("b", [1, 2])
def test_pads_do_not_exist(kind, layout, b):
    layer, real = make(kind), list(PAD_LAYOUTS[layout])
    mask = torch.zeros(b, 16, dtype=torch.bool)
    mask[:, real] = True
    tokens = randn(b, 8, D_MODEL)
    padded = torch.full((b, 16, D_MODEL), 1e4, dtype=torch.float64)
    padded[:, real] = tokens
    tokens.requires_grad_()
    padded.requires_grad_()
    expected = layer(tokens, positions=torch.tensor(real))
    output = layer(padded, key_mask=mask)[:, real]
    close(output, expected, 1e-10)
    cotangent, weights = randn(*expected.shape), list(layer.parameters())
    found, *of_weights = torch.autograd.grad(output, [padded, *weights], cotangent)
    exact, *exact_of_weights = torch.autograd.grad(expected, [tokens, *weights], cotangent)
    close(found[:, real], exact, 1e-9)
    assert (found[:, ~mask[0]] == 0).all()
    for one, other in zip(of_weights, exact_of_weights, strict=True):
        close(one, other, 1e-9)


@few_layers
def test_a_row_of_pads_alone_gives_zero(kind):
    layer, x = make(kind), randn(2, 9, D_MODEL, grad=True)
    mask = torch.tensor([[False], [True]]).expand(2, 9)
    output = layer(x, key_mask=mask)
    assert (output[0] == 0).all()
    close(output[1], layer(x)[1], 1e-10)
    grads = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
    assert (grads[0][0] == 0).all()
    assert all(found.isfinite().all() for found in grads)


# Packed sequences.


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in LINEAR]
)
@pytest.mark.parametrize("lengths", [[3, 1, 0, 8, 1, 0], [13]], ids=["some", "one"])
def test_packed_sequences_are_apart(kind, lengths):
    layer, x = make(kind), randn(1, N, D_MODEL)
    mask = torch.rand(1, N) < 0.7
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    for options in ({}, {"key_mask": mask}):
        alone = [
            layer(x[:, begin:end], **{key: mask[:, begin:end] for key in options})
            for begin, end in pairwise(offsets.tolist())
            if end > begin
        ]
        close(layer(x, offsets=offsets, **options), torch.cat(alone, 1), 1e-9)


def test_another_sequence_changes_no_bit():
    layer, x = make("EluPlusOne-numerator", torch.float32), randn(1, N, D_MODEL, dtype=torch.float32)
    changed = x.clone()
    changed[:, :4] = 1e3
    offsets = torch.tensor([0, 4, N])
    assert torch.equal(layer(changed, offsets=offsets)[:, 4:], layer(x, offsets=offsets)[:, 4:])


# C10.


@every_layer
def test_items_are_alone(kind):
    layer, x = make(kind), randn(3, N, D_MODEL)
    for i in range(3):
        loud = 100 * x
        loud[i] = x[i]
        close(layer(loud)[i : i + 1], layer(x[i : i + 1]), 1e-11)


@pytest.mark.parametrize("kind", ["EluPlusOne-numerator", pytest.param("softmax-rotary", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [33, pytest.param(65, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_compiled_equals_eager(kind, n, backend):
    torch.compiler.reset()
    layer, x = make(kind, torch.float32), randn(2, n, D_MODEL, dtype=torch.float32, grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    options = {"key_mask": torch.rand(2, n) < 0.8} if n == 33 else {}
    output, expected = compiled(x, **options), layer(x, **options)
    close(output, expected, 1e-5)
    grads = (torch.autograd.grad(y.square().sum(), (x, *layer.parameters())) for y in (output, expected))
    for found, wanted in zip(*grads, strict=True):
        close(found, wanted, 1e-4)


# ---- transforms and exporters ----


@few_layers
@pytest.mark.parametrize("masked", [False, True])
def test_torch_func(kind, masked):
    layer, x = make(kind), randn(3, N, D_MODEL)
    options = {"key_mask": torch.rand(1, N) < 0.7} if masked else {}
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def loss(parameters, x):
        return functional_call(layer, (parameters, buffers), (x,), options).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for i in range(3):
        layer.zero_grad()
        layer(x[i : i + 1], **options).square().sum().backward()
        for name, parameter in layer.named_parameters():
            close(each[name][i], parameter.grad, 1e-9)
    if "softmax" in kind:
        return  # torch's own attention has no forward mode
    tangent, cotangent = randn(1, N, D_MODEL), randn(1, N, D_MODEL)
    x = x[:1].requires_grad_()
    _, forward = jvp(partial(layer, **options), (x,), (tangent,))
    (backward,) = torch.autograd.grad(layer(x, **options), x, cotangent)
    close((forward * cotangent).sum(), (backward * tangent).sum(), 1e-9)


@pytest.mark.parametrize("kind", [pytest.param("EluPlusOne-numerator", marks=pytest.mark.slow), "softmax-rotary"])
def test_an_exported_layer_takes_any_length(kind):
    layer = make(kind).eval()
    lengths = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(layer, (randn(2, 37, D_MODEL),), dynamic_shapes=({1: lengths},)).module()
    for n in (2, 3, 37, 64, 200):
        x = randn(2, n, D_MODEL)
        close(program(x), layer(x), 1e-10)


class Step(torch.nn.Module):
    """One token, with the state's tensors as inputs and outputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, kv, key_sum, position, log_scale, *last):
        y, state = self.layer.stream(x, ShortConvState(State(kv, key_sum, position, log_scale), *last))
        return (y, *state.attention, *state[1:])


@pytest.mark.slow
def test_onnx_runs_the_parallel_form_and_the_stream():
    from tests.test_transforms import of_any_length, onnx_session, run

    layer, x = make("EluPlusOne-numerator", torch.float32).eval(), randn(2, 37, D_MODEL, dtype=torch.float32)
    session = onnx_session(layer, (x,), ({1: of_any_length()},))
    for n in (2, 3, 37):
        close(run(session, x[:, :n])[0], layer(x[:, :n]), 1e-4)
    _, state = layer.stream(x[:, :2])
    session = onnx_session(Step(layer).eval(), (x[:, 2:3], *state.attention, *state[1:]))
    for t in range(2, 8):
        output, *new = run(session, x[:, t : t + 1], *state.attention, *state[1:])
        expected, state = layer.stream(x[:, t : t + 1], state)
        close(output, expected, 1e-4)
        for actual, wanted in zip(new, (*state.attention, *state[1:]), strict=True):
            close(actual, wanted, 1e-4)


@both_layers
def test_a_layer_on_the_meta_device_gives_shapes_and_then_loads(kind):
    layer, x = make(kind, torch.float32), randn(2, 3, D_MODEL, dtype=torch.float32)
    with torch.device("meta"):
        blank = LAYERS[kind](short_conv=WIDTH)
    assert blank(torch.empty(2, 3, D_MODEL, device="meta")).shape == (2, 3, D_MODEL)
    blank.to_empty(device="cpu").load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(blank(x), layer(x))


# ---- in a model, in diagnostics, in distillation ----


def make_model(kind, **options):
    model = ByteTransformer(num_layers=2, d_model=D_MODEL, attention=lambda _: make(kind, torch.float32), **options)
    with torch.no_grad():  # so that logits differ by more than the initialisation makes them
        model.embedding.weight.mul_(50)
        model.head.weight.mul_(50)
    return model.double()


@few_layers
@pytest.mark.parametrize("positions", [None, "learned"])
def test_a_model_streams_and_generates(kind, positions):
    model, tokens = make_model(kind, positions=positions, seq_len=40), torch.randint(256, (2, N))
    whole = model(tokens)
    for cut in (1, 2, 7, 12):
        first, states = model.stream(tokens[:, :cut])
        rest, states = model.stream(tokens[:, cut:], states)
        close(torch.cat((first, rest), 1), whole, 1e-10)
        assert states[0].position.tolist() == [N, N]
    expected = tokens
    for _ in range(5):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(tokens, 5, temperature=0), expected)


def test_muon_leaves_the_convolutions_to_adamw_without_decay():
    model = make_model("EluPlusOne-numerator")
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, readout, others = ({names[id(p)] for p in part} for part in split_parameters(model))
    convs = {f"blocks.{i}.attention.{name}_conv.weight" for i in range(2) for name in ("query", "key", "value")}
    assert convs <= others
    assert not convs & (hidden | readout)
    assert readout == {"head.weight"}


@both_layers
def test_a_model_starts_as_the_one_without(kind):
    models = []
    for width in (None, WIDTH):
        torch.manual_seed(3)
        models.append(
            ByteTransformer(num_layers=2, d_model=12, attention=lambda _, w=width: LAYERS[kind](short_conv=w))
        )
    tokens = torch.randint(256, (2, N))
    assert torch.equal(models[0](tokens), models[1](tokens))


@both_layers
def test_diagnostics_see_what_attention_sees(kind):
    layer, x, mask = make(kind), randn(2, N, D_MODEL), torch.rand(2, N) < 0.6
    (found,) = attention_weights(layer, x, key_mask=mask).values()
    value = looped(layer.value(x), layer.value_conv.weight, mask)
    output = found.weights @ rearrange(value, "b s (h e) -> b h s e", h=HEADS)
    close(layer.out(rearrange(output, "b h n e -> b n (h e)")), layer(x, key_mask=mask), 1e-10)


def test_distillation_takes_the_convolutions_over():
    """At a rate of 0 the loss is the cross-entropy of explicit weights, with queries and keys in loops."""
    teacher, x = make("softmax"), randn(1, N, D_MODEL)
    student = LinearAttention(D_MODEL, HEADS, feature_map=Hedgehog, short_conv=WIDTH).double()
    (loss,) = fit_to_softmax(student, teacher, [x], learning_rate=0.0)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(student, f"{name}_conv").weight, getattr(teacher, f"{name}_conv").weight)
    query, key = (
        rearrange(looped(linear(x), conv.weight), "b n (h d) -> b h n d", h=HEADS)
        for linear, conv in ((teacher.query, teacher.query_conv), (teacher.key, teacher.key_conv))
    )
    future = torch.ones(N, N).triu(1).bool()
    target = (query @ key.mT / 2).masked_fill(future, -torch.inf).softmax(-1)
    kernel = student.feature_map.map_query(query) @ student.feature_map.map_key(key).mT
    log_weight = (kernel / kernel.masked_fill(future, 0.0).sum(-1, keepdim=True)).log()
    assert loss == pytest.approx(-(target * log_weight).sum(-1).mean().item(), rel=1e-9)
    with pytest.raises(ValueError, match=r"short_conv\) must agree, got \(12, 3, True, None\) and \(12, 3, True, 4\)"):
        fit_to_softmax(LinearAttention(D_MODEL, HEADS, feature_map=Hedgehog).double(), teacher, [x])

from functools import partial
from itertools import pairwise

import pytest
import torch

from linrope import LinearAttention, Rotary, SoftmaxAttention, State, linear_attention, stream_linear_attention
from tests.cases import (
    CAUSAL_PATHS,
    MAPS,
    PLACEMENTS,
    POSITION_BIASES,
    attention_options,
    close,
    epsilon_of,
    make_bias,
    make_map,
    mapped,
    mostly_slow,
    normalizer_of,
    paths_and_maps,
    randn,
    rotary_for,
    truth,
    turn,
)

every_map = pytest.mark.parametrize("name", mostly_slow(MAPS))
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)
every_causal_path = pytest.mark.parametrize("path", CAUSAL_PATHS, ids=lambda path: path.name)
every_causal_path_and_map = pytest.mark.parametrize(("path", "name"), paths_and_maps(CAUSAL_PATHS, MAPS))
scaled_or_not = pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])

N = 13


def features(name, scaled, n=N, dtype=torch.float64):
    """Arguments of an attention call, and the options that cut along with them."""
    feature_map = make_map(name, 6, dtype)
    query, key, log_scale = mapped(feature_map, randn(2, 3, n, 6, dtype=dtype), randn(2, 3, n, 6, dtype=dtype), scaled)
    return feature_map, (query, key, randn(2, 3, n, 5, dtype=dtype)), log_scale


def stream(tensors, log_scale, cuts, state=None, **options):
    """Outputs of the parts between ``cuts``, joined, and the last state."""
    outputs = []
    for begin, end in pairwise(cuts):
        part = [x[:, :, begin:end] for x in tensors]
        scale = None if log_scale is None else log_scale[:, :, begin:end]
        output, state = stream_linear_attention(*part, state, key_log_scale=scale, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def same_state(state: State, other: State, tolerance: float) -> None:
    for tensor, expected in zip(state, other, strict=True):
        close(tensor.double(), expected.double(), tolerance)


@every_causal_path_and_map
@pytest.mark.parametrize("placement", ["none", "numerator"])
@scaled_or_not
def test_any_split_is_the_whole(path, name, placement, scaled):
    feature_map, tensors, log_scale = features(name, scaled)
    normalizer = {"normalizer": normalizer_of(feature_map)}
    options = {"rotary": rotary_for(feature_map, placement), **normalizer, **path.options}
    rotate = turn if placement == "numerator" else None
    expected = truth(*tensors, rotate=rotate, log_scale=log_scale, **normalizer)
    whole = linear_attention(*tensors, key_log_scale=log_scale, **options)
    close(whole, expected.output, 1e-10)
    last = stream(tensors, log_scale, [0, N], **options)[1]
    splits = [[0, cut, N] for cut in range(1, N)] + [list(range(N + 1))]
    for cuts in splits:
        output, state = stream(tensors, log_scale, cuts, **options)
        close(output, whole, 1e-10)
        same_state(state, last, 1e-10)
    close(last.kv, expected.kv, 1e-10)
    close(last.key_sum, expected.key_sum, 1e-10)
    assert last.position.tolist() == [N, N]


@every_causal_path_and_map
@scaled_or_not
def test_a_state_is_left_as_it_is(path, name, scaled):
    feature_map, tensors, log_scale = features(name, scaled)
    normalizer = {"normalizer": normalizer_of(feature_map)}
    options = {"rotary": rotary_for(feature_map, "numerator"), **normalizer, **path.options}
    whole = stream(tensors, log_scale, [0, N], **options)[0]
    state = stream(tensors, log_scale, [0, 6], **options)[1]
    kept = [x.clone() for x in state]
    part = [x[:, :, 6:] for x in tensors]
    scale = None if log_scale is None else log_scale[:, :, 6:]
    first = stream(part, scale, [0, 7], state=state, **options)[0]
    # Another continuation, of other tokens, then the first once more.
    stream([x.flip(2) for x in part], None if scale is None else scale + 3, [0, 2, 7], state=state, **options)
    again = stream(part, scale, [0, 7], state=state, **options)[0]
    assert torch.equal(first, again)
    close(first, whole[:, :, 6:], 1e-10)
    assert all(map(torch.equal, state, kept))


# A step is one token, whatever the chunk size.
@pytest.mark.parametrize(
    "path",
    [p for p in CAUSAL_PATHS if not p.options["chunk_size"] or p.options["chunk_size"] == 64],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_five_thousand_steps_of_ones_are_five_thousand(path, dtype):
    one = torch.ones(1, 1, 1, 2, dtype=dtype)
    state = None
    with torch.inference_mode():
        for _ in range(5000):
            output, state = stream_linear_attention(one, one, one, state, **path.options)
    assert output.dtype == dtype
    assert state.key_sum.dtype == state.kv.dtype == torch.float32
    assert (state.key_sum == 5000).all()
    assert (state.kv == 5000).all()
    assert (state.position == 5000).all()


@every_causal_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_log_scale", [False, True])
def test_parts_of_ones_add_up(path, dtype, has_log_scale):
    ones, scale = torch.ones(1, 1, 1000, 2, dtype=dtype), torch.zeros(1, 1, 1000) if has_log_scale else None
    state = None
    for _ in range(5):
        output, state = stream_linear_attention(ones, ones, ones, state, key_log_scale=scale, **path.options)
    assert state.key_sum.dtype == torch.float32
    assert (state.key_sum == 5000).all()
    assert (state.kv == 5000).all()
    assert (output == 1).all()


@every_causal_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_state_is_float32_or_wider(path, dtype):
    x = randn(1, 2, 3, 4, dtype=dtype).abs()
    wide = torch.promote_types(dtype, torch.float32)
    for scale in (None, torch.zeros(1, 2, 3)):
        state = stream_linear_attention(x, x, x, key_log_scale=scale, **path.options)[1]
        assert state.kv.dtype == state.key_sum.dtype == state.log_scale.dtype == wide
        assert state.position.dtype == torch.int64
        with torch.autocast("cpu", torch.bfloat16):
            state = stream_linear_attention(x, x, x, state, key_log_scale=scale, **path.options)[1]
        assert state.kv.dtype == state.key_sum.dtype == wide


@every_causal_path
def test_a_state_is_as_large_after_many_tokens_as_after_one(path):
    few = stream(*features("EluPlusOne", True, n=1)[1:], [0, 1], **path.options)[1]
    many = stream(*features("EluPlusOne", True, n=200)[1:], [0, 200], **path.options)[1]
    assert [x.shape for x in few] == [x.shape for x in many]
    assert [tuple(x.shape) for x in few[:3]] == [(2, 3, 6, 5), (2, 3, 6), (2,)]


@every_causal_path_and_map
def test_rows_of_a_batch_go_on_from_positions_of_their_own(path, name):
    feature_map, tensors, log_scale = features(name, True)
    normalizer = {"normalizer": normalizer_of(feature_map)}
    options = {"rotary": rotary_for(feature_map, "numerator"), **normalizer, **path.options}
    positions = torch.arange(N) + torch.tensor([[0], [700]])
    scale = log_scale
    first = stream_linear_attention(
        *(x[:, :, :5] for x in tensors),
        key_log_scale=None if scale is None else scale[:, :, :5],
        query_positions=positions[:, :5],
        **options,
    )
    assert first[1].position.tolist() == [5, 705]
    rest, state = stream(
        [x[:, :, 5:] for x in tensors], None if scale is None else scale[:, :, 5:], [0, 3, 8], state=first[1], **options
    )
    assert state.position.tolist() == [13, 713]
    expected = truth(*tensors, rotate=turn, query_positions=positions, log_scale=log_scale, **normalizer)
    close(torch.cat((first[0], rest), 2), expected.output, 1e-10)
    close(state.kv, expected.kv, 1e-10)


@every_causal_path
def test_states_of_different_rows_may_be_joined(path):
    """Two texts of different lengths, read apart, then continued as one batch."""
    x = [randn(2, 3, 9, 4).abs() for _ in range(3)]
    options = {"rotary": Rotary(), **path.options}
    alone = [[t[i : i + 1, :, : (5, 2)[i]] for t in x] for i in (0, 1)]
    states = [stream_linear_attention(*t, **options)[1] for t in alone]
    joined = State(*(torch.cat(pair) for pair in zip(*states, strict=True)))
    following = [t[:, :, 5:] for t in x]
    output, state = stream_linear_attention(*following, joined, **options)
    for i in (0, 1):
        text = [torch.cat((a, t[i : i + 1]), 2) for a, t in zip(alone[i], following, strict=True)]
        expected = truth(*text, rotate=turn).output
        close(output[i : i + 1], expected[:, :, (5, 2)[i] :], 1e-10)
    assert state.position.tolist() == [9, 6]


@every_causal_path_and_map
@scaled_or_not
def test_masked_keys_stay_out_of_the_state(path, name, scaled):
    feature_map, tensors, log_scale = features(name, scaled)
    normalizer = {"normalizer": normalizer_of(feature_map)}
    options = {"rotary": rotary_for(feature_map, "numerator"), **normalizer, **path.options}
    mask = torch.rand(2, N) < 0.5
    mask[:, :2] = False
    mask[:, 2] = True
    expected = truth(*tensors, rotate=turn, key_mask=mask, log_scale=log_scale, **normalizer)
    for cuts in ([0, N], [0, 1, 2, 6, N], list(range(N + 1))):
        outputs, state = [], None
        for begin, end in pairwise(cuts):
            rows = slice(begin, end)
            scale = None if log_scale is None else log_scale[:, :, rows]
            output, state = stream_linear_attention(
                *(x[:, :, rows] for x in tensors), state, key_mask=mask[:, rows], key_log_scale=scale, **options
            )
            outputs.append(output)
        close(torch.cat(outputs, 2), expected.output, 1e-10)
        close(state.kv, expected.kv, 1e-10)
        close(state.key_sum, expected.key_sum, 1e-10)
        assert state.position.tolist() == [N, N]


@every_causal_path_and_map
def test_gradients_flow_through_a_state(path, name):
    feature_map = make_map(name, 6)
    tokens = [randn(2, 3, N, 6, grad=True) for _ in range(3)]
    query, key, log_scale = mapped(feature_map, *tokens[:2], scaled=True)
    normalizer = {"normalizer": normalizer_of(feature_map)}
    options = {"rotary": rotary_for(feature_map, "numerator"), **normalizer, **path.options}
    output = stream((query, key, tokens[2]), log_scale, [0, 4, 5, N], **options)[0]
    whole = feature_map.map_query(tokens[0]), feature_map.map_key(tokens[1]), tokens[2]
    expected = truth(*whole, rotate=turn, epsilon=epsilon_of(feature_map), **normalizer).output
    cotangent = randn(*output.shape)
    for grad, exact in zip(*(torch.autograd.grad(x, tokens, cotangent) for x in (output, expected)), strict=True):
        close(grad, exact, 1e-10)


@every_causal_path
def test_a_louder_key_later_rescales_what_came_before(path):
    """Log-scales that climb and fall by hundreds: plain sums would overflow or vanish."""
    query, key, value = (randn(1, 2, 40, 4).abs() + 0.1 for _ in range(3))
    log_scale = 500 * randn(1, 2, 40)
    expected = truth(query, key, value, rotate=turn, log_scale=log_scale)
    for cuts in ([0, 40], [0, 7, 8, 40], list(range(41))):
        output, state = stream((query, key, value), log_scale, cuts, rotary=Rotary(), **path.options)
        close(output, expected.output, 1e-10)
        close(state.kv, expected.kv, 1e-10)
        close(state.log_scale, log_scale.amax(-1), 1e-14)


@every_causal_path
def test_no_tokens_leave_the_state_alone(path):
    x = [randn(1, 2, 5, 4).abs() for _ in range(3)]
    state = stream_linear_attention(*x, **path.options)[1]
    output, after = stream_linear_attention(*(t[:, :, :0] for t in x), state, **path.options)
    assert output.shape == (1, 2, 0, 4)
    assert all(map(torch.equal, after, state))


def test_a_stream_takes_as_many_keys_as_queries():
    x = randn(1, 2, 5, 4).abs()
    with pytest.raises(ValueError, match="4 keys and 5 queries"):
        stream_linear_attention(x, x[:, :, :4], x[:, :, :4])


# Layers.


def with_bias(name, d_model, num_heads):
    return SoftmaxAttention(d_model, num_heads, rotary=Rotary(), position_bias=make_bias(name, num_heads))


LAYERS = {
    f"{name}-{placement}": partial(LinearAttention, **attention_options(name, placement))
    for name in MAPS
    for placement in PLACEMENTS
} | {
    "softmax": SoftmaxAttention,
    "softmax-rotary": partial(SoftmaxAttention, rotary=Rotary()),
    **{f"softmax-{name}": partial(with_bias, name) for name in POSITION_BIASES},
    "unnormalized": partial(LinearAttention, rotary=Rotary(), normalizer=None),
    "rms": partial(LinearAttention, rotary=Rotary(), normalizer="rms"),
    "FavorPlus-rms": partial(LinearAttention, feature_map=MAPS["FavorPlus"], normalizer="rms"),
    "FavorPlus-unnormalized": partial(LinearAttention, feature_map=MAPS["FavorPlus"], normalizer=None),
}
every_layer = pytest.mark.parametrize("kind", mostly_slow(LAYERS))


@every_layer
def test_any_split_of_a_layer_is_the_whole(kind):
    layer, x = LAYERS[kind](8, 2).double(), randn(3, N, 8)
    whole = layer(x)
    for cuts in [[0, cut, N] for cut in range(1, N)] + [list(range(N + 1))]:
        outputs, state = [], None
        for begin, end in pairwise(cuts):
            output, state = layer.stream(x[:, begin:end], state)
            outputs.append(output)
        close(torch.cat(outputs, 1), whole, 1e-10)
        assert state.position.tolist() == [N] * 3


@every_layer
def test_a_state_of_a_layer_is_left_as_it_is(kind):
    layer, x = LAYERS[kind](8, 2).double(), randn(3, N, 8)
    state = layer.stream(x[:, :6])[1]
    kept = [t.clone() for t in state]
    first = layer.stream(x[:, 6:], state)[0]
    layer.stream(randn(3, 4, 8), state)
    assert torch.equal(layer.stream(x[:, 6:], state)[0], first)
    close(first, layer(x)[:, 6:], 1e-10)
    assert all(map(torch.equal, state, kept))


@every_layer
def test_rows_of_a_layer_go_on_from_positions_of_their_own(kind):
    layer, x = LAYERS[kind](8, 2).double(), randn(2, N, 8)
    positions = torch.arange(N) + torch.tensor([[0], [300]])
    expected = layer(x, positions=positions)
    first, state = layer.stream(x[:, :5], positions=positions[:, :5])
    rest, state = layer.stream(x[:, 5:], state)
    close(torch.cat((first, rest), 1), expected, 1e-10)
    assert state.position.tolist() == [13, 313]


@every_layer
def test_a_layer_streams_past_pads(kind):
    layer, x = LAYERS[kind](8, 2).double(), randn(2, N, 8)
    mask = torch.rand(2, N) < 0.6
    mask[:, 0] = False
    expected = layer(x, key_mask=mask)
    first, state = layer.stream(x[:, :5], key_mask=mask[:, :5])
    rest, _ = layer.stream(x[:, 5:], state, key_mask=mask[:, 5:])
    close(torch.cat((first, rest), 1), expected, 1e-10)


@every_map
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_of_a_low_precision_layer_is_float32_or_wider(name, placement, dtype):
    layer = LAYERS[f"{name}-{placement}"](8, 2).to(dtype)
    output, state = layer.stream(randn(1, 5, 8, dtype=dtype))
    assert output.dtype == dtype
    assert state.kv.dtype == state.key_sum.dtype == state.log_scale.dtype
    assert torch.finfo(state.kv.dtype).bits >= 32


@pytest.mark.parametrize("make", [LinearAttention, SoftmaxAttention])
def test_a_layer_that_is_not_causal_does_not_stream(make):
    with pytest.raises(ValueError, match="causal=False"):
        make(8, 2, causal=False).stream(randn(1, 3, 8, dtype=torch.float32))

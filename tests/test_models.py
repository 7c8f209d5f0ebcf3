import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from linrope import ByteTransformer, FavorPlus, LinearAttention, Rotary, Rotation, SoftmaxAttention
from linrope.models import sample, sinusoids
from linrope.rotary import kept
from tests.cases import MAPS, PLACEMENTS, attention_options, close, mostly_slow, randn

ATTENTIONS = {
    f"{name}-{placement}": partial(LinearAttention, num_heads=2, **attention_options(name, placement))
    for name in MAPS
    for placement in PLACEMENTS
} | {"softmax": partial(SoftmaxAttention, num_heads=2, rotary=Rotary())}
POSITIONS = (None, "learned", "sinusoidal")
every_attention = pytest.mark.parametrize("attention", mostly_slow(ATTENTIONS))
every_position = pytest.mark.parametrize("positions", POSITIONS)
N = 13


def make(attention="FavorPlus-16-numerator", dtype=torch.float64, **options):
    settings = {"num_layers": 2, "d_model": 8, "attention": ATTENTIONS[attention], "seq_len": 40, **options}
    model = ByteTransformer(**settings).to(dtype)
    with torch.no_grad():  # so that logits differ by more than the initialisation makes them
        model.embedding.weight.mul_(50)
        model.head.weight.mul_(50)
    return model


def some_bytes(*shape):
    return torch.randint(256, shape)


def by_hand(model, tokens):
    """The model from its weights, its attention layers taken as they are."""

    def norm(x, layer):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias

    def gelu(x):
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    x = model.embedding.weight[tokens]
    n, width = tokens.shape[1], x.shape[-1]
    if model.positions == "learned":
        x = x + model.position_embedding.weight[:n]
    elif model.positions == "sinusoidal":
        rate = 10_000.0 ** (-torch.arange(0, width, 2).double() / width)
        angle = torch.arange(n).double()[:, None] * rate
        x = x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    for block in model.blocks:
        x = x + block.attention(norm(x, block.attention_norm))
        first, _, last = block.mlp
        hidden = gelu(norm(x, block.mlp_norm) @ first.weight.T + first.bias)
        x = x + hidden @ last.weight.T + last.bias
    return norm(x, model.norm) @ model.head.weight.T


@every_attention
@every_position
def test_a_model_is_the_formula(attention, positions):
    model, tokens = make(attention, positions=positions), some_bytes(3, N)
    close(model(tokens), by_hand(model, tokens), 1e-10)


# C4.


@every_attention
@every_position
def test_streaming_equals_forward(attention, positions):
    model, tokens = make(attention, positions=positions), some_bytes(3, N)
    whole = model(tokens)
    first_states = {}
    for cut in range(1, N):
        first, states = model.stream(tokens[:, :cut])
        rest, _ = model.stream(tokens[:, cut:], states)
        close(torch.cat((first, rest), 1), whole, 1e-10)
        first_states[cut] = states
    steps, states = [], None
    for t in range(N):
        logits, states = model.stream(tokens[:, t : t + 1], states)
        steps.append(logits)
        if t + 1 in first_states:
            for state, other in zip(states, first_states[t + 1], strict=True):
                for tensor, expected in zip(state, other, strict=True):
                    close(tensor.double(), expected.double(), 1e-10)
    close(torch.cat(steps, 1), whole, 1e-10)


@every_attention
@every_position
def test_two_continuations_from_one_state(attention, positions):
    model, tokens = make(attention, positions=positions), some_bytes(2, N)
    _, states = model.stream(tokens[:, :6])
    kept = [[tensor.clone() for tensor in state] for state in states]
    first, _ = model.stream(tokens[:, 6:], states)
    model.stream(some_bytes(2, 4), states)
    again, _ = model.stream(tokens[:, 6:], states)
    assert torch.equal(first, again)
    for state, copy in zip(states, kept, strict=True):
        assert all(map(torch.equal, state, copy))


@every_position
def test_rows_of_a_batch_at_different_positions(positions):
    """Two texts of different lengths read apart, continued as one batch."""
    model = make(positions=positions)
    texts = some_bytes(1, 9), some_bytes(1, 4)
    following = some_bytes(2, 5)
    states = [model.stream(text)[1] for text in texts]
    joined = [type(a)(*(torch.cat(pair) for pair in zip(a, b, strict=True))) for a, b in zip(*states, strict=True)]
    logits, _ = model.stream(following, joined)
    for i, text in enumerate(texts):
        close(logits[i], model(torch.cat((text, following[i : i + 1]), 1))[0, text.shape[1] :], 1e-10)


@pytest.mark.parametrize("name", mostly_slow(MAPS))
def test_any_length_streams_in_constant_memory(name):
    model = make(f"{name}-numerator")
    sizes = [[tensor.shape for state in model.stream(some_bytes(1, n))[1] for tensor in state] for n in (1, 300)]
    assert sizes[0] == sizes[1]


# C1, C10.


@every_attention
def test_a_later_byte_changes_no_earlier_logit(attention):
    model, tokens = make(attention, torch.float32), some_bytes(2, 8)
    logits = model(tokens)
    for t in range(7):
        later = tokens.clone()
        later[:, t + 1 :] = 255 - later[:, t + 1 :]
        changed = model(later)
        assert torch.equal(changed[:, : t + 1], logits[:, : t + 1])
        assert not torch.allclose(changed[:, t + 1], logits[:, t + 1])


@every_attention
def test_items_are_alone(attention):
    model, tokens = make(attention), some_bytes(3, N)
    logits = model(tokens)
    for i in range(3):
        close(logits[i : i + 1], model(tokens[i : i + 1]), 1e-11)


@pytest.mark.slow  # test_layers compiles the part of it that is ours
@pytest.mark.parametrize("name", mostly_slow(MAPS))
@pytest.mark.parametrize("n", [33, 65])
def test_compiled_equals_eager(name, n):
    torch.compiler.reset()
    model = make(f"{name}-numerator", torch.float32, positions="sinusoidal")
    tokens = some_bytes(2, n)
    close(torch.compile(model, fullgraph=True, backend="eager")(tokens), model(tokens), 1e-5)


# Positions.


@pytest.mark.parametrize("width", [2, 8, 64])
def test_sinusoids_are_exact_far_away(width):
    positions = torch.cat((torch.arange(300), torch.tensor([65_536, 2**20])))
    table = sinusoids(positions, width).tolist()
    for row, p in enumerate(positions.tolist()):
        for i in range(width // 2):
            angle = p / 10_000 ** (2 * i / width)
            assert abs(table[row][2 * i] - math.sin(angle)) < 1e-9
            assert abs(table[row][2 * i + 1] - math.cos(angle)) < 1e-9


def test_without_positions_or_rotation_order_is_what_causality_tells():
    """The last of a permuted text sees the same set of bytes, unless a position tells them apart."""
    tokens = some_bytes(1, N)
    shuffled = torch.cat((tokens[:, :-1].flip(1), tokens[:, -1:]), 1)
    for attention, positions, differs in (
        ("EluPlusOne-none", None, False),
        ("EluPlusOne-none", "learned", True),
        ("EluPlusOne-none", "sinusoidal", True),
        ("EluPlusOne-numerator", None, True),
        ("EluPlusOne-before", None, True),
    ):
        model = make(attention, positions=positions, num_layers=1)
        assert torch.allclose(model(tokens)[:, -1], model(shuffled)[:, -1]) is not differs


def test_any_length_without_learned_positions():
    for positions in (None, "sinusoidal"):
        assert make(positions=positions, seq_len=4)(some_bytes(1, 9)).shape == (1, 9, 256)


def test_more_tokens_than_learned_positions_are_refused():
    model = make(positions="learned", seq_len=4)
    assert model(some_bytes(1, 4)).shape == (1, 4, 256)
    with pytest.raises(ValueError, match="learned positions know 4 tokens, got 5"):
        model(some_bytes(1, 5))
    with pytest.raises(ValueError, match="learned positions know 4 tokens, got 5"):
        model.stream(some_bytes(1, 5))


def test_a_stream_past_the_learned_positions_is_refused():
    model = make(positions="learned", seq_len=4)
    _, states = model.stream(some_bytes(1, 3))
    with pytest.raises(ValueError, match="learned positions know 4 tokens, got 5"):
        model.stream(some_bytes(1, 2), states)
    with pytest.raises(ValueError, match="learned positions know 4 tokens"):
        model.generate(some_bytes(1, 3), 5)


# Seeds, projections, loading.


def test_layers_draw_different_projections():
    model = make(num_layers=3)
    drawn = [block.attention.feature_map.projection.rows for block in model.blocks]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[1], drawn[2])


@every_attention
@every_position
def test_one_seed_gives_the_same_model_twice(attention, positions):
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(make(attention, positions=positions).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])


def test_projections_depend_on_the_seed_of_the_map_alone():
    torch.manual_seed(3)
    first = make().state_dict()
    torch.manual_seed(4)
    other = make().state_dict()
    reseeded = make(attention="softmax").state_dict()
    names = [name for name in first if name.endswith("projection.rows")]
    assert len(names) == 2
    assert not [name for name in reseeded if name.endswith("projection.rows")]
    assert all(torch.equal(first[name], other[name]) for name in names)
    seeded = ByteTransformer(
        num_layers=2,
        d_model=8,
        attention=partial(LinearAttention, num_heads=2, feature_map=partial(FavorPlus, num_features=16, seed=9)),
    ).state_dict()
    assert not any(torch.equal(first[name].float(), seeded[name]) for name in names)


@every_attention
@every_position
def test_a_strict_load_before_any_forward(attention, positions):
    model, tokens = make(attention, positions=positions), some_bytes(2, N)
    torch.manual_seed(1)
    other = make(attention, positions=positions)
    assert not torch.equal(other.state_dict()["embedding.weight"], model.embedding.weight)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(tokens), model(tokens))


@every_attention
@every_position
@pytest.mark.parametrize("assign", [False, True])
def test_a_load_after_meta(attention, positions, assign):
    model, tokens = make(attention, torch.float32, positions=positions), some_bytes(2, N)
    with torch.device("meta"):
        other = make(attention, torch.float32, positions=positions)
    assert all(parameter.is_meta for parameter in (*other.parameters(), *other.buffers()))
    if not assign:
        other.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.fill_(torch.nan)  # whatever memory held
    other.load_state_dict(model.state_dict(), strict=True, assign=assign)
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(other.stream(tokens)[0], model.stream(tokens)[0])


@every_attention
def test_everything_saved_is_used(attention):
    """Nothing derived is in the state: every entry, made NaN, reaches the logits."""
    model, tokens = make(attention, positions="learned"), some_bytes(1, N)
    for name, tensor in model.state_dict().items():
        kept = tensor.clone()
        tensor.fill_(torch.nan)
        assert model(tokens).isnan().any(), name
        tensor.copy_(kept)
    assert model(tokens).isfinite().all()


@every_attention
def test_two_evaluations_are_equal(attention):
    model, tokens = make(attention, torch.float32).eval(), some_bytes(2, N)
    assert torch.equal(model(tokens), model(tokens))


def test_dropout_acts_in_training_alone():
    torch.manual_seed(3)
    model = make(dropout=0.5)
    torch.manual_seed(3)
    plain, tokens = make(), some_bytes(2, N)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    assert not torch.equal(model.train()(tokens), plain(tokens))


@every_attention
def test_every_parameter_is_trained(attention):
    model, tokens = make(attention, positions="learned"), some_bytes(4, 40)
    functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_have_the_dtype_of_the_weights(dtype):
    model, tokens = make(dtype=dtype, positions="sinusoidal"), some_bytes(2, N)
    assert model(tokens).dtype == model.stream(tokens)[0].dtype == dtype


def test_a_new_model_guesses():
    """Bytes drawn at random cost log 256 nats and half the variance of the logits."""
    model, tokens = ByteTransformer(num_layers=2, d_model=64), some_bytes(4, 100)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), some_bytes(4, 100).flatten())
    variance = model.head.weight.square().sum().item() / 256  # of a head over normed inputs
    # 400 targets, each with a logit of that variance.
    assert abs(loss.item() - math.log(256) - variance / 2) < 4 * math.sqrt(variance / 400)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_initial_widths_are_those_of_gpt_2(num_layers):
    model = ByteTransformer(num_layers=num_layers, d_model=64, positions="learned", seq_len=100)
    narrow = 0.02 / math.sqrt(2 * num_layers)
    widths = [(model.embedding.weight, 0.02), (model.position_embedding.weight, 0.02)]
    widths += [
        (weight, narrow) for block in model.blocks for weight in (block.attention.out.weight, block.mlp[2].weight)
    ]
    for weight, width in widths:
        # The variance of n normal numbers is known to √(2/n) of itself.
        assert abs(weight.square().mean().item() / width**2 - 1) < 4 * math.sqrt(2 / weight.numel())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"d_model": 0}, "d_model must be at least 1, got 0"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"positions": "rotary"}, "positions must be .*got 'rotary'"),
        ({"positions": "sinusoidal", "d_model": 7}, "even d_model, got 7"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ByteTransformer(**{"num_layers": 1, "d_model": 8, "attention": lambda d: nn.Identity(), **settings})


@pytest.mark.parametrize("tokens", [torch.zeros(5).long(), torch.zeros(2, 5)])
def test_tokens_that_are_no_bytes_are_refused(tokens):
    model = make()
    for call in (model, model.stream):
        with pytest.raises(ValueError, match=r"tokens must be \(b, n\) integers, got torch\.(int64|float32) of shape"):
            call(tokens)


# Generation, and the part of C11 that is about it.


def continued(model, prompt, num_tokens, choose):
    tokens = prompt
    for _ in range(num_tokens):
        tokens = torch.cat((tokens, choose(model(tokens)[:, -1])[:, None]), 1)
    return tokens


@every_attention
@every_position
def test_greedy_generation_takes_the_likeliest_byte(attention, positions):
    model, prompt = make(attention, positions=positions), some_bytes(3, 5)
    expected = continued(model, prompt, 12, lambda logits: logits.argmax(-1))
    assert torch.equal(model.generate(prompt, 12, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 12, top_k=1), expected)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.7, 5), (2.0, 256), (1.0, 1000)])
def test_generation_draws_from_the_logits_of_forward(temperature, top_k):
    model, prompt = make(), some_bytes(3, 5)
    generator = torch.Generator().manual_seed(5)
    drawn = model.generate(prompt, 20, temperature, top_k, generator)
    generator.manual_seed(5)

    def choose(logits):
        return sample(logits, temperature, top_k, generator)

    assert torch.equal(drawn, continued(model, prompt, 20, choose))


def test_a_generator_decides_alone():
    model, prompt = make(), some_bytes(2, 5)
    before = torch.get_rng_state()
    drawn = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_bytes_round_trip(dtype):
    text = bytes(range(256))
    prompt = torch.tensor(list(text)).to(dtype)[None]
    made = make().generate(prompt, 3)
    assert made.dtype == torch.int64
    assert bytes(made[0].tolist())[:256] == text
    assert made.shape == (1, 259)
    assert torch.equal(make().generate(prompt, 0), prompt.long())


def test_byte_zero_and_newline_are_bytes_like_any_other():
    model = make(attention="EluPlusOne-none")
    tokens = some_bytes(1, 9)
    for byte in (0, 10, 255):
        with_byte = tokens.clone()
        with_byte[0, 3] = byte
        close(model(with_byte), by_hand(model, with_byte), 1e-10)
        assert not torch.allclose(model(with_byte)[:, 3:], model(tokens)[:, 3:])
        # Such a byte can be generated too.
        logits = torch.full((4, 256), -100.0)
        logits[:, byte] = 0
        assert (sample(logits) == byte).all()


def frequencies(logits, draws=40_000, **options):
    drawn = sample(logits.expand(draws, -1), generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]).double() / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 8, 99])
def test_bytes_are_drawn_as_often_as_their_probability(temperature, top_k):
    logits = 2 * torch.randn(8)
    weight = (logits.double() / temperature).exp()
    if top_k is not None:
        weight[logits.argsort(descending=True)[top_k:]] = 0
    expected = weight / weight.sum()
    found = frequencies(logits, temperature=temperature, top_k=top_k)
    assert (found[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / 40_000).sqrt()
    assert ((found - expected).abs() <= 5 * deviation + 1e-12).all()


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_top_k_keeps_k_of_equal_logits(top_k):
    found = frequencies(torch.zeros(8), draws=2000, top_k=top_k)
    assert (found > 0).sum() == top_k


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.79, 0.94, 1.0])
def test_top_p_keeps_the_fewest_bytes_that_have_it(top_p):
    logits = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]).log()
    kept = {0.05: [1], 0.4: [1], 0.79: [1, 3], 0.94: [0, 1, 2, 3], 1.0: [0, 1, 2, 3, 4]}[top_p]
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = logits.double().exp()[kept]
    expected /= expected.sum()
    found = frequencies(logits, top_p=top_p)
    assert (found[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / 40_000).sqrt()
    assert ((found - expected).abs() <= 5 * deviation + 1e-12).all()


def test_top_p_goes_by_what_temperature_and_top_k_leave():
    """Of 4, 3, 2, 1 the first two are kept, so 4/7 and 3/7: half of it is the first alone."""
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).log()
    assert (frequencies(logits, draws=2000, top_k=2, top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (frequencies(logits, draws=2000, top_k=2, top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (frequencies(logits, draws=2000, temperature=0.1, top_p=0.9) > 0).tolist() == [True, False, False, False]


def test_a_continuation_is_what_generate_adds():
    model, prompt = make(), some_bytes(2, 5)
    whole = model.generate(prompt, 9, 0.8, 20, torch.Generator().manual_seed(1), 0.9)
    following = model.continuation(prompt, 0.8, 20, torch.Generator().manual_seed(1), 0.9)
    added = torch.stack([next(following) for _ in range(9)], dim=1)
    assert torch.equal(torch.cat((prompt.long(), added), 1), whole)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sampling_takes_any_dtype(dtype):
    found = frequencies(torch.tensor([0.0, -1000.0, 0.0], dtype=dtype), draws=1000)
    assert found[1] == 0
    assert abs(found[0] - 0.5) < 5 * math.sqrt(0.25 / 1000)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-30])
def test_a_low_temperature_takes_the_likeliest_byte(temperature):
    logits = torch.tensor([[0.0, 50.0, 49.0], [3.0, -50.0, 2.0]])
    assert sample(logits, temperature).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must not be negative, got -1"),
        ({"temperature": math.nan}, "temperature must not be negative, got nan"),
        ({"top_k": 0}, "top_k must keep at least 1 token, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"num_tokens": -1}, "num_tokens must not be negative, got -1"),
        ({"prompt": torch.zeros(1, 0).long()}, r"prompt must be .*got \(1, 0\)"),
        ({"prompt": torch.zeros(3).long()}, r"prompt must be .*got \(3,\)"),
    ],
)
def test_what_cannot_be_generated_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make().generate(**{"prompt": some_bytes(1, 3), "num_tokens": 2, **settings})


def test_generation_keeps_no_graph():
    model = make()
    assert not model.generate(some_bytes(1, 3), 2).requires_grad
    assert torch.is_grad_enabled()
    assert randn(1, grad=True).requires_grad


@pytest.mark.parametrize("attention", ["EluPlusOne-numerator", "EluPlusOne-before", "softmax"])
def test_turns_are_made_once_for_all_layers_and_steps(attention, monkeypatch):
    made = []
    make_turns = Rotation._make
    monkeypatch.setattr(Rotation, "_make", lambda *args: made.append(1) or make_turns(*args))
    monkeypatch.setattr(kept, "_tables", ())
    model = make(attention, num_layers=3)
    for _ in range(2):
        model(some_bytes(2, N)).sum().backward()
    assert len(made) == 1
    model(some_bytes(2, N + 1))  # another length has turns of its own
    assert len(made) == 2

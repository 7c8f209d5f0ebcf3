"""linrope's attention inside transformers' models."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    RoFormerModel,
    StaticCache,
    T5Config,
    T5Model,
)

from linrope import CosFormer, FavorPlus, Hedgehog, KernelAttention, Rotary, linear_attention
from linrope.integrations.transformers import linear_attention_forward, replace_attention, state_cache

V, N, PAD = 50, 12, 3
SMALL = {"vocab_size": V, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def gpt2(**options):
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    settings = {"vocab_size": V, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, **dropout, **NO_TOKENS}
    return GPT2LMHeadModel(GPT2Config(**settings | options))


def llama(**options):
    return LlamaForCausalLM(
        LlamaConfig(**SMALL | NO_TOKENS | {"num_key_value_heads": 2, "rope_theta": 500.0} | options)
    )


def bert(**options):
    return BertModel(BertConfig(**SMALL | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0} | options))


def roformer(kind=RoFormerForCausalLM, **options):
    settings = {"is_decoder": kind is RoFormerForCausalLM, "hidden_dropout_prob": 0.0, "max_position_embeddings": 64}
    return kind(RoFormerConfig(**SMALL | NO_TOKENS | settings | options))


DECODERS = {
    "gpt2": (gpt2, {}),
    "gpt2, rotary": (gpt2, {"rotary": Rotary(), "rotary_placement": "numerator"}),
    "gpt2, FAVOR+": (gpt2, {"feature_map": partial(FavorPlus, num_features=16)}),
    "llama, before": (llama, {}),
    "llama, numerator": (llama, {"rotary_placement": "numerator"}),
    "llama, FAVOR+": (llama, {"feature_map": partial(FavorPlus, num_features=16), "rotary_placement": "numerator"}),
    "roformer, before": (roformer, {}),
    "roformer, numerator": (roformer, {"rotary_placement": "numerator"}),
}
every_decoder = pytest.mark.parametrize("which", DECODERS)


def replaced(which: str):
    make, options = DECODERS[which]
    torch.manual_seed(0)
    model = make().double().eval()
    replace_attention(model, **options)
    return model


def tokens(b=2, n=N):
    torch.manual_seed(1)
    return torch.randint(1, V, (b, n))


# ---- the attention interface ----


@pytest.mark.parametrize("make", [gpt2, llama])
def test_set_attn_implementation_is_linear_attention_of_the_models_queries_and_keys(make, monkeypatch):
    torch.manual_seed(0)
    model = make().double().eval()
    softmax = model(tokens()).logits
    model.set_attn_implementation("linrope")
    seen = []
    forward = KernelAttention.forward
    monkeypatch.setattr(
        KernelAttention, "forward", lambda self, q, k, v, **o: seen.append((q, k, v)) or forward(self, q, k, v, **o)
    )
    assert not torch.allclose(model(tokens()).logits, softmax)
    assert len(seen) == 2
    attention = next(m for m in model.modules() if type(m).__name__ in ("GPT2Attention", "LlamaAttention"))
    project = attention.c_proj if make is gpt2 else attention.o_proj
    outputs = []
    project.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    model(tokens())
    query, key, value = seen[0]
    phi = [
        torch.where(x > 0, x + 1, x.exp()) for x in (query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
    ]
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    expected = linear_attention(*phi, value, backend="reference")
    assert_close(outputs[0], rearrange(expected, "b h n e -> b n (h e)"))
    model.set_attn_implementation("eager")
    assert_close(model(tokens()).logits, softmax)


def test_bert_sees_both_directions_and_no_pads():
    torch.manual_seed(0)
    model = bert().double().eval()
    model.set_attn_implementation("linrope")
    given = tokens()
    padded = torch.cat((given, torch.zeros(2, PAD, dtype=torch.long)), 1)
    mask = (torch.arange(N + PAD) < N).expand(2, -1)
    alone, among = model(given).last_hidden_state, model(padded, attention_mask=mask.long()).last_hidden_state[:, :N]
    assert_close(among, alone)
    changed = given.clone()
    changed[:, -1] = given[:, -1] % (V - 1) + 1
    assert (model(changed).last_hidden_state[:, 0] - alone[:, 0]).abs().max() > 1e-6


def test_cross_attention_is_not_causal():
    torch.manual_seed(0)
    model = bert(is_decoder=True, add_cross_attention=True).double().eval()
    model.set_attn_implementation("linrope")
    context, mask = torch.randn(2, 7, 32).double(), torch.ones(2, 7, dtype=torch.long)
    mask[:, -2:] = 0
    out = model(tokens(), encoder_hidden_states=context, encoder_attention_mask=mask).last_hidden_state
    cut = model(tokens(), encoder_hidden_states=context[:, :5]).last_hidden_state
    assert_close(out, cut)
    changed = context.clone()
    changed[:, 4] += 1
    later = model(tokens(), encoder_hidden_states=changed[:, :5]).last_hidden_state
    assert (later[:, 0] - cut[:, 0]).abs().max() > 1e-6


# ---- replaced attention ----


def test_weights_are_kept_and_every_layer_has_its_own_map():
    torch.manual_seed(0)
    model = llama()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names = replace_attention(model, feature_map=partial(FavorPlus, num_features=16))
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    rows = [after[f"{name}.linrope.feature_map.projection.rows"] for name in names]
    assert not torch.allclose(*rows)


@pytest.mark.parametrize("placement", ["before", "numerator"])
@pytest.mark.parametrize("make", [llama, roformer])
def test_the_rotation_is_where_it_is_said_to_be(make, placement):
    """The first layer's attention against the reference, with the projections' outputs rotated by linrope."""
    torch.manual_seed(0)
    model = make().double().eval()
    (name, _) = replace_attention(model, rotary_placement=placement)
    attention = model.get_submodule(name)
    seen = []
    attention.register_forward_hook(lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True)
    model(tokens())
    ((args, kwargs, output),) = seen
    x = args[0] if args else kwargs["hidden_states"]
    parts = [attention.q_proj, attention.k_proj, attention.v_proj] if make is llama else None
    q, k, v = (
        f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in parts or (attention.query, attention.key, attention.value)
    )
    k, v = (y.repeat_interleave(4 // y.shape[1], 1) for y in (k, v))
    rotary = Rotary(500.0, pairing="half") if make is llama else Rotary()
    if placement == "before":
        # Llama's tables are float32.
        q, k = rotary(q), rotary(k)
    q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    expected = linear_attention(q, k, v, rotary=rotary if placement == "numerator" else None, backend="reference")
    expected = rearrange(expected, "b h n e -> b n (h e)")
    expected = attention.o_proj(expected) if make is llama else expected
    assert_close(output[0], expected, rtol=1e-5, atol=1e-6) if placement == "before" else assert_close(
        output[0], expected
    )


@every_decoder
def test_later_tokens_do_not_exist(which):
    model, given = replaced(which), tokens()
    logits = model(given).logits
    changed = given.clone()
    changed[:, 8:] = changed[:, 8:] % (V - 1) + 1
    assert_close(model(changed).logits[:, :8], logits[:, :8])
    assert (model(changed).logits[:, 8:] - logits[:, 8:]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("which", "side"),  # a RoFormer's positions count pads: it has no position_ids
    [(which, side) for which in DECODERS for side in ("left", "right") if side == "right" or "roformer" not in which],
)
def test_pads_do_not_exist(which, side):
    model, given = replaced(which), tokens()
    pads = torch.zeros(2, PAD, dtype=torch.long)
    real = slice(PAD, None) if side == "left" else slice(N)
    padded = torch.cat((pads, given) if side == "left" else (given, pads), 1)
    mask = torch.zeros(2, N + PAD, dtype=torch.long)
    mask[:, real] = 1
    options = {} if which.startswith("roformer") else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert_close(model(padded, attention_mask=mask, **options).logits[:, real], model(given).logits)


@every_decoder
@pytest.mark.parametrize("make_cache", [lambda: None, state_cache], ids=["theirs", "ours"])
def test_the_cache_gives_the_parallel_logits(which, make_cache):
    model, given = replaced(which), tokens()
    expected = model(given).logits
    out = model(given[:, :5], use_cache=True, past_key_values=make_cache())
    parts, cache = [out.logits], out.past_key_values
    for part in (slice(5, 6), slice(6, 9), slice(9, N)):
        out = model(given[:, part], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)


@every_decoder
def test_generation_takes_the_likeliest_of_the_parallel_logits(which):
    model, given = replaced(which), tokens(n=4)
    made = model.generate(given, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(given))
    expected = given
    for _ in range(6):
        expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("which", ["llama, before", "llama, numerator", "gpt2", "llama, FAVOR+"])
def test_our_cache_does_not_grow_and_generates_the_same(which):
    model, given = replaced(which), tokens(n=4)
    padded = torch.cat((torch.zeros(2, PAD, dtype=torch.long), given), 1)
    for tokens_given in (given, padded):
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": (tokens_given > 0).long()}
        cache = state_cache()
        made = model.generate(tokens_given, past_key_values=cache, **options)
        assert torch.equal(made, model.generate(tokens_given, **options))
        assert [layer.state.kv.shape[-1] for layer in cache.layers] == [8, 8]
        assert cache.get_seq_length() == made.shape[1] - 1
    beams = {"num_beams": 3, "max_new_tokens": 5, "attention_mask": torch.ones_like(given), "do_sample": False}
    expected = model.generate(given, use_cache=False, **beams)
    assert torch.equal(model.generate(given, past_key_values=state_cache(), **beams), expected)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(1)


def test_our_cache_knows_where_padded_rows_go_on():
    """Padding on the right, then more tokens: their positions are given, and the state needs no others."""
    model, given = replaced("llama, numerator"), tokens()
    short = torch.cat((given[:, :5], torch.zeros(2, PAD, dtype=torch.long)), 1)
    mask = (short > 0).long()
    cache = model(short, attention_mask=mask, use_cache=True, past_key_values=state_cache()).past_key_values
    rest = torch.cat((mask, torch.ones(2, N - 5, dtype=torch.long)), 1)
    positions = torch.arange(5, N).expand(2, -1)
    out = model(given[:, 5:], attention_mask=rest, past_key_values=cache, position_ids=positions)
    assert_close(out.logits, model(given).logits[:, 5:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", ["llama, before", "llama, numerator", "gpt2"])
def test_generation_of_a_padded_batch_and_with_beams(which):
    model, given = replaced(which), tokens(n=4)
    alone = model.generate(given, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(given))
    padded = torch.cat((torch.zeros(2, PAD, dtype=torch.long), given), 1)
    among = model.generate(padded, max_new_tokens=5, do_sample=False, attention_mask=(padded > 0).long())
    assert torch.equal(among[:, PAD:], alone)
    options = {"num_beams": 3, "max_new_tokens": 5, "attention_mask": torch.ones_like(given), "do_sample": False}
    assert torch.equal(model.generate(given, **options), model.generate(given, use_cache=False, **options))


def test_learned_maps_are_trained_and_copied():
    torch.manual_seed(0)
    model = llama()
    replace_attention(model, feature_map=Hedgehog, rotary_placement="numerator")
    model(tokens(), labels=tokens()).loss.backward()
    (weight, *_) = [p for name, p in model.named_parameters() if ".linrope." in name]
    assert weight.grad.abs().max() > 0
    other = llama()
    replace_attention(other, feature_map=Hedgehog, rotary_placement="numerator")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("make", [gpt2, partial(gpt2, scale_attn_by_inverse_layer_idx=True), llama])
def test_favor_approaches_the_models_own_softmax(make):
    """The logits' distance from the host's own attention falls as the root of the features; a Llama rotates before."""
    torch.manual_seed(0)
    host = make().double().eval()
    softmax, errors = host(tokens()).logits, []
    for m in (64, 4096):
        squares = []
        for seed in range(4):
            model = copy.deepcopy(host)
            replace_attention(model, feature_map=partial(FavorPlus, num_features=m, seed=seed))
            squares.append((model(tokens()).logits - softmax).square().mean())
        errors.append(torch.stack(squares).mean().sqrt().item())
    assert errors[1] / errors[0] == pytest.approx(1 / 8, rel=0.4)


# ---- what is refused ----


def test_what_cannot_be_done_is_refused_with_the_reason():
    model = gpt2(attn_pdrop=0.1)
    model.set_attn_implementation("linrope")
    with pytest.raises(ValueError, match=r"no weights to drop: set the model's attention dropout, 0\.1, to 0"):
        model.train()(tokens())
    replace_attention(model)
    model.train()(tokens())

    model = llama()
    model.set_attn_implementation("linrope")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="a cache that grows"):
        model(tokens(), past_key_values=cache, use_cache=True)
    pairs = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    assert_close(model(tokens(), attention_mask=pairs).logits, model(tokens()).logits)
    pairs[:, :, 5, 2] = False
    with pytest.raises(ValueError, match="no masks of single pairs"):
        model(tokens(), attention_mask=pairs)


@pytest.mark.parametrize(
    "asked", ["sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "output_attentions"]
)
def test_what_models_may_ask_for_in_vain(asked):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=asked):
        linear_attention_forward(torch.nn.Module(), x, x, x, None, **{asked: torch.ones(3)[0]})


def test_models_that_cannot_be_replaced_are_left_as_they_were():
    with pytest.raises(
        ValueError, match="only attention of GPT-2, BERT, Llama and RoFormer can be replaced, got T5Model"
    ):
        replace_attention(T5Model(T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)))
    with pytest.raises(ValueError, match="rotates by itself: pass rotary_placement='numerator'"):
        replace_attention(llama(), rotary=Rotary())
    scaled = llama(rope_parameters={"rope_type": "proportional", "factor": 2.0, "rope_theta": 10_000.0})
    names = set(scaled.state_dict())
    with pytest.raises(ValueError, match=r"rotation is scaled \(proportional\)"):
        replace_attention(scaled, rotary_placement="numerator")
    assert set(scaled.state_dict()) == names
    assert scaled.config._attn_implementation != "linrope"


SCALED = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 0.5,
        "high_freq_factor": 3.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rotation_is_taken_over_as_it_is(kind):
    """Its frequencies are the model's own, in a text as long as it was made for and in a longer one."""
    rope = {"rope_type": kind, "rope_theta": 300.0, **SCALED[kind]}
    model = llama(rope_parameters=rope, max_position_embeddings=32)
    replace_attention(model, rotary_placement="numerator")
    rotary, own = model.model.layers[0].self_attn.linrope.rotary, model.model.rotary_emb
    for n in (10, 60):
        own(torch.zeros(1, n, 1), torch.arange(n)[None])  # dynamic ones follow the text
        width = 2 * len(own.inv_freq)
        assert_close(rotary.inv_freq(width, n), own.inv_freq.double(), rtol=1e-6, atol=0)
    assert rotary.pairing == "half"


@pytest.mark.parametrize("make", [gpt2, llama, roformer])
def test_replaced_once_and_no_more(make):
    model = make()
    replace_attention(model)
    with pytest.raises(ValueError, match="has been replaced already"):
        replace_attention(model)


def test_other_models_of_the_same_configuration_are_left_alone():
    torch.manual_seed(0)
    model = llama().eval()
    teacher = LlamaForCausalLM(model.config).eval()
    expected = teacher(tokens()).logits
    replace_attention(nn.ModuleDict({"student": model}))
    assert torch.equal(teacher(tokens()).logits, expected)
    assert model.config._attn_implementation == "linrope"


def test_a_saved_model_is_loaded_into_a_replaced_one(tmp_path):
    torch.manual_seed(0)
    model = llama()
    replace_attention(model, feature_map=Hedgehog)
    model.save_pretrained(tmp_path)
    other = llama()
    replace_attention(other, feature_map=Hedgehog)
    weights = load_file(tmp_path / "model.safetensors")
    assert not other.load_state_dict(weights, strict=False).unexpected_keys
    assert torch.equal(other.eval()(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("placement", ["before", "numerator"])
def test_gradients_are_those_of_the_reference(placement):
    """The parameters' gradients, with the kernel's backend exchanged for the reference's explicit matrices."""
    torch.manual_seed(0)
    model = llama().double()
    replace_attention(model, rotary_placement=placement)
    gradients = []
    for backend in ("auto", "reference"):
        for module in model.modules():
            if isinstance(module, KernelAttention):
                module.backend = backend
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_map_with_positions_generates_from_a_padded_batch():
    model, given = llama().double().eval(), tokens(n=4)
    replace_attention(model, feature_map=lambda d: CosFormer(d, max_positions=64, floor=0.01))
    padded = torch.cat((torch.zeros(2, PAD, dtype=torch.long), given), 1)
    options = {"max_new_tokens": 4, "do_sample": False}
    alone = model.generate(given, attention_mask=torch.ones_like(given), **options)
    assert torch.equal(model.generate(padded, attention_mask=(padded > 0).long(), **options)[:, PAD:], alone)


def test_a_llama_is_set_back_to_softmax_with_its_rotation():
    torch.manual_seed(0)
    model = llama().double().eval()
    softmax = model(tokens()).logits
    replace_attention(model, rotary_placement="numerator")
    assert not torch.allclose(model(tokens()).logits, softmax)
    model.set_attn_implementation("eager")
    assert_close(model(tokens()).logits, softmax)


@pytest.mark.parametrize("is_causal", [True, False])
def test_only_distances_count(is_causal):
    torch.manual_seed(0)
    model = llama(is_causal=is_causal).double().eval()
    replace_attention(model, rotary_placement="numerator")
    for module in model.modules():
        if hasattr(module, "linrope"):
            module.is_causal = is_causal
    positions = torch.arange(N)[None]
    assert_close(*(model(tokens(), position_ids=positions + ahead).logits for ahead in (100, 0)), rtol=1e-9, atol=1e-9)


def test_going_on_behind_padding_is_refused_where_positions_count():
    given = torch.cat((tokens(), torch.zeros(2, PAD, dtype=torch.long)), 1)
    mask = (given > 0).long()
    for placement, refused in (("before", False), ("numerator", True)):
        model = llama().eval()
        replace_attention(model, rotary_placement=placement)
        cache = model(given, attention_mask=mask, use_cache=True).past_key_values
        call = {"attention_mask": torch.cat((mask, mask[:, :1]), 1), "past_key_values": cache}
        if refused:
            with pytest.raises(ValueError, match="pad on the left"):
                model(given[:, :1], **call)
        else:
            model(given[:, :1], **call)


def test_cross_attention_is_not_rotated():
    model = bert(is_decoder=True, add_cross_attention=True)
    replace_attention(model, rotary=Rotary(), rotary_placement="numerator")
    rotaries = {name: m.linrope.rotary for name, m in model.named_modules() if hasattr(m, "linrope")}
    assert {name: rotary is None for name, rotary in rotaries.items()} == {
        name: "crossattention" in name for name in rotaries
    }


def test_a_roformer_encoder():
    torch.manual_seed(0)
    model = roformer(RoFormerModel).double().eval()
    replace_attention(model, rotary_placement="numerator")
    given = tokens()
    mask = (torch.arange(N + PAD) < N).long().expand(2, -1)
    padded = torch.cat((given, torch.zeros(2, PAD, dtype=torch.long)), 1)
    among = model(padded, attention_mask=mask).last_hidden_state[:, :N]
    assert_close(among, model(given).last_hidden_state)


# ---- from softmax to linear ----


@pytest.mark.slow
def test_training_recovers_most_of_what_the_exchange_costs():
    """Bytes of Python's help texts: trained with softmax, exchanged, trained on; beside as much training from scratch."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics.values()).encode()))

    def train(model, steps, seed):
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            starts = torch.randint(0, len(text) - 64, (16,), generator=generator)
            batch = torch.stack([text[i : i + 64] for i in starts])
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def loss(model):
        generator = torch.Generator().manual_seed(99)
        starts = torch.randint(0, len(text) - 64, (64,), generator=generator)
        batch = torch.stack([text[i : i + 64] for i in starts])
        with torch.no_grad():
            return model(batch, labels=batch).loss.item()

    torch.manual_seed(0)
    model = llama(vocab_size=256, hidden_size=64, intermediate_size=128)
    scratch = copy.deepcopy(model)
    train(model, 400, seed=0)
    softmax = loss(model)
    replace_attention(model, rotary_placement="numerator")
    exchanged = loss(model)
    train(model, 200, seed=1)
    recovered = loss(model)
    replace_attention(scratch, rotary_placement="numerator")
    train(scratch, 200, seed=1)
    print(f"softmax {softmax:.3f}, exchanged {exchanged:.3f}, recovered {recovered:.3f}, scratch {loss(scratch):.3f}")
    assert exchanged > softmax
    assert (exchanged - recovered) / (exchanged - softmax) > 0.5
    assert recovered < loss(scratch)

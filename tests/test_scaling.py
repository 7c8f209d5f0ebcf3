import math

import pytest
import torch

from linrope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    NTKScaling,
    Rotary,
    YaRN,
    rotate,
)
from tests.cases import close, randn

BASE, WIDTH, TRAINED = 10_000.0, 16, 64
SHORT, LONG = tuple(1 + i / 10 for i in range(WIDTH // 2)), tuple(1.0 + i for i in range(WIDTH // 2))
PLAIN = [BASE ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]


def turned_within_training(frequency: float) -> float:
    return TRAINED * frequency / (2 * math.pi)


def ntk(factor: float) -> list[float]:
    base = BASE * factor ** (WIDTH / (WIDTH - 2))
    return [base ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]


def llama3(frequency: float, factor: float) -> float:
    """By cases, as the release of Llama 3.1 words it: by wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength < TRAINED / 4:
        return frequency
    if wavelength > TRAINED / 1:
        return frequency / factor
    smooth = (TRAINED / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


# Scaling, length of the text, and the frequencies by the published formula.
FORMULAS = {
    "linear": (LinearScaling(4.0), 10, [f / 4 for f in PLAIN]),
    "NTK": (NTKScaling(4.0), 10, ntk(4.0)),
    "dynamic NTK, short": (DynamicNTKScaling(TRAINED, 4.0), TRAINED, PLAIN),
    "dynamic NTK, long": (DynamicNTKScaling(TRAINED, 4.0), 3 * TRAINED, ntk(4.0 * 3 - 3)),
    "dynamic NTK, fixed": (DynamicNTKScaling(TRAINED, 1.0, seq_len=5 * TRAINED), 10, ntk(5.0)),
    "Llama 3": (Llama3Scaling(8.0, TRAINED), 10, [llama3(f, 8.0) for f in PLAIN]),
    "LongRoPE, short": (LongRoPE(SHORT, LONG, TRAINED), TRAINED, [f / x for f, x in zip(PLAIN, SHORT, strict=True)]),
    "LongRoPE, long": (LongRoPE(SHORT, LONG, TRAINED), TRAINED + 1, [f / x for f, x in zip(PLAIN, LONG, strict=True)]),
    "LongRoPE, fixed": (
        LongRoPE(SHORT, LONG, TRAINED, seq_len=TRAINED + 1),
        1,
        [f / x for f, x in zip(PLAIN, LONG, strict=True)],
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_frequencies_are_the_published_formula(name):
    scaling, seq_len, expected = FORMULAS[name]
    expected = torch.tensor(expected, dtype=torch.float64)
    close(Rotary(BASE, scaling=scaling).inv_freq(WIDTH, seq_len), expected, 1e-13)
    # And a rotation turns by them: pairs (1, 0) become (cos, sin).
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(seq_len, WIDTH // 2)
    angle = torch.arange(seq_len)[:, None] * expected
    close(rotate(x, scaling=scaling), torch.stack((angle.cos(), angle.sin()), -1).flatten(-2), 1e-12)


def test_partial_rotation_scales_by_the_rotated_width():
    half = Rotary(BASE, fraction=0.5, scaling=NTKScaling(4.0))
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(30, WIDTH)
    angle = torch.arange(30)[:, None] * torch.tensor(ntk(4.0), dtype=torch.float64)
    expected = torch.cat((torch.stack((angle.cos(), angle.sin()), -1).flatten(-2), x[:, WIDTH:]), dim=-1)
    close(half(x), expected, 1e-12)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    scaled = Rotary(BASE, scaling=NTKScaling(7.0)).inv_freq(WIDTH)
    assert scaled[0] == 1
    close(scaled[-1], torch.tensor(PLAIN[-1] / 7, dtype=torch.float64), 1e-13)


def test_yarn_leaves_pairs_that_turn_often_and_interpolates_those_that_hardly_turn():
    """The paper's definition at both ends of its ramp (eq. 17 and 18); in between, monotonously from one to the other."""
    width, trained, factor = 64, 2048, 16.0
    plain = torch.tensor([BASE ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    scaled = Rotary(BASE, scaling=YaRN(factor, trained)).inv_freq(width)
    turns = trained * plain / (2 * math.pi)
    # The ramp runs from the pair before the one that turns 32 times to the one after that which turns once.
    fast, slow = turns >= 32, turns <= 1
    slow = slow & slow.roll(1)
    assert fast.sum() > 3
    assert slow.sum() > 3
    close(scaled[fast], plain[fast], 1e-13)
    close(scaled[slow], plain[slow] / factor, 1e-13)
    share = scaled / plain
    assert (share.diff() <= 1e-15).all()
    between = ~fast & ~(turns <= 1)
    assert ((share[between] < 1) & (share[between] > 1 / factor)).sum() > 3


def test_attention_factors():
    assert YaRN(8.0, 64).attention_factor == pytest.approx(0.1 * math.log(8.0) + 1, rel=1e-15)
    assert YaRN(8.0, 64, softmax_factor=1.5).attention_factor == 1.5
    assert LongRoPE((1.0,), (2.0,), 64, factor=4.0).attention_factor == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(64)), rel=1e-15
    )
    assert Rotary(scaling=LinearScaling(4.0)).attention_factor == Rotary().attention_factor == 1.0


@pytest.mark.parametrize("base", [100.0, BASE, 500_000.0])
@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
@pytest.mark.parametrize(("kind", "seq_len"), [("linear", 1), ("dynamic", 1), ("dynamic", 999), ("yarn", 1), ("llama3", 1), ("longrope", 1), ("longrope", 999)])  # fmt: skip
def test_frequencies_are_those_of_transformers(kind, seq_len, factor, base):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    trained, width = 128, 32
    short, long = [1 + i / 10 for i in range(16)], [1 + i / 2 for i in range(16)]
    ours, theirs = {
        "linear": (lambda: LinearScaling(factor), {}),
        "dynamic": (lambda: DynamicNTKScaling(trained, factor), {}),
        "yarn": (lambda: YaRN(factor, trained), {"original_max_position_embeddings": trained}),
        "llama3": (
            lambda: Llama3Scaling(factor, trained),
            {"original_max_position_embeddings": trained, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        "longrope": (
            lambda: LongRoPE(short, long, trained, factor),
            {"original_max_position_embeddings": trained, "short_factor": short, "long_factor": long},
        ),
    }[kind]
    config = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": kind, "rope_theta": base, "factor": factor, **theirs},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    rotary = Rotary(base, pairing="half", scaling=ours())
    close(rotary.inv_freq(width, seq_len), expected.double(), 1e-6)  # theirs are float32
    assert rotary.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_a_long_text_in_between_changes_nothing():
    for scaling in (DynamicNTKScaling(8, 2.0), LongRoPE((1.0, 2.0), (3.0, 4.0), 8)):
        rotary, x = Rotary(scaling=scaling), randn(40, 4)
        short, again = rotary(x[:8]), rotary(x[:8], torch.arange(8))
        long = rotary(x)
        assert torch.equal(rotary(x[:8]), short)
        assert torch.equal(rotary(x[:8], torch.arange(8)), again)
        assert torch.equal(short, again)
        assert not torch.equal(long[:8], short)
        close(rotary(x, seq_len=torch.tensor(8.0))[:8], short, 1e-14)


def test_each_row_has_the_frequencies_of_its_own_length():
    rotary, x = Rotary(scaling=DynamicNTKScaling(4, 2.0)), randn(2, 3, 5, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 40]])
    turned = rotary(x, positions)
    for b in range(2):
        close(turned[b : b + 1], rotary(x[b : b + 1], positions[b : b + 1]), 1e-14)
        close(turned[b], rotary(x[b], positions[b]), 1e-14)


def test_scalings_of_equal_settings_are_equal_and_share_their_tables():
    assert NTKScaling(2.0) == NTKScaling(2.0) != NTKScaling(3.0)
    assert LongRoPE([1, 2], [3, 4], 8) == LongRoPE((1.0, 2.0), (3.0, 4.0), 8)
    x = torch.randn(1, 1, 9, 8)
    turns = [Rotary(scaling=scaling).turns(x) for scaling in (NTKScaling(2.0), NTKScaling(2.0), NTKScaling(3.0), None)]
    assert turns[0].data_ptr() == turns[1].data_ptr()
    assert not torch.equal(turns[1], turns[2])
    assert not torch.equal(turns[2], turns[3])


def test_a_rotation_is_given_another_scaling():
    first = Rotary(500.0, fraction=0.5, pairing="half")
    second = first.with_scaling(LinearScaling(3.0))
    x = randn(7, 8)
    assert torch.equal(second(x), rotate(x, base=500.0, fraction=0.5, pairing="half", scaling=LinearScaling(3.0)))
    assert first.scaling is None
    assert second.for_width(9).scaling == LinearScaling(3.0)
    assert "LinearScaling(factor=3.0)" in repr(second)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LinearScaling(0.5), "factor must be at least 1, got 0.5"),
        (lambda: NTKScaling(float("nan")), "factor must be at least 1, got nan"),
        (lambda: DynamicNTKScaling(0, 2.0), "original_seq_len must be at least 1, got 0"),
        (lambda: DynamicNTKScaling(8, 2.0, seq_len=0), "seq_len must be at least 1, got 0"),
        (lambda: YaRN(2.0, 8, beta_fast=1.0, beta_slow=2.0), "beta_slow must be above 0 and below beta_fast, got 2 and 1"),
        (lambda: YaRN(2.0, 8, softmax_factor=0.0), "softmax_factor must be positive, got 0.0"),
        (lambda: Llama3Scaling(2.0, 8, 4.0, 4.0), "low_freq_factor must be above 0 and below high_freq_factor, got 4 and 4"),
        (lambda: LongRoPE([1.0], [1.0, 2.0], 8), "of one length, got 1 and 2"),
        (lambda: LongRoPE([0.0], [1.0], 8), r"short_factor must hold positive numbers, got \[0.0\]"),
        (lambda: LongRoPE([1.0], [1.0], 1), "original_seq_len must be at least 2, got 1"),
        (lambda: rotate(randn(3, 2), scaling=NTKScaling(2.0)), "NTKScaling needs at least two pairs to turn, got a rotated width of 2"),
        (lambda: rotate(randn(3, 8), scaling=LongRoPE([1.0], [1.0], 8)), "a factor for each of the 4 pairs, got 1"),
        (lambda: rotate(randn(3, 8), base=1.0, scaling=YaRN(2.0, 8)), "YaRN needs a base above 1, got 1"),
        (lambda: Rotary(scaling="yarn"), "scaling must be a linrope.Scaling or None, got 'yarn'"),
    ],
)  # fmt: skip
def test_settings_that_scale_nothing_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()

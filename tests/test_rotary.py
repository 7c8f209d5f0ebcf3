import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope import ByteTransformer, LinearAttention, Rotary, rotate
from tests.cases import close, randn, turn

# b, h, n and d all differ, so that no axis can stand in for another.
B, H, N, D = 2, 3, 5, 8
FAR = torch.cat((torch.arange(4097), torch.tensor([65_536, 2**20])))
LOW = (torch.float16, torch.bfloat16)


def unit_pairs(n: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Pairs (1, 0), which a rotation turns into (cos, sin)."""
    x = torch.zeros(n, width, dtype=dtype)
    x[:, 0::2] = 1
    return x


def true_tables(positions: torch.Tensor, width: int, base: float = 10_000.0) -> torch.Tensor:
    """(cos, sin) interleaved, float64."""
    angle = positions.double()[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("base", [10.0, 10_000.0])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("batched", [False, True])
def test_rotation_is_a_complex_product_along_the_token_axis(pairing, base, fraction, batched):
    x = randn(B, H, N, D)
    positions = torch.randint(0, 1000, (B, N) if batched else (N,))
    rotary = Rotary(base=base, fraction=fraction, pairing=pairing)
    expected = turn(x, positions, base=base, width=int(fraction * D), pairing=pairing)
    close(rotary(x, positions), expected, 1e-12)


def test_each_token_is_turned_alone():
    x, positions = randn(B, H, N, D), torch.randint(0, 1000, (B, N))
    turned = Rotary()(x, positions)
    for b in range(B):
        for h in range(H):
            for t in range(N):
                alone = Rotary()(x[b, h, t : t + 1], positions[b, t : t + 1])
                close(turned[b, h, t : t + 1], alone, 1e-14)


def test_tokens_without_heads_or_batch_are_rotated_too():
    x, positions = randn(N, D), torch.arange(N)
    close(Rotary()(x, positions), turn(x, positions), 1e-12)
    x = randn(B, N, D)
    close(Rotary()(x, torch.arange(B * N).reshape(B, N)), turn(x, torch.arange(B * N).reshape(B, N)), 1e-12)


def test_products_depend_on_distance_alone():
    q, k = randn(1, D), randn(1, D)

    def product(p, s):
        return (rotate(q, torch.tensor([p])) * rotate(k, torch.tensor([s]))).sum()

    for shift in (1, 1000, 2**20):
        close(product(7 + shift, 3 + shift), product(7, 3), 1e-9)
    assert abs(product(7, 3) - product(3, 7)) > 1e-3


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_pairings_agree_after_the_permutation_that_relates_them(fraction):
    x, positions = randn(B, H, N, D), torch.arange(N) + 3
    width = int(fraction * D)
    order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, D)))
    half = rotate(x[..., order], positions, fraction=fraction, pairing="half")
    close(half, rotate(x, positions, fraction=fraction)[..., order], 1e-14)


def test_partial_rotation_takes_frequencies_from_the_rotated_width():
    x, positions = randn(N, D), torch.arange(N) + 1
    turned = rotate(x, positions, fraction=0.5)
    assert torch.equal(turned[:, 4:], x[:, 4:])
    # Width 4: frequencies 1 and 1/100, not the 1 and 1/10 that width 8 begins with.
    angle = positions.double() / 100
    close(turned[:, 2], x[:, 2] * angle.cos() - x[:, 3] * angle.sin(), 1e-13)
    close(turned[:, 3], x[:, 2] * angle.sin() + x[:, 3] * angle.cos(), 1e-13)


def test_one_pair_turns_by_one_radian_a_token():
    turned = rotate(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([3]))
    close(turned, torch.tensor([[math.cos(3), math.sin(3)]], dtype=torch.float64), 1e-15)


def test_the_gradient_is_the_inverse_rotation():
    x, g, positions = randn(B, H, N, D, grad=True), randn(B, H, N, D), torch.arange(N)
    (grad,) = torch.autograd.grad(rotate(x, positions), x, g)
    close(grad, rotate(g, -positions), 1e-14)


def cast_to_bfloat16(rotary, x):
    return rotary.bfloat16()(x, FAR)


def cast_to_half(rotary, x):
    return rotary.half()(x, FAR)


def under_autocast(rotary, x):
    with torch.autocast("cpu", torch.bfloat16):
        return rotary(x, FAR)


def after_a_low_precision_call(rotary, x):
    rotary(x.bfloat16(), FAR)
    return rotary(x, FAR)


def after_a_low_precision_call_under_autocast(rotary, x):
    with torch.autocast("cpu", torch.bfloat16):
        rotary(x[:10].half(), FAR[:10])
    return rotary(x, FAR)


def under_a_low_default_dtype(rotary, x):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return rotary(x, FAR)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "call",
    [
        cast_to_bfloat16,
        cast_to_half,
        under_autocast,
        after_a_low_precision_call,
        after_a_low_precision_call_under_autocast,
        under_a_low_default_dtype,
    ],
)
@pytest.mark.parametrize("width", [2, 64])
def test_tables_are_exact_far_away(call, width):
    turned = call(Rotary(), unit_pairs(len(FAR), width))
    assert turned.dtype == torch.float32
    assert (turned.double() - true_tables(FAR, width)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_features_lose_only_their_own_rounding(dtype):
    turned = Rotary()(unit_pairs(len(FAR), 64, dtype), FAR)
    assert turned.dtype == dtype
    expected = true_tables(FAR, 64)
    # Half a unit in the last place, plus what float32 tables add.
    assert ((turned.double() - expected).abs() <= expected.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW])
def test_neighbours_far_away_differ(dtype):
    turned = Rotary()(unit_pairs(2, 2, dtype), torch.tensor([256, 257]))
    expected = true_tables(torch.tensor([256, 257]), 2)
    close(turned[1].double() - turned[0].double(), expected[1] - expected[0], 2 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_output_dtype_is_the_input_dtype(dtype, fraction):
    assert Rotary(fraction=fraction)(randn(B, H, N, D, dtype=dtype), torch.arange(N)).dtype == dtype


def test_inference_mode_before_training():
    rotary, positions = Rotary(), torch.arange(N)
    x = randn(N, D, grad=True)
    with torch.inference_mode():
        rotary(x, positions)
    (grad,) = torch.autograd.grad(rotary(x, positions).square().sum(), x)
    close(grad, 2 * x, 1e-13)  # a rotation keeps the norm


def test_a_longer_input_in_between_changes_nothing():
    rotary, x = Rotary(), randn(300, D)
    short = rotary(x[:7], torch.arange(7))
    long = rotary(x, torch.arange(300))
    assert torch.equal(rotary(x[:7], torch.arange(7)), short)
    assert torch.equal(long[:7], short)
    close(rotary(x[:7], torch.arange(50, 57)), turn(x[:7], torch.arange(50, 57)), 1e-12)


def test_two_bases_do_not_share_a_table():
    x, positions = randn(N, D), torch.arange(N)
    near, far = Rotary(base=100.0), Rotary(base=10_000.0)
    for rotary, base in ((near, 100.0), (far, 10_000.0), (near, 100.0)):
        close(rotary(x, positions), turn(x, positions, base=base), 1e-12)


def test_nothing_of_a_rotation_is_saved():
    model = ByteTransformer(num_layers=2, d_model=8, attention=lambda d: LinearAttention(d, 2, rotary=Rotary()))
    model(torch.zeros(1, 9, dtype=torch.long))
    assert not Rotary().state_dict()
    assert not [name for name in model.state_dict() if "rot" in name]


def test_a_rotation_is_right_after_to_empty_from_meta():
    with torch.device("meta"):
        rotary = Rotary()
    rotary.to_empty(device="cpu")
    x, positions = randn(N, D), torch.arange(N)
    close(copy.deepcopy(rotary)(x, positions), turn(x, positions), 1e-12)


@pytest.mark.parametrize(("width", "fraction", "seen"), [(7, 1.0, "7"), (6, 0.5, "3")])
def test_an_odd_rotated_width_is_refused(width, fraction, seen):
    with pytest.raises(ValueError, match=f"even width, got {seen}"):
        Rotary(fraction=fraction)(randn(N, width), torch.arange(N))


@pytest.mark.parametrize(
    "positions", [torch.arange(N + 1), torch.zeros(B + 1, N), torch.zeros(B, N, 1), torch.tensor(3)]
)
def test_positions_that_do_not_fit_are_refused(positions):
    with pytest.raises(ValueError, match=r"positions must be .*got"):
        Rotary()(randn(B, H, N, D), positions)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"base": 0.0}, "base"),
        ({"base": float("nan")}, "base"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"pairing": "pairs"}, "pairing"),
        ({"scaling": "yarn"}, "scaling"),
    ],
)
def test_settings_that_make_no_rotation_are_refused(settings, named):
    with pytest.raises(ValueError, match=rf"{named} must .*got"):
        Rotary(**settings)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(("width", "fraction", "even"), [(15, 1.0, 14), (15, 0.5, 8), (6, 0.5, 2), (8, 1.0, 8)])
def test_for_width_turns_the_largest_even_part(width, fraction, even, pairing):
    x, positions = randn(N, width), torch.arange(N)
    rotary = Rotary(base=100.0, fraction=fraction, pairing=pairing).for_width(width)
    close(rotary(x, positions), turn(x, positions, base=100.0, width=even, pairing=pairing), 1e-12)


def test_for_width_refuses_less_than_a_pair():
    with pytest.raises(ValueError, match="at least one pair, got 1"):
        Rotary().for_width(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_positions_left_out_count_from_zero(dtype, pairing):
    x, rotary = torch.randn(2, 3, 9, 8).to(dtype), Rotary(fraction=0.5, pairing=pairing)
    for _ in range(2):  # made, and kept
        assert torch.equal(rotary(x), rotary(x, torch.arange(9)))


def test_turns_that_are_kept_depend_on_all_they_are_made_of():
    x = torch.randn(1, 1, 9, 8)
    calls = [
        (Rotary(), x),
        (Rotary(base=100.0), x),
        (Rotary(fraction=0.5), x),
        (Rotary(), x.double()),
        (Rotary(), x[:, :, :5]),
    ]
    for rotary, features in calls * 2:
        assert torch.equal(rotary(features), rotary(features, torch.arange(features.shape[2])))


def test_turns_made_in_inference_mode_serve_a_training_step():
    x = torch.randn(1, 1, 11, 6)
    with torch.inference_mode():
        Rotary()(x)
    x.requires_grad_()
    Rotary()(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps lengths


def test_turns_made_by_a_fake_mode_do_not_outlive_it():
    with FakeTensorMode():
        Rotary()(torch.randn(1, 1, 12, 6))
    x = torch.randn(1, 1, 12, 6)
    assert torch.equal(Rotary()(x), Rotary()(x, torch.arange(12)))
    with FakeTensorMode():
        assert Rotary()(torch.randn(1, 1, 12, 6)).shape == (1, 1, 12, 6)


def test_features_may_begin_anywhere_in_memory():
    x = torch.randn(9)[1:].view(1, 1, 2, 4)
    assert torch.equal(Rotary()(x), Rotary()(x.clone()))

"""RoFormer's bound by its values and by loops, and the learned decay by pairs that are rotated one by one."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch.testing import assert_close

from linrope import ByteTransformer, LearnedRotary, LinearAttention, NTKScaling, Rotary
from plots import rotary_decay
from plots.rotary_decay import decay_bound, draw, learned_decay, main


def test_the_values_of_the_paper():
    """Of d = 128 and base 10,000, as computed from the formula by others."""
    distances = torch.tensor([0, 1, 10, 50, 100, 256])
    expected = torch.tensor([32.5, 31.538, 17.954, 12.629, 10.227, 6.543], dtype=torch.float64)
    assert_close(decay_bound(distances), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize(("width", "base"), [(2, 10.0), (6, 100.0), (64, 500_000.0)])
def test_the_formula_in_complex_numbers(width, base):
    for m in (0, 1, 7, 1000):
        total, sums = 0j, []
        for k in range(width // 2):
            total += cmath.exp(1j * m * base ** (-2 * k / width))
            sums.append(abs(total))
        assert decay_bound(torch.tensor([m]), width, base).item() == pytest.approx(sum(sums) / len(sums))


def test_it_bounds_products_of_rotated_vectors():
    """|q·R_m k| ≤ max |h_{j+1} - h_j| Σ |S_j|, with h the complex products of pairs, and 0 after the last."""
    torch.manual_seed(0)
    rotary, d = Rotary(), 16
    for m in (0, 1, 5, 100):
        q, k = torch.randn(2, 1, d, dtype=torch.float64)
        product = (rotary(q, torch.tensor([m])) @ rotary(k, torch.tensor([0])).mT).abs().item()
        h = torch.view_as_complex(q.view(-1, 2)) * torch.view_as_complex(k.view(-1, 2)).conj()
        steps = (torch.cat((h[1:], h.new_zeros(1))) - h).abs().max().item()
        assert product <= steps * decay_bound(torch.tensor([m]), d).item() * d / 2 + 1e-12


def network(**options):
    torch.manual_seed(0)
    return ByteTransformer(num_layers=2, d_model=16, attention=lambda d: LinearAttention(d, 2, **options)).double()


def test_the_learned_decay_is_that_of_pairs():
    model, tokens, rotary = network(rotary=Rotary()), torch.randint(0, 256, (2, 9)), Rotary()
    found = learned_decay(model, tokens)
    assert list(found) == ["blocks.0.attention.kernel", "blocks.1.attention.kernel"]
    block = model.blocks[0]
    x = block.attention_norm(model.embedding(tokens))
    q, k = (
        torch.where(y > 0, y + 1, y.exp()).unflatten(-1, (2, 8)).transpose(1, 2)
        for y in (block.attention.query(x), block.attention.key(x))
    )
    for m in range(9):
        rotated = unrotated = 0.0
        for t in range(m, 9):
            normalizer = (q[:, :, t] * k[:, :, : t + 1].sum(2)).sum(-1)
            turned = [rotary(y[:, :, at : at + 1], torch.tensor([at])) for y, at in ((q, t), (k, t - m))]
            rotated += ((turned[0] * turned[1]).sum((-1, -2)) / normalizer).sum().item()
            unrotated += ((q[:, :, t] * k[:, :, t - m]).sum(-1) / normalizer).sum().item()
        assert found["blocks.0.attention.kernel"][m].item() == pytest.approx(rotated / unrotated)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": Rotary(), "rotary_placement": "before"},
        {"rotary": Rotary(), "normalizer": "rms"},
    ],
)
def test_layers_without_a_rotation_in_the_numerator_are_refused(options):
    with pytest.raises(ValueError, match="no layer of this network rotates in the numerator, over a sum"):
        learned_decay(network(**options), torch.randint(0, 256, (1, 5)))


def test_it_draws(tmp_path, capsys):
    assert main(["--base", "100", "10000", "--width", "8", "--out", str(tmp_path / "deep" / "decay")]) == 0
    png, svg = capsys.readouterr().out.split()
    assert png.endswith("decay.png")
    text = (tmp_path / "deep" / "decay.svg").read_text()
    assert svg.endswith("decay.svg")
    assert all(label in text for label in ("base 100", "base 10,000", "for 8 features"))
    learned = learned_decay(network(rotary=Rotary()), torch.randint(0, 256, (1, 5)))
    draw(tmp_path / "both", learned=learned, source="a test")
    assert "blocks.1" in (tmp_path / "both.svg").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--width", "7"], "width must be even and at least 2, got 7"),
        (["--base", "-1"], "base must be positive, got -1"),
        (["--distances", "0"], "distances must be at least 1, got 0"),
        (["--ckpt", "nowhere.ckpt"], "nowhere.ckpt is not a whole checkpoint"),
    ],
)
def test_what_cannot_be_drawn_gets_one_message(tmp_path, capsys, given, message):
    assert main([*given, "--out", str(tmp_path / "decay")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rotary", [Rotary([10.0, 20.0]), Rotary(scaling=NTKScaling(2.0)), LearnedRotary()])
def test_a_rotation_of_more_than_a_base_wants_one_for_the_bound(tmp_path, capsys, monkeypatch, rotary):
    monkeypatch.setattr(rotary_decay, "load_network", lambda path: network(rotary=rotary))
    call = ["--ckpt", "runs/e/a/seed-0/checkpoints/last.ckpt", "--distances", "8", "--out", str(tmp_path / "decay")]
    assert main(call) == 2
    assert "has no one base for the bound: give --base" in capsys.readouterr().err
    assert main([*call, "--base", "20"]) == 0
    assert "base 20" in (tmp_path / "decay.svg").read_text()

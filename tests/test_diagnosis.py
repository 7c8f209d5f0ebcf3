"""Diagnostics of trained networks: logged in training without changing it, and drawn."""

from __future__ import annotations

import csv
import math
from types import SimpleNamespace

import pytest
import torch

from linrope import ByteTransformer, LinearAttention, Rotary
from linrope.diagnostics import diagnose
from plots import diagnostics, rotary_decay
from plots.checkpoints import load_network, real_text
from tasks.diagnostics import Diagnosis
from tests.test_enwik8_cli import ROOT, TINY, fit

ROTATED = [TINY[0], "--config=configs/positions/rotary_numerator.yaml", *TINY[1:], "--trainer.max_steps=4"]
DIAGNOSED = ["--trainer.callbacks+=tasks.diagnostics.Diagnosis", "--trainer.callbacks.every=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training, without and with diagnostics."""
    folder = tmp_path_factory.mktemp("diagnosis")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, more in (("plain", []), ("diagnosed", DIAGNOSED)):
            assert fit(folder / name / "seed-0", *more, base=ROTATED) == 0
    return folder


def rows(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_training_is_not_changed_by_it(runs):
    plain, diagnosed = (torch.load(runs / name / "seed-0/checkpoints/last.ckpt") for name in ("plain", "diagnosed"))
    for name, weight in plain["state_dict"].items():
        assert torch.equal(weight, diagnosed["state_dict"][name]), name
    for one, other in zip(rows(runs / "plain" / "seed-0"), rows(runs / "diagnosed" / "seed-0"), strict=True):
        assert one["train/loss"] == other["train/loss"]


def test_what_is_logged_is_what_the_network_does(runs):
    logged = rows(runs / "diagnosed" / "seed-0")
    assert [bool(row["diagnostics/entropy"]) for row in logged] == [False, True, False, True]
    last = logged[-1]
    assert float(last["diagnostics/row_sums"]) > 0
    assert 0 < float(last["diagnostics/entropy"]) < math.log(16)
    assert float(logged[1]["diagnostics/seconds"]) < float(last["diagnostics/seconds"])


def test_what_is_logged_is_what_the_layers_do():
    """Means over layers and heads, the largest growth and the smallest normalizer, of the batch's first sequence."""
    torch.manual_seed(0)
    network = ByteTransformer(num_layers=2, d_model=16, attention=lambda d: LinearAttention(d, 2, rotary=Rotary()))
    logged = []
    logger = SimpleNamespace(log_metrics=lambda row, step: logged.append((step, row)))
    trainer, module = SimpleNamespace(global_step=0, loggers=[logger]), SimpleNamespace(network=network)
    module.modules = network.modules
    diagnosis, batch = Diagnosis(every=3, max_tokens=7), torch.randint(0, 256, (2, 12))
    diagnosis.on_train_start(trainer, module)
    for trainer.global_step in (1, 2, 3, 3, 4):
        diagnosis.on_train_batch_end(trainer, module, None, batch, 0)
    ((step, row),) = logged
    assert step == 3
    layers = list(diagnose(network, batch[:1, :-1][:, :7]).values())
    for name in ("entropy", "distance", "negative_share", "softmax_error", "effective_rank"):
        expected = torch.stack([getattr(layer, name) for layer in layers]).mean().item()
        assert row[f"diagnostics/{name}"] == pytest.approx(expected)
    assert row["diagnostics/growth"] == max(layer.growth.max().item() for layer in layers)
    assert row["diagnostics/smallest_normalizer"] == min(layer.smallest_normalizer.min().item() for layer in layers)
    deviation = torch.stack([layer.row_sums - 1 for layer in layers]).abs().mean().item()
    assert row["diagnostics/row_sums"] == pytest.approx(deviation)
    with pytest.raises(ValueError, match="every and max_tokens must be at least 1, got 0 and 128"):
        Diagnosis(every=0)


def test_it_asks_for_no_more_positions_than_training_does(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = [TINY[0], "--config=configs/positions/learned.yaml", *TINY[1:], "--model.network.seq_len=16"]
    assert fit(tmp_path / "arm" / "seed-0", *DIAGNOSED, base=base) == 0
    assert rows(tmp_path / "arm" / "seed-0")[-1]["diagnostics/entropy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        [
            "--config=configs/feature_maps/favor_plus.yaml",
            "--config=configs/positions/rotary_before.yaml",
            "--model.network.attention.feature_map.redraw_interval=1",
        ],
        ["--config=configs/attention/softmax.yaml"],
    ],
)
def test_other_arms_are_not_changed_either(tmp_path, monkeypatch, arm):
    monkeypatch.chdir(ROOT)
    base = [TINY[0], *arm, *TINY[1:], "--trainer.max_steps=4"]
    for name, more in (("plain", []), ("diagnosed", DIAGNOSED)):
        assert fit(tmp_path / name / "seed-0", *more, base=base) == 0
    plain, diagnosed = (rows(tmp_path / name / "seed-0") for name in ("plain", "diagnosed"))
    assert [row["train/loss"] for row in plain] == [row["train/loss"] for row in diagnosed]
    assert diagnosed[-1]["diagnostics/effective_rank"]


def test_a_network_without_our_layers_trains_undiagnosed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = [TINY[0], "--config=configs/networks/performer_lm.yaml", *TINY[1:]]
    base = [x for x in base if "attention" not in x and "num_layers" not in x and "d_model" not in x]
    small = [
        "--model.network.dim=16",
        "--model.network.depth=1",
        "--model.network.heads=2",
        "--model.network.max_seq_len=16",
    ]
    with pytest.warns(UserWarning, match="no attention layer of linrope"):
        assert fit(tmp_path / "arm" / "seed-0", *small, *DIAGNOSED, base=base) == 0
    assert "diagnostics/entropy" not in rows(tmp_path / "arm" / "seed-0")[-1]


def test_the_picture_and_the_table(runs, tmp_path, capsys):
    checkpoint = runs / "plain" / "seed-0/checkpoints/last.ckpt"
    call = ["--ckpt", str(checkpoint), "--tokens", "16", "--sequences", "2", "--out", str(tmp_path / "deep" / "look")]
    assert diagnostics.main(call) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-2:] == [str(tmp_path / "deep" / f"look.{kind}") for kind in ("png", "svg")]
    found = diagnose(load_network(checkpoint), real_text(None, 2, 16))
    (name, measures), *_ = found.items()
    (line,) = [line for line in output if line.startswith(name)]
    assert f"{measures.negative_share.mean().item():.1%}" in line
    assert f"{measures.distance.mean().item():.1f}" in line
    text = (tmp_path / "deep" / "look.svg").read_text()
    assert "share of negative weights" in text


def test_the_decay_of_a_checkpoint_is_drawn(runs, tmp_path):
    checkpoint = runs / "plain" / "seed-0/checkpoints/last.ckpt"
    assert rotary_decay.main(["--ckpt", str(checkpoint), "--distances", "16", "--out", str(tmp_path / "decay")]) == 0
    text = (tmp_path / "decay.svg").read_text()
    assert "rotated / unrotated" in text
    assert "bound for 8 features" in text  # the layer's own: d 16, 2 heads


def test_windows_are_spread_over_a_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    assert real_text(path, 3, 10)[:, 0].tolist() == [0, 45, 90]
    assert real_text(None, 2, 5).shape == (2, 5)
    with pytest.raises(ValueError, match="the text has 100 bytes, fewer than the 101"):
        real_text(path, 1, 101)


def test_bad_input_gets_one_message(tmp_path, capsys):
    assert diagnostics.main(["--ckpt", str(tmp_path / "nowhere.ckpt")]) == 2
    assert "nowhere.ckpt is not a whole checkpoint" in capsys.readouterr().err

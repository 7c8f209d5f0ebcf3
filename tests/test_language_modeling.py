"""The metric, the schedule, and what happens to a loss that is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning import Trainer
from torch import nn

from tasks.enwik8.data import ByteData
from tasks.language_modeling import LanguageModeling, NonFiniteError, bits, learning_rate_factor, mean_loss


class Bigram(nn.Module):
    """Logits that depend on the last byte alone; streams trivially."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.table(tokens)

    def stream(self, tokens, states=None):
        return self(tokens), states


class Previous(nn.Module):
    """Knows the byte before the last one too, so that context and carried state matter."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.previous = nn.Embedding(256, 256), nn.Embedding(257, 256)

    def forward(self, tokens):
        return self.stream(tokens)[0]

    def stream(self, tokens, states=None):
        before = torch.full_like(tokens[:, :1], 256) if states is None else states
        previous = torch.cat((before, tokens[:, :-1]), dim=1)
        return self.last(tokens) + self.previous(previous), tokens[:, -1:]


@pytest.fixture
def split_file(tmp_path):
    """20,000 random bytes, so that validation and test hold 1,000 each; every byte value, 0 and newline too."""
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes())
    return path


def validate(network, path, **data):
    module = LanguageModeling(network)
    datamodule = ByteData(path=str(path), **{"seq_len": 64, **data})
    trainer = Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", barebones=False
    )
    trainer.validate(module, datamodule=datamodule, verbose=False)
    return module.scored["val"]


def by_hand(network, path) -> float:
    """Bits per byte of the 999 targets of the validation split, from the logits in one piece."""
    data = np.fromfile(path, dtype=np.uint8)[18_000:19_000].astype(np.int64)
    tokens = torch.from_numpy(data)[None]
    with torch.no_grad():
        log_p = network(tokens[:, :-1]).double().log_softmax(-1)
    nll = -log_p[0, torch.arange(999), tokens[0, 1:]]
    return float(nll.sum()) / (999 * math.log(2))


def test_uniform_logits_cost_exactly_8_bits(split_file):
    network = Bigram()
    nn.init.zeros_(network.table.weight)
    loss, targets = validate(network, split_file)
    assert bits(loss) == pytest.approx(8.0, abs=1e-12)
    assert targets == 999


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("stride", [0, 16, 63])
def test_every_target_counts_once_whatever_the_batch(split_file, batch_size, stride):
    torch.manual_seed(0)
    network = Bigram()
    loss, targets = validate(network, split_file, eval_batch_size=batch_size, stride=stride)
    assert targets == 999
    assert bits(loss) == pytest.approx(by_hand(network, split_file), rel=1e-6)


@pytest.mark.parametrize("how", [{"evaluation": "stream"}, {"stride": 1}])
def test_context_reaches_across_windows(split_file, how):
    torch.manual_seed(0)
    network = Previous()
    loss, targets = validate(network, split_file, **how)
    assert targets == 999
    assert bits(loss) == pytest.approx(by_hand(network, split_file), rel=1e-6)


def test_windows_alone_start_from_nothing(split_file):
    """The counterpart: without overlap or carried state the same network must score differently."""
    torch.manual_seed(0)
    network = Previous()
    loss, _ = validate(network, split_file)
    assert abs(bits(loss) - by_hand(network, split_file)) > 1e-4


def test_streaming_needs_a_network_that_streams(split_file):
    with pytest.raises(ValueError, match="Embedding has none"):
        validate(nn.Embedding(256, 256), split_file, evaluation="stream")


class Priced(nn.Module):
    """Each byte 0 costs ``cost`` nats, whatever stands before it."""

    cost = 1.0

    def forward(self, tokens):
        nats = torch.full((*tokens.shape, 1), self.cost, dtype=torch.float64)
        rest = torch.log(-torch.expm1(-nats) / 255)
        return torch.cat((-nats, rest.expand(*tokens.shape, 255)), dim=-1)


def test_average_over_unequal_batches_is_by_target():
    """Batches of 16×10 and 1×2 targets with losses 1 and 2 average to (160·1 + 2·2) / 162."""
    module = LanguageModeling(Priced())
    module._trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    module.log_dict = lambda *args, **kwargs: None
    module.on_validation_epoch_start()
    for index, (rows, targets, cost) in enumerate([(16, 10, 1.0), (1, 2, 2.0)]):
        module.network.cost = cost
        module.validation_step((torch.zeros(rows, targets + 1, dtype=torch.long), 0, False), index)
    module.on_validation_epoch_end()
    loss, targets = module.scored["val"]
    assert targets == 162
    assert loss == pytest.approx(164 / 162, rel=1e-12)


def test_loss_is_the_mean_cross_entropy():
    logits = torch.randn(2, 5, 256, dtype=torch.float64)
    targets = torch.randint(0, 256, (2, 5))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(mean_loss(logits, targets), expected, rtol=1e-12, atol=0)


def test_schedule_is_a_linear_rise_then_a_half_cosine():
    factor = [learning_rate_factor(step, 101, 10, 0.1) for step in range(101)]
    np.testing.assert_allclose(factor[:10], np.arange(1, 11) / 10)
    progress = (np.arange(10, 101) - 10) / 90
    np.testing.assert_allclose(factor[10:], 0.1 + 0.9 * np.cos(np.pi * progress / 2) ** 2, rtol=1e-12)
    assert factor[100] == pytest.approx(0.1)


def fit(network, path, tmp_path, steps=3, trainer=(), **options):
    module = LanguageModeling(network, **{"learning_rate": 0.1, "warmup_steps": 0, **options})
    Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        limit_val_batches=0,
        **dict(trainer),
    ).fit(module, datamodule=ByteData(path=str(path), seq_len=16, batch_size=2))
    return module


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_module(split_file, tmp_path):
    class Poisoned(nn.Module):
        def forward(self, x):
            return x / 0.0

    network = nn.Sequential(nn.Embedding(256, 256), Poisoned())
    with pytest.raises(NonFiniteError, match=r"1 \(Poisoned\)"):
        fit(network, split_file, tmp_path)


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_parameter(split_file, tmp_path):
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(256))

        def forward(self, x):
            return x * (1 + self.gain.sqrt())  # finite at 0, its slope is not

    network = nn.Sequential(nn.Embedding(256, 256), Steep())
    with pytest.raises(NonFiniteError, match=r"1\.gain"):
        fit(network, split_file, tmp_path)


@pytest.mark.parametrize(("limit", "algorithm"), [(1e-3, "norm"), (1e-3, "value"), (None, None)])
def test_gradients_are_clipped_and_their_norm_is_from_before(split_file, tmp_path, limit, algorithm):
    seen = {}

    class Spy(LanguageModeling):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            grads = torch.cat([p.grad.flatten() for p in self.network.parameters()])
            seen.update(norm=float(grads.norm()), largest=float(grads.abs().max()), reported=self.grad_norm)

    torch.manual_seed(0)
    module = Spy(Bigram(), learning_rate=1e-3)
    Trainer(
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        limit_val_batches=0,
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    ).fit(module, datamodule=ByteData(path=str(split_file), seq_len=16, batch_size=2))
    batch = next(iter(module.trainer.datamodule.train_dataloader().dataset[i] for i in [0]))
    torch.manual_seed(0)
    fresh = Bigram()
    mean_loss(fresh(batch[:, :-1]), batch[:, 1:]).backward()
    before = float(fresh.table.weight.grad.norm())
    assert seen["reported"] == pytest.approx(before, rel=1e-5)
    if limit is None:
        assert seen["norm"] == pytest.approx(before, rel=1e-5)
    elif algorithm == "norm":
        assert seen["norm"] == pytest.approx(limit, rel=1e-3)
    else:
        assert seen["largest"] == pytest.approx(limit, rel=1e-6)


# --- steps left out


class PoisonedAt(nn.Module):
    """A bigram whose loss or gradients are spoilt at the given calls in training, counted from 0."""

    def __init__(self, calls, how):
        super().__init__()
        self.table = nn.Embedding(256, 256)
        self.calls, self.how, self.call = calls, how, -1

    def forward(self, tokens):
        logits = self.table(tokens)
        self.call += self.training
        if not self.training or self.call not in self.calls:
            return logits
        if self.how == "nan":
            return logits * math.nan
        if (
            self.how == "loss alone"
        ):  # half of all bytes are impossible: an infinite loss, with gradients that are finite
            return logits + torch.where(torch.arange(256) < 128, 0.0, -math.inf)
        return logits + 0 * (logits - logits.detach()).sqrt()  # finite, with a slope that is not


@pytest.mark.parametrize("how", ["nan", "loss alone", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_left_out_moves_nothing_but_the_schedule(split_file, tmp_path, how, accumulate):
    """Four steps of which the second is left out: by hand, AdamW steps on the others at their own rates."""
    torch.manual_seed(0)
    trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    poisoned = PoisonedAt({accumulate}, how)
    module = fit(poisoned, split_file, tmp_path, steps=4, trainer=trainer, max_skipped_steps=1)
    torch.manual_seed(0)
    table = nn.Embedding(256, 256)
    adamw = torch.optim.AdamW(table.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    batches = ByteData(path=str(split_file), seq_len=16, batch_size=2)
    batches.setup()
    crops = batches.train_dataloader().dataset
    for step in range(4):
        if step == 1:
            continue
        adamw.param_groups[0]["lr"] = 0.1 * learning_rate_factor(step, 4, 0, 0.1)
        adamw.zero_grad()
        for part in range(accumulate):
            tokens = crops[step * accumulate + part]
            (mean_loss(table(tokens[:, :-1]), tokens[:, 1:]) / accumulate).backward()
        nn.utils.clip_grad_norm_(table.parameters(), 1.0)
        adamw.step()
    torch.testing.assert_close(module.network.table.weight, table.weight)
    assert module.skipped_steps == 1
    assert module.trainer.global_step == 4


@pytest.mark.parametrize("how", ["nan", "gradient"])
def test_more_steps_than_may_be_left_out_stop_the_run(split_file, tmp_path, how):
    with pytest.raises(NonFiniteError, match=r"first that of table\.weight, and 2 steps were skipped already"):
        fit(PoisonedAt({0, 1, 3}, how), split_file, tmp_path, steps=4, max_skipped_steps=2)


def test_a_negative_number_of_steps_to_leave_out_is_refused():
    with pytest.raises(ValueError, match="max_skipped_steps must be at least 0, got -1"):
        LanguageModeling(Bigram(), max_skipped_steps=-1)

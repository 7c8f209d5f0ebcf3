"""Two optimizers as one: the same steps as apart, one schedule, one state."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from linrope import ByteTransformer, SoftmaxAttention, T5Bias
from tasks.language_modeling import LanguageModeling
from tasks.optimizers import MuonAdamW, split_parameters

BETAS = (0.8, 0.9)


def network() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 256, bias=False))


def optimizer_of(model: nn.Module) -> MuonAdamW:
    hidden, readout, others = split_parameters(model)
    groups = [{"params": readout, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return MuonAdamW(hidden, groups, lr=0.02, weight_decay=0.1, betas=BETAS)


def take_step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    model.zero_grad()
    model(tokens).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_every_parameter_has_one_place_and_the_right_one():
    # The MLP's first matrix has 256 rows, as the head has.
    model = ByteTransformer(num_layers=1, d_model=64, positions="learned", seq_len=8)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, readout, others = ({names[id(p)] for p in part} for part in split_parameters(model))
    attention = {f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "out")}
    assert hidden == attention | {"blocks.0.mlp.0.weight", "blocks.0.mlp.2.weight"}
    assert readout == {"head.weight"}
    assert hidden | readout | others == set(names.values())
    assert {"embedding.weight", "position_embedding.weight", "norm.weight"} <= others


@pytest.mark.parametrize("muon", [True, False])
def test_the_table_of_a_position_bias_is_adamws_and_does_not_decay(muon):
    """One that two layers share is one parameter, in one place."""
    bias = T5Bias(2)
    attention = partial(SoftmaxAttention, num_heads=2, position_bias=bias)
    task = LanguageModeling(ByteTransformer(num_layers=2, d_model=8, attention=attention), muon=muon)
    task.trainer = SimpleNamespace(estimated_stepping_batches=10)
    optimizer = task.configure_optimizers()["optimizer"]
    owner = optimizer.parts["adamw"] if muon else optimizer
    assert isinstance(owner, torch.optim.AdamW)
    decays = [group["weight_decay"] for group in owner.param_groups for p in group["params"] if p is bias.table.weight]
    assert decays == [0.0]
    everywhere = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is bias.table.weight for p in everywhere) == 1
    assert len(everywhere) == len(list(task.parameters()))


def test_steps_are_those_of_the_two_apart():
    torch.manual_seed(0)
    model = network()
    twin = copy.deepcopy(model)
    together = optimizer_of(model)
    hidden, readout, others = split_parameters(twin)
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": readout, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02, betas=BETAS
    )
    schedules = [LambdaLR(optimizer, lambda step: 1 / (step + 1)) for optimizer in (together, muon, adamw)]
    for _ in range(3):
        take_step(model, together)
        take_step(twin, muon, adamw)
        for schedule in schedules:
            schedule.step()
    for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert {group["lr"] for group in together.param_groups} == {0.02 / 4}


def test_a_restored_state_goes_on_the_same():
    torch.manual_seed(0)
    model = network()
    optimizer = optimizer_of(model)
    take_step(model, optimizer)
    twin = copy.deepcopy(model)
    restored = optimizer_of(twin)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *restored.param_groups):
        group["lr"] = 0.005  # what is written to the groups must reach both parts, also after loading
    take_step(model, optimizer)
    take_step(twin, restored)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)

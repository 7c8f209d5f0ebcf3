"""Several processes compute what one does."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_enwik8_cli import ROOT, TINY

pytestmark = pytest.mark.slow

# Notes every random projection after each step, before what is due then, in the process that holds it; may crash there.
NOTES = """
import os
import torch
from lightning.pytorch.callbacks import Callback


class Notes(Callback):
    def __init__(self, folder: str):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, *args):
        buffers = {name: b.clone() for name, b in pl_module.network.named_buffers() if "projection" in name}
        assert buffers
        os.makedirs(self.folder, exist_ok=True)
        torch.save(buffers, f"{self.folder}/rank-{trainer.global_rank}-step-{trainer.global_step}.pt")
        if os.environ.get("CRASH_AT") == str(trainer.global_step):
            os._exit(7)
"""

STRATEGIES = {
    "one": ["--trainer.devices=1"],
    "ddp": ["--config=configs/strategies/ddp.yaml", "--trainer.devices=2", "--trainer.accelerator=cpu"],
    "fsdp2": [
        "--config=configs/strategies/fsdp2.yaml",
        "--trainer.devices=2",
        "--trainer.strategy.init_args.data_parallel_size=2",
        "--trainer.accelerator=cpu",
    ],
}


def fit(
    home: Path,
    name: str,
    *more: str,
    strategy: str | None = None,
    crash_at: int | None = None,
    attention: list[str] | None = None,
) -> Path:
    """Train six steps, projections redrawn at the second, fourth and sixth; or those of another ``attention``."""
    data = home / "bytes"
    if not data.exists():
        data.write_bytes(bytes(range(256)) * 80)  # 20,480 bytes: 1,024 to validate on
        (home / "notes.py").write_text(NOTES)
    run_dir = home / name / "arm" / "seed-0"
    if attention is None:
        attention = [
            "--model.network.attention.feature_map=linrope.FavorPlus",
            "--model.network.attention.feature_map.redraw_interval=2",
            "--trainer.callbacks=notes.Notes",
            f"--trainer.callbacks.folder={home / name / 'notes'}",
        ]
    own = [
        f"--data.path={data}",
        "--trainer.limit_val_batches=null",
        "--trainer.max_steps=6",
        "--trainer.val_check_interval=3",
        "--model.network.num_layers=2",
        *attention,
        "--model.muon=false",
        f"--run_dir={run_dir}",
    ]
    call = [sys.executable, "-m", "tasks.enwik8", "fit", *TINY, *STRATEGIES[strategy or name], *own, *more]
    execute(home, call, crash_at)
    return run_dir


def execute(home: Path, call: list[str], crash_at: int | None = None) -> None:
    """Run a command that finds the notes; RuntimeError with what it said if it fails."""
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{home}", "OMP_NUM_THREADS": "1", "CRASH_AT": str(crash_at)}
    done = subprocess.run(call, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def alone(home):
    return fit(home, "one")


def rows(run_dir):
    return list(csv.DictReader((run_dir / "metrics.csv").open()))


def info(run_dir):
    return json.loads((run_dir / "run.json").read_text())


def weights(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_equal(run_dir, alone):
    """The same losses and norms step by step, the same rates, each validation target once, the same weights."""
    for one, other in zip(rows(alone), rows(run_dir), strict=True):
        assert (one["step"], one["tokens"], one["lr"]) == (other["step"], other["tokens"], other["lr"])
        assert float(other["train/loss"]) == pytest.approx(float(one["train/loss"]), rel=1e-5)
        assert float(other["grad_norm"]) == pytest.approx(float(one["grad_norm"]), rel=1e-4)
        assert other["val/loss"] == one["val/loss"] == "" or float(other["val/loss"]) == pytest.approx(
            float(one["val/loss"]), rel=1e-5
        )
    assert info(alone)["validation"]["bytes_scored"] == info(run_dir)["validation"]["bytes_scored"] == 1023
    assert (info(alone)["processes"], info(run_dir)["processes"]) == (1, 2)
    torch.testing.assert_close(weights(run_dir), weights(alone), rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def together(request, home):
    return fit(home, request.param)


def test_two_processes_train_and_score_as_one(together, alone):
    assert_equal(together, alone)


def test_projections_are_the_same_in_every_process_after_every_redraw(together, alone, home):
    name = together.parents[1].name
    notes = [
        [torch.load(home / run / "notes" / f"rank-{rank}-step-{step}.pt", weights_only=True) for step in range(1, 7)]
        for run, rank in (("one", 0), (name, 0), (name, 1))
    ]
    for single, first, second in zip(*notes, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, single, rtol=0, atol=0)
    steps = [next(iter(note.values())) for note in notes[0]]
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(steps)]
    assert changed == [False, True, False, True, False]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_an_interrupted_run_of_two_processes_goes_on_as_if_it_had_not_been(home, alone, strategy):
    """Both processes die after the fifth step, two steps after the last checkpoint."""
    name = f"{strategy}-resumed"
    with pytest.raises(RuntimeError):
        fit(home, name, strategy=strategy, crash_at=5)
    checkpoint = home / name / "arm" / "seed-0" / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 3
    assert_equal(fit(home, name, strategy=strategy), alone)


def test_a_sharded_runs_checkpoint_is_one_that_a_single_process_evaluates(home):
    run_dir = fit(home, "fsdp2-evaluated", strategy="fsdp2")
    call = [sys.executable, "-m", "tasks.enwik8", "validate", f"--config={run_dir}/config.yaml"]
    call += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.callbacks=null"]
    call += [f"--ckpt_path={run_dir}/checkpoints/last.ckpt"]
    execute(home, call)
    again = info(run_dir)["evaluations"][-1]
    assert again["bpc"] == pytest.approx(info(run_dir)["validation"]["bpc"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_processes_stop_where_one_is_not_finite(home, strategy):
    """A rate of 1e30 spoils the second or third step; nobody is left waiting for the others."""
    with pytest.raises(RuntimeError, match=r"of arm 'arm' .*the gradients are not finite"):
        fit(home, f"{strategy}-wild", "--model.learning_rate=1e30", strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_processes_skip_where_one_is_not_finite(home, strategy):
    """The same wild rate: every step after the first few is left out, and counted, by both alike."""
    run_dir = fit(
        home, f"{strategy}-skips", "--model.learning_rate=1e30", "--model.max_skipped_steps=6", strategy=strategy
    )
    counts = [int(row["skipped_steps"]) for row in rows(run_dir)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 3
    assert info(run_dir)["skipped_steps"] == counts[-1]


def test_muon_on_sharded_matrices_is_refused(home):
    with pytest.raises(RuntimeError, match=r"error: Muon takes whole matrices.*--model.muon=false"):
        fit(home, "fsdp2-muon", "--model.muon=true", strategy="fsdp2")


def test_a_table_that_layers_share_is_trained_as_in_one_process(home):
    overlays = [f"--config=configs/{overlay}.yaml" for overlay in ("attention/softmax", "positions/t5_bias")]
    alone, *together = (
        fit(home, f"{strategy}-table", strategy=strategy, attention=overlays) for strategy in ("one", "ddp", "fsdp2")
    )
    for run_dir in together:
        assert_equal(run_dir, alone)
    tables = [table for name, table in weights(alone).items() if name.endswith("position_bias.table.weight")]
    assert len(tables) == 2
    assert torch.equal(*tables)
    assert tables[0].any()

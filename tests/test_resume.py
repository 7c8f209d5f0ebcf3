"""An interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

ROOT = Path(__file__).parents[1]

# Tiny, with everything that could go wrong: dropout, random features that are redrawn at step 7, validation.
TINY = """
seed_everything: 3
checkpoint_every: 3
trainer: {max_steps: 20, val_check_interval: 5, limit_val_batches: 1, accelerator: cpu}
model:
  warmup_steps: 4
  muon: true
  network:
    class_path: linrope.ByteTransformer
    init_args:
      num_layers: 2
      d_model: 16
      dropout: 0.1
      attention:
        class_path: linrope.LinearAttention
        init_args:
          num_heads: 2
          rotary: linrope.Rotary
          feature_map: {class_path: linrope.FavorPlus, init_args: {redraw_interval: 7}}
data: {seq_len: 16, batch_size: 4}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def command(config: Path, run_dir: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tasks.enwik8", "fit", "--config", str(config), "--run_dir", str(run_dir), *more]


def run(*args, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs)


def rows(run_dir: Path) -> list[dict[str, str]]:
    path = run_dir / "metrics.csv"
    return list(csv.DictReader(path.open())) if path.is_file() else []


def kill_after(step: int, config: Path, run_dir: Path, *more: str) -> None:
    """Start the run and kill -9 it once a checkpoint of ``step`` or later is on disk."""
    process = subprocess.Popen(
        command(config, run_dir, *more), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            if checkpoint.is_file() and torch.load(checkpoint, weights_only=True)["global_step"] >= step:
                return
            time.sleep(0.002)
        pytest.fail("no checkpoint appeared")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, schedule and every recorded figure but the clock's, bit for bit."""
    clock = ("seconds", "tokens_per_second")
    a, b = ([{k: v for k, v in row.items() if k not in clock} for row in rows(d)] for d in (one, other))
    assert [int(row["step"]) for row in a] == list(range(1, 21))
    assert a == b
    x, y = (torch.load(d / "checkpoints" / "last.ckpt", weights_only=True) for d in (one, other))
    assert x["global_step"] == y["global_step"] == 20
    torch.testing.assert_close(x["state_dict"], y["state_dict"], rtol=0, atol=0)
    one_state, other_state = (tree_flatten(z["optimizer_states"])[0] for z in (x, y))
    assert len(one_state) == len(other_state) > 0
    for p, q in zip(one_state, other_state, strict=True):
        assert torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q
    assert x["lr_schedulers"] == y["lr_schedulers"]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 1), (0, 2), (2, 2)])
def test_killed_and_resumed_equals_straight(config, tmp_path, workers, accumulate):
    more = (f"--trainer.accumulate_grad_batches={accumulate}", f"--data.num_workers={workers}")
    straight, broken = tmp_path / "exp/straight/seed-3", tmp_path / "exp/broken/seed-3"
    assert run(config, straight, *more).returncode == 0
    kill_after(9, config, broken, *more)
    before = rows(broken)
    assert len(before) < 20
    resumed = run(config, broken, *more)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(straight, broken)


PERFORMER = """
  network:
    class_path: performer_pytorch.PerformerLM
    init_args: {num_tokens: 256, max_seq_len: 16, dim: 16, depth: 1, heads: 2, dim_head: 8, causal: true,
                feature_redraw_interval: 7, ff_dropout: 0.1}
data:"""


@pytest.mark.parametrize("network", ["ours", "performer-pytorch"])
def test_resume_in_process_equals_straight(config, tmp_path, monkeypatch, network):
    """The quick variant: the interruption is an exception in the middle of step 12."""
    if network == "performer-pytorch":
        head, tail = TINY.split("  network:")
        config.write_text(head.rstrip() + PERFORMER + tail.split("data:")[1])
    from tasks.callbacks import Recorder
    from tasks.enwik8.__main__ import main

    monkeypatch.chdir(ROOT)
    straight, broken = tmp_path / "exp/straight/seed-3", tmp_path / "exp/broken/seed-3"
    assert main(command(config, straight)[3:]) == 0

    original = Recorder.on_train_batch_start

    def crash(self, trainer, *args):
        if trainer.global_step == 11:
            raise OSError("the lights went out")
        original(self, trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_start", crash)
        assert main(command(config, broken)[3:]) == 1
    assert len(rows(broken)) == 11
    assert main(command(config, broken)[3:]) == 0
    assert_same_run(straight, broken)

    finished = (broken / "metrics.csv").read_bytes()
    assert main(command(config, broken)[3:]) == 0, "a finished run is left alone"
    assert (broken / "metrics.csv").read_bytes() == finished

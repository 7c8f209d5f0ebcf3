"""Two processes compute what one does."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest

from tests.test_enwik8_cli import ROOT, TINY


@pytest.mark.slow
def test_two_processes_train_and_score_as_one(tmp_path):
    """The same losses with the same global batch; each target of the split once: N - 1 of them."""
    data = tmp_path / "bytes"
    data.write_bytes(bytes(range(256)) * 80)  # 20,480 bytes: 1,024 to validate on
    rows, infos = [], []
    for processes in (1, 2):
        run_dir = tmp_path / f"{processes}" / "arm" / "seed-0"
        own = [f"--data.path={data}", f"--trainer.devices={processes}", "--trainer.limit_val_batches=null"]
        if processes == 2:
            own.append("--trainer.strategy=ddp")
        call = [sys.executable, "-m", "tasks.enwik8", "fit", *TINY, *own, "--trainer.max_steps=4"]
        done = subprocess.run([*call, f"--run_dir={run_dir}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        rows.append(list(csv.DictReader((run_dir / "metrics.csv").read_text().splitlines())))
        infos.append(json.loads((run_dir / "run.json").read_text()))
    assert [info["processes"] for info in infos] == [1, 2]
    assert [info["validation"]["bytes_scored"] for info in infos] == [1023, 1023]
    for one, two in zip(*rows, strict=True):
        assert one["step"] == two["step"]
        assert float(two["train/loss"]) == pytest.approx(float(one["train/loss"]), rel=1e-5)
        assert float(two["grad_norm"]) == pytest.approx(float(one["grad_norm"]), rel=1e-4)
        assert one["tokens"] == two["tokens"]
    assert infos[1]["validation"]["bpc"] == pytest.approx(infos[0]["validation"]["bpc"], rel=1e-5)

"""``tasks.compare --check``: the recorded losses come out again, or it is said that they do not."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plots.runs import read_run
from tasks.compare.__main__ import main
from tasks.compare.repeat import compare_runs, describe
from tests.synthetic import make_run
from tests.test_enwik8_cli import TINY
from tests.test_enwik8_cli import fit as train

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An experiment of two arms, one with two seeds, trained once."""
    home = tmp_path_factory.mktemp("trained") / "experiment"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        for arm, seed in (("one", 0), ("one", 1), ("other", 0)):
            width = "--model.network.d_model=16" if arm == "one" else "--model.network.d_model=8"
            more = ["--trainer.max_steps=5", "--trainer.val_check_interval=5", f"--seed_everything={seed}", width]
            assert train(home / arm / f"seed-{seed}", *more) == 0
    return home


@pytest.fixture
def experiment(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    shutil.copytree(trained, tmp_path / "experiment")
    return tmp_path / "experiment"


def check(folder, steps=3):
    return main(["--check", str(folder), "--steps", str(steps)])


def change(run_dir, step, factor):
    """Falsify the training loss of one step."""
    path = run_dir / "metrics.csv"
    table = list(csv.DictReader(path.open()))
    for row in table:
        if int(row["step"]) == step:
            row["train/bpc"] = repr(float(row["train/bpc"]) * factor)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


@pytest.mark.slow
def test_an_experiment_comes_out_again(experiment, capsys):
    before = {path: path.read_bytes() for path in experiment.rglob("*") if path.is_file()}
    assert check(experiment) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one · seed 0: the same losses to the last digit, 3 steps",
        "other · seed 0: the same losses to the last digit, 3 steps",
    ]
    assert {path: path.read_bytes() for path in experiment.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_one_run_all_its_steps(experiment, capsys):
    assert check(experiment / "one" / "seed-1", steps=100) == 0
    assert "one · seed 1: the same losses to the last digit, 5 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_losses_that_do_not_come_out_are_told_with_their_step(experiment, capsys):
    change(experiment / "other" / "seed-0", 2, 1.01)
    assert check(experiment) == 1
    out = capsys.readouterr().out
    assert "one · seed 0: the same losses to the last digit" in out
    assert "other · seed 0: OTHER losses, most at step 2 (relative difference 9.9e-03)" in out


@pytest.mark.slow
def test_what_has_changed_since_is_told(experiment, capsys):
    path = experiment / "one/seed-0/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "2.0.0"}))
    assert check(experiment / "one") == 0
    assert f"(torch: 2.0.0 then, {torch.__version__} now)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_cannot_be_made_again_says_why(experiment, capsys):
    config = experiment / "one/seed-0/config.yaml"
    config.write_text(config.read_text().replace("path: null", "path: nowhere/text"))
    (experiment / "other/seed-0/config.yaml").unlink()
    assert check(experiment) == 1
    out = capsys.readouterr().out
    assert "one · seed 0: cannot be repeated: error: no file at nowhere/text" in out
    assert "other · seed 0: cannot be repeated: it has no config.yaml" in out


def test_a_folder_without_runs_and_no_steps_are_refused(tmp_path, capsys):
    assert check(tmp_path / "nowhere") == 2
    assert check(tmp_path) == 2
    assert check(tmp_path, steps=0) == 2
    error = capsys.readouterr().err
    for part in ("no such folder", "no run found", "--steps must be at least 1, got 0"):
        assert part in error


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (1.0, "the same losses to the last digit, 4 steps"),
        (1 + 5e-5, "the same losses within 5.0e-05, 4 steps"),
        (1 + 2e-4, "OTHER losses, most at step 3 (relative difference 2.0e-04)"),
        (float("nan"), "OTHER losses, most at step 3 (relative difference inf)"),
    ],
)
def test_the_verdict_goes_by_the_largest_relative_difference(tmp_path, factor, sentence):
    one, other = (make_run(tmp_path / name / "seed-0", [(6, 3.0)]) for name in ("a", "b"))
    change(other, 3, factor)
    change(other, 5, 2.0)  # beyond the steps that are compared
    assert describe(compare_runs(read_run(one), read_run(other), 4)) == sentence


@pytest.mark.slow
def test_the_training_of_a_check_stops_early_on_the_whole_schedule(experiment, capsys):
    """Two of five steps at the rates that five steps have: with max_steps=2 the second would be another."""
    table = list(csv.DictReader((experiment / "one/seed-0/metrics.csv").open()))
    assert "--trainer.max_steps=2" in TINY
    assert len({row["lr"] for row in table}) == 5
    assert check(experiment / "one", steps=2) == 0


@pytest.mark.slow
def test_nothing_compared_is_nothing_shown(experiment, capsys):
    path = experiment / "one/seed-0/metrics.csv"
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([head, *lines[3:]]))
    assert check(experiment / "one") == 1
    assert "one · seed 0: no step could be compared" in capsys.readouterr().out


@pytest.mark.slow
def test_a_divergence_that_does_not_come_again_is_another_result(experiment, capsys):
    path = experiment / "one/seed-0/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": {"step": 3, "why": "the loss is nan"}}))
    assert check(experiment / "one", steps=2) == 0, "that is beyond the steps that are made again"
    assert check(experiment / "one", steps=3) == 1
    assert "diverged: {'step': 3, 'why': 'the loss is nan'} then, None now" in capsys.readouterr().out


@pytest.mark.slow
def test_a_divergence_that_comes_again_is_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    run_dir = tmp_path / "experiment" / "wild" / "seed-0"
    assert train(run_dir, "--trainer.max_steps=9", "--model.learning_rate=1e30", "--model.muon=false") == 1
    assert check(run_dir, steps=9) == 0
    out = capsys.readouterr().out
    assert re.search(r"wild · seed 0: the same losses to the last digit, \d steps$", out.strip())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_check_leaves_nothing_behind(experiment, tmp_path, name):
    """Its training is stopped and its folder is gone."""
    call = [sys.executable, "-m", "tasks.compare", "--check", str(experiment / "one"), "--steps", "5"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(call, cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(temporary.rglob("log.txt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.Signals[name])
    assert process.wait(60) == 130
    assert not list(temporary.rglob("log.txt"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)

"""The command line: what bad input gets, what a run leaves, how checkpoints are used again."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tasks.callbacks import Recorder
from tasks.enwik8.__main__ import Enwik8CLI, main
from tasks.enwik8.data import ByteData
from tasks.language_modeling import LanguageModeling
from tasks.metrics_csv import MetricsCSV
from tasks.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
TINY = [
    "--config=configs/enwik8/small.yaml",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--model.network.num_layers=1",
    "--model.network.d_model=16",
    "--model.network.attention.num_heads=2",
    "--data.seq_len=16",
    "--data.batch_size=2",
    "--data.eval_batch_size=2",
]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "experiment" / "arm" / "seed-0"


def fit(run_dir: Path, *more: str, base=TINY) -> int:
    """Exit status of a tiny training."""
    try:
        return main(["fit", *base, f"--run_dir={run_dir}", *more])
    except SystemExit as exit:  # the parser's own refusal
        return int(exit.code or 0)


BAD = {
    "missing file": (["--data.path=nowhere/text"], ["nowhere/text"]),
    "misspelt key": (["--model.network.num_layer=1"], ["num_layer"]),
    "misspelt key deep down": (["--model.network.attention.num_head=2"], ["num_head"]),
    "misspelt class": (["--model.network.attention.feature_map=linrope.EluPlusTwo"], ["EluPlusTwo"]),
    "class of another kind": (["--model.network.attention.feature_map=linrope.Rotary"], ["Rotary"]),
    "missing config": (["--config=configs/nowhere.yaml"], ["configs/nowhere.yaml"]),
    "window longer than the split": (["--data.seq_len=300000"], ["300000", "validation", "--data.seq_len"]),
    "odd sinusoids": (
        ["--model.network.positions=sinusoidal", "--model.network.d_model=15", "--model.network.attention.num_heads=1"],
        ["even", "15"],
    ),
    "impossible head split": (["--model.network.attention.num_heads=3"], ["num_heads=3", "d_model=16"]),
    "no width to rotate": (
        [
            "--model.network.attention.num_heads=16",
            "--model.network.attention.rotary=linrope.Rotary",
        ],
        ["at least one pair", "got 1"],
    ),
    "missing checkpoint": (["--ckpt_path=nowhere.ckpt"], ["nowhere.ckpt"]),
    "no steps": (["--trainer.max_steps=-1"], ["max_steps", "-1"]),
    "seed": (["--seed_everything=-1"], ["-1", "from 0 to"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_message_and_a_status(case, run_dir, capsys):
    arguments, words = BAD[case]
    assert fit(run_dir, *arguments) != 0
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert "Traceback" not in message
    assert not (run_dir / "run.json").exists()


def test_a_cut_checkpoint_is_named(run_dir, tmp_path, capsys):
    assert fit(run_dir) == 0
    whole = (run_dir / "checkpoints" / "last.ckpt").read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole[: len(whole) // 2])
    assert fit(tmp_path / "other" / "arm" / "seed-0", f"--ckpt_path={cut}") == 1
    assert f"{cut} is not a whole checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_says_which_tensor(run_dir, tmp_path, capsys):
    assert fit(run_dir) == 0
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    other = tmp_path / "other" / "arm" / "seed-0"
    status = fit(other, f"--ckpt_path={checkpoint}", "--model.network.d_model=32", "--trainer.max_steps=4")
    assert status == 1
    message = capsys.readouterr().err
    assert "size mismatch" in message
    assert "16" in message
    assert "32" in message


def test_a_folder_of_another_run_is_refused_and_left_alone(run_dir, capsys):
    assert fit(run_dir) == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert fit(run_dir, "--model.learning_rate=0.5") == 1
    message = capsys.readouterr().err
    assert "model.learning_rate: 0.008 -> 0.5" in message
    assert "--run_dir" in message
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_what_a_run_leaves(run_dir):
    assert fit(run_dir) == 0
    info = json.loads((run_dir / "run.json").read_text())
    assert info["finished"] is True
    assert (info["experiment"], info["arm"], info["seed"]) == ("experiment", "arm", 0)
    assert info["steps"] == 2
    assert info["tokens"] == 2 * 2 * 16
    validation = info["validation"]
    # one batch of two windows was allowed
    assert (validation["bytes_scored"], validation["context"], validation["stride"]) == (32, 16, 0)
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[1]["val/bpc"]) == pytest.approx(validation["bpc"])
    assert float(rows[0]["train/bpc"]) == pytest.approx(float(rows[0]["train/loss"]) / 0.6931471805599453)
    # Two steps of a warm-up over 50.
    peak = yaml.safe_load((ROOT / "configs/enwik8/small.yaml").read_text())["model"]["learning_rate"]
    assert [float(row["lr"]) for row in rows] == pytest.approx([peak / 50, 2 * peak / 50])
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["model"]["network"]["init_args"]["d_model"] == 16
    assert list((run_dir / "tensorboard").iterdir())


def test_a_checkpoint_rebuilds_its_model_without_running_code(run_dir):
    assert fit(run_dir) == 0
    path = run_dir / "checkpoints" / "last.ckpt"
    torch.load(path, weights_only=True)
    module = LanguageModeling.load_from_checkpoint(path, weights_only=True, map_location="cpu")
    state = torch.load(path, weights_only=True)["state_dict"]
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)


def test_going_on_from_a_checkpoint_keeps_its_model_unless_told_otherwise(run_dir, tmp_path):
    """A second call in the same folder neither dies on config.yaml nor changes the model."""
    assert fit(run_dir, "--model.weight_decay=0.25") == 0
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    rest = [a for a in TINY if not a.startswith(("--config", "--model", "--trainer.max_steps"))]
    more = (f"--ckpt_path={checkpoint}", "--trainer.max_steps=3", "--model.learning_rate=0.125")
    assert fit(run_dir, *more, base=rest) == 0
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]
    assert saved["network"]["init_args"]["d_model"] == 16
    assert saved["weight_decay"] == 0.25
    assert saved["learning_rate"] == 0.125
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_evaluating_again_is_reported_beside_the_run(run_dir, subcommand, capsys):
    assert fit(run_dir) == 0
    arguments = [f"--config={run_dir}/config.yaml", f"--ckpt_path={run_dir}/checkpoints/last.ckpt"]
    before = json.loads((run_dir / "run.json").read_text())
    capsys.readouterr()
    assert main([subcommand, *arguments, "--data.stride=8"]) == 0
    printed = capsys.readouterr().out
    after = json.loads((run_dir / "run.json").read_text())
    (evaluation,) = after.pop("evaluations")
    assert after == before, "what the training measured stays"
    assert evaluation["stride"] == 8
    assert f"{evaluation['bpc']:.4f} bpc" in printed
    assert "at least 8)" in printed


def test_a_feature_map_of_ones_own_trains_by_its_class_path(run_dir, tmp_path, monkeypatch):
    (tmp_path / "mymaps.py").write_text(
        "import torch\n"
        "from linrope import FeatureMap\n"
        "class Softplus(FeatureMap):\n"
        "    is_positive = True\n"
        "    def __init__(self, head_dim: int):\n"
        "        super().__init__()\n"
        "        self.head_dim = self.num_features = head_dim\n"
        "    def map_query(self, query):\n"
        "        return torch.nn.functional.softplus(query)\n"
        "    map_key = map_query\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert fit(run_dir, "--model.network.attention.feature_map=mymaps.Softplus") == 0
    module = LanguageModeling.load_from_checkpoint(run_dir / "checkpoints" / "last.ckpt", map_location="cpu")
    assert type(module.network.blocks[0].attention.feature_map).__name__ == "Softplus"


def test_a_full_disk_leaves_the_last_good_checkpoint(run_dir, capsys):
    """The limit on file sizes stands in for a full disk: the write fails half-way."""
    resource = pytest.importorskip("resource", reason="limits on file sizes are POSIX")
    assert fit(run_dir) == 0
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        status = fit(run_dir, f"--ckpt_path={checkpoint}", "--trainer.max_steps=4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 1
    message = capsys.readouterr().err
    assert "no checkpoint could be written at step 4" in message
    assert str(checkpoint) in message
    assert checkpoint.read_bytes() == before
    assert fit(run_dir, f"--ckpt_path={checkpoint}", "--trainer.max_steps=4") == 0


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk of one's own takes Linux and root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("left", [0, 1000, 0.5])
def test_a_disk_that_fills_up_ends_the_run_and_the_same_call_goes_on_once_there_is_room(small_disk, capsys, left):
    """It fills up after step 2 but for nothing, a thousand bytes, or half a checkpoint; the log is on it, too."""
    from tasks.callbacks import Randomness

    call = ["--trainer.max_steps=6", "--checkpoint_every=1", "--trainer.val_check_interval=3"]
    straight, run_dir, filler = small_disk / "a/b/seed-0", small_disk / "a/c/seed-0", small_disk / "filler"
    assert fit(straight, *call) == 0
    original = Randomness.on_train_batch_start

    def fill(self, trainer, *args):
        if trainer.global_step == 2 and not filler.exists():
            free = shutil.disk_usage(small_disk).free
            checkpoint = (run_dir / "checkpoints" / "last.ckpt").stat().st_size
            filler.write_bytes(bytes(max(0, free - int(left * checkpoint if isinstance(left, float) else left))))
        original(self, trainer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Randomness, "on_train_batch_start", fill)
        assert fit(run_dir, *call) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") or "\nerror: " in message
    assert "No space left on device" in message
    assert torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2
    filler.unlink()
    assert fit(run_dir, *call) == 0
    first, second = (list(csv.DictReader((d / "metrics.csv").open())) for d in (straight, run_dir))
    for row in first + second:
        del row["seconds"], row["tokens_per_second"]
    assert first == second
    saved = [torch.load(d / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for d in (straight, run_dir)]
    torch.testing.assert_close(*saved, rtol=0, atol=0)


def test_a_prolonged_run_is_not_finished_until_it_is(run_dir, monkeypatch):
    """It is interrupted, then the plain call goes on from its own last checkpoint."""
    assert fit(run_dir) == 0
    longer = ("--trainer.max_steps=6", "--checkpoint_every=1")
    original = Recorder.on_train_batch_start

    def crash(self, trainer, *args):
        if trainer.global_step == 4:
            raise OSError("the lights went out")
        original(self, trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_start", crash)
        assert fit(run_dir, *longer, f"--ckpt_path={run_dir}/checkpoints/last.ckpt") == 1
    assert json.loads((run_dir / "run.json").read_text())["finished"] is False
    assert fit(run_dir, *longer) == 0
    info = json.loads((run_dir / "run.json").read_text())
    assert (info["finished"], info["steps"]) == (True, 6)


def test_going_on_from_another_run_happens_once(run_dir, tmp_path):
    assert fit(run_dir) == 0
    other = tmp_path / "other" / "arm" / "seed-0"
    call = (f"--ckpt_path={run_dir}/checkpoints/last.ckpt", "--trainer.max_steps=4")
    assert fit(other, *call) == 0
    before = (other / "metrics.csv").read_bytes()
    assert fit(other, *call) == 0
    assert (other / "metrics.csv").read_bytes() == before


def test_a_call_that_fails_before_it_trains_claims_nothing(run_dir):
    assert fit(run_dir, "--data.path=nowhere") == 1
    assert fit(run_dir) == 0


def test_evaluation_needs_weights_and_stays_with_its_run(run_dir, tmp_path, capsys):
    assert fit(run_dir) == 0
    other = tmp_path / "other" / "arm" / "seed-0"
    assert fit(other) == 0
    before = (other / "run.json").read_bytes()
    config, checkpoint = f"--config={run_dir}/config.yaml", f"{run_dir}/checkpoints/last.ckpt"
    assert main(["test", config]) == 1
    assert "--ckpt_path" in capsys.readouterr().err
    assert main(["test", config, f"--ckpt_path={checkpoint}", f"--run_dir={other}"]) == 0
    assert (other / "run.json").read_bytes() == before, "what another run's weights reach is not this run's"
    assert main(["test", config, f"--ckpt_path={checkpoint}"]) == 0
    (evaluation,) = json.loads((run_dir / "run.json").read_text())["evaluations"]
    assert (evaluation["step"], evaluation["checkpoint"]) == (2, checkpoint)


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_is_named_when_the_run_goes_on(run_dir, capsys, damage):
    assert fit(run_dir) == 0
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000] if damage is None else damage)
    (run_dir / "run.json").unlink()
    assert fit(run_dir) == 1
    assert f"{checkpoint} is not a whole checkpoint" in capsys.readouterr().err


def test_without_a_progress_bar(run_dir):
    assert fit(run_dir, "--trainer.enable_progress_bar=false") == 0


def test_bfloat16_on_request(run_dir):
    assert fit(run_dir, "--trainer.precision=bf16-mixed") == 0
    assert json.loads((run_dir / "run.json").read_text())["precision"] == "bf16-mixed"


# --- steps that are not finite

SOMETIMES = """
import math
import torch
from torch import nn


class Sometimes(nn.Module):
    '''NaN for every batch that ``unlucky`` describes: a function of the batch, so the same after a resumption.'''

    def __init__(self, modulus: int = 3):
        super().__init__()
        self.table, self.modulus = nn.Embedding(256, 256), modulus

    def forward(self, tokens):
        unlucky = self.training and int(tokens.sum()) % self.modulus == 0
        return self.table(tokens) * (math.nan if unlucky else 1.0)
"""


@pytest.fixture
def sometimes(tmp_path, monkeypatch):
    (tmp_path / "sometimes.py").write_text(SOMETIMES)
    monkeypatch.syspath_prepend(tmp_path)
    data = ["--data.seq_len=16", "--data.batch_size=2", "--data.eval_batch_size=2"]
    trainer = [argument for argument in TINY if argument.startswith("--trainer")]
    return [*trainer, *data, "--model.network=sometimes.Sometimes"]


def test_steps_left_out_are_counted_across_an_interruption(sometimes, run_dir, tmp_path, monkeypatch):
    call = ["--trainer.max_steps=12", "--trainer.val_check_interval=3", "--model.max_skipped_steps=12"]
    straight = tmp_path / "straight" / "arm" / "seed-0"
    assert fit(straight, *call, base=sometimes) == 0
    data = ByteData(seq_len=16, batch_size=2)
    data.setup()
    crops = data.train_dataloader().dataset
    unlucky = [int(crops[step][:, :-1].sum()) % 3 == 0 for step in range(12)]
    assert 0 < sum(unlucky[:6]) < sum(unlucky) < 12
    counts = [str(sum(unlucky[: step + 1])) for step in range(12)]
    rows = list(csv.DictReader((straight / "metrics.csv").open()))
    assert [row["skipped_steps"] for row in rows] == counts
    assert [row["train/loss"] == "nan" for row in rows] == unlucky
    assert json.loads((straight / "run.json").read_text())["skipped_steps"] == sum(unlucky)

    original = Recorder.on_train_batch_start

    def crash(self, trainer, *args):
        if trainer.global_step == 7:
            raise OSError("the lights went out")
        original(self, trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_start", crash)
        assert fit(run_dir, *call, base=sometimes) == 1
    assert fit(run_dir, *call, base=sometimes) == 0
    assert [row["skipped_steps"] for row in csv.DictReader((run_dir / "metrics.csv").open())] == counts
    weights = [torch.load(d / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for d in (straight, run_dir)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_run_that_diverges_says_where_and_what_is_left(sometimes, run_dir, capsys):
    """Step, module, arm and the last good checkpoint, which stays free of NaN."""
    call = ["--trainer.max_steps=12", "--trainer.val_check_interval=100", "--checkpoint_every=1"]
    data = ByteData(seq_len=16, batch_size=2)
    data.setup()
    crops = data.train_dataloader().dataset
    first = next(step for step in range(12) if int(crops[step][:, :-1].sum()) % 5 == 0)
    assert first > 0
    assert fit(run_dir, *call, "--model.network.modulus=5", base=sometimes) == 1
    message = capsys.readouterr().err
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    for part in (f"optimizer step {first + 1} of arm 'arm'", "first non-finite output: network", str(checkpoint)):
        assert part in message
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == first
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    diverged = json.loads((run_dir / "run.json").read_text())["diverged"]
    assert diverged["step"] == first + 1
    assert "the loss is nan" in diverged["why"]


# --- where a run comes from


def test_a_run_says_what_it_takes_to_repeat_it(run_dir):
    import platform

    import numpy

    assert fit(run_dir) == 0
    info = json.loads((run_dir / "run.json").read_text())
    assert info["config"] == yaml.safe_load((run_dir / "config.yaml").read_text())
    assert info["config"]["seed_everything"] == info["seed"] == 0
    assert info["torch"] == torch.__version__
    assert info["python"] == platform.python_version()
    assert info["libraries"]["numpy"] == numpy.__version__
    assert info["threads"] == torch.get_num_threads()
    assert info["deterministic"] is torch.are_deterministic_algorithms_enabled()
    assert info["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert info["code_modified"] in (True, False, None)
    assert info["attention"] in ("native", "chunked")
    assert "resumed" not in info


def test_a_resumed_run_says_where_and_what_had_changed(run_dir, monkeypatch):
    original = Recorder.on_train_batch_start

    def crash(self, trainer, *args):
        if trainer.global_step == 1:
            raise OSError("the lights went out")
        original(self, trainer, *args)

    call = ["--trainer.max_steps=3", "--checkpoint_every=1", "--trainer.val_check_interval=100"]
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_start", crash)
        assert fit(run_dir, *call) == 1
    path = run_dir / "run.json"
    info = json.loads(path.read_text())
    assert info["data"]["size"] == 4_000_000, "it is there before the first validation"
    path.write_text(json.dumps(info | {"torch": "2.0.0"}))
    assert fit(run_dir, *call) == 0
    assert json.loads(path.read_text())["resumed"] == [
        {"step": 1, "changed": {"torch": ["2.0.0", torch.__version__]}},
    ]


def test_a_run_does_not_go_on_with_other_data(run_dir, tmp_path, monkeypatch, capsys):
    original = Recorder.on_train_batch_start

    def crash(self, trainer, *args):
        if trainer.global_step == 1:
            raise OSError("the lights went out")
        original(self, trainer, *args)

    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    call = [f"--data.path={text}", "--trainer.max_steps=3", "--checkpoint_every=1", "--trainer.val_check_interval=100"]
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_start", crash)
        assert fit(run_dir, *call) == 1
    before = (run_dir / "checkpoints/last.ckpt").read_bytes()
    text.write_bytes(bytes(range(256))[::-1] * 40)
    capsys.readouterr()
    assert fit(run_dir, *call) == 1
    message = capsys.readouterr().err
    assert "was trained on other data: text (10240 bytes, SHA-256" in message
    assert (run_dir / "checkpoints/last.ckpt").read_bytes() == before
    text.write_bytes(bytes(range(256)) * 40)
    assert fit(run_dir, *call) == 0


def test_other_data_are_not_scored_as_the_runs_own_either(run_dir, tmp_path, monkeypatch, capsys):
    """It is interrupted in its last validation: nothing is left to train, and run.json may be lost besides."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    call = [f"--data.path={text}", "--trainer.max_steps=3", "--checkpoint_every=1", "--trainer.val_check_interval=2"]
    with monkeypatch.context() as patch:
        patch.setattr(Enwik8CLI, "after_fit", lambda self: (_ for _ in ()).throw(OSError("the lights went out")))
        assert fit(run_dir, *call) == 1
    text.write_bytes(bytes(range(256))[::-1] * 40)
    (run_dir / "run.json").unlink()
    capsys.readouterr()
    assert fit(run_dir, *call) == 1
    assert "was trained on other data: text (10240 bytes" in capsys.readouterr().err
    text.write_bytes(bytes(range(256)) * 40)
    assert fit(run_dir, *call) == 0
    info = json.loads((run_dir / "run.json").read_text())
    assert info["finished"]
    for key in ("config", "data", "torch", "device", "code_version", "precision"):
        assert info[key], "it is written again where it was lost"


def test_a_checkpoint_of_another_run_may_go_on_with_other_data(run_dir, tmp_path):
    assert fit(run_dir) == 0
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    other = run_dir.with_name("seed-1")
    assert (
        fit(other, f"--ckpt_path={run_dir}/checkpoints/last.ckpt", f"--data.path={text}", "--trainer.max_steps=4") == 0
    )
    assert json.loads((other / "run.json").read_text())["data"]["name"] == "text"


def test_starting_from_another_run_leaves_no_rows_of_the_one_before(run_dir, tmp_path):
    source = tmp_path / "source" / "arm" / "seed-0"
    assert fit(source) == 0
    assert fit(run_dir, "--trainer.max_steps=4") == 0
    assert fit(run_dir, f"--ckpt_path={source}/checkpoints/last.ckpt", "--trainer.max_steps=5") == 0
    assert [row["step"] for row in csv.DictReader((run_dir / "metrics.csv").open())] == ["3", "4", "5"]


def test_going_on_from_its_own_checkpoint_keeps_the_rows(run_dir):
    assert fit(run_dir) == 0
    assert fit(run_dir, f"--ckpt_path={run_dir}/checkpoints/last.ckpt", "--trainer.max_steps=4") == 0
    assert [row["step"] for row in csv.DictReader((run_dir / "metrics.csv").open())] == ["1", "2", "3", "4"]


def test_a_lost_config_is_known_from_run_json_and_without_both_the_folder_is_nobodys(run_dir, capsys):
    assert fit(run_dir) == 0
    (run_dir / "config.yaml").write_text("")
    assert fit(run_dir, "--model.learning_rate=0.5") == 1
    assert "belongs to a run with other settings" in capsys.readouterr().err
    change = {"finished": False}
    path = run_dir / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert fit(run_dir) == 0
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["max_steps"] == 2
    (run_dir / "config.yaml").write_text("")
    path.unlink()
    assert fit(run_dir) == 1
    assert "config.yaml is empty or gone" in capsys.readouterr().err


def test_a_call_that_fails_early_does_not_repeat_an_old_divergence(sometimes, run_dir, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(4000))  # every batch is unlucky
    call = [f"--data.path={text}"]
    assert fit(run_dir, *call, base=sometimes) == 1
    assert json.loads((run_dir / "run.json").read_text())["diverged"]["step"] == 1
    text.unlink()
    assert fit(run_dir, *call, base=sometimes) == 1
    assert json.loads((run_dir / "run.json").read_text())["diverged"] is None


@pytest.mark.parametrize("flag", ["--seed_every=5", "--run_di=elsewhere", "--trainer.max_st=1"])
def test_abbreviated_flags_are_refused(run_dir, capsys, flag):
    assert fit(run_dir, flag) != 0
    assert flag.split("=")[0] in capsys.readouterr().err
    assert not run_dir.exists()


def test_a_dry_run_of_lightning_is_refused_for_it_keeps_nothing(run_dir, capsys):
    assert fit(run_dir, "--trainer.fast_dev_run=true") == 1
    assert "--trainer.max_steps" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_process_waits_while_another_one_trains(run_dir):
    call = [sys.executable, "-m", "tasks.enwik8", "fit", *TINY, f"--run_dir={run_dir}"]
    with RunDirectory(run_dir).alone():
        second = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert second.stderr is not None
        said = next(line for line in second.stderr if "waiting" in line)
        assert said == f"waiting: another process is training in {run_dir}\n"
        assert fit(run_dir.with_name("seed-1")) == 0, "another folder is free"
        assert second.poll() is None
        assert not (run_dir / "config.yaml").exists()
    second.communicate(timeout=300)
    assert second.returncode == 0
    assert json.loads((run_dir / "run.json").read_text())["finished"]


def test_rows_that_another_process_wrote_meanwhile_are_gone_on_from(tmp_path):
    """A process that waited for the folder read the file before the other one had written to it."""
    waiting = MetricsCSV(tmp_path / "metrics.csv")
    other = MetricsCSV(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        other.log_metrics({"train/bpc": 4.0 - step, "val/bpc": 5.0}, step)
    other.save()
    waiting.rewind(2)
    waiting.log_metrics({"train/bpc": 0.5}, 3)
    waiting.save()
    table = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [(row["step"], row["train/bpc"], row["val/bpc"]) for row in table] == [
        ("1", "3.0", "5.0"),
        ("2", "2.0", "5.0"),
        ("3", "0.5", ""),
    ]


def test_an_interrupted_run_says_how_to_go_on(run_dir, capsys, monkeypatch):
    original = Recorder.on_train_batch_start

    def interrupt(self, trainer, *args):
        if trainer.global_step == 2:
            raise KeyboardInterrupt
        original(self, trainer, *args)

    call = ["--trainer.max_steps=4", "--trainer.val_check_interval=4"]
    for every, expected in ((100, "begins again, for lack of a checkpoint"), (1, "goes on from its last checkpoint")):
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "on_train_batch_start", interrupt)
            assert fit(run_dir, *call, f"--checkpoint_every={every}") != 0
        assert f"Interrupted after step 2. The same command {expected}." in capsys.readouterr().err


def test_a_run_that_goes_on_shows_no_rows_from_beyond_its_checkpoint(run_dir, monkeypatch):
    """Interrupted after step 3 with a checkpoint of step 2, and again before it has made step 3 anew."""
    original = Recorder.on_train_batch_start

    def crash_at(step):
        def crash(self, trainer, *args):
            if trainer.global_step == step:
                raise OSError("the lights went out")
            original(self, trainer, *args)

        return crash

    call = ["--trainer.max_steps=6", "--trainer.val_check_interval=6", "--checkpoint_every=2"]
    for step, rows in ((3, 3), (2, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "on_train_batch_start", crash_at(step))
            assert fit(run_dir, *call) == 1
        assert [int(row["step"]) for row in csv.DictReader((run_dir / "metrics.csv").open())] == list(
            range(1, rows + 1)
        )


def test_ones_own_code_is_recorded_by_its_hash(sometimes, run_dir, tmp_path):
    import hashlib

    call = ["--model.network.modulus=1000003"]
    assert fit(run_dir, *call, base=sometimes) == 0
    content = (tmp_path / "sometimes.py").read_bytes()
    assert json.loads((run_dir / "run.json").read_text())["own_code"] == {
        "sometimes": hashlib.sha256(content).hexdigest()
    }
    plain = run_dir.with_name("seed-1")
    assert fit(plain) == 0
    assert json.loads((plain / "run.json").read_text())["own_code"] == {}


def test_own_code_in_the_checkout_is_told_from_the_projects(tmp_path, monkeypatch):
    """A map beside the README, as the README has it, and one in a folder whose name begins like ours."""
    import hashlib

    from tasks import environment

    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    parts = []
    for name in ("mine", "linrope_mine.maps", "plots.ours"):
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("class Part: pass\n")
        spec = importlib.util.spec_from_file_location(f"own_{name}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        parts.append(module.Part())
    digest = hashlib.sha256(b"class Part: pass\n").hexdigest()
    found = environment.own_code([*parts, torch.nn.Linear(1, 1), Path()])
    assert found == {"own_mine": digest, "own_linrope_mine.maps": digest}


# --- checkpoints are data


class Harmful:
    """Unpickling it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("use", ["resume", "fit", "validate", "test"])
def test_no_code_in_a_checkpoint_is_run(run_dir, tmp_path, capsys, use):
    assert fit(run_dir) == 0
    checkpoint, mark = run_dir / "checkpoints" / "last.ckpt", tmp_path / "harm"
    content = torch.load(checkpoint, weights_only=True)
    torch.save(content | {"harm": Harmful(mark)}, checkpoint)
    if use == "resume":
        info = json.loads((run_dir / "run.json").read_text())
        (run_dir / "run.json").write_text(json.dumps(info | {"finished": False}))
        assert fit(run_dir) == 1
    elif use == "fit":
        other = run_dir.with_name("seed-1")
        assert fit(other, f"--ckpt_path={checkpoint}", "--trainer.max_steps=3") == 1
    else:
        assert main([use, *TINY, f"--ckpt_path={checkpoint}"]) == 1
    assert f"error: {checkpoint} is not a whole checkpoint" in capsys.readouterr().err
    assert not mark.exists()
    torch.load(checkpoint, weights_only=False)
    assert mark.exists(), "it would have done harm"


def test_every_load_of_a_checkpoint_is_of_data_alone():
    """Read off the sources: torch.load is called with weights_only=True, Lightning's own loading not at all."""
    for path in (p for package in ("linrope", "tasks", "plots") for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert node.func.attr != "load_from_checkpoint", path
                if called in ("torch.load", "pickle.load", "pickle.loads"):
                    assert called == "torch.load", path
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert given.get("weights_only") == "True", path

"""An interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import threading
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


def assert_same_run(one: Path, other: Path, steps: int = 20) -> None:
    """Weights, optimizer, schedule and every recorded figure but the clock's, bit for bit."""
    clock = ("seconds", "tokens_per_second")
    a, b = ([{k: v for k, v in row.items() if k not in clock} for row in rows(d)] for d in (one, other))
    assert [int(row["step"]) for row in a] == list(range(1, steps + 1))
    assert a == b
    x, y = (torch.load(d / "checkpoints" / "last.ckpt", weights_only=True) for d in (one, other))
    assert x["global_step"] == y["global_step"] == steps
    torch.testing.assert_close(x["state_dict"], y["state_dict"], rtol=0, atol=0)
    one_state, other_state = (tree_flatten(z["optimizer_states"])[0] for z in (x, y))
    assert len(one_state) == len(other_state) > 0
    for p, q in zip(one_state, other_state, strict=True):
        assert torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q
    assert x["lr_schedulers"] == y["lr_schedulers"]
    assert x["callbacks"].keys() == y["callbacks"].keys()
    first, second = (json.loads((d / "run.json").read_text()) for d in (one, other))
    assert first["finished"]
    assert second["finished"]
    assert first["validation"] == second["validation"]


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


@pytest.mark.parametrize("interval", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_validation_while_gradients_accumulate_does_not_spoil_resuming(config, tmp_path, monkeypatch, interval):
    """Every third or fifth batch, two batches a step: it falls between the two, where no checkpoint can be taken."""
    from tasks.callbacks import Recorder
    from tasks.enwik8.__main__ import main

    monkeypatch.chdir(ROOT)
    more = ["--trainer.accumulate_grad_batches=2", f"--trainer.val_check_interval={interval}", "--checkpoint_every=100"]
    straight, broken = tmp_path / "exp/straight/seed-3", tmp_path / "exp/broken/seed-3"
    assert main(command(config, straight, *more)[3:]) == 0
    original = Recorder.on_train_batch_start
    for crash_at in (4, 9, 16):

        def crash(self, trainer, *args, crash_at=crash_at):
            if trainer.global_step == crash_at:
                raise OSError("the lights went out")
            original(self, trainer, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "on_train_batch_start", crash)
            assert main(command(config, broken, *more)[3:]) == 1
    assert main(command(config, broken, *more)[3:]) == 0
    assert_same_run(straight, broken)


# --- killed anywhere


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nobody interrupted, and its config."""
    home = tmp_path_factory.mktemp("straight")
    (home / "tiny.yaml").write_text(TINY)
    assert in_child(home / "tiny.yaml", home / "exp/straight/seed-3") == 0
    return home / "exp/straight/seed-3"


def in_child(config: Path, run_dir: Path, arrange=lambda: None) -> int:
    """Run the command in a forked process, which has all imports already; ``arrange`` prepares its death there.

    Returns:
        The exit status, -9 after a kill -9.
    """
    child = os.fork()
    if child == 0:
        try:
            os.chdir(ROOT)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            arrange()
            from tasks.enwik8.__main__ import main

            os._exit(main(command(config, run_dir)[3:]))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner, name: str, call: int, then) -> None:
    """Replace a function by one that does ``then(original, *arguments)`` at its ``call``-th call."""
    original, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def replaced(*arguments, **options):
        if next(calls) == call:
            return then(original, *arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, replaced)


def flush_every_row() -> None:
    from tasks import callbacks

    callbacks._FLUSH_SECONDS = -1.0


def resumed_equals(straight: Path, broken: Path) -> None:
    assert in_child(straight.parents[2] / "tiny.yaml", broken) == 0
    assert_same_run(straight, broken)


@pytest.mark.slow
@pytest.mark.parametrize("point", range(20))
def test_killed_at_a_random_moment(straight, tmp_path, point):
    """A random step, and a random moment from its beginning on: computing, logging, saving or validating."""
    chance = random.Random(point)
    step, delay = chance.randint(1, 20), chance.uniform(0, 0.03)

    def arrange():
        from tasks.callbacks import Randomness

        flush_every_row()

        def start_the_clock(original, *arguments):
            threading.Timer(delay, die).start()
            return original(*arguments)

        at(Randomness, "on_train_batch_start", step, start_the_clock)

    broken = tmp_path / "exp/broken/seed-3"
    status = in_child(straight.parents[2] / "tiny.yaml", broken, arrange)
    assert status in (-signal.SIGKILL, 0), "the last step may end before its clock does"
    resumed_equals(straight, broken)


def half_of_a_file(original, *arguments, **options):
    """The process dies in the very middle of a write: the system ends it when a file passes this size."""
    import resource

    size = 20_000  # a checkpoint has several times as many bytes, no other file comes near
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return original(*arguments, **options)


def arrange_saving(call):
    from tasks.checkpoints import Checkpoints

    at(Checkpoints, "_save", call, half_of_a_file)


def arrange_renaming(call):
    from tasks import checkpoints

    def then_die(*arguments):
        checkpoints.write_whole.__globals__["os"].fsync = lambda *_: die()

    at(checkpoints, "write_whole", call, lambda original, *rest: (then_die(), original(*rest)))


def arrange_renamed(call):
    from tasks import checkpoints

    at(checkpoints, "write_whole", call, lambda original, *rest: (original(*rest), die()))


def arrange_flushing(call):
    """The row is cut short: half of it is on disk."""
    from tasks.metrics_csv import MetricsCSV

    flush_every_row()
    original = MetricsCSV._writer
    calls = iter(range(1, 1_000_000))

    class Half:
        def __init__(self, file):
            self.file = file

        def write(self, text):
            self.file.write(text[: len(text) // 2])
            self.file.flush()
            die()

    def writer(self, file):
        return original(self, Half(file) if next(calls) == call and hasattr(file, "fileno") else file)

    MetricsCSV._writer = writer


def arrange_validating(call):
    from tasks.language_modeling import LanguageModeling

    at(LanguageModeling, "validation_step", call, lambda *_: die())


def arrange_recording(call):
    """After the validation, before its figures are in run.json."""
    from tasks.run_directory import RunDirectory

    at(RunDirectory, "update", call, lambda *_: die())


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize(
    "arrange",
    [arrange_saving, arrange_renaming, arrange_renamed, arrange_flushing, arrange_validating, arrange_recording],
    ids=lambda arrange: arrange.__name__.removeprefix("arrange_"),
)
def test_killed_in_the_middle_of(straight, tmp_path, arrange, call):
    broken = tmp_path / "exp/broken/seed-3"
    status = in_child(straight.parents[2] / "tiny.yaml", broken, lambda: arrange(call))
    assert status in (-signal.SIGKILL, -signal.SIGXFSZ)
    if arrange is arrange_saving:
        assert [part.stat().st_size for part in (broken / "checkpoints").glob(".*.part")] == [20_000]
    resumed_equals(straight, broken)
    assert not list(broken.rglob(".*.part"))


# --- a comparison killed


def comparison(home: Path, name: str) -> subprocess.Popen:
    call = [sys.executable, "-m", "tasks.compare", "plan.yaml", "--jobs", "2", "--name", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(call, cwd=home, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two arms by two seeds that nobody interrupted; long enough that all can be killed at once."""
    home = tmp_path_factory.mktemp("compared")
    for name, base in (("one", 10_000), ("other", 100)):
        rotary = f"rotary: {{class_path: linrope.Rotary, init_args: {{base: {base}}}}}"
        (home / f"{name}.yaml").write_text(TINY.replace("rotary: linrope.Rotary", rotary))
    plan = "settings: {trainer.max_steps: 200, trainer.val_check_interval: 50}\n"
    plan += "seeds: [3, 4]\nbaseline: one\narms: {one: [one.yaml], other: [other.yaml]}\n"
    (home / "plan.yaml").write_text(plan)
    assert comparison(home, "straight").wait(600) == 0
    return home


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["all processes", "the comparison alone"])
def test_a_comparison_with_two_arms_killed_picks_itself_up(compared, whole):
    """Both arms are training when the kill -9 comes; afterwards every figure but the clock's is as if it had not."""
    name = "killed" if whole else "orphaned"
    killed = comparison(compared, name)
    home = compared / "runs" / name
    arms = [home / "one/seed-3", home / "other/seed-3"]
    deadline = time.monotonic() + 300
    while not all((arm / "checkpoints/last.ckpt").is_file() for arm in arms) and time.monotonic() < deadline:
        time.sleep(0.002)
    if whole:
        os.killpg(killed.pid, signal.SIGKILL)
    else:
        killed.kill()
    killed.wait()
    cut = [len(rows(arm)) for arm in arms]
    assert all(3 <= done < 200 for done in cut), cut
    assert comparison(compared, name).wait(600) == 0
    for arm in ("one", "other"):
        for seed in (3, 4):
            assert_same_run(compared / f"runs/straight/{arm}/seed-{seed}", home / f"{arm}/seed-{seed}", 200)
    first, second = (json.loads((compared / f"runs/{n}/summary.json").read_text()) for n in ("straight", name))
    clock = {"seconds_to_baseline", "tokens_per_second", "peak_memory_bytes"}
    for row, again in zip(first, second, strict=True):
        assert {k: v for k, v in row.items() if k not in clock} == {k: v for k, v in again.items() if k not in clock}

"""How far networks reach past their trained window: the figures, the command, the picture."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from linrope import (
    ByteTransformer,
    DynamicNTKScaling,
    LinearAttention,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    SoftmaxAttention,
    YaRN,
    redraw_feature_maps,
)
from plots import length as plot
from plots.checkpoints import load_checkpoint, load_network
from plots.length_rows import LengthRow, by_position, by_window, read_rows, rows_as_csv
from plots.length_table import table
from plots.runs import RunError
from tasks.enwik8.__main__ import main
from tasks.enwik8.data import CropBatches, crop_starts
from tasks.enwik8.length.command import parser
from tasks.enwik8.length.finetune import finetuned, recipe_for
from tasks.enwik8.length.measure import Measurement
from tasks.enwik8.length.scalings import find_scalings, scaled
from tasks.enwik8.length.score import at_once, bins, in_pieces, score
from tasks.enwik8.length.subjects import find_subjects
from tasks.language_modeling import learning_rate_factor
from tasks.optimizers import MuonAdamW, split_parameters
from tests.cases import CORE, PLACEMENTS, attention_options, close
from tests.test_enwik8_cli import ROOT, TINY
from tests.test_enwik8_cli import fit as train

CPU = torch.device("cpu")
CASES = [f"{name}-{placement}" for name in CORE for placement in PLACEMENTS] + ["softmax-none", "softmax-rotary"]
TEXT = np.frombuffer(np.random.default_rng(0).bytes(61), dtype=np.uint8)


def network_of(case: str, scaling=None) -> ByteTransformer:
    """One layer of an attention, in float64."""
    name, _, placement = case.rpartition("-")
    rotary = None if placement == "none" else Rotary(scaling=scaling)

    def attention(d_model: int):
        if name == "softmax":
            return SoftmaxAttention(d_model, 2, rotary=rotary)
        return LinearAttention(d_model, 2, **attention_options(name, placement, rotary))

    torch.manual_seed(0)
    network = ByteTransformer(num_layers=1, d_model=16, attention=attention).double().eval()
    for parameter in network.parameters():  # away from the first guesses, which all cost 8 bits
        torch.nn.init.normal_(parameter, std=0.3)
    return network


# --- the figures


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [1, 16, pytest.param(100, marks=pytest.mark.slow)])
def test_each_target_costs_what_its_own_prefix_says(case, window):
    network = network_of(case)
    tokens = torch.tensor(TEXT.astype(np.int64))
    nats, targets = torch.zeros(60, dtype=torch.float64), torch.zeros(60)
    with torch.no_grad():
        for last in range(60):
            start = last // window * window
            logits = network(tokens[None, start : last + 1])[0, -1]
            nats[last - start] -= logits.log_softmax(-1)[tokens[last + 1]]
            targets[last - start] += 1
    scored = score(at_once(network), TEXT, window, CPU)
    length = min(window, 60)
    close(scored.nats, nats[:length], 1e-9)
    assert scored.targets.tolist() == targets[:length].tolist()
    assert scored.bpc(0, length) == pytest.approx(float(nats.sum()) / (60 * math.log(2)), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_state_carried_is_one_long_window(case):
    network = network_of(case)
    whole = score(at_once(network), TEXT, 60, CPU)
    for piece in (1, 7, 60):
        carried = score(in_pieces(network, piece), TEXT, 60, CPU)
        close(carried.nats, whole.nats, 1e-9)
        assert carried.targets.tolist() == [1] * 60


def test_batches_change_nothing():
    """33,000 bytes in windows of 16 are three batches and a shorter window."""
    split = np.frombuffer(np.random.default_rng(1).bytes(33_000), dtype=np.uint8)
    network = network_of("EluPlusOne-numerator")
    scored = score(at_once(network), split, 16, CPU)
    with torch.no_grad():
        tokens = torch.tensor(split.astype(np.int64))
        log_probabilities = network(tokens[:32_992].view(-1, 16)).log_softmax(-1)
        nats = -log_probabilities.gather(-1, tokens[1:32_993].view(-1, 16, 1)).squeeze(-1).sum(0)
        nats[:7] -= network(tokens[None, 32_992:-1])[0].log_softmax(-1).gather(-1, tokens[32_993:, None])[:, 0]
    close(scored.nats, nats, 1e-9)
    assert scored.targets.sum() == 32_999


def test_bins_are_cut_at_halves_and_doubles_of_the_trained_length():
    assert bins(256, 2048) == [
        (0, 32), (32, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048),
    ]  # fmt: skip
    assert bins(16, 60)[-2:] == [(16, 32), (32, 60)]
    assert bins(1, 1) == []


@given(st.integers(1, 300), st.integers(1, 5000))
def test_bins_cover_every_position_once(trained, longest):
    covered = [p for begin, end in bins(trained, longest) for p in range(begin, end)]
    assert covered in ([], list(range(longest)))


# --- scalings


ROTATED = [case for case in CASES if not case.endswith("-none")]
# As they should be made for windows of 4 times the trained length of 16, with what the network then uses.
SCALINGS = {
    LinearScaling: LinearScaling(4.0),
    NTKScaling: NTKScaling(4.0),
    DynamicNTKScaling: DynamicNTKScaling(16),
    YaRN: YaRN(4.0, 16),
    Llama3Scaling: Llama3Scaling(4.0, 16),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("case", ROTATED)
def test_a_scaled_network_is_the_one_made_with_that_scaling(case, kind):
    network, tokens = network_of(case), torch.tensor(TEXT[None, :60].astype(np.int64))
    with torch.no_grad():
        before, expected = network(tokens), network_of(case, SCALINGS[kind])(tokens)
        with scaled(network, kind, 4.0, 16):
            within = network(tokens)
            rotations = [module for module in network.modules() if isinstance(module, Rotary)]
        after = network(tokens)
    assert [rotary.scaling for rotary in rotations] == [SCALINGS[kind]]
    close(within, expected, 1e-12)
    assert not torch.allclose(within, before, rtol=1e-6)
    assert torch.equal(after, before)


@pytest.mark.parametrize("case", ROTATED)
def test_positions_four_times_as_far_undo_a_linear_scaling_by_four(case):
    layer = network_of(case).blocks[0].attention
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        plain = layer(x, positions=torch.arange(9))
        with scaled(layer, LinearScaling, 4.0, 16):
            stretched = layer(x, positions=4 * torch.arange(9))
    if "CosFormer" not in case:  # whose map knows positions, too
        close(stretched, plain, 1e-9)


def test_the_rotation_is_restored_after_an_error():
    network = network_of("EluPlusOne-numerator")
    rotary = network.blocks[0].attention.kernel.rotary
    with suppress(ZeroDivisionError), scaled(network, YaRN, 2.0, 16):
        assert network.blocks[0].attention.kernel.rotary is not rotary
        raise ZeroDivisionError
    assert network.blocks[0].attention.kernel.rotary is rotary


# --- the command


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


NUMERATOR = "--config=configs/positions/rotary_numerator.yaml"
FAVOR = ["--config=configs/feature_maps/favor_plus.yaml"]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Two trained runs on 6,000 bytes of text: elu+1 with rotation, and without."""
    home = tmp_path_factory.mktemp("length")
    (home / "text").write_bytes((ROOT / "README.md").read_bytes()[:6000])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for arm, overlay in {"numerator": [NUMERATOR], "none": []}.items():
            base = [TINY[0], *overlay, *TINY[1:], f"--data.path={home / 'text'}"]
            assert train(home / "runs" / arm / "seed-0", base=base) == 0
    return home


SMALL = [
    "--factors",
    "1",
    "2",
    "4",
    "--scalings",
    "linrope.LinearScaling",
    "--finetune_steps",
    "2",
    "--finetune_factor",
    "2",
]


def measure(experiment, out, *more, given=("--runs", "runs"), base=SMALL):
    runs = [str(experiment / part) if part == "runs" else str(part) for part in given]
    try:
        return main(["length", *runs, *base, "--out", str(out), *map(str, more)])
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.fixture(scope="module")
def measured(experiment):
    before = {path: path.read_bytes() for path in experiment.rglob("*.ckpt")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert measure(experiment, experiment / "out") == 0
    assert {path: path.read_bytes() for path in experiment.rglob("*.ckpt")} == before
    return experiment / "out"


def test_rows_are_those_of_the_checkpoint(experiment, measured):
    """Bits per byte of whole windows by hand, from the loaded network; and every combination is there."""
    split = (experiment / "text").read_bytes()[5400:5700]
    network = load_network(experiment / "runs/numerator/seed-0/checkpoints/last.ckpt")
    rows = [row for row in read_rows(measured / "length.csv") if row.arm == "numerator" and row.finetune_steps == 0]
    for window in (16, 32, 64):
        nats = 0.0
        for start in range(0, 299, window):
            piece = torch.tensor([list(split[start : start + window + 1])])
            with torch.no_grad():
                log_probabilities = network(piece[:, :-1]).double().log_softmax(-1)
            nats -= log_probabilities.gather(-1, piece[:, 1:, None]).sum().item()
        (row,) = [r for r in rows if r.scaling == "none" and r.window == window and r.is_total]
        assert (row.targets, row.trained, row.factor) == (299, 16, None)
        assert row.bpc == pytest.approx(nats / 299 / math.log(2), rel=1e-6)
    found = {(r.arm, r.scaling, r.finetune_steps, r.evaluation, r.window) for r in read_rows(measured / "length.csv")}
    scalings = {("numerator", "none"), ("numerator", "LinearScaling"), ("none", "none")}
    assert found == {
        (*arm, steps, evaluation, window)
        for arm in scalings
        for steps in (0, 2)
        for evaluation, window in [*(("windows", w) for w in (16, 32, 64)), ("stream", 299)]
    }
    assert {r.factor for r in rows if r.scaling == "LinearScaling"} == {1, 2, 4}


def test_bins_of_the_longest_window_and_of_the_stream_recombine(measured):
    groups: dict = {}
    for row in read_rows(measured / "length.csv"):
        if row.evaluation == "stream" or row.window == 64:
            groups.setdefault((row.run, row.scaling, row.finetune_steps, row.evaluation), []).append(row)
    assert len(groups) == 12
    for rows in groups.values():
        (total,), parts = [r for r in rows if r.is_total], [r for r in rows if not r.is_total]
        assert sum(r.targets for r in parts) == total.targets == 299
        assert sum(r.targets * r.bpc for r in parts) == pytest.approx(total.targets * total.bpc, rel=1e-12)
        assert [r.position_from for r in parts][:5] == [0, 2, 4, 8, 16]


def test_what_the_figures_depend_on_is_written_beside_them(experiment, measured):
    content = json.loads((measured / "length.json").read_text())
    assert content["settings"]["scalings"] == [f"{LinearScaling.__module__}.LinearScaling"]
    assert (content["data"]["name"], content["data"]["size"], content["data"]["bytes"]) == ("text", 6000, 300)
    assert set(content["method"]) == {"windows", "stream", "factor", "position", "finetune"}
    entries = content["checkpoints"].values()
    assert [entry["notes"] for entry in entries] == [["there is no rotation to scale"], []]
    assert all(entry["trained_length"] == 16 and entry["code_version"] for entry in entries)


def test_again_it_measures_the_same(experiment, measured, tmp_path):
    assert measure(experiment, tmp_path / "out") == 0
    assert (tmp_path / "out/length.csv").read_text() == (measured / "length.csv").read_text()


def test_an_interrupted_call_goes_on(experiment, measured, tmp_path, monkeypatch, capsys):
    run, done = Measurement.run, []

    def interrupted(self):
        done.append(self.subject.arm)
        if len(done) == 2:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(Measurement, "run", interrupted)
    assert measure(experiment, tmp_path / "out") == 130
    assert "The same command goes on" in capsys.readouterr().err
    assert {row.arm for row in read_rows(tmp_path / "out/length.csv")} == {"none"}
    assert measure(experiment, tmp_path / "out") == 0
    assert done == ["none", "numerator", "numerator"]
    assert (tmp_path / "out/length.csv").read_text() == (measured / "length.csv").read_text()


def test_an_interrupted_fine_tuning_ends_the_call(experiment, tmp_path, monkeypatch, capsys):
    def interrupted(self, index):
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(CropBatches, "__getitem__", interrupted)
    try:
        assert measure(experiment, tmp_path / "out") == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # which the trainer has set aside
    assert "The same command goes on" in capsys.readouterr().err


def test_a_folder_of_other_settings_is_refused(experiment, measured, capsys):
    before = (measured / "length.csv").read_text()
    for changed, words in {
        ("--max_bytes", "200"): "settings.max_bytes: null -> 200",
        ("--factors", "1", "2"): "settings.factors",
        ("--finetune_factor", "1"): "settings.finetune_factor: 2.0 -> 1.0",
        ("--split", "test"): 'settings.split: "validation" -> "test"',
        ("--data.path", str(ROOT / "README.md")): "data.name",
    }.items():
        assert measure(experiment, measured, *changed) == 1
        assert words in capsys.readouterr().err
    assert (measured / "length.csv").read_text() == before


def test_without_steps_of_finetuning_their_settings_do_not_matter(experiment, tmp_path, capsys):
    for more in (["0.3"], ["1.1"], ["4", "--finetune_learning_rate", "-1"]):
        call = ["--factors", "2", "--finetune_factor", *more]
        assert measure(experiment, tmp_path / "out", given=("--runs", "runs"), base=call) == 0
    assert capsys.readouterr().out.count("already measured") == 2 * 2


def test_another_checkpoint_of_the_same_name_is_refused(experiment, measured, tmp_path, capsys):
    run = shutil.copytree(experiment / "runs/none/seed-0", tmp_path / "runs/none/seed-0")
    checkpoint = run / "checkpoints/last.ckpt"
    torch.save({**load_checkpoint(checkpoint), "other": 1}, checkpoint)
    assert measure(experiment, measured, given=("--runs", run)) == 1
    assert "is not the checkpoint that was measured" in capsys.readouterr().err


def test_a_checkpoint_alone_is_named_by_its_path(experiment, tmp_path):
    checkpoint = tmp_path / "some/place/seed-3/checkpoints/last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes((experiment / "runs/none/seed-0/checkpoints/last.ckpt").read_bytes())
    (subject,), _ = find_subjects([str(checkpoint)], [])
    # Without its run, what its network was made for is the trained length.
    assert (subject.name, subject.arm, subject.seed, subject.trained) == ("some/place/seed-3",) * 2 + (0, 256)
    with pytest.raises(RunError, match=r"fine-tuning needs the settings of its run"):
        recipe_for(subject, 2, 4, None)


def test_runs_that_have_not_finished_are_left_out_and_named(experiment, tmp_path, capsys):
    folder = tmp_path / "runs/none/seed-0"
    folder.mkdir(parents=True)
    source = experiment / "runs/none/seed-0"
    for name in ("metrics.csv", "config.yaml"):
        (folder / name).write_bytes((source / name).read_bytes())
    assert measure(experiment, tmp_path / "out", given=("--runs", tmp_path / "runs")) == 1
    assert "no checkpoint to measure" in (message := capsys.readouterr().err)
    assert "it is not finished" in message


ERRORS = {
    "no checkpoint": ((), [], "no checkpoint to measure: give --ckpt FILE or --runs FOLDER"),
    "missing checkpoint": (("--ckpt", "nowhere.ckpt"), [], "--ckpt nowhere.ckpt: no such file"),
    "missing folder": (("--runs", "nowhere"), [], "nowhere: no such folder"),
    "unknown class": (("--runs", "runs"), ["--scalings", "linrope.YaWN"], "no class linrope.YaWN"),
    "unknown module": (("--runs", "runs"), ["--scalings", "nowhere.YaRN"], "no class nowhere.YaRN"),
    "no path": (("--runs", "runs"), ["--scalings", "YaRN"], "no class YaRN"),
    "no scaling": (("--runs", "runs"), ["--scalings", "linrope.Rotary"], "linrope.Rotary is no scaling"),
    "twice": (("--runs", "runs"), ["--scalings", *["linrope.LinearScaling"] * 2], "names LinearScaling twice"),
    "wants more": (("--runs", "runs"), ["--scalings", "linrope.LongRoPE"], "needs short_factor, long_factor, original_seq_len, but"),
    "too long": (("--runs", "runs"), ["--factors", "1", "32"], "300 bytes here, too few for a window of 512 inputs"),
    "cut too short": (("--runs", "runs"), ["--max_bytes", "64"], "64 bytes here, too few for a window of 64"),
    "factor": (("--runs", "runs"), ["--factors", "0.5", "2"], "--factors must be at least 1, the trained length, got 0.5"),
    "fraction": (("--runs", "runs"), ["--factors", "1.3"], "1.3 times the trained length of 16 is no whole number"),
    "steps": (("--runs", "runs"), ["--finetune_steps", "-1"], "--finetune_steps must not be negative, got -1"),
    "rate": (("--runs", "runs"), ["--finetune_learning_rate", "0"], "--finetune_learning_rate must be positive, got 0"),
    "bytes": (("--runs", "runs"), ["--max_bytes", "-5"], "--max_bytes must be at least 2, one to see and one to predict, got -5"),
    "finetune factor": (("--runs", "runs"), ["--finetune_factor", "4"], "no whole number of windows of 64"),
    "missing data": (("--runs", "runs"), ["--data.path", "nowhere/text"], "no file at nowhere/text"),
    "device": (("--runs", "runs"), ["--device", "toaster"], "toaster"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_bad_calls_get_one_message_and_a_status(case, experiment, tmp_path, capsys):
    given_, more, words = ERRORS[case]
    assert measure(experiment, tmp_path / "out", *more, given=given_) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert words in message
    assert not (tmp_path / "out/length.csv").exists()


def test_a_scaling_that_follows_the_length_is_not_streamed(experiment, tmp_path, capsys):
    call = ["--factors", "2", "--scalings", "linrope.DynamicNTKScaling", "linrope.NTKScaling"]
    assert measure(experiment, tmp_path / "out", given=("--runs", "runs"), base=call) == 0
    rows = read_rows(tmp_path / "out/length.csv")
    streamed = {row.scaling for row in rows if row.evaluation == "stream"}
    assert streamed == {"none", "NTKScaling"}
    assert "scaling DynamicNTKScaling: no state is carried: its frequencies change" in capsys.readouterr().out


def test_softmax_is_not_streamed(experiment, tmp_path, capsys):
    overlays = ["--config=configs/attention/softmax.yaml", "--config=configs/positions/rotary.yaml"]
    base = [TINY[0], *overlays, *TINY[1:], f"--data.path={experiment / 'text'}"]
    assert train(tmp_path / "runs/softmax/seed-0", base=base) == 0
    call = ["--factors", "1", "2", "--scalings", "linrope.YaRN"]
    assert measure(experiment, tmp_path / "out", given=("--runs", tmp_path / "runs"), base=call) == 0
    rows = read_rows(tmp_path / "out/length.csv")
    assert {(row.scaling, row.evaluation) for row in rows} == {("none", "windows"), ("YaRN", "windows")}
    assert capsys.readouterr().out.count("no state is carried: softmax attention's is every key") == 1


def test_learned_positions_end_where_they_end(experiment, tmp_path, capsys):
    overlays = ["--config=configs/positions/learned.yaml"]
    base = [TINY[0], *overlays, *TINY[1:], "--model.network.seq_len=32", "--data.batch_size=4"]
    base += [f"--data.path={experiment / 'text'}"]
    assert train(tmp_path / "runs/learned/seed-0", base=base) == 0
    assert measure(experiment, tmp_path / "out", "--finetune_factor", "4", given=("--runs", tmp_path / "runs")) == 0
    rows = read_rows(tmp_path / "out/length.csv")
    assert {row.window for row in rows} == {16, 32}
    assert {row.evaluation for row in rows} == {"windows"}
    (entry,) = json.loads((tmp_path / "out/length.json").read_text())["checkpoints"].values()
    for words in (
        "windows of 64 are left out: learned positions know 32 tokens, got 64",
        "no state is carried: learned positions know 32",
        "fine-tuning is left out: learned positions know 32",
    ):
        assert any(words in note for note in entry["notes"])


def test_a_folder_in_which_nothing_could_be_measured_is_measured_on(experiment, tmp_path, capsys):
    base = [TINY[0], "--config=configs/positions/learned.yaml", *TINY[1:], "--model.network.seq_len=16"]
    assert train(tmp_path / "runs/learned/seed-0", base=[*base, f"--data.path={experiment / 'text'}"]) == 0
    call, out = ["--factors", "16"], tmp_path / "out"
    for more in ([], [], [experiment / "runs/none"]):
        assert measure(experiment, out, given=("--runs", tmp_path / "runs", *more), base=call) == 0
        if not more:
            assert plot.main([str(out)]) == 2
            message = capsys.readouterr().err.splitlines()[-1]
            assert message == f"error: {out}/length.csv: nothing was measured; length.json says why"
    assert capsys.readouterr().out.count("learned · seed 0: already measured") == 1  # and once before, read above
    assert {Path(row.run).parts[-2] for row in read_rows(out / "length.csv")} == {"none"}


def _of(arm: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(f"runs/{arm}/")]


DAMAGE = {
    "a number cut short": lambda lines: [*lines[:-1], lines[-1][:-3] + "\n"],
    "a row cut short": lambda lines: [*lines[:-1], lines[-1].rsplit(",", 2)[0]],
    "a row lost": lambda lines: lines[:-1],
    "a row twice": lambda lines: [*lines, lines[-1]],
    "a digit changed": lambda lines: [*lines[:-1], lines[-1].replace(",299,", ",298,")],
    "the rows of a checkpoint lost": lambda lines: [line for line in lines if line not in _of("none", lines)],
    "all rows lost": lambda lines: lines[:1],
    "nothing left": lambda lines: [],
    "not text": lambda lines: ["\0", *lines],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_not_taken_for_complete(damage, experiment, measured, tmp_path, capsys):
    out = shutil.copytree(measured, tmp_path / "out")
    lines = (out / "length.csv").read_text().splitlines(keepends=True)
    (out / "length.csv").write_text("".join(DAMAGE[damage](lines)))
    assert measure(experiment, out) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {out}/length.csv")
    assert message.count("\n") == 1
    assert message.endswith(f"; delete {out}, and the same command measures again\n")


def test_a_lost_length_csv_is_named(experiment, measured, tmp_path, capsys):
    out = shutil.copytree(measured, tmp_path / "out")
    (out / "length.csv").unlink()
    assert measure(experiment, out) == 1
    assert "length.csv is damaged: its rows of " in capsys.readouterr().err


@pytest.mark.parametrize("factors", [[1, 2], [2.0]])
def test_a_whole_folder_is_known_again(factors, experiment, tmp_path, capsys):
    """Whole numbers from a file are written as they read back; rows of a checkpoint that was not done are dropped."""
    (tmp_path / "length.yaml").write_text(f"factors: {factors}\nscalings: [linrope.LinearScaling]\n")
    call, out = ["--config", str(tmp_path / "length.yaml")], tmp_path / "out"
    assert measure(experiment, out, given=("--runs", "runs"), base=call) == 0
    whole = (out / "length.csv").read_text()
    (out / "length.csv").write_text(
        whole + "".join(line.replace("/none/", "/late/") for line in _of("none", whole.splitlines(True)))
    )
    capsys.readouterr()
    assert measure(experiment, out, given=("--runs", "runs"), base=call) == 0
    assert capsys.readouterr().out.count("already measured") == 2


ENTRIES = {
    "nothing": None,
    "a word": "sha256 rows_sha256",
    "a list": ["sha256", "rows_sha256"],
    "no sum of the checkpoint": {"rows_sha256": ""},
    "no sum of the rows": {"sha256": ""},
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_damaged_length_json_gets_one_message(entry, experiment, measured, tmp_path, capsys):
    out = shutil.copytree(measured, tmp_path / "out")
    content = json.loads((out / "length.json").read_text())
    name = next(iter(content["checkpoints"]))
    content["checkpoints"][name] = ENTRIES[entry]
    (out / "length.json").write_text(json.dumps(content))
    assert measure(experiment, out) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {out}/length.json is not what this command writes (no ")
    assert f"of {name} in it" in message
    assert message.count("\n") == 1
    assert message.endswith(f"choose another --out, or delete {out}\n")


@pytest.mark.slow
def test_a_network_of_others_is_measured_as_far_as_it_goes(experiment, tmp_path):
    """PerformerLM asserts that a text is no longer than ``max_seq_len``, and carries no state."""
    size = [f"--model.network.{name}" for name in ("max_seq_len=32", "depth=1", "dim=16", "dim_head=8")]
    data = ["--data.seq_len=16", "--data.batch_size=2", f"--data.path={experiment / 'text'}"]
    trainer = [option for option in TINY if option.startswith("--trainer")]
    base = [TINY[0], "--config=configs/networks/performer_lm.yaml", *trainer, *size, *data]
    assert train(tmp_path / "runs/performer/seed-0", base=base) == 0
    assert measure(experiment, tmp_path / "out", given=("--runs", tmp_path / "runs")) == 0
    rows = read_rows(tmp_path / "out/length.csv")
    assert {(row.evaluation, row.window, row.finetune_steps) for row in rows} == {
        ("windows", window, steps) for window in (16, 32) for steps in (0, 2)
    }
    (entry,) = json.loads((tmp_path / "out/length.json").read_text())["checkpoints"].values()
    assert "no state is carried: PerformerLM has no stream()" in entry["notes"]


# --- fine-tuning


@pytest.mark.parametrize("more", [[], [*FAVOR, "--model.network.attention.feature_map.redraw_interval=3"]])
def test_finetuning_is_the_runs_own_training_with_longer_windows(more, experiment, tmp_path):
    """The same steps, by an explicit loop: batches, rates, clipping and redraws counted on from the run's two steps."""
    base = [TINY[0], NUMERATOR, *more, *TINY[1:], "--data.batch_size=8", f"--data.path={experiment / 'text'}"]
    assert train(tmp_path / "runs/arm/seed-0", base=base) == 0
    (subject,), _ = find_subjects([], [str(tmp_path / "runs")])
    network = load_network(subject.checkpoint)
    before = deepcopy(network.state_dict())
    split = np.fromfile(experiment / "text", dtype=np.uint8)[:5400]
    recipe = recipe_for(subject, 3, 4.0, None)
    with scaled(network, LinearScaling, 4.0, 16):
        tuned = finetuned(network, recipe, split, CPU)
        expected = deepcopy(network).train()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())

    hidden, readout, others = split_parameters(expected)
    groups = [{"params": readout, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = MuonAdamW(hidden, groups, 8e-4, 0.1, (0.9, 0.95))
    for step in range(3):
        starts = crop_starts(0, 2 + step, 2, 5400 - 64)  # 8 windows of 16 bytes are 2 of 64
        tokens = torch.tensor(np.stack([split[s : s + 65] for s in starts]).astype(np.int64))
        logits = expected(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 8e-4 * learning_rate_factor(step, 3, 50, 0.0)
        optimizer.step()
        optimizer.zero_grad()
        redraw_feature_maps(expected, 3 + step)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(tuned.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)
        assert not torch.equal(value, before[name]) or "norm.bias" in name


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("scalings: linrope.YaRN", "'linrope.YaRN'"),
        ("scalings: null", "None"),
        ("factors: 2", "2"),
        ("factors:", "None"),
        ("runs: runs/length", "'runs/length'"),
        ("ckpt: last.ckpt", "'last.ckpt'"),
    ],
)
def test_one_value_in_a_file_where_a_list_is_expected_is_refused(line, got, tmp_path, capsys):
    (tmp_path / "length.yaml").write_text(f"finetune_steps: 1\n{line}\n")
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["--config", str(tmp_path / "length.yaml")])
    name = line.partition(":")[0]
    expected = f"error: {name} expects a list, as in {name}: [...], got {got}"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_the_shipped_settings_are_understood():
    options = parser().parse_args(["--runs", "runs/length", "--config", "configs/length.yaml"])
    assert [kind.__name__ for kind in find_scalings(options.scalings)] == [
        "LinearScaling", "NTKScaling", "DynamicNTKScaling", "YaRN", "Llama3Scaling",
    ]  # fmt: skip
    assert options.factors == [1, 2, 4, 8, 16]
    assert (options.finetune_steps, options.finetune_factor) == (100, 4)


# --- the picture and the table


def rows_of(arms: dict[str, list[str]], seeds: int = 3, finetune_steps: int = 0) -> list[LengthRow]:
    """Rows whose bpc is a known function: see ``bpc_of``."""
    rows = []
    for arm, scalings in arms.items():
        for scaling in scalings:
            for seed in range(seeds):
                for window in (16, 32, 64):
                    ranges = [(0, window), *(bins(16, 64) if window == 64 else ())]
                    rows += [
                        LengthRow(
                            f"e/{arm}/{seed}", arm, seed, 16, scaling, None if scaling == "none" else window / 16,
                            finetune_steps, "windows", window, begin, end, 10, bpc_of(scaling, seed, begin, end),
                        )
                        for begin, end in ranges
                    ]  # fmt: skip
                stream = ("stream", 299, 0, 299, 299, bpc_of(scaling, seed, 0, 299))
                rows.append(LengthRow(f"e/{arm}/{seed}", arm, seed, 16, scaling, None, finetune_steps, *stream))
    return rows


def bpc_of(scaling: str, seed: int, begin: int, end: int) -> float:
    return 2 + len(scaling) / 100 + seed**2 / 10 + end / 1000 + begin / 300


def interval(values: list[float]) -> tuple[float, float]:
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return float(low), float(high)


ARMS = {"elu, none": ["none"], "elu, before": ["none", "YaRN"], "soft, rotary": ["none", "YaRN"]}


def test_rows_read_back_as_they_were(tmp_path):
    rows = rows_of(ARMS)
    (tmp_path / "length.csv").write_text(rows_as_csv(rows))
    assert read_rows(tmp_path / "length.csv") == rows
    with (tmp_path / "length.csv").open() as file:
        assert next(csv.reader(file))[:5] == ["run", "arm", "seed", "trained", "scaling"]


def test_lines_are_means_and_bands_their_intervals():
    drawn = plot.figure(rows_of(ARMS), "A title")
    axes = {(axis.get_title(), axis.get_xlabel()): axis for axis in drawn.axes}
    assert {title for title, _ in axes} == {"elu, before", "soft, rotary"}
    for (title, xlabel), axis in axes.items():
        lines = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
        beside = ["none (not scaled)"] if title.startswith("elu") else []
        assert list(lines) == ["as trained", "YaRN", *beside]
        ranges = [(0, 16), (0, 32), (0, 64)] if xlabel == "bytes of a window" else bins(16, 64)
        for label, line in lines.items():
            scaling = "YaRN" if label == "YaRN" else "none"
            values = [[bpc_of(scaling, seed, *r) for seed in range(3)] for r in ranges]
            np.testing.assert_allclose(line.get_xdata(), [end for _, end in ranges])
            np.testing.assert_allclose(line.get_ydata(), [np.mean(v) for v in values], rtol=1e-12)
        band = axis.collections[1].get_paths()[0].vertices  # of YaRN
        for (_, end), heights in zip(ranges, [[bpc_of("YaRN", s, *r) for s in range(3)] for r in ranges], strict=True):
            found = band[band[:, 0] == end][:, 1]
            assert (found.min(), found.max()) == pytest.approx(interval(heights), rel=1e-9)


def test_the_trained_length_is_marked_in_every_panel():
    for axis in plot.figure(rows_of(ARMS), "").axes:
        (mark,) = [line for line in axis.lines if line.get_label().startswith("_")]
        assert list(mark.get_xdata()) == [16, 16]
        assert "trained" in [text.get_text().strip() for text in axis.texts]


def test_no_two_lines_look_alike():
    scalings = ["none", *(kind.__name__ for kind in SCALINGS)]
    axis = plot.figure(rows_of({"elu, none": ["none"], "elu, fixed": ["none"], "elu, before": scalings}), "").axes[0]
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    assert len({line.get_color() for line in lines[:6]}) == 6
    # matplotlib's own words for dashes: an offset and lengths, where they are not "-"
    assert len({(line.get_color(), str(line._unscaled_dash_pattern), line.get_marker()) for line in lines}) == 8


def test_without_scalings_a_family_has_one_panel():
    arms = {"elu, none": ["none"], "elu, before": ["none"], "soft, rotary": ["none"], "other": ["none"]}
    found = {name: [label for label, _ in lines] for name, lines in plot.panels(rows_of(arms)).items()}
    assert found == {"elu": ["none", "before"], "soft": ["rotary"], "other": ["other"]}


def means(axis) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines if not line.get_label().startswith("_")}


def test_scalings_are_drawn_where_the_network_as_trained_is_missing():
    """So fine-tuning leaves it: the unscaled diverged, the scaled did not."""
    axes = plot.figure(rows_of({"elu, none": ["none"], "elu, before": ["YaRN"]}, seeds=1), "").axes
    assert [axis.get_title() for axis in axes] == ["elu, before"] * 2
    assert list(means(axes[0])) == ["YaRN", "none (not scaled)"]
    assert means(axes[0])["YaRN"] == [bpc_of("YaRN", 0, 0, end) for end in (16, 32, 64)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seeds", [[0], [1], [0, 1]])
@pytest.mark.parametrize("bpc", [math.nan, math.inf])
def test_what_is_not_finite_is_a_gap(bpc, seeds):
    """Of one of two seeds or of both, in the longest window and all its bins; the others are drawn as without it."""
    rows = [
        replace(row, bpc=bpc) if row.seed in seeds and row.scaling == "YaRN" and row.window == 64 else row
        for row in rows_of(ARMS, seeds=2)
    ]
    drawn, whole = plot.figure(rows, "").axes, plot.figure(rows_of(ARMS, seeds=2), "").axes
    for axis, before in zip(drawn, whole, strict=True):
        finite = 2 if axis.get_xlabel() == "bytes of a window" else 0
        expected = means(before)
        expected["YaRN"] = [*expected["YaRN"][:finite], *[bpc] * len(expected["YaRN"][finite:])]
        assert means(axis).keys() == expected.keys()
        for label, heights in means(axis).items():
            np.testing.assert_array_equal(heights, expected[label])
        assert np.isfinite(axis.get_ylim()).all()
        assert ("↑" in [text.get_text() for text in axis.texts]) == (bpc == math.inf)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bpc", [math.nan, math.inf])
def test_the_table_says_what_is_not_finite(bpc, tmp_path, capsys):
    rows = rows_of({"soft, rotary": ["YaRN"]}, seeds=2)
    rows = [replace(row, bpc=bpc) if row.seed == 1 and row.window == 64 else row for row in rows]
    (tmp_path / "length.csv").write_text(rows_as_csv(rows))
    (tmp_path / "length.json").write_text(DATA)
    assert plot.main([str(tmp_path)]) == 0
    assert table(rows) in (printed := capsys.readouterr().out)
    cells = [f"{np.mean([bpc_of('YaRN', seed, 0, end) for seed in range(2)]):.3f} ± " for end in (16, 32)]
    assert f"| soft, rotary | YaRN |  | 2 | {cells[0]}" in printed
    assert f" | {cells[1]}" in printed
    assert f" | {bpc} | " in printed


DATA = json.dumps({"data": {"name": "text", "bytes": 300}, "settings": {"split": "validation"}})


@pytest.mark.parametrize("view", ["bytes of a window", "position in the longest window, up to"])
def test_without_bins_or_totals_the_other_is_drawn(view):
    rows = [row for row in rows_of(ARMS) if row.is_total == (view == "bytes of a window")]
    whole = {(axis.get_title(), axis.get_xlabel()): means(axis) for axis in plot.figure(rows_of(ARMS), "").axes}
    axes = plot.figure(rows, "").axes
    assert [axis.get_title() for axis in axes] == ["elu, before", "soft, rotary"]
    assert [means(axis) for axis in axes] == [whole[axis.get_title(), view] for axis in axes]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bpc", [math.nan, math.inf])
def test_shorter_windows_are_drawn_where_nothing_is_finite_in_the_longest(bpc):
    axes = plot.figure([replace(row, bpc=bpc) if row.window == 64 else row for row in rows_of(ARMS)], "").axes
    assert [axis.get_xlabel() for axis in axes] == ["bytes of a window"] * 2
    for axis in axes:
        expected = [np.mean([bpc_of("YaRN", seed, 0, end) for seed in range(3)]) for end in (16, 32)]
        np.testing.assert_allclose(means(axis)["YaRN"], [*expected, bpc], rtol=1e-12)
        assert np.isfinite(axis.get_ylim()).all()


@pytest.mark.filterwarnings("error")
def test_states_of_training_and_arms_without_windows_are_left_out(tmp_path):
    tuned = [replace(row, finetune_steps=2, bpc=math.nan) for row in rows_of(ARMS)]
    alone = [row for row in rows_of({"other, carried": ["none"]}) if row.evaluation == "stream"]
    paths = plot.draw([*rows_of(ARMS), *alone, *tuned], tmp_path / "reach")
    assert [path.name for path in paths] == ["reach.png", "reach.svg"]
    assert "carried" not in (tmp_path / "reach.svg").read_text()


NOTHING = {
    "not finite": lambda rows: [replace(row, bpc=math.nan) for row in rows],
    "only streams": lambda rows: [row for row in rows if row.evaluation == "stream"],
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_draw_gets_one_message(case, tmp_path, capsys):
    rows = NOTHING[case](rows_of(ARMS))
    (tmp_path / "length.csv").write_text(rows_as_csv(rows))
    (tmp_path / "length.json").write_text(DATA)
    assert plot.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: nothing to draw: no bpc of windows is there and finite\n"
    with pytest.raises(RunError, match="nothing to draw"):
        plot.figure(rows, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["length.csv", "length.json"]


def test_one_seed_has_no_interval():
    rows = rows_of({"a": ["none"]}, seeds=1)
    for curve in (by_window(rows), by_position(rows)):
        assert np.isnan(curve.half).all()
    assert "±" not in table(rows)


def test_the_table_says_means_and_intervals():
    lines = table(rows_of(ARMS)).splitlines()
    assert lines[0] == "| arm | scaling | fine-tuned | seeds | 16 bytes | 32 bytes | 64 bytes | state carried |"
    cells = []
    for end in (16, 32, 64, 299):
        values = [bpc_of("YaRN", seed, 0, end) for seed in range(3)]
        low, high = interval(values)
        cells.append(f"{np.mean(values):.3f} ± {(high - low) / 2:.3f}")
    assert f"| elu, before | YaRN |  | 3 | {' | '.join(cells)} |" in lines
    assert len(lines) == 2 + 5


def test_the_command_draws_what_was_measured(measured, tmp_path, capsys):
    assert plot.main([str(measured), "--out", str(tmp_path / "reach")]) == 0
    written = capsys.readouterr().out.splitlines()
    names = [f"reach{state}.{kind}" for state in ("", "_finetuned") for kind in ("png", "svg")]
    assert [Path(line).name for line in written[-4:]] == names
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    svg = (tmp_path / "reach.svg").read_text()
    for text in ("numerator", "LinearScaling", "300 bytes of the validation split", "seed 0"):
        assert text in svg
    assert written[0].startswith("| arm | scaling |")


def test_a_folder_without_figures_is_named(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 2
    assert "length.csv: no such file" in capsys.readouterr().err
    (tmp_path / "length.csv").write_text("a,b\n1,2\n")
    assert plot.main([str(tmp_path)]) == 2
    assert "not what tasks.enwik8 length writes" in capsys.readouterr().err

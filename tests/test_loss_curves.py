from __future__ import annotations

import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from plots import loss_curves
from plots.curves import half_interval, over_seeds, trailing_mean
from plots.labels import spread
from plots.loss_curves import describe, draw
from plots.runs import RunError, find_runs, read_run
from plots.styles import styles
from tests.synthetic import make_run

# --- reading what runs left


def test_a_run_is_read_from_its_path_and_files(tmp_path):
    make_run(tmp_path / "rope/elu-none/seed-3", [(5, 3.0), (10, 2.5)], label="elu, none")
    run = read_run(tmp_path / "rope/elu-none/seed-3")
    assert (run.experiment, run.arm, run.seed, run.finished, run.final_bpc) == ("rope", "elu, none", 3, True, 2.5)
    assert run.metrics["step"].tolist() == list(range(1, 11))
    assert np.flatnonzero(np.isfinite(run.metrics["val/bpc"])).tolist() == [4, 9]
    assert np.isnan(run.metrics["lr"]).all()


def test_a_folder_of_another_shape_gives_its_name_and_recorded_seed(tmp_path):
    run = read_run(make_run(tmp_path / "mine", [(2, 3.0)], seed=7))
    assert (run.arm, run.seed) == ("mine", 7)


def test_a_run_killed_early_has_no_run_json(tmp_path):
    folder = make_run(tmp_path / "e/a/seed-0", [(2, 3.0)])
    (folder / "run.json").unlink()
    with (folder / "metrics.csv").open("a") as file:
        file.write("0.001,3,30")  # cut off in the middle of a row
    run = read_run(folder)
    assert (run.finished, run.info, run.final_bpc) == (False, {}, 3.0)
    assert run.metrics["step"].tolist() == [1, 2]


@pytest.mark.parametrize("where", ["", "rope", "rope/a", "rope/a/seed-2"])
def test_runs_are_found_from_every_level(tmp_path, where):
    for seed in (10, 2):
        make_run(tmp_path / f"rope/a/seed-{seed}", [(2, 3.0)])
    found = find_runs(tmp_path / where, tmp_path / where)
    assert [run.seed for run in found] == ([2] if where.endswith("seed-2") else [2, 10])
    assert {run.arm for run in found} == {"a"}


def test_across_experiments_arms_carry_the_experiment(tmp_path):
    for place in ("one/rope", "one/quick", "two/rope"):
        make_run(tmp_path / place / "a/seed-0", [(2, 3.0)])
    assert [run.arm for run in find_runs(tmp_path / "one")] == ["quick/a", "rope/a"]
    both = find_runs(tmp_path / "one/rope", tmp_path / "two/rope")
    assert [run.arm for run in both] == ["one/rope/a", "two/rope/a"]


HEADER = "step,tokens,seconds,train/bpc\n"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "no run found in .*expected metrics.csv"),
        ("", "no complete row yet"),
        (HEADER, "no complete row yet"),
        ("step,tokens\n1,2\n", "no column seconds, train/bpc; its columns are step, tokens"),
        (HEADER + "1,2,3,4\n2,3,4\n", "line 3: expected 4 cells, got 3"),
        (HEADER + "1,2,x,4\n", "line 2: seconds is no number: 'x'"),
        (HEADER + "2,2,3,4\n1,2,3,4\n", "step goes backwards"),
        (HEADER + ",2,3,4\n", "a row has no step"),
    ],
)
def test_a_bad_folder_is_named_with_what_is_wrong(tmp_path, metrics, message):
    if metrics is not None:
        (tmp_path / "metrics.csv").write_text(metrics)
    with pytest.raises(RunError, match=message) as caught:
        find_runs(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_and_a_broken_json_are_named(tmp_path):
    with pytest.raises(RunError, match="nowhere: no such folder"):
        find_runs(tmp_path / "nowhere")
    (make_run(tmp_path / "a", [(2, 3.0)]) / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json: cannot be read as JSON"):
        find_runs(tmp_path)


# --- from runs to curves


def test_half_interval_is_the_textbook_formula():
    values = np.array([2.0, 2.5, 3.6])
    low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
    assert half_interval(values) == pytest.approx((high - low) / 2, rel=1e-12)
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        half_interval(values[:1])


def test_trailing_mean_looks_back_over_steps_only():
    step = np.array([1, 2, 4, 5, 9])  # logged irregularly
    values = np.array([10.0, 20.0, 30.0, 50.0, 7.0])
    assert trailing_mean(step, values, 3).tolist() == [10, 15, 25, 40, 7]
    assert trailing_mean(step, values, 1).tolist() == values.tolist()
    changed = np.append(values[:-1], 1e6)
    assert trailing_mean(step, changed, 3)[:-1].tolist() == [10, 15, 25, 40]


def test_seeds_of_different_speed_meet_up_to_the_end_of_the_shortest(tmp_path):
    # bpc is linear in the step, so against seconds both are known exactly everywhere.
    points = [(step, 5 - step / 10) for step in range(1, 21)]
    runs = [
        read_run(make_run(tmp_path / f"a/seed-{seed}", points, seconds_per_step=speed))
        for seed, speed in enumerate((1.0, 2.0))
    ]
    curve = over_seeds(runs, "seconds", "val/bpc")
    assert (curve.x[0], curve.x[-1]) == (2.0, 20.0)
    fast, slow = 5 - curve.x / 10, 5 - curve.x / 20
    np.testing.assert_allclose(curve.mean, (fast + slow) / 2)
    deviation = abs(fast - slow) / math.sqrt(2)
    np.testing.assert_allclose(curve.half, stats.t.ppf(0.975, 1) * deviation / math.sqrt(2))
    assert over_seeds(runs[:1], "step", "val/bpc").half is None


def test_a_seed_without_values_leaves_no_curve(tmp_path):
    runs = [read_run(make_run(tmp_path / f"seed-{bpc}", [(4, bpc)])) for bpc in (3.0, math.nan)]
    assert over_seeds(runs, "step", "val/bpc").x.size == 0


# --- names and looks


@given(st.lists(st.floats(0, 10), min_size=1, max_size=16), st.floats(0.05, 1.0))
def test_labels_never_overlap_and_stay_inside(wanted, gap):
    heights = spread(wanted, gap, 0.0, 10.0)
    kept = min(gap, 10.0 / max(len(wanted) - 1, 1))
    assert np.all(np.diff(np.sort(heights)) >= kept - 1e-9)
    assert heights.min() >= -1e-9
    assert heights.max() <= 10 + 1e-9
    # Names keep the order of the lines.
    for i, one in enumerate(wanted):
        for j, other in enumerate(wanted):
            if one < other:
                assert heights[i] < heights[j]


def test_labels_move_as_little_as_possible():
    assert spread([1.0, 5.0, 9.0], 1.0, 0, 10).tolist() == [1, 5, 9]
    assert spread([5.0, 5.0], 1.0, 0, 10).tolist() == [4.5, 5.5]
    assert spread([0.0, 0.1], 1.0, 0, 10).tolist() == [0, 1]


def test_hue_follows_the_feature_map_and_dash_the_rotation():
    arms = [f"{feature_map}, {place}" for feature_map in ("elu+1", "FAVOR+") for place in ("none", "before")]
    looks = styles(arms)
    assert looks["elu+1, none"].color == looks["elu+1, before"].color != looks["FAVOR+, none"].color
    assert looks["elu+1, none"].dash == looks["FAVOR+, none"].dash != looks["FAVOR+, before"].dash


@pytest.mark.parametrize(
    "arms",
    [
        [f"arm {number}" for number in range(16)],
        [f"map, {number}" for number in range(16)],
        [f"{a}, {b}" for a in "abcd" for b in "wxyz"],
    ],
)
def test_no_two_of_sixteen_arms_look_alike(arms):
    assert len(set(styles(arms).values())) == 16


# --- the picture


def synthetic(tmp_path, arms, seeds=2):
    for number, arm in enumerate(arms):
        for seed in range(seeds):
            points = [(10, 4.0), (20, 3 + number / 50 + seed / 100)]
            make_run(tmp_path / f"e/{number}/seed-{seed}", points, label=arm, seconds_per_step=1 + seed / 10)
    return find_runs(tmp_path / "e")


def svg_texts(path):
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize(("count", "seeds"), [(1, 1), (7, 3), (16, 2)])
def test_every_panel_names_every_arm(tmp_path, count, seeds):
    arms = [f"arm, {number}" for number in range(count)]
    png, svg = draw(synthetic(tmp_path, arms, seeds), tmp_path / "out/curves", title="A title")
    assert (png.name, svg.name) == ("curves.png", "curves.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = svg_texts(svg)
    for arm in arms:
        assert texts.count(arm) == 6
    for text in ("A title", "optimizer steps", "training bytes (MB)", "training time (s)"):
        assert text in texts
    assert any("bits per byte (bpc)" in text for text in texts)


def test_the_same_runs_give_the_same_bytes_and_nothing_global_changes(tmp_path):
    runs = synthetic(tmp_path, ["a", "b"])
    before = dict(matplotlib.rcParams)
    first, second = (draw(runs, tmp_path / stem) for stem in ("one", "two"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert dict(matplotlib.rcParams) == before


def test_dollars_in_names_are_no_formula(tmp_path):
    _, svg = draw(synthetic(tmp_path, ["costs $5, or $6"]), tmp_path / "curves")
    assert "costs $5, or $6" in svg_texts(svg)


def test_one_arm_far_above_does_not_squash_the_others(tmp_path):
    runs = synthetic(tmp_path, ["a", "b", "c"], seeds=1)
    make_run(tmp_path / "e/9/seed-0", [(10, 8.0), (20, 8.0)], label="stuck")
    _, svg = draw(find_runs(tmp_path / "e"), tmp_path / "curves")
    texts = svg_texts(svg)
    assert texts.count("stuck ↑") == 3  # in the validation panels
    ticks = [float(text) for text in texts if text.replace(".", "").isdigit() and 2 < float(text) < 8]
    assert max(ticks) < 6
    assert len(runs) == 3


def test_an_arm_without_a_finite_value_is_named(tmp_path):
    synthetic(tmp_path, ["a"])
    make_run(tmp_path / "e/9/seed-0", [(20, math.nan)], label="broken")
    _, svg = draw(find_runs(tmp_path / "e"), tmp_path / "curves")
    assert svg_texts(svg).count("broken") == 6  # three labels in training, three notes in validation


def test_the_subtitle_says_what_differs(tmp_path):
    make_run(tmp_path / "e/a/seed-0", [(20, 3.0)])
    make_run(tmp_path / "e/b/seed-1", [(1500, 3.0)], validation={"bpc": 3.0, "context": 512})
    text = describe(find_runs(tmp_path))
    assert text.startswith("a text · 20 or 1,500 steps · seeds 0, 1 · validated with 256 or 512 bytes of context")


def test_the_command_redraws(tmp_path, capsys):
    synthetic(tmp_path, ["a"])
    assert loss_curves.main([str(tmp_path / "e")]) == 0
    assert (tmp_path / "e/loss_curves.png").is_file()
    assert loss_curves.main([str(tmp_path / "e"), "--out", str(tmp_path / "new/x.y")]) == 0
    assert (tmp_path / "new/x.y.svg").is_file()
    capsys.readouterr()
    assert loss_curves.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_drawing_needs_no_pyplot_and_no_tasks():
    code = (
        "import sys, plots.loss_curves; print([m for m in ('matplotlib.pyplot', 'tasks', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

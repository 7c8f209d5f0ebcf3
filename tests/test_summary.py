from __future__ import annotations

import csv
import json
import math
import warnings

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from plots.runs import find_runs
from tasks.compare.summary import summarize, unfinished, write_summary
from tasks.compare.table import cells, print_table
from tests.synthetic import make_run

BASE = {0: 3.00, 1: 3.20, 2: 3.10}
ARM = {0: 2.91, 1: 3.08, 2: 3.00}


def write(root, arm, finals, start=5.0, **options):
    for seed, bpc in finals.items():
        make_run(root / f"e/{arm}/seed-{seed}", [(10, start), (20, bpc)], **options)


def rows_of(root, baseline="base"):
    return {row.arm: row for row in summarize(find_runs(root), baseline)}


def shown(rows, width=150):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(list(rows), console)
    return console.export_text()


def test_means_intervals_and_the_paired_test_are_the_textbook_ones(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "arm", ARM)
    rows = rows_of(tmp_path)
    finals, base = np.array(list(ARM.values())), np.array(list(BASE.values()))
    row = rows["arm"]
    assert row.seeds == row.paired_seeds == (0, 1, 2)
    assert row.bpc == pytest.approx(finals.mean())
    assert row.bpc_half == pytest.approx(stats.t.ppf(0.975, 2) * finals.std(ddof=1) / math.sqrt(3))
    # By hand: differences −0.09, −0.12, −0.10; mean −0.31/3, sample variance 7/30000.
    assert row.difference == pytest.approx(-0.31 / 3)
    standard_error = math.sqrt(7 / 30000 / 3)
    assert row.difference_half == pytest.approx(4.302652729749462 * standard_error)
    assert row.p == pytest.approx(2 * stats.t.sf(0.31 / 3 / standard_error, 2))
    assert row.p == pytest.approx(stats.ttest_rel(finals, base).pvalue)
    assert rows["base"].is_baseline
    assert (rows["base"].difference, rows["base"].p) == (None, None)


def test_pairing_is_by_seed_and_only_over_common_seeds(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "arm", {2: 3.0, 5: 1.0, 0: 2.91})
    row = rows_of(tmp_path)["arm"]
    assert row.seeds == (0, 2, 5)
    assert row.paired_seeds == (0, 2)
    assert row.difference == pytest.approx((2.91 - 3.00 + 3.0 - 3.10) / 2)


def test_one_common_seed_gives_no_difference(tmp_path):
    write(tmp_path, "base", {0: 3.0})
    write(tmp_path, "arm", ARM)
    row = rows_of(tmp_path)["arm"]
    assert (row.difference, row.difference_half, row.p) == (None, None, None)
    assert cells(row)[3] == "n/a: needs ≥ 2 seeds"
    assert rows_of(tmp_path)["base"].bpc_half is None


def test_a_diverged_arm_stays_and_is_said_so(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "arm", {0: 2.9, 1: math.nan, 2: math.inf})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = rows_of(tmp_path)["arm"]
    assert row.diverged == (1, 2)
    assert (row.bpc, row.difference, row.p) == (None, None, None)
    assert "diverged (seed 1, 2)" in shown([row])
    write_summary([row], tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())[0]["bpc"] is None


def test_an_arm_can_have_a_baseline_of_its_own(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "other", {seed: bpc + 1 for seed, bpc in BASE.items()})
    write(tmp_path, "arm", ARM)
    rows = {row.arm: row for row in summarize(find_runs(tmp_path), "base", {"arm": "other"})}
    assert rows["arm"].baseline == "other"
    assert rows["arm"].difference == pytest.approx(-0.31 / 3 - 1)
    assert rows["other"].baseline == "base"
    assert rows["other"].difference == pytest.approx(1)
    assert "to other" in shown(rows.values())


def test_a_diverged_baseline_sets_no_target(tmp_path):
    write(tmp_path, "base", {0: 3.0, 1: math.nan})
    write(tmp_path, "arm", {0: 2.0, 1: 2.0})
    row = rows_of(tmp_path)["arm"]
    assert (row.difference, row.steps_to_baseline, row.reached) == (None, None, 0)


def test_steps_to_the_baseline_are_a_mean_over_seeds_and_none_unless_all_arrive(tmp_path):
    write(tmp_path, "base", {0: 2.9, 1: 3.1})  # mean 3.0
    write(tmp_path, "all", {0: 1.0, 1: 2.0}, seconds_per_step=2.0)
    write(tmp_path, "some", {0: 1.0, 1: 3.5})
    rows = rows_of(tmp_path)
    # From 5 at step 10: to 1 at step 20 passes 3 at 15, to 2 at 10 + 20/3.
    assert rows["all"].steps_to_baseline == pytest.approx((15 + 10 + 20 / 3) / 2)
    assert rows["all"].seconds_to_baseline == pytest.approx(15 + 10 + 20 / 3)
    # Two values are each half their distance from the mean, and t(0.975, 1) = 12.706.
    assert rows["all"].steps_half == pytest.approx(12.706204736 * (10 + 20 / 3 - 15) / 2)
    assert rows["all"].steps_at_least is None
    some = rows["some"]
    assert (some.steps_to_baseline, some.steps_half, some.seconds_to_baseline, some.reached) == (None, None, None, 1)
    assert some.steps_at_least == pytest.approx((15 + 20) / 2)  # the other had come to step 20 without arriving
    assert cells(some)[7] == "> 18, not reached\n(1 of 2)"
    assert cells(rows["all"])[7] == "16 ± 11"
    assert (rows["base"].steps_to_baseline, rows["base"].seconds_to_baseline) == (20, 10)


def test_costs_and_measurement(tmp_path):
    make_run(tmp_path / "e/a/seed-0", [(2, 3.0)], tokens_per_second=100.0, peak_memory_bytes=7)
    odd = {"bpc": 3.0, "context": 256, "stride": 64, "bytes_scored": 10}
    make_run(tmp_path / "e/a/seed-1", [(2, 3.0)], tokens_per_second=300.0, peak_memory_bytes=9, validation=odd)
    row = rows_of(tmp_path)["a"]
    assert (row.tokens_per_second, row.peak_memory_bytes, row.parameters) == (200.0, 9, 1234)
    assert (row.context, row.stride, row.bytes_scored) == (256, None, None)


def test_unfinished_runs_are_left_out_and_named(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "arm", ARM)
    make_run(tmp_path / "e/arm/seed-9", [(20, 0.1)], finished=False)
    runs = find_runs(tmp_path)
    assert [run.directory.name for run in unfinished(runs)] == ["seed-9"]
    assert rows_of(tmp_path)["arm"].seeds == (0, 1, 2)


def test_no_finished_baseline_means_no_differences(tmp_path):
    write(tmp_path, "arm", ARM)
    row = rows_of(tmp_path)["arm"]
    assert (row.difference, row.steps_to_baseline) == (None, None)


def test_the_files_hold_every_number(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, 'a, "b"', ARM)
    rows = list(rows_of(tmp_path).values())
    as_csv, as_json = write_summary(rows, tmp_path / "new")
    with as_csv.open(newline="") as file:
        table = {line["arm"]: line for line in csv.DictReader(file)}
    listed = {line["arm"]: line for line in json.loads(as_json.read_text())}
    for row in rows:
        assert float(table[row.arm]["bpc"]) == listed[row.arm]["bpc"] == row.bpc
        assert table[row.arm]["seeds"] == "0 1 2"
        assert listed[row.arm]["p"] == row.p
        assert table[row.arm]["p"] == ("" if row.p is None else str(row.p))


@pytest.mark.parametrize("width", [80, 150])
def test_the_table_fits_and_shows_names_as_they_are(tmp_path, width):
    write(tmp_path, "base", BASE)
    write(tmp_path, "[red]", ARM)
    text = shown(rows_of(tmp_path).values(), width)
    assert "[red]" in text
    for value in ("2.997 ± 0.211", "-0.103 ± 0.038", "0.007", "2,000", "1,234"):
        assert value in text
    assert max(map(len, text.splitlines())) <= width


def test_p_values_are_corrected_for_all_comparisons_in_the_table(tmp_path):
    write(tmp_path, "base", BASE)
    write(tmp_path, "arm", ARM)
    write(tmp_path, "other", {0: 2.95, 1: 3.17, 2: 3.02})
    write(tmp_path, "single", {0: 1.0})
    rows = rows_of(tmp_path)
    p, q = rows["arm"].p, rows["other"].p
    assert p < q
    assert rows["arm"].p_holm == pytest.approx(2 * p)
    assert rows["other"].p_holm == pytest.approx(max(2 * p, q))
    assert (rows["single"].p_holm, rows["base"].p_holm) == (None, None)
    assert rows["arm"].p_permutation == 0.25


def test_steps_left_out_are_added_up_over_seeds(tmp_path):
    make_run(tmp_path / "e/a/seed-0", [(2, 3.0)], skipped_steps=2)
    make_run(tmp_path / "e/a/seed-1", [(2, 3.0)], skipped_steps=3)
    make_run(tmp_path / "e/b/seed-1", [(2, 3.0)])
    rows = rows_of(tmp_path)
    assert (rows["a"].skipped_steps, rows["b"].skipped_steps) == (5, 0)

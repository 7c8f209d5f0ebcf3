from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest

from plots.loss_curves import draw
from plots.runs import find_runs
from tasks.compare.report import _p, facts, verdict, warnings, write_report
from tasks.compare.summary import summarize
from tests.synthetic import make_run

NASTY = '<script>alert("x")</script> & co'


def finals(root, arm, values, **options):
    for seed, bpc in enumerate(values):
        make_run(root / f"e/{arm}/seed-{seed}", [(10, 5.0), (20, bpc)], **{"label": arm, **options})


def verdict_of(root, values, base=(3.00, 3.20, 3.10)):
    finals(root, "base", base[: len(values)])
    finals(root, "arm", values)
    rows = summarize(find_runs(root), "base")
    return next(verdict(row) for row in rows if row.arm == "arm")


def page(root, **changes):
    runs = find_runs(root / "e")
    rows = summarize(runs, "base")
    _, picture = draw(runs, root / "curves")
    overlay = root / "overlay.yaml"
    overlay.write_text("key: <b>bold</b>\n")
    arguments = {
        "name": "a name",
        "runs": runs,
        "rows": rows,
        "picture": picture,
        "problems": [],
        "arms": {row.arm: [(str(overlay), overlay.read_text())] for row in rows},
        "settings": ["--trainer.max_steps=20"],
        "command": "python -m tasks.compare x.yaml --root 'a b'",
        **changes,
    }
    return write_report(root / "report.html", **arguments).read_text()


class Tags(HTMLParser):
    """Collect tags and the addresses that a browser would load."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "srcset", "data")]


def test_the_page_is_self_contained_and_everything_in_it_is_escaped(tmp_path):
    finals(tmp_path, "base", (3.0, 3.2, 3.1))
    finals(tmp_path, "evil", (2.9, 3.08, 3.0), label=NASTY)
    text = page(tmp_path, name=NASTY, problems=[NASTY], settings=[NASTY], command=NASTY)
    parser = Tags()
    parser.feed(text)
    assert not {"script", "b", "link", "iframe"} & set(parser.tags)
    assert [address.split(",")[0] for address in parser.addresses] == ["data:image/svg+xml;base64"]
    assert not re.search(r"url\(|@import", text)
    assert text.count(html.escape("<script>alert(")) >= 5


def test_the_page_says_what_was_compared_and_how_it_is_made_again(tmp_path):
    finals(tmp_path, "base", (3.0, 3.2, 3.1))
    finals(tmp_path, "arm", (2.9, 3.08, 3.0))
    text = html.unescape(page(tmp_path, problems=["other · seed 3 is left out: failed"]))
    for part in (
        "a text, 3,000,000 bytes", "ab" * 32, "20 steps, 20,000 bytes", "0, 1, 2", "context 256, stride 128",
        "149,999", "cpu, threads: 2, precision 32-true", "torch 2.x, code 0.1.0",
        "other · seed 3 is left out: failed", "python -m tasks.compare x.yaml --root 'a b'",
        "key: <b>bold</b>", "2.993 ± 0.224", "prefers-color-scheme: dark", "@media print",
    ):  # fmt: skip
        assert part in text


def test_a_shown_difference_comes_with_interval_p_and_seeds(tmp_path):
    assert verdict_of(tmp_path, (2.91, 3.08, 3.00)) == (
        "arm ended lower (better) than base: -0.103 bpc (95% interval -0.141 to -0.065, p = 0.007, "
        "corrected for the number of arms = 0.007, 3 paired seeds)."
    )


def test_a_worse_arm_is_called_worse(tmp_path):
    assert verdict_of(tmp_path, (3.09, 3.32, 3.20)).startswith("arm ended higher (worse) than base: +0.103")


def test_a_difference_within_the_noise_is_not_called_one(tmp_path):
    text = verdict_of(tmp_path, (2.9, 3.4, 3.0))
    assert text.startswith("No difference is shown between arm and base: ")
    assert "better" not in text


@pytest.mark.parametrize(
    ("values", "few"),
    [
        ((2.0,), "1 seed is too few to conclude"),
        ((2.0, 2.21), "2 seeds are too few to conclude"),
        # The same by every seed: no spread, no test.
        ((2.0, 2.2, 2.1), "without any spread there is no interval and no t-test, and nothing is concluded"),
    ],
)
def test_too_few_seeds_conclude_nothing_however_large_the_difference(tmp_path, values, few):
    text = verdict_of(tmp_path, values)
    assert few in text
    assert "better" not in text


def test_a_diverged_baseline_is_the_reason_given(tmp_path):
    finals(tmp_path, "base", (3.0, float("nan"), 3.1))
    finals(tmp_path, "arm", (2.9, 3.0, 3.0))
    rows = {row.arm: row for row in summarize(find_runs(tmp_path), "base")}
    assert verdict(rows["arm"]).endswith("(3 seeds). No difference to base is given: base diverged.")


def test_a_diverged_arm_concludes_nothing(tmp_path):
    assert verdict_of(tmp_path, (2.0, float("nan"))) == "arm diverged with seed 1: nothing is concluded from it."


def test_facts_that_differ_stand_side_by_side_and_are_warned_of(tmp_path):
    finals(tmp_path, "base", (3.0,))
    finals(tmp_path, "arm", (2.9,), data={"name": "other", "size": 5, "sha256": "cd"}, torch=None)
    runs = find_runs(tmp_path)
    told = dict(facts(runs))
    assert told["Data"] == "other or a text, 5 or 3,000,000 bytes"
    assert told["Versions"] == "torch unknown or 2.x, code 0.1.0"
    said = list(warnings(runs, summarize(runs, "base")))
    assert said == ["Runs used different data: the arms are not comparable as they stand."]
    longer = find_runs(make_run(tmp_path / "f/a/seed-0", [(30, 2.0)]).parent)
    assert len(list(warnings([runs[1], *longer], summarize(runs, "base")))) == 2  # steps and bytes
    assert "baseline has no finished run" in next(iter(warnings(runs[:1], summarize(runs[:1], "base"))))


def test_a_difference_that_many_arms_could_show_by_chance_is_not_called_one(tmp_path):
    """p = 0.007 alone; among eight comparisons 0.059."""
    finals(tmp_path, "base", (3.00, 3.20, 3.10))
    finals(tmp_path, "arm", (2.91, 3.08, 3.00))
    for number in range(7):
        finals(tmp_path, f"other {number}", (3.0 + number / 10, 3.1, 3.2))
    rows = {row.arm: row for row in summarize(find_runs(tmp_path), "base")}
    assert rows["arm"].p < 0.01 < 0.05 < rows["arm"].p_holm == pytest.approx(8 * rows["arm"].p)
    assert verdict(rows["arm"]).startswith("No difference is shown between arm and base: ")


def test_few_seeds_are_warned_of_and_so_are_steps_left_out(tmp_path):
    for arm in ("base", "arm"):
        for seed in range(3):
            skipped = 4 if arm == "arm" else 0
            end = 3 - 0.1 * (arm == "arm") + seed / 9 + 0.01 * seed * (arm == "arm")
            make_run(tmp_path / f"e/{arm}/seed-{seed}", [(20, end)], skipped_steps=skipped)
    runs = find_runs(tmp_path)
    said = list(warnings(runs, summarize(runs, "base")))
    assert said[0] == "arm left out 12 steps whose loss or gradients were not finite."
    assert said[1].startswith("With 3 seeds a permutation test cannot give less than 0.25: ")
    assert len(said) == 2


def test_six_seeds_are_enough_for_a_permutation_test(tmp_path):
    finals(tmp_path, "base", [3 + i / 10 for i in range(6)])
    finals(tmp_path, "arm", [2.9 + i / 11 for i in range(6)])
    runs = find_runs(tmp_path)
    assert not list(warnings(runs, summarize(runs, "base")))


def test_a_limited_validation_is_told_with_what_there_is(tmp_path):
    measured = {"bpc": 3.0, "split": "validation", "evaluation": "windows", "bytes_scored": 8192}
    run = find_runs(make_run(tmp_path / "e/a/seed-0", [(20, 3.0)], validation={**measured, "split_targets": 199_999}))
    assert dict(facts(run))["Bytes scored"] == "8,192 of the 199,999 that the split has"


def test_speeds_of_different_conditions_are_warned_of(tmp_path):
    make_run(tmp_path / "e/a/seed-0", [(20, 3.0)], threads=2)
    make_run(tmp_path / "e/a/seed-1", [(20, 3.0)], threads=1)
    runs = find_runs(tmp_path)
    assert list(warnings(runs, summarize(runs, "a"))) == [
        "Runs had different devices, threads or numbers of processes: their speeds are not comparable."
    ]


@pytest.mark.parametrize(
    ("p", "text"), [(0.0496, "= 0.0496"), (0.0502, "= 0.0502"), (0.04, "= 0.040"), (1e-5, "< 0.001")]
)
def test_a_p_value_is_never_rounded_across_its_level(p, text):
    assert _p(p) == text

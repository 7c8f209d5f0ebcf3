from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from plots.loss_curves import draw
from plots.runs import find_runs
from tasks.compare import __main__ as module
from tasks.compare import local, process
from tasks.compare.__main__ import main
from tasks.compare.jobs import jobs
from tasks.compare.plan import PlanError, read_plan, slug
from tasks.compare.progress import Display, Latest, latest

ROOT = Path(__file__).resolve().parents[1]

# Stands in for the training command: its "configs" say how it behaves, and it notes each start.
FAKE = """
import os, sys, time, pathlib, yaml
from tests.synthetic import make_run
arguments = sys.argv[1:]
config, run_dir, seed = {}, None, None
for key, value in zip(arguments, arguments[1:]):
    if key == "--config":
        config.update(yaml.safe_load(pathlib.Path(value).read_text()) or {})
    if key == "--run_dir":
        run_dir = pathlib.Path(value)
    if key == "--seed_everything":
        seed = int(value)
with open(run_dir / "starts.txt", "a") as file:
    file.write(" ".join(arguments) + "\\n")
(run_dir / "threads.txt").write_text(os.environ.get("OMP_NUM_THREADS", "free"))
began = time.time()
print("training says hello")
if config.get("sleep"):
    (run_dir / "pid.txt").write_text(str(os.getpid()))
    make_run(run_dir, [(3, 4.0)], finished=False, seed=seed)
    time.sleep(config["sleep"])
if config.get("fail"):
    sys.exit("error: this arm cannot train")
if config.get("diverge"):
    make_run(run_dir, [(3, 4.0)], finished=False, seed=seed, diverged={"step": 4, "why": "the loss is nan"})
    sys.exit("error: the loss is nan")
time.sleep(config.get("pause", 0))
(run_dir / "times.txt").write_text(f"{began} {time.time()}")
bpc = 3 + config["effect"] + seed / 10 + seed * config["effect"] / 50
make_run(run_dir, [(5, 5.0), (10, bpc)], finished=not config.get("stop_early"), seed=seed)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A folder with a comparison of two arms by two seeds, and a fake training command.

    The picture is stubbed, being most of the time a comparison of fakes takes; ``real_picture`` undoes it.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "fake.py").write_text(FAKE)
    for name, content in (("base", {"a": 1}), ("zero", {"effect": 0.0}), ("low", {"effect": -0.2})):
        (tmp_path / f"configs/{name}.yaml").write_text(yaml.safe_dump(content))
    write_plan(tmp_path)
    monkeypatch.setattr(module, "draw", stub_draw)
    return tmp_path


@pytest.fixture
def real_picture(bench, monkeypatch):
    monkeypatch.setattr(module, "draw", draw)


def stub_draw(runs, stem, **_):
    paths = stem.with_suffix(".png"), stem.with_suffix(".svg")
    for path in paths:
        path.write_text("a picture")
    return paths


def write_plan(home, **changes):
    plan = {
        "base": ["base.yaml"],
        "settings": {"trainer.max_steps": 10, "flag": True},
        "seeds": [0, 1],
        "baseline": "elu+1, none",
        "arms": {"elu+1, none": ["zero.yaml"], "elu+1, numerator": ["low.yaml"]},
        **changes,
    }
    plan = {key: value for key, value in plan.items() if value is not None}
    (home / "configs/test.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))


def run(*arguments):
    return main(["configs/test.yaml", *arguments], command=(sys.executable, "fake.py"))


def starts(home, name="test"):
    return {
        str(file.parent.relative_to(home / "runs" / name)): file.read_text().splitlines()
        for file in sorted((home / "runs" / name).rglob("starts.txt"))
    }


ALL = ["elu+1-none/seed-0", "elu+1-none/seed-1", "elu+1-numerator/seed-0", "elu+1-numerator/seed-1"]


@pytest.mark.usefixtures("real_picture")
def test_everything_is_run_once_and_leaves_its_files(bench, capsys):
    assert run() == 0
    assert {key: len(lines) for key, lines in starts(bench).items()} == dict.fromkeys(ALL, 1)
    (start,) = starts(bench)["elu+1-numerator/seed-1"]
    assert re.sub(r"-[0-9a-f]{8}\.yaml", ".yaml", start) == (
        "fit --config runs/test/.configs/base.yaml --config runs/test/.configs/low.yaml --seed_everything 1 "
        "--run_dir runs/test/elu+1-numerator/seed-1 --trainer.max_steps=10 --flag=true"
    )
    home = bench / "runs/test"
    for name in ("loss_curves.png", "loss_curves.svg", "summary.csv", "summary.json", "report.html"):
        assert (home / name).stat().st_size > 100
    assert "training says hello" in (home / ALL[0] / "log.txt").read_text()
    assert [row["arm"] for row in json.loads((home / "summary.json").read_text())] == [
        "elu+1, none",
        "elu+1, numerator",
    ]
    out = capsys.readouterr().out
    assert "-0.202" in out  # the mean of −0.2 and −0.204, paired by seed
    assert out.splitlines()[-2:] == [
        "picture: runs/test/loss_curves.png",
        "report:  runs/test/report.html",
    ]
    assert {r.arm for r in find_runs(home)} == {"elu+1, none", "elu+1, numerator"}


def test_a_second_time_starts_nothing(bench, capsys):
    assert run() == 0
    before = starts(bench)
    assert run() == 0
    assert starts(bench) == before
    assert capsys.readouterr().out.count("already finished") == 4


def test_an_interrupted_run_is_run_again_and_only_that(bench):
    assert run() == 0
    path = bench / "runs/test" / ALL[1] / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "finished": False}))
    assert run() == 0
    assert [len(lines) for lines in starts(bench).values()] == [1, 2, 1, 1]


def test_a_missing_run_is_added(bench):
    assert run() == 0
    write_plan(bench, seeds=[0, 1, 2])
    assert run() == 0
    assert [len(lines) for lines in starts(bench).values()] == [1] * 6


@pytest.mark.parametrize("change", ["content", "files", "settings", "flags", "foreign"])
def test_a_changed_comparison_is_refused_before_anything_starts(bench, capsys, change):
    assert run() == 0
    before = starts(bench)
    flags = []
    if change == "content":
        (bench / "configs/low.yaml").write_text("effect: -0.5")
        expected = ["elu+1-numerator/seed-0", "edited since: configs/low.yaml"]
    elif change == "files":
        write_plan(bench, arms={"elu+1, none": ["zero.yaml", "low.yaml"]})
        expected = [ALL[0], "configs/base.yaml configs/zero.yaml then", "configs/low.yaml now"]
    elif change == "settings":
        write_plan(bench, settings={"trainer.max_steps": 20})
        expected = [ALL[0], "settings: --trainer.max_steps=10 --flag=true then, --trainer.max_steps=20 now"]
    elif change == "flags":
        flags = ["--model.lr=1"]
        expected = [ALL[0], "flags: none then, --model.lr=1 now"]
    else:
        (bench / "runs/test" / ALL[0] / "arm.json").unlink()
        expected = [ALL[0], "not started by a comparison"]
    assert run(*flags) == 2
    error = capsys.readouterr().err
    for part in (*expected, "another --name", "delete that folder"):
        assert part in error
    assert starts(bench) == before
    assert run("--name", "other", *flags) == 0


def test_a_renamed_config_with_the_same_content_is_the_same(bench):
    assert run() == 0
    before = starts(bench)
    (bench / "configs/low.yaml").rename(bench / "configs/renamed.yaml")
    write_plan(bench, arms={"elu+1, none": ["zero.yaml"], "elu+1, numerator": ["renamed.yaml"]})
    assert run() == 0
    assert starts(bench) == before


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--data.path", "my file", "--trainer.max_steps=600"], "--data.path my file --trainer.max_steps=600"),
        (["--root", "runs", "--", "--name.inner=x"], "--name.inner=x"),
        (["--a.b=c", "--", "--d=e"], "--a.b=c --d=e"),
    ],
)
def test_further_flags_go_to_every_run_last(bench, given, passed):
    assert run(*given) == 0
    for lines in starts(bench).values():
        assert lines[0].endswith(f"--flag=true {passed}")


@pytest.mark.parametrize("taken", ["--config", "--seed_everything=3", "--run_dir=x"])
def test_flags_that_the_comparison_sets_itself_are_refused(bench, capsys, taken):
    assert run(taken) == 2
    assert f"{taken} is set by the comparison itself" in capsys.readouterr().err
    write_plan(bench, settings={taken[2:].split("=")[0]: 1})
    assert run() == 2


def test_a_stray_word_is_refused(bench, capsys):
    assert run("stray") == 2
    assert "unexpected argument 'stray'" in capsys.readouterr().err


def test_a_failing_arm_stops_no_other_and_is_named(bench, capsys):
    (bench / "configs/bad.yaml").write_text("fail: true")
    write_plan(bench, arms={"elu+1, none": ["zero.yaml"], "bad": ["bad.yaml"], "low": ["low.yaml"]})
    assert run() == 1
    assert len(starts(bench)) == 6
    out = capsys.readouterr().out
    assert "error: this arm cannot train" in out
    assert "bad · seed 1" in out
    report = (bench / "runs/test/report.html").read_text()
    assert "bad · seed 0 is left out: failed: exit status 1; see runs/test/bad/seed-0/log.txt" in report
    assert {row["arm"] for row in json.loads((bench / "runs/test/summary.json").read_text())} == {"elu+1, none", "low"}


def test_a_run_that_ends_unfinished_counts_as_failed(bench, capsys):
    (bench / "configs/low.yaml").write_text("{effect: -0.2, stop_early: true}")
    assert run() == 1
    assert "it ended without finishing its training" in capsys.readouterr().out


def test_when_nothing_finished_there_is_no_report(bench, capsys):
    for name in ("zero", "low"):
        (bench / f"configs/{name}.yaml").write_text("fail: true")
    assert run() == 1
    assert "nothing to report" in capsys.readouterr().out
    assert not (bench / "runs/test/report.html").exists()


def test_report_only_runs_nothing_and_needs_no_flags_again(bench, capsys):
    assert run("--x=1") == 0
    before = starts(bench)
    (bench / "runs/test/report.html").unlink()
    write_plan(bench, seeds=[0, 1, 2])
    capsys.readouterr()
    assert run("--report_only") == 0
    assert starts(bench) == before
    report = (bench / "runs/test/report.html").read_text()
    assert "elu+1, none · seed 2 is left out: not run yet" in report
    assert "--name test --x=1" in report


@pytest.mark.usefixtures("real_picture")
def test_names_with_markup_are_shown_as_they_are(bench, capsys):
    write_plan(bench, baseline="[red]a", arms={"[red]a": ["zero.yaml"], "$b$": ["low.yaml"]})
    assert run() == 0
    assert "[red]a · seed 1" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["int", "term", "many", "terminal"])
def test_an_interrupt_stops_the_child_and_says_how_to_go_on(bench, how):
    (bench / "configs/low.yaml").write_text("{effect: -0.2, sleep: 60}")
    code = "import sys; from tasks.compare.__main__ import main; sys.exit(main(sys.argv[1:], command=(sys.executable, 'fake.py')))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "configs/test.yaml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    sleeping = bench / "runs/test" / ALL[2]
    deadline = time.monotonic() + 60
    while not (sleeping / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if how == "terminal":  # Ctrl-C there goes to the training process as well
        os.killpg(process.pid, signal.SIGINT)
    for _ in range({"many": 20, "terminal": 0}.get(how, 1)):
        process.send_signal(signal.SIGINT if how == "int" else signal.SIGTERM)
        time.sleep(0.002)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "The same command goes on where this one stopped" in error
    assert "Traceback" not in error
    assert "failed" not in out
    with pytest.raises(ProcessLookupError):
        os.kill(int((sleeping / "pid.txt").read_text()), 0)
    assert len(starts(bench)) == 2


def test_a_child_that_will_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(process, "_GRACE", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    process.stop([child])
    assert child.returncode == -signal.SIGKILL
    child.stdout.close()


def test_a_diverged_arm_is_named_with_its_step_and_the_others_are_reported(bench, capsys):
    (bench / "configs/wild.yaml").write_text("diverge: true")
    write_plan(bench, arms={"elu+1, none": ["zero.yaml"], "wild": ["wild.yaml"], "low": ["low.yaml"]})
    assert run() == 1
    assert "wild · seed 0: diverged at optimizer step 4: the loss is nan" in capsys.readouterr().out
    report = (bench / "runs/test/report.html").read_text()
    where = "runs/test/wild/seed-0/log.txt"
    assert f"wild · seed 0 diverged at optimizer step 4: the loss is nan; see {where}" in report
    assert "wild diverged with seed 0, 1: nothing is concluded from it." in report
    rows = {row["arm"]: row for row in json.loads((bench / "runs/test/summary.json").read_text())}
    assert list(rows) == ["elu+1, none", "wild", "low"]
    assert (rows["wild"]["diverged"], rows["wild"]["bpc"], rows["wild"]["difference"]) == ([0, 1], None, None)
    assert rows["low"]["difference"] == pytest.approx(-0.202)


def test_an_arm_of_which_some_seeds_diverged_is_not_its_survivors(bench):
    """As if NaN had been its figure: no mean over the seeds that are left."""
    (bench / "fake.py").write_text(FAKE.replace('if config.get("diverge"):', 'if config.get("diverge") and seed == 1:'))
    (bench / "configs/wild.yaml").write_text("{diverge: true, effect: 0.0}")
    write_plan(bench, arms={"elu+1, none": ["zero.yaml"], "wild": ["wild.yaml"]})
    assert run() == 1
    (row,) = [row for row in json.loads((bench / "runs/test/summary.json").read_text()) if row["arm"] == "wild"]
    assert (row["seeds"], row["diverged"], row["bpc"]) == ([0, 1], [1], None)


def test_a_config_edited_while_the_comparison_runs_changes_nothing_in_it(bench, monkeypatch):
    """The first run edits it; all train on it as it was, and the report shows it as it was."""
    (bench / "configs/zero.yaml").write_text("{effect: 0.0, edit: configs/low.yaml}")
    before = (bench / "configs/low.yaml").read_text()
    fake = (bench / "fake.py").read_text()
    edit = 'if config.get("edit"):\n    pathlib.Path(config["edit"]).write_text("effect: 5.0")\n'
    (bench / "fake.py").write_text(fake.replace('print("training says hello")', edit + 'print("training says hello")'))
    assert run() == 0
    assert (bench / "configs/low.yaml").read_text() == "effect: 5.0"
    (row,) = [r for r in json.loads((bench / "runs/test/summary.json").read_text()) if r["arm"] == "elu+1, numerator"]
    assert row["difference"] == pytest.approx(-0.202)
    assert before.strip() in (bench / "runs/test/report.html").read_text()
    assert run() == 2, "it is another comparison now"


@pytest.mark.slow
def test_two_comparisons_of_one_name_take_turns(bench):
    """The second begins while the first runs; it waits, and is then refused, for its runs are others."""
    (bench / "configs/low.yaml").write_text("{effect: -0.2, pause: 2}")
    write_plan(bench, name="same", seeds=[0])
    (bench / "configs/test.yaml").rename(bench / "configs/first.yaml")
    write_plan(bench, name="same", seeds=[0], settings={"x": 1})
    code = "import sys; from tasks.compare.__main__ import main; "
    code += "sys.exit(main(sys.argv[1:], command=(sys.executable, 'fake.py')))"

    def begin(name):
        return subprocess.Popen(
            [sys.executable, "-c", code, f"configs/{name}.yaml"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = begin("first")
    deadline = time.monotonic() + 60
    while not list((bench / "runs").rglob("starts.txt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    second = begin("test")
    _, error = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "waiting: another comparison is running in runs/same" in error
    assert "settings: --trainer.max_steps=10 --flag=true then, --x=1 now" in error
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert {len(lines) for lines in starts(bench, "same").values()} == {1}


def change(directory, **facts):
    path = directory / "run.json"
    content = json.loads(path.read_text()) | facts
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_divergence_is_told_of_the_last_call_alone_and_also_without_running(bench, capsys):
    assert run() == 0
    diverged = {"step": 4, "why": "the loss is nan"}
    change(bench / "runs/test" / ALL[1], finished=False, diverged=diverged)
    change(bench / "runs/test" / ALL[3], finished=False, diverged=None)
    capsys.readouterr()
    assert run("--report_only") == 0
    out = capsys.readouterr().out
    assert "elu+1, none · seed 1 diverged at optimizer step 4: the loss is nan" in out
    assert "elu+1, numerator · seed 1 is left out: not finished, it stands at step 10" in out


def test_a_run_that_was_never_validated_did_not_diverge(bench, capsys):
    assert run() == 0
    for seed in (2, 3):
        change(bench / "runs/test" / ALL[seed], validation=...)
    assert run("--report_only") == 0
    out = capsys.readouterr().out
    assert "elu+1, numerator · seed 0 is left out: it was never validated" in out
    assert "diverged" not in out


def test_a_run_of_another_seed_is_left_out(bench, capsys):
    assert run() == 0
    change(bench / "runs/test" / ALL[1], seed=7)
    assert run("--report_only") == 0
    assert "elu+1, none · seed 1 is left out: its run.json says seed 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "facts",
    [
        {"validation": None},
        {"validation": {"bpc": "x"}},
        {"tokens_per_second": "fast"},
        {"peak_memory_bytes": [1]},
        {"parameters": {}},
    ],
)
def test_a_run_json_with_odd_contents_is_left_out_with_the_reason(bench, capsys, facts):
    assert run() == 0
    change(bench / "runs/test" / ALL[1], **facts)
    assert run("--report_only") == 0
    (key,) = facts
    assert re.search(rf"elu\+1, none · seed 1 is left out: .*run\.json: {key}.* should be", capsys.readouterr().out)


def test_an_odd_arm_json_is_refused(bench, capsys):
    assert run() == 0
    path = bench / "runs/test" / ALL[1] / "arm.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"configs": [1]}))
    assert run("--report_only") == 2
    assert "arm.json is not what a comparison writes" in capsys.readouterr().err


def test_what_to_mind_is_said_in_the_terminal_too(bench, capsys):
    assert run() == 0
    change(bench / "runs/test" / ALL[1], data={"name": "other", "size": 1, "sha256": "ff"})
    capsys.readouterr()
    assert run("--report_only") == 0
    out = capsys.readouterr().out
    assert "note: Runs used different data: the arms are not comparable as they stand." in out
    assert "Runs used different data" in (bench / "runs/test/report.html").read_text()


# --- runs side by side


def intervals(home, name="test"):
    return [tuple(map(float, file.read_text().split())) for file in (home / "runs" / name).rglob("times.txt")]


def most_at_once(spans):
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


@pytest.mark.parametrize("side_by_side", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_so_many_runs_at_a_time_and_no_more(bench, monkeypatch, side_by_side):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "usable_cpus", lambda: 7)
    for name in ("zero", "low"):
        path = bench / f"configs/{name}.yaml"
        path.write_text(path.read_text() + "pause: 1\n")
    assert run("--jobs", str(side_by_side)) == 0
    assert {key: len(lines) for key, lines in starts(bench).items()} == dict.fromkeys(ALL, 1)
    assert most_at_once(intervals(bench)) == side_by_side
    threads = {file.read_text() for file in bench.rglob("threads.txt")}
    assert threads == {{1: "free", 2: "3", 3: "2"}[side_by_side]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--jobs", "2", "--on", "ray"], "--jobs goes without --on ray"),
        (["--cpus", "2"], "--cpus and --gpus go with --on ray"),
        (["--on", "ray", "--cpus", "0"], "at least 1 CPU and 0 GPUs, got 0 and 0"),
        (["--check", "runs"], "--check takes a folder of runs alone, got also configs/test.yaml"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(bench, capsys, flags, message):
    assert run(*flags) == 2
    assert message in capsys.readouterr().err
    assert not (bench / "runs").exists()


def test_a_comparison_needs_a_file(capsys):
    assert main([]) == 2
    assert "no comparison file given" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_no_training_process_outlives_the_comparison(bench, name):
    """Not even one that is killed -9: the training sees its input close. Two runs side by side."""
    training = bench / "training.py"
    training.write_text(
        "import os, pathlib, sys, time\n"
        "run_dir = pathlib.Path(sys.argv[sys.argv.index('--run_dir') + 1])\n"
        "(run_dir / 'pid.part').write_text(str(os.getpid()))\n"
        "(run_dir / 'pid.part').rename(run_dir / 'pid.txt')\n"
        "import tasks.enwik8.__main__ as enwik8\n"
        "enwik8.Enwik8CLI = lambda *_: time.sleep(60)\n"
        "enwik8.main([])\n"
    )
    code = "import sys; from tasks.compare.__main__ import main; "
    code += "sys.exit(main(sys.argv[1:], command=(sys.executable, 'training.py')))"
    comparison = subprocess.Popen(
        [sys.executable, "-c", code, "configs/test.yaml", "--jobs", "2"], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    files = [bench / "runs/test" / ALL[0] / "pid.txt", bench / "runs/test" / ALL[2] / "pid.txt"]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    comparison.send_signal(signal.Signals[name])
    comparison.wait(60)
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the comparison file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown key sedes; known are name, base, settings, seeds, baseline, against, arms, cpus"),
        ({"cpus": 0}, "cpus must be a whole number ≥ 1"),
        ({"cpus": 1.5}, "cpus must be a whole number ≥ 1"),
        ({"gpus": -1}, "gpus a number ≥ 0, got 1 and -1"),
        ({"seeds": None}, "no seeds"),
        ({"baseline": None, "arms": None}, "no baseline, no arms"),
        ({"arms": {}}, "arms must map at least one name"),
        ({"arms": {1: ["low.yaml"]}}, "arms must map at least one name"),
        ({"arms": {"elu+1, none": "low.yaml"}}, "must be a list of config files, got 'low.yaml'"),
        ({"arms": {"elu+1, none": ["no.yaml"]}}, "names configs/no.yaml: no such file"),
        ({"base": ["no.yaml"]}, "base names configs/no.yaml: no such file"),
        ({"baseline": "other"}, "baseline 'other' is none of the arms: elu+1, none; elu+1, numerator"),
        ({"against": {"elu+1, none": "other"}}, "against must map arms to arms"),
        ({"against": ["elu+1, none"]}, "against must map arms to arms"),
        ({"arms": {"elu+1, none": [], "ELU+1 none": []}}, "would be 'ELU+1-none'"),
        ({"arms": {"elu+1, none": [], "!": []}}, "need different folders, both would be ''"),
        ({"seeds": []}, "seeds must be a list of whole numbers"),
        ({"seeds": [0, 1.5]}, "seeds must be a list of whole numbers"),
        ({"seeds": [True]}, "seeds must be a list of whole numbers"),
        ({"seeds": [-1]}, "seeds must be a list of whole numbers"),
        ({"seeds": [1, 2, 1]}, "seeds must differ"),
        ({"settings": [1]}, "settings must map dotted keys"),
        ({"name": "a/b"}, "not the name of one folder"),
    ],
)
def test_a_bad_comparison_file_gets_one_clear_message(bench, capsys, changes, message):
    write_plan(bench, **changes)
    assert run() == 2
    out, error = capsys.readouterr()
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (bench / "runs").exists()
    assert out == ""


def test_a_file_that_is_absent_or_no_yaml_is_named(bench, capsys):
    assert main(["nowhere.yaml"]) == 2
    assert "nowhere.yaml: No such file" in capsys.readouterr().err
    for text, message in (
        ("a: [", "not YAML"),
        ("just text", "expected keys"),
        ("seeds: [0]\nseeds: [1]", "given twice"),
    ):
        (bench / "configs/test.yaml").write_text(text)
        assert run() == 2
        assert message in capsys.readouterr().err


def test_an_arm_given_twice_is_not_silently_dropped(bench):
    path = bench / "configs/test.yaml"
    path.write_text(path.read_text() + "  elu+1, none: [low.yaml]\n")
    with pytest.raises(PlanError, match=r"'elu\+1, none' is given twice"):
        read_plan(path)


def test_slugs_are_folder_names():
    assert slug("elu+1, none") == "elu+1-none"
    assert slug("../x y/z..") == "x-y-z"


@pytest.mark.parametrize("name", ["rope", "quick"])
def test_shipped_comparisons_say_what_they_promise(name):
    content = yaml.safe_load((ROOT / f"configs/compare/{name}.yaml").read_text())
    assert content["baseline"] == "elu+1, none"
    assert len({slug(arm) for arm in content["arms"]}) == len(content["arms"]) >= 3


# --- progress


def test_latest_reads_the_end_of_a_file_that_grows(tmp_path):
    assert latest(tmp_path) is None
    path = tmp_path / "metrics.csv"
    path.write_text("train/bpc,step,val/bpc,tokens_per_second\n")
    assert latest(tmp_path) is None
    rows = "".join(f"{5 - i / 10_000:.4f},{i},{'3.5' if i == 9990 else ''},100\n" for i in range(1, 10_001))
    path.write_text(path.read_text() + rows + "4.9,100")
    assert latest(tmp_path) == Latest(10_000, 4.0, 3.5, 100.0)
    assert Latest(3, 4.0, None, 1234.5).describe() == "train 4.000 · 1,234 bytes/s"


def on_terminal(bench, height=40):
    return Console(force_terminal=True, width=120, height=height, record=True, file=(bench / "terminal.txt").open("w"))


def test_one_live_table_shows_all_arms(bench):
    """While they run: step, bpc and rate of each; at the end all are done."""
    console = on_terminal(bench)
    (bench / "configs/low.yaml").write_text("{effect: -0.2, sleep: 2}")
    plan = read_plan("configs/test.yaml")
    runner = partial(local.run_here, side_by_side=4)
    assert module.compare(plan, command=(sys.executable, "fake.py"), console=console, run=runner) == 0
    text = (bench / "terminal.txt").read_text() + console.export_text()
    assert "elu+1, numerator · seed 1: finished" in text
    assert "report:  runs/test/report.html" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"elu\+1, numerator +0/2 +seed 0 +3/\? +4\.000 +4\.000", plain)
    assert re.search(r"elu\+1, none +2/2", plain)
    assert re.search(r"all +4/4", plain)


def test_on_a_low_terminal_the_table_keeps_what_runs_or_failed(bench):
    arms = {f"arm {number}": ["zero.yaml"] for number in range(20)}
    write_plan(bench, arms=arms, baseline="arm 0", seeds=[0])
    listed = jobs(read_plan("configs/test.yaml"), "runs")
    display = Display(on_terminal(bench, height=10), listed)
    for job in listed[:3]:
        display.event(job, "starts")
    display.ended(listed[1], "failed: exit status 1")
    display.ended(listed[2], None)
    console = Console(width=100, record=True, file=(bench / "x").open("w"))
    console.print(display._table())
    text = console.export_text()
    assert re.search(r"arm 0 +0/1 +seed 0 +begins", text)
    assert "arm 1" in text
    assert "seed 0 failed" in text
    assert "arm 2" not in text
    assert "arm 19" not in text
    assert re.search(r"all +1/20", text)

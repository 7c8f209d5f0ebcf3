"""Arms × seeds on a Ray cluster: a local one of two cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from tasks.compare.__main__ import main
from tests.test_compare import FAKE, alive, intervals, most_at_once, starts, stub_draw, write_plan
from tests.test_resume import TINY, assert_same_run, rows

ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'linrope[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    """One for all tests, with this project on its path."""
    here = str(Path(__file__).resolve().parents[1])
    ray.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}}, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    from tasks.compare import __main__ as module

    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "fake.py").write_text(FAKE)
    for name, content in (("base", {"pause": 1}), ("zero", {"effect": 0.0}), ("low", {"effect": -0.2})):
        (tmp_path / f"configs/{name}.yaml").write_text(yaml.safe_dump(content))
    write_plan(tmp_path)
    monkeypatch.setattr(module, "draw", stub_draw)
    return tmp_path


def run(*arguments):
    return main(["configs/test.yaml", "--on", "ray", *arguments], command=(sys.executable, "fake.py"))


@pytest.mark.parametrize(("cpus", "at_once"), [(1, 2), (2, 1)])
def test_as_many_runs_at_a_time_as_declared_cpus_allow(bench, cpus, at_once):
    write_plan(bench, cpus=cpus)
    assert run() == 0
    assert {len(lines) for lines in starts(bench).values()} == {1}
    assert len(intervals(bench)) == 4
    assert most_at_once(intervals(bench)) == at_once
    assert {file.read_text() for file in bench.rglob("threads.txt")} == {str(cpus)}
    assert (bench / "runs/test/report.html").is_file()


def test_a_run_that_no_machine_has_room_for_is_refused(bench, capsys):
    assert run("--gpus", "1") == 2
    assert "no machine of the cluster has 1 CPUs and 1 GPUs for a run" in capsys.readouterr().err
    assert not starts(bench)


def test_a_failing_arm_stops_no_other(bench, capsys):
    (bench / "configs/bad.yaml").write_text("fail: true")
    write_plan(bench, arms={"elu+1, none": ["zero.yaml"], "bad": ["bad.yaml"]})
    assert run() == 1
    assert {key: len(lines) for key, lines in starts(bench).items() if key.startswith("bad")} == {
        "bad/seed-0": 1,
        "bad/seed-1": 1,
    }, "an arm that fails by itself is not tried again"
    assert "error: this arm cannot train" in capsys.readouterr().out


def test_an_interrupt_stops_the_runs(bench):
    (bench / "configs/low.yaml").write_text("{effect: -0.2, sleep: 60}")
    sleeping = [bench / f"runs/test/elu+1-numerator/seed-{seed}/pid.txt" for seed in (0, 1)]

    def interrupt():
        wait_for(*sleeping)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt).start()
    try:
        assert run() == 130
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert wait_until(lambda: not any(alive(int(file.read_text())) for file in sleeping), seconds=120)


def test_sigterm_ends_a_comparison_that_started_a_cluster_itself(bench):
    """Ray puts handlers of its own in the place of ours, which would abort."""
    (bench / "configs/low.yaml").write_text("{effect: -0.2, sleep: 60}")
    write_plan(bench, seeds=[0])
    code = "import sys; from tasks.compare.__main__ import main; "
    code += "sys.exit(main(sys.argv[1:], command=(sys.executable, 'fake.py')))"
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", code, "configs/test.yaml", "--on", "ray"], env=environment, stderr=subprocess.PIPE
    )
    pid = bench / "runs/test/elu+1-numerator/seed-0/pid.txt"
    wait_for(pid)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert b"The same command goes on where this one stopped" in error
    assert wait_until(lambda: not alive(int(pid.read_text())))


@pytest.mark.parametrize("victims", ["worker and training", "training"])
def test_a_run_that_is_killed_goes_on_from_its_checkpoint(tmp_path, monkeypatch, victims):
    """Real training, killed -9: with its worker, as when a machine dies, or alone, as when memory runs out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as a run of one CPU has there: sums in another order end otherwise
    settings = yaml.safe_load(TINY)
    settings["trainer"]["val_check_interval"] = 4
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    plan = {"seeds": [3], "baseline": "a", "arms": {"a": ["tiny.yaml"]}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["plan.yaml", "--name", "straight"]) == 0
    run_dir = tmp_path / "runs/killed/a/seed-3"
    killed = []

    def kill():
        wait_for(run_dir / "checkpoints/last.ckpt", run_dir / "worker.txt")
        _, *pids = (run_dir / "worker.txt").read_text().split()
        for pid in pids if victims == "worker and training" else pids[1:]:
            os.kill(int(pid), signal.SIGKILL)
        killed.append((len(rows(run_dir)), *pids))

    thread = threading.Thread(target=kill)
    thread.start()
    assert main(["plan.yaml", "--name", "killed", "--on", "ray"]) == 0
    thread.join()
    assert killed[0][0] < 20, "it was killed before its end"
    assert "goes on from its last checkpoint" in (run_dir / "log.txt").read_text()
    assert (run_dir / "worker.txt").read_text().split()[1:] != list(killed[0][1:]), "another worker took it over"
    assert_same_run(tmp_path / "runs/straight/a/seed-3", run_dir)
    assert json.loads((run_dir / "run.json").read_text())["resumed"][0]["step"] >= 3


def wait_for(*files, seconds=120):
    assert wait_until(lambda: all(file.exists() for file in files), seconds)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

"""The bench of speed: that its figures are what they are called."""

import csv
import json
import platform
import subprocess
import sys
import time

import pytest
import torch

from linrope import ByteTransformer
from plots import speed as picture
from tasks.speed import __main__ as speed
from tasks.speed import attention, growth, positions, streaming, training
from tasks.speed.memory import peak_of
from tasks.speed.rows import Row, interleaved, limit_operations, matmul_rate

CPU = torch.device("cpu")


def test_the_limit_counts_the_products_of_one_chunk():
    """One head, one chunk of 64 tokens: scores and their product with the values by halves, the state twice."""
    m, e = 16, 8
    forward = 2 * (64 * 64 * m / 2 + 64 * 64 * e / 2 + 2 * 64 * m * e)
    assert limit_operations(1, 1, 64, m, e) == 3 * forward
    assert limit_operations(2, 3, 128, m, e) == 2 * 3 * 2 * 3 * forward


def test_rounds_are_interleaved_and_medians_taken_of_warm_runs():
    calls = []

    def contender(name, rounds):
        seconds = [second for each in rounds for second in each]

        def run():
            calls.append(name)
            return seconds.pop(0), 0.1

        return run

    # The first round, and the first run of each round, warm up.
    a = contender("a", [(0.8, 0.8, 0.8), (0.8, 0.1, 0.3), (0.8, 0.5, 0.7)])
    b = contender("b", [(0.8, 0.8, 0.8), (0.8, 0.2, 0.2), (0.8, 0.2, 0.2)])
    assert interleaved({"a": a, "b": b}, rounds=2) == {"a": (pytest.approx(0.4), 0.1), "b": (0.2, 0.1)}
    assert calls == [*"aaabbb", *"bbbaaa", *"aaabbb"]


def test_who_is_slow_runs_once():
    calls = []

    def slow():
        calls.append(1)
        return 40.0, 2.0

    assert interleaved({"slow": slow}, rounds=5, patience=30.0) == {"slow": (40.0, 2.0)}
    assert len(calls) == 1


def test_the_rate_is_that_of_a_product():
    run = matmul_rate(CPU, size=64)
    begin = time.perf_counter()
    seconds, backward = run()
    assert 0 < seconds < time.perf_counter() - begin
    assert backward == 0


def fill(megabytes: int):
    """Hold that much for a moment."""
    return lambda: torch.ones(megabytes * 2**18).sum()


@pytest.mark.slow
def test_peak_memory_is_that_of_the_step_alone():
    small, large = peak_of(fill, 16), peak_of(fill, 80)
    if small is None:
        pytest.skip("this system keeps no count of peak memory")
    assert abs(large - small - 64 * 2**20) < 4 * 2**20


FAULTS = """
import resource, torch
from tasks.speed.memory import keep_freed_memory
{call}
count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill = lambda: torch.empty(2**24).fill_(1.0)
for _ in range(20):  # the heap takes some turns to settle
    fill()
before = count()
for _ in range(5):
    fill()
print(count() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back at once")
def test_memory_that_is_kept_is_not_faulted_in_again():
    def faults(call):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep_freed_memory()") < faults("pass") / 10


def test_absent_peers_are_named_with_the_reason(monkeypatch):
    def no_such(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(attention.importlib, "import_module", no_such)
    found, absent = attention.peers(CPU)
    assert list(found) == ["SDPA (softmax)"]
    assert set(absent) == {"performer-pytorch", "fast-transformers", "flash-linear-attention"}
    assert absent["fast-transformers"] == "absent: No module named 'fast_transformers.causal_product'"


def test_peers_compute_what_they_are_called():
    """performer-pytorch's fallback is linear attention without rotation; it adds an epsilon."""
    query, key, value = (torch.rand(1, 2, 128, 8) + 0.1 for _ in range(3))
    found, _ = attention.peers(CPU)
    scores = (query @ key.mT).tril()
    expected = scores @ value / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(found["performer-pytorch"](query, key, value), expected, rtol=1e-4, atol=1e-5)


def test_a_case_has_a_row_for_everybody(monkeypatch):
    monkeypatch.setitem(attention._LONGEST, "reference", 32)
    ours = {name: attention._ours(name) for name in ("native", "chunked", "reference")}
    rows = {row.contender: row for row in attention._case((1, 2, 48, 8, 8), ours, CPU, 2)}
    assert list(rows) == ["limit", "native", "chunked", "reference"]
    assert rows["reference"].note == "left out: longer than 32"
    for name in ("native", "chunked"):
        assert rows[name].limit_share == pytest.approx(rows["limit"].seconds / rows[name].seconds)
        assert rows[name].ratio == pytest.approx(rows[name].seconds / rows["native"].seconds)
        assert 0 < rows[name].forward < rows[name].seconds


def test_networks_of_the_training_section_are_of_one_size():
    ours, theirs = (training._network(name, 64, 16) for name in (training.OURS, training.PERFORMER))
    assert isinstance(ours, ByteTransformer)
    assert len(ours.blocks) == len(theirs.performer.net.layers) == 4
    assert ours.blocks[0].attention.feature_map.num_features == 16
    assert theirs.performer.net.layers[0][0].fn.fast_attention.nb_features == 16


@pytest.mark.parametrize("kind", positions.SCHEMES)
def test_schemes_of_positions_differ_in_their_own_parameters_alone(kind):
    """Frequencies of 32 pairs and a table of 32 buckets for 4 heads, in all layers or one; 3 x 4 taps a feature and layer."""
    own = {"numerator, learned frequencies": 4 * 32, "T5 bias": 32 * 4, "none, short convolutions": 4 * 3 * 256 * 4}
    sizes = {}
    for name, make in positions.SCHEMES[kind].items():
        network = ByteTransformer(num_layers=4, d_model=256, attention=make)
        sizes[name] = sum(p.numel() for p in network.parameters())
        assert sizes[name] - sizes["none"] == own.get(name, 0), name
        assert all(seconds > 0 for seconds in positions.step(make, 8, CPU)())


def test_a_streamed_state_is_where_it_is_said_to_be():
    for kind in ("linear", "softmax"):
        layer, state = streaming._layer_at(kind, 10, CPU)
        _, after = layer.stream(torch.randn(1, 1, 256), state)
        assert after.position.tolist() == [11]
    assert after.key.shape[2] == 11


def test_a_step_of_growth_is_forward_and_backward():
    forward, backward = growth.step(growth.LINEAR, 64, "cpu")()
    assert forward > 0
    assert backward > 0


ROWS = [
    Row("growth", "n 256", "limit", n=256, seconds=0.5e-3),
    Row("growth", "n 256", "linear", n=256, seconds=1e-3, memory=4_000_000, ratio=1.0, against="linear"),
    Row("growth", "n 512", "linear", n=512, seconds=2e-3, memory=8_000_000, ratio=1.0, against="linear"),
]


def test_what_is_left_holds_every_figure(tmp_path):
    stem = tmp_path / "new" / "fast"
    paths = speed.write(ROWS, {"device": "cpu", "threads": 2, "torch": "2"}, stem)
    assert [path.name for path in paths] == ["fast.csv", "fast.json", "fast.png", "fast.svg"]
    kept = json.loads(paths[1].read_text())
    assert [row["seconds"] for row in kept["rows"]] == [0.5e-3, 1e-3, 2e-3]
    with paths[0].open() as file:
        assert [row["memory"] for row in csv.DictReader(file)] == ["", "4000000", "8000000"]
    assert "1,024" not in (svg := paths[3].read_text())
    for words in ("linear", "tokens", "peak memory, MB", "cpu, 2 thread(s), torch 2"):
        assert words in svg


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not what tasks.speed writes"),
        ("{}", "not what tasks.speed writes"),
        ('{"rows": [], "environment": {"device": 1, "threads": 1, "torch": 1}}', "no lengths"),
        (
            '{"rows": [{"section": "growth", "n": 1}], "environment": {"device": 1, "threads": 1, "torch": 1}}',
            "KeyError",
        ),
    ],
)
def test_a_file_that_holds_nothing_to_draw_is_named(tmp_path, capsys, content, said):
    path = tmp_path / "speed.json"
    path.write_text(content)
    assert picture.main([str(path), "--out", str(tmp_path / "x")]) == 2
    assert said in capsys.readouterr().err
    assert picture.main([str(tmp_path / "none.json")]) == 2


def test_the_table_leaves_out_what_nobody_has():
    grid = speed.table("growth", ROWS)
    assert [column.header for column in grid.columns] == ["case", "", "total", "a token", "time / linear", "memory"]
    assert [str(cell) for cell in grid.columns[3].cells] == ["1.95 µs", "3.91 µs", "3.91 µs"]


@pytest.mark.slow
def test_the_command_measures_and_leaves_files(tmp_path, capsys):
    assert speed.main(["--quick", "--only", "import", "--out", str(tmp_path / "speed"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "linrope, after torch" in printed
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["torch", "linrope, after torch"]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"])


@pytest.mark.parametrize("device", ["no-such-device", "meta"])
def test_a_device_that_cannot_be_measured_is_one_line(capsys, device):
    assert speed.main(["--device", device]) == 2
    assert capsys.readouterr().err.startswith(f"error: --device {device}:")


@pytest.mark.parametrize("out", ["", "/", ".."])
def test_where_nothing_can_be_left_nothing_is_measured(capsys, out):
    assert speed.main(["--device", "cpu", "--out", out]) == 2
    assert capsys.readouterr().err.startswith("error: --out must end in a name")


def test_a_folder_that_cannot_be_made_is_named_first(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert speed.main(["--device", "cpu", "--out", str(tmp_path / "file" / "speed")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err

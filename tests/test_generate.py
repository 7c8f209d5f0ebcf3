"""``python -m tasks.generate``: bytes as they come, those of the parallel logits."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from plots.checkpoints import load_network
from tasks.generate import main
from tests.test_enwik8_cli import ROOT, TINY
from tests.test_enwik8_cli import fit as train

ARMS = {
    "elu+1": ["--config=configs/positions/rotary_numerator.yaml"],
    "FAVOR+": ["--config=configs/feature_maps/favor_plus.yaml", "--config=configs/positions/rotary_before.yaml"],
    "softmax": ["--config=configs/attention/softmax.yaml", "--config=configs/positions/rotary.yaml"],
    "sinusoidal": ["--config=configs/positions/sinusoidal.yaml"],
}


@pytest.fixture(
    scope="module", params=["elu+1", *(pytest.param(arm, marks=pytest.mark.slow) for arm in list(ARMS)[1:])]
)
def checkpoint(request, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("generate") / "arm" / "seed-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        base = [TINY[0], *ARMS[request.param], *TINY[1:]]
        assert train(run_dir, base=base) == 0
    return run_dir / "checkpoints" / "last.ckpt"


def written(monkeypatch, *arguments):
    """Exit status and what was written, as bytes."""
    buffer = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", SimpleNamespace(buffer=buffer))
        status = main([str(argument) for argument in arguments])
    return status, buffer.getvalue()


def test_greedy_bytes_are_those_of_the_parallel_logits(checkpoint, monkeypatch):
    network = load_network(checkpoint)
    tokens = torch.tensor([list(b"The ")])
    with torch.no_grad():
        for _ in range(30):
            tokens = torch.cat((tokens, network(tokens)[:, -1:].argmax(-1)), 1)
    status, text = written(monkeypatch, "--ckpt", checkpoint, "--prompt", "The ", "--num_bytes", 30, "--temperature", 0)
    assert status == 0
    assert text == bytes(tokens[0].tolist())


@pytest.mark.slow
def test_compiled_it_writes_the_same_bytes(checkpoint, monkeypatch):
    call = ["--ckpt", checkpoint, "--num_bytes", 40, "--temperature", 0]
    assert written(monkeypatch, *call, "--compile") == written(monkeypatch, *call)


def test_a_seed_gives_the_same_bytes_and_sampling_narrows_them(checkpoint, monkeypatch):
    call = ["--ckpt", checkpoint, "--num_bytes", 40]
    (_, first), (_, again), (_, other) = (written(monkeypatch, *call, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 41
    greedy = written(monkeypatch, *call, "--temperature", 0)
    assert written(monkeypatch, *call, "--top_k", 1) == written(monkeypatch, *call, "--top_p", 1e-9) == greedy


def test_a_prompt_of_any_bytes_comes_back_as_it_is(checkpoint):
    prompt = bytes([200, 10, 228, 184, 150]) + "世".encode()
    call = [sys.executable, "-m", "tasks.generate", "--ckpt", str(checkpoint), "--num_bytes", "5", "--prompt", prompt]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    assert len(done.stdout) == len(prompt) + 5
    assert b"5 bytes, " in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--num_bytes", "-1"], "--num_bytes must not be negative, got -1"),
        (["--prompt", ""], r"prompt must be (b, n) with n of at least 1"),
        (["--temperature", "-1"], "temperature must not be negative"),
        (["--top_k", "0"], "top_k must keep at least 1"),
        (["--top_p", "0"], "top_p must be above 0"),
    ],
)
def test_what_cannot_be_generated_gets_one_message(checkpoint, monkeypatch, capsys, given, message):
    status, text = written(monkeypatch, "--ckpt", checkpoint, *given)
    assert status == 1
    assert message in capsys.readouterr().err
    assert text == b""


def test_a_file_that_is_no_checkpoint_of_ours_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "other.ckpt"
    path.write_bytes(b"no checkpoint")
    assert written(monkeypatch, "--ckpt", path) == (1, b"")
    assert f"{path} is not a whole checkpoint" in capsys.readouterr().err
    torch.save({"state_dict": {}}, path)
    assert written(monkeypatch, "--ckpt", path) == (1, b"")
    assert "does not say how its network was made" in capsys.readouterr().err
    made = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 2}}
    weights = {f"network.{k}": v for k, v in torch.nn.Linear(2, 2).state_dict().items()}
    torch.save({"state_dict": weights, "hyper_parameters": {"network": made}}, path)
    assert written(monkeypatch, "--ckpt", path) == (1, b"")
    assert "Linear cannot carry a state from byte to byte" in capsys.readouterr().err

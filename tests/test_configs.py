"""Every YAML under configs/ instantiates and takes one training step at tiny size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from tasks.compare.plan import read_plan
from tasks.enwik8.__main__ import main
from tests.cases import EXPORTED, POSITION_BIASES

ROOT = Path(__file__).parents[1]
SHRINK = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.strategy=auto",
    "--trainer.precision=32-true",
    "--trainer.max_steps=1",
    "--trainer.val_check_interval=1",
    "--trainer.limit_val_batches=1",
    "--data.corpus=builtin",
    "--data.seq_len=16",
    "--data.batch_size=2",
    "--data.eval_batch_size=1",
    "--data.num_workers=0",
]
TINY_NETWORK = ["--model.network.num_layers=1", "--model.network.d_model=24"]
TINY_PERFORMER = ["--model.network.depth=1", "--model.network.dim=16", "--model.network.dim_head=8"]


def configs(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs" / folder).glob("*.yaml"))


OVERLAYS = [
    c for folder in ("feature_maps", "positions", "attention", "networks", "strategies") for c in configs(folder)
]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def one_step(run_dir: Path, *paths: str) -> None:
    network = TINY_PERFORMER if any("networks/" in path for path in paths) else TINY_NETWORK
    chosen = [f"--config={path}" for path in paths]
    assert main(["fit", *chosen, *SHRINK, *network, f"--run_dir={run_dir}"]) == 0
    info = json.loads((run_dir / "run.json").read_text())
    assert info["finished"] is True
    assert info["steps"] == 1
    # An untrained network knows nothing: it costs about 8 bits a byte, never less than 6 nor much more.
    assert 6 < info["validation"]["bpc"] < 12
    assert math.isfinite(info["validation"]["bpc"])


@pytest.mark.parametrize("path", configs("enwik8"))
def test_bases_take_a_step(path, tmp_path):
    one_step(tmp_path / "e" / "a" / "seed-0", path)


# Overlays for another attention than that of the base come after its own.
FOR_SOFTMAX = [f"configs/positions/{name}.yaml" for name in ("alibi", "rotary", "t5_bias")]


@pytest.mark.parametrize("path", OVERLAYS)
def test_overlays_take_a_step(path, tmp_path):
    attention = ["configs/attention/softmax.yaml"] if path in FOR_SOFTMAX else []
    one_step(tmp_path / "e" / "a" / "seed-0", "configs/enwik8/small.yaml", *attention, path)


ARMS = {
    f"{Path(source).stem}: {arm.label}": arm.configs
    for source in configs("compare")
    for arm in read_plan(ROOT / source).arms
}
# Every overlay takes its step above; that each goes with each placement takes longer.
SLOW = [arm for arm in ARMS if arm.startswith(("feature_maps: ", "positions: ", "length: ", "short_conv: "))]


@pytest.mark.parametrize("arm", [pytest.param(arm, marks=pytest.mark.slow if arm in SLOW else ()) for arm in ARMS])
def test_arms_of_comparisons_take_a_step(arm, tmp_path):
    one_step(tmp_path / "e" / "a" / "seed-0", *map(str, ARMS[arm]))


def test_overlays_change_what_they_name_and_nothing_else():
    """A position overlay holds positions, rotation, decay and bias alone, a feature map's the feature map alone."""
    allowed = {
        "feature_maps": {"attention.feature_map", "attention.normalizer"},
        "positions": {
            "positions",
            *(
                f"attention.{name}"
                for name in ("rotary", "rotary_placement", "position_bias", "decay", "decay_placement")
            ),
        },
    }
    for folder, keys in allowed.items():
        for path in configs(folder):
            content = yaml.safe_load((ROOT / path).read_text())
            network = content["model"]["network"]["init_args"]
            attention = network.pop("attention", {}).get("init_args", {})
            if (
                path == "configs/positions/cosformer.yaml"
            ):  # a scheme that is a feature map: the very one of that overlay
                of_map = yaml.safe_load((ROOT / "configs/feature_maps/cosformer.yaml").read_text())
                of_map = of_map["model"]["network"]["init_args"]["attention"]["init_args"]
                assert attention.pop("feature_map") == of_map["feature_map"]
            assert set(network) | {f"attention.{key}" for key in attention} <= keys, path


def test_every_exported_map_has_an_overlay_and_two_arms():
    """A map that linrope exports can be trained by a file, and is in the comparison of all maps."""
    overlays = {}
    for path in configs("feature_maps"):
        chosen = yaml.safe_load((ROOT / path).read_text())["model"]["network"]["init_args"]["attention"]["init_args"]
        chosen = chosen["feature_map"]
        overlays[(chosen if isinstance(chosen, str) else chosen["class_path"]).removeprefix("linrope.")] = path
    assert overlays.keys() == EXPORTED.keys()
    arms = read_plan(ROOT / "configs/compare/feature_maps.yaml").arms
    used = [path.resolve().relative_to(ROOT).as_posix() for arm in arms for path in arm.configs]
    for path in overlays.values():
        assert used.count(path) == 2, path


def test_every_position_overlay_is_in_the_comparison_of_positions():
    """And every exported position bias has an overlay."""
    arms = read_plan(ROOT / "configs/compare/positions.yaml").arms
    used = {path.resolve().relative_to(ROOT).as_posix() for arm in arms for path in arm.configs}
    assert set(configs("positions")) <= used
    text = "".join((ROOT / path).read_text() for path in configs("positions"))
    exported = {type(make(4)).__name__ for make in POSITION_BIASES.values()}
    assert all(f"class_path: linrope.{name}\n" in text for name in exported)


def test_paper_yaml_holds_the_papers_numbers():
    """Su et al. 2021, section 4.4: 12 layers, 768 wide, 12 heads, length 1024, batch 128, rate 1e-4."""
    content = yaml.safe_load((ROOT / "configs/enwik8/paper.yaml").read_text())
    network = content["model"]["network"]["init_args"]
    assert (network["num_layers"], network["d_model"]) == (12, 768)
    assert network["attention"]["init_args"]["num_heads"] == 12
    assert (content["data"]["seq_len"], content["data"]["batch_size"]) == (1024, 128)
    assert content["model"]["learning_rate"] == 1e-4

"""The picture of kernels: what its numbers are, and that it draws every map."""

import numpy as np
import pytest
import torch

from linrope import FavorPlus, FeatureMap, RandomFourier, Taylor
from plots import kernel_error
from tests.cases import EXPORTED


def test_every_exported_map_is_drawn():
    assert kernel_error.exported_maps() == EXPORTED


def test_kernels_are_compared_up_to_a_factor():
    query, key = kernel_error.normal_pairs(101, 8)
    u = (query * key).sum(-1).numpy() / np.sqrt(8)
    taylor = 1 + u + u**2 / 2
    found = kernel_error.kernels(Taylor(8).double(), query, key)
    np.testing.assert_allclose(found.softmax, np.exp(u), rtol=1e-12)
    np.testing.assert_allclose(found.product, taylor / np.median(taylor / np.exp(u)), rtol=1e-12)


class OffByATenth(FeatureMap):
    """(1 ± 0.1) exp(q·k/√d) as a product, for the pair it was made for."""

    is_positive = True
    key: torch.Tensor

    def __init__(self, head_dim, num_features, seed):
        super().__init__()
        self.head_dim, self.num_features, self.sign = head_dim, num_features, (-1) ** seed

    def map_query(self, query):
        return ((query * self.key).sum(-1, keepdim=True) / self.head_dim**0.5).exp()

    def map_key(self, key):
        return torch.full_like(key[..., :1], 1 + 0.1 * self.sign)


def test_the_error_is_the_relative_rms():
    query, key = kernel_error.normal_pairs(30, 4)
    OffByATenth.key = key
    assert kernel_error.relative_error(OffByATenth, 1, query, key, seeds=4) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [FavorPlus, RandomFourier])
def test_more_features_err_less(kind):
    query, key = (x / 4 for x in kernel_error.normal_pairs(50, 8))
    few, many = (kernel_error.relative_error(kind, width, query, key, seeds=30) for width in (16, 256))
    # The error falls as the root of m.
    assert many / few == pytest.approx(0.25, rel=0.35)


@pytest.mark.slow
def test_it_draws_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_error, "_SEEDS", 1)
    monkeypatch.setattr(kernel_error, "_PAIRS", 10)
    assert kernel_error.main(["--head_dim", "4", "--out", str(tmp_path / "deep" / "kernels")]) == 0
    paths = capsys.readouterr().out.split()
    assert [path.rpartition(".")[2] for path in paths] == ["png", "svg"]
    svg = (tmp_path / "deep" / "kernels.svg").read_text()
    for name in EXPORTED:
        assert f"{name}, m = {EXPORTED[name](4).num_features}" in svg


def test_a_head_of_one_is_refused(tmp_path, capsys):
    assert kernel_error.main(["--head_dim", "1", "--out", str(tmp_path / "kernels")]) == 2
    assert "head_dim must be at least 2, got 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

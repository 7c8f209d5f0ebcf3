"""Feature maps that make new coordinates out of old ones: normed, multiplied, or weighted by position."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from linrope.feature_maps.base import FeatureMap, check_floor, relative_floor
from linrope.precision import at_least_float32


class OnePlusCosine(FeatureMap):
    """φ(x) = [x/‖x‖, √(1 + floor)], kernel 1 + floor + cos(q, k); signed, width d + 1.

    The constant stands last, where a rotation of an odd width leaves it alone: for an even d the rotated kernel, too,
    is 1 + floor and a cosine, the one kernel here that rotation cannot make negative.

    Args:
        head_dim: d, the width of queries and keys.
        floor: Least kernel, 0 or at least 1e-4; 0 gives one that is 0 for opposite vectors.

    Raises:
        ValueError: ``floor`` is negative, or so small that float32 loses it beside 1.

    Source: Su 2021, on the rotary transformer (kexue.fm/archives/8265).
    """

    is_positive = False

    def __init__(self, head_dim: int, floor: float = 0.0) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, head_dim + 1
        self.floor = check_floor(floor)
        if 0 < floor < 1e-4:
            raise ValueError(f"floor must be 0 or at least 1e-4, which float32 can tell from 0 beside 1, got {floor}")

    @property
    def kernel_is_positive(self) -> bool:
        """Whether there is a floor."""
        return self.floor > 0

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """[query/‖query‖, √(1 + floor)], and [0, √(1 + floor)] of a query that is 0."""
        x = at_least_float32(query)
        one = torch.full_like(x[..., :1], math.sqrt(1 + self.floor))
        return torch.cat((normalize(x, dim=-1, eps=1e-6), one), dim=-1)


class DPFP(FeatureMap):
    """φ(x) = [r ⊙ roll(r, 1), …, r ⊙ roll(r, ν)] with r = relu([x, -x]); width 2dν, positive where ``floor`` is.

    Args:
        head_dim: d, the width of queries and keys.
        nu: ν, the number of rolls, from 1 to 2d - 1.
        floor: Least feature, relative to 1 + ‖x‖²/d; 0, the paper's, gives a normalizer that can be 0.

    Raises:
        ValueError: ``nu`` out of range, or ``floor`` is negative.

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 5.3.
    """

    def __init__(self, head_dim: int, nu: int = 1, floor: float = 0.0) -> None:
        super().__init__()
        if not 1 <= nu <= 2 * head_dim - 1:
            raise ValueError(f"nu must be from 1 to 2 * head_dim - 1 = {2 * head_dim - 1}, got {nu}")
        self.head_dim, self.num_features, self.nu = head_dim, 2 * head_dim * nu, nu
        self.floor, self.is_positive = check_floor(floor), floor > 0

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """Products of relu([query, -query]) with its rolls."""
        x = at_least_float32(query)
        r = torch.cat((x, -x), dim=-1).relu()
        features = torch.cat([r * r.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)
        return relative_floor(features, x, self.floor, degree=2)


class Taylor(FeatureMap):
    """φ(x) = [1, x̃, x̃_i²/√2, x̃_i x̃_j (i < j)] with x̃ = x/d^¼; signed, width 1 + d + d(d + 1)/2.

    Its kernel is the second-order Taylor series of softmax's, 1 + u + u²/2 ≥ 1/2 with u = q·k/√d. Products i, j and
    j, i are packed into one, which leaves the kernel as it is at half the width. Its terms cancel where q and k are
    long and nearly orthogonal: in float32 the bound holds for entries up to about 10.

    Args:
        head_dim: d, the width of queries and keys.

    Source: Arora et al. 2024 (arXiv 2402.18668), section 4.1; Zhang et al. 2024 (arXiv 2402.04347).
    """

    is_positive = False

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, 1 + head_dim + head_dim * (head_dim + 1) // 2

    @property
    def kernel_is_positive(self) -> bool:
        """Always: 1 + u + u²/2 = ((1 + u)² + 1)/2."""
        return True

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """[1, x̃, its squares and products]."""
        x = at_least_float32(query) / self.head_dim**0.25
        return torch.cat((torch.ones_like(x[..., :1]), x, x.square() / math.sqrt(2), *_products(x, x)), dim=-1)


class CosFormer(FeatureMap):
    """φ(x) at position p has the pairs (r cos θ, r sin θ) with r = relu(x) and θ = πp/2M; width 2d.

    Its kernel relu(q)·relu(k) cos(π(p_q - p_k)/2M) fades with distance and is not negative while positions
    are below M. Pairs stand side by side, so that a rotation in the numerator (interleaved, the default) adds its angle
    to the map's and depends on distance alone.

    Args:
        head_dim: d, the width of queries and keys.
        max_positions: M, in tokens; fixed, so that it streams.
        floor: Least r, relative to √(1 + ‖x‖²/d); 0, the paper's, gives a normalizer that can be 0.

    Raises:
        ValueError: ``max_positions`` is smaller than 1, or ``floor`` is negative.

    Source: Qin et al. 2022 (arXiv 2202.08791).
    """

    is_positive = False
    uses_positions = True

    def __init__(self, head_dim: int, max_positions: int = 4096, floor: float = 0.0) -> None:
        super().__init__()
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        self.head_dim, self.num_features, self.max_positions = head_dim, 2 * head_dim, max_positions
        self.floor = check_floor(floor)

    @property
    def kernel_is_positive(self) -> bool:
        """Whether there is a floor; the cosine alone stays above 0."""
        return self.floor > 0

    def map_query(
        self, query: Float[Tensor, "*batch n d"], positions: Tensor | None = None
    ) -> Float[Tensor, "*batch n m"]:
        """(r cos θ, r sin θ) of each query.

        Args:
            query: Queries or keys.
            positions: In tokens, ``(n,)`` or ``(b, n)``; 0, 1, … by default.

        Raises:
            ValueError: Positions of another shape, negative, or M or more.
        """
        x = at_least_float32(query)
        if positions is None:
            positions = torch.arange(x.shape[-2] if x.ndim > 1 else 1, device=x.device)
        n = x.shape[-2] if x.ndim > 1 else 1
        if positions.shape not in ((n,), (1, n), (x.shape[0], n)):
            raise ValueError(
                f"positions must be (n,) = {(n,)} or (b, n) = {(x.shape[0], n)}, got {tuple(positions.shape)}"
            )
        # A graph cannot look at values; outside of one a position past M is an error, not a wrong sign.
        if not torch.compiler.is_compiling() and positions.numel() and positions.device.type != "meta":
            least, largest = (int(p) for p in positions.aminmax())
            if least < 0 or largest >= self.max_positions:
                raise ValueError(
                    f"positions must be from 0 to max_positions - 1 = {self.max_positions - 1}, got {least} to {largest}; "
                    "make the map with a larger max_positions"
                )
        # In float64, which Apple's GPUs lack: a float32 angle is off by 1e-4 at a position of a few thousand.
        exact = positions.to("cpu" if x.device.type == "mps" else x.device, torch.float64)
        angle = exact * (math.pi / 2 / self.max_positions)
        if positions.ndim == 2 and x.ndim == 4:
            angle = angle[:, None]
        r = relative_floor(x.relu(), x, self.floor)
        cos, sin = (wave.to(x.device, x.dtype)[..., None] for wave in (angle.cos(), angle.sin()))
        return torch.stack((r * cos, r * sin), dim=-1).flatten(-2)

    def map_key(self, key: Float[Tensor, "*batch n d"], positions: Tensor | None = None) -> Float[Tensor, "*batch n m"]:
        """(r cos θ, r sin θ) of each key; as :meth:`map_query`."""
        return self.map_query(key, positions)


def packed_square(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
    """[x_i², √2 x_i x_j (i < j)], whose dot products are those of x, squared."""
    return torch.cat((x.square(), *_products(math.sqrt(2) * x, x)), dim=-1)


def _products(y: Float[Tensor, "*batch d"], x: Float[Tensor, "*batch d"]) -> list[Tensor]:
    """Return y_i x_j for i < j, a tensor for each i but the last; slices, for indices take twice the time."""
    return [y_i * x[..., i:] for i, y_i in enumerate(y.split(1, dim=-1)[:-1], start=1)]

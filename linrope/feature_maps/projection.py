"""Random projections: rows ω ~ N(0, I), drawn as a function of seed, step and layer."""

from __future__ import annotations

import hashlib
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrope.precision import at_least_float32, full_precision


class RandomProjection(nn.Module):
    """x ↦ ωᵀx for random rows ω, which are a buffer: saved with the weights, redrawn in training only.

    Args:
        num_rows: Number of ω.
        width: d, the width of x.
        orthogonal: Rows of each block of d are orthogonal, with the norms of independent Gaussian
            rows; lower variance than independent rows.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The rows are a function of (seed, step, layer), the same in every process.

    Raises:
        ValueError: A number is smaller than 1.
    """

    rows: Tensor

    def __init__(
        self, num_rows: int, width: int, *, orthogonal: bool = True, redraw_interval: int | None = 1000, seed: int = 0
    ) -> None:
        super().__init__()
        for name, number in (("num_rows", num_rows), ("width", width), ("redraw_interval", redraw_interval)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.orthogonal, self.redraw_interval, self.seed = orthogonal, redraw_interval, seed
        self.register_buffer("rows", torch.empty(num_rows, width, dtype=torch.float32))
        self.redraw(step=0, layer=0)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch rows"]:
        """ωᵀx."""
        return wide_product(x, self.rows)

    def redraw(self, step: int, layer: int) -> None:
        """Draw afresh if ``step`` is 0 or a multiple of ``redraw_interval``."""
        if step and (self.redraw_interval is None or step % self.redraw_interval):
            return
        digest = hashlib.sha256(f"{self.seed} {step} {layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        draw = orthogonal_rows if self.orthogonal else gaussian_rows
        rows = draw(self.rows.shape[0], self.rows.shape[1], generator)
        if self.rows.device.type != "meta":
            with torch.no_grad():
                self.rows.copy_(rows)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{tuple(self.rows.shape)}, orthogonal={self.orthogonal}, redraw_interval={self.redraw_interval}"


def wide_product(x: Float[Tensor, "*batch d"], rows: Float[Tensor, "*heads m d"]) -> Float[Tensor, "*batch m"]:
    """Product of each x with each row, in float32 or wider also under autocast: as exponents they reach thousands."""
    with full_precision(x.device):
        x = at_least_float32(x)
        return x @ rows.to(x.dtype).mT


def check_num_features(num_features: int | None, head_dim: int, even: bool = False) -> int:
    """Return ``num_features``, by default d·ln d, rounded down and then up to an even number.

    Raises:
        ValueError: ``head_dim`` or ``num_features`` is smaller than 1, or the latter is odd and must be ``even``.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if num_features is None:
        num_features = max(2, int(head_dim * math.log(head_dim)))  # as performer-pytorch
        num_features += num_features % 2
    if num_features < 1:
        raise ValueError(f"num_features must be at least 1, got {num_features}")
    if even and num_features % 2:
        raise ValueError(f"num_features must be even, two for each row, got {num_features}")
    return num_features


def gaussian_rows(num_rows: int, width: int, generator: torch.Generator) -> Float[Tensor, "rows width"]:
    """Independent rows ~ N(0, I), float64 on the CPU."""
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64, device="cpu")


def orthogonal_rows(num_rows: int, width: int, generator: torch.Generator) -> Float[Tensor, "rows width"]:
    """Rows that are each N(0, I) alone and orthogonal within blocks of ``width``, float64 on the CPU.

    Directions come from the QR decomposition of Gaussian blocks, with signs that make it unique and the
    directions uniform; norms are those of independent Gaussian rows, so χ(width).

    Source: Yu et al. 2016 (arXiv 1610.09072), section 3; Mezzadri 2007 (math-ph/0609050) for the signs.
    """
    blocks = []
    for _ in range(math.ceil(num_rows / width)):
        q, r = torch.linalg.qr(gaussian_rows(width, width, generator))
        blocks.append((q * r.diagonal().sign()).mT)
    directions = torch.cat(blocks)[:num_rows]
    return directions * gaussian_rows(num_rows, width, generator).norm(dim=-1, keepdim=True)

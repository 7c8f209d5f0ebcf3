"""Which of the implementations runs."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Literal, cast, get_args

import torch

from linrope.attention.build import BuildError, library
from linrope.transforms import is_transformed

Backend = Literal["auto", "native", "chunked", "reference"]


def choose(backend: str, dtype: torch.dtype, device_type: str) -> Backend:
    """What ``backend`` means on this device, computing in this dtype; ``$LINROPE_BACKEND`` takes the place of "auto".

    Raises:
        ValueError: An unknown backend.
        RuntimeError: "native" is asked for and cannot be had; the message says why.
    """
    named = f"backend must be {' or '.join(map(repr, get_args(Backend)))}, got {backend!r}"
    if backend == "auto" and (forced := os.environ.get("LINROPE_BACKEND")):
        backend = forced
        named = f"LINROPE_BACKEND must be {' or '.join(get_args(Backend))}, got {backend!r}"
    if backend not in get_args(Backend):
        raise ValueError(named)
    if backend == "native":
        reason = why_not(dtype) if device_type == "cpu" else f"it is for the CPU, the tensors are on {device_type}"
        if reason:
            raise RuntimeError(f"the native backend cannot be had: {reason}")
    if backend == "auto":
        return "native" if device_type == "cpu" and not is_transformed() and _is_there(dtype) else "chunked"
    return cast(Backend, backend)


# A constant in a compiled graph. torch.compiler.assume_constant_result says so too, but loads the compiler.
choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why there is no native kernel for ``dtype``; None if there is one, built at the first call."""
    try:
        library(dtype)
    except (BuildError, OSError) as error:
        return str(error)
    return None


@cache
def _is_there(dtype: torch.dtype) -> bool:
    """Whether there is a native kernel for ``dtype``; says so, once, if not."""
    reason = why_not(dtype)
    if reason:
        warnings.warn(f"linrope computes with plain torch ('chunked'), for {reason}", stacklevel=4)
    return reason is None

"""One thread, one seed: a test gives the same numbers alone and among others."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("linrope", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("linrope")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

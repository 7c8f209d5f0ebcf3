"""One thread, one seed: a test gives the same numbers alone and among others."""

# First of all: typing takes Optional[Union[int, float]] and Optional[Union[float, int]] for one type, that of whoever
# came first, and with the second one `--trainer.limit_val_batches=1` would mean all batches, not one.
import lightning.pytorch  # noqa: F401
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("linrope", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("linrope")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

"""How the bytes are served: random crops to train on, windows to evaluate on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tasks.enwik8.corpus import Corpus, DataError, load_corpus
from tasks.enwik8.windows import EvalBatch, Rows, deal_windows, eval_windows


def crop_starts(seed: int, step: int, batch_size: int, num_starts: int) -> Int64[np.ndarray, " b"]:
    """Draw where the crops of one training batch begin: a function of its arguments alone.

    A split of N bytes has ``num_starts = N - L`` crops of L inputs and the L targets shifted by one;
    all are equally likely, with replacement.

    Args:
        seed: Seed of the run, >= 0.
        step: Number of the batch, >= 0.
        batch_size: Number of crops.
        num_starts: Starts are drawn from ``[0, num_starts)``.
    """
    return np.random.default_rng((seed, step)).integers(num_starts, size=batch_size)


def gather(split: UInt8[np.ndarray, " n"], starts: Any, num_bytes: int) -> Int64[Tensor, "b num_bytes"]:
    """Copy the ``num_bytes`` bytes from each start on out of the split, as token ids."""
    places = np.asarray(starts)[:, None] + np.arange(num_bytes)
    return torch.from_numpy(np.asarray(split[places], dtype=np.int64))


class CropBatches(Dataset[Tensor]):
    """Training batches without end: item ``i`` is batch ``i``, a function of ``(seed, i)`` alone.

    Args:
        split: The bytes.
        seq_len: L, inputs per crop; an item has shape ``(batch_size / world_size, L + 1)``, int64.
        batch_size: Crops in the batch over all processes.
        seed: Seed of the run, >= 0.
        rank: Process, from 0: it gets rows ``rank::world_size``.
        world_size: Number of processes.
    """

    def __init__(
        self,
        split: UInt8[np.ndarray, " n"],
        seq_len: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.split, self.seq_len, self.batch_size, self.seed = split, seq_len, batch_size, seed
        self.rows = slice(rank, None, world_size)

    def __getitem__(self, index: int) -> Int64[Tensor, "b L+1"]:
        starts = crop_starts(self.seed, index, self.batch_size, len(self.split) - self.seq_len)
        return gather(self.split, starts[self.rows], self.seq_len + 1)


class EvalBatches(Dataset[EvalBatch]):
    """The batches of one evaluation, in order."""

    def __init__(self, split: UInt8[np.ndarray, " n"], batches: list[Rows]):
        self.split, self.batches = split, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> EvalBatch:
        starts, num_bytes, first, carries_state = self.batches[index]
        return EvalBatch(gather(self.split, starts, num_bytes), first, carries_state)


class CountFrom(Sampler[int]):
    """Count up without end; where from is asked anew each time an iteration begins."""

    def __init__(self, start: Callable[[], int]):
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start())


class ByteData(LightningDataModule):
    """Bytes to train and evaluate on: Python's own library, Enwik8, or any file, split 90/5/5.

    Training batches are crops at random places. Which ones is a function of the seed and the step
    alone: runs with equal seeds see equal batches, and a resumed run goes on where it stopped.
    Several processes need ``Trainer(use_distributed_sampler=False)``: the batches are dealt here.

    Args:
        path: File to read; called "enwik8", it must be Enwik8. Left out: what ``corpus`` names.
        corpus: "builtin" (text of Python's standard library, needs no network), "enwik8" (downloaded
            unless ``path`` is given) or "file" (the bytes at ``path``, whatever they are). Left out:
            goes by ``path``.
        seq_len: Bytes a window feeds the model, in training and evaluation.
        batch_size: Crops per training batch, over all processes together, before accumulation.
        eval_batch_size: Most windows per evaluation batch, over all processes together; does not change results.
        stride: Bytes by which neighbouring evaluation windows overlap: more context, more work.
        evaluation: "windows" (each starts from nothing) or "stream" (the whole split in one pass, the
            state carried from chunk to chunk of ``seq_len`` bytes; one process).
        seed: Decides which crops are drawn, >= 0.
        num_workers: Loader processes; 0 reads in the training process. Does not change results.
    """

    corpus: Corpus

    def __init__(
        self,
        path: str | None = None,
        corpus: Literal["builtin", "enwik8", "file"] | None = None,
        seq_len: int = 256,
        batch_size: int = 16,
        eval_batch_size: int = 64,
        stride: int = 0,
        evaluation: Literal["windows", "stream"] = "windows",
        seed: int = 0,
        num_workers: int = 0,
    ):
        super().__init__()
        self.path = path
        self.source: Literal["builtin", "enwik8", "file"] | None = corpus
        self.seq_len, self.batch_size, self.eval_batch_size = seq_len, batch_size, eval_batch_size
        self.stride, self.evaluation = stride, evaluation
        self.seed, self.num_workers = seed, num_workers

    def prepare_data(self) -> None:
        """Make the file exist: assemble or download it. Lightning calls this in one process per node."""
        load_corpus(self.source, self.path)

    def setup(self, stage: str | None = None) -> None:
        """Open ``self.corpus``.

        Raises:
            DataError: The data are not there or not the right ones, or the settings do not fit them.
        """
        self._check_settings()
        self.corpus = load_corpus(self.source, self.path)
        for name in ("train", "validation", "test"):
            size = len(getattr(self.corpus, name))
            if size <= self.seq_len:
                raise DataError(
                    f"the {name} split of {self.corpus.name} has {size} bytes, too few for a window of "
                    f"--data.seq_len={self.seq_len} inputs and one more target: "
                    f"lower --data.seq_len to {size - 1} or less, or give a larger file"
                )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Serve ``(b, seq_len + 1)`` int64 batches without end, from the first one not yet trained on."""
        rank, world_size = self._process()
        crops = CropBatches(
            self.corpus.train, self.seq_len, self.batch_size, self.seed, rank=rank, world_size=world_size
        )
        return self._loader(crops, CountFrom(self._batches_trained))

    def val_dataloader(self) -> DataLoader[EvalBatch]:
        """Serve this process's share of the validation split as :class:`EvalBatch`."""
        return self._eval_loader(self.corpus.validation)

    def test_dataloader(self) -> DataLoader[EvalBatch]:
        """Serve this process's share of the test split as :class:`EvalBatch`."""
        return self._eval_loader(self.corpus.test)

    def measurement(self, split: Literal["validation", "test"]) -> dict[str, str | int]:
        """Say what an evaluation of all of ``split`` measures, to be written beside its figure.

        ``context`` (the most bytes a prediction can see), ``stride``, ``bytes_scored``, ``split_targets`` (what all
        of the split has to score) and ``data_size`` are in bytes.
        """
        size = len({"validation": self.corpus.validation, "test": self.corpus.test}[split])
        return {
            "split": split,
            "evaluation": self.evaluation,
            "context": self.seq_len if self.evaluation == "windows" else size,
            "stride": self.stride,
            "bytes_scored": size - 1,
            "split_targets": size - 1,
            "data": self.corpus.name,
            "data_size": self.corpus.size,
            "data_sha256": self.corpus.sha256,
        }

    def _check_settings(self) -> None:
        for name, least in {"seq_len": 1, "batch_size": 1, "eval_batch_size": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise DataError(f"--data.{name} must be at least {least}, got {getattr(self, name)}")
        eval_windows(2, self.seq_len, self.stride)  # refuses a stride out of range
        if self.evaluation == "stream" and self.stride:
            raise DataError(f"--data.evaluation=stream has no overlap: --data.stride is 0, got {self.stride}")
        _, processes = self._process()
        if processes == 1:
            return
        if self.evaluation == "stream":
            raise DataError(f"--data.evaluation=stream is one pass in one process, but there are {processes}")
        if self.batch_size % processes:
            raise DataError(
                f"--data.batch_size={self.batch_size} counts the crops over all processes: "
                f"it must be a multiple of their number, {processes}"
            )
        # Lightning's sampler would deal out again, with duplicates, what has been dealt here already.
        connector = getattr(self.trainer, "_accelerator_connector", None)
        if getattr(connector, "use_distributed_sampler", False):
            raise DataError(f"{processes} processes need --trainer.use_distributed_sampler=false")

    def _process(self) -> tuple[int, int]:
        """Return this process's rank and the number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _batches_trained(self) -> int:
        trainer = self.trainer
        return trainer.global_step * trainer.accumulate_grad_batches if trainer else 0

    def _eval_loader(self, split: UInt8[np.ndarray, " n"]) -> DataLoader[EvalBatch]:
        windows = eval_windows(len(split), self.seq_len, self.stride)
        if self.evaluation == "stream":
            batches = [Rows([start], stop - start, first, start > 0) for start, stop, first in windows]
        else:
            batches = deal_windows(windows, self.eval_batch_size, *self._process())
        return self._loader(EvalBatches(split, batches))

    def _loader(self, batches: Dataset[Any], sampler: Sampler[int] | None = None) -> DataLoader[Any]:
        return DataLoader(
            batches,
            batch_size=None,  # an item is a whole batch
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

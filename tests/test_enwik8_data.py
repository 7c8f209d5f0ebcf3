from collections import Counter
from itertools import islice, pairwise
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch

from tasks.enwik8.corpus import DataError
from tasks.enwik8.data import ByteData, CropBatches, EvalBatches, crop_starts
from tasks.enwik8.windows import deal_windows, eval_windows

SHAPES = [  # split size, seq_len, stride
    (2, 1, 0),
    (3, 2, 1),
    (100, 7, 0),
    (100, 7, 3),
    (100, 7, 6),
    (99, 49, 0),  # no tail: 98 targets in 2 windows
    (100, 99, 0),
    (100, 99, 98),
    (50, 64, 0),  # the window is longer than the split
    (50, 64, 63),
    (1000, 32, 31),
    (1001, 250, 17),
]


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(256, size=size).astype(np.uint8)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(random_bytes(2000).tobytes())
    return str(file)


def ready(path, trainer=None, **settings):
    data = ByteData(path, **{"seq_len": 8, "batch_size": 4, **settings})
    data.trainer = trainer
    data.setup()
    return data


def process(rank, world_size, *, use_distributed_sampler=False, global_step=0, accumulate_grad_batches=1):
    """Return what the data ask of a trainer."""
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        global_step=global_step,
        accumulate_grad_batches=accumulate_grad_batches,
        _accelerator_connector=SimpleNamespace(use_distributed_sampler=use_distributed_sampler),
    )


# Crops


def test_every_start_is_drawn_and_no_other():
    drawn = Counter(start for step in range(500) for start in crop_starts(3, step, 4, 7))
    assert set(drawn) == set(range(7))
    # 2,000 draws of probability 1/7: six standard deviations around the mean.
    mean, deviation = 2000 / 7, (2000 * 6 / 49) ** 0.5
    assert all(abs(count - mean) < 6 * deviation for count in drawn.values())


def test_starts_depend_on_seed_and_step_alone():
    first = crop_starts(1, 2, 50, 10**6)
    np.random.default_rng(0).random(3)
    assert (crop_starts(1, 2, 50, 10**6) == first).all()
    for other in (crop_starts(1, 3, 50, 10**6), crop_starts(2, 2, 50, 10**6), crop_starts(2, 1, 50, 10**6)):
        assert (other != first).any()


@pytest.mark.parametrize("index", [0, 1, 12345])
def test_crops_are_the_bytes_of_the_split(index):
    split = random_bytes(100)
    batch = CropBatches(split, seq_len=8, batch_size=64, seed=5)[index]
    starts = crop_starts(5, index, 64, 100 - 8)
    assert batch.dtype == torch.int64
    assert batch.tolist() == [split[start : start + 9].tolist() for start in starts]


def test_the_only_crop_of_a_split_of_one_window_is_all_of_it():
    split = random_bytes(9)
    assert CropBatches(split, seq_len=8, batch_size=2, seed=0)[0].tolist() == [split.tolist()] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_processes_share_the_rows_of_the_global_batch(world_size):
    split = random_bytes(100)
    whole = CropBatches(split, 8, 6, seed=1)[4]
    for rank in range(world_size):
        assert torch.equal(CropBatches(split, 8, 6, 1, rank, world_size)[4], whole[rank::world_size])


def test_workers_do_not_change_the_batches(path):
    alone, helped = (list(islice(ready(path, seed=7, num_workers=workers).train_dataloader(), 6)) for workers in (0, 2))
    assert torch.equal(torch.stack(alone), torch.stack(helped))
    assert torch.equal(alone[3], CropBatches(random_bytes(2000)[:1800], 8, 4, seed=7)[3])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_after_the_batches_already_trained_on(path, accumulate):
    trainer = process(0, 1, global_step=5, accumulate_grad_batches=accumulate)
    loader = ready(path, trainer).train_dataloader()
    crops = CropBatches(random_bytes(2000)[:1800], 8, 4, seed=0)
    for batch, index in zip(loader, range(5 * accumulate, 5 * accumulate + 3), strict=False):
        assert torch.equal(batch, crops[index])
    trainer.global_step = 9  # a second pass over the same loader, as in Lightning's next epoch
    assert torch.equal(next(iter(loader)), crops[9 * accumulate])


class Recorder(lightning.LightningModule):
    """Keeps the training batches it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batch):
        self.batches.append(batch)
        return self.weight.sum()

    def validation_step(self, batch):
        assert batch.tokens.shape[1] >= 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_sees_the_batches_of_a_straight_one(path, tmp_path, accumulate, workers):
    def fit(steps, checkpoint=None):
        module = Recorder()
        trainer = lightning.Trainer(
            max_steps=steps,
            accumulate_grad_batches=accumulate,
            val_check_interval=2 * accumulate,
            check_val_every_n_epoch=None,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        data = ByteData(path, seq_len=8, batch_size=4, num_workers=workers)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.batches

    straight = fit(5)
    resumed = fit(3) + fit(5, tmp_path / "last.ckpt")
    assert len(straight) == 5 * accumulate
    assert torch.equal(torch.stack(resumed), torch.stack(straight))


# Evaluation


def scored(windows):
    """Return the places in the split of all scored targets."""
    return [place for start, stop, first in windows for place in range(start + 1 + first, stop)]


def test_validation_of_enwik8_is_9765_windows_and_a_tail_of_319_targets():
    windows = eval_windows(5_000_000, 512, 0)
    targets = [stop - start - 1 for start, stop, _ in windows]
    assert targets == [512] * 9765 + [319]
    assert {first for _, _, first in windows} == {0}


@pytest.mark.parametrize(("size", "seq_len", "stride"), SHAPES)
def test_every_target_is_scored_once_in_order(size, seq_len, stride):
    windows = eval_windows(size, seq_len, stride)
    assert scored(windows) == list(range(1, size))
    assert all(2 <= stop - start <= seq_len + 1 for start, stop, _ in windows)


@pytest.mark.parametrize(("size", "seq_len", "stride"), SHAPES)
def test_neighbouring_windows_overlap_by_the_stride_and_give_that_context(size, seq_len, stride):
    windows = eval_windows(size, seq_len, stride)
    for before, after in pairwise(windows):
        assert before.stop - 1 - after.start == stride  # inputs of the one that the next one sees again
    for start, stop, first in windows:
        for place in range(start + 1 + first, stop):
            assert place - start > stride or start == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("size", "seq_len", "stride"), SHAPES)
def test_every_target_is_scored_once_by_any_number_of_processes(size, seq_len, stride, batch_size, world_size):
    windows = eval_windows(size, seq_len, stride)
    shares = [deal_windows(windows, batch_size, rank, world_size) for rank in range(world_size)]
    dealt = [(s, s + r.num_bytes, r.first) for share in shares for r in share for s in r.starts]
    assert sorted(scored(dealt)) == list(range(1, size))
    assert all(1 <= len(rows.starts) <= batch_size for share in shares for rows in share)
    lengths = [[rows.num_bytes for rows in share] for share in shares]
    assert all(share == lengths[0] for share in lengths), "the processes run in step"


@pytest.mark.parametrize("batch_size", [1, 3, 4, 64])
def test_the_first_batches_cover_the_same_windows_whatever_the_number_of_processes(batch_size):
    """So a limited validation scores the same targets in one process and in several."""
    windows = eval_windows(1000, 7, 3)

    def first(batches, world_size):
        shares = [deal_windows(windows, batch_size, rank, world_size)[:batches] for rank in range(world_size)]
        return sorted(scored([(s, s + r.num_bytes, r.first) for share in shares for r in share for s in r.starts]))

    for batches in (1, 2, 5):
        assert first(batches, 1) == first(batches, 2) == first(batches, 5)


@pytest.mark.parametrize("settings", [{"stride": 0}, {"stride": 5}, {"evaluation": "stream"}])
@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("eval_batch_size", [1, 3, 64])
def test_loaders_serve_each_byte_of_the_split_but_the_first_as_a_target_once(path, split, settings, eval_batch_size):
    data = ready(path, eval_batch_size=eval_batch_size, **settings)
    loader = data.val_dataloader() if split == "validation" else data.test_dataloader()
    expected = random_bytes(2000)[1800:1900] if split == "validation" else random_bytes(2000)[1900:]
    targets = torch.cat([batch.tokens[:, 1:][:, batch.first :].flatten() for batch in loader])
    assert targets.dtype == torch.int64
    assert targets.tolist() == expected[1:].tolist()


def test_eval_batches_hold_the_context_too():
    split = random_bytes(100)
    rows = deal_windows(eval_windows(100, 7, 3), 5)
    batches = EvalBatches(split, rows)
    assert len(batches) == len(rows)
    for index, (starts, num_bytes, first, _) in enumerate(rows):
        batch = batches[index]
        assert batch.tokens.tolist() == [split[s : s + num_bytes].tolist() for s in starts]
        assert (batch.first, batch.carries_state) == (first, False)


def test_a_stream_is_the_split_in_one_pass(path):
    batches = list(ready(path, seq_len=16, evaluation="stream").val_dataloader())
    inputs = torch.cat([batch.tokens[:, :-1] for batch in batches], dim=1)
    assert inputs.tolist() == [random_bytes(2000)[1800:1899].tolist()]
    assert [batch.tokens.shape for batch in batches] == [(1, 17)] * 6 + [(1, 4)]  # 99 = 6 · 16 + 3
    assert [batch.carries_state for batch in batches] == [False] + [True] * 6
    assert {batch.first for batch in batches} == {0}


def test_workers_do_not_change_the_evaluation(path):
    alone, helped = (list(ready(path, stride=3, num_workers=w).val_dataloader()) for w in (0, 2))
    assert len(alone) == len(helped)
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a[1:] == b[1:]


@pytest.mark.parametrize(("settings", "context", "stride"), [({"stride": 5}, 8, 5), ({"evaluation": "stream"}, 100, 0)])
def test_a_measurement_says_what_was_measured(path, settings, context, stride):
    data = ready(path, **settings)
    assert data.measurement("test") == {
        "split": "test",
        "evaluation": settings.get("evaluation", "windows"),
        "context": context,
        "stride": stride,
        "bytes_scored": 99,
        "split_targets": 99,
        "data": "bytes",
        "data_size": 2000,
        "data_sha256": data.corpus.sha256,
    }


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 100}, r"validation split of bytes has 100 bytes.*seq_len=100.*99 or less"),
        ({"seq_len": 5000}, r"train split of bytes has 1800 bytes.*seq_len=5000"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"stride": 8}, "from 0 to 7, got 8"),
        ({"stride": -1}, "from 0 to 7, got -1"),
        ({"evaluation": "stream", "stride": 2}, "stride is 0, got 2"),
        ({"batch_size": 3, "trainer": process(0, 2)}, "batch_size=3 .* multiple of their number, 2"),
        ({"evaluation": "stream", "trainer": process(0, 2)}, "one process, but there are 2"),
        ({"trainer": process(0, 2, use_distributed_sampler=True)}, "use_distributed_sampler=false"),
    ],
)
def test_settings_that_cannot_work_are_refused(path, settings, message):
    with pytest.raises(DataError, match=message):
        ready(path, **settings)


def test_the_longest_window_that_fits_is_served(path):
    data = ready(path, seq_len=99)
    (batch,) = data.val_dataloader()
    assert batch.tokens.tolist() == [random_bytes(2000)[1800:1900].tolist()]
    assert next(iter(data.train_dataloader())).shape == (4, 100)


def test_prepare_data_makes_the_file_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("LINROPE_CACHE", str(tmp_path))
    ByteData().prepare_data()
    assert [file.stat().st_size for file in tmp_path.glob("*.txt")] == [4_000_000]

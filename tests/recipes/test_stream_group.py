"""``data=stream``: rows of a stream's tokens, shared out by replica, and gone on with where a training stopped."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from pool import WorkerPool

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.recipes.streams import StreamDataModule

REPLICAS, BATCH_SIZE, SEQ_LEN = 2, 2, 8
BATCHES_PER_EPOCH = 5
NUM_BYTES = BATCHES_PER_EPOCH * BATCH_SIZE * SEQ_LEN  # of a replica


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def texts_of_two_replicas() -> list[str]:
    """Documents of many lengths, of which every second ones, and the others, fill all batches of an epoch."""
    draw = random.Random(0)
    halves = []
    for letters in ("abcdefghijklm", "nopqrstuvwxyz"):
        cuts = [0, *sorted(draw.sample(range(1, NUM_BYTES), 11)), NUM_BYTES]
        whole = "".join(draw.choice(letters) for _ in range(NUM_BYTES))
        halves.append([whole[begin:end] for begin, end in itertools.pairwise(cuts)])
    return [text for pair in zip(*halves, strict=True) for text in pair]


def texts_of_one_length() -> list[str]:
    """As many bytes for each replica, whichever documents it is given."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(REPLICAS * NUM_BYTES // 5)]


def documents_in(batches: list[list[list[int]]]) -> list[str]:
    """Those of one length that the rows of a replica are made of."""
    text = bytes(itertools.chain(*itertools.chain(*batches))).decode()
    return [text[start : start + 5] for start in range(0, len(text), 5)]


def batches_of(texts: list[str]) -> list[list[list[int]]]:
    """Independently of the package: the bytes one after the other, cut into rows, and these into batches."""
    tokens = list("".join(texts).encode())
    rows = [tokens[start : start + SEQ_LEN] for start in range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)]
    return [rows[start : start + BATCH_SIZE] for start in range(0, len(rows) - BATCH_SIZE + 1, BATCH_SIZE)]


class Seen(pl.Callback):
    """The rows and the loss of each batch."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch["input_ids"].tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def fit(
    folder: Path, steps: int, options: dict[str, int], limit: int | None, unequal_data: str, ckpt: str | None = None
) -> Seen:
    pl.seed_everything(3, verbose=False)
    seen = Seen()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=PipelineParallelStrategy(
            2,
            data_parallel_size=REPLICAS,
            num_microbatches=2,
            schedule="1f1b",
            unequal_data=unequal_data,
            check_first_batches=False,
        ),
        max_steps=steps,
        limit_train_batches=limit,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen, ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    module = ByteGPT(num_layers=2, dim=8, num_heads=1, max_seq_len=SEQ_LEN, dropout=0.1)
    data = StreamDataModule(
        "json", data_files=str(folder / "text.jsonl"), batch_size=BATCH_SIZE, seq_len=SEQ_LEN, **options
    )
    trainer.fit(module, datamodule=data, ckpt_path=None if ckpt is None else folder / ckpt)
    return seen


def undisturbed_and_resumed(
    folder: Path, steps: int, options: dict[str, int], limit: int | None, stops: list[int], unequal_data: str = "error"
) -> list[tuple[Any, list[float]]]:
    fits = [fit(folder, steps, options, limit, unequal_data)]
    fits += [fit(folder, steps, options, limit, unequal_data, f"step={stop}.ckpt") for stop in stops]
    return [(each.rows, each.losses) for each in fits]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"shuffle_buffer": 4}, 2),
        pytest.param({}, None, marks=pytest.mark.nightly),
        pytest.param({"shuffle_buffer": 4, "num_workers": 1}, None, marks=pytest.mark.nightly),
    ],
)
def test_replicas_read_their_own_and_a_resumed_training_goes_on(
    pool: WorkerPool, tmp_path: Path, options: dict[str, int], limit: int | None
) -> None:
    is_shuffled = bool(options)
    texts = texts_of_one_length() if is_shuffled else texts_of_two_replicas()
    write_lines(tmp_path / "text.jsonl", texts)
    per_epoch = limit or BATCHES_PER_EPOCH
    steps, stops = 2 * per_epoch, [per_epoch, per_epoch + 1] if is_shuffled else [2, per_epoch]
    told = pool.run(undisturbed_and_resumed, tmp_path, steps, options, limit, stops, world_size=4, timeout=250)
    whole = [results[0][0] for results in told]
    assert whole[0] == whole[2] and whole[1] == whole[3]  # the pipelines are ranks 0 and 2, and ranks 1 and 3
    first, second = ([rows[:per_epoch] for rows in whole[:2]], [rows[per_epoch:] for rows in whole[:2]])
    if not is_shuffled:
        assert first == second == [batches_of(texts[replica::REPLICAS]) for replica in range(REPLICAS)]
        assert all(len(batches) == BATCHES_PER_EPOCH for batches in first)
    elif limit is None:
        for epoch in (first, second):
            assert sorted(itertools.chain(*map(documents_in, epoch))) == sorted(texts)
    assert (first != second) == is_shuffled
    for (rows, losses), *resumed in told:
        assert len(rows) == len(losses) == steps
        for stop, (rows_again, losses_again) in zip(stops, resumed, strict=True):
            assert rows_again == rows[stop:], f"after step {stop}"
            assert losses_again == losses[stop:], f"after step {stop}"


@pytest.mark.nightly
def test_an_epoch_ends_with_the_replica_that_has_least(pool: WorkerPool, tmp_path: Path) -> None:
    short = BATCHES_PER_EPOCH - 2
    texts = [text for pair in zip(["long"] * 20, ["sho"] * 20, strict=True) for text in pair]
    expected = [batches_of(texts[replica::REPLICAS]) for replica in range(REPLICAS)]
    assert [len(batches) for batches in expected] == [BATCHES_PER_EPOCH, short]
    write_lines(tmp_path / "text.jsonl", texts)
    steps, stops = short + 2, [short - 1, short]
    told = pool.run(undisturbed_and_resumed, tmp_path, steps, {}, None, stops, "shortest", world_size=4, timeout=250)
    for rank, ((rows, losses), *resumed) in enumerate(told):
        mine = expected[rank % REPLICAS]
        assert rows == [*mine[:short], *mine[:2]]
        for stop, again in zip(stops, resumed, strict=True):
            assert again == (rows[stop:], losses[stop:]), f"after step {stop}"


def alone(data: StreamDataModule) -> StreamDataModule:
    """With a trainer of one process."""
    data.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    return data


def test_rows_are_the_tokens_of_a_tokenizer_with_an_end_after_each_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<end>", "<unknown>", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {
        "train": str(write_lines(tmp_path / "a.jsonl", ["a b c", "d", "", "e f a b"], "content")),
        "validation": str(write_lines(tmp_path / "b.jsonl", ["f " * 50], "content")),
    }
    tokens = {"tokenizer": str(tmp_path / "tokenizer.json"), "end": "<end>", "text_field": "content"}
    sizes = {"batch_size": 1, "seq_len": 4, "num_val_batches": 3}
    data = alone(StreamDataModule("json", data_files=files, val_split="validation", **tokens, **sizes))
    batches = [batch["input_ids"] for batch in data.train_dataloader()]
    assert all(batch.dtype == torch.int64 for batch in batches)
    assert torch.cat(batches).tolist() == [[2, 3, 4, 0], [5, 0, 6, 7]]  # "a b <end>" fills no row
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.cat([batch["input_ids"] for batch in loader]).tolist() == [[7] * 4] * 3


def test_without_a_split_there_is_no_validation_for_callbacks_to_wait_for(tmp_path: Path) -> None:
    data = alone(StreamDataModule("json", data_files=str(write_lines(tmp_path / "a.jsonl", ["a"]))))
    assert not is_overridden("val_dataloader", data)
    with pytest.raises(ConfigurationError, match=r"nothing to evaluate on: .* data\.val_split=NAME"):
        data.test_dataloader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_files": "none.jsonl"}, r"data\.path=json .* cannot be read: FileNotFoundError: Unable to find .*none"),
        ({"data_files": None}, r"data\.path=json reads files: name them"),
        ({"split": "dev"}, r"data\.split=dev cannot be read: .*Available splits: \['train'\]"),
        ({"val_split": "dev"}, r"data\.split=dev cannot be read"),
        ({"text_field": "content"}, r"no field 'content': it has text\. .*data\.text_field=NAME"),
        ({"tokenizer": "nowhere"}, "the tokenizer nowhere does not exist"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_made(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    files = str(write_lines(tmp_path / "a.jsonl", ["a"]))
    with pytest.raises(ConfigurationError, match=message):
        StreamDataModule("json", **{"data_files": files, **options})


def test_bad_sizes_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size=0: must be at least 1\ndata\.shuffle_buffer=-1: must be"):
        StreamDataModule("json", batch_size=0, shuffle_buffer=-1)


def test_what_only_reading_shows_is_said_with_its_place(tmp_path: Path) -> None:
    short = StreamDataModule("json", data_files=str(write_lines(tmp_path / "a.jsonl", ["abc"])), seq_len=2)
    with pytest.raises(ConfigurationError, match="how many data-parallel ranks share the stream"):
        short.train_dataloader()
    with pytest.raises(ConfigurationError, match=r"has 0 batches of data\.batch_size=16 rows"):
        next(iter(alone(short).train_dataloader()))
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n{"other": 1}\n')
    gap = alone(StreamDataModule("json", data_files=str(tmp_path / "b.jsonl"), seq_len=2))
    with pytest.raises(ConfigurationError, match="document 1 of this rank's part of the stream: text is a NoneType"):
        next(iter(gap.train_dataloader()))

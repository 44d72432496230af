"""Tokens: what ``lightning-pp-data`` makes of each kind of source, and the rows that are trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipelined_fit import trainer
from pool import WorkerPool

from lightning_pp.cli.data.command import main
from lightning_pp.recipes.token_files import TokenFiles, TokenWriter
from lightning_pp.recipes.tokens import TokenDataModule

TEXTS = ["one two two", "three", "two one"]


def made(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 1
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def documents(folder: Path) -> list[list[int]]:
    files = TokenFiles(folder)
    return [files.tokens[a:b].tolist() for a, b in zip(files.offsets[:-1], files.offsets[1:], strict=True)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words, as a file and as a directory for transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    own = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>").save_pretrained(tmp_path / "words")
    return tmp_path / "words"


WORDS = [[1, 2, 2], [3], [2, 1]]


def test_every_kind_of_source_gives_the_same_tokens(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset, DatasetDict

    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n\n")
    for name, text in zip("xyz", TEXTS, strict=True):
        (tmp_path / f"{name}.md").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
    pyarrow.parquet.write_table(pyarrow.table({"content": TEXTS, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    DatasetDict({"train": Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "set")
    capsys.readouterr()
    sources: list[tuple[Any, ...]] = [
        (tmp_path / "a.txt", "--lines"),
        (tmp_path / "?.md",),
        (tmp_path / "a.jsonl",),
        (tmp_path / "a.parquet", "--field", "content"),
        (tmp_path / "set", "--split", "train"),
    ]
    for number, source in enumerate(sources):
        out = tmp_path / f"out{number}"
        told = made(capsys, *source, "-o", out, "--tokenizer", tokenizer)
        assert f"{out}: 9 tokens of 3 documents, uint8, tokenizer {tokenizer} with 4 tokens" in told
        assert documents(out) == [[*words, 0] for words in WORDS]
    made(capsys, tmp_path / "a.jsonl", "-o", tmp_path / "file", "--tokenizer", tmp_path / "tokenizer.json")
    assert documents(tmp_path / "file") == WORDS
    made(capsys, tmp_path / "a.jsonl", "-o", tmp_path / "no_end", "--tokenizer", tokenizer, "--end", "")
    assert documents(tmp_path / "no_end") == WORDS
    made(capsys, tmp_path / "x.md", tmp_path / "y.md", "-o", tmp_path / "bytes")
    assert [bytes(document).decode() for document in documents(tmp_path / "bytes")] == TEXTS[:2]


def test_refusals_leave_nothing(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    assert "line 2 has no field 'text': it has body" in refused(capsys, tmp_path / "a.jsonl", "-o", out)
    (tmp_path / "b.jsonl").write_text('{"text": 3}\n')
    assert "text is a int, not text" in refused(capsys, tmp_path / "b.jsonl", "-o", out)
    (tmp_path / "c.jsonl").write_text("one\n")
    assert "c.jsonl, line 1 is not JSON" in refused(capsys, tmp_path / "c.jsonl", "-o", out)
    (tmp_path / "d.txt").write_bytes(b"\xff")
    assert "d.txt is not UTF-8 text" in refused(capsys, tmp_path / "d.txt", "-o", out)
    (tmp_path / "e.txt").write_text("")
    assert "the sources hold no text" in refused(capsys, tmp_path / "e.txt", "-o", out)
    assert "does not exist" in refused(capsys, tmp_path / "none.txt", "-o", out)
    assert "is a folder, but not a dataset" in refused(capsys, tmp_path, "-o", out)
    text = tmp_path / "f.txt"
    text.write_text("one")
    assert "the tokenizer nowhere does not exist" in refused(capsys, text, "-o", out, "--tokenizer", "nowhere")
    assert "has no token <eos>" in refused(capsys, text, "-o", out, "--tokenizer", tokenizer, "--end", "<eos>")
    assert f"{text} exists" in refused(capsys, text, "-o", text)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "add", interrupt)
    with pytest.raises(SystemExit) as stop:
        main([str(text), "-o", str(out)])
    assert stop.value.code == 130 and "interrupted" in capsys.readouterr().err
    names = {"a.jsonl", "b.jsonl", "c.jsonl", "d.txt", "e.txt", "f.txt", "words", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def write(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, of tokens that say where they are."""
    numbers = iter(range(1, sum(lengths) + 1))
    found = [[next(numbers) for _ in range(length)] for length in lengths]
    writer = TokenWriter(folder, vocab_size=70_000)
    writer.add(found)
    assert writer.finish(tokenizer="byte", end=None, sources=[]).dtype == "uint32"
    return found


def test_rows_hold_every_token_once(tmp_path: Path) -> None:
    torch.manual_seed(1)  # of which the first row of the shuffled ones is not the first
    found = write(tmp_path / "t", [3, 9, 1, 7, 12, 4, 8])
    flat = [token for document in found[:6] for token in document]
    joined = TokenDataModule(str(tmp_path / "t"), batch_size=2, seq_len=8, val_fraction=0.2)
    rows = torch.cat([batch["input_ids"] for batch in joined.train_dataloader()])
    assert sorted(rows.flatten().tolist()) == flat[:32] and rows[0].tolist() != flat[:8]
    assert next(iter(joined.val_dataloader()))["input_ids"].tolist() == [found[6]]

    masked = TokenDataModule(str(tmp_path / "t"), batch_size=4, seq_len=8, val_fraction=0.2, documents="masked")
    firsts = {document[0] for document in found}
    for batch in masked.train_dataloader():
        for tokens, positions, labels in zip(*(batch[n].tolist() for n in batch), strict=True):
            assert [a == -100 for a in labels] == [token in firsts for token in tokens]
            expected = [next((k for k in range(i + 1) if tokens[i - k] in firsts), i) for i in range(8)]
            assert positions == expected

    packed = TokenDataModule(str(tmp_path / "t"), batch_size=2, seq_len=8, val_fraction=0.2, documents="packed")
    for batch in packed.train_dataloader():
        assert {tuple(row.shape) for row in batch.values()} == {(1, 16)}
        tokens, positions, labels = (batch[name][0].tolist() for name in ("input_ids", "position_ids", "labels"))
        begins = [place for place in range(16) if place % 8 == 0 or tokens[place] in firsts]
        assert [place for place in range(16) if labels[place] == -100] == begins
        assert [place for place in range(16) if positions[place] == 0] == begins

    separate = TokenDataModule(
        str(tmp_path / "t"), batch_size=2, seq_len=8, val_fraction=0.2, documents="separate", pad_to_multiple=4
    )
    pieces = []
    for batch in separate.train_dataloader():
        assert batch["input_ids"].shape[1] % 4 == 0
        assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
        kept = batch["attention_mask"].bool()
        pieces += [row[mask].tolist() for row, mask in zip(batch["input_ids"], kept, strict=True)]
    expected = [document[i : i + 8] for document in found[:6] for i in range(0, len(document), 8)]
    assert sorted(pieces) == expected


def test_masked_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """The loss of a row of three documents is that of the three by themselves."""
    from lightning_pp.recipes.causal_lm import CausalLM

    write(tmp_path / "t", [5, 3, 8, 16])
    data = TokenDataModule(str(tmp_path / "t"), batch_size=1, seq_len=16, documents="masked")
    batch = next(iter(data.train_dataloader()))
    torch.manual_seed(0)
    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    module = CausalLM("llama", {**config, "num_attention_heads": 2, "num_key_value_heads": 2})
    module.configure_model()
    module.eval()
    with torch.no_grad():
        loss = module._outputs(batch).loss
        apart = [batch["input_ids"][:, a:b] for a, b in ((0, 5), (5, 8), (8, 16))]
        losses = [module._outputs({"input_ids": tokens}).loss * (tokens.shape[1] - 1) for tokens in apart]
        joined = module._outputs({"input_ids": batch["input_ids"]}).loss
    assert loss.item() == pytest.approx(float(sum(losses)) / 13, rel=1e-5)
    assert abs(loss.item() - joined.item()) > 1e-4


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder of tokens.*lightning-pp-data"):
        TokenDataModule(str(tmp_path))
    write(tmp_path / "t", [20, 20])
    with pytest.raises(ValueError, match="do not fill a row of data.seq_len=64"):
        TokenDataModule(str(tmp_path / "t"), seq_len=64)
    with pytest.raises(ValueError, match="must be one of joined, masked, separate, packed"):
        TokenDataModule(str(tmp_path / "t"), seq_len=4, documents="apart")
    file = tmp_path / "t" / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="should have 160 bytes and has 159"):
        TokenFiles(tmp_path / "t")


def fit(
    folder: str, documents: str, steps: int, save: str | None, resume: str | None, num_ranks: int = 2
) -> tuple[list[list[int]], list[float]]:
    """Trains on tokens; the rows that this rank was given, from where it was resumed, and the losses."""
    import lightning.pytorch as pl

    from lightning_pp import PipelineParallelStrategy, split_packed
    from lightning_pp.recipes.causal_lm import CausalLM

    seen: list[list[int]] = []
    losses: list[float] = []

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(batch["input_ids"].tolist())

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    pl.seed_everything(3, verbose=False)
    config = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    module = CausalLM("llama", {**config, "num_attention_heads": 2, "num_key_value_heads": 2}, num_warmup_steps=1)
    cut = split_packed if documents == "packed" else None
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineParallelStrategy(2, num_microbatches=2, split_batch=cut, check_first_batches=False)
    run = trainer(num_ranks, strategy, max_epochs=-1, max_steps=steps, callbacks=[Seen()], limit_val_batches=0)
    data = TokenDataModule(folder, batch_size=4, seq_len=16, val_fraction=0.1, documents=documents, pad_to_multiple=8)
    run.fit(module, datamodule=data, ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    assert math.isfinite(float(run.callback_metrics["train_loss"]))
    return seen, losses


def test_packed_rows_train_as_on_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    """To what float32 allows: transformers computes losses in it."""
    write(tmp_path / "t", np.random.default_rng(0).integers(4, 24, 30).tolist())
    folder = str(tmp_path / "t")
    rows, expected = fit(folder, "packed", 4, None, None, 1)
    for found, losses in pool.run(fit, folder, "packed", 4, None, None):
        assert found == rows and losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("documents", ["masked", "separate"])
def test_a_pipeline_resumes_with_the_next_rows(pool: WorkerPool, tmp_path: Path, documents: str) -> None:
    lengths = np.random.default_rng(0).integers(4, 24, 30).tolist()
    write(tmp_path / "t", lengths)
    folder, path = str(tmp_path / "t"), str(tmp_path / "a.ckpt")
    (whole, _), (same, _) = pool.run(fit, folder, documents, 4, None, None)
    assert whole == same
    first = pool.run(fit, folder, documents, 2, path, None)[0][0]
    rest = pool.run(fit, folder, documents, 4, None, path)[0][0]
    assert first + rest == whole and len(rest) == 8

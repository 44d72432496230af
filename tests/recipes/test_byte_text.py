"""The byte-level data module: which files, which crops, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_pp.recipes.byte_text import ByteTextDataModule, find_files, read_bytes, standard_library_sources


def test_patterns_and_names_expand_in_order_without_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.md", "deep/er/d.md", "odd[1].txt"):
        (tmp_path / name).write_text(name)
    assert find_files(["b.txt", "?.txt", "deep/**/*.md"]) == [
        Path(name) for name in ("b.txt", "a.txt", "deep/c.md", "deep/er/d.md")
    ]
    assert find_files(["odd[1].txt"]) == [Path("odd[1].txt")]


def test_file_that_may_not_be_opened_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, whom no mode bits stop
    with pytest.raises(FileNotFoundError, match="secret.txt: Permission denied"):
        find_files([str(secret)])


def test_text_is_joined_in_order_and_cut(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"abc")
    second.write_bytes(b"\xffde")
    assert bytes(read_bytes([first, second], max_bytes=100).tolist()) == b"abc\n\xffde\n"
    assert bytes(read_bytes([first, second], max_bytes=5).tolist()) == b"abc\n\xff"
    assert bytes(read_bytes([first, second], max_bytes=2).tolist()) == b"ab"


def test_default_text_is_the_standard_library_and_the_same_every_time() -> None:
    assert "argparse.py" in {source.name for source in standard_library_sources()}
    batches = []
    for _ in range(2):
        data = ByteTextDataModule(batch_size=3, seq_len=16, num_train_crops=7)
        data.setup()
        batches.append([batch["input_ids"] for batch in data.train_dataloader()])
    assert [tuple(batch.shape) for batch in batches[0]] == [(3, 16), (3, 16), (1, 16)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    assert batches[0][0].dtype == torch.int64
    assert not torch.equal(batches[0][0], batches[0][1])


def test_evaluation_never_sees_training_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"t" * 900 + b"v" * 99)
    data = ByteTextDataModule([str(text)], seq_len=16, num_train_crops=200, num_val_crops=5, val_fraction=0.1)
    data.setup()
    assert {byte for batch in data.train_dataloader() for byte in batch["input_ids"].unique().tolist()} == {ord("t")}
    evaluated = torch.cat([batch["input_ids"] for batch in data.val_dataloader()])
    assert evaluated.shape == (5, 16)
    assert set(evaluated.unique().tolist()) == {ord("v"), ord("\n")}
    for loader in (data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(torch.cat([batch["input_ids"] for batch in loader]), evaluated)


def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * 999)
    with pytest.raises(
        ValueError, match="1 files hold 1000 bytes .* 950 for training and 50 for evaluation .*seq_len=64"
    ):
        ByteTextDataModule([str(text)], seq_len=64)


def test_bad_sizes_are_all_named() -> None:
    with pytest.raises(ValueError, match="must be at least 1") as error:
        ByteTextDataModule(batch_size=0, seq_len=-1, val_fraction=1.0)
    for problem in ("data.batch_size=0", "data.seq_len=-1", "data.val_fraction=1.0"):
        assert problem in str(error.value)


def test_loader_before_setup_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"setup\(\) has not run"):
        ByteTextDataModule().train_dataloader()

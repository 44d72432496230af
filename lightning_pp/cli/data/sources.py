"""Where documents come from: text, JSON lines, parquet, datasets of the library of that name; one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_pp.errors import ConfigurationError

#: How many bytes, or rows of a dataset, have been read.
Progress = Callable[[int], None]

_JSON_LINES = (".jsonl", ".ndjson")
_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")


class Source:
    """One file or folder.

    Args:
        path: The file, or a folder that ``Dataset.save_to_disk`` wrote.
        field: Of JSON lines, parquet and datasets: what holds the text.
        lines: Of text files: whether a line is a document, and not the file.
        split: Of a folder with several datasets.

    Attributes:
        size: In bytes, or in rows of a dataset.

    Raises:
        ConfigurationError: What is needed to read it is not installed, or it is a folder of other things.
    """

    def __init__(self, path: Path, field: str, lines: bool, split: str | None) -> None:
        self.path, self.field, self.lines = path, field, lines
        self._dataset = _open_dataset(path, field, split) if path.is_dir() else None
        if path.suffix == ".parquet":
            _parquet()
        self.size = path.stat().st_size if self._dataset is None else len(self._dataset)

    def documents(self, progress: Progress) -> Iterator[str]:
        """The text of each document.

        Raises:
            ConfigurationError: Something in the source is not text; the error says where.
        """
        if self._dataset is not None:
            for number, row in enumerate(self._dataset):
                progress(1)
                yield self._text(row, f"{self.path}, row {number}")
        elif self.path.suffix == ".parquet":
            yield from self._of_parquet(progress)
        elif self.path.suffix in _JSON_LINES:
            yield from self._of_json_lines(progress)
        else:
            yield from self._of_text(progress)

    def _of_text(self, progress: Progress) -> Iterator[str]:
        with self.path.open("rb") as file:
            for number, content in enumerate(file if self.lines else [file.read()]):
                progress(len(content))
                try:
                    text = content.decode()
                except UnicodeDecodeError as error:
                    where = f", line {number + 1}" if self.lines else ""
                    raise ConfigurationError(f"{self.path}{where} is not UTF-8 text: {error}") from error
                yield text.rstrip("\r\n") if self.lines else text

    def _of_json_lines(self, progress: Progress) -> Iterator[str]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                progress(len(line))
                if not line.strip():
                    continue
                place = f"{self.path}, line {number + 1}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigurationError(f"{place} is not JSON: {error}") from error
                yield self._text(row, place)

    def _of_parquet(self, progress: Progress) -> Iterator[str]:
        file = _parquet().ParquetFile(self.path)
        names = file.schema_arrow.names
        if self.field not in names:
            raise ConfigurationError(_no_field(self.field, str(self.path), names))
        number = done = 0
        for batch in file.iter_batches(batch_size=1024, columns=[self.field]):
            for text in batch.column(0).to_pylist():
                yield self._text({self.field: text}, f"{self.path}, row {number}")
                number += 1
            now = self.size * number // max(1, file.metadata.num_rows)
            progress(now - done)
            done = now

    def _text(self, row: Any, place: str) -> str:
        if not isinstance(row, dict) or self.field not in row:
            raise ConfigurationError(_no_field(self.field, place, list(row) if isinstance(row, dict) else []))
        text = row[self.field]
        if not isinstance(text, str):
            raise ConfigurationError(f"{place}: {self.field} is a {type(text).__name__}, not text")
        return text


def _no_field(field: str, place: str, names: list[str]) -> str:
    there = f"it has {', '.join(map(str, names))}" if names else "it is not an object with fields"
    return f"{place} has no field {field!r}: {there}. Name the field with the text: --field NAME"


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("parquet files need pyarrow: pip install 'pyarrow>=15'") from error
    return pyarrow.parquet


def _open_dataset(path: Path, field: str, split: str | None) -> Any:
    if not any((path / name).is_file() for name in _DATASET):
        raise ConfigurationError(
            f"{path} is a folder, but not a dataset that Dataset.save_to_disk wrote. For the files in it "
            f"give {path}/*.txt"
        )
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise ConfigurationError(f"{path} needs datasets: pip install 'datasets>=3.2'") from error
    found: Any = load_from_disk(str(path))
    if isinstance(found, DatasetDict):
        if split not in found:
            raise ConfigurationError(f"{path} has the splits {', '.join(map(str, found))}. Choose one: --split NAME")
        found = found[split]
    if field not in found.column_names:
        raise ConfigurationError(_no_field(field, str(path), found.column_names))
    return found.select_columns([field])

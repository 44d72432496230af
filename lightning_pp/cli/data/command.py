"""``lightning-pp-data``: makes a folder of tokens from text; ``data=tokens data.directory=FOLDER`` trains on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_pp.cli.data.sources import Source
from lightning_pp.errors import ConfigurationError
from lightning_pp.recipes.byte_text import find_files
from lightning_pp.recipes.encoders import find_tokenizer
from lightning_pp.recipes.token_files import TokenInfo, TokenWriter
from lightning_pp.versions import parser_of

_CHARACTERS_AT_ONCE = 1 << 22
_EPILOG = """\
A source is a text file (one document, or with --lines one per line), a .jsonl or .ndjson file, a .parquet file, or a
folder written by Dataset.save_to_disk of the library datasets. The folder of tokens appears when it is complete. An
interrupted command leaves nothing.

examples:
  lightning-pp-data corpus/*.txt --output corpus_bytes
  lightning-pp-data web.jsonl --field content --tokenizer llama/ --output web_tokens
  lightning-pp-data part-*.parquet --tokenizer tokenizer.json --end '<|endoftext|>' --output tokens
  lightning-pp recipe=gpt2_124m data=tokens data.directory=tokens
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    options = _parser().parse_args(arguments)
    try:
        info = make_tokens(options)
    except (ConfigurationError, OSError, ValueError) as error:
        sys.stderr.write(f"lightning-pp-data: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write(f"lightning-pp-data: interrupted. {options.output} was not made\n")
        sys.exit(130)
    sys.stdout.write(
        f"{options.output}: {info.num_tokens} tokens of {info.num_documents} documents, {info.dtype}, tokenizer "
        f"{info.tokenizer} with {info.vocab_size} tokens"
        + (f", of which {info.end} ends a document" if info.end is not None else "")
        + f"\nTrain on it: lightning-pp recipe=NAME data=tokens data.directory={options.output}\n"
    )


def make_tokens(options: argparse.Namespace) -> TokenInfo:
    """Do what the command line says.

    Raises:
        ConfigurationError: A source or the tokenizer cannot be read.
        OSError: A file is missing, or the folder exists.
        ValueError: The sources hold no text.
    """
    folders = [source for source in options.sources if Path(source).is_dir()]
    files = find_files([source for source in options.sources if source not in folders], "the sources")
    paths = [*map(Path, folders), *files]
    encoder = find_tokenizer(options.tokenizer, options.end)
    sources = [Source(path, options.field, options.lines, options.split) for path in paths]
    writer = TokenWriter(Path(options.output).expanduser(), encoder.vocab_size)
    try:
        with _progress_bar() as bar:
            for source in sources:
                task = bar.add_task(str(source.path), total=source.size, tokens=0)
                for texts in _chunks(source.documents(partial(bar.advance, task))):
                    writer.add(encoder.encode(texts))
                    bar.update(task, tokens=writer.num_tokens)
        return writer.finish(tokenizer=encoder.name, end=encoder.end, sources=[str(path) for path in paths])
    finally:
        writer.close()


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Several texts at a time, as many as are quick to encode together."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    more = (TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn())
    return Progress(*columns, *more, console=console, disable=not console.is_terminal)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("lightning-pp-data", __doc__, _EPILOG)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, patterns, or folders of datasets")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to make; must not exist")
    parser.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte (default), a tokenizer.json, or a directory with a tokenizer",
    )
    parser.add_argument(
        "--end",
        metavar="TOKEN",
        help="token after each document (default: the end token of a directory's tokenizer; '' for none)",
    )
    parser.add_argument("--field", default="text", help="field of JSON lines, parquet and datasets (default: text)")
    parser.add_argument("--lines", action="store_true", help="each line of a text file is a document")
    parser.add_argument("--split", help="split of a folder with several datasets")
    return parser


if __name__ == "__main__":
    main()

"""Where a checkpoint is: a path of this machine, or a URL that fsspec reads and writes.

Paths are :class:`pathlib.Path`. URLs (``s3://bucket/model.ckpt``) are :class:`upath.UPath`, which has the methods of a
path over fsspec: https://github.com/fsspec/universal_pathlib. What a path can do and an object store cannot, renames
above all, is asked for by :func:`is_remote` where it matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from fsspec import available_protocols
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from typing_extensions import TypeIs
from upath import UPath

from lightning_pp.errors import CheckpointError

Location: TypeAlias = Path | UPath
_OF_FILES_ONLY = ("http", "https")


def locate(path: str | os.PathLike[str] | UPath) -> Location:
    """The location of a path or URL.

    Raises:
        CheckpointError: The package that reads the URL is missing, or a URL went through :class:`pathlib.Path`.
    """
    text = str(path)
    protocol = get_protocol(text)
    if not is_url(text):
        _refuse_crushed_url(Path(text))
        return Path(text)
    try:
        _, stripped = url_to_fs(text)
    except ImportError as error:
        raise CheckpointError(f"{text} needs a package that is not installed here. {error}") from error
    except Exception as error:
        raise CheckpointError(f"{text} cannot be opened ({_text_of(error)}); give a path or a URL of fsspec") from error
    if protocol in ("file", "local"):
        return Path(stripped)
    return UPath(text)


def is_url(path: str) -> bool:
    """Whether a path is a URL of fsspec, also one of several filesystems (``simplecache::s3://``)."""
    return "://" in path or "::" in path


def is_remote(location: Location) -> TypeIs[UPath]:
    """Whether the location is a URL, so that folders cannot be renamed and files not be mapped."""
    return not isinstance(location, Path)


@contextmanager
def naming(location: Location, done: str) -> Iterator[None]:
    """In the block, what a remote storage raises becomes a :class:`CheckpointError` that names the URL.

    Args:
        location: What the body works on; errors at a path of this machine pass as they are.
        done: What the body does, as in "cannot be read".
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not is_remote(location):
            raise
        raise CheckpointError(f"{location} cannot be {done} ({_text_of(error)})") from error


def is_folder(location: Location) -> bool:
    """Whether there is a folder; in an object store, whether any name begins with the location's and a slash.

    Raises:
        CheckpointError: A remote storage does not answer.
    """
    return _kind(location) == "directory"


def is_file(location: Location) -> bool:
    """Whether there is a file; of a web server that is not asked, but taken to be so.

    Raises:
        CheckpointError: A remote storage does not answer.
    """
    return _kind(location) == "file"


def file_sizes(folder: Location) -> dict[str, int]:
    """The files in a folder by name, with their sizes in bytes; none if there is no folder.

    Raises:
        CheckpointError: A remote storage does not answer.
    """
    if isinstance(folder, Path):
        entries_here = os.scandir(folder) if folder.is_dir() else ()
        return {entry.name: entry.stat().st_size for entry in entries_here if entry.is_file()}
    with naming(folder, "listed"):
        try:
            folder.fs.invalidate_cache()
            entries: list[dict[str, Any]] = folder.fs.ls(folder.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {os.path.basename(entry["name"]): int(entry["size"]) for entry in entries if entry["type"] == "file"}


def names_in(folder: UPath) -> list[str]:
    """The names of files and folders in a remote folder; none if there is no folder.

    Raises:
        CheckpointError: The storage does not answer.
    """
    with naming(folder, "listed"):
        try:
            folder.fs.invalidate_cache()
            return [os.path.basename(name.rstrip("/")) for name in folder.fs.ls(folder.path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []


def put(content: bytes, file: UPath) -> None:
    """Write a remote file that appears whole or not at all.

    Raises:
        CheckpointError: It cannot be written.
    """
    with naming(file, "written"), file.fs.transaction, file.fs.open(file.path, "wb") as stream:
        stream.write(content)


def remove(location: UPath) -> None:
    """Remove a remote file or folder, if it is there.

    Raises:
        CheckpointError: It cannot be removed.
    """
    with naming(location, "removed"):
        if location.fs.exists(location.path):
            location.fs.rm(location.path, recursive=True)


@contextmanager
def on_disk(file: Location) -> Iterator[Path]:
    """A path of this machine with the content of a file: itself, or a download that is removed afterwards.

    What has been mapped into memory meanwhile stays readable.

    Raises:
        CheckpointError: A remote file is not there or cannot be read.
    """
    if isinstance(file, Path):
        yield file
        return
    with TemporaryDirectory(prefix="lightning_pp_", ignore_cleanup_errors=True) as folder:
        target = Path(folder) / file.name
        with naming(file, "read"):
            try:
                file.fs.get_file(file.path, os.fspath(target))
            except FileNotFoundError as error:
                raise CheckpointError(f"{file} does not exist; give the URL of a checkpoint") from error
        yield target


def _kind(location: Location) -> str | None:
    if isinstance(location, Path):
        return "directory" if location.is_dir() else "file" if location.is_file() else None
    if location.protocol in _OF_FILES_ONLY:
        return "file"  # reading it tells whether it is there; a folder is a page with links
    with naming(location, "looked up"):
        try:
            location.fs.invalidate_cache()  # other processes and threads write there
            kind: str = location.fs.info(location.path)["type"]
        except FileNotFoundError:
            return None
        return kind


def _refuse_crushed_url(path: Path) -> None:
    """A path with a part like ``s3:`` was a URL, and would be written to a folder of that name."""
    for part in path.parts:
        if part.endswith(":") and part[:-1] in available_protocols() and part[:-1] not in ("file", "local"):
            raise CheckpointError(
                f"{path} was a URL before pathlib turned its two slashes into one. Give the URL as a string, "
                f"{part}//..., everywhere (dirpath, default_root_dir, ckpt_path)"
            )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

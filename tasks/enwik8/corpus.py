"""What the bytes are: where they come from, whether they are the right ones, how they are split."""

from __future__ import annotations

import os
import platform
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

import numpy as np
import pooch
from jaxtyping import UInt8

from tasks.enwik8.reading import ChangingError, read_bytes
from tasks.locks import alone

SMALLEST_SIZE = 40  # 5 percent of it are 2 bytes: one to see and one to predict

BUILTIN_SIZE = 4_000_000
# Tests, and the character tables of encodings: neither reads like the rest, and the test split would hold them.
_NOT_LIBRARY = {"test", "tests", "idle_test", "encodings", "__pycache__"}

ENWIK8_URL = "https://mattmahoney.net/dc/enwik8.zip"
ENWIK8_ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_SIZE = 100_000_000
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"


class DataError(ValueError):
    """The data asked for are not there, not the right ones, or too few; the message says what to do."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of a file and their three splits, read-only.

    The splits follow each other in file order, are disjoint, and cover the file: 90, 5 and 5 percent
    of its bytes, each rounded down, with what is left over in ``test``. Enwik8 gives 90,000,000,
    5,000,000 and 5,000,000.

    Args:
        name: What to call the data in a report.
        path: The file.
        size: Its number of bytes.
        sha256: Its SHA-256, in hexadecimal.
        train: First split.
        validation: Second split.
        test: Third split.
    """

    name: str
    path: Path
    size: int
    sha256: str
    train: UInt8[np.ndarray, " train"] = field(repr=False)
    validation: UInt8[np.ndarray, " validation"] = field(repr=False)
    test: UInt8[np.ndarray, " test"] = field(repr=False)


def load_corpus(corpus: Literal["builtin", "enwik8", "file"] | None = None, path: Path | str | None = None) -> Corpus:
    """Find, check and split the bytes to train on.

    ==========  ====================================  ===========================================
    ``corpus``  without ``path``                      with ``path``
    ==========  ====================================  ===========================================
    left out    as ``"builtin"``                      as ``"enwik8"`` if the file is called that,
                                                      else as ``"file"``
    "builtin"   text of Python's standard library     refused
    "enwik8"    downloaded once (36 MB), then cached  the file, which must be Enwik8
    "file"      refused                               the file, whatever it holds
    ==========  ====================================  ===========================================

    What is made or downloaded is kept in the folder that the environment variable ``LINROPE_CACHE``
    names, else in the user's cache folder.

    Args:
        corpus: Which bytes.
        path: A file to read them from.

    Raises:
        DataError: ``corpus`` and ``path`` do not go together; the file is missing, unreadable, too
            small to split, or not Enwik8 where it should be; the download failed; or the cache
            folder cannot be written.
    """
    if corpus not in (None, "builtin", "enwik8", "file"):
        raise DataError(f"--data.corpus is one of builtin, enwik8, file; got {corpus!r}")
    if path is None:
        if corpus == "file":
            raise DataError("--data.corpus=file needs the file: give --data.path")
        if corpus == "enwik8":
            return _open("enwik8", _download_enwik8(), must_be_enwik8=True)
        return _open(f"Python {platform.python_version()} standard library", _write_builtin())
    if corpus == "builtin":
        raise DataError(f"--data.corpus=builtin reads no file, but --data.path is {path}: leave one of them out")
    path = Path(path).expanduser()
    if corpus == "enwik8" or (corpus is None and path.name == "enwik8"):
        return _open("enwik8", path, must_be_enwik8=True)
    return _open(path.name, path)


def _open(name: str, path: Path, *, must_be_enwik8: bool = False) -> Corpus:
    """Read the file at ``path``, check it and split it."""
    try:
        if not path.exists():
            raise DataError(f"no file at {path}: check --data.path, or leave it out for the built-in text")
        if not path.is_file():
            raise DataError(f"{path} is not a file: --data.path takes one file of bytes")
        data, sha256 = read_bytes(path, _cache_folder() / "hashes.json")
        size = len(data)
        if must_be_enwik8 and (size, sha256) != (ENWIK8_SIZE, ENWIK8_SHA256):
            raise DataError(
                f"{path} is not Enwik8: expected {ENWIK8_SIZE:,} bytes with SHA-256 {ENWIK8_SHA256}, "
                f"got {size:,} bytes with SHA-256 {sha256}. Delete it and download it again ({ENWIK8_URL}), "
                f"or use the bytes as they are with --data.path={path} --data.corpus=file"
            )
        if size < SMALLEST_SIZE:
            raise DataError(f"{path} holds {size} bytes: splits of 90, 5 and 5 percent need at least {SMALLEST_SIZE}")
    except ChangingError as error:
        raise DataError(
            f"{path} cannot be trusted yet: {error}. Wait until it is whole, then give the command again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    train, validation = size * 90 // 100, size * 5 // 100
    splits = data[:train], data[train : train + validation], data[train + validation :]
    return Corpus(name, path, size, sha256, *splits)


def library_files(library: Path) -> Iterator[Path]:
    """Yield the standard library's module sources: the help topics, then the rest by relative path."""
    topics = library / "pydoc_data" / "topics.py"  # prose, the nearest thing to an encyclopedia in there
    if topics.is_file():
        yield topics
    found: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(library):
        # Only identifiers can be imported: this leaves out site-packages and the build's own
        # config-3.x-<platform>, which differ between machines.
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name not in _NOT_LIBRARY]
        for name in names:
            file = Path(folder, name)
            is_module = file.suffix == ".py" and file.stem.isidentifier()
            if is_module and not name.startswith("_sysconfigdata") and file != topics:
                found.append((file.relative_to(library).as_posix(), file))
    for _, file in sorted(found):
        yield file


def _builtin_text() -> bytes:
    """Return the first ``BUILTIN_SIZE`` bytes of the running Python's standard library, or all it has."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in library_files(library):
        text += file.read_bytes()
        if len(text) >= BUILTIN_SIZE:
            break
    if not text:
        raise DataError(f"this Python has no library sources in {library}: give a file with --data.path")
    return bytes(text[:BUILTIN_SIZE])


def _write_builtin() -> Path:
    """Make the built-in text exist as a file, and return its path."""
    text = _builtin_text()
    path = _cache_folder() / f"python-{platform.python_version()}-library-{len(text)}.txt"

    def right() -> bool:
        # Compared in full: a Python built elsewhere may have other bytes under the same version.
        return path.is_file() and path.read_bytes() == text

    return _made_once(path, right, lambda: _write_aside(path, [text]))


def _download_enwik8() -> Path:
    """Make Enwik8 exist as a file, and return its path."""
    path = _cache_folder() / "enwik8"

    def there() -> bool:
        # A whole file only ever gets this name by renaming, so the size tells; the caller checks the hash.
        return path.is_file() and path.stat().st_size == ENWIK8_SIZE

    return _made_once(path, there, lambda: _download(path))


def _download(path: Path) -> None:
    pooch.get_logger().setLevel("WARNING")
    try:
        archive = pooch.retrieve(
            ENWIK8_URL,
            known_hash=f"sha256:{ENWIK8_ZIP_SHA256}",
            fname="enwik8.zip",
            path=path.parent,
            progressbar=True,
        )
    except (OSError, ValueError) as error:  # no network, a refusal, a full disk; a wrong hash
        raise DataError(
            f"could not download {ENWIK8_URL} to {path.parent}: {error}. Download it elsewhere, unpack it "
            "and give the file with --data.path, or leave out --data.corpus to use the built-in text"
        ) from error
    # Not pooch.Unzip: it unpacks in place, so a killed run would leave half a file under the final name.
    with zipfile.ZipFile(archive) as members, members.open("enwik8") as member:
        _write_aside(path, iter(lambda: member.read(1 << 20), b""))


def _made_once(path: Path, is_there: Callable[[], bool], make: Callable[[], None]) -> Path:
    """Make a file of the cache unless it is there; of several processes one does, the others wait."""
    if is_there():  # also in a folder that cannot be written
        return path
    _make_folder(path.parent)
    try:
        with alone(path.with_name(f".{path.name}.lock"), f"another process is making {path}"):
            if not is_there():
                make()
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    return path


def _cache_folder() -> Path:
    return Path(os.environ.get("LINROPE_CACHE") or pooch.os_cache("linrope")).expanduser()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write_aside(path: Path, pieces: Iterable[bytes]) -> None:
    """Write under a name of our own, then rename: nobody ever sees half a file, nor two writers' mix."""
    _make_folder(path.parent)
    aside = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        with aside.open("xb") as file:
            file.writelines(pieces)
        os.replace(aside, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    finally:
        aside.unlink(missing_ok=True)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache folder {folder} cannot be written: {error}. "
        "Set the environment variable LINROPE_CACHE to a folder that can, or give a file with --data.path"
    )

import hashlib
import os
import pydoc_data.topics
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pooch
import pytest
import requests

from tasks.enwik8 import corpus as corpus_module
from tasks.enwik8 import reading
from tasks.enwik8.corpus import BUILTIN_SIZE, ENWIK8_SHA256, DataError, library_files, load_corpus

REPO = Path(__file__).parents[1]
PREFIX = REPO.parent / "shared" / "data" / "enwik8_prefix_3mb"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LINROPE_CACHE", str(folder))
    return folder


def files(cache):
    """What the cache keeps, but for locks and remembered hashes."""
    return [name for name in os.listdir(cache) if not name.startswith(".") and name != "hashes.json"]


@pytest.fixture(autouse=True)
def _no_watching(monkeypatch):
    """Files that have just been made are read at once; the tests of that very thing say otherwise."""
    monkeypatch.setattr(reading, "_WATCH_SECONDS", 0.0)


@pytest.fixture
def small_enwik8(tmp_path, monkeypatch):
    """A file of 2,000 bytes that the size and hash of Enwik8 are made to describe."""
    content = np.random.default_rng(0).integers(256, size=2000).astype(np.uint8).tobytes()
    monkeypatch.setattr(corpus_module, "ENWIK8_SIZE", len(content))
    monkeypatch.setattr(corpus_module, "ENWIK8_SHA256", hashlib.sha256(content).hexdigest())
    path = tmp_path / "enwik8"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size", [40, 41, 59, 60, 99, 100, 101, 1999, 100_003])
def test_splits_are_disjoint_in_file_order_and_cover_the_file(tmp_path, size):
    content = np.random.default_rng(size).integers(256, size=size).astype(np.uint8).tobytes()
    path = tmp_path / "some.bin"
    path.write_bytes(content)
    corpus = load_corpus(path=path)
    assert b"".join(split.tobytes() for split in (corpus.train, corpus.validation, corpus.test)) == content
    assert (len(corpus.train), len(corpus.validation)) == (size * 90 // 100, size * 5 // 100)
    assert min(len(corpus.validation), len(corpus.test)) >= 2
    assert (corpus.name, corpus.path, corpus.size) == ("some.bin", path, size)
    assert corpus.sha256 == hashlib.sha256(content).hexdigest()


def test_splits_are_read_only_bytes(tmp_path):
    path = tmp_path / "some.bin"
    path.write_bytes(bytes(100))
    for split in (load_corpus(path=path).train, load_corpus(path=path).test):
        assert split.dtype == np.uint8
        with pytest.raises(ValueError, match="read-only"):
            split[0] = 1


def test_a_hundred_million_bytes_split_into_90_5_and_5_million(tmp_path):
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    corpus = load_corpus(path=path)
    assert [len(s) for s in (corpus.train, corpus.validation, corpus.test)] == [90_000_000, 5_000_000, 5_000_000]


@pytest.mark.skipif(not PREFIX.exists(), reason="the Enwik8 prefix is not at ../shared/data")
def test_real_enwik8_bytes_are_read_as_published():
    corpus = load_corpus(path=PREFIX)
    # SHA-256 of enwik6, the first million bytes.
    published = "369b688978f649681136198fb96db14c1616756260c55fb4b65e9bc049552cad"
    assert hashlib.sha256(corpus.train[:1_000_000].tobytes()).hexdigest() == published
    assert [len(s) for s in (corpus.train, corpus.validation, corpus.test)] == [2_700_000, 150_000, 150_000]


@pytest.mark.parametrize("corpus", [None, "enwik8"])
def test_the_right_enwik8_is_accepted(small_enwik8, corpus):
    loaded = load_corpus(corpus, small_enwik8)
    assert (loaded.name, loaded.size, len(loaded.train)) == ("enwik8", 2000, 1800)


def test_a_corrupted_enwik8_is_refused_unless_taken_as_a_plain_file(small_enwik8):
    right = corpus_module.ENWIK8_SHA256
    content = bytearray(small_enwik8.read_bytes())
    content[1234] ^= 1
    small_enwik8.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_corpus(path=small_enwik8)
    for part in (str(small_enwik8), right, hashlib.sha256(content).hexdigest(), "--data.corpus=file"):
        assert part in str(caught.value)
    assert load_corpus("file", small_enwik8).size == 2000


@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize(("corpus", "name"), [(None, "enwik8"), ("enwik8", "other")])
def test_a_truncated_enwik8_is_refused(tmp_path, corpus, name, size):
    path = tmp_path / name
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"(?s){path}.*100,000,000.*{ENWIK8_SHA256}.*{size:,} bytes.*download"):
        load_corpus(corpus, path)


def test_enwik8_is_downloaded_unpacked_and_kept(tmp_path, cache, small_enwik8, monkeypatch):
    archive = tmp_path / "enwik8.zip"
    with zipfile.ZipFile(archive, "w") as members:
        members.write(small_enwik8, "enwik8")
    asked = []

    def retrieve(url, known_hash, **_):
        asked.append((url, known_hash))
        return str(archive)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    for _ in range(2):
        corpus = load_corpus("enwik8")
        assert corpus.path.read_bytes() == small_enwik8.read_bytes()
        assert corpus.name == "enwik8"
    assert asked == [(corpus_module.ENWIK8_URL, f"sha256:{corpus_module.ENWIK8_ZIP_SHA256}")]
    assert files(cache) == ["enwik8"]


def test_without_a_network_the_message_says_how_to_go_on(cache, monkeypatch):
    def retrieve(*_, **__):
        raise requests.exceptions.ConnectionError("name not resolved")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError) as caught:
        load_corpus("enwik8")
    for part in ("https://mattmahoney.net/dc/enwik8.zip", "name not resolved", "--data.path", "--data.corpus"):
        assert part in str(caught.value)


def test_builtin_text_is_the_librarys_and_always_the_same(cache):
    corpus = load_corpus()
    content = corpus.path.read_bytes()
    topics = Path(pydoc_data.topics.__file__).read_bytes()
    assert corpus.size == len(content) == BUILTIN_SIZE == 4_000_000
    assert content[: len(topics)] == topics
    assert content.find(topics[:1000], 1) == -1, "the topics come once"
    assert corpus.name == "Python {}.{}.{} standard library".format(*sys.version_info)
    assert files(cache) == [corpus.path.name]
    corpus.path.unlink()
    assert load_corpus("builtin").sha256 == corpus.sha256 == hashlib.sha256(content).hexdigest()


def test_builtin_file_is_kept_when_right_and_made_anew_when_not(cache):
    first = load_corpus()
    made = first.path.stat().st_mtime_ns
    assert load_corpus().path.stat().st_mtime_ns == made
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-1] + b"\0")
    assert load_corpus().path.read_bytes() == content


def test_builtin_text_can_be_made_by_two_processes_at_once(cache):
    program = "from tasks.enwik8.corpus import load_corpus; print(load_corpus().sha256)"
    makers = [
        subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = {maker.communicate(timeout=120)[0].strip() for maker in makers}
    assert printed == {load_corpus().sha256}
    assert len(files(cache)) == 1


def test_library_files_leave_out_tests_packages_and_what_differs_between_machines(tmp_path):
    kept = ["pydoc_data/topics.py", "a.py", "email/b.py", "pydoc_data/c.py", "z.py"]
    left_out = [
        *("site-packages/d.py", "test/e.py", "lib2to3/tests/f.py", "idlelib/idle_test/g.py", "encodings/cp1.py"),
        *("__pycache__/h.py", "config-3.11-x86_64/i.py", "_sysconfigdata__linux_.py", "python-config.py", "j.txt"),
    ]
    for name in kept + left_out:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert [file.relative_to(tmp_path).as_posix() for file in library_files(tmp_path)] == kept


@pytest.mark.parametrize("corpus", ["builtin", "enwik8"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, corpus):
    occupied = tmp_path / "occupied"
    occupied.touch()
    monkeypatch.setenv("LINROPE_CACHE", str(occupied))
    with pytest.raises(DataError, match=rf"{occupied} cannot be written.*LINROPE_CACHE"):
        load_corpus(corpus)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache, monkeypatch):
    path = load_corpus().path
    path.write_bytes(b"old")

    def replace(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DataError, match="disk full"):
        load_corpus()
    assert path.read_bytes() == b"old"
    assert files(cache) == [path.name]


@pytest.mark.parametrize("size", [0, 1, 39])
def test_a_file_too_small_to_split_is_refused(tmp_path, size):
    path = tmp_path / "small"
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"{path} holds {size} bytes.*at least 40"):
        load_corpus(path=path)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=f"no file at {tmp_path / 'missing'}"):
        load_corpus(path=tmp_path / "missing")
    with pytest.raises(DataError, match=f"{tmp_path} is not a file"):
        load_corpus(path=tmp_path)


@pytest.mark.parametrize(
    ("corpus", "path", "message"),
    [
        ("file", None, "needs the file: give --data.path"),
        ("builtin", "some.bin", "leave one of them out"),
        ("text8", None, "builtin, enwik8, file; got 'text8'"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(corpus, path, message):
    with pytest.raises(DataError, match=message):
        load_corpus(corpus, path)


# --- files that others write


@pytest.fixture
def long_ago(monkeypatch):
    """The time of change cannot be set back, so what counts as long ago moves instead."""
    monkeypatch.setattr(reading, "_FRESH_SECONDS", -1.0)


@pytest.fixture
def hashed(monkeypatch):
    """Sizes of what has been hashed."""
    sizes = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(reading.hashlib, "sha256", lambda data: sizes.append(len(data)) or sha256(data))
    return sizes


@pytest.mark.usefixtures("cache", "long_ago")
def test_the_hash_is_computed_once_while_the_file_stays_as_it_is(tmp_path, hashed):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    first = load_corpus(path=path)
    assert load_corpus(path=path).sha256 == first.sha256 == hashlib.sha256(bytes(range(100))).hexdigest()
    assert hashed == [100, 100]  # once by the corpus, once here above


@pytest.mark.usefixtures("cache", "long_ago")
@pytest.mark.parametrize(
    "how", ["overwritten", "grown", "overwritten with its times", "replaced", "replaced with its times"]
)
def test_a_changed_file_is_hashed_again(tmp_path, how):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))
    first, status = load_corpus(path=path), path.stat()
    content = bytes(101) if how == "grown" else bytes([1]) * 100
    if how.startswith("replaced"):
        (tmp_path / "other").write_bytes(content)
        os.replace(tmp_path / "other", path)
    else:
        path.write_bytes(content)
    if how.endswith("with its times"):
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_corpus(path=path)
    assert second.sha256 == hashlib.sha256(content).hexdigest() != first.sha256


@pytest.mark.usefixtures("cache")
def test_a_file_just_written_is_not_remembered(tmp_path, hashed):
    """Two changes within one tick of the clock have the same times."""
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))
    load_corpus(path=path)
    load_corpus(path=path)
    assert hashed == [100, 100]


@pytest.mark.usefixtures("long_ago")
@pytest.mark.parametrize("damage", ["{", "[1]", '{"x": 1}', '{"x": [1]}', "unwritable"])
def test_a_damaged_memory_of_hashes_costs_time_alone(tmp_path, cache, damage):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))
    cache.mkdir()
    if damage == "unwritable":
        (cache / "hashes.json").mkdir()
    else:
        (cache / "hashes.json").write_text(damage)
    for _ in range(2):
        assert load_corpus(path=path).sha256 == hashlib.sha256(bytes(100)).hexdigest()


@pytest.mark.usefixtures("cache")
def test_a_file_that_is_still_being_downloaded_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))

    def more(seconds):
        with path.open("ab") as file:
            file.write(bytes(50))

    monkeypatch.setattr(reading.time, "sleep", more)
    with pytest.raises(DataError, match=rf"{path} cannot be trusted yet: .*100 bytes a moment ago, 150 now.*Wait"):
        load_corpus(path=path)


@pytest.mark.usefixtures("cache", "long_ago")
@pytest.mark.parametrize("change", [b"", bytes([7]) * 100, bytes(1000)])
def test_a_file_changed_while_it_is_read_is_refused(tmp_path, monkeypatch, change):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))
    read = np.fromfile

    def interrupted(*arguments, **options):
        data = read(*arguments, **options)
        path.write_bytes(change)
        return data

    monkeypatch.setattr(reading.np, "fromfile", interrupted)
    with pytest.raises(DataError, match="cannot be trusted yet"):
        load_corpus(path=path)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("change", ["truncated", "overwritten", "deleted"])
def test_what_happens_to_the_file_later_changes_nothing(tmp_path, change):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    corpus = load_corpus(path=path)
    if change == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"" if change == "truncated" else bytes(100))
    assert bytes(corpus.train) + bytes(corpus.validation) + bytes(corpus.test) == bytes(range(100))


def test_a_cache_that_is_read_only_serves_what_it_has(cache, monkeypatch):
    first = load_corpus()

    def refuse(*_, **__):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(reading, "write_whole", refuse)
    assert load_corpus().sha256 == first.sha256


def test_one_of_two_processes_downloads_and_the_other_waits(tmp_path, cache):
    """The download takes a second and notes each start; both processes then read the same file."""
    content = bytes(range(250)) * 8
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as members:
        members.writestr("enwik8", content)
    program = f"""
import hashlib, pathlib, time, pooch
from tasks.enwik8 import corpus
corpus.ENWIK8_SIZE, corpus.ENWIK8_SHA256 = {len(content)}, "{hashlib.sha256(content).hexdigest()}"
def retrieve(*_, **__):
    with open(r"{tmp_path / "starts"}", "a") as file:
        file.write("start\\n")
    time.sleep(1)
    return r"{tmp_path / "enwik8.zip"}"
pooch.retrieve = retrieve
print(corpus.load_corpus("enwik8").sha256)
"""
    both = [
        subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in both]
    assert {words[-1] for words in printed} == {hashlib.sha256(content).hexdigest()}
    assert (tmp_path / "starts").read_text() == "start\n"

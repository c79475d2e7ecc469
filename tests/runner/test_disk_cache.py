"""Bytes by key on disk: what comes back is what was put there by this user, whole, or nothing."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import stat
import subprocess
import sys
import time

import pytest

from jaxinfer.runner.disk_cache import STALE_S, DiskCache

WRITER = """
import sys
from pathlib import Path
from jaxinfer.runner.disk_cache import DiskCache
cache = DiskCache.open(Path(sys.argv[1]))
for i in range(200):
    cache.put("key", sys.argv[2].encode() * 20_000)
    data = cache.get("key")
    assert data is not None and len(set(data)) == 1 and len(data) == 20_000, "an entry of two writers, or of none"
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "made" / "steps"


@pytest.fixture
def cache(folder):
    return DiskCache.open(folder)


def test_what_was_put_comes_back_and_the_folder_is_for_its_user_alone(cache, folder):
    assert cache.get("a") is None
    cache.put("a", b"one")
    cache.put("b", b"")
    cache.put("a", b"two")
    assert (cache.get("a"), cache.get("b")) == (b"two", b"")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def damage_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit": damage_a_bit,
    "the end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "all": lambda path: path.write_bytes(b""),
    "its header": lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
    "more than all": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_deleted_with_a_word_and_never_given_out(cache, folder, damage, caplog):
    cache.put("a", b"one two three")
    DAMAGES[damage](folder / "a")
    with caplog.at_level(logging.WARNING):
        assert cache.get("a") is None
    assert "steps/a is discarded: its" in caplog.text and "bytes are damaged" in caplog.text
    assert not list(folder.iterdir())
    cache.put("a", b"again")
    assert cache.get("a") == b"again"


def test_entry_under_the_name_of_another_is_no_entry(cache, folder):
    cache.put("a", b"one")
    (folder / "a").rename(folder / "b")
    assert cache.get("b") is None and not list(folder.iterdir())


def test_entry_that_others_can_write_to_or_that_is_a_link_is_not_read(cache, folder, tmp_path, caplog):
    cache.put("a", b"one")
    (folder / "a").chmod(0o666)
    cache.put("b", b"two")
    (folder / "b").rename(tmp_path / "elsewhere")
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert (cache.get("a"), cache.get("b")) == (None, None)
    assert "others can write to it" in caplog.text
    assert not list(folder.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_can_write_to_is_refused_with_the_way_out(folder, mode, caplog):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert DiskCache.open(folder) is None
    assert f"others can write to {folder} (owner {os.geteuid()}, mode {mode:o})" in caplog.text
    assert "chmod 700" in caplog.text


def test_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert DiskCache.open(tmp_path / "file" / "steps") is None
    assert "compiled steps are not kept: " in caplog.text


def test_disk_that_cannot_be_written_to_is_a_warning(cache, folder, caplog):
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        cache.put("a", b"one")
    assert "a compiled step is not kept: " in caplog.text
    assert cache.get("a") is None


def test_what_was_used_least_recently_makes_room(folder):
    cache = DiskCache.open(folder, max_bytes=3500)
    for name in "abc":
        cache.put(name, b"x" * 1000)
        time.sleep(0.02)  # file systems tell times apart by 4 to 10 ms
    assert cache.get("a") is not None
    time.sleep(0.02)
    cache.put("d", b"x" * 1000)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3500


def test_entry_larger_than_the_limit_is_not_kept_and_costs_no_other(folder, caplog):
    cache = DiskCache.open(folder, max_bytes=2000)
    cache.put("a", b"x" * 1000)
    with caplog.at_level(logging.WARNING):
        cache.put("b", b"x" * 2000)
    assert "is not kept: the limit of" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_file_of_a_writer_that_died_is_deleted_in_the_end(cache, folder):
    (folder / ".dead").write_bytes(b"x")
    (folder / ".alive").write_bytes(b"x")
    os.utime(folder / ".dead", (0, time.time() - STALE_S - 1))
    cache.put("a", b"one")
    assert sorted(path.name for path in folder.iterdir()) == [".alive", "a"]


def test_two_processes_that_write_at_once_leave_a_whole_entry_of_one(folder):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), letter]) for letter in "xy"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert DiskCache.open(folder).get("key") in (b"x" * 20_000, b"y" * 20_000)
    assert [path.name for path in folder.iterdir()] == ["key"]


def test_threads_may_share_a_cache_that_is_making_room(folder):
    cache = DiskCache.open(folder, max_bytes=10_000)

    def use(i: int) -> None:
        cache.put(str(i), bytes([i]) * 1000)
        assert cache.get(str(i)) in (None, bytes([i]) * 1000)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(100)))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10_000


def test_folder_or_pipe_in_the_place_of_an_entry_is_none_and_does_no_harm(tmp_path, caplog):
    cache = DiskCache.open(tmp_path / "kept", max_bytes=200)
    (tmp_path / "kept" / "folder").mkdir()
    os.mkfifo(tmp_path / "kept" / "pipe")
    assert cache.get("folder") is None and cache.get("pipe") is None
    assert "folder is discarded: it is no file" in caplog.text
    cache.put("folder", b"x")
    for key in ("a", "b", "c"):
        cache.put(key, b"y" * 60)
    assert cache.get("a") is None and cache.get("c") == b"y" * 60

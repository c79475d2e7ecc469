"""The disk tier's files: what was written is what is read, and nothing else is."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import ConfigError
from jaxinfer.runner import page_file
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.scheduler.plan import DiskPage, page_key

MODEL = "0123456789abcdef" * 4
SHAPE = (2, 3, 4)


@pytest.fixture
def open_pages(tmp_path):
    """Opens the folder `kv`; whoever had it before is closed first, as by a restart."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            stack.close()
            given = {"fingerprint": MODEL, "page_shape": SHAPE, "dtype": "float32"} | settings
            made = DiskPages.open(tmp_path / "kv", **given)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def pages(open_pages):
    return open_pages()


def page(*tokens, parent=None, salt="", model=MODEL):
    above = None if parent is None else parent.key
    return DiskPage(page_key(model, salt, above, tokens), above, salt, tokens)


def data(seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32).astype(np.dtype(dtype))


def file_of(pages, one):
    return pages.folder / "pages" / one.key


def equal(left, right):
    return left is not None and left.dtype == right.dtype and left.tobytes() == right.tobytes()


FIRST = page(1, 2)
SECOND = page(3, 4, parent=FIRST)
THIRD = page(5, 6, parent=SECOND)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_page_is_read_as_it_was_written_also_after_a_restart(open_pages, dtype):
    pages = open_pages(dtype=dtype)
    pages.write(FIRST, data(1, dtype))
    pages.write(SECOND, data(2, dtype))
    assert equal(pages.read(FIRST.key), data(1, dtype))
    pages = open_pages(dtype=dtype)
    assert pages.pages() == [FIRST, SECOND]
    assert equal(pages.read(FIRST.key), data(1, dtype)) and equal(pages.read(SECOND.key), data(2, dtype))


def test_a_page_is_written_from_a_strided_array_and_read_into_one_that_is_given(pages):
    strided = np.zeros((*SHAPE, 2), np.float32)[..., 0]
    strided[:] = data()
    pages.write(FIRST, strided)
    out = np.zeros(SHAPE, np.float32)
    assert pages.read(FIRST.key, out) is out and equal(out, data())
    for wrong in (out.reshape(3, 2, 4), out.astype(np.float16), strided):
        with pytest.raises(ValueError, match=r"it must be float32\[2, 3, 4\], and contiguous"):
            pages.read(FIRST.key, wrong)


def test_a_key_depends_on_model_salt_parent_and_tokens_and_on_where_one_ends():
    keys = [
        page_key(MODEL, "", None, (1, 2)),
        page_key("f" * 64, "", None, (1, 2)),
        page_key(MODEL, "a", None, (1, 2)),
        page_key(MODEL, "", FIRST.key, (1, 2)),
        page_key(MODEL, FIRST.key, None, (1, 2)),
        page_key(MODEL, "null", None, (1, 2)),
        page_key(MODEL, "", None, (12,)),
        page_key(MODEL, "", None, (1, 2, 0)),
        page_key(MODEL, '",null,[1', None, (1, 2)),
    ]
    assert len(set(keys)) == len(keys) and all(len(key) == 64 for key in keys)
    assert page_key(MODEL, "", None, [1, 2]) == keys[0]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=64).map(tuple),
    salt=st.text(st.characters(), max_size=300),
    parent=st.none() | st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}"),
)
def test_a_header_says_the_page_again(tokens, salt, parent):
    layout = page_file.PageLayout(MODEL, (2,), np.dtype("bfloat16"))
    one = DiskPage(page_key(MODEL, salt, parent, tokens), parent, salt, tokens)
    header, content = page_file.encode(layout, one, np.ones(2, layout.dtype))
    assert len(header) % page_file.BLOCK_BYTES == 0
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(header + bytes(content))
        file.seek(0)
        assert page_file.read_header(file, layout)[::2] == (one, len(header))


def test_every_changed_byte_is_noticed(open_pages, caplog):
    pages = open_pages(page_shape=(2,))
    path = file_of(pages, FIRST)
    pages.write(FIRST, np.ones(2, np.float32))
    good = path.read_bytes()
    for i in range(len(good)):
        pages.write(FIRST, np.ones(2, np.float32))
        path.write_bytes(good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :])
        path.chmod(0o600)
        assert pages.read(FIRST.key) is None, f"byte {i} of {len(good)}"
        assert not path.exists() and pages.num_bytes == 0
    assert len(caplog.records) == len(good)


def test_a_file_that_is_cut_or_too_long_is_noticed_when_read_and_at_a_start(open_pages):
    pages = open_pages(page_shape=(2,))
    pages.write(FIRST, np.ones(2, np.float32))
    good = file_of(pages, FIRST).read_bytes()
    for size in (*range(0, len(good), 7), *range(len(good) - 20, len(good)), len(good) + 1):
        for read in (lambda: pages.read(FIRST.key), lambda: pages.pages() or None):
            pages.write(FIRST, np.ones(2, np.float32))
            file_of(pages, FIRST).write_bytes((good + b"x")[:size])
            assert read() is None, f"{size} of {len(good)} bytes"
            assert not file_of(pages, FIRST).exists()


def test_a_page_in_the_place_of_another_is_not_read(open_pages, caplog):
    pages = open_pages()
    for one in (FIRST, SECOND):
        pages.write(one, data())
    os.replace(file_of(pages, SECOND), file_of(pages, FIRST))
    assert pages.read(FIRST.key) is None
    assert f"it holds page {SECOND.key}, not {FIRST.key}" in caplog.text
    assert pages.read(SECOND.key) is None
    assert "is gone from" in caplog.text
    assert pages.read(THIRD.key) is None
    assert f"page {THIRD.key} is not in" in caplog.text


def test_data_of_another_shape_or_dtype_or_a_wrong_key_is_refused(pages):
    with pytest.raises(ValueError, match=r"page float32\[24\]; this folder's are float32\[2, 3, 4\]"):
        pages.write(FIRST, data().reshape(-1))
    with pytest.raises(ValueError, match=r"page float16\[2, 3, 4\]"):
        pages.write(FIRST, data(dtype="float16"))
    with pytest.raises(ValueError, match="is not that of its 2 tokens"):
        pages.write(FIRST._replace(tokens=(7, 8)), data())
    for key in ("../lock", "a" * 63, FIRST.key.upper(), FIRST.key + "\n"):
        with pytest.raises(ValueError, match="is not 64 hexadecimal digits"):
            pages.remove(key)


def test_pages_of_another_version_model_or_shape_are_skipped_and_stay(open_pages, caplog, monkeypatch):
    pages = open_pages()
    with monkeypatch.context() as patch:
        patch.setattr(page_file, "VERSION", 2)
        pages.write(FIRST, data())
    near = MODEL[:16] + "f" * 48  # shares the folder
    other = page(1, 2, model=near)
    open_pages(fingerprint=near).write(other, data())
    open_pages(page_shape=(4, 3, 2)).write(page(9), data().reshape(4, 3, 2))
    open_pages(dtype="float16").write(page(10), data(dtype="float16"))
    pages = open_pages()
    file_of(pages, FIRST).with_name("notes.txt").write_text("mine")
    assert pages.pages() == [] and pages.num_bytes == 0
    assert len(list((pages.folder / "pages").iterdir())) == 5
    told = sorted(record.getMessage().split(": ", 1)[1].split("; ")[0] for record in caplog.records)
    assert told == [
        "1 files are no pages",
        "1 files are of another model",
        "1 files are of another version of jaxinfer",
        "2 files are of another page size or dtype",
    ]
    assert "it is of version 2, not 1" in caplog.text and "it holds float" in caplog.text
    assert open_pages(fingerprint="e" * 64).pages() == []


def test_damaged_pages_and_those_behind_them_are_deleted_at_a_start(open_pages, caplog):
    pages = open_pages()
    for one in (FIRST, SECOND, THIRD, page(8)):
        pages.write(one, data())
    path = file_of(pages, SECOND)
    path.write_bytes(path.read_bytes().replace(b"parent", b"pArent"))
    assert pages.pages() == [FIRST, page(8)] or pages.pages() == [page(8), FIRST]
    assert not path.exists() and not file_of(pages, THIRD).exists()
    assert "1 files are damaged, and deleted; one is" in caplog.text
    assert "1 files are deleted, as the page before them is not there" in caplog.text
    assert pages.num_pages == 2
    caplog.clear()
    assert len(pages.pages()) == 2 and not caplog.records


def test_a_file_that_others_can_write_to_a_link_and_a_pipe_are_not_read(pages, caplog):
    for one in (FIRST, page(8)):
        pages.write(one, data())
    file_of(pages, FIRST).chmod(0o622)
    path = file_of(pages, page(8))
    os.replace(path, path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    os.mkfifo(file_of(pages, page(9)), 0o600)
    assert pages.read(FIRST.key) is None and pages.read(page(8).key) is None
    assert "others can write to it" in caplog.text
    assert pages.pages() == [] and "3 files are unreadable" in caplog.text


def test_parents_come_first_and_then_what_was_used_least_recently(open_pages):
    pages = open_pages()
    other = page(7)
    for number, one in enumerate((THIRD, other, SECOND, FIRST)):
        pages.write(one, data())
        os.utime(file_of(pages, one), ns=(number, number))
    assert pages.pages() == [other, FIRST, SECOND, THIRD]
    pages.read(other.key)
    assert open_pages().pages() == [FIRST, SECOND, THIRD, other]


def test_bytes_are_counted_as_pages_come_and_go(open_pages):
    size = 4096 + 96
    pages = open_pages()
    assert pages.num_bytes == 0
    for one in (FIRST, SECOND, FIRST):
        pages.write(one, data())
    assert pages.num_bytes == 2 * size == sum(path.stat().st_size for path in (pages.folder / "pages").iterdir())
    pages = open_pages()
    assert pages.num_bytes == 0 and len(pages.pages()) == 2 and pages.num_bytes == 2 * size
    for _ in range(2):
        pages.remove(SECOND.key)
    assert pages.num_bytes == size and pages.read(SECOND.key) is None
    long_salt = page(1, salt="\N{SNOWMAN}" * 2000)
    pages.write(long_salt, data())
    assert pages.num_bytes == size + 4 * 4096 + 96 and equal(pages.read(long_salt.key), data())


def test_two_servers_of_a_model_do_not_share_a_folder_but_two_models_do(tmp_path):
    settings = {"page_shape": SHAPE, "dtype": "float32"}
    first = DiskPages.open(tmp_path, fingerprint=MODEL, **settings)
    with pytest.raises(ConfigError, match=rf"another server of this model uses {tmp_path}.*another --kv-disk-dir"):
        DiskPages.open(tmp_path, fingerprint=MODEL, **settings)
    DiskPages.open(tmp_path, fingerprint="a" * 64, **settings).close()
    first.close()
    first.close()
    DiskPages.open(tmp_path, fingerprint=MODEL, **settings).close()


def test_the_lock_of_a_server_that_was_killed_is_free(tmp_path):
    code = (
        "import sys, pathlib, os, signal; from jaxinfer.runner.disk_pages import DiskPages\n"
        f"p = DiskPages.open(pathlib.Path(sys.argv[1]), fingerprint={MODEL!r}, page_shape=(1,), dtype='bfloat16', "
        "); assert 'jax' not in sys.modules; os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-9, "")
    DiskPages.open(tmp_path, fingerprint=MODEL, page_shape=(1,), dtype="bfloat16").close()


def test_a_folder_that_others_can_write_to_or_that_cannot_be_made_is_refused(tmp_path, open_pages):
    pages = open_pages()
    for folder in (tmp_path / "kv", pages.folder, pages.folder / "pages", pages.folder / "sessions"):
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=rf"others can write to {folder} .*mode 777.*another --kv-disk-dir"):
            open_pages()
        folder.chmod(0o700)
    (tmp_path / "file").write_text("")
    settings = {"page_shape": SHAPE, "dtype": "float32"}
    with pytest.raises(ConfigError, match="--kv-disk-dir .*/file cannot be used: "):
        DiskPages.open(tmp_path / "file", fingerprint=MODEL, **settings)
    with pytest.raises(ValueError, match="'../../etc' is not 64 hexadecimal digits"):
        DiskPages.open(tmp_path, fingerprint="../../etc", **settings)


def test_a_full_disk_is_the_callers_matter_and_changes_nothing(pages, monkeypatch):
    pages.write(FIRST, data(1))
    pages.write_manifest("a", {"n": 1})

    def replace(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    for write in (lambda: pages.write(FIRST, data(2)), lambda: pages.write(SECOND, data(2))):
        with pytest.raises(OSError, match="No space left"):
            write()
    with pytest.raises(OSError, match="No space left"):
        pages.write_manifest("a", {"n": 2})
    assert pages.num_pages == 1 and equal(pages.read(FIRST.key), data(1)) and pages.read_manifest("a") == {"n": 1}
    assert [path.name for path in (pages.folder / "pages").iterdir()] == [FIRST.key]


def test_a_server_that_dies_while_it_writes_leaves_no_damage(open_pages, monkeypatch):
    pages = open_pages()
    pages.write(FIRST, data(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)  # dies here: neither renamed nor cleaned up
        pages.write(FIRST, data(2))
        pages.write_manifest("a", {})
    assert len(list((pages.folder / "pages").iterdir())) == 2
    pages = open_pages()
    assert pages.pages() == [FIRST] and equal(pages.read(FIRST.key), data(1)) and pages.manifests() == {}
    assert [path.name for path in (pages.folder / "pages").iterdir()] == [FIRST.key]
    assert list((pages.folder / "sessions").iterdir()) == []


def test_a_manifest_is_read_as_it_was_written_also_after_a_restart(open_pages):
    pages = open_pages()
    manifest = {"pages": [FIRST.key, SECOND.key], "salt": "\N{SNOWMAN}", "saved_at_s": 1.5}
    for name in ("b", "A.json", "a" * 128):
        pages.write_manifest(name, manifest)
    pages.write_manifest("b", manifest | {"pages": []})
    pages = open_pages()
    assert list(pages.manifests()) == ["A.json", "a" * 128, "b"]
    assert pages.read_manifest("b") == manifest | {"pages": []} and pages.read_manifest("A.json") == manifest
    for _ in range(2):
        pages.remove_manifest("b")
    assert pages.read_manifest("b") is None and len(pages.manifests()) == 2


def test_a_manifest_that_is_damaged_or_of_another_session_model_or_version_is_none(open_pages, caplog):
    pages = open_pages()
    pages.write_manifest("a", {"tokens": [1, 23]})
    path = pages.folder / "sessions" / "a.json"
    good = path.read_bytes()
    changed = [
        good[:-1],
        good.replace(b"23", b"24"),
        b"[]",
        b"{}",
        b"\xff",
        b"",
        json.dumps(json.loads(good) | {"version": 2}).encode(),
        json.dumps(json.loads(good) | {"fingerprint": "a" * 64}).encode(),
        json.dumps(json.loads(good) | {"content": None}).encode(),
    ]
    for number, content in enumerate(changed, 1):
        path.write_bytes(content)
        assert pages.read_manifest("a") is None and len(caplog.records) == number
    path.write_bytes(good)
    os.replace(path, path.with_name("b.json"))
    assert pages.read_manifest("b") is None and pages.manifests() == {}
    assert pages.read_manifest("a") is None
    assert all("session " in record.getMessage() for record in caplog.records)


def test_no_changed_byte_of_a_manifest_changes_what_is_read(pages, caplog):
    caplog.set_level(logging.ERROR)
    pages.write_manifest("a", {"tokens": [1, 23]})
    path = pages.folder / "sessions" / "a.json"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :])
        assert pages.read_manifest("a") in (None, {"tokens": [1, 23]}), f"byte {i}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "../a", "a/b", "/etc/passwd", "a\n", "a\0", "a" * 129, "é", "a b", "C:\\a", "%2e%2e"]
)
def test_a_session_id_that_is_no_name_of_a_file_is_refused(pages, name):
    for call in (
        lambda: pages.write_manifest(name, {}),
        lambda: pages.read_manifest(name),
        lambda: pages.remove_manifest(name),
    ):
        with pytest.raises(ValueError, match="must be 1 to 128 characters"):
            call()
    assert list((pages.folder / "sessions").iterdir()) == []


def test_a_page_that_cannot_be_deleted_is_a_warning(pages, caplog, monkeypatch):
    pages.write(FIRST, data())

    def unlink(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    pages.remove(FIRST.key)
    assert "cannot be deleted: [Errno 30] Read-only file system" in caplog.text and pages.num_pages == 0

"""Sessions of an LLM: saved, loaded after a restart, deleted; 150 tokens and 6 of output leave 155 on 20 pages."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.types import InvalidRequest, UnknownSession
from tests.api.tiers import (
    GREEDY,
    NUM_PAGES,
    check,
    every_size_is_compiled_once,
    files,
    ids,
    model,
    nodes_of,
    one_after_another,
    plain,
    same,
    session,
    start,
    tokens_of,
)

FIXTURES = (every_size_is_compiled_once, model, plain, start, ids)  # that this file uses by name


def test_a_saved_session_goes_on_after_a_restart(start, plain, ids, tmp_path):
    llm, prompt = start(), ids(150)
    (output,) = llm.generate([prompt], session("chat"))
    history = [*prompt, *output.outputs[0].token_ids]
    assert llm.session_manifest("chat").saved is False
    info = llm.save_session("chat")
    assert (info.num_tokens, info.num_pages, info.num_cached_tokens, info.saved) == (155, NUM_PAGES, 155, True)
    assert info.num_bytes == NUM_PAGES * (8192 + 4096)
    assert llm.session_manifest("chat") == info
    assert len(files(tmp_path / "kv")) == NUM_PAGES
    assert files(tmp_path / "kv", "sessions") == {"chat.json"}
    llm.close()
    llm = start()
    assert llm.session_manifest("chat") == info
    assert llm.load_session("chat") == info
    assert same(llm, plain, [[*history, *ids(10)]], session("chat")) == [155]
    assert llm.session_manifest("chat").num_tokens == 155 + 1 + 10 + 5
    check(llm)


def test_a_session_that_is_not_loaded_is_found_too_but_for_its_last_page(start, plain, ids):
    llm, prompt = start(), ids(150)
    llm.generate([prompt], session("chat"))
    llm.save_session("chat")
    llm.close()
    assert same(start(), plain, [prompt]) == [144]


def test_deleting_a_session_leaves_the_files_that_another_one_shares(start, ids, tmp_path):
    llm, shared = start(), ids(80)
    for name in ("a", "b"):
        llm.generate([[*shared, *ids(70)]], session(name))
        llm.save_session(name)
    assert len(files(tmp_path / "kv")) == 10 + 2 * 10
    assert llm.delete_session("a").num_pages == NUM_PAGES
    llm.generate([ids(20)], GREEDY)  # by its end the files are gone
    info = llm.session_manifest("b")
    with pytest.raises(UnknownSession):
        llm.session_manifest("a")
    llm.close()
    assert len(files(tmp_path / "kv")) == NUM_PAGES
    assert files(tmp_path / "kv", "sessions") == {"b.json"}
    llm = start()
    assert llm.load_session("b") == info
    llm.delete_session("b")
    llm.close()
    assert not files(tmp_path / "kv") and not files(tmp_path / "kv", "sessions")


def test_unknown_sessions_are_told_apart_from_those_that_are_not_saved(start, ids):
    llm = start()
    for action in (llm.save_session, llm.load_session, llm.session_manifest, llm.delete_session):
        with pytest.raises(UnknownSession, match="there is no session 'nobody'"):
            action("nobody")
    llm.generate([ids(20)], session("a"))
    with pytest.raises(UnknownSession, match="'a' is not saved"):
        llm.load_session("a")
    llm.delete_session("a")
    with pytest.raises(UnknownSession):
        llm.session_manifest("a")


def test_without_a_disk_tier_a_session_is_kept_but_not_saved(start, plain, ids):
    llm = start(disk=0)
    same(llm, plain, [ids(30)], session("a"))
    assert llm.session_manifest("a").num_cached_tokens == 35
    with pytest.raises(InvalidRequest, match="there is no disk tier"):
        llm.save_session("a")


def test_a_session_is_saved_while_other_requests_run(start, plain, ids):
    llm, prompt = start(), ids(150)
    same(llm, plain, [prompt], session("a"))
    others, found = [ids(150) for _ in range(10)], []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(others, GREEDY)))
    thread.start()
    infos = [llm.save_session("a") for _ in range(3)]
    thread.join(60)
    assert all(info.saved and info.num_bytes == NUM_PAGES * (8192 + 4096) for info in infos)
    assert tokens_of(found) == tokens_of(plain.generate(others, GREEDY))
    check(llm)
    llm.close()
    llm = start()
    assert llm.load_session("a").num_cached_tokens == 155
    assert same(llm, plain, [prompt]) == [149]


def test_a_save_that_finds_the_disk_full_fails_alone(start, plain, ids, monkeypatch, tmp_path):
    llm, prompt = start(), ids(150)
    same(llm, plain, [prompt], session("a"))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskPages, "write", full)
        with pytest.raises(RuntimeError, match="could not be written"):
            llm.save_session("a")
        one_after_another(llm, plain, [ids(150) for _ in range(10)])
    assert llm.session_manifest("a").saved is False
    assert llm.stats().num_disk_pages_used == 0 == len(files(tmp_path / "kv"))
    assert same(llm, plain, [prompt], session("a"))[0] > 0
    assert llm.save_session("a").num_bytes == NUM_PAGES * (8192 + 4096)


def test_a_session_larger_than_the_disk_tier_is_not_saved_and_says_why(start, plain, ids):
    llm, prompt = start(disk=10), ids(150)
    same(llm, plain, [prompt], session("a"))
    with pytest.raises(RuntimeError, match="holds 10 pages, not enough free for the 20 of the session"):
        llm.save_session("a")
    assert same(llm, plain, [prompt]) == [149]


def test_pages_of_a_session_leave_the_device_after_all_others_and_leave_it_when_nothing_else_is_left(start, plain, ids):
    llm, prompt, stranger = start(host=320, disk=0), ids(150), ids(150)
    same(llm, plain, [prompt], session("a"))
    same(llm, plain, [stranger])
    one_after_another(llm, plain, [ids(150) for _ in range(6)])
    assert [bool(node.page) for node in nodes_of(llm, prompt)] == [True] * 19
    assert [bool(node.page) for node in nodes_of(llm, stranger)] == [False] * 19
    assert same(llm, plain, [prompt], session("a")) == [149]
    same(llm, plain, [ids(120) for _ in range(4)], dataclasses.replace(GREEDY, max_tokens=80))  # 25 pages each
    assert not all(node.page for node in nodes_of(llm, prompt))

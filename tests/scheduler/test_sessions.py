"""Sessions without a device: what they pin, what of them is saved and loaded, and what goes wrong meanwhile."""

import pytest

from jaxinfer.scheduler.plan import Delete, DeleteSession, Fetch, Offload, Save, SaveSession
from jaxinfer.scheduler.sessions import MAX_SESSIONS, Sessions
from jaxinfer.types import InvalidRequest, SessionInfo, UnknownSession
from tests.scheduler.cached import Cache, of_kind, page

A, B, C = ([10 * i + j for j in range(1, 9)] for i in range(1, 4))
"""Tokens of four pages each: two of them fill the device."""


def talk(cache: Cache, session_id: str, tokens: list[int]) -> None:
    """A request of a session comes and goes."""
    cache.keep(tokens)
    cache.sessions.update(session_id, "", tuple(tokens))
    cache.check()


def talk_meanwhile(cache: Cache, session_id: str, tokens: list[int]) -> None:
    """Likewise, while what is under way goes on."""
    held, _ = cache.begin(tokens)
    cache.end(held)
    cache.sessions.update(session_id, "", tuple(tokens))
    cache.check()


def outcome(cache: Cache) -> SessionInfo | Exception:
    ((_, found),) = cache.sessions.take_outcomes()
    return found


def save(cache: Cache, session_id: str) -> SessionInfo:
    cache.sessions.save(session_id)
    cache.settle()
    found = outcome(cache)
    assert isinstance(found, SessionInfo)
    return found


def test_a_session_is_saved_a_frame_at_a_time_and_its_list_of_tokens_last():
    cache = Cache()
    talk(cache, "a", A)
    cache.sessions.save("a")
    kinds = []
    while cache.sessions.has_work and (begun := cache.begun()):
        kinds.append([type(one).__name__ for one in begun])
        assert not cache.begun(), "nothing goes on before that is written"
        for one in of_kind(begun, Save, SaveSession):
            cache.done(one.ticket)
    assert kinds == [["Offload", "Save"]] * 2 + [["SaveSession"]]
    info = outcome(cache)
    assert isinstance(info, SessionInfo)
    assert (info.num_tokens, info.num_pages, info.num_bytes, info.saved, info.num_cached_tokens) == (8, 4, 4, True, 8)
    (manifest,) = of_kind(cache.log, SaveSession)
    assert manifest.manifest["tokens"] == A and manifest.manifest["salt"] == ""


def test_a_session_larger_than_the_host_tier_is_saved():
    cache = Cache(num_frames=1)
    talk(cache, "a", A)
    assert save(cache, "a").num_bytes == 4
    assert [len(one.pages) for one in of_kind(cache.log, Save)] == [2, 2]


def test_a_save_waits_while_every_frame_is_being_filled():
    pages = [page(C[:2]), page(C[2:4], C[:2])]
    cache = Cache(pages, num_frames=1)
    talk(cache, "a", A)
    (ticket,) = cache.fetch(cache.hit(C).fetched)
    cache.sessions.save("a")
    assert not of_kind(cache.begun(), Offload, Save)
    assert cache.sessions.has_work
    cache.done(ticket)
    cache.settle()
    assert isinstance(outcome(cache), SessionInfo)


def test_two_saves_of_a_session_are_one():
    cache = Cache()
    talk(cache, "a", A)
    cache.sessions.save("a")
    cache.sessions.save("a")
    cache.settle()
    assert isinstance(outcome(cache), SessionInfo)
    assert len(of_kind(cache.log, SaveSession)) == 1
    save(cache, "a")
    assert len(of_kind(cache.log, Save)) == 2, "pages that are on disk are not written again"


def test_what_is_saved_is_what_was_there_when_it_was_asked_for():
    cache = Cache()
    talk(cache, "a", A)
    cache.sessions.save("a")
    cache.begun()
    talk_meanwhile(cache, "a", B)  # another conversation, while the first is written
    cache.settle()
    (one,) = of_kind(cache.log, SaveSession)
    assert one.manifest["tokens"] == A
    cache.sessions.load("a")
    assert cache.sessions.info("a").num_cached_tokens == 8
    assert [cache.where(A[:num])[-1] for num in (2, 4, 6, 8)] == ["F"] * 4


def test_a_session_that_goes_on_while_it_is_saved_is_saved_but_for_the_page_that_was_filled():
    cache = Cache()
    talk(cache, "a", A[:5])
    cache.sessions.save("a")
    cache.begun()
    talk_meanwhile(cache, "a", A)
    cache.settle()
    found = outcome(cache)
    assert isinstance(found, SessionInfo), found
    (one,) = of_kind(cache.log, SaveSession)
    assert one.manifest["tokens"] in (A[:4], A[:5])


def test_a_session_that_goes_on_while_its_list_of_tokens_is_written_is_saved():
    cache = Cache()
    talk(cache, "a", A[:5])
    cache.sessions.save("a")
    while not (lists := of_kind(begun := cache.begun(), SaveSession)):
        for one in of_kind(begun, Save):
            cache.done(one.ticket)
    talk_meanwhile(cache, "a", A)
    cache.done(lists[0].ticket)
    found = outcome(cache)
    assert isinstance(found, SessionInfo), found
    assert found.saved and cache.sessions.load("a").num_cached_tokens == 5


def test_pages_that_cannot_be_written_fail_the_save_and_leave_the_one_before():
    cache = Cache()
    talk(cache, "a", A[:4])
    before = save(cache, "a")
    talk(cache, "a", A)
    cache.sessions.save("a")
    (one,) = of_kind(cache.begun(), Save)
    cache.done(one.ticket, one.pages[0][1].key)
    error = outcome(cache)
    assert isinstance(error, RuntimeError) and "1 pages or the list of them could not be written" in str(error)
    info = cache.sessions.info("a")
    assert (info.saved, info.num_bytes) == (True, before.num_bytes)
    cache.settle()
    assert cache.sessions.load("a").num_tokens == 4


def test_a_page_that_fails_after_the_list_of_tokens_was_begun_fails_the_save():
    cache = Cache()
    talk(cache, "a", A[:4])
    nodes = [cache.node(A[:num]) for num in (2, 4)]
    frame = cache.host.take()
    cache.tiers.offload(nodes, frame)
    cache.tiers.save(nodes, frame)
    (write,) = of_kind(cache.begun(), Save)
    cache.sessions.save("a")
    (manifest,) = of_kind(cache.begun(), SaveSession)
    cache.done(write.ticket, write.pages[1][1].key)
    cache.done(manifest.ticket)
    assert isinstance(outcome(cache), RuntimeError)
    assert cache.sessions.info("a").saved is False


def test_a_list_of_tokens_that_cannot_be_written_leaves_what_was_saved_before():
    cache = Cache()
    talk(cache, "a", A[:4])
    save(cache, "a")
    talk(cache, "a", A)
    cache.sessions.save("a")
    while not (lists := of_kind(begun := cache.begun(), SaveSession)):
        for one in of_kind(begun, Save):
            cache.done(one.ticket)
    cache.done(lists[0].ticket, "a")
    assert isinstance(outcome(cache), RuntimeError)
    assert cache.sessions.info("a").saved
    assert cache.sessions.load("a").num_tokens == 4
    saved = [node for node in cache._tree.nodes() if node.num_saves]
    assert saved == cache._tree.path("", A[:4])
    cache.sessions.delete("a")
    assert of_kind(cache.settle(), DeleteSession) == [DeleteSession("a")]
    assert all(not node.num_saves for node in cache._tree.nodes())


def test_a_session_is_not_deleted_while_it_is_saved():
    cache = Cache()
    talk(cache, "a", A)
    cache.sessions.save("a")
    with pytest.raises(InvalidRequest, match="'a' is being saved; delete it afterwards"):
        cache.sessions.delete("a")
    cache.settle()
    assert cache.sessions.delete("a").saved
    cache.check()
    with pytest.raises(UnknownSession):
        cache.sessions.info("a")


def test_deleting_a_session_deletes_its_pages_on_disk_but_those_of_another_that_is_saved():
    cache = Cache()
    talk(cache, "a", A)
    talk(cache, "b", [*A[:4], *B[:4]])
    for session_id in ("a", "b"):
        save(cache, session_id)
    own = {cache.node(A[:num]).key for num in (6, 8)}
    cache.sessions.delete("a")
    cache.check()
    begun = cache.settle()
    assert {one.key for delete in of_kind(begun, Delete) for one in delete.pages} == own
    assert of_kind(begun, DeleteSession) == [DeleteSession("a")]
    assert cache.sessions.info("b").num_bytes == 4
    cache.sessions.delete("b")
    cache.settle()
    assert cache.disk.num_used == 0
    assert not any(node.num_pins or node.num_saves for node in cache._tree.nodes())


def test_pages_of_saved_sessions_are_not_deleted_for_others():
    cache = Cache(num_pages=4, num_frames=2, num_disk_pages=6)
    talk(cache, "a", A)
    save(cache, "a")
    for i in range(1, 8):
        cache.keep([token + 100 * i for token in A])
    cache.settle()
    assert cache.disk.num_used == 6
    assert all(cache.node(A[:num]).on_disk for num in (2, 4, 6, 8))


def test_a_session_for_which_the_disk_has_no_room_is_not_saved():
    cache = Cache(num_disk_pages=3)
    talk(cache, "a", A)
    cache.sessions.save("a")
    cache.settle()
    error = outcome(cache)
    assert "holds 3 pages, not enough free for the 4 of the session" in str(error)
    assert not any(node.num_saves for node in cache._tree.nodes())


def test_pages_of_a_session_are_evicted_after_all_others():
    cache = Cache(num_frames=0, num_disk_pages=0)
    talk(cache, "a", A)
    cache.keep(B)
    cache.keep(C)
    assert cache.hit(A).num_tokens == 8 and not cache.has(B)
    cache.sessions.delete("a")
    cache.check()
    cache.keep(B)
    cache.keep([token + 100 for token in A])
    assert not cache.has(A)


def test_pages_of_sessions_are_evicted_when_there_are_no_others():
    cache = Cache(num_frames=0, num_disk_pages=0)
    talk(cache, "a", A)
    talk(cache, "b", B)
    talk(cache, "c", C)
    assert cache.hit(C).num_tokens == 8 and cache.hit(B).num_tokens == 8 and not cache.has(A)
    assert cache.sessions.info("a").num_cached_tokens == 0


def test_a_session_pins_what_it_had_last_only():
    cache = Cache(num_frames=0, num_disk_pages=0)
    talk(cache, "a", A)
    talk(cache, "a", [*A[:2], *B[:2]])
    pins = {node.tokens: node.num_pins for node in cache._tree.nodes()}
    assert pins == {(11, 12): 1, (21, 22): 1, (13, 14): 0, (15, 16): 0, (17, 18): 0}


def test_the_session_used_least_recently_is_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("jaxinfer.scheduler.sessions.MAX_SESSIONS", 2)
    assert MAX_SESSIONS == 1024
    cache = Cache()
    talk(cache, "saved", A[:2])
    save(cache, "saved")
    for session_id in ("a", "b", "a", "c"):
        talk(cache, session_id, A)
    assert len(cache.sessions) == 3
    for session_id in ("saved", "a", "c"):
        cache.sessions.info(session_id)
    with pytest.raises(UnknownSession):
        cache.sessions.info("b")
    assert cache.node(A).num_pins == 2


def test_a_restart_knows_the_saved_sessions_and_loading_reads_them_to_the_host():
    pages = [page(A[i : i + 2], A[:i]) for i in range(0, 8, 2)]
    manifests = {"a": {"salt": "", "tokens": A, "saved_at_s": 7}}
    cache = Cache(pages, manifests)
    info = cache.sessions.info("a")
    assert (info.saved, info.saved_at_s, info.num_tokens, info.num_cached_tokens) == (True, 7, 8, 8)
    assert cache.node(A).num_saves == 1 and cache.node(A).num_pins == 0
    assert cache.sessions.load("a") == info
    fetches = of_kind(cache.settle(), Fetch)
    assert [one.tokens for fetch in fetches for one in fetch.pages] == [tuple(A[i : i + 2]) for i in range(0, 8, 2)]
    assert cache.hit(A).num_tokens == 8 and cache.node(A).num_pins == 1
    cache.sessions.delete("a")
    cache.settle()
    assert cache.disk.num_used == 0


def test_a_session_some_of_whose_pages_are_gone_is_loaded_as_far_as_they_go():
    manifests = {"a": {"salt": "", "tokens": A, "saved_at_s": 7}}
    cache = Cache([page(A[:2]), page(A[2:4], A[:2])], manifests)
    assert cache.sessions.load("a").num_cached_tokens == 4


def test_a_session_is_named_and_loaded_only_where_it_is_known_and_saved():
    cache = Cache()
    for action in (Sessions.save, Sessions.load, Sessions.info, Sessions.delete):
        with pytest.raises(UnknownSession, match="there is no session 'x'"):
            action(cache.sessions, "x")
    talk(cache, "x", A)
    with pytest.raises(UnknownSession, match="'x' is not saved"):
        cache.sessions.load("x")
    without = Cache(num_disk_pages=0)
    talk(without, "x", A)
    for action in (Sessions.save, Sessions.load):
        with pytest.raises(InvalidRequest, match="there is no disk tier"):
            action(without.sessions, "x")


def test_a_save_whose_pages_are_lost_says_so():
    cache = Cache()
    talk(cache, "a", A)
    cache.sessions.save("a")
    cache.prefix.clear()
    cache.settle()
    assert "was lost while it was saved" in str(outcome(cache))
    assert cache.pool.num_empty == 8


def test_pages_that_are_on_their_way_to_the_device_are_not_copied_from_there_for_a_save():
    cache = Cache(num_frames=8)
    talk(cache, "a", A[:4])
    for tokens in (B, C, [token + 100 for token in B]):
        talk(cache, "b", tokens)
    assert cache.where(A[:4]) == "H"
    _, (ticket,) = cache.begin(A[:4])
    pages = {cache.node(A[:num]).page for num in (2, 4)}
    cache.tiers.give_up(cache.node(A[:4]).frame)
    cache.sessions.save("a")
    assert not any(pages & {*one.pages} for one in of_kind(cache.begun(), Offload))
    cache.done(ticket)
    cache.settle()
    assert isinstance(outcome(cache), SessionInfo)


def test_load_brings_back_what_was_saved_under_its_own_salt():
    cache = Cache()
    cache.keep(A, "alice")
    cache.sessions.update("a", "alice", tuple(A))
    save(cache, "a")
    cache.keep(B, "bob")
    cache.sessions.update("a", "bob", tuple(B))
    info = cache.sessions.load("a")
    assert (info.num_tokens, info.num_cached_tokens) == (len(A), len(A))
    assert len(cache.sessions) == 1

"""The page at / in a real browser, with an engine whose answers each test writes."""

from __future__ import annotations

import json

import pytest
from chromium import BrowserError

from jaxinfer.config import ServerConfig
from tests.http.conftest import READY, wait_for
from tests.http.test_tools import make_server

pytestmark = pytest.mark.long

KEY = "the-right-key"
MARKUP = [
    "<script>window.hacked = 1</script>",
    '<img src="x" onerror="window.hacked = 1"><svg onload="window.hacked = 1"></svg>',
    "</p></div></article><h1>Hello</h1><style>* { display: none }</style>",
    "![image](https://evil.example/x.png) [link](javascript:hacked=1) &lt;b&gt; \u202e\u0000 {{ 7 * 7 }}",
]
ANSWERED = "document.querySelector('.exchange:last-child .answer > .note') !== null"
FAILED = "document.querySelector('.exchange:last-child .failure') !== null"
RUNNING = "!document.querySelector('#stop').hidden"
TEXT = ".exchange:last-child .text"


@pytest.fixture
def serve():
    """Makes servers of one test."""
    made = []

    def serve(reply="the cat sat on the mat", **config):
        server = make_server(ServerConfig(port=0, **config), added=["<think>", "<tool_call>"])
        server.engine.reply, server.engine.end_with_eos = reply, True
        made.append(server)
        return server

    yield serve
    for server in made:
        server.engine.gate.set()
        server.close()


def set_value(page, name, value):
    page.evaluate(f"document.querySelector('#{name}').value = {json.dumps(str(value))}")


def ask(page, question="Hello", until=ANSWERED):
    """Greedy, so that the engine says its reply from the start."""
    if page.evaluate("document.querySelector('#temperature').value") == "":
        set_value(page, "temperature", 0)
    page.focus("#question")
    page.type(question)
    page.press("Enter")
    page.wait_for(until)


def prompt(server, number=-1):
    return server.tokenizer.decode(server.engine.requests[number].prompt_ids, skip_special_tokens=False)


# The chat


def test_answer_is_shown_while_it_is_streamed(serve, browse):
    server = serve()
    server.engine.step_s = 0.1
    page = browse(server)
    ask(page, until=f"document.querySelector('{TEXT}')?.textContent.length > 0 && {RUNNING}")
    assert 0 < len(page.text(TEXT)) < len(server.engine.reply)
    assert page.text("#send") == "" and page.text("#stop") == "Stop"
    page.wait_for(ANSWERED)
    assert page.text(TEXT) == server.engine.reply
    assert page.text("#send") == "Send" and page.text("#stop") == ""
    assert page.text(".question") == "Hello" and page.evaluate("document.querySelector('#question').value") == ""
    assert " tokens in · " in page.text(".answer > .note") and " out · first token after " in page.text(
        ".answer > .note"
    )


def test_reasoning_is_shown_apart(serve, browse):
    page = browse(serve("<think>\nthe cat <b>sat</b>\n</think>\n\nHello world!"))
    ask(page)
    assert page.text(".thought p").strip() == "the cat <b>sat</b>"
    assert page.text(TEXT).strip() == "Hello world!"


@pytest.mark.parametrize("markup", MARKUP)
def test_what_the_model_and_the_user_write_stays_text(serve, browse, markup):
    page = browse(serve(f"<think>{markup}</think>{markup}"))
    before = page.evaluate("document.querySelectorAll('script, style, img, svg, h1, a').length")
    ask(page, question=markup.replace("\u0000", ""))
    for selector, written in ((".thought p", markup), (TEXT, markup), (".question", markup.replace("\u0000", ""))):
        assert page.evaluate(f"document.querySelector('{selector}').textContent").strip() == written
        assert page.evaluate(f"document.querySelector('{selector}').childElementCount") == 0
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('script, style, img, svg, h1, a').length") == before


def test_what_the_server_writes_stays_text(serve, browse):
    name = '<img src="x" onerror="window.hacked = 1">'
    server = serve(served_model_names=(name, "other"))
    page = browse(server)
    page.wait_for("document.querySelector('#name').options.length === 2")
    assert page.text("#model") == name and page.evaluate("document.querySelector('#name').value") == name
    server.engine.fail_after = 2
    page.expected_failures = ["404"]
    page.evaluate("document.querySelector('#name').append(new Option('<b>x</b>', '<b>no such</b>', true, true))")
    ask(page, until=FAILED)
    assert "<b>no such</b>" in page.text(".failure")
    assert page.evaluate("window.hacked") is None and page.evaluate("document.querySelector('main img')") is None


def test_the_browser_itself_refuses_markup_and_scripts_that_are_in_no_file(serve, chromium):
    server = serve()
    page = chromium.open(f"{server.url}/")
    page.wait_for(READY)
    with pytest.raises(BrowserError, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(BrowserError, match="Failed to fetch"):
        page.evaluate("fetch('http://127.0.0.1:9/')")
    page.evaluate(
        "const image = new Image(); image.src = 'https://evil.example/x.png'; document.body.append(image);"
        "const style = document.createElement('style'); style.textContent = '* {}'; document.body.append(style)"
    )
    wait_for(lambda: page.evaluate("1") and len(page.complaints) >= 4)
    told = " ".join(page.complaints)
    assert all(name in told for name in ("TrustedHTML", "connect-src", "img-src", "style-src"))


def test_conversation_and_settings_are_sent_and_a_new_chat_begins_without_them(serve, browse):
    server = serve()
    page = browse(server)
    for name, value in {"system": "ABC", "temperature": 0, "top_p": 0.5, "max_tokens": 3, "seed": 7}.items():
        set_value(page, name, value)
    ask(page, "the cat")
    request = server.engine.requests[-1]
    assert (request.temperature, request.top_p, request.max_tokens) == (0.0, 0.5, 3)
    server.chat(seed=7, max_tokens=1)
    assert server.engine.requests.pop().seed == request.seed
    first = page.text(TEXT)
    assert server.engine.reply.startswith(first) and len(first) < len(server.engine.reply)
    assert "cut: no room for more tokens" in page.text(".answer > .note")
    ask(page, "the mat", until="document.querySelectorAll('.answer > .note').length === 2")
    turns = f"system\nABC<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>"
    assert f"{turns}\n<|im_start|>user\nthe mat<|im_end|>" in prompt(server)
    page.click("#clear")
    assert page.evaluate("document.querySelectorAll('.exchange').length") == 0
    set_value(page, "system", "")
    ask(page, "Hello")
    assert prompt(server).count("<|im_start|>") == 2 and "the cat" not in prompt(server)


@pytest.mark.parametrize("how", ["click", "escape"])
def test_stop_ends_the_request_and_keeps_what_was_said(serve, browse, how):
    server = serve("the cat sat on the mat " * 50)
    server.engine.step_s = 0.03
    page = browse(server)
    ask(page, until=f"document.querySelector('{TEXT}')?.textContent.length > 10")
    if how == "click":
        page.click("#stop")
    else:
        page.press("Escape")
    page.wait_for(ANSWERED)
    assert page.text(".answer > .note") == "stopped"
    wait_for(lambda: len(server.engine.cancelled) == 1 and not server.engine.running)
    assert server.engine.reply.startswith(page.text(TEXT)) and len(page.text(TEXT)) > 10
    server.engine.step_s = 0
    server.engine.reply = "Hello world!"
    ask(page, "ABC", until="document.querySelectorAll('.answer > .note').length === 2")
    assert page.text(TEXT) == "Hello world!" and "the cat sat" in prompt(server)


# Failures


def test_refusal_is_told_with_the_field_and_can_be_tried_again(serve, browse):
    server = serve()
    page = browse(server)
    page.expected_failures = ["400"]
    set_value(page, "temperature", -1)
    ask(page, until=FAILED)
    told = page.text(".failure")
    assert told.startswith("The server refused the request\ntemperature is -1")
    assert "HTTP 400" in told and "field temperature" in told and "request " in told
    set_value(page, "temperature", 0)
    page.click(".failure button")
    page.wait_for(ANSWERED)
    assert page.text(TEXT) == server.engine.reply
    assert page.evaluate("document.querySelectorAll('.failure, .exchange').length") == 1


def test_setting_that_is_no_number_is_told_before_anything_is_sent(serve, browse):
    server = serve()
    page = browse(server)
    page.focus("#temperature")
    page.type("1e")
    page.focus("#question")
    page.type("Hello")
    page.press("Enter")
    page.wait_for(FAILED)
    assert page.text(".failure").startswith("A setting is no number\nTemperature must be a number, or empty.")
    assert not server.engine.requests


def test_answer_that_fails_in_the_middle_keeps_what_was_said(serve, browse):
    server = serve("the cat sat on the mat " * 50)
    server.engine.fail_after = 6
    page = browse(server)
    ask(page, until=FAILED)
    assert "The answer failed\nthe engine failed the request: NaN in the logits" in page.text(".failure")
    assert page.text(TEXT).startswith("the ca")
    assert page.text("#send") == "Send"


def test_full_queue_is_told_as_such(serve, browse):
    server = serve()
    server.engine.refuse = True
    page = browse(server)
    page.expected_failures = ["503"]
    ask(page, until=FAILED)
    assert page.text(".failure").startswith("The server cannot take this now\n1024 requests wait already")


def test_dead_engine_and_then_a_server_that_is_gone_are_told(serve, browse):
    server = serve("the cat sat on the mat " * 50)
    server.engine.die_after = 3
    page = browse(server)
    page.expected_failures = ["503", "ERR_CONNECTION_REFUSED"]
    ask(page, until=FAILED)
    assert "the engine stopped: CUDA error 700" in page.text(".failure")
    page.wait_for("document.querySelector('#state').textContent === 'the engine stopped: CUDA error 700'")
    assert page.evaluate("document.querySelector('#state').dataset.state") == "bad"
    server.thread.wait()
    page.wait_for("document.querySelector('#state').textContent === 'no answer'")
    ask(page, "ABC", until=FAILED)
    assert page.text(".exchange:last-child .failure").startswith("The server does not answer")


# Keys


def test_key_is_asked_for_and_stays_in_the_tab(serve, browse):
    server = serve(api_keys=(KEY,))
    page = browse(server)
    assert "This server asks for a key" in page.text("#access") and page.failed_loads == []
    page.expected_failures = ["401"]
    ask(page, until=FAILED)
    assert page.text(".failure").startswith("The API key is missing or wrong\nan API key is missing")
    assert page.evaluate("document.activeElement.id") == "key"
    for shown, told in (("a-wrong-key", "the API key is wrong"), (KEY, "The server takes this key")):
        set_value(page, "key", "")
        page.focus("#key")
        page.type(shown)
        page.press("Enter")
        page.wait_for(f"document.querySelector('#key-note').textContent.startsWith('{told}')")
    page.click(".failure button")
    page.wait_for(ANSWERED)
    assert page.text(TEXT) == server.engine.reply
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [0, "", f"{server.url}/"]
    assert not any(KEY in asked for asked in page.requests)
    page.send("Page.reload")
    page.wait_for("document.querySelector('#key-note')?.textContent.startsWith('The server takes this key')")
    other = browse(server)
    assert other.evaluate("sessionStorage.length") == 0
    assert "This server asks for a key" in other.text("#access")


def test_without_keys_there_is_no_field_for_one(serve, browse):
    assert browse(serve()).text("#access") == ""


# The numbers


def test_numbers_are_those_of_the_server_and_follow_it(serve, browse):
    server = serve()
    server.engine.gate.clear()
    page = browse(server)
    assert page.text("#model") == "models/fake" and page.text("#pages-note") == "0 of 8 pages; 3 cached"
    assert page.text("#ttft") == "–" and page.text("#hits") == "off"
    ask(page, until=RUNNING)
    page.wait_for("document.querySelector('#running').textContent === '1'")
    page.wait_for("document.querySelector('#pages-note').textContent.startsWith('1 of 8 pages')")
    assert page.text("#pages") == "13%"
    server.engine.gate.set()
    page.wait_for(f"{ANSWERED} && document.querySelector('#running').textContent === '0'")
    page.wait_for("document.querySelector('#totals').textContent.startsWith('Since the start: 1 done')")
    assert page.text("#ttft") != "–" and page.text("#between") != "–" and page.text("#output") != "0"
    points = page.evaluate("document.querySelector('#output-chart .curve').getAttribute('points').split(' ').length")
    assert points >= 2


def test_tab_that_nobody_sees_asks_for_nothing(serve, browse):
    server = serve()
    page = browse(server)
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
    page.evaluate("new Promise((done) => setTimeout(done, 500))")
    count = len(page.requests)
    page.evaluate("new Promise((done) => setTimeout(done, 5000))")
    assert len(page.requests) == count


# Whoever uses it, wherever


def test_every_control_is_reached_and_used_by_the_keyboard(serve, browse):
    page = browse(serve(api_keys=(KEY,)))
    assert page.evaluate("document.activeElement.id") == "question"
    reached = set()
    for _ in range(20):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    asked = {"clear", "Settings", "system", "temperature", "top_p", "max_tokens", "seed", "log", "question", "send"}
    assert reached >= asked | {"key", "Use"}
    page.focus("#question")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.evaluate("document.querySelector('#question').value") == "one\ntwo"
    assert page.evaluate("document.querySelectorAll('.exchange').length") == 0


def test_every_control_has_a_name_for_those_who_do_not_see_it(serve, browse):
    page = browse(serve(api_keys=(KEY,), served_model_names=("a", "b")))
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "spinbutton", "combobox", "meter", "image", "log")
    named = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(named) > 10
    assert [node["role"]["value"] for node in named if not node["name"]["value"]] == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_page_fits_its_screen_in_both_schemes_and_its_text_can_be_read(serve, browse, dark, width):
    page = browse(serve("the cat sat on the mat " * 8 + "x" * 200), width=width, height=800, dark=dark)
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    low = page.evaluate(CONTRASTS)
    assert low == []
    box = page.evaluate("(({ top, bottom }) => [top, bottom])(document.querySelector('#ask').getBoundingClientRect())")
    assert box[0] > 0 and box[1] <= 800


CONTRASTS = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parts(colour).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const shows = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!shows || !node.getClientRects().length) continue;
    const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.tagName}#${node.id}.${node.className}`);
  }
  return low;
})()
"""
"""Elements whose text stands out from what is behind it by a ratio of less than 4.5 (WCAG 2.2, 1.4.3)."""

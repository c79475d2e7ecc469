"""`jaxinfer serve` with keys and a certificate: over real sockets, by one front end and by several."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl

import httpx
import msgspec
import pytest

from jaxinfer import cli
from tests.api.test_serve_process import GOLDEN, TINY_FLAGS, Serving, save_tiny_model
from tests.http.conftest import wait_for
from tests.http.test_limits import make_certificate

KEY = "a-key"
SHORT = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture
def serve(folder, tmp_path):
    """Starts a server of the tiny model, and waits for its address."""
    started = []

    def serve(*args, **environment):
        flags = [*TINY_FLAGS, "--compile-cache-dir", str(folder / "compiled"), *args]
        serving = Serving(tmp_path / f"{len(started)}.log", str(folder / "model"), *flags, **environment)
        started.append(serving)
        line = serving.process.stdout.readline().decode()
        assert " serves " in line, serving.stderr
        serving.url = line.split()[-1]
        return serving

    yield serve
    for serving in started:
        serving.close()


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_key_certificate_responses_and_log_work_with_any_number_of_front_ends(serve, tmp_path, num_front_ends):
    """E7, E22, E23, E26, O11."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl, which is not installed")
    cert, key = make_certificate(tmp_path)
    flags = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-server-count", str(num_front_ends)]
    server = serve(*flags, "--drain-timeout-s", "20", JAXINFER_API_KEY=KEY)
    assert server.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {KEY}"}

    with contextlib.ExitStack() as stack:

        def client(**options):
            return stack.enter_context(httpx.Client(base_url=server.url, verify=trusted, timeout=60, **options))

        stranger = client()
        wait_for(lambda: answers(stranger), limit_s=10)
        clients = [client(headers=headers) for _ in range(2 * num_front_ends)]  # dealt evenly
        assert stranger.post("/v1/completions", json=SHORT).status_code == 401
        for one in clients:
            assert one.post("/v1/completions", json=SHORT, headers={"X-Request-Id": "id-7"}).status_code == 200
        kept = clients[0].post("/v1/responses", json={"input": "abc", "max_output_tokens": 3}).json()
        for one in clients:
            assert one.get(f"/v1/responses/{kept['id']}").json() == kept
        asked = {"input": "d", "previous_response_id": kept["id"], "stream": True, "max_output_tokens": 200}
        with clients[0].stream("POST", "/v1/responses", json=asked) as reply:
            lines = reply.iter_lines()
            next(lines)
            response_id = msgspec.json.decode(next(lines).removeprefix("data: "))["response"]["id"]
            cancelled = clients[-1].post(f"/v1/responses/{response_id}/cancel")
            events = [line for line in lines if line.startswith("event: ")]
        if cancelled.status_code == 200:  # it may have ended by itself meanwhile
            assert cancelled.json()["status"] in ("cancelled", "incomplete", "completed")
        else:
            assert "there is nothing to cancel" in cancelled.text
        assert events[-1] in ("event: response.incomplete", "event: response.completed")
        last = clients[-1].get(f"/v1/responses/{response_id}").json()
        assert last["status"] in ("cancelled", "incomplete", "completed")
        with clients[0].stream("POST", "/v1/completions", json=SHORT | {"stream": True, "max_tokens": 200}) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(server.process.pid, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(30) == 0, server.stderr
    log = server.stderr
    assert log.count("POST '/v1/completions' 200 ") == 2 * num_front_ends + 1 and "POST '/v1/completions' 401" in log
    assert log.count(" id-7") == 2 * num_front_ends and "abc" not in log and KEY not in log
    assert "Traceback" not in log


def answers(client):
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def refusal(args, capsys):
    assert cli.main(["serve", "no-such-model", *args]) == 1
    return capsys.readouterr().err


def test_address_that_others_reach_is_refused_without_a_key_before_the_model_is_looked_at(capsys, monkeypatch):
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    err = refusal(["--host", "0.0.0.0", "--port", "0"], capsys)
    assert err.startswith("jaxinfer serve: host is '0.0.0.0', which other machines may reach, and there is no API key")
    for allowed in (["--api-key", "k"], ["--allow-public-without-key"]):
        assert "model 'no-such-model' is no file" in refusal(["--host", "0.0.0.0", "--port", "0", *allowed], capsys)


def test_certificate_that_is_none_is_refused_before_the_model_is_looked_at(capsys, tmp_path):
    err = refusal(["--ssl-certfile", str(tmp_path / "none.pem")], capsys)
    assert err.startswith("jaxinfer serve: HTTPS cannot be served with ssl_certfile ")


@pytest.mark.parametrize(
    ("args", "environment", "expected"),
    [
        ([], None, ()),
        ([], "from-there", ("from-there",)),
        ([], "", ()),
        (["--api-key", "a", "--api-key", "b"], "from-there", ("a", "b")),
    ],
)
def test_keys_of_the_command_line_stand_in_place_of_that_of_the_environment(args, environment, expected, monkeypatch):
    asked = {}
    monkeypatch.setattr("jaxinfer.serving.serve", lambda **options: asked.update(options))
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("JAXINFER_API_KEY", environment)
    assert cli.main(["serve", str(GOLDEN), *args]) == 0
    assert asked["server"]["api_keys"] == expected


def test_access_is_configured_from_the_command_line(monkeypatch):
    asked = {}
    monkeypatch.setattr("jaxinfer.serving.serve", lambda **options: asked.update(options))
    flags = ["--allowed-origins", "https://a", "--allowed-origins", "https://b", "--allowed-methods", "GET"]
    flags += ["--allowed-headers", "X-A", "--allow-credentials", "--ssl-certfile", "c", "--ssl-keyfile", "k"]
    flags += ["--request-timeout-s", "9", "--drain-timeout-s", "8", "--access-log", "prompts"]
    assert cli.main(["serve", str(GOLDEN), *flags, "--allow-public-without-key"]) == 0
    expected = {
        "allowed_origins": ["https://a", "https://b"],
        "allowed_methods": ["GET"],
        "allowed_headers": ["X-A"],
        "allow_credentials": True,
        "ssl_certfile": "c",
        "ssl_keyfile": "k",
        "request_timeout_s": 9,
        "drain_timeout_s": 8,
        "access_log": "prompts",
        "allow_public_without_key": True,
    }
    assert {name: asked["server"][name] for name in expected} == expected
    asked.clear()
    assert cli.main(["serve", str(GOLDEN)]) == 0
    left = {name for name in expected if name in asked["server"]}
    assert left == {"allow_credentials", "allow_public_without_key", "access_log"}
    assert asked["server"]["access_log"] == "requests"

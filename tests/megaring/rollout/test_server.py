"""The server over real sockets: whole answers, streams, everything malformed, clients that leave, and the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import replace

import pytest
from fake_model import POISON, FakeExecutor, expected

from megaring.data.tokenizers import ByteTokenizer
from megaring.rollout.engine import Engine, EngineFailed
from megaring.rollout.intake import EngineConfig
from megaring.rollout.loop import EngineLoop
from megaring.rollout.request import SamplingParams
from megaring.rollout.server import Server, ServerConfig
from megaring.rollout.wire import WireLimits

LIMITS = WireLimits(header=2048, body=4096, read=1.0, write=2.0)
CONFIG = ServerConfig(port=0, request_seconds=20.0, answer_seconds=10.0, wire=LIMITS)
WAIT = 15.0


class Slow(FakeExecutor):
    """Takes its time, so that a client can leave in between."""

    seconds = 0.0

    def execute(self, plan):
        time.sleep(self.seconds)
        return super().execute(plan)


@contextlib.contextmanager
def serving(executor=None, config=CONFIG, tokenizer=None, **changes):
    executor = executor or Slow()
    engine = Engine(executor, replace(EngineConfig(max_context=384, max_rows=64, max_running=8), **changes))
    engine.tokenizer = tokenizer
    loop = EngineLoop(engine, beat=0.2)
    failure = []

    def run():
        try:
            loop.run()
        except EngineFailed as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with Server(loop, config, tokenizer) as server:
        server.executor, server.loop, server.failure = executor, loop, failure
        yield server
        loop.stop()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def ask(server, method="POST", path="/v1/completions", body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if "json" in response.headers["Content-Type"] else text.decode(), response


def events(server, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
    lines = response.read().decode().split("\n\n")
    connection.close()
    assert lines[-1] == ""
    return [line.removeprefix("data: ") for line in lines[:-1]]


def tokens(prompt, params, seed, index=0):
    return [drawn.token for drawn in expected(prompt, params, seed, index)]


def test_whole_answer(server):
    body = {"prompt": [[1, 2, 3], [4]], "max_tokens": 5, "seed": 9, "n": 2, "logprobs": 1, "temperature": 0.8}
    status, answer, _ = ask(server, body=body)
    params = SamplingParams(max_tokens=5, temperature=0.8, n=2, logprobs=1)
    assert status == 200
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    for place, each in enumerate(answer["choices"]):
        drawn = expected([[1, 2, 3], [4]][place // 2], params, 9, place % 2)
        assert each["token_ids"] == [one.token for one in drawn]
        assert each["finish_reason"] == "length"
        assert each["weight_versions"] == [0] * 5
        assert each["logprobs"]["token_logprobs"] == pytest.approx([one.logprob for one in drawn])
        assert each["logprobs"]["sampling_logprobs"] == pytest.approx([one.sampling_logprob for one in drawn])
        assert each["logprobs"]["top_logprobs"][0] == pytest.approx(
            {f"token_id:{token}": value for token, value in drawn[0].alternatives}
        )
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}
    assert (answer["object"], answer["model"]) == ("text_completion", "megaring")


def test_stream(server):
    lines = events(
        server, {"prompt": [7, 8], "max_tokens": 6, "seed": 3, "n": 2, "stream_options": {"include_usage": True}}
    )
    assert lines[-1] == "[DONE]"
    parts = [json.loads(line) for line in lines[:-1]]
    assert parts[-1]["usage"]["completion_tokens"] == 12
    for index in range(2):
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == index]
        streamed = [token for each in mine for token in each["token_ids"]]
        assert streamed == tokens([7, 8], SamplingParams(max_tokens=6), 3, index)
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]


def test_prompt_log_probabilities_and_experts(server):
    status, answer, _ = ask(
        server, body={"prompt": [5, 6, 7], "max_tokens": 2, "prompt_logprobs": 1, "experts": True, "seed": 1}
    )
    made = answer["choices"][0]
    assert status == 200
    assert made["prompt_logprobs"][0] is None
    assert "token_id:6" in made["prompt_logprobs"][1]
    assert len(made["experts"]) == 4


BAD = [
    (b"{", "not JSON"),
    (b"[1]", "JSON list"),
    (b'"x"', "JSON str"),
    (b"\xff\xfe{", "not JSON"),
    (b"[" * 4000, "nested too deeply"),
    (b'{"prompt": [1], "max_tokens": ' + b"9" * 4000 + b"}", "max_tokens|not JSON"),
    (b'{"prompt": [1], "prompt": [2]}', "given twice"),
    (b'{"prompt": [1], "temperature": NaN}', "NaN is not a JSON number"),
    ({"prompt": [1], "max_token": 3}, "unknown field 'max_token'; did you mean max_tokens"),
    ({"prompt": [1], "zzz": 3}, "unknown field 'zzz'; known are"),
    ({"prompt": [1], "best_of": 3}, "best_of is not served here"),
    ({"max_tokens": 3}, "prompt is missing"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": {}}, "prompt is a dict"),
    ({"prompt": [1, "a"]}, "mixture"),
    ({"prompt": [True]}, "mixture"),
    ({"prompt": [1.5]}, "mixture"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"prompt": [[1]] * 129}, "129 entries"),
    ({"prompt": [40]}, "token ids are integers from 0 to 39"),
    ({"prompt": "text"}, "needs a tokenizer"),
    ({"prompt": [1], "max_tokens": 10**9}, "the context is 384"),
    ({"prompt": [1], "max_tokens": 10**12}, "max_tokens is 1000000000000"),
    ({"prompt": [1], "max_tokens": "5"}, "max_tokens is '5'"),
    ({"prompt": [1], "max_tokens": 5.0}, "max_tokens is 5.0"),
    ({"prompt": [1], "stop": "x"}, "stop strings need a tokenizer"),
    ({"prompt": [1], "stop": 3}, "stop is 3"),
    ({"prompt": [1], "stop_token_ids": ["a"]}, "stop_token_ids is"),
    ({"prompt": [1], "stream": 1}, "stream is 1"),
    ({"prompt": [1], "stream_options": {}, "stream": False, "model": "other"}, "model is 'other'"),
    ({"prompt": [1], "stream_options": {"a": 1}, "stream": True}, "stream_options is"),
    ({"prompt": [1], "n": 10**6}, "n is 1000000"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_malformed_bodies_get_400(server, body, message):
    status, answer, _ = ask(server, body=body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert any(part in answer["error"]["message"] for part in message.split("|")), answer


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health FTP/1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", 408),
        (b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
    ],
)
def test_malformed_requests(server, raw, status):
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
        client.sendall(raw)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'"error"' in answer
    assert ask(server, "GET", "/health")[:2] == (200, {"status": "ok"})


def test_expect_100_continue(server):
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
        client.sendall(head.encode())
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_models_and_metrics(server):
    assert ask(server, "GET", "/v1/models")[1]["data"][0]["id"] == "megaring"
    before = ask(server, "GET", "/metrics")[1]
    ask(server, body={"prompt": [1], "max_tokens": 3, "ignore_eos": True})
    wait_until(lambda: not server.executor.cache)  # the step after the last token gives the pages back
    after = ask(server, "GET", "/metrics")[1]

    def value(text, name):
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))

    assert value(after, "megaring_generated_tokens_total") == value(before, "megaring_generated_tokens_total") + 3
    assert value(after, "megaring_running") == value(after, "megaring_kv_use") == 0
    assert 'megaring_layout{layout="TP"} 1' in after
    assert value(after, "megaring_tokens_per_second") > 0


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(stream):
    executor = Slow()
    executor.seconds = 0.02
    with serving(executor) as server:
        body = json.dumps({"prompt": [1] * 30, "max_tokens": 300, "n": 2, "stream": stream}).encode()
        client = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: executor.cache)
        if stream:
            assert client.recv(10) == b"HTTP/1.1 2"
        client.close()
        wait_until(lambda: not executor.cache)
        assert len(executor.plans) < 200
        assert ask(server, body={"prompt": [2], "max_tokens": 1})[0] == 200


def test_overload_is_answered_and_passes():
    executor = Slow()
    executor.seconds = 0.1
    with serving(executor, max_waiting=1, max_running=1) as server:
        statuses = []

        def one():
            status, _, response = ask(server, body={"prompt": [1], "max_tokens": 8, "ignore_eos": True})
            statuses.append((status, response.headers["Retry-After"]))

        clients = [threading.Thread(target=one) for _ in range(5)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(WAIT)
        assert len(statuses) == 5
        assert set(statuses) == {(200, None), (503, "1")}
        assert ask(server, body={"prompt": [1], "max_tokens": 1})[0] == 200


def test_a_request_that_takes_too_long_is_aborted():
    executor = Slow()
    executor.seconds = 0.05
    with serving(executor, replace(CONFIG, request_seconds=0.3)) as server:
        status, answer, _ = ask(server, body={"prompt": [1], "max_tokens": 300, "ignore_eos": True})
        assert (status, answer["error"]["message"]) == (504, "not done within 0.3 seconds")
        lines = events(server, {"prompt": [1], "max_tokens": 300, "ignore_eos": True})
        assert json.loads(lines[-1])["error"]["code"] == 504
        wait_until(lambda: not executor.cache)


def test_a_bad_row_fails_its_request_alone(server):
    status, answer, _ = ask(server, body={"prompt": [1, POISON]})
    assert status == 500
    assert "no distribution" in answer["error"]["message"]
    _, answer, _ = ask(server, body={"prompt": [[1, POISON, 5], [1]], "max_tokens": 2, "prompt_logprobs": 0})
    assert answer["choices"][0]["prompt_logprobs"][2] == {"token_id:5": None}
    _, answer, _ = ask(server, body={"prompt": [[1, POISON], [1]], "max_tokens": 2})
    assert [each["finish_reason"] for each in answer["choices"]] == ["error", "length"]
    assert ask(server, body={"prompt": [1], "max_tokens": 1})[0] == 200


def test_a_mistake_in_an_answer_ends_that_answer_alone(server, monkeypatch, capfd):
    monkeypatch.setattr("megaring.rollout.server.usage", lambda *_: 1 / 0)
    status, answer, _ = ask(server, body={"prompt": [1], "max_tokens": 1})
    assert (status, answer["error"]["message"]) == (500, "internal error: ZeroDivisionError")
    assert "ZeroDivisionError" in capfd.readouterr().err
    monkeypatch.undo()
    assert ask(server, body={"prompt": [1], "max_tokens": 1})[0] == 200


def test_a_failed_engine_answers_everybody():
    executor = Slow()
    executor.fails_at = 3
    with serving(executor) as server:
        status, answer, _ = ask(server, body={"prompt": [1], "max_tokens": 300, "ignore_eos": True})
        assert status == 503
        assert "on fire" in answer["error"]["message"]
        assert "on fire" in ask(server, body={"prompt": [1]})[1]["error"]["message"]
        status, answer, _ = ask(server, "GET", "/health")
        assert (status, answer["status"]) == (503, "failed")
        wait_until(lambda: server.failure)


def test_the_end_reaches_clients():
    executor = Slow()
    executor.seconds = 0.05
    found = []
    with serving(executor) as server:
        client = threading.Thread(
            target=lambda: found.append(ask(server, body={"prompt": [1], "max_tokens": 300, "ignore_eos": True}))
        )
        client.start()
        wait_until(lambda: executor.cache)
    client.join(WAIT)
    assert found[0][0] == 503
    assert "ending" in found[0][1]["error"]["message"]
    assert not executor.cache


class Letters(ByteTokenizer):
    """Ids 0 to 39 are letters."""

    vocab_size, eod_id = 40, None

    def encode(self, text):
        return [ord(letter) - 60 for letter in text]

    def decode(self, ids):
        return "".join(chr(60 + token) for token in ids)


def test_text_and_stop_strings():
    with serving(tokenizer=Letters()) as server:
        body = {"prompt": "ABC", "max_tokens": 12, "seed": 4, "ignore_eos": True}
        plain = ask(server, body=body)[1]["choices"][0]
        assert plain["text"] == Letters().decode(plain["token_ids"])
        stop = plain["text"][5:8]
        cut = ask(server, body={**body, "stop": [stop, "never there"]})[1]["choices"][0]
        assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (plain["text"][:5], "stop", stop)
        assert cut["token_ids"] == plain["token_ids"][:8]
        lines = events(server, {**body, "stop": stop})
        parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert "".join(part["text"] for part in parts) == plain["text"][:5]


def test_a_port_in_use_is_an_error(server):
    loop = EngineLoop(Engine(FakeExecutor(), EngineConfig(max_context=100)))
    with pytest.raises(OSError), Server(loop, replace(CONFIG, port=server.port)):
        pass

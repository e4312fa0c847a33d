"""The example of a service: many clients at once get the answers that each would get alone.

Inside: gates are planted in the server of the example, so that two calls meet.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")
pytest.importorskip("safetensors")

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[2] / "examples" / "decoders"
TEXTS = [f"The favorite color of person {i} is color number {i * i % 7}. " * 2 for i in range(5)]
QUESTIONS = ["Which color?", "Who?", "And then?"]
NEW = 5


class Bytes:
    """A tokenizer with a token for each byte."""

    def __call__(self, text: str, return_tensors: str, add_special_tokens: bool = True) -> dict[str, Any]:
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[1] * add_special_tokens + list(text.encode())])}

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, ids.tolist()))


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = transformers.LlamaConfig(eos_token_id=None, pad_token_id=0, **sizes, **heads)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def module(example):
    return example("server")


@pytest.fixture
def serve(module):
    servers = []

    def start(service):
        server = ThreadingHTTPServer(("127.0.0.1", 0), module.handler(service))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return lambda path, content: post(f"http://127.0.0.1:{server.server_port}{path}", content)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def post(address, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=300) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def dense(model, text, question):
    ids = torch.tensor([[1, *text.encode(), *question.encode()]])
    return " ".join(map(str, model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()))


@pytest.mark.parametrize("budget", [1.0, {(0, 0): 0.3, (1, 1): 0.5}])
def test_clients_at_once_get_the_answers_of_one_alone(module, serve, model, tmp_path, budget):
    service = module.Service(model, Bytes(), tmp_path, budget=budget, held=2)
    ask = serve(service)

    def asked(i):
        text, question = TEXTS[i % len(TEXTS)], QUESTIONS[i % len(QUESTIONS)]
        status, read = ask("/texts", {"text": text})
        assert status == 200
        status, found = ask(f"/texts/{read['name']}", {"question": question, "max_new_tokens": NEW})
        assert status == 200
        return read["name"], question, found["answer"]

    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(asked, range(30)))
    assert len(list(tmp_path.iterdir())) == len(TEXTS)
    again = module.Service(model, Bytes(), tmp_path, budget=budget)  # which reads the files alone
    for i, (name, question, answer) in enumerate(found):
        assert answer == again.answer(name, question, NEW)
        if budget == 1.0:
            assert answer == dense(model, TEXTS[i % len(TEXTS)], question)


class Gate:
    """A function that waits, at its first call, until it is told to go on."""

    def __init__(self, function):
        self.function, self.calls, self.entered, self.open = function, 0, threading.Event(), threading.Event()

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls == 1:
            self.entered.set()
            assert self.open.wait(300)
        return self.function(*args, **options)


@pytest.mark.parametrize("what", ["read", "load"])
def test_other_texts_are_asked_while_one_is_read(module, serve, model, tmp_path, monkeypatch, what):
    first = module.Service(model, Bytes(), tmp_path, budget=1.0)
    ask = serve(first)
    names = [first.read(text) for text in (TEXTS[:1] if what == "read" else TEXTS[:2])]
    if what == "load":  # by another service, which has only the files
        again = module.Service(model, Bytes(), tmp_path, budget=1.0)
        ask = serve(again)
        again.answer(names[0], "Who?", NEW)
        gate = Gate(module.CompressedCache.load)
        monkeypatch.setattr(module.CompressedCache, "load", gate)
    else:
        gate = Gate(module.compress)
        monkeypatch.setattr(module, "compress", gate)

    def slow(question):
        path, content = f"/texts/{names[-1]}", {"question": question, "max_new_tokens": NEW}
        if what == "read":
            name = ask("/texts", {"text": TEXTS[1]})[1]["name"]
            path = f"/texts/{name}"
        return ask(path, content)[1]["answer"]

    with ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(slow, question) for question in QUESTIONS]
        assert gate.entered.wait(300)
        status, found = ask(f"/texts/{names[0]}", {"question": "Who?", "max_new_tokens": NEW})
        assert (status, found["answer"]) == (200, dense(model, TEXTS[0], "Who?"))
        assert not any(client.done() for client in waiting)
        gate.open.set()
        assert [client.result() for client in waiting] == [dense(model, TEXTS[1], asked) for asked in QUESTIONS]
    assert gate.calls == 1  # for all who waited


def test_a_text_that_cannot_be_read_is_refused_and_may_come_again(module, serve, model, tmp_path, monkeypatch):
    ask = serve(module.Service(model, Bytes(), tmp_path, budget=1.0))

    def fails(*_, **__):
        raise ValueError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(module, "compress", fails)
        assert ask("/texts", {"text": TEXTS[0]}) == (400, {"error": "out of memory"})
    name = ask("/texts", {"text": TEXTS[0]})[1]["name"]
    asked = {"question": "Who?", "max_new_tokens": NEW}
    assert ask(f"/texts/{name}", asked) == (200, {"answer": dense(model, TEXTS[0], "Who?")})


def test_wrong_requests_get_a_reason(module, serve, model, tmp_path):
    ask = serve(module.Service(model, Bytes(), tmp_path, budget=1.0))
    name = ask("/texts", {"text": TEXTS[0]})[1]["name"]
    for path, content, status, reason in (
        ("/texts", b"no JSON", 400, "Expecting value"),
        ("/texts", {}, 404, "text"),
        (f"/texts/{name}", {"question": ""}, 400, "question has no tokens"),
        (f"/texts/{'0' * 16}", {"question": "Who?"}, 404, "is not known here"),
        ("/texts/../secret", {"question": "Who?"}, 404, "is not known here"),
        ("/elsewhere", {}, 404, "is not known here"),
    ):
        found = ask(path, content)
        assert found[0] == status
        assert reason in found[1]["error"]
    assert ask(f"/texts/{name}", {"question": "Who?", "max_new_tokens": NEW})[1]["answer"] == dense(
        model, TEXTS[0], "Who?"
    )

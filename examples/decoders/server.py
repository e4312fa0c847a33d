"""A small service over HTTP: texts are read once and kept in few bytes, and many clients ask about them at once.

python examples/decoders/server.py --model MODEL --folder contexts --heads heads.json
curl localhost:8000/texts -d '{"text": "..."}'
curl localhost:8000/texts/NAME -d '{"question": "Who wrote the letter?", "max_new_tokens": 50}'

The standard library alone serves it, without encryption or accounts: an example to read, not to put on the internet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from levattn.integrations.transformers import CompressedCache, HeadProfile, compress

MOST = 16 << 20  # bytes of a request


class Service:
    """A model, and the texts that it has read: the last ones in memory, all in files.

    One text is read at a time, and `at_once` threads answer meanwhile. Who asks for a text that is being read waits
    for it. Each answer has a copy of the text's cache, which shares the slots and holds only its own question and
    answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        *,
        budget: float = 0.25,
        heads: HeadProfile | None = None,
        held: int = 8,
        at_once: int = 4,
    ) -> None:
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.budget, self.heads, self.held = budget, heads, held
        self._caches: OrderedDict[str, CompressedCache] = OrderedDict()
        self._coming: dict[str, Future[CompressedCache]] = {}  # what a thread is reading
        self._lock = threading.Lock()  # of these two, and never held for long
        self._reading, self._places = threading.Semaphore(), threading.Semaphore(at_once)
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, text: str) -> str:
        """Read a text, unless a file has it already, and return its name."""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        if not self._file(name).exists():
            self._cache(name, text)
        return name

    def answer(self, name: str, question: str, max_new_tokens: int = 50) -> str:
        """Answer a question about a text; `KeyError` if no such text was read."""
        fork = self._cache(name).copy()
        tokens = self.tokenizer(question, return_tensors="pt", add_special_tokens=False)
        with self._places:
            found = fork.ask(self.model, tokens, max_new_tokens=max_new_tokens, do_sample=False)
        return str(self.tokenizer.decode(found[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))

    def _cache(self, name: str, text: str | None = None) -> CompressedCache:
        """Return the cache of a text: from memory, from its file, or by reading it, once for all threads."""
        with self._lock:
            if name in self._caches:
                self._caches.move_to_end(name)
                return self._caches[name]
            coming, first = self._coming.get(name), name not in self._coming
            if coming is None:
                coming = self._coming[name] = Future()
        if first:
            try:
                coming.set_result(self._made(name, text))
            except BaseException as error:  # which all get who wait for it
                coming.set_exception(error)
            with self._lock:
                del self._coming[name]
                if coming.exception() is None:
                    self._caches[name] = coming.result()
                while len(self._caches) > self.held:  # the texts that were asked last stay
                    self._caches.popitem(last=False)
        return coming.result()

    def _made(self, name: str, text: str | None) -> CompressedCache:
        if self._file(name).exists():
            return CompressedCache.load(self._file(name), self.model)
        if text is None:
            raise KeyError(name)
        with self._reading:
            tokens = self.tokenizer(text, return_tensors="pt")
            cache = compress(self.model, tokens, self.budget, heads=self.heads)
        cache.save(self._file(name))
        return cache

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def handler(service: Service) -> type[BaseHTTPRequestHandler]:
    """Return what answers the requests of a service."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                self._reply(200, self._done())
            except KeyError as error:
                self._reply(404, {"error": f"{error} is not known here"})
            except (TypeError, ValueError) as error:  # what the library refuses, with the reason
                self._reply(400, {"error": str(error)})

        def _done(self) -> dict[str, Any]:
            length = int(self.headers.get("Content-Length", 0))
            if length > MOST:
                raise ValueError(f"the request has {length} bytes; expected at most {MOST}")
            asked = json.loads(self.rfile.read(length))
            if self.path == "/texts":
                return {"name": service.read(asked["text"])}
            found = re.fullmatch("/texts/([0-9a-f]{16})", self.path)
            if found is None:
                raise KeyError(self.path)
            most = int(asked.get("max_new_tokens", 50))
            return {"answer": service.answer(found[1], asked["question"], most)}

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    return Handler


def main() -> None:
    """Serve a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a decoder")
    parser.add_argument("--folder", type=Path, default=Path("contexts"), help="for the texts that were read")
    parser.add_argument("--heads", type=Path, help="a profile that head_profile(model, tokenizer).save wrote")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    heads = None if options.heads is None else HeadProfile.load(options.heads)
    service = Service(model, tokenizer, options.folder, budget=options.budget, heads=heads)
    with ThreadingHTTPServer(("127.0.0.1", options.port), handler(service)) as server:
        print(f"http://127.0.0.1:{options.port}")
        server.serve_forever()


if __name__ == "__main__":
    main()

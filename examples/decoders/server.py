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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from levattn.integrations.transformers import CompressedCache, HeadProfile, compress

MOST = 16 << 20  # bytes of a request


class Service:
    """A model, and the texts that it has read: the last ones in memory, all in files.

    One thread reads a text, `at_once` threads answer. Each answer has a copy of the text's cache, which shares the
    slots and holds only its own question and answer.
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
        self._lock, self._places = threading.Lock(), threading.Semaphore(at_once)
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, text: str) -> str:
        """Read a text, unless a file has it already, and return its name."""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._lock:
            if name not in self._caches and not self._file(name).exists():
                tokens = self.tokenizer(text, return_tensors="pt")
                cache = compress(self.model, tokens, budget=self.budget, heads=self.heads)
                cache.save(self._file(name))
                self._hold(name, cache)
        return name

    def answer(self, name: str, question: str, max_new_tokens: int = 50) -> str:
        """Answer a question about a text; `KeyError` if no such text was read."""
        with self._lock:
            cache = self._caches.get(name)
            if cache is None:
                if not self._file(name).exists():
                    raise KeyError(name)
                cache = CompressedCache.load(self._file(name), self.model)
            self._hold(name, cache)
            fork = cache.copy()
        tokens = self.tokenizer(question, return_tensors="pt", add_special_tokens=False)
        with self._places:
            found = fork.ask(self.model, tokens, max_new_tokens=max_new_tokens, do_sample=False)
        return str(self.tokenizer.decode(found[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _hold(self, name: str, cache: CompressedCache) -> None:
        """Keep the texts that were asked last."""
        self._caches[name] = cache
        self._caches.move_to_end(name)
        while len(self._caches) > self.held:
            self._caches.popitem(last=False)


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

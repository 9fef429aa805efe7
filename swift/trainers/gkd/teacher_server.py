"""A teacher behind a server: the log-probs of its likeliest tokens, by OpenAI's API with vLLM's `prompt_logprobs`.

`swift rollout` answers compactly, in 8 bytes a likely token. A server that is lost is asked again until it is back, for
as long as `--vllm_server_timeout` allows; then the run ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from swift.errors import ConfigError, EngineError, first_line, shortened
from swift.rollout.scores import from_entries
from swift.types import Completion, FinishReason, Request, TokenScores

if TYPE_CHECKING:
    from swift.models.template import Template

FLAG = "--teacher_model_server"
AT_A_TIME = 32
"""Requests of a process at a time."""
WAIT_S = 0.5
"""Between two tries, in seconds."""
PROBE = "How much is 12 + 30? \n\tÄ 日本語 🙂 <|x|> def f(x): return x ** 2"
"""Text that tokenizers are compared with, beside prompts."""
LINE = 300
"""Characters of a reply in a message."""


class TeacherServer:
    """Asks for scores of tokens, from any thread. everywhere: every rank asks for its own samples.

    url: of the server. top_k: number of likeliest tokens. timeout_s: how long a lost server is waited for.
    """

    everywhere = True

    def __init__(self, url: str, *, top_k: int, timeout_s: float, api_key: str | None = None) -> None:
        self.url, self.top_k, self.timeout_s = url.rstrip("/").removesuffix("/v1"), top_k, timeout_s
        key = api_key or os.environ.get("SWIFT_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=timeout)
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="teacher")
        self._lock = threading.Lock()
        self._bytes = self._tokens = 0
        self._model = ""
        self._is_swift = False

    def check(self, template: Template, prompts: Sequence[Sequence[int]]) -> str:
        """Find the model, compare its tokenizer with the policy's, and try a request; a line for the plan.

        Raises:
            ConfigError: another tokenizer, or a server that cannot score prompts.
            EngineError: it does not answer.
        """
        entry = self._ask("GET", "/v1/models")["data"][0]
        self._model, self._is_swift = str(entry["id"]), entry.get("owned_by") == "swift"
        texts = [PROBE, *(template.decode(ids, skip_special_tokens=False) for ids in prompts)]
        for text in texts:
            theirs = self._tokenized(text)
            if theirs != (ours := template.encode_text(text)):
                raise ConfigError(
                    f"{FLAG}: {self.url}: its tokenizer makes {shortened(str(theirs), 80)} of {text[:40]!r}, and the "
                    f"policy's {shortened(str(ours), 80)}; serve a model with the tokenizer of --model"
                )
        ids = template.encode_text(PROBE)
        try:
            self.score_now(ids[:1], ids[1:])
        except EngineError as error:
            raise ConfigError(
                f"{error.problems[0]}; serve it with `swift rollout`, or vLLM with --max-logprobs {self.top_k}"
            ) from error
        self.drain_metrics()
        return f"teacher: {self._model} at {self.url}, its {self.top_k} likeliest tokens at each place"

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TokenScores:
        """`score_now`, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.score_now, prompt_ids, token_ids)

    def score_all(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores]:
        """`score_now` of several prompts with their completions."""
        return list(self._threads.map(lambda pair: self.score_now(*pair), pairs))

    def score_now(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TokenScores:
        """The scores of a completion. Raises EngineError: the server is lost, or refuses."""
        first, whole = len(prompt_ids), [int(token) for token in (*prompt_ids, *token_ids)]
        body: dict[str, Any] = {"model": self._model, "prompt": whole, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = self.top_k
        if self._is_swift:
            body |= {"scored_from": first, "compact_scores": True}
        choice = self._ask("POST", "/v1/completions", body)["choices"][0]
        with self._lock:
            self._tokens += len(token_ids)
        try:
            if self._is_swift:
                return msgspec.convert(choice["prompt_scores"], TokenScores)
            return from_entries(choice["prompt_logprobs"][first:], whole[first:], self.top_k)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{FLAG}: {self.url}: returns no prompt log-probs ({first_line(error)})") from error

    async def generate(self, request: Request) -> Completion:
        """A sample of the teacher."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._sample, request)

    def _sample(self, request: Request) -> Completion:
        wanted = request.sampling
        body = {
            "model": self._model, "prompt": [int(token) for token in request.prompt_ids], "return_token_ids": True,
            "max_tokens": wanted.max_new_tokens, "temperature": wanted.temperature, "top_p": wanted.top_p,
            "seed": wanted.seed % 2**31, "stop": list(wanted.stop) or None,
        }  # fmt: skip
        choice = self._ask("POST", "/v1/completions", body)["choices"][0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise EngineError(f"{FLAG}: {self.url}: returns no token_ids for --seq_kd; use vLLM or `swift rollout`")
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion(request.request_id, ids, [], reason)

    def drain_metrics(self) -> dict[str, float]:
        """Bytes of replies for each scored token since the last call."""
        with self._lock:
            found = {"distillation/bytes_per_token": self._bytes / self._tokens} if self._tokens else {}
            self._bytes = self._tokens = 0
        return found

    def close(self) -> None:
        """End the threads and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _tokenized(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return list(self._ask("POST", "/tokenize", body)["tokens"])
        except (EngineError, KeyError) as error:
            raise ConfigError(
                f"{FLAG}: {self.url}: has no route /tokenize ({first_line(error)}), so tokenizers cannot be compared; "
                "use vLLM or `swift rollout`"
            ) from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A reply; asked for again while the server is lost or overloaded."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                reply = self._http.request(method, path, json=body)
                problem = f"status {reply.status_code}: {shortened(reply.text, LINE)}"
                if reply.status_code == 200:
                    with self._lock:
                        self._bytes += len(reply.content)
                    found: dict[str, Any] = msgspec.json.decode(reply.content, type=dict[str, Any])
                    return found
                if reply.status_code not in (429, 500, 502, 503, 504):
                    raise EngineError(f"{FLAG}: {self.url}: {problem}")
            except httpx.TransportError as error:
                problem = first_line(error) or type(error).__name__
            except msgspec.DecodeError as error:
                raise EngineError(f"{FLAG}: {self.url}: {path}: no JSON ({first_line(error)})") from error
            if time.monotonic() > deadline:
                limit = f"{self.timeout_s:g} s (--vllm_server_timeout)"
                raise EngineError(f"{FLAG}: {self.url}: {path}: no answer within {limit}: {problem}")
            time.sleep(WAIT_S)

"""What people do to a server, for Locust: `tests/soak_server.py` runs it.

Answers are checked while they come: a stream ends with [DONE] and has as many tokens as were asked for.
"""

from __future__ import annotations

import json
import random
from typing import Any

from locust import HttpUser, between, task

WORDS = ["the", "answer", "is", "a", "red", "house", "near", "seven", "green", "rivers", "and", "nobody", "knows"]


def some_words(least: int, most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(least, most)))


class Person(HttpUser):
    """Asks, reads, and thinks for a moment."""

    wait_time = between(0.0, 0.3)

    def on_start(self) -> None:
        (listed,) = self.client.get("/v1/models").json()["data"]
        self.name = listed["id"]

    def ask(self, tokens: int, chat: bool, **options: Any) -> tuple[str, dict[str, Any]]:
        text = some_words(1, 20)
        body = {"model": self.name, "max_tokens": tokens, "ignore_eos": True} | options
        if chat:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        return "/v1/completions", body | {"prompt": text}

    @task(6)
    def stream(self) -> None:
        self._stream(leave_after=None)

    @task(2)
    def leave(self) -> None:
        self._stream(leave_after=random.randint(0, 10))

    def _stream(self, leave_after: int | None) -> None:
        tokens, options = random.randint(1, 40), {"stream": True, "stream_options": {"include_usage": True}}
        path, body = self.ask(tokens, random.random() < 0.7, temperature=random.choice([0, 0.8]), **options)
        name = f"{path} (stream)" if leave_after is None else f"{path} (left)"
        with self.client.post(path, json=body, stream=True, name=name, catch_response=True) as response:
            if response.status_code != 200:
                return response.failure(response.text)
            events = []
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    events.append(line.removeprefix(b"data: "))
                if leave_after is not None and len(events) > leave_after:
                    response.close()
                    return response.success()
            if events[-1] != b"[DONE]":
                return response.failure(f"the stream ends with {events[-1]!r}")
            got = json.loads(events[-2])["usage"]["completion_tokens"]
            if got != tokens:
                return response.failure(f"{got} of {tokens} tokens")
            return response.success()

    @task(2)
    def whole(self) -> None:
        tokens, n = random.randint(1, 30), random.randint(1, 3)
        path, body = self.ask(tokens, random.random() < 0.5, n=n, temperature=1.0, seed=random.randrange(100))
        with self.client.post(path, json=body, catch_response=True) as response:
            if response.status_code != 200 or response.json()["usage"]["completion_tokens"] != n * tokens:
                return response.failure(response.text)
            return response.success()

    @task(1)
    def mistake(self) -> None:
        wrong = random.choice([{"temperature": -1}, {"model": "other"}, {"n": 0}, {"prompt_": 1}, {"stop": [5]}])
        path, body = self.ask(5, random.random() < 0.5)
        with self.client.post(path, json=body | wrong, name=f"{path} (refused)", catch_response=True) as response:
            if response.status_code not in (400, 404) or "error" not in response.json():
                return response.failure(f"{response.status_code} {response.text}")
            return response.success()

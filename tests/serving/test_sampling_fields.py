"""Stop strings, log-probabilities, penalties and biases, as the official client asks for them."""

from __future__ import annotations

import math

import pytest
import torch
from byte_models import byte_model, byte_tokenizer, saying
from servers import openai, served
from tiny_models import generate_alone, greedy

from hf_cb.serving.logprobs import LOWEST, TokenTexts

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model():
    return byte_model()


def script(server, monkeypatch, text: str) -> None:
    """From now on the server's model says this, and ends."""
    submit = server.manager.submit

    def scripted(*args, **options):
        return submit(*args, logits_processor=[saying(server.tokenizer, text)], eos_token_id=2, **options)

    monkeypatch.setattr(server.manager, "submit", scripted)


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))
def test_stop_strings(model, monkeypatch, stream) -> None:
    """The text ends before the stop string, however it is cut into tokens, and what only looks like one is text."""
    with served(model) as server:
        script(server, monkeypatch, "One. Two.EN Three.END Four.")
        create = server.client().chat.completions.create

        def ask(**options) -> tuple[str, str, str | int | None]:
            answer = create(model="tiny", messages=HELLO, stream=stream, **options)
            if not stream:
                (choice,) = answer.choices
                return choice.message.content, choice.finish_reason, choice.stop_reason
            choices = [c.choices[0] for c in answer]
            return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason, choices[-1].stop_reason

        assert ask(stop="END") == ("One. Two.EN Three.", "stop", "END")
        assert ask(stop=["nothing", " Two"]) == ("One.", "stop", " Two")
        kept = ask(stop="END", extra_body={"include_stop_str_in_output": True})
        assert kept == ("One. Two.EN Three.END", "stop", "END")
        assert ask(stop="never")[:2] == ("One. Two.EN Three.END Four.", "stop")


def test_chat_logprobs(model) -> None:
    with served(model) as server:
        create = server.client().chat.completions.create
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "logprobs": True}
        whole = create(**asked, top_logprobs=3).choices[0]
        assert len(whole.logprobs.content) == 6
        text = b""
        for entry in whole.logprobs.content:
            assert len(entry.top_logprobs) == 3
            best = entry.top_logprobs[0]  # greedy: what was taken
            assert (best.token, best.logprob) == (entry.token, entry.logprob)
            assert entry.logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
            text += bytes(entry.bytes)
        assert text.replace(b"</s>", b"").decode(errors="replace") == whole.message.content
        stream = list(create(**asked, top_logprobs=3, stream=True))
        streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert [e.model_dump() for e in streamed] == [e.model_dump() for e in whole.logprobs.content]
        assert all(e.top_logprobs == [] for e in create(**asked).choices[0].logprobs.content)
        assert create(model="tiny", messages=HELLO, max_tokens=2).choices[0].logprobs is None
        # the model's own, whatever the temperature
        hot = create(**asked, temperature=9.0, seed=1, top_logprobs=1).choices[0].logprobs.content
        assert hot[0].top_logprobs[0].logprob == pytest.approx(whole.logprobs.content[0].logprob, abs=1e-4)


def test_completion_logprobs(model) -> None:
    with served(model) as server:
        create = server.client().completions.create
        (choice,) = create(model="tiny", prompt="abc", max_tokens=4, logprobs=2).choices
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 4
        assert found.text_offset[0] == 0 and all(len(top) == 2 for top in found.top_logprobs)
        for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert top[token] == value == max(top.values())
        chunks = list(create(model="tiny", prompt="abc", max_tokens=4, logprobs=2, stream=True))
        streamed = [p for c in chunks if c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs]
        assert streamed == found.token_logprobs
        (only,) = create(model="tiny", prompt="abc", max_tokens=4, logprobs=0).choices
        assert only.logprobs.token_logprobs == pytest.approx(found.token_logprobs)
        assert all(len(top) == 1 for top in only.logprobs.top_logprobs)


def test_a_prompt_is_scored(model) -> None:
    """echo with max_tokens=0 and logprobs, as evaluation harnesses ask: what one forward of the model says."""
    ids = byte_tokenizer()("score me")["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [scores[i, token].item() for i, token in enumerate(ids[1:])]
    with served(model) as server:
        create = server.client().completions.create
        (choice,) = create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices
        assert choice.text == "score me" and choice.logprobs.tokens == list("score me")
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(want, abs=1e-4)
        assert choice.logprobs.text_offset == list(range(8))
        (more,) = create(model="tiny", prompt=ids, max_tokens=2, echo=True, logprobs=1).choices
        assert len(more.logprobs.tokens) == 10 and more.logprobs.token_logprobs[1:8] == pytest.approx(want, abs=1e-4)
        (extra,) = create(model="tiny", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices
        assert extra.prompt_logprobs[0] is None
        got = [row[str(token)]["logprob"] for row, token in zip(extra.prompt_logprobs[1:], ids[1:], strict=True)]
        assert got == pytest.approx(want, abs=1e-4)
        assert create(model="tiny", prompt="text", max_tokens=0, echo=True).choices[0].text == "text"


def test_penalties_and_biases(model) -> None:
    tokenizer = byte_tokenizer()
    (a,) = tokenizer("a")["input_ids"]
    with served(model) as server:
        create = server.client().completions.create

        def text(**options) -> str:
            return create(model="tiny", prompt="some prompt", max_tokens=8, **options).choices[0].text

        assert text(logit_bias={str(a): 100}) == "aaaaaaaa"
        assert "a" not in text(logit_bias={str(a): -100})
        assert text(logit_bias={str(a): 50}, frequency_penalty=2) == text(logit_bias={str(a): 50})  # 50 is more
        assert text(presence_penalty=2.0) and text(frequency_penalty=-2.0)
        with pytest.raises(openai.BadRequestError, match="999"):
            text(logit_bias={"999": 1})


def test_ending_and_special_tokens(monkeypatch) -> None:
    own = byte_model()
    first = generate_alone(own, byte_tokenizer()("x")["input_ids"], greedy(1))[0]
    own.generation_config.eos_token_id = first
    with served(own) as server:
        create = server.client().completions.create
        ended = create(model="tiny", prompt="x")
        assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
        on = create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
        assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 16)
        script(server, monkeypatch, "Bye.")
        shown = create(model="tiny", prompt="x", extra_body={"skip_special_tokens": False})
        assert shown.choices[0].text == "Bye.</s>"


def test_user_and_priority() -> None:
    with served(engine={"policy": "fair"}) as server:
        create = server.client().completions.create
        assert create(model="tiny", prompt="x", user="someone").usage.completion_tokens == 16
        with pytest.raises(openai.BadRequestError, match="priority"):
            create(model="tiny", prompt="x", extra_body={"priority": 1})
    with served(engine={"policy": "priority"}) as server:
        answer = server.client().completions.create(model="tiny", prompt="x", extra_body={"priority": 1})
        assert answer.usage.completion_tokens == 16


def test_tokens_as_bytes() -> None:
    """Half a character has bytes, and no text of its own."""
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer("é")["input_ids"]
    assert [texts.of(i)[1] for i in ids] == [[b] for b in "é".encode()]
    assert texts.text(ids[0]) == "\N{REPLACEMENT CHARACTER}"
    assert texts.of(tokenizer.eos_token_id) == ("</s>", list(b"</s>"))
    assert math.isfinite(LOWEST)

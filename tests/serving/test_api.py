"""The official client against our server: what it answers, whole and streamed."""

from __future__ import annotations

import pytest
from byte_models import byte_model, byte_tokenizer, saying
from servers import served
from tiny_models import generate_alone, greedy

CHAT = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
AS_TEXT = "<system>be<user>hello<assistant>"


@pytest.fixture(scope="module")
def model():
    return byte_model()


def said_alone(model, text: str, count: int) -> str:
    tokenizer = byte_tokenizer()
    return tokenizer.decode(generate_alone(model, tokenizer(text)["input_ids"], greedy(count)))


def test_chat_whole_and_streamed(model) -> None:
    want = said_alone(model, AS_TEXT, 12)
    with served(model) as server:
        client = server.client()
        answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
        (choice,) = answer.choices
        assert choice.message.content == want and choice.message.role == "assistant"
        assert choice.finish_reason == "length" and answer.model == "tiny" and answer.object == "chat.completion"
        prompt = len(AS_TEXT)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 12)
        stream = client.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == prompt + 12
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # the first request's
        assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])


def test_parts_and_developers(model) -> None:
    with served(model) as server:
        create = server.client().chat.completions.create
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
        answer = create(model="tiny", messages=messages, max_tokens=12)
        assert answer.choices[0].message.content == said_alone(model, AS_TEXT, 12)
        thinking = create(
            model="tiny", messages=CHAT, max_tokens=5, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
        assert thinking.usage.prompt_tokens == len(AS_TEXT + "<think>")
        open_end = create(model="tiny", messages=CHAT, max_tokens=5, extra_body={"add_generation_prompt": False})
        assert open_end.usage.prompt_tokens == len(AS_TEXT) - len("<assistant>")


def test_completions_of_every_kind_of_prompt(model) -> None:
    texts = ["one", "two words"]
    want = [said_alone(model, text, 16) for text in texts]
    ids = [byte_tokenizer()(text)["input_ids"] for text in texts]
    with served(model) as server:
        create = server.client().completions.create
        assert create(model="tiny", prompt=texts[0]).choices[0].text == want[0]  # 16 tokens, as OpenAI's
        assert create(model="tiny", prompt=ids[0]).choices[0].text == want[0]
        assert [c.text for c in create(model="tiny", prompt=texts).choices] == want
        assert [c.text for c in create(model="tiny", prompt=ids).choices] == want
        echoed = create(model="tiny", prompt=ids, echo=True)
        assert [c.text for c in echoed.choices] == [t + w for t, w in zip(texts, want, strict=True)]
        assert [c.index for c in echoed.choices] == [0, 1]
        assert echoed.usage.prompt_tokens == len("".join(texts)) and echoed.usage.completion_tokens == 32
        for echo in (False, True):
            got = ["", ""]
            for chunk in create(model="tiny", prompt=texts, stream=True, echo=echo):
                got[chunk.choices[0].index] += chunk.choices[0].text
            assert got == [t * echo + w for t, w in zip(texts, want, strict=True)]


def test_sampling_with_n_and_seed(model) -> None:
    with served(model) as server:
        create = server.client().completions.create

        def sample(**options) -> list[str]:
            return [c.text for c in create(model="tiny", prompt="x", n=3, max_tokens=8, **options).choices]

        first = sample(seed=1, temperature=5.0)
        assert len(set(first)) == 3 and first == sample(seed=1, temperature=5.0)
        assert first != sample(seed=2, temperature=5.0) and sample(seed=-1, temperature=5.0)
        streamed = ["", "", ""]
        for chunk in create(model="tiny", prompt="x", n=3, max_tokens=8, seed=1, temperature=5.0, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == first
        # "n" alone asks for sampling, from all tokens at temperature 1, whatever the model's config leaves open
        assert sample(seed=1) == sample(seed=1, temperature=1.0, top_p=1.0, extra_body={"top_k": -1})
        assert len(set(sample(extra_body={"top_k": 1}))) == 1


def test_other_options_reach_the_engine(model) -> None:
    with served(model) as server:
        create = server.client().completions.create
        plain = create(model="tiny", prompt="some prompt").choices[0].text
        assert (
            create(model="tiny", prompt="no matter: some prompt", extra_body={"truncate_prompt_tokens": 11})
            .choices[0]
            .text
            == plain
        )
        assert (
            create(model="tiny", prompt="some prompt", extra_body={"repetition_penalty": 0.05}).choices[0].text != plain
        )
        first = byte_tokenizer()(plain)["input_ids"][0]
        stopped = create(model="tiny", prompt="some prompt", extra_body={"stop_token_ids": [first]})
        assert stopped.choices[0].finish_reason == "stop" and stopped.usage.completion_tokens == 1
        on = create(model="tiny", prompt="some prompt", extra_body={"stop_token_ids": [first], "min_tokens": 3})
        assert on.usage.completion_tokens >= 3


def test_the_models_own_settings_are_the_defaults(model) -> None:
    own = byte_model()
    own.generation_config.update(do_sample=True, temperature=4.0, top_k=3)
    with served(own) as server:
        create = server.client().completions.create
        same = [create(model="tiny", prompt="x", seed=5).choices[0].text]
        same.append(create(model="tiny", prompt="x", seed=5, temperature=4.0, extra_body={"top_k": 3}).choices[0].text)
        assert same[0] == same[1]
        assert create(model="tiny", prompt="x", temperature=0).choices[0].text == said_alone(model, "x", 16)


def test_models_and_ids(model) -> None:
    with served(model) as server:
        client = server.client()
        (listed,) = client.models.list().data
        assert listed.id == "tiny" and client.models.retrieve("tiny").max_model_len == 512
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=CHAT, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
        )
        assert raw.headers["x-request-id"] == "mine-1"
        again = client.chat.completions.with_raw_response.create(model="tiny", messages=CHAT, max_tokens=1)
        assert len(again.headers["x-request-id"]) == 32


def test_an_answer_that_ends(model, monkeypatch) -> None:
    with served(model) as server:
        submit = server.manager.submit

        def scripted(*args, **options):
            return submit(*args, logits_processor=[saying(server.tokenizer, "Bye é.")], eos_token_id=2, **options)

        monkeypatch.setattr(server.manager, "submit", scripted)
        create = server.client().chat.completions.create
        (choice,) = create(model="tiny", messages=CHAT).choices
        assert (choice.message.content, choice.finish_reason) == ("Bye é.", "stop")
        chunks = list(create(model="tiny", messages=CHAT, stream=True))
        texts = [c.choices[0].delta.content or "" for c in chunks]
        assert "".join(texts) == "Bye é." and chunks[-1].choices[0].finish_reason == "stop"

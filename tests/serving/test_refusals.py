"""Every field of OpenAI's requests is honoured or refused by its name; every error has OpenAI's shape."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from byte_models import byte_tokenizer
from servers import openai, served
from transformers import GenerationConfig

from hf_cb.serving.errors import ApiError
from hf_cb.serving.messages import ChatTemplate
from hf_cb.serving.options import submit_options
from hf_cb.serving.protocol import CHAT, COMPLETION, read_chat, read_completion

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BAD_CHAT = {
    "temperature": (-1, "warm", True, [], float("inf"), 10**400),
    "top_p": (0, 1.5, "x"),
    "n": (0, 1.0, 1000, "2"),
    "seed": (1.5, "x", 2**70),
    "stop": ("", [1], {}, [""]),
    "presence_penalty": (3, "x"),
    "frequency_penalty": (-3, "x"),
    "logit_bias": ([], {"a": 1}, {"5": 200}, {"5": "x"}, {"9" * 5000: 1}),
    "logprobs": (1, "yes"),
    "top_logprobs": (21, -1, True),
    "max_tokens": (0, -1, 2.5, "9"),
    "max_completion_tokens": (0, "9"),
    "stream": ("yes", 1),
    "user": (5,),
    "messages": ([], "hello", [1], [{}], [{"role": "user"}], [{"role": "boss", "content": ""}]),
    "tools": ("x", [{}], [{"type": "custom", "custom": {}}], [{"type": "function", "function": {}}]),
    "tool_choice": ("required", "auto", {"type": "function", "function": {"name": "f"}}),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "text"),
    "modalities": (["audio"], ["text", "audio"]),
    "service_tier": ("flex", "priority"),
    "store": (True,),
    "metadata": ({"a": "b"},),
    "reasoning_effort": ("low",),  # this template does not look at it
    "verbosity": ("low",),
    "prediction": ({"type": "content", "content": "x"},),
    "web_search_options": ({},),
    "functions": ([],),
    "function_call": ("auto",),
    "audio": ({},),
    "top_k": (-2, 1.5),
    "min_p": (2, "x"),
    "repetition_penalty": (0, -1),
    "min_tokens": (-1,),
    "ignore_eos": (1,),
    "stop_token_ids": (5, ["a"], [-1], [2**40]),
    "truncate_prompt_tokens": (0, -2),
    "prompt_logprobs": (-1, 21, True),
    "priority": (1.5,),
    "chat_template_kwargs": ({"tokenize": False}, {"chat_template": "x"}, {"nothing_it_knows": 1}, []),
    "stream_options": ({"include_usage": True}, []),  # without stream
    "use_beam_search": (True,),
    "guided_json": ({},),
    "prompt": ("x",),  # of the other API
}
BAD_COMPLETION = {
    "prompt": ([], 5, [[]], ["a", 5], [1, "a"], [[1], "a"], {}),
    "suffix": ("x",),
    "best_of": (2, 0),
    "echo": (1,),
    "logprobs": (True, 21),
    "max_tokens": (0, -1),
    "messages": (HELLO,),
    "add_special_tokens": (1,),
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


def read(body, template, is_chat: bool):
    request = read_chat(body, template) if is_chat else read_completion(body)
    submit_options(request, GenerationConfig())
    return request


@pytest.mark.parametrize("is_chat", (True, False), ids=("chat", "completions"))
def test_what_is_wrong_is_named(template, is_chat) -> None:
    base = {"model": "tiny"} | ({"messages": HELLO} if is_chat else {"prompt": "x"})
    read(base, template, is_chat)
    for name, value in cases(BAD_CHAT if is_chat else BAD_COMPLETION):
        with pytest.raises(ApiError) as caught:
            read(base | {name: value}, template, is_chat)
        error = caught.value
        assert error.status == 400 and error.param.startswith(name), (name, value, error.message)
        assert error.message.startswith(error.param)


def test_every_field_of_the_official_client_has_its_place() -> None:
    """A newer client brings new fields: each wants to be honoured, or refused with a reason."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert chat <= set(CHAT), chat - set(CHAT)
    completion = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert completion <= set(COMPLETION), completion - set(COMPLETION)


def test_the_page_has_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    missing = [name for name in {**CHAT, **COMPLETION} if f"`{name}`" not in page]
    assert not missing


def test_null_is_nothing(template) -> None:
    assert read({"messages": HELLO} | dict.fromkeys(set(CHAT) - {"messages"}), template, True).fields.keys() == {
        "messages"
    }
    nulls = {"prompt": "x"} | dict.fromkeys(set(COMPLETION) - {"prompt"})
    assert read(nulls, template, False).fields.keys() == {"prompt"}


MESSAGES = (
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([*HELLO, {"role": "assistant"}], "messages[1].content"),
    ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
    ([{"role": "user", "content": "x", "name": "Al"}], "messages[0].name"),  # the template has no place for it
    ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99_999}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
)


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=[param for _, param in MESSAGES])
def test_messages_are_checked(template, messages, param) -> None:
    with pytest.raises(ApiError) as caught:
        read({"messages": messages}, template, True)
    assert caught.value.param == param


def test_what_does_not_go_together(template) -> None:
    for more, name in (
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}, "tools[0].function.strict"),
    ):
        with pytest.raises(ApiError) as caught:
            read({"messages": HELLO} | more, template, True)
        assert caught.value.param == name
    plain = ChatTemplate(byte_tokenizer())
    plain.source = "{{ messages }}"
    with pytest.raises(ApiError, match="tools is not supported: the model's chat template"):
        read({"messages": HELLO, "tools": [TOOL]}, plain, True)


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict, dict]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), {k.lower(): v for k, v in error.headers.items()}


def test_errors_over_http() -> None:
    with served(api_key="secret", max_body_bytes=20_000, max_output_tokens=40) as server:
        client = server.client("secret")
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="other"):
            create(model="other", messages=HELLO)
        with pytest.raises(openai.NotFoundError, match="other"):
            client.models.retrieve("other")
        for options in (
            {"max_tokens": 41},
            {"messages": [{"role": "user", "content": "x" * 600}]},
            {"temperature": -1},
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create(**{"model": "tiny", "messages": HELLO, **options})
            assert caught.value.body["param"] == next(iter(options))
            assert caught.value.body["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=[5, 999])
        assert "999" in caught.value.body["message"]
        status, *_ = post(f"{server.url}/v1/completions", b'{"prompt": "x"}', Authorization="bearer secret")
        assert status == 200  # schemes have no case
        for key in ("wrong", "secret2"):
            with pytest.raises(openai.AuthenticationError, match="API key"):
                server.client(key).models.list()

        url, bearer = f"{server.url}/v1/completions", "Bearer secret"
        for body in (b"{", b"[]", b"\xff", b'{"prompt": "x", "temperature": NaN}', b"[" * 15_000):
            status, answer, headers = post(url, body, Authorization=bearer)
            assert status == 400 and answer["error"]["code"] == "invalid_json", body[:20]
            assert headers["x-request-id"]
        status, answer, _ = post(url, b'{"\\ud800": 1}', Authorization=bearer)
        assert (status, answer["error"]["param"]) == (400, "\ud800")
        assert post(url, b" " * 20_001, Authorization=bearer)[0] == 413
        status, answer, headers = post(url, b"{}")
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert post(f"{server.url}/v1/nothing", b"{}", Authorization=bearer)[0] == 404
        status, answer, _ = post(f"{server.url}/health", b"{}")
        assert status == 405 and answer["error"]["type"] == "invalid_request_error"
        with urllib.request.urlopen(f"{server.url}/health") as answer:  # for probes, which have no key
            assert answer.status == 200


def test_the_log_has_no_prompt_and_a_line_for_each_request(caplog) -> None:
    caplog.set_level("INFO", "hf_cb.server")
    with served() as server:
        assert post(f"{server.url}/v1/completions", b'{"prompt": "secret \\ud800"}')[0] == 400
        assert post(f"{server.url}/v1/completions", b'{"x\\nsecond line": 1}')[0] == 400
        assert post(f"{server.url}/x%0asecond%20line", b"{}")[0] == 404
    said = [record.getMessage() for record in caplog.records if record.name == "hf_cb.server"]
    assert len(said) == 3 and not any("secret" in line or "\n" in line for line in said), said


def test_a_full_queue_says_when_to_come_back() -> None:
    with served(engine={"max_queue_size": 2, "max_num_seqs": 1}, max_requests=4) as server:
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
        client = server.client()
        with server.manager.pause():
            handles = [server.manager.submit([5], max_new_tokens=2) for _ in range(2)]
            status, answer, headers = post(f"{server.url}/v1/completions", body)
            assert status == 429 and answer["error"]["type"] == "rate_limit_error"
            assert 1 <= int(headers["retry-after"]) <= 60
        assert all(len(h.result(20).generated_tokens) == 2 for h in handles)
        assert post(f"{server.url}/v1/completions", body)[0] == 200
        with pytest.raises(openai.BadRequestError, match="3 answers"):
            client.completions.create(model="tiny", prompt=["a", "b", "c"])
        server.service.gate.inside = 4
        status, answer, headers = post(f"{server.url}/v1/completions", body)
        assert status == 429 and answer["error"]["code"] == "server_full" and headers["retry-after"]
        server.service.gate.inside = 0

"""Tools go to the model through its template, and its calls come back as OpenAI's."""

from __future__ import annotations

import json

import pytest
from byte_models import saying
from servers import served

from hf_cb.serving.tools import ToolCall, ToolCallReader

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ZURICH = ToolCall("weather", '{"city": "Zürich"}')
EMPTY = ToolCall("weather", "{}")
HELLO = [{"role": "user", "content": "hello"}]

# a model's text -> what is in it
TEXTS = (
    ("no call", ["no call"]),
    ("blanks stay\n\n", ["blanks stay\n\n"]),
    (CALL, [ZURICH]),
    (f"Let me see.\n{CALL}\n{CALL}\n", ["Let me see.", ZURICH, ZURICH]),
    (f"\n\n{CALL} and then", [ZURICH, " and then"]),
    (CALL.removesuffix("</tool_call>"), [ZURICH]),  # ended by the end of the sequence
    ('<tool_call>{"name": "weather"}</tool_call>', [EMPTY]),
    ("a < b <tool_ca", ["a < b <tool_ca"]),
    ("<tool_call>{broken</tool_call>", ["<tool_call>{broken</tool_call>"]),
    ("<tool_call>[1]</tool_call>.", ["<tool_call>[1]</tool_call>."]),
    ('<tool_call>{"name": "weather", "argu', ['<tool_call>{"name": "weather", "argu']),
)


def joined(items: list[str | ToolCall]) -> list[str | ToolCall]:
    """Neighbouring texts as one."""
    result: list[str | ToolCall] = []
    for item in items:
        if isinstance(item, str) and result and isinstance(result[-1], str):
            result[-1] += item
        else:
            result.append(item)
    return result


@pytest.mark.parametrize(("text", "want"), TEXTS)
def test_calls_are_found_however_the_text_comes(text, want) -> None:
    for size in range(1, len(text) + 1):
        reader = ToolCallReader()
        found = [item for i in range(0, len(text), size) for item in reader.push(text[i : i + size])]
        assert joined(found + reader.finish()) == want, size


def test_one_call_at_most() -> None:
    reader = ToolCallReader(at_most_one=True)
    assert reader.push(CALL + CALL) + reader.finish() == [ZURICH]


def test_over_http(monkeypatch) -> None:
    with served() as server:
        submit, said = server.manager.submit, f"Let me see.\n{CALL}"

        def scripted(*args, **options):
            return submit(*args, logits_processor=[saying(server.tokenizer, said)], eos_token_id=2, **options)

        monkeypatch.setattr(server.manager, "submit", scripted)
        create = server.client().chat.completions.create
        answer = create(model="tiny", messages=HELLO, tools=TOOLS)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Zürich"}
        template = "<tools>" + json.dumps(TOOLS) + "<user>hello<assistant>"
        assert answer.usage.prompt_tokens == len(template)

        chunks = list(create(model="tiny", messages=HELLO, tools=TOOLS, stream=True))
        deltas = [c.choices[0].delta for c in chunks]
        assert "".join(d.content or "" for d in deltas) == "Let me see."
        (streamed,) = [c for d in deltas for c in d.tool_calls or []]
        assert streamed.index == 0 and streamed.id and json.loads(streamed.function.arguments) == {"city": "Zürich"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        # the answer goes back, with its arguments as the object that templates take
        calls = [{"id": call.id, "type": "function", "function": call.function.model_dump()}]
        history = [*HELLO, {"role": "assistant", "tool_calls": calls}]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        again = create(model="tiny", messages=history, tools=TOOLS, tool_choice="none")
        want = '<user>hello<assistant><tool_call>{"city": "Zürich"}</tool_call><tool>sunny<assistant>'
        assert again.usage.prompt_tokens == len(want.encode())
        assert again.choices[0].message.content == said and again.choices[0].message.tool_calls is None

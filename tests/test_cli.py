"""The command line, called in this process on a tiny model in a folder."""

import io
import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_cb.cli import COMMANDS, doctor, main

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model on bytes, whose tokenizer has no chat template and adds no token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("model")
    make_model(vocab_size=len(vocab)).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def chat_folder(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template."""
    path = tmp_path_factory.mktemp("chat")
    for file in Path(folder).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_help_names_every_command_and_each_has_its_own(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert name in said
        assert main([name, "--help"]) == 0
        known = {"transformers": "arguments", "plan": "MODEL", "simulate": "--policy"}
        assert known.get(name, "--model") in capsys.readouterr().out


def test_no_command_is_an_error(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_generate_from_arguments(folder, capsys):
    assert main(["generate", "-m", folder, "-p", "one", "-p", "two words", "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr().out
    assert said.index("--- 0: one\n") < said.index("--- 1: two words\n")


def test_one_prompt_prints_its_text_alone(folder, capsys):
    assert main(["generate", "-m", folder, "-p", "one", "--max-new-tokens", "5", "--json"]) == 0
    (result,) = json_lines(capsys.readouterr().out)
    assert main(["generate", "-m", folder, "-p", "one", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == result["text"] + "\n"


def test_generate_from_standard_input_skips_blank_lines(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n  \nsecond\r\n"))
    assert main(["generate", "-m", folder, "--max-new-tokens", "3", "--json"]) == 0
    results = json_lines(capsys.readouterr().out)
    assert [r["index"] for r in results] == [0, 1]
    assert [r["metrics"]["prompt_tokens"] for r in results] == [len("first"), len("second")]
    assert all(r["finish_reason"] == "length" and r["error"] is None for r in results)
    assert all(r["metrics"]["ttft_s"] > 0 for r in results)


def test_no_prompts(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["generate"]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_a_failing_prompt_leaves_the_others_alone(folder, capsys):
    prompts = ["-p", "good", "-p", "x" * 999, "-p", "also good"]
    assert main(["generate", "-m", folder, *prompts, "--max-new-tokens", "3", "--json"]) == 1
    good, bad, also_good = json_lines(capsys.readouterr().out)
    assert good["error"] is None and also_good["error"] is None
    assert bad["index"] == 1 and bad["finish_reason"] == "error" and "999" in bad["error"]
    assert bad["metrics"]["ttft_s"] is None  # NaN is no JSON
    assert main(["generate", "-m", folder, *prompts, "--max-new-tokens", "3"]) == 1
    said = capsys.readouterr()
    assert "prompt 1 failed" in said.err and "--- 2: also good\n" in said.out


def test_sampling_repeats_with_a_seed(folder, capsys):
    def sample(*options: str) -> list[str]:
        prompts = ["-p", "same", "-p", "same"]
        assert main(["generate", "-m", folder, *prompts, "--json", "--max-new-tokens", "8", *options]) == 0
        return [r["text"] for r in json_lines(capsys.readouterr().out)]

    first = sample("--temperature", "5", "--seed", "1")
    assert first[0] != first[1], "each request has its own seed"
    assert first == sample("--temperature", "5", "--seed", "1")
    assert first != sample("--temperature", "5", "--seed", "2")
    assert len(set(sample("--top-k", "1"))) == 1


def test_stop_text_and_progress(folder, capsys):
    assert main(["generate", "-m", folder, "-p", "one", "--max-new-tokens", "6", "--json"]) == 0
    (whole,) = json_lines(capsys.readouterr().out)
    stop = next(c for c in whole["text"] if c.isascii() and c.isprintable())
    options = ["--max-new-tokens", "6", "--json", "--stop", stop, "--progress"]
    assert main(["generate", "-m", folder, "-p", "one", *options]) == 0
    said = capsys.readouterr()
    (result,) = json_lines(said.out)
    assert result["finish_reason"] == "stop" and stop in result["text"]
    assert "1/1" in said.err


def test_chats(chat_folder, capsys):
    def prompt_tokens(*options: str) -> int:
        assert main(["generate", "-m", chat_folder, "-p", "hi", "--json", "--max-new-tokens", "1", *options]) == 0
        (result,) = json_lines(capsys.readouterr().out)
        return result["metrics"]["prompt_tokens"]

    assert prompt_tokens() == len("<user>hi<assistant>")
    assert prompt_tokens("--system", "be") == len("<system>be<user>hi<assistant>")
    assert prompt_tokens("--no-chat") == len("hi")


BAD = (
    (["--kv-budget", "lots"], "kv_budget"),
    (["--max-new-tokens", "0"], "--max-new-tokens"),
    (["--top-p", "3"], "--top-p"),
    (["--temperature", "warm"], "--temperature"),
    (["--temperature", "0", "--top-k", "3"], "--top-k"),
    (["--chat"], "--chat"),
    (["--system", "be kind"], "--system"),
    (["--device", "cpu", "--device-map", "auto"], "--device-map"),
    (["--device", "abacus"], "abacus"),
    (["--model", "/no/such/model"], "/no/such/model"),
    (["--nonsense"], "--nonsense"),
)


def test_a_bad_option_is_named_in_one_line(folder, capsys):
    for options, name in BAD:
        assert main(["generate", "-m", folder, "-p", "one", *options]) == 2, options
        said = capsys.readouterr()
        last = said.err.splitlines()[-1]
        assert said.out == "" and last.startswith("hf-cb") and name in last, options


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in (f"torch {torch.__version__}", "reference", "native kernels", "GiB", "torch threads"):
        assert word in said


def test_doctor_explains_a_model(folder, capsys):
    assert main(["doctor", "-m", folder, "--json", "--max-model-len", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transformers_problem"] is None
    assert found["free_memory_bytes"] > 0
    assert found["model"]["path"] == "paged"
    assert "100" in found["model"]["config"]["max_model_len"]


def test_doctor_says_what_is_wrong(folder, capsys, monkeypatch):
    from hf_cb.attention import interception

    monkeypatch.setattr(interception, "missing", lambda: ["a thing"])
    assert main(["doctor"]) == 1
    assert "lacks a thing" in capsys.readouterr().out


def test_interrupted(capsys, monkeypatch):
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_bench(folder, capsys, tmp_path):
    file = tmp_path / "bench.json"
    sizes = ["--requests", "4", "--prompt-mean", "20", "--out-min", "2", "--out-max", "6", "--repeat", "2"]
    assert main(["bench", "-m", folder, *sizes, "--no-first-token", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert set(figures["engines"]) == {"hf_cb", "generate", "transformers"}
    for name, engine in figures["engines"].items():
        assert engine["output_tokens"] == figures["workload"]["output_tokens"], name
        assert len(engine["runs"]) == 2 and engine["tok_s"] > 0 and engine["itl_p95_s"] > 0
        assert name in said
    assert set(figures["ratios"]) == {"hf_cb / generate", "hf_cb / transformers"}
    assert figures["problems"] == [] and figures["decode_steps"]["full"]["host_ms"] > 0
    assert figures["date"] and figures["machine"]["cores"] and figures["versions"]["torch"]
    assert figures["model"]["dtype"] == "bfloat16"


def test_bench_refuses_before_it_works(folder, capsys, tmp_path):
    assert main(["bench", "-m", folder, "--engines", "hf_cb,warp"]) == 2
    assert "warp" in capsys.readouterr().err
    assert main(["bench", "-m", folder, "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "--json" in capsys.readouterr().err
    assert main(["bench", "-m", folder, "--out-max", "256"]) == 2
    assert "no room for a prompt" in capsys.readouterr().err


def test_bench_times_the_first_token_in_a_fresh_process(folder, capsys, tmp_path):
    file = tmp_path / "bench.json"
    sizes = ["--engines", "hf_cb", "--workload", "single", "--prompt-mean", "9", "--out-max", "2"]
    assert main(["bench", "-m", folder, *sizes, "--json", str(file)]) == 0
    first = json.loads(file.read_text())["first_token"]
    parts = first["import_s"] + first["accelerate_s"] + first["generate_s"]
    assert first["total_s"] == pytest.approx(parts) and first["import_s"] > 0
    assert "to the first token" in capsys.readouterr().out

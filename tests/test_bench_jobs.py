"""What the benchmark's peers are given: the job, and the model in a form that they read."""

import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

from hf_cb.bench.gguf_file import write_gguf
from hf_cb.bench.measured import CannotRun
from hf_cb.bench.peer import PeerError
from hf_cb.bench.peer_jobs import job_maker
from hf_cb.bench.workload import BenchRequest, Workload

LOAD = Workload("few", [BenchRequest([5, 6, 7], 3), BenchRequest([8, 9], 2), BenchRequest([1], 9)])
EXPORTER = """#!/bin/sh
for out; do :; done
mkdir "$out"; echo "$@" > "$out/arguments"
"""


@pytest.fixture
def folder(llama, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llama.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def program(path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_job_has_room_for_the_longest_requests_that_run_together(llama, folder):
    job = job_maker("vllm", "python", llama, folder, LOAD, max_seqs=2, prefix_caching=False)()
    config = llama.config
    dim = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * 4
    assert job["model"] == os.path.realpath(folder) and job["dtype"] == "float32"
    assert (job["max_seqs"], job["max_len"], job["kv_tokens"], job["prefix_caching"]) == (2, 10, 16, False)
    assert job["kv_bytes"] == 16 * token and job["threads"] == torch.get_num_threads()


def test_a_model_on_another_device_is_not_for_peers_on_the_cpu(llama, folder):
    with pytest.raises(CannotRun, match="on meta"):
        job_maker("openvino", "python", llama.to("meta"), folder, LOAD, 64, False)()


def test_a_model_in_the_peers_own_form_is_taken_as_it_is(llama, folder):
    assert job_maker("llamacpp", "python", llama, folder, LOAD, 64, True, given="/some/file.gguf")()["model"] == (
        "/some/file.gguf"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for OpenVINO's Python")
def test_an_export_is_made_once_and_again_when_the_model_changes(llama, folder, tmp_path):
    python = program(tmp_path / "python", EXPORTER)
    make = job_maker("openvino", python, llama, folder, LOAD, 64, False)
    exported = make()["model"]
    arguments = Path(exported, "arguments").read_text()
    assert f"export openvino -m {os.path.realpath(folder)} --task text-generation-with-past" in arguments
    assert "--weight-format fp32" in arguments and exported.startswith(str(tmp_path / "cache" / "hf_cb" / "peers"))
    program(tmp_path / "python", "#!/bin/sh\nexit 9\n")
    assert make()["model"] == exported
    os.utime(os.path.join(folder, "config.json"), (1, 1))
    with pytest.raises(PeerError, match="exporting the model for openvino failed"):
        make()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for OpenVINO's Python")
def test_an_export_that_fails_says_why_and_leaves_nothing(llama, folder, tmp_path):
    python = program(tmp_path / "python", '#!/bin/sh\nfor out; do :; done\nmkdir "$out"; echo "no disk" >&2; exit 1\n')
    with pytest.raises(PeerError, match="no disk"):
        job_maker("openvino", python, llama, folder, LOAD, 64, False)()
    assert list((tmp_path / "cache").rglob("*openvino*")) == []


def test_a_gguf_file_has_the_models_weights(folder):
    gguf = pytest.importorskip("gguf", reason="GGUF files are made with the package gguf")
    model = make_model("Llama").to(torch.bfloat16)
    path = job_maker("llamacpp", "python", model, folder, LOAD, 64, False)()["model"]
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    weights = model.state_dict()
    assert len(tensors) == len(weights) - bool(model.config.tie_word_embeddings)
    assert reader.get_field("llama.attention.head_count_kv").contents() == model.config.num_key_value_heads
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == "BF16"
    stored = torch.from_numpy(down.data.copy()).view(torch.bfloat16)
    assert torch.equal(stored, weights["model.layers.0.mlp.down_proj.weight"])
    norm = torch.from_numpy(tensors["output_norm.weight"].data.copy())
    assert torch.equal(norm, weights["model.norm.weight"].float())
    # of each head, a query's first row stays, and its second was the first of the head's second half
    q = torch.from_numpy(tensors["blk.0.attn_q.weight"].data.copy()).view(torch.bfloat16)
    dim = q.shape[0] // model.config.num_attention_heads
    before = weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(q[:2], before[[0, dim // 2]])


@pytest.mark.parametrize(("family", "changes"), [("Gemma2", {}), ("Llama", {"hidden_act": "gelu"})])
def test_models_that_llama_cpp_reads_otherwise_are_refused(tmp_path, family, changes):
    pytest.importorskip("gguf", reason="GGUF files are made with the package gguf")
    with pytest.raises(CannotRun, match="--peer-model"):
        write_gguf(make_model(family, **changes), tmp_path / "x.gguf", torch.float32)
    assert list(tmp_path.iterdir()) == []

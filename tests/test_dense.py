"""The dense path: decoding requests as one padded batch that others join and leave."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, generate_alone, greedy, make_model, make_prompts
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

import hf_cb
from hf_cb import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.models import lanes
from hf_cb.models.dense import DenseModel
from hf_cb.models.lanes import Lanes


@pytest.fixture
def dense_only(monkeypatch, patched) -> None:
    monkeypatch.setattr(hf_cb.manager.probe, "PATHS", ("dense",))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("Mistral", WINDOW), ("Gemma3", {}), ("GPTNeoX", {})],
)
def test_requests_of_all_lengths_come_and_go(family: str, changes: dict[str, Any], dense_only) -> None:
    """Shorter and longer than a window of 8, some ended early, some started late, some preempted."""
    model = make_model(family, **changes)
    prompts = make_prompts([1, 25, 9, 7, 30, 12])
    counts = [20, 9, 14, 30, 3, 11]
    want = [generate_alone(model, p, greedy(n)) for p, n in zip(prompts, counts, strict=True)]
    config = EngineConfig(block_size=4, num_blocks=18, max_num_seqs=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(n)) for p, n in zip(prompts[:4], counts, strict=False)]
            cancelled = manager.submit(prompts[1], greedy(40))
        next(iter(handles[0]))
        cancelled.cancel()
        handles += [manager.submit(p, greedy(n)) for p, n in zip(prompts[4:], counts[4:], strict=True)]
        results = [h.result(timeout=60) for h in handles]
        cancelled.result(timeout=60)
    assert [r.generated_tokens for r in results] == want
    assert sum(record.preempted for record in manager.trace()) > 0
    assert len(manager.engine.runner) == 0
    manager.engine.check_idle()


def test_a_step_is_one_forward(dense_only, monkeypatch) -> None:
    model = make_model()
    rows: list[int] = []
    together = DenseModel._decode_together

    def count(self: DenseModel, lanes: Lanes, requests: list[Request]) -> dict[Request, torch.Tensor]:
        rows.append(len(requests))
        return together(self, lanes, requests)

    hf_cb.explain(model)
    monkeypatch.setattr(DenseModel, "_decode_together", count)
    with model.continuous_batching_context_manager() as manager:
        with manager.pause():  # so that all are there at once
            handles = [manager.submit(p, greedy(6)) for p in make_prompts([3, 5, 9])]
        assert all(h.result(timeout=60).error is None for h in handles)
    assert rows == [3] * 5


@pytest.mark.parametrize("kind", ["static", "sliding_window"])
def test_a_cache_of_fixed_size_in_the_generation_config(kind: str, patched) -> None:
    model = make_model()
    want = generate_alone(model, make_prompts([9])[0], greedy(4))
    model.generation_config.cache_implementation = kind
    model.generation_config.prefill_chunk_size = 4
    assert model.generate_batch(make_prompts([9]), greedy(4))["req_0"].generated_tokens == want
    assert model.generation_config.cache_implementation == kind and hf_cb.explain(model).path == "paged"


def test_one_long_request_does_not_pad_the_short_ones(dense_only, monkeypatch) -> None:
    model = make_model()
    prompts = make_prompts([200, 3, 4, 150, 60])
    want = [generate_alone(model, p, greedy(8)) for p in prompts]
    together, batches = DenseModel._decode_together, []

    def note(self: DenseModel, lanes: Lanes, requests: list[Request]) -> dict[Request, torch.Tensor]:
        batches.append([len(r.token_ids) for r in requests])
        return together(self, lanes, requests)

    monkeypatch.setattr(DenseModel, "_decode_together", note)
    with model.continuous_batching_context_manager() as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(8)) for p in prompts]
        assert [h.result(timeout=60).generated_tokens for h in handles] == want
    assert any(max(b) > 200 for b in batches) and any(max(b) < 64 for b in batches)
    assert all(max(b) < 2 * max(64, min(b)) for b in batches)


def request(name: str) -> Request:
    return Request(name, [1], SamplingParams(1))


def cache_of(length: int, value: float) -> DynamicCache:
    """A full layer, a layer with a window of 4, and a recurrent one."""
    cache = DynamicCache(config=make_model("Mistral", sliding_window=4, num_hidden_layers=2).config)
    cache.layers[0] = DynamicCache().layer_class_to_replicate()
    for i in range(2):
        keys = torch.full((1, 2, length, 3), value)
        cache.update(keys, keys + 1, i)
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.full((1, 5, 3), value))
    cache.layers.append(layer)
    return cache


def test_join_and_take_apart() -> None:
    caches = [cache_of(2, 1.0), cache_of(9, 2.0)]
    whole = lanes.join(caches)
    assert whole.layers[0].keys.shape == (2, 2, 9, 3) and whole.layers[1].keys.shape == (2, 2, 3, 3)
    assert whole.layers[1].cumulative_length == 9
    assert whole.layers[0].keys[0, 0, :, 0].tolist() == [0.0] * 7 + [1.0] * 2
    for i in range(2):
        whole.update(torch.full((2, 2, 1, 3), 5.0), torch.full((2, 2, 1, 3), 6.0), i)
    first, second = (lanes.select(whole, slice(row, row + 1), length, 10) for row, length in ((0, 3), (1, 10)))
    assert first.layers[0].keys[0, 0, :, 0].tolist() == [1.0, 1.0, 5.0]
    assert first.layers[1].keys[0, 0, :, 0].tolist() == [1.0, 1.0, 5.0] and first.layers[1].cumulative_length == 3
    assert second.layers[0].values[0, 0, :, 0].tolist() == [3.0] * 9 + [6.0]
    assert second.layers[1].keys.shape[2] == 3 and second.layers[1].cumulative_length == 10
    assert first.layers[2].conv_states[0].unique().tolist() == [1.0]
    assert caches[0].layers[0].keys.shape[2] == 2  # the parts are as they were


def test_what_cannot_be_one_batch() -> None:
    with pytest.raises(ValueError, match="window differs"):
        lanes.join([{"window": 3}, {"window": 4}])


def test_lanes_join_and_leave() -> None:
    a, b, c, d = (request(name) for name in "abcd")
    found = Lanes()
    for value, r in enumerate((a, b, c, d)):
        found.put(r, {"keys": torch.full((1, 1, value + 1, 1), float(value))}, value + 1)
    joined, order = found.together([b, a])
    assert order == [b, a] and found.together([a, b])[0] is joined
    joined, order = found.together([d, b, c])  # a leaves, two come; the row that stays comes first
    assert order == [b, d, c] and joined["keys"][:, 0, :, 0].tolist() == [[0, 0, 1, 1], [3, 3, 3, 3], [0, 2, 2, 2]]
    joined, order = found.together([b, c])  # with the longest gone, its padding goes too
    assert order == [b, c] and joined["keys"][:, 0, :, 0].tolist() == [[0, 1, 1], [2, 2, 2]]
    assert [found.one(r)["keys"].flatten().tolist() for r in (a, d)] == [[0], [3, 3, 3, 3]]


def test_lanes_forget() -> None:
    a, b, c = (request(name) for name in "abc")
    found = Lanes()
    for value, r in enumerate((a, b, c)):
        found.put(r, {"state": torch.full((1, 2), float(value))})
    joined, _ = found.together([a, b])
    joined["state"][:] += 10
    found.forget(a)
    found.put(a, {"state": torch.full((1, 2), 99.0)})  # back after a preemption: its old row is nothing to it
    assert [found.one(r)["state"][0, 0].item() for r in (a, b, c)] == [99.0, 11.0, 2.0]
    memory = weakref.ref(found.together([b, c])[0]["state"])
    del joined
    for r in (a, b, c):
        found.forget(r)
    gc.collect()
    assert len(found) == 0 and memory() is None, "the batch goes with its last request"

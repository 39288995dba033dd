"""What the recogniser must not take for something else, and what packing must survive."""

from __future__ import annotations

import pytest
import torch
import transformers
from packed_models import alone, tokens
from tiny_models import SHAPE, make_model
from torch import nn

import hf_cb
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.twin import spread_weights
from hf_cb.modules.recognise import NotRecognised, activation_of, norm_recipe

pytestmark = pytest.mark.skipif(lib.library() is None, reason=f"no compiled kernels: {lib.problem()}")


@pytest.mark.parametrize("size", [64, 2048])
def test_a_layer_norm_in_bfloat16_is_no_rms_norm(size: int) -> None:
    assert norm_recipe(nn.LayerNorm(size).bfloat16()).centred


def test_an_activation_that_differs_far_out_is_another() -> None:
    mlp = nn.Module()
    mlp.act = nn.ReLU6()
    with pytest.raises(NotRecognised):
        activation_of(mlp)


def test_scaling_by_position_is_seen() -> None:
    """Queries of Ministral 3 are scaled beyond the original maximum, which eleven tokens never reach."""
    if not hasattr(transformers, "Ministral3Config"):
        pytest.skip("this transformers has no Ministral 3")
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
    rope |= dict(llama_4_scaling_beta=0.5, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    options = SHAPE | dict(head_dim=16, rope_parameters=rope)
    torch.manual_seed(0)
    model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**options)).eval().float()
    spread_weights(model)
    want = alone(model)
    hf_cb.accelerate(model)
    assert tokens(model) == want
    hf_cb.restore(model)


@pytest.mark.parametrize("what", ["embedding", "norms"])
def test_mixed_dtypes(what: str) -> None:
    model = make_model("Llama", tie_word_embeddings=False)
    if what == "embedding":
        model.model.embed_tokens.to(torch.bfloat16)
    else:
        for layer in model.model.layers:
            layer.input_layernorm.to(torch.float64)
    try:
        want = alone(model)
    except RuntimeError:
        pytest.skip("torch does not compute this mixture")
    hf_cb.accelerate(model)
    assert tokens(model) == want
    hf_cb.restore(model)

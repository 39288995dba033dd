"""Parity with `generate` over every causal-LM architecture of transformers, on tiny random float32 models.

usage: python -m hf_cb.bench.sweep [--only llama,qwen3] [--seed 0] [--longest 40] [--block-size 16] [--budget 32]
       [--num-blocks N] [--page docs/models.md]

Each architecture is built from its configuration class (no download), with windows and chunks of 8 where it has them.
Eight prompts are decoded greedily for 12 tokens, one by one with `generate` and together with `generate_batch`. An
outcome is "same", "differs", "error" or "skipped" (cannot be built tiny, is an encoder-decoder, or `generate` fails).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_cb.config import EngineConfig
from hf_cb.models.twin import spread_weights
from hf_cb.patching import explain, patch, unpatch

VOCAB, WINDOW, NEW_TOKENS, MAX_PARAMETERS = 128, 8, 12, 60_000_000

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "mamba_d_state", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads"), 8),
    "linear_num_key_heads": 4,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "bos_token_id"), 1),
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

_FOUR_KV = {"num_key_value_heads": 4}
_ROPE_8 = {"num_key_value_heads": 4, "head_dim": 8}
_WINDOWED = {"use_sliding_window": True, "max_window_layers": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
# what a family needs beyond SIZES; windows and chunks are switched on where its default leaves them off
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), _ROPE_8),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "dots3_note_text"), _FOUR_KV),
    **dict.fromkeys(("qwen2", "qwen2_moe"), _WINDOWED),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text": {"attention_chunk_size": WINDOW},
    "doge": {"sliding_window": WINDOW},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **_MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
}


@dataclass
class Outcome:
    """What came of one architecture; `path` and `reason` as `hf_cb.explain` gives them."""

    name: str
    result: str
    detail: str = ""
    path: str = ""
    reason: str = ""
    seconds: float = 0.0


class CannotBuild(Exception):
    """This architecture has no tiny decoder-only model."""


def build_tiny(model_type: str, class_name: str, seed: int) -> Any:
    """A tiny model with logits spread so far that greedy decoding meets no ties; CannotBuild if there is none."""
    config_class, model_class = CONFIG_MAPPING[model_type], getattr(transformers, class_name)
    base = config_class()
    aliases, known = getattr(config_class, "attribute_map", {}), base.to_dict()
    options: dict[str, Any] = {
        k: v for k, v in SIZES.items() if (k in known or k in aliases) and not (k in aliases and aliases[k] in SIZES)
    }
    text = base.get_text_config()
    if text is not base:
        part = next(k for k in ("text_config", "decoder") if hasattr(base, k))
        options = {part: {k: v for k, v in SIZES.items() if k in text.to_dict()}}
    if known.get("sliding_window", 1) is None:
        options.pop("sliding_window", None)
    config = config_class(**options | SPECIAL.get(model_type, {}))
    if getattr(config, "is_encoder_decoder", False):
        raise CannotBuild("encoder-decoder")
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in model_class(config).parameters())
        except AttributeError:  # the class wants the text part alone
            config = config.get_text_config()
            size = sum(p.numel() for p in model_class(config).parameters())
    if size > MAX_PARAMETERS:
        raise CannotBuild(f"{size / 1e6:.0f} M parameters")
    torch.manual_seed(seed)
    model = model_class(config).eval().float()
    return spread_weights(model)


def prompts_up_to(longest: int) -> list[list[int]]:
    """Eight prompts around the window and the pages, the last one of `longest` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 3, 7, 8, 9, 17, 24, longest]
    return [torch.randint(3, 100, (n,), generator=generator).tolist() for n in lengths]


def compare(name: str, class_name: str, prompts: list[list[int]], engine: EngineConfig, seed: int) -> Outcome:
    """Builds one architecture and compares `generate_batch` with `generate`."""
    options = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        model = build_tiny(name, class_name, seed)
        want = [_alone(model, prompt, options) for prompt in prompts]
        if any(len(tokens) != NEW_TOKENS for tokens in want):
            raise CannotBuild("generate stopped early")
    except Exception as error:
        return Outcome(name, "skipped", _one_line(error))
    began = time.perf_counter()
    try:
        results = list(model.generate_batch(prompts, options, engine).values())
        found = explain(model)
    except Exception as error:
        return Outcome(name, "error", _one_line(error), seconds=time.perf_counter() - began)
    wrong = [len(p) for p, r, w in zip(prompts, results, want, strict=True) if r.generated_tokens != w]
    errors = [r.error for r in results if r.error]
    detail = errors[0] if errors else f"prompts of {wrong} tokens" if wrong else ""
    outcome = "error" if errors else "differs" if wrong else "same"
    return Outcome(name, outcome, detail, found.path, found.reason, time.perf_counter() - began)


def sweep(only: Sequence[str], longest: int, engine: EngineConfig, seed: int) -> Iterator[Outcome]:
    """All architectures, or some."""
    prompts = prompts_up_to(longest)
    patch()
    try:
        for name, classes in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
            if not only or name in only:
                class_name = classes if isinstance(classes, str) else classes[0]
                yield compare(name, class_name, prompts, engine, seed)
    finally:
        unpatch()


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/models.md: architecture, path, reason."""
    tried = [o for o in outcomes if o.result != "skipped"]
    paths = Counter(o.path for o in tried if o.result == "same")
    counts = ", ".join(f"{n} on the {path} path" for path, n in paths.most_common())
    rows = [f"| {o.name} | {o.path or o.result} | {_why(o)} |" for o in tried]
    return "\n".join(
        [
            "# Models",
            "",
            "Made by `make sweep`: tiny random float32 models of every causal-LM architecture of transformers "
            f"{version('transformers')} that can be built small without a download, compared token by token with "
            f"`generate`. Of {len(tried)}, {sum(paths.values())} give the same tokens: {counts}. "
            f"{len(outcomes) - len(tried)} more could not be tried.",
            "",
            "| architecture | path | why not a faster one |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _why(outcome: Outcome) -> str:
    why = outcome.detail if outcome.result != "same" else outcome.reason if outcome.path != "paged" else ""
    return why.replace("|", "/").replace("\n", " ")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if an architecture differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--longest", type=int, default=40, help="tokens of the longest prompt")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=32, help="query tokens in a step")
    parser.add_argument("--num-blocks", type=int, help="KV blocks; few of them make requests give way")
    parser.add_argument("--page", type=Path, help="write the table here")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    engine = EngineConfig(block_size=args.block_size, max_batch_tokens=args.budget, num_blocks=args.num_blocks)
    outcomes = []
    for o in sweep([n for n in args.only.split(",") if n], args.longest, engine, args.seed):
        outcomes.append(o)
        print(f"{o.name:24} {o.result:8} {o.path:10} {o.seconds:5.1f} s {o.detail[:90]}", flush=True)
    print(dict(Counter(o.result for o in outcomes)), dict(Counter(o.path for o in outcomes if o.path)))
    if args.page is not None:
        args.page.write_text(page(outcomes))
    return int(any(o.result in ("differs", "error") for o in outcomes))


def _alone(model: Any, prompt: list[int], options: GenerationConfig) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return out[0, len(prompt) :].tolist()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]


if __name__ == "__main__":
    sys.exit(main())

"""Every option of the engine, validated. What is left open ("auto") becomes a value in `sizes.py`.

`EngineConfig` is what a user writes. transformers' own
`ContinuousBatchingConfig` is accepted everywhere and converted: a field equal to transformers' default means "auto".
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from hf_cb.errors import OptionError
from hf_cb.policies import make_policy
from hf_cb.values import flag, is_number, is_whole

MAX_THREADS = 1024
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

# transformers' field -> ours
CONVERTED = {
    "page_size": "block_size",
    "block_size": "block_size",  # the older name; where both exist, transformers copies it into page_size
    "num_blocks": "num_blocks",
    "max_batch_tokens": "max_batch_tokens",
    "max_memory_percent": "max_memory_fraction",
    "max_requests_per_batch": "max_num_seqs",
    "allow_block_sharing": "prefix_caching",
    "scheduler_type": "policy",
    "return_logprobs": "return_logprobs",
    "use_async_batching": "overlap",
    "cpu_offload_space": "cpu_offload_space",
    "use_cuda_graph": "cuda_graphs",
    "max_queue_size": "max_queue_size",
    "seed": "seed",
}

# transformers' fields that only steer its own implementation: accepted in any setting, without effect on any answer
NEUTRAL = frozenset(
    {
        "max_blocks_per_request",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "varlen_compile_config",
        "decode_compile_config",
        "default_compile_level",
        "use_default_compile_configs",
        "max_cached_graphs",
        "safety_margin",
        "auto_switch_to_flash",
        "cpu_offload_space_safety_threshold",
        "disable_nccl_graph_mixing",
        "cpu_group_timeout",
        "per_request_processors",  # always on here
        "drop_unsupported_processors",  # none is unsupported here
    }
)


@dataclass
class EngineConfig:
    """Options of the engine; None means "auto".

    Args:
        block_size: tokens in a KV block.
        num_blocks: KV blocks, for all layers together. Excludes `kv_budget`.
        kv_budget: memory for the KV cache: bytes, or a string such as "2GiB" or "500MB".
        max_memory_fraction: share of the free memory that the KV cache may take when neither of the two is given.
        max_batch_tokens: query tokens in a step.
        max_num_seqs: requests in a step.
        max_model_len: positions of one request, the prompt's and those of all output tokens but the last, which is
            never fed back; the model's own number if None. An answer that reaches it ends with "length".
        prefill_chunk: most tokens of one prompt in a step; and while answers are running, of all prompts together, so
            that no step holds them up for longer. None: as many as a step may have.
        itl_target: seconds between two tokens of a running answer. While answers are running, a step takes as many
            prompt tokens as fit into that time, told from the steps so far; a few always. None: `prefill_chunk` alone.
        cpu_offload_space: the host's memory for what requests have computed that give their KV blocks to others on a
            GPU: bytes, or a string such as "8GiB". None: it is computed again.
        prefix_caching: reuse the blocks of equal prompt beginnings.
        overlap: launch each step while the one before it still runs, on tokens that only the device knows yet; a
            request that ends costs at most one token more. None: on a GPU. Answers are the same either way.
        cuda_graphs: record decode steps once for each of some batch sizes, and replay them. None: on CUDA.
        policy: whose turn it is: "continuous" (also "fifo", "inflight", "iteration"), "prefill_first", "priority",
            "fair", "deadline", "longest_prefix", "static" or "dynamic", perhaps with parameters ("dynamic:8:0.05"); or
            an object of an `hf_cb.policies.Policy` class. See docs/policies.md.
        attention: "flash" (FlashAttention 2, 3 or 4, where installed), "triton", "torch_varlen" (PyTorch's own), "cpu"
            or "reference". None: for each kind of layer the fastest on its device that can compute it.
        kv_dtype: "int8" keeps keys and values quantised, one scale for each token and head, only on the "cpu" backend;
            "fp8" keeps them in e4m3 without a scale, up to 448, only on the "triton" backend. Either takes about half
            the memory of bfloat16, for slightly less exact answers. None: the model's own dtype.
        modules: faster modules, verified against the model's own: "fused" (whole layers), "leaf" (linear layers and
            norms) or "off". None: "fused" for a model that `accelerate` was called on, else "off".
        return_logprobs: give each token's log-probability.
        max_queue_size: waiting requests beyond which a submission is rejected; 0 for no limit.
        queue_wait: seconds that a submission waits for room then, before it is rejected.
        max_queue_time: seconds after which a request that has not started ends with "timeout".
        seed: seed for the requests of this manager that have none of their own.
        num_threads: CPU threads of a step; torch's own setting if None.
        switch_interval: seconds for which a busy Python thread may hold up a step (`sys.setswitchinterval`, for the
            whole process, while steps run); None leaves Python's own 5 ms, with which such a thread stops them nearly.
        trace_steps: StepRecords kept.
        train_mode_timeout: seconds that a step waits for somebody else's `train()` to end.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    kv_budget: int | str | None = None
    max_memory_fraction: float | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    prefill_chunk: int | None = None
    itl_target: float | None = None
    cpu_offload_space: int | str | None = None
    prefix_caching: bool = True
    overlap: bool | None = None
    cuda_graphs: bool | None = None
    policy: Any = "continuous"
    attention: str | None = None
    kv_dtype: Literal["int8", "fp8"] | None = None
    modules: Literal["fused", "leaf", "off"] | None = None
    return_logprobs: bool = False
    max_queue_size: int = 0
    queue_wait: float = 0.0
    max_queue_time: float | None = None
    seed: int | None = None
    num_threads: int | None = None
    switch_interval: float | None = 1e-4
    trace_steps: int = 4096
    train_mode_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_batch_tokens", "max_num_seqs", "max_model_len", "prefill_chunk"):
            _check_count(name, getattr(self, name), least=1, optional=True)
        _check_count("num_threads", self.num_threads, least=1, optional=True)
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise OptionError(f"num_threads must be at most {MAX_THREADS}, not {self.num_threads}.")
        _check_count("max_queue_size", self.max_queue_size, least=0)
        _check_count("trace_steps", self.trace_steps, least=1)
        _check_count("seed", self.seed, least=0, optional=True)
        if self.switch_interval is not None:
            _check_number("switch_interval", self.switch_interval, least=1e-6)
        _check_number("queue_wait", self.queue_wait, least=0.0)
        for name in ("max_queue_time", "itl_target"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least=1e-9)
        make_policy(self.policy)  # refused now, if at all
        _check_number("train_mode_timeout", self.train_mode_timeout, least=0.0)
        if self.max_memory_fraction is not None:
            _check_number("max_memory_fraction", self.max_memory_fraction, least=0.0, most=1.0)
        if self.cpu_offload_space:
            self.cpu_offload_space = parse_bytes(self.cpu_offload_space, "cpu_offload_space")
        if self.kv_budget is not None:
            self.kv_budget = parse_bytes(self.kv_budget)
            if self.num_blocks is not None:
                raise OptionError(
                    f"num_blocks={self.num_blocks} and kv_budget={self.kv_budget} both size the KV cache: give one."
                )
        for name in ("overlap", "cuda_graphs"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True, False or None, not {getattr(self, name)!r}.")
        for name in ("prefix_caching", "return_logprobs"):
            flag(name, getattr(self, name))
        if self.kv_dtype not in (None, "int8", "fp8"):
            raise OptionError(f'kv_dtype={self.kv_dtype!r} must be "int8", "fp8", or None for the model\'s own dtype.')
        if self.modules not in (None, "fused", "leaf", "off"):
            raise OptionError(f'modules={self.modules!r} must be "fused", "leaf" or "off".')

    @classmethod
    def of(cls, config: Any = None, base: EngineConfig | None = None, **options: Any) -> EngineConfig:
        """The EngineConfig of what a user passed: None, ours, transformers', or a dict; `options` override it.

        transformers' own says nothing of most of ours: what it leaves open is as in `base`.

        Raises:
            OptionError: an unknown or unsupported option, by its name.
        """
        if config is None:
            given: dict[str, Any] = {}
        elif isinstance(config, EngineConfig):
            given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        elif isinstance(config, dict):
            given = dict(config)
        elif type(config).__name__ == "ContinuousBatchingConfig":
            given = _convert(config)
            if base is not None:
                rest = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
                if "num_blocks" in given:
                    rest["kv_budget"] = None
                given = rest | given
        else:
            raise OptionError(
                f"continuous_batching_config must be a ContinuousBatchingConfig or an hf_cb.EngineConfig, "
                f"not {type(config).__name__}."
            )
        given.update(options)
        known = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(f"Unknown option {name!r}; the options are {', '.join(known)}.")
        return cls(**given)


def parse_bytes(size: int | str, name: str = "kv_budget") -> int:
    """Bytes of "2GiB", "500MB", "1e9" or a plain number; OptionError for anything else."""
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise OptionError(f'{name} must be bytes or a string such as "2GiB", not {size!r}.')
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(size).lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else -1.0
    except (KeyError, ValueError):
        value = -1.0
    if not 1 <= value < 2**62:
        raise OptionError(f'{name} must be a positive size such as "2GiB", "500MB" or "1TB", not {size!r}.')
    return int(value)


def _convert(config: Any) -> dict[str, Any]:
    """The options in a transformers ContinuousBatchingConfig that differ from its defaults, under our names."""
    defaults = type(config)()
    options: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value == getattr(defaults, f.name) or f.name in NEUTRAL:
            continue
        if f.name not in CONVERTED:
            raise OptionError(f"ContinuousBatchingConfig.{f.name}={value!r} is not supported by hf_cb: leave it unset.")
        options[CONVERTED[f.name]] = f"{value}GiB" if f.name == "cpu_offload_space" else value
    return options


def _check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not is_whole(value):
        raise OptionError(f"{name} must be a whole number{' or None' if optional else ''}, not {value!r}.")
    if value < least:
        raise OptionError(f"{name} must be at least {least}, not {value}.")


def _check_number(name: str, value: Any, least: float, most: float = float("inf")) -> None:
    if not is_number(value) or not least <= value <= most:
        raise OptionError(f"{name} must be a number from {least} to {most}, not {value!r}.")

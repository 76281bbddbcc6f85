"""Whether a model can fit, estimated from its `config.json` before anything is loaded.

It refuses only what cannot work: whatever it doesn't know counts as small. vLLM itself measures, after minutes.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from launcher.command import GIB, Model, Plan, number
from launcher.device import Device
from launcher.model import ModelMissing

Config = Mapping[str, Any]

GPU_SHARE: Final = 0.92  # of a GPU's memory, which vLLM takes by default
BLOCK: Final = 16  # tokens; vLLM's unit of the KV cache
FETCH_S: Final = 5.0
BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# With these, either the weights or the cache are not what the configuration says.
ELSEWHERE: Final = {"quantization", "hf-overrides", "cpu-offload-gb", "load-format", "hf-config-path", "config"}
# Names of fields that speak of layers of another kind.
NO_CACHE: Final = ("mamba", "ssm", "linear_", "layers_block_type", "attn_layer_period", "rwkv")


class DoesNotFit(Exception):
    """The model can't run here as asked; the text says which argument would make it fit."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The estimate; None is unknown."""

    weights: int | None = None  # bytes for each worker
    kv_tokens: int | None = None  # at most, in all
    context: int | None = None  # tokens of one request


def read_config(model: Model, env: Mapping[str, str]) -> tuple[Config, int]:
    """A model's configuration and the bytes of its weight files; empty and 0 where they are not known.

    That of a hub's model comes from its cache, else from the hub, which vLLM is about to ask anyway.

    Raises:
        ModelMissing: the configuration is there and is none.
    """
    folder = Path(model.path) if model.path.startswith("/") else _cached(model.path, env)
    with contextlib.suppress(OSError, ValueError, httpx.HTTPError, httpx.InvalidURL):
        if folder is not None:
            return _own_config(folder / "config.json"), _weight_files(folder)
        if env.get("HF_HUB_OFFLINE", "0") in ("", "0"):
            headers = {"authorization": f"Bearer {env['HF_TOKEN']}"} if env.get("HF_TOKEN") else {}
            url = f"{env.get('HF_ENDPOINT') or 'https://huggingface.co'}/{model.path}/resolve/main/config.json"
            answer = httpx.get(url, headers=headers, timeout=FETCH_S, follow_redirects=True)
            return _as_config(answer.raise_for_status().json()), 0
    return {}, 0


def _own_config(file: Path) -> Config:
    try:
        config = json.loads(file.read_bytes())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ModelMissing(f"{file} is not a JSON object: fetch the model again")
    return config


def check(plan: Plan, device: Device, config: Config, weight_files: int) -> Fit:
    """What the model will take and leave of the memory.

    Raises:
        DoesNotFit: it can't work.
    """
    flags = plan.flags
    text = {**config, **_as_config(config.get("text_config"))}
    own = _int(text, "max_position_embeddings", "n_positions", "max_seq_len")
    asked = _tokens(flags.get("max-model-len", ""))
    _check_context(plan, text, own, asked)
    tensor, pipeline = (number(flags, f"{kind}-parallel-size", 1) for kind in ("tensor", "pipeline"))
    dtype = _dtype(flags.get("dtype", "auto"), text)
    weights = None if flags.keys() & ELSEWHERE else _weights(text, dtype, weight_files)
    if weights is not None:
        experts = number(flags, "data-parallel-size", 1) if "enable-expert-parallel" in flags else 1
        weights //= tensor * pipeline * experts
    cache = _for_cpu(plan, device, weights) if device.kind == "cpu" else _for_gpu(plan, device, weights)
    per_token = _kv_bytes(text, tensor, pipeline, 1 if "fp8" in flags.get("kv-cache-dtype", "") else dtype)
    if cache is None or not per_token or flags.keys() & {"num-gpu-blocks-override", "decode-context-parallel-size"}:
        return Fit(weights, None, asked or own)
    tokens = cache // per_token // BLOCK * BLOCK
    wanted = asked or own
    if "max-model-len" in flags and asked is None:  # "auto"
        wanted = min(own, tokens) if own else None
    if wanted and tokens < wanted and not text.get("sliding_window"):
        raise DoesNotFit(
            f"one request of {wanted:,} tokens needs {wanted * per_token / GIB:.1f} GiB of KV cache, and there is room "
            f"for {max(0, cache) / GIB:.1f}: " + _advice([f"--max-model-len {tokens}"] if tokens > 0 else [])
        )
    return Fit(weights, tokens * number(flags, "data-parallel-size", 1), wanted)


def _advice(ways: Sequence[str], otherwise: str = "take a smaller or a quantised model") -> str:
    return f"pass {' or '.join(ways)} after --" if ways else otherwise


def _check_context(plan: Plan, text: Config, own: int | None, asked: int | None) -> None:
    rope = {**_as_config(text.get("rope_scaling")), **_as_config(text.get("rope_parameters"))}
    stretched = rope.get("rope_type", rope.get("type", "default")) != "default" or "factor" in rope
    allowed = plan.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    if own and asked and asked > own and not stretched and not allowed and "hf-overrides" not in plan.flags:
        raise DoesNotFit(f"--max-model-len {asked} is longer than the model's own context: at most {own}")


def _for_cpu(plan: Plan, device: Device, weights: int | None) -> int | None:
    """Bytes of the KV cache, which has a fixed size on a CPU."""
    flags, space = plan.flags, plan.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    if "kv-cache-memory-bytes" in flags:
        cache = _tokens(flags["kv-cache-memory-bytes"])
    else:
        cache = int(space) * GIB if space.isdecimal() and "gpu-memory-utilization" not in flags else None
    if weights is not None and device.memory and weights + (cache or 0) > device.memory:
        left = device.memory - weights
        ways = []
        if left >= GIB:
            ways.append(f"--kv-cache-memory-bytes {left // GIB * GIB}")
        if flags.get("dtype") in ("float32", "float") and weights // 2 + (cache or 0) <= device.memory:
            ways.append("--dtype bfloat16")
        raise DoesNotFit(
            f"{_gib(weights)} of weights as {plan.dtype} and {_gib(cache or 0)} of KV cache don't fit into "
            f"{_gib(device.memory)} of free memory: " + _advice(ways)
        )
    return cache


def _for_gpu(plan: Plan, device: Device, weights: int | None) -> int | None:
    """Bytes of the KV cache on each GPU, at most: what the weights leave of vLLM's share."""
    if not device.total:
        return None
    share = plan.flags.get("gpu-memory-utilization", "")
    try:
        budget = int(float(share or GPU_SHARE) * device.total)
    except (ValueError, OverflowError):
        return None
    if budget > device.memory:
        fits = math.floor(100 * device.memory / device.total) / 100
        raise DoesNotFit(
            f"{_gib(device.memory)} of {_gib(device.total)} are free on the GPU, and vLLM wants {share or GPU_SHARE} "
            f"of all: end what uses it (nvidia-smi shows it), or pass --gpu-memory-utilization {fits:g} after --"
        )
    if weights is not None and weights > budget:
        ways = [f"--tensor-parallel-size {ranks}" for ranks in _more(plan, device, weights, budget)]
        if weights <= 0.98 * device.memory:
            ways.append("--gpu-memory-utilization 0.98")
        raise DoesNotFit(
            f"{_gib(weights)} of weights on each GPU don't fit into {_gib(budget)}: "
            + _advice(ways, "take a quantised model, or see docs/scaling.md")
        )
    if "kv-cache-memory-bytes" in plan.flags:
        return _tokens(plan.flags["kv-cache-memory-bytes"])
    return budget - weights if weights is not None else None


def _more(plan: Plan, device: Device, weights: int, budget: int) -> list[int]:
    """The smallest power of two of GPUs over which the weights fit, if there are as many."""
    now = number(plan.flags, "tensor-parallel-size", 1)
    others = number(plan.flags, "pipeline-parallel-size", 1) * number(plan.flags, "data-parallel-size", 1)
    return [ranks for ranks in (2, 4, 8) if ranks * others <= device.count and weights * now // ranks < budget][:1]


def _kv_bytes(text: Config, tensor: int, pipeline: int, size: int) -> int:
    """Bytes of one token's keys and values on each worker; 0 if the layers are of a kind that isn't known here."""
    layers, heads = _int(text, "num_hidden_layers", "n_layer"), _int(text, "num_attention_heads", "n_head")
    hidden = _int(text, "hidden_size", "n_embd")
    if not (layers and heads and hidden) or any(name.startswith(NO_CACHE) for name in text):
        return 0
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        layers = kinds.count("full_attention") or layers
    if rank := _int(text, "kv_lora_rank"):
        width = rank + (_int(text, "qk_rope_head_dim") or 0)
    else:
        per_worker = math.ceil((_int(text, "num_key_value_heads") or heads) / tensor)
        width = 2 * per_worker * (_int(text, "head_dim") or hidden // heads)
    return math.ceil(layers / pipeline) * width * size


def _weights(text: Config, dtype: int, files: int) -> int | None:
    """Bytes of all weights once loaded."""
    quantised = _as_config(text.get("quantization_config"))
    if files:
        return files if quantised else files // _stored(text) * dtype
    layers, hidden = _int(text, "num_hidden_layers", "n_layer"), _int(text, "hidden_size", "n_embd")
    heads, inner = _int(text, "num_attention_heads", "n_head"), _int(text, "intermediate_size")
    if not (layers and hidden and heads and inner):
        return None
    head = _int(text, "head_dim") or hidden // heads
    attention = 2 * hidden * head * (heads + (_int(text, "num_key_value_heads") or heads))
    if experts := _int(text, "num_local_experts", "n_routed_experts", "num_experts"):
        inner = experts * (_int(text, "moe_intermediate_size") or inner)
    if _int(text, "kv_lora_rank"):
        attention = 0  # compressed
    params = layers * (attention + 3 * hidden * inner) + hidden * (_int(text, "vocab_size") or 0)
    return params * (_int(quantised, "bits") or 4) // 8 if quantised else params * dtype


def _stored(text: Config) -> int:
    """Bytes of one number in the weight files."""
    return BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2)


def _dtype(name: str, text: Config) -> int:
    """Bytes of one number once loaded; what the model says decides for `auto`, but vLLM halves float32 then."""
    return min(2, _stored(text)) if name == "auto" else BYTES.get(name, 2)


def _tokens(text: str) -> int | None:
    """A number as vLLM reads it: 8192, 8k (8,000), 8K (8,192); None for `auto` and what is no number."""
    unit = UNITS.get(text[-1:], 1)
    with contextlib.suppress(ValueError, OverflowError):  # the latter of "inf"
        value = int(float(text[:-1] if unit > 1 else text) * unit)
        return value if value > 0 else None
    return None


def _int(config: Config, *names: str) -> int | None:
    """The first of these that is there and a positive whole number."""
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _as_config(value: object) -> Config:
    return value if isinstance(value, dict) else {}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _weight_files(folder: Path) -> int:
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin"):
        if found := sum(file.stat().st_size for file in folder.glob(pattern)):
            return found
    return 0


def _cached(name: str, env: Mapping[str, str]) -> Path | None:
    """The folder of a model that the Hugging Face cache holds."""
    home = env.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")  # noqa: PTH111
    repo = Path(env.get("HF_HUB_CACHE") or Path(home, "hub")) / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError):
        folder = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
        return folder if (folder / "config.json").is_file() else None
    return None

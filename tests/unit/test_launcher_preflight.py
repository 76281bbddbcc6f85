"""What fits and what doesn't, by a model's configuration; the figures are those of real models."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.command import GIB, Model, make_plan
from launcher.device import Device
from launcher.model import ModelMissing
from launcher.preflight import DoesNotFit, Fit, check, read_config

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}
QWEN_SMALL = {  # 0.6B
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
DEEPSEEK = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40},
    "quantization_config": {"quant_method": "fp8", "bits": 8},
}
H100 = Device("cuda", "H100", count=1, memory=79 * GIB, total=80 * GIB)
EIGHT = Device("cuda", "H100", count=8, memory=79 * GIB, total=80 * GIB)
LAPTOP = Device("cpu", "CPU", memory=12 * GIB, bf16=True)
OLD_LAPTOP = Device("cpu", "CPU", memory=12 * GIB, bf16=False)
MODEL = Model("/models/m", "m")


def fit(device: Device, config: dict[str, Any], extra: str = "", files: int = 0, **env: str) -> Fit:
    plan = make_plan(device, MODEL, Path("/run/e.sock"), extra.split(), env)
    return check(plan, device, config, files)


def test_an_8b_model_on_one_gpu() -> None:
    found = fit(H100, LLAMA_8B)
    assert found.weights is not None
    assert 13 * GIB < found.weights < 16 * GIB  # 8.03 billion parameters, of which one table isn't counted
    assert found.kv_tokens is not None
    assert 450_000 < found.kv_tokens < 500_000  # 128 KiB a token
    assert found.context == 131072


def test_a_small_model_on_a_laptop() -> None:
    found = fit(LAPTOP, QWEN_SMALL)
    assert found.kv_tokens == 3 * GIB // (2 * 28 * 8 * 128 * 2) // 16 * 16
    assert found.context == found.kv_tokens  # --max-model-len auto


@pytest.mark.parametrize(
    ("device", "config", "extra", "says"),
    [
        (H100, LLAMA_70B, "", "take a quantised model, or see docs/scaling.md"),
        (EIGHT, LLAMA_70B, "", "pass --tensor-parallel-size 2 after --"),
        (EIGHT, LLAMA_70B, "-pp 2 --gpu-memory-utilization 0.5", "--tensor-parallel-size 2"),
        (H100, LLAMA_8B, "--max-model-len 1m", "--max-model-len 1000000 is longer"),
        (H100, LLAMA_8B, "--gpu-memory-utilization .2", "pass --max-model-len"),
        (H100, LLAMA_8B, "--gpu-memory-utilization .1", "pass --gpu-memory-utilization 0.98 after --"),
        (
            Device("cuda", "A", memory=20 * GIB, total=80 * GIB),
            QWEN_SMALL,
            "",
            "--gpu-memory-utilization 0.25 after --",
        ),
        (LAPTOP, LLAMA_8B, "", "take a smaller or a quantised model"),
        (OLD_LAPTOP, LLAMA_8B | {"num_hidden_layers": 16}, "", "pass --dtype bfloat16 after --"),
        (LAPTOP, QWEN_SMALL, "--kv-cache-memory-bytes 16G", "pass --kv-cache-memory-bytes "),
        (LAPTOP, QWEN_SMALL, "--max-model-len 40960", "pass --max-model-len 28080 after --"),
        (LAPTOP, QWEN_SMALL, "--max-model-len 65536", "longer than the model's own context: at most 40960"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_flag_that_would_make_it_fit(
    device: Device, config: dict[str, Any], extra: str, says: str
) -> None:
    if "1m" in extra:
        config = {**config, "rope_scaling": None}
    with pytest.raises(DoesNotFit) as caught:
        fit(device, config, extra)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("device", "config", "extra"),
    [
        (EIGHT, LLAMA_70B, "--tensor-parallel-size 2 --max-model-len 32k"),
        (EIGHT, LLAMA_70B, "-tp 4 --max-model-len 32K -pp 2"),
        (Device("cuda", "H200", 8, 139 * GIB, 140 * GIB), DEEPSEEK, "-dp 8 --enable-expert-parallel"),
        (LAPTOP, QWEN_SMALL, "--max-model-len 16384"),
        (LAPTOP, QWEN_SMALL, "--max-model-len auto"),
        (LAPTOP, QWEN_SMALL | {"sliding_window": 4096}, "--max-model-len 40960"),
        (H100, LLAMA_70B, "--quantization fp8"),
        (H100, LLAMA_70B, "--cpu-offload-gb 100"),
        (H100, LLAMA_8B | {"mamba_d_state": 16}, ""),
        (Device("cuda", "GB10"), LLAMA_70B, ""),
        (Device("cpu", "CPU"), LLAMA_70B, ""),
        (H100, {}, ""),
        (H100, LLAMA_8B, "--gpu-memory-utilization inf"),
        (LAPTOP, QWEN_SMALL, "--max-model-len inf"),
        (H100, {"hidden_size": None, "text_config": [], "quantization_config": 7, "rope_scaling": "x"}, ""),
    ],
)
def test_what_may_fit_or_is_not_known_is_tried(device: Device, config: dict[str, Any], extra: str) -> None:
    fit(device, config, extra)


def test_a_longer_context_may_be_forced() -> None:
    fit(H100, {**QWEN_SMALL}, "--max-model-len 65536", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")


def test_compressed_attention_takes_less_cache_and_ranks_add_up() -> None:
    one = fit(
        EIGHT,
        DEEPSEEK,
        "-tp 8 --enable-expert-parallel --cpu-offload-gb 1 --max-model-len 64k --kv-cache-memory-bytes 8G",
    )
    assert one.kv_tokens == 8 * GIB // (61 * 576 * 2) // 16 * 16
    two = fit(EIGHT, QWEN_SMALL, "-dp 2 --kv-cache-memory-bytes 8G --kv-cache-dtype fp8")
    assert two.kv_tokens == 2 * (8 * GIB // (2 * 28 * 8 * 128) // 16 * 16)


def test_weight_files_count_as_they_are_loaded() -> None:
    assert fit(OLD_LAPTOP, QWEN_SMALL, files=GIB).weights == 2 * GIB  # float32
    assert fit(LAPTOP, QWEN_SMALL, files=GIB).weights == GIB
    assert fit(LAPTOP, QWEN_SMALL | {"quantization_config": {"bits": 4}}, files=GIB).weights == GIB


def test_configuration_of_a_folder_and_of_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--a--b/snapshots/123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("123")
    (snapshot / "config.json").write_text(json.dumps(QWEN_SMALL))
    (snapshot / "model.safetensors").write_bytes(b"x" * 100)
    (snapshot / "consolidated.safetensors").write_bytes(b"x" * 100)
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert read_config(Model("a/b", "a/b"), offline) == (QWEN_SMALL, 100)
    assert read_config(Model(str(snapshot), "b"), {}) == (QWEN_SMALL, 100)
    assert read_config(Model("a/c", "a/c"), offline) == ({}, 0)
    (snapshot / "config.json").unlink()
    assert read_config(Model(str(snapshot), "b"), {}) == ({}, 0)


@pytest.mark.parametrize("content", [b"", b'{"hidden_size": 64', b"[1, 2]", b"\xff\x00\xfe"])
def test_a_broken_configuration_is_named_before_anything_is_loaded(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelMissing, match=r"config\.json is not a JSON object: fetch the model again"):
        read_config(Model(str(tmp_path), "b"), {})


def test_a_hub_that_cannot_be_reached_is_no_reason_to_refuse(tmp_path: Path) -> None:
    for endpoint in ("http://127.0.0.1:1", "127.0.0.1", "http://["):
        assert read_config(Model("a/b", "a/b"), {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}) == ({}, 0)

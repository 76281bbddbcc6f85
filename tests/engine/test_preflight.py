"""What is said before the start is what vLLM finds after it."""

from pathlib import Path

from launcher.command import Model, make_plan
from launcher.device import find
from launcher.preflight import check, read_config
from tests.engine.real import CONTEXT, EXTRA, Vllm
from tests.engine.tiny_model import tiny_model


def test_the_estimated_kv_cache_is_what_vllm_makes_of_the_memory(vllm: Vllm) -> None:
    model, device = Model(str(tiny_model()), "tiny"), find("auto")
    plan = make_plan(device, model, Path("/run/e.sock"), EXTRA, {})
    fit = check(plan, device, *read_config(model, {}))
    (labels,) = [dict(labels) for name, labels in vllm.metrics().samples if name == "vllm:cache_config_info"]
    made = int(labels["block_size"]) * int(labels["num_gpu_blocks"])
    assert fit.kv_tokens is not None
    assert abs(fit.kv_tokens - made) < 0.02 * made
    assert fit.context == CONTEXT

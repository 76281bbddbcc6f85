"""A model that loads fast and says nothing sensible: a random 2-layer Llama with the embedded model's tokenizer.

`python -m tests.engine.tiny_model [DIR]` makes it, by default in the user's cache folder, and prints where it is.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from launcher.model import cache_folder, prepare

NAME = "tiny-random-llama-1"  # count up when the recipe changes
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def tiny_model(folder: Path | None = None) -> Path:
    """The folder of the tiny model, made on the first call."""
    target = folder or cache_folder() / NAME
    if (target / "config.json").is_file():
        return target
    embedded = prepare(lambda line: print(line, file=sys.stderr, flush=True))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.part-", dir=target.parent) as work:
        made = Path(work, "made")
        _make(embedded, made)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        try:
            made.rename(target)
        except OSError:
            assert (target / "config.json").is_file(), f"{target} is in the way"  # else another process was faster
    return target


def _make(embedded: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(embedded)
    config.update(
        {
            "_name_or_path": NAME,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(embedded / file, folder)


if __name__ == "__main__":
    print(tiny_model(Path(sys.argv[1]) if len(sys.argv) > 1 else None))

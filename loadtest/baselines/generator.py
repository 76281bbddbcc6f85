"""The weights behind the naive servers: transformers' `generate` on a batch, and the chat route's form around it."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from fastapi import Response

DEFAULT_TOKENS: Final = 128  # where a request names no number
HIGHEST_TOKENS: Final = 4096


class BadRequest(ValueError):
    """The body is no chat request; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the ids of its prompt's tokens and how many to make at most."""

    ids: tuple[int, ...]
    tokens: int
    ignore_eos: bool
    stream: bool


@dataclass(frozen=True, slots=True)
class Text:
    """An answer and its length in tokens."""

    text: str
    tokens: int


class Model(Protocol):
    """What a naive server needs of a model."""

    def prompt(self, body: bytes, /) -> Prompt:
        """Read a chat request; raises BadRequest."""

    def __call__(self, prompts: Sequence[Prompt], /) -> list[Text]:
        """Answer all of them as one batch."""


class Generator:
    """A model in memory. Greedy, so that a request gives the same answer alone and in a batch."""

    def __init__(self, folder: Path) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch = torch
        # Batches of one model need prompts that end at the same place: padding goes to the left.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def prompt(self, body: bytes) -> Prompt:
        """Read a chat request.

        Raises:
            BadRequest: it is none.
        """
        try:
            asked = json.loads(body)
            text = self._tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
            tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or DEFAULT_TOKENS)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"not a chat request: {type(error).__name__} {error}") from error
        if not 1 <= tokens <= HIGHEST_TOKENS:
            raise BadRequest(f"max_tokens must be from 1 to {HIGHEST_TOKENS}")
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(tuple(ids), tokens, bool(asked.get("ignore_eos")), bool(asked.get("stream")))

    def __call__(self, prompts: Sequence[Prompt]) -> list[Text]:
        """Answer all of them as one batch, which lasts as long as its longest answer."""
        padded = self._tokenizer.pad({"input_ids": [list(prompt.ids) for prompt in prompts]}, return_tensors="pt")
        until_the_end = any(prompt.ignore_eos for prompt in prompts)
        with self._torch.inference_mode():
            made = self._model.generate(
                **padded,
                max_new_tokens=max(prompt.tokens for prompt in prompts),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=self._tokenizer.pad_token_id,
                eos_token_id=None if until_the_end else self._tokenizer.eos_token_id,
            )
        begin = padded["input_ids"].shape[1]
        return [self._text(prompt, row[begin:].tolist()) for prompt, row in zip(prompts, made, strict=True)]

    def _text(self, prompt: Prompt, ids: list[int]) -> Text:
        ids = ids[: prompt.tokens]
        end = self._tokenizer.eos_token_id
        if not prompt.ignore_eos and end in ids:
            ids = ids[: ids.index(end) + 1]
        return Text(self._tokenizer.decode(ids, skip_special_tokens=True), len(ids))


def answer(prompt: Prompt, text: Text) -> Response:
    """The whole answer at once, as a completion; whoever asked for a stream gets one event and the end mark."""
    part = "delta" if prompt.stream else "message"
    body = {
        "id": "chatcmpl-naive",
        "object": "chat.completion.chunk" if prompt.stream else "chat.completion",
        "created": int(time.time()),
        "choices": [{"index": 0, part: {"role": "assistant", "content": text.text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(prompt.ids), "completion_tokens": text.tokens},
    }
    if prompt.stream:
        return Response(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
    return Response(json.dumps(body), media_type="application/json")


def refusal(status: int, message: str) -> Response:
    """An error in OpenAI's form."""
    error = {"message": message, "type": "error", "param": None, "code": str(status)}
    return Response(json.dumps({"error": error}), status, media_type="application/json")


def load_model() -> Generator:
    """The model in the folder `MODEL`, else the embedded one."""
    from launcher.model import prepare

    given = os.environ.get("MODEL")
    return Generator(Path(given) if given else prepare(lambda line: print(line, file=sys.stderr, flush=True)))

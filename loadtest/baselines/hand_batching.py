"""Dynamic batching by hand, done right: what one builds before finding an engine that batches by itself.

    python -m uvicorn --factory loadtest.baselines.hand_batching:create_app --port 8000     [MODEL=folder]

Up to 16 requests or 50 ms, whichever comes first; 200 may wait, then 503; 30 s, then 504; prompts of more than 256
tokens have batches of their own, so that no short one is padded to a long one. Still, a batch lasts as long as its
longest answer, nobody joins one that runs, and no token is seen before all of them are there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response

from loadtest.baselines.batcher import Batcher, QueueFull
from loadtest.baselines.generator import BadRequest, Model, Prompt, Text, answer, load_model, refusal

LONG_PROMPT: Final = 256  # tokens; longer ones don't share a batch with the others


def queue_of(prompt: Prompt) -> str:
    """Short or long, by the prompt alone: the length of the answer is not known."""
    return "long" if len(prompt.ids) > LONG_PROMPT else "short"


def create_app(model: Model | None = None, **limits: Any) -> FastAPI:
    """The application; without a model it loads one first. `limits` are the batcher's."""
    serving = model or load_model()
    made = 0

    async def run(prompts: Sequence[Prompt]) -> list[Text]:
        nonlocal made
        texts = await asyncio.to_thread(serving, prompts)
        made += sum(text.tokens for text in texts)
        return texts

    batcher = Batcher[Prompt, Text](run, queue_of, **limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.work())
        yield
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        try:
            prompt = serving.prompt(await request.body())
            return answer(prompt, await batcher.ask(prompt))
        except BadRequest as error:
            return refusal(400, str(error))
        except QueueFull:
            return refusal(503, "The queue is full.")
        except TimeoutError:
            return refusal(504, "No answer within the time that a request may take.")

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        seen = batcher.statistics
        return {
            "batches": seen.batches,
            "avg_batch_size": seen.batched / seen.batches if seen.batches else None,
            "largest_batch": seen.largest,
            "batches_by_queue": seen.by_queue,
            "refused": seen.refused,
            "timed_out": seen.timed_out,
            "waiting": batcher.depth,
            "running": batcher.running,
            "generated_tokens": made,
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app

"""The first naive server: FastAPI around `generate`, one request at a time, everybody else waits, without any limit.

    python -m uvicorn --factory loadtest.baselines.one_at_a_time:create_app --port 8000     [MODEL=folder]

Nobody is refused, nobody is told anything, and whoever has left is computed for all the same.
"""

import asyncio

from fastapi import FastAPI, Request, Response

from loadtest.baselines.generator import BadRequest, Model, answer, load_model, refusal


def create_app(model: Model | None = None) -> FastAPI:
    """The application; without a model it loads one first."""
    model = model or load_model()
    app = FastAPI()
    one = asyncio.Lock()
    counts = {"total_requests": 0, "waiting": 0, "running": 0, "generated_tokens": 0}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        counts["total_requests"] += 1
        try:
            prompt = model.prompt(await request.body())
        except BadRequest as error:
            return refusal(400, str(error))
        counts["waiting"] += 1
        async with one:
            counts["waiting"] -= 1
            counts["running"] += 1
            try:
                (text,) = await asyncio.to_thread(model, [prompt])
            finally:
                counts["running"] -= 1
            counts["generated_tokens"] += text.tokens
        return answer(prompt, text)

    @app.get("/stats")
    async def stats() -> dict[str, int]:
        return counts

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app

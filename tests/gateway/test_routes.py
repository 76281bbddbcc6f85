"""Which paths pass, which are answered here, and which are nobody's business."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.harness import MESSAGES, body_for, chat, refused
from tests.wire import CHAT, Answer

GATED = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    MESSAGES,
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/classify",
    "/pooling",
]
BESIDE = ["/v1/messages/count_tokens", "/tokenize", "/detokenize"]
READ = ["/v1/models", "/version"]
PROBES = ["/livez", "/readyz", "/health", "/enginez", "/metrics"]
NOBODYS = [
    "/inference/v1/generate",
    "/invocations",
    "/ping",
    "/load",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/server_info",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/generative_scoring",
    "/v1/load_lora_adapter",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/chat/completions/render",
    "/v1/models/fake-model",
    "/start_profile",
    "/sleep",
    "/pause",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/v1/realtime",
    "/fake/counts",
]
DISGUISED = [
    "/v1/chat/completions/",
    "/v1/v1/chat/completions",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/%63hat/completions",
    "/v1/./chat/completions",
    "/v1/x/../chat/completions",
    "/V1/chat/completions",
    "/v1/chat/completions%20",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions%3Fx",
    "/chat/completions",
    "/inference/../v1/chat/completions",
    "/version/../inference/v1/generate",
]


async def ask(gate: Any, method: str, target: str, body: Any = None, **headers: str) -> Answer:
    """One call on the bare socket, so that no client tidies the path."""
    async with await gate.wire() as wire:
        await wire.request(
            target, body, method=method, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer: Answer = await wire.answer()
        return answer


@pytest.mark.parametrize("route", GATED + BESIDE)
async def test_forwarded_route_gets_the_engines_answer(gateway: Start, route: str) -> None:
    gate = gateway()
    answer = await ask(gate, "POST", f"{route}?beta=true&x=%2F", body_for(route, fake={"tag": "f"}))
    assert answer.status_code == 200
    assert gate.engine.entry("f")["target"] == f"{route}?beta=true&x=%2F"
    assert int(answer.headers["x-fake-id"]) == gate.engine.entry("f")["id"]


@pytest.mark.parametrize("route", READ)
async def test_read_route_gets_the_engines_answer(gateway: Start, route: str) -> None:
    answer = await ask(gateway(), "GET", route)
    assert answer.status_code == 200
    assert "x-fake-id" in answer.headers


@pytest.mark.parametrize("route", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_audio_upload_is_forwarded(gateway: Start, route: str) -> None:
    gate = gateway()
    async with gate.client() as client:
        answer = await client.post(
            route,
            files={"file": ("a.wav", bytes(range(256)) * 100)},
            data={"model": "m"},
            headers={"x-fake": json.dumps({"tag": "a"})},
        )
    assert answer.status_code == 200
    assert gate.engine.entry("a")["body_bytes"] > 25_600


@pytest.mark.parametrize("path", [*PROBES, "/stats", "/"])
async def test_own_route_answers_without_the_engine(gateway: Start, path: str) -> None:
    gate = gateway()
    assert (await ask(gate, "GET", path)).status_code == 200
    assert gate.engine.entries() == []


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", NOBODYS + DISGUISED)
async def test_anything_else_is_a_404_that_the_engine_never_sees(gateway: Start, path: str, method: str) -> None:
    gate = gateway()
    body = chat() if method == "POST" else None
    refused(await ask(gate, method, path, body), "not_found")
    assert gate.engine.counts()["received"] == 0


@pytest.mark.parametrize("path", ["/v1/messages/", "/v1/messages/batches"])
async def test_404_below_messages_has_anthropics_form(gateway: Start, path: str) -> None:
    refused(await ask(gateway(), "POST", path, {}), "not_found", anthropic=True)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/v1/chat/completions", "/v1"),
        ("/v1/chat/completions/", "slash"),
        ("/chat/completions", "/v1"),
        ("/v1/realtime", "realtime"),
    ],
)
async def test_404_hints_at_the_usual_mistakes(gateway: Start, path: str, word: str) -> None:
    assert word in refused(await ask(gateway(), "POST", path, chat()), "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/metrics", "GET"),
        ("DELETE", "/", "GET"),
    ],
)
async def test_wrong_method_is_told_the_right_one(gateway: Start, method: str, path: str, allowed: str) -> None:
    answer = await ask(gateway(), method, path)
    refused(answer, "method_not_allowed")
    assert allowed in answer.headers["allow"].split(", ")


@pytest.mark.parametrize("target", ["*", "http://elsewhere.example/inference/v1/generate"])
async def test_odd_request_targets_never_reach_the_engine(gateway: Start, target: str) -> None:
    gate = gateway()
    answer = await ask(gate, "OPTIONS" if target == "*" else "GET", target)
    assert answer.status_code in (400, 404)
    assert gate.engine.counts()["received"] == 0


async def test_preflight_needs_no_key_and_takes_no_slot(gateway: Start) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b")
    before = gate.stats()["total_requests"]
    answer = await ask(gate, "OPTIONS", CHAT, authorization="", origin="https://x.example")
    assert (answer.status_code, answer.body) == (204, b"")
    assert gate.stats()["total_requests"] == before
    assert "access-control-allow-origin" not in answer.headers, "CORS is off unless configured"


@pytest.mark.parametrize("origin", ["https://app.example", "https://evil.example"])
async def test_preflight_of_a_browser_is_answered_as_any_other_and_says_who_may(gateway: Start, origin: str) -> None:
    gate = gateway(cors_origins="https://app.example", api_keys="a:secret-a")
    asked = {"origin": origin, "access_control_request_method": "POST"}
    asked |= {"access_control_request_headers": "authorization,content-type"}
    answer = await ask(gate, "OPTIONS", CHAT, authorization="", **asked)
    assert (answer.status_code, answer.body) == (204, b"")
    assert answer.headers.get("access-control-allow-origin") == (origin if "app" in origin else None)
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["x-request-id"]
    refused(await ask(gate, "OPTIONS", "/nowhere", **asked), "not_found")


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "/nowhere", "not_found"),
        ("GET", CHAT, "method_not_allowed"),
        ("POST", CHAT, "invalid_api_key"),
        ("GET", "/stats", "invalid_api_key"),
    ],
)
async def test_checks_come_in_the_promised_order(gateway: Start, method: str, path: str, reason: str) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b")
    refused(await ask(gate, method, path, b"{", authorization="Bearer wrong", x_request_timeout_ms="soon"), reason)


@pytest.mark.parametrize(
    "header",
    [
        {"authorization": "Bearer secret-b"},
        {"authorization": "bearer secret-b"},
        {"authorization": "", "x_api_key": "secret-b"},
    ],
    ids=str,
)
async def test_either_key_header_opens_and_ends_here(gateway: Start, header: dict[str, str]) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b", engine_api_key="engine-secret")
    assert (await ask(gate, "POST", CHAT, chat(fake={"tag": "k"}), **header)).status_code == 200
    headers = gate.engine.entry("k")["headers"]
    assert [value for name, value in headers if name.lower() == "authorization"] == ["Bearer engine-secret"]
    assert "secret-b" not in json.dumps(headers)


@pytest.mark.parametrize(
    "header",
    [
        {"authorization": ""},
        {"authorization": "Bearer secret-bb"},
        {"authorization": "Basic secret-b"},
        {"authorization": "Bearer"},
        {"authorization": "", "x_api_key": "b"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_wrong_key_is_refused(gateway: Start, path: str, header: dict[str, str]) -> None:
    gate = gateway(api_keys="a:secret-a,b:secret-b")
    answer = await ask(gate, "POST", path, body_for(path), **header)
    refused(answer, "invalid_api_key", anthropic=path == MESSAGES)
    assert gate.engine.counts()["received"] == 0
    assert "secret" not in gate.log


@pytest.mark.parametrize("path", [*PROBES, "/"])
async def test_probes_and_metrics_need_no_key(gateway: Start, path: str) -> None:
    assert (await ask(gateway(api_keys="a:secret-a,b:secret-b"), "GET", path, authorization="")).status_code == 200


async def test_ops_port_takes_the_probes_away_from_the_main_one(gateway: Start) -> None:
    from tests.harness import free_port

    gate = gateway(fresh=True, ops_port=free_port())
    for path in PROBES:
        assert gate.get(path).status_code == 200
        refused(gate.get(path, ops=False), "not_found")
    assert gate.get("/stats").status_code == gate.get("/").status_code == 200


SENT = {
    "x-vllm-priority": "-100",
    "x-vllm-other": "1",
    "x-tidegate-reason": "spoofed",
    "keep-alive": "timeout=5",
    "te": "trailers",
    "accept-encoding": "gzip, br",
    "x-custom": "kept",
    "user-agent": "kept/1",
}


async def test_headers_to_the_engine_are_the_clients_less_what_is_ours(gateway: Start) -> None:
    gate = gateway()
    async with await gate.wire() as wire:
        await wire.request(CHAT, chat(fake={"tag": "h"}), headers=SENT)
        assert (await wire.answer()).status_code == 200
    got = {name.lower(): value for name, value in gate.engine.entry("h")["headers"]}
    assert (got["x-custom"], got["user-agent"], got["accept-encoding"]) == ("kept", "kept/1", "identity")
    assert not got.keys() & {"keep-alive", "te", "x-vllm-other", "x-tidegate-reason"}
    assert got["x-vllm-priority"] == "0", "the lane's own priority, not the client's"


async def test_header_that_connection_names_ends_here(gateway: Start) -> None:
    gate = gateway()
    answer = await ask(gate, "POST", CHAT, chat(fake={"tag": "h"}), connection="keep-alive, x-listed", x_listed="1")
    assert answer.status_code == 200
    assert "x-listed" not in {name.lower() for name, _ in gate.engine.entry("h")["headers"]}


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/score", "/rerank", "/pooling"])
async def test_client_cannot_set_a_priority_where_the_header_does_not_beat_it(gateway: Start, route: str) -> None:
    gate = gateway()
    refused(await ask(gate, "POST", route, body_for(route, priority=-5)), "invalid_request")
    assert (await ask(gate, "POST", CHAT, chat(priority=-5))).status_code == 200


async def test_background_responses_are_refused_clearly(gateway: Start) -> None:
    gate = gateway()
    answer = await ask(gate, "POST", "/v1/responses", body_for("/v1/responses", background=True))
    assert "background" in refused(answer, "invalid_request")
    assert gate.engine.counts()["received"] == 0

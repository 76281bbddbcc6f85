"""The allow-list, as a client walks into it."""

import pytest

from app.errors import METHOD, NOT_FOUND, Refused
from app.routes import FORWARDED, GENERATION, OPS, PAGES, Family, Routes, Way, is_anthropic

ALL = Routes(*FORWARDED, *OPS, *PAGES)
GATED = """
    /v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/embeddings /v1/score /v1/rerank /score /rerank
    /v2/rerank /classify /pooling /v1/audio/transcriptions /v1/audio/translations
"""
UNKNOWN = """
    /v1 /v1/ /v1/files /docs /openapi.json /ping /server_info /v1/chat /v1/chat/completions/x /V1/chat/completions
    /v1/chat/completions/render /v1/chat%2Fcompletions /v1/./completions /v1/../v1/completions //v1/completions /%2e
    /invocations /inference/v1/generate /scale_elastic_ep /load_lora_adapter /sleep /metrics/ /stats/ * http://h/v1/models
"""


def refusal(method: str, path: bytes, routes: Routes = ALL) -> Refused:
    with pytest.raises(Refused) as caught:
        routes.find(method, path)
    return caught.value


@pytest.mark.parametrize(
    ("way", "method", "paths"),
    [
        (Way.GATED, "POST", GATED),
        (Way.BESIDE, "POST", "/v1/messages/count_tokens /tokenize /detokenize"),
        (Way.BESIDE, "GET", "/v1/models /version"),
        (Way.OPEN, "GET", "/livez /readyz /health /enginez /metrics / /page.js /page.css"),
        (Way.GUARDED, "GET", "/stats"),
    ],
)
def test_exactly_these_paths_are_served(way: Way, method: str, paths: str) -> None:
    served = [route for route in (*FORWARDED, *OPS, *PAGES) if (route.way, route.method) == (way, method)]
    assert sorted(route.name for route in served) == sorted(paths.split())
    for route in served:
        assert ALL.find(method, route.name.encode()) is route
        assert ALL.find("OPTIONS", route.name.encode()) is route


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "post", "BREW"])
def test_a_wrong_method_is_a_405_that_says_which_is_right(method: str) -> None:
    refused = refusal(method, b"/v1/chat/completions")
    assert (refused.kind, refused.allow) == (METHOD, "POST, OPTIONS")
    assert refusal("POST", b"/v1/models").allow == "GET, OPTIONS"


@pytest.mark.parametrize("path", UNKNOWN.split())
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_anything_else_is_a_404(method: str, path: str) -> None:
    assert refusal(method, path.encode()).kind is NOT_FOUND


def test_bytes_that_are_no_text_are_a_404() -> None:
    assert refusal("GET", b"/\xff\x00").kind is NOT_FOUND


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (b"/v1/v1/chat/completions", "/v1 twice"),
        (b"/v1/chat/completions/", "slash too many"),
        (b"/v1/models///", "slash too many"),
        (b"/chat/completions", "lacks /v1"),
        (b"/models", "lacks /v1"),
        (b"/v1/realtime", "out of scope"),
        (b"/v1/realtime/sessions", "out of scope"),
        (b"/v1/files", "no such route here."),
        (b"/", "no such route here."),
    ],
)
def test_a_404_hints_at_what_was_meant(path: bytes, hint: str) -> None:
    refused = refusal("POST", path, Routes(*FORWARDED))
    assert refused.kind is NOT_FOUND
    assert hint in refused.message


def test_with_a_port_of_their_own_probes_are_not_on_the_main_port() -> None:
    assert refusal("GET", b"/livez", Routes(*FORWARDED, *PAGES)).kind is NOT_FOUND
    assert refusal("GET", b"/stats", Routes(*OPS)).kind is NOT_FOUND


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [
        (b"/v1/messages", True),
        (b"/v1/messages/count_tokens", True),
        (b"/v1/messages/batches", True),
        (b"/v1/messages/", True),
        (b"/v1/messagesx", False),
        (b"/v1/chat/completions", False),
    ],
)
def test_errors_take_anthropics_form_on_anthropics_paths(path: bytes, anthropic: bool) -> None:
    assert is_anthropic(path) is anthropic


def test_every_gated_route_has_a_family_and_the_engine_reads_the_priority_header_on_four_of_them() -> None:
    gated = [route for route in FORWARDED if route.way is Way.GATED]
    assert all(route.family is not Family.OTHER for route in gated)
    assert [route.name for route in gated if route.family in GENERATION] == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    ]

"""docs/openapi.yaml says what the gateway does: its routes, its statuses, its error object."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app import errors
from app.errors import Kind, Refused
from app.routes import FORWARDED, OPS, PAGES, Route, Way, is_anthropic

DOCUMENT: dict[str, Any] = yaml.safe_load(Path(__file__).parents[2].joinpath("docs/openapi.yaml").read_text())
COMPONENTS = DOCUMENT["components"]
KINDS = [value for value in vars(errors).values() if isinstance(value, Kind)]
OF_THE_ROUTING = {errors.NOT_FOUND, errors.METHOD}  # of any path, so in the description alone
ROUTES = [*FORWARDED, *OPS, *PAGES]


def operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][route.name][route.method.lower()]
    return found


def resolved(reference: str) -> dict[str, Any]:
    value: Any = DOCUMENT
    for part in reference.removeprefix("#/").split("/"):
        value = value[part]
    assert isinstance(value, dict)
    return value


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if "$ref" in value else set()
    return own.union(*map(references, value.values()))


def test_it_names_each_route_with_its_method_and_no_other() -> None:
    told = {(path, method.upper()) for path, item in DOCUMENT["paths"].items() for method in item}
    assert told == {(route.name, route.method) for route in ROUTES}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_it_says_of_each_route_which_way_it_goes_and_whether_it_wants_a_key(route: Route) -> None:
    told = operation(route)
    assert told["tags"] == [route.way.name.lower()]
    assert (told.get("security") == []) is (route.way is Way.OPEN)
    assert ("401" in told["responses"]) is (route.way is not Way.OPEN)


@pytest.mark.parametrize("route", FORWARDED, ids=lambda route: route.name)
def test_it_tells_each_status_that_a_forwarded_route_may_be_refused_with(route: Route) -> None:
    statuses = {str(kind.status) for kind in KINDS if kind not in OF_THE_ROUTING} | {"429"}
    assert operation(route)["responses"].keys() == statuses | {"200", "default"}
    for kind in set(KINDS) - OF_THE_ROUTING:
        response = resolved(operation(route)["responses"][str(kind.status)]["$ref"])
        refused = Refused(kind, "a text")
        sent = {name.decode() for name, _ in refused.headers()} - {"connection"} | {"x-request-id"}
        assert response["headers"].keys() == sent
        schema = response["content"]["application/json"]["schema"]
        body = json.loads(refused.body(anthropic=is_anthropic(route.name.encode())))
        jsonschema.validate(body, schema | {"components": COMPONENTS})


def test_it_knows_each_reason_type_and_code_and_no_other() -> None:
    told = COMPONENTS["schemas"]["ErrorBody"]["properties"]
    assert set(told["code"]["enum"]) == {kind.code for kind in KINDS}
    assert set(told["type"]["enum"]) == {kind.type for kind in KINDS}
    assert set(COMPONENTS["headers"]["Reason"]["schema"]["enum"]) == {kind.reason for kind in KINDS}


def test_all_that_it_refers_to_is_in_it_and_nothing_else() -> None:
    used = references(DOCUMENT)
    for reference in used:
        resolved(reference)
    there = {f"#/components/{kind}/{name}" for kind in COMPONENTS for name in COMPONENTS[kind]}
    schemes = {f"#/components/securitySchemes/{name}" for name in COMPONENTS["securitySchemes"]}
    assert there == used | schemes

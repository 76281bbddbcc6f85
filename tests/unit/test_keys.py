"""API keys: who gets in, under which name, and that mistakes never leave the door open."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.keys import Keys, load_keys
from app.settings import Settings, SettingsError

TWO = Keys({"alice": "a-key", "bob": "b:key"})


def load(keys: str | None = None, file: Path | None = None) -> Keys:
    return load_keys(Settings.model_validate({"api_keys": keys, "api_keys_file": file}))


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({b"authorization": b"Bearer a-key"}, "alice"),
        ({b"authorization": b"bearer a-key"}, "alice"),
        ({b"authorization": b"BEARER   b:key "}, "bob"),
        ({b"x-api-key": b"b:key"}, "bob"),
        ({b"x-api-key": b"b:key "}, "bob"),
        ({b"authorization": b"Bearer wrong", b"x-api-key": b"b:key"}, "bob"),
        ({}, None),
        ({b"authorization": b""}, None),
        ({b"authorization": b"Bearer"}, None),
        ({b"authorization": b"Bearer "}, None),
        ({b"authorization": b"a-key"}, None),
        ({b"authorization": b"Basic a-key"}, None),
        ({b"authorization": b"Bearer a-key x"}, None),
        ({b"authorization": b"Bearer A-KEY"}, None),
        ({b"authorization": b"Bearer alice"}, None),
        ({b"authorization": b"Bearer alice:a-key"}, None),
        ({b"x-api-key": b""}, None),
        ({b"x-api-key": b"a-ke"}, None),
        ({b"x-api-key": b"\xff\x00"}, None),
    ],
)
def test_a_caller_is_known_by_the_name_of_its_key(headers: dict[bytes, bytes], name: str | None) -> None:
    assert TWO.name_of(headers) == name


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_no_other_header_opens_the_door(authorization: bytes, api_key: bytes) -> None:
    name = TWO.name_of({b"authorization": authorization, b"x-api-key": api_key})
    assert name is None or b"a-key" in authorization + api_key or b"b:key" in authorization + api_key


@pytest.mark.parametrize("keys", [None, ""])
def test_without_keys_everybody_is_let_in_under_one_name(keys: str | None) -> None:
    everybody = load(keys)
    assert everybody.name_of({}) == everybody.name_of({b"x-api-key": b"any"}) == ""


def test_keys_come_from_the_setting_and_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\n\n  carol : c-key \r\ndave:d:key,with:all\n   # gone:g-key\n")
    keys = load(" alice:a-key, bob:b-key ,", file)
    names = [keys.name_of({b"x-api-key": key}) for key in (b"a-key", b"b-key", b"c-key", b"d:key,with:all", b"g-key")]
    assert names == ["alice", "bob", "carol", "dave", None]


REPEATED = ["alice:s3cret,alice:other", "alice:s3cret,bob:s3cret"]
NO_ENTRY = ["s3cret", ":s3cret", "alice:", "al ice:s3cret", "älice:s3cret", f"{'a' * 65}:s3cret", "alice:s3crét"]


@pytest.mark.parametrize("entries", [*NO_ENTRY, *REPEATED])
@pytest.mark.parametrize("place", ["setting", "file"])
def test_a_bad_entry_stops_the_start_and_is_not_shown(entries: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(entries.replace(",", "\n"), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load(entries) if place == "setting" else load(file=file)
    text = str(caught.value)
    assert text.startswith("TIDEGATE_API_KEYS: " if place == "setting" else "TIDEGATE_API_KEYS_FILE: ")
    assert "s3cr" not in text
    assert "entry" in text


@pytest.mark.parametrize("between", ["\n", "\r\n", "\t", "\0"])
def test_a_value_that_no_header_can_carry_stops_the_start(between: str) -> None:
    """Such as a list with a line for each key, where commas are wanted: nobody would get in, and nobody know why."""
    with pytest.raises(SettingsError, match="TIDEGATE_API_KEYS: entry 1 "):
        load(f"alice:a-key{between}bob:b-key")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:a-key\n", encoding="utf-8-sig")
    assert load(file=file).name_of({b"x-api-key": b"a-key"}) == "alice"


@pytest.mark.parametrize("keys", [" ", ",", " , ,"])
def test_a_setting_of_which_no_key_is_left_stops_the_start(keys: str) -> None:
    with pytest.raises(SettingsError, match="TIDEGATE_API_KEYS: "):
        load(keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda file: None,
        lambda file: file.mkdir(),
        lambda file: file.write_bytes(b"\xff\xfe"),
        lambda file: file.write_text(""),
        lambda file: file.write_text("# none yet\n\n"),
    ],
    ids=["missing", "a folder", "no text", "empty", "comments only"],
)
def test_a_file_without_keys_stops_the_start(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "keys")
    with pytest.raises(SettingsError, match=r"TIDEGATE_API_KEYS_FILE: .*keys"):
        load(file=tmp_path / "keys")

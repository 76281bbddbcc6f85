"""Settings: what may be said, who wins, and that a mistake ends in one line that says what to do."""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st

from app.settings import DEFAULT_LANES, PREFIX, Lane, Settings, SettingsError, load_settings

EXAMPLE = Path(__file__).parents[2] / ".env.example"
NAMED = [  # its settings, each with the line above
    (above, line)
    for above, line in itertools.pairwise(EXAMPLE.read_text(encoding="utf-8").splitlines())
    if re.match(r"(# )?TIDEGATE_[A-Z_]+=", line)
]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of whoever runs the tests, and an empty working folder."""
    for name in os.environ:
        if name.upper().startswith(PREFIX) or name == "WEB_CONCURRENCY":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def complaint(**flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**flags)
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestSources:
    def test_flags_beat_the_environment_which_beats_the_env_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path(".env").write_text("TIDEGATE_PORT=1\nTIDEGATE_MAX_QUEUE=1\nTIDEGATE_MAX_IN_FLIGHT=1\n")
        monkeypatch.setenv("TIDEGATE_PORT", "2")
        monkeypatch.setenv("TIDEGATE_MAX_QUEUE", "2")
        settings = load_settings(port=3, host=None)
        assert (settings.port, settings.max_queue, settings.max_in_flight) == (3, 2, 1)
        assert settings.host == "127.0.0.1"  # a flag that was not given

    def test_an_empty_variable_means_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in Settings.model_fields:
            monkeypatch.setenv(PREFIX + name.upper(), "")
        assert load_settings() == Settings.model_construct()

    def test_other_programs_settings_in_the_env_file_are_no_concern_of_ours(self) -> None:
        Path(".env").write_text("DATABASE_URL=postgres://db\nexport PORT=5\n")
        assert load_settings().port == 8000

    @pytest.mark.parametrize("content", [b"\xff\xfeT\x00", b"TIDEGATE_HOST=\xe9\n"])
    def test_an_env_file_that_is_no_text_is_named(self, content: bytes) -> None:
        Path(".env").write_bytes(content)
        assert ".env cannot be read" in complaint()

    def test_a_name_without_a_value_in_the_env_file_means_the_default(self) -> None:
        Path(".env").write_text("TIDEGATE_PORT\n")
        assert load_settings().port == 8000


class TestMistakes:
    @pytest.mark.parametrize("place", ["environment", "file"])
    def test_an_unknown_name_stops_the_start_and_the_closest_one_is_proposed(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if place == "environment":
            monkeypatch.setenv("TIDEGATE_MAX_INFLIGHT", "5")
        else:
            Path(".env").write_text("TIDEGATE_MAX_INFLIGHT=5\n")
        text = complaint()
        assert "TIDEGATE_MAX_INFLIGHT" in text
        assert "TIDEGATE_MAX_IN_FLIGHT?" in text

    @pytest.mark.parametrize("value", ["2", "4", " 2 ", "auto"])
    def test_several_workers_are_refused_with_the_reason(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEB_CONCURRENCY", value)
        assert "several workers" in complaint()

    @pytest.mark.parametrize("value", ["", "1", " 1 "])
    def test_one_worker_is_fine(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEB_CONCURRENCY", value)
        load_settings()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("TIDEGATE_PORT", "tcp://10.96.0.7:80"),
            ("TIDEGATE_SERVICE_HOST", "10.96.0.7"),
            ("TIDEGATE_SERVICE_PORT", "80"),
            ("TIDEGATE_SERVICE_PORT_HTTP", "80"),
            ("TIDEGATE_PORT_80_TCP", "tcp://10.96.0.7:80"),
            ("TIDEGATE_PORT_80_TCP_ADDR", "10.96.0.7"),
            ("TIDEGATE_PORT_80_TCP_PROTO", "tcp"),
        ],
    )
    def test_variables_that_kubernetes_injects_are_explained(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, value)
        text = complaint()
        assert name in text
        assert "enableServiceLinks: false" in text

    @pytest.mark.parametrize(("given", "key"), [("secret\n", "secret"), (" secret \r\n", "secret"), ("\n", None)])
    def test_line_break_at_the_end_of_the_engines_key_is_not_part_of_it(
        self, given: str, key: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would end the head of every request to the engine in its middle."""
        monkeypatch.setenv(f"{PREFIX}ENGINE_API_KEY", given)
        kept = load_settings().engine_api_key
        assert (kept and kept.get_secret_value()) == key

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("PORT", "eighty"),
            ("PORT", "70000"),
            ("PORT", "80.5"),
            ("MAX_IN_FLIGHT", "0"),
            ("MAX_QUEUE", "-1"),
            ("MAX_WAIT_S", "0"),
            ("MAX_WAIT_S", "inf"),
            ("DEADLINE_S", "nan"),
            ("DEADLINE_S", "-1"),
            ("KEEPALIVE_S", "-1"),
            ("BODY_S", "0"),
            ("STALL_S", "0"),
            ("DRAIN_S", "inf"),
            ("MAX_BODY_BYTES", "32MiB"),
            ("MAX_HELD_BYTES", "0"),
            ("SHED_STATUS", "500"),
            ("USE_STAINLESS_TIMEOUT", "maybe"),
            ("LOG_FORMAT", "xml"),
            ("MAX_RESTARTS", "-1"),
            ("ENGINE_API_KEY", "se\ncret"),
            ("ENGINE_API_KEY", "secr\u00e9t"),
            ("ENGINE_API_KEY", "secr\udce9t"),
            ("ENGINE_URL", "127.0.0.1:8001"),
            ("ENGINE_URL", "https://engine"),
            ("ENGINE_URL", "http://"),
            ("ENGINE_URL", "http://engine:port"),
            ("ENGINE_URL", "http://engine:99999"),
            ("ENGINE_URL", "http://:8001"),
            ("ENGINE_URL", "http://[::1"),
            ("ENGINE_URL", "unix://"),
            ("ENGINE_URL", "unix://run/engine.sock"),
        ],
    )
    def test_a_bad_value_is_named(self, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PREFIX + name, value)
        assert complaint().startswith(f"{PREFIX}{name}: ")

    def test_one_port_for_two_listeners_is_refused(self) -> None:
        assert "OPS_PORT" in complaint(port=9000, ops_port=9000)

    @pytest.mark.parametrize("name", ["API_KEYS", "ENGINE_API_KEY"])
    def test_secrets_are_not_shown(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PREFIX + name, "alice:s3cret")
        assert "s3cret" not in repr(load_settings())
        assert "s3cret" not in complaint(port="no")

    @given(st.sampled_from(sorted(set(Settings.model_fields) - {"lanes"})), st.text(max_size=20))
    def test_no_value_ends_in_anything_but_a_complaint(self, name: str, value: str) -> None:
        value = value.replace("\0", "").encode("utf-8", "ignore").decode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PREFIX + name.upper(), value)
            try:
                load_settings()
            except SettingsError as error:
                assert str(error).startswith(PREFIX)  # noqa: PT017 - one of two good ends


class TestEngineUrl:
    @pytest.mark.parametrize(
        ("value", "read"),
        [
            ("http://engine:8001/", "http://engine:8001"),
            ("http://[::1]:8001", "http://[::1]:8001"),
            ("http://engine/base/", "http://engine/base"),
            ("unix:///run/engine.sock", "unix:///run/engine.sock"),
        ],
    )
    def test_is_taken(self, value: str, read: str) -> None:
        assert load_settings(engine_url=value).engine_url == read


class TestLanes:
    @pytest.mark.parametrize(
        ("lanes", "complains"),
        [
            ("short", "is not JSON"),
            ("{}", "array"),
            ('"short"', "array"),
            ("null", "array"),
            ("[]", "exactly one lane"),
            ('[{"name": "a", "max_cost": 5}]', "exactly one lane"),
            ('[{"name": "a"}, {"name": "b"}]', "exactly one lane"),
            ('[{"name": "a"}, {"name": "a", "max_cost": 5}]', "same name"),
            ('[{"name": "a"}, {"name": "b", "max_cost": 5}, {"name": "c", "max_cost": 5}]', "same max_cost"),
            ('[{"name": "A"}]', "[0].name"),
            ('[{"name": ""}]', "[0].name"),
            (f'[{{"name": "{"a" * 33}"}}]', "[0].name"),
            ('[{"name": "a\\n"}]', "[0].name"),
            ("[{}]", "[0].name"),
            ("[1]", "[0]"),
            ('[{"name": "a", "size": 5}]', "[0].size"),
            ('[{"name": "a"}, {"name": "b", "max_cost": 0}]', "[1].max_cost"),
            ('[{"name": "a", "floor": 1.1}]', "[0].floor"),
            ('[{"name": "a", "floor": NaN}]', "[0].floor"),
            ('[{"name": "a", "weight": 0}]', "[0].weight"),
            ('[{"name": "a", "weight": Infinity}]', "[0].weight"),
            ('[{"name": "a", "queue": -0.1}]', "[0].queue"),
            ('[{"name": "a", "max_wait_s": -1}]', "[0].max_wait_s"),
            ('[{"name": "a", "priority": 1.5}]', "[0].priority"),
            ('[{"name": "a", "floor": 1}]', "floors"),
            ('[{"name": "a", "floor": 0.5}, {"name": "b", "floor": 0.5, "max_cost": 5}]', "floors"),
        ],
    )
    def test_a_bad_setting_is_explained(self, lanes: str, complains: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIDEGATE_LANES", lanes)
        text = complaint()
        assert text.startswith("TIDEGATE_LANES")
        assert complains in text

    def test_what_is_left_out_has_the_documented_defaults(self) -> None:
        [lane] = load_settings(lanes='[{"name": "all"}]').lanes
        assert lane.model_dump() == {
            "name": "all",
            "max_cost": None,
            "floor": 0,
            "weight": 1,
            "queue": 1,
            "max_wait_s": 10,
            "priority": 0,
        }

    @pytest.mark.parametrize("limit", [2, 10, 16, 50, 64, 100, 256, 1000])
    def test_a_floor_keeps_its_share_rounded_down(self, limit: int) -> None:
        percents = range(101)
        kept = [Lane(name="a", floor=percent / 100).floor_slots(limit) for percent in percents]
        assert kept == [percent * limit // 100 for percent in percents]

    def test_with_one_slot_there_are_no_floors(self) -> None:
        settings = load_settings(max_in_flight=1)
        assert [lane.floor_slots(1) for lane in settings.lanes] == [0, 0]

    @pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 16, 64, 256, 1024])
    def test_the_default_lanes_fit_every_limit(self, limit: int) -> None:
        load_settings(max_in_flight=limit)


def test_a_drain_lasts_as_long_as_the_deadline_unless_told_otherwise() -> None:
    assert load_settings(deadline_s=7).drain_limit_s == 7
    assert load_settings(deadline_s=7, drain_s=0).drain_limit_s == 0


class TestExample:
    def test_names_every_setting_once_and_no_other(self) -> None:
        names = [line.removeprefix("# ").partition("=")[0] for _, line in NAMED]
        assert sorted(names) == sorted(PREFIX + name.upper() for name in Settings.model_fields)

    def test_comments_out_what_is_unset_by_default(self) -> None:
        commented = [line for _, line in NAMED if line.startswith("#")]
        fields = Settings.model_fields.items()
        assert sorted(commented) == sorted(
            f"# {PREFIX}{name.upper()}=" for name, field in fields if field.default is None
        )

    def test_gives_the_defaults_when_it_is_used_as_it_is(self) -> None:
        Path(".env").write_bytes(EXAMPLE.read_bytes())
        assert load_settings() == Settings.model_construct()

    def test_writes_the_defaults_down_rather_than_leaving_them_empty(self) -> None:
        written = dotenv_values(EXAMPLE)
        assert [name for name, value in written.items() if not value] == ["TIDEGATE_CORS_ORIGINS"]

    def test_prints_the_lanes_in_full(self) -> None:
        lanes = [lane.model_dump(mode="json") for lane in DEFAULT_LANES]
        bounded = [{name: value for name, value in lane.items() if value is not None} for lane in lanes]
        assert json.loads(dotenv_values(EXAMPLE)["TIDEGATE_LANES"] or "") == bounded

    def test_explains_each_setting_in_the_line_above_with_its_unit(self) -> None:
        units = {"_S": "econds", "_BYTES": "ytes"}
        for above, line in NAMED:
            assert re.fullmatch(r"# [A-Za-z].{12,}[.:]?", above), line
            for ending, unit in units.items():
                assert unit in above or not line.partition("=")[0].endswith(ending), line

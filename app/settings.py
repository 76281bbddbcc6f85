"""Every setting of the gateway, its default and its check. Names, defaults and meaning are listed in `.env.example`."""

import difflib
import json
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX = "TIDEGATE_"
ENV_FILE = ".env"
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")


class SettingsError(Exception):
    """A setting is unknown or has a bad value; the text names it and says what to do."""


class Lane(BaseModel):
    """One class of requests by cost. Shares are fractions of 1; times are seconds; costs are tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_]{1,32}$")
    max_cost: int | None = Field(default=None, ge=1)  # tokens; None takes the rest
    floor: float = Field(default=0.0, ge=0, le=1)  # share of in-flight slots that no other lane may take
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # share of the other slots when several lanes wait
    queue: float = Field(default=1.0, ge=0, le=1)  # share of MAX_QUEUE that this lane may fill, rounded up
    max_wait_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)  # after this its next request goes first
    priority: int = 0  # sent to vLLM; lower is earlier

    def floor_slots(self, limit: int) -> int:
        """Slots out of `limit` that are kept for this lane."""
        return math.floor(self.floor * limit + 1e-9) if limit > 1 else 0  # 0.29 of 100 is 28.999… in floating point


DEFAULT_LANES = (
    Lane(name="short", max_cost=512, floor=0.4375, weight=2, max_wait_s=10, priority=0),
    Lane(name="long", floor=0.25, weight=1, max_wait_s=10, priority=10),
)


class Settings(BaseSettings):
    """What `TIDEGATE_*` variables say; flags of the launcher beat the environment, which beats `.env`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    ops_port: int | None = Field(default=None, ge=0, le=65535)
    engine_url: str = "http://127.0.0.1:8001"
    engine_api_key: SecretStr | None = None
    max_in_flight: int = Field(default=64, ge=1)
    max_queue: int = Field(default=200, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    wait_share: float = Field(default=0.2, gt=0, le=1)
    deadline_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    keepalive_s: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    body_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    stall_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    drain_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    lanes: Annotated[tuple[Lane, ...], NoDecode] = DEFAULT_LANES
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    max_held_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    api_keys: SecretStr | None = None
    api_keys_file: Path | None = None
    shed_status: Literal[429, 503] = 503
    use_stainless_timeout: bool = False
    cors_origins: str = ""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    log_format: Literal["console", "json"] = "console"
    max_restarts: int = Field(default=5, ge=0)

    @property
    def drain_limit_s(self) -> float:
        """How long a drain may last: `DRAIN_S`, else the deadline."""
        return self.deadline_s if self.drain_s is None else self.drain_s

    @field_validator("shed_status", mode="before")
    @classmethod
    def _shed_status(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("lanes", mode="before")
    @classmethod
    def _lanes_from_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error}); give an array of lanes") from error
        if not isinstance(parsed, list):
            raise ValueError("must be a JSON array of lanes")
        return parsed

    @field_validator("engine_url")
    @classmethod
    def _engine_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            reachable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            reachable = False
        is_socket = value.startswith("unix:///") and value.rstrip("/") != "unix:"
        if not is_socket and not (value.startswith("http://") and reachable):
            raise ValueError("must be http://host:port or unix:///path/to/socket")
        return value.rstrip("/")

    @field_validator("engine_api_key")
    @classmethod
    def _engine_api_key(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value().strip() if value is not None else ""  # files often end with a line break
        if not (key.isascii() and key.isprintable()):
            raise ValueError("has a character in it that no header can carry")
        return SecretStr(key) if key else None

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.ops_port and self.ops_port == self.port:
            raise ValueError(f"OPS_PORT: {self.ops_port} is the main port as well; choose another or unset it")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("TLS_CERT_FILE: goes with TLS_KEY_FILE; set both or neither")
        return self

    @model_validator(mode="after")
    def _lanes_fit(self) -> Self:
        names = [lane.name for lane in self.lanes]
        if len(set(names)) != len(names):
            raise ValueError("LANES: two lanes have the same name")
        if sum(lane.max_cost is None for lane in self.lanes) != 1:
            raise ValueError("LANES: exactly one lane must be without max_cost (it takes the rest)")
        costs = [lane.max_cost for lane in self.lanes if lane.max_cost is not None]
        if len(set(costs)) != len(costs):
            raise ValueError("LANES: two lanes have the same max_cost")
        kept = sum(lane.floor_slots(self.max_in_flight) for lane in self.lanes)
        if kept > max(0, self.max_in_flight - 1):
            raise ValueError(
                f"LANES: the floors keep {kept} of {self.max_in_flight} slots; together they may keep at most "
                f"{self.max_in_flight - 1}: lower a floor or raise MAX_IN_FLIGHT"
            )
        return self


def load_settings(**flags: Any) -> Settings:
    """Read flags (which win), environment and `.env`.

    Raises:
        SettingsError: an unknown `TIDEGATE_*` name, a bad value, or more than one worker asked for.
    """
    given = {**_read_env_file(), **os.environ}
    _refuse_workers(given.get("WEB_CONCURRENCY", ""))
    ours = {name: value for name, value in given.items() if name.upper().startswith(PREFIX)}
    for name, value in ours.items():
        _refuse_service_link(name, value or "")
        if name.upper().removeprefix(PREFIX).lower() not in Settings.model_fields:
            raise SettingsError(f"{name} is not a setting of Tidegate{_closest(name)}; .env.example lists all of them")
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(detail) for detail in error.errors(include_url=False))) from None


def _read_env_file() -> dict[str, str | None]:
    try:
        return dotenv_values(ENV_FILE) if Path(ENV_FILE).is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{ENV_FILE} cannot be read: {error}; mend or remove it") from None


def _refuse_workers(value: str | None) -> None:
    if value and value.strip() not in ("", "1"):
        raise SettingsError(
            f"WEB_CONCURRENCY={value} asks for several workers, each of which would admit up to the limit: "
            "one process holds one gate. Unset it; to serve more, run more engines, each with its own gateway"
        )


def _refuse_service_link(name: str, value: str) -> None:
    """Kubernetes describes a Service named `tidegate` to every pod in variables with our prefix."""
    link = SERVICE_LINK.search(name.upper())
    if value.startswith(("tcp://", "udp://", "sctp://")) or link:
        raise SettingsError(
            f"{name} was set by Kubernetes for a Service named tidegate, not by you: put `enableServiceLinks: false` "
            "into the pod spec or rename the Service"
        )


def _closest(name: str) -> str:
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def _explain(detail: ErrorDetails) -> str:
    where, *inside = detail["loc"] or ("",)
    message = detail["msg"].removeprefix("Value error, ")
    if not where:
        return PREFIX + message
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
    return f"{PREFIX}{str(where).upper()}{place}: {message[0].lower()}{message[1:]}"

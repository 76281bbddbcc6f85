"""API keys: who is calling. A key is known by its name; its value is never logged, shown or passed on."""

import hmac
import re
from collections.abc import Mapping

from app.settings import Settings, SettingsError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Keys:
    """The named keys of the settings; without any, the service is open and every caller has the name ""."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = [(name, value.encode()) for name, value in keys.items()]

    def name_of(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The name of the key in `Authorization: Bearer` or `x-api-key`; None when neither is one of ours."""
        if not self._keys:
            return ""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        offered = [token.strip()] if scheme.lower() == b"bearer" else []
        offered.append(headers.get(b"x-api-key", b"").strip())
        found = None
        for name, key in self._keys:  # no early exit: the time must not tell which key came close
            if sum(hmac.compare_digest(key, value) for value in offered):
                found = name
        return found


def load_keys(settings: Settings) -> Keys:
    """Read `API_KEYS` and `API_KEYS_FILE` (one `name:key` a line, `#` starts a comment line).

    Raises:
        SettingsError: the file cannot be read, an entry is not `name:key`, or a name or key stands twice.
    """
    keys: dict[str, str] = {}
    listed = settings.api_keys.get_secret_value() if settings.api_keys is not None else ""
    if listed:
        _add(keys, "TIDEGATE_API_KEYS", listed.split(","))
    if settings.api_keys_file is not None:
        source = f"TIDEGATE_API_KEYS_FILE: {settings.api_keys_file}"
        try:
            lines = settings.api_keys_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise SettingsError(f"{source}: {reason}") from None
        _add(keys, source, [line for line in lines if not line.lstrip().startswith("#")])
    return Keys(keys)


def _add(keys: dict[str, str], source: str, entries: list[str]) -> None:
    before = len(keys)
    for number, entry in enumerate(entries, start=1):
        name, _, value = (part.strip() for part in entry.partition(":"))
        if not name and not value:
            continue
        if not NAME.fullmatch(name) or not value or not (value.isascii() and value.isprintable()):
            raise SettingsError(f"{source}: entry {number} is not name:key (a name has letters, digits, - _ . only)")
        if name in keys or value in keys.values():
            raise SettingsError(f"{source}: entry {number} repeats a name or a key")
        keys[name] = value
    if len(keys) == before:
        raise SettingsError(f"{source}: there is no name:key in it; unset it to serve everyone")

"""Formats of strings as regular expressions, where llguidance is too loose or strict. It has the others."""

from __future__ import annotations

from typing import Any

_HOUR, _MINUTE = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_OFFSET = f"([zZ]|[+-]{_HOUR}:{_MINUTE})"
_FRACTION = r"(\.[0-9]+)?"


def _leap_seconds() -> str:
    """Return second 60 of 23:59 UTC, in the zones that are whole quarters of an hour from it."""
    texts = [f"23:59:60{_FRACTION}([zZ]|[+-]00:00)"]
    for sign in (1, -1):
        for offset in range(15, 24 * 60, 15):
            hour, minute = divmod((23 * 60 + 59 + sign * offset) % (24 * 60), 60)
            zone = f"{'[+]' if sign > 0 else '-'}{offset // 60:02}:{offset % 60:02}"
            texts.append(f"{hour:02}:{minute:02}:60{_FRACTION}{zone}")
    return "|".join(texts)


_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # Python's dates begin with year 1
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = f"({_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}{_OFFSET}|{_leap_seconds()})"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_GROUP, _BYTE = "[0-9a-fA-F]{1,4}", "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


def _ipv6() -> str:
    """Return the addresses of RFC 3986: eight groups, of which "::" may replace some and IPv4 the last two."""
    last = rf"({_GROUP}:{_GROUP}|({_BYTE}\.){{3}}{_BYTE})"
    begin = [f"({_GROUP}(:{_GROUP}){{0,{count}}})?::" for count in range(7)]  # up to count + 1 groups
    texts = [f"({_GROUP}:){{6}}{last}", f"::({_GROUP}:){{5}}{last}"]
    texts += [f"{begin[count]}({_GROUP}:){{{4 - count}}}{last}" for count in range(5)]
    return "|".join([*texts, f"{begin[5]}{_GROUP}", begin[6]])


_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

_OWN: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_DOMAIN}$", "maxLength": 253},
    "ipv6": {"pattern": f"^({_ipv6()})$"},
    "email": {"pattern": rf"^{_ATOM}(\.{_ATOM})*@{_DOMAIN}$", "maxLength": 254},
}
_OF_LLGUIDANCE = ("duration", "ipv4", "uri", "uuid")
FORMATS = (*_OWN, *_OF_LLGUIDANCE)


def with_exact_format(schema: dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    """Return a schema whose format llguidance follows exactly. Raises ValueError for an unknown one, unless lenient."""
    name = schema.get("format")
    types = schema.get("type", "string")
    if name is None or "string" not in (types if isinstance(types, list) else [types]):
        return {key: value for key, value in schema.items() if key != "format"}
    if name in _OF_LLGUIDANCE:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if name in _OWN:
        return {**rest, "allOf": [*rest.get("allOf", ()), dict(_OWN[name])]}
    if lenient:
        return rest
    raise ValueError(f": Unknown format: {name}; known: {', '.join(FORMATS)}")

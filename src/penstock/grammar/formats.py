"""String formats as regular expressions, so that a `format` is either enforced or refused, never ignored.

A pattern accepts no string that its specification forbids. Some patterns accept less than the specification: leap seconds only
at 23:59:60Z, host names without punycode, e-mail addresses without quoted local parts."""

from typing import Any

_HEX = "[0-9a-fA-F]"
_FULL_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)")
_FRACTION = r"(?:\.[0-9]+)?"
_OFFSET = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FULL_TIME = f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
# A label's third and fourth characters are not both hyphens: that prefix is for punycode, which is no regular language.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9]|[a-zA-Z0-9-]?[a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9][a-zA-Z0-9-]{0,59}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join([
    f"(?:{_GROUP}:){{6}}{_LAST}", f"::(?:{_GROUP}:){{5}}{_LAST}", f"(?:{_GROUP})?::(?:{_GROUP}:){{4}}{_LAST}",
    f"(?:(?:{_GROUP}:){{0,1}}{_GROUP})?::(?:{_GROUP}:){{3}}{_LAST}",
    f"(?:(?:{_GROUP}:){{0,2}}{_GROUP})?::(?:{_GROUP}:){{2}}{_LAST}",
    f"(?:(?:{_GROUP}:){{0,3}}{_GROUP})?::{_GROUP}:{_LAST}",
    f"(?:(?:{_GROUP}:){{0,4}}{_GROUP})?::{_LAST}",
    f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
    f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::"]) + ")"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"
_PCT = f"%{_HEX}{{2}}"


def _references(letters: str, private: str) -> tuple[str, str]:
    """Returns the patterns of absolute and relative references of RFC 3986; of RFC 3987 if `letters` has more than ASCII."""
    unreserved = f"[a-zA-Z0-9._~{letters}-]"
    plain = f"(?:{unreserved}|{_PCT}|[!$&'()*+,;=])"
    char = f"(?:{plain}|[:@])"
    authority = (rf"(?:(?:{plain}|:)*@)?(?:\[(?:{_IPV6}|[vV]{_HEX}+\.[a-zA-Z0-9._~!$&'()*+,;=:-]+)\]|(?:{plain})*)(?::[0-9]*)?")
    empty_or_absolute = f"(?:/{char}*)*"
    rootless = f"{char}+(?:/{char}*)*"
    absolute = f"/(?:{rootless})?"
    tail = f"(?:\\?(?:{char}|[/?{private}])*)?(?:#(?:{char}|[/?])*)?"
    hierarchy = f"(?://{authority}{empty_or_absolute}|{absolute}|{rootless})?"
    first = f"(?:{plain}|@)+"
    relative = f"(?://{authority}{empty_or_absolute}|{absolute}|{first}(?:/{char}*)*)?"
    full = f"[a-zA-Z][a-zA-Z0-9+.-]*:{hierarchy}{tail}"
    return full, f"(?:{full}|{relative}{tail})"


_URI, _URI_REFERENCE = _references("", "")
_IRI, _IRI_REFERENCE = _references("\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef", "\ue000-\uf8ff")
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_NAME = rf"(?:[a-zA-Z0-9_]|{_PCT})(?:\.?(?:[a-zA-Z0-9_]|{_PCT}))*(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = rf"(?:[^\x00-\x20\"'%<>\\^`{{|}}\x7f]|{_PCT}|\{{[+#./;?&]?{_NAME}(?:,{_NAME})*\}})*"

_PATTERNS: dict[str, str] = {
    "date": _FULL_DATE, "time": _FULL_TIME, "date-time": f"{_FULL_DATE}[tT]{_FULL_TIME}", "duration": _DURATION,
    "email": _EMAIL, "ipv4": _IPV4, "ipv6": _IPV6, "ip-address": _IPV4,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI, "url": _URI, "uri-reference": _URI_REFERENCE, "iri": _IRI, "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE, "json-pointer": _POINTER, "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"}

_SCHEMAS: dict[str, dict[str, Any]] = {
    "hostname": {"pattern": f"^{_HOSTNAME}$", "maxLength": 253},
    "int32": {"minimum": -2**31, "maximum": 2**31 - 1}, "int64": {"minimum": -2**63, "maximum": 2**63 - 1},
    "float": {}, "double": {}, "password": {}, "binary": {}, "string": {}}
_SCHEMAS |= {name: {"pattern": f"^(?:{pattern})$"} for name, pattern in _PATTERNS.items()}

ENCODINGS = {"base64": {"pattern": f"^{_PATTERNS['byte']}$"}, "base16": {"pattern": f"^(?:{_HEX}{{2}})*$"},
             "7bit": {"pattern": "^[\\x00-\\x7f]*$"}, "8bit": {}, "binary": {}}
"""The schema of each contentEncoding."""

KNOWN = tuple(sorted(_SCHEMAS))


def schema_of(name: object) -> dict[str, Any] | None:
    """Returns the schema that values of a format must also satisfy; None for an unknown format."""
    return _SCHEMAS.get(name) if isinstance(name, str) else None

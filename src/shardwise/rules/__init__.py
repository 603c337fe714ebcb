"""Rules: what layouts an operator may run in on one mesh axis."""

from .language import (
    Along,
    Call,
    Dims,
    Family,
    Local,
    Operand,
    Row,
    Rule,
    Scaled,
    Site,
    Windows,
    along,
    has_fractions,
)
from .notation import notation, parse
from .table import REGISTERED, TABLE, Registered, family_of, key_of, registered

__all__ = [
    "REGISTERED",
    "TABLE",
    "Along",
    "Call",
    "Dims",
    "Family",
    "Local",
    "Operand",
    "Registered",
    "Row",
    "Rule",
    "Scaled",
    "Site",
    "Windows",
    "along",
    "family_of",
    "has_fractions",
    "key_of",
    "notation",
    "parse",
    "registered",
]

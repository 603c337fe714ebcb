"""Rules: what layouts an operator may run in on one mesh axis."""

from .apart import split_factors
from .call import Call, Family, Operand, stored
from .notation import notation, parse
from .rule import Along, Dims, Link, Local, Row, Rule, Scaled, Site, Windows, along, dims_of
from .table import TABLE, family_of

__all__ = [
    "TABLE",
    "Along",
    "Call",
    "Dims",
    "Family",
    "Link",
    "Local",
    "Operand",
    "Row",
    "Rule",
    "Scaled",
    "Site",
    "Windows",
    "along",
    "dims_of",
    "family_of",
    "notation",
    "parse",
    "split_factors",
    "stored",
]

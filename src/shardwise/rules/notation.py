"""The index notation of rules: `"m k, k n -> m n"`.

Operands are separated by commas, dims by spaces.

- `m` is a factor; `k!` is a dim that is needed whole, and `_` one without a name.
- `(a b)` is a dim made of two factors, outer first.
- `...` stands for any number of dims that broadcast; `...!` needs them whole.
- `[m]` is a dim that may be missing or of size 1 (broadcast).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import RuleError
from .language import (
    NOWHERE,
    Along,
    Call,
    Dims,
    Family,
    Local,
    Rule,
    Scaled,
    has_fractions,
    unless_empty,
)


@dataclass(frozen=True)
class DimPattern:
    """One dim of a pattern: its factors, outer first; none for `_`."""

    factors: tuple[str, ...]
    whole: bool = False
    optional: bool = False
    ellipsis: bool = False


Pattern = tuple[DimPattern, ...]

_TOKEN = re.compile(r"\s*(\.\.\.!?|\([^()]*\)|\[[^\[\]]*\]|[A-Za-z][A-Za-z0-9]*!?|_)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")


@lru_cache(maxsize=1024)
def parse(text: str) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    """The patterns of operands and results.

    >>> parse("m k k n")
    Traceback (most recent call last):
    shardwise.errors.RuleError: rule 'm k k n': there is no '->' between operands and results. \
Write for example 'm k, k n -> m n'.
    """
    if text.count("->") != 1:
        problem = "there is no '->'" if "->" not in text else "there is more than one '->'"
        raise RuleError(
            f"rule {text!r}: {problem} between operands and results. "
            "Write for example 'm k, k n -> m n'."
        )
    left, right = text.split("->")
    inputs = tuple(_operand(text, part) for part in left.split(","))
    outputs = tuple(_operand(text, part) for part in right.split(","))
    _check_names(text, inputs, outputs)
    return inputs, outputs


def _operand(rule: str, text: str) -> Pattern:
    dims: list[DimPattern] = []
    rest = text.strip()
    if rest == "()":
        return ()
    if not rest:
        raise RuleError(f"rule {rule!r}: an operand is empty. Write '()' for a 0-d tensor.")
    while rest:
        match = _TOKEN.match(rest)
        if match is None:
            raise RuleError(
                f"rule {rule!r}: cannot read {rest!r}. A dim is a name like 'm', 'k!' (needed "
                "whole), '_', '(a b)', '[m]', '...' or '...!'."
            )
        dims.append(_dim(rule, match.group(1)))
        rest = rest[match.end() :].strip()
    if sum(dim.ellipsis for dim in dims) > 1:
        raise RuleError(f"rule {rule!r}: an operand has '...' twice.")
    return tuple(dims)


def _dim(rule: str, token: str) -> DimPattern:
    if token.startswith("..."):
        return DimPattern((), whole=token.endswith("!"), ellipsis=True)
    if token == "_":
        return DimPattern(())
    if token[0] in "([":
        names = tuple(token[1:-1].split())
        if not names or not all(_NAME.fullmatch(name) for name in names):
            raise RuleError(f"rule {rule!r}: {token!r} must hold names separated by spaces.")
        return DimPattern(names, optional=token[0] == "[")
    return DimPattern((token.rstrip("!"),), whole=token.endswith("!"))


def _check_names(rule: str, inputs: Sequence[Pattern], outputs: Sequence[Pattern]) -> None:
    known = {name for pattern in inputs for dim in pattern for name in dim.factors}
    dots = any(dim.ellipsis for pattern in inputs for dim in pattern)
    for pattern in outputs:
        for dim in pattern:
            for name in dim.factors:
                if name not in known:
                    raise RuleError(
                        f"rule {rule!r}: the result has {name!r}, which no operand has. "
                        f"Operands have {', '.join(sorted(known)) or 'no names'}."
                    )
            if dim.ellipsis and not dots:
                raise RuleError(f"rule {rule!r}: the result has '...', which no operand has.")


def notation(
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    added: Sequence[int] = (),
    reduce: str | None = "sum",
    alike: Sequence[int] = (),
    local: Local | None = None,
    refuses_empty: int | None = None,
) -> Family:
    """A family written in index notation; for the traits see `Rule`.

    `refuses_empty` is an operand of which the kernel refuses empty shards: a rank that holds one
    makes zeros. A result that is None, or of shape [0] where the rule has more dims, is one that
    the caller did not ask for.
    """
    inputs, outputs = parse(text)

    def family(call: Call) -> Rule:
        given = call.present()
        if len(given) != len(call.specs) or (given and given[-1] >= len(inputs)):
            raise RuleError(
                f"{call.name}: the rule {text!r} is for {len(inputs)} operands, but the call has "
                f"{len(call.specs)}."
            )
        used = [inputs[index] for index in given]
        rank = _ellipsis_rank(call, used)
        sizes: dict[str, int] = {}
        patterns = [_expand(pattern, rank) for pattern in used]
        for optional in (False, True):
            for operand, pattern in enumerate(patterns):
                _bind(call, text, operand, pattern, sizes, optional)
        whole = {name for p in patterns for dim in p if dim.whole for name in dim.factors}
        made = [_expand(pattern, rank) for pattern in _returned(call, outputs)]
        unasked = [i for i, r in enumerate(call.results) if r.shape == (0,) and len(made[i]) != 1]
        for index, result in enumerate(call.results):
            if index not in unasked and _fitted(made[index], len(result.shape)) is None:
                raise RuleError(
                    f"{call.name}: result {index} has shape {list(result.shape)}, which does not "
                    f"fit rule {text!r}."
                )
        rule = Rule(
            inputs=tuple(
                _dims(pattern, call.shape(operand), sizes, whole)
                for operand, pattern in enumerate(patterns)
            ),
            outputs=tuple(
                (None,) if index in unasked else _dims(made[index], result.shape, sizes, whole)
                for index, result in enumerate(call.results)
            ),
            sizes={name: size for name, size in sizes.items() if name not in whole},
            reduce=None if _is_scaled_by_infinity(call) else reduce,
            added=frozenset(given.index(index) for index in added if index in given),
            alike=frozenset([*alike, *unasked]),
            linear=tuple(
                kept
                for each in (() if _is_scaled_by_infinity(call) else linear)
                if (kept := tuple(given.index(index) for index in each if index in given))
            ),
            averages=all(has_fractions(spec.dtype) for spec in call.specs),
            local=local,
            placed=None if local is None else NOWHERE,
        )
        return rule if refuses_empty is None else replace(rule, **unless_empty(call, refuses_empty))

    return family


def _returned(call: Call, outputs: Sequence[Pattern]) -> Sequence[Pattern]:
    """The patterns of the results that are not None."""
    if not isinstance(call.structure, (list, tuple)) or len(call.structure) != len(outputs):
        return outputs
    pairs = zip(call.structure, outputs, strict=True)
    return [pattern for at, pattern in pairs if isinstance(at, int)]


def _is_scaled_by_infinity(call: Call) -> bool:
    """True if the terms of a sum are each multiplied by an infinite number."""
    numbers = [call.get(name) for name in ("alpha", "beta", "scale")]
    return any(isinstance(n, (float, complex)) and n - n != 0 for n in numbers)


def _ellipsis_rank(call: Call, inputs: Sequence[Pattern]) -> int:
    rank = 0
    for operand, pattern in enumerate(inputs):
        if any(dim.ellipsis for dim in pattern):
            rank = max(rank, len(call.shape(operand)) - (len(pattern) - 1))
    return rank


def _expand(pattern: Pattern, rank: int) -> Pattern:
    """The pattern with `...` replaced by one factor per dim."""
    dims: list[DimPattern] = []
    for dim in pattern:
        if dim.ellipsis:
            names = [(f"i{index}",) for index in range(rank)]
            dims.extend(DimPattern(name, whole=dim.whole, optional=True) for name in names)
        else:
            dims.append(dim)
    return tuple(dims)


def _fitted(pattern: Pattern, ndim: int) -> Pattern | None:
    """The pattern without as many leading optional dims as the tensor lacks."""
    missing = len(pattern) - ndim
    if missing < 0 or not all(dim.optional for dim in pattern[:missing]):
        return None
    return pattern[missing:]


def _bind(
    call: Call, text: str, operand: int, pattern: Pattern, sizes: dict[str, int], optional: bool
) -> None:
    """Learn the sizes of the factors from an operand's dims that are, or are not, optional."""
    shape = call.shape(operand)
    dims = _fitted(pattern, len(shape))
    if dims is None:
        raise RuleError(
            f"{call.name}: operand {operand} has shape {list(shape)}, which does not fit "
            f"rule {text!r}."
        )
    for dim, size in zip(dims, shape, strict=True):
        if len(dim.factors) == 1 and dim.optional == optional:
            name = dim.factors[0]
            known = sizes.get(name)
            if known is None or (known == 1 and optional):
                sizes[name] = size
            elif known != size and not (dim.optional and size == 1):
                raise RuleError(
                    f"{call.name}: {name!r} is {known} in one operand and {size} in operand "
                    f"{operand} of rule {text!r}."
                )


def _dims(pattern: Pattern, shape: Sequence[int], sizes: dict[str, int], whole: set[str]) -> Dims:
    dims: list[Along | None] = []
    fitted = _fitted(pattern, len(shape))
    for dim, size in zip(pattern if fitted is None else fitted, shape, strict=True):
        name = dim.factors[0] if dim.factors else None
        if name is None or name in whole or (dim.optional and size != sizes.get(name)):
            dims.append(None)
            continue
        block = 1
        for inner in dim.factors[1:]:
            block *= sizes[inner]
        dims.append(Along(name, Scaled(block) if block > 1 else None))
    return tuple(dims)

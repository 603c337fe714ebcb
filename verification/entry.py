"""One entry of PyTorch's operator database against plain PyTorch, in many layouts."""

from __future__ import annotations

import contextlib
import itertools
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten, tree_map

import shardwise
from shardwise import Partial, Placement, Replicate, Shard
from shardwise.comm.events import watchers
from shardwise.dispatch import dispatch

from .rounding import ROUNDING, Differs, widened
from .strides import checked_strides

__all__ = [
    "Finding",
    "Inferring",
    "check_entry",
    "check_index",
    "check_strides",
    "entries",
    "entry_name",
]

MESHES = [(2,), (2, 2)]
MOST_ALONE = 4
"""So many inputs of a call are sharded alone, the others replicated."""

SHAPELESS = (
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
)
"""Operators whose values are not defined: only shape and dtype are compared."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7, torch.complex64: 1e-4}


@dataclass
class Finding:
    """What was seen of one entry."""

    name: str
    samples: int = 0
    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    tiers: list[str] = field(default_factory=list)
    nbytes: int = 0
    held: int = 0
    alone: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    refused: str = ""
    rounded: int = 0
    of_subclass: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _TooLong(BaseException):
    pass


def _too_long(*_: object) -> None:
    raise _TooLong


def entry_name(entry: Any) -> str:
    """The name with its variant."""
    return entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else "")


def _dtype(entry: Any) -> torch.dtype | None:
    known = entry.supported_dtypes("cpu")
    return next(
        (d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in known), None
    )


def layouts(mesh_ndim: int, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, ...]]:
    """The layouts to try: one word per mesh axis. `S1` is the dim, or the last one there is; `B1`
    is the dim sharded block by block, if it is several blocks; `S0@1` is input 1 alone."""
    most_dims = max(t.ndim for t in tensors)
    words = ["R", *(f"S{dim}" for dim in range(max(most_dims, 1))), "P"]
    if mesh_ndim == 1:
        yield from ((word,) for word in words)
        for dim in range(min(most_dims, 2)):
            if any(t.ndim > dim and _blocks(t.shape[dim]) > 1 for t in tensors):
                yield (f"B{dim}",)
        alone = (
            [i for i, t in enumerate(tensors) if t.ndim][:MOST_ALONE] if len(tensors) > 1 else []
        )
        yield from ((f"S0@{index}",) for index in alone)
        return
    first = [("S0", "S0"), ("S0", "P"), ("R", "S0"), ("P", "R")]
    yield from first
    yield from (pair for pair in itertools.permutations(words[1:-1][:3], 2))


def _place(word: str, value: torch.Tensor) -> Placement:
    if word == "P":
        floats = value.is_floating_point() or value.is_complex()
        return Partial() if floats and bool(value.isfinite().all()) else Replicate()
    if word == "R" or value.ndim == 0:
        return Replicate()
    dim = min(int(word[1:]), value.ndim - 1)
    return Shard(dim, _blocks(value.shape[dim]) if word[0] == "B" else 1)


def _blocks(size: int) -> int:
    """How many equal blocks of several elements a dim can be seen as; 1 if it cannot."""
    return next((n for n in (2, 3, 5) if size > n and size % n == 0), 1)


def _distributed(value: torch.Tensor, mesh: Any, words: tuple[str, ...], grad: bool) -> Any:
    """A DTensor of the value; a pending sum is split into parts that are not the value itself."""
    if value.layout is not torch.strided:
        return value
    places = [_place(word, value) for word in words]
    made = shardwise.distribute_tensor(value.detach().clone(), mesh, places)
    if any(place.is_partial() for place in places):
        made = _split(made)
    wants = grad and (value.is_floating_point() or value.is_complex())
    return made.requires_grad_() if wants else made


def _split(made: Any) -> Any:
    """Move half of a pending sum from its first coordinate to the last."""
    spec = made._spec
    axis = spec.sums[0]
    last = spec.topology.shape[axis] - 1
    for coord in spec.slots:
        if coord[axis] == 0 and last:
            there = list(coord)
            there[axis] = last
            a, b = made._locals[spec.slot(coord)], made._locals[spec.slot(tuple(there))]
            half = a * 0.5
            b += half
            a -= half
    return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


Slack = dict[int, float]
"""By the id of a tensor that plain PyTorch gave: how far from it a result may be."""


def _same(ours: Any, theirs: Any, values: bool, slack: Slack | None = None) -> None:
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{type(ours)} where a tensor is expected"
        assert ours.shape == theirs.shape, f"shape {list(ours.shape)}, not {list(theirs.shape)}"
        assert ours.dtype == theirs.dtype, f"dtype {ours.dtype}, not {theirs.dtype}"
        assert ours.layout == theirs.layout, f"layout {ours.layout}, not {theirs.layout}"
        if values and theirs.layout is not torch.strided:
            with torch.inference_mode(theirs.is_inference()):
                _same(ours.to_dense(), theirs.to_dense(), values, slack)
        elif values:
            whole = ours.full_tensor() if isinstance(ours, shardwise.DTensor) else ours
            close = TOLERANCE.get(theirs.dtype, 0)
            far = max(close, (slack or {}).get(id(theirs), 0))
            pair, near = (whole.detach(), theirs.detach()), {"rtol": close, "atol": far}
            if not torch.allclose(*pair, **near, equal_nan=True):  # it has no words, but is quick
                try:
                    torch.testing.assert_close(*pair, **near, equal_nan=True)
                except AssertionError as error:
                    raise Differs(str(error)) from None
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{len(ours)} results, not {len(theirs)}"
        for a, b in zip(ours, theirs, strict=True):
            _same(a, b, values, slack)
    elif isinstance(theirs, (bool, int, float, complex)) and values:
        equal = ours == theirs or (ours != ours and theirs != theirs)
        assert equal or abs(ours - theirs) < 1e-4, f"{ours}, not {theirs}"


@dataclass
class _Case:
    """A sample of an entry, and what plain PyTorch gives for it."""

    entry: Any
    given: Any
    leaves: frozenset[int]  # the inputs, counted among the dense ones, that require grad
    results: Any
    cotangents: list[torch.Tensor]
    grads: tuple[torch.Tensor | None, ...]

    @cached_property
    def doubled(self) -> _Case | None:
        """The same in double precision; None if PyTorch has it not."""
        try:
            wide = widened((self.given, self.cotangents))
            return _case(self.entry, wide[0], self.leaves, wide[1])
        except (RuntimeError, TypeError, ValueError):
            return None

    @cached_property
    def of_subclass(self) -> _Case:
        """The same with the gradients that PyTorch gives for subclasses of tensors, where its
        formula differs: that of `prod` does not divide by its input, and so has no NaN where an
        input is infinite."""
        pairs = tree_map(_paired, (self.given, self.cotangents))
        case = _case(self.entry, pairs[0], self.leaves, pairs[1])
        grads = tuple(None if grad is None else grad.a for grad in case.grads)
        return replace(self, grads=grads)

    def slack(self) -> Slack:
        """For each tensor a multiple of the rounding error that plain PyTorch itself makes."""
        exact = self.doubled
        if exact is None:
            return {}
        ours = [*_tensors(self.results), *(g for g in self.grads if g is not None)]
        theirs = [*_tensors(exact.results), *(g for g in exact.grads if g is not None)]
        found: Slack = {}
        for a, b in zip(ours, theirs, strict=True):
            if a.layout is torch.strided and a.dtype in TOLERANCE and a.numel():
                error = (widened(a) - b.detach()).abs()
                found[id(a)] = ROUNDING * max(error[error.isfinite()].tolist(), default=0.0)
        return found


def _paired(value: Any) -> Any:
    """A tensor as one of PyTorch's own subclasses; what is no tensor stays as it is."""
    return TwoTensor(value, value.clone()) if isinstance(value, torch.Tensor) else value


def _needs_grad(tree: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(tree) if t.requires_grad]


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` costs as much as a call


_REFUSALS = (AssertionError, RuntimeError, ValueError, IndexError, TypeError)


def _plain(entry: Any, given: Any) -> _Case:
    """What plain PyTorch gives, with the gradients of all inputs that have one.

    Some operators refuse an input that requires grad, as a loss does its weights: such a sample is
    run with the others, and if all are refused without gradients.
    """
    dense = [t for t in _tensors(given) if t.layout is torch.strided]
    floats = [i for i, t in enumerate(dense) if t.is_floating_point() or t.is_complex()]
    sparse = given[1].get("sparse")  # a gradient that would be sparse is refused
    every = frozenset(floats if entry.supports_autograd and not sparse else ())
    try:
        return _case(entry, given, every)
    except _REFUSALS as error:
        refusal = error
    some = frozenset(i for i in every if _accepts(entry, given, i))
    for leaves in dict.fromkeys((some, frozenset[int]())):
        with contextlib.suppress(*_REFUSALS):
            return _case(entry, given, leaves)
    raise refusal


def _accepts(entry: Any, given: Any, leaf: int) -> bool:
    try:
        _case(entry, given, frozenset([leaf]))
    except _REFUSALS:
        return False
    return True


def _case(
    entry: Any,
    given: Any,
    leaves: frozenset[int],
    cotangents: list[torch.Tensor] | None = None,
) -> _Case:
    order = itertools.count()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach().clone()
        if value.layout is not torch.strided:
            return copy
        return copy.requires_grad_(next(order) in leaves)

    args, kwargs = tree_map(own, given)
    _seed(0)
    results = entry(*args, **kwargs)
    roots, ends = _needs_grad(results), _needs_grad((args, kwargs))
    if not (roots and ends):
        return _Case(entry, given, leaves, results, [], ())
    if cotangents is None:
        _seed(1)
        cotangents = [torch.randn_like(root) for root in roots]
    grads = torch.autograd.grad(roots, ends, cotangents, allow_unused=True)
    return _Case(entry, given, leaves, results, cotangents, grads)


def _for_input(word: str, index: int) -> str:
    """The word of one input, counted among the dense ones."""
    word, _, alone = word.partition("@")
    return word if alone in ("", str(index)) else "R"


def _forward(case: _Case, mesh: Any, words: tuple[str, ...]) -> Any:
    required = case.leaves if case.grads else frozenset()
    order = itertools.count()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        index = next(order)
        own_words = tuple(_for_input(w, index) for w in words)
        return _distributed(value, mesh, own_words, index in required)

    args, kwargs = tree_map(own, case.given)
    leaves = _needs_grad((args, kwargs))
    _seed(0)
    with shardwise.CommDebugMode() as comm:
        results = case.entry(*args, **kwargs)
    return results, leaves, sum(comm.bytes.values())


def _backward(
    results: Any, leaves: list[Any], case: _Case, mesh: Any, slack: Slack | None = None
) -> None:
    roots = _needs_grad(results)
    assert len(roots) == len(case.cotangents), "other results require grad"
    whole = [Replicate()] * mesh.ndim
    cotangents = [
        c if c.layout is not torch.strided else shardwise.distribute_tensor(c, mesh, whole)
        for c in case.cotangents
    ]
    grads = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    for ours, theirs in zip(grads, case.grads, strict=True):
        assert (ours is None) == (theirs is None), "a gradient is missing, or too many"
        if theirs is not None:
            _same(ours, theirs, True, slack)


def check_entry(entry: Any, meshes: list[Any], most: int | None, seconds: int) -> Finding:
    """Run one entry: every sample (at most `most`), every mesh, every layout."""
    finding = Finding(entry_name(entry))
    dtype = _dtype(entry)
    if dtype is None:
        finding.left_out = "no CPU kernel for float32, int64, bool or complex64"
        return finding
    # Time of this process alone, so that a busy machine checks no less than an idle one.
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    plans: dict[int, Any] = {}
    dispatch.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = entry.sample_inputs("cpu", dtype, requires_grad=False)
            for sample in itertools.islice(samples, most):
                _check_sample(entry, sample, meshes, finding, counts, plans)
    except _TooLong:
        counts["forward"]["time"] += 1
        finding.examples["time"] = f"more than {seconds} s"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    finding.forward, finding.backward = dict(counts["forward"]), dict(counts["backward"])
    if not finding.samples and not finding.left_out:
        finding.left_out = finding.refused or "no sample takes a tensor"
    return finding


def _check_sample(
    entry: Any,
    sample: Any,
    meshes: list[Any],
    finding: Finding,
    counts: dict[str, Counter[str]],
    plans: dict[int, Any],
) -> None:
    given = ((sample.input, *sample.args), sample.kwargs)
    tensors = [t for t in _tensors(given) if t.layout is torch.strided]
    if not tensors:
        return
    if len(tensors) < len(_tensors(given)):
        finding.refused = "sparse inputs, which are refused: use to_dense()"
        return
    try:
        case = _plain(entry, given)
    except _REFUSALS as error:
        finding.refused = f"plain PyTorch refuses: {error}".replace("\n", " ")[:100]
        return  # what plain PyTorch refuses is no sample
    finding.samples += 1
    for mesh in meshes:
        for words in layouts(mesh.ndim, tensors):
            with _observed(finding, words, plans):
                _check_layout(case, mesh, words, finding, counts)


@contextlib.contextmanager
def _observed(finding: Finding, words: tuple[str, ...], plans: dict[int, Any]) -> Iterator[None]:
    """Note who serves the calls when dim 0 is sharded on one axis.

    A tier is told when a plan is built. So these calls have plans of their own: whatever serves
    them was built for them, once in an entry.
    """
    if words != ("S0",):
        yield
        return
    tiers: set[str] = set(finding.tiers)

    def seen(op: object, tier: str, operands: object) -> None:
        tiers.add(tier)

    others, dispatch._entries = dispatch._entries, plans
    watchers.append(seen)
    try:
        yield
    finally:
        watchers.remove(seen)
        dispatch._entries = others
    finding.tiers = sorted(tiers)


def _call(
    case: _Case,
    mesh: Any,
    words: tuple[str, ...],
    finding: Finding | None = None,
    slack: Slack | None = None,
) -> tuple[str, BaseException | None]:
    """Make a call: how far it came, and what went wrong."""
    stage = "forward"
    try:
        results, leaves, nbytes = _forward(case, mesh, words)
        if finding is not None and words == ("S0",):
            finding.nbytes += nbytes
            finding.held += sum(t.numel() * t.element_size() for t in _tensors(case.given))
        if finding is not None and "@" in words[0]:
            _note_alone(finding, case, words[0].partition("@")[2], nbytes)
        _same(results, case.results, case.entry.name not in SHAPELESS, slack)
        if case.grads:
            stage = "backward"
            _backward(results, leaves, case, mesh, slack)
    except (_TooLong, KeyboardInterrupt):
        raise
    except BaseException as error:
        return stage, error
    return stage, None


def _note_alone(finding: Finding, case: _Case, index: str, nbytes: int) -> None:
    """Add up the bytes received, and those of the input, when it alone is sharded."""
    dense = [t for t in _tensors(case.given) if t.layout is torch.strided]
    own = dense[int(index)]
    before = finding.alone.get(index, [0, 0])
    finding.alone[index] = [before[0] + nbytes, before[1] + own.numel() * own.element_size()]


def _is_rounding(case: _Case, mesh: Any, words: tuple[str, ...]) -> bool:
    """Whether a difference is rounding: see `rounding.py`."""
    exact = case.doubled
    if exact is None or _call(exact, mesh, words)[1] is not None:
        return False
    return _call(case, mesh, words, slack=case.slack())[1] is None


def _is_of_subclass(case: _Case, mesh: Any, words: tuple[str, ...]) -> bool:
    """Whether a gradient is the one that PyTorch gives for subclasses of tensors."""
    try:
        return _call(case.of_subclass, mesh, words)[1] is None
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def _check_layout(
    case: _Case,
    mesh: Any,
    words: tuple[str, ...],
    finding: Finding,
    counts: dict[str, Counter[str]],
) -> None:
    stage, error = _call(case, mesh, words, finding)
    if isinstance(error, Differs) and _is_rounding(case, mesh, words):
        stage, error = "backward" if case.grads else "forward", None
        finding.rounded += 1
    elif isinstance(error, Differs) and stage == "backward" and _is_of_subclass(case, mesh, words):
        error = None
        finding.of_subclass += 1
    if stage == "backward":
        counts["forward"]["right"] += 1
    if error is None:
        counts[stage]["right"] += 1
        return
    kind = "wrong" if isinstance(error, AssertionError) else "error"
    counts[stage][kind] += 1
    shapes = [list(t.shape) for t in _tensors(case.given)]
    text = f"{words} on {tuple(mesh.shape)}, {shapes}: {type(error).__name__}: {error}"
    finding.examples.setdefault(f"{stage} {kind}", text.replace("\n", " ")[:400])


def entries() -> list[Any]:
    """PyTorch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class Inferring:
    """An entry that is called in inference mode, where composites reach the library whole."""

    supports_autograd = False

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self._entry(*args, **kwargs)


class Permuted:
    """An entry whose samples come again with dims in another order in memory: of all, of some."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry(*args, **kwargs)

    def sample_inputs(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for sample in self._entry.sample_inputs(*args, **kwargs):
            yield sample
            yield sample.transform(_permuted)
            order = itertools.count()
            yield sample.transform(lambda v, n=order: v if next(n) % 2 else _permuted(v))


def _permuted(value: Any) -> Any:
    """A tensor with its dims in the order of channels-last images, or in reverse."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    order = [0, *range(2, value.ndim), 1] if value.ndim > 3 else [*range(value.ndim)][::-1]
    inverse = sorted(range(value.ndim), key=order.__getitem__)
    return value.permute(order).contiguous().permute(inverse)


def check_index(
    index: int, most: int | None, seconds: int, inference: bool, strides: bool
) -> dict[str, Any]:
    """Check one entry of the database, in a process of its own."""
    torch.set_num_threads(1)
    meshes = [shardwise.init_device_mesh("cpu", shape) for shape in MESHES]
    entry = Inferring(entries()[index]) if inference else entries()[index]
    if not strides:
        return check_entry(entry, meshes, most, seconds).as_dict()
    return check_strides(entry, meshes, most, seconds).as_dict()


def check_strides(entry: Any, meshes: list[Any], most: int | None, seconds: int) -> Finding:
    """As `check_entry`, with the strides of every DTensor checked; a fault counts as wrong."""
    with checked_strides(against_plain=True) as found:
        finding = check_entry(Permuted(entry), meshes, most, seconds)
    if found:
        finding.forward["wrong"] = finding.forward.get("wrong", 0) + len(found)
        for number, text in enumerate(dict.fromkeys(found)):
            if number < 8:
                finding.examples[f"strides {number}"] = text
    return finding

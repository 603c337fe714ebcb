"""`capture(step)`: calls run eagerly, then two are recorded and compared, then it is replayed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import memory_of, no_garbage_collection, pytree
from ..comm.events import on_free
from ..comm.recording import recorder
from ..config import current
from ..errors import CaptureError, need, public
from ..layout.user_line import warn_user
from ..report import StepReport, explain_step
from ..storage.wrapper import Wrapper
from .agree import all_agree, all_record
from .emit import Missed
from .graph import Graph
from .passes import DEFAULT, Pass
from .record import Recording, difference, record
from .script import save_inputs, script
from .state import State, local_tensors, observed
from .variables import is_told_by_value

WARM = 2
"""How many calls with arguments of one kind run eagerly before one is recorded."""
MOST_GRAPHS = 8
"""How many graphs a captured step makes; what fits none of them runs eagerly."""
_MOST_TRIES = 8
"""How often a recording is compared with one of another branch before the step is refused."""
_MOST_KINDS = 64
"""How many kinds of arguments are remembered."""


class _Case:
    """The calls with arguments of one kind."""

    def __init__(self) -> None:
        self.calls = 0
        self.first: Recording | None = None
        self.graphs: list[Graph] = []
        self.refused = ""


@public
class Captured:
    """A step that is recorded and replayed. Call it as the function that it was made of."""

    _made = itertools.count()

    def __init__(
        self,
        step: Callable[..., Any],
        passes: Sequence[Pass] | None,
        verify: bool,
        backend: str | None,
    ) -> None:
        need("capture", step, Callable, "a function", CaptureError)
        words = "a list of functions of shardwise.capture.passes"
        need("capture: passes", passes, Sequence | None, words, CaptureError)
        for each in passes or ():
            need("capture: passes", each, Callable, words, CaptureError)
        if backend not in (None, "inductor"):
            raise CaptureError(f"capture: backend is None or 'inductor', not {backend!r}.")
        functools.update_wrapper(self, step)
        self.eager = step
        self._number = next(self._made)
        self._passes = DEFAULT if passes is None else tuple(passes)
        self._verify, self._backend = verify, backend
        self._state: State | None = None
        self._cases: dict[Any, _Case] = {}
        self._told: set[str] = set()
        self._counts = dict.fromkeys(("eager", "recorded", "replayed", "graphs"), 0)

    def stats(self) -> dict[str, int]:
        """How many calls ran eagerly, were recorded or replayed, and how many graphs were made."""
        return dict(self._counts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recorder() is not None:
            raise CaptureError(
                f"{self._name}: a captured step was called while another one is recorded. Call "
                "its function, `.eager`, inside a captured step, and capture the outermost alone."
            )
        state = self._state
        if state is None or not state.is_current():
            return self._look(args, kwargs)
        # A report is of lines, modules and memory, which a replay does not know.
        if current().lockstep or current().plain == "check_always" or on_free:
            return self._run_eagerly(args, kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs))
        key = (tree, *[self._kind(value) for value in flat], _shared(flat), state.key())
        case = self._cases.get(key)
        if case is None:
            case = self._new_case(key)
        if case.refused:
            raise CaptureError(case.refused)
        for graph in case.graphs:
            changed = graph.changed()
            if changed is not None:
                self._tell(f"the variable {changed!r} has another value, so another graph is made")
            elif graph.takes(flat):
                return self._replay(case, graph, flat, tree)
        return self._record(case, flat, tree)

    @property
    def _name(self) -> str:
        return f"capture({getattr(self.eager, '__name__', 'step')})"

    def _call(self) -> str:
        """This call, told apart from all others of captured steps in the same way on every rank."""
        calls = sum([self._counts[kind] for kind in ("eager", "recorded", "replayed")])
        return f"{self._number} {self._name} {calls}"

    # --- the program ---------------------------------------------------------------------------

    def _graph(self) -> Graph:
        """The graph that was made last."""
        graphs = [graph for case in self._cases.values() for graph in case.graphs]
        if not graphs:
            raise CaptureError(
                f"{self._name}: nothing is captured yet. It takes {WARM + 3} calls with arguments "
                "of one kind."
            )
        return graphs[-1]

    def code(self) -> str:
        """The step as a script in plain PyTorch and `torch.distributed`, which runs without
        Shardwise under torchrun. All ranks make the call, and get the same text."""
        return script(self._graph())

    def explain(self, *args: Any, **kwargs: Any) -> StepReport:
        """The report of one call: its communication and memory. It runs eagerly, on all ranks:
        a replay makes the same collectives, but knows no lines and modules."""
        return explain_step(self.eager, *args, **kwargs)

    def save_inputs(self, prefix: str, batches: Sequence[Any]) -> None:
        """Write what the script of `code()` needs to go on from here: a file for each rank.

        `batches` are the arguments of the next calls: a list for each call, or its only argument.
        """
        need("save_inputs", batches, list | tuple, "a list of arguments", CaptureError)
        listed = [each if isinstance(each, (list, tuple)) else [each] for each in batches]
        save_inputs(self._graph(), prefix, listed)

    # --- eager calls ---------------------------------------------------------------------------

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        self._counts["eager"] += 1
        return _detached(self.eager(*args, **kwargs))

    def _look(self, args: Any, kwargs: Any) -> Any:
        """Run eagerly, and find the modules and optimizers that the step uses."""
        if self._state is not None:
            self._tell(
                "a parameter, buffer or module is another one than before; it is recorded anew"
            )
        self._cases.clear()
        self._state = None
        with observed() as found:
            result = self._run_eagerly(args, kwargs)
        self._state = State(found.modules, found.optimizers, self.eager)
        return result

    def _new_case(self, key: Any) -> _Case:
        while len(self._cases) >= _MOST_KINDS:
            self._cases.pop(next(iter(self._cases)))
        made = self._cases[key] = _Case()
        return made

    def _tell(self, text: str) -> None:
        """Say something once."""
        if text not in self._told:
            self._told.add(text)
            warn_user(f"{self._name}: {text}.")

    def _kind(self, value: Any) -> Any:
        """The part of an argument that a graph depends on."""
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise CaptureError(
                    f"{self._name}: an argument of shape {list(value.shape)} requires gradients. "
                    "Make it a parameter of a module, or pass x.detach()."
                )
            if not isinstance(value, Wrapper):
                return value.shape, value.stride(), value.dtype, value.device
            if value._of is not None:
                raise CaptureError(
                    f"{self._name}: an argument of shape {list(value.shape)} is a view whose "
                    "elements live on other ranks. Pass x.clone()."
                )
            return value._spec
        if type(value) is float:
            return float
        if not is_told_by_value(value):
            raise CaptureError(
                f"{self._name}: an argument of type {type(value).__name__} cannot be told from "
                "others. Pass tensors, numbers, strings, and lists, tuples or dicts of these."
            )
        return type(value), value

    # --- recording -----------------------------------------------------------------------------

    def _record(self, case: _Case, flat: Sequence[Any], tree: Any) -> Any:
        """Run a call that no graph fits: eagerly, or recorded."""
        state, args = self._state, pytree.tree_unflatten(flat, tree)
        assert state is not None
        if case.calls < WARM:
            case.calls += 1
            return self._run_eagerly(*args)
        if self._counts["graphs"] >= MOST_GRAPHS:
            self._tell(
                f"it has {MOST_GRAPHS} graphs, for other shapes, layouts or branches, and makes no "
                "more; this call runs eagerly. Pad batches to few shapes"
            )
            return self._run_eagerly(*args)
        meshes = state.topologies(flat)
        all_record(self._name, meshes, self._call())
        self._counts["recorded"] += 1
        with no_garbage_collection():
            result, made = record(self.eager, flat, tree, state, case.first is not None)
        first, case.first = case.first, None
        reason = next(iter(made.seen.refusals), None)
        again = first is None or not first.took_same_branches(made)
        if first is not None and (not again or case.calls >= WARM + _MOST_TRIES):
            reason = reason or difference(first, made)
        reason = all_agree(meshes, made if first is not None else None, reason)
        if reason is not None:
            self._refuse(case, reason)
        elif again:
            case.first = made  # to be compared with the next call
            case.calls += 1
        else:
            assert first is not None
            with no_garbage_collection():
                case.graphs.append(Graph(made, first, state, meshes, self._passes))
            self._counts["graphs"] += 1
        return _detached(result)

    def _refuse(self, case: _Case, reason: str) -> None:
        case.refused = (
            f"{self._name} cannot be captured: {reason}. The calls before this one ran eagerly and "
            "are right. Change the step, or go on with its function, `.eager`."
        )

    # --- replay --------------------------------------------------------------------------------

    def _replay(self, case: _Case, graph: Graph, flat: Sequence[Any], tree: Any) -> Any:
        try:
            if graph.is_verified or not self._verify:
                if self._backend and not graph.is_compiled:
                    self._compile(case, graph, flat)
                result = graph.run(flat)
                self._counts["replayed"] += 1
                return result
            return self._verified(case, graph, flat, tree)
        except Missed:  # found out before anything was done
            case.graphs.remove(graph)
            return self._record(case, flat, tree)

    def _compile(self, case: _Case, graph: Graph, flat: Sequence[Any]) -> None:
        all_record(self._name, graph.meshes, self._call())
        reason = graph.compile(flat, self._verify)
        if reason is not None:
            self._refuse(case, reason)
            raise CaptureError(case.refused)

    def _verified(self, case: _Case, graph: Graph, flat: Sequence[Any], tree: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(flat, tree)
        all_record(self._name, graph.meshes, self._call())
        result, reason = graph.verify(flat, lambda: self.eager(*args, **kwargs))
        reason = all_agree(graph.meshes, None, reason)
        self._counts["eager"] += 1
        graph.is_verified = True
        if reason is not None:
            case.graphs.remove(graph)
            self._refuse(case, reason)
        return _detached(result)


def _shared(flat: Sequence[Any]) -> tuple[int, ...]:
    """For arguments that share memory: the place of each one's first use; () for others."""
    parts = [memory_of(part) for value in flat for part in local_tensors(value)]
    if len(set(parts)) == len(parts):
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(part, place) for place, part in enumerate(parts)])


def _detached(result: Any) -> Any:
    """The result of a step, without its autograd history: a replay has none."""
    return pytree.tree_map(
        lambda each: each.detach() if isinstance(each, torch.Tensor) and each.grad_fn else each,
        result,
    )


@public
def capture(
    step: Callable[..., Any] | None = None,
    *,
    passes: Sequence[Pass] | None = None,
    verify: bool = True,
    backend: str | None = None,
) -> Any:
    """Record a training step and replay it without DTensors.

    The first calls run eagerly. Two are recorded, which gives a flat program of local operators and
    collectives, and compared. The next call runs it beside the eager step, and compares the bits
    (unless `verify=False`). From then on it is replayed: parameters, buffers and optimizer state
    are written in place, learning rates are read anew. Other shapes, layouts or training flags
    record another graph. A step that reads values to decide what to do is refused with its line.

    `passes` are the functions of `shardwise.capture.passes` that change the graph. With
    `backend="inductor"` the operators between collectives, writes and draws are compiled: results
    are equal to rounding, not to the bit.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> model = torch.nn.Linear(4, 4)
    >>> _ = shardwise.shard_module(model, mesh, {"weight": {"tp": shardwise.Shard(0)}})
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> @shardwise.capture
    ... def step(batch):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> for _ in range(8):
    ...     loss = step(torch.ones(2, 4))
    >>> step.stats()
    {'eager': 4, 'recorded': 2, 'replayed': 2, 'graphs': 1}
    """
    if step is None:
        return functools.partial(capture, passes=passes, verify=verify, backend=backend)
    return Captured(step, passes, verify, backend)

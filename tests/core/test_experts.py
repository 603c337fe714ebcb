"""Tokens sent to their experts: results and gradients are those of a loop over tokens, whoever is
chosen, and weights of experts do not move."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

from ..compare import numbers, virtual

WIDTH, HIDDEN = 8, 16


@dataclass(frozen=True)
class Case:
    """Tokens, experts and who is chosen: at random, one expert by all, or only the first half."""

    tokens: int = 24
    experts: int = 8
    top: int = 2
    capacity: int | None = None
    chosen: str = "any"
    hidden: int = HIDDEN

    def made(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen experts, and what is trained."""
        draw = torch.Generator().manual_seed(self.tokens + self.experts + self.top)
        below = max(1, self.experts // 2) if self.chosen == "half" else self.experts
        index = torch.randint(below, (self.tokens, self.top), generator=draw)
        if self.chosen == "one":
            index = torch.full_like(index, self.experts - 1)
        float32 = torch.float32
        return index, {
            "tokens": numbers(self.tokens, WIDTH, seed=1, dtype=float32),
            "weights": numbers(self.tokens, self.top, seed=2, dtype=float32),
            "up": numbers(self.experts, WIDTH, self.hidden, seed=3, dtype=float32),
            "bias": numbers(self.experts, self.hidden, seed=4, dtype=float32),
            "down": numbers(self.experts, self.hidden, WIDTH, seed=5, dtype=float32),
        }


def mixture(case: Case, index: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The program: the same on one device and on a mesh."""
    sent = sw.dispatch_tokens(
        given["tokens"], index, given["weights"], given["up"], capacity=case.capacity
    )
    hidden = F.gelu(sent.grouped_mm(sent.tokens, given["up"], given["bias"]))
    return sent.combine(sent.grouped_mm(hidden, given["down"]))


def loop(case: Case, index: Tensor, given: dict[str, Tensor]) -> Tensor:
    """What it means: pairs in their order, without those for which their expert has no room."""
    taken = [0] * case.experts
    rows = [torch.zeros(WIDTH) for _ in range(case.tokens)]
    for token, rank in torch.cartesian_prod(
        torch.arange(case.tokens), torch.arange(case.top)
    ).tolist():
        expert = int(index[token, rank])
        taken[expert] += 1
        if case.capacity is None or taken[expert] <= case.capacity:
            hidden = F.gelu(given["tokens"][token] @ given["up"][expert] + given["bias"][expert])
            rows[token] = (
                rows[token] + given["weights"][token, rank] * hidden @ given["down"][expert]
            )
    return torch.stack(rows)


def results(program: Any, case: Case, index: Any, given: dict[str, Any], lay: Any) -> list[Any]:
    """The result, and the gradients of all that is trained."""
    leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
    out = program(case, index, leaves)
    out.backward(lay(numbers(case.tokens, WIDTH, seed=9, dtype=torch.float32)))
    return [out, *[leaf.grad for leaf in leaves.values()]]


def laid_out(mesh: Any, case: Case, tokens: Any, parameters: Any) -> tuple[Any, dict[str, Any]]:
    def on(value: Tensor, places: Any) -> Any:
        return sw.distribute_tensor(value, mesh, places, src_data_rank=None)

    index, given = case.made()
    places = {name: parameters.get(name, tokens) for name in given}
    return on(index, tokens), {name: on(value, places[name]) for name, value in given.items()}


def assert_equals_the_loop(mesh: Any, case: Case, tokens: Any, parameters: Any) -> list[Any]:
    index, given = case.made()
    want = results(loop, case, index, given, lambda grad: grad)
    laid = laid_out(mesh, case, tokens, parameters)
    made = results(
        mixture,
        *(case, *laid),
        lambda grad: sw.distribute_tensor(grad, mesh, tokens, src_data_rank=None),
    )
    for have, expected in zip(made, want, strict=True):
        torch.testing.assert_close(have.full_tensor(), expected, rtol=1e-4, atol=1e-4)
    return made


EXPERT = {name: {"ep": Shard(0)} for name in ("up", "bias", "down")}
TENSOR = {
    "up": {"ep": Shard(0), "tp": Shard(2)},
    "bias": {"ep": Shard(0), "tp": Shard(1)},
    "down": {"ep": Shard(0), "tp": Shard(1)},
}
CASES = {
    "top 1": Case(top=1),
    "top 2": Case(),
    "top 8": Case(top=8),
    "uneven": Case(tokens=13, experts=7),
    "fewer experts than ranks": Case(experts=3),
    "one expert has all tokens": Case(chosen="one"),
    "half of the experts have none": Case(chosen="half"),
    "fewer tokens than ranks": Case(tokens=2),
    "capacity": Case(capacity=3),
    "capacity, one expert": Case(capacity=5, chosen="one"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_device(case: Case) -> None:
    index, given = case.made()
    want = results(loop, case, index, given, lambda grad: grad)
    made = results(mixture, case, index, given, lambda grad: grad)
    for have, expected in zip(made, want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [{}, {"ep": Shard(0)}], ids=["whole", "sharded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_expert_parallel(case: Case, tokens: Any) -> None:
    mesh = virtual(4, names=("ep",))
    made = assert_equals_the_loop(mesh, case, tokens, EXPERT)
    assert [grad.placements for grad in made[3:]] == [(Shard(0),)] * 3


@pytest.mark.parametrize(
    "tokens", [{}, {"ep": Shard(0)}, {"tp": Shard(0)}, {"ep": Shard(0), "tp": Shard(0)}], ids=str
)
@pytest.mark.parametrize("case", [Case(), Case(tokens=13, experts=3, capacity=4)], ids=str)
def test_expert_and_tensor_parallel(case: Case, tokens: Any) -> None:
    assert_equals_the_loop(virtual(2, 2, names=("ep", "tp")), case, tokens, TENSOR)


@pytest.mark.parametrize("names", [("dp", "ep"), ("ep", "dp")], ids=str)
@pytest.mark.parametrize("tokens", [{"dp": Shard(0)}, {"dp": Shard(0), "ep": Shard(0)}], ids=str)
@pytest.mark.parametrize("case", [Case(), Case(tokens=13, experts=3, capacity=4)], ids=str)
def test_replicas_of_experts_serve_their_own_tokens(case: Case, tokens: Any, names: Any) -> None:
    assert_equals_the_loop(virtual(2, 2, names=names), case, tokens, EXPERT)
    assert_equals_the_loop(virtual(2, 2, names=names), case, tokens, {key: {} for key in EXPERT})


def communicated(case: Case, tokens: Any) -> tuple[dict[Any, int], int]:
    mesh = virtual(4, names=("ep",))
    laid = laid_out(mesh, case, tokens, EXPERT)
    grad = sw.distribute_tensor(torch.ones(case.tokens, WIDTH), mesh, tokens)
    with sw.CommDebugMode() as comm, sw.communication("error", fallback="error"):
        results(mixture, case, *laid, lambda _: grad)
    return comm.get_comm_counts(), sum(comm.bytes.values())


def test_weights_of_experts_do_not_move() -> None:
    """Experts of eight times the size cost not a byte more. Tokens travel there and back, and so do
    their gradients; all ranks hear who was chosen."""
    for tokens in ({}, {"ep": Shard(0)}):
        counts, nbytes = communicated(Case(), tokens)
        assert (counts, nbytes) == communicated(replace(Case(), hidden=8 * HIDDEN), tokens)
    assert counts == {"all_gather": 1, "exchange": 4}
    row = 4 * WIDTH + 4 * 2  # a token with its weights
    assert nbytes <= 4 * 24 // 4 * 3 * row + 2 * 48


def test_a_token_travels_once_to_a_rank() -> None:
    """Of eight experts on two ranks a token needs all, so each rank gets each token once."""
    mesh = virtual(2, names=("ep",))
    tokens = sw.distribute_tensor(torch.randn(8, WIDTH), mesh, {"ep": Shard(0)})
    chosen = torch.arange(8).expand(8, 8).contiguous()
    experts = sw.distribute_tensor(torch.randn(8, WIDTH, 4), mesh, {"ep": Shard(0)})
    with sw.CommDebugMode() as comm:
        sent = sw.dispatch_tokens(tokens, chosen, None, experts)
    assert sent.tokens.shape == (64, WIDTH)
    assert sum(comm.bytes.values()) == 4 * WIDTH * 4


def test_plain_tokens_and_plain_experts() -> None:
    """What is plain counts as replicated, and has a plain gradient."""
    case, mesh = Case(), virtual(4, names=("ep",))
    index, given = case.made()
    want = results(loop, case, index, given, lambda grad: grad)
    for plain in (("tokens", "weights"), ("up", "bias", "down")):
        laid = laid_out(mesh, case, {"ep": Shard(0)}, EXPERT)[1]
        mixed = {name: given[name] if name in plain else laid[name] for name in given}
        made = results(mixture, case, index, mixed, lambda grad: grad)
        for name, have, expected in zip(("", *given), made, want, strict=True):
            assert isinstance(have, sw.DTensor) == (name not in plain)
            have = have if name in plain else have.full_tensor()
            torch.testing.assert_close(have, expected, rtol=1e-4, atol=1e-4)


def test_second_derivatives() -> None:
    case, mesh = Case(tokens=5, experts=4), virtual(2, names=("ep",))

    def penalty(index: Any, given: dict[str, Any]) -> list[Any]:
        tokens = given["tokens"].detach().requires_grad_()
        sent = sw.dispatch_tokens(tokens, index, given["weights"], given["up"])
        out = sent.combine(sent.tokens.sin())
        (grad,) = torch.autograd.grad(out.sin().sum(), tokens, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), tokens))

    (want,) = penalty(*case.made())
    (have,) = penalty(*laid_out(mesh, case, {"ep": Shard(0)}, EXPERT))
    torch.testing.assert_close(have.full_tensor(), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.full((24, 2), 8)}, "an expert outside of 0 to 7"),
        ({"index": torch.full((24, 2), -1)}, "an expert outside of 0 to 7"),
        (
            {"index": torch.zeros(23, 2, dtype=torch.int64)},
            "integers expert_index .tokens, chosen experts.",
        ),
        ({"weights": torch.ones(24, 1)}, "integers expert_index .tokens, chosen experts."),
        ({"tokens": torch.ones(2, 12, 8)}, "Flatten other dims of tokens first"),
        ({"index": torch.zeros(24, 2)}, "integers expert_index .tokens, chosen experts."),
        ({"index": torch.zeros(24, 2) > 0}, "integers expert_index .tokens, chosen experts."),
        ({"tokens": [1.0]}, "tokens: a tensor is needed"),
        *(({"capacity": wrong}, "an int of at least 1") for wrong in (0, 1.5, "2", True)),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    index, given = Case().made()
    mesh = virtual(2, names=("ep",))
    experts = sw.distribute_tensor(given["up"], mesh, {"ep": Shard(0)})
    use = {"index": index, "capacity": None, **given} | change
    for weight in (given["up"], experts):
        with pytest.raises((sw.errors.LayoutError, sw.errors.OutOfRangeError), match=message):
            sw.dispatch_tokens(
                use["tokens"], use["index"], use["weights"], weight, capacity=use["capacity"]
            )


def test_any_integers_name_experts() -> None:
    index, given = Case().made()
    for dtype in (torch.uint8, torch.int8, torch.int32):
        sent = sw.dispatch_tokens(given["tokens"], index.to(dtype), None, given["up"])
        want = sw.dispatch_tokens(given["tokens"], index, None, given["up"])
        assert torch.equal(sent.tokens, want.tokens)


def test_tensors_of_two_meshes() -> None:
    index, given = Case().made()
    tokens = sw.distribute_tensor(given["tokens"], virtual(2, names=("ep",)), {"ep": Shard(0)})
    experts = sw.distribute_tensor(given["up"], virtual(4, names=("ep",)), {"ep": Shard(0)})
    with pytest.raises(sw.errors.MeshError, match="Redistribute them to one mesh first"):
        sw.dispatch_tokens(tokens, index, None, experts)


# --- modules that transformers marks -------------------------------------------------------------


class Experts(nn.Module):
    """Stacked experts as in Hugging Face models: a loop, and marks for other implementations."""

    def __init__(self, transposed: bool, bias: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, bias, transposed
        shapes = {"gate_up_proj": (WIDTH, 2 * HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        for seed, (name, shape) in enumerate(shapes.items()):
            value = numbers(8, *shape, seed=seed, dtype=torch.float32)
            value = value if transposed else value.mT.contiguous()
            self.register_parameter(name, nn.Parameter(value))
            if bias:
                own = numbers(8, shape[1], seed=seed + 5, dtype=torch.float32)
                self.register_parameter(f"{name}_bias", nn.Parameter(own))

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _linear(self, rows: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else 0
        return rows @ (weight if self.is_transposed else weight.mT) + bias

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(tokens)
        for expert in range(8):
            token, rank = torch.where(chosen == expert)
            rows = self._apply_gate(self._linear(tokens[token], "gate_up_proj", expert))
            rows = self._linear(rows, "down_proj", expert) * weights[token, rank, None]
            total = total.index_add(0, token, rows)
        return total


MARKED_PLANS: dict[str, Any] = {
    "ep": {"*": {"ep": Shard(0)}},
    "ep x tp": {
        "gate_up_proj": {"ep": Shard(0), "tp": Shard(1, split=2)},
        "down_proj": {"ep": Shard(0), "tp": Shard(2)},
    },
}


@pytest.mark.parametrize(("transposed", "bias"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("kind", MARKED_PLANS)
def test_modules_of_stacked_experts_dispatch(kind: str, transposed: bool, bias: bool) -> None:
    plan = MARKED_PLANS[kind]
    if kind != "ep" and (transposed or bias):
        plan = {"*": {"ep": Shard(0)}}
    mesh = virtual(2, 2, names=("ep", "tp"))
    alone = Experts(transposed, bias)
    model = sw.shard_module(copy.deepcopy(alone), mesh, plan)
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    index, given = Case().made()
    chosen, tokens, weights = index, given["tokens"], given["weights"]
    alone(tokens, chosen, weights).square().sum().backward()
    laid = [sw.distribute_tensor(v, mesh, {"ep": Shard(0)}) for v in (tokens, chosen, weights)]
    with sw.CommDebugMode() as comm:
        model(*laid).square().sum().backward()
    for name, parameter in alone.named_parameters():
        have = model.get_parameter(name)
        assert have.grad.placements == have.placements
        torch.testing.assert_close(have.grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-3)
    assert comm.get_comm_counts()["exchange"] == 3  # tokens need no gradient here

"""`torch.compile` on a virtual mesh: what it gives is what plain PyTorch gives, or an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.models import transformer
from torch._dynamo.exc import TorchDynamoException

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..compare import numbers, virtual
from ..compiled import PROGRAMS, check_compiled
from ..training import RUNS, batches

S0, S1, R = Shard(0), Shard(1), Replicate()

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, about its own compiler


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **options)


# --- values and gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_a_fully_sharded_model_runs_between_graphs(whole: bool) -> None:
    mesh = virtual(2, names=("dp",))
    torch.manual_seed(0)
    layers = [[torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)] for _ in range(2)]
    model = torch.nn.Sequential(*[torch.nn.Sequential(*pair) for pair in layers]).double()
    made: Any = copy.deepcopy(model)
    for layer in made:
        sw.fully_shard(layer, mesh)
        if not whole:
            layer.compile(backend="aot_eager")
    run = compiled(sw.fully_shard(made, mesh)) if whole else sw.fully_shard(made, mesh)
    for step in range(2):
        batch = numbers(5, 6) + step
        model(batch).square().mean().backward()
        run(distribute_tensor(batch, mesh, [S0])).square().mean().backward()
    for want, have in zip(model.parameters(), made.parameters(), strict=True):
        assert have.placements == (S0,)
        torch.testing.assert_close(have.grad.full_tensor(), want.grad)


def test_a_compiled_forward_rounds_no_parameter() -> None:
    """It computes in bfloat16. What it writes stays, and the rest stays in float32."""
    mesh = virtual(2, names=("dp",))
    layer = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 6))
    layer.append(torch.nn.Embedding(6, 6, max_norm=0.5))
    whole = copy.deepcopy(layer)
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    made: Any = sw.fully_shard(layer, mesh, mp_policy=policy)

    def run(model: Any, x: Any) -> Any:
        return model[1](model[0](x)) + model[2](torch.arange(4))

    made.forward = lambda x: run(made, x)
    made.compile(backend="aot_eager")
    made(distribute_tensor(numbers(4, 6).bfloat16(), mesh, [S0])).square().mean().backward()
    run(whole, numbers(4, 6).float())
    for want, have in zip(whole.parameters(), made.parameters(), strict=True):
        exact = want is not whole[2].weight
        close: Any = {"rtol": 0, "atol": 0} if exact else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(have.full_tensor().detach(), want.detach(), **close)


def test_a_fully_sharded_model_is_no_single_graph() -> None:
    mesh = virtual(2, names=("dp",))
    model = sw.fully_shard(torch.nn.Linear(6, 6).double(), mesh)
    with pytest.raises(TorchDynamoException, match="it runs between the graphs"):
        compiled(model, fullgraph=True)(distribute_tensor(numbers(4, 6), mesh, [S0]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    check_compiled(name, virtual(3), ([S1], [S0]))
    check_compiled(name, virtual(3), ([S0], [R]), dynamic=True)


@pytest.mark.parametrize("name", ["a product", "reductions", "views", "attention"])
def test_two_axes(name: str) -> None:
    check_compiled(name, virtual(2, 2), ([S0, S1], [R, S0]), rows=5)


def test_the_default_backend() -> None:
    check_compiled("added twice", virtual(2), ([S1], [S0]), backend="inductor")


def test_other_layouts_and_sizes_are_compiled_anew() -> None:
    call = compiled(lambda x: (x @ x.t()).relu())
    for place in (S0, S1, R, S0):
        for size in (4, 6, 5):
            x = numbers(size, 4)
            got = call(distribute_tensor(x, virtual(2), [place]))
            torch.testing.assert_close(got.full_tensor(), (x @ x.t()).relu())


def test_a_module_is_trained() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    ours = sw.distribute_module(copy.deepcopy(plain), virtual(2))
    call = compiled(ours)
    x = numbers(6, 4, dtype=torch.float32)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, ours)]
    losses: list[Any] = []
    for _ in range(3):
        losses = [plain(x), call(distribute_tensor(x, virtual(2), [S0]))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses[1].full_tensor(), losses[0])


# --- memory -----------------------------------------------------------------------------------


def partial(x: torch.Tensor, w: torch.Tensor, mesh: Any) -> Any:
    made = distribute_tensor(x, mesh, [S1]) @ distribute_tensor(w, mesh, [S0])
    assert made.placements == (Partial(),)
    return made


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_write_into_an_input_is_known(backend: str) -> None:
    x, w, mesh = numbers(4, 4), numbers(4, 4, seed=1), virtual(2)
    p = partial(x, w, mesh)
    p.relu()  # what is reduced for it is kept
    torch.compile(lambda t: t.add_(1.0), backend=backend)(p)
    torch.testing.assert_close(p.relu().full_tensor(), (x @ w + 1).relu())
    y = distribute_tensor(x, mesh, [S0])
    view = y.t()[1:]
    torch.testing.assert_close(view.full_tensor(), x.t()[1:])
    torch.compile(lambda t: t[1:].mul_(3.0), backend=backend)(y)
    want = x.clone()
    want[1:] *= 3
    torch.testing.assert_close(view.full_tensor(), want.t()[1:])


def test_a_write_into_a_result_in_the_memory_of_an_input_is_known() -> None:
    x, w, mesh = numbers(4, 4), numbers(4, 4, seed=1), virtual(2)
    p = partial(x, w, mesh)
    p.relu()
    compiled(lambda t: t.view(2, 8))(p).mul_(2)
    torch.testing.assert_close(p.relu().full_tensor(), (x @ w * 2).relu())
    y = distribute_tensor(x, mesh, [S0])
    view = y.t()[1:]
    torch.testing.assert_close(view.full_tensor(), x.t()[1:])
    compiled(lambda t: t.view(2, 8))(y).add_(1)
    torch.testing.assert_close(view.full_tensor(), (x + 1).t()[1:])


def test_deferred_views_as_inputs() -> None:
    x = numbers(6, 4)
    ours = distribute_tensor(x, virtual(3), [S0])
    view = ours.t()[1:]
    torch.testing.assert_close(compiled(lambda t: t.sum(0))(view).full_tensor(), x.t()[1:].sum(0))
    compiled(lambda t: t.add_(1))(view)
    want = x.clone()
    want.t()[1:] += 1
    torch.testing.assert_close(ours.full_tensor(), want)


# --- between the graphs -------------------------------------------------------------------------


def test_what_is_no_operator_runs_between_the_graphs() -> None:
    mesh, x = virtual(2), numbers(5, 4)
    functions = {
        "redistribute": lambda t: (t * 2).redistribute(placements=[R]).relu() + 1,
        "full_tensor": lambda t: (t * 2).full_tensor().relu() + 1,
        "to_local": lambda t: DTensor.from_local((t * 2).to_local().relu(), mesh, [R]) + 1,
        "distribute_tensor": lambda t: (
            (t * 2).relu() + distribute_tensor(torch.ones(5, 4, dtype=t.dtype), mesh, [S0])
        ),
    }
    for name, function in functions.items():
        place = R if name == "to_local" else S0
        made = compiled(function)(distribute_tensor(x, mesh, [place]))
        made = made.full_tensor() if isinstance(made, DTensor) else made
        torch.testing.assert_close(made, (x * 2).relu() + 1, msg=name)
    refused = {
        "to_local": "to_local cannot be compiled on a virtual mesh",
        "distribute_tensor": "no operator",
    }
    for name, text in refused.items():
        torch._dynamo.reset()
        with pytest.raises(TorchDynamoException, match=text):
            compiled(functions[name], fullgraph=True)(distribute_tensor(x, mesh, [R]))


def test_redistribute_inside_of_one_graph() -> None:
    x = numbers(6, 4)
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def function(t: Any) -> Any:
        wide = (t * 2).redistribute(placements=[S1]).relu()
        return wide.redistribute(mesh, {"tp": Replicate()}) * t

    call = compiled(function, fullgraph=True)
    for place in (S0, S1, R):
        ours = distribute_tensor(x, mesh, [place]).requires_grad_()
        plain = x.clone().requires_grad_()
        (((plain * 2).relu() * plain).sum() * 3).backward()
        made = call(ours)
        torch.testing.assert_close(made.full_tensor(), (plain * 2).relu() * plain)
        (made.sum() * 3).backward()
        assert isinstance(ours.grad, DTensor) and ours.grad.placements == (place,)
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize(
    "name",
    [
        *["gpt, dp x tp", "llama, dp x tp", "resnet, channels"],
        *[
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("gpt, dp", "gpt, sequence", "gpt, fully sharded x tp")
        ],
    ],
)
def test_models_are_one_graph(name: str) -> None:
    run = RUNS[name]
    shape, names = tuple(run.mesh.values()), tuple(run.mesh)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    losses = []
    for one_graph in (True, False):
        torch.manual_seed(0)
        model = transformer.GPT(layers=1) if name.startswith("gpt") else run.model()
        sw.shard_module(model, mesh, run.plan)
        call = compiled(model, fullgraph=True) if one_graph else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches(model, 3):
            given, wanted = (distribute_tensor(v, mesh, run.batch) for v in (inputs, targets))
            optimizer.zero_grad()
            loss = F.cross_entropy(call(given).flatten(0, -2), wanted.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[:3], losses[3:])


def test_what_reads_values_ends_a_graph() -> None:
    x = numbers(6, 4)
    ours = distribute_tensor(x, virtual(3), [S0])
    for function in (
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.sum().item() * t,
        lambda t: t[torch.where(t > 0)[0]] * 2,
    ):
        torch.testing.assert_close(compiled(function)(ours).full_tensor(), function(x))


@pytest.mark.parametrize("product", [lambda t: t.prod(), lambda t: t.cumprod(0).sum()])
def test_gradients_of_products(product: Any) -> None:
    plain = numbers(6, 4).requires_grad_()
    x = distribute_tensor(numbers(6, 4), virtual(2), [S0]).requires_grad_()
    compiled(product)(x).backward()
    product(plain).backward()
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_an_index_out_of_range_raises() -> None:
    x = distribute_tensor(numbers(6, 4), virtual(2), [S0])
    call = compiled(lambda t, i: t[i])
    torch.testing.assert_close(
        call(x, torch.tensor([1, 5, -1])).full_tensor(), numbers(6, 4)[[1, 5, 5]]
    )
    for bad in (9, -7):
        with pytest.raises(RuntimeError, match="out of bounds for dimension 0 with size 6"):
            call(x, torch.tensor([1, 2, bad]))


# --- random numbers -----------------------------------------------------------------------------


def test_dropout_draws_anew_at_each_call() -> None:
    x = torch.ones(50, 4)
    ours = distribute_tensor(x, virtual(2), [S0])
    call = compiled(lambda t: F.dropout(t, 0.5))
    torch.manual_seed(3)
    got = [call(ours).full_tensor() for _ in range(3)]
    torch.manual_seed(3)
    want = [F.dropout(x, 0.5) for _ in range(3)]
    assert not torch.equal(want[0], want[1])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_counter_mode_is_refused() -> None:
    ours = distribute_tensor(torch.ones(6, 4), virtual(2), [S0])
    with (
        sw.random.mode("counter"),
        pytest.raises(TorchDynamoException, match="counter mode cannot be compiled"),
    ):
        compiled(lambda t: F.dropout(t, 0.5))(ours)


# --- what PyTorch asks by name -------------------------------------------------------------------


def test_methods_that_the_compiler_asks_for() -> None:
    mesh, x = virtual(2), numbers(4, 4)
    ours = distribute_tensor(x, mesh, [S0])
    names, spec = ours.__tensor_flatten__()
    again = DTensor.__tensor_unflatten__({n: getattr(ours, n) for n in names}, spec, None, None)
    assert torch.equal(again.full_tensor(), x)
    assert copy.deepcopy(spec) is spec
    assert DTensor.__metadata_guard__(spec, spec)
    other = ours.redistribute(placements=[S1])
    assert not DTensor.__metadata_guard__(spec, other._spec)
    pending = partial(x, x, mesh)
    assert pending.__coerce_tangent_metadata__().placements == (R,)
    assert ours.__coerce_tangent_metadata__().placements == (S0,)
    coerced = other.__coerce_same_metadata_as_tangent__(spec)
    assert coerced.placements == (S0,)
    assert torch.equal(coerced.full_tensor(), x)
    assert other.__coerce_same_metadata_as_tangent__(None, torch.Tensor) is None
    keys = {t._stable_hash_for_caching() for t in (ours, again, other, pending)}
    assert len(keys) == 3
    with pytest.raises(AttributeError, match="_local_shape"):
        ours._local_shape  # noqa: B018

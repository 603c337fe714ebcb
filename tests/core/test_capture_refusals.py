"""What a captured step must notice: a clear error or a new graph, never a wrong number."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm.recording import recorder
from shardwise.errors import CaptureError

from ..compare import virtual

MESH = virtual(2, names=("tp",))
PLAN: Any = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}


def batch(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(number))


class Trainer:
    """A model with an optimizer, and a step that a test may change."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        sw.shard_module(self.model, MESH, PLAN)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **options)
        self.extra: Any = lambda loss: loss

    def step(self, x: Tensor) -> Any:
        loss = self.extra(self.model(x).square().mean())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def values(self) -> list[Tensor]:
        return [p.full_tensor().detach().clone() for p in self.model.parameters()]


def in_step(x: Tensor) -> Any:
    return sw.distribute_tensor(x, MESH, [Replicate()])


def assert_same(one: Trainer, other: Trainer) -> None:
    for a, b in zip(one.values(), other.values(), strict=True):
        assert torch.equal(a, b)


def both(change: Callable[[Trainer, int], object], steps: int = 14, **options: Any) -> Any:
    """Train twice, captured and eagerly, with a change before each step; they must be equal."""
    eager, captured = Trainer(**options), Trainer(**options)
    step = sw.capture(captured.step)
    for number in range(steps):
        change(eager, number)
        change(captured, number)
        want, have = eager.step(in_step(batch(number))), step(in_step(batch(number)))
        assert torch.equal(want.full_tensor(), have.full_tensor()), number
    assert_same(eager, captured)
    return step


def refusal(trainer: Trainer, calls: int = 8) -> str:
    """The error of a step that cannot be captured. What it did before is what the eager step does,
    and it can go on eagerly."""
    step = sw.capture(trainer.step)
    with pytest.raises(CaptureError) as caught:
        for number in range(calls):
            step(in_step(batch(number)))
    done = sum(step.stats()[name] for name in ("eager", "recorded", "replayed"))
    step.eager(in_step(batch(done)))
    assert recorder() is None
    return str(caught.value)


# --- values on the host --------------------------------------------------------------------------


def branch(loss: Any) -> Any:
    return loss * 2 if loss > 0 else loss


READS: dict[str, Callable[[Any], Any]] = {
    "if": branch,
    "float": lambda loss: loss * float(loss.detach()),
    "tolist": lambda loss: loss * loss.tolist(),
    "int": lambda loss: loss * int(loss.detach() * 100),
    "item in a branch": lambda loss: loss if loss.item() > 0 else -loss,
    "numpy": lambda loss: loss * float(loss.detach().full_tensor().numpy()),
    "shape": lambda loss: loss * torch.ones(5)[: int(1 + loss.detach())].sum(),
    "nonzero": lambda loss: loss * loss.reshape(1).nonzero().shape[0],
    "text": lambda loss: loss * len(f"{loss.item()}"),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_is_read_is_refused_with_its_line(name: str) -> None:
    trainer = Trainer()
    trainer.extra = READS[name]
    text = refusal(trainer)
    assert "cannot be captured" in text and "test_capture_refusals.py" in text
    assert name != "text" or "return it and read it after the call" in text


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * int(grad.detach())


def trained(trainer: Trainer, captured: bool, calls: int = 10) -> list[Any]:
    """The losses, parameters and optimizer state after each call; eager calls after a refusal."""
    step, found = sw.capture(trainer.step) if captured else trainer.step, []
    for number in range(calls):
        x = in_step(batch(number))
        try:
            loss = step(x)
        except CaptureError:
            assert number == 4
            step = step.eager
            loss = step(x)
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        found.append((number, loss.full_tensor().detach(), trainer.values(), kept(states)))
    assert step == trainer.step  # the captured step has been refused
    return found


def kept(values: Any) -> Any:
    """Copies of values that may be tensors, in lists."""
    if isinstance(values, list):
        return [kept(each) for each in values]
    if isinstance(values, DTensor):
        return values.full_tensor().clone()
    return values.clone() if isinstance(values, Tensor) else values


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def with_closure(trainer: Trainer) -> Trainer:
    """A trainer whose optimizer calls the model itself, as LBFGS does."""

    def step(x: Tensor) -> Any:
        def closure() -> Any:
            trainer.optimizer.zero_grad()
            loss = trainer.model(x).square().mean()
            loss.backward()
            return loss

        return trainer.optimizer.step(closure)

    trainer.step = step  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_refused_lbfgs_goes_on_with_the_bits_of_the_eager_one(search: str | None) -> None:
    options = {"max_iter": 4, "line_search_fn": search}
    one, other = (with_closure(Trainer(torch.optim.LBFGS, **options)) for _ in range(2))
    assert_equal(trained(one, captured=True), trained(other, captured=False))


@pytest.mark.parametrize("name", READS)
def test_a_refused_step_goes_on_with_the_bits_of_the_eager_one(name: str) -> None:
    one, other = Trainer(), Trainer()
    one.extra = other.extra = READS[name]
    assert_equal(trained(one, captured=True), trained(other, captured=False))


def test_numbers_that_a_step_keeps_are_floats_after_it() -> None:
    trainer, losses = Trainer(), []
    before = trainer.step

    def step(x: Tensor) -> Any:
        loss = before(x)
        losses.append(loss.item())
        return loss

    captured = sw.capture(step)
    want = [captured(in_step(batch(number))).item() for number in range(7)]
    assert captured.stats()["replayed"] == 1
    assert losses == want[:-1]  # a replay runs no Python
    for have, number in zip(losses, want, strict=False):
        x = torch.tensor([2.0, -3.0])
        for made, right in ((x * have, x * number), (have - x, number - x), (x / have, x / number)):
            assert torch.equal(made, right)
        for made in (have + 1, 2 - have, have // 3, abs(-have), copy.deepcopy(have)):
            assert type(made) is float
        assert f"{have:.3f} {have}" == f"{number:.3f} {number}"
        assert [have + 1, 1 / have, have**2, 2**have, -have, round(have, 2), int(have)] == [
            number + 1, 1 / number, number**2, 2**number, -number, round(number, 2), int(number),
        ]  # fmt: skip


def test_a_value_that_is_read_in_a_backward_is_refused_with_its_line() -> None:
    trainer = Trainer()
    trainer.extra = lambda loss: Rounded.apply(loss)
    line = Rounded.backward.__code__.co_firstlineno + 2
    assert f"test_capture_refusals.py:{line} (in the backward of rounded)" in refusal(trainer)


def test_operators_of_a_backward_have_the_line_of_the_forward() -> None:
    trainer = Trainer()
    trainer.extra = lambda loss: F.softplus(loss)
    step = sw.capture(trainer.step)
    for number in range(6):
        step(in_step(batch(number)))
    nodes = step._graph().recording.seen.graph.nodes
    lines = {str(node.target): node.meta["line"] for node in nodes if "line" in node.meta}
    want = __file__, trainer.extra.__code__.co_firstlineno
    assert lines["aten.softplus.default"] == lines["aten.softplus_backward.default"] == want


def test_an_item_that_stays_a_number_is_read_in_each_replay() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number == 0:
            trainer.extra = lambda loss: loss * (1 + loss.item() ** 2)

    assert both(change).stats()["replayed"] == 8


def test_a_python_counter_is_refused() -> None:
    trainer, calls = Trainer(), [0]

    def extra(loss: Any) -> Any:
        calls[0] += 1
        return loss * calls[0]

    trainer.extra = extra
    assert "changes the variable 'calls[0]'" in refusal(trainer)


def test_a_sum_of_losses_is_refused_in_few_words() -> None:
    trainer, total = Trainer(), [0.0]

    def extra(loss: Any) -> Any:
        total[0] += loss.item()
        return loss

    trainer.extra = extra
    text = refusal(trainer)
    assert "changes the variable 'total[0]'" in text and "unknown" not in text
    assert len(text) < 600, text


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_a_counter_that_no_variable_holds_is_refused(make: Callable[[int], Any]) -> None:
    trainer, calls = Trainer(), itertools.count(1)
    trainer.extra = lambda loss: loss * make(next(calls))
    assert "became" in refusal(trainer)


def test_a_step_that_changes_its_learning_rate_is_refused() -> None:
    trainer = Trainer()

    def extra(loss: Any) -> Any:
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    trainer.extra = extra
    assert "scheduler.step() after" in refusal(trainer)


@pytest.mark.parametrize("optimizer", [torch.optim.RAdam])
def test_optimizers_that_branch_by_their_state_are_refused(optimizer: Any) -> None:
    assert "a branch by a value that a tensor holds" in refusal(Trainer(optimizer))


def test_a_grad_scaler_is_refused_by_name() -> None:
    trainer, scaler = Trainer(), torch.amp.GradScaler("cpu")
    trainer.extra = lambda loss: scaler.scale(loss)
    assert "the variable 'scaler' is a GradScaler" in refusal(trainer)
    none = torch.amp.GradScaler("cpu", enabled=False)

    def change(each: Trainer, number: int) -> None:
        if number == 0:
            each.extra = lambda loss: none.scale(loss)

    assert both(change).stats()["replayed"] > 0


# --- tensors from outside ------------------------------------------------------------------------


def test_a_partial_in_a_variable_is_reduced_in_each_replay() -> None:
    local = DTensor.from_local(torch.tensor([2.0]), MESH, [Partial()])
    eager, captured = Trainer(), Trainer()
    for trainer in (eager, captured):
        trainer.extra = lambda loss: loss * local.relu().sum()
    step = sw.capture(captured.step)
    for number in range(12):
        want = eager.step(in_step(batch(number)))
        assert torch.equal(want.full_tensor(), step(in_step(batch(number))).full_tensor())
        with torch.no_grad():
            local.mul_(1.1)
    assert step.stats()["replayed"] == 6
    assert_same(eager, captured)


def test_a_tensor_that_no_variable_holds_is_refused() -> None:
    trainer = Trainer()
    values = iter([in_step(torch.tensor(2.0)) * 1 for _ in range(20)])
    trainer.extra = lambda loss: loss * next(values)
    assert "no argument, parameter" in refusal(trainer)


def test_a_variable_that_holds_another_tensor_makes_another_graph() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number in (0, 8):
            scale = in_step(torch.tensor(1.0 + number))
            trainer.extra = lambda loss: loss * scale

    with pytest.warns(UserWarning, match="'self.extra' has another value"):
        assert both(change, 18).stats()["graphs"] == 2


def test_a_number_in_a_variable_that_changes_makes_another_graph() -> None:
    eager, captured = Trainer(), Trainer()

    @sw.capture
    def step(x: Tensor) -> Any:
        loss = captured.model(x).square().mean() * scale
        loss.backward()
        captured.optimizer.step()
        captured.optimizer.zero_grad()
        return loss

    scale = 1.0
    eager.extra = lambda loss: loss * scale
    with pytest.warns(UserWarning, match="'scale' has another value"):
        for number in range(14):
            scale = 1.0 if number < 8 else 3.0
            want = eager.step(in_step(batch(number)))
            assert torch.equal(want.full_tensor(), step(in_step(batch(number))).full_tensor())
    assert step.stats()["graphs"] == 2


def test_a_variable_that_the_step_changes_is_refused() -> None:
    trainer = Trainer()
    usual = trainer.step

    def counting(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return usual(x) if calls % 10 else usual(2 * x)

    calls = 0
    trainer.step = counting  # type: ignore[method-assign]
    assert "the step changes the variable 'calls'" in refusal(trainer)


def test_a_parameter_that_is_bound_anew_makes_another_graph() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number == 8:
            old: Any = trainer.model[2].bias
            trainer.model[2].bias = nn.Parameter(old.detach() + 1)
            trainer.optimizer.param_groups[0]["params"][3] = trainer.model[2].bias

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert both(change, 16).stats()["graphs"] == 2
    assert "another one than before" in str(seen[0].message)


def test_assigned_data_and_loaded_states_are_seen() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number == 8:
            weight: Any = trainer.model[0].weight
            weight.data = weight.detach() * 2
        if number == 10:
            trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
        if number == 11:
            trainer.model.load_state_dict({k: v * 2 for k, v in trainer.model.state_dict().items()})

    assert both(change).stats()["graphs"] == 1


# --- guards --------------------------------------------------------------------------------------


def test_hyperparameters_are_read_anew_and_branches_on_them_are_guarded() -> None:
    def change(trainer: Trainer, number: int) -> None:
        group = trainer.optimizer.param_groups[0]
        group["lr"] = 0.01 * (1 + number)
        group["weight_decay"] = 0.0 if number < 9 else 0.1  # SGD skips a weight decay of 0

    step = both(change, 16, optimizer=torch.optim.SGD, weight_decay=0.0, momentum=0.9)
    assert step.stats() == {"eager": 5, "recorded": 4, "replayed": 7, "graphs": 2}


def test_flags_and_settings_make_another_graph() -> None:
    def change(trainer: Trainer, number: int) -> None:
        trainer.model[1] = trainer.model[1].train(number < 8)
        if number == 14:
            trainer.model[0].bias.requires_grad_(False)

    assert both(change, 22).stats()["graphs"] == 3


def test_autocast_of_another_device_makes_another_graph() -> None:
    def change(trainer: Trainer, number: int) -> None:
        torch.set_autocast_enabled("cuda", number > 7)

    try:
        assert both(change).stats()["graphs"] == 2
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_shape_that_changes_each_call_runs_eagerly_and_says_so() -> None:
    eager, captured = Trainer(), Trainer()
    step = sw.capture(captured.step)
    for number in range(12):
        x = in_step(batch(number, rows=number + 1))
        assert torch.equal(eager.step(x).full_tensor(), step(x).full_tensor())
    assert step.stats()["graphs"] == 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(60):  # ten shapes in turn, but no more than eight graphs
            x = in_step(batch(number, rows=20 + number % 10))
            assert torch.equal(eager.step(x).full_tensor(), step(x).full_tensor())
    assert step.stats()["graphs"] == 8
    assert [str(each.message).count("makes no more") for each in seen] == [1]
    assert_same(eager, captured)


# --- failures ------------------------------------------------------------------------------------


def test_an_exception_while_recording_is_the_users() -> None:
    eager, captured, fails = Trainer(), Trainer(), [False]

    def extra(loss: Any) -> Any:
        if fails[0]:
            raise KeyError("mine")
        return loss

    captured.extra = extra
    step = sw.capture(captured.step)
    for number in range(12):
        fails[0] = number == 3
        if fails[0]:
            with pytest.raises(KeyError, match="mine"):
                step(in_step(batch(number)))
            fails[0] = False
        want = eager.step(in_step(batch(number)))
        assert torch.equal(want.full_tensor(), step(in_step(batch(number))).full_tensor())
    assert recorder() is None
    assert type(captured.optimizer.param_groups[0]["lr"]) is float
    assert_same(eager, captured)


def test_a_captured_step_inside_another_is_refused() -> None:
    inner = sw.capture(lambda x: x * 2)
    trainer = Trainer()
    trainer.extra = lambda loss: inner(loss.detach()) * loss
    step = sw.capture(trainer.step)
    with pytest.raises(CaptureError, match="while another one is recorded"):
        for number in range(6):
            step(in_step(batch(number)))
    assert recorder() is None
    step.eager(in_step(batch(0)))


def test_an_index_out_of_range_raises_in_a_replay() -> None:
    table = nn.Embedding(8, 4)
    sw.shard_module(table, MESH, {"weight": {"tp": Shard(0)}})
    step = sw.capture(lambda index: table(index).sum().detach())
    for _ in range(7):
        step(in_step(torch.tensor([1, 7])))
    assert step.stats()["replayed"] == 1
    with pytest.raises(IndexError, match="index 8 is out of bounds"):
        step(in_step(torch.tensor([1, 8])))


def test_arguments_that_cannot_be_taken_are_named() -> None:
    trainer = Trainer()
    step = sw.capture(trainer.step)
    step(in_step(batch(0)))
    with pytest.raises(CaptureError, match="requires gradients"):
        step(in_step(batch(0)).requires_grad_())
    with pytest.raises(CaptureError, match="of type set"):
        step({1})
    with pytest.raises(CaptureError, match="a function is needed"):
        sw.capture(3)
    for wrong in (0, [0]):
        with pytest.raises(CaptureError, match="passes: a list of functions"):
            sw.capture(trainer.step, passes=wrong)  # type: ignore[arg-type]


# --- results -------------------------------------------------------------------------------------


def test_results_come_back_in_their_structure() -> None:
    model = nn.Linear(6, 6)
    sw.shard_module(model, MESH, {"weight": {"tp": Shard(0)}})

    @sw.capture
    def step(x: Tensor, *, scale: float) -> Any:
        with torch.no_grad():
            y = model(x) * scale
        return {"y": y, "number": y.sum().item(), "same": [x, model.weight, "text", None]}

    for number in range(9):
        x = in_step(batch(number))
        made = step(x, scale=1.0 + number)
        want = F.linear(x.full_tensor(), *[p.full_tensor().detach() for p in model.parameters()])
        torch.testing.assert_close(made["y"].full_tensor(), want * (1.0 + number))
        assert made["number"] == made["y"].sum().item() and type(made["number"]) is float
        assert made["same"][0] is x and made["same"][1] is model.weight
        assert made["same"][2:] == ["text", None]
    assert step.stats()["replayed"] == 3


def test_a_replay_reports_its_collectives() -> None:
    trainer = Trainer()
    step = sw.capture(trainer.step)
    counts = []
    for number in range(8):
        with sw.CommDebugMode() as comm:
            step(in_step(batch(number)))
        counts.append(comm.get_comm_counts())
    assert step.stats()["replayed"] == 2
    assert counts[7] == counts[1] != {}


def test_equal_results_do_not_share_memory() -> None:
    step = sw.capture(lambda x: (x > 0, x > 0))
    for number in range(8):
        x = in_step(batch(number))
        one, other = step(x)
        one.logical_not_()
        assert torch.equal(other.full_tensor(), x.full_tensor() > 0)
    assert step.stats()["replayed"] == 2


def test_a_captured_step_explains_one_call_as_the_eager_one_does() -> None:
    captured, eager = Trainer(), Trainer()
    step = sw.capture(captured.step)
    for number in range(8):
        step(in_step(batch(number)))
        eager.step(in_step(batch(number)))
    want = sw.explain(eager.step, in_step(batch(8)))
    around = sw.explain(lambda x: step(x), in_step(batch(8)))
    for have in (step.explain(in_step(batch(8))), sw.explain(step, in_step(batch(8))), around):
        assert isinstance(have, sw.StepReport) and have.collectives
        rows = [[(one.kind, one.bytes) for one in each.collectives] for each in (want, have)]
        assert rows[0] == rows[1]
        assert have.memory().peak == want.memory().peak
        assert all(one.end > one.begin for one in have.collectives)
    assert step.stats()["replayed"] > 0

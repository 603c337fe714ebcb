"""Rules that users bring, in each of three forms, give the answer of one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, communication, register_rule
from shardwise.errors import LayoutError, RuleError
from shardwise.register import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    PlacementStrategy,
    RuntimeSchemaInfo,
    TensorMeta,
    TupleStrategy,
    einop_rule,
    expand_to_full_mesh_op_strategy,
    generate_redistribute_costs,
    is_tensor_dim_sharded,
    is_tensor_evenly_shardable,
    is_tensor_partial,
    is_tensor_shardable,
    normalize_dim,
    normalize_dims,
    pointwise_rule,
    register_op_strategy,
    register_prop_rule,
    replicate_tensor_dim,
    unshard_tensor_dim,
)
from shardwise.rules import REGISTERED, Along, Call, Rule

from ..compare import check, numbers, spread, virtual
from ..layouts import spec_of

LIB = torch.library.Library("regtest", "DEF")
OPS = torch.ops.regtest
SIZES = [(4, 8, 6), (5, 7, 3), (1, 3, 2)]


def define(schema: str, run: Any, *, fake: bool = True) -> None:
    """An operator for these tests, with a kernel for the CPU and one that knows the shapes."""
    name = schema.split("(")[0]
    LIB.define(schema)
    LIB.impl(name, run, "CPU")
    if fake:
        LIB.impl(name, run, "Meta")


def scaled(x: torch.Tensor, other: torch.Tensor | None, scale: float) -> torch.Tensor:
    return x * scale if other is None else x * scale + other


def add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


define("matmul2(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b * 2)
define("scaled(Tensor x, Tensor? other, float scale) -> Tensor", scaled)
define("row_sums(Tensor x) -> (Tensor, Tensor)", lambda x: (x.sum(1), (x * x).sum(1)))
define("largest(Tensor x) -> Tensor", lambda x: x.amax(1))
define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.add_(y))
define("add(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y)
define("update(Tensor(a!) x, Tensor y) -> ()", add_into)
define("swap(Tensor(a!) x, Tensor(b!) y) -> ()", lambda x, y: None)
define("pairs(Tensor x) -> Tensor", lambda x: x.reshape(-1, 2))
define("first(Tensor x) -> Tensor", lambda x: x[:2].sum(0).expand(6, -1).clone())
define("square(Tensor x) -> Tensor", lambda x: x * x)
define("join(Tensor[] xs, int dim) -> Tensor", lambda xs, dim: torch.cat(xs, dim))
define("each(Tensor[] xs, Tensor y) -> Tensor[]", lambda xs, y: [x * y for x in xs])
define(
    "named(Tensor x, *, Tensor bias, float scale=1.0) -> Tensor",
    lambda x, bias, scale=1.0: x * scale + bias,
)
define(
    "parts(Tensor x, bool[2] asked) -> (Tensor, Tensor)",
    lambda x, asked: (x + 1 if asked[0] else None, x * 2 if asked[1] else None),
)
define("both(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x * 2))
define("tile(Tensor x, int rows) -> Tensor", lambda x, rows: x.sum(0).expand(rows, -1).clone())
define("unknown(Tensor x) -> Tensor", lambda x: x + 1, fake=False)
define("cat(Tensor x) -> Tensor", lambda x: x * 3)
define("lonely.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, out: out.copy_(x))
LIB.define("dice(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


@pytest.fixture(autouse=True)
def no_rules_are_left() -> Iterator[None]:
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
    shardwise.dispatch.dispatch.clear()


def everywhere(f: Any, *inputs: torch.Tensor, limit: int = 12, **options: Any) -> None:
    """`f` equals plain PyTorch on meshes of one and two axes, in every layout or a large sample."""
    for shape in ((2,), (3,), (2, 2)):
        check(f, *inputs, mesh=virtual(*shape), limit=limit, grad=False, **options)


def without_moving(f: Any, *operands: Any) -> Any:
    with communication("error", fallback="error"):
        return f(*operands)


# --- the native form -----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_a_rule_in_index_notation(m: int, k: int, n: int) -> None:
    register_rule(OPS.matmul2, "m k, k n -> m n", linear=[[0], [1]])
    everywhere(OPS.matmul2, numbers(m, k), numbers(k, n, seed=1))
    mesh = virtual(2, 2)
    a = spread(numbers(m, k), mesh, [Shard(0), Shard(1)])
    b = spread(numbers(k, n, seed=1), mesh, [Replicate(), Shard(0)])
    assert without_moving(OPS.matmul2, a, b).placements == (Shard(0), Partial())


def test_optional_operands_and_numbers() -> None:
    register_rule(OPS.scaled.default, "m n, m n -> m n", linear=[[0, 1]])
    x, y = numbers(5, 3), numbers(5, 3, seed=1)
    everywhere(lambda x, y: OPS.scaled(x, y, 2.0), x, y)
    everywhere(lambda x: OPS.scaled(x, None, 3.0), x)
    placed = spread(x, virtual(2), [Partial()])
    for scale in (2.0, 5.0):  # one plan serves every number
        assert without_moving(lambda x, s=scale: OPS.scaled(x, None, s), placed).placements == (
            Partial(),
        )
        torch.testing.assert_close(OPS.scaled(placed, None, scale).full_tensor(), x * scale)


def test_several_results_and_other_reductions() -> None:
    register_rule(OPS.row_sums, "m n -> m, m")
    register_rule(OPS.largest, "m n -> m", reduce="max")
    everywhere(OPS.row_sums, numbers(5, 7))
    everywhere(OPS.largest, numbers(5, 7), ops=("sum", "max"))
    x = spread(numbers(5, 7), virtual(2), [Shard(1)])
    assert without_moving(OPS.largest, x).placements == (Partial("max"),)
    register_rule(OPS.largest, "m n -> m", reduce=None)  # a later rule replaces an earlier one
    assert OPS.largest(x).placements == (Shard(0),)


def test_a_local_call_of_its_own() -> None:
    seen = []

    def local(op: Any, args: Any, kwargs: Any, site: Any) -> Any:
        seen.append(site.coord)
        return op(*args, **kwargs)

    register_rule(OPS.square, "... -> ...", local=local)
    x = spread(numbers(5, 3), virtual(3), [Shard(0)])
    torch.testing.assert_close(OPS.square(x).full_tensor(), numbers(5, 3) ** 2)
    assert seen == [(0,), (1,), (2,)]


def test_a_function_as_a_rule() -> None:
    def family(call: Call) -> Rule:
        rows, columns = call.shape(0)
        factors = {"m": rows, "n": columns} if call.get("scale") > 0 else {}
        dims = (Along("m"), Along("n")) if factors else (None, None)
        return Rule((dims,) * len(call.specs), (dims,), sizes=factors)

    register_rule(OPS.scaled.default, family)
    x = numbers(5, 3)
    for scale in (2.0, -2.0):
        everywhere(lambda x, s=scale: OPS.scaled(x, None, s), x)
    placed = spread(x, virtual(2), [Shard(0)])
    assert OPS.scaled(placed, None, 2.0).placements == (Shard(0),)
    assert OPS.scaled(placed, None, -2.0).placements == (Replicate(),)


def test_in_place_forms_follow_and_writes_without_results_work() -> None:
    register_rule(OPS.add, "m n, m n -> m n", linear=[[0, 1]])
    register_rule(OPS.update, "m n, m n -> m n", linear=[[0, 1]])

    def write(x: Any, y: Any) -> Any:
        mine = x.clone()
        assert OPS.add_(mine, y) is mine
        assert OPS.update(mine, y) is None
        return mine

    everywhere(write, numbers(5, 3), numbers(5, 3, seed=1), mixed=False)


def test_a_rule_for_an_operator_of_pytorch() -> None:
    x = spread(numbers(4, 6), virtual(2), [Shard(1)])
    softmax = torch.ops.aten._softmax.default
    register_rule(softmax, "m n! -> m n!")
    everywhere(lambda x: torch.softmax(x, 1), numbers(5, 3))
    with pytest.raises(shardwise.errors.CommunicationError):  # the rule, not the built-in form
        without_moving(lambda x: torch.softmax(x, 1), x)
    held = spread(numbers(3), virtual(2), [Partial("max")])
    assert held.t().placements == (Partial("max"),)
    register_rule(torch.ops.aten.relu.default, "... -> ...")
    assert not torch.relu(held).placements[0].is_partial()


def test_plans_made_before_the_rule_are_forgotten() -> None:
    x = spread(numbers(4, 6), virtual(2), [Shard(0)])
    assert OPS.square(x).placements == (Replicate(),)
    register_rule(OPS.square, "m n -> m n")
    assert OPS.square(x).placements == (Shard(0),)


def test_autograd_of_a_custom_op() -> None:
    @torch.library.custom_op("regtest::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    register_rule(cube, "... -> ...")
    assert shardwise.verify(cube, numbers(5, 3)).ok
    for shape in ((2,), (3,), (2, 2)):
        check(cube, numbers(5, 3), mesh=virtual(*shape))


def test_an_operator_is_not_taken_for_one_of_pytorch() -> None:
    everywhere(OPS.cat, numbers(5, 3))


@pytest.mark.parametrize(
    ("op", "rule", "options", "text"),
    [
        (OPS.matmul2, "m k, k n > m n", {}, "rule 'm k, k n > m n': there is no '->'"),
        (OPS.matmul2, "m k, k n -> m p", {}, "the result has 'p', which no operand has"),
        (OPS.matmul2, "m k*, k n -> m n", {}, "cannot read '*'"),
        (OPS.row_sums, "m n -> m", {}, "is for 1 results, but regtest.row_sums.default returns 2:"),
        (OPS.square, "m -> m", {"linear": [[1]]}, "operand 1 is named in linear or added"),
        (OPS.square, 7, {}, "7 is neither index notation, like 'm k, k n -> m n', nor a function"),
        (OPS.square, len, {"reduce": None}, "belong to a rule in index notation"),
        (OPS.square, len, {"reads": ["scale"]}, "names 'scale', but regtest.square.default has"),
        (torch.sin, "m -> m", {}, "is not an operator. Give torch.ops.<namespace>.<name>"),
        ("aten::mm", "m -> m", {}, "register_rule: 'aten::mm' is not an operator."),
        ([], "m -> m", {}, "register_rule: the list of operators is empty."),
        (OPS.swap, "m, m -> m", {}, "writes into x, y and returns 0 new results"),
        (OPS.dice, "m -> m", {}, "draws random numbers"),
        (OPS.lonely.out, "m -> m", {}, "has no form without out="),
    ],
)
def test_a_bad_registration_is_a_clear_error(op: Any, rule: Any, options: Any, text: str) -> None:
    with pytest.raises(RuleError, match=re.escape(text)):
        register_rule(op, rule, **options)


def test_a_rule_for_another_number_of_tensors_is_a_clear_error() -> None:
    x = spread(numbers(4, 4), virtual(2), [Shard(0)])
    register_rule(OPS.matmul2, "m k -> m")
    with pytest.raises(RuleError, match="is for 1 operands, but the call has 2"):
        OPS.matmul2(x, x)
    register_rule(OPS.join, "m n, m n -> m n")
    with pytest.raises(RuleError):
        OPS.join([x, x], 0)


def test_a_rule_for_a_result_of_other_dims_is_a_clear_error() -> None:
    register_rule(OPS.matmul2, "m k!, k! n -> m")
    with pytest.raises(RuleError, match=r"result 0 has shape \[4, 4\], which does not fit rule"):
        OPS.matmul2(spread(numbers(4, 4), virtual(2), [Shard(0)]), numbers(4, 4))
    with pytest.raises(RuleError, match="which does not fit rule"):
        shardwise.verify(OPS.matmul2, numbers(4, 4), numbers(4, 4))


def test_an_unknown_reduction_is_a_clear_error() -> None:
    with pytest.raises(LayoutError, match="unknown reduce op 'mean'"):
        register_rule(OPS.square, "m -> m", reduce="mean")


def test_a_rule_that_does_not_keep_its_word_is_an_error() -> None:
    register_rule(OPS.pairs, "m n -> m _")
    text = "by the rule m n -> m _ result 0 has shape [6, 2], but it has shape [12, 2]."
    with pytest.raises(RuleError, match=re.escape(text)):
        OPS.pairs(spread(numbers(6, 4), virtual(2), [Shard(0)]))
    register_rule(OPS.pairs, "m n -> (m n) _")
    x = spread(numbers(6, 2), virtual(2), [Shard(0)])
    with pytest.raises(RuleError, match="result 0 has shape"):
        OPS.pairs(x)
    register_rule(OPS.first, "m n -> m n")
    with pytest.raises(
        RuleError, match=re.escape("so the results have the local shapes [[3, 4]] at")
    ):
        OPS.first(spread(numbers(6, 4), virtual(2), [Shard(0)]))


def test_an_operator_without_fake_implementation_is_an_error_that_says_so() -> None:
    register_rule(OPS.unknown, "m -> m")
    with pytest.raises(RuleError, match=re.escape("operator a fake implementation: torch.library")):
        OPS.unknown(spread(numbers(6), virtual(2), [Shard(0)]))


# --- DTensor's first form: propagation rules -----------------------


@pytest.mark.parametrize("linearity", [False, True])
def test_pointwise_rule(linearity: bool) -> None:
    @register_prop_rule([OPS.add.default, OPS.add_.default])
    def rule(schema: OpSchema) -> OutputSharding:
        return pointwise_rule(schema, linearity=linearity)

    def write(x: Any, y: Any) -> Any:
        mine = x.clone()
        assert OPS.add_(mine, y) is mine
        return mine

    for rows in (6, 5, 1):
        x = numbers(rows, 3)
        for y in (numbers(rows, 3, seed=1), numbers(3, seed=1), numbers(rows, 1, seed=1)):
            everywhere(OPS.add, x, y)
            everywhere(write, x, y, mixed=False)
    x = spread(numbers(5, 3), virtual(2, 2), [Shard(0), Partial()])
    y = spread(numbers(5, 3), virtual(2, 2), [Shard(0), Partial()])
    assert OPS.add(x, y).placements == (Shard(0), Partial() if linearity else Replicate())


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_a_prop_rule_that_asks_for_redistribution(m: int, k: int, n: int) -> None:
    calls = []

    @register_prop_rule(OPS.matmul2.default)
    def rule(schema: OpSchema) -> OutputSharding:
        a, b = schema.args_spec
        calls.append((a.placements, b.placements))
        rows = replicate_tensor_dim(a.placements, 1)
        whole = (Replicate(),) * len(rows)
        if a.placements == rows and b.placements == whole:
            return OutputSharding(DTensorSpec(a.mesh, rows))
        specs = (DTensorSpec(a.mesh, rows, a.tensor_meta), DTensorSpec(b.mesh, whole))
        return OutputSharding(None, redistribute_schema=OpSchema(schema.op, specs, {}))

    everywhere(OPS.matmul2, numbers(m, k), numbers(k, n, seed=1))
    shardwise.dispatch.dispatch.clear()
    calls.clear()
    a = spread(numbers(m, k), virtual(3), [Shard(0)])
    b = spread(numbers(k, n), virtual(3), [Shard(1)])
    assert OPS.matmul2(a, b).placements == (Shard(0),)
    assert calls == [((Shard(0),), (Shard(1),)), ((Shard(0),), (Replicate(),))]


def test_a_prop_rule_may_say_both_at_once_and_change_an_argument() -> None:
    @register_prop_rule(OPS.tile.default, schema_info=RuntimeSchemaInfo(1))
    def rule(schema: OpSchema) -> OutputSharding:
        x, rows = schema.args_schema
        count = x.mesh.size()
        if rows % count:
            whole = DTensorSpec(x.mesh, [Replicate()], x.tensor_meta)
            return OutputSharding(whole, OpSchema(schema.op, (whole, rows), {}))
        whole = DTensorSpec(x.mesh, [Replicate()], x.tensor_meta)
        mine = OpSchema(schema.op, (whole, rows // count), {})
        return OutputSharding(DTensorSpec(x.mesh, [Shard(0)]), mine)

    for shape in ((2,), (3,)):
        for rows in (6, 5):
            check(lambda x, r=rows: OPS.tile(x, r), numbers(5, 4), mesh=virtual(*shape), grad=False)
    assert OPS.tile(spread(numbers(5, 4), virtual(2), [Shard(1)]), 6).placements == (Shard(0),)


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_einop_rule(m: int, k: int, n: int) -> None:
    @register_prop_rule(OPS.matmul2.default)
    def rule(schema: OpSchema) -> OutputSharding:
        return einop_rule("mk,kn->mn", schema)

    everywhere(OPS.matmul2, numbers(m, k), numbers(k, n, seed=1))
    a = spread(numbers(m, k), virtual(2), [Shard(1)])
    b = spread(numbers(k, n), virtual(2), [Shard(0)])
    assert without_moving(OPS.matmul2, a, b).placements == (Partial(),)


def test_a_rule_in_terms_of_dim_map_and_sums() -> None:
    @register_prop_rule(OPS.largest.default)
    def rule(schema: OpSchema) -> OutputSharding:
        (x,) = schema.args_spec
        if is_tensor_partial(x) or is_tensor_dim_sharded(x, 1):
            dim_map = [x.dim_map[0], -1]
            whole = DTensorSpec.from_dim_map(x.mesh, dim_map, [], tensor_meta=x.tensor_meta)
            return OutputSharding(None, redistribute_schema=OpSchema(schema.op, (whole,), {}))
        meta = TensorMeta(x.shape[:1], (1,), x.dtype)
        return OutputSharding(DTensorSpec.from_dim_map(x.mesh, x.dim_map[:1], [], meta))

    for shape in ((2,), (3,)):
        check(OPS.largest, numbers(5, 3), mesh=virtual(*shape), grad=False)


def test_ragged_operands_are_cut_as_the_rule_means() -> None:
    @register_prop_rule(OPS.add.default)
    def rule(schema: OpSchema) -> OutputSharding:
        x, y = schema.args_spec
        assert x.placements == y.placements
        return OutputSharding(x)

    x, y = numbers(6, 3), numbers(6, 3, seed=1)
    mesh = virtual(2)
    ragged = spread(x, mesh, [Shard(0)], cuts=[(5, 1), None])
    made = OPS.add(ragged, spread(y, mesh, [Shard(0)], cuts=[(2, 4), None]))
    assert made.placements == (Shard(0),)
    torch.testing.assert_close(made.full_tensor(), x + y)


# --- DTensor's second form: strategies -----------------------

ROWS = [
    [Shard(0), Shard(0), Replicate()],
    [Shard(1), Replicate(), Shard(1)],
    [Partial(), Shard(1), Shard(0)],
    [Partial(), Partial(), Replicate()],
    [Replicate(), Replicate(), Replicate()],
]


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("with_mesh", [True, False])
def test_a_strategy_expanded_over_the_mesh(m: int, k: int, n: int, with_mesh: bool) -> None:
    if with_mesh:

        @register_op_strategy(OPS.matmul2.default)
        def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
            return expand_to_full_mesh_op_strategy(mesh, schema, ROWS)
    else:

        @register_op_strategy(OPS.matmul2.default)
        def newer(schema: OpSchema) -> OpStrategy:
            mesh = schema.get_mesh_from_args()
            return expand_to_full_mesh_op_strategy(mesh, schema, ROWS, input_index=1)

    everywhere(OPS.matmul2, numbers(m, k), numbers(k, n, seed=1))
    if min(m, k, n) > 2:
        mesh = virtual(2, 2)
        a = spread(numbers(m, k), mesh, [Shard(0), Shard(1)])
        b = spread(numbers(k, n), mesh, [Replicate(), Shard(0)])
        assert without_moving(OPS.matmul2, a, b).placements == (Shard(0), Partial())


def test_what_a_strategy_function_sees() -> None:
    seen: list[Any] = []

    @register_op_strategy(OPS.named.default, schema_info=RuntimeSchemaInfo(1, ["scale"]))
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        x = schema.args_schema[0]
        bias = schema.kwargs_schema["bias"]
        assert isinstance(x, OpStrategy) and schema.args_strategy == (x,)
        assert isinstance(bias, OpStrategy) and schema.kwargs_strategy == (bias,)
        assert (x.ndim, x.shape, x.max_num_shards()) == (2, torch.Size([5, 3]), 2)
        assert x.strategies[0].output_spec.placements == (Shard(0), Replicate())
        assert mesh.shape == (2, 2) and not schema.is_inplace_op()
        seen.append(schema.kwargs_schema.get("scale"))
        whole = DTensorSpec(mesh, [Replicate(), Replicate()])
        return OpStrategy([PlacementStrategy(whole, [whole, whole])])

    x = spread(numbers(5, 3), virtual(2, 2), [Shard(0), Replicate()])
    bias = spread(numbers(3), virtual(2, 2), [Replicate(), Shard(0)])
    for scale in (2.0, 3.0, 2.0):
        made = OPS.named(x, bias=bias, scale=scale)
        torch.testing.assert_close(made.full_tensor(), numbers(5, 3) * scale + numbers(3))
    assert seen == [2.0, 3.0]  # the number is read, so that it tells two calls apart


def test_a_strategy_with_keyword_operands() -> None:
    @register_op_strategy(OPS.named.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        rows = [[Shard(0), Shard(0), Replicate()], [Shard(1), Shard(1), Shard(0)]]
        rows.append([Replicate()] * 3)
        return expand_to_full_mesh_op_strategy(mesh, schema, rows)

    everywhere(lambda x, b: OPS.named(x, bias=b, scale=2.0), numbers(5, 3), numbers(3, seed=1))
    everywhere(lambda x, b: OPS.named(x, bias=b), numbers(4, 4), numbers(4, seed=1))


def test_numbers_that_the_schema_info_leaves_out_share_a_plan() -> None:
    calls = []

    @register_op_strategy(OPS.scaled.default, schema_info=RuntimeSchemaInfo())
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        calls.append(schema)
        spec = schema.args_strategy[0].strategies[0].output_spec
        return OpStrategy([OpSpec(DTensorSpec(mesh, spec.placements))])

    x = spread(numbers(5, 3), virtual(2), [Shard(0)])
    for scale in (2.0, 3.0):
        torch.testing.assert_close(OPS.scaled(x, None, scale).full_tensor(), numbers(5, 3) * scale)
    assert len(calls) == 1


def test_a_strategy_for_a_list_of_tensors() -> None:
    @register_op_strategy(OPS.join.default, schema_info=RuntimeSchemaInfo(1, needs_pytree=True))
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        tensors, dim = schema.args_schema
        assert isinstance(tensors, TupleStrategy)
        first = tensors.childs[0]
        assert isinstance(first, OpStrategy)
        assert schema.args_strategy == tuple(tensors.childs)
        follow = first.strategies[0].output_spec.placements
        places = replicate_tensor_dim(follow, normalize_dim(dim, first.ndim))
        spec = DTensorSpec(mesh, places)
        return OpStrategy([PlacementStrategy(spec, [spec] * len(tensors.childs))])

    for dim in (0, -1):
        everywhere(
            lambda x, y, z, d=dim: OPS.join([x, y, z], d),
            numbers(5, 3),
            numbers(5, 3, seed=1),
            numbers(5, 3, seed=2),
        )


def test_a_strategy_for_a_list_of_results() -> None:
    @register_op_strategy(OPS.each.default, schema_info=RuntimeSchemaInfo(needs_pytree=True))
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        made = []
        for child in schema.args_schema[0].children:
            places = unshard_tensor_dim(child.strategies[0].output_spec.placements, 1)
            places = tuple(Replicate() if p.is_partial() else p for p in places)
            made.append(DTensorSpec(mesh, places))
        whole = DTensorSpec(mesh, [Replicate()] * mesh.ndim)
        return OpStrategy([OpSpec([whole] * 2, [whole] * 3), OpSpec(made, [*made, whole])])

    everywhere(
        lambda x, y, z: OPS.each([x, y], z), numbers(5, 3), numbers(4, 2), numbers(1, 1, seed=2)
    )
    mesh = virtual(2)
    x, y = spread(numbers(5, 3), mesh, [Shard(0)]), spread(numbers(4, 2), mesh, [Replicate()])
    a, b = without_moving(lambda *xs: OPS.each(list(xs), torch.ones(1, 1)), x, y)
    assert (a.placements, b.placements) == ((Shard(0),), (Replicate(),))


@pytest.mark.parametrize("asked", [[True, True], [True, False], [False, True]])
def test_none_for_a_result_that_is_not_asked_for(asked: list[bool]) -> None:
    @register_op_strategy(OPS.parts.default, schema_info=RuntimeSchemaInfo(1))
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        rows = []
        for place in (Shard(0), Shard(1), Replicate()):
            rows.append([*(place if each else None for each in schema.args_schema[1]), place])
        return expand_to_full_mesh_op_strategy(mesh, schema, rows, input_index=2)

    everywhere(lambda x: OPS.parts(x, asked), numbers(5, 3))
    x = spread(numbers(5, 3), virtual(2), [Shard(0)])
    made = without_moving(lambda x: OPS.parts(x, asked), x)
    assert [None if m is None else m.placements for m in made] == [
        (Shard(0),) if each else None for each in asked
    ]


def test_one_spec_for_several_results() -> None:
    @register_op_strategy(OPS.both.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        spec = schema.args_strategy[0].strategies[0].output_spec
        places = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
        one = DTensorSpec(mesh, places)
        return OpStrategy([PlacementStrategy(one, [one])])

    everywhere(OPS.both, numbers(5, 3))


def test_an_in_place_operator() -> None:
    @register_op_strategy([OPS.add_.default, OPS.update.default])
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        rows = [[p] * 3 for p in (Replicate(), Shard(0), Shard(1), Partial())]
        return expand_to_full_mesh_op_strategy(mesh, schema, rows, inplace_op=True)

    def write(x: Any, y: Any) -> Any:
        mine = x.clone()
        assert OPS.add_(mine, y) is mine
        assert OPS.update(mine, y) is None
        if isinstance(x, DTensor):
            assert mine.placements == x.placements
        return mine

    for rows in (6, 5, 1):
        everywhere(write, numbers(rows, 3), numbers(rows, 3, seed=1), mixed=False)


def test_the_cheapest_strategy_is_taken_and_the_first_of_equals() -> None:
    order: list[Any] = []

    @register_op_strategy(OPS.square.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        return OpStrategy([OpSpec(DTensorSpec(mesh, [p]), [DTensorSpec(mesh, [p])]) for p in order])

    def result(place: Any, *ways: Any) -> Any:
        order[:] = ways
        shardwise.dispatch.dispatch.clear()
        return OPS.square(spread(numbers(4, 4), virtual(2), [place])).placements[0]

    assert result(Shard(0), Replicate(), Shard(1), Shard(0)) == Shard(0)
    assert result(Shard(0), Replicate(), Shard(1)) == Shard(1)  # an all_to_all moves less
    assert result(Replicate(), Shard(1), Shard(0)) == Shard(1)  # both are free
    assert result(Replicate(), Shard(1), Replicate()) == Replicate()  # leaves all as it is
    assert result(Partial(), Replicate(), Shard(0)) == Shard(0)


def test_costs_that_a_rule_gives_are_used_if_all_are_there() -> None:
    costs: list[Any] = []

    @register_op_strategy(OPS.square.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        ways = [DTensorSpec(mesh, [p]) for p in (Shard(0), Shard(1))]
        return OpStrategy([OpSpec(w, [w], c) for w, c in zip(ways, costs, strict=True)])

    def result(*given: Any) -> Any:
        costs[:] = given
        shardwise.dispatch.dispatch.clear()
        return OPS.square(spread(numbers(4, 4), virtual(2), [Shard(0)])).placements[0]

    assert result(None, None) == Shard(0)
    assert result([[5.0]], [[1.0]]) == Shard(1)
    assert result([[5.0]], None) == Shard(0)
    assert result([[5.0]], [[1.0, 2.0]]) == Shard(0)


def test_all_forms_may_bear_on_one_operator_and_the_last_counts() -> None:
    x = spread(numbers(4, 4), virtual(2), [Shard(0)])
    register_op_strategy(OPS.square.default)(
        lambda mesh, schema: OpStrategy(
            [OpSpec(DTensorSpec(mesh, [Shard(1)]), [DTensorSpec(mesh, [Shard(1)])])]
        )
    )
    assert OPS.square(x).placements == (Shard(1),)
    register_rule(OPS.square, "m n -> m n")
    assert OPS.square(x).placements == (Shard(0),)


# --- errors of the two forms -----------------------


def answer(form: Any, op: Any, made: Any) -> None:
    """Register a rule that answers `made(schema)`, and call the operator with a 5 x 3 tensor."""
    form(op)(made)
    OPS.square(spread(numbers(5, 3), virtual(2), [Shard(0)]))


def spec(schema: OpSchema, *places: Any, mesh: Any = None) -> DTensorSpec:
    return DTensorSpec(schema.get_mesh_from_args() if mesh is None else mesh, places)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda s: None, "regtest.square.default: the rule returned None, not an OutputSharding."),
        (
            lambda s: OutputSharding(None),
            "the rule gives no output_spec for [S(0)].",
        ),
        (
            lambda s: OutputSharding(None, s.with_specs([spec(s, Replicate())])),
            "the rule gives no output_spec for [R].",
        ),
        (
            lambda s: OutputSharding(s.args_spec[0], OpSchema(s.op, (), {})),
            "0 specs were given for 1 operands.",
        ),
        (
            lambda s: OutputSharding(spec(s, Shard(2))),
            "the rule's layout of result 0: DTensorSpec: S(2) of a tensor of 2 dims",
        ),
        (lambda s: OutputSharding((s.args_spec[0],) * 2), "gives 2 output specs, but the operator"),
        (
            lambda s: OutputSharding((None,)),
            "gives result 0 None, which is no DTensorSpec on mesh (2).",
        ),
        (
            lambda s: OutputSharding(spec(s, Replicate(), mesh=virtual(3))),
            "gives result 0 [R] on (3), which is no DTensorSpec on mesh (2).",
        ),
        (lambda s: OutputSharding([Shard(0)]), "gives result 0 S(0), which is no DTensorSpec"),
        (
            lambda s: OutputSharding(spec(s, Replicate())),
            "the rule says [S(0)] -> [R], so the results have the local shapes [[5, 3]] at "
            "coordinate (0), but the operator gives [[3, 3]] there.",
        ),
    ],
)
def test_a_bad_answer_of_a_prop_rule(made: Any, text: str) -> None:
    with pytest.raises(RuleError, match=re.escape(text)):
        answer(register_prop_rule, OPS.square.default, made)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda s: None,
            "square.default: the rule returned None, which is no OpStrategy with a way to run.",
        ),
        (
            lambda s: OpStrategy([]),
            "the rule returned OpStrategy[], which is no OpStrategy with a way to run.",
        ),
        (
            lambda s: OpStrategy([OpSpec(spec(s, Shard(0)), [spec(s, Shard(0))] * 2)]),
            "the rule gives 2 input specs, but the call has 1 operands.",
        ),
        (lambda s: OpStrategy([OpSpec((None,))]), "this strategy has the results (None,), not one"),
        (
            lambda s: expand_to_full_mesh_op_strategy(s.get_mesh_from_args(), s, [[Shard(0)] * 3]),
            "the row [S(0), S(0), S(0)] has 2 operands after 1 results, but the call has 1.",
        ),
    ],
)
def test_a_bad_answer_of_a_strategy(made: Any, text: str) -> None:
    with pytest.raises(RuleError, match=re.escape(text)):
        answer(register_op_strategy, OPS.square.default, made)


def test_a_written_operand_must_stay_in_its_layout() -> None:
    register_op_strategy(OPS.add_.default)(
        lambda s: OpStrategy([OpSpec(spec(s, Shard(0)), [spec(s, Replicate())] * 2)])
    )
    x = spread(numbers(5, 3), virtual(2), [Shard(0)])
    with pytest.raises(RuleError, match="writes into operand 0, so that the result is in its"):
        OPS.add_(x, x)


def test_uneven_shards_that_a_rule_forgot_are_an_error() -> None:
    register_op_strategy(OPS.pairs.default)(
        lambda s: OpStrategy([OpSpec(spec(s, Shard(0)), [spec(s, Shard(0))])])
    )
    even, uneven, odd = numbers(4, 3), numbers(5, 4), numbers(6, 3)
    torch.testing.assert_close(
        OPS.pairs(spread(even, virtual(2), [Shard(0)])).full_tensor(), even.reshape(-1, 2)
    )
    text = "have the local shapes [[5, 2]] at coordinate (0), but the operator gives [[6, 2]]"
    with pytest.raises(RuleError, match=re.escape(text)):
        OPS.pairs(spread(uneven, virtual(2), [Shard(0)]))
    with pytest.raises(RuleError, match=re.escape("the operator fails at coordinate (0): shape '")):
        OPS.pairs(spread(odd, virtual(2), [Shard(0)]))


def test_bad_registrations_of_the_two_forms() -> None:
    with pytest.raises(RuleError, match=r"register_prop_rule: .* is not an operator"):
        register_prop_rule(torch.add)(lambda schema: None)


# --- helpers ---------------------


def test_questions_about_a_spec() -> None:
    mesh = virtual(2, 3)
    both = spec_of(mesh, [Shard(0), Shard(0)], (12, 4))
    assert is_tensor_evenly_shardable((12, 4), both)
    assert not is_tensor_evenly_shardable((8, 4), both)
    assert is_tensor_shardable((8, 4), both) and not is_tensor_shardable((5, 4), both)
    assert not is_tensor_evenly_shardable((), both) and not is_tensor_shardable((), both)
    assert is_tensor_dim_sharded(both, 0) and not is_tensor_dim_sharded(both, 1)
    assert not is_tensor_partial(both)
    assert is_tensor_partial(spec_of(mesh, [Shard(0), Partial("max")], (12, 4)))
    assert normalize_dim(-1, 3) == 2 and normalize_dims((-1, 0), 2) == (1, 0)
    assert unshard_tensor_dim(both.placements, 0) == (Replicate(), Replicate())
    assert replicate_tensor_dim([Partial(), Shard(1)], 0) == (Replicate(), Shard(1))


def test_expanding_leaves_out_what_cannot_be() -> None:
    mesh = virtual(2, 2)
    operand = OpStrategy([OpSpec(spec_of(mesh, [Replicate(), Replicate()], (3, 8)))])
    schema = OpSchema(OPS.square.default, (operand,), {})
    rows = [[Shard(0)] * 2, [Shard(1)] * 2, [Partial("sum")] * 2, [Partial("max")] * 2]
    found = expand_to_full_mesh_op_strategy(mesh, schema, rows).strategies
    places = [strategy.output_spec.placements for strategy in found]
    assert (Shard(0), Shard(0)) not in places  # 3 rows on 4 ranks
    assert (Partial("sum"), Partial("max")) not in places
    assert (Shard(0), Shard(1)) in places and (Shard(1), Shard(1)) in places
    assert len(places) == 13
    only = expand_to_full_mesh_op_strategy(
        mesh, schema, rows, is_valid_strategy_cb=lambda ins, out: is_tensor_dim_sharded(out, 0)
    )
    assert len(only.strategies) == 6


def test_a_strategy_on_four_axes() -> None:
    @register_op_strategy(OPS.matmul2.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        return expand_to_full_mesh_op_strategy(mesh, schema, ROWS)

    mesh = virtual(2, 2, 2, 2)
    a, b = numbers(9, 8), numbers(8, 5, seed=1)
    placed = spread(a, mesh, [Shard(0), Shard(1), Shard(0), Partial()])
    other = spread(b, mesh, [Replicate(), Shard(0), Shard(1), Replicate()])
    made = OPS.matmul2(placed, other)
    torch.testing.assert_close(made.full_tensor(), a @ b * 2)
    assert made.placements == (Shard(0), Partial(), Shard(0), Partial())


def test_a_rule_may_change_the_strategies_that_it_was_given() -> None:
    @register_op_strategy(OPS.square.default)
    def strategy(mesh: Any, schema: OpSchema) -> OpStrategy:
        made = expand_to_full_mesh_op_strategy(mesh, schema, [[p, p] for p in (Shard(0), Shard(1))])
        made.strategies[:] = [s for s in made.strategies if s.output_spec.placements[0].is_shard(1)]
        return made

    assert OPS.square(spread(numbers(4, 4), virtual(2), [Shard(0)])).placements == (Shard(1),)


def test_costs_count_what_is_received() -> None:
    mesh = virtual(2)
    held = OpStrategy([OpSpec(spec_of(mesh, [p], (4, 4))) for p in (Replicate(), Shard(0))])
    free, gathered = generate_redistribute_costs(held, DTensorSpec(mesh, [Replicate()]))
    assert free == 0 < gathered
    assert held.max_num_shards() == 2 and str(held) == "OpStrategy[[R], [S(0)]]"

"""Attention in every layout: batches, heads and queries stay where they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise import CommDebugMode, Partial, Replicate, Shard, communication, distribute_tensor
from shardwise.errors import LayoutError

from ..compare import assert_same, check, numbers, spread, virtual
from ..rules import kernels

Q, K, V = numbers(3, 4, 5, 8), numbers(3, 4, 7, 8, seed=1), numbers(3, 4, 7, 8, seed=2)
FEW = K[:, :2].contiguous(), V[:, :2].contiguous()
attend = F.scaled_dot_product_attention

CASES: dict[str, tuple[Any, ...]] = {
    "plain": (lambda q, k, v: attend(q, k, v, scale=0.3), Q, K, V),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), Q, K, V),
    "causal, fewer keys": (lambda q, k, v: attend(k, q, q + v[:, :, :5], is_causal=True), Q, K, V),
    "mask": (lambda q, k, v, m: attend(q, k, v, attn_mask=m.detach()), Q, K, V, K[0, 0, :5, :7]),
    "mask with a gradient": (lambda q, k, v, m: attend(q, k, v, m), Q, K, V, K[0, 0, :5, :7]),
    "mask of heads": (
        lambda q, k, v, m: attend(q, k, v, m.detach()),
        *(Q, K, V, numbers(1, 4, 5, 7, seed=4)),
    ),
    "mask of batches": (
        lambda q, k, v, m: attend(q, k, v, m.detach() > -0.5),
        *(Q, K, V, numbers(3, 1, 1, 7, seed=5)),
    ),
    "shared heads": (lambda q, k, v: attend(q, k, v, enable_gqa=True, is_causal=True), Q, *FEW),
}


MESHES = [(2, 2), *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ((2,), (4,)))]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CASES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=6)


@pytest.mark.parametrize("name", ["plain", "causal", "shared heads"])
def test_the_backend_of_plain_products(name: str) -> None:
    f, *inputs = CASES[name]

    def run(*given: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return f(*given)

    check(run, *inputs, mesh=virtual(2, 2), limit=6)


def test_dropout_draws_what_one_device_draws() -> None:
    check(lambda q, k, v: attend(q, k, v, dropout_p=0.4), Q, K, V, mesh=virtual(2), limit=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nothing_moves(at: int, causal: bool) -> None:
    """Batches and heads are apart; so are queries, if everybody has the keys."""
    mesh = virtual(2)
    keys = Replicate() if at == 2 else Shard(at)
    given = [spread(t, mesh, [place]) for t, place in ((Q, Shard(at)), (K, keys), (V, keys))]
    with communication("error", fallback="error"):
        out: Any = attend(*given, is_causal=causal)
    assert out.placements == (Shard(at),)


def test_gradients_of_keys_are_pending_where_queries_are_apart() -> None:
    mesh = virtual(2)
    q, out = (spread(t, mesh, [Shard(2)]) for t in (Q, Q))
    k, v = (spread(t, mesh, [Replicate()]) for t in (K, V))
    lse = spread(Q[..., 0].contiguous(), mesh, [Shard(2)])
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with communication("error"):
        grads = back(out, q, k, v, out, lse, 0.0, True)
    assert [g.placements for g in grads] == [(Shard(2),), (Partial(),), (Partial(),)]


def test_a_sequence_in_parts_moves_pieces_and_not_the_whole() -> None:
    """Queries and keys of a sharded sequence: heads change owner and come back as queries lie."""
    mesh, x = virtual(4), numbers(1, 8, 256, 16)
    given: Any = spread(x, mesh, [Shard(2)])
    with CommDebugMode() as comm:
        assert attend(given, given, given, is_causal=True).placements == (Shard(2),)
    assert sum(comm.bytes.values()) <= x.numel() * x.element_size() // 2


# --- taken apart, with dropout or the gradient of a mask ------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 5, 8), (3, 6, 8), (3, 6, 4)],
        [(5, 8), (7, 8), (7, 3)],
        [(2, 1, 5, 8), (1, 3, 7, 8), (2, 3, 7, 4)],
        [(2, 2, 2, 3, 4), (2, 2, 2, 5, 4), (2, 2, 2, 5, 4)],
    ],
    ids=str,
)
def test_batches_of_any_dims_with_the_gradient_of_a_mask(shapes: list[tuple[int, ...]]) -> None:
    inputs = [numbers(*shape, seed=at) for at, shape in enumerate(shapes)]
    mask = numbers(shapes[0][-2], shapes[1][-2], seed=5)
    check(lambda q, k, v, m: attend(q, k, v, m), *inputs, mask, mesh=virtual(2, 2), limit=6)


# --- keys in shards ------------------------------------------------------------------------------

MEMORY = numbers(2, 2, 301, 16, seed=3), numbers(2, 2, 301, 16, seed=4)
FROM = numbers(2, 2, 5, 16, seed=5)
UNSEEN = numbers(1, 2, 5, 301, seed=6).masked_fill(torch.arange(301) < 120, float("-inf"))
UNSEEN[0, 1, 2] = float("-inf")  # one query sees nothing at all
KEYS: dict[str, Any] = {
    "plain": lambda q, k, v, m: attend(q, k, v),
    "causal": lambda q, k, v, m: attend(q, k, v, is_causal=True),
    "causal, more queries": lambda q, k, v, m: attend(
        k, q.repeat(1, 1, 30, 1), v[:, :, :150], is_causal=True
    ),
    "mask": lambda q, k, v, m: attend(q, k, v, m.detach()),
    "mask with a gradient": lambda q, k, v, m: attend(q, k, v, m),
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=str)
def test_keys_in_shards(name: str, shape: tuple[int, ...]) -> None:
    inputs = [FROM, *MEMORY, UNSEEN.clamp(min=-1e30) if "gradient" in name else UNSEEN]
    more = (Replicate(), Shard(1), Shard(2))[: 3 if len(shape) == 2 else 1]
    for other in more:
        rest = (other,) * (len(shape) - 1)
        keys = (Shard(2), *((Replicate(),) if other == Shard(2) else rest))
        mask = (Shard(3), *((Replicate(),) * (len(shape) - 1)))
        where = [(Replicate(), *rest), keys, keys, mask]
        assert_same(KEYS[name], inputs, where, virtual(*shape))


def test_a_small_memory_is_moved() -> None:
    """Where keys are less than the result they go to the queries."""
    mesh, q = virtual(4), numbers(1, 2, 400, 16)
    k, v = (spread(numbers(1, 2, 4, 16, seed=s), mesh, [Shard(2)]) for s in (1, 2))
    assert attend(spread(q, mesh, [Shard(2)]), k, v).placements == (Shard(2),)


# --- the backends of GPUs, with kernels that stand in for theirs --------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [kernels.FLASH, kernels.EFFICIENT, kernels.CUDNN, kernels.OTHER])
def test_backends_of_gpus(name: str, causal: bool) -> None:
    op = getattr(torch.ops.aten, name)
    more: tuple[Any, ...] = (None, True) if name in (kernels.EFFICIENT, kernels.CUDNN) else ()
    if name == kernels.OTHER:
        more = (None,)

    def run(q: Any, k: Any, v: Any) -> Any:
        return op(q, k, v, *more, 0.0, causal)[0]

    for at in (0, 1, 2):
        where: Any = [(Shard(at), Replicate())] * 3
        assert_same(run, [Q, K, V], where, virtual(2, 2), tolerance=1e-6, stride=False)
    check(run, Q, K, V, mesh=virtual(3), limit=4, tolerance=1e-6, stride=False)
    long = [t.float() for t in (FROM, *MEMORY)]
    keys: Any = [(Replicate(),), (Shard(2),), (Shard(2),)]
    assert_same(run, long, keys, virtual(4), tolerance=1e-5, stride=False)


def test_results_that_are_numbers() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    given = [spread(t, virtual(2), [Shard(1)]) for t in (Q, K, V)]
    with communication("error", fallback="error"):
        made = op(*given)
    assert made[2:6] == (None, None, 5, 7)


# --- modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention(weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])

    def run(x: Any) -> list[Any]:
        made = layer(x, x, x, key_padding_mask=padding, need_weights=weights)
        return [each for each in made if each is not None]

    check(run, numbers(3, 5, 8), mesh=virtual(2), limit=4)


def test_inference_of_a_transformer_runs_on_the_batch() -> None:
    """Without gradients PyTorch runs a whole layer as one kernel."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with torch.no_grad():
        f = [lambda x: layer(x), lambda x: layer.self_attn(x, x, x, key_padding_mask=padding)]
        for each in f:
            check(each, numbers(3, 5, 8), mesh=virtual(2), limit=8, grad=False)
        x = spread(numbers(3, 5, 8), virtual(4), [Shard(0)])
        with communication("error", fallback="error"):
            assert layer(x).placements == (Shard(0),)
            assert layer.self_attn(x, x, x, need_weights=False)[1] is None


def padded_encoder() -> tuple[Any, torch.Tensor]:
    """An encoder that PyTorch runs on nested tensors, and a mask of padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    return nn.TransformerEncoder(layer, 2).eval(), padding


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_a_padded_batch() -> None:
    """PyTorch makes a nested tensor of it, and zeros of the padding."""
    encoder, padding = padded_encoder()

    def run(x: Any) -> Any:
        return encoder(x, src_key_padding_mask=padding)

    with torch.no_grad():
        assert not run(numbers(3, 5, 8))[1, 3:].any()
        check(run, numbers(3, 5, 8), mesh=virtual(2), limit=8, grad=False)
        x = spread(numbers(3, 5, 8), virtual(4), [Shard(0)])
        with communication("error", fallback="error"):
            assert run(x).placements == (Shard(0),)
    encoder.mask_check = False
    with torch.inference_mode():
        torch.testing.assert_close(run(x).full_tensor(), run(numbers(3, 5, 8)))


def test_sequences_of_many_lengths_are_for_the_layers_of_an_encoder() -> None:
    x = spread(numbers(3, 5, 8), virtual(2), [Shard(0)])
    _, padding = padded_encoder()
    made = torch._nested_tensor_from_mask(x, padding.logical_not())
    with pytest.raises(LayoutError, match="enable_nested_tensor=False"):
        made + 1
    backwards = padding.flip(1).logical_not()
    assert not torch._nested_tensor_from_mask_left_aligned(x, backwards)


@pytest.mark.parametrize("first", [True, False])
def test_a_decoder_in_inference_mode_runs_on_the_batch(first: bool) -> None:
    """There composites such as dropout arrive whole."""
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=first, dtype=torch.float64).eval()
    x = spread(numbers(4, 4, 8), virtual(2), [Shard(0 if first else 1)])
    with torch.inference_mode(), communication("error", fallback="error"):
        made = layer(x, x)
    torch.testing.assert_close(made.full_tensor(), layer(numbers(4, 4, 8), numbers(4, 4, 8)))


def parallel(module: nn.Module, mesh: Any) -> nn.Module:
    """First weights by their rows, second ones by their columns, on the last axis."""
    lead = [Replicate()] * (mesh.ndim - 1)
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            first = "in_proj" in name or part is getattr(module, "linear1", None)
            second = weight.ndim == 2 and not first
            place = Shard(0) if first else Shard(1) if second else Replicate()
            setattr(
                part, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [*lead, place]))
            )
    return module


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_in_shards(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    mesh = virtual(2, 2)
    ours = parallel(copy.deepcopy(plain), mesh)
    x = numbers(3, 5, 8)
    for module in (plain, ours):
        module.train(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        want, got = plain(x), ours(spread(x, mesh, [Shard(0), Replicate()]))
        torch.testing.assert_close(got.full_tensor(), want)
        if mode == "train":
            (want * want).sum().backward()
            (got * got).sum().backward()
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(b.grad.full_tensor(), a.grad)  # type: ignore

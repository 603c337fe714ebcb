"""A rule for an operator of your own: one line of index notation, checked by brute force."""

import torch

import shardwise as sw
from shardwise import Shard


@torch.library.custom_op("examples::scores", mutates_args=())
def scores(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Imagine a fast kernel here."""
    return torch.einsum("bqd,bkd->bqk", queries, keys) * scale


@scores.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    return queries.new_empty(*queries.shape[:2], keys.shape[1])


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    queries, keys = torch.randn(4, 5, 6), torch.randn(4, 3, 6)
    q = sw.distribute_tensor(queries, mesh, [Shard(0), Shard(2)])
    k = sw.distribute_tensor(keys, mesh, [Shard(0), Shard(2)])

    # Without a rule it works, but on whole tensors. Strict mode says so.
    try:
        with sw.communication("auto", fallback="error"):
            scores(q, k, 0.5)
    except sw.errors.CommunicationError as error:
        print(error, "\n")
    torch.testing.assert_close(scores(q, k, 0.5).full_tensor(), scores(queries, keys, 0.5))

    # d is missing in the result, so sharding it leaves a sum pending. The kernel is linear in each.
    sw.register_rule(scores, "b q d, b k d -> b q k", linear=[[0], [1]])
    print(sw.verify(torch.ops.examples.scores, queries, keys, 0.5), "\n")

    with sw.communication("error", fallback="error"):  # now nothing moves
        result = scores(q, k, 0.5)
    print(result)
    torch.testing.assert_close(result.full_tensor(), scores(queries, keys, 0.5))


if __name__ == "__main__":
    main()

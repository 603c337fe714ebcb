"""`import shardwise` changes nothing for tensors that are no DTensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard

PROGRAM = textwrap.dedent(
    """
    import os
    import sys
    import torch
    import torch.nn.functional as F
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wrapped(torch.Tensor):
        seen = []

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self._held = inner

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
            cls.seen.append(str(op))
            def bare(value):
                if isinstance(value, (list, tuple)):
                    return type(value)(map(bare, value))
                return value._held if isinstance(value, cls) else value
            def dressed(value):
                if isinstance(value, (list, tuple)):
                    return type(value)(map(dressed, value))
                return cls(value) if isinstance(value, torch.Tensor) else value
            given = {name: bare(value) for name, value in (kwargs or {}).items()}
            return dressed(op(*bare(args), **given))

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            Wrapped.seen.append(str(op))
            return op(*args, **(kwargs or {}))

    def wrapped(*shape, dtype=torch.float32):
        torch.manual_seed(0)
        if dtype is torch.int64:
            return Wrapped(torch.randint(0, 4, shape))
        return Wrapped(torch.randn(shape, dtype=dtype))

    def theirs(*shape, dtype=torch.float32):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (1,))
        return distribute_tensor(wrapped(*shape, dtype=dtype)._held, mesh, [Shard(0)])

    def plain(*shape, dtype=torch.float32):
        return wrapped(*shape, dtype=dtype)._held

    rnn = torch.nn.GRU(3, 4)
    CALLS = {
        "one_hot": lambda new: F.one_hot(new(3, dtype=torch.int64), 4),
        "one_hot of any number": lambda new: F.one_hot(new(3, dtype=torch.int64)),
        "tensor_split": lambda new: torch.tensor_split(new(6, 2), torch.tensor([1, 4])),
        "vander": lambda new: torch.vander(new(3)),
        "resolve_conj": lambda new: new(3, dtype=torch.complex64).conj().resolve_conj(),
        "resolve_neg": lambda new: torch._neg_view(new(3)).resolve_neg(),
        "real": lambda new: new(3, dtype=torch.complex64).real,
        "imag": lambda new: new(3, dtype=torch.complex64).conj().imag,
        "kron out": lambda new: torch.kron(new(2, 2), new(2, 2), out=new(4, 4)),
        "matmul out": lambda new: torch.matmul(new(2, 3), new(3, 2), out=new(2, 2)),
        "quantile": lambda new: torch.quantile(new(5, 2), 0.3, dim=0),
        "attention": lambda new: F.scaled_dot_product_attention(*[new(1, 2, 3, 4)] * 3),
        "circular pad": lambda new: F.pad(new(1, 2, 4), (1, 2), mode="circular"),
        "gru": lambda new: rnn(new(2, 1, 3)),
        "cumsum": lambda new: new(4).cumsum(0),
        "cumprod_": lambda new: new(4).cumprod_(0),
        "prod": lambda new: new(4, 2).prod(1),
        "rfft": lambda new: torch.fft.rfft(new(8)),
    }

    def gradient(call):
        def run(new):
            x = new(4, 3).requires_grad_()
            call(x).sum().backward()
            return x.grad
        return run

    for name, call in {
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(1),
        "prod": lambda x: x.prod(),
        "rfft": lambda x: torch.fft.rfft(x).abs(),
    }.items():
        CALLS[f"gradient of {name}"] = gradient(call)
        CALLS[f"vmap of {name}"] = lambda new, call=call: torch.vmap(call)(new(2, 4, 3))
        total = lambda x, call=call: call(x).sum()
        CALLS[f"func.grad of {name}"] = lambda new, total=total: torch.func.grad(total)(new(4, 3))
    CALLS["vmap of one_hot"] = lambda new: torch.vmap(lambda x: F.one_hot(x, 4))(
        new(2, 3, dtype=torch.int64)
    )

    def values(made):
        if isinstance(made, (list, tuple)):
            return list(map(values, made))
        if not isinstance(made, torch.Tensor):
            return made
        inner = made
        while hasattr(inner, "_held") or hasattr(inner, "_local_tensor"):
            inner = inner._held if hasattr(inner, "_held") else inner._local_tensor
        return type(made).__name__, inner.resolve_conj().resolve_neg().detach().tolist()

    def outcome(call, new, inference):
        Wrapped.seen.clear()
        try:
            with torch.inference_mode(inference):
                made = call(new)
            text = str(values(made))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
        return text, tuple(Wrapped.seen)

    def outcomes():
        found = {}
        for inference in (False, True):
            for name, call in CALLS.items():
                found[name, "subclass", inference] = outcome(call, wrapped, inference)
                found[name, "PyTorch's DTensor", inference] = outcome(call, theirs, inference)
                with Recorder():
                    found[name, "mode", inference] = outcome(call, plain, inference)
        return found

    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes()  # what PyTorch itself does only once
    before = outcomes()
    import shardwise
    after = outcomes()
    dist.destroy_process_group()
    assert len(before) > 150 and any(seen for _, seen in before.values())
    for case, told in before.items():
        if after[case] != told:
            print(*case, told, after[case], sep=" | ")
            sys.stdout.flush()
    """
)


def test_import_changes_no_operator_for_other_tensors() -> None:
    """Subclasses, dispatch modes and PyTorch's own DTensor see the calls that they saw before."""
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout == "", made.stdout[:4000]


@pytest.mark.parametrize("inference", [False, True])
def test_forms_of_composites_still_serve_dtensors(inference: bool) -> None:
    """What runs for DTensors alone gives what one device gives, and refuses what it refuses."""
    mesh = sw.init_device_mesh("cpu", (3,))
    classes = torch.tensor([2, 0, 3, 1, 3])
    values = torch.tensor([-1.5, 2.0, 0.5, -3.0, 0.25, 4.0, -0.5])
    with torch.inference_mode(inference):
        x = sw.distribute_tensor(classes, mesh, [Shard(0)])
        y = sw.distribute_tensor(values, mesh, [Shard(0)])
        assert torch.equal(F.one_hot(x, 4).full_tensor(), F.one_hot(classes, 4))
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            F.one_hot(x, 3)
        torch.testing.assert_close(torch.vander(y).full_tensor(), torch.vander(values))
        torch.testing.assert_close(y.cumprod(0).full_tensor(), values.cumprod(0))
        torch.testing.assert_close(y.prod().full_tensor(), values.prod())


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "prod"])
def test_vmap_and_func_grad_of_forms_with_gradients(name: str) -> None:
    """DTensors inside functorch give what plain tensors give."""
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = torch.randn(5, 3)
    x = sw.distribute_tensor(plain, mesh, [Shard(0)])

    def call(value: torch.Tensor) -> torch.Tensor:
        return getattr(value, name)(0)  # type: ignore[no-any-return]

    def total(value: torch.Tensor) -> torch.Tensor:
        return (call(value) ** 2).sum()

    made = torch.vmap(call, in_dims=1)(x)
    torch.testing.assert_close(made.full_tensor(), torch.vmap(call, in_dims=1)(plain))
    made = torch.func.grad(total)(x)
    torch.testing.assert_close(made.full_tensor(), torch.func.grad(total)(plain))
    made = torch.vmap(torch.func.grad(total), in_dims=1)(x)
    expected = torch.vmap(torch.func.grad(total), in_dims=1)(plain)
    torch.testing.assert_close(made.full_tensor(), expected)


def test_plain_tensors_made_by_a_dtensor() -> None:
    """`new_tensor` and `new` ask a tensor for its backend, and make plain tensors."""
    plain = torch.ones(4, 2, dtype=torch.float64)
    x = sw.distribute_tensor(plain, sw.init_device_mesh("cpu", (2,)), [Shard(0)])
    for made, expected in (
        (x.new_tensor([1, -2]), plain.new_tensor([1, -2])),
        (x.new_tensor(3, dtype=torch.int8), plain.new_tensor(3, dtype=torch.int8)),
        (x.new([4, 5]), plain.new([4, 5])),  # type: ignore[no-untyped-call]
        (x[1].new_tensor(2.0), plain.new_tensor(2.0)),
    ):
        assert type(made) is torch.Tensor and made.dtype is expected.dtype
        assert torch.equal(made, expected)
    assert x.new(2, 3).shape == (2, 3)
    assert x.new().shape == plain.new().shape  # type: ignore[no-untyped-call]
    assert x.type() == plain.type()

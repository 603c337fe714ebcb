"""PyTorch's parallel styles: where the parameters of a module live, and in which layouts its inputs
and outputs are.

Every operator is right in every layout, so a style computes nothing. It converts parameters once,
and changes layouts before and after `forward`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import LayoutError, MeshError, public
from ..layout.mesh import AnyMesh, Topology, axes_in, topology
from ..layout.placement import Placement, Replicate, Shard
from ..tensor.dtensor import DTensor
from ..tensor.per_rank import PerRank
from .in_place import convert_module

Layouts = Placement | tuple[Placement | None, ...] | None
"""The layouts of several values: None for one that is left as it is. One alone needs no tuple."""


class ParallelStyle(ABC):
    """How a module is put on a mesh: a class with a method `_apply(module, device_mesh)`.

    `parallelize_module` sets `src_data_rank`, the rank whose parameters all ranks take.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        """Put a module on a mesh, in place."""

    def _check(self, module: nn.Module) -> None:  # noqa: B027  # styles need not have it
        """Raise if this style cannot be for a module: called before any module is changed."""

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name != "src_data_rank"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


@public
class ColwiseParallel(ParallelStyle):
    """An `nn.Linear` whose output features, or an `nn.Embedding` whose columns, are sharded.

    - `input_layouts`: the layout of a local tensor that comes in, by default `Replicate()`. The
      module runs on a replicated input.
    - `output_layouts`: the layout of the output, by default `Shard(-1)`.
    - `use_local_output`: the output is a local tensor.

    >>> import torch, shardwise
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> linear = parallelize_module(torch.nn.Linear(4, 6), mesh, ColwiseParallel())
    >>> linear.weight.placements, linear(torch.ones(3, 4)).shape
    ((S(0),), torch.Size([3, 3]))
    """

    _PLACES: Mapping[type, Mapping[str, Placement]] = {
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    }
    _INPUT: Mapping[type, Placement] = {nn.Linear: Replicate(), nn.Embedding: Replicate()}
    _GIVEN: Placement = Replicate()
    _OUTPUT: Placement = Shard(-1)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = _tuple(name, "input_layouts", input_layouts or self._GIVEN)
        self.output_layouts = _tuple(name, "output_layouts", output_layouts or self._OUTPUT)
        self.use_local_output = use_local_output

    def _check(self, module: nn.Module) -> None:
        if not isinstance(module, tuple(self._PLACES)):
            raise NotImplementedError(
                f"{type(self).__name__} is for nn.Linear and nn.Embedding, but got a "
                f"{type(module).__name__}. For other modules shardwise.shard_module takes the "
                "placements of any parameter."
            )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        self._check(module)
        kind = next(each for each in self._PLACES if isinstance(module, each))
        _place(self, module, device_mesh, self._PLACES[kind])
        layouts = self.input_layouts[0], self._INPUT[kind], self.output_layouts[0]
        # The weight says how large the sharded dim of a local input is: nobody has to ask.
        size = module.in_features if isinstance(module, nn.Linear) else None
        return _surround(self, module, device_mesh, *layouts, self.use_local_output, size)


@public
class RowwiseParallel(ColwiseParallel):
    """An `nn.Linear` whose input features, or an `nn.Embedding` whose rows, are sharded.

    - `input_layouts`: the layout of a local tensor that comes in, by default `Shard(-1)`. A linear
      layer runs on an input that is sharded so, an embedding on a replicated one.
    - `output_layouts`: the layout of the output, by default `Replicate()`.
    - `use_local_output`: the output is a local tensor.

    >>> import torch, shardwise
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> linear = parallelize_module(torch.nn.Linear(4, 6), mesh, RowwiseParallel())
    >>> linear.weight.placements, linear.bias.placements
    ((S(1),), (R,))
    """

    _PLACES = {nn.Linear: {"weight": Shard(1)}, nn.Embedding: {"weight": Shard(0)}}
    _INPUT = {nn.Linear: Shard(-1), nn.Embedding: Replicate()}
    _GIVEN = Shard(-1)
    _OUTPUT = Replicate()


@public
class SequenceParallel(ParallelStyle):
    """A module with replicated parameters whose input and output are sharded on `sequence_dim`,
    such as `nn.LayerNorm` and `nn.Dropout`.

    >>> import torch, shardwise
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
    >>> norm(shardwise.randn(2, 6, 4, device_mesh=mesh)).placements
    (S(1),)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = _tuple(type(self).__name__, "sequence_dim", Shard(sequence_dim))
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        (place,) = self.sequence_sharding
        _place(self, module, device_mesh, {})
        return _surround(self, module, device_mesh, place, place, place, self.use_local_output)


@public
class PrepareModuleInput(ParallelStyle):
    """The layouts of a module's inputs.

    - `input_layouts`: for each positional input the layout of a local tensor that comes in, None
      for an input that is left as it is.
    - `desired_input_layouts`: for each of them the layout in which `forward` gets it.
    - `input_kwarg_layouts`, `desired_input_kwarg_layouts`: the same by name.
    - `use_local_output`: `forward` gets local tensors.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    >>> module = parallelize_module(torch.nn.Identity(), mesh, style)
    >>> out = module(torch.ones(3, 4))  # each rank has three rows
    >>> out.shape, out.placements
    (torch.Size([6, 4]), (R,))
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        name = type(self).__name__
        self.input_layouts, self.desired_input_layouts = _pair(
            name, "input_layouts", input_layouts, desired_input_layouts
        )
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise LayoutError(
                f"{name}: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, and "
                f"desired_input_kwarg_layouts {sorted(self.desired_input_kwarg_layouts)}. Both "
                "should name the same inputs."
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        local, mesh = self.use_local_output, topology(device_mesh)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            on = _On(mesh, module)
            if self.input_layouts is not None:
                layouts = self.input_layouts, self.desired_input_layouts
                args = _bring_all(self, "input", on, args, *layouts, local)
            named = {}
            for name, value in kwargs.items():
                given = self.input_kwarg_layouts.get(name)
                wanted = self.desired_input_kwarg_layouts.get(name)
                what = f"its input {name}"
                named[name] = _bring(self, what, on, value, given, wanted, local=local)
            return args, named

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


@public
class PrepareModuleOutput(ParallelStyle):
    """The layouts of a module's outputs.

    - `output_layouts`: for each output the layout of a local tensor, None for an output that is
      left as it is.
    - `desired_output_layouts`: for each of them the layout that it gets.
    - `use_local_output`: the outputs are local tensors.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    >>> module = parallelize_module(torch.nn.Identity(), mesh, style)
    >>> module(torch.arange(4)).parts
    (tensor([0, 1]), tensor([2, 3]))
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        given, wanted = _pair(name, "output_layouts", output_layouts, desired_output_layouts)
        if given is None or wanted is None:
            raise LayoutError(f"{name}: output_layouts should say one layout for each output.")
        self.output_layouts, self.desired_output_layouts = given, wanted
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        mesh = topology(device_mesh)

        def after(module: nn.Module, _: Any, output: Any) -> Any:
            many = isinstance(output, tuple)
            values = output if many else (output,)
            layouts, on = (self.output_layouts, self.desired_output_layouts), _On(mesh, module)
            made = _bring_all(self, "output", on, values, *layouts, self.use_local_output)
            return made if many else made[0]

        module.register_forward_hook(after)
        return module


@public
class PrepareModuleInputOutput(ParallelStyle):
    """The layouts of a module's inputs and outputs: `PrepareModuleInput`, whose `use_local_output`
    is `use_local_input` here, and `PrepareModuleOutput`.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import parallelize_module
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> style = PrepareModuleInputOutput(
    ...     input_layouts=Replicate(), desired_input_layouts=Shard(0),
    ...     output_layouts=Shard(0), desired_output_layouts=Replicate(),
    ... )
    >>> parallelize_module(torch.nn.Identity(), mesh, style)(torch.arange(3))
    tensor([0, 1, 2])
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)


# --- what styles are made of ---------------------------------------------------------------------


def _place(
    style: ParallelStyle, module: nn.Module, mesh: AnyMesh, places: Mapping[str, Placement]
) -> None:
    """Convert the parameters and buffers of a module; those without a placement are replicated."""
    name = type(style).__name__
    for key, wanted in places.items():
        made: Any = module._parameters.get(key)
        if not isinstance(made, DTensor):
            continue
        if made._spec.topology is not topology(mesh) or made.placements != (wanted,):
            raise LayoutError(
                f"{name}: {key} is {made._spec} already, and this style wants [{wanted}] on "
                f"{topology(mesh)}. Give a module, and modules that share a parameter, styles that "
                "agree."
            )
    convert_module(
        name,
        module,
        mesh,
        lambda names, _: [places.get(names[0], Replicate())],
        src_data_rank=style.src_data_rank,
    )


def _surround(
    style: ParallelStyle,
    module: nn.Module,
    device_mesh: AnyMesh,
    given: Placement | None,
    wanted: Placement | None,
    output: Placement | None,
    local: bool,
    size: int | None = None,
) -> nn.Module:
    """Change the layouts of the first input of a module, by position or by name, and of its
    output."""
    mesh = topology(device_mesh)

    def first(on: _On, value: Any) -> Any:
        return _bring(style, "its input", on, value, given, wanted, size=size)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on = _On(mesh, module)
        if args:
            return (first(on, args[0]), *args[1:]), kwargs
        named = {name: first(on, value) for name, value in [*kwargs.items()][:1]}
        return args, kwargs | named

    def after(module: nn.Module, _: Any, value: Any) -> Any:
        return _bring(style, "its output", _On(mesh, module), value, output, output, local=local)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return module


class _On(NamedTuple):
    """The mesh of a style, of one axis, and the module that it is for.

    After `fully_shard` the parameters of the module are on a larger mesh.
    """

    mesh: Topology
    module: nn.Module

    def whole(self) -> Topology:
        """The mesh of the module's parameters, if the style's mesh is a part of it."""
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor):
                found = parameter._spec.topology
                return self.mesh if axes_in(self.mesh, found) is None else found
        return self.mesh


def _bring(
    style: ParallelStyle,
    what: str,
    on: _On,
    value: Any,
    given: Placement | None,
    wanted: Placement | None,
    *,
    local: bool = False,
    size: int | None = None,
) -> Any:
    """A value in the layout `wanted`, as a DTensor or as its local tensor.

    A local tensor is taken to be in the layout `given`; if that is None, the value is left as it
    is. `size` is the global size of its last dim, if it is known.
    """
    if given is None:
        return value
    name = type(style).__name__
    if isinstance(value, (torch.Tensor, PerRank)) and not isinstance(value, DTensor):
        value = _from_local(f"{name}: {what}", on, value, given, size)
    if not isinstance(value, DTensor):
        raise LayoutError(
            f"{name}: {what} is a {type(value).__name__}, and only a tensor can be {given}. Give "
            "None as the layout of a value that is no tensor."
        )
    found = axes_in(on.mesh, value._spec.topology)
    if found is None:
        raise MeshError(
            f"{name}: {what} is {value._spec}, but the module is on mesh {on.mesh}. Give "
            "it on that mesh: value.redistribute(mesh, placements)."
        )
    (axis,) = found
    if wanted is not None and value.placements[axis] != _in_front(wanted, value.ndim):
        places = list(value.placements)
        places[axis] = wanted
        value = value.redistribute(placements=places)
    return _local(value) if local else value


def _from_local(what: str, on: _On, value: Any, given: Placement, size: int | None) -> DTensor:
    """A DTensor of a local tensor. On the other axes of the mesh, those of `fully_shard`, each rank
    has a part of the batch."""
    shape = None
    where: Any = on.whole()
    if isinstance(value, torch.Tensor) and size is not None and _is_last(given, value.ndim):
        shape = (*value.shape[:-1], size) if where is on.mesh else None
    (axis,) = axes_in(on.mesh, where) or (0,)
    places = [given if each == axis else Shard(0) for each in range(where.ndim)]
    try:
        return DTensor.from_local(value, where, places, shape=shape)
    except LayoutError as error:
        raise LayoutError(
            f"{what} is a local tensor, taken to be {given} on {on.mesh}. {error}"
        ) from error


def _bring_all(
    style: ParallelStyle,
    what: str,
    on: _On,
    values: tuple[Any, ...],
    given: Sequence[Placement | None],
    wanted: Sequence[Placement | None],
    local: bool,
) -> tuple[Any, ...]:
    if len(values) != len(given):
        raise LayoutError(
            f"{type(style).__name__}: module {what}s and {what}_layouts should have same length! "
            f"The module has {len(values)}, and {what}_layouts {len(given)}: give None for what "
            "is left as it is."
        )
    return tuple(
        _bring(style, f"{what} {place}", on, *each, local=local)
        for place, each in enumerate(zip(values, given, wanted, strict=True))
    )


def _local(value: DTensor) -> Any:
    """The local tensor; a plain tensor where all ranks of a virtual mesh hold the same one."""
    grads = [Replicate() if place.is_partial() else place for place in value.placements]
    made = value.to_local(grad_placements=grads)
    return made.parts[0] if isinstance(made, PerRank) and not made.axes else made


def _is_last(place: Placement, ndim: int) -> bool:
    return _in_front(place, ndim).is_shard(ndim - 1)


def _in_front(place: Placement, ndim: int) -> Placement:
    """A placement whose dim is counted from the front."""
    if isinstance(place, Shard) and place.dim < 0:
        return Shard(place.dim + ndim, split=place.split)
    return place


def _tuple(name: str, what: str, layouts: Any) -> tuple[Placement | None, ...]:
    made = (layouts,) if isinstance(layouts, Placement) else layouts
    if not isinstance(made, (tuple, list)) or not all(
        place is None or isinstance(place, Placement) for place in made
    ):
        raise LayoutError(
            f"{name}: {what} is {layouts!r}, but should be a placement, such as Shard(0), or a "
            "tuple with a placement or None for each value."
        )
    return tuple(made)


def _pair(name: str, what: str, given: Any, wanted: Any) -> Any:
    """The layouts that come and those that are wanted, one for one; None if there are none."""
    if given is None and wanted is None:
        return None, None
    if given is None or wanted is None:
        raise LayoutError(f"{name}: {what} and desired_{what} should both be given, or neither.")
    pair = _tuple(name, what, given), _tuple(name, f"desired_{what}", wanted)
    if len(pair[0]) != len(pair[1]):
        raise LayoutError(
            f"{name}: {what} and desired_{what} should have same length! They have "
            f"{len(pair[0])} and {len(pair[1])}."
        )
    return pair

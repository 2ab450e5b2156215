"""A GPU for machines that have none: tensors on the CPU that behave as those of a GPU do.

Two devices are pretended, ``meta:1`` and ``meta:2``: torch knows the name, which needs no driver,
and the number tells them from the real one. Their tensors do not mix with others of one dimension
or more, nor become arrays of NumPy. ``meta:2`` has no float64, as Apple's GPUs.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

PRETENDED = torch.device("meta:1")
WITHOUT_FLOAT64 = torch.device("meta:2")

aten = torch.ops.aten
MOVES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
JOINED = {aten.cat.default, aten.stack.default}
CPU, PLACES = torch.device("cpu"), (PRETENDED, WITHOUT_FLOAT64)


class PretendedTensor(Tensor):
    """A tensor on the CPU that says it is elsewhere."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> PretendedTensor:
        check_width(device, inner.dtype)
        with torch.inference_mode(False):  # whose tensors cannot be views
            made: Any = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
                requires_grad=inner.requires_grad,
            )
        made.on_cpu = inner
        return made  # type: ignore[no-any-return]

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.on_cpu!r} on {self.device}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: Any = None, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, **{"device": self.device, **options})

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)  # as with map_location="cpu"

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return computed(func, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Let operations without any tensor, such as ``torch.zeros``, make pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what an operation gives, where a GPU would compute it."""
    if torch.is_inference_mode_enabled():  # which leaves it to us to take an operation apart
        with Factories():
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    moved = func in MOVES
    if not moved:
        check_places(func, args, tensors)
    for tensor in tensors:
        check_width(tensor.device, kwargs.get("dtype"))
    device = kwargs.get("device")
    if device is None or func is aten.copy_.default:
        places = [x.device for x in tensors if isinstance(x, PretendedTensor)]
        device = args[0].device if moved else next(iter(places), CPU)
    elsewhere = device in PLACES
    named = {**kwargs, "device": CPU} if elsewhere and "device" in kwargs else kwargs
    result = func(*tree_map(inner_of, args), **tree_map(inner_of, named))
    if not elsewhere:
        return args[0] if func is aten.copy_.default else result
    wrapped = tree_map(lambda x: PretendedTensor(x, device) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def check_width(device: Any, dtype: Any) -> None:
    """Raise as Apple's GPUs do, also for a copy that would be converted on its way to the CPU."""
    if device == WITHOUT_FLOAT64 and dtype == torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )


def inner_of(value: Any) -> Any:
    return value.on_cpu if isinstance(value, PretendedTensor) else value


def check_places(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise as CUDA does: only single numbers on the CPU mix, and indices."""
    places = {x.device for x in tensors if isinstance(x, PretendedTensor)}
    if func in INDEXED and isinstance(args[0], PretendedTensor):
        tensors = [args[0], *(x for x in tree_leaves(args[2:]) if isinstance(x, Tensor))]
    places |= {x.device for x in tensors if x.ndim or func in JOINED}
    if len(places) > 1:
        found = " and ".join(sorted(map(str, places)))
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found}! (when checking the arguments of {func})"
        )


class Constructors(TorchFunctionMode):
    """Let ``torch.tensor`` and the like, which reach no operation, make pretended tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and named.get("device") in PLACES:
            device = named.pop("device")
            return func(*args, **named).to(device)
        return func(*args, **named)


class Generator(torch.Generator):
    """One that draws on the CPU, wherever it is asked for."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


@contextlib.contextmanager
def pretended_devices() -> Any:
    """Have both devices within the block, and in the threads of its pools."""
    submit = ThreadPoolExecutor.submit

    def submitted(self: Any, task: Any, /, *args: Any, **named: Any) -> Any:
        def run() -> Any:
            with Constructors(), Factories():
                return task(*args, **named)

        return submit(self, run)

    with (
        mock.patch.object(ThreadPoolExecutor, "submit", submitted),
        mock.patch.object(torch, "Generator", Generator),
        Constructors(),
        Factories(),
    ):
        yield

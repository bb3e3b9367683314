"""Every private torch API that Wholestep touches, each behind one small function: a new torch is this file's work."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch._C import _set_grad_enabled as set_grad_marker
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "HigherOrderOperator", "OpOverload", "TorchDispatchMode", "make_fx", "set_grad_marker"]
#: the module that a call of torch.export imports first
EXPORT = "torch.export._trace"


def schema_of(operator: Any) -> Any:
    """The schema of a registered operator: name, arguments with types and aliasing, whether it mutates."""
    return operator._schema


def optimizer_step_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the hooks that run around `optimizer.step`: the optimizer's own and those for all optimizers."""
    from torch.optim import optimizer as module

    registries: list[Any] = [
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        getattr(module, "_global_optimizer_pre_hooks", None),
        getattr(module, "_global_optimizer_post_hooks", None),
    ]
    found = [h for hooks in registries if hooks for h in hooks.values()]
    return [getattr(h, "__name__", type(h).__name__) for h in found if not getattr(h, "of_wholestep", False)]


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside the block operators run as they are, whoever watches or replaces them outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def trace_with_fake_tensors(function: Any, kinds: list[tuple[Any, ...]]) -> torch.fx.GraphModule:
    """The ATen calls that `function(*tensors)` makes, without memory or arithmetic.

    Each tensor is given by its kind: shape, stride, dtype, device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with FakeTensorMode(), preserve_node_meta():
        fakes = [torch.empty_strided(shape, stride, dtype=dtype, device=dev) for shape, stride, dtype, dev in kinds]
        return make_fx(function)(*fakes)


def note_source_line(file: str, line: int) -> None:
    """The nodes traced from now on come from this line; seen where a trace preserves node metadata."""
    from torch.fx import traceback

    traceback.set_stack_trace([f'  File "{file}", line {line}, in step\n'])


def static_number(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The number a symbolic size is known to be; None where only the data tells."""
    node = value.node
    if isinstance(value, torch.SymInt):
        number = node.maybe_as_int()
    elif isinstance(value, torch.SymFloat):
        number = node.maybe_as_float()
    else:
        number = node.maybe_as_bool()
    return node.hint if number is None and node.has_hint() else number


def mark_optimizer_called(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning-rate schedulers that the optimizer has stepped, as its own `step` would."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because Python asked a fake tensor for its values."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether autograd would call somebody's hook with this parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether autograd would call somebody's hook on its way back through this module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def foreach_norm(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor, in few kernel launches."""
    return list(torch._foreach_norm(tensors, order)) if tensors else []


#: types that torch's kernels for many tensors do not know, and those that hold the same bits
SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def foreach_copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies each value into its tensor, converting types, in few kernel launches."""
    kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(into, values, strict=True):  # the fast kernels want one device and one pair of types
        if target.dtype in SAME_BITS or value.dtype in SAME_BITS:
            if target.dtype != value.dtype:
                target.copy_(value)
                continue
            target, value = (t.view(SAME_BITS[t.dtype]) for t in (target, value))
        group = kinds.setdefault((target.device, value.device, target.dtype, value.dtype), ([], []))
        group[0].append(target)
        group[1].append(value)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


#: how often a tensor was written in place, as autograd counts it; asked of many tensors on every step
version_of = attrgetter("_version")


def profiled(name: str) -> Any:
    """A range that profilers show, at a twentieth of what torch.profiler.record_function costs while there is none."""
    return torch._C._profiler._RecordFunctionFast(name)


def torch_library(name: str) -> ctypes.CDLL:
    """One of torch's own libraries."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def addresses(functions: Iterable[Any]) -> list[int]:
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


def functions_of_torch() -> list[int]:
    """Addresses of functions that read a tensor, of torch's stable interface, and of the one that counts a write."""
    library = torch_library("libtorch_cpu.so")
    names = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")
    found = [library[f"aoti_torch_get_{name}"] for name in names]
    return addresses([*found, library["_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"]])


def thread_functions() -> list[int]:
    """Addresses of C++ functions that ask for the state of a thread: whether somebody observes its calls (a profiler),
    whether autocast is on for a kind of device, whether inference mode is.
    """
    tensors, core = torch_library("libtorch_cpu.so"), torch_library("libc10.so")
    names = ("_ZN2at12hasCallbacksEv", "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE")
    return addresses([*(tensors[name] for name in names), core["_ZN3c1013InferenceMode10is_enabledEv"]])


def tensor_functions() -> list[int]:
    """Addresses of C++ functions that read a tensor: address, dimensions, strides, version, whether it trains.

    Of torch's stable interface; two by their names in C++: TensorBase::_version and TensorImpl::requires_grad.
    """
    tensors, core = torch_library("libtorch_cpu.so"), torch_library("libc10.so")
    stable = [tensors[f"aoti_torch_get_{name}"] for name in ("data_ptr", "dim", "strides")]
    own = [tensors["_ZNK2at10TensorBase8_versionEv"], core["_ZNK3c1010TensorImpl13requires_gradEv"]]
    return addresses([*stable, *own])


def place_of_tensor() -> int:
    """Bytes from the start of a Python tensor to the tensor of C++, which is a pointer that torch shows as `_cdata`."""
    found = set()
    for tensor in (torch.zeros(1), torch.nn.Parameter(torch.zeros(2, 3))):
        words = list((ctypes.c_int64 * 6).from_address(id(tensor)))
        found.add(words.index(tensor._cdata) * 8)
    if len(found) != 1:
        raise ValueError(f"tensors of C++ at {sorted(found)}")
    return found.pop()


def graphs_without_code() -> Any:
    """A context in which a traced graph is written as Python code only when somebody runs it: an export makes six."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


@contextmanager
def grouped_products_of_any_type() -> Iterator[None]:
    """Grouped products of float32 can be traced: torch runs them, and knows the shape of 16-bit ones alone."""
    from torch._subclasses.fake_impls import op_implementations_dict

    operator = torch.ops.aten._grouped_mm.default

    def shaped(mode: Any, func: Any, x: Any, y: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        if x.dim() == 2:
            shape = (x.shape[0], y.shape[2]) if y.dim() == 3 else (offs.shape[0], x.shape[0], y.shape[1])
        else:
            shape = (x.shape[1], y.shape[1]) if y.dim() == 2 else (*x.shape[:2], y.shape[2])
        return x.new_empty(shape, dtype=out_dtype)

    before = op_implementations_dict.get(operator)
    op_implementations_dict[operator] = shaped
    try:
        yield
    finally:
        if before is None:
            del op_implementations_dict[operator]
        else:
            op_implementations_dict[operator] = before


@contextmanager
def silent_fakes() -> Iterator[None]:
    """Fake tensors that refuse a call raise, and do not write to the log as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def clear_cublas_workspaces() -> None:
    """Gives back the memory that cuBLAS keeps per stream that ran a product; the next product takes it again."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # absent where torch is built without CUDA
    if clear is not None:
        clear()


@contextmanager
def cpu_allocations(sizes: list[int]) -> Iterator[None]:
    """Adds the bytes that torch's allocator for CPUs hands out to this thread meanwhile, and, below 0, what comes back.

    Nothing is added where a profiler of torch is on already: there is one at a time.
    """
    autograd = torch._C._autograd
    try:
        config = torch._C._profiler
        # (no shapes, stacks, flops, modules)
        only_memory = (False, True, False, False, False, config._ExperimentalConfig())
        wanted = config.ProfilerConfig(config.ProfilerState.CPU, *only_memory)
        begin, end = autograd._enable_profiler_legacy, autograd._disable_profiler_legacy
    except (AttributeError, TypeError):  # of another torch: what is taken is then not known
        yield
        return
    if autograd._profiler_enabled():
        yield
        return
    begin(wanted)
    try:
        yield
    finally:
        for thread in end():
            sizes += [event.cpu_memory_usage() for event in thread if event.kind() == "memory_alloc"]


@contextmanager
def cudnn_off() -> Iterator[None]:
    """Has ATen's own kernels convolve. `torch.backends.cudnn.flags` would set its other flags as well."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


#: what PyTorch has kernels of for GPUs and not for CPUs: products of 16-bit numbers that give f32
GPUS_ALONE = frozenset({"aten::mm.dtype_out", "aten::bmm.dtype_out"})


def has_kernel(operator: Any, device: str) -> bool:
    """Whether an operator has a kernel written for this kind of device. Where torch has none, that of the CPU tells, or
    that there is one for GPUs alone."""
    schema = operator._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    key = {"cuda": "CUDA"}.get(device, "CPU")
    if key == "CUDA" and not has("aten::add.out", "CUDA"):
        return name in GPUS_ALONE or has(name, "CPU")
    return has(name, key)


def is_composite(operator: Any) -> bool:
    """Whether an operator is nothing but calls of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def without_detour(call: Any) -> Any:
    """An operator as the dispatcher takes it, without the Python method around it; anything else as it is."""
    return call._op if isinstance(call, OpOverload) else call


def set_activation_memory_budget(share: float) -> None:
    """How much of what its partitioner would keep torch.compile may keep; it reads this while it compiles."""
    import torch._functorch.config as config

    config.activation_memory_budget = share


def hold_while_timing(held: Callable[[], AbstractContextManager[Any]]) -> None:
    """From now on torch.compile times kernels of a GPU inside of `held()`, in whichever mode.

    What it times is called once before: the first call loads a kernel, or even compiles it.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    plain = benchmarker.benchmark_gpu

    def timed(call: Callable[[], Any], *given: Any, **named: Any) -> Any:
        call()
        with held():
            return plain(call, *given, **named)

    benchmarker.benchmark_gpu = timed  # type: ignore[method-assign]

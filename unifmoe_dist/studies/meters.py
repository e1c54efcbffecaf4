"""The time and memory that calls take: the one clock and all meters of the studies.

- `seconds` waits for the device before and after.
- `LiveBytes` counts the storages of live tensors by kind, real or fake, from the first tensor on them to the last.
- `peak_bytes` is the allocator's own peak on a GPU, and that of `LiveBytes` on the CPU.
- `allocations` is the CPU allocator's peak, temporaries inside operations included, as torch's profiler records it.
- `process_peak` is the resident memory of a process, for runs whose steps nothing may slow.
- `kept_for_backward` is what autograd saves.

torch's own `MemTracker` (torch.distributed._tools) does not take its place: for two training steps of the digits model
with UniF-MoE layers on the CPU its peak was 0.8 % above the allocator's records, that of `LiveBytes` within 0.0001 %.
"""

import resource
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, work on the device included.

    torch.utils.benchmark compiles a loop for every statement and times it on one thread; here steps are interleaved.
    """
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - started


class Ledger:
    """Bytes in use on one device, by kind."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()  # now
        self.peak: Counter[str] = Counter()  # at the moment of the largest total
        self.most: Counter[str] = Counter()  # of every kind, at whatever moment

    def add(self, kind: str, size: float) -> None:
        """Take `size` bytes into use; a negative number gives them back."""
        self.live[kind] += int(size)
        self.most[kind] = max(self.most[kind], self.live[kind])
        if self.live.total() > self.highest:
            self.peak = self.live.copy()

    def spike(self, kind: str, size: float) -> None:
        """Bytes that are taken and given back at once."""
        self.add(kind, size)
        self.add(kind, -size)

    @property
    def highest(self) -> int:
        """The largest total so far."""
        return self.peak.total()


class LiveBytes(TorchDispatchMode):
    """Enters every storage that operations make into a ledger, and takes it out when the last tensor on it is gone.

    Works on real tensors and, because only sizes matter, on fake ones, which take neither memory nor time.

    Args:
        ledger: Where bytes are entered.
        given: Tensors made before that count from the start.
    """

    def __init__(self, ledger: Ledger, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.ledger = ledger
        self.kind = "activations"
        self._known: dict[int, str] = {}
        for tensor in given:
            self._enter(tensor)

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor's storage out: it is entered elsewhere."""
        self._known.setdefault(_address(tensor), "")

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Enter a tensor's storage under another kind."""
        size, before = tensor.untyped_storage().nbytes(), self._known.get(_address(tensor), "")
        if before and before != kind:
            self._known[_address(tensor)] = kind
            self.ledger.add(before, -size)
            self.ledger.add(kind, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False  # earlier Transformers ask whether a mask is all ones, to drop it: with padding it stays
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._enter(value)
        return result

    def _enter(self, tensor: Tensor) -> None:
        address, storage = _address(tensor), tensor.untyped_storage()
        if address not in self._known:
            self._known[address] = self.kind
            self.ledger.add(self.kind, storage.nbytes())
            weakref.finalize(storage, self._leave, address, storage.nbytes()).atexit = False

    def _leave(self, address: int, size: int) -> None:
        self.ledger.add(self._known.pop(address), -size)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(call: Callable[[], object], device: torch.device, given: Iterable[Tensor] = ()) -> int:
    """Peak bytes on the device during a call: the allocator's on a GPU, else those of `given` and of new tensors."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device)
    with LiveBytes(Ledger(), given) as live:
        call()
    return live.ledger.highest


def kept_for_backward(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that a forward pass keeps for its backward pass, parameters left out.

    Counts tensors that autograd saves, the input included, and those that functions written in Python hold as
    attributes of their own.
    """
    kept: dict[int, Tensor] = {}  # held until counted, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    ahead: list[Any] = [output.grad_fn]
    seen: set[Any] = {None}
    while ahead:  # through the graph behind the output
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
            for tensor in _tensors(list(getattr(node, "__dict__", {}).values())):
                keep(tensor)
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors in a value, its containers and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors(vars(leaf))


def process_peak(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on a GPU; on the CPU resident, without files and libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux
        return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kilobytes = {line.split(":")[0]: line.split()[1] for line in status.read_text().splitlines() if line.endswith("kB")}
    return 1024 * (int(kilobytes["VmHWM"]) - int(kilobytes["RssFile"]) - int(kilobytes["RssShmem"]))


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """Record torch's CPU allocator; yields what tells, afterwards, the highest number of bytes that were in use.

    Resident memory is no such measure: it counts libraries, pages that were released but kept, and no page that was
    never written.
    """
    elsewhere, activities = _ReleasesElsewhere(), [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, elsewhere:
        yield lambda: max(accumulate(size for _, size in sorted([*_records(profile), *elsewhere.records])))


def _records(profile: Any) -> Iterator[tuple[int, int]]:
    """Times in nanoseconds and bytes of the profiler's allocations and, negative, releases."""
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.start_ns(), event.nbytes()


class _ReleasesElsewhere(LiveBytes):
    """Storages that another thread releases, such as gloo's after an all-reduce: the profiler records its own only."""

    def __init__(self) -> None:
        super().__init__(Ledger())
        self.thread, self.records = threading.get_ident(), list[tuple[int, int]]()

    def _leave(self, address: int, size: int) -> None:
        super()._leave(address, size)
        if threading.get_ident() != self.thread:
            self.records.append((time.time_ns(), -size))

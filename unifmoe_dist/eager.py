"""Functions that only run eagerly: torch.compile leaves them alone, and they may look at who or what has called them.

The decorator `torch.compiler.disable` imports torch._dynamo where it stands: seconds for every program that uses this
package, few of which compile anything.
"""

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Decorator: as `torch.compiler.disable`, which takes over at the first call after torch._dynamo was imported.

    Before that nothing can be compiling, and the function is called as it is.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if torch.compiler.is_dynamo_compiling():  # tracing this very frame, called where a graph broke
            torch._dynamo.skip_frame("a function that is not compiled")
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled caller breaks its graph here
    return call  # type: ignore[return-value]


def called_by(matches: Callable[[CodeType], bool]) -> bool:
    """Whether a function whose code matches is among those that have called the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if matches(frame.f_code):
            return True
        frame = frame.f_back
    return False


def exporting() -> bool:
    """Whether torch.export traces the model now; `torch.compiler.is_exporting` of torch 2.9 means any compilation."""
    return torch.compiler._is_exporting_flag


def exporting_to_onnx() -> bool:
    """Whether torch.onnx.export traces the model now, to which the operators of this package mean nothing."""
    return exporting() and torch.onnx.is_in_onnx_export()


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) wraps tensors now, or forward-mode AD adds tangents.

    They must not outlive it, and functions with a backward pass written by hand do not take them.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0

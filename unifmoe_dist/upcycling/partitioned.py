"""Models whose weights ZeRO 3 spreads over ranks while they are made, as `from_pretrained` makes them under Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(module: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Inside, the weights of such a module are whole, and a new module's stay so; collective.

    What comes is to be called with the new module when it is finished: its weights are spread as the old one's, with
    rank 0's values. Of any other module nothing happens.
    """
    spread: list[Any] = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not spread:
        yield lambda new: None
        return
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        with GatheredParameters(spread):
            yield lambda new: spread[0].convert_to_zero_parameters(param_list=[*new.parameters()])
    finally:
        restore_init_context()

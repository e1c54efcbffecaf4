"""Reloading upcycled Transformers models.

Every Transformers model ends its construction with `post_init`; there, a model whose config notes an
upcycling gets its UniF-MoE layers back, before `from_pretrained` loads the weights. Then `from_pretrained` looks
whether it found weights for them; `save_pretrained` looks whether the config tells of all of them. Transformers is
patched when it is imported, never imported from here.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.config_entry import KEY, mark
from unifmoe_dist.upcycling.families import find_adapter, match_adapter
from unifmoe_dist.upcycling.layers import saved_arguments
from unifmoe_dist.upcycling.saving import check_loaded, prepare_saving, register_activations
from unifmoe_dist.upcycling.upcycle import convert, layer_maker, moe_layers

_TARGET = "transformers.modeling_utils"


def rebuild(model: nn.Module) -> None:
    """Give a newly constructed Transformers model the layers that its config notes; those it has stay.

    Raises:
        UserError: The model was saved with experts spread over ranks, so its weight file has only a part.
    """
    mark(model.config)  # folders of earlier versions lack the mark
    for note in getattr(model.config, KEY, None) or []:
        if note.get("expert_parallel_size", 1) > 1:
            raise UserError(
                f"This model was saved with its experts spread over {note['expert_parallel_size']} ranks; "
                "save it from a run with expert_parallel_size 1, or load the run's own checkpoint."
            )
        if moe_layers(model) and match_adapter(model) is None:
            return  # a class of somebody's own, around a model that has its layers already
        blocks = find_adapter(model).blocks(model)
        # A model may be loaded with fewer layers than were saved: what is above is left out, as Transformers does.
        kept = [index for index in note["layers"] if index < len(blocks)]
        missing = [index for index in kept if not moe_layers(blocks[index])]
        if missing:
            convert(model, missing, layer_maker(**saved_arguments(note)))
            if not note.get("flat_biases"):  # from_pretrained compares shapes, and the files have the older ones
                for index in missing:
                    for layer in moe_layers(blocks[index]).values():
                        for bank in layer.banks():
                            bank.stack_biases()


def install_rebuild() -> None:
    """Patch Transformers now if it is loaded, else when it is."""
    if _TARGET in sys.modules:
        _patch(sys.modules[_TARGET])
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def _patch(modeling: ModuleType) -> None:
    pretrained = modeling.PreTrainedModel
    original, save, load = pretrained.post_init, pretrained.save_pretrained, pretrained.__dict__["from_pretrained"]
    if hasattr(original, "rebuilds_unif_moe"):
        return

    @wraps(original)
    def post_init(self: nn.Module) -> None:
        original(self)
        if getattr(self.config, KEY, None):
            rebuild(self)

    @wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **options: Any) -> Any:
        prepare_saving(self)
        return save(self, *args, **options)

    @wraps(load.__func__)
    def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
        wanted = options.pop("output_loading_info", False)
        model, report = load.__func__(cls, *args, output_loading_info=True, **options)
        check_loaded(model, report, args[0] if args else options.get("pretrained_model_name_or_path"))
        return (model, report) if wanted else model

    post_init.rebuilds_unif_moe = True  # type: ignore[attr-defined]
    pretrained.post_init, pretrained.save_pretrained = post_init, save_pretrained
    pretrained.from_pretrained = classmethod(from_pretrained)
    register_activations()


class _PatchOnImport(MetaPathFinder):
    """Lets one module load as always, then patches it; who only asks where the module is changes nothing."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

"""Reloading upcycled Transformers models.

Every Transformers model ends its construction with `post_init`; there, a model whose config notes an
upcycling gets its UniF-MoE layers back, before `from_pretrained` loads the weights. Then `from_pretrained` looks
whether it found weights for them; `save_pretrained` looks whether the config tells of all of them.
`enable_from_pretrained` patches Transformers so; importing this package changes nothing there.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.config_entry import KEY, mark
from unifmoe_dist.upcycling.convert import convert, layer_maker, moe_layers
from unifmoe_dist.upcycling.families import find_adapter, match_adapter
from unifmoe_dist.upcycling.layers import saved_arguments
from unifmoe_dist.upcycling.saving import check_loaded, prepare_saving, register_activations


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


def enable_from_pretrained() -> None:
    """Let Transformers' `from_pretrained` rebuild the layers of upcycled models that `save_pretrained` wrote.

    A process that loads such a folder calls this first; one in which `upcycle` had a Transformers model need not.
    It extends `post_init`, `save_pretrained` and `from_pretrained` of `transformers.PreTrainedModel` for models with
    layers of experts and leaves others as they are. Calling it again changes nothing.
    """
    pretrained = importlib.import_module("transformers.modeling_utils").PreTrainedModel
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

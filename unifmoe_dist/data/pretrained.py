"""Models of Transformers and their tokenizers, from the hub or from a folder: what encoders and decoders share."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from unifmoe_dist.errors import UserError


@dataclass(frozen=True)
class Pretrained:
    """Where a model and its tokenizer come from.

    Args:
        backbone: Name on the Hugging Face hub, or a folder.
        pretrained: Folder with config, weights and tokenizer, in place of the backbone; "none" draws random weights
            for the backbone's architecture; None takes the backbone's own weights.
    """

    backbone: str
    pretrained: str | None = None

    @property
    def random(self) -> bool:
        """Whether weights are drawn rather than read."""
        return self.pretrained == "none"

    @property
    def source(self) -> str:
        """The hub name or folder that is read."""
        return self.backbone if self.random or self.pretrained is None else self.pretrained

    def tokenizer(self) -> Any:
        """Raises UserError where it cannot be had from the source."""
        from transformers import AutoTokenizer

        with self._explained("tokenizer"):
            return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)

    def config(self) -> Any:
        """The model's config; raises UserError where it cannot be had from the source."""
        from transformers import AutoConfig

        with self._explained("config"):
            return AutoConfig.from_pretrained(self.source, trust_remote_code=False)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Missing files, no network and unreadable files in one sentence."""
        folder = Path(self.source)
        if self.pretrained not in (None, "none") and not folder.is_dir():
            raise UserError(
                f"model.pretrained {self.source} is not a folder; give one that holds a model's config, weights and "
                "tokenizer, or none for random weights."
            )
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, pickle.UnpicklingError) as error:
            place = f"the folder {folder}" if folder.is_dir() else f"{self.source} on the Hugging Face hub"
            reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
            raise UserError(
                f"the {what} of {place} cannot be had ({reason}); check the name and the network, or set "
                "model.pretrained to a folder that holds config, weights and tokenizer."
            ) from error

    def check_whole(self, drawn: list[str]) -> None:
        """See that no weight had to be drawn that the source should hold.

        Raises:
            UserError: naming the first of `drawn`.
        """
        if drawn:
            raise UserError(
                f"the weights of {self.source} lack {sorted(drawn)[0]} in the shape that its config names "
                f"({len(drawn)} such tensors); give a folder whose weights and config belong together, or set "
                "model.pretrained none."
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' report of weights that it draws anew, which are meant to be new, and without its bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

"""Texts that a saved language model writes, token by token, and what each token used in every layer of experts."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.data.pretrained import quiet
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import seed_everything
from unifmoe_dist.studies.run_report.loaded_run import layer_names
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.export import load_exported
from unifmoe_dist.train.own_model import own_config, own_model
from unifmoe_dist.upcycling import moe_layers


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, under the names of Transformers: the most probable, or drawn with `do_sample`."""

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Of `generate`; what only sampling reads is left out where nothing is sampled, as it would be warned of."""
        drawn = ("temperature", "top_k", "top_p")
        values = {name: getattr(self, name) if self.do_sample else None for name in drawn}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample, **values}


@dataclass(frozen=True)
class LayerUse:
    """What one token used in one layer."""

    blocks: float  # C_B, executed blocks
    share: float  # C_B / B: in dense FFNs
    experts: tuple[tuple[int, float], ...]  # (residual) experts, with their gates
    demand: float | None  # alpha; None where nothing is shared
    shared: tuple[int, ...]  # blocks of the shared expert


@dataclass(frozen=True)
class Token:
    """One token of a text; a part of a character that is not whole yet has no text."""

    text: str
    prompt: bool
    layers: Mapping[str, LayerUse]  # empty where nothing was recorded, as of the last token: no layer has seen it

    @property
    def share(self) -> float | None:
        """Mean C_B / B over layers."""
        return sum(use.share for use in self.layers.values()) / len(self.layers) if self.layers else None


@dataclass(frozen=True)
class Written:
    """A prompt with what followed it."""

    tokens: list[Token]
    seconds: float

    @property
    def new(self) -> list[Token]:
        return [token for token in self.tokens if not token.prompt]


@dataclass(frozen=True)
class Writer:
    """A language model with its tokenizer, on its device."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device

    def encode(self, prompt: str, chat: bool) -> Tensor:
        """Token ids (1, T) of a prompt, put into the tokenizer's chat template or as it is.

        Raises:
            UserError: there is nothing to go on from, or no such template.
        """
        if chat:
            if not self.tokenizer.chat_template:
                raise UserError(f"the tokenizer of {self.name} has no chat template; leave --chat out.")
            words = [{"role": "user", "content": prompt}]
            prompt = self.tokenizer.apply_chat_template(words, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)["input_ids"].long()
        if ids.shape[1] == 0:
            raise UserError("a prompt is empty; give at least one word.")
        return ids.to(self.device)

    @torch.no_grad()
    def write(
        self,
        prompt: str,
        sampling: Sampling,
        chat: bool = False,
        record: bool = True,
        show: Callable[[Token], None] = lambda token: None,
    ) -> Written:
        """Go on from a prompt.

        Args:
            prompt: What the text begins with, or with `chat` what the user says.
            sampling: How tokens are chosen.
            chat: Whether the tokenizer's chat template is put around the prompt.
            record: Whether layers note what every token uses; without it nothing is routed twice.
            show: Called with every token once it is known: a recorded one when the next token has been chosen.

        Raises:
            UserError: the prompt is empty, or does not fit into the model's positions with what is to follow.
        """
        ids = self.encode(prompt, chat)
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and ids.shape[1] + sampling.max_new_tokens > positions:
            raise UserError(
                f"a prompt of {ids.shape[1]} tokens and --max_new_tokens {sampling.max_new_tokens} are more than the "
                f"{positions} positions of {self.name}; shorten one of them."
            )
        seed_everything(sampling.seed)
        with recording(self.model, record) as recorders:
            stream = _Stream(self.tokenizer, recorders, show)
            started = time.perf_counter()
            mask = torch.ones_like(ids)
            end = self.tokenizer.eos_token_id
            self.model.generate(
                ids, attention_mask=mask, pad_token_id=end, streamer=stream, use_cache=True, **sampling.arguments()
            )
        return Written(stream.tokens, time.perf_counter() - started)


def load_writer(folder: Path, name: str | None = None) -> Writer:
    """The language model of a run's checkpoint, or of a folder of `save_pretrained`.

    Args:
        folder: Of the run or the model.
        name: Of a run "best" (None), "latest" or "step-N".

    Raises:
        UserError: there is no such folder or checkpoint, or the model in it writes no text.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (folder / "config.yaml").is_file():
        config = load_train_config(str(folder / "config.yaml"))
        task = find_task(config.data.task)
        if not task.next_token:
            raise UserError(
                f"{folder} is a run of data.task {config.data.task}, whose model writes no text; give a run of a "
                "language model."
            )
        config.parallel.gradient_checkpointing = False
        saved = checkpoint.latest(folder, name or "best")
        model: Any = own_model(folder, config)
        checkpoint.load_weights(saved, model)
        tokenizer = task.tokenizer(own_config(folder, config))
    elif (folder / "config.json").is_file():
        from transformers import AutoTokenizer

        if name is not None:
            raise UserError(f"{folder} is a saved model and has no checkpoints; leave --checkpoint {name} out.")
        with quiet():
            model = load_exported(folder)
        if not (hasattr(model, "can_generate") and model.can_generate()):
            raise UserError(f"{folder} holds a {type(model).__name__}, which writes no text; give a language model's.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(f"the tokenizer in {folder} cannot be read ({reason}); save it there too.") from error
    else:
        raise UserError(
            f"{folder} is neither a run nor a saved model; give the folder that a training run, launch/export.py or "
            "save_pretrained wrote."
        )
    return Writer(folder.resolve().name, model.to(device).eval(), tokenizer, device)


# -- what is recorded -------------------------------------------------------------------------------------------------


@dataclass
class _Recorder:
    """Forward pre-hook that routes a layer's tokens once more and notes what each uses."""

    blocks: int  # B
    part: float  # of a dense FFN that one expert is
    seen: list[LayerUse] = field(default_factory=list)

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routing = layer.route(args[0] if args else kwargs["x"])
        shared = getattr(routing, "shared_blocks", None)
        for row, gates in enumerate(routing.gates.tolist()):
            experts = tuple((number, gate) for number, gate in enumerate(gates) if gate)
            own = () if shared is None else tuple(shared[row].nonzero().flatten().tolist())
            count = len(own) + self.part * len(experts) * (self.blocks - len(own))
            demand = None if shared is None else float(routing.shared_demand[row])
            self.seen.append(LayerUse(count, count / self.blocks, experts, demand, own))


@contextmanager
def recording(model: nn.Module, wanted: bool = True) -> Iterator[dict[str, _Recorder]]:
    """Recorders of the model's layers of experts, by names for readers; none where they are not wanted."""
    layers = moe_layers(model) if wanted else {}
    names = layer_names(list(layers))
    recorders = {}
    for path, layer in layers.items():
        config: Any = layer.config
        part = (
            getattr(layer, "expert_dim", config.hidden_dim) / config.hidden_dim
        )  # EMoE's experts are slices of an FFN
        recorders[names[path]] = _Recorder(config.num_blocks, part)
    hooks = [
        layer.register_forward_pre_hook(recorder, with_kwargs=True)
        for layer, recorder in zip(layers.values(), recorders.values(), strict=True)
    ]
    try:
        yield recorders
    finally:
        for hook in hooks:
            hook.remove()


class _Stream:
    """What `generate` hands its tokens to: it makes texts of them, and waits for what layers recorded of each."""

    def __init__(self, tokenizer: Any, recorders: Mapping[str, _Recorder], show: Callable[[Token], None]) -> None:
        self.tokenizer, self.recorders, self.show = tokenizer, recorders, show
        self.tokens: list[Token] = []
        self._ids: list[int] = []
        self._whole = ""  # text of all tokens whose characters are whole
        self._waiting: list[tuple[str, bool]] = []

    def put(self, ids: Tensor) -> None:
        prompt = not self._ids
        for token in ids.flatten().tolist():
            self._waiting.append((self._text(token), prompt))
        if not prompt:
            self._release(len(self._waiting) - 1)

    def end(self) -> None:
        rest = self._decoded()[len(self._whole) :]  # bytes of a character that never became whole
        if self._waiting:
            text, prompt = self._waiting.pop()
            self._waiting.append((text + rest, prompt))
        self._release(len(self._waiting))

    def _release(self, count: int) -> None:
        for text, prompt in self._waiting[:count]:
            place = len(self.tokens)
            uses = {name: r.seen[place] for name, r in self.recorders.items() if place < len(r.seen)}
            self.tokens.append(Token(text, prompt, uses))
            self.show(self.tokens[-1])
        del self._waiting[:count]

    def _text(self, token: int) -> str:
        self._ids.append(token)
        text = self._decoded()
        if text.endswith("\ufffd"):  # in the middle of a character
            return ""
        new, self._whole = text[len(self._whole) :], text
        return new

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

"""Language modelling: the next token of texts in several domains, one of which is held out, scored by perplexity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.brown import GENRES
from unifmoe_dist.data.metrics import PERPLEXITY
from unifmoe_dist.data.task import Batch, Task, TaskData, find_environment, plain, split_seed
from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from unifmoe_dist.data.decoders import Decoder

SCORED = ("validation", "test")

SHARE = 0.1
"""Of every domain's documents that validate; where no domain is held out, as many test."""


class Corpus(Task):
    """Texts in the registry of tasks: Brown's genres, or the domains of `data.root`.

    All training domains are one set, from which windows are drawn in proportion to their tokens.
    """

    title = "Texts"
    num_classes = 49152
    environments: tuple[str, ...] = GENRES
    language = True
    next_token = True
    metric = PERPLEXITY
    ignored = ("model.dropout", "model.drop_path", "data.image_size")
    base_config = "smollm.yaml"
    backbone_sizes = 134.5e6, 576, 1536
    disk_gb = 0.6

    def read(self, config: TrainConfig) -> TaskData:
        from unifmoe_dist.data.packing import Windows, collate_windows

        length, most = config.data.sequence_length, config.data.eval_windows
        decoder, rows = self.decoder(config), self._rows(config)
        vocabulary = _check(decoder, rows, length)
        scored = {part: [Windows(row, length, most) for row in rows[part].values()] for part in SCORED}
        if most is not None and len(rows["test"]) == 1 < len(rows["validation"]):
            scored["test"] = [Windows(row, length, most * len(rows["validation"])) for row in rows["test"].values()]
        return TaskData(
            name=self.name,
            num_classes=vocabulary,
            train=[Windows(rows["train"][self.name], length)],
            validation=[*scored["validation"]],
            test=[*scored["test"]],
            environments=(self.name,),
            collate=collate_windows,
            build_model=decoder.language_model,
            metric=self.metric,
            domains={part: tuple(rows[part]) for part in SCORED},
            tokens=length,
        )

    def _rows(self, config: TrainConfig) -> dict[str, dict[str, np.ndarray]]:
        """Token ids to train on, all in one row, and to validate and test on, by domain."""
        import numpy as np

        from unifmoe_dist.data.packing import split_documents, tokenise_documents
        from unifmoe_dist.data.text_files import read_domains

        held_out, tokenizer = self.held_out(config), self.decoder(config).tokenizer()
        found: dict[str, dict[str, np.ndarray]] = {"train": {}, "validation": {}, "test": {}}
        domains = read_domains(config.data.root)
        for name, texts in ((name, domains[name]) for name in self.domains(config)):
            documents = tokenise_documents(tokenizer, texts)
            if name == held_out:
                found["test"][name] = np.concatenate(documents)
                continue
            shares = (1 - SHARE, SHARE) if held_out else (1 - 2 * SHARE, SHARE, SHARE)
            for part, row in zip(found, split_documents(documents, shares, split_seed(config)), strict=False):
                found[part][name] = row
        return {**found, "train": {self.name: np.concatenate([*found["train"].values()])}}

    def domains(self, config: TrainConfig) -> tuple[str, ...]:
        """Names of the domains that are read."""
        from unifmoe_dist.data.text_files import domain_names

        return domain_names(config.data.root)

    def held_out(self, config: TrainConfig) -> str | None:
        """As of `Task`; "none" holds nothing out, and a part of every domain tests."""
        if plain(config.data.held_out) == "none":
            return None
        names = self.domains(config)
        if len(names) == 1:
            raise UserError(
                f"the texts have one domain, {names[0]}, so none can be held out; set data.held_out none to test on a "
                "part of it."
            )
        return names[find_environment(config.data.held_out, "the texts", names)]

    def decoder(self, config: TrainConfig) -> Decoder:
        """Where backbone and tokenizer come from."""
        from unifmoe_dist.data.decoders import Decoder

        return Decoder(config.model.backbone or "", config.model.pretrained)

    def untrained(self, config: TrainConfig) -> nn.Module:
        return self.decoder(config).untrained()

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        return (config.data.sequence_length,)

    def tokenizer(self, config: TrainConfig) -> Any:
        return self.decoder(config).tokenizer()

    def training_sets(self) -> int:
        return 1

    def offline(self, config: TrainConfig, backbone: Path | None) -> TrainConfig:
        if backbone is None:
            return config
        return replace(config, model=replace(config.model, backbone=str(backbone), pretrained="none"))

    def made_up(self, config: TrainConfig, items: int) -> Batch:
        import torch

        tokens = torch.randint(0, self.num_classes, (items, config.data.sequence_length))
        return {"input_ids": tokens}, tokens


class Genres(Corpus):
    """Four genres of Brown that differ much, for runs of minutes that hold out each in turn."""

    title = "Genres"
    environments = ("news", "religion", "learned", "romance")
    base_config = "genres.yaml"

    def domains(self, config: TrainConfig) -> tuple[str, ...]:
        if missing := set(self.environments).difference(super().domains(config)):
            raise UserError(
                f"data.root {config.data.root} has no genre {min(missing)} of Brown; leave it out, name the Brown "
                "corpus, or set data.task corpus for texts of your own."
            )
        return self.environments


def _check(decoder: Decoder, rows: dict[str, dict[str, np.ndarray]], length: int) -> int:
    """See that the model takes such windows of these tokens; gives the size of its vocabulary.

    Raises:
        UserError: it has too few positions or embeddings, or a domain is too short for a window.
    """
    config = decoder.config()
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        raise UserError(
            f"data.sequence_length {length} is more than the {positions} positions of the model; give at most as many."
        )
    for part, found in rows.items():
        for name, row in found.items():
            if len(row) <= length:
                raise UserError(
                    f"the {part} texts of {name} have {len(row)} tokens, too few for a window of data.sequence_length "
                    f"{length} and its label; give more text, or a smaller data.sequence_length."
                )
    largest = max(int(row.max()) for found in rows.values() for row in found.values())
    if largest >= config.vocab_size:
        raise UserError(
            f"the tokenizer gives token {largest}, but the model has embeddings for {config.vocab_size}; give a "
            "tokenizer and a model that belong together."
        )
    return config.vocab_size

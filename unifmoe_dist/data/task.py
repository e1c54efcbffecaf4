"""What a task says of itself before its data are read, and the one shape that all data take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unifmoe_dist.data.metrics import ACCURACY, Metric
from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from unifmoe_dist.config import TrainConfig

_VOCABULARY = 1000  # the smallest of the encoders have more

Batch = tuple[dict[str, "Tensor"], "Tensor"]
"""Model keyword arguments and the labels ``(N,) int64``."""


@dataclass(frozen=True)
class TaskData:
    """Data, collation and dense backbone of one task.

    Model selection sees ``validation`` only; ``test`` is for the final number. The lists hold map-style
    datasets, one per environment, all sized.

    Attributes:
        name: short name for logs and run folders.
        num_classes: width of the logits.
        train: one dataset per training environment (exactly one for language tasks).
        validation: the out-splits of the training environments.
        test: the held-out environment's in-split, or the test split.
        environments: names of the training environments, in the order of ``train``.
        collate: list of items -> ``(inputs, labels)``; call the model as ``model(**inputs)``.
        build_model: ``build_model()`` -> the dense backbone. It draws its new parameters from torch's global
            generator, so seed that first.
        augment: optional ``augment(item, generator) -> item`` for items of ``train``, before they are collated. The
            item is not changed in place. The generator is on the CPU and the only source of randomness.
        metric: what selects the checkpoint and is reported, computed on each data set as a whole, and over them as it
            says.
        linear_baseline: optional ``linear_baseline(task) -> test score`` of a linear classifier, reported beside the
            run's.
        domains: names of the data sets of "validation" and "test", where each is scored and reported on its own.
        tokens: labels of an item, where every position has one; 0 where an item is of one class.
    """

    name: str
    num_classes: int
    train: list[Dataset]
    validation: list[Dataset]
    test: list[Dataset]
    environments: tuple[str, ...]
    collate: Callable[[list[Any]], Batch]
    build_model: Callable[[], nn.Module]
    augment: Callable[[Any, torch.Generator], Any] | None = None
    metric: Metric = ACCURACY
    linear_baseline: Callable[[TaskData], float] | None = None
    domains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tokens: int = 0


class Task:
    """A task by the value of `data.task`: what is known of it without its data. Register a subclass in `TASKS`.

    Attributes:
        title: Name for readers.
        num_classes: Width of the logits.
        environments: Those that may be held out, one at a time; a task without any has a test split.
        language: Whether inputs are texts.
        next_token: Whether every position is labelled, with the token that follows.
        family: The benchmark that it is a part of, "domainbed" or "glue"; empty for a task of its own, whose runs are
            small enough for CPU cores.
        ignored: Options that it does not take, by dotted name; to give one is refused.
        metric: As of `TaskData`.
        class_names: Of the classes, for readers; None numbers them.
        mean, std: Pixel statistics (of values in 0..1), by channel, with which images were normalised.
        stroke_above: Brightness (0..1) that tells strokes from their background, in images that are made of strokes.
        base_config: Base configuration of a sweep, below configs/; by default the task's name with .yaml.
        learning_rates: Peak learning rates of a sweep, to choose from by validation; none keeps the base
            configuration's.
        method_options: Options that a method has here in place of its own, by method and dotted name.
        backbone_sizes: Parameters of the default backbone, its width d and its FFN's width H, for estimates.
        step_seconds: Seconds of a training step of the dense model and of UniF-MoE on one core of an x86 CPU, measured
            with `base_config`; None where nobody has.
        disk_gb: Size of archives and unpacked files together, about.
    """

    title: str
    num_classes: int
    environments: tuple[str, ...] = ()
    language: bool = False
    next_token: bool = False
    family: str = ""
    ignored: tuple[str, ...] = ()
    metric: Metric = ACCURACY
    class_names: tuple[str, ...] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    stroke_above: float | None = None
    base_config: str = ""
    learning_rates: tuple[float, ...] = ()
    method_options: Mapping[str, Mapping[str, Any]] = {}
    backbone_sizes: tuple[float, int, int] = (0.0, 0, 0)
    step_seconds: tuple[float, float] | None = None
    disk_gb: float = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.base_config = self.base_config or f"{name}.yaml"
        if not self.next_token:  # its texts are no windows
            self.ignored = (*self.ignored, "data.sequence_length", "data.eval_windows")

    def read(self, config: TrainConfig) -> TaskData:
        """The data, cut as the configuration says, and the dense backbone.

        Raises:
            UserError: data or tokenizer are missing or unreadable, or an option does not fit them.
        """
        raise NotImplementedError

    def untrained(self, config: TrainConfig) -> nn.Module:
        """The dense backbone with random weights: what the task builds, without its data and pretrained weights.

        Raises:
            UserError: the backbone's sizes are neither known nor in a folder, and the hub cannot be reached.
        """
        raise NotImplementedError

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        """(channels, height, width) of an image, or (tokens,) of the longest text, as far as known without data."""
        raise NotImplementedError

    def training_sets(self) -> int:
        """Data sets that a step draws from, as far as known without data."""
        return max(1, len(self.environments) - 1)

    def made_up(self, config: TrainConfig, items: int) -> Batch:
        """A batch of noise as large as any; sentences have the longest length that the task takes, without padding."""
        import torch

        size, labels = self.input_size(config), torch.randint(0, self.num_classes, (items,))
        if not self.language:
            return {"x": torch.randn(items, *size)}, labels
        tokens = torch.randint(0, _VOCABULARY, (items, *size))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": tokens * 0}, labels

    def held_out(self, config: TrainConfig) -> str | None:
        """Name of the environment that the configuration holds out, however it was written; None without any.

        Raises:
            UserError: there is no such environment.
        """
        if not self.environments:
            return None
        return self.environments[find_environment(config.data.held_out, self.title, self.environments)]

    def tokenizer(self, config: TrainConfig) -> Any:
        """The tokenizer of a language task."""
        raise NotImplementedError

    def offline(self, config: TrainConfig, backbone: Path | None) -> TrainConfig:
        """Options with which a run opens by itself: weights are its own, so pretrained ones are not asked for.

        Args:
            config: The run's options.
            backbone: Folder of the dense model's config and the tokenizer, where the run has kept them.
        """
        return config

    def prepare(self, archives: Sequence[Path], root: Path | None, progress: bool) -> str:
        """Put official files where `read` finds them, for tasks in `PREPARED`; gives what to tell the user.

        Args:
            archives: The files, where the user names them.
            root: Folder to write to; None takes one that `read` looks in.
            progress: Whether to show it.

        Raises:
            UserError: a file is missing, unreadable or another one than results are of.
        """
        raise NotImplementedError

    def timm_arguments(self, config: TrainConfig) -> dict[str, Any]:
        """What timm needs besides an architecture's name to build a model whose weights have the same names."""
        return {}


def split_seed(config: TrainConfig) -> int:
    """What decides the splits: `data.split_seed`, or the run's seed."""
    return config.seed if config.data.split_seed is None else config.data.split_seed


def find_environment(held_out: str | int, title: str, names: Sequence[str], others: Sequence[str] = ()) -> int:
    """Index of an environment given by name or index; case and punctuation do not matter.

    `title` names the data set, and `others` are further names of the same environments.

    Raises:
        UserError: there is no such environment.
    """
    given = str(held_out)
    for known in (names, others):
        if (wanted := plain(given)) in (spelled := [plain(name) for name in known]):
            return spelled.index(wanted)
    if not isinstance(held_out, bool) and given.isdecimal() and int(given) < len(names):
        return int(given)
    raise UserError(
        f"data.held_out {held_out!r} is no environment of {title}; give --data.held_out one of {', '.join(names)}, or "
        f"an index from 0 to {len(names) - 1}."
    )


def plain(name: str) -> str:
    """Lower case, letters and digits only: "Real World", "real_world" and "RealWorld" are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def logits_of(output: Any) -> Tensor:
    """Logits of a timm model (a tensor) or a Hugging Face one (an output with .logits)."""
    return getattr(output, "logits", output)


def collate_images(items: Sequence[tuple[Tensor, int]]) -> Batch:
    """Stack ``(image (C, H, W), label)`` pairs into ``({"x": (N, C, H, W)}, (N,))``."""
    import torch

    images, labels = zip(*items, strict=True)
    return {"x": torch.stack(images)}, torch.tensor(labels, dtype=torch.int64)

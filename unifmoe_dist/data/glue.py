"""Five tasks of GLUE (Wang et al., 2019) under the paper's protocol: CoLA, MRPC, QNLI, MNLI and RTE.

The official training split trains. GLUE publishes no labels of its test splits, so as in the paper the official
validation split both selects the epoch and is reported: `test` is `validation`, and a test score is the best epoch's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.glue_files import FORMATS, read_glue
from unifmoe_dist.data.language import LanguageTask
from unifmoe_dist.data.metrics import ACCURACY, ACCURACY_AND_F1, MATTHEWS, Metric
from unifmoe_dist.data.task import TaskData

if TYPE_CHECKING:
    from torch import nn

    from unifmoe_dist.data.encoders import Encoder


@dataclass(frozen=True)
class Facts:
    """What GLUE's tasks differ in, besides how they are stored.

    Attributes:
        metric: What GLUE scores it by.
        train, validation: Examples of the two splits (MNLI: matched).
        padded_length: Mean length of a padded batch of 32, in tokens, as far as it can be guessed.
        disk_gb: As of `Task`.
        class_names: Where the files give numbers.
        most_experts: Experts that DynMoE may have at most, as its authors' scripts have it.
    """

    metric: Metric
    train: int
    validation: int
    padded_length: int
    disk_gb: float = 0.01
    class_names: tuple[str, ...] | None = None
    most_experts: int = 16


FACTS = {
    "cola": Facts(MATTHEWS, 8_551, 1_043, 20, class_names=("not acceptable", "acceptable")),
    "mrpc": Facts(ACCURACY_AND_F1, 3_668, 408, 70, class_names=("not equivalent", "equivalent")),
    "qnli": Facts(ACCURACY, 104_743, 5_463, 90, disk_gb=0.05, most_experts=10),
    "mnli": Facts(ACCURACY, 392_702, 9_815, 70, disk_gb=0.4, most_experts=10),
    "rte": Facts(ACCURACY, 2_490, 277, 110),
}


class Glue(LanguageTask):
    """The five tasks in the registry of tasks; `FACTS` and `FORMATS` say what they differ in."""

    family = "glue"
    ignored = ("model.drop_path", "data.image_size")
    backbone_sizes = 333.6e6, 1024, 4096
    learning_rates = (2e-5, 3e-5, 5e-5)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        facts, stored = FACTS[name], FORMATS[name]
        self.title, self.num_classes = stored.folder, len(stored.classes)
        self.class_names, self.metric = facts.class_names or stored.classes, facts.metric
        self.base_config, self.disk_gb = f"glue/{name}.yaml", facts.disk_gb
        # As the authors' GLUE scripts have it (github.com/LINs-lab/DynMoE, github.com/psmiz/MASS).
        most = {"model.num_experts": 8, "model.max_experts": facts.most_experts}
        mass = {"model.num_experts": 8, "model.max_experts": 16, "model.mass_threshold": 0.5}
        self.method_options = {"dynmoe": {**most, "model.adapt_every": "epoch"}, "mass": mass}

    def read(self, config: TrainConfig) -> TaskData:
        return self.encoded(read_glue(self.name, config.data.root), self.encoder(config), config.model.dropout)

    def encoder(self, config: TrainConfig) -> Encoder:
        from unifmoe_dist.data.encoders import GLUE_BACKBONE, Encoder

        return Encoder(config.model.backbone or GLUE_BACKBONE, config.model.pretrained)

    def untrained(self, config: TrainConfig) -> nn.Module:
        return self.encoder(config).untrained(self.num_classes, config.model.dropout)

    def offline(self, config: TrainConfig, backbone: Path | None) -> TrainConfig:
        if backbone is None:
            return config
        return replace(config, model=replace(config.model, backbone=str(backbone), pretrained="none"))

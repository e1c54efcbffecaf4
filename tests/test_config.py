"""Options are checked when they are made; what cannot be is one sentence."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace

import pytest
from pydantic import ValidationError

from unifmoe_dist.config import (
    DataConfig,
    DMDAConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    UniFMoEConfig,
)
from unifmoe_dist.config.named import by_dotted_name, with_options
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.mass import MASSConfig
from unifmoe_dist.methods.topk import TopKConfig
from unifmoe_dist.train.cli import dump_train_config, load_train_config, parse_train_config


@pytest.mark.parametrize(
    "kwargs,words",
    [
        (dict(hidden_dim=30, num_blocks=4), ["30", "4"]),
        (dict(num_blocks=1), ["1", "num_blocks"]),
        (dict(num_experts=0), ["num_experts"]),
        (dict(activation="swish9"), ["swish9", "gelu"]),
        (dict(num_experts=16), ["16", "15"]),
        (dict(hidden_dim=2.5), ["hidden_dim", "2.5"]),
        (dict(shared_demand=0), ["shared_demand", "0"]),
        (dict(shared_demand=1.0), ["shared_demand", "1.0"]),
        (dict(shared_demand=float("nan")), ["shared_demand"]),
        (dict(shared_demand=True), ["shared_demand", "True"]),
        (dict(fixed_experts=0), ["fixed_experts", "0"]),
        (dict(fixed_experts=4), ["fixed_experts", "4", "3"]),
        (dict(fixed_experts=2.0), ["fixed_experts"]),
        (dict(block_choice="random"), ["block_choice", "random"]),
    ],
)
def test_config_errors(kwargs, words):
    with pytest.raises(UserError) as error:
        UniFMoEConfig(**{**dict(model_dim=16, hidden_dim=24, num_experts=3, num_blocks=4), **kwargs})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "make,sentence",
    [
        (lambda: OptimConfig(lr=0), "optim.lr must be above 0, not 0."),
        (lambda: OptimConfig(lr=float("inf")), "optim.lr must be finite and above 0, not inf."),
        (lambda: OptimConfig(lr="fast"), "optim.lr must be a number, not 'fast'."),
        (lambda: OptimConfig(betas=(0.9, 1.5)), "optim.betas must be at least 0 and below 1, not (0.9, 1.5)."),
        (lambda: OptimConfig("adagrad"), "optim.name must be adamw, adam or sgd, not 'adagrad'."),
        (lambda: OptimConfig(rate=1), "there is no option optim.rate; choose from name, lr,"),
        (lambda: DataConfig(task="mnist"), "data.task 'mnist' is not known; choose one of digits, "),
        (lambda: DataConfig(workers=True), "data.workers must be a whole number, not True."),
        (lambda: ModelConfig(layers=[3, "x"]), "model.layers must be a list of whole numbers, not [3, 'x']."),
        (lambda: ModelConfig(adapt_every=-1), "model.adapt_every must be at least 0 or epoch, not -1."),
        (lambda: ModelConfig(adapt_every="day"), "model.adapt_every must be a whole number or epoch, not 'day'."),
        (lambda: ModelConfig(mass_window=1), "model.mass_window must be at least 2 or null, not 1."),
        (lambda: ModelConfig(mass_threshold=0), "model.mass_threshold must be above 0 and at most 1, not 0."),
        (lambda: ModelConfig(moe="gmoe", top_k=7), "model.top_k 7 must be from 1 to model.num_experts 6."),
        (lambda: ParallelConfig(zero_stage=3), "parallel.zero_stage 3 leaves no weight whole on any rank"),
        (
            lambda: ParallelConfig(expert_parallel_size=0),
            "parallel.expert_parallel_size must be at least 1 or auto, not 0.",
        ),
        (lambda: DMDAConfig(expert_dim=3), "algorithm.dmda.expert_dim must be at least 4, not 3."),
        (lambda: TrainConfig(model=3), "model must be a ModelConfig, not 3."),
        (lambda: TrainConfig(seed=2**32), "seed must be at least 0 and at most 4294967295, not 4294967296."),
        (lambda: TrainConfig(output=""), "output is empty; name a folder, or leave it out"),
        (lambda: TrainConfig(output="a\0b"), "output 'a\\x00b' holds a null character"),
        (lambda: TrainConfig(epochs=2, steps=9), "epochs 2 sets steps by passes over the data"),
        (lambda: TrainConfig(data=DataConfig(root="there")), "data.root would change nothing in data.task digits"),
        (lambda: TrainConfig(data=DataConfig(sequence_length=9)), "data.sequence_length would change nothing"),
        (lambda: UniFMoEConfig(16), "hidden_dim must be given."),
        (lambda: UniFMoEConfig(16, 24, 3, 4, "gelu", True, 0), "capacity_factor must be above 0 or null, not 0."),
        (lambda: UniFMoEConfig(16, 24, 3, 4, "gelu", True, None, 2), "shared_demand must be above 0 and below 1 or"),
        (
            lambda: UniFMoEConfig(16, 24, 3, 4, "gelu", True, *[None] * 3, "prefix", 0.1),
            "UniFMoEConfig takes at most 10 values",
        ),
        (lambda: UniFMoEConfig(16, 24, model_dim=16), "model_dim is given twice, by its place and by its name"),
        (lambda: OptimConfig(betas=(0.9,)), "optim.betas must be 2 numbers, not (0.9,)."),
        (lambda: OptimConfig(betas=(0.9, 0.99, 1)), "optim.betas must be 2 numbers, not (0.9, 0.99, 1)."),
        (lambda: TrainConfig(optim={"lr": 1}), "optim must be an OptimConfig, not {'lr': 1}."),
        (lambda: TrainConfig(resume="x"), "resume must be true, false or auto, not 'x'."),
        (lambda: UniFMoEConfig(16, 24, 0), "num_experts must be at least 1, not 0."),
        (lambda: TopKConfig(16, 24, 3, 4, top_k=4), "top_k 4 must be a whole number from 1 to num_experts 3."),
        (lambda: MASSConfig(16, 24, 8, window=1), "window must be at least 2, not 1."),
    ],
)
def test_options_are_checked_when_they_are_made(make, sentence):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)
    assert not isinstance(error.value.__cause__, ValidationError) and error.value.__suppress_context__


def test_what_was_assigned_is_checked_before_training():
    config = TrainConfig()
    config.algorithm.dmda.expert_dim = 1
    with pytest.raises(UserError, match="algorithm.dmda.expert_dim"):
        config.validate(1)
    with pytest.raises(UserError, match="batch_size 16 .* 3 ranks"):
        TrainConfig().validate(3)


def test_dataclasses_as_before():
    config = UniFMoEConfig(16, 24, 3, 4, hidden_dropout=0)
    assert config == UniFMoEConfig(model_dim=16, hidden_dim=24, num_experts=3, num_blocks=4) and len({config}) == 1
    assert replace(config, num_blocks=6).block_dim == 4 and is_dataclass(config)
    assert [field.default for field in fields(UniFMoEConfig)][2:7] == [6, 8, "gelu", True, 0.0]
    with pytest.raises(FrozenInstanceError):
        config.num_blocks = 6
    for made in (config, MASSConfig(16, 24), TrainConfig(output="x", model=ModelConfig(layers=(1, 2)))):
        assert copy.deepcopy(made) == made and pickle.loads(pickle.dumps(made)) == made
        assert with_options(made, by_dotted_name(asdict(made))) == made
    assert UniFMoEConfig.num_experts == 6 and TrainConfig.steps == 800 and ModelConfig(layers=(1,)).layers == [1]


def test_paths_are_taken_for_texts(tmp_path):
    config = TrainConfig(output=tmp_path, data=DataConfig(task="pacs", root=tmp_path / "data"))
    assert (config.output, config.data.root) == (str(tmp_path), str(tmp_path / "data"))
    assert replace(config, output=tmp_path / "b").output == str(tmp_path / "b")


def test_options_change_together_or_not_at_all():
    config = with_options(TrainConfig(), {"model.moe": "emoe", "model.num_experts": 24, "model.top_k": 8})
    assert (config.model.moe, config.model.top_k) == ("emoe", 8)
    assert with_options(config, {"model.moe": "unif", "model.top_k": 30}).model.top_k == 30  # it does not read it
    with pytest.raises(UserError, match="top_k 8"):
        with_options(config, {"model.num_experts": 6})
    with pytest.raises(KeyError):
        with_options(config, {"model.colour": 1})


def test_a_run_that_an_earlier_version_let_pass_opens(tmp_path):
    words = dump_train_config(TrainConfig()).replace("image_size: 224", "image_size: 32")
    (tmp_path / "config.yaml").write_text(words)
    assert load_train_config(str(tmp_path / "config.yaml")) == TrainConfig()
    with pytest.raises(UserError, match="data.image_size would change nothing"):
        parse_train_config(["--config", str(tmp_path / "config.yaml")])

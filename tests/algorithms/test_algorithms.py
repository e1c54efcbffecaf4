"""Training algorithms: each against its equations item by item, on a toy shift, and as a run on real ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unifmoe_dist.algorithms import ALGORITHMS, Algorithm
from unifmoe_dist.algorithms.dmda import SelectiveHead
from unifmoe_dist.config import AlgorithmConfig, DMDAConfig, ModelConfig, TrainConfig
from unifmoe_dist.data.digits import build_digits_vit, digits_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import build
from unifmoe_dist.train.cli import dump_train_config, load_train_config, parse_train_config

GENERALISING = ("lfme", "dmda", "pcmoe")
CLASSES, ENVIRONMENTS = 4, 3
CLOSE = dict(rtol=1e-5, atol=1e-6)


class Toy(nn.Module):
    """The least that the algorithms take a timm model to be."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward_features(self, x):
        return self.body(x).relu()

    def forward_head(self, x, pre_logits=False):
        return x if pre_logits else self.head(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))

    def get_classifier(self):
        return self.head


def make(name: str, make_model=Toy, classes: int = CLASSES, **options) -> Algorithm:
    torch.manual_seed(0)
    config = AlgorithmConfig(name, **options)
    kind = ALGORITHMS[name]

    def adapted():
        return kind.adapt(make_model(), kind.deployed(config))

    return kind(adapted(), ENVIRONMENTS, classes, config, adapted)


def batch(per_environment: int = 5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    count = ENVIRONMENTS * per_environment
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return {"x": torch.randn(count, 12, generator=generator)}, labels


def gradients(loss, module):
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def assert_gradients(loss, module, expected_loss):
    expected = gradients(expected_loss, module)
    assert any(value.abs().max() > 1e-5 for value in expected.values())
    for name, value in gradients(loss, module).items():
        torch.testing.assert_close(value, expected[name], **CLOSE, msg=name)


# -- the equations ------------------------------------------------------------------------------------------------


def test_erm_is_the_task_loss():
    algorithm, (inputs, labels) = make("erm"), batch()
    loss, logits = algorithm(inputs, labels, 0)
    assert torch.equal(loss, F.cross_entropy(algorithm.model(**inputs), labels))
    assert torch.equal(logits, algorithm.model(**inputs)) and not list(algorithm.extra.parameters())


def test_lfme_is_its_equation():
    algorithm, (inputs, labels) = make("lfme"), batch()
    algorithm.guidance_weight = 0.7
    loss, logits = algorithm(inputs, labels, 0)
    task = guidance = 0.0
    expert_losses = [torch.zeros(()) for _ in range(ENVIRONMENTS)]
    for i, (x, y) in enumerate(zip(inputs["x"], labels, strict=True)):
        e = i // 5
        own, target = algorithm.experts[e](x), algorithm.model(x)
        expert_losses[e] = expert_losses[e] - own.log_softmax(-1)[y] / 5
        task = task - target.log_softmax(-1)[y] / 15
        guidance = guidance + (target - own.softmax(-1).detach()).square().sum() / (15 * CLASSES)
    torch.testing.assert_close(loss, task + 0.7 * guidance + sum(expert_losses), **CLOSE)
    torch.testing.assert_close(logits, algorithm.model(**inputs))
    assert_gradients(loss, algorithm.model, task + 0.7 * guidance)
    for e in range(ENVIRONMENTS):  # an expert learns from its own environment, and nothing from the model
        assert_gradients(loss, algorithm.extra["experts"][e], expert_losses[e])
    first = [dict(expert.named_parameters())["body.weight"] for expert in (algorithm.model, *algorithm.experts)]
    assert all(not torch.equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize("step", [0, 700])
def test_dmda_is_its_equation(step):
    options = DMDAConfig(channel_ratio=0.3, scorer_weight=2.0, temperature=3.0, expert_dim=8, approximator_dim=8)
    algorithm, (inputs, labels) = make("dmda", dmda=options), batch()
    loss, logits = algorithm(inputs, labels, step)
    head, extra = algorithm.model.head, algorithm.extra
    learning = alignment = 0.0
    for i, (x, y) in enumerate(zip(inputs["x"], labels, strict=True)):
        z = algorithm.model.forward_features(x)
        kept = sorted(range(16), key=lambda c, y=y: -head.scorer.weight[y, c].item())[: int(16 * 0.3)]
        mask = torch.tensor([float(c in kept) for c in range(16)])
        semantics = extra["expert"](z * mask)
        pair = z * mask + extra["embedding"]((semantics / 3.0).softmax(-1)) * mask
        for weight, logit in ((1.0, head.classifier(z * mask)), (1.0, semantics), (2.0, head.scorer(z))):
            learning = learning - weight * logit.log_softmax(-1)[y] / 15
        alignment = alignment - extra["approximator"](pair).log_softmax(-1)[i // 5] / 15
    torch.testing.assert_close(loss, learning + alignment, **CLOSE)
    strength = 2 / (1 + math.exp(-step / 1000)) - 1
    assert_gradients(loss, extra["approximator"], alignment)  # learns to tell environments apart,
    for part in (algorithm.model, extra["expert"]):  # and what is below it to prevent that
        assert_gradients(loss, part, learning - strength * alignment)
    torch.testing.assert_close(logits, algorithm.model(**inputs))  # as deployed: the labels do not leak


def test_a_selective_head_depends_on_the_item_alone():
    torch.manual_seed(0)
    head = SelectiveHead(nn.Linear(16, CLASSES), 0.25)
    features = torch.randn(9, 16)
    masks = head.mask(torch.arange(CLASSES))
    assert masks.sum(-1).tolist() == [4.0] * CLASSES and len(masks.unique(dim=0)) > 1
    torch.testing.assert_close(head(features), torch.cat([head(row[None]) for row in features]))
    chosen = head.mask(head.scorer(features).argmax(-1))
    changed = features + 0.01 * (1 - chosen)  # too little to change the scorer's mind
    assert torch.equal(head.scorer(features).argmax(-1), head.scorer(changed).argmax(-1))
    torch.testing.assert_close(head(changed), head(features))


def test_pcmoe_is_its_equation():
    algorithm, (inputs, labels) = make("pcmoe"), batch()
    algorithm.options.expert_weight, algorithm.options.consistency_weight = 0.5, 0.8
    loss, logits = algorithm(inputs, labels, 0)
    experts, gate, model = algorithm.extra["experts"], algorithm.extra["gate"], algorithm.model
    task = gating = consistency = 0.0
    own_losses = [torch.zeros(()) for _ in range(ENVIRONMENTS)]
    for i, (x, y) in enumerate(zip(inputs["x"], labels, strict=True)):
        e, z = i // 5, model.forward_features(x)
        others = [other for other in range(ENVIRONMENTS) if other != e]
        weights = gate(z.detach())[others].softmax(-1)
        mixture = sum(w * experts[o](z).detach().softmax(-1) for w, o in zip(weights, others, strict=True))
        prediction = model(x).log_softmax(-1)
        task = task - prediction[y] / 15
        own_losses[e] = own_losses[e] - experts[e](z).log_softmax(-1)[y] / 15
        gating = gating - mixture[y].log() / 15
        p = mixture.detach()
        consistency = consistency + (p * (p.log() - prediction)).sum() / 15
    learning = task + 0.5 * sum(own_losses) + 0.8 * consistency
    torch.testing.assert_close(loss, learning + gating, **CLOSE)
    torch.testing.assert_close(logits, model(**inputs))
    assert_gradients(loss, model, learning)
    assert_gradients(loss, gate, gating)
    for e in range(ENVIRONMENTS):
        assert_gradients(loss, experts[e], 0.5 * own_losses[e])


# -- any backbone, any task ---------------------------------------------------------------------------------------


def shifted(environment_seed: int, count: int, seed: int):
    """Classes in the first channels, an environment's own offset and class-dependent habit in the others."""
    world = torch.Generator().manual_seed(99)
    prototypes = 2 * torch.randn(CLASSES, 6, generator=world)
    habits = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(environment_seed))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    x = torch.cat([prototypes[labels], habits[labels]], dim=1) + 0.7 * torch.randn(count, 12, generator=generator)
    return x, labels


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_learns_under_a_shift(name):
    algorithm = make(name)
    optimizer = torch.optim.Adam(algorithm.parameters(), lr=1e-2)
    unseen, unseen_labels = shifted(1000, 400, seed=7)

    def accuracy():
        with torch.no_grad():
            return float((algorithm.model(unseen).argmax(-1) == unseen_labels).float().mean())

    before = accuracy()
    for step in range(60):
        parts = [shifted(e, 8, seed=100 * step + e) for e in range(ENVIRONMENTS)]
        loss, _ = algorithm({"x": torch.cat([x for x, _ in parts])}, torch.cat([y for _, y in parts]), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.5 and accuracy() > 0.8  # chance is 0.25


@pytest.mark.parametrize("backbone", ["digits", "test_vit", "test_resnet", "test_convnext"])
@pytest.mark.parametrize("name", GENERALISING)
def test_any_timm_backbone(backbone, name):
    import timm

    def make_model():
        if backbone == "digits":
            return build_digits_vit(embed_dim=16, depth=1, num_heads=2)
        return timm.create_model(backbone, num_classes=10)

    algorithm = make(name, make_model, classes=10)
    algorithm.model.eval()  # batch norms would differ between the two ways to the logits
    images = torch.randn(6, 1, 16, 16) if backbone == "digits" else torch.randn(6, 3, 64, 64)
    if backbone == "test_vit":
        images = torch.randn(6, 3, 160, 160)
    loss, logits = algorithm({"x": images}, torch.arange(6), 500)
    torch.testing.assert_close(logits, algorithm.model(images), rtol=1e-4, atol=1e-5)
    loss.backward()
    unused = [n for n, p in algorithm.named_parameters() if p.requires_grad and p.grad is None]
    assert loss.isfinite() and not unused  # ZeRO wants a gradient for every parameter
    names = [name for name, _ in algorithm.named_parameters(remove_duplicate=False)]
    assert len(names) == len(list(algorithm.parameters())) and all(n.startswith(("model.", "extra.")) for n in names)


@pytest.mark.parametrize("name", ["dmda", "pcmoe"])
def test_a_model_without_features_is_refused(name):
    with pytest.raises(UserError, match=f"{name}.*forward_features.*Linear"):
        make(name, lambda: nn.Linear(12, CLASSES))
    wrapped = Toy()
    wrapped.head = nn.Sequential(wrapped.head)
    with pytest.raises(UserError, match=f"{name}.*linear classifier.*Sequential"):
        make(name, lambda: wrapped)


def test_a_single_environment_is_refused():
    task = digits_task()
    single = dataclasses.replace(task, name="cola", train=task.train[:1])
    for name in GENERALISING:
        config = TrainConfig(algorithm=AlgorithmConfig(name), model=ModelConfig(moe="none"))
        with pytest.raises(UserError, match=f"algorithm.name {name} .*two training environments.*cola has 1"):
            build.build_algorithm(config, single)
    build.build_algorithm(TrainConfig(model=ModelConfig(moe="none")), single)


def test_an_uneven_batch_is_refused():
    inputs, labels = batch()
    with pytest.raises(ValueError, match="14 items"):
        make("lfme")({"x": inputs["x"][:14]}, labels[:14], 0)


@pytest.mark.parametrize(
    "option,value",
    [
        ("lfme.guidance_weight", "-1"),
        ("dmda.channel_ratio", "0"),
        ("dmda.channel_ratio", "1.5"),
        ("dmda.temperature", "0"),
        ("dmda.scorer_weight", ".nan"),
        ("dmda.expert_dim", "1"),
        ("dmda.warmup_steps", "-3"),
        ("pcmoe.expert_weight", ".inf"),
        ("pcmoe.consistency_weight", "-1"),
    ],
)
def test_options_out_of_range(option, value):
    with pytest.raises(UserError, match=f"algorithm.{option}"):
        parse_train_config([f"--algorithm.{option}", value]).validate(1)


def test_options_on_the_command_line_and_in_a_file(tmp_path):
    config = parse_train_config(["--algorithm.name", "dmda", "--algorithm.dmda.channel_ratio", "0.75"])
    assert config.algorithm.dmda == DMDAConfig(channel_ratio=0.75)
    (tmp_path / "c.yaml").write_text(dump_train_config(config))
    assert load_train_config(str(tmp_path / "c.yaml")) == config

"""Estimates of memory equal what real steps take, and the configurations fit where they are said to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.support.jobs import run_job
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import tile_sizes, use_kernels
from unifmoe_dist.studies.memory import budget as memory
from unifmoe_dist.studies.memory.deepspeed_memory import Group
from unifmoe_dist.studies.memory.fake_step import KINDS, fake_storage, sizes_of_algorithm, task_of_sizes, variants
from unifmoe_dist.studies.memory.measured_peak import check
from unifmoe_dist.studies.memory.stand_ins import Load, standing_in
from unifmoe_dist.studies.meters import Ledger, LiveBytes
from unifmoe_dist.train import build, deepspeed
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.upcycling import moe_layers

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
NOT_RUNS = {"digits-comparison.yaml"}  # options of a sweep's runs on the CPU
PACS = ["--config", str(ROOT / "configs/domainbed/pacs.yaml")]
COLA = ["--config", str(ROOT / "configs/glue/cola.yaml")]


def config_of(*words: str) -> TrainConfig:
    return parse_train_config(list(words))


# -- against real steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, words",
    [
        (1, ["--parallel.gradient_checkpointing", "true", "--parallel.precision", "bf16"]),
        (2, ["--parallel.zero_stage", "2", "--parallel.gradient_accumulation", "2", "--data.batch_size", "32"]),
        (2, ["--parallel.expert_parallel_size", "2", "--data.batch_size", "32"]),
    ],
    ids=["zero-1, bf16, checkpointing", "zero-2, accumulation, 2 ranks", "zero-1, experts over 2 ranks"],
)
def test_estimates_are_within_ten_percent_of_measured_peaks(ranks, words):
    found = check(config_of(*words), ranks)
    assert found.measured > 8 * 2**20
    # Tokens are taken to be spread evenly over experts, so the mean of ranks that hold different ones is estimated.
    assert found.estimated == pytest.approx(sum(found.ranks) / ranks, rel=0.1)
    if "--parallel.expert_parallel_size" not in words:
        assert 0.9 < found.ratio < 1.1, f"estimated {found.estimated}, measured {found.measured}"


def kept_and_peak(layer: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that are kept after a forward pass, and the most during forward and backward pass."""
    ledger = Ledger()
    live = LiveBytes(ledger)
    for tensor in (*layer.parameters(), x):
        live.ignore(tensor)
    with live:
        y = layer(x)
        kept = sum(ledger.live.values())
        y.backward(torch.ones_like(y))
    return kept, ledger.highest


@pytest.mark.parametrize(
    "dtype,more",
    [
        (torch.float32, dict()),
        (torch.bfloat16, dict()),
        (torch.float32, dict(hidden_dropout=0.1)),
        (torch.float32, dict(gated=True, activation="silu")),
    ],
)
def test_the_stand_in_takes_the_memory_of_the_cpu_kernels(dtype, more):
    torch.manual_seed(0)
    layer = UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=4, **more)).to(dtype)
    x = torch.randn(3000, 64, dtype=dtype, requires_grad=True)
    routing = layer.route(x)
    load = Load(routing.shared_block_count.float().mean().item(), routing.expert_count.float().mean().item())
    layer(x)  # the statistics' own tensor stays
    real = kept_and_peak(layer, x)
    with standing_in(layer, load, gpu=False, ranks=1):
        stood = kept_and_peak(layer, x)
    assert stood == pytest.approx(real, rel=0.05)


INTERPRETED = """
import tests.support.triton  # quickens the interpreter
import torch
from torch.autograd.graph import saved_tensors_hooks
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.studies.memory.stand_ins import Load, kernels_without_launches, standing_in
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.kernels.triton import ffn

taken = []

def recorded(module):
    class Workspace(module.Workspace):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            shape = self.shape
            groups = shape.experts * shape.blocks
            taken.append((len(self.rows), self.tiles, shape.width, groups, self.total.numel(), self.fillings))

    def make_plan(*arguments):
        plan = made(*arguments)
        taken.append(sum(t.numel() for t in vars(plan).values() if torch.is_tensor(t)))
        return plan

    made = module.make_plan
    module.Workspace, module.make_plan = Workspace, make_plan

def saved(module, x):
    sizes = []
    with saved_tensors_hooks(lambda t: (sizes.append((t.numel(), t.dtype)), t)[1], lambda t: t):
        y = module(x)
    y.sum().backward()
    buffers = taken[:]
    taken.clear()
    assert len(buffers) == 4
    return sizes, buffers

copy = kernels_without_launches()["unifmoe_dist.kernels.triton.ffn"]
assert copy is not ffn
recorded(ffn), recorded(copy)
for blocks, gated in ((2, False), (4, False), (2, True)):  # those of 256 channels are cut in two, gated ones in four
    layer = UniFMoELayer(UniFMoEConfig(32, 512, num_experts=2, num_blocks=blocks, gated=gated))
    x = torch.randn(40, 32, requires_grad=True)
    with use_kernels("triton"):
        real = saved(layer, x)
    with standing_in(layer, Load(0, 0), gpu=True, ranks=1):
        stood = saved(layer, x)
    assert stood == real, (stood, real)
from unifmoe_dist.kernels.triton import routing
assert routing.triton_route is not kernels_without_launches()[routing.__name__].triton_route
"""


def test_the_stand_in_takes_the_memory_of_the_gpu_kernels():
    """In Triton's interpreter: the tensors that are kept for the backward pass, and the buffers of both passes."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("gated", [False, True])
def test_gpu_kernels_keep_channels_for_a_backward_pass_alone(gated):
    """As many as a dense FFN keeps, or as were allowed; checkpoints and evaluation keep none."""
    layer = UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=4, gated=gated))
    x = torch.randn(3000, 64, requires_grad=True)

    def live(call, **options):
        ledger = Ledger()
        with standing_in(layer, Load(0, 0), gpu=True, ranks=1), use_kernels("triton", **options), LiveBytes(ledger):
            y = call()  # noqa: F841, its history lives
            return sum(ledger.live.values()), ledger.highest

    def evaluate():
        with torch.no_grad():
            return layer(x)

    live(evaluate)  # the statistics' own tensor stays
    dense = (2 + gated) * 3000 * 256 * 4
    without, _ = live(lambda: layer(x), kept_bytes=0)
    assert 0.99 * dense < live(lambda: layer(x))[0] - without <= dense
    assert live(lambda: layer(x), kept_bytes=10**6)[0] - without <= 10**6
    assert live(lambda: checkpoint(layer, x, use_reentrant=False))[0] < 3 * x.nbytes
    assert live(evaluate) == live(evaluate, kept_bytes=0)


def test_a_fake_model_takes_the_memory_of_a_real_one():
    config = config_of("--model.moe", "none")
    task = task_of_sizes(config)
    images = task.collate([*range(8)])[0]["x"]
    real = kept_and_peak(task.build_model(), images)
    with torch.device("meta"):
        model = task.build_model()
    with FakeTensorMode():
        fake_storage(model)
        fake = kept_and_peak(model, torch.empty(images.shape))
    assert fake == real


# -- what is counted --------------------------------------------------------------------------------------------------


def test_released_storages_leave_the_ledger():
    ledger = Ledger()
    with LiveBytes(ledger) as live:
        a = torch.ones(100)
        b = a[:50]  # a view takes nothing
        live.relabel(a, "gradients")
        del a
        assert ledger.live["gradients"] == 400
        del b
        c = torch.ones(10)
    assert ledger.live["gradients"] == 0 and ledger.live["activations"] == 40 == c.nbytes
    assert ledger.highest == 400 and ledger.peak["activations"] == ledger.most["gradients"] == 400


def test_a_model_that_asks_whether_its_mask_is_all_ones():
    """Transformers 4.57's BERT does, of values that an estimate does not have."""
    mask = torch.ones(2, 3)
    with LiveBytes(Ledger()):
        assert torch.all(mask == 1)
    with FakeTensorMode(), LiveBytes(Ledger()):
        assert not torch.all(torch.ones(2, 3) == 1)


@pytest.mark.parametrize("moe", ["unif", "none", "topk", "gmoe", "emoe", "emoe_learn", "dynmoe", "mass"])
def test_every_layer_is_counted_exactly(moe):
    """The weights of a rank that holds half of the experts."""
    config = config_of("--model.moe", moe, "--model.num_experts", "4", "--parallel.zero_stage", "0")
    algorithm = sizes_of_algorithm(config, task_of_sizes(config), 1)
    experts = [p for layer in moe_layers(algorithm).values() for p in layer.experts.parameters()]
    halved = replace(config, parallel=replace(config.parallel, expert_parallel_size=2))
    result = memory.estimate(halved, ranks=2)
    assert result.parameters == trained(algorithm) - sum(p.numel() for p in experts) // 2
    assert result.most["weights"] >= 4 * result.parameters
    assert result.most["activations"] > 0


def test_a_model_of_sizes_has_the_parameters_of_the_real_one():
    config = config_of("--algorithm.name", "lfme")
    task = task_of_sizes(config)
    assert trained(sizes_of_algorithm(config, task, 1)) == trained(build.build_algorithm(config, task))


def trained(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_stages_divide_what_they_say():
    config = config_of("--parallel.zero_stage", "2", "--parallel.precision", "bf16")
    one, four = memory.estimate(config, 1), memory.estimate(config, 4)
    for kind in ("master weights", "optimiser states"):
        assert four.most[kind] == pytest.approx(one.most[kind] / 4, rel=1e-3)
    assert one.most["weights"] == pytest.approx(2 * one.parameters, rel=1e-3)
    assert one.most["master weights"] == pytest.approx(4 * one.parameters, rel=1e-3)
    assert one.most["optimiser states"] == pytest.approx(8 * one.parameters, rel=1e-3)
    offloaded = memory.estimate(replace(config, parallel=replace(config.parallel, offload_optimizer=True)))
    assert not offloaded.most["master weights"] and not offloaded.most["optimiser states"]
    assert offloaded.host["optimiser states"] == one.most["optimiser states"]
    assert offloaded.peak < one.peak


def test_partitions_cover_a_group():
    group = Group([torch.nn.Parameter(torch.empty(n)) for n in (5, 11, 1, 6)], False, replicas=4, decayed=True)
    assert group.aligned == 24 and group.partition == 6
    owners = group.owners()
    assert [list(touched) for _, touched, _ in owners] == [[0], [0, 1, 2], [2], [2, 3]]
    assert sum(sum(parts) for _, _, parts in owners) == group.size


def test_the_gradient_bucket_is_no_larger_than_the_gradients():
    model = torch.nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    assert deepspeed.reduce_bucket(model) == 12
    with torch.device("meta"):
        assert deepspeed.reduce_bucket(torch.nn.Linear(30_000, 30_000)) == deepspeed.REDUCE_BUCKET


# -- one RTX 3090 -----------------------------------------------------------------------------------------------------


@cache
def needed(key: str) -> float:
    """GiB of the configuration of that text, with margin and context."""
    config = CONFIG_OF_KEY[key]
    return memory.Budget(24 * memory.GIB, True, 1).needed(memory.estimate(config)) / memory.GIB


CONFIG_OF_KEY: dict[str, TrainConfig] = {}


def each_run(path: Path):
    """The dearest of each kind in `make test`; the others have as much room."""
    dearest = path.stem in ("vlcs", "cola", "language-64-experts", "smollm", "digits")
    return pytest.param(path, marks=[] if dearest else pytest.mark.slow, id=path.stem)


@pytest.mark.parametrize("path", [each_run(path) for path in CONFIGS if path.name not in NOT_RUNS])
def test_configurations_fit_an_rtx_3090(path):
    config = config_of("--config", str(path))
    environments = len(task_of_sizes(config).train)
    data, optim = config.data, config.optim.name
    what = (config.model, config.parallel, data.batch_size, data.image_size, optim, environments)
    kind = find_task(data.task).family or data.task
    key = repr((*what, kind))
    CONFIG_OF_KEY.setdefault(key, config)  # data sets that differ in their classes only are estimated once
    assert needed(key) < 24


@pytest.mark.parametrize("moe, millions", [("unif", 34.19), ("none", 20.66)])
def test_the_papers_parameters(moe, millions):
    """N of the paper's cost table, on VLCS, in units of 2**20."""
    config = config_of("--config", str(ROOT / "configs/domainbed/vlcs.yaml"), "--model.moe", moe)
    counted = trained(sizes_of_algorithm(config, task_of_sizes(config), 1))
    assert counted / 2**20 == pytest.approx(millions, abs=0.005)


# -- for people -------------------------------------------------------------------------------------------------------


def test_the_command_shows_every_variant(tmp_path):
    words = ["--estimate", "--num-gpus-per-node", "2", "--gpu-memory-gb", "1.5", "--parallel.expert_parallel_size", "2"]
    job = run_job(tmp_path, 1, words)
    assert job.statuses == [0], job.output
    assert "each of 2 ranks (expert-parallel size 2)" in job.output
    for kind in (*KINDS, "CUDA context"):
        assert kind in job.output
    assert "fits into 1.5" in job.output
    rows = [line.split()[:3] for line in job.output.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 10 and ["2", "yes", "yes"] in rows


def test_what_does_not_fit_is_said():
    small = memory.Budget(4 * memory.GIB, True, 1)
    assert "does NOT fit into 4.0" in memory.describe(memory.estimate(config_of(*PACS)), small)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--gpu-memory-gb", "24"], "--gpu-memory-gb belongs to --estimate"),
        (["--estimate", "--num-nodes", "0"], "--num-nodes must be above 0, not 0"),
        (["--estimate", "--num-nodes", "many"], "--num-nodes must be a whole number, not many"),
        (["--estimate", "--num-gpus-per-node", "5"], "batch_size 16 does not divide evenly over 5 ranks"),
        (["--estimate", "--data.task", "cola", "--model.backbone", "nobody/nothing"], "bert-large-cased"),
        (["--estimate", "--data.task", "pacs", "--model.backbone", "resnet"], "is not in timm's registry"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, monkeypatch):
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        import train
    finally:
        sys.path.pop(0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=sentence):
        train.main(words)


def test_known_encoders_need_no_network(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "AutoConfig", None)  # it would ask the hub, and again and again without a network
    task = task_of_sizes(config_of(*COLA, "--model.backbone", "google-bert/bert-large-cased"))
    with torch.device("meta"):
        model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) == 333_581_314  # the paper's 333.6 million
    assert model.config.vocab_size == 28996


def test_every_layer_is_taken_to_start_evenly():
    config = config_of()
    with torch.device("meta"):
        layers = moe_layers(build.build_model(config, task_of_sizes(config)))
    assert len(layers) == len(config.model.layers)
    assert all(Load.at_start(layer) == Load(4.0, 3.0) for layer in layers.values())  # B / 2 and K / 2


def test_variants_of_a_run_in_graphs():
    """Activation checkpointing goes without graphs; before, no table of variants came."""
    config = config_of("--parallel.cuda_graphs", "true")
    parallel = [variant.parallel for variant in variants(config)]
    assert len(parallel) == len([*variants(config_of())])
    assert all(one.cuda_graphs != one.gradient_checkpointing for one in parallel)


def test_what_graphs_hold_all_the_time():
    """Gradients of their layers' weights and tokens once more, and rows for a while, which other passes share."""
    config = config_of("--data.batch_size", "8")
    eager = memory.estimate(config)
    graphs = memory.estimate(replace(config, parallel=replace(config.parallel, cuda_graphs=True)))
    layers = moe_layers(sizes_of_algorithm(config, task_of_sizes(config), 1)).values()
    weights = sum(p.nbytes for layer in layers for p in layer.parameters())
    tokens = 3 * len(layers) * eager.items * 5 * 64 * 4  # five tokens of 64 numbers for every image
    scratch = graphs.device["buffers"] - eager.device["buffers"] - weights - tokens
    assert weights > 0 and 0 < scratch <= 2 * tile_sizes.WORKSPACE_BYTES
    assert weights + tokens <= graphs.peak - eager.peak <= weights + tokens + scratch  # at the peak some was there

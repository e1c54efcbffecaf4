"""The other methods' layers against their authors' code: the same tensors, and the numbers that the originals printed.

docs/fidelity.md says how the originals were run. Without the fixed numbers, tests/support/gates.py has the equations.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.fidelity import SHAPE, D, H, K, N, mass, wave, with_weights
from tests.support.original_numbers import ORIGINAL
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.methods.mass import LANGUAGE, OVER, SHORT, VISION, MASSSchedule, mass_schedule
from unifmoe_dist.methods.noisy_top_k import load_importance_loss
from unifmoe_dist.methods.topk import balance_loss
from unifmoe_dist.train.build import layer_options
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.upcycling.convert import build_layer


def results(layer, weight_of_loss=0.0):
    """Output and gradients for the fixed tokens and output gradient, by name."""
    x = wave(N, D, seed=7).requires_grad_()
    y = layer(x)
    ((y * wave(N, D, seed=8)).sum() + weight_of_loss * layer.auxiliary_loss()).backward()
    return {"y": y, "x": x.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}


def assert_like(tensor, sketch):
    flat = tensor.detach().double().flatten()
    norm, total, *entries = sketch
    assert float(flat.norm()) == pytest.approx(norm, rel=2e-5)
    assert float(flat.sum()) == pytest.approx(total, abs=1e-4 * max(norm, 1))
    got = [float(flat[place]) for place in (0, len(flat) // 3, len(flat) - 1)]
    assert got == pytest.approx(entries, abs=2e-5 * max(norm, 1))


def assert_all_like(got, want):
    for name, sketch in want.items():
        if name != "loss":
            assert_like(got[name], sketch)


def applied(step, epoch_steps=None, task_loss=lambda: 0.0):
    return AppliedStep(step, lambda t: t.detach().double().cpu(), task_loss, epoch_steps)


@pytest.fixture
def fixed_noise(monkeypatch):
    monkeypatch.setattr(torch, "randn_like", lambda t, **_: wave(*t.shape, seed=9).to(t))


# -- DynMoE -----------------------------------------------------------------------------------------------------------


def dynmoe(**options):
    layer = build_layer("dynmoe", SHAPE, dict(num_experts=4, max_experts=K, **options), None, "auto")
    return with_weights(layer, {"weight": wave(K, D, seed=5), "thresholds": wave(K, seed=6, scale=0.3) + 0.2})


def test_dynmoe_has_no_temperature_by_default():
    assert dynmoe().router.temperature is None and dynmoe(gate_temperature=True).router.temperature is not None


def test_dynmoe_in_training():
    layer = dynmoe()
    assert torch.bincount(layer.route(wave(N, D, seed=7)).expert_count).tolist() == [6, 22, 9, 3]
    assert_all_like(results(layer), ORIGINAL["dynmoe"])


def test_dynmoe_in_evaluation():
    assert_all_like(results(dynmoe().eval()), ORIGINAL["dynmoe eval"])


def test_dynmoe_with_a_temperature():
    assert_all_like(results(dynmoe(gate_temperature=True)), ORIGINAL["dynmoe temperature"])


def test_dynmoe_gives_a_token_with_one_expert_no_gate_gradient():
    layer = dynmoe()
    x = wave(N, D, seed=7)
    single = x[layer.route(x).expert_count == 1]
    assert len(single) == 22
    layer(single).square().sum().backward()
    assert layer.router.weight.grad.abs().max() < 1e-5 and layer.router.thresholds.grad.abs().max() < 1e-5


def test_dynmoe_loss_is_over_all_slots():
    layer = dynmoe()
    loss = layer.auxiliary_loss()
    loss.backward()
    assert loss.item() == pytest.approx(ORIGINAL["dynmoe loss"]["loss"], rel=1e-6)
    assert_like(layer.router.weight.grad, ORIGINAL["dynmoe loss"]["router.weight"])


def test_dynmoe_removes_and_adds_what_the_original_does():
    layer = dynmoe()
    layer(wave(N, D, seed=7))
    layer.after_step(applied(1))
    want = ORIGINAL["dynmoe adapted"]
    assert layer.active.int().tolist() == want["active"]
    assert_like(layer.router.weight[3], want["weight"])  # it had no tokens, and its slot is taken again
    assert_like(layer.router.thresholds, want["thresholds"])


@pytest.mark.parametrize("epoch_steps", [1, 2, 3, 7, 8])
def test_dynmoe_decides_once_an_epoch_on_its_third_quarter(epoch_steps):
    """As search_glue_no_trainer.py: it records from batch len // 2 on and decides after batch 3 len // 4."""
    layer = dynmoe(adapt_every="epoch")
    seen, decided = [], []
    layer._adapt = lambda step: decided.append((step.step - 1, int(layer.count.sum()))) or []
    for step in range(1, 3 * epoch_steps + 1):
        layer.count[0] += 10 ** ((step - 1) % epoch_steps)  # which steps were counted shows as digits
        layer.after_step(applied(step, epoch_steps))
        seen.append(step)
    first, last = epoch_steps // 2, 3 * epoch_steps // 4
    digits = sum(10**place for place in range(first, last + 1))
    assert decided == [(epoch * epoch_steps + last, digits) for epoch in range(3)]
    with pytest.raises(UserError, match="epoch_steps"):
        layer.after_step(applied(1))


# -- Tutel's noisy top-k: GMoE, EMoE ----------------------------------------------------------------------------------


def gmoe(top_k, **options):
    layer = build_layer("gmoe", SHAPE, dict(num_experts=K, top_k=top_k, **options), None, "auto")
    router = {
        "weight": wave(K, 256, seed=5),
        "projection.weight": wave(256, D, seed=10),
        "projection.bias": wave(256, seed=11),
    }
    return with_weights(layer, router)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_gmoe(top_k, fixed_noise):
    layer, want = gmoe(top_k), ORIGINAL[f"gmoe top-{top_k}"]
    assert_all_like(results(layer, 10), want)
    assert layer.auxiliary_loss().item() == pytest.approx(want["loss"], rel=2e-5)


@pytest.mark.parametrize("method", ["emoe", "emoe_learn"])
def test_emoe(method, fixed_noise):
    layer = build_layer(method, SHAPE, dict(num_experts=4, top_k=2), None, "auto")
    layer = with_weights(layer, {"weight": wave(4, H // 4, D, seed=1, scale=0.4).mean(1)})
    want = ORIGINAL[method]
    assert_all_like(results(layer, 10), want)
    assert layer.auxiliary_loss().item() == pytest.approx(want["loss"], rel=2e-5)


def test_the_load_loss_of_shazeer_et_al_is_an_option(fixed_noise):
    layer = gmoe(2, load_loss="shazeer")
    layer(wave(N, D, seed=7))
    assert layer.auxiliary_loss().item() == pytest.approx(0.008018827, rel=1e-4)  # 29 times Tutel's
    with pytest.raises(UserError, match="tutel or shazeer, not 'switch'"):
        gmoe(2, load_loss="switch")
    assert (
        layer_options(parse_train_config(["--model.moe", "gmoe", "--model.load_loss", "shazeer"]))["load_loss"]
        == "shazeer"
    )


@pytest.mark.tutel
def test_losses_and_gate_of_the_installed_tutel():
    from tutel.gates.cosine_top import CosineTopKGate
    from tutel.impls.losses import gshard_loss
    from tutel.impls.losses import load_importance_loss as theirs

    layer = gmoe(2)
    gate = CosineTopKGate(D, K, k=2, fp32_gate=True)
    with torch.no_grad():
        gate.sim_matrix.copy_(layer.router.weight.T)
        gate.cosine_projector.load_state_dict(layer.router.projection.state_dict())
    x = wave(N, D, seed=7)
    logits = layer.router(x)
    torch.testing.assert_close(logits, gate(x))
    noisy = logits + wave(N, K, seed=9) / K
    strongest = noisy.topk(2).values
    scores = torch.softmax(noisy, 1)
    grads = []
    for loss in (
        load_importance_loss(logits, strongest[:, 1:], 1 / K, "tutel"),
        theirs(torch.softmax(logits, 1), strongest, K, 1.0),
    ):
        grads.append(torch.autograd.grad(loss, layer.router.weight, retain_graph=True)[0])
        assert loss.item() == pytest.approx(2.7478201e-4, rel=1e-5)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(balance_loss(scores), gshard_loss(scores, scores.topk(2).indices))


@pytest.mark.parametrize("tau", [0.5, 0.9])
def test_mass(tau):
    assert_all_like(results(mass(tau)), ORIGINAL[f"mass {tau}"])


def p_value(layer, expert):
    return float(torch.special.ndtr(-layer.drift[expert].sum() / math.sqrt(layer.config.window)))


def test_mass_windows_keep_still_while_an_expert_warms_up():
    layer = mass(0.5, 2, warmup=4, window=6)
    wanted = dict(ORIGINAL["mass p"])
    for t, norm in enumerate((wave(40, seed=12) * 0.5 + 1.5 + torch.arange(40) * 0.03).tolist()):
        norms = [norm, 2 * norm**0.5, norm + 0.1, 0, 0, 0]
        layer._note(torch.tensor(norms))
        if t in wanted:
            assert [p_value(layer, e) for e in range(len(wanted[t]))] == pytest.approx(wanted[t], abs=1e-6)
        if t == 19:  # expert 0 is copied: both warm up, it keeps its window
            layer.active[2] = True
            layer.seen[0] = layer.seen[2] = 0


def test_a_gradient_of_zero_is_an_entry_of_the_window():
    """An expert without tokens has one; counted as missing, it would keep the window from ever being full."""
    layer = mass(0.5, 2, warmup=1, window=3)
    for norm in (1.0, 0.0, 2.0):
        layer._note(torch.tensor([norm, 0.0, 0, 0, 0, 0]))
    assert layer.seen_in_window().tolist() == [3, 3, 0, 0, 0, 0]
    assert float(layer.drift[0, -1]) == pytest.approx(1.0)  # (2 - mean of 1, 0, 2) / their deviation


def test_mass_redundancy_loss():
    layer = mass(0.5)
    layer.source[2], layer.source[3] = 0, 1
    layer.auxiliary_loss().backward()
    assert layer.auxiliary_loss().item() == pytest.approx(ORIGINAL["mass redundancy"]["loss"], rel=1e-5)
    assert_like(layer.router.weight.grad, ORIGINAL["mass redundancy"]["router.weight"])


def test_mass_redundancy_loss_acts_in_the_steps_of_expansion_alone():
    layer = mass(0.5, expansion_steps=3)
    layer.source[2] = 0
    losses = []
    for step in range(1, 6):
        layer(wave(N, D, seed=7)).sum().backward()
        losses.append(layer.auxiliary_loss().item())
        layer.after_step(applied(step))
    assert all(loss > 0 for loss in losses[:3]) and losses[3:] == [0, 0] and layer.progress[2] == OVER
    full = mass(0.5, initial=K, window=2, warmup=0, p_limit=1.1, similarity_limit=1.1, expansion_steps=9)
    full.source[2] = 0
    for step in range(1, 4):  # no slot is free, which ends expansion, but not the loss
        full(wave(N, D, seed=7)).sum().backward()
        full.after_step(applied(step))
    assert full.progress[2] and float(full.auxiliary_loss().detach()) > 0


def test_mass_splits_the_step_as_the_original_does():
    """The source's part. The copy's is the deviation that docs/deviations.md names first."""
    layer = mass(0.9, 2, warmup=3, window=5, expansion_steps=40, p_limit=0.35, similarity_limit=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    want, losses = ORIGINAL["mass split"], []
    for step in range(5):
        x = wave(N, D, seed=100 + step)
        optimizer.zero_grad()
        loss = (layer(x) - torch.roll(x, 1, 1) * 2).square().mean()
        loss.backward()
        optimizer.step()
        before = layer.experts.keys.detach().clone()
        layer.after_step(applied(step + 1))
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(want["losses"], rel=1e-5)
    source, copy = want["pair"]
    assert layer.active.int().tolist() == want["active"] and int(layer.source[copy]) == source
    assert_like(layer.experts.keys[source], want["source keys"])
    assert_like(layer.router.weight[source], want["source router"])
    assert_like(layer.experts.values[source], want["source values"])
    assert_like(layer.experts.keys[0], want["other keys"])
    torch.testing.assert_close(layer.experts.keys[copy], before[source])  # the whole step


def test_mass_stops_expanding_when_its_slots_are_taken():
    """Without trying the last copy again, which could take it back."""
    layer = mass(1.0, initial=K - 1, window=2, warmup=0, p_limit=1.1, similarity_limit=1.1, expansion_steps=50)
    tried = []
    for step in range(1, 8):
        layer(wave(N, D, seed=step)).square().sum().backward()
        layer.after_step(applied(step, task_loss=lambda: tried.append(1) or 0.0))
    assert layer.active.all() and not tried


@pytest.mark.parametrize("untried,trials", [(0, 2), (1, 1), (2, 0)])
def test_mass_tries_its_last_copy_from_the_second_or_third_on(untried, trials):
    layer = mass(1.0, 3, window=2, warmup=1, p_limit=1.1, similarity_limit=1.1, expansion_steps=50, untried=untried)
    tried = []
    for step in range(1, 12):
        layer.zero_grad()
        layer(wave(N, D, seed=step)).square().sum().backward()
        # Worse without the copy, so all copies stay.
        layer.after_step(applied(step, task_loss=lambda: tried.append(1) or float(-layer.active.sum())))
    assert layer.active.all() and len(tried) == 2 * trials


def test_a_copy_that_goes_leaves_nothing_in_its_slot():
    """A new copy there starts with an empty window; and where the copy itself drifted, nothing is copied."""
    layer = mass(1.0, 2, window=2, warmup=0, p_limit=1.1, similarity_limit=1.1, expansion_steps=50)
    for step in range(1, 4):
        layer.zero_grad()
        layer(wave(N, D, seed=step)).square().sum().backward()
        layer.after_step(applied(step))
        if layer.active[2]:
            break
    assert layer.active.tolist() == [True] * 3 + [False] * 3 and not layer.norms[2].any()
    layer.norms[2], layer.drift[2] = 5.0, 5.0
    layer._drifting = lambda cosine: 0
    layer(wave(N, D, seed=9)).square().sum().backward()
    layer.after_step(applied(step + 1))  # the loss is the same without it: it goes, and comes again
    assert layer.active[2] and int(layer.source[2]) == 0 and not layer.norms[2].any() and not layer.drift[2].any()
    layer._drifting = lambda cosine: 2
    layer(wave(N, D, seed=9)).square().sum().backward()
    assert layer.after_step(applied(step + 2)) == []
    assert not layer.active[2] and int(layer.source[2]) == -1


@pytest.mark.parametrize(
    "steps,recipe,want",
    [
        (5001, VISION, (500, 450, 250)),
        (15001, VISION, (1500, 1350, 750)),
        (800, VISION, (80, 200, 100)),
        (2680, LANGUAGE, (268, 241, 134)),
        (1150, LANGUAGE, (115, 103, 57)),
        (780, LANGUAGE, (78, 70, 39)),
        (300, LANGUAGE, (30, 60, 30)),
        (150, SHORT, (15, 13, 7)),
        (10, SHORT, (1, 2, 0)),
    ],
)
def test_windows_of_mass_are_shares_of_the_run(steps, recipe, want):
    """train_mass.py: max(200, 9 %) and max(100, 5 %); search_glue_no_trainer_mass.py: max(60, 9 %) and max(30, 5 %)."""
    assert mass_schedule(steps, recipe) == MASSSchedule(*want)

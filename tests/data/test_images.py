"""What is done to an image before a model sees it."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from unifmoe_dist.data.images import MEAN, STD, EvaluationTransform, TrainingTransform

# -- transforms ---------------------------------------------------------------------------------------------------


def test_evaluation_resizes_directly_and_normalises():
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 30:] = (255, 128, 0)  # left black, right orange: a centre crop would lose the sides
    out = EvaluationTransform(32)(Image.fromarray(pixels))
    assert out.shape == (3, 32, 32) and out.dtype == torch.float32
    normalise = [[(v / 255 - m) / s for v, m, s in zip(c, MEAN, STD, strict=True)] for c in ((0, 0, 0), (255, 128, 0))]
    torch.testing.assert_close(out[:, 5, 5], torch.tensor(normalise[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[:, 5, 26], torch.tensor(normalise[1]), atol=1e-5, rtol=0)


def test_training_augments_from_its_generator_alone():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8))
    augment, before = TrainingTransform(32), torch.get_rng_state()
    views = [augment((image, 5), torch.Generator().manual_seed(seed)) for seed in range(300)]
    again = [augment((image, 5), torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(label == 5 and view.shape == (3, 32, 32) for view, label in views)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(views, again, strict=False))
    assert len({view.numpy().tobytes() for view, _ in views}) == 300
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    colours = torch.stack([view for view, _ in views]) * deviation + mean
    grey = ((colours - colours.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-3).float().mean()
    assert 0.04 < grey < 0.17  # one in ten


def test_half_of_the_views_are_flipped():
    ramp = np.repeat(np.linspace(60, 200, 100)[None, :, None], 100, 0).repeat(3, 2).astype(np.uint8)
    falling = 0
    for seed in range(200):
        view, _ = TrainingTransform(32)((Image.fromarray(ramp), 0), torch.Generator().manual_seed(seed))
        row = view[0, 16]
        falling += bool(row[-1] < row[0])
    assert 75 < falling < 125

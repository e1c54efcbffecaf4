"""What a UniF-MoE run's layers do, as blocks of a page."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unifmoe_dist.studies.figures.maps import patch_figure, text_figure
from unifmoe_dist.studies.figures.usage import coactivation_graph, distribution_figure, gram_figure, load_figure
from unifmoe_dist.studies.page import Block, Cell, Number, Picture, Section, Table
from unifmoe_dist.studies.run_report.sample import label_names, pixels
from unifmoe_dist.studies.run_report.study import RunStudy
from unifmoe_dist.studies.usage.maps import PatchGrid, high_demand, patch_compute, token_means
from unifmoe_dist.studies.usage.study import LayerUsage

IMAGES, SENTENCES = 8, 6
HIGH_SHARE = 0.1
"""Share of the patches that is outlined at most, where their C_B are not all equal."""


def usage_sections(found: RunStudy, prefix: str) -> list[Section]:
    """Distributions, loads, co-activation and router geometry; then where computation goes. Empty without such layers.

    Args:
        found: The run.
        prefix: Begins the names of files, and is unique on the page.
    """
    if not found.usage:
        return []
    tokens = next(iter(found.usage.values())).tokens
    items = "sentences" if found.run.is_text else "images"
    blocks: list[Block] = [
        f"All numbers of this section are over {tokens:,} tokens per layer, from {len(found.sample.places):,} {items} "
        "of the test data, drawn at random. Padding does not count.",
        usage_table(found.usage, f"{prefix}usage", found.run.config.model.num_blocks),
        *(
            Picture(prefix + name, title, caption, draw(found.usage))
            for name, (draw, title, caption) in _PICTURES.items()
        ),
    ]
    maps = _text_maps(found, prefix) if found.run.is_text else _patch_maps(found, prefix)
    return [Section("Shared blocks and residual experts", blocks), Section("Where computation goes", maps)]


def usage_table(usage: Mapping[str, LayerUsage], name: str, num_blocks: int) -> Table:
    """Means and spread of every layer."""
    rows: list[dict[str, Cell]] = [
        {
            "layer": layer,
            "C_B": Number(u.block_compute.mean),
            "C_B (5 %)": Number(u.block_compute.quantiles[0.05], ".3g"),
            "C_B (95 %)": Number(u.block_compute.quantiles[0.95], ".3g"),
            "α": Number(u.shared_demand.mean),
            "b": Number(u.shared_block_count.mean),
            "k": Number(u.expert_count.mean),
            "least load": Number(min(u.expert_load), ".1%"),
            "most load": Number(max(u.expert_load), ".1%"),
            "co-activation": Number(u.mean_pair_coactivation, ".1%"),
            "Gram": Number(u.gram_distance, ".2g"),
        }
        for layer, u in usage.items()
    ]
    caption = (
        f"Means over tokens, layer by layer. C_B counts executed blocks, a dense FFN executes B = {num_blocks}; "
        "beside its mean stand the 5 % and 95 % quantiles. α is the shared demand, b the shared blocks, k the "
        "residual experts. Loads are the fractions of tokens that use the least and the most used residual "
        "expert. Co-activation is the mean, over pairs of residual experts, of the fraction of tokens that "
        "use both. Gram is the loss ‖W*ᵀW* − I‖ of the router."
    )
    return Table(name, caption, rows)


_PICTURES = {
    "distributions": (
        distribution_figure,
        "Distributions over tokens",
        "Each row is a layer, each bar a share of its tokens; the black line is the mean. Wide histograms of "
        "α and C_B mean that the layer spends more on some tokens than on others; a single bar means that it "
        "treats all alike.",
    ),
    "loads": (
        load_figure,
        "Loads",
        "How many tokens use each residual expert, and for how many each block is shared. Bars of equal "
        "height mean balanced use; a bar near 0 is an expert or block that is hardly used. Loads add up to "
        "the mean k and b.",
    ),
    "coactivation": (
        coactivation_graph,
        "Co-activation of residual experts",
        "Experts on a circle. The darker and wider an edge, the more tokens use both of its ends, on one "
        "scale for all panels. The Gram loss is there to make this graph sparse.",
    ),
    "router-gram": (
        gram_figure,
        "Router Gram matrix",
        "Inner products of the router's embeddings; S is the shared one. A white matrix with a red diagonal "
        "of 1 means orthonormal embeddings, which is where the router starts and what the Gram loss holds it "
        "to.",
    ),
}
"""Figures of all layers by the names of their files: how they are drawn, title and caption."""


def demand_threshold(compute: Tensor) -> int:
    """Least C_B that at most `HIGH_SHARE` of the patches reach; the largest there is where more reach even that.

    Beyond all values where they are all equal: then no patch stands out.
    """
    values = compute.unique().tolist()
    if len(values) == 1:
        return int(values[0]) + 1
    few = [v for v in values if high_demand(compute, v).double().mean() <= HIGH_SHARE]
    return int(min(few, default=values[-1]))


def _patch_maps(found: RunStudy, prefix: str) -> list[Block]:
    run = found.run
    grid, names = PatchGrid.of(run.model), label_names(run)
    inputs, labels = found.sample.batch(IMAGES)
    images, titles = pixels(run, inputs["x"]), [names[int(label)] for label in labels]
    blocks: list[Block] = []
    for number, (layer, captured) in enumerate(found.captured.items(), start=1):
        compute = patch_compute(captured, grid)
        threshold = demand_threshold(compute)
        share = float(high_demand(compute, threshold).double().mean())
        outlined = f"Outlined in red: C_B of at least {threshold}, {100 * share:.1f} % of all patches of the sample."
        caption = (
            f"Eight images of the sample, each beside the C_B of its {grid.rows} x {grid.columns} patches: yellow "
            "patches execute most blocks. "
            + (outlined if share else "All patches execute equally many blocks, so none is outlined.")
        )
        figure = patch_figure(images, compute[: len(images)], threshold, titles)
        blocks.append(Picture(f"{prefix}patches-{number}", f"Blocks per patch, {layer}", caption, figure))
    return blocks


def _text_maps(found: RunStudy, prefix: str) -> list[Block]:
    """Some sentences token by token; and the tokens with the highest and lowest mean C_B, of those seen often."""
    run, names, least, shown = found.run, label_names(found.run), 5, 8
    titles = [names[item[-1]] for item in found.sample.items(0, SENTENCES)]
    caption = (
        "Sentences of the sample, token by token, with the true class above. The darker a token and the "
        "larger the number below it, the more blocks it executes; a dense FFN executes "
        f"{run.config.model.num_blocks}."
    )
    blocks: list[Block] = []
    for number, (layer, texts) in enumerate(found.texts.items(), start=1):
        figure = text_figure(texts[: len(titles)], titles)
        blocks.append(Picture(f"{prefix}text-{number}", f"Blocks per token, {layer}", caption, figure))
        every = token_means(texts)
        means = list(every[every["count"] >= least].itertuples())
        rows: list[dict[str, Cell]] = [
            {
                "token": mean.token,
                "mean C_B": Number(mean.block_compute),
                "mean k": Number(mean.expert_count),
                "times seen": Number(mean.count, ",d"),
            }
            for mean in (means if len(means) <= 2 * shown else means[:shown] + means[-shown:])
        ]
        told = (
            f"{layer}: tokens with the highest and the lowest mean C_B among those seen at least {least} times. "
            "numbers.json has every token."
        )
        blocks.append(Table(f"{prefix}tokens-{number}", told, rows))
    return blocks

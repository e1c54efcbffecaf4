"""The peak of real training steps against what `launch/train.py --estimate` says."""

from __future__ import annotations

from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.record import Record

WITHIN, SLACK = 0.1, 64 * 2**20
"""What an estimate may be off by: this share of the peak, and bytes beside it, such as cuBLAS's workspace."""


def check(record: Record, precision: str) -> None:
    name = "DeiT-S" if record.on_card else "digits ViT"
    with record.attempt(f"{name}, {precision}"), device.quiet_tiles():
        import timm  # noqa: F401  named where it is missing

        from unifmoe_dist.config import DataConfig, ModelConfig, ParallelConfig, TrainConfig
        from unifmoe_dist.studies.memory.fake_step import estimate
        from unifmoe_dist.studies.memory.measured_peak import measure_peak

        vision = ModelConfig(pretrained="none", layers=[8, 10], drop_path=0.1)
        model, task, batch = (vision, "pacs", 32) if record.on_card else (ModelConfig(), "digits", 2)
        parallel = ParallelConfig(precision=precision)  # type: ignore[arg-type]
        config = TrainConfig(data=DataConfig(task=task, batch_size=batch), model=model, parallel=parallel)
        peak, load = measure_peak(config)
        estimated = estimate(config, 1, record.on_card, load).peak
        cells = {"model": name, "type": precision, "batch of an environment": batch}
        cells |= {"estimated (MiB)": f"{estimated / 2**20:.0f}", "measured (MiB)": f"{peak / 2**20:.0f}"}
        cells["estimated / measured"] = f"{estimated / peak:.3f}"
        record.row("memory", "Peak memory of training steps, ZeRO 1 on one rank", cells)
        record.numbers[f"{name}, {precision}"] = {"estimated": estimated, "measured": peak}
        text = f"the estimate is {estimated / peak:.3f} of the peak of {peak / 2**20:.0f} MiB"
        record.judge(f"{name}, {precision}", abs(estimated - peak) <= WITHIN * peak + SLACK, text)

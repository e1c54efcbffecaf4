"""One training job, from its options to its summary: launch/train.py and every run of a sweep."""

from pathlib import Path
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import running_ranks, world_size_from_environment
from unifmoe_dist.train.folder import choose_folder
from unifmoe_dist.train.run import check_shared, only_writer, refuse_taken
from unifmoe_dist.train.trainer import Trainer


def train(config: TrainConfig, patience: float) -> tuple[Path, dict[str, Any]] | None:
    """Validate the options, join the job, hold the run's folder and train.

    `patience` is for how many seconds to wait for another job to leave the folder.

    Returns:
        On rank 0 the run's folder and its summary; None on the others, and after a stop signal.

    Raises:
        UserError: the options do not go together, the folder is taken, or the ranks did not find one another.
    """
    world_size = world_size_from_environment()
    config.validate(world_size)
    parallel = config.parallel
    try:
        folder = choose_folder(config)
    except UserError:  # its advice is for a folder that nobody writes into
        refuse_taken(Path(config.output or ""))
        raise
    with running_ranks(
        config.expert_parallel_size(world_size),
        parallel.expert_placement,
        timeout_s=parallel.timeout_s,
        host_timeout_s=parallel.host_timeout_s,
    ) as ranks:
        folder = Path(ranks.share(str(folder)))
        check_shared(folder, ranks)
        with only_writer(folder, ranks, patience) as waited:
            if waited:
                choose_folder(config)  # again: the other job may have gone further
            summary = Trainer(config, ranks, folder).fit()
        return None if summary is None or ranks.rank != 0 else (folder, summary)

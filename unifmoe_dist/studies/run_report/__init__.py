"""What a trained run's layers do, as one page, figures, tables and numbers: `launch/analyze.py`.

write_report([load_run(Path("runs/mine"))], Path("runs/mine/analysis"), StudyOptions(), "how")
"""

from unifmoe_dist.studies.run_report.build import write_report
from unifmoe_dist.studies.run_report.loading import LoadedRun, load_run
from unifmoe_dist.studies.run_report.study import StudyOptions, can_be_diagnosed

__all__ = ["LoadedRun", "StudyOptions", "can_be_diagnosed", "load_run", "write_report"]

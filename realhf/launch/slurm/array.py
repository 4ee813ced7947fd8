"""The batch script of a job array: its tasks run the batch scripts of jobs of one size, each of its own run."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from realhf.base.errors import UserError

ARRAY_SCRIPT = "array.sbatch"


def array_text(texts: Sequence[str], scripts: Sequence[Path], at_most: int | None = None) -> str:
    """Task K runs `scripts[K]`, whose text is `texts[K]`; `at_most` tasks at a time. Raises UserError where the jobs
    ask SLURM for different things: the tasks of an array do not."""
    headers = [[line for line in text.splitlines() if line.startswith("#SBATCH ")] for text in texts]
    for header, script in zip(headers, scripts, strict=True):
        if other := sorted({*header} ^ {*headers[0]}):
            raise UserError(
                f"the runs of an array have one size, and {script.parent.parent.name} differs from "
                f"{scripts[0].parent.parent.name}: {', '.join(other)}; start them by themselves"
            )
    limit = f"%{at_most}" if at_most else ""
    return _TEMPLATE.format(
        header="\n".join([*headers[0], f"#SBATCH --array=0-{len(scripts) - 1}{limit}"]),
        scripts="\n".join(f"    {shlex.quote(str(script))}" for script in scripts),
    )


_TEMPLATE = """\
#!/bin/bash
{header}
scripts=(
{scripts}
)
script=${{scripts[$SLURM_ARRAY_TASK_ID]}}
for try in 1 2 3 4 5; do [ -e "$script" ] && break; sleep 1; done
[ -e "$script" ] && exec /bin/bash "$script"
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
scontrol update JobId="$job" Comment="realhf-directory:$(base64 -w 0 <<< "$SLURMD_NODENAME")"
exit 1
"""

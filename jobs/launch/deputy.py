"""The deputy of a batch script, on another node of its job.

`python -m jobs.launch.deputy RUN_FOLDER BATCH_NODE` starts it. If the node of the batch script
fails, SLURM keeps a job that outlives its nodes until its time limit, without the batch script. The
deputy queries the job's nodes now and then, and before SLURM ends it. If the node of the batch
script has gone, the deputy submits the run as a new job that starts after this one, and cancels
this one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gems.errors import GemsError
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id
from jobs.batch.job import JobId
from jobs.batch.output import report
from jobs.launch.batch import BatchJob
from jobs.launch.elastic import DEPUTY_LOG as LOG
from jobs.launch.elastic import Recovery, own_nodes
from jobs.schedulers.slurm_client.jobs import cancel_jobs

LOOK_EVERY_S = 20.0


def main(argv: list[str]) -> int:
    """Watch until the batch script's node is lost or SLURM ends this step; return the exit code."""
    if len(argv) != 2:
        print("usage: python -m jobs.launch.deputy RUN_FOLDER BATCH_NODE", file=sys.stderr)
        return 2
    folder = RunFolder(Path(argv[0]))
    batch_node = argv[1]
    is_ending = threading.Event()
    # output through srun would be lost with the batch script's node
    with (folder.logs / LOG).open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGTERM, lambda number, frame: is_ending.set())
    nodes: tuple[str, ...] = ()
    while not nodes or batch_node in nodes:
        was_ending = is_ending.wait(LOOK_EVERY_S)
        nodes = own_nodes()
        if was_ending and (not nodes or batch_node in nodes):
            return 0
    try:
        Recovery(folder, BatchJob((str(folder.path),))).replace_job(batch_node)
    except (GemsError, OSError) as error:
        report(f"the batch script's node {batch_node} is lost; the run does not go on: {error}")
        return 1
    finally:
        cancel_jobs([JobId.parse(own_job_id() or "").local])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How the processes of a run part."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks

# Without keep_group this hangs before the thirtieth time, mostly before the tenth, where two ranks share a core.
PARTING = """
import os, sys
import torch
from torch import distributed
from draftsmith.train import processes

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rank = int(os.environ["RANK"])
for time in range(100):
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store{time}", rank=rank, world_size=2)
    processes.keep_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    distributed.barrier()
    distributed.destroy_process_group()
    del model
    processes._KEPT.clear()
print("parted")
"""


@pytest.mark.slow
def test_processes_part_a_hundred_times(tmp_path: Path) -> None:
    script = tmp_path / "parting.py"
    script.write_text(PARTING)
    assert run_ranks(2, str(script), [str(tmp_path)], timeout=120).count("parted") == 2

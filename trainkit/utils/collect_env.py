"""Machine information for bug reports: ``python -m trainkit.utils.collect_env``."""

import os
import platform
import sys

import fvcore
import numpy as np
import torch

import trainkit
from trainkit.utils.logger import format_table


def collect_env_info() -> str:
    """A table of versions and hardware."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    cuda = torch.version.cuda or "none"
    facts = {
        "platform": platform.platform(),
        "python": sys.version.replace("\n", ""),
        "trainkit": f"{trainkit.__version__} @ {os.path.dirname(trainkit.__file__)}",
        "torch": f"{torch.__version__} @ {os.path.dirname(torch.__file__)}",
        "numpy": np.__version__,
        "fvcore": fvcore.__version__,
        "CPU": f"{os.cpu_count()} cores (torch uses {torch.get_num_threads()} threads)",
        "CUDA": f"{cuda}, cuDNN {torch.backends.cudnn.version()}, devices {gpus}",
    }
    return format_table(facts.items())


if __name__ == "__main__":
    print(collect_env_info())

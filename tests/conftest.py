"""Settings of the whole suite."""

import torch

# tiny models only lose by more threads, most of all when something else runs on the machine
torch.set_num_threads(1)

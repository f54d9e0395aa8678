"""Loads batches until it is told to end; run as a program in a process group of its own by test_workers.py.

Commands come line by line: "batch" answers with the index of the next one, "pids" with those of the workers,
"terminate" with their exit codes, and "drop" lets go of them.
"""

import multiprocessing
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader

from trainkit.data.build import build_batch_data_loader, worker_init_reset_seed
from trainkit.data.samplers import TrainingSampler


class Slow:
    """The sample of index 7 is never ready."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        while index == 7:
            time.sleep(60)
        return index


def make_loader(kind):
    sampler = TrainingSampler(8, shuffle=False, seed=0)
    if kind == "plain":
        return DataLoader(
            Slow(), sampler=sampler, num_workers=2, worker_init_fn=worker_init_reset_seed
        )
    return build_batch_data_loader(Slow(), sampler, 1, num_workers=2, multiprocessing_context=kind)


def main():
    torch.set_num_threads(1)
    batches = iter(make_loader(sys.argv[1]))
    # now, so that the workers do not inherit it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # as a run that finishes its step first
    for line in sys.stdin:
        workers, command = multiprocessing.active_children(), line.strip()
        if command == "batch":
            print(int(next(batches)[0]), flush=True)
        elif command == "pids":
            print(*(worker.pid for worker in workers), flush=True)
        elif command == "terminate":
            for worker in workers:
                worker.terminate()
                worker.join()
            print(*(worker.exitcode for worker in workers), flush=True)
        else:
            batches = None
            print("dropped", flush=True)


if __name__ == "__main__":
    main()

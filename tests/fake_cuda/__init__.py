"""A "cuda" device on the CPU, on which the tests marked ``cuda`` run where there is no GPU.

`device.cpp` registers guard, memory and a fallback to the CPU's kernels under torch's real CUDA key, so ``is_cuda`` is
true, autograd has its device threads, pinned memory is known as such, and torch's sanitizer (CSAN) can judge the order
of work on streams. `device.py` completes ``torch.cuda`` and is a plugin of pytest. `accept.py` runs all that says if a
GPU works, fake or real; `test_run.py` builds the fake one and runs it there.

A copy into pinned memory that does not block arrives when the host has waited for an event after it; until then the
memory is garbage. It stays garbage if the memory it is copied from is freed before on another stream. A device has
1 GiB. Copies of pageable memory, and reads such as ``x[mask]``, count as waits. A wait for an event of another GPU
than that of the thread is refused. `mutants.py` has faults that these tests must find.

What it cannot show: kernels end before the call returns, graphs are replayed by a recorder, random numbers are those of
the CPU's generator. So speed, most rules of a capture, other reuse of memory, and NCCL are not tested.
"""

"""Compiles the fake device."""

import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension


def build(folder: Path) -> Path:
    """The path of the library, in ``folder``; takes about 10 s."""
    path = folder / "fake_cuda_device.so"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    lib = Path(torch.__file__).parent / "lib"
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-O0",
        "-w",
        "-std=c++20",
        "-DTORCH_EXTENSION_NAME=fake_cuda_device",
    ]
    command += [f"-I{include}" for include in includes] + [
        str(Path(__file__).with_name("device.cpp")),
        "-o",
        str(path),
    ]
    command += [
        f"-L{lib}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
        f"-Wl,-rpath,{lib}",
    ]
    subprocess.run(command, check=True)
    return path

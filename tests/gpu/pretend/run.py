"""Run a command on a pretend H200: `python tests/gpu/pretend/run.py COMMAND …`, with the torch of this interpreter.

Steps are compiled for sm_90 by triton and ptxas, packages are loaded, graphs captured and launched, all through torch's
own CUDA build; kernels alone do nothing, so nothing that is computed means anything. Fails where the command does, or
where it breaks a rule of CUDA's, see `cuda.cpp`. Needs a C++ compiler, and CUDA's headers
from PyPI: `nvidia-cuda-crt`, `nvidia-cuda-cccl`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cuda.cpp")
LIBRARY = "libcuda.so.1"
SITE = """
import os
if os.environ.get("PRETEND_GPU"):
    import torch
    for kind in ("cudnn", "flash", "mem_efficient"):  # whose libraries ask the real driver
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
"""


def main() -> int:
    site, cuda = Path(torch.__file__).parents[1], str(torch.version.cuda)
    headers = site / "nvidia" / f"cu{cuda.split('.')[0]}" / "include"
    if not all((headers / part).is_file() for part in ("crt/host_defines.h", "nv/target")):
        wanted = " ".join(f"'nvidia-cuda-{part}=={cuda}.*'" for part in ("crt", "cccl"))
        print(f"pretend: CUDA's headers are incomplete in {headers}: pip install --no-deps {wanted}")
        return 2
    with tempfile.TemporaryDirectory(prefix="pretend-gpu-") as folder:
        place = Path(folder)
        build(place, headers, site / "torch" / "lib")
        home = place / "cuda"
        (home / "lib64" / "stubs").mkdir(parents=True)
        (home / "include").symlink_to(headers)
        for link, target in (
            ("libcudart.so", next(headers.parent.glob("lib/libcudart.so.*"))),
            ("libcuda.so", place / LIBRARY),
            ("stubs/libcuda.so", place / LIBRARY),
        ):
            (home / "lib64" / link).symlink_to(target)
        (place / "sitecustomize.py").write_text(SITE)
        environment = os.environ | {
            "PRETEND_GPU": "1",
            "LD_PRELOAD": str(place / LIBRARY),
            "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder,
            "TRITON_CACHE_DIR": str(place / "triton"),
            "CUDA_HOME": str(home),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder))),
        }
        run = subprocess.Popen(sys.argv[1:], env=environment, stderr=subprocess.PIPE, text=True, errors="replace")
        assert run.stderr is not None
        num_broken = 0
        for line in run.stderr:
            num_broken += line.startswith("VIOLATION")
            print(line, end="", file=sys.stderr)
        failed = run.wait()
    print(f"pretend: {num_broken} rules broken, exit status {failed}")
    return 1 if failed or num_broken else 0


def build(place: Path, headers: Path, torch_libraries: Path) -> None:
    """Compile the library, with a call that does nothing for every function of cuBLAS that it does not have."""
    library = torch_libraries / "libtorch_cuda.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    known = SOURCE.read_text()
    named = sorted(set(re.findall(r"\b(cublas\w+)", listed.stdout)))
    missing = [name for name in named if not re.search(rf"\b{name}\b", known)]
    others = place / "others.cpp"
    others.write_text("".join(f'extern "C" int {name}(...) {{ return 0; }}\n' for name in missing))
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}", f"-I{headers}"]
    subprocess.run([*command, str(SOURCE), str(others), "-o", str(place / LIBRARY), "-ldl", "-lpthread"], check=True)


if __name__ == "__main__":
    sys.exit(main())

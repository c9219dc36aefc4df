"""One look at one thing this machine has or lacks, each in a process of its own.

``python -m megaring.probes NAME`` prints one JSON object and ends. A package that aborts, hangs or floods the screen on
import therefore costs that process only; ``megaring.doctor`` runs them and judges.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def package(module: str, distribution: str) -> dict[str, Any]:
    """Import ``module``; its version. Raises what the import raises."""
    imported = importlib.import_module(module)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(imported, "__version__", "unknown version"))
    return {"version": version}


def torch_facts() -> dict[str, Any]:
    """torch, the CUDA it was built for, its communication libraries, and the GPUs it can use (or why none)."""
    facts = package("torch", "torch")
    import torch
    import torch.distributed as dist

    facts["cuda_build"] = torch.version.cuda
    facts["gloo"] = dist.is_available() and dist.is_gloo_available()
    facts["nccl"] = None
    if dist.is_available() and dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["gpus"] = []
    facts["no_gpu"] = ""
    if torch.version.cuda is None:
        facts["no_gpu"] = "this torch is built without CUDA"
        return facts
    try:
        torch.cuda.init()
    except Exception as error:
        facts["no_gpu"] = (str(error) or repr(error)).strip().splitlines()[0].split(". ")[0]
        return facts
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        facts["gpus"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "peers": [o for o in range(count) if o != index and torch.cuda.can_device_access_peer(index, o)],
            }
        )
    if count > 1:
        facts["links"] = gpu_links()
    return facts


def gpu_links() -> list[str]:
    """The kinds of connection between GPUs that ``nvidia-smi`` reports (NV18, SYS, ...); empty where it cannot say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    shown = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30)
    return parse_topology(shown.stdout) if shown.returncode == 0 else []


def parse_topology(text: str) -> list[str]:
    """The different entries between two GPUs in the matrix that ``nvidia-smi topo -m`` prints, sorted."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return sorted({entry for row in gpus for entry in row[1 : 1 + len(gpus)] if entry != "X"})


def nvrtc_facts() -> dict[str, Any]:
    """The run-time compiler: its version, whether it makes code for Hopper (``sm_90a``), and what it built so far."""
    facts = package("cuda.bindings.nvrtc", "cuda-bindings")
    from cuda.bindings import nvrtc

    from megaring.kernels.compile import is_built
    from megaring.kernels.specialisations import every_specialisation

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion says {status.name}")
    facts["nvrtc"] = f"{major}.{minor}"
    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    facts["hopper"] = 90 in architectures
    kernels = every_specialisation()
    facts["kernels"] = len(kernels)
    facts["built"] = sum(is_built(each) for each in kernels)
    return facts


def apex_facts() -> dict[str, Any]:
    """Which of the two packages called apex this is: NVIDIA's, or the unrelated one of the Python package index."""
    spec = importlib.util.find_spec("apex")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return {"version": "", "nvidia": False}
    return {**package("apex", "apex"), "nvidia": True, "extensions": importlib.util.find_spec("amp_C") is not None}


def planner_facts() -> dict[str, Any]:
    """Plan one small step, so that NumPy, Numba and its cache are seen to work."""
    from buddyring import plan

    placement = plan([24576, 24576, 14336, 2048], 4)
    return {**package("numba", "numba"), "token_imbalance": placement.token_imbalance}


def attention_facts() -> dict[str, Any]:
    """Each attention backend and each local kernel, fastest first: None where it runs here, else why it does not.

    Asked and tried for one rank, head dimension 128, bf16 on a GPU and fp32 on a CPU.
    """
    import torch

    from buddyring import Placement
    from megaring.attention import attention
    from megaring.backends import MODULES, Request
    from megaring.backends.local import FAMILIES
    from megaring.device_shards import to_device

    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", 0), torch.bfloat16
    q, k, v = (torch.ones(256, heads, 128, device=device, dtype=dtype) for heads in (4, 2, 2))
    shards = to_device(Placement.from_groups([200, 56], 1, [(0, 1), (0, 1)]).shards(0), device)
    request = Request(q, k, v, shards, None, 128**-0.5, True, False)
    backends: dict[str, str | None] = {}
    for name, module in MODULES.items():
        backends[name] = importlib.import_module(module).refusal(request)
        if backends[name] is None:
            out = attention(q, k, v, shards, backend=name)
            if (out.float() - 1).abs().max() > 0.01:  # a mean of ones, whatever the weights
                backends[name] = "computes wrong results on this machine"
    kernels = {}
    for family in FAMILIES:
        module = importlib.import_module(f"megaring.backends.local.{family}")
        kernels[module.NAME] = module.refusal(device, dtype, 128)
    return {"version": "", "device": str(device), "backends": backends, "kernels": kernels}


# What is probed: the top-level module that must be there, and the function that looks.
PROBES = {
    "numba": ("numba", planner_facts),
    "torch": ("torch", torch_facts),
    "attention": ("torch", attention_facts),
    "nvrtc": ("cuda", nvrtc_facts),
    "megatron-core": ("megatron", lambda: package("megatron.core", "megatron-core")),
    "psutil": ("psutil", lambda: package("psutil", "psutil")),
    "pyyaml": ("yaml", lambda: package("yaml", "pyyaml")),
    "tqdm": ("tqdm", lambda: package("tqdm", "tqdm")),
    "datasets": ("datasets", lambda: package("datasets", "datasets")),
    "tokenizers": ("tokenizers", lambda: package("tokenizers", "tokenizers")),
    "wandb": ("wandb", lambda: package("wandb", "wandb")),
    "matplotlib": ("matplotlib", lambda: package("matplotlib", "matplotlib")),
    "transformer-engine": ("transformer_engine", lambda: package("transformer_engine.pytorch", "transformer-engine")),
    "flash-attn-3": ("flash_attn_interface", lambda: package("flash_attn_interface", "flash-attn-3")),
    "flash-attn": ("flash_attn", lambda: package("flash_attn", "flash-attn")),
    "apex": ("apex", apex_facts),
}


def main(name: str) -> None:
    """Print what the probe ``name`` finds: its facts, or ``missing``, or ``broken`` with the error."""
    module, look = PROBES[name]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    answer: dict[str, Any] = {"state": "missing"}
    if found:
        try:
            answer = {"state": "ok", **look()}
        except BaseException as error:  # whatever a broken package raises, SystemExit included, is the answer
            answer = {"state": "broken", "error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    # On a line of its own, since a package may have printed without ending its line.
    print(f"\n{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

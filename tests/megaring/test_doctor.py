import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from megaring.doctor import PROBES, PURPOSES, Finding, examine, interpret, judge, look, report_lines
from megaring.probes import parse_topology

LIGHT = ("megatron", "datasets", "tokenizers", "wandb", "matplotlib", "psutil", "yaml", "tqdm")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """``fake(name, source)`` puts a module in front of the installed one, for the probes' processes alone."""

    def put(name, source, version=None):
        path = tmp_path.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        for folder in [path, *path.parents]:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        (path / "__init__.py").write_text(source)
        if version is not None:
            distribution, number = version
            info = tmp_path / f"{distribution.replace('-', '_')}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}\n")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return put


@pytest.fixture
def hide(tmp_path, monkeypatch):
    """``hide(name)`` makes a module look as if it was not installed."""

    def take_away(*names):
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\n"
            "class Hide:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.split('.')[0] in {names!r}:\n"
            "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
            "sys.meta_path.insert(0, Hide())\n"
        )

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return take_away


def findings(**changes):
    """A machine where everything works and there is one GPU, except for ``changes``."""
    torch = {"gpus": [{"name": "H"}], "no_gpu": "", "gloo": True, "nccl": "2.28", "cuda_build": "13.0"}
    made = {name: Finding(name, "ok", "9.9") for name in PROBES}
    made["torch"] = Finding("torch", "ok", "9.9", facts=torch)
    made["attention"] = Finding("attention", "ok", facts={"backends": {"fused": "not built", "ring": None}})
    made.update({name.replace("_", "-"): finding for name, finding in changes.items()})
    return made


def verdicts(**changes):
    return {verdict.task: verdict for verdict in judge(findings(**changes))}


# ---- what becomes of one package


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import nosuchmodule", "No module named 'nosuchmodule'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os.abort()", "its import ended the process (signal 6)"),
        ("import os, sys; print('driver gone', file=sys.stderr, flush=True); os._exit(5)", "(status 5): driver gone"),
        ("x = 1", "No module named 'torch.distributed'"),
    ],
    ids=["library", "dependency", "exit", "abort", "hard exit", "empty"],
)
def test_a_broken_torch_is_reported_and_not_raised(fake, source, words):
    fake("torch", source)
    found = look("torch")
    assert (found.name, found.state, found.usable) == ("torch", "broken", False)
    assert words in found.detail


def test_the_compiler_tells_how_many_kernels_are_built():
    facts = {"state": "ok", "version": "13.0.3", "nvrtc": "13.0", "hopper": True, "kernels": 8}
    assert (
        interpret("nvrtc", {**facts, "built": 8}).detail == "NVRTC 13.0, compiles for Hopper; 8 of 8 kernels are built"
    )
    assert interpret("nvrtc", {**facts, "built": 0}).detail.endswith(
        "0 of 8 kernels are built (megaring build makes the rest)"
    )


def test_an_import_that_never_ends_is_given_up(fake):
    fake("torch", "import time; time.sleep(100)")
    assert look("torch", timeout=1).detail == "its import did not end within 1 s"


def test_a_missing_package_says_what_for_and_how_to_get_it(hide):
    hide("torch", "apex", "cuda")
    assert look("torch").state == look("nvrtc").state == look("attention").state == "missing"
    assert look("apex").detail == f"for {PURPOSES['apex'][0]}: {PURPOSES['apex'][1]}"


def test_a_package_that_prints_on_import_is_still_read(fake):
    fake("wandb", "print('{\"state\": 1} Welcome', end='')", version=("wandb", "1.2.3"))
    assert (look("wandb").state, look("wandb").version) == ("ok", "1.2.3")


def test_an_old_version_is_refused_with_the_one_needed(fake):
    fake("megatron.core", "", version=("megatron-core", "0.12.0"))
    found = look("megatron-core")
    assert (found.state, found.version) == ("old", "0.12.0")
    assert "at least 0.19.2 is needed" in found.detail


def test_nvidia_apex_is_told_from_the_other_package(fake):
    fake("apex", "raise SystemError('the unrelated package must not even be imported')")
    found = look("apex")
    assert found.state == "unrelated" and "github.com/NVIDIA/apex" in found.detail
    fake("apex", "__version__ = '0.1'")
    fake("apex.multi_tensor_apply", "")
    found = look("apex")
    assert (found.state, found.version, found.detail) == ("ok", "0.1", "NVIDIA's, without its CUDA extensions")


def test_a_folder_in_the_current_directory_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('a folder of runs')")
    monkeypatch.chdir(tmp_path)
    assert "a folder of runs" not in look("wandb").detail


# ---- what follows for the tasks


def test_everything_works():
    assert all(v.possible and not v.reasons for v in judge(findings()))


@pytest.mark.parametrize("name", ["torch", "attention", "megatron-core", "psutil", "pyyaml", "tqdm"])
def test_training_needs_each_of_these_and_planning_none(name):
    said = verdicts(**{name: Finding(name, "broken", detail="no luck")})
    assert said["plan"].possible and said["prepare data"].possible
    for task in ("train on CPU", "train on GPU"):
        assert not said[task].possible and f"{name} is broken (no luck)" in said[task].reasons


def test_without_numba_nothing_goes():
    assert not any(v.possible for v in verdicts(numba=Finding("numba", "missing", detail="x")).values())


@pytest.mark.parametrize("name", ["wandb", "matplotlib", "transformer-engine", "flash-attn", "flash-attn-3", "apex"])
def test_extras_stop_nothing(name):
    assert all(v.possible for v in verdicts(**{name: Finding(name, "missing")}).values())


def test_missing_formats_limit_the_data_but_not_the_task():
    said = verdicts(datasets=Finding("datasets", "missing"))["prepare data"]
    assert said.possible and said.reasons == ("no datasets: not for preparing parquet and JSONL",)


def test_without_a_gpu_the_reason_is_the_drivers():
    facts = {"gpus": [], "no_gpu": "Found no NVIDIA driver", "gloo": True, "nccl": None, "cuda_build": "13.0"}
    said = verdicts(torch=Finding("torch", "ok", facts=facts))
    assert said["train on CPU"].possible
    assert said["train on GPU"].reasons == ("no GPU: Found no NVIDIA driver",) and not said["train on GPU"].possible


def test_communication_libraries_count():
    facts = {"gpus": [{}], "no_gpu": "", "gloo": False, "nccl": None, "cuda_build": "13.0"}
    said = verdicts(torch=Finding("torch", "ok", facts=facts))
    assert said["train on CPU"].reasons == ("torch has no gloo",) and not said["train on CPU"].possible
    assert said["train on GPU"].possible and "one GPU only" in said["train on GPU"].reasons[0]


def test_no_attention_backend_no_training():
    said = verdicts(attention=Finding("attention", "ok", facts={"backends": {"ring": "odd"}}))
    assert said["train on CPU"].reasons == ("no attention backend runs: ring: odd",)


def test_links_between_gpus_are_read_from_the_matrix():
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\n"
        "GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0\n"
        "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tSYS\tSYS\t X \t\t\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing NVLinks\n"
    )
    assert parse_topology(text) == ["NV18", "SYS"]
    assert parse_topology("No devices were found") == []


def test_gpus_are_listed():
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8, "peers": [1]}
    facts = {"version": "2.11.0", "cuda_build": "13.0", "nccl": "2.28.9", "gloo": True, "no_gpu": ""}
    made = findings(torch=interpret("torch", {"state": "ok", **facts, "gpus": [gpu, gpu], "links": ["NV18"]}))
    from megaring.doctor import Report

    kernels = {"fast": "needs a wish", "slow": None}
    made["attention"] = Finding(
        "attention", "ok", facts={"device": "x", "backends": {"ring": None}, "kernels": kernels}
    )
    lines = report_lines(Report("3.12", "m", tuple(made.values()), judge(made)))
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "GPU 1 NVIDIA H200, compute capability 9.0, 139.8 GiB, reaches the memory of GPU 1" in text
    assert "GPU links NV18" in text and "train on GPU yes" in text
    assert "attention: ring yes, on x" in text and "local kernel slow (not fast: needs a wish)" in text


# ---- the command


def doctor(*arguments):
    command = [sys.executable, "-m", "megaring.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)


def test_the_command_without_torch(fake):
    fake("torch", "raise ImportError('no such luck')")
    for name in LIGHT:
        fake(name, "")
    done = doctor("--json")
    assert done.returncode == 1 and done.stderr == ""
    report = json.loads(done.stdout)
    said = {verdict["task"]: verdict for verdict in report["verdicts"]}
    assert said["plan"]["possible"] and not said["train on CPU"]["possible"]
    assert "torch is broken (ImportError: no such luck)" in said["train on CPU"]["reasons"]
    assert {finding["name"] for finding in report["findings"]} == set(PROBES)


def test_the_command_where_training_is_possible(fake):
    torch = pytest.importorskip("torch", reason="training needs torch")
    fake("megatron.core", "", version=("megatron-core", "99.0"))
    for name in LIGHT[1:]:
        fake(name, "")
    done = doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    said = {verdict["task"]: verdict["possible"] for verdict in report["verdicts"]}
    assert said == {
        "plan": True,
        "prepare data": True,
        "train on CPU": True,
        "train on GPU": torch.cuda.is_available(),
    }
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["megatron-core"]["version"] == "99.0"
    assert found["torch"]["version"] == importlib.metadata.version("torch")
    facts = found["torch"]["facts"]
    assert facts["cuda_build"] == torch.version.cuda and len(facts["gpus"]) == torch.cuda.device_count()
    assert bool(facts["no_gpu"]) == (not torch.cuda.is_available())
    facts = found["attention"]["facts"]
    assert facts["backends"]["ring"] is None and facts["backends"]["reference"] is None
    assert facts["kernels"]["plain torch operations"] is None


def test_examine_needs_no_installed_metadata(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    monkeypatch.setattr("megaring.doctor.look", lambda name, timeout: interpret(name, {"state": "missing"}))
    assert not examine().possible("plan")
    assert interpret("wandb", {"state": "ok", "version": "0"}).state == "ok"

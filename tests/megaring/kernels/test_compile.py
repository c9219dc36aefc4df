import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from sass import disassemble, most_registers, reachable

from megaring import cli
from megaring.build import faults, main, table
from megaring.kernels import compile as compiler
from megaring.kernels.compile import Built, CompileError, Report, build, cache_key, is_built, parse_log
from megaring.kernels.specialisations import Specialisation, every_specialisation, forward, unit_kernels

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 72, 216  # csrc/forward_layout.cuh
BACKWARD_PRODUCER_REGISTERS, BACKWARD_CONSUMER_REGISTERS = 56, 224  # csrc/backward_layout.cuh
ALL = [*every_specialisation(), *unit_kernels()]
SMALL = next(each for each in unit_kernels() if each.function == "unit_tma_2d")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ALL, pool.map(lambda each: build(each, folder=folder), ALL), strict=True))


@pytest.mark.parametrize("specialisation", ALL, ids=lambda each: each.label)
def test_nothing_spills_or_is_serialised(specialisation, cubins):
    assert faults(cubins[specialisation]) == []


def test_both_kernels_come_in_every_choice():
    assert len({(each.function, each.defines) for each in every_specialisation()}) == 2 * 2 * 2 * 2


def of(function):
    return [each for each in every_specialisation() if each.function == function]


def roles(cubin, folder, consumer_registers, producer_registers):
    """Machine code that the consumers can reach, and the producers; checks that each keeps within its quota."""
    consumers = reachable(cubin, folder, "USETMAXREG.TRY_ALLOC")
    producers = reachable(cubin, folder, "USETMAXREG.DEALLOC")
    assert most_registers(consumers) <= consumer_registers
    assert most_registers(producers) <= producer_registers
    for code, registers in ((consumers, consumer_registers), (producers, producer_registers)):
        assert any("USETMAXREG" in line and f"0x{registers:x}" in line for line in code)
    return consumers, producers


def check_scopes(code):
    """Words that another GPU may write or read are 64 bits wide and always at system scope; counters have 32 bits."""
    words = [line for line in code if re.search(r"(LDG|STG|ATOMG|REDG|LD|ST|ATOM|RED)\.E\.\S*64\.STRONG", line)]
    assert words and all("STRONG.SYS" in line for line in words)
    for access in ("LDG.E.64.STRONG.SYS", "STG.E.64.STRONG.SYS", "ATOMG.E.CAS.64.STRONG.SYS", "MEMBAR.ALL.SYS"):
        assert any(access in line for line in code), f"no {access}"
    assert not any(re.search(r"\.64\.STRONG\.(GPU|CTA|SM)", line) for line in code)


@pytest.mark.parametrize("specialisation", of("megaring_backward"), ids=lambda each: each.label)
def test_backward_machine_code(specialisation, cubins, tmp_path):
    code = disassemble(cubins[specialisation].cubin, tmp_path)
    cubin = cubins[specialisation].cubin
    consumers, producers = roles(cubin, tmp_path, BACKWARD_CONSUMER_REGISTERS, BACKWARD_PRODUCER_REGISTERS)
    quotas = BACKWARD_PRODUCER_REGISTERS + 2 * BACKWARD_CONSUMER_REGISTERS
    assert 3 * cubins[specialisation].report.registers >= quotas
    check_scopes(code)

    # dK and dV of other ranks' keys are added at system scope, dQ by the copy engine and never by a consumer.
    added = [line for line in code if "REDG.E.ADD.F32" in line]
    assert added and all("STRONG.SYS" in line and line in consumers for line in added)
    assert any("UBLKRED" in line for line in producers) and not any("UBLKRED" in line for line in consumers)

    # In the loop the probabilities are made between the waits for S^T and for dP^T, which runs meanwhile.
    waits = [i for i, line in enumerate(consumers) if "WARPGROUP.DEPBAR" in line]
    hidden = [sum("MUFU.EX2" in line for line in consumers[a:b]) for a, b in pairwise(waits)]
    assert hidden.count(32) == 2, "once for a task's first query tile, once in the loop"


@pytest.mark.parametrize("specialisation", of("megaring_forward"), ids=lambda each: each.label)
def test_forward_machine_code(specialisation, cubins, tmp_path):
    code = disassemble(cubins[specialisation].cubin, tmp_path)
    consumers, _ = roles(cubins[specialisation].cubin, tmp_path, CONSUMER_REGISTERS, PRODUCER_REGISTERS)
    assert 3 * cubins[specialisation].report.registers >= PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS
    check_scopes(code)

    # In the loop the softmax runs between the wait for the scores and the one for P V.
    waits = [i for i, line in enumerate(consumers) if "WARPGROUP.DEPBAR" in line]
    scores = next(i for i in waits if "gsb0, 0x1" in consumers[i])
    values = next(i for i in waits if i > scores)
    assert sum("MUFU.EX2" in line for line in consumers[scores:values]) >= 64


def test_signal_words_have_system_scope(cubins, tmp_path):
    signal = next(each for each in unit_kernels() if each.function == "unit_signal")
    code = disassemble(cubins[signal].cubin, tmp_path)
    assert any("LDG.E.64.STRONG.SYS" in line for line in code) and any("STG.E.64.STRONG.SYS" in line for line in code)


def test_a_second_build_comes_from_the_cache(tmp_path):
    assert not is_built(SMALL, folder=tmp_path)
    first, second = build(SMALL, folder=tmp_path), build(SMALL, folder=tmp_path)
    assert is_built(SMALL, folder=tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.report) == (second.cubin, second.report)
    assert {path.suffix for path in tmp_path.iterdir()} == {".cubin", ".log", ".lock"}, "a temporary file was left"


def test_the_key_tells_sources_options_and_version_apart(monkeypatch):
    keys = [cache_key(each) for each in ALL]
    assert len({(each.source, each.defines) for each in ALL}) == len(set(keys))
    before = cache_key(SMALL)
    monkeypatch.setattr(compiler, "headers", lambda: {"ptx.cuh": "// other"})
    assert cache_key(SMALL) != before
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    assert cache_key(SMALL) != before


def test_a_lock_that_is_never_freed_is_an_error_within_its_bound(tmp_path):
    lock = (tmp_path / cache_key(SMALL)).with_suffix(".lock")
    with (
        compiler._locked(lock, 1.0),  # another open file, as another process would have
        pytest.raises(TimeoutError, match="another process has held"),
    ):
        build(SMALL, folder=tmp_path, lock_seconds=0.2)
    assert not build(SMALL, folder=tmp_path, lock_seconds=5.0).cached


def test_of_many_who_want_a_kernel_one_compiles(tmp_path, monkeypatch):
    compiled, real, lock = [], compiler.compile_cubin, threading.Lock()

    def counted(specialisation):
        with lock:
            compiled.append(specialisation)
        return real(specialisation)

    monkeypatch.setattr(compiler, "compile_cubin", counted)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(SMALL, folder=tmp_path), range(4)))
    assert compiled == [SMALL] and len({each.cubin for each in built}) == 1


def test_a_source_that_does_not_compile_says_why(monkeypatch):
    monkeypatch.setattr(compiler, "source", lambda name: "this is not C++")
    with pytest.raises(CompileError, match=r"unit_tma_2d does not compile for sm_90a:\n.*error"):
        compiler.compile_cubin(SMALL)


LOG = """ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'f'
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 170 registers, used 1 barriers
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers
"""


def test_a_log_is_read_for_its_worst_kernel():
    report = parse_log(LOG)
    assert (report.registers, report.stack, report.spill_stores, report.spill_loads) == (170, 16, 8, 12)
    assert len(report.notes) == 1 and "C7512" in report.notes[0]
    found = faults(Built(forward(128, bfloat16=True, causal=True), b"", report, False, 1.0))
    assert found[:2] == ["spills 8 bytes out and 12 in", "uses 170 registers, 168 are budgeted"] and "C7512" in found[2]


def test_a_log_without_figures_is_an_error():
    with pytest.raises(ValueError, match="registers and spills"):
        parse_log("nothing")


def test_the_build_command_prints_a_table_and_fails_on_faults(monkeypatch, capsys):
    good = Built(SMALL, b"12", Report(14, 0, 0, 0, ()), True, 0.0)
    monkeypatch.setattr("megaring.build.build", lambda each, folder: good)
    assert main([]) == 0
    assert "unit_tma_2d" in capsys.readouterr().out
    monkeypatch.setattr("megaring.build.build", lambda each, folder: Built(SMALL, b"", parse_log(LOG), False, 1.0))
    assert main([]) == 1
    assert table([good]).splitlines()[1].split() == ["14", "0", str(SMALL.shared_bytes), "2", "cached", "unit_tma_2d"]


def test_megaring_build_is_the_same_command(monkeypatch, capsys, tmp_path):
    folders = set()

    def fake(each, folder):
        folders.add(folder)
        return Built(each, b"12", Report(14, 0, 0, 0, ()), True, 0.0)

    monkeypatch.setattr("megaring.build.build", fake)
    assert cli.main(["build", "--folder", str(tmp_path)]) == 0
    assert folders == {tmp_path}
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(every_specialisation())
    with pytest.raises(SystemExit):
        cli.main(["build", "--fold", str(tmp_path)])  # no abbreviations
    assert "unrecognized arguments" in capsys.readouterr().err


def test_head_dimensions_outside_the_kernel_are_refused():
    with pytest.raises(ValueError, match="64 or 128, not 96"):
        forward(96, bfloat16=True, causal=True)


def test_a_missing_compiler_is_named(monkeypatch):
    def missing():
        raise CompileError("cuda-bindings is missing")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    with pytest.raises(CompileError, match="cuda-bindings"):
        compiler.compile_cubin(Specialisation("unit/unit_tma.cu", "unit_tma_2d", (), 255, 0))

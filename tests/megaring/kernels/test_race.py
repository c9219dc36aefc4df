"""How times are taken and compared, with a clock in place of a GPU."""

import ctypes
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from megaring.kernels.checks import contenders, gpu_state, race
from megaring.kernels.checks.gpu_state import GpuState
from megaring.kernels.checks.race import Alone, Contender, Race, Times, Together, balanced_order


@pytest.mark.parametrize("count", range(1, 9))
def test_every_contender_follows_every_other_one_equally_often(count):
    rounds = count if count % 2 == 0 else 2 * count
    orders = [balanced_order(count, turn) for turn in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followed) == count * (count - 1) and len(set(followed.values())) <= 1
    assert len(set(Counter(order[0] for order in orders).values())) == 1


@pytest.fixture
def clock(monkeypatch):
    """The GPU runs ``drift`` times slower in every round; each contender's ms is what its ``run`` returns."""
    made = SimpleNamespace(ran=[], drift=1.5, turn=0)

    def timed(contender, calls, ranks):
        made.ran.append((contender.name, calls))
        return contender.run() * made.drift**made.turn

    def state(device):
        made.turn += 1
        return GpuState(1980 - made.turn, 500.0 + made.turn, 60, 0)

    monkeypatch.setattr(race, "_timed", timed)
    monkeypatch.setattr(race, "gpu_state", state)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_ratios_do_not_feel_the_drift(clock):
    entrants = [Contender("slow", lambda: 2.0, 4e9), Contender("fast", lambda: 0.5, 4e9)]
    done = race.race(entrants, rounds=5)
    slow, fast = done.times["slow"], done.times["fast"]
    assert fast.speed(slow) == pytest.approx(4.0) and slow.speed(fast) == pytest.approx(0.25)
    assert fast.ms == pytest.approx([0.5 * 1.5**turn for turn in range(5)])
    assert fast.tflops() == pytest.approx(4e9 / (0.5 * 1.5**2) / 1e9) and fast.tflops(2) == fast.tflops() / 2
    assert (slow.calls, fast.calls) == (2, 6)  # regions of about 3 ms
    assert [name for name, calls in clock.ran[2:6]] == ["slow", "fast", "fast", "slow"]
    assert done.clock_range() == "1975-1979 MHz, 501-505 W"
    rows = done.rows("slow")
    assert [row["contender"] for row in rows] == ["slow", "fast"] and rows[1]["speed"] == pytest.approx(4.0)
    assert rows[1]["best_ms"] == 0.5 and rows[1]["median_ms"] == pytest.approx(0.5 * 1.5**2)
    assert done.rows("cudnn")[0]["speed"] is None
    assert done.clocks()["rounds"][0] == {"sm_mhz": 1979, "power_w": 501.0, "temperature_c": 60, "throttle_bits": 0}


def test_a_contender_that_does_not_run_is_named_and_left_out(clock, capsys):
    def broken():
        raise RuntimeError("no kernel found\nmore")

    done = race.race([Contender("broken", broken, 1.0), Contender("right", lambda: 1.0, 1.0)], rounds=2)
    assert list(done.times) == ["right"] and "broken does not run: no kernel found" in capsys.readouterr().out
    assert race.race([Contender("broken", broken, 1.0)], rounds=2) == Race({}, ())


def test_a_race_that_takes_too_long_stops_after_two_rounds(clock):
    done = race.race([Contender("one", lambda: 1.0, 1.0)], rounds=50, seconds=0.0)
    assert len(done.times["one"].ms) == len(done.states) == 2


def test_the_slowest_rank_counts(clock):
    class Two(Alone):
        def most(self, values):
            return [max(value, 7.0) for value in values]

    done = race.race([Contender("one", lambda: 1.0, 14e9)], rounds=1, ranks=Two())
    assert done.times["one"] == Times("one", 14e9, 1, (7.0,)) and done.times["one"].tflops(2) == 1.0


def ranks_agree(rank, world_size):
    ranks = Together(None, torch.device("cpu"))
    ranks.align()
    return ranks.rank, ranks.most([1.0 + rank, 5.0 - rank])


def test_ranks_agree_on_the_slowest(pool):
    assert pool.run(2, ranks_agree) == [(0, [2.0, 5.0]), (1, [2.0, 5.0])]


# What is raced


def test_variants_are_read_from_the_command_line():
    assert contenders.parse_variant("no turns: ping_pong=False") == ("no turns", {"ping_pong": False})
    assert contenders.parse_variant("a: x=1, y = 'b'") == ("a", {"x": 1, "y": "b"})
    assert contenders.parse_variant("again:") == ("again", {})
    for wrong in ("ping_pong=False", "a: ping_pong", "a: x=foo", ": x=1"):
        with pytest.raises(ValueError, match="is no"):
            contenders.parse_variant(wrong)


def test_useful_operations():
    assert contenders.forward_flops([2, 3]) == 4 * 128 * 32 * (3 + 6)


@pytest.mark.parametrize("lengths", [(40,), (16, 16)])
def test_a_library_gets_the_sequences_as_a_batch(lengths):
    tensors = contenders.random_tensors(sum(lengths), "cpu")
    made = contenders.library("math", SDPBackend.MATH, lengths, tensors)
    out = made.run()
    assert out.shape == (len(lengths), 32, lengths[0], 128)
    assert torch.equal(out[-1, :, 0], tensors[2][-lengths[0]].repeat_interleave(4, dim=0))  # a first token sees itself


# The GPU's state


class Library:
    """NVML with one GPU."""

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        return 0 if name.value == b"GPU-12-34" else 6

    def nvmlDeviceGetPowerUsage(self, handle, value):
        return self._put(value, 512_345)

    def nvmlDeviceGetClockInfo(self, handle, kind, value):
        return self._put(value, 1755 if kind.value == 1 else 0)

    def nvmlDeviceGetTemperature(self, handle, sensor, value):
        return self._put(value, 61)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle, value):
        return self._put(value, 4, ctypes.c_ulonglong)

    @staticmethod
    def _put(reference, value, kind=ctypes.c_uint):
        ctypes.cast(reference, ctypes.POINTER(kind))[0] = value
        return 0


@pytest.mark.parametrize(("uuid", "state"), [("12-34", GpuState(1755, 512.345, 61, 4)), ("other", None)])
def test_the_state_is_that_of_torch_s_gpu(monkeypatch, uuid, state):
    gpu_state._handle.cache_clear()
    monkeypatch.setattr(gpu_state, "_library", Library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    assert gpu_state.gpu_state(0) == state
    gpu_state._handle.cache_clear()


def test_a_machine_without_the_library_says_so():
    def missing(name):
        raise OSError("libnvidia-ml.so.1: not found")

    gpu_state._library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", missing)
        assert gpu_state.driver_version() == "unknown: libnvidia-ml.so.1: not found"
    gpu_state._library.cache_clear()

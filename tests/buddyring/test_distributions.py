import argparse
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from buddyring.distributions import MIXTURES, NAMES, batch, stdlib_files, stdlib_lengths


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 777, 131072])
def test_a_batch_holds_exactly_its_tokens(name, tokens):
    lengths = batch(name, tokens)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1 and all(type(x) is int for x in lengths)


@pytest.mark.parametrize(
    ("name", "median", "sigma"),
    [
        ("prolong", 1024, 1.0),
        ("arxiv", 12288, 0.8),
        ("freelaw", 2560, 1.1),
        ("github", 800, 1.5),
        ("pile_cc", 560, 0.95),
    ],
)
def test_the_mixtures_are_what_they_say(name, median, sigma):
    drawn = MIXTURES[name].draw(np.random.default_rng(5), 40000)
    share = 0.6 if name == "prolong" else 0.0
    assert (drawn == 65536).mean() == pytest.approx(share, abs=0.01)
    logs = np.log(drawn[drawn != 65536])
    assert math.exp(np.median(logs)) == pytest.approx(median, rel=0.03)
    assert logs.std() == pytest.approx(sigma, rel=0.03)


def test_lengths_are_not_rounded():
    lengths = np.asarray(batch("freelaw", 1_000_000))
    for multiple in (2, 16, 128):
        assert (lengths % multiple == 0).mean() == pytest.approx(1 / multiple, abs=0.1)


def test_the_same_arguments_give_the_same_batch_in_another_process():
    code = "from buddyring.distributions import batch; print(batch('github', 50000, seed=3, index=2))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == str(batch("github", 50000, seed=3, index=2))


@pytest.mark.parametrize("name", NAMES)
def test_seed_and_index_change_the_batch(name):
    drawn = {batch(name, 400_000, seed=seed, index=index) for seed in range(2) for index in range(3)}
    assert len(drawn) == 6


def test_a_longer_batch_goes_on_where_the_shorter_was_cut():
    short, long = batch("arxiv", 100_000), batch("arxiv", 200_000)
    assert long[: len(short) - 1] == short[:-1]
    assert long[len(short) - 1] >= short[-1]


def test_stdlib_lengths_are_real():
    files = stdlib_files()
    assert Path(argparse.__file__) in files
    assert not [f for f in files if {"test", "tests", "idle_test", "site-packages"} & set(f.parts[-4:-1])]
    assert list(files) == sorted(files)
    lengths = stdlib_lengths()
    assert lengths[files.index(Path(argparse.__file__))] == len(Path(argparse.__file__).read_bytes())
    assert len(files) > 300 and lengths.min() >= 1 and lengths.max() > 100_000


def test_stdlib_batches_draw_every_file_once_before_any_twice():
    lengths = stdlib_lengths()
    total = int(lengths.sum())
    assert sorted(batch("stdlib", total)) == sorted(lengths.tolist())
    twice = batch("stdlib", 2 * total, seed=1)
    assert sorted(twice) == sorted([*lengths.tolist()] * 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch", 10), "unknown distribution 'nosuch'"),
        (("arxiv", 0), "at least 1 token"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        batch(*arguments)
    with pytest.raises(ValueError, match="not negative"):
        batch("arxiv", 10, seed=-1)

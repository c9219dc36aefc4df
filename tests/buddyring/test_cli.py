import json
import os
import shlex
import subprocess
import sys

import pytest

from buddyring import SCHEDULERS, Placement, plan
from buddyring.cli import main
from buddyring.distributions import batch
from buddyring.report import human


def run(capsys, *arguments):
    """Exit status, standard output and standard error of the command."""
    status = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("24576\n24576\n14336\n2048\n")
    return path


def test_plan_shows_what_plan_gives(capsys, lengths_file):
    status, out, err = run(capsys, "plan", lengths_file, "--ranks", 4)
    made = plan([24576, 24576, 14336, 2048], 4)
    assert (status, err) == (0, "")
    assert "4 sequences, 65,536 tokens, 2,048 to 24,576 each (median 19,456), on 4 ranks by buddyring" in out
    assert f"{made.num_shards} shards, {made.communication:,.0f} tokens sent" in out
    assert f"at most {made.token_imbalance:.2%} from the mean" in out
    assert f"at most {made.attention_imbalance:.2%} from the mean" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit() and "█" in line]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    mean = sum(made.token_loads) / 4
    assert [row[2].split("█")[0].rstrip("!") for row in rows] == [f"{t / mean - 1:+.1%}" for t in made.token_loads]


def test_bars_have_the_lengths_of_the_loads(capsys, tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("4096\n2048\n")
    status, out, _ = run(capsys, "plan", path, "--ranks", 2, "--cp-scheduler", "local")
    assert status == 0
    full, half = (line for line in out.splitlines() if "█" in line)
    tokens, pairs = (bar.count("█") for bar in full.split("  ") if "█" in bar)
    assert tokens == pairs >= 8
    shorter = [bar.count("█") for bar in half.split("  ") if "█" in bar]
    assert shorter == [round(tokens / 2), round(pairs / 4)]
    assert out.count("!") == 4 and "OUTSIDE the tolerance of 10%" in out and "OUTSIDE the tolerance of 5%" in out


def test_every_planning_option_reaches_the_planner(capsys, monkeypatch, lengths_file):
    seen = []

    def spy(lengths, ranks, **options):
        seen.append((lengths, ranks, options))
        return plan(lengths, ranks)

    monkeypatch.setattr("buddyring.cli.plan", spy)
    flags = "--token-tolerance 0.2 --attention-tolerance 0.3 --max-group 2 --capacity 50000 --rank-multiple 8 --tile 64"
    status, _, err = run(
        capsys, "plan", lengths_file, "--ranks", 4, *flags.split(), "--exact-tiles", "--cp-scheduler", "megatron",
        "--target", 9000,
    )  # fmt: skip
    assert (status, err) == (0, "")
    expected = {
        "scheduler": "megatron",
        "token_tolerance": 0.2,
        "attention_tolerance": 0.3,
        "max_group": 2,
        "capacity": 50000,
        "rank_multiple": 8,
        "tile": 64,
        "exact_tiles": True,
        "target": 9000,
    }
    assert seen[0] == ([24576, 24576, 14336, 2048], 4, expected)


def test_defaults_are_those_of_plan(capsys, monkeypatch, lengths_file):
    import inspect

    seen = {}
    monkeypatch.setattr("buddyring.cli.plan", lambda lengths, ranks, **o: seen.update(o) or plan(lengths, ranks))
    assert run(capsys, "plan", lengths_file, "--ranks", 4)[0] == 0
    defaults = {k: p.default for k, p in inspect.signature(plan).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert seen == defaults


def test_json_holds_every_step_and_reads_back(capsys, tmp_path):
    path = tmp_path / "p.json"
    arguments = [
        "plan",
        "--distribution",
        "freelaw",
        "--tokens",
        "200000",
        "--token-budget",
        "65536",
        "--ranks",
        "4",
        "--json",
    ]
    assert run(capsys, *arguments, path)[0] == 0
    data = json.loads(path.read_text())
    lengths = batch("freelaw", 200000)
    assert data["summary"]["steps"] == len(data["steps"]) == 3
    for step in data["steps"]:
        made = Placement.from_json(json.dumps(step["placement"]))
        assert list(made.lengths) == [lengths[i] for i in step["sequences"]]
        assert made.groups == plan(made.lengths, 4).groups
        assert step["planning_ms"] > 0
    worst = max(step["placement"]["token_imbalance"] for step in data["steps"])
    assert data["summary"]["token_worst"] == worst


def test_json_to_standard_output_is_nothing_else(capsys, lengths_file):
    status, out, _ = run(capsys, "plan", lengths_file, "--ranks", 4, "--json", "-")
    assert status == 0 and json.loads(out)["steps"][0]["sequences"] == [0, 1, 2, 3]
    status, out, _ = run(capsys, "compare", lengths_file, "--ranks", 4, "--json", "-")
    assert status == 0 and [row["scheduler"] for row in json.loads(out)["schedulers"]] == list(SCHEDULERS)


def test_steps_are_reported_with_mean_and_worst(capsys, tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("6000\n2000\n3000\n5000\n4000\n4000\n100\n")
    arguments = ("plan", path, "--ranks", 2, "--token-budget", 8000, "--cp-scheduler", "local")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "3 steps, 6 sequences, 8,000 tokens a step (the last 100 are left out)" in out
    assert "tokens        25.00% from the mean on average, 50.00% at worst" in out
    assert "both met in 33.3% of the steps; furthest outside in step 0" in out
    assert "\nstep 0: 2 sequences, 8,000 tokens, 2,000 to 6,000 each" in out
    assert "\nstep 2: 2 sequences, 8,000 tokens, 4,000 to 4,000 each" in run(capsys, *arguments, "--step", 2)[1]


def test_overlong_sequences(capsys, tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("5000\n1000\n")
    base = ("plan", path, "--ranks", 2, "--token-budget", 6000, "--seq-length", 4000)
    status, out, err = run(capsys, *base)
    assert (status, out) == (2, "") and "sequence 0 has 5000 tokens" in err and "--overlong split" in err
    assert "3 sequences, 6,000 tokens" in run(capsys, *base, "--overlong", "split")[1]
    assert "2 sequences, 5,000 tokens" in run(capsys, *base, "--overlong", "truncate")[1]


def test_many_ranks_show_the_extremes(capsys):
    status, out, _ = run(capsys, "plan", "--distribution", "pile_cc", "--tokens", 200000, "--ranks", 64)
    assert status == 0
    rows = [line for line in out.splitlines() if "█" in line]
    assert len(rows) == 16 and "48 ranks with attention work between these" in out
    made = plan(batch("pile_cc", 200000), 64)
    order = sorted(range(64), key=lambda rank: (made.attention_loads[rank], rank))
    assert [int(row.split()[0]) for row in rows] == order[:8] + order[-8:]


def test_compare_lists_every_scheduler_with_its_figures(capsys):
    status, out, _ = run(capsys, "compare", "--distribution", "arxiv", "--tokens", 131072, "--ranks", 8)
    assert status == 0
    rows = {
        line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in SCHEDULERS
    }
    assert list(rows) == list(SCHEDULERS)
    for scheduler, row in rows.items():
        made = plan(batch("arxiv", 131072), 8, scheduler=scheduler)
        assert row[1:5] == [f"{made.token_imbalance:.1%}"] * 2 + [f"{made.attention_imbalance:.1%}"] * 2
        assert row[6:8] == [f"{made.num_shards:,.1f}", f"{made.communication:,.0f}"]
        assert row[10] == ("yes" if made.aligned else "0%")
        assert float(row[11]) > 0


def test_compare_goes_on_when_one_scheduler_refuses(capsys, tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("4096\n2048\n2048\n")
    status, out, _ = run(capsys, "compare", path, "--ranks", 2, "--capacity", 4096)
    assert status == 0 and "\nbuddyring " in out
    path.write_text("8192\n")  # whole on one rank is over its capacity
    status, out, _ = run(capsys, "compare", path, "--ranks", 2, "--capacity", 4096)
    assert status == 0 and "\nbuddyring " in out and "local refused: " in out
    path.write_text("16384\n")
    status, out, err = run(capsys, "compare", path, "--ranks", 2, "--capacity", 4096)
    assert (status, out) == (2, "") and "4096" in err


def test_the_picture(capsys, tmp_path, lengths_file):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / "p.png"
    status, out, _ = run(capsys, "plan", lengths_file, "--ranks", 4, "--plot", path)
    assert status == 0 and path.read_bytes()[:4] == b"\x89PNG" and f"picture in {path}" in out


def test_a_picture_without_matplotlib(capsys, monkeypatch, tmp_path, lengths_file):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, "plan", lengths_file, "--ranks", 4, "--plot", tmp_path / "p.png")
    assert (status, out) == (2, "")
    assert err.startswith("buddyring: error: drawing needs matplotlib") and "pip install 'megaring[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan nosuch.txt --ranks 4", "nosuch.txt: No such file or directory"),
        ("plan . --ranks 4", ".: Is a directory"),
        ("plan --ranks 4", "give either a file of lengths or --distribution"),
        ("plan FILE --distribution arxiv --tokens 5 --ranks 4", "give either"),
        ("plan FILE --tokens 5 --ranks 4", "--tokens goes with --distribution"),
        ("plan --distribution arxiv --ranks 4", "needs --tokens"),
        ("plan --distribution arxiv --tokens 0 --ranks 4", "--tokens is 0"),
        ("plan --distribution arxiv --tokens 9 --seed -1 --ranks 4", "not negative"),
        ("plan --distribution arxiv --tokens 9 --field n --ranks 4", "--field goes with"),
        ("plan FILE --ranks 0", "ranks"),
        ("plan FILE --ranks 4 --token-tolerance nan", "token_tolerance"),
        ("plan FILE --ranks 4 --capacity 100", "capacity"),
        ("plan FILE --ranks 4 --target 100", "--target goes with --cp-scheduler megatron"),
        ("plan FILE --ranks 4 --step 1", "--step 1: there are steps 0 to 0"),
        ("plan FILE --ranks 4 --token-budget 0", "--token-budget is 0"),
        ("plan FILE --ranks 4 --token-budget 100 --seq-length 200", "--seq-length 200 is over --token-budget 100"),
        ("plan FILE --ranks 4 --plot out.nosuch", "its name must end in one of"),
        ("plan FILE --ranks 4 --json nosuch/p.json", "nosuch/p.json: No such file or directory"),
        ("compare FILE --ranks 0", "ranks"),
    ],
)
def test_errors_are_one_line_and_a_status(capsys, lengths_file, arguments, words):
    words_given = [str(lengths_file) if a == "FILE" else a for a in arguments.split()]
    status, out, err = run(capsys, *words_given)
    assert (status, out) == (2, "")
    assert err.startswith("buddyring: error: ") and err.count("\n") == 1 and words in err


def test_a_bad_line_is_named(capsys, tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("5\nseven\n")
    status, _, err = run(capsys, "plan", path, "--ranks", 4)
    assert (status, err) == (
        2,
        f"buddyring: error: {path}, line 2: 'seven' is not an integer; give one integer per line\n",
    )


def command(*arguments, **options):
    return [sys.executable, "-m", "buddyring.cli", *arguments]


def test_piped_output_has_no_escape_codes_and_an_ascii_terminal_gets_ascii():
    arguments = command("plan", "-", "--ranks", "2", "--cp-scheduler", "local")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(arguments, input=b"4096\n100\n", capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0 and done.stderr == b""
    assert b"\x1b" not in done.stdout and b"########" in done.stdout


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_a_terminal_gets_red_where_a_tolerance_is_missed():
    controller, terminal = os.openpty()
    arguments = command("plan", "-", "--ranks", "2", "--cp-scheduler", "local")
    subprocess.run(arguments, input=b"4096\n100\n", stdout=terminal, timeout=60, check=True)
    os.close(terminal)
    shown = os.read(controller, 65536)
    os.close(controller)
    assert b"\x1b[31m" in shown and shown.count(b"\x1b[31m") == shown.count(b"\x1b[0m") == 4


@pytest.mark.parametrize(("stream", "words"), [("<&-", b"standard input is closed"), (">&-", b"output is closed")])
def test_closed_streams_are_named(stream, words):
    line = f"{shlex.join(command('plan', '-', '--ranks', '4'))} {stream}"
    done = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(b"buddyring: error: ") and words in done.stderr and done.stderr.count(b"\n") == 1


def test_counts_of_any_size_have_a_letter(capsys, tmp_path):
    assert [human(x) for x in (950, 999.5, 12_345, 4.6e18, 1.2e24, 1e30)] == [
        *("950", "1k", "12.3k", "4.6E", "1.2Y", "1e+06Y")
    ]
    path = tmp_path / "l.txt"
    path.write_text("2147483647\n" * 4)
    assert "2.31E" in run(capsys, "plan", path, "--ranks", 4)[1]  # pairs: L (L + 1) / 2 of each rank


def test_a_reader_that_leaves_is_no_error():
    arguments = command("plan", "--distribution", "pile_cc", "--tokens", "100000", "--ranks", "8", "--json", "-")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 141)
    process.stderr.close()

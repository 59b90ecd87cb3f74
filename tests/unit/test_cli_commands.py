"""The commands from their arguments to their output, on rings made here."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import shmring
import shmring.ring as ring_module
from shmring.cli import main
from shmring.cli.command import EXIT_FAILED, EXIT_READER_GONE, EXIT_USAGE
from shmring.cli.inspection import waits_lines
from shmring.cli.live import Look, frame_lines, rates_between, take_look
from shmring.cli.terminal import Terminal

ENVIRON = os.environ | {"PYTHONPATH": str(Path(shmring.__file__).parents[1])}
END_KEYS = {
    "attaches",
    "batches",
    "bytes",
    "idle_ns",
    "parked_ns",
    "parks",
    "pid",
    "position_bytes",
    "records",
    "stalls",
    "state",
    "waiting_ns",
    "wakes_sent",
}
RING_KEYS = {
    "capacity_bytes",
    "condition",
    "consumer",
    "fill_ratio",
    "high_water_bytes",
    "name",
    "owner_pid",
    "owner_state",
    "producer",
    "retired",
    "sentence",
    "used_bytes",
    "waits",
}


@pytest.fixture
def deployment(ring_name):
    """The name of two rings and a blob: one with three records in it, one that nobody attached to."""
    with (
        shmring.create(f"{ring_name}.ingress", 8192) as ring,
        shmring.create(f"{ring_name}.egress.0", 4096),
        contextlib.closing(shmring.publish_blob(ring_name, b"manifest")),
        ring.producer() as producer,
        ring.consumer(),
    ):
        for _ in range(3):
            producer.push(b"x" * 100)
        yield ring_name


@pytest.fixture
def leftover(ring_name):
    """The name of a ring whose owner has died, and the owner's pid."""
    name = f"{ring_name}-leftover"
    code = (
        f"import os, shmring; r = shmring.create({name!r}, 4096); print(os.getpid(), flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=ENVIRON, stdout=subprocess.PIPE, check=True, timeout=60)
    yield name, int(done.stdout)
    path_of(name).unlink(missing_ok=True)


@pytest.fixture
def damaged(ring_name):
    """The name of something that carries our prefix and is none of ours."""
    name = f"{ring_name}-damaged"
    path_of(name).write_bytes(b"not a segment" * 1000)
    yield name
    path_of(name).unlink(missing_ok=True)


@pytest.fixture
def _only_ours(ring_name, monkeypatch):
    """Let the commands see the names of this test alone: others may be at work on this machine."""
    everything = ring_module.segment_names
    monkeypatch.setattr(ring_module, "segment_names", lambda: [n for n in everything() if ring_name in n])


def path_of(name):
    return Path(f"/dev/shm/shmring.{name}")


def run(capsys, *arguments):
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def line_of(text, name):
    """The line of the table that begins with `name`, in words."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_ls_shows_a_deployment_by_its_name(capsys, deployment):
    """The operator knows the deployment's name, not its rings'."""
    code, out, err = run(capsys, "ls", deployment)
    assert (code, err) == (0, "")
    assert line_of(out, deployment) == [deployment, "blob", "4", "KiB", "-", "-", "-", "alive", "-", "-", "-"]
    pid = str(os.getpid())
    assert line_of(out, f"{deployment}.ingress") == [
        *(f"{deployment}.ingress", "ring", "8", "KiB", "4%", pid, pid, "alive", "3", "336", "B", "0"),
    ]
    assert line_of(out, f"{deployment}.egress.0")[4:8] == ["0%", "never", "never", "alive"]


def test_ls_of_one_name_is_not_of_those_that_begin_alike(capsys, deployment):
    """`ls demo` must not mix in the rings of demo2."""
    with shmring.create(f"{deployment}2", 4096):
        _, out, _ = run(capsys, "ls", deployment)
        _, everything, _ = run(capsys, "ls")
    assert f"{deployment}2" not in out
    assert f"{deployment}2" in everything


def test_ls_as_json_has_every_counter_under_documented_keys(capsys, deployment):
    """Scripts and alerts are written against these keys."""
    code, out, _ = run(capsys, "ls", "--json", deployment)
    assert code == 0
    segments = {segment["name"]: segment for segment in json.loads(out)["segments"]}
    assert set(segments) == {deployment, f"{deployment}.ingress", f"{deployment}.egress.0"}
    blob = segments[deployment]
    assert blob == {
        "name": deployment,
        "kind": "blob",
        "size_bytes": 8192,
        "mode": "0600",
        "uid": os.geteuid(),
        "owner_alive": True,
        "leftover": False,
        "problem": None,
        "ring": None,
    }
    ring = segments[f"{deployment}.ingress"]["ring"]
    assert set(ring) == RING_KEYS
    assert set(ring["producer"]) == set(ring["consumer"]) == END_KEYS
    assert (ring["used_bytes"], ring["producer"]["records"], ring["consumer"]["records"]) == (336, 3, 0)


@pytest.mark.usefixtures("_only_ours")
def test_ls_without_rings_says_so(capsys):
    """An empty screen leaves it open whether the tool works."""
    assert run(capsys, "ls") == (0, "no rings\n", "")
    assert json.loads(run(capsys, "ls", "--json")[1]) == {"segments": []}


def test_ls_marks_a_leftover(capsys, leftover):
    """What a dead owner left takes memory until somebody notices."""
    name, pid = leftover
    code, out, _ = run(capsys, "ls", name)
    assert code == 0
    assert line_of(out, name)[7] == "gone"
    assert f"{name}: leftover: its owner (pid {pid}) is gone; `shmring sweep` removes it" in out
    assert json.loads(run(capsys, "ls", "--json", name)[1])["segments"][0]["leftover"] is True


def test_stat_marks_a_leftover(capsys, leftover):
    """Who looks at one ring only must learn that nobody will remove it."""
    name, pid = leftover
    _, out, _ = run(capsys, "stat", name)
    assert out.splitlines()[1:3] == [
        "never attached: nobody has taken either end yet",
        f"leftover: its owner (pid {pid}) is gone; `shmring sweep` removes it",
    ]


def test_ls_marks_what_is_damaged_and_goes_on(capsys, damaged, deployment):
    """One bad file must not hide the others."""
    code, out, _ = run(capsys, "ls")
    assert code == 0
    assert line_of(out, damaged)[1] == "damaged"
    assert f"{damaged}: damaged: " in out
    assert line_of(out, f"{deployment}.ingress")


@pytest.mark.usefixtures("_only_ours")
def test_ls_shows_unfinished_segments_only_if_asked(capsys, ring_name):
    """Segments that are being made flicker through the folder; they are no news."""
    name = f"~{ring_name}"
    path_of(name).touch()
    try:
        _, out, _ = run(capsys, "ls")
        _, everything, _ = run(capsys, "ls", "--all")
        _, removable, _ = run(capsys, "sweep", "--dry-run")
    finally:
        path_of(name).unlink()
    assert out == "1 unfinished not shown: --all shows them\n"
    assert line_of(everything, name)[1] == "unfinished"
    assert removable == "nothing to remove\n"


def test_a_name_with_control_characters_is_shown_harmlessly(capsys, ring_name):
    """Listing a stranger's file must not run his escape sequences in the operator's terminal."""
    path = path_of(f"{ring_name}\x1b[2J\udcff")
    path.touch()
    try:
        code, out, _ = run(capsys, "ls")
    finally:
        path.unlink()
    assert code == 0
    assert "\x1b" not in out
    assert f"{ring_name}\\x1b[2J\\udcff" in out


def test_stat_shows_both_ends_and_says_what_goes_on(capsys, deployment):
    """It is the whole answer to `what is wrong with this ring`."""
    code, out, err = run(capsys, "stat", f"{deployment}.ingress")
    assert (code, err) == (0, "")
    pid = os.getpid()
    lines = out.splitlines()
    assert lines[0] == f"{deployment}.ingress"
    assert lines[1] == (
        f"behind: the consumer (pid {pid}) is awake and has taken nothing yet, with 3 records (336 B) to take"
    )
    assert line_of(out, "used") == ["used", "336", "B", "[#.............................]", "4%"]
    assert line_of(out, "state") == ["state", "attached", "attached"]
    assert line_of(out, "records") == ["records", "3", "0"]
    assert line_of(out, "position") == ["position", "336", "0"]
    assert "nothing timed yet (one publication in 64 is)" in out


def test_stat_draws_how_long_records_waited(capsys, deployment):
    """A median hides the one in a hundred that waited for a second."""
    name = f"{deployment}.egress.0"
    with shmring.Producer.attach(name) as producer, shmring.Consumer.attach(name) as consumer:
        for _ in range(64 * 5):
            producer.push(b"x")
            consumer.pop()
    _, out, _ = run(capsys, "stat", name)
    counts = [int(line.split()[3]) for line in out.splitlines() if line.startswith("below ")]
    assert sum(counts) == 5
    assert "HOW LONG RECORDS WAITED (5 timed, one publication in 64)" in out
    waits = json.loads(run(capsys, "stat", "--json", name)[1])["waits"]
    assert sum(wait["count"] for wait in waits) == 5


def test_stat_leaves_out_a_long_run_of_empty_rows():
    """One record that waited for a second is looked for at the end of the screen, not below it."""

    def labels(*bins: int) -> list[str]:
        counts = tuple(int(bin_ in bins) for bin_ in range(40))
        statistics = SimpleNamespace(waits_log2_ns=counts)
        return [
            line[:14].strip() for line in waits_lines(statistics, Terminal()) if line.startswith("below ")
        ]

    assert labels(10, 13) == ["below 1.02 us", "below 2.05 us", "below 4.1 us", "below 8.19 us"]
    assert labels(10, 30) == ["below 1.02 us", "below 1.07 s"]


def test_stat_as_json_is_the_same_as_in_ls(capsys, deployment):
    """One reader must do for both."""
    name = f"{deployment}.ingress"
    code, out, _ = run(capsys, "stat", "--json", name)
    listed = json.loads(run(capsys, "ls", "--json", name)[1])["segments"][0]["ring"]
    found = json.loads(out)
    for ring in (found, listed):
        for end in ("producer", "consumer"):
            del ring[end]["idle_ns"]
    assert code == 0
    assert found == listed


def test_a_wrong_name_is_one_line_that_says_what_there_is(capsys, deployment):
    """A slip of the finger at night should cost one look, not a search."""
    code, out, err = run(capsys, "stat", f"{deployment}.ingres")
    assert (code, out) == (EXIT_FAILED, "")
    assert err.startswith(f"shmring: no ring of that name: name={deployment}.ingres (there is ")
    assert f"{deployment}.ingress" in err
    assert err.count("\n") == 1
    for command in (("ls",), ("top", "--once")):
        code, out, err = run(capsys, *command, f"{deployment}.nothing")
        assert (code, out) == (EXIT_FAILED, "")
        assert err.startswith(f"shmring: no ring of that name: name={deployment}.nothing")


def test_stat_of_a_deployment_names_its_rings(capsys, deployment):
    """The deployment's name is a blob's; the rings are what was meant."""
    code, _, err = run(capsys, "stat", deployment)
    assert code == EXIT_FAILED
    assert err == (
        f"shmring: a blob, not a ring: name={deployment} "
        f"(there is {deployment}.egress.0, {deployment}.ingress)\n"
    )


def test_stat_of_something_damaged_is_one_line(capsys, damaged):
    """A traceback says nothing to an operator."""
    code, out, err = run(capsys, "stat", damaged)
    assert (code, out) == (EXIT_FAILED, "")
    assert err.startswith("shmring: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("stat",),
        ("nonsense",),
        ("ls", "--nonsense"),
        ("top", "--interval", "0"),
        ("top", "--interval", "nan"),
        ("top", "--interval", "soon"),
    ],
)
def test_wrong_usage_has_a_code_of_its_own(capsys, arguments):
    """A script must tell a typing error from a missing ring."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == EXIT_USAGE
    assert "usage: shmring" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../etc/passwd", "/demo", "", "~x"])
@pytest.mark.parametrize("command", ["ls", "stat", "top"])
def test_a_name_that_can_be_none_is_refused(capsys, command, name):
    """Nothing outside our prefix is ever opened."""
    code, out, err = run(capsys, command, name)
    assert (code, out) == (EXIT_USAGE, "")
    assert err.startswith("shmring: name may hold ")


@pytest.mark.usefixtures("_only_ours")
def test_sweep_removes_leftovers_and_nothing_else(capsys, leftover, damaged, deployment):
    """Taking the name of a living ring away would cut its deployment in two."""
    name, pid = leftover
    code, out, _ = run(capsys, "sweep", "--dry-run")
    assert code == 0
    assert out.splitlines() == [
        f"would remove {damaged} (damaged, 13 KiB, nobody owns it)",
        f"would remove {name} (ring, 4 KiB, owner pid {pid} gone)",
    ]
    assert path_of(name).exists()

    code, out, _ = run(capsys, "sweep", "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "dry_run": False,
            "leftovers": [
                {"name": damaged, "kind": "damaged", "size_bytes": 13_000, "removed": True},
                {"name": name, "kind": "ring", "size_bytes": 8192, "removed": True},
            ],
        },
    )
    assert not path_of(name).exists()
    assert len(json.loads(run(capsys, "ls", "--json", deployment)[1])["segments"]) == 3


@pytest.mark.usefixtures("_only_ours")
def test_a_sweep_that_was_not_allowed_everything_says_so(capsys, leftover, monkeypatch):
    """Who goes by the exit code must not believe that all is clean."""
    name, pid = leftover
    monkeypatch.setattr("shmring.cli.leftovers.sweep", list)
    code, out, _ = run(capsys, "sweep")
    assert (code, out) == (EXIT_FAILED, f"could not remove {name} (ring, 4 KiB, owner pid {pid} gone)\n")


@pytest.mark.usefixtures("_only_ours")
def test_a_sweep_with_nothing_to_do_says_so(capsys):
    """Silence might also mean that it was not allowed to look."""
    assert run(capsys, "sweep") == (0, "nothing to remove\n", "")


@pytest.mark.usefixtures("_only_ours")
def test_a_link_under_our_prefix_is_not_followed(capsys, ring_name, tmp_path):
    """A stranger's link must not make us judge, or remove, by what it leads to."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path_of(ring_name).symlink_to(target)
    try:
        assert run(capsys, "sweep", "--dry-run") == (0, "nothing to remove\n", "")
        assert run(capsys, "stat", ring_name)[0] == EXIT_FAILED
    finally:
        path_of(ring_name).unlink()
    assert target.read_bytes() == b"precious"


def test_top_shows_rates_between_two_looks(deployment):
    """Totals do not tell whether anything moves now."""
    name = f"{deployment}.egress.0"
    with shmring.Producer.attach(name) as producer, shmring.Consumer.attach(name) as consumer:
        before = take_look(deployment)
        for _ in range(50):
            producer.push(b"x" * 24)
            consumer.pop()
        after = Look(before.at_s + 2.0, take_look(deployment).infos)
    lines = frame_lines(before, after, Terminal())
    assert [line.split()[0] for line in lines] == ["NAME", name, f"{deployment}.ingress"]
    assert lines[1].split()[1:8] == ["[........]", "0%", "25", "800", "B", "0%", "0%"]
    assert lines[2].split()[-1] == "take"


def test_top_has_no_rates_for_a_ring_that_was_made_anew(deployment):
    """Counters that begin again would show as a negative rate."""
    ring = shmring.read_statistics(f"{deployment}.ingress")
    fresh = shmring.read_statistics(f"{deployment}.egress.0")
    assert rates_between(ring, fresh, 1.0) is None
    assert rates_between(ring, ring, 0.0) is None
    assert rates_between(ring, ring, 1.0).records_per_s == 0


@pytest.mark.usefixtures("_only_ours")
def test_top_fits_its_terminal(deployment, damaged):
    """A frame that scrolls is no frame."""
    look = take_look(None)
    for width in (60, 80, 130):
        lines = frame_lines(look, look, Terminal(width=width, height=6))
        assert max(len(line) for line in lines) <= width
        assert len(lines) <= 5


def test_top_once_prints_one_frame(capsys, deployment):
    """It is what goes into a ticket."""
    code, out, _ = run(capsys, "top", deployment, "--once", "--interval", "0.1")
    assert code == 0
    assert len(out.splitlines()) == 3


def test_top_ends_quietly_on_ctrl_c(capsys, deployment, monkeypatch):
    """It is the ordinary way out."""

    def interrupted(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("shmring.cli.live.time.sleep", interrupted)
    assert run(capsys, "top", deployment) == (0, "", "")


def test_a_reader_that_goes_away_is_no_error(deployment):
    """`shmring ls | head -1` must not end in a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shmring", "ls", deployment]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=ENVIRON, check=False)
    assert (done.returncode, done.stderr) == (EXIT_READER_GONE, b"")


def test_the_version_names_the_layout(capsys):
    """Two versions that cannot attach to each other differ in the layout, not in the release."""
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.split()[-2:] == ["layout", "1"]


def test_a_closed_output_is_no_traceback(ring_name):
    """A script that closes what it does not want to read would be shown our insides."""
    with shmring.create(ring_name, 4096):
        close_first = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        done = subprocess.run(
            [sys.executable, "-c", close_first, "-m", "shmring", "stat", ring_name],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

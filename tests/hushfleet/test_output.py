"""What a command writes: no text of somebody else is obeyed by a terminal, hidden by it, or taken for another line."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata

import pytest

from hushfleet.output import one_line, shown
from support.hostile import HOSTILE_FILE, SHOWN_FILE, assert_harmless

SIGNS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2"  # of numbers, which show


def test_what_a_terminal_obeys_or_hides_is_escaped() -> None:
    kept = "\t\n\u200c\u200d"  # Persian and emoji need the joiners
    for character in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(character)
        is_format = category == "Cf" and ord(character) < 1 << 16 and character not in SIGNS
        if (is_format or category in ("Cc", "Zl", "Zp", "Cs")) and character not in kept:
            assert shown(character) == ascii(character)[1:-1]
        elif category not in ("Cf", "Cn"):
            assert shown(character) == character


@pytest.mark.parametrize("text", ["", "leaf", "Blüte 猫", "12\u00a0%", r"C:\temp\x1b", "👩\u200d🌾", "می\u200cخواهم"])
def test_other_texts_stay(text: str) -> None:
    assert shown(text) == one_line(text) == text


def test_nothing_is_escaped_twice() -> None:
    assert shown(shown(HOSTILE_FILE)) == shown(HOSTILE_FILE)
    assert one_line(one_line(HOSTILE_FILE)) == one_line(shown(HOSTILE_FILE)) == SHOWN_FILE


def written_by(program: str) -> subprocess.CompletedProcess[str]:
    begin = (
        "import json, logging, sys, warnings\n"
        "from hushfleet.output import *\n"
        f"bad = {HOSTILE_FILE!a}\n"
        "take_all_characters(); escape_output(); log_to_stderr('%(levelname)-7s %(message)s')\n"
    )
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    "program",
    [
        "say(bad); say(bad, error=True)",
        "logging.error('%s', bad)",
        "logging.error(bad)",
        "print(one_line(bad)); sys.stdout.writelines([one_line(bad)]); sys.exit(one_line(bad))",
        "import argparse; argparse.ArgumentParser().parse_args([one_line(bad)])",
        "warnings.warn(one_line(bad))",
    ],
)
def test_no_way_out_of_a_command_shows_it_as_it_is(program: str) -> None:
    done = written_by(program)
    assert SHOWN_FILE in done.stdout + done.stderr
    assert_harmless(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "program",
    [
        "print(bad)",
        "sys.stderr.write(bad)",
        "import argparse; argparse.ArgumentParser().parse_args([bad])",
        "raise ValueError(bad)",
        "sys.exit(bad)",
        "warnings.warn(bad)",
    ],
)
def test_a_caller_that_forgets_it_breaks_a_line_at_most(program: str) -> None:
    done = written_by(program)
    assert SHOWN_FILE.split(r"\n")[0] in done.stdout + done.stderr
    assert_harmless((done.stdout + done.stderr).replace("\nERROR   all", ""))


def test_a_record_is_a_line_and_a_traceback_is_indented() -> None:
    done = written_by("try:\n    raise ValueError(bad)\nexcept ValueError:\n    logging.exception('failed: %s', bad)")
    assert done.stderr.startswith(f"ERROR   failed: {SHOWN_FILE}\n  Traceback (most recent call last):\n  ")
    assert [line for line in done.stderr.splitlines() if line.startswith("ERROR")] == [f"ERROR   failed: {SHOWN_FILE}"]


def test_lines_that_are_said_end_where_they_are_meant_to() -> None:
    done = written_by("say('a', bad, 'c')")
    assert done.stdout == f"a\n{SHOWN_FILE}\nc\n"


def test_json_keeps_the_true_name() -> None:
    done = written_by("say(json.dumps({bad: [bad]})); print(json.dumps({'\\u202e': 1}, ensure_ascii=False))")
    first, second = done.stdout.splitlines()
    assert json.loads(first) == {HOSTILE_FILE: [HOSTILE_FILE]}
    assert json.loads(second) == {"\u202e": 1}

"""Makes clips of spoken words by `espeak-ng` (apt install espeak-ng): each board is a speaker who says twelve words.

Nobody was recorded. A speaker has a voice, an accent, a pitch and a speed, which vary a little from clip to clip. A
clip has one second at 16 kHz: a word at a random place, with white and brown noise, the word 0 to 15 dB louder.

    python make_data.py        # writes words/ beside this file: WAV files, some 350 MB

- `train/BOARD/WORD/`: a board's clips;
- `test/BOARD/WORD/`: further clips of the same speakers, each word as often as the others;
- `test/stranger-*/WORD/`: clips of speakers whose voices no board has;
- `public/`: other words, by voices that neither boards nor strangers have.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.signal import resample_poly

from hushfleet.errors import BadInput

RATE = 16_000  # of a clip, which has one second; espeak-ng speaks at 22,050 Hz
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "marvin", "sheila")
OTHER_WORDS = """
    apple behind garden seven winter table orange people under music paper happy yellow mother river bed bird cat dog
    eight five four house learn nine one six three tree two visual wow zero follow forward backward summer window
"""
VOICES = """
    Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael Mike Mr adam anika
    antonio aunty belinda benjamin boris caleb david ed edward f1 f2 f3 f4 f5 grandma grandpa gustave iven john linda
    m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert pablo paul pedro quincy rob robert sandro shelby steph
    travis victor
"""
PUBLIC_VOICES = "Nguyen RicishayMax announcer edward2 iven2 iven3 klatt klatt2 klatt3 klatt4 robosoft3 steph2 zac"
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbclan")
OF_BOARDS = 44  # voices; the others are the strangers'
TESTED = 24  # test clips of a speaker


class Speaker(NamedTuple):
    voice: str
    accent: str
    pitch: int
    speed: int  # words a minute

    @classmethod
    def drawn(cls, voice: str, rng: np.random.Generator) -> Speaker:
        return cls(voice, str(rng.choice(ACCENTS)), int(rng.integers(25, 75)), int(rng.integers(130, 200)))


def spoken(word: str, speaker: Speaker, rng: np.random.Generator) -> np.ndarray:
    """Returns a clip, int16 `[RATE]`."""
    pitch, speed = speaker.pitch + rng.integers(-8, 9), speaker.speed + rng.integers(-20, 21)
    voice = f"{speaker.accent}+{speaker.voice}"
    command = ["espeak-ng", "-v", voice, "-p", str(pitch), "-s", str(speed), "--stdout", word]
    with wave.open(io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)) as file:
        said = np.frombuffer(file.readframes(RATE * 10), "<i2")
    speech = resample_poly(said.astype(np.float64), 320, 441)[:RATE]
    clip, start = np.zeros(RATE), rng.integers(0, RATE - len(speech) + 1)
    clip[start : start + len(speech)] = speech
    brown = np.cumsum(rng.standard_normal(RATE))
    noise = rng.standard_normal(RATE) + (brown - brown.mean()) / brown.std()
    clip += np.sqrt(np.mean(speech**2)) * 10 ** (-rng.uniform(0, 15) / 20) * noise / noise.std()
    return (clip * (32767 / np.abs(clip).max())).astype(np.int16)


def write(job: tuple[Path, str, Speaker, list[int]]) -> None:
    path, word, speaker, seed = job
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(spoken(word, speaker, np.random.default_rng(seed)).astype("<i2").tobytes())


def make(
    folder: Path, *, boards: int = 100, clips: int = 20, strangers: int = 66, public: int = 600, seed: int = 0
) -> None:
    """The same seed makes the same clips.

    :param clips: of each board, to learn from.
    :param public: the number of public clips.
    """
    rng = np.random.default_rng(seed)
    voices, said = rng.permutation(VOICES.split()), list[tuple[Path, str, Speaker]]()

    def add(place: Path, speaker: Speaker, words: list[str]) -> None:
        said.extend((place / word / f"{number:02d}.wav", word, speaker) for number, word in enumerate(words))

    balanced = list(WORDS) * (TESTED // len(WORDS))
    for board in range(boards):
        speaker = Speaker.drawn(voices[board % OF_BOARDS], rng)
        add(folder / "train" / f"board-{board:03d}", speaker, rng.choice(WORDS, clips).tolist())
        add(folder / "test" / f"board-{board:03d}", speaker, balanced)
    for number in range(strangers):
        speaker = Speaker.drawn(voices[OF_BOARDS:][number % (len(voices) - OF_BOARDS)], rng)
        add(folder / "test" / f"stranger-{number:02d}", speaker, balanced)
    for number in range(public):
        speaker = Speaker.drawn(str(rng.choice(PUBLIC_VOICES.split())), rng)
        said.append((folder / "public" / f"{number:03d}.wav", str(rng.choice(OTHER_WORDS.split())), speaker))
    with ThreadPoolExecutor() as threads:
        list(threads.map(write, ((*each, [seed, place]) for place, each in enumerate(said))))


def make_once(folder: Path, *, boards: int, seed: int) -> None:
    """Makes the clips if there are none; refuses those of another number of boards."""
    if not (found := len(list(folder.glob("train/board-*")))):
        if not shutil.which("espeak-ng"):
            raise BadInput("the program espeak-ng is missing: apt install espeak-ng")
        make(folder, boards=boards, seed=seed)
    elif found != boards:
        raise BadInput(
            f"{folder} has the clips of {found} boards, not {boards}; take data.devices={found}, or delete it"
        )


if __name__ == "__main__":
    make(Path(__file__).with_name("words"))

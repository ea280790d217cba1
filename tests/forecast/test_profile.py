"""What is remembered of the experts that answers used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from seqmoe_cli.forecast.profile import HALF_LIFE, UseProfile
from seqmoe_cli.forecast.trace import Trace


def used(*experts: int) -> list[bool]:
    return [expert in experts for expert in range(6)]


def test_what_many_answers_used_comes_first(tmp_path: Path) -> None:
    profile = UseProfile.load(tmp_path / "new" / "a.npz", 6)
    assert profile.ranking().tolist() == []
    for answer in (used(2, 5), used(5, 1), used(), used(5, 1)):
        profile.add(answer)
    assert profile.ranking().tolist() == [5, 1, 2] and profile.num_answers == 3
    profile.save()
    again = UseProfile.load(profile.path, 6)
    assert again.ranking().tolist() == [5, 1, 2] and again.num_answers == 3
    again.add(used(3))
    again.save()
    assert UseProfile.load(profile.path, 6).num_answers == 4


def test_old_answers_fade() -> None:
    profile = UseProfile(Path("unused"), np.zeros(6))
    profile.add(used(0))
    for _ in range(HALF_LIFE):
        profile.add(used(1))
    assert profile.counts[0] == pytest.approx(0.5)


def flipped(path: Path) -> None:
    """A file whose compressed numbers have lost bits."""
    np.savez_compressed(path, format="seqmoe-profile", num_answers=1, counts=np.arange(6.0) / 7)
    data = bytearray(path.read_bytes())
    at = data.index(b"counts.npy") + 40
    data[at : at + 20] = bytes(255 - byte for byte in data[at : at + 20])
    path.write_bytes(data)


def array_alone(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(6))


def many_answers(path: Path) -> None:
    np.savez(path, format="seqmoe-profile", num_answers=np.ones(3), counts=np.ones(6))


def not_a_number(path: Path) -> None:
    np.savez(path, format="seqmoe-profile", num_answers=1, counts=np.full(6, np.nan))


@pytest.mark.parametrize("damage", [flipped, array_alone, many_answers, not_a_number])
def test_damage_is_an_empty_profile_and_mends(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.npz"
    damage(path)
    profile = UseProfile.load(path, 6)
    assert profile.num_answers == 0 and not profile.counts.any()
    profile.add(used(2))
    profile.save()
    assert UseProfile.load(path, 6).ranking().tolist() == [2]


def test_chats_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    one, other = (UseProfile.load(path, 6) for _ in range(2))
    one.add(used(1))
    other.add(used(3))
    one.save()
    other.save()
    one.add(used(3))
    one.save()
    assert UseProfile.load(path, 6).num_answers == 3
    assert UseProfile.load(path, 6).ranking().tolist() == [3, 1]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", None])
def test_what_cannot_be_read_is_an_empty_profile(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.npz"
    if content is None:  # of a model of another size
        np.savez(path, format="seqmoe-profile", num_answers=1, counts=np.ones(5))
    else:
        path.write_bytes(content)
    profile = UseProfile.load(path, 6)
    assert profile.num_answers == 0 and profile.ranking().tolist() == []
    profile.save()  # nothing is new
    assert content is None or path.read_bytes() == content


def test_sequences_of_a_trace_are_answers(tmp_path: Path) -> None:
    experts = np.array([[[0], [2]], [[1], [0]], [[1], [0]], [[1], [2]]], np.uint8)
    trace = Trace(
        "m", "f", 3, experts, np.array([0, 0, 0, 1], np.uint32), np.array([0, 1, 1, 1], np.uint8)
    )
    profile = UseProfile.load(tmp_path / "a.npz", 6)
    profile.learn(trace)
    assert profile.num_answers == 2 and profile.ranking().tolist() == [1, 5, 3]

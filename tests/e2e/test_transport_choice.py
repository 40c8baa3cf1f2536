"""Which transport a run gets: what suits its hosts, or the one asked for where it can reach every node."""

from dataclasses import replace

import pytest

from afserve.errors import ConfigError
from afserve.launch.gateway import UpFlags, chosen_transport
from afserve.launch.seating import Seat, Seating

HERE = Seating((Seat("attention", 0, "127.0.0.1", here=True, device="cpu"),))
ELSEWHERE = Seating(
    (*HERE.seats, Seat("experts", 0, "10.0.0.2", here=False, device="cpu")), listen="10.0.0.1"
)


def flags(**given):
    nothing = dict.fromkeys(UpFlags.__dataclass_fields__)
    return replace(UpFlags(**{**nothing, "transport": "auto", "device": "cpu"}), **given)


@pytest.mark.parametrize(("seating", "expected"), [(None, "shm"), (HERE, "shm"), (ELSEWHERE, "tcp")])
def test_auto_suits_the_hosts(seating, expected):
    assert chosen_transport(flags(), seating) == expected


def test_a_name_is_taken_where_it_reaches_every_node():
    assert chosen_transport(flags(transport="dist"), ELSEWHERE) == "dist"
    assert chosen_transport(flags(transport="tcp"), None) == "tcp"
    assert chosen_transport(flags(transport="symm", device="cuda:0"), HERE) == "symm"


@pytest.mark.parametrize("name", ["shm", "symm"])
def test_what_reaches_no_other_host_says_so(name):
    with pytest.raises(ConfigError, match=f"--transport {name}: reaches no other host; use tcp or dist"):
        chosen_transport(flags(transport=name, device="cuda:0"), ELSEWHERE)


def test_symm_is_for_gpus():
    with pytest.raises(ConfigError, match="--transport symm: is for nodes on GPUs; give --device cuda:0"):
        chosen_transport(flags(transport="symm"), None)

"""Declared settings: what a declaration says, how a group checks itself, and what a signature shows."""

import inspect
from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from afserve.config_ranges import Range
from afserve.errors import ConfigError
from afserve.settings import FileUse, build, check, flag_of, keywords, setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kettle:
    """A group with one field that nobody sets."""

    litres: float = setting(1.5, "How much water.", Range(0.1, 3, whole=False), metavar="LITRES")
    cups: int = setting(MISSING, "For how many.", Range(1, 12))
    whistle: bool = setting(True, "Says when it boils.")
    tea: str = setting("black", "Which tea.", ("black", "green"))
    log: Path | None = setting(None, "Written at the end.", FileUse.WRITTEN)
    label: str = setting("", "What is on it.")
    guests: tuple[str, ...] = setting((), "Who comes.")
    owner: object = None

    def __post_init__(self) -> None:
        check(self, flag_of)


def test_a_declaration_has_name_kind_default_and_help():
    by_name = {one.name: one for one in settings_of(Kettle)}
    assert list(by_name) == ["litres", "cups", "whistle", "tea", "log", "label", "guests"]
    assert [one.kind for one in by_name.values()] == [float, int, bool, str, Path, str, tuple]
    assert by_name["litres"].flag == "--litres" and by_name["litres"].help == "How much water."
    assert by_name["cups"].default is MISSING and by_name["guests"].default == ()


@pytest.mark.parametrize(
    ("values", "said"),
    [({"litres": 4.0}, "--litres: 4.0 is outside [0.1, 3]"), ({"litres": float("nan")}, "--litres: nan is outside"),
     ({"litres": "2"}, "--litres: '2' is not a number in [0.1, 3]"), ({"cups": 0}, "--cups: 0 is outside [1, 12]"),
     ({"cups": 2.0}, "--cups: 2.0 is not a whole number in [1, 12]"),
     ({"cups": True}, "--cups: True is not a whole number"), ({"cups": 1 << 999}, "--cups: an integer of 1000 bits"),
     ({"whistle": 1}, "--whistle: 1 is not true or false"), ({"tea": "red"}, "--tea: 'red' is not one of black, green"),
     ({"tea": ["black"]}, "--tea: ['black'] is not one of"), ({"label": None}, "--label: None is not a text"),
     ({"guests": "Ann"}, "--guests: 'Ann' is not a list"), ({"cosy": 1}, "cosy is not one of cups, guests")],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_by_name(values, said):
    with pytest.raises(ConfigError) as refused:
        build(Kettle, {"cups": 2} | values)
    assert said in refused.value.message and refused.value.param == next(iter(values))


def test_what_is_not_given_is_the_default():
    assert build(Kettle, {"cups": 3}) == Kettle(cups=3) and Kettle(cups=3).log is None
    assert Kettle(cups=3, litres=2).litres == 2


def test_a_signature_names_the_settings():
    @keywords(Kettle)
    def boil(where: str, **settings: object) -> None:
        pass

    found = inspect.signature(boil).parameters
    assert list(found)[:3] == ["where", "litres", "cups"] and "settings" not in found
    assert found["litres"].default == 1.5 and found["tea"].annotation is str

"""The words of JSON Schema: which hold schemas, which hold data, and how large a schema may be.

What stands under `enum`, `const`, `default` and `examples` is data, whatever it looks like. Knows no references and no
grammars.
"""

from collections.abc import Iterator, Mapping
from typing import NoReturn

from afserve.errors import RequestError

Schema = Mapping[str, object] | bool
MAX_DEPTH = 64
MAX_ENTRIES = 1 << 14  # keys and items, of the whole schema
ONE = frozenset({
    "additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
})  # fmt: skip
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)


def refuse_schema(param: str, where: str, why: str) -> NoReturn:
    """`where` is a place inside the schema that came in the field `param`, "" the whole."""
    raise RequestError(f"{param}: {where}: {why}" if where else f"{param}: {why}", param=param)


def below(where: str, key: str | int) -> str:
    """The name of a place: properties.a.items[2]. Keys are cut, since a client wrote them."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key[:64]}" if where else key[:64]


def parts(node: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """The schemas right below one, whatever stands where a schema should."""
    for key, value in node.items():
        inner = below(where, key)
        if key in MAPS and isinstance(value, Mapping):
            yield from ((below(inner, name), item) for name, item in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from ((below(inner, i), item) for i, item in enumerate(value))
        elif key in ONE:
            yield inner, value


def check_size(schema: object, param: str) -> None:
    """Raises RequestError for one that is too deep or has too many entries; looks at no more than it may have."""
    level: list[object] = [schema]
    entries = 0
    for _ in range(MAX_DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        entries += sum(map(len, containers))
        if entries > MAX_ENTRIES:
            refuse_schema(
                param,
                "",
                f"has more than {MAX_ENTRIES} entries, keys and items counted together; send a smaller schema",
            )
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    refuse_schema(param, "", f"is nested more than {MAX_DEPTH} deep; send a flatter schema")

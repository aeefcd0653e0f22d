"""Attention policies as requests and settings name them: what is checked, and what the API's documents describe.

A schema is made of a policy's class: its fields are the parameters, its docstring is the description. `a_shape` has a
schema alone, since it is a window under another name.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta
from pydantic import Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core import core_schema

from longreach.policies import values
from longreach.policies.values import AttentionPolicy, RequestPolicy
from longreach.sizes import MAX_PROMPT_TOKENS
from longreach.util.strict_models import StrictModel, invalid


class Range:
    """The bounds of a number, told together where one is passed."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "minimum": self.least, "maximum": self.most}

    def _check(self, value: float) -> float:
        if not self.least <= value <= self.most:
            raise invalid(f"must be from {self.least} to {self.most}, got {str(value)[:64]}")
        return value


class PolicySchema(StrictModel):
    """Base of the schemas, whose first field is the policy's name, `policy`."""

    VALUE: ClassVar[type[RequestPolicy]]  # of which its value is

    @classmethod
    def name(cls) -> str:
        """What the policy is called."""
        return get_args(cls.model_fields["policy"].annotation)[0]

    @classmethod
    def parameters(cls) -> list[str]:
        """Its parameters, in order."""
        return list(cls.model_fields)[1:]

    def resolve(self) -> AttentionPolicy:
        """What the engine is told: all parameters, as they take effect."""
        given = {name: getattr(self, name) for name in self.parameters()}
        made = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return self.VALUE(**made)  # pyright: ignore[reportReturnType]

    @model_validator(mode="after")
    def _check_together(self) -> PolicySchema:
        try:
            self.resolve()
        except ValueError as error:
            raise invalid(str(error)) from None
        return self


def schema_of(value: type[RequestPolicy]) -> type[PolicySchema]:
    """The schema of a policy, every parameter of which has a default."""
    hints = get_type_hints(value, include_extras=True)
    fields: dict[str, Any] = {"policy": (Literal[value.__struct_config__.tag], ...)}
    for field in msgspec.structs.fields(value):
        assert field.default is not NODEFAULT, f"{value.__name__}.{field.name} needs a default"
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        fields[field.name] = (_checked(hints[field.name]), Field(default, description=_description(hints[field.name])))
    made = create_model(
        f"{value.__name__}Policy", __base__=PolicySchema, __doc__=value.__doc__, __module__=__name__, **fields
    )
    made.VALUE = value
    return made


def _checked(hint: Any) -> Any:
    """A field's type with the checks of its `Meta` as pydantic's, and lists in place of tuples."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        checked = _checked(args[0])
        for meta in args[1:]:
            if meta.ge is not None:
                checked = Annotated[checked, Range(meta.ge, meta.le)]
            if meta.max_length is not None:
                checked = Annotated[checked, Field(max_length=meta.max_length)]
        return checked
    if origin in (Union, UnionType):
        return Union[tuple(_checked(arg) for arg in args)]  # noqa: UP007
    if origin is tuple:
        return list[_checked(args[0])]
    return hint


def _description(hint: Any) -> str:
    """What the outermost `Meta` of a field that has one says of it."""
    found = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta) and meta.description]
    return found[-1]


class AShapePolicy(PolicySchema):
    """The same shape with more first keys, as MInference (Jiang et al. 2024) calls and uses it."""

    VALUE: ClassVar[type[RequestPolicy]] = values.Window

    policy: Literal["a_shape"]
    sinks: Annotated[int, Range(0, MAX_PROMPT_TOKENS)] = Field(
        1024, description="First keys of the prompt that stay visible."
    )
    window: Annotated[int, Range(1, MAX_PROMPT_TOKENS)] = Field(
        8192, description="Keys that a query sees, itself counted."
    )

    def resolve(self) -> AttentionPolicy:
        """A window: `a_shape` is its name in the literature, with the literature's defaults."""
        return values.Window(size=self.window, sinks=self.sinks)


_schemas = [schema_of(value) for value in values.POLICIES]
SCHEMAS: tuple[type[PolicySchema], ...] = (*_schemas[:2], AShapePolicy, *_schemas[2:])  # beside the window that it is
BY_NAME = {schema.name(): schema for schema in SCHEMAS}

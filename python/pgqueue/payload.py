"""Payloads and results: to JSON that Postgres can store, and back to arguments.

What JSON does not have (datetime, UUID, Decimal, Enum, models) is left to pydantic, if
it is installed; without it only plain values and flat dataclasses work. It is imported when it
is first needed: that takes as long as all else together.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

Read = Callable[..., Any] | None
KEYS = (str, int, float, bool, type(None))  # in JSON, as texts
PLAIN = (str, int, float, bool, list, dict, type(None), object, Any)
HAS_PYDANTIC = importlib.util.find_spec("pydantic_core") is not None  # 2 or later
NULL = object()  # the payload null; None means no payload: the server stores {}
# json.loads also skips white space on both sides: twice the time for a short payload.
decode = json.JSONDecoder().raw_decode
LAZY: dict[str, Any] = {}
if sys.version_info >= (3, 14):  # an annotation may name what is not there, or not yet
    import annotationlib

    LAZY["annotation_format"] = annotationlib.Format.FORWARDREF


class NotThere(TypeError):
    """An annotation names what is not there at run time, or not yet."""


def to_json(value: Any, name: str) -> str | None:
    """Encode a value as JSON; None stays None.

    Raises ValueError, or TypeError for a type that JSON does not have. NUL characters and
    lone surrogates are left for the server to refuse.
    """
    if value is None:
        return None
    try:
        try:
            return _encode(value)
        except TypeError:
            if not HAS_PYDANTIC:
                raise
            return _encode(_with_plain_keys(value))
    except RecursionError:
        raise ValueError(f"{name} cannot be stored as JSON: it is too deep") from None
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} cannot be stored as JSON: {error}") from error


def _as_plain(value: Any) -> Any:
    """Turn a value that json does not know into one that it knows."""
    if value is NULL:
        return None
    if HAS_PYDANTIC:
        from pydantic_core import to_jsonable_python

        return to_jsonable_python(value, round_trip=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(
        f"{type(value).__name__} is not a JSON type (pydantic 2 knows more)"
    )


def _with_plain_keys(value: Any) -> Any:
    """Do for keys what `default` does for values: json does not ask it about keys."""
    if isinstance(value, dict):
        return {_as_key(k): _with_plain_keys(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_plain_keys(each) for each in value]
    return value


def _as_key(key: Any) -> Any:
    plain = key if isinstance(key, KEYS) else _as_plain(key)
    return plain if isinstance(plain, KEYS) else key


_encode = json.JSONEncoder(allow_nan=False, default=_as_plain).encode


class Arguments:
    """How the parameters of a handler become a payload, and a payload the parameters.

    A single parameter annotated with a dataclass or a pydantic model, perhaps `| None`,
    gets the whole payload; others get its keys by name. A parameter named `job` gets the
    Job, and is not part of the payload.

    Raises TypeError for parameters that a payload cannot name, and for what is no function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if inspect.isclass(function) or not hasattr(function, "__qualname__"):
            raise TypeError(f"a handler is a function; put {function!r} into one")
        signature = inspect.signature(function, **LAZY)
        parameters = [p for p in signature.parameters.values() if p.name != "job"]
        self.takes_job = len(parameters) < len(signature.parameters)
        self._signature = signature.replace(parameters=parameters)
        for p in signature.parameters.values():
            if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
                where = function.__qualname__
                raise TypeError(f"{where}: a payload has no name for {str(p)!r}")
        self._names = [p.name for p in parameters]
        self._function = function
        with contextlib.suppress(NotThere):  # a class may be defined later
            self.reading  # noqa: B018

    @functools.cached_property
    def reading(self) -> tuple[bool, Read]:
        """Whether there is a single parameter for the whole payload, and what reads it."""
        function, hints = self._function, _hints(self._function, self._names)
        is_model = len(self._names) == 1 and _is_model(hints.get(self._names[0]))
        if not (hints and HAS_PYDANTIC):
            return is_model, _read_plainly(function, hints, is_model)
        if is_model:
            return is_model, _read_by_pydantic(*hints.values())
        return is_model, _read_arguments(function, self._signature, hints)

    def payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the payload of a call; raises TypeError for arguments that do not fit."""
        is_model, _ = self.reading
        call = self._signature.bind(*args, **kwargs)
        if is_model:
            call.apply_defaults()
            model = call.arguments[self._names[0]]
            return NULL if model is None else model
        bound = call.arguments
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(parameter.name, {})
        return bound

    def read(self, payload: Any) -> dict[str, Any]:
        """Make the arguments of a payload; raises ValueError or TypeError for a bad one."""
        is_model, reader = self.reading
        if is_model and reader:
            return {self._names[0]: reader(payload)}
        if self.takes_job and not self._names:
            return {}
        if not isinstance(payload, dict):
            kind = type(payload).__name__
            raise TypeError(f"the payload is not a JSON object but {kind}")
        arguments: dict[str, Any] = reader(**payload) if reader else payload
        return arguments


def result_reader(function: Callable[..., Any]) -> Read:
    """Find what reads the result of a function from JSON; None to take it as it is.

    Raises TypeError for an annotation that is not there at run time, or needs pydantic.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(of_task := getattr(function, "arguments", None), Arguments):
        function = of_task._function
    hints = _hints(function, ["return"])
    if not hints:
        return None
    if HAS_PYDANTIC:
        return _read_by_pydantic(hints["return"])
    return _read_plainly(function, hints, _is_model(hints["return"]))


def _hints(function: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    """Evaluate the annotations of some parameters, and no others."""

    def annotated() -> None: ...

    lazily = {k.removeprefix("annotation_"): v for k, v in LAZY.items()}
    given = inspect.get_annotations(function, **lazily)
    annotated.__annotations__ = {n: given[n] for n in names if n in given}
    known_there = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        known = typing.get_type_hints(annotated, known_there, None, HAS_PYDANTIC)
    except NameError as error:
        what = getattr(function, "__qualname__", repr(function))
        text = f"{what}: {error}: is it imported for type checkers only?"
        raise NotThere(text) from None
    return {name: hint for name, hint in known.items() if hint is not Any}


def _read_by_pydantic(hint: Any) -> Read:
    import pydantic

    return pydantic.TypeAdapter(hint).validate_python


def _read_arguments(
    function: Any, signature: inspect.Signature, hints: dict[str, Any]
) -> Read:
    """Let pydantic read them as for a function of the same signature."""
    import pydantic

    def arguments(**values: Any) -> dict[str, Any]:
        return values

    arguments.__signature__ = signature  # type: ignore[attr-defined]
    # Also for what has no hint: the signature has its annotation all the same.
    arguments.__annotations__ = dict.fromkeys(signature.parameters, Any) | hints
    arguments.__name__ = arguments.__qualname__ = function.__qualname__
    return pydantic.validate_call(arguments)


def _read_plainly(function: Any, hints: dict[str, Any], is_model: bool) -> Read:
    """Take values as JSON has them; raises TypeError if the annotations want more."""
    model = next(iter(hints.values())) if is_model else None
    if dataclasses.is_dataclass(model):
        hints = typing.get_type_hints(model)
    for hint in hints.values():
        if not _is_plain(hint):
            where = function.__qualname__
            raise TypeError(f"{where}: reading {hint} from JSON needs pydantic 2")
    return None if model is None else lambda payload: model(**payload)


def _is_plain(annotation: Any) -> bool:
    """Whether JSON has this type, and those of its parts."""
    if _is_union(annotation) or typing.get_origin(annotation) in (list, dict):
        return all(_is_plain(part) for part in typing.get_args(annotation))
    return annotation in PLAIN


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_model(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _is_model(annotation.__origin__)
    if _is_union(annotation):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return len(inner) == 1 and _is_model(inner[0])
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_validate")
    )


def storable(text: str) -> str:
    """Escape what Postgres cannot store."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()

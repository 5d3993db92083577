"""OpenTelemetry, if it is installed: a job's trace context, and the spans of its attempts.

The only module that imports it, and itself imported only where there may be a span: when the
application has imported OpenTelemetry, or the headers of a job have a context. `tracer` is None
if it is not installed. Names follow its messaging conventions.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    tracer = trace.get_tracer("pgqueue")
    # Not what is configured for HTTP: the headers are stored, and baggage may be private.
    W3C = TraceContextTextMapPropagator()
except ImportError:
    tracer = None  # type: ignore[assignment]


R = TypeVar("R")


class Claimed(Protocol):
    """What a span says of an attempt."""

    id: int
    queue: str
    kind: str
    number: int
    headers: str | None


def with_context(headers: Any) -> Any:
    """Add the context of the current span, if there is one, to headers without any.

    A span of its own would claim that the job was sent; the caller may still roll back.
    """
    context: dict[str, str] = {}
    W3C.inject(context)
    if not context:
        return headers
    if headers is None:
        return context
    if not isinstance(headers, Mapping) or "traceparent" in headers:
        return headers
    return {**headers, **context}


def start_span(attempt: Claimed) -> "trace.Span | None":
    """Start the span of an attempt, a child of what its headers name.

    A child, not just a link: a span is for one job, and nothing else could be its parent.
    None if there is neither an SDK nor a parent: then the API is usually there for others.
    """
    if tracer is None:
        return None
    texts: dict[str, str] = {}
    if attempt.headers is not None:
        headers = json.loads(attempt.headers)
        # The propagator ignores malformed text, and raises for what is not text.
        texts = {n: headers[n] for n in W3C.fields if isinstance(headers.get(n), str)}
    span = tracer.start_span(
        f"process {attempt.queue}",
        W3C.extract(texts),
        trace.SpanKind.CONSUMER,
        {
            "messaging.system": "pgqueue",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": attempt.queue,
            "messaging.message.id": str(attempt.id),
            "messaging.pgqueue.kind": attempt.kind,
            "messaging.pgqueue.attempt": attempt.number,
        },
    )
    return None if span is trace.INVALID_SPAN else span


async def traced(
    attempt: Claimed,
    run: Callable[[], Awaitable[R]],
    told: Callable[[Any, R], tuple[str, str | None]],
) -> R:
    """Run an attempt in its span, if it gets one, in which `told` says how it ended."""
    span = start_span(attempt)
    if span is None:
        return await run()
    with trace.use_span(span, end_on_exit=True):
        outcome = await run()
        conclude(span, *told(attempt, outcome))
    return outcome


def conclude(span: "trace.Span", outcome: str, error: str | None) -> None:
    """Record in the span how an attempt ended and, if it failed, what is kept of the error."""
    span.set_attribute("messaging.pgqueue.outcome", outcome)
    if error is None:
        return
    summary, _, stack = error.partition("\n\n")
    kind, _, message = summary.partition(": ")
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR, summary)
    # Not record_exception, which lets errors of the exception's own methods through.
    said = {"type": kind, "message": message, "stacktrace": stack}
    span.add_event("exception", {f"exception.{n}": text for n, text in said.items()})
